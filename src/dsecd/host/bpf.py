"""BPF maps, links, pins and ring buffers, as bpf(2) gives them. Nothing here decides.

Objects live as long as a descriptor, a link or a pin refers to them. A `Map` reuses its buffers, so
it is for one thread (the event loop: a call takes a microsecond and never waits).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

from dsecd import fastpath
from dsecd.host import syscalls
from libdsec.errors import DSecError, Exhausted, Internal

_LOOKUP, _DELETE, _NEXT, _PIN, _GET, _INFO, _LINK_CREATE = 1, 3, 4, 6, 7, 15, 28
_BATCH_MISSING = (errno.EINVAL, errno.EOPNOTSUPP, 524)  # 524: ENOTSUPP, not for user space
_FULL = (errno.E2BIG, errno.ENOSPC, errno.ENOMEM)
_NOEXIST = 1  # BPF_NOEXIST
_ELEMENT = struct.Struct("=I4xQQQ")
_PAGE = mmap.PAGESIZE
BPF_FS_MAGIC = 0xCAFE4A11

# enum bpf_attach_type
INGRESS, EGRESS, SOCK_CREATE, CONNECT4, CONNECT6, SENDMSG4, SENDMSG6 = 0, 1, 2, 10, 11, 14, 15
LSM_MAC = 27

_number = syscalls.number("bpf", syscalls.host_arch())
_syscall = ctypes.CDLL(None, use_errno=True).syscall
_syscall.restype = ctypes.c_long
_syscall.argtypes = (ctypes.c_long, ctypes.c_int, ctypes.c_void_p, ctypes.c_uint)


def _bpf(command: int, attr: bytes) -> int:
    """Return bpf(2)'s result, or a negative errno."""
    result = int(_syscall(_number, command, attr, len(attr)))
    return -ctypes.get_errno() if result < 0 else result


def _failed(code: int, what: str) -> DSecError:
    text = f"{what}: {os.strerror(-code)}"
    return (Exhausted if -code in _FULL else Internal)(text, errno=-code)


class Map:
    """A map by its descriptor, which belongs to somebody else."""

    def __init__(self, fd: int, key_bytes: int, value_bytes: int, name: str) -> None:
        self.fd = fd
        self.name = name
        self._key = ctypes.create_string_buffer(key_bytes)
        self._value = ctypes.create_string_buffer(value_bytes)
        self._next = ctypes.create_string_buffer(key_bytes)
        key, value = ctypes.addressof(self._key), ctypes.addressof(self._value)
        self._element = _ELEMENT.pack(fd, key, value, 0)
        self._key_only = _ELEMENT.pack(fd, key, 0, 0)
        self._step = _ELEMENT.pack(fd, key, ctypes.addressof(self._next), 0)

    def update(self, key: bytes, value: bytes) -> None:
        """Enter or replace an element. Raises `Exhausted` when the map is full, `Internal`."""
        try:
            fastpath.update_map(self.fd, key, value, 0)
        except fastpath.StepError as error:
            raise self._refused(error) from error

    def enter(self, key: bytes, value: bytes) -> None:
        """Enter an element unless there is one. Raises as `update`."""
        try:
            fastpath.update_map(self.fd, key, value, _NOEXIST)
        except fastpath.StepError as error:
            if error.errno != errno.EEXIST:
                raise self._refused(error) from error

    def delete(self, key: bytes) -> bool:
        """Remove an element; return whether there was one."""
        self._key.raw = key
        result = _bpf(_DELETE, self._key_only)
        if result < 0 and result != -errno.ENOENT:
            raise _failed(result, f"remove from the map {self.name}")
        return result == 0

    def get(self, key: bytes) -> bytes | None:
        """Return an element's value, None without it."""
        self._key.raw = key
        result = _bpf(_LOOKUP, self._element)
        if result == -errno.ENOENT:
            return None
        if result < 0:
            raise _failed(result, f"read the map {self.name}")
        return self._value.raw

    def all_keys(self) -> list[bytes]:
        """Return all keys; the map must not change meanwhile but by the programs."""
        found, step = [], _ELEMENT.pack(self.fd, 0, ctypes.addressof(self._next), 0)
        while _bpf(_NEXT, step) == 0:
            found.append(self._next.raw)
            self._key.raw = self._next.raw
            step = self._step
        return found

    def update_all(self, keys: Sequence[bytes], values: Sequence[bytes]) -> None:
        """Enter many, in order, in one call where the kernel can. Raises as `update`."""
        if len(keys) > 1:
            try:
                fastpath.update_map_batch(self.fd, b"".join(keys), b"".join(values), len(keys))
                return
            except fastpath.StepError as error:
                if error.errno not in _BATCH_MISSING:
                    raise self._refused(error) from error
        for key, value in zip(keys, values, strict=True):
            self.update(key, value)

    def delete_all(self, keys: Sequence[bytes]) -> None:
        """Remove many; absent ones are fine."""
        if len(keys) > 1:
            with contextlib.suppress(fastpath.StepError):
                fastpath.delete_map_batch(self.fd, b"".join(keys), len(keys))
                return
        for key in keys:
            self.delete(key)

    def _refused(self, error: OSError) -> DSecError:
        return _failed(-(error.errno or 0), f"enter into the map {self.name}")


