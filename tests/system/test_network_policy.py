"""Network policies of real sandboxes, end to end: names, numbers, updates, events, restarts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from libdsec import DSecClient, DSecContainerRunArgs, Sandbox
from libdsec.model import Event
from tests.system.compat.debian import IMAGE
from tests.system.daemon import Daemon, until
from tests.system.user_view import first_process
from tests.system.world_lab import World, housed, is_pinned, world

pytestmark = [
    pytest.mark.root,
    pytest.mark.needs("bpf_cgroup", "bpf_fs", "veth", "nftables"),
    pytest.mark.asyncio,
]
GOOD, GOOD6, OTHER = "203.0.113.10", "2600:db8::10", "203.0.113.99"
ONLY_GOOD = {"network": {"rules": [{"allow": "good.example", "private": True, "ports": [80]}]}}
ALL_OF_GOOD = {"network": {"rules": [{"allow": GOOD, "ports": [9, 80]}]}}
CLOSED: dict[str, Any] = {"network": {}}
MANY = 150  # more than are cut at once
PROBE = """
import json, socket, sys
out = {}
for word in sys.argv[1:]:
    host, _, port = word.rpartition("/")
    try:
        with socket.create_connection((host, int(port)), timeout=3) as c:
            out[word] = c.makefile().readline().strip()
    except socket.gaierror as error:
        out[word] = socket.EAI_NONAME == error.errno and "NXDOMAIN" or str(error)
    except OSError as error:
        out[word] = error.strerror or str(error)
