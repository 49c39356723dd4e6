"""Creating many sandboxes with one call."""

from __future__ import annotations

import uuid

import msgspec

from libdsec import model
from libdsec.connection import Call, ConnectionLost
from libdsec.errors import DSecError, Internal, InvalidArgument, from_wire
from libdsec.link import Link, pack, unpack
from libdsec.request import Request

MAX_BATCH = 65_536  # keys of a larger one would not fit a frame


class Batch:
    """One `sandbox.create_many`; after a lost connection it goes on with the keys still open."""

    def __init__(self, link: Link, wanted: Request, count: int, timeout_s: float | None) -> None:
        if not 1 <= count <= MAX_BATCH:
            raise InvalidArgument(f"count must be 1 to {MAX_BATCH}, not {count}", field="count")
        self._link = link
        self._wanted = wanted
        self._timeout_s = timeout_s
        self._open = {uuid.uuid4().hex for _ in range(count)}
        self._call: Call | None = None
        self._failure: DSecError | None = None

    async def next(self) -> model.SandboxInfo | DSecError | None:
        """Return the next sandbox or error, None when every key is answered."""
        while self._open:
            if self._failure is not None:
                self._open.pop()
                return self._failure
            try:
                if self._call is None:
                    self._call = await self._start()
                raw = await self._call.next_item()
            except ConnectionLost:
                self._call = None
                continue
            except DSecError as error:  # the rest has failed: each of them, to the caller
                self._call, self._failure = None, error
                continue
            if raw is None:
                self._call = None
                self._failure = Internal("the daemon ended the batch without an answer for this")
                continue
            made = unpack(raw, model.Created)
            if made.key in self._open:
                self._open.discard(made.key)
                return self._outcome(made)
        return None

    def abandon(self) -> None:
        """Stop what was created and not handed out. Nothing to do after a complete batch."""
        call, self._call = self._call, None
        if call is None:
            return
        for raw in call.take_unread():
            self._stop(raw)
        if not call.closed:
            call.on_late_item = self._stop
            call.cancel(lambda raw: None)

    async def _start(self) -> Call:
        args = model.CreateManyArgs(
            keys=sorted(self._open), timeout_s=self._timeout_s,
            args=self._wanted.args, backend=self._wanted.backend, vm=self._wanted.vm,
        )  # fmt: skip
        return await self._link.start("sandbox.create_many", pack(args))

    def _outcome(self, made: model.Created) -> model.SandboxInfo | DSecError:
        if made.info is not None:
            return made.info
        return from_wire(dict(made.error or {}))

    def _stop(self, raw: msgspec.Raw) -> None:
        made = unpack(raw, model.Created)
        if made.info is not None and made.key in self._open:
            self._link.post("sandbox.stop", model.SandboxRef(id=made.info.id))
