"""The contract between the engine and what a sandbox runs in.

Vocabulary
    *spec*      what the caller asked for, validated (`dsecd.model.Spec`).
    *handle*    everything a sandbox holds on the host, as data: versioned, goes to the journal
    before
                anything is made, and is all that is needed to free or to re-adopt the sandbox
                later.
    *instance*  a running sandbox: its (completed) handle and the channel to its agent.
    *channel*   multiplexed calls to the agent inside; its loss is the sandbox's death.
    *listener*  where a backend reports what happens by itself: death, OOM.

Lifecycle of one sandbox::

    handle = backend.prepare(id, spec)       # takes from pools only; undone by `release`
    journal.intend(handle)                   # a crash from here on is cleaned by `destroy(handle)`
    instance = await backend.create(handle, spec)
    journal.running(instance.handle)
    ...                                      # calls through instance.channel; listener.died(id,
    death) await backend.destroy(instance.handle)   # idempotent; also for a handle that never ran

After a restart of the daemon the engine calls `recover(handle)` for every journalled handle, then
`destroy` for those that answered None, then `sweep(known)`, which removes whatever carries this
daemon's names and belongs to nobody. `prepare` is called only after that.

A failed or cancelled `create` may leave things behind: the engine calls `destroy` at once, so there
is one way to undo whatever stage was reached. A handle is destroyed until that succeeds: `destroy`
may raise `DSecError`, and is then tried again later.

A daemon may have several backends (`engine.backends`). One may be made of another: it is given that
one's `Backend`, and nobody else uses what it makes there, under the same sandbox id. Whatever the
inner one reports for it reaches the engine as the sandbox's own. Each is started after what it is
made of, and closed before it.

Worked example (`fake.py` is a complete one): a backend for WebAssembly would put its module's
digest and memory reservation in the handle, start the instance in a worker process in `create`,
report the worker's exit through `listener.died`, and declare ``Capabilities(network=("none",),
pty=False)``. The engine never asks for a backend's name: it reads its capabilities.
"""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from typing import Protocol

import msgspec

from dsecd.backends.spec import Spec
from dsecd.images.library import Library
from dsecd.images.local import Located
from dsecd.images.tool import Report, unreported
from dsecd.model import Death
from dsecd.policy.rules import NetPolicy
from libdsec.model import (
    Checkpoint,
    Collected,
    CpuClass,
    Feature,
    KeptPath,
    KeptWarning,
    LayerCollapse,
    LayerImport,
    LayerInfo,
    MouseButton,
    PackArgs,
    Packed,
    Screenshot,
)

HANDLE_VERSION = 2


class Handle(msgspec.Struct, frozen=True, kw_only=True):
    """What a sandbox holds. `resources` is the backend's own record, msgpack-encoded."""

    sandbox: str
    backend: str
    version: int = HANDLE_VERSION
    resources: bytes = b""


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """What a backend can do, as data; the engine refuses what is not in here."""

    network: tuple[str, ...] = ("none",)
    upper: tuple[str, ...] = ("auto", "memory", "disk")
    survives_daemon: bool = False  # sandboxes live on when the daemon ends
    oom: bool = False  # reports OOM kills
    layers: bool = False
    vm: bool = False  # its sandboxes have a kernel of their own: it takes `Spec.vm`
    whole: bool = False  # they boot a disk image: it takes `VmSpec.full`, and no layers
    checkpoints: bool = False  # checkpoint, rollback, sandboxes that begin with a checkpoint
    pack: bool = False  # `pack_diff`, and `keep`, which grading needs
    streams: bool = False  # `open_stream`, which function calls need
    shell: bool = False  # shell text runs in a shell of the platform's, not the sandbox's
    files_each: int = 0  # descriptors that a sandbox costs the daemon
    files_ruled: int = 0  # and that one with rules for its network costs beyond
    memory_each: int = 0  # bytes that a sandbox may take beyond its limit
    memory_each_cpu: int = 0  # and for each CPU of its own kernel
    trim: bool = False  # pages out memory of running sandboxes
    pause: bool = False
    pause_frees: bool = False  # a paused one holds no memory that could be paged out
    secrets: bool = False  # adds headers to requests for names, on the host
    # of `policy.mechanisms.NEEDS`, those that it applies where `features` has what they need
    mechanisms: tuple[str, ...] = ()


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """What a sandbox uses now."""

    memory_bytes: int = 0  # charged to it: its own
    memory_shared_bytes: int = 0  # its share of pages that others map, too
    memory_swapped_bytes: int = 0
    stalled: Mapping[str, float] = {}  # cpu, memory, io: percent of 10 s in which a task waited
    cpu_usage_s: float = 0.0
    pids: int = 0
    oom_kills: int = 0
    disk_bytes: int = 0
    disk_limit_bytes: int = 0  # 0: as asked
    rx_bytes: int = 0
    tx_bytes: int = 0
    denied: int = 0  # by the network policy: calls, packets, sockets


