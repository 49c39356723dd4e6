"""faults.md, "Files": each fault as a user of libdsec meets it, against a real daemon."""

from __future__ import annotations

import hashlib
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from libdsec import DSecError
from tests.system.user_view import viewed

pytestmark = pytest.mark.root

NAMES = [
    b"with space", b"quote's \"and\" `tick`", b"line\nbreak", b"\xff\xfe not utf-8", b"-rf", b"*",
    b"$(touch x)", b"tab\tend ", b"%s%n", b"a" * 255, "ünï☃".encode(),
]  # fmt: skip


@pytest.mark.parametrize(
    "size", [0, 1, 65_535, 65_536, 262_144, 1 << 20, (1 << 20) + 1, 16_777_217, 100_000_000]
)
async def test_an_upload_of_any_size_is_there_and_unchanged(size: int, tmp_path: Path) -> None:
    data = os.urandom(size)
    (tmp_path / "local").write_bytes(data)
    async with viewed(memory_limit_mb=1024) as view:
        files = view.sandbox.files
        assert await files.upload(tmp_path / "local", "/uploaded") == size
        assert (await files.write("/written", data)).size == size
        digest = hashlib.sha256(data).hexdigest()
        inside = await view.sandbox.run("sha256sum", "/uploaded", "/written")
        assert [line.split()[0] for line in inside.stdout.splitlines()] == [digest, digest]
        assert await files.read("/written", format="bytes") == data
        await files.download("/uploaded", tmp_path / "back")
        assert (tmp_path / "back").read_bytes() == data


async def test_an_upload_that_does_not_fit_fails_and_leaves_nothing() -> None:
    async def endless() -> AsyncIterator[bytes]:
        for _ in range(64):
            yield bytes(1 << 20)

    async with viewed(disk_limit_mb=16) as view:
        files = view.sandbox.files
        await files.write("/f", b"old")
        with pytest.raises(DSecError) as caught:
            await files.write("/f", endless())
        assert "space" in caught.value.message or "disk" in caught.value.message
        assert await files.read("/f") == "old"
        await files.write("/after", bytes(1 << 20))  # the failed one's room was given back


async def test_an_upload_whose_source_fails_leaves_the_old_file() -> None:
    async def broken() -> AsyncIterator[bytes]:
        yield bytes(1 << 20)
        raise RuntimeError("the source broke")

    async with viewed() as view:
        await view.sandbox.files.write("/f", b"old")
        with pytest.raises(RuntimeError, match="broke"):
            await view.sandbox.files.write("/f", broken())
        assert await view.sandbox.files.read("/f") == "old"
        # what was begun is removed by who wrote it, once it sees that no more comes
        left = "until ! ls -A / | grep -F .dsec-write-; do sleep 0.05; done"
        assert (await view.sandbox.run_shell(left, timeout=30)).exit_code == 0


async def test_binary_content_is_not_changed() -> None:
    data = bytes(range(256)) * 1000 + b"\r\n\r\n\0\xef\xbb\xbf\x1a"
    async with viewed() as view:
        await view.sandbox.files.write("/b", data)
        await view.sandbox.files.append("/b", data)
        assert await view.sandbox.files.read("/b", format="bytes") == data * 2
        copied = await view.sandbox.run("cat", "/b")
        assert copied.stdout_bytes == data * 2


@pytest.mark.parametrize("name", NAMES, ids=[f"name{n}" for n in range(len(NAMES))])
async def test_strange_paths_are_paths(name: bytes, tmp_path: Path) -> None:
    async with viewed() as view:
        files, path = view.sandbox.files, b"/d/" + name
        await files.write(path, b"content")
        assert await files.read(path) == "content"
        (entry,) = await files.list("/d")
        assert os.fsencode(entry.path) == path
        assert (await view.sandbox.run("cat", path)).stdout == "content"
        await files.download("/d", tmp_path / "d")
        assert (os.fsencode(tmp_path / "d") + b"/" + name) in [
            os.path.join(os.fsencode(tmp_path / "d"), one)  # noqa: PTH118 - bytes
            for one in os.listdir(os.fsencode(tmp_path / "d"))  # noqa: PTH208
        ]
        await files.upload(tmp_path / "d", "/again")
        assert await files.read(b"/again/" + name) == "content"
        await files.rename(path, b"/d/plain")
        await files.remove(b"/again/" + name)
        assert [entry.name for entry in await files.list("/d")] == ["plain"]
        assert not await files.exists(b"/again/" + name)


async def test_a_link_out_of_the_root_stays_inside_and_the_daemon_follows_none(
    tmp_path: Path,
) -> None:
    tmp_path.chmod(0o777)
    secret = tmp_path / "secret"
    secret.write_text("of the host")
    async with viewed() as view:
        files, up = view.sandbox.files, "../" * 20
        await view.sandbox.run_shell(
            f"mkdir /l; ln -s {up}{secret} /l/relative; ln -s {secret} /l/absolute;"
            f"ln -s {tmp_path} /l/directory; ln -s /proc/1/root{secret} /l/magic",
            check=True,
        )
        for name in ("relative", "absolute", "directory/secret", "magic"):
            with pytest.raises(DSecError):
                await files.read(f"/l/{name}")
        # writing through one makes the file inside, and nothing on the host
        for name in ("relative", "directory/new"):
            try:
                await files.write(f"/l/{name}", b"of the sandbox")
            except DSecError:
                continue
        assert secret.read_text() == "of the host"
        assert [entry.name for entry in tmp_path.iterdir()] == ["secret"]
        await files.remove("/l", recursive=True)
        assert secret.read_text() == "of the host"


async def test_stopping_a_sandbox_full_of_links_removes_nothing_of_the_host(
    tmp_path: Path,
) -> None:
    tmp_path.chmod(0o777)
    for n in range(10):
        (tmp_path / f"f{n}").write_text("kept")
    for upper in ("memory", "auto"):
        async with viewed(upper=upper) as view:
            await view.sandbox.run_shell(
                f"for i in 1 2 3 4 5; do ln -s {tmp_path} /tmp/l$i; ln -s {tmp_path} /l$i; done",
                check=True,
            )
            await view.sandbox.stop()
            assert view.daemon.remains() == []
        assert len(list(tmp_path.iterdir())) == 10
