"""Sandboxes side by side, and one after the other: none sees or changes anything of another."""

from __future__ import annotations

import hashlib
import socket
from pathlib import Path

import pytest

from libdsec import Sandbox
from libdsec.errors import NotFound
from tests.security.conftest import USER, Target, attack

pytestmark = [pytest.mark.root, pytest.mark.asyncio(loop_scope="module")]

MARK = "neighbour-7c1f"
# Everything that a process can leave for others: a name in each kind of space
PLANT = f"""
import socket, time
abstract = socket.socket(socket.AF_UNIX); abstract.bind("\\0{MARK}"); abstract.listen()
os.makedirs("/srv", exist_ok=True)
named = socket.socket(socket.AF_UNIX); named.bind("/srv/{MARK}.sock"); named.listen()
port = socket.socket(); port.bind(("127.0.0.1", 7171)); port.listen()
port6 = socket.socket(socket.AF_INET6); port6.bind(("::1", 7171)); port6.listen()
segment = call("shmget", 0x7171, 4096, 0o1666)
made = trying("mq_open", b"{MARK}", os.O_CREAT | os.O_RDWR, 0o666, 0)
for path in ("/tmp/{MARK}", "/dev/shm/{MARK}", "/etc/{MARK}"):
    open(path, "w").write("secret")
"""
LOOK = f"""
import socket
from pathlib import Path
def unix(name):
    with socket.socket(socket.AF_UNIX) as s:
        s.connect(name)
def tcp(family, host):
    with socket.socket(family) as s:
        s.settimeout(2); s.connect((host, 7171))
report(
    abstract=tried(unix, "\\0{MARK}"), named=tried(unix, "/srv/{MARK}.sock"),
    port=tried(tcp, socket.AF_INET, "127.0.0.1"), port6=tried(tcp, socket.AF_INET6, "::1"),
    shm=trying("shmget", 0x7171, 4096, 0), queue=trying("mq_open", b"{MARK}", os.O_RDWR, 0, 0),
    files=[peek(p) for p in ("/tmp/{MARK}", "/dev/shm/{MARK}", "/etc/{MARK}")],
    listed="{MARK}" in peek("/proc/net/unix"), table="29041" in peek("/proc/sysvipc/shm"),
    processes=[n for n in os.listdir("/proc") if n.isdigit() and int(n) != os.getpid()
               and "{MARK}" in peek(f"/proc/{{n}}/cmdline")],
)
"""


async def test_a_sibling_sees_nothing(target: Target) -> None:
    one, two = target.sandbox, await target.sibling()
    source = "import sys; sys.path.insert(0, '/attack')\nfrom kit import *\n" + PLANT
    await one.files.write("/attack/plant.py", source + "print(made, flush=True); time.sleep(60)\n")
    planted = await one.commands.run(["python3", "/attack/plant.py", MARK], background=True)
    async for item in planted:
        assert item.data == b"ok\n"
        break
    control, seen = await attack(one, LOOK), await attack(two, LOOK)
    assert control["files"] == ["secret"] * 3
    assert {control[k] for k in ("abstract", "named", "port", "port6", "shm", "queue")} == {"ok"}
    assert (control["listed"], control["table"], len(control["processes"])) == (True, True, 1)
    assert seen == {
        "abstract": "ECONNREFUSED", "named": "ENOENT", "port": "ECONNREFUSED",
        "port6": "ECONNREFUSED", "shm": "ENOENT", "queue": "ENOENT", "files": ["ENOENT"] * 3,
        "listed": False, "table": False, "processes": [],
    }  # fmt: skip
    await planted.kill()
    await two.stop()


async def test_signals_to_all_stay_inside(target: Target) -> None:
    """kill(-1) by root is the whole PID namespace but init, and nobody else's."""
    one, two = await target.sibling(), await target.sibling()
    bystander = await two.commands.run(["sleep", "30"], background=True)
    victim = await one.commands.run(["sleep", "30"], background=True)
    await one.run("python3", "-c", "import os; os.kill(-1, 9)")
    assert (await victim.wait()).signal == 9  # control
    assert (await one.run("echo", "alive")).stdout == "alive\n"
    assert [c.cid for c in await two.commands.list()] == [bystander.cid]
    await one.stop()
    await two.stop()


async def test_two_sandboxes_share_no_host_id(target: Target) -> None:
    two = await target.sibling()
    maps = [(await box.run("cat", "/proc/self/uid_map")).stdout for box in (target.sandbox, two)]
    spans = [tuple(int(field) for field in text.split()) for text in maps]
    (inside, base, count), (_, other, _) = spans
    assert (inside, count) == (0, 65535)
    assert abs(base - other) >= 65536
    await two.stop()


