"""One sandbox in the engine's memory. The manager alone changes it."""

from __future__ import annotations

import asyncio
import time

import msgspec

from dsecd.backends.abc import Backend, Channel, Display, Handle, Instance
from dsecd.backends.spec import Spec
from dsecd.config import Limits
from dsecd.engine.grants import hidden
from dsecd.engine.journal import Journal, PausedBy, Row, RowState
from dsecd.engine.lifecycle import ALIVE, FINAL, Action, after
from dsecd.engine.policies import Account
from dsecd.engine.request import Kind
from dsecd.images.tool import Report, unreported
from dsecd.secrets.secret import digest
from libdsec.errors import DSecError, WrongState
from libdsec.model import CpuClass, DSecContainerRunArgs, MicroVMInfo, SandboxInfo, State
from libdsec.model_layers import ImportStage

COMMANDS_NOTED = 4096  # per sandbox


class Sandbox:
    """State, clocks and resources of one sandbox. Loop times unless a name ends in `_at`."""

    __slots__ = (
        "account", "address", "address6", "args", "backend", "calls", "channel", "claim_deadline",
        "claims", "commands", "cpu_class", "cpu_notes", "created_at", "display", "ended_at",
        "entered", "error", "gone", "handle", "id", "idle_s", "idle_since", "key", "kind",
        "lifetime_end", "node", "notes", "oom_kills", "own", "owner", "paused_by", "pull", "ready",
        "reason", "report", "saving", "sealed", "spec", "started", "state", "task", "waiters",
        "waking",
    )  # fmt: skip

    def __init__(
        self,
        name: str,
        key: str,
        owner: str,
        args: DSecContainerRunArgs,
        spec: Spec,
        backend: Backend,
        kind: Kind,
    ) -> None:
        loop = asyncio.get_running_loop()
        self.id, self.key, self.owner = name, key, owner
        self.args, self.spec = hidden(args), spec
        self.backend, self.kind = backend, kind
        self.sealed = digest(args.secrets, key)  # what the secrets were
        self.node = ""
        self.state: State = "creating"
        self.reason = ""
        self.created_at = time.time()
        self.ended_at: float | None = None
        self.started = now = loop.time()
        self.handle: Handle | None = None
        self.channel: Channel | None = None
        self.display: Display | None = None
        self.address, self.address6 = "", ""
        self.notes: list[str] = []  # those of the backend
        self.account: Account | None = None  # of its policy
        self.cpu_class: CpuClass = args.cpu_class
        self.cpu_notes: tuple[str, ...] = ()  # what of it the host does not give
        self.paused_by: PausedBy = ""
        self.waking: asyncio.Task[None] | None = None  # resuming it, the last time
        self.calls = 0  # open calls from outside
        self.entered = 0  # calls ever
        self.idle_since = now
        self.idle_s: float | None = None
        self.lifetime_end: float | None = None
        self.claim_deadline: float | None = None  # nobody has got the answer to the create
        self.waiters = 0  # callers that wait for the create
        self.claims = 0  # callers that got its answer
        self.own = False  # the engine's: no client can name it, and it ends with the daemon
        self.oom_kills = 0
        self.commands: dict[str, int] = {}  # cid → OOM kills before it began
        self.ready: asyncio.Future[None] = loop.create_future()  # running, or the create's error
        self.gone: asyncio.Future[None] = loop.create_future()  # all resources are given back
        self.error: DSecError | None = None  # of its create
        self.task: asyncio.Task[None] | None = None  # building or freeing
        self.pull: asyncio.Future[None] | None = None  # its wait for a registry's image
        self.report: Report = unreported  # told how far that is, by whoever waits for the create
        self.saving: asyncio.Lock | None = None  # see `lock`

    @property
    def wanted(self) -> bool:
        """Whether it has neither ended nor is being ended."""
        return self.state == "creating" or self.state in ALIVE

    def carries(self, labels: dict[str, str]) -> bool:
        """Whether all of `labels` are among its own."""
        return all(self.args.labels.get(key) == value for key, value in labels.items())

    def hold(self, instance: Instance) -> None:
        """Keep what `instance` is reached by."""
        self.handle, self.channel = instance.handle, instance.channel
        self.display = instance.display

    def create_s(self, limits: Limits) -> float:
        """Return how long its creation may take: a whole system has its own idea of that."""
        full = self.spec.vm.full if self.spec.vm is not None else None
        return limits.create_timeout_s + (full.boot_timeout if full is not None else 0.0)

    def require_alive(self) -> None:
        """Raise `WrongState`, and why it ended, unless it is running or paused."""
        if self.state not in ALIVE:
            why = f": {self.reason}" if self.reason else ""
            raise WrongState(f"sandbox {self.id} is {self.state}{why}", state=self.state)

    def disk_full(self) -> bool:
        """Whether a quota leaves its upper no room, read now."""
        return self.handle is not None and self.backend.disk_full(self.handle)

    def lock(self) -> asyncio.Lock:
        """One checkpoint, rollback, pack, pause or resumption at a time."""
        if self.saving is None:
            self.saving = asyncio.Lock()
        return self.saving

    def asked(self, kind: Kind, args: DSecContainerRunArgs) -> bool:
        """Return whether this sandbox was asked for with `kind`, settled, and `args`."""
        same = self.kind == kind and self.args == hidden(args)
        return same and self.sealed == digest(args.secrets, self.key)

    def tell(self, stage: ImportStage, done: int, total: int) -> None:
        """Pass on how far the pull of the image is. From any thread."""
        self.report(stage, done, total)

    def move(self, action: Action) -> None:
        """Take the transition `action`. Raises `WrongState`."""
        self.state = after(self.state, action)
        if self.state in FINAL and self.ended_at is None:
            self.ended_at = time.time()

    def command_began(self, cid: str) -> int:
        """Note the start of a command; returns the number of OOM kills before it.

        A cid that is known attaches to its command instead of starting one.
        """
        known = self.commands.get(cid)
        if known is not None:
            return known
        if len(self.commands) >= COMMANDS_NOTED:
            del self.commands[next(iter(self.commands))]
        self.commands[cid] = self.oom_kills
        return self.oom_kills

    def oom_before(self, cid: str) -> int:
        """Return the number of OOM kills before the command; 0 when that is no longer known."""
        return self.commands.get(cid, 0)

    def answer_failure(self) -> None:
        """Tell those who wait for the create that it failed, if it did."""
        if self.error is not None and not self.ready.done():
            self.ready.set_exception(self.error)
            self.ready.exception()  # nobody may be waiting

    def deadline(self) -> tuple[float, str] | None:
        """Return when the sandbox has to end and why, as things stand now."""
        ends: list[tuple[float, str]] = []
        if self.lifetime_end is not None:
            ends.append((self.lifetime_end, "maximum lifetime reached"))
        if self.idle_s is not None and self.calls == 0 and self.paused_by != "caller":
            ends.append((self.idle_since + self.idle_s, "idle timeout (ttl_running_stop) reached"))
        if self.claim_deadline is not None:
            ends.append((self.claim_deadline, "nobody received the answer to its create"))
        return min(ends) if ends else None

    async def save(self, journal: Journal, handle: Handle) -> None:
        """Journal it with its handle as it is now."""
        self.handle = handle
        if self.state in ALIVE:
            await journal.write(self.row("running"))

    def row(self, state: RowState, claimed: bool = True) -> Row:
        """Return what the journal has to know."""
        handle = None if state == "ended" else self.handle
        account = self.account if state == "running" else None  # only the living are re-adopted
        return Row(
            id=self.id,
            key=self.key,
            owner=self.owner,
            state=state,
            final=self.state if self.state in FINAL else "",
            reason=self.reason,
            created_at=self.created_at,
            ended_at=self.ended_at,
            idle_s=self.idle_s,
            args=self.args,
            backend=self.kind.backend,
            vm=self.kind.vm,
            sealed=self.sealed,
            handle=b"" if handle is None else msgspec.msgpack.encode(handle),
            address=self.address,
            address6=self.address6,
            notes=self.notes,
            policy=b"" if account is None else account.packed,
            claimed=claimed,
            own=self.own,
            cpu_class=self.cpu_class if self.cpu_class != self.args.cpu_class else None,
            paused_by=self.paused_by,
        )

    def info(self, with_args: bool = False) -> SandboxInfo:
        """Return what a caller may know."""
        end = self.deadline() if self.state in ALIVE else None
        now = asyncio.get_running_loop().time()
        info = SandboxInfo(
            id=self.id,
            state=self.state,
            image=self.args.container_image,
            backend=self.kind.backend,
            created_at=self.created_at,
            ended_at=self.ended_at,
            expires_at=None if end is None else time.time() + end[0] - now,
            reason=self.reason,
            node=self.node,
            address=self.address,
            address6=self.address6,
            labels=self.args.labels,
            notes=[*self.notes, *self.cpu_notes, *(self.account.notes if self.account else ())],
            cpu_class=self.cpu_class,
        )
        if not with_args:
            return info
        info.args = self._present_args()
        if self.kind.vm is None:
            return info
        return MicroVMInfo(**msgspec.structs.asdict(info), vm=self.kind.vm)

    def _present_args(self) -> DSecContainerRunArgs:
        """Return what another sandbox like this one is made of: a branch has its policy of now."""
        args = self.args
        if self.cpu_class != args.cpu_class:
            args = msgspec.structs.replace(args, cpu_class=self.cpu_class)
        if self.account is None or not self.account.source.updated:
            return args
        policy = msgspec.to_builtins(self.account.source.policy)
        return msgspec.structs.replace(args, policy=policy, network_rules=None, network="nat")
