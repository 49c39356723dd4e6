"""The Firecracker driver against an API that the test plays, in the shapes of its swagger file."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dsecd.host import kvm
from dsecd.host.firecracker import Firecracker, FirecrackerMachine, requests
from dsecd.host.firecracker_api import FirecrackerApi
from dsecd.host.vm_plan import Ram, VmEvent, VmLayer, VmMemory, VmNetwork, VmPlan
from libdsec.errors import (
    DSecError,
    Internal,
    InvalidArgument,
    Timeout,
    Unavailable,
    Unsupported,
    WrongState,
)

MIB = 1 << 20
PLAN = VmPlan(
    memory_bytes=256 * MIB,
    vcpus=2,
    kernel="/vm/kernel",
    initrd="/vm/initrd",
    command_line="quiet",
    upper="/vm/upper.img",
    accel="kvm",
)
EMPTY = b"HTTP/1.1 204 \r\nServer: Firecracker API\r\nConnection: keep-alive\r\n\r\n"


def content(status: str, body: Any) -> bytes:
    """Return an answer with a body, as micro-http writes it."""
    text = json.dumps(body).encode()
    head = (
        f"HTTP/1.1 {status} \r\nServer: Firecracker API\r\nConnection: keep-alive\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(text)}\r\n\r\n"
    )
    return head.encode() + text


def fault(message: str) -> bytes:
    return content("400", {"fault_message": message})


class Api:
    """Firecracker's end: what it was asked, and what it answers."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.asked: list[tuple[str, str, Any]] = []
        self.answers: dict[tuple[str, str], bytes] = {}
        self.silent = False
        self.writers: list[asyncio.StreamWriter] = []
        self._server: asyncio.Server

    async def open(self) -> None:
        self._server = await asyncio.start_unix_server(self._serve, self.path)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.append(writer)
        while line := await reader.readline():
            method, path, version = line.decode().split()
            assert version == "HTTP/1.1"
            headers: dict[str, str] = {}
            while (header := (await reader.readline()).decode().strip()) != "":
                name, _, value = header.partition(":")
                headers[name.lower()] = value.strip()
            body = await reader.readexactly(int(headers.get("content-length", 0)))
            if body:
                assert headers["content-type"] == "application/json"
            self.asked.append((method, path, json.loads(body) if body else None))
            if not self.silent:
                writer.write(self.answers.get((method, path), EMPTY))

    async def close(self) -> None:
        for writer in self.writers:
            writer.close()
        self._server.close()
        await self._server.wait_closed()


class Pair:
    """A machine, its API, and what happened to it."""

    def __init__(self, api: Api, machine: FirecrackerMachine, events: list[VmEvent]) -> None:
        self.api, self.machine, self.events = api, machine, events


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Pair]:
    api = Api(tmp_path / "api.sock")
    await api.open()
    plan = msgspec.structs.replace(PLAN, control_socket=str(api.path))
    events: list[VmEvent] = []
    machine = await Firecracker().connect(Path("/"), plan, events.append)
    yield Pair(api, machine, events)
    machine.close()
    await api.close()


