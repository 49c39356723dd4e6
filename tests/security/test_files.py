"""The files API against hostile trees, in both directions: nothing outside the root is reached."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Awaitable
from pathlib import Path

import pytest

from libdsec import Sandbox, model
from libdsec.errors import DSecError, InvalidArgument, PermissionDenied
from libdsec.link import pack
from tests.security.conftest import USER, Target, attack

pytestmark = [pytest.mark.root, pytest.mark.asyncio(loop_scope="module")]
BOTH = pytest.mark.parametrize("user", ["root", USER])
SECRET = "secret of the host"


@pytest.fixture
def planted(target: Target) -> Path:
    """A file of the host that everybody may read, in a directory that everybody may enter."""
    path = target.daemon.root / "open" / "planted"
    path.parent.mkdir(exist_ok=True)
    path.parent.chmod(0o777)
    path.write_text(SECRET)
    path.chmod(0o644)
    return path


def ways(path: Path) -> list[str]:
    return [
        str(path), "/.." * 20 + str(path), f"/proc/self/root{path}", f"/proc/1/root{path}",
        f"/proc/self/cwd/{'../' * 20}{path}", *(f"/proc/self/fd/{n}{'/..' * 20}{path}"
        for n in range(12)), f"/proc/thread-self/root{path}", f"/dev/fd/3{'/..' * 20}{path}",
    ]  # fmt: skip


@BOTH
async def test_reads_and_lists_stay_in_the_root(box: Sandbox, planted: Path, user: str) -> None:
    await box.run_shell("mkdir -p -m 777 /tmp/links; rm -f /tmp/links/*", check=True)
    for i, way in enumerate(ways(planted)):
        await box.run("ln", "-s", way, f"/tmp/links/{i}", check=True)
        await box.run("ln", "-s", str(Path(way).parent), f"/tmp/links/d{i}", check=True)
        for path in (way, f"/tmp/links/{i}", f"/tmp/links/d{i}/planted"):
            with pytest.raises(DSecError) as caught:
                await box.files.read(path, user=user)
            assert caught.value.code in ("not_found", "permission_denied", "invalid_argument"), path
            with pytest.raises(DSecError):
                await box.files.get_info(path, user=user)
        assert await box.files.glob(f"/tmp/links/d{i}/plant*", user=user) == []
    await box.files.write("/tmp/links/real", "inside", user=user)
    await box.run("ln", "-s", "/" + "../" * 9 + "tmp/links/real", "/tmp/links/up", check=True)
    assert await box.files.read("/tmp/links/up", user=user) == "inside"  # control
    assert "root:" in await box.files.read("/etc/shadow")
    host = Path("/etc/shadow").read_text()
    assert await box.files.read("/" + "../" * 20 + "etc/shadow") != host


async def _outcome(action: Awaitable[object]) -> str:
    try:
        await action
    except DSecError as error:
        return error.code
    return "ok"


@BOTH
async def test_writes_stay_in_the_root(box: Sandbox, planted: Path, user: str) -> None:
    await box.run_shell("rm -rf /tmp/w; mkdir -p -m 777 /tmp/w", check=True)
    before = planted.stat()
    for i, way in enumerate(ways(planted)):
        await box.run("ln", "-s", way, f"/tmp/w/{i}", check=True)
        for path in (f"/tmp/w/{i}", way):
            for action in (
                box.files.write(path, "owned", user=user),
                box.files.append(path, "owned", user=user),
                box.files.chmod(path, 0o777, user=user),
                box.files.chown(path, USER, user=user),
                box.files.remove(path, user=user),
                box.files.rename(path, "/tmp/w/moved", user=user),
                box.files.make_dir(path + "/x", user=user),
            ):
                outcome = await _outcome(action)
                assert outcome != "internal", (path, action)
    after = planted.stat()
    assert planted.read_text() == SECRET
    assert (after.st_mode, after.st_uid, after.st_ino) == (
        before.st_mode, before.st_uid, before.st_ino,
    )  # fmt: skip
    assert [found.name for found in planted.parent.iterdir()] == ["planted"]


async def test_users_rights_are_the_files_apis(box: Sandbox) -> None:
    """A user's call has the user's rights, whatever links lead to."""
    await box.run_shell(f"ln -sfn /etc/shadow /home/{USER}/s; echo x > /root/f", check=True)
    for path in (f"/home/{USER}/s", "/etc/shadow", "/root/f"):
        for action in (box.files.read(path, user=USER), box.files.write(path, "x", user=USER),
                       box.files.append(path, "x", user=USER),
                       box.files.chmod(path, 0o777, user=USER),
                       box.files.chown(path, USER, user=USER)):  # fmt: skip
            with pytest.raises(PermissionDenied):
                await action
    assert "root:" in await box.files.read("/etc/shadow")  # control: root may
    done = await box.run("stat", "-c", "%a %U", "/etc/shadow")
    assert done.stdout == "640 root\n"


async def test_a_directory_that_becomes_a_link_meanwhile(target: Target, planted: Path) -> None:
    """The race of rename and symlink against a path walk: every read is of one or the other."""
    script = f"""
