"""The twin of dsec-blobd on pyfuse3: same control protocol, cache format and checks, to be read.

    python -m dsecd.images.blobd.twin --fuse-fd N --control PATH --state DIR --cache DIR

What pyfuse3 cannot do is missing, and `hello` says so by its capabilities: going on with the
connection of a dead process (libfuse insists on the first FUSE_INIT), so also the keeper and the
kept registrations; the interruption of a read; splicing. Requests to a store are not signed.
"""

from __future__ import annotations

import argparse
import errno
import logging
import os
import stat
import sys
from pathlib import Path
from typing import Any

import pyfuse3
import trio
from pyfuse3 import FileHandleT, InodeT, ModeT

from dsecd.config import Log
from dsecd.images.blobd.twin_blob import BLOCK, Blob
from dsecd.images.blobd.twin_cache import Cache, Failed
from dsecd.images.blobd.twin_control import Control
from dsecd.log import configure

_log = logging.getLogger("dsec-blobd")
_VALID_S = 3600


class Directory(pyfuse3.Operations):
    """Registered blobs as read-only files."""

    def __init__(self) -> None:
        super().__init__()
        self.cache: Cache | None = None  # set before anything is served

    def _blob(self, inode: int) -> Blob:
        blob = self.cache.node(inode) if self.cache else None
        if blob is None:
            raise pyfuse3.FUSEError(errno.ESTALE)
        return blob

    def _attributes(self, blob: Blob | None) -> Any:
        entry = pyfuse3.EntryAttributes()
        entry.st_ino = InodeT(blob.nodeid) if blob else pyfuse3.ROOT_INODE
        entry.st_mode = ModeT(stat.S_IFREG | 0o400 if blob else stat.S_IFDIR | 0o500)
        entry.st_size = blob.length if blob else 0
        entry.st_blksize = BLOCK
        entry.entry_timeout, entry.attr_timeout = 0, _VALID_S
        return entry

    async def lookup(self, parent: int, name: bytes, ctx: Any = None) -> Any:
        blob = self.cache.blobs.get(os.fsdecode(name)) if self.cache else None
        if blob is None or parent != pyfuse3.ROOT_INODE:
            raise pyfuse3.FUSEError(errno.ENOENT)
        return self._attributes(blob)

    async def getattr(self, inode: int, ctx: Any = None) -> Any:
        return self._attributes(None if inode == pyfuse3.ROOT_INODE else self._blob(inode))

    async def open(self, inode: int, flags: int, ctx: Any) -> Any:
        if flags & os.O_ACCMODE != os.O_RDONLY:
            raise pyfuse3.FUSEError(errno.EROFS)
        return pyfuse3.FileInfo(fh=FileHandleT(inode), direct_io=True, keep_cache=True)

    async def read(self, fh: int, off: int, size: int) -> bytes:
        assert self.cache is not None
        try:
            return await self.cache.read(self._blob(fh), off, size)
        except Failed:
            raise pyfuse3.FUSEError(errno.EIO) from None
        except OSError as error:
            _log.error("cannot read the cache: %s", error)
            raise pyfuse3.FUSEError(errno.EIO) from error

    async def opendir(self, inode: int, ctx: Any) -> FileHandleT:
        return FileHandleT(inode)

    async def readdir(self, fh: int, start_id: int, token: Any) -> None:
        return


def _options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="dsec-blobd-twin")
    parser.add_argument("--fuse-fd", type=int, required=True)
    for name in ("control", "state", "cache"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--connection", default="")
    parser.add_argument("--take-over", action="store_true")
    return parser.parse_args(arguments)


async def _serve(options: argparse.Namespace, directory: Directory) -> None:
    async with trio.open_nursery() as nursery:
        directory.cache = Cache(options.cache, nursery)
        control = Control(directory.cache, options.fuse_fd, nursery.cancel_scope.cancel)
        nursery.start_soon(control.serve, options.control)
        _log.info("serving")
        await pyfuse3.main()
        nursery.cancel_scope.cancel()  # unmounted


def main() -> int:
    """Serve until `shutdown` or until the directory is unmounted; return the exit status."""
    options = _options(sys.argv[1:])
    configure(Log(format="json"))
    if options.take_over:
        _log.error("this implementation cannot take a connection over: mount a new one")
        return 2
    directory = Directory()
    pyfuse3.init(directory, f"/dev/fd/{options.fuse_fd}", {"fsname=dsec-blobs"})
    try:
        trio.run(_serve, options, directory)
    finally:
        pyfuse3.close(unmount=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
