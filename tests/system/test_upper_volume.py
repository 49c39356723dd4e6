"""Disk uppers on a real volume: hard limits, removal, restarts."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from dsecd.host import mountinfo, syscalls
from dsecd.host.upper import Uppers
from dsecd.host.volume import Kind
from libdsec.errors import Internal

pytestmark = pytest.mark.root
MIB = 1 << 20
SIZE = 1 << 30


def loops(directory: Path) -> list[str]:
    """Return the loop devices on files below `directory`."""
    found = subprocess.run(["losetup", "-a"], capture_output=True, text=True, check=True).stdout
    return [line for line in found.splitlines() if str(directory) in line]


async def no_loops(directory: Path) -> None:
    """A loop device goes with the last reference to it, which may be the kernel's for a while."""
    for _ in range(50):
        if not loops(directory):
            return
        await asyncio.sleep(0.1)
    assert loops(directory) == []


@pytest.fixture(params=["btrfs", "xfs"])
async def uppers(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Uppers]:
    kind: Kind = request.param
    made = Uppers(tmp_path / "disk", tmp_path / "point", SIZE, (kind,))
    made.start()
    if not made.feature().available:
        await no_loops(tmp_path)
        assert list((tmp_path / "disk").iterdir()) == []
        pytest.skip(made.feature().reason)
    yield made
    made.teardown()
    assert not [mount for mount in mountinfo.mounts() if mount.point.startswith(str(tmp_path))]
    assert not (tmp_path / "disk/volume.img").exists()
    assert not (tmp_path / "point").exists()
    await no_loops(tmp_path)


def fill(path: Path, size: int) -> int:
    """Write until `size` or an error; return how much got in."""
    done = 0
    try:
        with path.open("wb", buffering=0) as file:
            while done < size:
                done += file.write(os.urandom(1 << 16))
    except OSError as error:
        assert error.errno in (errno.EDQUOT, errno.ENOSPC)  # noqa: PT017
    return done


async def test_a_limit_is_hard_and_only_its_own(uppers: Uppers) -> None:
    small = await uppers.acquire("a", 16 * MIB)
    large = await uppers.acquire("b", 64 * MIB)
    got = fill(Path(small.dir) / "f", 40 * MIB)
    assert 14 * MIB <= got <= 16 * MIB
    assert fill(Path(small.dir) / "g", MIB) < MIB
    assert fill(Path(large.dir) / "f", 40 * MIB) == 40 * MIB
    assert 14 * MIB <= uppers.usage(small) <= 16 * MIB + (64 << 10)
    assert uppers.usage(large) >= 40 * MIB
    (Path(small.dir) / "f").unlink()  # a full upper can be emptied
    os.sync()
    assert fill(Path(small.dir) / "h", 8 * MIB) == 8 * MIB
    await uppers.release(small)
    await uppers.release(large)
    assert not Path(small.dir).exists()


async def test_many_small_files_count_too(uppers: Uppers) -> None:
    upper = await uppers.acquire("a", 4 * MIB)
    made = 0

    def touch() -> None:
        nonlocal made
        for made in range(200_000):
            (Path(upper.dir) / f"{made}").touch()

    with pytest.raises(OSError, match=r"quota|space"):
        touch()
    assert 500 < made < 100_000
    await uppers.release(upper)


async def test_an_overlay_works_on_it(uppers: Uppers, tmp_path: Path) -> None:
    lower, merged = tmp_path / "lower", tmp_path / "merged"
    (lower / "d").mkdir(parents=True)
    (lower / "d/f").write_text("old")
    merged.mkdir()
    upper = await uppers.acquire("a", 64 * MIB)
    for name in ("upper", "work"):
        (Path(upper.dir) / name).mkdir()
    options = f"lowerdir={lower},upperdir={upper.dir}/upper,workdir={upper.dir}/work"
    syscalls.mount("overlay", str(merged), "overlay", 0, options + ",redirect_dir=on,volatile")
    try:
        (merged / "d").rename(merged / "e")
        (merged / "e/f").write_text("new")
        (merged / "e/f").rename(merged / "g")
        (merged / "e").rmdir()
        assert (merged / "g").read_text() == "new"
        assert not (merged / "d").exists()
        assert fill(merged / "big", 80 * MIB) < 64 * MIB
    finally:
        syscalls.umount(str(merged))
    await uppers.release(upper)


