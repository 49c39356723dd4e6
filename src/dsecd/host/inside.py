"""Files of a sandbox, opened from the host by a path as the sandbox sees it.

What runs in the sandbox may own the directory and put a link in the place of a file, or of its own
socket, which the host would then follow to its own. Here no link is followed and no `..` leads out
(openat2(2)).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import struct
import time
from pathlib import Path

from dsecd.host import syscalls
from libdsec.errors import Unavailable

_TRY_AGAIN_S = 0.005
_NO_MAGICLINKS, _NO_SYMLINKS, _IN_ROOT = 0x02, 0x04, 0x10  # RESOLVE_*


def open_inside(root: Path, path: str, flags: int, mode: int = 0) -> int:
    """Return a descriptor of `path` below the directory `root`, as ``/proc/<pid>/root``.

    Raises `OSError`: ELOOP for a symbolic link anywhere in `path`.
    """
    resolve = _IN_ROOT | _NO_SYMLINKS | _NO_MAGICLINKS
    how = struct.pack("=QQQ", flags | os.O_CLOEXEC, mode, resolve)
    directory = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return syscalls.call("openat2", directory, os.fsencode(path), how, len(how))
    finally:
        os.close(directory)


def socket_inside(root: Path, path: str) -> tuple[socket.socket, int]:
    """Return a connection to the unix socket at `path` below `root`, and the pid of who listens.

    It does not block. The pid is that of the process that called listen(2), as this process's PID
    namespace knows it (SO_PEERCRED, unix(7)). Raises `OSError`, also when that process has another
    root: it is gone, and its pid another's.
    """
    place = open_inside(root, path, os.O_PATH)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        connection.connect(f"/proc/self/fd/{place}")
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        pid: int = struct.unpack("=iii", credentials)[0]
        if not Path(f"/proc/{pid}/root/.").samefile(root):
            raise OSError(errno.ECONNREFUSED, "who listens is not in the sandbox")
        return connection, pid
    except BaseException:
        connection.close()
        raise
    finally:
        os.close(place)


async def reach(root: Path, path: str, timeout_s: float) -> tuple[socket.socket, int]:
    """`socket_inside`, but of a process that may not listen yet. Raises `Unavailable`."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return socket_inside(root, path)
        except OSError as error:
            not_yet = error.errno in (errno.ENOENT, errno.ECONNREFUSED, errno.EAGAIN)
            if not not_yet or time.monotonic() > deadline:
                raise Unavailable(f"cannot connect to {path}: {error.strerror}") from error
        await asyncio.sleep(_TRY_AGAIN_S)


def threads(pid: int) -> tuple[tuple[int, int, str], ...]:
    """Return the threads of a process: id on this host, id in its own PID namespace, name."""
    found = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            fields = dict(line.split(":", 1) for line in (task / "status").read_text().splitlines())
            inner = int(fields["NSpid"].split()[-1])
            found.append((int(task.name), inner, fields["Name"].strip()))
    return tuple(sorted(found))
