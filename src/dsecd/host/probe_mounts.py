"""Trials of mounts: EROFS from a plain file, id mapping, the stack that a sandbox's root is."""

from __future__ import annotations

import ctypes
import errno
import os
import select
import shutil
import struct
import tempfile
from pathlib import Path

from dsecd import fastpath
from dsecd.host import preaccess, syscalls
from dsecd.host.probe import Trial
from libdsec.errors import Unsupported

_FSCONFIG_SET_STRING, _FSCONFIG_SET_FD, _FSCONFIG_CREATE = 1, 5, 6
_UID_BASE, _OWNER = 0x7FFF0000, 0x7FFFFFFF
_FUSE_INIT_EXT, _FUSE_HAS_RESEND = 1 << 30, 1 << (39 - 32)


def empty_erofs() -> bytes:
    """Return the smallest EROFS image: a superblock and an empty root (erofs_fs.h)."""
    image = bytearray(4096)
    struct.pack_into(
        "<IIIBBHQQIIII", image, 1024,
        0xE0F5E1E2, 0, 0, 12, 0, 36, 1, 0, 0, 1, 0, 0,
    )  # fmt: skip
    inode = 36 * 32  # nid 36, metadata starts at block 0
    names = struct.pack("<QHBB", 36, 24, 2, 0) + struct.pack("<QHBB", 36, 25, 2, 0) + b"..."
    struct.pack_into(
        "<HHHHIIIIHHI", image, inode,
        2 << 1, 0, 0o40755, 2, len(names), 0, 0, 1, 0, 0, 0,
    )  # fmt: skip
    image[inode + 32 : inode + 32 + len(names)] = names
    return bytes(image)


def _layer(scratch: Path) -> int:
    """Return a detached mount of an EROFS image in a plain file.

    The file must lie on a disk file system (a tmpfs cannot back EROFS: ENOTBLK), so not in scratch.
    """
    with tempfile.NamedTemporaryFile(prefix="dsec-probe-", dir="/var/tmp") as image:
        image.write(empty_erofs())
        image.flush()
        try:
            return fastpath.mount_erofs(image.name)
        except OSError as error:
            if error.errno == errno.ENOTBLK:
                raise OSError(
                    error.errno,
                    "no EROFS on plain files: the kernel lacks CONFIG_EROFS_FS_BACKED_BY_FILE "
                    "(6.12), or /var/tmp is not on a disk file system",
                ) from error
            raise


def _idmapped_layer(scratch: Path) -> int:
    """Return an idmapped clone of a mounted layer, as the spawner makes one per sandbox."""
    point = scratch / "layer"
    point.mkdir(exist_ok=True)
    mount = _layer(scratch)
    fastpath.move_mount(mount, str(point))
    os.close(mount)
    clone = fastpath.open_tree(str(point), True)
    userns = fastpath.make_userns(_UID_BASE, _OWNER)
    try:
        fastpath.idmap_mount(clone, userns)
    finally:
        os.close(userns)
        syscalls.umount(str(point))
    return clone


def _erofs_file(scratch: Path) -> str:
    os.close(_layer(scratch))
    return ""


def _erofs_idmapped(scratch: Path) -> str:
    clone = _idmapped_layer(scratch)
    try:
        owner = os.fstat(os.open(".", os.O_RDONLY | os.O_DIRECTORY, dir_fd=clone)).st_uid
    finally:
        os.close(clone)
    if owner != _UID_BASE:
        raise Unsupported("idmap", reason=f"root inside shows as {owner}, not as {_UID_BASE}")
    return ""


def _fsconfig(context: int, command: int, key: str = "", value: str = "", aux: int = 0) -> None:
    """fsconfig(2); the kernel's own explanation becomes the error's text."""
    try:
        syscalls.call(
            "fsconfig",
            context,
            command,
            key.encode() if key else None,
            value.encode() if value else None,
            aux,
        )
    except OSError as error:
        raise OSError(error.errno, _explanation(context) or error.strerror) from error


def _explanation(context: int) -> str:
    """Return the message that the mount API queued, "" when there is none."""
    try:
        return os.read(context, 4096).decode("utf-8", "replace").strip().removeprefix("e ")
    except OSError:
        return ""


