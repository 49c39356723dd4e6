"""A store in a directory of any POSIX file system: local disk, NFS, JuiceFS, CephFS, 3FS.

::

    <root>/blobs/<id>          an object, and so on for the other prefixes
    <root>/names/<name>/<n>    the versions of a name; the one with the highest n is current
    <root>/tmp/<random>        what is being written; left ones are removed after a day

The only thing asked of the file system is that link(2) is atomic and fails when the target exists;
that holds on all of those, without locks, leases or clocks. An object is written and synced under
``tmp`` and then linked to its key. A name at version n is moved by linking the new record as n+1:
of many writers one succeeds, and none that dies midway leaves anything that has to be broken.

Old versions stay for a day after they are superseded and are removed in order, the oldest first.
So a writer that was stuck for longer than that, and links n+1 where n+1 has been and gone, finds
that n is gone too, and takes its link back; readers look at the highest number only.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import TypeVar

from dsecd.host.probe import Feature
from dsecd.images.stores import keys, record
from dsecd.images.stores.abc import Conflict, Entry, Source, size_of
from dsecd.images.stores.record import Record
from dsecd.images.stores.retry import Transient, retry
from dsecd.images.stores.workers import Call, Workers
from libdsec.errors import (
    DSecError,
    Exhausted,
    Internal,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    Unavailable,
    Unsupported,
)

KEEP_S = 86400.0  # leftovers in tmp, and superseded versions of names
_PIECE = 1 << 20  # bytes of one step: a mount that takes longer than the limit for it has stalled
_SYNC = 32 << 20
_READ_TRIES = 20
_PASSING = {
    errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.EHOSTDOWN, errno.EHOSTUNREACH,
    errno.ECONNREFUSED, errno.ECONNRESET, errno.ECONNABORTED, errno.EAGAIN, errno.EBUSY,
    errno.ENODEV, errno.EREMOTEIO, errno.ENXIO, errno.EINTR, errno.ENETUNREACH, errno.ESHUTDOWN,
    errno.ENOTEMPTY,
}  # fmt: skip
T = TypeVar("T")


class DirectoryStore:
    """The store in `root`. Use `dsecd.images.stores.opening.open_store`."""

    def __init__(self, root: Path, timeout_s: float = 30.0, threads: int = 16) -> None:
        self._root, self._timeout_s = root, timeout_s
        self._temporary = root / "tmp"
        self._workers = Workers(threads, timeout_s, f"the store {root}")
        self.url = root.as_uri()
        self.features: tuple[Feature, ...] = ()

    async def start(self) -> None:
        """Make the directories, try the file system, remove old leftovers.

        Raises `Unsupported` when it has no hard links, and what every method may raise.
        """
        await self._run("open", self._start)
        self.features = (
            Feature("store_swap", True, "by link(2)", "several writers of names in the store"),
        )

    # --- objects ----------------------------------------------------------------------------

    async def read(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        path = self._root / keys.check_fixed(key)
        if not 0 <= start <= (start if end is None else end):
            raise InvalidArgument(f"no range: bytes {start} to {end}", field="start")
        return await self._run(f"read {key}", lambda call: _read(path, start, end, call))

    async def size(self, key: str) -> int | None:
        path = self._root / keys.check_fixed(key)
        return await self._run(f"look at {key}", lambda _: _size(path))

    async def write(self, key: str, source: bytes | Path) -> bool:
        keys.check_fixed(key)
        return await self._run(f"write {key}", lambda call: self._write(key, source, call))

    async def delete(self, key: str) -> None:
        keys.check_deletable(key)
        path = self._root / key
        await self._run(f"delete {key}", lambda _: _remove(path))

    async def list(self, prefix: str) -> AsyncIterator[Entry]:
        keys.check_prefix(prefix)
        look = self._list_names if prefix in keys.MOVING else self._list_objects
        for entry in await self._run(f"list {prefix}", lambda call: look(prefix, call)):
            yield entry

    def source(self, key: str) -> Source:
        return Source(kind="file", path=str(self._root / keys.check_fixed(key)))

    async def tidy(self) -> None:
        await self._run("remove what is left over", self._tidy)

    async def close(self) -> None:
        self._workers.close()

    # --- names ------------------------------------------------------------------------------

    async def read_name(self, key: str) -> tuple[bytes, str] | None:
        path = self._root / keys.check_moving(key)
        _, current = await self._run(f"read {key}", lambda call: _current(path, call))
        return (current.data, current.version) if current and current.data else None

    async def swap_name(self, key: str, data: bytes | None, expected: str | None) -> str:
        keys.check_moving(key)
        wanted = record.new(data)
        await self._run(f"move {key}", lambda call: self._swap(key, wanted, expected, call))
        return wanted.version

    def _swap(self, key: str, wanted: Record, expected: str | None, call: Call) -> None:
        path = self._root / key
        number, current = _current(path, call)
        if current is not None and current.version == wanted.version:
            return  # a try before this one got through, but its answer did not
        live = current is not None and bool(current.data)
        if (current.version if current and live else None) != expected:
            raise _conflict(key, expected, current.version if current and live else None)
        if current is None:
            self._make_name(path, call)
            number = 0
        if not self._put(path / _numbered(number + 1), record.encode(wanted), call):
            raise _conflict(key, expected, "a newer one")
        numbers = _numbers(path)
        if number not in numbers:  # see the module
            _unlink(path / _numbered(number + 1))
            raise _conflict(key, expected, "a newer one")
        with contextlib.suppress(OSError):  # only tidying
            _remove_superseded(path, numbers)

    def _make_name(self, path: Path, call: Call) -> None:
        """Make the directory of a name with version 0, which is a deleted one, in one step."""
        scratch = self._temporary / secrets.token_hex(16)
        scratch.mkdir(0o700)
        try:
            first = os.open(scratch / _numbered(0), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o400)
            try:
                _write_all(first, record.encode(record.new(None)))
                os.fsync(first)
            finally:
                os.close(first)
            _sync(scratch)
            call.beat()
            try:
                scratch.rename(path)
                _sync(path.parent)
            except OSError as error:
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                    raise
        finally:
            if scratch.exists():
                _remove(scratch)

    # --- in a thread ------------------------------------------------------------------------

    async def _run(self, what: str, step: Callable[[Call], T]) -> T:
        async def attempt() -> T:
            try:
                return await self._workers.run(step)
            except OSError as error:
                raise self._translated(error, what) from error

        return await retry(attempt, f"cannot {what} in the store {self._root}", self._timeout_s)

    def _translated(self, error: OSError, what: str) -> Exception:
        reason = f"cannot {what} in the store {self._root}: {error.strerror}"
        if error.errno in _PASSING:
            return Transient(error.strerror or str(error))
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return Exhausted(f"{reason}; free space there, or raise the quota")
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            return PermissionDenied(f"{reason}; dsecd needs to write there")
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            return Unavailable(f"{reason}: {error.filename}; is the file system mounted?")
        return Internal(f"{reason} ({errno.errorcode.get(error.errno or 0, '?')})")

    def _start(self, call: Call) -> None:
        for directory in (self._root, self._temporary, *(self._root / p for p in keys.PREFIXES)):
            directory.mkdir(0o700, parents=True, exist_ok=True)
        first = self._temporary / f"probe-{secrets.token_hex(8)}"
        second = first.with_suffix(".link")
        first.touch(exist_ok=False)
        try:
            _require_links(first, second)
        finally:
            _unlink(first)
            _unlink(second)
        self._tidy(call)

    def _tidy(self, call: Call) -> None:
        clock = self._temporary / f"clock-{secrets.token_hex(8)}"
        clock.touch(exist_ok=False)
        try:
            now = clock.stat().st_mtime  # by the server's clock, which also made the others
        finally:
            _unlink(clock)
        for leftover in list(self._temporary.iterdir()):
            call.beat()
            with contextlib.suppress(OSError):
                if leftover.stat().st_mtime < now - KEEP_S:
                    _remove(leftover)

    def _write(self, key: str, source: bytes | Path, call: Call) -> bool:
        size = size_of(source)
        target = self._root / key
        found = _size(target)
        new = found is None and self._put(target, source, call)
        if (found := _size(target)) is None:
            raise OSError(errno.EAGAIN, "it was deleted meanwhile", str(target))
        if found != size:
            raise Internal(
                f"{target} has {found} bytes instead of {size}: it is damaged; delete it", key=key
            )
        return new

    def _put(self, target: Path, source: bytes | Path, call: Call) -> bool:
        """Write `source` to `target`, if nothing is there. True when it was put by this call."""
        temporary = self._temporary / secrets.token_hex(16)
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o400)
        try:
            try:
                if isinstance(source, bytes):
                    _write_all(fd, source, call)
                else:
                    _copy(source, fd, call)
                os.fsync(fd)
            finally:
                os.close(fd)
            call.beat()
            return _link(temporary, target)
        finally:
            _unlink(temporary)

    def _list_objects(self, prefix: str, call: Call) -> Sequence[Entry]:
        found = []
        with os.scandir(self._root / prefix) as entries:
            for entry in entries:
                call.beat()
                key = prefix + entry.name
                with contextlib.suppress(FileNotFoundError, InvalidArgument):  # deleted; not ours
                    status = entry.stat(follow_symlinks=False)
                    found.append(Entry(keys.check(key), status.st_size, status.st_mtime))
        return found

    def _list_names(self, prefix: str, call: Call) -> Sequence[Entry]:
        found = []
        for path in list((self._root / prefix).iterdir()):
            call.beat()
            with contextlib.suppress(FileNotFoundError, InvalidArgument):
                key = keys.check(prefix + path.name)
                numbers = _numbers(path)
                status = (path / _numbered(numbers[-1])).stat() if numbers else None
                if status and status.st_size > record.SIZE_DELETED:
                    size = status.st_size - record.SIZE_DELETED
                    found.append(Entry(key, size, status.st_mtime))
        return found


def _read(path: Path, start: int, end: int | None, call: Call) -> bytes:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        if not path.parent.is_dir():
            raise
        raise NotFound(f"the store has no {path.parent.name}/{path.name}") from None
    try:
        size = os.fstat(fd).st_size
        end = size if end is None else min(end, size)
        pieces = []
        while start < end:
            call.beat()
            piece = os.pread(fd, min(_PIECE, end - start), start)
            if not piece:
                raise OSError(errno.EIO, "the file is shorter than its size", str(path))
            pieces.append(piece)
            start += len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)
    finally:
        os.close(fd)


def _current(path: Path, call: Call) -> tuple[int, Record | None]:
    """Return number and record of the current version of the name in `path`; (0, None): none."""
    for _ in range(_READ_TRIES):
        call.beat()
        numbers = _numbers(path)
        if not numbers:
            return 0, None
        newest = path / _numbered(numbers[-1])
        try:
            return numbers[-1], record.decode(newest.read_bytes())
        except FileNotFoundError:
            continue  # superseded and removed since the listing
        except record.Damaged as error:
            raise Internal(
                f"{newest} is damaged: {error}; remove it to get the version before"
            ) from error
    raise OSError(errno.EAGAIN, "its versions come and go", str(path))


def _numbers(path: Path) -> list[int]:
    """Return the versions in the directory of a name, ascending; none when there is none."""
    try:
        return sorted(int(name) for name in os.listdir(path) if name.isdigit())  # noqa: PTH208
    except FileNotFoundError:
        if not path.parent.is_dir():
            raise
        return []


def _remove_superseded(path: Path, numbers: list[int]) -> None:
    """Remove versions superseded a day ago, the oldest first; the newest's time is now."""
    now = (path / _numbered(numbers[-1])).stat().st_mtime
    for number, next_number in itertools.pairwise(numbers):
        if (path / _numbered(next_number)).stat().st_mtime > now - KEEP_S:
            return
        _unlink(path / _numbered(number))


