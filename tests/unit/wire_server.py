"""A small honest daemon for tests of the client: the real protocol, commands as real processes.

It keeps its state (sandboxes, commands, files) across `drop` and `restart`, as dsecd does. Tests
override an operation with ``server.on[op] = handler`` and read what arrived in `server.requests`.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from libdsec import model, wire
from libdsec.errors import DSecError, Internal, InvalidArgument, NotFound, PermissionDenied, to_wire
from tests.unit.wire_sandbox import SandboxWorld

Handler = Callable[["ServerCall"], Awaitable[Any]]


class ServerCall:
    """One call of a client. `send` honours its credit."""

    def __init__(self, peer: Peer, request: wire.Request) -> None:
        self.peer, self.request = peer, request
        self.server = peer.server
        self.cancelled = False
        self.credit = wire.INITIAL_CREDIT
        self.inbox: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.task: asyncio.Task[None] | None = None
        self.changed = asyncio.Event()
        self.sent = self.received = 0

    def args(self, kind: Any) -> Any:
        try:
            return msgspec.msgpack.decode(self.request.args, type=kind)
        except msgspec.DecodeError as error:
            raise InvalidArgument(str(error)) from error

    async def send(self, value: Any) -> None:
        while self.credit <= 0:
            self.changed.clear()
            await self.changed.wait()
        self.credit -= 1
        self.sent += 1
        self.peer.write(wire.Item(self.request.id, wire.pack(value)))
        await self.peer.drained.wait()

    async def items(self) -> AsyncIterator[bytes]:
        """Yield what the client streams, granting a credit for each."""
        while (data := await self.inbox.get()) is not None:
            self.received += 1
            yield data
            self.peer.write(wire.Credit(self.request.id, 1))


class Peer(asyncio.Protocol):
    """The server's end of one connection."""

    def __init__(self, server: WireServer) -> None:
        self.server = server
        self.splitter = wire.Splitter()
        self.calls: dict[int, ServerCall] = {}
        self.drained = asyncio.Event()
        self.drained.set()
        self.greeted = False

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.server.peers.add(self)

    def pause_writing(self) -> None:
        self.drained.clear()

    def resume_writing(self) -> None:
        self.drained.set()

    def data_received(self, data: bytes) -> None:
        for frame in self.splitter.feed(data):
            self.dispatch(frame)

    def dispatch(self, frame: wire.Frame) -> None:
        if isinstance(frame, wire.Request):
            assert frame.id not in self.calls, "a call id was used twice"
            call = ServerCall(self, frame)
            self.calls[frame.id] = call
            call.task = self.server.spawn(self.answer(call))
            return
        call = self.calls.get(frame.id)
        if call is None:
            return
        if isinstance(frame, wire.Item):
            call.inbox.put_nowait(msgspec.msgpack.decode(frame.data))
            assert call.inbox.qsize() <= wire.INITIAL_CREDIT, "the client sent without credit"
        elif isinstance(frame, wire.End):
            call.inbox.put_nowait(None)
        elif isinstance(frame, wire.Credit):
            call.credit += frame.n
            assert call.credit <= wire.INITIAL_CREDIT, "the client granted more than was sent"
            call.changed.set()
        elif isinstance(frame, wire.Cancel):
            call.cancelled = True
            self.server.cancels.append(call.request.op)
            assert call.task is not None
            call.task.cancel()

    async def answer(self, call: ServerCall) -> None:
        request = call.request
        self.server.requests.append((request.op, request.target))
        try:
            handler = self.server.on.get(request.op)
            if handler is None:
                raise Internal(f"no operation {request.op}")
            if not self.greeted and request.op != "hello":
                raise InvalidArgument("the first call must be hello")
            result = await handler(call)
            self.write(wire.Reply(request.id, wire.pack(result)))
        except DSecError as error:
            self.write(wire.Failure(request.id, to_wire(error)))
        except asyncio.CancelledError:
            error = InvalidArgument("cancelled")
            self.write(wire.Failure(request.id, to_wire(error)))
        finally:
            self.calls.pop(request.id, None)

    def write(self, frame: wire.Frame) -> None:
        if not self.transport.is_closing():
            self.transport.write(wire.encode(frame))

    def connection_lost(self, error: Exception | None) -> None:
        self.server.peers.discard(self)
        self.drained.set()
        for call in tuple(self.calls.values()):
            if call.task is not None:
                call.task.cancel()