def _overlay(scratch: Path, lower: str | int, owner: int = 0) -> str:
    """Mount an overlay with the options of a sandbox's root, make and remove a file in it."""
    upper, work, point = (scratch / name for name in ("upper", "work", "merged"))
    for path in (upper, work, point):
        path.mkdir(exist_ok=True)
        os.chown(path, owner, owner)
    context = syscalls.call("fsopen", b"overlay", 1)
    try:
        if isinstance(lower, int):
            _fsconfig(context, _FSCONFIG_SET_FD, "lowerdir+", aux=lower)
        else:
            _fsconfig(context, _FSCONFIG_SET_STRING, "lowerdir+", lower)
        for key, value in (("upperdir", upper), ("workdir", work), ("redirect_dir", "on")):
            _fsconfig(context, _FSCONFIG_SET_STRING, key, str(value))
        _fsconfig(context, 0, "volatile")
        _fsconfig(context, _FSCONFIG_CREATE)
        mount = syscalls.call("fsmount", context, 1, 0)
        fastpath.move_mount(mount, str(point))
        os.close(mount)
    finally:
        os.close(context)
    try:
        (point / "file").write_text("x")
        (point / "file").unlink()
    finally:
        syscalls.umount(str(point))
        for path in (upper, work):
            shutil.rmtree(path, ignore_errors=True)
    return ""


def _overlay_lowerdir(scratch: Path) -> str:
    lower = scratch / "lower"
    lower.mkdir(exist_ok=True)
    return _overlay(scratch, str(lower))


def _overlay_lower_fd(scratch: Path) -> str:
    mount = _layer(scratch)
    try:
        return _overlay(scratch, mount)
    finally:
        os.close(mount)


def _overlay_idmapped(scratch: Path) -> str:
    clone, point = _idmapped_layer(scratch), scratch / "idmapped"
    point.mkdir(exist_ok=True)
    fastpath.move_mount(clone, str(point))  # by path: descriptors have a row of their own
    os.close(clone)
    try:
        return _overlay(scratch, str(point), _UID_BASE)
    finally:
        syscalls.umount(str(point))


def _tmpfs(scratch: Path) -> str:
    point = scratch / "tmpfs"
    point.mkdir(exist_ok=True)
    syscalls.mount("dsec-probe", str(point), "tmpfs", 0, "size=1m,mode=755")
    syscalls.umount(str(point))
    return ""


def _fuse(scratch: Path) -> str:
    """Mount, and read what the kernel says of itself in its first request (fuse.h)."""
    point = scratch / "fuse"
    point.mkdir(exist_ok=True)
    try:
        fd = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise OSError(
            error.errno, f"/dev/fuse: {error.strerror}; load the module fuse (CONFIG_FUSE_FS)"
        ) from error
    try:
        options = f"fd={fd},rootmode=40000,user_id=0,group_id=0"
        syscalls.mount("dsec-probe", str(point), "fuse", 0, options)
        try:
            request = os.read(fd, 8192)
        finally:
            syscalls.umount(str(point))
    finally:
        os.close(fd)
    return describe_fuse(request)


def describe_fuse(request: bytes) -> str:
    """Return protocol and limits of the kernel that sent this FUSE_INIT."""
    if len(request) < 56:
        raise Unsupported("fuse", reason="the kernel speaks a protocol without FUSE_INIT")
    major, minor, _, low = struct.unpack_from("<4I", request, 40)
    (high,) = struct.unpack_from("<I", request, 56) if len(request) >= 60 else (0,)
    resend = low & _FUSE_INIT_EXT and high & _FUSE_HAS_RESEND
    without = "" if resend else "; readers get an error when dsec-blobd dies (Linux < 6.9)"
    return f"protocol {major}.{minor}{without}"


