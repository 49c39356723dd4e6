"""The typed plan of one container, built by Python, executed by dsec-spawner (C).

Pure data: nothing here touches the host. The spawner runs the steps in the order the fields are
described in docs/architecture.md, undoes them in reverse on a failure and answers with the step
that failed. File descriptors travel beside the plan and are named by their index in it.
"""

from __future__ import annotations

import msgspec

OP_CREATE, OP_DESTROY, OP_STAGE, OP_REROOT = range(4)
LIST_MAX = 64  # elements of a list in a plan
GUARDS_MAX = 256
PLAN_MAX = 192 << 10  # bytes of an encoded plan: what one datagram of the socket surely takes

# The steps of a creation, in order; `ContainerPlan.fail_step` and `SpawnReply.step` name one.
STEPS = (
    "cgroup", "limits", "runtime_dir", "agent_socket", "spool_dir", "upper", "upper_dirs", "files",
    "lowers", "overlay", "links", "terminals", "bind_sources", "config", "clone",
    # in the new process
    "root", "proc", "dev", "read_only", "masks", "binds", "guards", "netns", "cgroup_ns", "helper",
    # in its helper, inside the user namespace
    "userns", "unshare", "hostname", "namespaces",
    # in the new process again
    "affinity", "oom_score", "descriptors", "credentials", "exec",
)  # fmt: skip

# The steps of a re-rooting, in order.
REROOT_STEPS = (
    "carry_over", "bare_root", "upper", "upper_dirs", "files", "lowers", "overlay", "links",
    "bind_sources", "clone",
    # in the new process
    "root", "proc", "dev", "binds", "guards", "userns", "unshare", "namespace",
)  # fmt: skip


class FileWrite(msgspec.Struct, array_like=True, frozen=True):
    """Write `value` to the host file `path` before the clone (a limit of the sandbox's cgroup)."""

    path: str
    value: str


class Bind(msgspec.Struct, array_like=True, frozen=True):
    """Bind the host's `source` at `target` inside the root; the mount is read-only if asked."""

    source: str
    target: str
    read_only: bool = True


class NewFile(msgspec.Struct, array_like=True, frozen=True):
    """A generated file, put into the upper layer: root inside owns it and may change it.

    `target` is a path inside the root without a leading slash (``etc/hosts``); directories on the
    way become root's, mode 0755. Cheaper than a `Bind`: it needs no mount.
    """

    target: str
    content: bytes
    mode: int = 0o644  # at most 0755


GUARD_READ_ONLY, GUARD_NO_EXEC, GUARD_MASK = 1, 2, 4


class Guard(msgspec.Struct, array_like=True, frozen=True, order=True):
    """A mount over `path`, inside, that root inside cannot move, undo or write over.

    `how` is a sum of `GUARD_*`; 0 is the path bound on itself, which holds it in place. A symbolic
    link on the way fails the step with ELOOP; one at the end is guarded itself. What is missing is
    made: directories, and an empty file for the last component.
    """

    path: str
    how: int = 0


class ContainerPlan(msgspec.Struct, kw_only=True, frozen=True):
    """One container. Paths are the host's unless said otherwise.

    Descriptors passed beside the plan, in this order: user namespace, network namespace, then one
    per lower layer (bottom first): a mount of the layer, not yet idmapped. The topmost `raw_lowers`
    of them are uppers of checkpoints, taken as they are: a branch idmaps them before.
    """

    sandbox: str
    lowers: int  # how many descriptors of lowers follow
    raw_lowers: int = 0  # how many of these, the topmost, have their ids right already
    linked: bool = False  # the topmost may hold files of several names: they stay such
    uid_base: int  # first host id of the range; inside 0..65534
    owner_uid: int  # host id that owns the user namespace: uid_base + 65535
    cgroup: str = ""  # v2 directory: made, delegated to owner_uid, and entered by the clone
    writes: tuple[FileWrite, ...] = ()
    runtime_dir: str  # made by the spawner, mode 0700: agent.sock; gone after destroy
    spool_dir: str  # for command output, in files without a name: one for all sandboxes
    upper_dir: str = ""  # "" → a tmpfs of `upper_bytes`, else a directory on the host's disk
    upper_bytes: int = 0
    upper_project: int = 0  # quota project id of a disk upper, 0: none
    dev_tree: str = ""  # a /dev of the host's making; "": the spawner's own minimal one
    files: tuple[NewFile, ...] = ()  # resolv.conf, hosts, hostname, machine-id
    binds: tuple[Bind, ...] = ()  # host objects shown inside
    read_only: tuple[str, ...] = ("/proc/sys", "/proc/sysrq-trigger", "/proc/irq", "/proc/bus")
    masked: tuple[str, ...] = ()  # hidden by an empty file or directory; absent ones are skipped
    guards: tuple[Guard, ...] = ()  # in this order: each after those above it
    hostname: str
    cpus: tuple[int, ...] = ()  # affinity; () leaves it
    init_config: bytes  # docs/protocol.md: handed to dsec-init
    trace: bool = False  # fill `SpawnReply.micros`
    fail_step: str = ""  # fault injection: fail this step instead of doing it


class RerootPlan(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """Another root for a live container: the fields that mean the same are `ContainerPlan`'s.

    Descriptors passed beside the plan: pidfd of its PID 1, its user namespace, then the lowers,
    bottom first. Beside the reply come the new mount namespace and the new upper, for `root.swap`.
    /proc, /dev and all that is mounted below them (masks, terminals, shared memory, binds)
    are carried over; `binds` has the others.
    """

    sandbox: str
    lowers: int
    raw_lowers: int = 0  # uppers of this container's earlier checkpoints, the newest last
    linked: bool = False
    uid_base: int
    upper_dir: str = ""  # fresh, as the memory upper is
    upper_bytes: int = 0
    upper_project: int = 0
    files: tuple[NewFile, ...] = ()  # a root without the first upper lacks them
    binds: tuple[Bind, ...] = ()
    guards: tuple[Guard, ...] = ()  # but for those below /proc and /dev
    trace: bool = False
    fail_step: str = ""


class DestroyPlan(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """The end of one container, in any state of being made or unmade; what is gone already is fine.

    The pidfd of its PID 1 travels beside it when it is known, then, with `netns`, its network
    namespace. Everything in `cgroup` is killed; when no process is left the group with its children
    and the directories are removed, and `SpawnReply.clean` says whether the namespace is reusable.
    """

    sandbox: str
    cgroup: str = ""  # v2 directory
    runtime_dir: str = ""
    upper_dir: str = ""  # of a disk upper
    timeout_ms: int = 10_000  # for the processes to die
    netns: bool = False


class SpawnReply(msgspec.Struct, kw_only=True, frozen=True):
    """Answer of the spawner, with what was made beside it: a pidfd, or see `RerootPlan`."""

    pid: int = 0
    error: int = 0  # errno
    step: str = ""  # the step that failed
    where: str = ""  # the path of the plan that it failed at
    micros: dict[str, int] = {}  # time of each step, when `trace` was asked
    clean: bool = False  # of a destruction: nothing is left in its network namespace
    linked: bool = False  # of a re-rooting: there are files of several names in the topmost lower
