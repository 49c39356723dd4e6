"""``sandbox.files`` against a real peer: content of every kind, trees, hostile archives."""

from __future__ import annotations

import asyncio
import io
import os
import tarfile
from pathlib import Path

import pytest

from libdsec import (
    DSecClient,
    DSecContainerRunArgs,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    Unavailable,
    WriteEntry,
    archive,
)
from libdsec.model import WatchEvent
from tests.unit.wire_server import WireServer

ARGS = DSecContainerRunArgs(container_image="base/debian:12")


@pytest.fixture
async def server(tmp_path):
    server = WireServer(tmp_path)
    await server.start()
    yield server
    await server.close()


@pytest.fixture
async def sandbox(server):
    async with DSecClient(server.socket) as client:
        yield await client.run_container(ARGS)


@pytest.mark.parametrize("size", [0, 1, 65536, 65537, 262144, 5_000_001])
async def test_content_of_every_size_is_unchanged(sandbox, size):
    data = os.urandom(size)
    assert (await sandbox.files.write("f", data)).size == size
    assert await sandbox.files.read("f", format="bytes") == data
    stream = await sandbox.files.read("f", format="stream")
    assert b"".join([block async for block in stream]) == data


async def test_every_kind_of_source(sandbox):
    async def pieces():
        yield b"a" * 300_000
        yield b"b"

    await sandbox.files.write("1", "text ä")
    await sandbox.files.write("2", io.BytesIO(b"x" * 700_000))
    await sandbox.files.write("3", [b"one", b"two"])
    await sandbox.files.write("4", pieces())
    assert await sandbox.files.read("1") == "text ä"
    assert len(await sandbox.files.read("2")) == 700_000
    assert await sandbox.files.read("3") == "onetwo"
    assert (await sandbox.files.get_info("4")).size == 300_001
    for wrong in (5, ["text"], io.StringIO("text")):
        with pytest.raises(InvalidArgument):
            await sandbox.files.write("5", wrong)
    assert not await sandbox.files.exists("5")


async def test_a_source_that_fails_leaves_no_file(server, sandbox):
    async def broken():
        yield b"x" * 100
        raise ValueError("disk")

    with pytest.raises(ValueError, match="disk"):
        await sandbox.files.write("f", broken())
    await sandbox.files.exists("f")
    assert server.cancels == ["files.write"]
    assert not await sandbox.files.exists("f")


@pytest.mark.parametrize("name", ["with space", "quote'\"", "new\nline", b"\xff\xfe", "-rf", "ü"])
async def test_odd_names(sandbox, name):
    await sandbox.files.write(name, b"x")
    (entry,) = await sandbox.files.list(".")
    assert os.fsencode(entry.name) == os.fsencode(name)
    assert await sandbox.files.read(entry.path) == "x"
    await sandbox.files.remove(entry.path)


async def test_ranges_append_and_mode(sandbox):
    await sandbox.files.write("f", b"0123456789", mode=0o600)
    assert await sandbox.files.read("f", offset=3, length=4) == "3456"
    await sandbox.files.append("f", b"ab")
    assert await sandbox.files.read("f", offset=9) == "9ab"
    await sandbox.files.chmod("f", 0o755)
    assert (await sandbox.files.get_info("f")).mode == 0o755


async def test_tree_operations(server, sandbox):
    files = sandbox.files
    assert await files.make_dir("a/b")
    assert not await files.make_dir("a/b")
    await files.write_files([("a/x.py", "1"), WriteEntry("a/b/y.py", b"2", mode=0o700)])
    assert [e.path for e in await files.list("a")] == ["a/b", "a/x.py"]
    assert [e.path for e in await files.list("a", depth=2)] == ["a/b", "a/x.py", "a/b/y.py"]
    assert await files.glob("a/*.py") == ["a/x.py"]
    moved = await files.rename("a/x.py", "a/z.py")
    assert (moved.path, moved.type) == ("a/z.py", "file")
    (server.root / sandbox.id / "link").symlink_to("nowhere")
    assert await files.exists("link")
    assert (await files.get_info("link", follow=False)).symlink_target == "nowhere"
    await files.remove("a")
    with pytest.raises(NotFound):
        await files.remove("a")
    with pytest.raises(NotFound):
        await files.read("a", format="stream")
    with pytest.raises(PermissionDenied):
        await files.write("/denied/x", b"x" * 1_000_000)