def _pre_access(scratch: Path) -> str:
    """Mark a file on the disk, read it in a child, and let that read go on."""
    with tempfile.NamedTemporaryFile(prefix="dsec-probe-", dir="/var/tmp") as file:
        file.write(bytes(4096))
        file.flush()
        group = preaccess.open_group()
        try:
            preaccess.mark(group, file.fileno())
            child = os.fork()
            if child == 0:
                os._exit(len(Path(file.name).read_bytes()) != 4096)
            asked = bool(select.select([group], [], [], 2.0)[0])
            if asked:
                _, _, fd, _ = struct.unpack("<QQii", os.read(group, 72)[:24])
                os.write(group, struct.pack("<iI", fd, 1))  # FAN_ALLOW
                os.close(fd)
            while asked and os.waitpid(child, os.WNOHANG) == (0, 0):
                if select.select([group], [], [], 0.01)[0]:
                    _, _, fd, _ = struct.unpack("<QQii", os.read(group, 72)[:24])
                    os.write(group, struct.pack("<iI", fd, 1))
                    os.close(fd)
        finally:
            os.close(group)
    if not asked:
        raise Unsupported("pre_access", reason="a read of a marked file did not ask (Linux < 6.14)")
    return "fails open: only when asked for by cache.on_demand"


def _file_systems() -> set[str]:
    return {line.split()[-1] for line in Path("/proc/filesystems").read_text().splitlines() if line}


def _loop(scratch: Path) -> str:
    """A quota volume in a file needs a loop device; EROFS layers do not."""
    fd = os.open("/dev/loop-control", os.O_RDWR | os.O_CLOEXEC)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        free = libc.ioctl(fd, 0x4C82)  # LOOP_CTL_GET_FREE
        if free < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
    finally:
        os.close(fd)
    return ""


def _xfs_quota(scratch: Path) -> str:
    """Looked for and not tried: a trial needs a volume of 300 MB."""
    if "xfs" not in _file_systems():
        raise Unsupported("xfs", reason="the kernel has no XFS")
    if not Path("/proc/fs/xfs/xqm").exists():
        raise Unsupported("xfs", reason="XFS is built without quotas (CONFIG_XFS_QUOTA)")
    if shutil.which("mkfs.xfs") is None:
        raise Unsupported("xfs", reason="mkfs.xfs is missing; install xfsprogs")
    return ""


def _ext4_quota(scratch: Path) -> str:
    """Looked for and not tried: a trial needs a volume of its own."""
    if "ext4" not in _file_systems():
        raise Unsupported("ext4", reason="the kernel has no ext4")
    try:
        syscalls.call("quotactl", 0x80000100, None, 0, None)  # Q_SYNC of all
    except OSError as error:
        raise OSError(error.errno, "the kernel has no quotas (CONFIG_QUOTA)") from error
    if shutil.which("mkfs.ext4") is None:
        raise Unsupported("ext4", reason="mkfs.ext4 is missing; install e2fsprogs")
    return ""


def _btrfs(scratch: Path) -> str:
    if "btrfs" not in _file_systems():
        raise Unsupported("btrfs", reason="the kernel has no btrfs")
    if shutil.which("mkfs.btrfs") is None:
        raise Unsupported("btrfs", reason="mkfs.btrfs is missing; install btrfs-progs")
    return ""


TRIALS = (
    Trial("erofs_file", "layers, mounted from plain files", _erofs_file),
    Trial("erofs_idmapped", "layers shared between sandboxes' user ranges", _erofs_idmapped),
    Trial("overlay_lowerdir", "the stack of layers (mount API, lowerdir+)", _overlay_lowerdir),
    Trial("overlay_lower_fd", "the stack of layers without attaching each", _overlay_lower_fd),
    Trial("overlay_idmapped", "a writable root over idmapped layers", _overlay_idmapped),
    Trial("tmpfs", "upper layers in memory", _tmpfs),
    Trial("fuse", "on-demand layers (dsec-blobd)", _fuse),
    Trial("pre_access", "on-demand layers without FUSE (cache.on_demand)", _pre_access),
    Trial("loop_devices", "a quota volume for disk uppers in a file", _loop),
    Trial("xfs_project_quota", "hard limits of disk uppers", _xfs_quota),
    Trial("ext4_project_quota", "hard limits of disk uppers where XFS has no quotas", _ext4_quota),
    Trial("btrfs", "atomic snapshots of disk uppers", _btrfs),
)
