"""Networks of microVMs, end to end: what a guest reaches, with rules and without, by any packet.

A guest's root does what it likes to its kernel; what counts is what arrives in the world.
"""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from dsecd.host import network_veth
from libdsec import DSecClient, DSecMicroVMRunArgs, Sandbox
from libdsec.errors import Unsupported
from tests.system.compat.debian import IMAGE
from tests.system.daemon import Daemon
from tests.system.network_lab import datagrams, in_namespace
from tests.system.world_lab import World, housed, world

pytestmark = [
    pytest.mark.root,
    pytest.mark.needs("bpf_cgroup", "bpf_fs", "veth", "nftables"),
    pytest.mark.asyncio,
]
GOOD, GOOD6, OTHER, OTHER6 = "203.0.113.10", "2600:db8::10", "203.0.113.99", "2600:db8::99"
ONLY_GOOD: dict[str, Any] = {
    "network": {"rules": [{"allow": "good.example", "private": True, "ports": [80]}]}
}
BY_NUMBER: dict[str, Any] = {"network": {"rules": [{"allow": OTHER, "ports": [80]}]}}
DROPPED_S, ANSWERED_S = 2.0, 20.0  # waited for an answer that must not come, and that must
CONNECT = """
import json, socket, sys
out = {}
for word, patience_s in zip(sys.argv[1::2], sys.argv[2::2]):
    host, _, port = word.rpartition("/")
    try:
        with socket.create_connection((host, int(port)), timeout=float(patience_s)) as c:
            out[word] = c.makefile().readline().strip()
    except socket.gaierror as error:
        out[word] = "no name"
    except TimeoutError:
        out[word] = "dropped"
    except OSError as error:
        out[word] = error.strerror or str(error)
print(json.dumps(out))
"""
# frames as the guest's root makes them, past its own kernel's tables and filters
RAW = """
import socket, struct, sys
gateway, own = bytes.fromhex(sys.argv[1]), sys.argv[2]
def checksum(data):
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF
def frame(source, target, port, text):
    udp = struct.pack("!HHHH", 4000, port, 8 + len(text), 0) + text
    head = struct.pack("!BBHHHBBH4s4s", 0x45, 0, 20 + len(udp), 1, 0, 64, 17, 0,
                       socket.inet_aton(source), socket.inet_aton(target))
    head = head[:10] + struct.pack("!H", checksum(head)) + head[12:]
    return gateway + bytes(6) + b"\\x08\\0" + head + udp
with socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as raw:
    raw.bind(("eth0", 0))
    for word in sys.argv[3:]:
        source, target, port, text = word.split(",")
        raw.send(frame(source or own, target, int(port), text.encode()))
    raw.send(gateway + bytes(6) + b"\\x88\\xb5" + b"of no protocol" * 4)
"""


@pytest.fixture
def internet() -> Iterator[World]:
    with world() as made:
        made.names = {"good.example": [GOOD, GOOD6], "bad.example": [OTHER]}
        for version in (4, 6):
            made.serve(80, version)
        made.serve(81)
        yield made


@pytest.fixture
def heard(internet: World) -> Iterator[socket.socket]:
    """Datagrams for port 80 of any address."""
    with datagrams(internet.world, "0.0.0.0", 80) as opened:
        yield opened


@pytest_asyncio.fixture
async def host(internet: World, guest_kernel: Path) -> AsyncIterator[Daemon]:
    async with housed(internet, vm={"enabled": "yes", "kernel": str(guest_kernel)}) as made:
        yield made


async def make(client: DSecClient, policy: dict[str, Any] | None, **more: Any) -> Sandbox:
    args = DSecMicroVMRunArgs(
        image=IMAGE, memory_limit_mb=256, disk_limit_mb=64, layers="block", policy=policy, **more
    )
    return await client.run_microvm(args, timeout=120)


async def connect(sandbox: Sandbox, expected: dict[str, str]) -> None:
    """Have a TCP connection to each ``HOST/PORT`` come to what is expected."""
    words = []
    for place, answer in expected.items():
        words += [place, str(DROPPED_S if answer == "dropped" else ANSWERED_S)]
    result = await sandbox.commands.run(["python3", "-c", CONNECT, *words])
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout) == expected


