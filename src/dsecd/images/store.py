"""The host's layers: immutable EROFS files named by digest, and names that point at them.

::

    <directory>/<sha256>.erofs   a layer; never changes
    <directory>/names/<name>     {"digest", "created_at"} of one name (quoted), replaced by rename
    <directory>/tmp/<random>/    an import in progress, locked; the next start removes dead ones
    <directory>/lock             flock: held while names move, across processes

A name moves by compare-and-swap under the lock. An image is complete and on disk before any name
points to it, so a crash leaves only files in ``tmp``, or a layer without a name, which is listed by
its digest. Everything but imports is a few system calls and synchronous: between `resolve` and the
mount that follows it in the same turn of the event loop, no removal can slip in.
"""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import fcntl
import hashlib
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from dsecd.host import erofs
from dsecd.host.layers import fit_for_images
from dsecd.images import names, tarball, writer
from libdsec.errors import (
    AlreadyExists,
    Exhausted,
    Internal,
    InvalidArgument,
    NotFound,
    WrongState,
)

PARALLEL_IMPORTS = 2
RESERVE_BYTES = 256 << 20  # of the disk, never filled by an import
_SUFFIX = ".erofs"


class Layer(msgspec.Struct, frozen=True):
    """One layer under one name; a layer without a name has its digest as name."""

    name: str
    digest: str
    path: Path
    size_bytes: int
    created_at: float


class Progress(msgspec.Struct, frozen=True):
    """How far an import is: `done` of `total` bytes of this stage (total 0: not known)."""

    stage: str  # unpack, write or copy, digest
    done: int
    total: int


class _Record(msgspec.Struct):
    """Content of a name's file."""

    digest: str
    created_at: float


class Cancelled(Exception):
    """The caller of an import gave up."""


