"""The memory of a virtual machine, copied out of its monitor and into another one.

It is a memfd of the monitor, which nobody but the monitor maps and which can be opened by its
descriptor. What was never touched is a hole in it, and stays one in every copy.
"""

from __future__ import annotations

import contextlib
import subprocess
from pathlib import Path

from dsecd.host import sparse
from dsecd.host.cgroup import memory_members
from libdsec.errors import Internal, Unavailable

# What is written into a memfd is charged to the cgroup of who writes it, so that is a process which
# has joined the monitor's: $1 is the file of its members. From $2 to $3; zeros stay holes.
_FILL = 'echo $$ > "$1" && exec dd if="$2" of="$3" bs=64k conv=notrunc,sparse status=none'
_SHELL = "/bin/sh"
_COPY_S = 30.0


def take_ram(pid: int, size: int, to: Path) -> None:
    """Copy the memory of the monitor `pid`, whose guest stands still, to the new file `to`.

    Raises `OSError`, `Unavailable`.
    """
    sparse.copy_sparse(_memory_file(pid, size), to)


def used_bytes(pid: int, size: int) -> int:
    """Return how much of it was ever touched, as `take_ram` copies. Raises as that does."""
    return _memory_file(pid, size).stat().st_blocks * 512


def fill_ram(pid: int, size: int, source: Path) -> None:
    """Write `source` into the untouched memory of the monitor `pid`; its cgroup pays for it.

    Raises `OSError`, `Unavailable`, `Internal`.
    """
    arguments = (str(memory_members(pid)), str(source), str(_memory_file(pid, size)))
    try:
        done = subprocess.run(
            (_SHELL, "-c", _FILL, "fill", *arguments), env={"PATH": "/usr/bin:/bin"},
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_COPY_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise Unavailable(f"{source} was not copied in {_COPY_S:g} s") from error
    if done.returncode:
        raise Internal(f"{source} cannot be copied into a machine: {done.stderr.strip()[-300:]}")


def _memory_file(pid: int, size: int) -> Path:
    """Return the one memfd of `pid` that is `size` bytes long."""
    found = []
    for link in Path(f"/proc/{pid}/fd").glob("*"):
        with contextlib.suppress(FileNotFoundError):  # closed, this one or all
            if str(link.readlink()).startswith("/memfd:") and link.stat().st_size == size:
                found.append(link)
    if len(found) != 1:
        raise Unavailable(f"process {pid} has {len(found)} memfds of {size} bytes")
    return found[0]