os.symlink("/proc/1/root{planted.parent}", "/tmp/b")
os.symlink("/../../../../../../../..{planted.parent}", "/tmp/c")
print("swapping", flush=True)
while True:
    for other in ("/tmp/b", "/tmp/c"):
        try:
            libc.renameat2(-100, b"/tmp/a", -100, other.encode(), 2)
        except OSError:
            pass
"""
    whole = "import sys; sys.path.insert(0, '/attack')\nfrom kit import *\n" + script
    seen: list[str] = []
    async with await target.sibling(cpu_cores_limit=2) as box:
        await box.files.write("/tmp/a/planted", "inside")  # whole before anybody reads it
        running = await box.commands.run(["python3", "-c", whole], background=True)
        assert (await anext(running)).data == b"swapping\n"
        # control: until both the directory and a link were met there
        while len(seen) < 150 or not {"inside"} < set(seen):
            try:
                seen.append(await box.files.read("/tmp/a/planted"))
            except DSecError as error:
                seen.append(error.code)
        await running.kill()
    assert SECRET not in seen
    assert set(seen) <= {"inside", "not_found", "permission_denied", "invalid_argument"}


def archive(*entries: tuple[str, bytes, bytes | str]) -> bytes:
    """A tar of (name, type, content or link target)."""
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, kind, value in entries:
            info = tarfile.TarInfo(name)
            info.type = kind
            info.mode = 0o777
            if kind in (tarfile.SYMTYPE, tarfile.LNKTYPE):
                info.linkname = str(value)
            elif isinstance(value, bytes):
                info.size = len(value)
            if kind in (tarfile.CHRTYPE, tarfile.BLKTYPE):
                info.devmajor, info.devminor = 1, 1
            tar.addfile(info, io.BytesIO(value) if isinstance(value, bytes) else None)
    return raw.getvalue()


async def _unpack(box: Sandbox, path: str, data: bytes, user: str = "root") -> str:
    """files.upload of raw bytes, as a client of any make could send; "ok" or the error's code."""
    args = model.TarArgs(path=os.fsencode(path), user=user)
    call = await box._link.start("files.upload", pack(args), box.id)
    try:
        for at in range(0, len(data), 65536):
            await call.send(data[at : at + 65536])
        call.end()
        await call.result()
    except DSecError as error:
        return error.code
    return "ok"


async def test_an_uploaded_archive_stays_below_its_destination(box: Sandbox) -> None:
    R, S, L = tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE
    outside = {
        "dotdot": archive(("../../escaped", R, b"x")),
        "absolute": archive(("/escaped", R, b"x")),
        "symlink": archive(("d", S, "/"), ("d/escaped", R, b"x")),
        "relative symlink": archive(("d", S, "../.."), ("d/escaped", R, b"x")),
        "two steps": archive(("a", S, "b"), ("b", S, "/"), ("a/escaped", R, b"x")),
        "proc": archive(("p", S, "/proc/self/root"), ("p/escaped", R, b"x")),
        "hard link": archive(("h", L, "/etc/shadow"), ("h", R, b"x")),
        "hard link up": archive(("h", L, "../../etc/shadow"), ("h", R, b"x")),
        "link replaced": archive(("f", S, "/escaped"), ("f", R, b"x")),
    }
    before = (await box.run("sha256sum", "/etc/shadow", check=True)).stdout
    for name, data in outside.items():
        await box.run_shell("rm -rf /tmp/up; mkdir /tmp/up", check=True)
        outcome = await _unpack(box, "/tmp/up", data)
        assert outcome in ("ok", "invalid_argument", "permission_denied", "not_found"), name
        assert not await box.files.exists("/escaped"), name
        assert not await box.files.exists("/tmp/escaped"), name
        assert (await box.run("sha256sum", "/etc/shadow")).stdout == before, name
    kinds = archive(
        ("dev", tarfile.CHRTYPE, b""), ("blk", tarfile.BLKTYPE, b""), ("ok", R, b"fine")
    )
    await box.run_shell("rm -rf /tmp/up; mkdir /tmp/up", check=True)
    assert await _unpack(box, "/tmp/up", kinds) == "ok"
    assert (await box.run("ls", "/tmp/up")).stdout == "ok\n"  # control; devices are left out


