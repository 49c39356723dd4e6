"""Sandboxes as plain objects in the daemon's own process.

For unit tests of engine and API, and the worked example of `abc.Backend`. It runs nothing: commands
are a handful of built-ins (true, false, echo, exit N, sleep S, yes N, cat, oom), files live in a
dictionary. What it cannot do it refuses as `Unsupported`; it never invents an answer.
"""

from __future__ import annotations

import asyncio
import shlex
import socket
import time
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import msgspec

from dsecd.backends.abc import (
    Capabilities,
    Handle,
    Instance,
    KeepArgs,
    Kept,
    Layers,
    Listener,
    Receiver,
    Save,
    Usage,
    Warmth,
)
from dsecd.backends.fake_layers import FakeLayers
from dsecd.backends.spec import Spec
from dsecd.images.tool import Report, unreported
from dsecd.model import Death
from dsecd.policy.rules import NetPolicy
from libdsec import wire
from libdsec.errors import (
    DSecError,
    Exhausted,
    InvalidArgument,
    NotFound,
    Unavailable,
    Unsupported,
    WrongState,
    to_wire,
)
from libdsec.model import (
    Checkpoint,
    CommandInfo,
    CommandResult,
    CpuClass,
    ExecArgs,
    Feature,
    FileStat,
    Output,
    PackArgs,
    Packed,
    PathArgs,
    ReadArgs,
    Transferred,
    WriteArgs,
)

CAPABILITIES = Capabilities(network=("none",), oom=True, layers=True, trim=True, pause=True)
_CHUNK = 64 << 10


class FakeCall:
    """One call into a fake sandbox: a task, a stream each way, credits as the wire has them."""

    def __init__(self, sandbox: FakeSandbox, receiver: Receiver) -> None:
        self.sandbox, self.receiver = sandbox, receiver
        self.items: asyncio.Queue[msgspec.Raw | None] = asyncio.Queue()
        self.task: asyncio.Task[None] | None = None
        self._credit = wire.INITIAL_CREDIT
        self._begun = self._given_up = False
        self._room = asyncio.Event()
        self._room.set()

    def begin(self, op: str, args: msgspec.Raw) -> None:
        self.task = asyncio.get_running_loop().create_task(self._run(op, args))

    async def _run(self, op: str, args: msgspec.Raw) -> None:
        self._begun = True
        try:
            if self._given_up:
                raise asyncio.CancelledError
            await self.sandbox.going.wait()
            result = await self.sandbox.answer(op, args, self)
        except asyncio.CancelledError:
            self.receiver.on_failure(to_wire(self.sandbox.loss()))
        except DSecError as error:
            self.receiver.on_failure(to_wire(error))
        except msgspec.DecodeError as error:
            self.receiver.on_failure(to_wire(InvalidArgument(f"{op}: {error}", field="args")))
        else:
            self.receiver.on_reply(wire.pack(result))
        finally:
            self.sandbox.calls.discard(self)

    async def send(self, value: Any) -> None:
        while self._credit <= 0:
            self._room.clear()
            await self._room.wait()
        self._credit -= 1
        self.receiver.on_item(wire.pack(value))

    def send_item(self, data: msgspec.Raw) -> None:
        self.items.put_nowait(data)

    def end(self) -> None:
        self.items.put_nowait(None)

    def cancel(self) -> None:
        if self._begun and self.task is not None:
            self.task.cancel()
        self._given_up = True

    def grant(self, n: int) -> None:
        self._credit += n
        self._room.set()