async def test_watch(server, sandbox):
    await sandbox.files.make_dir("w")
    events = server.world.watch_events
    events.put_nowait(WatchEvent(kind="create", name=b"x"))
    async with await sandbox.files.watch_dir("w") as watch:
        assert (await anext(watch)).name == "x"
    assert [event async for event in watch] == []
    seen = []
    watch = await sandbox.files.watch_dir("w", seen.append)
    await sandbox.files.exists("w")  # by now the first watch is gone at the peer, too
    events.put_nowait(WatchEvent(kind="modify", name=b"\xff"))
    async with asyncio.timeout(5):
        while not seen:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert (seen[0].kind, os.fsencode(seen[0].name)) == ("modify", b"\xff")
    await watch.stop()

    watch = await sandbox.files.watch_dir("w")
    await asyncio.sleep(0.05)
    await server.drop()
    with pytest.raises(Unavailable):
        await anext(watch)


# --- trees


def make_tree(root: Path) -> None:
    (root / "sub" / "deep").mkdir(parents=True)
    (root / "sub" / "run.sh").write_text("#!/bin/sh\n")
    (root / "sub" / "run.sh").chmod(0o755)
    (root / "big").write_bytes(os.urandom(2_000_000))
    (root / "link").symlink_to("sub/run.sh")
    (root / "sub" / "name with\nnewline").write_bytes(b"\x00\xff")


def listing(root: Path) -> dict[str, object]:
    found: dict[str, object] = {}
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        if path.is_symlink():
            found[name] = str(path.readlink())
        else:
            found[name] = path.read_bytes() if path.is_file() else "dir"
    return found


async def test_directory_trees_both_ways(server, sandbox, tmp_path):
    source, back = tmp_path / "source", tmp_path / "back"
    make_tree(source)
    sizes = []
    sent = await sandbox.files.upload(source, "copy/of it", on_progress=sizes.append)
    assert sent > 2_000_000
    assert listing(server.root / sandbox.id / "copy" / "of it") == listing(source)
    received = await sandbox.files.download("copy/of it", back, on_progress=sizes.append)
    assert received >= 2_000_000
    assert listing(back) == listing(source)
    assert os.access(back / "sub" / "run.sh", os.X_OK)


async def test_single_files_both_ways(sandbox, tmp_path):
    (tmp_path / "one").write_bytes(os.urandom(1_000_000))
    (tmp_path / "one").chmod(0o750)
    assert await sandbox.files.upload(tmp_path / "one", "one") == 1_000_000
    assert await sandbox.files.download("one", tmp_path / "two") == 1_000_000
    assert (tmp_path / "two").read_bytes() == (tmp_path / "one").read_bytes()
    assert (await sandbox.files.get_info("one")).mode == 0o750
    with pytest.raises(NotFound):
        await sandbox.files.download("none", tmp_path / "three")
    assert not (tmp_path / "three").exists()


async def test_cancelled_upload_ends_its_thread(server, sandbox, tmp_path):
    source = tmp_path / "source"
    make_tree(source)

    async def stuck(call):
        await asyncio.sleep(60)

    server.on["files.upload"] = stuck
    for _ in range(18):
        (source / os.urandom(4).hex()).write_bytes(os.urandom(500_000))
    upload = asyncio.create_task(sandbox.files.upload(source, "x"))
    await asyncio.sleep(0.3)
    upload.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(upload, 5)


def hostile(*members: tuple[str, str, str]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, kind, value in members:
            info = tarfile.TarInfo(name)
            if kind == "file":
                info.size = len(value)
                tar.addfile(info, io.BytesIO(value.encode()))
            else:
                info.type = {"sym": tarfile.SYMTYPE, "hard": tarfile.LNKTYPE,
                             "char": tarfile.CHRTYPE, "dir": tarfile.DIRTYPE}[kind]  # fmt: skip
                info.linkname = value
                tar.addfile(info)
    return buffer.getvalue()


@pytest.mark.parametrize(
    "members",
    [
        [("../evil", "file", "x")],
        [("a/../../evil", "file", "x")],
        [("l", "sym", ".."), ("l/evil", "file", "x")],
        [("l", "sym", "/etc")],
        [("d", "dir", ""), ("d/l", "sym", "../../x")],
        [("h", "hard", "../secret")],
        [("h", "hard", "/etc/passwd")],
    ],
)
async def test_hostile_archives_do_not_leave_the_target(server, sandbox, tmp_path, members):
    async def serve(call):
        await call.send(hostile(*members))
        return {"size": 1}

    server.on["files.download"] = serve
    (tmp_path / "secret").write_text("s")
    await sandbox.files.make_dir("t")
    with pytest.raises(InvalidArgument, match=r"leave|outside"):
        await sandbox.files.download("t", tmp_path / "out")
    assert not (tmp_path / "evil").exists()


def test_absolute_names_devices_and_replaced_links(tmp_path):
    data = hostile(
        ("/abs", "file", "x"), ("dev", "char", ""), ("l", "sym", "abs"), ("l", "file", "new")
    )
    chunks = iter([data])
    archive.unpack(lambda: next(chunks, b""), tmp_path / "out", lambda size: None)
    assert listing(tmp_path / "out") == {"abs": b"x", "l": b"new"}