class Warmth(msgspec.Struct, frozen=True, kw_only=True):
    """What reclaim asks of many sandboxes in a row: cheap to read."""

    memory_bytes: int
    cpu_usage_s: float
    memory_stalled: float = 0.0  # percent of 10 s


class Call(Protocol):
    """One open call on a channel, seen from the caller."""

    def send_item(self, data: msgspec.Raw) -> None: ...
    def end(self) -> None: ...
    def cancel(self) -> None: ...
    def grant(self, n: int) -> None: ...


class Receiver(Protocol):
    """Where the answers of one call go; called from the event loop, must not raise or block."""

    def on_item(self, data: msgspec.Raw) -> None: ...
    def on_credit(self, n: int) -> None: ...
    def on_reply(self, result: msgspec.Raw) -> None: ...
    def on_failure(self, error: dict[str, object]) -> None: ...


class Channel(Protocol):
    """Calls into a sandbox. After its loss every open call fails and `open` raises."""

    def open(self, op: str, args: msgspec.Raw, receiver: Receiver) -> Call: ...
    def close(self) -> None: ...


class GuestNetwork(msgspec.Struct, frozen=True, kw_only=True):
    """What a guest inside has to configure: its interface is at the other end of a tap.

    Addresses have their prefixes; `neighbours` are (address, MAC) of the gateways, which answer no
    questions. `resolv_conf` is the text of that file.
    """

    addresses: tuple[str, ...]
    gateways: tuple[str, ...]
    neighbours: tuple[tuple[str, str], ...]
    mtu: int
    resolv_conf: str


class Display(Protocol):
    """The screen of a sandbox, its keyboard and its pointer.

    Each raises `InvalidArgument` for what is not on the screen or the keyboard, `Unavailable`.
    """

    async def screenshot(self) -> Screenshot: ...

    async def click(self, x: int, y: int, button: MouseButton | None, count: int) -> None:
        """Go to a pixel, and press `button` there; None presses nothing."""

    async def scroll(self, x: int, y: int, steps: int) -> None:
        """Go to a pixel, and turn the wheel there: down, or up by less than 0 steps."""

    async def type_text(self, text: str) -> None:
        """Strike the keys of `text`, one after the other."""

    async def press(self, keys: Sequence[str]) -> None:
        """Hold `keys` down together, and let them go."""


class Instance(msgspec.Struct, frozen=True, kw_only=True):
    """A running sandbox."""

    handle: Handle
    channel: Channel
    pid: int = 0
    address: str = ""
    address6: str = ""
    notes: tuple[str, ...] = ()
    steps_us: Mapping[str, int] = {}  # time of each step of the creation
    paused: bool = False  # of a recovered one
    display: Display | None = None
    guest: GuestNetwork | None = None  # of one that was given `Spec.tap_user` and a network


class Listener(Protocol):
    """The engine's ears; called from the event loop."""

    def died(self, sandbox: str, death: Death) -> None: ...
    def oom(self, sandbox: str, kills: int) -> None: ...
    def denied(self, sandbox: str, detail: dict[str, str]) -> None:
        """The policy refused something: the detail of an event of kind `denied`."""


class KeepArgs(msgspec.Struct, frozen=True, kw_only=True):
    """What is graded: absolute paths inside. See `model.VerifyArgs`."""

    paths: tuple[bytes, ...]
    toolkits: tuple[str, ...] = ()
    workspace: bool = True


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """A layer of kept paths: it belongs on `layers`, bottom first, and below `toolkits`."""

    digest: str
    layers: tuple[str, ...]
    toolkits: tuple[str, ...]
    paths: list[KeptPath]
    warnings: list[KeptWarning]
    frozen_ms: float


Save = Callable[[Handle], Awaitable[None]]


class Layers(Protocol):
    """Layers a backend can start from."""

    async def list(self) -> list[LayerInfo]: ...
    async def get(self, name: str) -> LayerInfo: ...
    async def import_(self, args: LayerImport, report: Report = unreported) -> LayerInfo: ...
    async def collapse(self, args: LayerCollapse, report: Report = unreported) -> LayerInfo: ...
    async def remove(self, name: str) -> None: ...
    async def collect(self, grace_s: float | None, wait_s: float | None) -> Collected: ...

    async def stats(self) -> Mapping[str, float]:
        """What serves layers of a remote store has counted; {} when nothing serves any."""


class Environments(Protocol):
    """Layers of environments on this host, for a backend that makes something else of them."""

    library: Library  # where new ones go

    def recall(self, spec: Spec, aged: bool = False) -> Located | None:
        """Return what `locate` found a moment ago; with `aged`, the last that it found."""

    async def locate(self, spec: Spec) -> Located:
        """Bring the layers of `spec` to this host. Raises as `Backend.locate` does."""

    async def pull(self, spec: Spec, report: Report) -> None: ...


