"""Checked names end to end: a real dsecd and sandbox, and servers that share one address.

The servers answer for every name, as a content network does: only the relay stands between a
sandbox and the names that its policy does not allow.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from dsecd.secrets.authority import Authority
from libdsec import DSecClient, DSecContainerRunArgs, Sandbox
from libdsec.errors import Unavailable
from libdsec.model import Event
from tests.system.compat.debian import IMAGE
from tests.system.daemon import Daemon, until
from tests.system.network_lab import listen
from tests.system.user_view import by_node, get_at_once
from tests.system.world_lab import World, housed, world

pytestmark = [
    pytest.mark.root,
    pytest.mark.needs("bpf_cgroup", "bpf_fs", "veth", "nftables"),
    pytest.mark.asyncio,
]
HOST, OTHER = "api.example.com", "evil.example.org"
ADDRESS = "203.0.113.20"
CHECKED: dict[str, Any] = {
    "network": {"check_names": True, "rules": [{"allow": HOST, "private": True}]}
}
UNCHECKED: dict[str, Any] = {"network": {"rules": [{"allow": HOST, "private": True}]}}
ELSE: dict[str, Any] = {
    "network": {"check_names": True, "rules": [{"allow": "else.example.com", "private": True}]}
}
# each argument is PORT:NAME, of whom the server is asked at the address of api.example.com, or
# PORT:NAME:ADDRESS
ASK = """
import socket, ssl, sys
context = ssl.create_default_context()
context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
for text in sys.argv[1:]:
    port, name, *where = text.split(":")
    try:
        c = socket.create_connection((where[0] if where else "api.example.com", int(port)), 10)
        if port == "443":
            c = context.wrap_socket(c, server_hostname=name or None)
        c.sendall(f"GET / HTTP/1.1\\r\\nHost: {name}\\r\\nConnection: close\\r\\n\\r\\n".encode())
        said = b""
        while data := c.recv(65536): said += data
        print(said.split(b"\\r\\n")[0].decode()[9:12], said.rpartition(b"\\n")[2].decode())
    except ssl.SSLError as error: print("alert", error.reason)
    except OSError as error: print("failed", error.strerror or error)
"""
HOLD = """
import socket, ssl
c = socket.create_connection(("api.example.com", 443), 10)
context = ssl.create_default_context()
context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
c = context.wrap_socket(c, server_hostname="api.example.com")
c.sendall(b"GET /hold HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n")
got = c.recv(4096)
c.settimeout(None)  # what ends it is told from what takes long
print(len(got) > 0, flush=True)
try:
    while c.recv(4096): pass
