"""Secrets end to end: a real dsecd and sandbox, and in their world a server that plays the API.

The API's certificate is of an authority that the daemon is told to trust. Only the API may ever
see the secret: the sandbox is searched for it by root inside, and so is what the daemon keeps.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import stat
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from dsecd.secrets.authority import Authority
from libdsec import DSecClient, DSecContainerRunArgs, InvalidArgument, NotFound, Sandbox
from libdsec.errors import AlreadyExists
from libdsec.model import CreateArgs, Event, SandboxInfo
from tests.system.compat.debian import IMAGE
from tests.system.daemon import Daemon, until
from tests.system.network_lab import listen
from tests.system.user_view import by_node, first_process, get_at_once
from tests.system.world_lab import World, housed, world
from tests.unit.secrets_upstream import HOST, VALUE, Api

pytestmark = [
    pytest.mark.root,
    pytest.mark.needs("bpf_cgroup", "bpf_fs", "veth", "nftables"),
    pytest.mark.asyncio,
]
ADDRESS = "203.0.113.20"
TOKEN = VALUE.split()[1]
SECRETS: dict[str, dict[str, str] | str] = {HOST: f"Authorization: {VALUE}"}
ALLOWED = {"network": {"rules": [{"allow": HOST, "private": True, "ports": [443]}]}}
OTHERS = {"network": {"rules": [{"allow": "other.example.com", "private": True, "ports": [443]}]}}

FETCH = """
import sys, urllib.request
for url in sys.argv[1:]:
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            print(answer.status, answer.read().decode())
    except OSError as error:
        print("failed", error)
"""
# arguments: the secret in base64, so that the search does not find itself
SEARCH = r"""
import base64, os, re, sys
needle = base64.b64decode(sys.argv[1])
def search(path, limit=1 << 28):
    tail = b""
    try:
        with open(path, "rb", buffering=0) as file:
            while limit > 0 and (data := file.read(1 << 20)):
                if needle in tail + data: return True
                tail, limit = data[-len(needle):], limit - len(data)
    except OSError: pass
    return False
def memory(pid):
    try:
        with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb", 0) as mem:
            for line in maps:
                start, end = (int(x, 16) for x in line.split()[0].split("-"))
                if line.split()[1][0] != "r" or "[v" in line: continue
                try:
                    mem.seek(start)
                    if needle in mem.read(end - start): return True
                except (OSError, OverflowError, ValueError): pass
    except OSError: pass
    return False
for pid in filter(str.isdigit, os.listdir("/proc")):
    for name in ("environ", "cmdline", "auxv", "mountinfo"):
        if search(f"/proc/{pid}/{name}"): print(f"/proc/{pid}/{name}")
    if int(pid) != os.getpid() and memory(pid): print(f"memory of {pid}")
for top in ("/etc", "/run", "/tmp", "/root", "/var", "/home", "/dev", "/opt", "/srv", "/sys",
            "/proc/self/net", "/proc/sys"):
    for folder, names, files in os.walk(top):
        for file in files:
            path = os.path.join(folder, file)
            if os.path.isfile(path) and search(path): print(path)
"""
# holds a connection whose answer does not end; says what it got
HOLD = """
import ssl, socket
raw = socket.create_connection(("api.example.com", 443), 10)
c = ssl.create_default_context().wrap_socket(raw, server_hostname="api.example.com")
c.settimeout(None)
c.sendall(b"GET /events HTTP/1.1\\r\\nHost: api.example.com\\r\\nConnection: close\\r\\n\\r\\n")
print(len(c.recv(4096)) > 0, flush=True)
try:
    while c.recv(4096): pass
    print("ended", flush=True)
except OSError as error:
    print("ended", flush=True)
"""
# arguments: name for SNI ("" none), then the request in base64; prints the first line
RAW = """
import base64, socket, ssl, sys
context = ssl.create_default_context()
context.check_hostname = False
try:
    raw = socket.create_connection(("api.example.com", 443), 10)
    c = context.wrap_socket(raw, server_hostname=sys.argv[1] or None)
    c.sendall(base64.b64decode(sys.argv[2]))
    print(c.recv(65536).split(b"\\r\\n")[0].decode())
except OSError as error:
    print("refused")
