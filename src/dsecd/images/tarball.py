"""Unpack a tar of unknown origin, as root, with ownership, times and extended attributes.

Only tarfile's header parser is used; files are made by `Tree`, one component at a time. What
cannot be part of a layer is an error that names the member (paths with ``..``, hard links to
nothing, members below a symbolic link, a member given twice) or is left out and counted in the
report: device nodes (a sandbox has its own ``/dev``, and a 0/0 device would be an overlay whiteout)
and attributes that steer overlayfs.
"""

from __future__ import annotations

import bz2
import contextlib
import decimal
import errno
import gzip
import lzma
import os
import stat
import subprocess
import tarfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol, cast

import msgspec

from dsecd.images.tree import Tree, show, split
from libdsec.errors import Exhausted, InvalidArgument, Unsupported

MAX_ID = 65534  # ids a sandbox can map
MAX_ENTRIES = 10_000_000
MAX_TIME = 1 << 33  # seconds; the year 2242
MAX_EXTENSION = 1 << 20  # bytes of a long name or pax header, which tarfile reads into memory
_CHUNK = 1 << 20
_HOLE = 1 << 16  # zero runs from this size on become holes
_ZEROS = bytes(_HOLE)
_MAGIC = {b"\x28\xb5\x2f\xfd": "zstd", b"\x1f\x8b": "gz", b"\xfd7zXZ\x00": "xz", b"BZh": "bz2"}
_XATTR = "SCHILY.xattr."
_ACL = "SCHILY.acl."
_KEPT_XATTRS = ("user.", "security.capability", "system.posix_acl_")
_EXTENSIONS = (b"x", b"g", b"X", b"L", b"K")
# RecursionError: tarfile handles a chain of extended headers by recursion
_DAMAGE = (
    tarfile.TarError, EOFError, zlib.error, lzma.LZMAError, ValueError, RecursionError,
    gzip.BadGzipFile,
)  # fmt: skip

Check = Callable[[int], None]  # told the bytes of the file read so far; raises to give up


class _Source(Protocol):
    """All that tarfile's stream mode asks of a file."""

    def read(self, size: int = -1, /) -> bytes: ...


class Report(msgspec.Struct, kw_only=True):
    """What an archive held and what was left out."""

    entries: int = 0
    size_bytes: int = 0
    devices: int = 0  # left out
    xattrs: int = 0  # left out
    clamped_ids: int = 0  # owner above MAX_ID became MAX_ID

    def notes(self) -> list[str]:
        """Return what the importer should know, as sentences."""
        lines = []
        if self.devices:
            lines.append(f"{self.devices} device nodes left out: a sandbox has its own /dev")
        if self.xattrs:
            lines.append(
                f"{self.xattrs} extended attributes left out (not user, capability or ACL)"
            )
        if self.clamped_ids:
            lines.append(f"{self.clamped_ids} entries with ids above {MAX_ID} given to {MAX_ID}")
        return lines


class _Header(tarfile.TarInfo):
    """tarfile takes a damaged header for the end of the archive; here it is an error."""

    @classmethod
    def fromtarfile(cls, archive: tarfile.TarFile) -> _Header:
        try:
            return super().fromtarfile(archive)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]  # the zero block that ends it
            raise
        except tarfile.HeaderError as error:
            raise ValueError(str(error)) from error

    def _proc_member(self, archive: tarfile.TarFile) -> tarfile.TarInfo:
        if self.size < 0 or (self.type in _EXTENSIONS and self.size > MAX_EXTENSION):
            raise ValueError(f"a header claims {self.size} bytes")
        return super()._proc_member(archive)  # type: ignore[misc,no-any-return]


def unpack(source: Path, target: Path, limit_bytes: int, check: Check) -> Report:
    """Unpack the tar file `source` (plain, gz, bz2, xz, zst) into the empty directory `target`.

    Raises `InvalidArgument` for what is no tar, damaged or hostile, `Exhausted` above `limit_bytes`
    of content or when the disk is full, `Unsupported` without a program for zstd.
    """
    report = Report()
    with _open(source, check) as stream:
        try:
            with tarfile.open(
                fileobj=cast(Any, stream), mode="r|", tarinfo=_Header, errors="surrogateescape"
            ) as archive:
                _Unpacker(archive, target, limit_bytes, report).run()
            while stream.read(_CHUNK):  # a compressed file's checksum is at its end
                pass
        except _DAMAGE as error:
            where = f"after {report.entries} members" if report.entries else "at its start"
            raise InvalidArgument(
                f"{source.name} is not a readable tar archive, {where}: {error}", field="source"
            ) from error
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise Exhausted(f"disk full while unpacking {source.name}") from error
            raise
    return report


