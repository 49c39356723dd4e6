"""The operations of the daemon itself: name → typed arguments → engine.

Adding one is a line in `Operations.table` and a method. Quick ones are plain functions and are
answered in the same turn of the loop; the others run as a task (`LocalCall`).
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import Callable
from typing import Any

import msgspec

from dsecd import __version__
from dsecd.api import displays, policies
from dsecd.api.local import LocalCall
from dsecd.api.progress import told
from dsecd.engine import cpu, pausing, snapshots, usage
from dsecd.engine import verify as grading
from dsecd.engine.fncall import Pools
from dsecd.engine.manager import Manager
from dsecd.engine.request import Kind
from dsecd.engine.sandbox import Sandbox
from dsecd.engine.signing import Signer
from dsecd.images.tool import Report, unreported
from libdsec import model
from libdsec.errors import DSecError, InvalidArgument, Timeout, to_wire

MAX_BATCH = 100_000  # keys of one create_many
_FIELD = re.compile(r" - at `\$\.?([^`]*)`")
Nothing = type(None)


class Operation:
    """A table entry: how to decode the arguments, and who answers."""

    __slots__ = ("_decoder", "handler", "name", "quick")

    def __init__(self, name: str, args: Any, handler: Callable[..., Any], quick: bool) -> None:
        self.name, self.handler, self.quick = name, handler, quick
        self._decoder = msgspec.msgpack.Decoder(args)

    def decode(self, raw: msgspec.Raw) -> Any:
        """Return the typed arguments. Raises `InvalidArgument` naming the field."""
        try:
            return self._decoder.decode(raw)
        except msgspec.DecodeError as error:
            text = str(error)
            found = _FIELD.search(text) or re.search(r"field `([^`]*)`", text)
            field = found.group(1) if found else ""
            raise InvalidArgument(f"{self.name}: {text}", field=field) from error


class Operations:
    """The table, bound to one engine."""

    def __init__(self, manager: Manager, fncalls: Pools) -> None:
        self._manager, self._fncalls = manager, fncalls
        self._started = time.monotonic()
        self._signer = Signer(manager.config.state / "verify.key")
        entries: list[tuple[str, Any, Callable[..., Any], bool]] = [
            ("sandbox.create", model.CreateArgs, self.create, False),
            ("sandbox.create_many", model.CreateManyArgs, self.create_many, False),
            ("sandbox.get", model.SandboxRef, self.get, True),
            ("sandbox.stop", model.SandboxRef, self.stop, False),
            ("sandbox.list", model.ListArgs, self.select, True),
            ("sandbox.set_timeout", model.SetTimeout, self.set_timeout, True),
            ("sandbox.set_cpu_class", model.SetCpuClass, self.set_cpu_class, False),
            ("sandbox.pause", model.PauseArgs, self.pause, False),
            ("sandbox.resume", model.SandboxRef, self.resume, False),
            ("sandbox.pause_many", model.PauseManyArgs, self.pause_many, False),
            ("sandbox.resume_many", model.ResumeManyArgs, self.resume_many, False),
            ("sandbox.metrics", model.SandboxRef, self.metrics, False),
            ("events.subscribe", model.EventFilter, self.subscribe, False),
            ("host.check", msgspec.Raw, self.check, False),
            ("host.stats", msgspec.Raw, self.stats, True),
            ("layer.list", msgspec.Raw, self.layer_list, False),
            ("layer.get", model.LayerRef, self.layer_get, False),
            ("layer.import", model.LayerImport, self.layer_import, False),
            ("layer.collapse", model.LayerCollapse, self.layer_collapse, False),
            ("layer.remove", model.LayerRef, self.layer_remove, False),
            ("layer.collect", model.CollectArgs, self.layer_collect, False),
            ("sandbox.pack_diff", model.PackArgs, self.pack_diff, False),
            ("sandbox.checkpoint", model.SandboxRef, self.checkpoint, False),
            ("sandbox.checkpoints", model.SandboxRef, self.checkpoints, True),
            ("sandbox.rollback", model.CheckpointRef, self.rollback, False),
            ("sandbox.verify", model.VerifyArgs, self.verify, False),
            ("host.verify_key", msgspec.Raw, self.verify_key, True),
            ("sandbox.delete_checkpoint", model.CheckpointRef, self.delete_checkpoint, False),
            ("fncall.run", model.DSecFnCallArgs, self.fncall_run, False),
            *policies.entries(manager),
            *displays.entries(manager),
        ]
        self.table = {name: Operation(name, *rest) for name, *rest in entries}

    # --- sandboxes

    async def create(self, call: LocalCall, args: model.CreateArgs) -> model.SandboxInfo:
        if not args.progress:
            return await self._create(call, args)
        async with told(call) as report:
            return await self._create(call, args, report)

    async def _create(
        self, call: LocalCall, args: model.CreateArgs, report: Report = unreported
    ) -> model.SandboxInfo:
        owner, kind = _owner(call), _kind(args)
        try:
            if args.timeout_s is None:
                sandbox = await self._manager.create(owner, args.key, kind, args.args, report)
            else:
                async with asyncio.timeout(args.timeout_s):
                    sandbox = await self._manager.create(owner, args.key, kind, args.args, report)
        except TimeoutError:
            self._give_up(owner, args.key, 0.0)
            raise Timeout(f"not running after {args.timeout_s:g} s; the create is undone") from None
        except asyncio.CancelledError:
            self._give_up(owner, args.key, self._grace(call))
            raise
        _hand_over(call, sandbox)
        return sandbox.info()

    async def create_many(self, call: LocalCall, args: model.CreateManyArgs) -> None:
        if len(args.keys) > MAX_BATCH or len(set(args.keys)) != len(args.keys):
            raise InvalidArgument(f"keys: at most {MAX_BATCH}, all different", field="keys")
        owner = _owner(call)
        pending = set(args.keys)
        try:
            async with asyncio.timeout(args.timeout_s):
                batch = self._manager.create_many(owner, args.keys, _kind(args), args.args)
                async with contextlib.aclosing(batch) as outcomes:
                    async for key, outcome in outcomes:
                        await call.send(_created(key, outcome))
                        pending.discard(key)
                        if isinstance(outcome, Sandbox):
                            _hand_over(call, outcome)
        except TimeoutError:
            self._give_up_all(owner, pending, 0.0)
            raise Timeout(
                f"{len(pending)} of {len(args.keys)} were not running after {args.timeout_s:g} s; "
                "these are undone"
            ) from None
        except asyncio.CancelledError:
            self._give_up_all(owner, pending, self._grace(call))
            raise

    def _give_up_all(self, owner: str, keys: set[str], grace_s: float) -> None:
        for key in keys:
            self._give_up(owner, key, grace_s)

    def _give_up(self, owner: str, key: str, grace_s: float) -> None:
        sandbox = self._manager.by_key(owner, key)
        if sandbox is not None:
            self._manager.abandon(sandbox, grace_s)

    def _grace(self, call: LocalCall) -> float:
        """A lost client may come back with its key; one that cancels has said what it wants."""
        return self._manager.config.limits.unclaimed_grace_s if call.client_lost else 0.0

    def get(self, call: LocalCall, args: model.SandboxRef) -> model.SandboxInfo:
        return self._manager.get(args.id).info(with_args=True)

    async def stop(self, call: LocalCall, args: model.SandboxRef) -> model.SandboxInfo:
        call.connection.fresh.discard(args.id)
        return (await self._manager.stop(args.id)).info()

    def select(self, call: LocalCall, args: model.ListArgs) -> list[model.SandboxInfo]:
        return [sandbox.info() for sandbox in self._manager.select(args.labels, args.all)]

    def set_timeout(self, call: LocalCall, args: model.SetTimeout) -> model.SandboxInfo:
        value = args.ttl_running_stop
        if value is not None and not 0 < value < 1e9:
            raise InvalidArgument("ttl_running_stop: above 0, or none", field="ttl_running_stop")
        sandbox = self._manager.get(args.id)
        self._manager.set_timeout(sandbox, value)
        return sandbox.info()

    async def set_cpu_class(self, call: LocalCall, args: model.SetCpuClass) -> model.SandboxInfo:
        return await cpu.set_cpu_class(self._manager, args)

    async def pause(self, call: LocalCall, args: model.PauseArgs) -> model.Paused:
        return await pausing.pause(self._manager, args.id, args.target_bytes)

    async def resume(self, call: LocalCall, args: model.SandboxRef) -> model.SandboxInfo:
        return (await pausing.resume(self._manager, args.id)).info()

    async def pause_many(self, call: LocalCall, args: model.PauseManyArgs) -> list[model.Paused]:
        return await pausing.pause_many(self._manager, args.labels, args.target_bytes)

    async def resume_many(self, call: LocalCall, args: model.ResumeManyArgs) -> list[model.Resumed]:
        return await pausing.resume_many(self._manager, args.labels)

    async def pack_diff(self, call: LocalCall, args: model.PackArgs) -> model.Packed:
        if not args.builder:
            args = msgspec.structs.replace(args, builder=_owner(call))
        return await snapshots.pack_diff(self._manager, args)

    async def checkpoint(self, call: LocalCall, args: model.SandboxRef) -> model.Checkpoint:
        return await snapshots.checkpoint(self._manager, args.id)

    def checkpoints(self, call: LocalCall, args: model.SandboxRef) -> list[model.Checkpoint]:
        sandbox = self._manager.get(args.id)
        return sandbox.backend.checkpoints(sandbox.handle) if sandbox.handle is not None else []

    async def rollback(self, call: LocalCall, args: model.CheckpointRef) -> model.Checkpoint:
        return await snapshots.rollback(self._manager, args.id, args.checkpoint)

    async def delete_checkpoint(self, call: LocalCall, args: model.CheckpointRef) -> None:
        await snapshots.delete_checkpoint(self._manager, args.id, args.checkpoint)

    async def verify(self, call: LocalCall, args: model.VerifyArgs) -> model.Verified:
        return await grading.verify(self._manager, self._signer, _owner(call), args, call.send)

    def verify_key(self, call: LocalCall, args: msgspec.Raw) -> model.VerifyKey:
        return model.VerifyKey(key=self._signer.public())

    async def metrics(self, call: LocalCall, args: model.SandboxRef) -> model.Metrics:
        return await usage.metrics(self._manager, args.id)

    async def subscribe(self, call: LocalCall, args: model.EventFilter) -> None:
        events = self._manager.events.subscribe(args.sandbox)
        try:
            async for event in events:
                await call.send(event)
        finally:
            self._manager.events.unsubscribe(events)

    async def fncall_run(self, call: LocalCall, args: model.DSecFnCallArgs) -> model.FnCallResult:
        try:
            return await self._fncalls.run(_owner(call), args)
        except asyncio.CancelledError:
            if not call.client_lost:
                self._fncalls.give_up(_owner(call), args)
            raise

    # --- host

    async def check(self, call: LocalCall, args: msgspec.Raw) -> list[model.Feature]:
        # the first time, features are tried in a process of their own: seconds
        return await asyncio.to_thread(self._manager.backends.features)

    def stats(self, call: LocalCall, args: msgspec.Raw) -> model.HostStats:
        admission = self._manager.admission
        reading = admission.reading()
        return model.HostStats(
            node=self._manager.config.node,
            version=__version__,
            uptime_s=time.monotonic() - self._started,
            sandboxes=admission.sandboxes,
            sandboxes_max=admission.sandboxes_max,
            memory_total_bytes=reading.memory_total_bytes,
            memory_available_bytes=reading.memory_available_bytes,
            memory_requested_bytes=admission.memory_requested,
            cpus=admission.host.cpus,
            cpu_requested=round(admission.cpu_requested, 3),
            swap_total_bytes=reading.swap_total_bytes,
            swap_free_bytes=reading.swap_free_bytes,
            memory_overcommit=round(admission.memory_overcommit, 4),
            cpu_overcommit=round(admission.cpu_overcommit, 4),
            reclaim_need_bytes=admission.above_target_bytes(),
        )

    async def layer_list(self, call: LocalCall, args: msgspec.Raw) -> list[model.LayerInfo]:
        return await self._manager.backends.own.layers().list()

    async def layer_get(self, call: LocalCall, args: model.LayerRef) -> model.LayerInfo:
        return await self._manager.backends.own.layers().get(args.name)

    async def layer_import(self, call: LocalCall, args: model.LayerImport) -> model.LayerInfo:
        layers = self._manager.backends.own.layers()
        if not args.progress:
            return await layers.import_(args)
        async with told(call) as report:
            return await layers.import_(args, report)

    async def layer_collapse(self, call: LocalCall, args: model.LayerCollapse) -> model.LayerInfo:
        layers = self._manager.backends.own.layers()
        if not args.progress:
            return await layers.collapse(args)
        async with told(call) as report:
            return await layers.collapse(args, report)

    async def layer_remove(self, call: LocalCall, args: model.LayerRef) -> None:
        await self._manager.backends.own.layers().remove(args.name)

    async def layer_collect(self, call: LocalCall, args: model.CollectArgs) -> model.Collected:
        return await self._manager.backends.own.layers().collect(args.grace_s, args.wait_s)


def _owner(call: LocalCall) -> str:
    principal = call.connection.principal
    return principal.name if principal is not None else ""


def _kind(args: model.CreateArgs | model.CreateManyArgs) -> Kind:
    return Kind(backend=args.backend, vm=args.vm)


def _hand_over(call: LocalCall, sandbox: Sandbox) -> None:
    """The answer about `sandbox` is being sent: it is the client's now, unless it never reads."""
    if sandbox.id not in call.connection.fresh:
        call.connection.fresh.add(sandbox.id)
        sandbox.claims += 1


def _created(key: str, outcome: Sandbox | DSecError) -> model.Created:
    if isinstance(outcome, Sandbox):
        return model.Created(key=key, info=outcome.info())
    return model.Created(key=key, error=to_wire(outcome))