class FakeSandbox:
    """The inside of one sandbox, and its channel."""

    def __init__(self, name: str, spec: Spec, listener: Listener) -> None:
        self.name, self.spec, self.listener = name, spec, listener
        self.net = None if spec.policy is None else spec.policy.net
        self.files: dict[bytes, bytes] = {}
        self.results: dict[str, CommandResult] = {}
        self.running: dict[str, asyncio.Task[CommandResult]] = {}
        self.calls: set[FakeCall] = set()
        self.oom_kills = 0
        self.memory_bytes = self.swapped_bytes = 0
        self.cpu_usage_s = 0.0
        self.cpu_class: CpuClass = "standard"
        self.pauses = self.resumes = 0
        self.going = asyncio.Event()  # not paused
        self.going.set()
        self.closed = False

    # --- Channel

    def open(self, op: str, args: msgspec.Raw, receiver: Receiver) -> FakeCall:
        if self.closed:
            raise Unavailable(f"sandbox {self.name} does not answer")
        call = FakeCall(self, receiver)
        self.calls.add(call)
        call.begin(op, args)
        return call

    def close(self) -> None:
        self.closed = True
        for call in tuple(self.calls):
            call.cancel()

    def loss(self) -> DSecError:
        if self.closed:
            return WrongState(f"sandbox {self.name} is gone", state="stopped")
        return WrongState("the call was cancelled")

    def end(self) -> None:
        self.close()
        for task in self.running.values():
            task.cancel()

    # --- Agent

    async def answer(self, op: str, raw: msgspec.Raw, call: FakeCall) -> Any:
        handler = getattr(self, "_op_" + op.replace(".", "_"), None)
        if handler is None:
            raise Unsupported(f"{op} is not offered by the fake backend", reason="it runs nothing")
        return await handler(raw, call)

    async def _op_sys_ping(self, raw: msgspec.Raw, call: FakeCall) -> None:
        return None

    async def _op_exec_run(self, raw: msgspec.Raw, call: FakeCall) -> CommandResult:
        args = msgspec.msgpack.decode(raw, type=ExecArgs)
        result = await asyncio.shield(self._start(args))
        if not args.stream:
            return result
        data, offset = result.stdout, 0
        while offset < len(data):
            piece = data[offset : offset + _CHUNK]
            await call.send(Output(stream=1, offset=offset, data=piece))
            offset += len(piece)
        return msgspec.structs.replace(result, stdout=b"")

    async def _op_exec_start(self, raw: msgspec.Raw, call: FakeCall) -> CommandInfo:
        args = msgspec.msgpack.decode(raw, type=ExecArgs)
        self._start(args)
        return CommandInfo(cid=args.cid, running=args.cid in self.running, background=True)

    async def _op_exec_wait(self, raw: msgspec.Raw, call: FakeCall) -> CommandResult:
        cid = msgspec.msgpack.decode(raw)["cid"]
        if cid in self.running:
            await asyncio.shield(self.running[cid])
        if cid not in self.results:
            raise NotFound(f"no command {cid!r}", cid=cid)
        return msgspec.structs.replace(self.results[cid], stdout=b"", stderr=b"")

    async def _op_exec_kill(self, raw: msgspec.Raw, call: FakeCall) -> None:
        cid = msgspec.msgpack.decode(raw)["cid"]
        if cid not in self.running:
            raise WrongState(f"command {cid!r} has ended", state="ended")
        self.running[cid].cancel()

    async def _op_exec_forget(self, raw: msgspec.Raw, call: FakeCall) -> None:
        self.results.pop(msgspec.msgpack.decode(raw)["cid"], None)

    async def _op_exec_list(self, raw: msgspec.Raw, call: FakeCall) -> list[CommandInfo]:
        return [CommandInfo(cid=cid, running=True) for cid in self.running] + [
            CommandInfo(cid=cid, running=False) for cid in self.results
        ]

    def _start(self, args: ExecArgs) -> asyncio.Task[CommandResult]:
        known = self.running.get(args.cid)
        if known is not None:
            return known
        task = asyncio.get_running_loop().create_task(self._command(args))
        self.running[args.cid] = task
        return task

    async def _command(self, args: ExecArgs) -> CommandResult:
        begun = time.monotonic()
        if args.cid in self.results:
            self.running.pop(args.cid, None)
            return self.results[args.cid]
        words = args.argv or [w.encode() for w in shlex.split((args.shell or b"").decode())]
        result = CommandResult(cid=args.cid)
        try:
            async with asyncio.timeout(args.timeout_s):
                await self._builtin(words, args, result)
        except TimeoutError:
            result.timed_out, result.signal = True, 9
        finally:
            self.running.pop(args.cid, None)
        result.stdout_total = len(result.stdout)
        result.duration_s = time.monotonic() - begun
        self.results[args.cid] = result
        return result

    async def _builtin(self, words: list[bytes], args: ExecArgs, result: CommandResult) -> None:
        name, rest = (words[0].rpartition(b"/")[2], words[1:]) if words else (b"", [])
        result.exit_code = 0
        if name == b"true":
            return
        if name == b"false":
            result.exit_code = 1
        elif name == b"echo":
            result.stdout = b" ".join(rest) + b"\n"
        elif name == b"exit":
            result.exit_code = int(rest[0])
        elif name == b"cat":
            result.stdout = args.input or b""
        elif name == b"yes":
            result.stdout = b"y\n" * int(rest[0])
        elif name == b"sleep":
            result.exit_code = None
            await asyncio.sleep(float(rest[0]))
            result.exit_code = 0
        elif name == b"oom":
            self.oom_kills += 1
            result.exit_code, result.signal = None, 9
        elif name == b"die":
            result.exit_code = None
            self.listener.died(self.name, Death("its agent closed the channel"))
        else:
            result.exit_code, result.stderr = 127, name + b": not found\n"

    async def _op_files_write(self, raw: msgspec.Raw, call: FakeCall) -> Transferred:
        args = msgspec.msgpack.decode(raw, type=WriteArgs)
        data = args.data
        if data is None:
            data = b""
            while (item := await call.items.get()) is not None:
                data += msgspec.msgpack.decode(item, type=bytes)
                if len(data) > self.spec.disk_bytes:
                    raise Exhausted("the sandbox's disk is full", limit="disk")
                call.receiver.on_credit(1)
        self.files[args.path] = self.files.get(args.path, b"") + data if args.append else data
        return Transferred(size=len(data))

    async def _op_files_read(self, raw: msgspec.Raw, call: FakeCall) -> Transferred:
        args = msgspec.msgpack.decode(raw, type=ReadArgs)
        end = None if args.length is None else args.offset + args.length
        data = self._file(args.path)[args.offset : end]
        if len(data) <= wire.INLINE:
            return Transferred(size=len(data), data=data)
        for offset in range(0, len(data), _CHUNK):
            await call.send(data[offset : offset + _CHUNK])
        return Transferred(size=len(data))

    async def _op_files_stat(self, raw: msgspec.Raw, call: FakeCall) -> FileStat:
        path = msgspec.msgpack.decode(raw, type=PathArgs).path
        return FileStat(name=path.rpartition(b"/")[2], type="file", size=len(self._file(path)))

    async def _op_files_remove(self, raw: msgspec.Raw, call: FakeCall) -> None:
        path = msgspec.msgpack.decode(raw, type=PathArgs).path
        self._file(path)
        del self.files[path]

    def _file(self, path: bytes) -> bytes:
        if path not in self.files:
            raise NotFound(f"no file {path!r}")
        return self.files[path]