async def test_removal_follows_no_link(uppers: Uppers, tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious/f").write_text("x")
    upper = await uppers.acquire("a", 16 * MIB)
    (Path(upper.dir) / "l").symlink_to(tmp_path / "precious")
    (Path(upper.dir) / "d/e").mkdir(parents=True)
    await uppers.release(upper)
    await uppers.release(upper)  # twice is once
    assert (tmp_path / "precious/f").read_text() == "x"
    assert uppers.usage(upper) == 0


async def test_the_same_sandbox_gets_no_second_upper(uppers: Uppers) -> None:
    upper = await uppers.acquire("a", 16 * MIB)
    with pytest.raises(Internal, match="exists"):
        await uppers.acquire("a", 16 * MIB)
    await uppers.release(upper)


async def test_a_restart_keeps_the_living_and_sweeps_the_dead(
    uppers: Uppers, tmp_path: Path
) -> None:
    kept = await uppers.acquire("kept", 16 * MIB)
    gone = await uppers.acquire("gone", 16 * MIB)
    fill(Path(kept.dir) / "f", 8 * MIB)
    fill(Path(gone.dir) / "f", 8 * MIB)
    foreign = Path(kept.dir).with_name("not-ours")
    foreign.mkdir()
    uppers.close()

    again = Uppers(tmp_path / "disk", tmp_path / "point", SIZE)
    again.start()
    assert await again.sweep(["kept"]) == [Path(gone.dir).name]
    assert not Path(gone.dir).exists()
    assert foreign.exists()
    assert again.usage(kept) >= 8 * MIB
    assert fill(Path(kept.dir) / "g", 16 * MIB) <= 8 * MIB  # the limit holds on
    fresh = await again.acquire("fresh", 16 * MIB)
    assert fresh.project != kept.project or fresh.project == 0
    assert fill(Path(fresh.dir) / "f", 8 * MIB) == 8 * MIB
    again.close()


async def test_a_burst(uppers: Uppers) -> None:
    made = await asyncio.gather(*[uppers.acquire(f"s{n}", 16 * MIB) for n in range(200)])
    assert len({upper.dir for upper in made}) == 200
    await asyncio.gather(*[uppers.release(upper) for upper in made])
    assert await uppers.sweep([]) == []


@pytest.mark.slow
async def test_freed_space_goes_back_to_the_disk(uppers: Uppers, tmp_path: Path) -> None:
    image = tmp_path / "disk/volume.img"
    upper = await uppers.acquire("a", 200 * MIB)
    fill(Path(upper.dir) / "f", 150 * MIB)
    os.sync()
    full = image.stat().st_blocks * 512
    assert full >= 150 * MIB
    await uppers.release(upper)
    for _ in range(200):  # discards follow the next commits
        os.sync()
        if image.stat().st_blocks * 512 < full - 100 * MIB:
            break
        await asyncio.sleep(0.3)
    assert image.stat().st_blocks * 512 < full - 100 * MIB


async def test_a_half_made_volume_is_made_again(tmp_path: Path) -> None:
    """A crash between attaching the loop device and mounting it."""
    (tmp_path / "disk").mkdir()
    image = tmp_path / "disk/volume.img"
    image.write_bytes(b"junk")
    os.truncate(image, 64 * MIB)
    subprocess.run(["losetup", "-f", str(image)], check=True)  # noqa: ASYNC221
    uppers = Uppers(tmp_path / "disk", tmp_path / "point", SIZE)
    uppers.start()
    assert uppers.feature().available, uppers.feature().reason
    uppers.teardown()
    await no_loops(tmp_path)