class Backend(Protocol):
    """See the module's docstring."""

    name: str
    capabilities: Capabilities

    async def start(self, listener: Listener) -> None:
        """Make pools and start helper processes. Raises `Unsupported` with the reason."""

    def located(self, spec: Spec) -> bool:
        """Whether `prepare` may follow at once, without `locate`."""

    async def pull(self, spec: Spec, report: Report = unreported) -> None:
        """Import the image of `spec` if only a registry has it, which may take minutes.

        Cancelling it ends this wait, not the import, which others may wait for, too. `report` may
        be called from any thread. Raises `Unavailable` with what the registry says.
        """

    async def locate(self, spec: Spec) -> None:
        """Bring the layers of `spec` to this host; `prepare` must follow in the same turn.

        Raises `NotFound`, `InvalidArgument` for what does not fit together, `Unavailable`.
        """

    def prepare(self, sandbox: str, spec: Spec) -> Handle:
        """Take what `spec` needs. Raises `Exhausted`, `NotFound` (image), `InvalidArgument`."""

    def release(self, handle: Handle) -> None:
        """Undo `prepare` for a handle that was never passed to `create`."""

    async def create(self, handle: Handle, spec: Spec) -> Instance: ...
    async def destroy(self, handle: Handle) -> None: ...

    async def recover(self, handle: Handle) -> Instance | None:
        """Re-adopt a live sandbox, or None when it is dead."""

    async def sweep(self, known: Collection[str]) -> Iterable[str]:
        """Remove left-overs of sandboxes not in `known`; return what was removed, for the log.

        `known` are all that live, those of other backends, too. What a backend left that is not
        configured any more is the host's own backend's to remove.
        """

    async def usage(self, handle: Handle) -> Usage: ...

    def warmth(self, handle: Handle) -> Warmth: ...

    async def trim(self, handle: Handle, want_bytes: int) -> int:
        """Page out the coldest memory of a sandbox, which goes on running, or stays as frozen as
        it is. Returns how many bytes were freed, which without swap may be few."""

    async def pause(self, handle: Handle, save: Save) -> None:
        """Have all in a sandbox stand still until `resume`, whatever becomes of the daemon.

        Calls wait, those that are opened meanwhile too, and none of their timeouts runs. `save`
        journals the handle, by which `recover` knows. After a failure it runs. Its memory is then
        free where `Capabilities.pause_frees` says so, else it is `trim`'s.
        """

    async def resume(self, handle: Handle, save: Save) -> None:
        """Let a paused sandbox go on; returns when its agent answers. May be called again."""

    async def set_cpu_class(self, handle: Handle, cpu_class: CpuClass) -> tuple[str, ...]:
        """Say how a sandbox competes for CPUs. Returns what of that the host does not give."""

    async def open_stream(self, handle: Handle, op: str, args: msgspec.Raw) -> socket.socket:
        """Begin an operation of the agent that talks on a byte stream of its own: our end of it.

        Raises what the agent answers, `Unavailable` when it cannot be reached.
        """

    def oom_kills(self, handle: Handle) -> int:
        """A cheap counter read."""

    def disk_full(self, handle: Handle) -> bool:
        """Whether a quota that the agent inside cannot see leaves the upper no room."""

    async def update_network(self, handle: Handle, policy: NetPolicy, save: Save) -> None:
        """Put another network policy in force; what it does not allow any more is cut.

        `save` journals the handle, which holds the policy: `recover` binds it again. A failure
        leaves the former policy. Raises `WrongState` for a sandbox without a network, `Exhausted`.
        """

    async def pack_diff(self, handle: Handle, args: PackArgs) -> Packed:
        """Save what a running sandbox changed as a layer. Raises `AlreadyExists`, `Exhausted`."""

    async def keep(self, handle: Handle, args: KeepArgs) -> Kept:
        """Save paths of a running sandbox as a layer without a name on what it began with.

        Raises `InvalidArgument` for a path that cannot be kept, `NotFound` for a toolkit.
        """

    async def checkpoint(self, handle: Handle, save: Save) -> Checkpoint:
        """Remember the present files, or all of a machine.

        `save` journals the handle as it is then, more than once. Raises `Exhausted`, `Internal`.
        """

    async def rollback(self, handle: Handle, checkpoint: str, save: Save) -> Checkpoint:
        """Go back to a checkpoint. Raises `NotFound`, `WrongState`.

        Every process and session ends, or is what it was where memory is part of a checkpoint; open
        calls fail there.
        """

    async def delete_checkpoint(self, handle: Handle, checkpoint: str, save: Save) -> None:
        """Forget a checkpoint and free what nothing stands on. Raises `NotFound`."""

    def checkpoints(self, handle: Handle) -> list[Checkpoint]: ...

    def pools(self) -> Mapping[str, float]:
        """Depth of each pool, for metrics."""

    def features(self) -> list[Feature]:
        """Return what was tried here, with all that its `mechanisms` need."""

    def layers(self) -> Layers: ...

    async def close(self) -> None:
        """End helpers and pools, if it was started; live sandboxes are left alone."""
