"""dsec-init as PID 1 of a virtual machine, in guests of guest_lab.py.

`fresh` has not begun when a test gets it, and serves that test alone; `guest` has begun, on layers
of virtio-blk, and serves all others.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import os
import re
import secrets
import tarfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from libdsec import model, wire
from libdsec.errors import (
    DSecError,
    Internal,
    InvalidArgument,
    Unsupported,
    WrongState,
)
from tests.system.guest_lab import (
    PAUSE_S,
    Guest,
    command,
    leave,
    missing,
    receive,
    running,
    send,
    shell,
)  # fmt: skip
from tests.wire_client import WireClient

pytestmark = [
    pytest.mark.root,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(missing()), reason=missing()),
]

NETWORK = {
    "interface": "eth0",
    "addresses": ["10.0.2.15/24", "fd00::5/128"],
    "gateways": ["169.254.1.1", "fe80::1"],
    "neighbours": [["169.254.1.1", "02:d5:ec:02:00:01"], ["fe80::1", "02:d5:ec:02:00:01"]],
    "mtu": 1400,
}
RENEWED = ("files", "hostname", "time_ns", "entropy", "config")
EIGHT_MIB = 8 << 20


@pytest.fixture(scope="module")
def begun(guest_kernel: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guest]:
    async def begin(guest: Guest) -> None:
        async with guest.connected() as client:
            await client.call("vm.begin", guest.begin_args(network=NETWORK))

    with running(tmp_path_factory.mktemp("guest")) as guest:
        asyncio.run(begin(guest))
        yield guest


@pytest.fixture
async def client(begun: Guest) -> AsyncIterator[WireClient]:
    async with begun.connected() as connected:
        yield connected


@pytest.fixture(params=[False, True], ids=["blk", "pmem"])
def fresh(guest_kernel: Path, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Guest]:
    with running(tmp_path, dax=request.param) as guest:
        yield guest


@pytest.fixture
async def waiting(fresh: Guest) -> AsyncIterator[WireClient]:
    async with fresh.connected() as connected:
        yield connected


async def refused(client: WireClient, kind: type[DSecError], op: str, args: Any) -> DSecError:
    with pytest.raises(kind) as caught:
        await client.call(op, args)
    return caught.value


async def test_a_machine_begins_once_and_is_then_what_it_was_told_to_be(
    fresh: Guest, waiting: WireClient
) -> None:
    assert await waiting.call("sys.ping", {}) is None
    for op in ("sys.stats", "exec.list", "files.stat", "vm.clock", "vm.watch", "no.such"):
        assert "vm.begin" in str(await refused(waiting, WrongState, op, {}))

    config = {"caps": 0xFF, "oom_score_adj": 300, "user": "root", "env": {"FROM": "config"}}
    args = fresh.begin_args(config=msgspec.msgpack.encode(config), time_ns=1_900_000_000 * 10**9)
    reply = await waiting.call("vm.begin", args)
    assert {"layers", "upper", "overlay", "switch_root", "cgroup"} <= set(reply["steps_us"])
    assert await refused(waiting, WrongState, "vm.begin", fresh.begin_args())

    done = await shell(
        waiting,
        "cat /layers/both /layers/below /etc/hosts; hostname; date +%s; echo $FROM; uname -n;"
        "grep -E 'CapEff|CapBnd' /proc/self/status; cat /proc/self/oom_score_adj"
        " /proc/1/oom_score_adj /sys/fs/cgroup/dsec/pids.max; ulimit -c; id -u;"
        "stat -c %a / /run/a/b; grep -c ' / erofs' /proc/self/mountinfo; cat /proc/self/cgroup",
    )
    lines = done.stdout.decode().split("\n")
    assert lines[:2] == ["abovebase127.0.0.1 here", "guest"], done
    assert 0 <= int(lines[2]) - 1_900_000_000 < 60
    assert lines[3:5] == ["config", "guest"]
    assert [line.split()[1] for line in lines[5:7]] == ["00000000000000ff"] * 2
    assert lines[7:13] == ["300", "-1000", "100", "0", "0", "711"]
    assert lines[13:15] == ["600", "0"]
    assert lines[15].startswith("0::/dsec/")
    layers = (await shell(waiting, "cat /proc/mounts")).stdout.decode()
    assert "/lower/1:/lower/0" in layers
    assert "redirect_dir=on" in layers
    assert b"DAX unsupported" not in (await shell(waiting, "dmesg")).stdout


@pytest.mark.parametrize("fresh", [False], indirect=True, ids=["blk"])
async def test_what_is_wrong_with_the_arguments_is_named(fresh: Guest, waiting: WireClient) -> None:
    network = {"interface": "eth0", "addresses": ["10.0.0.1/24"], "gateways": []}
    wrong: dict[str, list[Any]] = {
        "layers": [None, [], ["/etc/passwd"], ["/dev/a"] * 33, "x"],
        "upper": [None, "vda", "/dev/"],
        "dax": [1],
        "files": [[["/etc/a", b"", 0o644]], [["a/../b", b"", 1]], [["a", b"", 0o10000]], [["a"]]],
        "hostname": [None, "x" * 65],
        "pids": [None, 0],
        "time_ns": [None, -1, 2**63],
        "entropy": [None, b"x" * 63],
        "config": [None, b"\x81\xa5wrong\x01"],
        "network": [
            network | {"interface": "x" * 20},
            network | {"addresses": ["10.0.0.1"]},
            network | {"addresses": ["10.0.0.1/33"]},
            network | {"gateways": ["10.0.0.1/8"]},
            network | {"neighbours": [["10.0.0.1"]]},
            network | {"neighbours": [["10.0.0.1", "02:d5:ec:02:00:0g"]]},
            network | {"neighbours": [["10.0.0.1", "02:d5:ec:02:00"]]},
            network | {"mtu": 67},
            network | {"more": 1},
        ],
        "reclaim": [{}, {"min_age_s": 0}, {"min_age_s": 86401}, {"min_age_s": 1, "more": 1}],
    }
    for field, values in wrong.items():
        for value in values:
            error = await refused(
                waiting, InvalidArgument, "vm.begin", fresh.begin_args(**{field: value})
            )
            assert f'"{field}' in str(error), (field, value)
    error = await refused(waiting, InvalidArgument, "vm.begin", fresh.begin_args(other=1))
    assert "does not know" in str(error)

    missing_layer = fresh.begin_args(layers=["/dev/vdb", "/dev/vdz"])
    failure = await refused(waiting, Internal, "vm.begin", missing_layer)
    assert failure.detail["reason"] == "layers"
    assert "/dev/vdz" in str(failure)
    assert "No such file" in str(failure)


async def test_operations_that_pass_descriptors_are_not_there(client: WireClient) -> None:
    for op in ("root.swap", "fncall.serve"):
        error = await refused(client, Unsupported, op, {})
        assert "descriptors" in error.detail["reason"]


async def test_commands_have_the_rights_of_root_and_none_of_our_descriptors(
    client: WireClient,
) -> None:
    done = await shell(
        client,
        "cat /proc/self/uid_map /proc/sys/kernel/cap_last_cap; grep CapEff /proc/self/status;"
        "mkdir /mnt && mount -t tmpfs none /mnt && umount /mnt && echo mounted;"
        "ls -l /proc/self/fd; for port in /dev/vport*; do cat $port; done",
    )
    out = done.stdout.decode()
    words = out.split()
    assert words[:3] == ["0", "0", "4294967295"]
    assert int(words[5], 16) == (1 << int(words[3]) + 1) - 1
    assert words[6] == "mounted"
    numbers = [line.split()[8] for line in out.splitlines() if " -> " in line]
    assert set(numbers) <= {"0", "1", "2", "3"}
    assert "vport" not in out
    assert b"vport" in done.stderr
    assert b"busy" in done.stderr


async def test_the_network_is_configured(client: WireClient) -> None:
    done = await shell(client, "ip address; ip route; ip -6 route; ip neigh; ping -c 1 127.0.0.1")
    out = done.stdout.decode()
    assert done.exit_code == 0, done
    assert "inet 10.0.2.15/24" in out
    assert "inet6 fd00::5/128" in out
    assert "tentative" not in out.split("fd00::5")[1].split("\n")[0]
    assert "default via 169.254.1.1 dev eth0" in out
    assert "default via fe80::1 dev eth0" in out
    for gateway in ("169.254.1.1", "fe80::1"):
        neighbour = re.escape(f"{gateway} dev eth0 lladdr 02:d5:ec:02:00:01 ")
        assert re.search(neighbour + ".*PERMANENT", out)
    assert "mtu 1400" in out
    assert "inet 127.0.0.1/8" in out


async def test_the_clock_can_be_set_again(client: WireClient) -> None:
    clock = {"time_ns": 2_000_000_000 * 10**9, "entropy": secrets.token_bytes(64)}
    assert await client.call("vm.clock", clock) is None
    done = await shell(client, "date +%s")
    assert 0 <= int(done.stdout) - 2_000_000_000 < 60
    for bad in ({"time_ns": 1}, {"entropy": b"x" * 64}, {**clock, "more": 1}):
        await refused(client, InvalidArgument, "vm.clock", bad)


async def test_input_and_files(client: WireClient) -> None:
    run = client.open("exec.run", command("tr a-z A-Z; exit 3", stdin=True, cid="tr"))
    for data, eof in ((b"one ", False), (b"two", True)):
        await client.call("exec.stdin", model.StdinArgs(cid="tr", data=data, eof=eof))
    result = await run.answer(model.CommandResult)
    out = result.stdout or (await run.item(model.Output)).data
    assert (out, result.exit_code) == (b"ONE TWO", 3)

    path = {"path": b"/root/file"}
    await client.call("files.write", {**path, "data": b"in the upper", "mode": 0o640})
    assert (await client.call("files.read", path))["data"] == b"in the upper"
    assert (await client.call("files.stat", path))["mode"] == 0o640
    found = await client.call("files.stat", {"path": b"/etc/resolv.conf", "follow": False})
    assert found["target"] == b"/run/of-the-image"


async def test_sessions_terminals_watches_and_forwards(client: WireClient) -> None:
    await client.call("session.open", {"name": "s"})
    await shell(client, "cd /etc; kept=yes", session="s")
    assert (await shell(client, "pwd; echo $kept", session="s")).stdout == b"/etc\nyes\n"
    await client.call("session.close", {"name": "s"})

    pty = model.PtySize(rows=30, cols=90)
    assert b"30 90" in (await shell(client, "stty size", pty=pty)).stdout

    watch = client.open("files.watch", {"path": b"/root"})
    await client.call("files.write", {"path": b"/root/seen", "data": b""})
    assert (await watch.item(model.WatchEvent)).name == b"seen"
    watch.cancel()
    await watch.answer()

    server = command("nc -l -p 7777 -e tr a-z A-Z", cid="server", background=True)
    await client.call("exec.start", server)
    await shell(client, "until netstat -ltn | grep -q :7777; do sleep 0.1; done", timeout_s=30.0)
    forward = client.open("net.forward", {"port": 7777})
    await send(forward, b"through the guest")
    assert await receive(forward) == b"THROUGH THE GUEST"


async def test_a_full_disk_is_told_apart(client: WireClient) -> None:
    done = await shell(client, "head -c 60000000 /dev/zero >/root/big", timeout_s=100.0)
    assert done.exit_code != 0
    assert done.disk_full
    await client.call("files.remove", {"path": b"/root/big"})
    assert not (await shell(client, "echo x >/root/small; exit 1")).disk_full


def archive(data: bytes) -> bytes:
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as tar:
        member = tarfile.TarInfo("data")
        member.size = len(data)
        tar.addfile(member, io.BytesIO(data))
    return raw.getvalue()


def unpacked(raw: bytes) -> bytes:
    with tarfile.open(fileobj=io.BytesIO(raw)) as tar:
        content = tar.extractfile("data")
        assert content is not None
        return content.read()


async def test_large_transfers_in_both_directions_at_once(client: WireClient) -> None:
    data, other = os.urandom(EIGHT_MIB), os.urandom(EIGHT_MIB)
    upload = client.open("files.upload", {"path": b"/root/first"})
    await send(upload, archive(data))
    await upload.answer(timeout_s=60)

    upload = client.open("files.upload", {"path": b"/root/second"})
    download = client.open("files.download", {"path": b"/root/first"})
    received, _ = await asyncio.wait_for(
        asyncio.gather(receive(download), send(upload, archive(other))), 120
    )
    await upload.answer(timeout_s=60)
    assert unpacked(received) == data
    again = client.open("files.download", {"path": b"/root/second"})
    assert unpacked(await receive(again)) == other
    await shell(client, "rm -r /root/first /root/second")


async def test_a_reader_that_stops_holds_up_nobody(client: WireClient) -> None:
    """Its output waits in the spool; other calls on the connection are answered."""
    deaf = client.open("exec.run", command("head -c 6000000 /dev/zero", stream=True))
    await asyncio.sleep(1)
    assert (await shell(client, "echo still here")).stdout == b"still here\n"
    total = len(b"".join([item.data async for item in deaf.stream(model.Output)]))
    assert total == 6_000_000


async def test_a_timeout_kills_the_tree(client: WireClient) -> None:
    done = await shell(client, "sleep 1000 & sleep 1000", timeout_s=1.0)
    assert done.timed_out
    gone = "while grep -aqs 'sleep.100[0]' /proc/[0-9]*/cmdline; do sleep 0.1; done; echo none"
    assert (await shell(client, gone, timeout_s=20.0)).stdout == b"none\n"


async def test_no_more_processes_than_were_allowed(client: WireClient) -> None:
    # ended by the image's shell, whose first fork that fails is its last command
    text = (
        'sh -c \'trap "kill \\$pids; wait" EXIT;'
        ' for i in $(seq 150); do sleep 1000 & pids="$pids $!"; done\''
    )
    done = await shell(client, text, timeout_s=60.0)
    assert b"Resource temporarily unavailable" in done.stderr
    assert (await shell(client, "echo after")).stdout == b"after\n"


async def test_an_oom_kill_is_told_before_the_result_of_its_command(client: WireClient) -> None:
    watch = client.open("vm.watch", {})
    before = (await watch.item())["oom_kills"]
    done = await shell(client, "tail /dev/zero; echo $?", timeout_s=100.0)
    assert done.stdout == b"137\n"
    assert watch.items.qsize() >= 1, "the count came after the result"
    assert (await watch.item())["oom_kills"] > before
    await refused(client, DSecError, "vm.watch", {})
    watch.cancel()
    assert await watch.answer() is None
    assert await client.call("sys.ping", {}) is None


async def test_a_copied_machine_becomes_one_of_its_own(begun: Guest, client: WireClient) -> None:
    told = begun.begin_args(
        files=[["etc/machine-id", b"another\n", 0o444]],
        hostname="another",
        network={**NETWORK, "addresses": ["10.0.2.77/24", "fd00::7/128"]},
        time_ns=1_900_000_000 * 10**9,
        config=msgspec.msgpack.encode({"sandbox": "another", "env": {"WHO": "another"}}),
    )
    renewed = {name: told[name] for name in (*RENEWED, "network")}
    await client.call("exec.start", command("sleep 600", cid="before", background=True))
    reply = await client.call("vm.renew", renewed)
    assert list(reply["steps_us"]) == ["time", "entropy", "files", "hostname", "network"]
    for _ in range(2):  # it may be called again
        seen = (
            "hostname; cat /etc/machine-id; echo $WHO; date +%Y; ip address; ip route; ip -6 route"
        )
        out = (await shell(client, seen)).stdout.decode()
        assert out.split()[:4] == ["another", "another", "another", "2030"]
        assert "inet 10.0.2.77/24" in out
        assert "inet6 fd00::7/128" in out
        assert "10.0.2.15" not in out
        assert "fd00::5" not in out
        assert out.count("default via 169.254.1.1") == 1
        assert out.count("default via fe80::1") == 1
        await client.call("vm.renew", renewed)
    found = await client.call("exec.list", {})
    assert "before" in [one["cid"] for one in found if one["running"]], "its processes go on"
    await client.call("exec.kill", {"cid": "before"})
    for name in ("hostname", "entropy", "config"):
        lacking = {field: value for field, value in renewed.items() if field != name}
        assert name in str(await refused(client, InvalidArgument, "vm.renew", lacking))
    former = begun.begin_args(network=NETWORK)
    await client.call("vm.renew", {name: former[name] for name in (*RENEWED, "network")})


async def test_a_command_outlives_the_connection(begun: Guest) -> None:
    first = await begun.connect()
    first.open("exec.run", command("for i in 1 2 3 4 5 6; do echo $i; sleep 0.5; done", cid="long"))
    await first.call("sys.ping", {})  # answered behind it: it has begun
    await asyncio.sleep(0.7)
    await leave(first)
    second = await begun.connect()
    attach = second.open("exec.attach", {"cid": "long"})
    out = b"".join([item.data async for item in attach.stream(model.Output)])
    result = await attach.answer(model.CommandResult)
    assert out + result.stdout == b"1\n2\n3\n4\n5\n6\n"
    assert result.exit_code == 0
    await leave(second)


async def test_a_host_that_came_for_another_unseen_starts_clean(begun: Guest) -> None:
    """Both the going and the coming are there when the machine goes on, and may be seen as none."""
    first = await begun.connect()
    first.open("exec.run", command("sleep 1000", cid="unseen"))
    watch = first.open("vm.watch", {})
    await watch.item()
    with begun.frozen():
        await leave(first)
        coming = asyncio.ensure_future(begun.connect())
        await asyncio.sleep(0.3)
    second = await coming
    call = second.open("exec.list", {})
    assert call.id == 1, "the number of a call that was open before"
    assert "unseen" in str(await call.answer())
    assert await second.open("vm.watch", {}).item()
    await second.call("exec.kill", {"cid": "unseen"})
    await leave(second)


@pytest.mark.parametrize("left", ["half a frame", "a call", "no frame"])
async def test_what_a_host_left_behind_does_no_harm(begun: Guest, left: str) -> None:
    reader, writer = await begun.open()
    request = wire.encode(wire.Request(1, "exec.run", wire.pack({"cid": "x", "shell": b"true"})))
    if left == "half a frame":
        writer.write(request[: len(request) // 2])
    elif left == "a call":
        writer.write(wire.encode(wire.Request(1, "files.upload", wire.pack({"path": b"/root/u"}))))
    else:
        writer.write(b"\xff" * 100_000)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1):
                assert not await reader.read(1), "what breaks the protocol is not answered"
    await asyncio.sleep(0.1)
    writer.transport.abort()
    await asyncio.sleep(PAUSE_S)
    async with begun.connected() as client:
        assert (await shell(client, "echo clean")).stdout == b"clean\n"


async def test_a_pack_that_was_cut_off_is_over(begun: Guest) -> None:
    """Nothing stays frozen, and the next one begins at the beginning."""
    first = await begun.connect()
    text = "head -c 8000000 /dev/urandom >/root/packed; md5sum /root/packed"
    made = (await shell(first, text)).stdout
    pack = first.open("vm.pack", {})
    assert await anext(pack.stream())
    await refused(first, WrongState, "vm.pack", {})
    await leave(first)
    async with begun.connected() as client:
        assert (await shell(client, "md5sum /root/packed")).stdout == made
        raw = await receive(client.open("vm.pack", {}))
        with tarfile.open(fileobj=io.BytesIO(raw)) as tar:
            packed = tar.extractfile("./root/packed")
            assert packed is not None
            assert hashlib.md5(packed.read()).hexdigest() == made.decode().split()[0]
        await client.call("files.remove", {"path": b"/root/packed"})


async def test_nothing_is_done_while_no_host_is_there(begun: Guest) -> None:
    async def ticks() -> int:
        async with begun.connected() as client:
            text = (await shell(client, "cat /proc/1/stat")).stdout.decode()
        user, system = text.rpartition(")")[2].split()[11:13]
        return int(user) + int(system)

    before = await ticks()
    await asyncio.sleep(3)
    assert await ticks() - before < 100, "a busy loop takes 300 ticks of 10 ms"


async def test_one_host_after_the_other(begun: Guest) -> None:
    for number in range(10):
        async with begun.connected() as client:
            assert (await shell(client, f"echo {number}")).stdout == b"%d\n" % number
