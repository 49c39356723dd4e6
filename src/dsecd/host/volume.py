"""The file system that holds disk uppers: one where a directory can have a hard limit.

The operator's directory is used as it is when it lies on XFS mounted with ``prjquota`` or on btrfs
with simple quotas. Otherwise dsecd makes a volume of its own: a sparse file in that directory,
formatted and loop-mounted with direct I/O at a private mount point. It outlives the daemon, and is
made anew after a reboot, as no sandbox whose upper it held is alive then.
docs/decisions/0002-uppers.md tells why btrfs comes first.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from dsecd import fastpath
from dsecd.host import btrfs, mountinfo, syscalls
from dsecd.host.layers import privatise
from libdsec.errors import Exhausted, Unsupported

_log = logging.getLogger(__name__)
Kind = Literal["btrfs", "xfs"]
KINDS: tuple[Kind, ...] = ("btrfs", "xfs")
SHARE = 0.8  # of the free disk, the default size of a volume
MIN_BYTES = 512 << 20
_MS_NOATIME = 1 << 10
_FORMAT = {
    "btrfs": ("mkfs.btrfs", "--quiet", "--metadata", "single"),
    "xfs": ("mkfs.xfs", "-q", "-m", "reflink=1"),
}
_PACKAGE = {"btrfs": "btrfs-progs", "xfs": "xfsprogs"}
# discard gives freed space back to the host's disk: the loop driver punches holes. Btrfs looks for
# removed subvolumes once per commit interval, 30 s by default.
_OPTIONS = {"btrfs": "discard=async,commit=10", "xfs": "prjquota,discard"}


class Volume(msgspec.Struct, frozen=True):
    """Where uppers live. `image` is None when the volume is the operator's."""

    directory: Path
    kind: Kind
    image: Path | None = None

    def free_bytes(self) -> int:
        """Return what may still be written: no more than the disk below a sparse image has."""
        places = [self.directory] + ([self.image.parent] if self.image else [])
        return min(status.f_bavail * status.f_frsize for status in map(os.statvfs, places))


def open_volume(
    directory: Path, point: Path, size_bytes: int = 0, kinds: Sequence[Kind] = KINDS
) -> Volume:
    """Return the volume for `directory`: the file system below it, a mounted one, or a new one.

    `size_bytes` 0 takes a share of the free disk. Blocks for some tens of milliseconds. Raises
    `Unsupported` with the reason of each kind that was tried, `Exhausted` when the disk is full.
    """
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    existing = _existing(directory)
    if existing is not None:
        return existing
    image = directory / "volume.img"
    mount = mountinfo.at(point)
    while mount is not None and mount.type not in KINDS:  # a mount of ours that was half made
        fastpath.umount(point)
        mount = mountinfo.at(point)
    if mount is not None:
        return Volume(point, "btrfs" if mount.type == "btrfs" else "xfs", image)
    reasons: list[str] = []
    for kind in kinds:
        try:
            return _make(kind, image, point, size_bytes or _default_size(directory))
        except Unsupported as error:
            reasons.append(f"{kind}: {error.message}")
    raise Unsupported(
        "no file system with a limit per directory: " + "; ".join(reasons),
        reason="; ".join(reasons),
    )


def close_volume(volume: Volume) -> None:
    """Unmount and remove a volume of our own; the operator's stays."""
    if volume.image is None:
        return
    while mountinfo.at(volume.directory) is not None:
        fastpath.umount(volume.directory)
    with contextlib.suppress(OSError):
        volume.directory.rmdir()
    _discard(volume.image)


def _existing(directory: Path) -> Volume | None:
    """Return the operator's file system when it can limit directories."""
    mount = mountinfo.holding(directory)
    if mount.type == "xfs" and {"prjquota", "pquota"} & set(mount.options):
        return Volume(directory, "xfs")
    if mount.type == "btrfs" and btrfs.quota_mode(directory) == "squota":
        return Volume(directory, "btrfs")
    return None