def _numbered(number: int) -> str:
    return f"{number:020d}"


def _link(temporary: Path, target: Path) -> bool:
    """Link atomically; False when `target` exists and is not ours."""
    try:
        target.hardlink_to(temporary)
    except FileExistsError:
        # NFS repeats a call whose answer was lost: then what exists is our own link
        if target.stat().st_ino != temporary.stat().st_ino:
            return False
    _sync(target.parent)
    return True


def _require_links(first: Path, second: Path) -> None:
    try:
        second.hardlink_to(first)
        linked = _link(first, second) and first.stat().st_nlink == 2
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK):
            raise
        linked = False
    if not linked:
        raise Unsupported(
            f"the file system of {first.parent.parent} has no hard links, which a store needs to "
            "put objects atomically; use another one, or S3",
            reason="no hard links",
        )


def _copy(source: Path, fd: int, call: Call) -> None:
    buffer = bytearray(_PIECE)
    view = memoryview(buffer)
    done = 0
    with source.open("rb", buffering=0) as reader:
        size = os.fstat(reader.fileno()).st_size
        while count := reader.readinto(buffer):
            _write_all(fd, view[:count], call)
            done += count
            if done % _SYNC == 0:  # one fsync at the end could take longer than the limit
                os.fdatasync(fd)
    if done != size:
        raise InvalidArgument(f"{source} changed while it was read", field="source")


def _write_all(fd: int, data: bytes | memoryview, call: Call | None = None) -> None:
    view = memoryview(data)
    while view:
        if call is not None:
            call.beat()
        view = view[os.write(fd, view[:_PIECE]) :]


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        if not path.parent.is_dir():
            raise
        return None


def _sync(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _remove(path: Path) -> None:
    """Remove an object, or a lease with its versions. Nothing happens when there is none."""
    if path.is_dir():
        for version in sorted(path.iterdir()):
            _unlink(version)
        with contextlib.suppress(FileNotFoundError):
            path.rmdir()
    else:
        _unlink(path)


def _unlink(path: Path) -> None:
    path.unlink(missing_ok=True)


def _conflict(key: str, expected: str | None, found: str | None) -> DSecError:
    return Conflict(
        f"{key} is {f'at version {found}' if found else 'not there'}, expected "
        f"{f'version {expected}' if expected else 'none'}: somebody else moved it; read it again",
        key=key,
    )