"""


@pytest.fixture
def internet() -> Iterator[World]:
    with world() as made:
        made.names = {
            HOST: [ADDRESS],
            "other.example.com": [ADDRESS],
            "evil.example.org": [ADDRESS],
        }
        yield made


@pytest.fixture
def public(tmp_path: Path) -> Authority:
    """The authority of the internet, in a file for the daemon."""
    made = Authority.load(tmp_path / "public")
    (tmp_path / "public.pem").write_bytes(made.pem)
    return made


@pytest_asyncio.fixture
async def api(internet: World, public: Authority) -> AsyncIterator[Api]:
    made = Api(public.context(HOST))
    sock = listen(internet.world, ADDRESS, 443)
    sock.setblocking(False)
    await made.start(sock)
    yield made
    await made.close()


@pytest_asyncio.fixture
async def host(
    internet: World, public: Authority, api: Api, tmp_path: Path
) -> AsyncIterator[Daemon]:
    async with housed(internet, secrets={"authorities": str(tmp_path / "public.pem")}) as made:
        yield made


def arguments(**more: Any) -> DSecContainerRunArgs:
    given: dict[str, Any] = {
        "container_image": IMAGE, "memory_limit_mb": 512, "disk_limit_mb": 64,
        "policy": ALLOWED, "secrets": SECRETS,
    }  # fmt: skip
    return DSecContainerRunArgs(**(given | more))


async def make(client: DSecClient, **more: Any) -> Sandbox:
    return await client.run_container(arguments(**more), timeout=60)


async def fetched(sandbox: Sandbox, *urls: str) -> list[str]:
    done = await sandbox.run("python3", "-c", FETCH, *urls, timeout=60)
    assert done.ok, done.stderr
    return str(done.stdout).splitlines()


async def raw(sandbox: Sandbox, request: bytes, name: str = HOST) -> str:
    encoded = base64.b64encode(request).decode()
    done = await sandbox.run("python3", "-c", RAW, name, encoded, timeout=60)
    assert done.ok, done.stderr
    return str(done.stdout).strip()


async def searched(sandbox: Sandbox, text: str = TOKEN) -> list[str]:
    encoded = base64.b64encode(text.encode()).decode()
    done = await sandbox.run("python3", "-c", SEARCH, encoded, timeout=110, user="root")
    assert done.ok, done.stderr
    return str(done.stdout).splitlines()


async def test_programs_inside_use_a_secret_that_only_the_api_sees(
    client: DSecClient, api: Api
) -> None:
    sandbox = await make(client)
    urls = [f"https://{HOST}/ok", f"http://{HOST}/ok"]
    assert await fetched(sandbox, *urls) == ["200 yes", "200 yes"]
    assert await by_node(sandbox, f"https://{HOST}/ok") == "200\n"
    requests = (
        "from pip._vendor import requests\n"
        f"print(requests.get('https://{HOST}/ok', headers={{'Authorization': 'mine'}}).text)"
    )
    assert (await sandbox.run("python3", "-c", requests, timeout=60)).stdout == "yes\n"
    assert len(api.seen) == 4
    for head in api.seen:
        assert head.count(b"uthorization:") == 1
        assert f"\r\nAuthorization: {VALUE}\r\n".encode() in head


@pytest.mark.timeout(240)
async def test_the_secret_is_nowhere_inside_nor_in_what_the_daemon_tells(
    client: DSecClient, host: Daemon, api: Api
) -> None:
    seen: list[Event] = []

    async def listen_to_all() -> None:
        async for event in client.events():
            seen.append(event)

    listening = asyncio.create_task(listen_to_all())
    sandbox = await make(client, env={"PLANTED": "canary-5f1c9a"})
    assert (await fetched(sandbox, f"https://{HOST}/echo"))[0].startswith("200 GET /echo")
    holder = await sandbox.commands.run(["python3", "-c", HOLD], background=True)
    said = aiter(holder)
    assert (await anext(said)).data == b"True\n"
    assert TOKEN.encode() in api.seen[0]
    assert await searched(sandbox) == []
    found = await searched(sandbox, "canary-5f1c9a")  # the search does find what is there
    assert any(place.endswith("/environ") for place in found)
    assert any(place.startswith("memory of") for place in found)
    await raw(sandbox, b"TRACE / HTTP/1.1\r\nHost: api.example.com\r\n\r\n")
    api.release.set()
    await holder.wait()

    info = await client._link.call("sandbox.get", {"id": sandbox.id}, SandboxInfo)
    assert info.args is not None
    assert info.args.secrets == {HOST: {"Authorization": "***"}}
    told = [repr(info), repr(await client.list_sandboxes()), repr(seen)]
    listening.cancel()
    refused = [event.detail for event in seen if event.detail.get("where") == "secret"]
    assert refused[0]["name"] == HOST
    assert "TRACE" in refused[0]["reason"]
    assert not any(TOKEN in text for text in [*told, host.log()])
    kept = [
        path
        for root in (host.state, host.runtime)
        for path in root.rglob("*")
        if path.is_file()
        and not {"bpf", "layers"}.intersection(path.parts)
        and path.stat().st_size < 64 << 20  # without the volume of uppers, searched inside
        and TOKEN.encode() in path.read_bytes()
    ]
    vault = host.state / f"secrets/{sandbox.id}.secrets"
    assert kept == [vault]
    assert stat.S_IMODE(vault.stat().st_mode) == 0o600
    await sandbox.kill()
    assert not vault.exists()


@pytest.mark.parametrize(
    ("request_", "name", "said"),
    [
        (b"GET / HTTP/1.1\r\nHost: evil.example.org\r\n\r\n", HOST, "HTTP/1.1 421"),
        (b"GET https://evil.example.org/ HTTP/1.1\r\nHost: api.example.com\r\n\r\n", HOST,
         "HTTP/1.1 421"),
        (b"CONNECT evil.example.org:443 HTTP/1.1\r\nHost: evil.example.org:443\r\n\r\n", HOST,
         "HTTP/1.1 405"),
        (b"TRACE / HTTP/1.1\r\nHost: api.example.com\r\n\r\n", HOST, "HTTP/1.1 405"),
        (b"POST / HTTP/1.1\r\nHost: api.example.com\r\nContent-Length: 4\r\n"
         b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /smuggled HTTP/1.1\r\n\r\n", HOST,
         "HTTP/1.1 400"),
        (b"GET /ok HTTP/1.1\r\nHost: api.example.com\r\n\r\n", "evil.example.org", "refused"),
    ],
    ids=["host", "absolute", "connect", "trace", "smuggling", "sni"],
)  # fmt: skip
async def test_attempts_to_take_the_secret_elsewhere_reach_nobody(
    client: DSecClient, api: Api, request_: bytes, name: str, said: str
) -> None:
    sandbox = await make(client)
    assert await raw(sandbox, request_, name) == said
    assert api.seen == []
    # without a name the address stands for it
    good = b"GET /ok HTTP/1.1\r\nHost: api.example.com\r\n\r\n"
    assert await raw(sandbox, good, "") == "HTTP/1.1 200 OK"


async def test_a_redirection_is_followed_without_the_secret(client: DSecClient, api: Api) -> None:
    sandbox = await make(client)
    (line,) = await fetched(sandbox, f"https://{HOST}/redirect")
    assert line.startswith("failed")  # evil.example.org is not allowed
    assert TOKEN not in line
    assert len(api.seen) == 1


async def test_the_name_has_no_other_way(client: DSecClient, api: Api) -> None:
    sandbox = await make(client)
    script = (
        "import socket\nfound = socket.getaddrinfo('api.example.com', 443)\n"
        "print(sorted({a[4][0] for a in found}))\n"
        f"try: socket.create_connection(('{ADDRESS}', 443), 3); print('open')\n"
        "except OSError as e: print(e.strerror)"
    )
    done = await sandbox.run("python3", "-c", script)
    assert done.stdout == "['127.77.0.1']\nOperation not permitted\n"
    assert api.seen == []


async def test_an_update_that_closes_the_name_takes_the_secret_away(
    client: DSecClient, api: Api
) -> None:
    sandbox = await make(client)
    holder = await sandbox.commands.run(["python3", "-c", HOLD], background=True)
    said = aiter(holder)
    assert (await anext(said)).data == b"True\n"
    await sandbox.update_network(policy=OTHERS)
    assert (await anext(said)).data == b"ended\n"
    (by_name, by_number) = await fetched(sandbox, f"http://{HOST}/ok", "http://127.77.0.1/ok")
    assert "Name or service not known" in by_name
    assert by_number.startswith("failed")
    assert len(api.seen) == 1
    await sandbox.update_network(policy=ALLOWED)
    assert await fetched(sandbox, f"https://{HOST}/ok") == ["200 yes"]


async def test_secrets_outlive_a_killed_daemon(client: DSecClient, host: Daemon) -> None:
    args = arguments()
    wire = await host.client()
    made = await wire.call("sandbox.create", CreateArgs(key="k", args=args), kind=SandboxInfo)
    await host.restart()
    sandbox = await client.get_sandbox(made.id)
    assert await fetched(sandbox, f"https://{HOST}/ok", f"http://{HOST}/ok") == ["200 yes"] * 2
    wire = await host.client()  # a retry of the create finds it, by the values too
    again = await wire.call("sandbox.create", CreateArgs(key="k", args=args), kind=SandboxInfo)
    assert again.id == made.id
    changed = arguments(secrets={HOST: {"Authorization": "Bearer another-0123"}})
    with pytest.raises(AlreadyExists):
        await wire.call("sandbox.create", CreateArgs(key="k", args=changed), kind=SandboxInfo)
    await sandbox.kill()
    assert list((host.state / "secrets").glob("*.secrets")) == []


def listening(pid: int) -> set[str]:
    """The addresses listened at in the network namespace of a process, as the kernel has them."""
    rows = [row.split() for row in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()]
    return {row[1] for row in rows if row[3] == "0A"}


async def test_an_address_taken_while_no_daemon_runs_is_left_to_who_took_it(
    client: DSecClient, host: Daemon
) -> None:
    """Anybody inside may bind any loopback address; the proxy then has another one."""
    sandbox = await make(client)
    script = (
        "import socket, time\nheld = []\n"
        "while len(held) < 2:\n"
        "  for port in (443, 80):\n"
        "    s = socket.socket()\n"
        "    try: s.bind(('127.77.0.1', port)); s.listen(); held.append(s)\n"
        "    except OSError: s.close(); time.sleep(0.01)\n"
        "print('taken', flush=True)\ntime.sleep(600)"
    )
    squatter = await sandbox.commands.run(["python3", "-c", script], background=True)
    inside = first_process(host, sandbox.id)
    host.kill()  # from now on it is the squatter who listens there
    await until(lambda: listening(inside) >= {"01004D7F:01BB", "01004D7F:0050"}, 60)
    await host.start()
    assert (await anext(aiter(squatter))).data == b"taken\n"
    assert await fetched(sandbox, f"https://{HOST}/ok") == ["200 yes"]
    resolved = await sandbox.run("getent", "ahostsv4", HOST)
    assert str(resolved.stdout).split()[0] == "127.77.1.1"


async def test_checkpoints_keep_the_trust_and_branches_ask_for_the_secret(
    client: DSecClient, api: Api
) -> None:
    sandbox = await make(client)
    checkpoint = await sandbox.checkpoint()
    assert await fetched(sandbox, f"https://{HOST}/ok") == ["200 yes"]
    done = await sandbox.run("sh", "-c", "echo x >> /etc/dsec/bundle.pem; umount /etc/dsec")
    assert not done.ok
    with pytest.raises(InvalidArgument, match="give its value again"):
        await sandbox.branch(1, checkpoint)
    other = {HOST: {"Authorization": "Bearer of-the-branch"}}
    (branch,) = await sandbox.branch(1, checkpoint, secrets=other)
    assert await fetched(branch, f"https://{HOST}/ok") == ["200 yes"]
    assert b"Authorization: Bearer of-the-branch\r\n" in api.seen[-1]


def ears(host: Daemon) -> int:
    """How many descriptors the daemon has that tell of OOM kills."""
    assert host.process is not None
    found = 0
    for entry in Path(f"/proc/{host.process.pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            found += str(entry.readlink()) in ("anon_inode:[eventfd]", "anon_inode:inotify")
    return found


async def test_a_hundred_requests_at_once_leave_nothing_open(
    client: DSecClient, host: Daemon, api: Api
) -> None:
    deaf = ears(host)
    sandbox = await make(client)
    await fetched(sandbox, f"https://{HOST}/ok")
    await until(lambda: ears(host) > deaf)  # its OOM watch is armed after a second
    before = host.open_files()
    assert await get_at_once(sandbox, [f"https://{HOST}/ok"], 100) == "100 200\n"
    await until(lambda: host.open_files() <= before, 6)


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"policy": OTHERS}, "the policy does not allow api.example.com at tcp port 443"),
        ({"policy": None}, "give a policy"),
        ({"secrets": {HOST: {"Authorization": "***"}}}, "give its value again"),
        ({"secrets": {"*.example.com": {"A": VALUE}}}, "write each name in full"),
    ],
)
async def test_what_cannot_be_granted_is_refused_at_once(
    client: DSecClient, host: Daemon, more: dict[str, Any], why: str
) -> None:
    with pytest.raises(InvalidArgument, match=why) as caught:
        await make(client, **more)
    assert TOKEN not in json.dumps(caught.value.detail) + caught.value.message
    with pytest.raises(NotFound):
        await client.get_sandbox("t0-n0-1-0")
    assert list((host.state / "secrets").glob("*.secrets")) == []
