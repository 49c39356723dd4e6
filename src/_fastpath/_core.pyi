"""Contract of the native core, and of its Python twin. Every failure is a `StepError`."""

from collections.abc import Iterable
from os import PathLike

StrPath = str | bytes | PathLike[str]

def make_userns(uid_base: int, owner_uid: int) -> int:
    """Return a user namespace whose ids 0..65534 are `uid_base`.. outside, owned by `owner_uid`."""

def make_shift_userns(from_base: int, to_base: int) -> int:
    """Return a user namespace for `idmap_mount`: the range at `from_base` is seen at `to_base`."""

def make_netns() -> int:
    """Return a new network namespace of the host's user namespace, loopback up."""

def netns_reusable(fd: int) -> bool:
    """Return whether nothing of the last user is left: sockets, TIME_WAIT, interfaces, routes."""

def mount_erofs(image: StrPath, devices: Iterable[StrPath] = (), direct: bool = False) -> int:
    """Return a detached, read-only, nodev, file-backed mount of `image` and its blob `devices`.

    `direct` reads past the page cache of the files: for blobs that dsec-blobd serves.
    """

def open_tree(path: StrPath, clone: bool, recursive: bool = False) -> int:
    """Return a descriptor of the mount at `path`, or of a detached clone of it."""

def move_mount(fd: int, target: StrPath) -> None:
    """Attach the detached mount `fd` at `target`."""

def idmap_mount(fd: int, userns: int) -> None:
    """Map the ids of the detached mount `fd` through the user namespace."""

def umount(target: StrPath, detach: bool = True) -> None:
    """Unmount `target` (never through a symbolic link); detached, busy mounts go later."""

def remove_tree(path: StrPath) -> None:
    """Remove `path` and all below it without following a symbolic link; absent is success."""

def remove_cgroup(path: StrPath) -> None:
    """Remove a cgroup and its child groups; EBUSY while a process is left; absent is success."""

def set_project(fd: int, project: int) -> None:
    """Put the directory into quota project `project`; what is made below inherits."""

def set_project_quota(fd: int, project: int, limit_bytes: int, limit_inodes: int = 0) -> None:
    """Set the hard limits of `project` on the volume that holds `fd`; 0 lifts one."""

def get_project_usage(fd: int, project: int) -> tuple[int, int, int, int]:
    """Return (bytes, limit_bytes, inodes, limit_inodes)."""

def make_sched_cookie(pid: int) -> None:
    """Give the process a fresh core-scheduling cookie. EINVAL, ENODEV: not on this host."""

def share_sched_cookie(source: int, target: int) -> None:
    """Give `target` the cookie of `source`."""

def get_sched_cookie(pid: int) -> int:
    """Return the cookie, 0 for none."""

def build_erofs(tree: bytes) -> bytes:
    """Return the EROFS image of an encoded tree (dsecd/images/erofs/encode.py).

    EBADMSG: malformed. EFBIG: the image would be too large.
    """

def read_chunks(
    fd: int, at: int, end: int, buffer: bytearray | memoryview, used: int
) -> tuple[int, int, list[bytes | None]]:
    """Read chunks of the file from `at` on into `buffer` behind its first `used` bytes.

    Every chunk starts at a multiple of 4096 in the buffer, padded with zeros. Returns where to go
    on, the bytes of the buffer in use, and a SHA-256 for each chunk, None for one of zeros, which
    takes no room. It ends early when the buffer is full, and after some 100 chunks. Moves the
    descriptor's offset. ENODATA: the file is shorter than `end`.
    """

def load_network_programs(
    sandbox_level: int, deny_unbound: bool, events_per_s: int
) -> tuple[list[int], list[int]]:
    """Load bpf/*.bpf.c from their light skeleton; return descriptors of maps and programs.

    Maps: bindings, counts, links, rules, names, fragments, events, constants. Programs: connect4,
    connect6, egress, ingress, link, sendmsg4, sendmsg6, sock_create. `sandbox_level` is the depth
    of a sandbox's cgroup below the v2 root. ENOSYS: this implementation does not carry them.
    """

def network_programs_version() -> int:
    """Return a number of 64 bits that changes with the programs or the maps."""

def load_file_programs(sandbox_level: int) -> tuple[list[int], list[int]]:
    """Load bpf/lsm/*.bpf.c from their light skeleton; return descriptors of maps and programs.

    Maps: bindings, roots, names, mount_types, abstracts, constants. Every program is for one hook,
    which it knows. ENOSYS: this implementation does not carry them.
    """

def file_programs_version() -> int:
    """Return a number of 64 bits that changes with the programs or the maps."""

def update_map(fd: int, key: bytes, value: bytes, flags: int) -> None:
    """Enter one element into a BPF map; key and value have its sizes."""

def update_map_batch(fd: int, keys: bytes, values: bytes, count: int) -> None:
    """Enter `count` elements in order, in one call. EINVAL, ENOTSUPP: not for this map or kernel.

    ENOSYS, here and below: this implementation does not carry the programs that have maps.
    """

def delete_map_batch(fd: int, keys: bytes, count: int) -> None:
    """Remove `count` elements in one call; the first that is absent ends it (ENOENT)."""
