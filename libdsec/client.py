"""The way in: a client of one daemon."""

from __future__ import annotations

import asyncio
import contextlib
import os
import warnings
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any

import msgspec

from libdsec import endpoint as endpoints
from libdsec import model
from libdsec.batch import Batch
from libdsec.errors import DSecError, InvalidArgument, WrongState
from libdsec.layers import Layers
from libdsec.link import Link, pack, unpack
from libdsec.progress import ImportCallback, progress_items
from libdsec.record import key_text
from libdsec.request import Request, request_of
from libdsec.sandbox import Sandbox

_ANSWER_S = 1.0  # the daemon knows better why a create took too long: let it say so first


class DSecClient:
    """A client of the daemon at `endpoint`; one multiplexed connection, kept alive.

    `endpoint` is ``unix:/path``, ``/path``, ``tcp://host:port`` or ``tls://host:port``; by default
    that of DSEC_ENDPOINT, else the local daemon's socket. `token` (DSEC_TOKEN) authenticates over
    TCP; `ca_file` (DSEC_CA_FILE) holds the authorities to trust for TLS; `tls_server_name` is the
    name expected in the certificate when it is not the endpoint's host. A lost connection is made
    anew for `reconnect_timeout` seconds, commands that run go on meanwhile. `request_timeout`
    bounds calls that have no time of their own. A client belongs to one event loop; any number
    of tasks may use it at once.
    """

    def __init__(
        self,
        endpoint: str | None = None,
        *,
        token: str | None = None,
        ca_file: str | None = None,
        tls_server_name: str | None = None,
        reconnect_timeout: float = 30.0,
        request_timeout: float = 60.0,
    ) -> None:
        where = endpoints.from_environment(endpoint, ca_file, tls_server_name)
        secret = token if token is not None else os.environ.get("DSEC_TOKEN", "")
        self._link = Link(
            where, secret, reconnect_s=reconnect_timeout, request_timeout_s=request_timeout
        )
        self._layers = Layers(self._link, self.run_container)
        self._open = False

    def __repr__(self) -> str:
        return f"<DSecClient {self._link.endpoint}>"

    def __del__(self) -> None:
        if getattr(self, "_open", False):
            warnings.warn(f"unclosed {self!r}", ResourceWarning, source=self, stacklevel=2)

    @property
    def endpoint(self) -> str:
        """Where the daemon listens."""
        return str(self._link.endpoint)

    @property
    def welcome(self) -> model.Welcome:
        """What the daemon said of itself. Raises `WrongState` before `open`."""
        if self._link.welcome is None:
            raise WrongState("the client is not open yet: await client.open()")
        return self._link.welcome

    @property
    def layers(self) -> Layers:
        """The images that sandboxes are made of."""
        return self._layers

    # --- life

    async def open(self) -> DSecClient:
        """Connect. Raises `Unavailable` saying how to start the daemon, or `PermissionDenied`."""
        await self._link.connection()
        self._open = True
        return self

    async def close(self) -> None:
        """Disconnect. Sandboxes and background commands go on. Closing twice is no error."""
        self._open = False
        await self._link.close()

    async def __aenter__(self) -> DSecClient:
        return await self.open()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    # --- sandboxes

    async def run_container(
        self,
        args: model.DSecContainerRunArgs,
        timeout: float | None = None,
        *,
        on_progress: ImportCallback | None = None,
    ) -> Sandbox:
        """Create a container sandbox and return it running.

        `timeout` in seconds. A cancelled or timed-out call leaves no sandbox; a lost connection
        is retried with the same idempotency key and gives the same one. An image that has to be
        pulled from its registry takes as long as it takes; `on_progress` is told how far that is.
        Raises `NotFound` (no such image), `InvalidArgument`, `Exhausted` (host full; retryable),
        `Timeout`, `Unavailable` for a registry that does not give the image.
        """
        return await self._run(request_of(args), timeout, on_progress)

    async def run_containers(
        self, args: model.DSecContainerRunArgs, count: int, timeout: float | None = None
    ) -> AsyncIterator[Sandbox | DSecError]:
        """Create `count` sandboxes and yield each, or its error, as it becomes ready.

        Leaving the iteration early stops the sandboxes that were not yielded.
        """
        async with contextlib.aclosing(self._run_many(request_of(args), count, timeout)) as made:
            async for one in made:
                yield one

    async def run_microvm(
        self,
        args: model.DSecMicroVMRunArgs,
        timeout: float | None = None,
        *,
        on_progress: ImportCallback | None = None,
    ) -> Sandbox:
        """Create a microVM sandbox and return it running, as `run_container` does.

        Raises `Unsupported`, with what to do about it, where the daemon makes no microVMs.
        """
        return await self._run(request_of(args), timeout, on_progress)

    async def run_microvms(
        self, args: model.DSecMicroVMRunArgs, count: int, timeout: float | None = None
    ) -> AsyncIterator[Sandbox | DSecError]:
        """Create `count` microVM sandboxes, as `run_containers` does."""
        async with contextlib.aclosing(self._run_many(request_of(args), count, timeout)) as made:
            async for one in made:
                yield one

    async def run_fullvm(
        self, args: model.DSecFullVMRunArgs, timeout: float | None = None
    ) -> Sandbox:
        """Boot a disk image as a sandbox and return it when its agent answers.

        Raises `NotFound` for an image that the host has not, `Unsupported`, with what to do about
        it, where the daemon makes no full VMs.
        """
        return await self._run(request_of(args), timeout, None)

    async def _run(
        self, wanted: Request, timeout: float | None, on_progress: ImportCallback | None
    ) -> Sandbox:
        create = model.CreateArgs(
            key=os.urandom(16).hex(), args=wanted.args, backend=wanted.backend, vm=wanted.vm,
            timeout_s=timeout, progress=on_progress is not None,
        )  # fmt: skip
        info = await self._link.call(
            "sandbox.create",
            create,
            model.SandboxInfo,
            retry=True,
            timeout_s=0 if timeout is None else timeout + _ANSWER_S,
            on_item=progress_items(on_progress),
            on_late_result=self._discard,
        )
        return Sandbox(self._link, info)

    async def _run_many(
        self, wanted: Request, count: int, timeout: float | None
    ) -> AsyncGenerator[Sandbox | DSecError, None]:
        batch = Batch(self._link, wanted, count, timeout)
        try:
            while (made := await batch.next()) is not None:
                yield made if isinstance(made, DSecError) else Sandbox(self._link, made)
        finally:
            batch.abandon()

    # --- functions

    async def run_fncall(self, args: model.DSecFnCallArgs) -> model.FnCallResult:
        """Call a function in a warm worker and return how it ended (docs/fncall.md).

        Only with ``args.key`` it is asked for again after a lost connection: else it may have run.
        Cancelling it kills the call. Raises `InvalidArgument`,
        `NotFound` (no such layer), `Exhausted` (host full, or too many calls wait; retryable),
        `Unsupported` when the layers have no Python that can do it, `Unavailable` for a lost
        worker.
        """
        retry = args.key is not None
        return await self._link.call(
            "fncall.run", args, model.FnCallResult, retry=retry, timeout_s=0
        )

    async def map_fncall(
        self, args: model.DSecFnCallArgs, inputs: Iterable[Any], *, concurrency: int = 8
    ) -> AsyncIterator[model.FnCallResult]:
        """Call with each of `inputs` in place of ``args.input`` and yield the results in order.

        With ``args.key`` each call has a key of its own: that and the number of its input.

        No more than `concurrency` calls are open at once, and no more results wait to be taken.
        Leaving the iteration early, or an error of one call, gives up those that are open.
        """
        if concurrency < 1:
            raise InvalidArgument("concurrency: at least 1", field="concurrency")
        open_calls: deque[asyncio.Task[model.FnCallResult]] = deque()
        try:
            for number, value in enumerate(inputs):
                key = None if args.key is None else f"{args.key}/{number}"
                call = self.run_fncall(msgspec.structs.replace(args, input=value, key=key))
                open_calls.append(self._link.spawn(call, "libdsec-fncall"))
                if len(open_calls) == concurrency:
                    yield await open_calls.popleft()
            while open_calls:
                yield await open_calls.popleft()
        finally:
            for task in open_calls:
                task.cancel()
            await asyncio.gather(*open_calls, return_exceptions=True)

    # --- sandboxes that exist

    async def connect(self, sandbox_id: str) -> Sandbox:
        """Return the sandbox with this id. Raises `NotFound`."""
        ref = model.SandboxRef(id=sandbox_id)
        info = await self._link.call("sandbox.get", ref, model.SandboxInfo, retry=True)
        return Sandbox(self._link, info)

    async def get_sandbox(self, sandbox_id: str) -> Sandbox:
        """The same as `connect`."""
        return await self.connect(sandbox_id)

    async def list_sandboxes(
        self, *, labels: Mapping[str, str] | None = None, all: bool = False
    ) -> list[model.SandboxInfo]:
        """Return the sandboxes with these labels; with `all` also ended ones still remembered."""
        args = model.ListArgs(labels=dict(labels or {}), all=all)
        return await self._link.call("sandbox.list", args, list[model.SandboxInfo], retry=True)

    async def pause_sandboxes(
        self, labels: Mapping[str, str], target_bytes: int | None = None
    ) -> list[model.Paused]:
        """Pause all sandboxes that carry `labels`, a few at a time; see `Sandbox.pause`."""
        args = model.PauseManyArgs(labels=dict(labels), target_bytes=target_bytes)
        return await self._link.call(
            "sandbox.pause_many", args, list[model.Paused], retry=True, timeout_s=0
        )

    async def resume_sandboxes(self, labels: Mapping[str, str]) -> list[model.Resumed]:
        """Resume all sandboxes that carry `labels`."""
        args = model.ResumeManyArgs(labels=dict(labels))
        return await self._link.call(
            "sandbox.resume_many", args, list[model.Resumed], retry=True, timeout_s=0
        )

    def _discard(self, raw: msgspec.Raw) -> None:
        """A create that was given up was answered after all."""
        self._link.post("sandbox.stop", model.SandboxRef(id=unpack(raw, model.SandboxInfo).id))

    # --- host

    async def check(self) -> list[model.Feature]:
        """Return which kernel features the daemon's host has, and why not."""
        return await self._link.call("host.check", {}, list[model.Feature], retry=True)

    async def verify_key(self) -> str:
        """Return the public key of this host's records of grading, as `check_record` takes it.

        It is made when it is first asked for or used, and stays. Ask the host itself, not whoever
        hands a record in.
        """
        answer = await self._link.call("host.verify_key", {}, model.VerifyKey, retry=True)
        return key_text(answer.key)

    async def host_stats(self) -> model.HostStats:
        """Return what the daemon holds and how much more it may take."""
        return await self._link.call("host.stats", {}, model.HostStats, retry=True)

    # --- policies

    async def check_policy(
        self,
        policy: str | Mapping[str, Any] | None = None,
        *,
        network_rules: Mapping[str, bool] | None = None,
    ) -> model.PolicySummary:
        """Have the daemon compile a policy. Raises `InvalidArgument` that names the rule.

        `policy` and `network_rules` are those of `DSecContainerRunArgs`.
        """
        args = _policy(policy, network_rules)
        return await self._link.call("policy.check", args, model.PolicySummary, retry=True)

    async def explain_policy(
        self,
        policy: str | Mapping[str, Any] | None = None,
        *,
        network_rules: Mapping[str, bool] | None = None,
        network: model.NetworkMode = "none",
        backend: str = model.CONTAINER,
    ) -> list[model.PolicyRow]:
        """Return what enforces each entry of a policy on the daemon's host, or that nothing does.

        `network` is that of `DSecContainerRunArgs`, `backend` what the sandbox would run in:
        "container" or "microvm". Raises `InvalidArgument`, `Unsupported` for a backend that the
        daemon has not.
        """
        args = _policy(policy, network_rules, network, backend)
        return await self._link.call("policy.explain", args, list[model.PolicyRow], retry=True)

    async def test_policy(
        self,
        questions: Sequence[str],
        policy: str | Mapping[str, Any] | None = None,
        *,
        network_rules: Mapping[str, bool] | None = None,
    ) -> list[model.PolicyAnswer]:
        """Return what a policy says to questions like ``tcp 192.0.2.1 443`` (docs/policy.md)."""
        asked = _policy(policy, network_rules)
        args = model.PolicyTest(
            questions=list(questions), policy=asked.policy, network_rules=asked.network_rules
        )
        return await self._link.call("policy.test", args, list[model.PolicyAnswer], retry=True)

    # --- events

    async def events(self, sandbox_id: str = "") -> AsyncIterator[model.Event]:
        """Yield what happens to sandboxes (or one sandbox) from now on.

        Raises `Unavailable` when the connection is lost: events of the time between are missing.
        """
        args = model.EventFilter(sandbox=sandbox_id)
        call = await self._link.start("events.subscribe", pack(args))
        try:
            while (raw := await call.next_item()) is not None:
                yield unpack(raw, model.Event)
        finally:
            if not call.closed:
                call.cancel()


def _policy(
    policy: str | Mapping[str, Any] | None,
    rules: Mapping[str, bool] | None,
    network: model.NetworkMode = "none",
    backend: str = model.CONTAINER,
) -> model.PolicyArgs:
    return model.PolicyArgs(
        policy=dict(policy) if isinstance(policy, Mapping) else policy,
        network_rules=None if rules is None else dict(rules),
        network=network,
        backend=backend,
    )