async def test_an_upload_by_a_user_has_the_users_rights(box: Sandbox) -> None:
    await box.run_shell("rm -rf /tmp/up; mkdir -m 777 /tmp/up", check=True)
    data = archive(("f", tarfile.REGTYPE, b"x"))
    assert await _unpack(box, "/etc", data, USER) == "permission_denied"
    assert await _unpack(box, "/tmp/up", data, USER) == "ok"  # control
    assert (await box.run("stat", "-c", "%U", "/tmp/up/f")).stdout == f"{USER}\n"


async def test_broken_archives_are_refused(box: Sandbox) -> None:
    good = archive(("f", tarfile.REGTYPE, b"x" * 1000))
    huge = bytearray(good)
    huge[124:136] = b"\xff" * 12  # a size of 2^94, base 256
    huge[148:156] = b"        "
    huge[148:156] = b"%06o\0 " % sum(huge[:512])
    for data in (good[:700], bytes(huge), b"\xff" * 2048, good[:100], b"x" * 100_000):
        outcome = await _unpack(box, "/tmp/broken", data)
        assert outcome in ("invalid_argument", "ok", "exhausted"), outcome
        assert (await box.run("echo", "alive")).stdout == "alive\n"
    await box.files.remove("/tmp/broken")


async def test_a_download_does_not_write_outside(
    box: Sandbox, tmp_path: Path, planted: Path
) -> None:
    """What a sandbox sends is its own: links out of the copy are refused."""
    victim = tmp_path / "victim"
    victim.write_text("client's")
    await box.run_shell(
        f"rm -rf /tmp/down; mkdir -p /tmp/down/d; cd /tmp/down; echo own > f; "
        f"ln -s {victim} link; ln -s {tmp_path} dir; ln -s ../../.. up; ln -s {planted} p",
        check=True,
    )
    target = tmp_path / "copy"
    with pytest.raises(InvalidArgument):
        await box.files.download("/tmp/down", target)
    assert victim.read_text() == "client's"
    assert sorted(p.name for p in tmp_path.iterdir()) in (["victim"], ["copy", "victim"])
    await box.run_shell("cd /tmp/down; rm link dir up p; ln -s f inner")
    await box.files.download("/tmp/down", tmp_path / "again")
    assert (tmp_path / "again/inner").read_text() == "own\n"  # control


async def test_special_files_do_not_hold_the_files_api(box: Sandbox) -> None:
    """A FIFO, a socket or a terminal where a file is expected: an error, not a wait."""
    await attack(
        box,
        """
import socket
for name in ("fifo", "sock"):
    if os.path.lexists("/tmp/" + name):
        os.unlink("/tmp/" + name)
os.mkfifo("/tmp/fifo"); socket.socket(socket.AF_UNIX).bind("/tmp/sock"); report()
""",
    )
    for path in ("/tmp/fifo", "/tmp/sock"):
        for action in (box.files.read(path), box.files.write(path, "x")):
            with pytest.raises(DSecError) as caught:
                await action
            assert caught.value.code == "invalid_argument"
    for file in ("/etc/passwd", "/etc/group"):
        await box.run_shell(f"mv {file} {file}.real; mkfifo {file}", check=True)
        done = await box.run("echo", "alive", user="0:0", timeout=5)
        assert done.stdout == "alive\n", file
        await box.run_shell(f"mv {file}.real {file}", user="0:0", check=True)