async def test_a_machine_is_configured_in_order_and_started(pair: Pair) -> None:
    plan = msgspec.structs.replace(
        PLAN,
        data="/vm/data.img",
        layers=(VmLayer("/vm/layer0", 2 * MIB), VmLayer("/vm/layer1", 4096, "block")),
        network=VmNetwork(interface="tap0", mac="02:00:00:00:00:01"),
    )
    await pair.machine.boot(plan)

    def drive(name: str, path: str, *, read_only: bool) -> dict[str, Any]:
        cache = "Unsafe" if read_only else "Writeback"
        return {
            "drive_id": name, "path_on_host": path, "is_root_device": False,
            "is_read_only": read_only, "cache_type": cache,
        }  # fmt: skip

    assert pair.api.asked == [
        ("PUT", "/machine-config", {"vcpu_count": 2, "mem_size_mib": 256, "smt": False}),
        (
            "PUT", "/boot-source",
            {
                "kernel_image_path": "/vm/kernel", "boot_args": "quiet",
                "initrd_path": "/vm/initrd",
            },
        ),
        ("PUT", "/drives/upper", drive("upper", "/vm/upper.img", read_only=False)),
        ("PUT", "/drives/data", drive("data", "/vm/data.img", read_only=False)),
        (
            "PUT", "/pmem/layer0",
            {"id": "layer0", "path_on_host": "/vm/layer0", "read_only": True},
        ),
        ("PUT", "/drives/layer1", drive("layer1", "/vm/layer1", read_only=True)),
        (
            "PUT", "/network-interfaces/eth0",
            {"iface_id": "eth0", "guest_mac": "02:00:00:00:00:01", "host_dev_name": "tap0"},
        ),
        ("PUT", "/vsock", {"guest_cid": 3, "uds_path": "/vm/agent.sock"}),
        ("PUT", "/entropy", {}),
        (
            "PUT", "/balloon",
            {
                "amount_mib": 0, "deflate_on_oom": True, "stats_polling_interval_s": 10,
                "free_page_reporting": True,
            },
        ),
        ("PUT", "/actions", {"action_type": "InstanceStart"}),
    ]  # fmt: skip
    assert len(pair.api.writers) == 1


def test_what_is_not_asked_for_is_not_sent() -> None:
    """An older Firecracker refuses a whole request for a field that it does not know."""
    plan = msgspec.structs.replace(PLAN, initrd="", free_page_reporting=False)
    sent = {path: body for _, path, body in requests(plan)}
    assert "initrd_path" not in sent["/boot-source"]
    assert "free_page_reporting" not in sent["/balloon"]
    assert "/network-interfaces/eth0" not in sent
    assert "/balloon" not in {
        path for _, path, _ in requests(msgspec.structs.replace(plan, balloon=False))
    }
    assert requests(msgspec.structs.replace(plan, incoming=True)) == ()


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (fault("The kernel file cannot be opened: No such file or directory"), Internal),
        (fault("Invalid request method and/or path: PUT pmem/layer0."), Unsupported),
        (fault("unknown field `free_page_reporting`, expected one of ..."), Unsupported),
        (content("500", "no object"), Internal),
    ],
)
async def test_the_first_refusal_ends_it_with_firecrackers_words(
    pair: Pair, answer: bytes, error: type[DSecError]
) -> None:
    pair.api.answers["PUT", "/boot-source"] = answer
    with pytest.raises(error, match="PUT /boot-source"):
        await pair.machine.boot(PLAN)
    assert [path for _, path, _ in pair.api.asked] == ["/machine-config", "/boot-source"]
    assert await status_of(pair, "Not started") == "starting"  # the connection is still good


async def status_of(pair: Pair, state: str) -> str:
    instance = {"app_name": "Firecracker", "id": "x", "state": state, "vmm_version": "1.14.0"}
    pair.api.answers["GET", "/"] = content("200", instance)
    return await pair.machine.status()


async def test_states(pair: Pair) -> None:
    assert await status_of(pair, "Running") == "running"
    assert await status_of(pair, "Paused") == "paused"
    with pytest.raises(Internal, match="Halted"):
        await status_of(pair, "Halted")
    await pair.machine.stop()
    await pair.machine.cont()
    assert pair.api.asked[-2:] == [
        ("PATCH", "/vm", {"state": "Paused"}),
        ("PATCH", "/vm", {"state": "Resumed"}),
    ]


async def test_saving_and_taking_up_again(pair: Pair) -> None:
    await status_of(pair, "Running")
    with pytest.raises(WrongState):
        await pair.machine.save("/vm/state")
    await status_of(pair, "Paused")
    await pair.machine.save("/vm/state")
    assert pair.api.asked[-1] == (
        "PUT", "/snapshot/create",
        {
            "snapshot_type": "Full", "snapshot_path": "/vm/state",
            "mem_file_path": "/vm/state.ram",
        },
    )  # fmt: skip
    await pair.machine.load("/vm/state")
    assert pair.api.asked[-1] == (
        "PUT", "/snapshot/load",
        {
            "snapshot_path": "/vm/state", "resume_vm": False,
            "mem_backend": {"backend_type": "File", "backend_path": "/vm/state.ram"},
        },
    )  # fmt: skip


