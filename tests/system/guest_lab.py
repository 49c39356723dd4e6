"""A guest whose PID 1 is `dsec-init --vm`, in QEMU without KVM, and clients of its serial port.

Kernel, command line and initramfs are those of microVMs. Nothing of the host is mounted or shared
but the images of `Disks`, and the port is a unix socket, so that every frame can be seen.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dsecd.images.guest import COMMAND_LINE
from dsecd.images.initramfs import initramfs
from libdsec import model, wire
from libdsec.errors import Unavailable
from tests.system.init_harness import BINARY
from tests.wire_client import WireCall, WireClient

KERNEL = Path(os.environ.get("DSEC_GUEST_KERNEL", "/var/cache/dsec-guest/kernel-for-tests"))
SHELL = Path("/bin/bash-static")
MEMORY_MB = 256
UPPER_BYTES = 48 << 20
ALIGNMENT = 2 << 20  # of what virtio-pmem maps
PROMPT_S = 2.0  # in which the agent must answer the first frame of a connection
PAUSE_S = 0.2  # the agent sees that a peer has gone
BOOT_S = 60.0


def missing() -> str:
    """Return why no guest can be started here, or ""."""
    if shutil.which("qemu-system-x86_64") is None:
        return "qemu-system-x86 is missing"
    tools = [name for name in ("mkfs.erofs", "mkfs.ext4", "busybox") if not shutil.which(name)]
    return f"missing: {', '.join(tools)}" if tools else ""


@dataclass(frozen=True)
class Disks:
    """Two layers, the second over the first, in images of whole `ALIGNMENT`s; an empty upper."""

    layers: tuple[Path, Path]
    upper: Path

    @classmethod
    def make(cls, folder: Path) -> Disks:
        base, above = folder / "base", folder / "above"
        for name in ("bin", "etc", "root", "tmp", "layers"):
            (base / name).mkdir(parents=True)
        busybox = shutil.which("busybox")
        assert busybox is not None
        shutil.copy(busybox, base / "bin/busybox")
        applets = subprocess.run([busybox, "--list"], capture_output=True, text=True, check=True)
        for name in applets.stdout.split():
            if name != "busybox":
                (base / "bin" / name).symlink_to("busybox")
        (base / "etc/passwd").write_text("root:x:0:0::/root:/bin/sh\nuser:x:1000:1000::/:/bin/sh\n")
        (base / "etc/resolv.conf").symlink_to("/run/of-the-image")
        (base / "layers/both").write_text("base")
        (base / "layers/below").write_text("base")
        (above / "layers").mkdir(parents=True)
        (above / "layers/both").write_text("above")
        above.chmod(0o711)
        for tree in (base, above):
            image = tree.with_suffix(".erofs")
            command = ["mkfs.erofs", "--quiet", "--all-root", str(image), str(tree)]
            subprocess.run(command, check=True, capture_output=True)
            os.truncate(image, -(-image.stat().st_size // ALIGNMENT) * ALIGNMENT)
        upper = folder / "upper.img"
        upper.touch()
        os.truncate(upper, UPPER_BYTES)
        command = ["mkfs.ext4", "-q", "-O", "^has_journal", str(upper)]
        subprocess.run(command, check=True, capture_output=True)
        return cls((base.with_suffix(".erofs"), above.with_suffix(".erofs")), upper)


class Guest:
    """A running one. `folder` keeps its console, for the reader of a failure."""

    def __init__(self, folder: Path, *, dax: bool = False) -> None:
        self.folder, self.dax = folder, dax
        self.disks = Disks.make(folder)
        self.socket = folder / "agent.sock"
        (folder / "initrd").write_bytes(initramfs(Path(BINARY).read_bytes(), SHELL.read_bytes()))
        self.process = subprocess.Popen(self._command(), stdin=subprocess.DEVNULL)

    @property
    def devices(self) -> list[str]:
        return ["/dev/pmem0", "/dev/pmem1"] if self.dax else ["/dev/vdb", "/dev/vdc"]

    def _command(self) -> list[str]:
        argv = ["qemu-system-x86_64", "-machine", "q35", "-accel", "tcg,thread=multi"]
        argv += ["-cpu", "max,-cx16", "-smp", "1", "-m", f"{MEMORY_MB},maxmem=2G"]
        argv += ["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"]
        argv += ["-kernel", str(KERNEL), "-initrd", str(self.folder / "initrd")]
        argv += ["-append", COMMAND_LINE, "-serial", f"file:{self.folder / 'console'}"]
        argv += ["-chardev", f"socket,id=agent,path={self.socket},server=on,wait=off"]
        argv += ["-device", "virtio-serial-pci"]
        argv += ["-device", "virtserialport,chardev=agent,name=dsec.agent"]
        argv += ["-netdev", "user,id=net,restrict=on", "-device", "virtio-net-pci,netdev=net"]
        argv += self._drive("upper", self.disks.upper, "cache=unsafe")
        for number, image in enumerate(self.disks.layers):
            if self.dax:
                size = image.stat().st_size
                backend = f"id=l{number},mem-path={image},size={size},share=on,readonly=on"
                argv += ["-object", f"memory-backend-file,{backend}"]
                argv += ["-device", f"virtio-pmem-pci,memdev=l{number}"]
            else:
                argv += self._drive(f"l{number}", image, "readonly=on")
        return argv

    @staticmethod
    def _drive(name: str, image: Path, options: str) -> list[str]:
        drive = f"file={image},if=none,id={name},format=raw,{options}"
        return ["-drive", drive, "-device", f"virtio-blk-pci,drive={name}"]

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Let no time pass for QEMU: of what happens meanwhile it sees the outcome."""
        self.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)

    def console(self) -> str:
        return (self.folder / "console").read_text(errors="replace")[-4000:]

    def begin_args(self, **changes: Any) -> dict[str, Any]:
        """Return arguments of vm.begin; a field that is changed to None is left out."""
        args: dict[str, Any] = {
            "layers": self.devices,
            "dax": self.dax,
            "upper": "/dev/vda",
            "files": [["etc/hosts", b"127.0.0.1 here\n", 0o644], ["run/a/b", b"", 0o600]],
            "hostname": "guest",
            "pids": 100,
            "time_ns": time.time_ns(),
            "entropy": secrets.token_bytes(64),
            "config": msgspec.msgpack.encode({"sandbox": "guest", "workdir": "/"}),
        }
        args |= changes
        return {name: value for name, value in args.items() if value is not None}

    async def _try(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect, and return when the first frame that comes is the answer to our ping.

        Raises `Unavailable` when it is another, or when none comes in `PROMPT_S`.
        """
        reader, writer = await asyncio.open_unix_connection(str(self.socket))
        ping = secrets.randbits(48)
        writer.write(wire.encode(wire.Request(ping, "sys.ping", wire.pack({"first": True}))))
        try:
            async with asyncio.timeout(PROMPT_S):
                size = int.from_bytes(await reader.readexactly(4), "big")
                body = await reader.readexactly(size)
                frames = list(wire.Splitter().feed(size.to_bytes(4, "big") + body))
        except (TimeoutError, OSError, EOFError, wire.FrameError) as error:
            writer.transport.abort()
            raise Unavailable(f"no answer to the ping: {error!r}") from error
        if [(type(frame), frame.id) for frame in frames] != [(wire.Reply, ping)]:
            writer.transport.abort()
            raise Unavailable(f"not the answer to the ping: {frames}")
        return reader, writer

    async def open(
        self, timeout_s: float = BOOT_S
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Return a connection on which the agent answers, coming again until it does."""
        deadline = time.monotonic() + timeout_s
        while True:
            with contextlib.suppress(Unavailable, OSError):  # QEMU may not listen yet
                return await self._try()
            assert self.process.poll() is None, f"the guest has ended:\n{self.console()}"
            assert time.monotonic() < deadline, f"the agent does not answer:\n{self.console()}"
            await asyncio.sleep(PAUSE_S)

    async def connect(self) -> WireClient:
        return WireClient.over(*await self.open())

    @contextlib.asynccontextmanager
    async def connected(self) -> AsyncIterator[WireClient]:
        client = await self.connect()
        try:
            yield client
        finally:
            await leave(client)


@contextlib.contextmanager
def running(folder: Path, *, dax: bool = False) -> Iterator[Guest]:
    if reason := missing():
        pytest.skip(reason)
    guest = Guest(folder, dax=dax)
    try:
        yield guest
    finally:
        guest.stop()


async def leave(client: WireClient) -> None:
    """Hang up, as the kernel does for a daemon that was killed."""
    client.abort()
    await client.lost.wait()


async def shell(client: WireClient, text: str, **fields: Any) -> model.CommandResult:
    """Run `text` in the platform's shell; its whole output is in the result."""
    call = client.open("exec.run", command(text, **fields))
    items = [item async for item in call.stream(model.Output)]
    result: model.CommandResult = await call.answer(model.CommandResult)
    streamed = {n: b"".join(item.data for item in items if item.stream == n) for n in (1, 2)}
    return msgspec.structs.replace(
        result, stdout=streamed[1] + result.stdout, stderr=streamed[2] + result.stderr
    )


def command(text: str, **fields: Any) -> model.ExecArgs:
    cid = fields.pop("cid", f"c{secrets.randbits(48)}")
    return model.ExecArgs(cid=cid, shell=text.encode(), **fields)


async def send(call: WireCall, data: bytes, chunk: int = wire.MAX_ITEM) -> None:
    """Stream `data` into a call under its credits."""
    for at in range(0, len(data), chunk):
        await call.push(data[at : at + chunk])
    call.end()


async def receive(call: WireCall) -> bytes:
    """Return everything that a call streams out."""
    return b"".join([item async for item in call.stream()])
