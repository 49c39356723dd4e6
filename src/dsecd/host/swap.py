"""Swap space of the daemon's own, so that the memory of idle sandboxes has somewhere to go.

A zram device or a file. Ours is whatever carries the UUID that a record below the runtime directory
names: it is written before anything is made, so that after a kill at any point the next daemon
finds what there is, uses it on, and removes it when it ends. Swap of anybody else's is used by the
kernel like ours, and never touched.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import struct
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from dsecd.host import pressure, syscalls, zram
from dsecd.host.kernelfs import KernelFiles
from libdsec.errors import Unsupported

logger = logging.getLogger(__name__)
Kind = Literal["auto", "zram", "file", "off"]
PAGE = os.sysconf("SC_PAGE_SIZE")
_PREFER = 0x8000  # SWAP_FLAG_PREFER; the priority is in the low 15 bits
_PRIORITY = {"zram": 100, "file": 10}  # the faster one first
_LABEL = b"dsec"
_HEADER = struct.Struct(
    "<3I16s16s"
)  # union swap_header: version, last page, bad pages, UUID, label
_HEADER_AT, _MAGIC = 1024, b"SWAPSPACE2"


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """`size_bytes` 0: half of the host's memory. `algorithm` is zram's, "" the kernel's choice."""

    kind: Kind = "auto"
    size_bytes: int = 0
    algorithm: str = ""


class Record(msgspec.Struct, frozen=True):
    """What is ours: a swap space with this UUID."""

    uuid: str
    kind: Literal["zram", "file"]
    path: str = ""  # of a file