class LayerStore:
    """The store in `directory`. `in_use` tells how many sandboxes use a digest."""

    def __init__(
        self,
        directory: Path,
        in_use: Callable[[str], int] = lambda _: 0,
        reserve: int = RESERVE_BYTES,
    ) -> None:
        self._directory = directory
        self._names_directory = directory / "names"
        self._temporary = directory / "tmp"
        self._lock = directory / "lock"
        self._in_use = in_use
        self._reserve = reserve
        self._names: dict[str, _Record] = {}
        self._imports = asyncio.Semaphore(PARALLEL_IMPORTS)

    def start(self) -> None:
        """Make the directories, remove what a crash left, read the names.

        Raises `Unsupported` when the directory's file system cannot back EROFS mounts.
        """
        self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        fit_for_images(self._directory)
        for directory in (self._names_directory, self._temporary):
            directory.mkdir(exist_ok=True, mode=0o700)
        self._lock.touch(mode=0o600)
        with _locked(self._lock):
            for entry in self._temporary.iterdir():
                # another process may be importing: its directory is locked, and soon gone
                with (
                    contextlib.suppress(FileNotFoundError),
                    _locked(entry, wait=False) as free,
                ):
                    if free:
                        _discard(entry)
            self._reload()

    # --- names ------------------------------------------------------------------------------

    def resolve(self, reference: str) -> Layer:
        """Return the layer with this name, digest or unique abbreviation of a digest.

        Raises `NotFound` with what there is instead, `InvalidArgument` for an ambiguous digest.
        """
        found = self._find(reference)
        if found is None:
            self._reload()  # another process may have imported it
            found = self._find(reference)
        if found is None:
            raise NotFound(f"no layer {reference!r}; {self._hint(reference)}", name=reference)
        return found

    def list(self) -> list[Layer]:
        """Return every layer under every name, sorted by name; then those without a name."""
        self._reload()
        rows = [self._layer(name, record) for name, record in sorted(self._names.items())]
        named = {record.digest for record in self._names.values()}
        for digest in sorted(self._digests() - named):
            rows.append(self._layer(digest, None))
        return [row for row in rows if row is not None]

    def point(self, name: str, digest: str, expected: str | None) -> Layer:
        """Let `name` point to `digest` if it now points to `expected` (None: if it is free).

        Raises `AlreadyExists` when it points elsewhere, `NotFound` when there is no such layer.
        """
        full = names.normalise(name)
        if not self._image(digest).exists():
            raise NotFound(f"no layer with digest {digest[:12]}", digest=digest)
        with _locked(self._lock):
            self._reload()
            current = self._names.get(full)
            if (current.digest if current else None) != expected:
                raise AlreadyExists(
                    f"layer {full} exists" + (f" as {current.digest[:12]}" if current else ""),
                    name=full,
                )
            return self._write_name(full, digest)

    def remove(self, reference: str, drop: Callable[[str], None] = lambda _: None) -> None:
        """Remove a name, or by digest a layer with all its names; the last takes the image along.

        `drop` unmounts the layer. Raises `WrongState` while a sandbox uses the image, `NotFound`.
        """
        layer = self.resolve(reference)
        with _locked(self._lock):
            self._reload()
            holders = [n for n, record in self._names.items() if record.digest == layer.digest]
            gone = holders if layer.name not in holders else [layer.name]
            if len(gone) == len(holders):
                users = self._in_use(layer.digest)
                if users:
                    raise WrongState(
                        f"layer {layer.name} is used by {users} sandboxes; stop them first",
                        state="in_use",
                        users=users,
                    )
                drop(layer.digest)
            for name in gone:
                (self._names_directory / names.to_file(name)).unlink(missing_ok=True)
                self._names.pop(name, None)
            if len(gone) == len(holders):
                layer.path.unlink(missing_ok=True)

    def prune(self, age_s: float, drop: Callable[[str], None] = lambda _: None) -> int:
        """Remove images that lost their last name, are not in use and older than `age_s`.

        A replaced name leaves such an image: it can still be had by digest until then. Returns the
        bytes freed.
        """
        freed = 0
        with _locked(self._lock):
            self._reload()
            named = {record.digest for record in self._names.values()}
            for digest in self._digests() - named:
                layer = self._layer(digest, None)
                if layer is None or layer.created_at > time.time() - age_s:
                    continue
                if self._in_use(digest) == 0:
                    drop(digest)
                    layer.path.unlink(missing_ok=True)
                    freed += layer.size_bytes
        return freed

    # --- imports ----------------------------------------------------------------------------

    async def import_(
        self,
        name: str,
        source: Path,
        replace: bool = False,
        progress: Callable[[Progress], None] = lambda _: None,
    ) -> Layer:
        """Make a layer of the directory, tar file or EROFS image `source` and name it.

        Runs in a thread, a few at a time; `progress` is called there. Cancelling the call ends the
        work and removes what it made. An image that exists already is only named. Raises
        `AlreadyExists` when the name is taken and `replace` is not given, `InvalidArgument` for a
        bad name or source, `Exhausted` for lack of disk.
        """
        full = names.normalise(name)
        self._expect_free(full, replace)
        gone = threading.Event()
        async with self._imports:
            work = asyncio.ensure_future(
                asyncio.to_thread(self.import_blocking, full, source, replace, progress, gone)
            )
            try:
                return await asyncio.shield(work)
            except asyncio.CancelledError:
                gone.set()
                with contextlib.suppress(Exception):
                    await work
                raise

    def import_blocking(
        self,
        name: str,
        source: Path,
        replace: bool = False,
        progress: Callable[[Progress], None] = lambda _: None,
        gone: threading.Event | None = None,
    ) -> Layer:
        """The same, in the calling thread; raises `Cancelled` soon after `gone` is set."""
        full = names.normalise(name)
        if not source.exists():
            raise InvalidArgument(f"{source} does not exist on the daemon's host", field="source")
        self._expect_free(full, replace)
        with contextlib.ExitStack() as stack:
            with _locked(self._lock):
                scratch = Path(tempfile.mkdtemp(dir=self._temporary))
                stack.enter_context(_locked(scratch))
            stack.callback(_discard, scratch)
            image, digest = _Import(source, scratch, self._room(), progress, gone).run()
            return self._publish(full, image, digest, replace)

    def _expect_free(self, full: str, replace: bool) -> None:
        """Fail before the work, not after it; `_publish` looks again."""
        self._reload()
        if full in self._names and not replace:
            raise AlreadyExists(
                f"layer {full} exists; use replace to move the name to new content", name=full
            )

    def verify(self, reference: str) -> None:
        """Read the whole image and compare it with its digest. Raises `Internal` on damage."""
        layer = self.resolve(reference)
        found = _digest(layer.path, lambda _: None)
        if found != layer.digest:
            raise Internal(
                f"the image of layer {layer.name} is damaged: its content has the digest "
                f"{found[:12]} instead of {layer.digest[:12]}; remove it and import it again",
                path=str(layer.path),
            )

    def _publish(self, full: str, image: Path, digest: str, replace: bool) -> Layer:
        """Move the finished image into place, then let the name point to it."""
        with _locked(self._lock):
            self._reload()
            current = self._names.get(full)
            if current and current.digest == digest and self._image(digest).exists():
                return self._known(full, current)
            if current and not replace:
                raise AlreadyExists(
                    f"layer {full} was made meanwhile, with other content", name=full
                )
            if not self._image(digest).exists():
                image.chmod(0o400)
                image.rename(self._image(digest))
                _sync_directory(self._directory)
            return self._write_name(full, digest)

    def _write_name(self, full: str, digest: str) -> Layer:
        record = _Record(digest, time.time())
        target = self._names_directory / names.to_file(full)
        fd, temporary = tempfile.mkstemp(dir=self._temporary)
        with os.fdopen(fd, "wb") as file:
            file.write(msgspec.json.encode(record))
            file.flush()
            os.fsync(fd)
        Path(temporary).rename(target)
        _sync_directory(self._names_directory)
        self._names[full] = record
        return self._known(full, record)

    def _room(self) -> int:
        """Return how many bytes an import may write. Raises `Exhausted` when there are none."""
        status = os.statvfs(self._directory)
        room = status.f_bavail * status.f_frsize - self._reserve
        if room <= 0:
            raise Exhausted(f"the disk of {self._directory} is full; remove layers or free space")
        return room

    # --- reading ----------------------------------------------------------------------------

    def _image(self, digest: str) -> Path:
        return self._directory / f"{digest}{_SUFFIX}"

    def _digests(self) -> set[str]:
        stems = {path.name.removesuffix(_SUFFIX) for path in self._directory.glob(f"*{_SUFFIX}")}
        return {stem for stem in stems if names.is_digest(stem)}

    def _reload(self) -> None:
        """Read the name files; one that is not ours or half gone is skipped."""
        table: dict[str, _Record] = {}
        for path in self._names_directory.iterdir():
            with contextlib.suppress(FileNotFoundError, msgspec.DecodeError):
                record = msgspec.json.decode(path.read_bytes(), type=_Record)
                table[names.from_file(path.name)] = record
        self._names = table

    def _find(self, reference: str) -> Layer | None:
        with contextlib.suppress(InvalidArgument):
            full = names.normalise(reference)
            if full in self._names:
                return self._known(full, self._names[full])
        prefix = names.digest_prefix(reference)
        if prefix is None:
            return None
        matches = [digest for digest in self._digests() if digest.startswith(prefix)]
        if len(matches) > 1:
            raise InvalidArgument(
                f"{reference} is the beginning of {len(matches)} digests; give more digits",
                field="name",
            )
        return self._layer(matches[0], None) if matches else None

    def _layer(self, name: str, record: _Record | None) -> Layer | None:
        path = self._image(record.digest if record else name)
        try:
            status = path.stat()
        except FileNotFoundError:
            return None
        digest = record.digest if record else name
        return Layer(
            name, digest, path, status.st_size, record.created_at if record else status.st_mtime
        )

    def _known(self, full: str, record: _Record) -> Layer:
        layer = self._layer(full, record)
        if layer is None:
            raise NotFound(
                f"the image file of layer {full} is gone; import the layer again",
                name=full,
                digest=record.digest,
            )
        return layer

    def _hint(self, reference: str) -> str:
        """Say what there is: close names first, else the first few."""
        known = sorted(self._names)
        if not known:
            return "there are none yet: see dsec layer import"
        close = difflib.get_close_matches(reference, known, n=3, cutoff=0.5)
        if close:
            return "did you mean " + " or ".join(close) + "?"
        more = f" and {len(known) - 5} more" if len(known) > 5 else ""
        return "known: " + ", ".join(known[:5]) + more