class FakeBackend:
    """See the module's docstring. `latency_s` is the time a create takes.

    A second one, with another name and capabilities, stands in for a second kind of sandbox.
    """

    def __init__(
        self,
        latency_s: float = 0.0,
        name: str = "fake",
        capabilities: Capabilities = CAPABILITIES,
    ) -> None:
        self.latency_s, self.name, self.capabilities = latency_s, name, capabilities
        self.sandboxes: dict[str, FakeSandbox] = {}
        self.prepared: set[str] = set()
        self._layers = FakeLayers()
        self._listener: Listener | None = None

    async def start(self, listener: Listener) -> None:
        self._listener = listener

    def located(self, spec: Spec) -> bool:
        return True

    async def pull(self, spec: Spec, report: Report = unreported) -> None: ...

    async def locate(self, spec: Spec) -> None: ...

    def prepare(self, sandbox: str, spec: Spec) -> Handle:
        if spec.image.startswith("missing"):
            raise NotFound(f"no layer {spec.image!r}", image=spec.image)
        self.prepared.add(sandbox)
        return Handle(sandbox=sandbox, backend=self.name, resources=spec.image.encode())

    def release(self, handle: Handle) -> None:
        self.prepared.discard(handle.sandbox)

    async def create(self, handle: Handle, spec: Spec) -> Instance:
        assert self._listener is not None
        if self.latency_s:
            await asyncio.sleep(self.latency_s)
        if spec.image.startswith("broken"):
            raise Exhausted("step mount: no space left on device", step="mount")
        sandbox = FakeSandbox(handle.sandbox, spec, self._listener)
        self.sandboxes[handle.sandbox] = sandbox
        return Instance(handle=handle, channel=sandbox, pid=1)

    async def destroy(self, handle: Handle) -> None:
        sandbox = self.sandboxes.pop(handle.sandbox, None)
        if sandbox is not None:
            sandbox.end()
        self.prepared.discard(handle.sandbox)

    async def recover(self, handle: Handle) -> Instance | None:
        sandbox = self.sandboxes.get(handle.sandbox)
        if sandbox is None:
            return None
        sandbox.closed = False
        paused = not sandbox.going.is_set()
        return Instance(handle=handle, channel=sandbox, pid=1, paused=paused)

    async def sweep(self, known: Collection[str]) -> Iterable[str]:
        unknown = [name for name in self.sandboxes if name not in known]
        for name in unknown:
            self.sandboxes.pop(name).end()
        return unknown

    async def usage(self, handle: Handle) -> Usage:
        sandbox = self.sandboxes[handle.sandbox]
        return Usage(
            memory_bytes=sandbox.memory_bytes,
            memory_swapped_bytes=sandbox.swapped_bytes,
            oom_kills=sandbox.oom_kills,
            disk_bytes=sum(map(len, sandbox.files.values())),
        )

    def warmth(self, handle: Handle) -> Warmth:
        sandbox = self.sandboxes[handle.sandbox]
        return Warmth(memory_bytes=sandbox.memory_bytes, cpu_usage_s=sandbox.cpu_usage_s)

    async def trim(self, handle: Handle, want_bytes: int) -> int:
        """Move that much of a sandbox's memory, of which a test says how much it has."""
        sandbox = self.sandboxes[handle.sandbox]
        freed = min(want_bytes, sandbox.memory_bytes)
        sandbox.memory_bytes -= freed
        sandbox.swapped_bytes += freed
        return freed

    async def pause(self, handle: Handle, save: Save) -> None:
        """Let calls wait. What runs already goes on: it is a task of the daemon's."""
        sandbox = self.sandboxes[handle.sandbox]
        await asyncio.sleep(0)
        sandbox.going.clear()
        sandbox.pauses += 1
        await save(handle)

    async def resume(self, handle: Handle, save: Save) -> None:
        sandbox = self.sandboxes[handle.sandbox]
        await asyncio.sleep(0)
        sandbox.resumes += not sandbox.going.is_set()
        sandbox.going.set()
        await save(handle)

    async def set_cpu_class(self, handle: Handle, cpu_class: CpuClass) -> tuple[str, ...]:
        """Remember it; there are no CPUs to share."""
        self.sandboxes[handle.sandbox].cpu_class = cpu_class
        return ("fake: no CPU is shared",) if cpu_class != "standard" else ()

    async def checkpoint(self, handle: Handle, save: Save) -> Checkpoint:
        raise Unsupported(f"the {self.name} backend keeps no checkpoints", reason="fake")

    async def rollback(self, handle: Handle, checkpoint: str, save: Save) -> Checkpoint:
        raise Unsupported(f"the {self.name} backend keeps no checkpoints", reason="fake")

    async def delete_checkpoint(self, handle: Handle, checkpoint: str, save: Save) -> None:
        raise Unsupported(f"the {self.name} backend keeps no checkpoints", reason="fake")

    def checkpoints(self, handle: Handle) -> list[Checkpoint]:
        return []

    async def pack_diff(self, handle: Handle, args: PackArgs) -> Packed:
        raise Unsupported(f"the {self.name} backend keeps no layers", reason="fake")

    async def keep(self, handle: Handle, args: KeepArgs) -> Kept:
        raise Unsupported(f"the {self.name} backend keeps no layers", reason="fake")

    async def open_stream(self, handle: Handle, op: str, args: msgspec.Raw) -> socket.socket:
        raise Unsupported(f"the {self.name} backend has no {op}", reason="fake")

    def oom_kills(self, handle: Handle) -> int:
        sandbox = self.sandboxes.get(handle.sandbox)
        return sandbox.oom_kills if sandbox is not None else 0

    def disk_full(self, handle: Handle) -> bool:
        return False

    async def update_network(self, handle: Handle, policy: NetPolicy, save: Save) -> None:
        """Keep the policy. Nothing inside could reach a network: `capabilities` claims none."""
        sandbox = self.sandboxes[handle.sandbox]
        if sandbox.spec.network == "none":
            raise WrongState(f"sandbox {handle.sandbox} has no network")
        await save(handle)
        sandbox.net = policy

    def pools(self) -> Mapping[str, float]:
        return {}

    def features(self) -> list[Feature]:
        return [
            Feature(name="fake", available=True, reason="in-process objects", needed_for="tests")
        ]

    def layers(self) -> Layers:
        return self._layers

    async def close(self) -> None:
        """Sandboxes stay: the object may be given to the next daemon of a test."""
