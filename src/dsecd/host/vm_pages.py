"""The memory of a virtual machine that stands copy-on-write on a file: the pages that are its own.

All others are as in the file. /proc/PID/pagemap tells them apart (Documentation/admin-guide/mm/
pagemap.rst): what is there, or in swap, and is no page of a file has been written to.
"""

from __future__ import annotations

import array
import contextlib
import itertools
import os
from collections.abc import Iterator
from pathlib import Path

from dsecd.host import sparse
from libdsec.errors import Unavailable

PAGE = os.sysconf("SC_PAGE_SIZE")
_PRESENT, _SWAPPED, _OF_FILE = 1 << 63, 1 << 62, 1 << 61
_ENTRY = 8  # bytes of pagemap for a page
_PIECE = 4 << 20


def own_bytes(pid: int, base: Path) -> int:
    """Return how much of its memory the monitor `pid` does not share with `base`.

    Raises `OSError`, `Unavailable`.
    """
    return sum(end - start for _, start, end in _own_pages(pid, base))


def take_pages(pid: int, base: Path, to: Path) -> None:
    """Copy the memory of the monitor `pid`, whose guest stands still on `base`, to the new `to`.

    Raises `OSError`, `Unavailable`.
    """
    sparse.copy_sparse(base, to)
    with contextlib.ExitStack() as undo:
        undo.callback(to.unlink)
        with to.open("r+b") as file, Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
            for shift, start, end in _own_pages(pid, base):
                for at in range(start, end, _PIECE):
                    piece = os.pread(memory.fileno(), min(_PIECE, end - at), shift + at)
                    os.pwrite(file.fileno(), piece, at)
        undo.pop_all()


def _own_pages(pid: int, base: Path) -> Iterator[tuple[int, int, int]]:
    """Yield stretches of them: what to add for their address, and begin and end in the file."""
    shift, size = _mapping(pid, base)
    with Path(f"/proc/{pid}/pagemap").open("rb", buffering=0) as file:
        pages = array.array("Q")
        file.seek(shift // PAGE * _ENTRY)
        pages.frombytes(file.read(size // PAGE * _ENTRY))
    own = (bool(page & (_PRESENT | _SWAPPED)) and not page & _OF_FILE for page in pages)
    at = 0
    for mine, run in itertools.groupby(own):
        end = at + sum(1 for _ in run) * PAGE
        if mine:
            yield shift, at, end
        at = end


def _mapping(pid: int, base: Path) -> tuple[int, int]:
    """Return where `base` begins in the memory of `pid`, and how long it is mapped."""
    wanted = base.stat()
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        span, _, offset, _, inode = line.split(maxsplit=5)[:5]
        if inode != str(wanted.st_ino) or int(offset, 16):
            continue
        start, end = (int(text, 16) for text in span.split("-"))
        # the device that is named beside it is not always what stat(2) says (btrfs)
        found = Path(f"/proc/{pid}/map_files/{start:x}-{end:x}").stat()
        if found.st_dev == wanted.st_dev and end - start == wanted.st_size:
            return start, end - start
    raise Unavailable(f"process {pid} does not have all of {base} in its memory")