async def send_raw(sandbox: Sandbox, *packets: str) -> None:
    """Send ``SOURCE,TARGET,PORT,TEXT``; no source is the guest's own."""
    own = (await sandbox.get_info()).address
    gateway = network_veth.TAP_MAC.hex()
    result = await sandbox.commands.run(["python3", "-c", RAW, gateway, own, *packets])
    assert result.exit_code == 0, result.stderr


def texts(sock: socket.socket, last: bytes = b"") -> set[bytes]:
    """Return what arrived until it is quiet; `last` is waited for, if it is given."""
    found = set[bytes]()
    with contextlib.suppress(TimeoutError):
        while True:
            sock.settimeout(ANSWERED_S if last and last not in found else 0.5)
            found.add(sock.recv(2048))
    return found


async def test_rules_hold_for_whatever_a_guest_sends(
    internet: World, host: Daemon, heard: socket.socket
) -> None:
    async with DSecClient(f"unix:{host.socket}") as client:
        sandbox = await make(client, ONLY_GOOD)
        info = await sandbox.get_info()
        names = await sandbox.files.read("/etc/resolv.conf")
        assert names.startswith(f"nameserver {network_veth.RESOLVER}\n")
        # before its name was asked for, an address is no more than any other
        early = (f"{GOOD}/80", f"{OTHER}/80", f"{OTHER6}/80")
        await connect(sandbox, dict.fromkeys(early, "dropped"))
        await connect(sandbox, {
            "good.example/80": GOOD, f"{GOOD6}/80": GOOD6, "good.example/81": "dropped",
            "bad.example/80": "no name",
        })  # fmt: skip
        assert "bad.example" not in internet.asked

        await send_raw(sandbox, f",{GOOD},80,denied protocol", f",{OTHER},80,denied address")
        assert texts(heard) == set()
        pings = await sandbox.run_shell(f"ping -c 1 -W 1 {GOOD} || ping -6 -c 1 -W 1 {GOOD6}")
        assert pings.exit_code != 0

        # another policy, while the guest runs
        await sandbox.update_network(policy=BY_NUMBER)
        await connect(sandbox, {
            f"{GOOD}/80": "dropped", f"{OTHER}/80": OTHER, "good.example/80": "no name",
        })  # fmt: skip
        rules = {"network": {"rules": [{"allow": OTHER, "protocol": "udp", "ports": [80]}]}}
        await sandbox.update_network(policy=rules)
        await send_raw(sandbox, f"203.0.113.7,{OTHER},80,foreign", f",{OTHER},80,own")
        assert texts(heard, b"own") == {b"own"}
        assert (await sandbox.get_info()).address == info.address
        with pytest.raises(Unsupported, match="check_names"):
            await sandbox.update_network(policy={"network": {"check_names": True, "rules": []}})

        # the network is the kernel's: nothing of it ends with the daemon
        await sandbox.update_network(policy=BY_NUMBER)
        host.kill()
        await host.start()
    async with DSecClient(f"unix:{host.socket}") as client:
        (sandbox,) = [await client.get_sandbox(info.id)]
        await connect(sandbox, {f"{OTHER}/80": OTHER, f"{GOOD}/80": "dropped"})
        await sandbox.update_network(policy=ONLY_GOOD)
        await connect(sandbox, {"good.example/80": GOOD, f"{OTHER}/80": "dropped"})
        await sandbox.stop()
    links = in_namespace(internet.host, socket.if_nameindex)
    assert {name for _, name in links} == {"lo", "up0"}


async def test_a_guest_without_rules_reaches_what_the_host_does(
    internet: World, host: Daemon, heard: socket.socket
) -> None:
    async with DSecClient(f"unix:{host.socket}") as client:
        sandbox = await make(client, None, network="nat")
        await connect(sandbox, {f"{GOOD}/80": GOOD, f"{GOOD6}/80": GOOD6, "bad.example/80": OTHER})
        await send_raw(sandbox, f"203.0.113.7,{OTHER},80,foreign", f",{OTHER},80,own")
        assert texts(heard, b"own") == {b"own"}

        await sandbox.update_network(policy=ONLY_GOOD)
        await connect(sandbox, {
            "good.example/80": GOOD, f"{OTHER}/80": "dropped", "bad.example/80": "no name",
        })  # fmt: skip
        await sandbox.stop()