except OSError: pass
print("ended", flush=True)
"""

TAKE = """
import socket, time
listening = socket.create_server(("", 443))
print("taken", flush=True)
time.sleep(100)
"""


class Network:
    """Servers of all names at one address; `seen` are the names that came, by SNI or Host."""

    def __init__(self, directory: Path) -> None:
        self.seen: list[str | None] = []
        self.context = Authority.load(directory).context(HOST)
        self.context.sni_callback = lambda _sock, name, _context: self.seen.append(name)
        self._servers: list[asyncio.Server] = []
        self._serving: set[asyncio.Task[Any]] = set()
        self._release = asyncio.Event()

    async def start(self, fd: int) -> None:
        for port, context in ((443, self.context), (80, None)):
            sock = listen(fd, ADDRESS, port)
            sock.setblocking(False)
            wait_s = 1.0 if context else None  # a client that was cut off never answers
            self._servers.append(
                await asyncio.start_server(
                    self._serve, sock=sock, ssl=context, ssl_shutdown_timeout=wait_s
                )
            )

    async def close(self) -> None:
        self._release.set()
        for server in self._servers:
            server.close()
        await asyncio.gather(*self._serving)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            if writer.get_extra_info("ssl_object") is None:
                self.seen.append(head.lower().split(b"host: ")[1].split(b"\r\n")[0].decode())
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nyes")
            if b"/hold" in head:
                await self._release.wait()
            writer.write(b"!")
            await writer.drain()
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.close()
            with contextlib.suppress(OSError, asyncio.CancelledError):
                await writer.wait_closed()


@pytest.fixture
def internet() -> Iterator[World]:
    with world() as made:
        made.names = {name: [ADDRESS] for name in (HOST, OTHER, "else.example.com")}
        yield made


@pytest_asyncio.fixture
async def network(internet: World, tmp_path: Path) -> AsyncIterator[Network]:
    made = Network(tmp_path / "public")
    await made.start(internet.world)
    yield made
    await made.close()


@pytest_asyncio.fixture
async def host(internet: World, network: Network) -> AsyncIterator[Daemon]:
    async with housed(internet) as made:
        yield made


async def make(client: DSecClient, policy: dict[str, Any] | None = None) -> Sandbox:
    args = DSecContainerRunArgs(
        container_image=IMAGE, memory_limit_mb=512, disk_limit_mb=64, policy=policy or CHECKED
    )
    return await client.run_container(args, timeout=60)


async def asked(sandbox: Sandbox, *questions: str) -> list[str]:
    done = await sandbox.run("python3", "-c", ASK, *questions, timeout=60)
    assert done.ok, done.stderr
    return str(done.stdout).splitlines()


async def resolved(sandbox: Sandbox, name: str) -> list[str]:
    done = await sandbox.run("getent", "ahostsv4", name)
    return sorted({line.split()[0] for line in str(done.stdout).splitlines()})


async def test_only_allowed_names_are_reached_at_a_shared_address(
    client: DSecClient, network: Network
) -> None:
    events: list[Event] = []

    async def listen_to_all() -> None:
        async for event in client.events():
            events.append(event)

    listening = asyncio.create_task(listen_to_all())
    sandbox = await make(client)
    assert await asked(sandbox, f"443:{HOST}", f"80:{HOST}") == ["200 yes!"] * 2
    assert network.seen == [HOST, HOST]
    alert, refused, nameless = await asked(sandbox, f"443:{OTHER}", f"80:{OTHER}", "443:")
    assert alert == nameless == "alert TLSV1_UNRECOGNIZED_NAME"
    assert refused.startswith("403 ")
    assert network.seen == [HOST, HOST]
    for _ in range(100):
        found = [event.detail for event in events if event.detail.get("where") == "relay"]
        if len(found) == 3:
            break
        await asyncio.sleep(0.05)
    listening.cancel()
    assert [detail["name"] for detail in found] == [OTHER, OTHER, ""]
    assert "does not allow evil.example.org at tcp port 443" in found[0]["reason"]

    # the same sandbox without the option: the hole that it closes
    await sandbox.update_network(policy=UNCHECKED)
    assert await asked(sandbox, f"443:{OTHER}", f"80:{OTHER}") == ["200 yes!"] * 2
    assert network.seen[2:] == [OTHER, OTHER]


async def test_programs_of_all_kinds_come_through(client: DSecClient, network: Network) -> None:
    sandbox = await make(client)
    assert await by_node(sandbox, f"http://{HOST}/") == "200\n"
    trusting = "process.env.NODE_TLS_REJECT_UNAUTHORIZED='0';"
    assert await by_node(sandbox, f"https://{HOST}/", trusting) == "200\n"
    pip = (
        "from pip._vendor import requests\n"
        f"print(requests.get('https://{HOST}/', verify=False).text)"
    )
    done = await sandbox.run("python3", "-W", "ignore", "-c", pip, timeout=60)
    assert done.stdout == "yes!\n", done.stderr


async def test_there_is_no_other_way_to_the_name(
    client: DSecClient, network: Network, internet: World
) -> None:
    sandbox = await make(client)
    assert await resolved(sandbox, HOST) == ["127.78.0.1"]
    assert await resolved(sandbox, OTHER) == []
    assert internet.asked == []
    direct = await asked(sandbox, f"443:{HOST}:{ADDRESS}", f"80:{HOST}:{ADDRESS}")
    assert direct == ["failed Operation not permitted"] * 2
    assert await asked(sandbox, f"443:{HOST}") == ["200 yes!"]
    direct = await asked(sandbox, f"443:{HOST}:{ADDRESS}", f"22:{HOST}")
    assert direct == ["failed Operation not permitted", "failed Connection refused"]
    assert network.seen == [HOST]


async def test_updates_switch_it_and_cut_what_they_close(
    client: DSecClient, network: Network
) -> None:
    sandbox = await make(client, UNCHECKED)
    assert await resolved(sandbox, HOST) == [ADDRESS]

    async def held() -> Any:
        job = await sandbox.commands.run(["python3", "-c", HOLD], background=True)
        said = aiter(job)
        assert (await anext(said)).data == b"True\n"
        return said

    direct = await held()
    await sandbox.update_network(policy=CHECKED)  # its address is not open any more
    assert (await anext(direct)).data == b"ended\n"
    assert await resolved(sandbox, HOST) == ["127.78.0.1"]
    assert await asked(sandbox, f"443:{HOST}:{ADDRESS}") == ["failed Operation not permitted"]
    through = await held()
    more = {**CHECKED["network"], "rules": [*CHECKED["network"]["rules"], {"allow": OTHER}]}
    await sandbox.update_network(policy={"network": more})
    still = asyncio.ensure_future(anext(through))
    assert not (await asyncio.wait([still], timeout=0.3))[0]
    await sandbox.update_network(policy=ELSE)
    assert (await still).data == b"ended\n"
    assert await asked(sandbox, f"443:{HOST}:127.78.0.1") == ["alert TLSV1_UNRECOGNIZED_NAME"]
    await sandbox.update_network(policy=UNCHECKED)
    assert await resolved(sandbox, HOST) == [ADDRESS]
    assert await asked(sandbox, f"443:{HOST}:127.78.0.1") == ["failed Connection refused"]
    assert await asked(sandbox, f"443:{HOST}") == ["200 yes!"]


async def test_an_update_is_refused_where_the_port_is_taken_and_changes_nothing(
    client: DSecClient, network: Network
) -> None:
    sandbox = await make(client, UNCHECKED)
    job = await sandbox.commands.run(["python3", "-c", TAKE], background=True)
    assert (await anext(aiter(job))).data == b"taken\n"
    with pytest.raises(Unavailable, match=r"port 443 in the sandbox: .*; end what listens"):
        await sandbox.update_network(policy=CHECKED)
    assert await resolved(sandbox, HOST) == [ADDRESS]
    assert await asked(sandbox, f"443:{OTHER}") == ["200 yes!"]
    await job.kill()
    await job.wait()
    await sandbox.update_network(policy=CHECKED)
    assert await asked(sandbox, f"443:{HOST}") == ["200 yes!"]
    assert await asked(sandbox, f"443:{OTHER}") == ["alert TLSV1_UNRECOGNIZED_NAME"]


async def test_it_outlives_a_killed_daemon(
    client: DSecClient, host: Daemon, network: Network
) -> None:
    sandbox = await make(client)
    job = await sandbox.commands.run(["python3", "-c", HOLD], background=True)
    assert (await anext(aiter(job))).data == b"True\n"
    await host.restart()
    again = await client.get_sandbox(sandbox.id)
    assert await asked(again, f"443:{HOST}", f"80:{HOST}") == ["200 yes!"] * 2
    (alert,) = await asked(again, f"443:{OTHER}")
    assert alert == "alert TLSV1_UNRECOGNIZED_NAME"
    assert await asked(again, f"443:{HOST}:{ADDRESS}") == ["failed Operation not permitted"]
    await again.update_network(policy=UNCHECKED)
    assert await asked(again, f"443:{HOST}") == ["200 yes!"]


def oom_watches(host: Daemon) -> int:
    """Descriptors by which the daemon hears of kills: of each sandbox, or one of all of them."""
    assert host.process is not None
    found = 0
    for fd in Path(f"/proc/{host.process.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed while we looked
            found += str(fd.readlink()) in ("anon_inode:[eventfd]", "anon_inode:inotify")
    return found


async def test_many_at_once_leave_nothing_open(
    client: DSecClient, host: Daemon, network: Network
) -> None:
    deaf = oom_watches(host)
    sandbox = await make(client)
    await asked(sandbox, f"443:{HOST}")
    await until(lambda: oom_watches(host) > deaf)  # armed a second after the start
    before = host.open_files()
    urls = [f"https://{HOST}/", f"http://{HOST}/"]
    got = await get_at_once(sandbox, urls, 200, "_create_unverified_context")
    assert got == "200 200\n"
    await until(lambda: host.open_files() <= before, 6)
