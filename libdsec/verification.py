"""Following a grader to its end: its output as it comes, then its result and the signed record."""

from __future__ import annotations

import msgspec

from libdsec import model
from libdsec.errors import Internal
from libdsec.execution import Sink, give
from libdsec.link import Link, pack, unpack
from libdsec.record import SignedRecord, Verified
from libdsec.result import from_model


async def run(
    link: Link, args: model.VerifyArgs, stdout: Sink | None, stderr: Sink | None
) -> Verified:
    """Grade once. A cancelled or lost call ends the grader: nothing can take it up again."""
    kept = {1: bytearray(), 2: bytearray()}
    sinks = {1: stdout, 2: stderr}
    call = await link.start("sandbox.verify", pack(args))
    try:
        while (raw := await call.next_item()) is not None:
            output = unpack(raw, model.Output)
            kept[output.stream] += output.data
            if (sink := sinks[output.stream]) is not None:
                await give(sink, output.data)
        end = unpack(await call.result(), model.Verified)
    except BaseException:
        call.cancel()
        raise
    for sink in sinks.values():
        if sink is not None:
            await give(sink, b"", True)
    try:
        record = msgspec.json.decode(end.record, type=model.Record)
    except msgspec.DecodeError as error:
        raise Internal(f"the daemon's record is not understood: {error}") from error
    return Verified(
        result=from_model(end.result, bytes(kept[1]), bytes(kept[2])),
        record=record,
        signed=SignedRecord(record=end.record, signature=end.signature, key=end.key),
    )