def link_cgroup(program: int, cgroup_fd: int, kind: int) -> int:
    """Attach a program to a cgroup, beside others; the link's descriptor. Raises `Internal`."""
    result = _bpf(_LINK_CREATE, struct.pack("=IIII", program, cgroup_fd, kind, 0))
    if result < 0:
        raise _failed(result, "attach a network program to the cgroup of the sandboxes")
    return result


def link_lsm(program: int) -> int:
    """Attach a program to its hook of the security module; the link's descriptor."""
    result = _bpf(_LINK_CREATE, struct.pack("=IIII", program, 0, LSM_MAC, 0))
    if result < 0:
        raise _failed(result, "attach a program to a hook of the security module")
    return result


def linked_cgroup(link: int) -> int:
    """Return the id of the cgroup that a link is attached to, 0 when that cgroup is gone."""
    info = ctypes.create_string_buffer(32)
    attr = struct.pack("=IIQ", link, len(info), ctypes.addressof(info))
    result = _bpf(_INFO, attr)
    if result < 0:
        raise _failed(result, "read about an attached network program")
    return int(struct.unpack_from("=Q", info, 16)[0])


# --- pins ---------------------------------------------------------------------------------------


def pin(fd: int, path: Path) -> None:
    """Keep the object of `fd` under a name in a BPF file system. Raises `Internal`."""
    name = ctypes.create_string_buffer(os.fsencode(path))
    result = _bpf(_PIN, struct.pack("=QII", ctypes.addressof(name), fd, 0))
    if result < 0:
        raise _failed(result, f"pin {path}")


def open_pin(path: Path) -> int:
    """Return a descriptor of the pinned object. Raises `Internal`."""
    name = ctypes.create_string_buffer(os.fsencode(path))
    result = _bpf(_GET, struct.pack("=QII", ctypes.addressof(name), 0, 0))
    if result < 0:
        raise _failed(result, f"open the pin {path}")
    return result


class _StatFs(ctypes.Structure):
    _fields_ = (("f_type", ctypes.c_long), ("rest", ctypes.c_char * 512))


def is_bpf_fs(path: Path) -> bool:
    """Say whether objects can be pinned in `path`."""
    found = _StatFs()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.statfs(os.fsencode(path), ctypes.byref(found)):
        return False
    return int(found.f_type) & 0xFFFFFFFF == BPF_FS_MAGIC


def ensure_bpf_fs(path: Path) -> None:
    """Mount a BPF file system at `path`, open to root only, unless one is there."""
    if is_bpf_fs(path):
        return
    try:
        path.mkdir(parents=True, exist_ok=True)
        syscalls.mount("bpf", str(path), "bpf", syscalls.MS_NOSUID | syscalls.MS_NODEV, "mode=0700")
    except OSError as error:
        raise Internal(f"mount a BPF file system at {path}: {error.strerror}") from error


def remove_bpf_fs(path: Path) -> None:
    """Undo `ensure_bpf_fs`."""
    while is_bpf_fs(path):
        syscalls.umount(str(path))
    if path.is_dir():
        path.rmdir()


# --- ring buffer --------------------------------------------------------------------------------


class Ring:
    """The reader's side of a ring buffer (kernel/bpf/ringbuf.c); `fd` becomes readable.

    The first page holds the reader's position, the second the writers'; the data follow, twice, so
    that no record is split. A record is a header of 8 bytes (busy, discarded, length) and the data.
    """

    _BUSY, _DISCARD, _HEADER = 1 << 31, 1 << 30, 8

    def __init__(self, fd: int, data_bytes: int) -> None:
        self.fd = fd
        self._mask = data_bytes - 1
        self._reader = mmap.mmap(fd, _PAGE, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        self._writers = mmap.mmap(
            fd, _PAGE + 2 * data_bytes, mmap.MAP_SHARED, mmap.PROT_READ, offset=_PAGE
        )

    def close(self) -> None:
        self._reader.close()
        self._writers.close()
        os.close(self.fd)

    def read(self, limit: int = 4096) -> Iterator[bytes]:
        """Yield what was submitted, at most `limit` records; each is released when the next is
        asked for."""
        (at,) = struct.unpack_from("=Q", self._reader, 0)
        for _ in range(limit):
            (end,) = struct.unpack_from("=Q", self._writers, 0)
            if at >= end:
                return
            offset = _PAGE + (at & self._mask)
            (header,) = struct.unpack_from("=I", self._writers, offset)
            if header & self._BUSY:
                return
            size = header & ~(self._BUSY | self._DISCARD)
            start = offset + self._HEADER
            if not header & self._DISCARD:
                yield self._writers[start : start + size]
            at += (size + self._HEADER + 7) & ~7
            struct.pack_into("=Q", self._reader, 0, at)