def _default_size(directory: Path) -> int:
    status = os.statvfs(directory)
    size = int(status.f_bavail * status.f_frsize * SHARE)
    if size < MIN_BYTES:
        raise Exhausted(
            f"{directory} has room for {size >> 20} MiB, a volume for uppers needs "
            f"{MIN_BYTES >> 20}; free space or choose another directory"
        )
    return size >> 20 << 20


def _make(kind: Kind, image: Path, point: Path, size: int) -> Volume:
    """Make, format, attach and mount; everything is undone when a step fails."""
    _discard(image)
    with contextlib.ExitStack() as undo:
        undo.callback(_discard, image)
        with image.open("xb") as file:
            image.chmod(0o600)
            file.truncate(size)
        _run(kind, *_FORMAT[kind], str(image))
        device = _attach(kind, image)
        # lazy: the device goes with the mount, or at once when mounting fails
        undo.callback(_detach, device)
        point.mkdir(parents=True, exist_ok=True, mode=0o700)
        privatise(point)
        undo.callback(_unmount_all, point)
        flags = syscalls.MS_NOSUID | syscalls.MS_NODEV | _MS_NOATIME
        try:
            syscalls.mount(device, str(point), kind, flags, _OPTIONS[kind])
            if kind == "btrfs":
                btrfs.enable_quotas(point)
        except OSError as error:
            raise Unsupported(_refusal(kind, error), reason=_refusal(kind, error)) from error
        undo.pop_all()
    _detach(device)
    point.chmod(0o700)
    _log.info("made a %s volume of %d MiB for uppers at %s", kind, size >> 20, point)
    return Volume(point, kind, image)


def _refusal(kind: Kind, error: OSError) -> str:
    """Say why the kernel refused; the usual reasons have one error number each."""
    usual = {
        ("xfs", 22): "the kernel has no XFS quotas (CONFIG_XFS_QUOTA)",
        ("btrfs", 22): "the kernel has no simple quotas (Linux 6.7)",
        ("xfs", 19): "the kernel has no XFS",
        ("btrfs", 19): "the kernel has no btrfs",
    }
    return usual.get((kind, error.errno or 0), str(error))


def _attach(kind: Kind, image: Path) -> str:
    """Attach `image` to a loop device, with direct I/O where the file system below allows it."""
    command = ("losetup", "--find", "--show")
    try:
        return _run(kind, *command, "--direct-io=on", str(image)).strip()
    except Unsupported:
        _each_device(image, _detach)
        return _run(kind, *command, str(image)).strip()


def _detach(device: str) -> None:
    subprocess.run(["losetup", "--detach", device], check=False, capture_output=True)


def _each_device(image: Path, action: Callable[[str], None]) -> None:
    command = ["losetup", "--associated", str(image), "--noheadings", "--output", "NAME"]
    with contextlib.suppress(FileNotFoundError):  # no losetup, no devices
        found = subprocess.run(command, check=False, capture_output=True, text=True)
        for device in found.stdout.split():
            action(device)


def _discard(image: Path) -> None:
    """Remove an image and the loop devices that an interrupted start left on it."""
    if image.exists():
        _each_device(image, _detach)
        image.unlink()


def _unmount_all(point: Path) -> None:
    while mountinfo.at(point) is not None:
        fastpath.umount(point)


def _run(kind: Kind, *command: str) -> str:
    try:
        done = subprocess.run(command, check=True, capture_output=True, text=True)
    except FileNotFoundError as error:
        package = _PACKAGE[kind] if command[0].startswith("mkfs") else "util-linux"
        reason = f"{command[0]} is not installed (package {package})"
        raise Unsupported(reason, reason=reason) from error
    except subprocess.CalledProcessError as error:
        reason = f"{command[0]} failed: {error.stderr.strip()}"
        raise Unsupported(reason, reason=reason) from error
    return done.stdout