async def test_the_balloon(pair: Pair) -> None:
    pair.api.answers["GET", "/machine-config"] = content(
        "200", {"vcpu_count": 2, "mem_size_mib": 256, "smt": False}
    )
    await pair.machine.balloon(200 * MIB)
    assert pair.api.asked[-1] == ("PATCH", "/balloon", {"amount_mib": 56})
    stats = {"target_pages": 14336, "actual_pages": 0, "target_mib": 56, "actual_mib": 0}
    pair.api.answers["GET", "/balloon/statistics"] = content("200", stats)
    with pytest.raises(Unavailable, match="reported nothing"):
        await pair.machine.memory()
    stats |= {"total_memory": 230 * MIB, "free_memory": 30 * MIB, "available_memory": 90 * MIB}
    pair.api.answers["GET", "/balloon/statistics"] = content("200", stats)
    assert await pair.machine.memory() == VmMemory(
        limit_bytes=200 * MIB,
        total_bytes=230 * MIB,
        free_bytes=30 * MIB,
        available_bytes=90 * MIB,
    )


async def test_the_end_of_firecracker_is_told_once(pair: Pair) -> None:
    await pair.machine.stop()
    for writer in pair.api.writers:
        writer.close()
    async with asyncio.timeout(5):
        while not pair.events:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    with pytest.raises(Unavailable):
        await pair.machine.status()
    pair.machine.close()
    assert pair.events == [VmEvent("lost")]


@pytest.mark.parametrize(
    "answer",
    [b"SSH-2.0-OpenSSH_9.2\r\n\r\n", EMPTY + EMPTY, content("200", {"x": "y" * (1 << 20)})],
    ids=["other", "twice", "endless"],
)
async def test_what_is_no_answer_ends_the_connection(pair: Pair, answer: bytes) -> None:
    pair.api.answers["PATCH", "/vm"] = answer
    await asyncio.gather(pair.machine.stop(), pair.machine.stop(), return_exceptions=True)
    with pytest.raises(Unavailable):
        await pair.machine.stop()
    assert pair.events == [VmEvent("lost")]


async def test_a_request_without_an_answer_gives_the_connection_up(tmp_path: Path) -> None:
    """Its answer would otherwise be taken for that of the next."""
    api = Api(tmp_path / "api.sock")
    await api.open()
    api.silent = True
    lost: list[int] = []
    reader, writer = await asyncio.open_unix_connection(api.path)
    connection = writer.get_extra_info("socket").dup()
    writer.close()
    client = await FirecrackerApi.connect(connection, lambda: lost.append(1))
    with pytest.raises(Timeout, match="GET /version"):
        await client.call("GET", "/version", timeout_s=0.02)
    with pytest.raises(Unavailable):
        await client.call("GET", "/version")
    assert lost == [1]
    assert reader is not None
    await api.close()


async def test_several_ask_one_after_the_other(pair: Pair) -> None:
    assert await asyncio.gather(*(pair.machine.stop() for _ in range(5))) == [None] * 5
    assert len(pair.api.asked) == 5


@pytest.mark.parametrize(
    "changes",
    [{"accel": "tcg"}, {"firmware": "qboot.rom"}, {"cpu": "max"}, {"ram": Ram(path="/vm/ram")}],
)
def test_what_it_lacks_is_refused_with_its_reason(changes: dict[str, Any]) -> None:
    with pytest.raises(Unsupported) as caught:
        Firecracker().compile(msgspec.structs.replace(PLAN, **changes))
    assert caught.value.detail["reason"] in Firecracker.lacks.values()


async def test_the_console_is_elsewhere(pair: Pair) -> None:
    with pytest.raises(Unsupported, match="standard output"):
        await pair.machine.console()