class _Import:
    """One import up to the finished image in `scratch`."""

    def __init__(
        self,
        source: Path,
        scratch: Path,
        room: int,
        progress: Callable[[Progress], None],
        gone: threading.Event | None,
    ) -> None:
        self._source, self._scratch, self._room = source, scratch, room
        self._progress, self._gone = progress, gone
        self._last = 0.0

    def run(self) -> tuple[Path, str]:
        """Return the image and its digest."""
        image = self._scratch / "image"
        if self._source.is_file() and writer.is_image(self._source):
            size = self._source.stat().st_size
            self._expect_room(size)
            writer.copy(self._source, image, self._reporter("copy", size))
        else:
            self._write(image)
        return image, _digest(image, self._reporter("digest", image.stat().st_size))

    def _write(self, image: Path) -> None:
        """Make the image of a directory or tar."""
        root = self._source
        if not root.is_dir():
            root = self._scratch / "tree"
            root.mkdir(mode=0o755)
            size = self._source.stat().st_size
            # content is on disk twice for a while: unpacked and in the image
            tarball.unpack(self._source, root, self._room // 2, self._reporter("unpack", size))
        found = writer.survey(root)
        self._expect_room(found.size_bytes)
        writer.build(root, image, found.excluded, self._reporter("write", found.size_bytes))
        erofs.inspect(image)

    def _expect_room(self, size: int) -> None:
        if size > self._room:
            raise Exhausted(
                f"{self._source} holds {size} bytes, the disk has room for {self._room}"
            )

    def _reporter(self, stage: str, total: int) -> Callable[[int], None]:
        """Return a function that passes progress on, ten times a second at most, or gives up."""

        def report(done: int) -> None:
            if self._gone is not None and self._gone.is_set():
                raise Cancelled
            now = time.monotonic()
            if now - self._last >= 0.1 or done >= total:
                self._last = now
                self._progress(Progress(stage, min(done, total), total))

        return report


def _digest(image: Path, check: Callable[[int], None]) -> str:
    digest = hashlib.sha256()
    with image.open("rb", buffering=0) as file:
        buffer = bytearray(1 << 20)
        view, done = memoryview(buffer), 0
        while count := file.readinto(buffer):
            digest.update(view[:count])
            done += count
            check(done)
    return digest.hexdigest()


def _sync_directory(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _discard(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def _locked(path: Path, wait: bool = True) -> Iterator[bool]:
    """Hold an exclusive flock on the file or directory `path`; yield whether it is ours."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(fd)