print(json.dumps(out))
"""
DENIED = "Operation not permitted"
DNS_TAKEN = "3500007F:0035 00000000:0000 0A"  # who listens at 127.0.0.53:53, in /proc/net/tcp


@pytest.fixture
def internet() -> Iterator[World]:
    with world() as made:
        made.names = {"good.example": [GOOD, GOOD6], "bad.example": [OTHER]}
        for version in (4, 6):
            made.serve(80, version)
        made.serve(81)
        yield made


@pytest_asyncio.fixture
async def host(internet: World) -> AsyncIterator[Daemon]:
    async with housed(internet) as made:
        yield made


async def make(client: DSecClient, policy: dict[str, Any] | None, **more: Any) -> Sandbox:
    args = DSecContainerRunArgs(
        container_image=IMAGE, memory_limit_mb=256, disk_limit_mb=64, policy=policy, **more
    )
    return await client.run_container(args, timeout=60)


async def reached(sandbox: Sandbox, *places: str) -> dict[str, str]:
    """Return what came of a TCP connection to each ``HOST/PORT``."""
    done = await sandbox.run("python3", "-c", PROBE, *places, timeout=60)
    assert done.ok, done.stderr
    found: dict[str, str] = json.loads(done.stdout)
    return found


async def test_an_allowed_name_opens_its_port_and_nothing_else(
    client: DSecClient, internet: World
) -> None:
    sandbox = await make(client, ONLY_GOOD)
    assert await reached(sandbox, f"{GOOD}/80") == {f"{GOOD}/80": DENIED}  # not asked for yet
    found = await reached(
        sandbox, "good.example/80", "good.example/81", "bad.example/80", f"{OTHER}/80",
        f"{GOOD}/80", f"{GOOD6}/80", f"::ffff:{GOOD}/80", f"::ffff:{OTHER}/80", "192.0.2.53/53",
    )  # fmt: skip
    assert found == {
        "good.example/80": GOOD6, "good.example/81": DENIED, "bad.example/80": "NXDOMAIN",
        f"{OTHER}/80": DENIED, f"{GOOD}/80": GOOD, f"{GOOD6}/80": GOOD6,
        f"::ffff:{GOOD}/80": GOOD, f"::ffff:{OTHER}/80": DENIED, "192.0.2.53/53": DENIED,
    }  # fmt: skip
    assert set(internet.asked) == {"good.example"}


async def test_dns_carries_nothing_out_with_the_network_closed(
    client: DSecClient, internet: World
) -> None:
    sandbox = await make(client, CLOSED, network="nat")
    names = [f"{n:02x}.leak.example" for n in range(20)]
    found = await reached(sandbox, *(f"{name}/80" for name in names), "192.0.2.53/53")
    assert {found.pop("192.0.2.53/53")} == {DENIED}
    assert set(found.values()) == {"NXDOMAIN"}
    assert internet.asked == []


async def test_an_update_cuts_what_it_does_not_allow(client: DSecClient) -> None:
    sandbox = await make(client, ONLY_GOOD)
    talk = (
        "import socket, sys\nc = socket.create_connection(('good.example', 80), 5)\n"
        "f = c.makefile('rw')\nprint(f.readline(), end='', flush=True)\n"
        "for line in sys.stdin:\n"
        "  try:\n    f.write(line); f.flush(); print(f.readline(), end='', flush=True)\n"
        "  except OSError as e: print(e.strerror, flush=True); break\n"
    )
    command = await sandbox.commands.run(["python3", "-c", talk], background=True, stdin=True)
    said = aiter(command)
    assert (await anext(said)).data.decode() == f"{GOOD6}\n"
    await command.send_stdin(b"one\n")
    assert (await anext(said)).data == b"one\n"
    await sandbox.update_network(policy=CLOSED)
    await command.send_stdin(b"two\n")
    assert (await anext(said)).data == b"Software caused connection abort\n"
    assert (await reached(sandbox, "good.example/80"))["good.example/80"] == "NXDOMAIN"
    assert (await reached(sandbox, f"{GOOD}/80"))[f"{GOOD}/80"] == DENIED
    await sandbox.update_network(policy=ONLY_GOOD)
    assert (await reached(sandbox, "good.example/80"))["good.example/80"] == GOOD6


async def test_an_update_cuts_all_of_many_connections(client: DSecClient) -> None:
    sandbox = await make(client, ALL_OF_GOOD)
    hold = (
        "import socket, sys\n"
        f"held = [socket.create_connection(('{GOOD}', 80)) for _ in range({MANY})]\n"
        "for _ in range(20):\n"
        "  sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
        f"  sock.connect(('{GOOD}', 9)); held.append(sock)\n"
        "print('up', flush=True)\nsys.stdin.readline()\n"
        "print(sum(each.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 103 for each in held))\n"
    )
    command = await sandbox.commands.run(["python3", "-c", hold], background=True, stdin=True)
    said = aiter(command)
    assert (await anext(said)).data == b"up\n"
    await sandbox.update_network(policy=CLOSED)
    await command.send_stdin(b"\n")
    assert (await anext(said)).data.decode() == f"{MANY + 20}\n"


async def test_rules_can_be_given_to_a_sandbox_that_had_none(client: DSecClient) -> None:
    sandbox = await make(client, None, network="nat")
    assert (await reached(sandbox, "bad.example/80", f"{OTHER}/81")) == {
        "bad.example/80": OTHER, f"{OTHER}/81": OTHER,
    }  # fmt: skip
    await sandbox.update_network(policy=ONLY_GOOD)
    assert await reached(sandbox, "good.example/80", "bad.example/80", f"{OTHER}/81") == {
        "good.example/80": GOOD6, "bad.example/80": "NXDOMAIN", f"{OTHER}/81": DENIED,
    }  # fmt: skip


async def test_a_port_scan_shows(client: DSecClient) -> None:
    sandbox = await make(client, ONLY_GOOD)
    seen: list[Event] = []

    async def listen() -> None:
        async for event in client.events(sandbox.id):
            seen.append(event)

    def denied() -> list[dict[str, str]]:
        return [event.detail for event in seen if event.kind == "denied"]

    def scanned() -> set[str]:
        of_other = (d for d in denied() if d.get("address") == OTHER)
        return {d["port"] for d in of_other if d["protocol"] == "tcp"}

    def names() -> set[str]:
        return {d["name"] for d in denied() if d["where"] == "name"}

    task = asyncio.create_task(listen())
    await asyncio.sleep(0.2)
    try:
        await reached(sandbox, *(f"{OTHER}/{port}" for port in range(1, 31)), "bad.example/80")
        # those of calls and those of names come by different ways, in any order
        await until(lambda: len(scanned()) >= 30 and names())
    finally:
        task.cancel()
    assert scanned() == {str(port) for port in range(1, 31)}
    assert names() == {"bad.example."}
    assert (await sandbox.get_metrics()).denied >= 30


async def test_the_policy_outlives_a_killed_daemon(
    client: DSecClient, host: Daemon, internet: World
) -> None:
    sandbox = await make(client, ONLY_GOOD)
    script = (
        "import socket, time\nsocket.create_connection(('good.example', 80))\n"
        "print('up', flush=True)\n"
        f"while True:\n  s = socket.socket(); r = s.connect_ex(('{OTHER}', 80)); s.close()\n"
        "  if r != 1: print('open', r, flush=True)\n  time.sleep(0.002)\n"
    )
    command = await sandbox.commands.run(["python3", "-c", script], background=True)
    said = aiter(command)
    assert (await anext(said)).data == b"up\n"
    host.kill()
    assert is_pinned(host.runtime)
    await asyncio.sleep(0.3)
    await host.start()
    assert await reached(sandbox, "good.example/80", f"{OTHER}/80", "bad.example/80") == {
        "good.example/80": GOOD6, f"{OTHER}/80": DENIED, "bad.example/80": "NXDOMAIN",
    }  # fmt: skip
    await sandbox.update_network(policy=CLOSED)
    await host.restart()
    assert await reached(sandbox, "good.example/80", f"{GOOD}/80") == {
        "good.example/80": "NXDOMAIN", f"{GOOD}/80": DENIED,
    }  # fmt: skip
    await command.kill()
    rest = [item.data async for item in said]
    assert rest == []


async def test_who_takes_the_resolver_s_place_while_it_is_away_gets_no_names(
    client: DSecClient, host: Daemon
) -> None:
    sandbox = await make(client, ONLY_GOOD)
    script = (
        "import socket, time\n"
        "s = [socket.socket(socket.AF_INET, kind) for kind in (1, 2)]\n"
        "for each in s:\n"
        "  each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)\n"
        "  while True:\n"
        "    try: each.bind(('127.0.0.53', 53)); break\n"
        "    except OSError: time.sleep(0.001)\n"
        "s[0].listen(); print('mine', flush=True); time.sleep(99)\n"
    )
    command = await sandbox.commands.run(["python3", "-c", script], background=True)
    inside = first_process(host, sandbox.id)
    host.kill()
    await until(lambda: DNS_TAKEN in Path(f"/proc/{inside}/net/tcp").read_text())
    await host.start()
    assert (await anext(aiter(command))).data == b"mine\n"
    assert (await reached(sandbox, f"{OTHER}/80"))[f"{OTHER}/80"] == DENIED
    await sandbox.update_network(policy=CLOSED)


async def test_nothing_is_pinned_after_the_end(host: Daemon, client: DSecClient) -> None:
    await make(client, ONLY_GOOD)
    assert is_pinned(host.runtime)
    await host.end()
    assert not is_pinned(host.runtime)
    await host.start()
