"""A client's call into a sandbox: frames pass through, arguments and data are not decoded.

Credits are end to end. The agent may send what the client allowed, but never more than
`INITIAL_CREDIT` items ahead of what the client's transport took: a larger credit is handed on in
parts, and not at all while the transport is full.

When the client is lost, calls that only serve it (uploads, downloads, watches, attachments,
forwards) are cancelled. Everything else, `exec.run` above all, goes on in the sandbox; its items
are then drained here, so that the call can end. It no longer counts as activity.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec

from dsecd.backends.abc import Call
from dsecd.engine import outcome, pausing
from dsecd.engine.lifecycle import ALIVE
from dsecd.engine.manager import Manager
from dsecd.engine.sandbox import Sandbox
from libdsec import wire
from libdsec.errors import DSecError, Internal, Unavailable, WrongState, to_wire

if TYPE_CHECKING:
    from dsecd.api.connection import ClientConnection

CANCELLED_WITH_CLIENT = frozenset(
    {
        "exec.attach", "exec.wait", "files.read", "files.write", "files.download", "files.upload",
        "files.watch", "net.forward",
    }
)  # fmt: skip
STARTS = frozenset({"exec.run", "exec.start"})
WINDOW = wire.INITIAL_CREDIT


class _Named(msgspec.Struct):
    """The one argument the daemon looks at: which command an exec operation is about."""

    cid: str = ""


_named = msgspec.msgpack.Decoder(_Named)


class ProxiedCall:
    """Both an `OpenCall` of the connection and the `Receiver` of the agent's answers."""

    __slots__ = (
        "_agent", "_allowed", "_cid", "_connection", "_held", "_id", "_manager", "_oom", "_op",
        "_sandbox", "_upload", "_window",
    )  # fmt: skip

    def __init__(
        self,
        manager: Manager,
        sandbox: Sandbox,
        connection: ClientConnection,
        request: wire.Request,
    ) -> None:
        self._manager, self._sandbox = manager, sandbox
        self._connection: ClientConnection | None = connection
        self._id, self._op = request.id, request.op
        self._window = WINDOW  # items the agent may still send
        self._held = 0  # credit of the client not yet handed on
        self._upload = WINDOW  # items the client may still send
        self._agent: Call | None = None
        self._cid = ""
        self._oom = 0
        if request.op.startswith("exec."):
            self._note_command(request)

    def _note_command(self, request: wire.Request) -> None:
        """Remember how many OOM kills there were before the command."""
        if request.op not in STARTS and request.op not in outcome.OPS:
            return
        try:
            self._cid = _named.decode(request.args).cid
        except msgspec.DecodeError:
            return  # the agent will say what is wrong
        if request.op in STARTS:
            self._manager.registry.commands.add()
            self._oom = self._sandbox.command_began(self._cid)
        else:
            self._oom = self._sandbox.oom_before(self._cid)

    def begin(self, request: wire.Request) -> None:
        """Open the call on the sandbox's channel. Raises `DSecError`."""
        channel = self._sandbox.channel
        assert channel is not None  # enter() has seen it running
        self._agent = channel.open(request.op, request.args, self)
        self._wake()

    def _wake(self) -> None:
        """Have a paused sandbox go on. What was sent waits at its agent meanwhile."""
        if pausing.asleep(self._sandbox):
            pausing.wake(self._manager, self._sandbox).add_done_callback(self._woken)

    def _woken(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None and self._agent is not None:
            known = error if isinstance(error, DSecError) else Internal(f"cannot resume: {error!r}")
            self.on_failure(to_wire(known))

    # --- from the client

    def item(self, data: msgspec.Raw) -> None:
        self._upload -= 1
        if self._upload < 0 and self._connection is not None:
            self._connection.violation("an item was sent without credit")
        elif self._agent is not None:
            self._agent.send_item(data)
            self._wake()

    def end(self) -> None:
        if self._agent is not None:
            self._agent.end()
            self._wake()

    def cancel(self) -> None:
        if self._agent is not None:
            self._agent.cancel()
            self._wake()

    def credit(self, n: int) -> None:
        if n == 0:
            return
        if self._connection is not None:
            # a client that grants billions means "as fast as you can", not memory
            self._held = min(self._held + n, 1 << 32)
            self._hand_on()

    def writable(self) -> None:
        self._hand_on()

    def lost(self) -> None:
        self._connection = None
        self._manager.leave(self._sandbox)
        if self._agent is None:
            return
        if self._op in CANCELLED_WITH_CLIENT:
            self._agent.cancel()
        # what is in flight, or comes before the cancel is seen, is dropped; the call must end
        if self._window < WINDOW:
            self._agent.grant(WINDOW - self._window)
            self._window = WINDOW

    def _hand_on(self) -> None:
        connection = self._connection
        if connection is None or connection.paused or not self._held or self._agent is None:
            return
        n = min(self._held, WINDOW - self._window)
        if n > 0:
            self._held -= n
            self._window += n
            self._agent.grant(n)

    # --- from the agent

    def on_item(self, data: msgspec.Raw) -> None:
        connection = self._connection
        if connection is None:
            if self._agent is not None:
                self._agent.grant(1)
            return
        self._window -= 1
        if self._window < 0:  # the agent is not trusted: it runs what the sandbox runs
            self.cancel()
            self.on_failure({"code": "internal", "message": "the agent sent without credit"})
            return
        connection.write(wire.Item(self._id, data))
        if self._held:
            self._hand_on()

    def on_credit(self, n: int) -> None:
        self._upload += n
        if self._connection is not None:
            self._connection.write(wire.Credit(self._id, n))

    def on_reply(self, result: msgspec.Raw) -> None:
        if self._op in outcome.OPS:
            result = self._with_outcome(result)
        connection = self._finish()
        if connection is not None:
            connection.reply(self._id, result)

    def on_failure(self, error: dict[str, object]) -> None:
        if error.get("code") == Unavailable.code:
            # the channel is lost; the reason is known once the engine has heard of it
            asyncio.get_running_loop().call_soon(self._fail, error)
        else:
            self._fail(error)

    def _fail(self, error: dict[str, object]) -> None:
        state = self._sandbox.state
        if error.get("code") == Unavailable.code and state not in ALIVE:
            error = to_wire(WrongState(f"sandbox is {state}: {self._sandbox.reason}", state=state))
        connection = self._finish()
        if connection is not None:
            self._manager.registry.errors.add(str(error.get("code")))
            connection.calls.pop(self._id, None)
            connection.write(wire.Failure(self._id, error))

    def _finish(self) -> ClientConnection | None:
        """Close the call's books; returns the connection if it still waits for the answer."""
        connection, self._connection, self._agent = self._connection, None, None
        if connection is not None:
            self._manager.leave(self._sandbox)
        return connection

    def _with_outcome(self, result: msgspec.Raw) -> msgspec.Raw:
        """Set what only the daemon knows about a command that ended badly."""
        sandbox = self._sandbox
        sandbox.commands.pop(self._cid, None)
        ending = outcome.ending(result)
        if ending is None or ending.exit_code == 0:
            return result
        disk_full = ending.disk_full or sandbox.disk_full()
        if disk_full:
            self._manager.events.emit(sandbox.id, "disk_full", command=self._cid)
        oom = self._manager.refresh_oom(sandbox) > self._oom
        if oom or disk_full:
            return outcome.amended(result, oom_killed=oom, disk_full=disk_full)
        return result
