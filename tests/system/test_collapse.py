"""Deep stacks become one layer that shows the same, and costs the store no content."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import random
import stat
import struct
from pathlib import Path

import pytest

from dsecd.host import mountinfo
from dsecd.images.stores.opening import open_store
from libdsec import DSecClient, DSecContainerRunArgs, ImageConfig, ImportProgress, Sandbox
from libdsec.errors import AlreadyExists, Exhausted, InvalidArgument, NotFound
from tests.system.daemon import IMAGE, Daemon, daemon, make_rootfs, until
from tests.system.user_view import shell

pytestmark = pytest.mark.root
CAPABILITY = struct.pack("<IIIII", 0x02000001, 1 << 10, 0, 0, 0)  # cap_net_bind_service+ep
OURS = ("etc/hostname", "etc/hosts", "etc/machine-id", "etc/resolv.conf")  # each sandbox's own
LAYERS = 7
ATTRIBUTES = 7  # place in what is seen of a name
View = dict[str, tuple[object, ...]]


def arguments(image: str, **more: object) -> DSecContainerRunArgs:
    return DSecContainerRunArgs(container_image=image, disk_limit_mb=64, **more)  # type: ignore[arg-type]


async def inside(host: Daemon, sandbox: Sandbox) -> Path:
    """The sandbox's root as this process reaches it."""
    await sandbox.commands.run(["sleep", "1000"], background=True)
    found: list[Path] = []

    def look() -> bool:
        for pid in host.pids_of(sandbox.id):
            with contextlib.suppress(OSError):  # it has just ended
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                if words[-2:-1] == [b"1000"]:
                    found.append(Path(f"/proc/{pid}/root"))
        return bool(found)

    await until(look)
    return found[0]


def attributes(path: str) -> list[tuple[str, bytes]]:
    found = []
    for name in sorted(os.listxattr(path, follow_symlinks=False)):
        value = os.getxattr(path, name, follow_symlinks=False)
        if name == "security.capability":
            value = value[4:20]  # without the version and the id of its root
        found.append((name, value))
    return found


def view(root: Path) -> View:
    """All that can be seen of every name; numbers of inodes only tell which names are one file."""
    seen: View = {}
    groups: dict[tuple[int, int], list[str]] = {}
    base = root.stat().st_uid
    pending = [""]
    while pending:
        name = pending.pop()
        path = f"{root}/{name}"
        status = os.lstat(path)
        kind = stat.S_IFMT(status.st_mode)
        content = target = ""
        if kind == stat.S_IFREG:
            content = hashlib.sha256(Path(path).read_bytes()).hexdigest()
        elif kind == stat.S_IFLNK:
            target = str(Path(path).readlink())
        elif kind == stat.S_IFDIR:
            for below in Path(path).iterdir():
                inner = f"{name}/{below.name}".lstrip("/")
                if inner not in ("proc", "dev", "sys", *OURS):
                    pending.append(inner)
        if kind != stat.S_IFDIR:
            groups.setdefault((status.st_dev, status.st_ino), []).append(name)
        seen[name] = (
            status.st_mode, status.st_uid - base, status.st_gid - base, content, target,
            status.st_size if kind != stat.S_IFDIR else 0,
            status.st_mtime_ns if name not in ("", "etc") else 0, attributes(path),
        )  # fmt: skip
    for names in groups.values():
        for name in names:
            seen[name] += (sorted(names),)
    return seen


def store(root: Path) -> dict[str, set[str]]:
    return {
        kind: {path.name for path in (root / kind).rglob("*") if path.is_file()}
        for kind in ("blobs", "indexes", "images", "layers")
    }


def plant(root: Path) -> None:
    """A base with what a shell without tools cannot make."""
    make_rootfs(root)
    for n in range(6):
        place = root / f"data/d{n}/sub"
        place.mkdir(parents=True)
        for k in range(4):
            (place / f"f{k}").write_bytes(random.Random(n * 10 + k).randbytes(1 + k * 40_000))
        os.link(place / "f1", root / f"data/d{n}/hard")
        os.setxattr(place / "f2", "user.note", f"{n}".encode())
        os.setxattr(place, "user.dir", b"d")
        os.setxattr(place / "f3", "security.capability", CAPABILITY)
        (place / "link").symlink_to("../hard")
    os.truncate(root / "data/d0/sub/f0", 1 << 20)  # a hole