class WireServer:
    """The daemon. `root` is where its sandboxes' files are."""

    def __init__(self, root: Path, *, token: str = "", ssl: Any = None) -> None:
        self.root, self.token, self.ssl = root, token, ssl
        self.socket = str(root / "d.sock")
        self.port = 0
        self.peers: set[Peer] = set()
        self.tasks: set[asyncio.Task[None]] = set()
        self.requests: list[tuple[str, str]] = []
        self.cancels: list[str] = []
        self.sandboxes: dict[str, model.SandboxInfo] = {}
        self.keys: dict[str, str] = {}
        self.layers: dict[str, model.LayerInfo] = {}
        self.subscribers: list[asyncio.Queue[model.Event]] = []
        self.create_delay_s = 0.0
        self.world = SandboxWorld(root, self.spawn)
        self.on: dict[str, Handler] = {
            "hello": self.hello,
            "sandbox.create": self.create,
            "sandbox.create_many": self.create_many,
            "sandbox.get": self.get,
            "sandbox.stop": self.stop_sandbox,
            "sandbox.list": self.list,
            "sandbox.set_timeout": self.set_timeout,
            "sandbox.metrics": self.metrics,
            "events.subscribe": self.subscribe,
            "host.check": self.check,
            "host.stats": self.stats,
            "layer.list": self.layer_list,
            "layer.import": self.layer_import,
            "layer.remove": self.layer_remove,
            **self.world.operations(),
        }

    # --- life

    def spawn(self, work: Any) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    async def start(self, *, tcp: bool = False) -> None:
        loop = asyncio.get_running_loop()
        if tcp:
            self._server: Any = await loop.create_server(
                lambda: Peer(self), "127.0.0.1", self.port, ssl=self.ssl
            )
            self.port = self._server.sockets[0].getsockname()[1]
        else:
            self._server = await loop.create_unix_server(lambda: Peer(self), self.socket)

    async def drop(self) -> None:
        """Cut every connection, as a crash does; the listener stays."""
        for peer in tuple(self.peers):
            peer.transport.abort()
        await asyncio.sleep(0)

    async def halt(self) -> None:
        """Stop listening and cut every connection; state and commands stay."""
        self._server.close()
        await self.drop()
        await self._server.wait_closed()
        Path(self.socket).unlink(missing_ok=True)

    async def close(self) -> None:
        with contextlib.suppress(Exception):
            await self.halt()
        await self.world.close()
        for task in tuple(self.tasks):
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    def count(self, op: str) -> int:
        return sum(1 for name, _ in self.requests if name == op)

    # --- operations of the daemon

    async def hello(self, call: ServerCall) -> model.Welcome:
        args = call.args(model.Hello)
        if args.token != self.token:
            raise PermissionDenied("the token is wrong")
        call.peer.greeted = True
        return model.Welcome(protocol=wire.PROTOCOL, server="dsecd/test", node="n1")

    def make(
        self,
        key: str,
        args: model.DSecContainerRunArgs,
        backend: str = model.CONTAINER,
        vm: model.VmArgs | None = None,
    ) -> model.SandboxInfo:
        if key not in self.keys:
            if args.container_image == "missing":
                raise NotFound("no layer named missing")
            sandbox_id = f"n1-{len(self.keys) + 1}"
            self.keys[key] = sandbox_id
            (self.root / sandbox_id).mkdir()
            self.sandboxes[sandbox_id] = model.MicroVMInfo(
                id=sandbox_id, state="running", image=args.container_image,
                created_at=time.time(), labels=args.labels, args=args,
                backend=backend, vm=vm,
            )  # fmt: skip
        return self.sandboxes[self.keys[key]]

    async def create(self, call: ServerCall) -> model.SandboxInfo:
        args = call.args(model.CreateArgs)
        await asyncio.sleep(self.create_delay_s)
        return self.make(args.key, args.args, args.backend, args.vm)

    async def create_many(self, call: ServerCall) -> None:
        args = call.args(model.CreateManyArgs)
        for number, key in enumerate(args.keys):
            await asyncio.sleep(self.create_delay_s)
            if args.args.labels.get("fail_every") and number % 3 == 2:
                error = to_wire(InvalidArgument("made to fail"))
                await call.send(model.Created(key=key, error=error))
                continue
            info = self.make(key, args.args, args.backend, args.vm)
            try:
                await call.send(model.Created(key=key, info=info))
            except asyncio.CancelledError:
                if call.cancelled:  # made and not reported: undone
                    info.state = "stopped"
                raise

    def find(self, sandbox_id: str) -> model.SandboxInfo:
        if sandbox_id not in self.sandboxes:
            raise NotFound(f"no sandbox {sandbox_id}")
        return self.sandboxes[sandbox_id]

    async def get(self, call: ServerCall) -> model.SandboxInfo:
        return self.find(call.args(model.SandboxRef).id)

    async def stop_sandbox(self, call: ServerCall) -> model.SandboxInfo:
        info = self.find(call.args(model.SandboxRef).id)
        info.state, info.ended_at = "stopped", time.time()
        return info

    async def list(self, call: ServerCall) -> list[model.SandboxInfo]:
        args = call.args(model.ListArgs)
        return [
            info for info in self.sandboxes.values()
            if (args.all or info.state == "running") and args.labels.items() <= info.labels.items()
        ]  # fmt: skip

    async def set_timeout(self, call: ServerCall) -> model.SandboxInfo:
        args = call.args(model.SetTimeout)
        info = self.find(args.id)
        ttl = args.ttl_running_stop
        info.expires_at = None if ttl is None else time.time() + ttl
        return info

    async def metrics(self, call: ServerCall) -> model.Metrics:
        self.find(call.args(model.SandboxRef).id)
        return model.Metrics(memory_bytes=1 << 20, memory_limit_bytes=1 << 30, pids=2, uptime_s=3)

    async def subscribe(self, call: ServerCall) -> None:
        queue: asyncio.Queue[model.Event] = asyncio.Queue()
        self.subscribers.append(queue)
        while True:
            await call.send(await queue.get())

    async def check(self, call: ServerCall) -> list[model.Feature]:
        return [
            model.Feature(name="overlay", available=True, needed_for="layers"),
            model.Feature(name="core scheduling", available=False, reason="no SCHED_CORE"),
        ]

    async def stats(self, call: ServerCall) -> model.HostStats:
        return model.HostStats(node="n1", version="test", sandboxes=len(self.sandboxes), cpus=2)

    async def layer_list(self, call: ServerCall) -> list[model.LayerInfo]:
        return list(self.layers.values())

    async def layer_import(self, call: ServerCall) -> model.LayerInfo:
        args = call.args(model.LayerImport)
        layer = model.LayerInfo(name=args.name, digest="sha256:ab", size_bytes=9, created_at=1.0)
        self.layers[args.name] = layer
        return layer

    async def layer_remove(self, call: ServerCall) -> None:
        if self.layers.pop(call.args(model.LayerRef).name, None) is None:
            raise NotFound("no such layer")


@contextlib.contextmanager
def in_thread(server: WireServer) -> Iterator[asyncio.AbstractEventLoop]:
    """Run `server` on a loop of its own, for tests of synchronous code."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        asyncio.run_coroutine_threadsafe(server.start(), loop).result(10)
        yield loop
    finally:
        asyncio.run_coroutine_threadsafe(server.close(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()