def test_it_is_started_with_its_socket() -> None:
    launch = Firecracker("/usr/bin/fc").compile(PLAN)
    assert launch.argv == ("/usr/bin/fc", "--api-sock", "/vm/qmp.sock")
    assert launch.devices.upper == "/dev/vda"
    with pytest.raises(InvalidArgument, match="32"):
        Firecracker().compile(msgspec.structs.replace(PLAN, vcpus=33))


@pytest.mark.parametrize(
    ("answer", "expected"),
    [(b"OK 1073741824\nfirst", b"first"), (b"", None), (b"no such port\n", None)],
    ids=["open", "closed", "other"],
)
async def test_the_agents_port_is_asked_for(
    tmp_path: Path, answer: bytes, expected: bytes | None
) -> None:
    asked = asyncio.get_running_loop().create_future()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.set_result(await reader.readline())
        writer.write(answer)
        writer.close()

    path = tmp_path / "agent.sock"
    async with await asyncio.start_unix_server(serve, path):
        plan = msgspec.structs.replace(PLAN, agent_socket=str(path))
        if expected is None:
            with pytest.raises(Unavailable, match="port 1024"):
                await Firecracker().open_agent(Path("/"), plan)
        else:
            with await Firecracker().open_agent(Path("/"), plan) as connection:
                loop = asyncio.get_running_loop()
                assert await loop.sock_recv(connection, 64) == expected  # nothing of it was read
        assert await asked == b"CONNECT 1024\n"


def _firecracker() -> str:
    """Return why the real one cannot be tried here, "" when it can."""
    if shutil.which("firecracker") is None:
        return "firecracker is missing"
    try:
        kvm.check()
    except Unsupported as error:
        return str(error.detail["reason"])
    return ""


@pytest.mark.skipif(bool(_firecracker()), reason=_firecracker())
async def test_a_real_firecracker_takes_the_configuration(tmp_path: Path) -> None:
    """All but the start, which would need a kernel."""
    for name in ("kernel", "upper.img", "layer0"):
        (tmp_path / name).touch()
        os.truncate(tmp_path / name, 2 * MIB)
    plan = VmPlan(
        memory_bytes=128 * MIB,
        kernel=str(tmp_path / "kernel"),
        upper=str(tmp_path / "upper.img"),
        layers=(VmLayer(str(tmp_path / "layer0"), 2 * MIB, "block"),),
        accel="kvm",
        agent_socket=str(tmp_path / "agent.sock"),
        control_socket=str(tmp_path / "api.sock"),
        free_page_reporting=False,
    )
    driver = Firecracker(shutil.which("firecracker") or "")
    events: list[VmEvent] = []
    process = await asyncio.create_subprocess_exec(*driver.compile(plan).argv)
    try:
        machine = await driver.connect(Path("/"), plan, events.append)
        assert await machine.status() == "starting"
        for method, path, body in requests(plan)[:-1]:
            await machine._api.call(method, path, body)
        await machine.quit()
        assert await process.wait() == -signal.SIGKILL
        assert events == [VmEvent("lost")]
        machine.close()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_quitting_kills_who_listens(tmp_path: Path) -> None:
    """The API has no call to end it; the process is the one that was there at the connect."""
    path = tmp_path / "api.sock"
    program = (
        "import socket, sys; s = socket.socket(socket.AF_UNIX); s.bind(sys.argv[1]); "
        "s.listen(1); c, _ = s.accept(); c.recv(1)"
    )
    process = subprocess.Popen(["/usr/bin/python3", "-c", program, str(path)])  # noqa: ASYNC220
    events: list[VmEvent] = []
    try:
        plan = msgspec.structs.replace(PLAN, control_socket=str(path))
        machine = await Firecracker().connect(Path("/"), plan, events.append)
        assert machine.pid == process.pid
        await machine.quit()
        assert process.wait(10) == -signal.SIGKILL
        machine.close()
    finally:
        process.kill()
        process.wait()