def changes(dice: random.Random, number: int) -> str:
    """A shell's script; what fails in it does not matter."""
    dirs = [f"/data/d{n}" for n in range(6)] + [f"/data/m{n}" for n in range(LAYERS)]
    names = [f"{d}/sub/f{k}" for d in dirs for k in range(5)]

    def operation() -> str:
        one, two = dice.sample(names, 2)
        where, other = dice.sample(dirs, 2)
        return dice.choice(
            (
                f"echo {dice.random()} > {one}",
                f"echo {dice.random()} >> {one}",
                f"rm -f {one}",
                f"mv {one} {two}",
                f"ln -f {one} {two}",
                f"ln -sf {one} {two}",
                f"rm -rf {where}/sub; mkdir -p {where}/sub; echo new > {where}/sub/f0",
                f"mv {where} {other}/in{number}",
                f"mv {where}/sub {where}/gone{number}; mkdir {where}/sub",
                f"rm -rf {where}",
                f"chmod {dice.choice(('600', '4755', '711'))} {one}",
                f"chown {dice.randrange(65000)}:{dice.randrange(65000)} {one}",
                f"mkfifo {one}.p",  # under its own name: a writer would wait
                f"truncate -s {dice.randrange(1 << 18)} {one}",
            )
        )

    fixed = f"mv /data/d{number % 6} /data/m{number}; mkdir /data/d{number % 6}"
    return "; ".join([fixed, *(operation() for _ in range(12)), "true"])


def mark(root: Path, dice: random.Random) -> None:
    """Attributes on some of what is there, as a tool inside would set them."""
    files = sorted(
        path
        for path in (root / "data").rglob("*")
        if not path.is_symlink() and (path.is_dir() or path.is_file())
    )
    for path in dice.sample(files, min(3, len(files))):
        os.setxattr(path, "user.mark", dice.randbytes(8))
        if path.is_file():
            os.setxattr(path, "security.capability", CAPABILITY)


async def stacked(client: DSecClient, host: Daemon, tree: Path, seed: int) -> str:
    """Return the name of a layer with `LAYERS` - 1 below it."""
    await asyncio.to_thread(plant, tree)
    await client.layers.import_("base/planted:1", str(tree))
    image, dice = "base/planted:1", random.Random(seed)
    for number in range(1, LAYERS):
        async with await client.run_container(arguments(image)) as box:
            await shell(box, changes(dice, number))
            mark(await inside(host, box), dice)
            config = ImageConfig(env={f"V{number}": str(number)}, workdir="/etc")
            image = f"snapshot/s{number}"
            await box.pack_diff(image, clean=False, config=config)
    return image


@pytest.mark.parametrize("seed", range(3))
async def test_a_collapsed_stack_shows_the_same(
    client: DSecClient, host: Daemon, tmp_path: Path, seed: int
) -> None:
    top = await stacked(client, host, tmp_path / "tree", seed)
    before = store(host.state / "store")
    seen: list[ImportProgress] = []
    made = await client.layers.collapse(top, "base/flat:1", on_progress=seen.append)
    after = store(host.state / "store")
    assert {kind: len(after[kind] - before[kind]) for kind in after} == {
        "blobs": 0, "indexes": 0, "images": 1, "layers": 1,
    }  # fmt: skip
    files, mounts = host.open_files(), mountinfo.mounts()
    assert (await client.layers.collapse(top, "base/flat:3")).digest == made.digest
    await until(lambda: host.open_files() == files)
    ours = [mount for mount in mounts if mount.point.startswith(str(host.root))]
    assert [m for m in mountinfo.mounts() if m.point.startswith(str(host.root))] == ours
    assert {item.stage for item in seen} <= {"waiting", "reading", "storing"}
    async with (
        await client.run_container(arguments(top)) as old,
        await client.run_container(arguments("base/flat:1")) as new,
    ):
        wanted, found = view(await inside(host, old)), view(await inside(host, new))
        assert found.keys() == wanted.keys()
        for name, facts in wanted.items():
            assert found[name] == facts, name
        for box in (old, new):
            assert await shell(box, "pwd; echo $V1 $V6") == "/etc\n1 6\n"
        # it has no layers below it, and none of overlayfs' own attributes
        names = {name for facts in found.values() for name, _ in facts[ATTRIBUTES]}  # type: ignore[attr-defined]
        assert names <= {"user.note", "user.dir", "user.mark", "security.capability"}
        assert len(names) > 2
    infos = {info.name: info for info in await client.layers.list()}
    assert infos["base/flat:1"].digest == made.digest != infos[f"{top}:latest"].digest
    again = await client.layers.collapse(made.digest[:12], "base/flat:2")  # one layer is itself
    assert again.digest == made.digest


