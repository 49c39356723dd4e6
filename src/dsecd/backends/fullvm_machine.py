"""One full VM: a `GuestMachine` that can go back to what it was."""

from __future__ import annotations

import asyncio
from typing import cast

import msgspec

from dsecd.backends.abc import Call, Receiver
from dsecd.backends.agent import AgentChannel, call
from dsecd.backends.microvm_machine import SILENT_S, GuestMachine
from dsecd.backends.microvm_plan import clock
from dsecd.host.fullvm_plan import FullMachine
from libdsec.errors import Unavailable
from libdsec.wire import pack


class GuestChannel:
    """A `Channel` to whatever connection the machine has now: going back makes another one."""

    def __init__(self, machine: FullGuestMachine) -> None:
        self._machine = machine

    def open(self, op: str, args: msgspec.Raw, receiver: Receiver) -> Call:
        channel = self._machine.channel
        if channel is None:
            raise Unavailable("the sandbox's agent cannot be reached")
        return channel.open(op, args, receiver)

    def close(self) -> None:
        if self._machine.channel is not None:
            self._machine.channel.close()


class FullGuestMachine(GuestMachine):
    """See `GuestMachine`; its monitor is that of a `FullVmPlan`."""

    def full(self) -> FullMachine:
        """Return the machine itself. Raises `Unavailable`."""
        if self._machine is None:
            raise Unavailable("the machine cannot be reached")
        return cast(FullMachine, self._machine)

    # --- it stands still, its monitor stays -----------------------------------------------------

    async def stop(self) -> None:
        """Have the guest stand still, its clocks too."""
        machine = self.full()
        self.paused = True
        await machine.stop()

    async def go_on(self) -> None:
        """Let it go on, and tell it what time it is."""
        adopted = self._machine is None
        if self._machine is None:
            self._machine = await self._vmm.connect(self._root, self.plan, self._heard)
        await self._machine.cont()
        self.paused = False
        if adopted:
            self._begin_to_follow()
        if self.channel is not None:
            async with asyncio.timeout(SILENT_S):
                await call(self.channel, "vm.clock", pack(clock()))

    async def adopt_frozen(self) -> None:
        """Take up a machine that an earlier daemon paused: it is asked when it goes on."""
        self.paused = True
        stream = await self._vmm.open_agent(self._root, self.plan)
        self.channel = await AgentChannel.adopt(stream, self._lost)

    # --- checkpoints ----------------------------------------------------------------------------

    async def snapshot(self, name: str) -> None:
        """Remember the machine under `name`; it stands still meanwhile. Raises as `FullMachine`."""
        await self.stop()
        try:
            await self.full().snapshot(name)
        finally:
            await self.go_on()

    async def forget(self, name: str) -> None:
        await self.full().forget(name)

    async def restore(self, name: str) -> None:
        """Become what was remembered under `name`. Open calls fail: their callers are in a future
        that the guest has not seen.

        After a failure of the monitor, too, there is no machine to go on with: it is told as dead.
        """
        await self.stop()
        try:
            await self.full().restore(name)
        except BaseException:
            await self._explain("its machine could not go back to a checkpoint")
            raise
        await self._renew()

    async def _renew(self) -> None:
        """Go on, with a new connection to the agent: what the old one was about is not known."""
        old, self.channel = self.channel, None
        await self.full().cont()
        if old is not None:
            old.close()  # it tells nobody
        async with asyncio.timeout(SILENT_S):
            self.channel = AgentChannel.detached(self._lost)
            self.channel.take_over(await self._open_agent(SILENT_S))
            await call(self.channel, "vm.clock", pack(clock()))
        self.paused = False
        await self._end_work()
        self._followed = False
        self._begin_to_follow()
