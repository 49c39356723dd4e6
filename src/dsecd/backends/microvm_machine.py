"""One microVM: its monitor in the jail, its agent in the guest, and why it ended."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from dsecd.backends import microvm_memory
from dsecd.backends.abc import Channel
from dsecd.backends.agent import AgentChannel, call
from dsecd.backends.microvm_plan import VMM, VMM_USER, Begin, Clock, clock
from dsecd.host.vm_plan import Launch, Machine, VmEvent, Vmm, VmPlan
from dsecd.model import Death
from libdsec.errors import DSecError, Internal, NotFound, Timeout, Unavailable, WrongState
from libdsec.model import AttachArgs, CommandResult, ExecArgs, Output
from libdsec.wire import pack

logger = logging.getLogger("dsecd.microvm")
BOOT_S = 120.0  # an emulated guest on a busy host; a quick one has booted in two
LOAD_S = 40.0  # to take up a saved guest and have its answer; takes half a second
ANSWER_S = 10.0  # of an agent that runs, to the first frame of a connection
AGAIN_S = 0.2  # long enough for the guest to see that the host went away
SILENT_S = 60.0
HUSHED_S = 1.0  # after so long without an answer the console is looked at
EXPLAIN_S = 2.0  # for the monitor to say why, after the agent is gone
HALTED = "reboot: System halted"
TOLD = 4000  # characters of last words
_CONTROL = re.compile(r"\x1b(\[[0-9;?]*[A-Za-z]|c)|[^\x20-\x7e\n]")  # of terminals

OnDeath = Callable[[Death], None]
OnKills = Callable[[int], None]
Step = Callable[[Machine], Awaitable[None]]
T = TypeVar("T", bound=Clock)


class _Watch(msgspec.Struct):
    """An item of `vm.watch`."""

    oom_kills: int


class GuestMachine:
    """Made for one sandbox by its backend; `on_death` is called once, when it ended by itself."""

    def __init__(
        self, sandbox: str, vmm: Vmm, plan: VmPlan, jail: Channel, root: Path,
        on_death: OnDeath, on_kills: OnKills,
    ) -> None:  # fmt: skip
        self.sandbox, self._vmm, self.plan, self._jail, self._root = (
            sandbox, vmm, plan, jail, root,
        )  # fmt: skip
        self._on_death: OnDeath | None = on_death
        self._on_kills = on_kills
        self._machine: Machine | None = None
        self._work: set[asyncio.Task[None]] = set()
        self.channel: AgentChannel | None = None
        self.oom_kills = 0
        self.paused = False
        self.ping_s, self.boot_s = 20.0, BOOT_S
        self._followed = False
        self._loading = False  # how that ends is the answer of `take_up`

    # --- start ----------------------------------------------------------------------------------

    async def start(self, launch: Launch, begin: Begin, booted: Step | None = None) -> None:
        """Start the monitor and boot the guest. Raises `Internal`, `Timeout`, `Unavailable`.

        `booted` is called when the agent answers and knows nothing yet.
        """
        await self._run(launch)
        try:
            async with asyncio.timeout(self.boot_s):
                await self._connect(self.boot_s)
                assert self.channel is not None
                assert self._machine is not None
                if booted is not None:
                    await booted(self._machine)
                await call(self.channel, "vm.begin", pack(_now(begin)))
        except TimeoutError as error:
            raise Timeout(
                f"the guest of {self.sandbox} did not start in {self.boot_s:.0f} s: "
                + (await self._last_words() or "nothing on its console")
            ) from error
        except DSecError as error:
            raise Internal(
                f"the guest of {self.sandbox} did not start: {error.message}; "
                + (await self._last_words() or "nothing on its console")
            ) from error
        self._begin_to_follow()

    async def take_up(self, launch: Launch, load: Step, op: str, told: Clock) -> None:
        """Start the monitor with a saved guest that `load` takes up, and tell it by `op` what
        it cannot know. Raises `DSecError`, `OSError`.

        After a failure the monitor is gone: `start`, or another `take_up`, is possible.
        """
        async with self._loaded(launch):
            assert self._machine is not None
            await load(self._machine)
            met = await self._met(self._machine, ANSWER_S)
            try:
                await call(met, op, pack(_now(told)))
            except BaseException:
                met.close()
                raise
            if self.channel is None:
                self.channel = AgentChannel.detached(self._lost)
            self.channel.take_over(met)
        self._begin_to_follow()

    @contextlib.asynccontextmanager
    async def _loaded(self, launch: Launch) -> AsyncIterator[None]:
        """Start the monitor with a guest that is taken up, and stop it where that fails."""
        self._loading = True
        await self._run(launch)
        try:
            async with asyncio.timeout(LOAD_S):
                self._machine = await self._vmm.connect(self._root, self.plan, self._heard)
                yield
        except BaseException as error:
            await self.end_monitor()
            if isinstance(error, TimeoutError):
                raise Timeout(f"its agent did not answer in {LOAD_S:g} s") from error
            raise
        self.paused = self._loading = False

    async def end_monitor(self) -> None:
        """Kill the monitor; calls wait for the next one."""
        self._loading = True
        gone = None if self.channel is None else self.channel.detach()
        if self._machine is not None:
            self._machine.close()
            self._machine = None
        for op in ("exec.kill", "exec.wait", "exec.forget"):
            with contextlib.suppress(NotFound, WrongState):
                await call(self._jail, op, pack({"cid": VMM}))
        if gone is None:
            self._loading = False
            return
        try:
            async with asyncio.timeout(ANSWER_S):
                await gone  # all that the guest had said has been heard
        except TimeoutError as error:
            raise Internal("the monitor ended, and its socket is open still") from error

    async def _run(self, launch: Launch) -> None:
        wanted = ExecArgs(
            cid=VMM,
            argv=[word.encode() for word in launch.argv],
            env=dict(launch.env),
            user=VMM_USER,
            background=True,
        )
        await call(self._jail, "exec.start", pack(wanted))

    async def adopt(self, *, saved: bool) -> None:
        """Take up a machine that an earlier daemon started. Raises `Unavailable`, `Timeout`.

        Of one that is `saved` the monitor may have been about to be ended: it is.
        """
        if saved:
            self.paused = True
            self.channel = AgentChannel.detached(self._lost)
            await self.end_monitor()
            return
        try:
            async with asyncio.timeout(SILENT_S):
                await self._connect(ANSWER_S)
                assert self.channel is not None
                await call(self.channel, "vm.clock", pack(clock()))
        except TimeoutError as error:
            raise Timeout("its agent does not answer") from error
        self._begin_to_follow()

    async def _connect(self, answer_s: float) -> None:
        self._machine = await self._vmm.connect(self._root, self.plan, self._heard)
        await self._machine.boot(self.plan)
        if await self._machine.status() in ("paused", "saved"):
            await self._machine.cont()  # an earlier daemon died while it saved it
        met = await self._met(self._machine, answer_s)
        self.channel = AgentChannel.detached(self._lost)
        self.channel.take_over(met)

    async def _met(self, machine: Machine, answer_s: float) -> AgentChannel:
        """Return a connection to the guest's agent."""
        while (status := await machine.status()) in ("starting", "running"):
            # bytes of an earlier connection may have been under way: then it takes another one
            with contextlib.suppress(TimeoutError, Unavailable):
                return await self._open_agent(answer_s)
            await asyncio.sleep(AGAIN_S)
        raise Unavailable(f"its machine is {status}")

    async def _open_agent(self, answer_s: float) -> AgentChannel:
        """Return a channel whose other end is at the beginning, too."""
        stream = await self._vmm.open_agent(self._root, self.plan)
        channel = await AgentChannel.adopt(stream)
        try:
            async with asyncio.timeout(answer_s):
                # drops calls of an earlier connection whose end the guest may not have seen
                await call(channel, "sys.ping", pack({"first": True}))
        except BaseException:
            channel.close()
            raise
        return channel

    def _begin_to_follow(self) -> None:
        self._spawn(self._watch())
        if not self._followed:
            self._followed = True
            self._spawn(self._ping())

    def _spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._work.add(task)
        task.add_done_callback(self._work.discard)

    # --- what happens by itself -----------------------------------------------------------------

    async def _watch(self) -> None:
        """Count what the guest's kernel kills for want of memory."""

        def counted(raw: msgspec.Raw) -> None:
            kills = msgspec.msgpack.decode(raw, type=_Watch).oom_kills
            if kills != self.oom_kills:
                self.oom_kills = kills
                self._on_kills(kills)

        assert self.channel is not None
        with contextlib.suppress(DSecError):  # the channel is lost, which is told elsewhere
            await call(self.channel, "vm.watch", pack({}), counted)

    async def _ping(self) -> None:
        """Notice a guest that stands still: a halted one tells nobody."""
        while True:
            await asyncio.sleep(self.ping_s)
            channel = self.channel
            if self.paused or channel is None:
                continue
            answer = asyncio.ensure_future(call(channel, "sys.ping", pack({})))
            try:
                for wait_s in (HUSHED_S, SILENT_S):
                    await asyncio.wait({answer}, timeout=wait_s)
                    if answer.done() or self.paused or HALTED in await self._last_words():
                        break
                if answer.done():
                    await answer
                elif not self.paused:
                    await self._explain("its agent does not answer")
                    return
            except DSecError:
                continue  # it went back to a checkpoint, or its end is told elsewhere
            finally:
                answer.cancel()

    def _heard(self, event: VmEvent) -> None:
        reasons = {
            "panicked": "the guest's kernel panicked",
            "shutdown": "the guest switched itself off",
            "reset": "the guest began to reboot",
            "lost": "its virtual machine monitor ended",
        }
        if self._loading:
            return
        if event.kind in reasons:
            self._spawn(self._explain(reasons[event.kind]))
        elif event.kind == "disk_error":
            logger.error("%s: a disk of its machine fails: %s", self.sandbox, event.detail)

    def _lost(self) -> None:
        """The agent's channel is closed: the monitor may say why in a moment."""
        if self._loading:
            return
        self.channel = None
        if self._on_death is not None:
            self._spawn(self._explain_later())

    async def _explain_later(self) -> None:
        await asyncio.sleep(EXPLAIN_S)
        await self._explain("its agent closed the channel")

    async def _explain(self, reason: str) -> None:
        """Say once that the machine ended, with what is known of why."""
        if self._on_death is None:
            return
        on_death, self._on_death = self._on_death, None
        words = await self._last_words()
        if HALTED in words:
            reason = "the guest halted"
        on_death(Death(reason, {"console": words} if words else {}))

    async def _last_words(self) -> str:
        """Return the end of the guest's console, or of what the monitor said when it is gone."""
        with contextlib.suppress(DSecError, TimeoutError):
            async with asyncio.timeout(EXPLAIN_S):
                if self._machine is not None:
                    text = _CONTROL.sub("", await self._machine.console()).strip()
                    if text:
                        return text[-TOLD:]
        with contextlib.suppress(DSecError, TimeoutError):
            async with asyncio.timeout(EXPLAIN_S):
                return await self._monitor_words()
        return ""

    async def _monitor_words(self) -> str:
        """Return how the monitor ended and what it wrote. It does not return while it runs."""
        said = bytearray()

        def wrote(raw: msgspec.Raw) -> None:
            said.extend(msgspec.msgpack.decode(raw, type=Output).data)

        raw = await call(self._jail, "exec.attach", pack(AttachArgs(cid=VMM)), wrote)
        result = msgspec.msgpack.decode(raw, type=CommandResult)
        said += result.stdout + result.stderr
        ended = f"signal {result.signal}" if result.signal else f"exit code {result.exit_code}"
        text = said.decode(errors="replace").strip()
        return f"{self._vmm.name} ended with {ended}" + (f": {text[-TOLD:]}" if text else "")

    # --- asked from outside -----------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def standing(self) -> AsyncIterator[Machine]:
        """Have the guest stand still, its clocks too, with nothing on the way to its agent.

        It goes on afterwards, unless its monitor was ended. Raises `Timeout`, `Unavailable`.
        """
        machine, channel = self._machine, self.channel
        if machine is None or channel is None:
            raise Unavailable("the sandbox's agent cannot be reached")
        async with contextlib.AsyncExitStack() as stack:
            try:
                async with asyncio.timeout(ANSWER_S):
                    await stack.enter_async_context(channel.quiet())
            except TimeoutError as error:
                raise Timeout("its agent does not answer") from error
            self.paused = True
            try:
                await machine.stop()
                yield machine
            finally:
                if self._machine is machine:
                    await machine.cont()
                    self.paused = False
                    async with asyncio.timeout(ANSWER_S):
                        await channel.call_ahead("vm.clock", pack(clock()))

    async def resume(self, launch: Launch, load: Step) -> None:
        """Go on with a guest whose monitor was ended while it stood still; `load` takes it up.

        Its calls go on, too. After a failure it may be tried again.
        """
        if not self._followed:  # of an earlier daemon
            await self.take_up(launch, load, "vm.clock", clock())
            return
        assert self.channel is not None
        async with self._loaded(launch):
            assert self._machine is not None
            await self.channel.attach(await self._vmm.open_agent(self._root, self.plan))
            await load(self._machine)
            await self.channel.call_ahead("vm.clock", pack(clock()))
            self.channel.go_on()

    def fail(self, reason: str) -> None:
        """Say that the machine is over."""
        self._spawn(self._explain(reason))

    async def leave(self, reason: str) -> None:
        """End the monitor and what is open in the guest, for `take_up` of another moment."""
        assert self.channel is not None
        self.channel.drop_calls(reason)
        await self.end_monitor()

    async def shrink(self, want_bytes: int) -> None:
        """Have the guest give memory back; it may take it again. Raises as `Machine` does."""
        plan = self.plan
        if self._machine is not None and plan.balloon and not self.paused:
            await microvm_memory.shrink(self._machine, plan.memory_bytes, want_bytes)

    async def close(self) -> None:
        """Let go without touching the machine."""
        self._on_death = None
        await self._end_work()
        channel, self.channel = self.channel, None
        if channel is not None:
            channel.close()
        machine, self._machine = self._machine, None
        if machine is not None:
            machine.close()

    async def _end_work(self) -> None:
        for task in list(self._work):
            task.cancel()
        await asyncio.gather(*self._work, return_exceptions=True)


def _now(told: T) -> T:
    """Return it with the time and randomness of the moment in which it is sent."""
    now = clock()
    return msgspec.structs.replace(told, time_ns=now.time_ns, entropy=now.entropy)
