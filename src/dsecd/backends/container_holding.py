"""What one container holds: in memory, and the part of it that the journal keeps."""

from __future__ import annotations

import asyncio

import msgspec

from dsecd.backends.abc import Handle
from dsecd.backends.agent import AgentChannel
from dsecd.backends.container_names import Names
from dsecd.doors.reach import Reach
from dsecd.host.cgroup import OomWatch, SandboxCgroup, Slot
from dsecd.host.netns import Netns
from dsecd.host.nettable import IpAddress
from dsecd.host.network import Attachment
from dsecd.host.plan import Guard
from dsecd.host.ranges import Range
from dsecd.host.upper import Upper
from dsecd.images.local import Local
from dsecd.images.manifest import Config
from dsecd.policy.packed import pack
from dsecd.policy.rules import FilePolicy, NetPolicy, SystemPolicy

FD_MOUNT_NS, FD_UPPER = 8, 12  # in dsec-init


class Saved(msgspec.Struct, frozen=True, omit_defaults=True):
    """An upper that is immutable now: where it is, whose ids it has, on disk in whose volume.

    `linked`: a file in it may have several names; it is not known before a root was made on it.
    """

    path: str
    uid_base: int
    volume: Upper | None = None
    linked: bool = True


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A state of the files to come back to: paths of saved uppers, the oldest first."""

    id: str
    stack: tuple[str, ...]
    method: str
    created_at: float


class Pending(msgspec.Struct, frozen=True):
    """A swap of roots under way: it has happened when commands enter namespace `mount_ns`."""

    mount_ns: int
    stack: tuple[str, ...]
    upper_dir: str


class Roots(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What lies between a container's layers and its present upper, and what else was saved."""

    saved: list[Saved] = []
    stack: tuple[str, ...] = ()
    checkpoints: list[Checkpoint] = []
    made: int = 0  # checkpoints ever, deleted ones too
    serial: int = 0
    upper_dir: str = ""  # of the present upper on disk, "" for the first one
    pending: Pending | None = None


class Restrictions(msgspec.Struct, frozen=True):
    """Rules that the security module enforces."""

    files: FilePolicy
    system: SystemPolicy


class Held(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The journalled part of a holding."""

    range_index: int
    layers: list[Local]  # bottom first
    upper: Upper | None = None
    attachment: Attachment | None = None
    policy: bytes = b""  # of the network, packed
    restrictions: Restrictions | None = None
    apparmor: str = ""
    slot: str = ""
    cpus: tuple[int, ...] = ()
    pid: int = 0
    upper_bytes: int = 0
    defaults: Config = Config()
    roots: Roots = msgspec.field(default_factory=Roots)
    guards: tuple[Guard, ...] = ()
    paused: bool = False


class Holding:
    """All that one container holds, in the order in which it is taken."""

    __slots__ = (
        "apparmor", "attachment", "cgroup", "cgroup_id", "channel", "cpus", "defaults", "guards",
        "layers", "names", "netns", "overrides", "paused", "pid", "pidfd", "policy", "range",
        "reach", "relay", "restrictions", "roots", "sandbox", "slot", "upper", "upper_bytes",
        "watch",
        "watch_timer",
    )  # fmt: skip

    def __init__(self, sandbox: str) -> None:
        self.sandbox = sandbox
        self.range: Range | None = None
        self.layers: list[Local] = []
        self.defaults = Config()  # of the environment
        self.guards: tuple[Guard, ...] = ()  # over its files, in every root
        self.upper: Upper | None = None
        self.upper_bytes = 0
        self.roots = Roots()
        self.cpus: tuple[int, ...] = ()
        self.netns: Netns | None = None
        self.attachment: Attachment | None = None
        self.policy: NetPolicy | None = None  # of the network; None: no rules were given
        self.restrictions: Restrictions | None = None
        self.names: Names | None = None
        self.overrides: dict[str, str] = {}  # names with secrets: the address of the proxy inside
        self.reach: Reach | None = None  # of these, under `policy`
        self.relay: IpAddress | None = None  # inside, of all other names when they are checked
        self.apparmor = ""  # profile of its commands
        self.cgroup: SandboxCgroup | None = None
        self.cgroup_id = 0  # when a network policy is bound to it
        self.slot: Slot | None = None
        self.paused = False  # frozen until it is resumed
        self.pid = 0
        self.pidfd = -1
        self.channel: AgentChannel | None = None
        self.watch: OomWatch | None = None
        self.watch_timer: asyncio.TimerHandle | None = None

    def handle(self) -> Handle:
        assert self.range is not None
        held = Held(
            range_index=self.range.index,
            layers=self.layers,
            upper=self.upper,
            attachment=self.attachment,
            policy=pack(self.policy) if self.policy is not None else b"",
            restrictions=self.restrictions,
            apparmor=self.apparmor,
            slot=self.slot.name if self.slot is not None else "",
            cpus=self.cpus,
            pid=self.pid,
            upper_bytes=self.upper_bytes,
            defaults=self.defaults,
            roots=self.roots,
            guards=self.guards,
            paused=self.paused,
        )
        return Handle(
            sandbox=self.sandbox, backend="container", resources=msgspec.msgpack.encode(held)
        )