async def test_what_root_overwrites_stays_in_its_sandbox(target: Target) -> None:
    """Replaced shells and accounts reach neither the layer, nor a sibling, nor a later sandbox."""
    sibling = await target.sibling()
    store = target.daemon.state / "store"
    files = [*(store / "images").iterdir(), *(store / "blobs").iterdir()]
    before = [_digest(file) for file in files]
    assert len(before) >= 2
    evil = await target.sibling()
    script = r"""
    printf '#!/bin/false\necho owned\n' > /tmp/evil
    cp /bin/echo /tmp/echo; cat /tmp/echo > /usr/bin/id
    echo 'root::0:0::/owned:/bin/sh' > /etc/passwd
    echo /owned.so > /etc/ld.so.preload; rm -rf /usr/share/doc /usr/lib/python3/dist-packages
    chmod 4777 /usr/bin/python3.11; chown -R nobody /opt /srv
    cp /tmp/echo /usr/bin/bash.new; mv /usr/bin/bash.new /usr/bin/bash
    """
    await evil.run_shell(script)
    assert (await evil.run("bash", "-c", "id")).stdout == "-c id\n"  # control
    later = await target.sibling()
    for box in (sibling, later):
        done = await box.run_shell("id -u; grep ^root: /etc/passwd; ls /usr/share/doc | wc -l")
        uid, root, documents = done.stdout.split()
        assert (uid, root) == ("0", "root:x:0:0:root:/root:/bin/bash")
        assert int(documents) > 10
        assert not await box.files.exists("/etc/ld.so.preload")
        assert (await box.files.get_info("/usr/bin/python3.11")).mode == 0o755
        await box.stop()
    assert [_digest(file) for file in files] == before
    await evil.stop()


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


async def test_nothing_survives_in_a_recycled_id_range(target: Target) -> None:
    """A range keeps its user namespace: no binary format, key or file may wait in it."""
    first = await target.sibling()
    base = (await first.run("cat", "/proc/self/uid_map")).stdout
    formats = await attack(
        first,
        """
done = mount("none", "/mnt", "binfmt_misc")
entry = b":dsec:M::DSEC::/bin/echo:"
report(mounted=done, made=tried(lambda: open("/mnt/register", "wb", 0).write(entry)) if
       done == "ok" else done)
""",
    )
    await first.files.write("/tmp/format", b"DSEC\n", mode=0o755)
    if formats["made"] == "ok":
        assert (await first.run("/tmp/format")).stdout == "/tmp/format\n"  # control
    await first.stop()
    for _ in range(12):
        second = await target.sibling()
        if (await second.run("cat", "/proc/self/uid_map")).stdout == base:
            break
        await second.stop()
    else:
        pytest.fail("the range did not come back: nothing was tried")
    await second.files.write("/tmp/format", b"DSEC\n", mode=0o755)
    assert (await second.run_shell("/tmp/format")).stdout != "/tmp/format\n"
    assert not (await second.run_shell("ls /dev/shm /tmp | grep -v format")).stdout.count(MARK)
    await second.stop()


@pytest.mark.parametrize("user", ["root", USER])
async def test_the_hosts_loopback_is_another(box: Sandbox, user: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        socket.create_connection(("127.0.0.1", port), 2).close()  # control
        found = await attack(
            box,
            f"""
import socket
from pathlib import Path
report(tcp=tried(lambda: socket.create_connection(("127.0.0.1", {port}), 2)),
       interfaces=[name for _, name in socket.if_nameindex()])
""",
            user,
        )
    assert found == {"tcp": "ECONNREFUSED", "interfaces": ["lo"]}


async def test_a_stopped_sandboxs_files_are_gone(target: Target) -> None:
    box = await target.sibling(upper="disk") if _disk(target) else await target.sibling()
    await box.files.write("/secret", MARK)
    sandbox_id = box.id
    await box.stop()
    left = [
        path
        for folder in (target.daemon.runtime, target.daemon.state / "spool",
                       target.daemon.state / "upper")
        if folder.is_dir()
        for path in folder.rglob("*")
        if sandbox_id in str(path) or path.name == "secret"
    ]  # fmt: skip
    assert left == []
    with pytest.raises(NotFound):
        await target.client.connect("s0-t0-1-zzzzz")


def _disk(target: Target) -> bool:
    return (target.daemon.state / "upper").exists()
