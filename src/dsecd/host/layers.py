"""Layers mounted once per host, whatever the number of sandboxes that stack them.

The page cache belongs to the superblock, so two mounts of one image would cache it twice. Each
layer is mounted once from its file (no loop device) and held in two ways:

* attached at ``<root>/<digest>``: this is what survives the daemon; `start` finds it again. The
  root is a private mount of its own, so that no other mount namespace gets, and pins, a copy.
* as the detached mount that fsmount(2) made, while this daemon lives. The spawner, in a mount
  namespace of its own, may clone that one. It may not clone a clone of the attached mount (a
  detached tree remembers the namespace it was copied from), though it may use such a clone itself.
  So after a restart, and on kernels before 6.15, where detached mounts cannot be cloned at all,
  `lower` makes a clone for every sandbox.

All calls are synchronous: `acquire` takes 1-2 ms for a layer that is not mounted and nothing
otherwise. A layer nobody uses stays mounted for `grace_s`, as the next sandbox will often want it.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from dsecd import fastpath
from dsecd.host import erofs, mountinfo, syscalls
from libdsec.errors import Internal, NotFound, Unsupported, WrongState

_log = logging.getLogger(__name__)
GRACE_S = 300.0
_MS_BIND, _MS_PRIVATE = 1 << 12, 1 << 18
_UNFIT = ("overlay", "erofs", "tmpfs", "ramfs")  # EROFS refuses metadata files that lie on these


class Lower(msgspec.Struct, frozen=True):
    """A mount of a layer for a container plan, not yet idmapped.

    A shared one is to be cloned by the spawner and stays open here; a private one was made for one
    sandbox, is used as it is, and is closed by whoever asked for it, after sending it.
    """

    fd: int
    private: bool


class _Mounted(msgspec.Struct):
    """A mounted layer. `shared` is the fsmount descriptor, −1 when there is none to share."""

    point: Path
    shared: int = -1
    devices: tuple[str, ...] = ()  # () as long as an adopted one has no user
    users: int = 0
    idle_since: float = 0.0


class LayerMounts:
    """Mounts below `root`, counted by user. One per daemon, used from its event loop only."""

    def __init__(
        self, root: Path, grace_s: float = GRACE_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._root = root
        self._grace_s = grace_s
        self._clock = clock
        self._layers: dict[str, _Mounted] = {}

    def start(self) -> list[str]:
        """Make the private root and adopt the mounts of an earlier daemon; return their digests.

        Adopted layers count no user: recovery calls `acquire` for each live sandbox, and `collect`
        unmounts after the grace what nobody claimed.
        """
        self._root.mkdir(parents=True, exist_ok=True, mode=0o700)
        privatise(self._root)
        prefix = os.path.realpath(self._root) + "/"
        for mount in mountinfo.mounts():
            digest = mount.point.removeprefix(prefix)
            if mount.point == digest or "/" in digest or mount.type != "erofs":
                continue
            self._layers[digest] = _Mounted(point=self._root / digest, idle_since=self._clock())
        for entry in self._root.iterdir():  # of a crash between mkdir and mount
            if entry.name not in self._layers:
                with contextlib.suppress(OSError):
                    entry.rmdir()
        return list(self._layers)

    def acquire(
        self,
        digest: str,
        image: str | Path,
        devices: Sequence[str | Path] = (),
        served: bool = False,
    ) -> None:
        """Count one more user of the layer, mounting it when it is not.

        `served`: its blobs are files of dsec-blobd.

        Raises `NotFound` (no image file), `Internal` (damaged image), `Unsupported` (this kernel or
        the file system of `image`).
        """
        layer = self._layers.get(digest)
        if layer is None:
            layer = self._layers[digest] = self._mount(
                digest, Path(image), [Path(device) for device in devices], served
            )
        layer.devices = tuple(map(str, devices))
        layer.users += 1

    def release(self, digest: str) -> None:
        """Count one user less; the layer stays mounted for the grace."""
        layer = self._layers[digest]
        layer.users -= 1
        if layer.users == 0:
            layer.idle_since = self._clock()

    def lower(self, digest: str) -> Lower:
        """Return the mount of an acquired layer, for a plan. Raises `Internal` when it is gone."""
        layer = self._layers[digest]
        if layer.shared >= 0:
            return Lower(layer.shared, private=False)
        try:
            return Lower(fastpath.open_tree(layer.point, clone=True), private=True)
        except fastpath.StepError as error:
            raise Internal(f"the mount of layer {digest[:12]} cannot be cloned: {error}") from error

    @contextlib.contextmanager
    def lowers(self, digests: Sequence[str]) -> Iterator[list[int]]:
        """Lend the descriptors of several acquired layers, in order, while they are sent."""
        taken: list[Lower] = []
        try:
            for digest in digests:
                taken.append(self.lower(digest))
            yield [lower.fd for lower in taken]
        finally:
            for lower in taken:
                if lower.private:
                    os.close(lower.fd)

    def users(self, digest: str) -> int:
        """Return how many sandboxes use the layer."""
        layer = self._layers.get(digest)
        return layer.users if layer else 0

    def digests(self) -> list[str]:
        """Return the digests of all mounted layers."""
        return list(self._layers)

    def devices(self) -> set[str]:
        """Return the blob devices of all mounted layers that had a user."""
        return {device for layer in self._layers.values() for device in layer.devices}

    def attached(self) -> set[str]:
        """Return the digests of what the kernel has mounted, also where an unmount failed."""
        prefix = os.path.realpath(self._root) + "/"
        return {
            mount.point.removeprefix(prefix)
            for mount in mountinfo.mounts()
            if mount.point.startswith(prefix)
        }

    def images(self) -> set[str]:
        """Return the image files of what the kernel has mounted."""
        prefix = os.path.realpath(self._root) + "/"
        return {mount.source for mount in mountinfo.mounts() if mount.point.startswith(prefix)}

    def mounted(self) -> int:
        """Return how many layers are mounted."""
        return len(self._layers)

    def drop(self, digest: str) -> None:
        """Unmount the layer now, if it is mounted. Raises `WrongState` while it is used."""
        layer = self._layers.get(digest)
        if layer is None:
            return
        if layer.users:
            raise WrongState(
                f"layer {digest[:12]} is used by {layer.users} sandboxes; stop them first",
                state="in_use",
                users=layer.users,
            )
        self._unmount(digest)

    def drop_served(self) -> list[str]:
        """Unmount adopted layers on files of a dsec-blobd whose connection is gone; return them.

        For ever they give EIO to the sandboxes that have them; the next user mounts them anew.
        """
        prefix = os.path.realpath(self._root) + "/"
        served = [
            digest
            for mount in mountinfo.mounts()
            if (digest := mount.point.removeprefix(prefix)) in self._layers
            and "directio" in mount.options
        ]
        for digest in served:
            self.drop(digest)
        return served

    def collect(self) -> list[str]:
        """Unmount the layers unused for longer than the grace; return their digests."""
        idle = self.retire()
        for _, unmount in idle:
            unmount()
        return [digest for digest, _ in idle]

    def retire(self) -> list[tuple[str, Callable[[], None]]]:
        """Give up the layers unused for longer than the grace, each with what unmounts it.

        That may be called in any thread: an unmount waits for reads under way, and those of a
        served layer for its store. The layer may be mounted anew meanwhile.
        """
        limit = self._clock() - self._grace_s
        idle = [
            digest
            for digest, layer in self._layers.items()
            if layer.users == 0 and layer.idle_since <= limit
        ]
        return [(digest, functools.partial(_unmount, self._layers.pop(digest))) for digest in idle]

    def close(self) -> None:
        """Give up the descriptors; every mount stays for the next daemon."""
        for layer in self._layers.values():
            if layer.shared >= 0:
                os.close(layer.shared)
        self._layers.clear()

    def teardown(self) -> None:
        """Unmount everything, used or not, and the root: for a daemon that leaves the host."""
        for digest in list(self._layers):
            self._unmount(digest)
        while (mount := mountinfo.at(self._root)) is not None:
            fastpath.umount(mount.point)
        with contextlib.suppress(OSError):
            self._root.rmdir()

    def _mount(self, digest: str, image: Path, devices: Sequence[Path], served: bool) -> _Mounted:
        """Mount the image; what was made is undone on failure."""
        wanted = erofs.inspect(image).devices
        if wanted != len(devices):
            # the kernel would mount it all the same and answer reads with EIO
            raise Internal(f"{image} needs {wanted} blob devices, {len(devices)} are given")
        with contextlib.ExitStack() as undo:
            try:
                shared = fastpath.mount_erofs(image, devices, served)
            except fastpath.StepError as error:
                raise _explain(image, error) from error
            undo.callback(os.close, shared)
            point = self._root / digest
            point.mkdir(mode=0o700, exist_ok=True)  # `unmount` may be about to remove it
            undo.callback(point.rmdir)
            layer = _Mounted(point=point)
            clone = _clone_detached(shared)
            if clone >= 0:
                undo.callback(os.close, clone)
                fastpath.move_mount(clone, point)
                layer.shared = shared
                undo.pop_all()
                os.close(clone)
            else:
                fastpath.move_mount(shared, point)
                undo.pop_all()
                os.close(shared)
        _log.debug("mounted layer %s", digest[:12])
        return layer

    def _unmount(self, digest: str) -> None:
        _unmount(self._layers.pop(digest))


def _unmount(layer: _Mounted) -> None:
    if layer.shared >= 0:
        os.close(layer.shared)
    try:
        fastpath.umount(layer.point)
    except fastpath.StepError as error:
        if error.errno not in (errno.EINVAL, errno.ENOENT):  # somebody else unmounted it
            raise
    with contextlib.suppress(OSError):  # gone, or the mount point of the same layer again
        layer.point.rmdir()


def _clone_detached(fd: int) -> int:
    """Return a clone of the detached mount `fd`, −1 where the kernel has no such thing (< 6.15)."""
    try:
        return fastpath.open_tree(f"/proc/self/fd/{fd}", clone=True)
    except fastpath.StepError as error:
        if error.errno != errno.EINVAL:
            raise
        return -1


def privatise(directory: Path) -> None:
    """Make `directory` a mount of its own that propagates nowhere, unless it is one."""
    mount = mountinfo.at(directory)
    if mount is not None and not mount.shared:
        return
    if mount is None:
        syscalls.mount(str(directory), str(directory), "", _MS_BIND)
    syscalls.mount("", str(directory), "", _MS_PRIVATE)


def fit_for_images(directory: Path) -> None:
    """Raise `Unsupported` when EROFS cannot mount files that lie in `directory` (ENOTBLK)."""
    mount = mountinfo.holding(directory)
    if mount.type in _UNFIT:
        raise Unsupported(
            f"{directory} lies on {mount.type}, from which EROFS cannot mount image files; "
            "put paths.state on a disk file system such as ext4, XFS or btrfs",
            reason=f"state directory on {mount.type}",
        )


def _explain(image: Path, error: fastpath.StepError) -> Exception:
    """Return the error that says what to do about a failed mount of `image`."""
    if error.errno in (errno.ENODEV, errno.ENOSYS):
        reason = "the kernel has no EROFS (CONFIG_EROFS_FS), or it is a module that is not loaded"
    elif error.errno == errno.ENOTBLK:
        kind = mountinfo.holding(image).type
        reason = (
            f"the image lies on {kind}, which cannot back an EROFS mount"
            if kind in _UNFIT
            else "the kernel cannot mount EROFS from a file (CONFIG_EROFS_FS_BACKED_BY_FILE, 6.12)"
        )
    elif error.errno == errno.ENOENT:
        return NotFound(f"the image file {image} is gone; import the layer again", path=str(image))
    else:
        return Internal(
            f"the layer image {image} cannot be mounted: {error}; "
            "if it is damaged, remove the layer and import it again",
            path=str(image),
        )
    return Unsupported(f"cannot mount {image}: {reason}", reason=reason)