class _Counted:
    """A file that tells `check` how far the archive `raw` has been read."""

    def __init__(self, stream: _Source, raw: int, check: Check) -> None:
        self._stream, self._raw, self._check = stream, raw, check

    def read(self, size: int = -1, /) -> bytes:
        # the offset is shared with a decompressor that reads the same open file
        self._check(os.lseek(self._raw, 0, os.SEEK_CUR))
        return self._stream.read(size)


@contextlib.contextmanager
def _open(source: Path, check: Check) -> Iterator[_Source]:
    """Open `source` decompressed; the kind is told by its first bytes."""
    with source.open("rb", buffering=0) as raw, contextlib.ExitStack() as stack:
        head = raw.read(6)
        raw.seek(0)
        kind = next((kind for magic, kind in _MAGIC.items() if head.startswith(magic)), "")
        stream: _Source = raw
        if kind == "gz":
            stream = stack.enter_context(gzip.GzipFile(fileobj=raw))
        elif kind == "xz":
            stream = stack.enter_context(lzma.LZMAFile(raw))
        elif kind == "bz2":
            stream = stack.enter_context(bz2.BZ2File(raw))
        elif kind == "zstd":
            stream = stack.enter_context(_zstd(raw.fileno()))
        yield _Counted(stream, raw.fileno(), check)