def header(size_bytes: int, identity: bytes) -> bytes:
    """Return the first page of a swap space (include/linux/swap.h, mkswap(8))."""
    page = bytearray(PAGE)
    _HEADER.pack_into(page, _HEADER_AT, 1, size_bytes // PAGE - 1, 0, identity, _LABEL)
    page[-len(_MAGIC) :] = _MAGIC
    return bytes(page)


def identity(path: str) -> str:
    """Return the UUID of the swap space at `path`, "" when it is none or cannot be read."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return ""
    try:
        page = os.pread(fd, PAGE, 0)
    except OSError:
        return ""
    finally:
        os.close(fd)
    if len(page) < PAGE or not page.endswith(_MAGIC):
        return ""
    return str(uuid.UUID(bytes=_HEADER.unpack_from(page, _HEADER_AT)[3]))


def active(files: KernelFiles) -> dict[str, int]:
    """Return the bytes used of each swap space of the host, by path."""
    try:
        lines = files.read("/proc/swaps").splitlines()[1:]
    except OSError:
        return {}
    rows = [line.rsplit(maxsplit=4) for line in lines]  # path type size used priority
    return {row[0].strip(): int(row[3]) * 1024 for row in rows if len(row) == 5}


class Swap:
    """The swap space of one daemon. `start`, then `close`; both may block for a while."""

    def __init__(
        self, wanted: Wanted, record: Path, state: Path, files: KernelFiles | None = None
    ) -> None:
        self._wanted, self._record = wanted, record
        self._file = state / "swap"
        self._files = files or KernelFiles()
        self.remark = "not looked for yet"
        self.path = ""  # of ours, "" while there is none

    def slow(self) -> bool:
        """Whether any of the host's swap has to be waited for; zram only costs CPU time."""
        return any(not zram.is_device(path) for path in active(self._files))

    def start(self) -> None:
        """Take over ours, or make it. Raises `Unsupported` only for what was asked for by name."""
        record = self._load()
        if record is not None:
            self.path = self._find(record)
            if self.path and self._wanted.kind in ("auto", record.kind):
                self._on(record.kind)
                self.remark = f"{record.kind}: {self.path}, ours"
                return
            self.close(leave_nothing=True)  # a half-made one, or the configuration has changed
        if self._wanted.kind == "off":
            self.remark = "reclaim.swap is off"
        elif self._wanted.kind == "auto":
            self._choose()
        else:
            self._make(self._wanted.kind)

    def _choose(self) -> None:
        others = active(self._files)
        if others:
            self.remark = f"the host's own: {', '.join(sorted(others))}"
            return
        try:
            self._make("zram")
        except Unsupported as error:
            self.remark = str(error.detail.get("reason") or error.message)
            logger.warning("idle sandboxes keep their anonymous memory: %s", self.remark)

    def _make(self, kind: Literal["zram", "file"]) -> None:
        """Make ours and use it; what a failure left is removed."""
        size = self._wanted.size_bytes or pressure.memory().total_bytes // 2
        size -= size % PAGE
        name = uuid.uuid4()
        self._save(Record(str(name), kind, str(self._file) if kind == "file" else ""))
        try:
            if kind == "zram":
                self._make_device(size, name.bytes)
            else:
                self._make_file(size, name.bytes)
            self._on(kind)
        except (OSError, Unsupported) as error:
            self.close(leave_nothing=True)
            if isinstance(error, Unsupported):
                raise
            why = f"cannot make swap ({kind}): {error.strerror}"
            raise Unsupported(why, reason=why) from error
        self.remark = f"{kind}: {self.path}, {size >> 20} MiB, ours"

    def _make_device(self, size: int, name: bytes) -> None:
        number = zram.add(self._files)
        self.path = zram.device(number)
        try:
            zram.configure(self._files, number, size, self._wanted.algorithm)
            _write_header(self.path, header(size, name), os.O_WRONLY)
        except BaseException:
            zram.remove(self._files, number)
            self.path = ""
            raise

    def _make_file(self, size: int, name: bytes) -> None:
        """Without holes, which swapon(2) refuses; on a file system that allows swap files."""
        self._file.unlink(missing_ok=True)
        self.path = str(self._file)
        _write_header(self.path, header(size, name), os.O_RDWR | os.O_CREAT | os.O_EXCL, size)

    def _on(self, kind: Literal["zram", "file"]) -> None:
        if self.path not in active(self._files):
            flags = _PREFER | _PRIORITY[kind]
            try:
                syscalls.call("swapon", os.fsencode(self.path), flags)
            except OSError as error:
                if error.errno != errno.EBUSY:  # on already, under another name
                    raise

    def _find(self, record: Record) -> str:
        """Return the path of ours, "" when there is none (any more)."""
        places = [record.path] if record.kind == "file" else map(zram.device, zram.numbers())
        return next((path for path in places if identity(path) == record.uuid), "")

    def close(self, leave_nothing: bool) -> None:
        """Remove ours if no sandbox lives; one that cannot be emptied stays for the next daemon."""
        record = self._load()
        if not leave_nothing or record is None:
            return
        path = self._find(record)
        try:
            if path in active(self._files):
                syscalls.call("swapoff", os.fsencode(path))
            if record.kind == "file":
                Path(record.path).unlink(missing_ok=True)
            elif path:
                zram.remove(self._files, int(path.removeprefix(zram.device(0)[:-1])))
        except OSError as error:
            logger.warning("swap stays on %s: %s", path, error.strerror)
            return
        self.path = ""
        self._record.unlink(missing_ok=True)

    def _load(self) -> Record | None:
        try:
            return msgspec.json.decode(self._record.read_bytes(), type=Record)
        except (FileNotFoundError, msgspec.MsgspecError):
            return None

    def _save(self, record: Record) -> None:
        self._record.parent.mkdir(parents=True, exist_ok=True)
        fresh = self._record.with_suffix(".new")
        fresh.write_bytes(msgspec.json.encode(record))
        fresh.replace(self._record)


def _write_header(path: str, page: bytes, flags: int, size: int = 0) -> None:
    fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        if size:
            os.posix_fallocate(fd, 0, size)
        os.pwrite(fd, page, 0)
        with contextlib.suppress(OSError):
            os.fsync(fd)
    finally:
        os.close(fd)
