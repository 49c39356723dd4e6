"""Everything of a tree, as the host sees it: to compare what a checkpoint brings back with a copy.

`view` reads a directory of the host, `sandbox_view` one of a sandbox, in whose mount namespace this
file runs as a program of its own; nothing runs in the sandbox, so it may be frozen.
"""

from __future__ import annotations

import asyncio
import ctypes
import hashlib
import os
import pickle
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Tree = dict[str, tuple[Any, ...]]
_CLONE_NEWNS = 0x20000
_FD_MOUNT_NS = 8  # in dsec-init
_ROOT = Path(__file__).parents[2]


def view(root: str, uid_base: int = 0) -> Tree:
    """Return each entry below `root`: kind and mode, owner, times, links, xattrs, content."""
    found: Tree = {}
    first: dict[tuple[int, int], str] = {}  # of the names of a file
    for path in sorted(_entries(os.fsencode(root))):
        status = path.lstat()
        name = os.fsdecode(path)
        shown = os.path.relpath(name, root)
        inode = (status.st_dev, status.st_ino)
        regular, folder = stat.S_ISREG(status.st_mode), stat.S_ISDIR(status.st_mode)
        found[shown] = (
            oct(status.st_mode),
            status.st_uid - uid_base,
            status.st_gid - uid_base,
            status.st_size if regular else None,
            # overlayfs counts no subdirectories
            None if folder else status.st_nlink,
            None if folder or status.st_nlink == 1 else first.setdefault(inode, shown),
            status.st_mtime_ns,
            str(Path(name).readlink()) if stat.S_ISLNK(status.st_mode) else None,
            {key: os.getxattr(name, key, follow_symlinks=False) for key in _xattrs(name)},
            hashlib.sha256(Path(name).read_bytes()).hexdigest() if regular else None,
        )
    return found


def without_times(tree: Tree) -> Tree:
    return {name: (*entry[:6], *entry[7:]) for name, entry in tree.items()}


def difference(one: Tree, other: Tree) -> dict[str, tuple[object, object]]:
    """Return what differs, by name: for a failing test to show."""
    names = sorted({*one, *other})
    return {
        name: (one.get(name), other.get(name)) for name in names if one.get(name) != other.get(name)
    }


async def sandbox_view(init: int, root: str) -> Tree:
    """Return `view` of `root` in the sandbox whose PID 1 is `init`; owners are those inside."""
    command = [sys.executable, str(Path(__file__)), str(init), root]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(_ROOT)}
    )
    out, _ = await process.communicate()
    assert process.returncode == 0
    found: Tree = pickle.loads(out)
    return found


def _entries(root: bytes) -> Iterator[Path]:
    for folder, folders, files in os.walk(os.fsdecode(root)):
        for name in (*folders, *files):
            yield Path(folder) / name


def _xattrs(name: str) -> list[str]:
    return [key for key in os.listxattr(name, follow_symlinks=False) if key != "security.selinux"]


def _main(init: int, root: str) -> None:
    uid_base = Path(f"/proc/{init}").stat().st_uid & ~0xFFFF  # PID 1 has the last id of the range
    out = sys.stdout.buffer
    namespace = os.open(f"/proc/{init}/fd/{_FD_MOUNT_NS}", os.O_RDONLY | os.O_CLOEXEC)
    # overlayfs may show one file that it copied up under two numbers, its origin's and its own, for
    # as long as it remembers both
    Path("/proc/sys/vm/drop_caches").write_text("2")
    # os.setns() comes with Python 3.12
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace, _CLONE_NEWNS) < 0:
        raise OSError(ctypes.get_errno(), "setns")
    out.write(pickle.dumps(view(root, uid_base)))


if __name__ == "__main__":
    _main(int(sys.argv[1]), sys.argv[2])