class _Zstd:
    """Output of the zstd program (Python 3.11 has no decoder); its failure is a damaged archive."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def read(self, size: int = -1, /) -> bytes:
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        data = self._process.stdout.read(size)
        if not data and self._process.wait() != 0:
            raise ValueError(self._process.stderr.read().decode("utf-8", "replace").strip())
        return data


@contextlib.contextmanager
def _zstd(raw: int) -> Iterator[_Zstd]:
    try:
        process = subprocess.Popen(
            ["zstd", "-dcq"], stdin=raw, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
    except FileNotFoundError as error:
        raise Unsupported(
            "reading .tar.zst needs the program zstd: install the package zstd, or give a .tar.gz",
            reason="zstd is not installed",
        ) from error
    with process:
        try:
            yield _Zstd(process)
        finally:
            process.kill()


class _Unpacker:
    """One run over the members, in the order of the archive."""

    def __init__(
        self, archive: tarfile.TarFile, target: Path, limit_bytes: int, report: Report
    ) -> None:
        self._archive, self._limit, self._report = archive, limit_bytes, report
        self._target = target
        self._seen: set[tuple[bytes, ...]] = set()
        self._directories: list[tuple[tuple[bytes, ...], tarfile.TarInfo]] = []

    def run(self) -> None:
        tree = Tree(str(self._target))
        try:
            for member in self._archive:
                self._report.entries += 1
                if self._report.entries > MAX_ENTRIES:
                    raise InvalidArgument(f"archive has more than {MAX_ENTRIES} members")
                self._member(tree, member)
                self._archive.members = []  # type: ignore[attr-defined]  # it would keep them all
            # last and deepest first: filling a directory changes its time
            for parts, member in sorted(self._directories, key=lambda item: -len(item[0])):
                fd = tree.make_directory(parts)
                self._own(fd, b".", member)
        finally:
            tree.close()

    def _member(self, tree: Tree, member: tarfile.TarInfo) -> None:
        parts = split(_bytes(member.name))
        if member.isdir():
            tree.make_directory(parts)
            self._directories.append((parts, member))
            return
        if not parts:
            raise InvalidArgument("a member that is no directory stands for the tree itself")
        if parts in self._seen:
            raise InvalidArgument(f"{show(parts)} is in the archive twice", member=show(parts))
        self._seen.add(parts)
        if member.ischr() or member.isblk():
            self._report.devices += 1
            return
        above = tree.clear(parts)
        name = parts[-1]
        if member.islnk():
            self._link(tree, member, parts)
            return  # owner, mode and times are those of the file it names
        if member.issym():
            os.symlink(_bytes(member.linkname), name, dir_fd=above)
        elif member.isfifo():
            os.mkfifo(name, 0o600, dir_fd=above)
        elif member.isreg():
            self._content(member, above, name)
        else:
            raise InvalidArgument(
                f"{show(parts)} is of the unknown kind {member.type!r}", member=show(parts)
            )
        self._own(above, name, member)

    def _link(self, tree: Tree, member: tarfile.TarInfo, parts: tuple[bytes, ...]) -> None:
        target = split(_bytes(member.linkname))
        if not target:
            raise InvalidArgument(f"{show(parts)} is a hard link to the tree itself")
        try:
            holder = os.dup(tree.parent(target, create=False))
        except FileNotFoundError as error:
            raise _dangling(parts, target) from error
        try:
            above = tree.parent(parts)
            os.link(
                target[-1], parts[-1], src_dir_fd=holder, dst_dir_fd=above, follow_symlinks=False
            )
        except FileNotFoundError as error:
            raise _dangling(parts, target) from error
        except PermissionError as error:  # a directory
            raise InvalidArgument(f"{show(parts)} is a hard link to a directory") from error
        finally:
            os.close(holder)

    def _content(self, member: tarfile.TarInfo, above: int, name: bytes) -> None:
        """Write the data, with holes for long runs of zeros."""
        self._report.size_bytes += member.size
        if self._report.size_bytes > self._limit:
            raise Exhausted(
                f"the archive's content passes {self._limit} bytes, what this disk can take; "
                "free space or raise the limit",
                limit_bytes=self._limit,
            )
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(name, flags, 0o600, dir_fd=above)
        try:
            stream = self._archive.extractfile(member)
            assert stream is not None  # regular files have one
            left = member.size
            while left:
                data = stream.read(min(_CHUNK, left))
                if not data:
                    raise EOFError("content ends early")
                left -= len(data)
                _write(fd, data)
            os.ftruncate(fd, member.size)
        finally:
            os.close(fd)

    def _own(self, above: int, name: bytes, member: tarfile.TarInfo) -> None:
        """Set owner, attributes, mode, times, in this order: chown clears set-id bits."""
        if member.uid > MAX_ID or member.gid > MAX_ID:
            self._report.clamped_ids += 1
        uid, gid = min(max(member.uid, 0), MAX_ID), min(max(member.gid, 0), MAX_ID)
        os.chown(name, uid, gid, dir_fd=above, follow_symlinks=False)
        self._xattrs(above, name, member)
        if not member.issym():
            os.chmod(name, stat.S_IMODE(member.mode), dir_fd=above)
        when = _nanoseconds(member)
        os.utime(name, ns=(when, when), dir_fd=above, follow_symlinks=False)

    def _xattrs(self, above: int, name: bytes, member: tarfile.TarInfo) -> None:
        for key, value in member.pax_headers.items():
            if key.startswith(_ACL):  # an ACL as text, as GNU tar writes it
                self._report.xattrs += 1
            if not key.startswith(_XATTR):
                continue
            attribute = key[len(_XATTR) :]
            if not attribute.startswith(_KEPT_XATTRS) or attribute.startswith("user.overlay."):
                self._report.xattrs += 1
                continue
            # setxattr has no *at form: a magic link to the open directory, then one component
            path = b"/proc/self/fd/%d/%s" % (above, name)
            try:
                os.setxattr(path, attribute, _bytes(value), follow_symlinks=False)
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.EPERM, errno.EINVAL):
                    raise
                self._report.xattrs += 1


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    for start in range(0, len(data), _HOLE):
        piece = view[start : start + _HOLE]
        if len(piece) == _HOLE and piece == _ZEROS:
            os.lseek(fd, _HOLE, os.SEEK_CUR)
        else:
            while piece:
                piece = piece[os.write(fd, piece) :]


def _nanoseconds(member: tarfile.TarInfo) -> int:
    """Return the time of change, exact where the archive is, within what an image can hold."""
    try:
        when = int(decimal.Decimal(member.pax_headers.get("mtime") or member.mtime) * 10**9)
    except (ArithmeticError, ValueError):  # "inf", "nan"
        return 0
    return min(max(when, 0), MAX_TIME * 10**9 - 1)


def _bytes(text: str) -> bytes:
    """tarfile decodes with surrogateescape: this gives the archive's own bytes back."""
    return text.encode("utf-8", "surrogateescape")


def _dangling(parts: tuple[bytes, ...], target: tuple[bytes, ...]) -> InvalidArgument:
    return InvalidArgument(
        f"{show(parts)} is a hard link to {show(target)}, which does not come before it",
        member=show(parts),
    )
