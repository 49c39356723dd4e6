"""The typed plan of one container, built by Python, executed by dsec-spawner (C).

Pure data: nothing here touches the host. The spawner runs the steps in the order the fields are
described in docs/architecture.md, undoes them in reverse on a failure and answers with the step
that failed. File descriptors travel beside the plan and are named by their index in it.
"""

from __future__ import annotations

import msgspec


class FileWrite(msgspec.Struct, array_like=True, frozen=True):
    """Write `value` to the host file `path` before the clone (a limit of a pooled cgroup)."""

    path: str
    value: str


class Bind(msgspec.Struct, array_like=True, frozen=True):
    """Bind the host object `source` at `target` (inside the root); the mount is read-only if asked."""

    source: str
    target: str
    read_only: bool = True


class ContainerPlan(msgspec.Struct, kw_only=True, frozen=True):
    """One container. Paths are the host's unless said otherwise.

    Descriptors passed beside the plan, in this order: cgroup v2 directory of the sandbox, user
    namespace, network namespace, then one per lower layer (bottom first): a mount of the layer,
    not yet idmapped.
    """

    sandbox: str
    lowers: int  # how many layer descriptors follow
    uid_base: int  # first host id of the range; inside 0..65534
    owner_uid: int  # host id that owns the user namespace: uid_base + 65535
    writes: tuple[FileWrite, ...] = ()
    runtime_dir: str  # made by the spawner, mode 0700: agent.sock; gone after destroy
    spool_dir: str  # made by the spawner, owned by owner_uid: command output
    upper_dir: str = ""  # "" → a tmpfs of `upper_bytes`, else a directory on the host's disk
    upper_bytes: int = 0
    upper_project: int = 0  # quota project id of a disk upper, 0: none
    dev_tree: str  # prebuilt /dev of the host's template
    binds: tuple[Bind, ...] = ()  # masks and generated files (resolv.conf, hosts, machine-id)
    read_only: tuple[str, ...] = ("/proc/sys", "/proc/sysrq-trigger", "/proc/irq", "/proc/bus")
    masked: tuple[str, ...] = ()  # hidden by an empty file or directory; absent ones are skipped
    hostname: str
    cpus: tuple[int, ...] = ()  # affinity; () leaves it
    init_config: bytes  # docs/protocol.md: handed to dsec-init


class SpawnReply(msgspec.Struct, kw_only=True, frozen=True):
    """Answer of the spawner; a pidfd travels beside it when `error` is 0."""

    pid: int = 0
    error: int = 0  # errno
    step: str = ""  # the step that failed
    micros: dict[str, int] = {}  # time of each step, when tracing is asked