async def test_names_are_not_taken_over(client: DSecClient, host: Daemon) -> None:
    async with await client.run_container(arguments(IMAGE)) as box:
        await shell(box, "echo 1 > /root/a")
        packed = await box.pack_diff("snapshot/a")
    with pytest.raises(AlreadyExists, match="layer snapshot/a:latest exists"):
        await client.layers.collapse("snapshot/a", "snapshot/a")
    with pytest.raises(NotFound, match="no layer 'snapshot/none'"):
        await client.layers.collapse("snapshot/none", "snapshot/b")
    made = await client.layers.collapse("snapshot/a", "snapshot/a", replace=True)
    assert made.digest != packed.digest
    async with await client.run_container(arguments("snapshot/a")) as box:
        assert await shell(box, "cat /root/a") == "1\n"


async def test_a_host_that_made_none_of_the_layers_adds_no_content_either(tmp_path: Path) -> None:
    url = {"url": str(tmp_path / "store")}
    async with (
        daemon(store=url) as one,
        DSecClient(f"unix:{one.socket}") as client,
        await client.run_container(arguments(IMAGE)) as box,
    ):
        await shell(box, "dd if=/dev/urandom of=/root/a bs=1000 count=500 2>/dev/null")
        wanted = await shell(box, "md5sum /root/a /bin/busybox")
        await box.pack_diff("snapshot/a")
    before = store(tmp_path / "store")
    other = daemon(base=False, store=url, cache={"use": "always"})
    async with other as two, DSecClient(f"unix:{two.socket}") as client:
        await client.layers.collapse("snapshot/a", "base/flat:1")
        after = store(tmp_path / "store")
        assert (after["blobs"], after["indexes"]) == (before["blobs"], before["indexes"])
        async with await client.run_container(arguments("base/flat:1")) as box:
            assert await shell(box, "md5sum /root/a /bin/busybox") == wanted


async def test_a_collapse_that_is_given_up_leaves_nothing(
    client: DSecClient, host: Daemon, tmp_path: Path
) -> None:
    top = await stacked(client, host, tmp_path / "tree", 9)
    for delay in (0.0, 0.005, 0.01, 0.02, 0.05):
        work = asyncio.ensure_future(client.layers.collapse(top, "base/flat:1", replace=True))
        await asyncio.sleep(delay)
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
    made = await client.layers.collapse(top, "base/flat:1", replace=True)
    assert made.name == "base/flat:1"
    # Those given up end by themselves, possibly after this one: their calls hold nothing up.
    async with asyncio.timeout(10):
        while any(info.in_use for info in await client.layers.list()):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await until(lambda: list((host.state / "builds").iterdir()) == [])
    kept = await open_store(str(host.state / "store"))
    leases = [entry.key async for entry in kept.list("leases/")]
    await kept.close()
    assert not [key for key in leases if not key.startswith("leases/host-")]


async def checkpoints(box: Sandbox, name: str, most: int) -> None:
    """Make `most` of them, or as many as it may have."""
    for number in range(most):
        await shell(box, f"echo {name}{number} >> /root/log")
        try:
            await box.checkpoint()
        except Exhausted as error:
            if "roll back to an earlier one, or save it with pack_diff" in error.message:
                return
            raise


async def test_what_the_error_of_too_many_checkpoints_says_is_true(client: DSecClient) -> None:
    """Roll back, or save and go on in a new sandbox; collapse when that has too many layers."""
    image, counts = IMAGE, []
    for name, most in (("a", 99), ("b", 99), ("c", 12), ("d", 99)):
        async with await client.run_container(arguments(image)) as box:
            await checkpoints(box, name, most)
            points = await box.checkpoints()
            counts.append(len(points))
            (branch,) = await box.branch(1, points[-1])
            await branch.stop()
            await shell(box, "echo more >> /root/log")
            log = await shell(box, "cat /root/log")
            image = f"snapshot/{name}"
            await box.pack_diff(image)
            await box.rollback(points[-2])
            await box.checkpoint()  # there is room again
    assert counts == [20, 20, 12, 8]  # the last one stands on 56 layers
    with pytest.raises(InvalidArgument, match=r"at most 60 can be stacked; .*dsec layer collapse"):
        await client.run_container(arguments(image))
    await client.layers.collapse(image, image, replace=True)
    async with await client.run_container(arguments(image)) as box:
        assert await shell(box, "cat /root/log") == log
        for _ in range(20):
            await box.checkpoint()
