"""One dsec-spawner process and the calls that it has not answered yet."""

from __future__ import annotations

import array
import asyncio
import errno
import os
import socket
import subprocess
from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

import msgspec

from dsecd.host.plan import PLAN_MAX, SpawnReply
from libdsec.errors import DSecError, Exhausted, Internal, InvalidArgument, Unavailable

Call: TypeAlias = asyncio.Future[tuple[SpawnReply, tuple[int, ...]]]
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(tuple[int, SpawnReply])
_FULL = frozenset(
    (errno.ENOSPC, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.EDQUOT)
)
_REPLY_MAX = 8192  # bytes
_TWO_FDS = socket.CMSG_SPACE(8)
_RECV_FLAGS = socket.MSG_CMSG_CLOEXEC
_SEND_BUFFER = 1 << 20  # bytes; the kernel caps it at net.core.wmem_max


class Slot(Protocol):
    """A pre-made set of v1 groups; `procs_paths` are its cgroup.procs files."""

    @property
    def procs_paths(self) -> tuple[str, ...]: ...


def step_error(what: str, code: int, step: str, where: str = "") -> DSecError:
    """Return the error for a step of the spawner that failed with errno `code` (at `where`)."""
    if step == "guards" and code == errno.ELOOP:
        return InvalidArgument(
            f"policy: {where} leads through a symbolic link in this image; name the path behind it",
            field="policy",
        )
    at = f" at {where}" if where else ""
    message = f"{what}: step {step!r} failed{at}: {os.strerror(code)}"
    if step == "links" and code in _FULL:
        message = (
            f"{what}: {os.strerror(code)} for a copy of the files with several names (hard links), "
            "which each root on a checkpoint needs; remove some of them, or use more disk_limit_mb"
        )
    detail = {"step": step, "errno": errno.errorcode.get(code, str(code))}
    return (Exhausted if code in _FULL else Internal)(message, **detail)


class Worker:
    """One spawner process and the calls it has not answered yet."""

    def __init__(
        self,
        binary: str,
        init: str,
        base_filter: bytes,
        on_lost: Callable[[Worker], None],
        by_path: bool = False,
        shell: int = -1,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_lost = on_lost
        self._calls: dict[int, Call] = {}
        self._next = 1
        self.slot: Slot | None = None
        self.lost = False
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, os.fdopen(os.memfd_create("filter"), "wb", buffering=0) as filter_file:
            filter_file.write(base_filter)
            for end in (ours, theirs):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
            ours.setblocking(False)
            self._socket = ours
            self._process = subprocess.Popen(
                [
                    *(binary, str(theirs.fileno()), init, str(filter_file.fileno()), str(shell)),
                    *(["by-path"] if by_path else ()),
                ],
                pass_fds=[theirs.fileno(), filter_file.fileno(), *([shell] if shell >= 0 else ())],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # a ^C on the daemon's terminal is not for it
                env={},
                cwd="/",
            )
        self.ready = self._loop.create_future()
        self._calls[0] = self.ready  # its first message answers a call that nobody made
        self._loop.add_reader(ours.fileno(), self._on_readable)

    @property
    def pending(self) -> int:
        return len(self._calls)

    def call(self, op: int, plan: object, fds: Sequence[int] = ()) -> Call:
        """Send one message; the future gives the reply and the descriptors beside it."""
        number = self._next
        self._next += 1
        message = _encoder.encode((number, op, plan))
        if len(message) > PLAN_MAX:
            raise InvalidArgument(f"a plan of {len(message)} bytes exceeds {PLAN_MAX}")
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        try:
            self._socket.sendmsg([message], rights)
        except OSError as error:
            raise Unavailable(f"the spawner cannot be reached: {error.strerror}") from error
        future = self._calls[number] = self._loop.create_future()
        return future

    def _on_readable(self) -> None:
        while True:
            try:
                data, rights, _, _ = self._socket.recvmsg(_REPLY_MAX, _TWO_FDS, _RECV_FLAGS)
            except BlockingIOError:
                return
            except OSError:
                data, rights = b"", []
            if not data:
                self._on_eof()
                return
            fds = tuple(array.array("i", rights[0][2])) if rights else ()
            number, reply = _decoder.decode(data)
            future = self._calls.pop(number)
            if not future.cancelled():
                future.set_result((reply, fds))
            else:
                for fd in fds:
                    os.close(fd)
            if not self._calls:
                return

    def _on_eof(self) -> None:
        """The process died, which it never does by itself while we hold the socket."""
        if self.lost:
            return
        self.close()
        for future in self._calls.values():
            if not future.done():
                future.set_exception(Unavailable("the spawner process died; see the kernel's log"))
        self._calls.clear()
        self._on_lost(self)

    def close(self) -> None:
        """Close the socket, which ends the process. Calls not answered are dropped."""
        if self.lost:
            return
        self.lost = True
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close()

    def reaped(self) -> bool:
        """Return whether the process has ended; never blocks."""
        return self._process.poll() is not None

    async def stop(self) -> None:
        """Close and reap; kills the process when a plan holds it for too long."""
        self.close()
        for _ in range(200):
            if self.reaped():
                return
            await asyncio.sleep(0.005)
        self._process.kill()
        while not self.reaped():  # noqa: ASYNC110  (no event tells: no thread, no child watcher)
            await asyncio.sleep(0.005)
