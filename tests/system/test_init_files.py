"""Files, trees, watches and forwards of a real dsec-init."""

from __future__ import annotations

import io
import os
import socket
import tarfile
from pathlib import Path

import msgspec
import pytest

from libdsec import wire
from libdsec.errors import (
    AlreadyExists,
    DSecError,
    Exhausted,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    Unavailable,
    WrongState,
)  # fmt: skip
from tests.system.init_harness import Init, InitClient, client, here, init, wait_until

__all__ = ["client", "here", "init"]

pytestmark = [
    pytest.mark.root,
    pytest.mark.leaky(
        "one init serves many tests and pools cgroup directories until it is stopped"
    ),
]

STRANGE = [b"with space", b"quote'\"`$x", b"new\nline", b"\xff\xfe not utf-8", b"-rf", b"x" * 255]


def read(client: InitClient, path: bytes, **args: object) -> bytes:
    result, items = client.finish(client.open("files.read", path=path, **args))
    data = b"".join(items) + result.get("data", b"")
    assert len(data) == result["size"]
    return data


def listed(client: InitClient, directory: bytes) -> list[bytes]:
    return [entry["name"] for entry in client.call("files.list", path=directory)]


# --- content ----------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 65536, 65537, 5_000_000])
def test_an_upload_of_any_size_is_there_afterwards(
    client: InitClient, here: bytes, size: int
) -> None:
    data = os.urandom(size)
    assert client.upload(client.open("files.write", path=here + b"/up"), data) == {"size": size}
    assert read(client, here + b"/up") == data
    assert read(client, here + b"/up", offset=size // 2) == data[size // 2 :]
    assert read(client, here + b"/up", offset=1, length=10) == data[1:11]
    if size <= 1 << 20:
        client.call("files.write", path=here + b"/inline", data=data)
        assert read(client, here + b"/inline") == data


@pytest.mark.parametrize("name", STRANGE)
def test_strange_names_are_names(client: InitClient, here: bytes, name: bytes) -> None:
    path = here + b"/" + name
    client.call("files.write", path=path, data=b"x")
    assert client.call("files.stat", path=path)["name"] == name
    assert [e["name"] for e in client.call("files.list", path=here)] == [name]
    assert read(client, path) == b"x"
    client.call("files.rename", path=path, target=here + b"/moved")
    client.call("files.remove", path=here + b"/moved")
    with pytest.raises(NotFound):
        client.call("files.stat", path=path)


def test_write_is_atomic_and_keeps_mode_and_owner(client: InitClient, here: bytes) -> None:
    path = here + b"/f"
    client.call("files.write", path=path, data=b"old", mode=0o751)
    client.call("files.chown", path=path, owner="12:34")
    call = client.open("files.write", path=path)
    client.send(wire.Item(call, wire.pack(b"half")))
    wait_until(lambda: len(listed(client, here)) == 2)  # it has begun: its temporary file
    assert read(client, path) == b"old"
    client.send(wire.Cancel(call))
    with pytest.raises(DSecError):
        client.finish(call)
    wait_until(lambda: listed(client, here) == [b"f"])  # its process ends after the answer
    assert read(client, path) == b"old"
    client.call("files.write", path=path, data=b"new")
    stat = client.call("files.stat", path=path)
    assert (stat["mode"], stat["uid"], stat["gid"]) == (0o751, 12, 34)
    assert listed(client, here) == [b"f"]  # nothing temporary


def test_a_write_whose_client_vanishes_leaves_nothing(
    init: Init, client: InitClient, here: bytes
) -> None:
    gone = InitClient(init.path)
    call = gone.open("files.write", path=here + b"/never")
    gone.send(wire.Item(call, wire.pack(b"half")))
    wait_until(lambda: listed(client, here))  # it has begun: its temporary file
    gone.close()
    wait_until(lambda: listed(client, here) == [])


def test_append_and_parents_and_links(client: InitClient, here: bytes) -> None:
    client.call("files.write", path=here + b"/a/b/c", data=b"1")
    client.call("files.write", path=here + b"/a/b/c", data=b"2", append=True)
    assert read(client, here + b"/a/b/c") == b"12"
    client.run("ln -s b/c a/link; ln -s nowhere a/dangling; ln -s loop loop", cwd=here)
    client.call("files.write", path=here + b"/a/link", data=b"through")
    assert read(client, here + b"/a/b/c") == b"through"
    assert client.call("files.stat", path=here + b"/a/link", follow=False)["target"] == b"b/c"
    client.call("files.write", path=here + b"/a/dangling", data=b"made")
    assert read(client, here + b"/a/nowhere") == b"made"
    with pytest.raises(InvalidArgument):
        client.call("files.write", path=here + b"/loop", data=b"")


def test_a_link_out_of_the_root_stays_inside(client: InitClient, here: bytes) -> None:
    client.run(
        "ln -s ../../../../../../../../../../../../etc/passwd up; ln -s /proc/self/root magic",
        cwd=here,
    )
    assert b"root:" in read(client, here + b"/up")  # the sandbox's own, never the host's
    with pytest.raises(InvalidArgument):
        read(client, here + b"/magic/etc/passwd")


@pytest.mark.parametrize(
    ("op", "args", "error"),
    [
        ("read", {"path": b"absent"}, NotFound),
        ("read", {"path": b"/etc"}, InvalidArgument),
        ("read", {"path": b"/etc/passwd/x"}, InvalidArgument),
        ("read", {"path": b"nul\0"}, InvalidArgument),
        ("read", {"path": b""}, InvalidArgument),
        ("read", {"path": b"x" * 5000}, InvalidArgument),
        ("list", {"path": b"/etc/passwd"}, InvalidArgument),
        ("mkdir", {"path": b"/etc"}, AlreadyExists),
        ("remove", {"path": b"/"}, InvalidArgument),
        ("remove", {"path": b"absent"}, NotFound),
        ("write", {"path": b"/etc", "data": b""}, InvalidArgument),
        ("stat", {"path": b"/etc", "misspelt": 1}, InvalidArgument),
        ("chmod", {"path": b"/etc"}, InvalidArgument),
        ("chown", {"path": b"/etc", "owner": "nobody-here"}, NotFound),
        ("write", {"path": b"/proc/version", "data": b"", "user": "4000"}, PermissionDenied),
        ("read", {"path": b"/etc/shadow", "user": "4000:4000"}, PermissionDenied),
        ("nonsense", {"path": b"/"}, DSecError),
    ],
)
def test_errors_are_told_by_kind(
    client: InitClient, op: str, args: dict[str, object], error: type[DSecError]
) -> None:
    with pytest.raises(error) as caught:
        client.call(f"files.{op}", **args)
    assert type(caught.value).code != "internal"


def test_a_fifo_does_not_hang_the_call(client: InitClient, here: bytes) -> None:
    client.run("mkfifo pipe", cwd=here)
    with pytest.raises(InvalidArgument):
        read(client, here + b"/pipe")
    with pytest.raises(InvalidArgument):
        client.call("files.write", path=here + b"/pipe", data=b"x")


def test_a_full_disk_is_reported_as_such(init: Init) -> None:
    if init.work.stat().st_uid != 0:
        pytest.skip("the test's mount is made in init's own mount namespace")
    target = init.work / "small"
    target.mkdir()
    os.system(f"nsenter --mount=/proc/{init.pid()}/ns/mnt mount -t tmpfs -o size=64k none {target}")
    with pytest.raises(Exhausted) as caught:
        init.client.call("files.write", path=b"small/f", data=bytes(200_000))
    assert caught.value.detail == {"reason": "disk_full"}
    with pytest.raises(Exhausted):
        init.client.upload(init.client.open("files.write", path=b"small/g"), bytes(3_000_000))
    assert init.client.call("files.list", path=b"small") == []


# --- trees ------------------------------------------------------------------------------------


def test_list_glob_and_recursive_changes(client: InitClient, here: bytes) -> None:
    client.run("mkdir -p a/b .hid; touch a/x.py a/b/y.py z.py .hid/h.py a/n.txt", cwd=here)
    names = {e["name"] for e in client.call("files.list", path=here, recursive=True)}
    assert names == {
        b"a",
        b"a/b",
        b".hid",
        b"a/x.py",
        b"a/b/y.py",
        b"z.py",
        b".hid/h.py",
        b"a/n.txt",
    }
    glob = lambda pattern: set(client.call("files.glob", path=here + b"/" + pattern))  # noqa: E731
    assert glob(b"*.py") == {here + b"/z.py"}
    assert glob(b"**/*.py") == {here + b"/" + p for p in (b"z.py", b"a/x.py", b"a/b/y.py")}
    assert glob(b"a/?.[pt]y") == {here + b"/a/x.py"}
    assert glob(b"absent/*") == set()
    client.call("files.chmod", path=here + b"/a", mode=0o700, recursive=True)
    client.call("files.chown", path=here + b"/a", owner="7:8", recursive=True)
    stat = client.call("files.stat", path=here + b"/a/b/y.py")
    assert (stat["mode"], stat["uid"], stat["gid"]) == (0o700, 7, 8)
    with pytest.raises(WrongState):
        client.call("files.remove", path=here + b"/a")
    client.call("files.remove", path=here + b"/a", recursive=True)
    assert {e["name"] for e in client.call("files.list", path=here)} == {b".hid", b"z.py"}


def test_a_tree_deeper_than_descriptors_is_removed(client: InitClient, here: bytes) -> None:
    client.run(
        'python3 -c \'import os\nfor i in range(700): os.mkdir("d"); os.chdir("d")\'', cwd=here
    )
    client.call("files.remove", path=here + b"/d", recursive=True)
    assert client.call("files.list", path=here) == []


def test_a_large_list_is_complete_and_a_huge_one_refused(client: InitClient, here: bytes) -> None:
    client.run("seq -f 'file-%06g' 1 3000 | xargs touch", cwd=here)
    assert len(client.call("files.list", path=here)) == 3000
    assert len(client.call("files.glob", path=here + b"/file-*5")) == 300


def build_tar(format_: int) -> bytes:
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w", format=format_) as tar:

        def add(name: str, data: bytes | None = None, **fields: object) -> None:
            info = tarfile.TarInfo(name)
            info.mode, info.mtime = 0o640, 1_500_000_000
            for key, value in fields.items():
                setattr(info, key, value)
            info.size = len(data or b"")
            tar.addfile(info, io.BytesIO(data or b""))

        add("dir", type=tarfile.DIRTYPE, mode=0o750)
        add("dir/file", b"content" * 1000, uid=11, gid=12)
        add("/absolute", b"made relative")
        add("dir/" + "n" * 90 + "/" + "long" * 40, b"long name")
        add("dir/link", type=tarfile.SYMTYPE, linkname="../" + "t" * 150)
        add("dir/hard", type=tarfile.LNKTYPE, linkname="dir/file")
        add("fifo", type=tarfile.FIFOTYPE)
        add("empty", b"")
    return raw.getvalue()


@pytest.mark.parametrize("format_", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_upload_unpacks_what_python_packs_and_download_gives_it_back(
    client: InitClient, here: bytes, format_: int
) -> None:
    data = build_tar(format_)
    result = client.upload(client.open("files.upload", path=here + b"/in"), data)
    assert result["size"] == len(data)
    assert result["skipped"] == 1
    base = here + b"/in/"
    stat = client.call("files.stat", path=base + b"dir/file")
    assert (stat["uid"], stat["gid"], stat["mode"], stat["mtime"]) == (11, 12, 0o640, 1.5e9)
    assert read(client, base + b"absolute") == b"made relative"
    assert client.call("files.stat", path=base + b"dir")["mode"] == 0o750
    assert (
        client.call("files.stat", path=base + b"dir/link", follow=False)["target"]
        == b"../" + b"t" * 150
    )
    result, items = client.finish(client.open("files.download", path=here + b"/in"))
    packed = b"".join(items)
    assert result["size"] == len(packed)
    with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
        members = {m.name: m for m in tar.getmembers()}
        long = "dir/" + "n" * 90 + "/" + "long" * 40
        assert set(members) == {"dir", "dir/file", "absolute", "dir/" + "n" * 90, long, "dir/link",
                                "dir/hard", "empty"}  # fmt: skip
        hard, soft = sorted((members["dir/file"], members["dir/hard"]), key=lambda m: m.islnk())
        assert tar.extractfile(hard).read() == b"content" * 1000  # type: ignore[union-attr]
        assert soft.islnk()
        assert members["dir/link"].linkname == "../" + "t" * 150
        assert members["dir/file"].mtime == 1_500_000_000
    again = client.upload(client.open("files.upload", path=here + b"/copy"), packed)
    assert again["size"] == len(packed)


def test_download_of_strange_names_and_of_one_file(client: InitClient, here: bytes) -> None:
    for name in STRANGE:
        client.call("files.write", path=here + b"/" + name, data=name)
    _, items = client.finish(client.open("files.download", path=here))
    with tarfile.open(fileobj=io.BytesIO(b"".join(items))) as tar:
        assert {os.fsencode(m.name) for m in tar} == set(STRANGE)
    _, items = client.finish(client.open("files.download", path=here + b"/-rf"))
    with tarfile.open(fileobj=io.BytesIO(b"".join(items))) as tar:
        assert tar.getnames() == ["-rf"]


@pytest.mark.parametrize("bad", ["../escape", "a/../../escape", "via/escape"])
def test_an_archive_cannot_leave_its_directory(client: InitClient, here: bytes, bad: str) -> None:
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as tar:
        link = tarfile.TarInfo("via")
        link.type, link.linkname = tarfile.SYMTYPE, "/tmp"
        tar.addfile(link)
        info = tarfile.TarInfo(bad)
        info.size = 1
        tar.addfile(info, io.BytesIO(b"x"))
    with pytest.raises(InvalidArgument):
        client.upload(client.open("files.upload", path=here), raw.getvalue())
    assert not Path("/tmp/escape").exists()


@pytest.mark.parametrize("data", [b"junk" * 200, build_tar(tarfile.PAX_FORMAT)[:1500], b""])
def test_a_broken_archive_is_refused(client: InitClient, here: bytes, data: bytes) -> None:
    with pytest.raises(InvalidArgument):
        client.upload(client.open("files.upload", path=here), data)


# --- watch and forward --------------------------------------------------------------------------


def watched(client: InitClient, call: int, until: bytes) -> list[tuple[str, bytes]]:
    events = []
    while not events or events[-1][1] != until:
        frame = client.frame(call)
        assert isinstance(frame, wire.Item)
        client.send(wire.Credit(call, 1))
        event = msgspec.msgpack.decode(frame.data)
        events.append((event["kind"], event.get("name", b"")))
    return events


def test_watch_sees_what_the_next_request_does(client: InitClient, here: bytes) -> None:
    call = client.open("files.watch", path=here)
    script = client.open("exec.run", cid=here.decode(), cwd=here,
                         shell=b"echo > a; mv a b; chmod 600 b; rm b; touch end")  # fmt: skip
    events = watched(client, call, b"end")
    for expected in (("create", b"a"), ("modify", b"a"), ("rename_from", b"a"), ("rename_to", b"b"),
                     ("attrib", b"b"), ("remove", b"b"), ("create", b"end")):  # fmt: skip
        assert expected in events
    client.finish(script)
    client.send(wire.Cancel(call))
    assert client.finish(call)[0] is None


def test_recursive_watch_follows_new_and_renamed_directories(
    client: InitClient, here: bytes
) -> None:
    client.run("mkdir -p old/deep", cwd=here)
    call = client.open("files.watch", path=here, recursive=True)
    client.run(
        "mkdir -p new/er; touch new/er/f; mv old moved; touch moved/deep/g; touch end", cwd=here
    )
    names = {name for _, name in watched(client, call, b"end")}
    assert {b"new", b"new/er", b"old", b"moved", b"moved/deep/g"} <= names
    client.send(wire.Cancel(call))
    client.finish(call)
    with pytest.raises(NotFound):
        client.call("files.watch", path=here + b"/absent")


def test_watch_shows_a_write_and_not_its_temporary_file(client: InitClient, here: bytes) -> None:
    call = client.open("files.watch", path=here)
    client.call("files.write", path=here + b"/whole", data=b"x" * 100)
    client.run("touch .dsec-write-1-x .dsec-write- end", cwd=here)
    names = {name for _, name in watched(client, call, b"end")}
    assert names == {b"whole", b".dsec-write-1-x", b".dsec-write-", b"end"}
    client.send(wire.Cancel(call))
    client.finish(call)


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_forward_carries_both_ways_and_half_closes(
    client: InitClient, family: socket.AddressFamily
) -> None:
    server = socket.socket(family)
    server.bind(("127.0.0.1" if family == socket.AF_INET else "::1", 0))
    server.listen()
    call = client.open("net.forward", port=server.getsockname()[1])
    peer, _ = server.accept()
    client.send(wire.Item(call, wire.pack(b"ping")))
    assert peer.recv(10) == b"ping"
    client.send(wire.End(call))
    assert peer.recv(10) == b""
    data = os.urandom(1 << 20)
    peer.settimeout(10)
    import threading

    sender = threading.Thread(target=lambda: (peer.sendall(data), peer.close()))
    sender.start()
    _, items = client.finish(call)
    sender.join()
    assert b"".join(items) == data
    server.close()


def test_forward_to_nothing_is_unavailable(client: InitClient) -> None:
    with pytest.raises(Unavailable):
        client.finish(client.open("net.forward", port=1))
