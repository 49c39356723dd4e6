"""What the daemon adds to the result of a command: whether memory ended it, or a full disk.

The kernel kills one process of a sandbox that passes its memory limit; the agent inside sees a
SIGKILL, or only a shell's exit code. The daemon holds the cgroup's counter of OOM kills: if it
moved between the command's start and its unsuccessful end, memory is the reason. The common result,
exit code 0, costs one small decode and no read of a file. A quota of an upper on disk cannot be
seen from inside either.
"""

from __future__ import annotations

import msgspec

from libdsec.model import CommandResult

OPS = frozenset({"exec.run", "exec.wait", "exec.attach"})


class _Ending(msgspec.Struct):
    """The part of a `CommandResult` that tells whether to look further."""

    exit_code: int | None = None
    signal: int | None = None
    disk_full: bool = False


_ending = msgspec.msgpack.Decoder(_Ending)
_result = msgspec.msgpack.Decoder(CommandResult)


def ending(result: msgspec.Raw) -> _Ending | None:
    """Return how the command ended, None when `result` is not a `CommandResult`."""
    try:
        return _ending.decode(result)
    except msgspec.DecodeError:
        return None


def amended(result: msgspec.Raw, *, oom_killed: bool, disk_full: bool) -> msgspec.Raw:
    """Return `result` with what is true of these set."""
    value = _result.decode(result)
    value.oom_killed |= oom_killed
    value.disk_full |= disk_full
    return msgspec.Raw(msgspec.msgpack.encode(value))
