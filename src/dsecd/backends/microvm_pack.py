"""What a running microVM changed, saved as a layer.

The guest's file system is never mounted here: it is the guest's to forge. Its agent freezes the
commands and streams the upper, which goes to a file of the host, without a name, and becomes a
layer when the guest runs again.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Sequence
from typing import IO

import msgspec

from dsecd.backends import packing
from dsecd.backends.abc import Call, Channel
from dsecd.images import disk
from dsecd.images.library import Gate, Library
from dsecd.images.model import Node
from dsecd.images.sources.report import Report
from dsecd.images.sources.sink import Sink
from dsecd.images.sources.tar import MAX_OVERHEAD
from dsecd.images.sources.upper_tar import read_upper_tar
from libdsec.errors import DSecError, Exhausted, Internal, Timeout, from_wire
from libdsec.model import PackArgs, Packed
from libdsec.wire import INITIAL_CREDIT, pack

SILENT_S = 60.0  # of a guest in the middle: its disk may be slow, it may also mean harm
LONGEST_S = 3600.0

_item = msgspec.msgpack.Decoder(bytes)


class _Sent(msgspec.Struct):
    """The result of `vm.pack`."""

    size: int
    sockets: int


_sent = msgspec.msgpack.Decoder(_Sent)


async def pack_diff(
    library: Library, channel: Channel, base: packing.Base, limit_bytes: int, args: PackArgs
) -> Packed:
    """Make the layer and name it; the guest's disk holds `limit_bytes`.

    Raises what the agent answers, `Timeout` when it does not, `InvalidArgument` for what is no
    upper, what the writer and the store raise.
    """
    await library.expect_free(args.name, args.replace)
    library.scratch.mkdir(parents=True, exist_ok=True, mode=0o700)
    reports: list[Report] = []
    gate = Gate()
    with (
        disk.full_named(f"saving a machine's changes in {library.scratch}"),
        tempfile.TemporaryFile(dir=library.scratch) as file,
    ):
        begun = time.monotonic()
        room = disk.room(library.scratch)
        sent = await _Transfer(channel).receive(file, min(limit_bytes + MAX_OVERHEAD, room))
        frozen_ms = round((time.monotonic() - begun) * 1e3, 3)

        def read(sink: Sink) -> Sequence[Node]:
            file.seek(0)
            root, report = read_upper_tar(
                file, sink, limit_bytes=limit_bytes, residue=packing.rules(args), check=gate.check
            )
            report.sockets = sent.sockets
            reports[:] = [report]
            return [root]

        made = await packing.make_layer(library, base, args, read, gate)
    return packing.packed(made, frozen_ms, reports)


class _Transfer:
    """One call of `vm.pack`, whose items go to a file as fast as that takes them."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._events: asyncio.Queue[bytes | _Sent | DSecError] = asyncio.Queue()
        self._ended = False

    async def receive(self, file: IO[bytes], limit_bytes: int) -> _Sent:
        """Raises `Exhausted` beyond `limit_bytes`; whatever is raised, the guest runs again."""
        call = self._channel.open("vm.pack", pack({}), self)
        try:
            async with asyncio.timeout(LONGEST_S):
                return await self._receive(call, file, limit_bytes)
        except TimeoutError as error:
            raise Timeout("the guest did not hand its changes over in time; try again") from error
        finally:
            if not self._ended:
                call.cancel()

    async def _receive(self, call: Call, file: IO[bytes], limit_bytes: int) -> _Sent:
        size = 0
        while isinstance(event := await self._next(), bytes):
            size += len(event)
            if size > limit_bytes:
                raise Exhausted(
                    f"the machine's changes pass {limit_bytes} bytes, what its disk or this one "
                    "can take; remove files in it, or free space"
                )
            await asyncio.to_thread(file.write, event)
            call.grant(1)
        if size != event.size:
            raise Internal(f"the agent sent {size} bytes of its changes and says {event.size}")
        return event

    async def _next(self) -> bytes | _Sent:
        async with asyncio.timeout(SILENT_S):
            event = await self._events.get()
        if isinstance(event, DSecError):
            raise event
        return event

    # --- Receiver

    def on_item(self, data: msgspec.Raw) -> None:
        # the guest is not trusted: what it sends without credit must not fill our memory
        if self._events.qsize() > INITIAL_CREDIT:
            return
        try:
            event: bytes | DSecError = _item.decode(data)
        except msgspec.DecodeError as error:
            event = Internal(f"the agent's item is not understood: {error}")
        if self._events.qsize() == INITIAL_CREDIT:
            event = Internal("the agent sent without credit")
        self._events.put_nowait(event)

    def on_credit(self, n: int) -> None:
        """The call sends no items."""

    def on_reply(self, result: msgspec.Raw) -> None:
        self._ended = True
        try:
            self._events.put_nowait(_sent.decode(result))
        except msgspec.DecodeError as error:
            self._events.put_nowait(Internal(f"the agent's answer is not understood: {error}"))

    def on_failure(self, error: dict[str, object]) -> None:
        self._ended = True
        self._events.put_nowait(from_wire(error))
