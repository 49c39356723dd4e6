"""`network="nat"`: sandboxes reach the world through the host, and nothing else.

Each sandbox has a routed veth pair (`network_veth`) and one element per family in a firewall table
(`network_nft`). Out of the box it reaches what the host reaches, masqueraded, over IPv4 and IPv6;
it does not reach other sandboxes, the host's own addresses (but for DNS, where the host itself is
its configured resolver), link-local networks and cloud metadata; nobody but the host reaches it.
IPv6 addresses are unique local ones: programs that have both prefer IPv4 (RFC 6724).

Lifecycle: `attach` before the sandbox's first process runs, `detach` after its last one ended and
before its namespace goes back to the pool. Place of the later allowlists: between `attach` and the
creation of the first process the caller has an Attachment whose `index` identifies the sandbox in
every packet (interface index, connection mark).

Blocking work happens in two dedicated threads; the event loop only queues it. Detaches that come
together are executed together: removing interfaces costs an RCU grace period, not one for each.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import msgspec

from dsecd.host.addresses import AddressPool
from dsecd.host.netns import Netns
from dsecd.host.network_nft import Entry
from dsecd.host.network_plane import NatConfig, Plane, Remover
from dsecd.host.network_veth import GATEWAY, GATEWAY6, INSIDE
from dsecd.host.network_watch import TableWatch
from dsecd.host.settle import settle
from libdsec.errors import DSecError, Internal, InvalidArgument, Timeout, Unavailable, Unsupported

__all__ = ["Attachment", "Nat", "NatConfig", "NatStats", "Traffic"]

DETACH_TIMEOUT_S = 30.0
DETACH_BATCH = 64

_T = TypeVar("_T")
log = logging.getLogger(__name__)


class Attachment(msgspec.Struct, frozen=True, kw_only=True):
    """A sandbox's place in the network; plain data, journalled as it is.

    `address6` and `gateway6` are "" on a host without IPv6. `ifname` is the host's end, `inside`
    the sandbox's. `guest`: the addresses are those of a guest behind `network_veth.TAP`.
    """

    sandbox: str
    slot: int
    index: int
    ifname: str
    inside: str = INSIDE
    address: str
    address6: str
    gateway: str
    gateway6: str
    resolv_conf: str
    guest: bool = False
    mtu: int = 1500


class Traffic(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes since the sandbox was attached, from its own side."""

    rx_bytes: int
    tx_bytes: int


class NatStats(msgspec.Struct, frozen=True, kw_only=True):
    """For metrics: sandboxes attached now, and totals since start."""

    attached: int
    attaches: int
    detaches: int
    failures: int
    addresses: int  # in the pool


class Nat:
    """The network of all sandboxes of one daemon. Methods belong to one event loop.

    Nothing of the host changes before the first `attach`. `netns_fd` is the namespace that plays
    the host; None: the daemon's own.
    """

    def __init__(self, config: NatConfig, *, netns_fd: int | None = None) -> None:
        if not 1 <= len(config.prefix) <= 10:
            raise InvalidArgument("an interface prefix has 1 to 10 characters", field="prefix")
        self._config = config
        self._netns_fd = netns_fd
        self._addresses = AddressPool(
            config.pool4,
            config.pool6,
            config.quarantine_s,
            # a restarted daemon begins somewhere else than where it stopped
            start=random.randrange(1 << 16),
        )
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="network")
        self._plane: Plane | None = None
        self._removal_thread = ThreadPoolExecutor(1, thread_name_prefix="network-removal")
        self._remover: Remover | None = None
        self._live: dict[int, tuple[str, Entry]] = {}  # by slot: sandbox, its map entry
        self._leaving: dict[int, asyncio.Future[None]] = {}
        self._queue: list[int] = []
        self._drain_task: asyncio.Task[None] | None = None
        self._watching: TableWatch | None = None
        self._removals = 0  # of tables, as far as seen
        self._repair_task: asyncio.Task[None] | None = None
        self._attaches = self._detaches = self._failures = 0
        self._closed = False

    async def attach(
        self, ns: Netns, sandbox_id: str, program: int | None = None, tap_owner: int | None = None
    ) -> Attachment:
        """Connect `ns` to the world. On any failure, or when cancelled, nothing stays behind.

        `program` judges what leaves, as after `judge`. With `tap_owner`, a user of the host, the
        namespace gets a tap for a guest of that user's.

        Raises `Exhausted` when no address is free, `InvalidArgument` when the pools overlap the
        host's routes, `Unsupported` without nftables, `Internal` naming the step that failed.
        """
        if self._closed:
            raise Unavailable("the daemon is stopping")
        slot = self._addresses.acquire()
        future = self._submit(
            lambda plane: self._attach(plane, slot, sandbox_id, ns.fd, program, tap_owner)
        )
        cancelled = await settle(future)
        error = future.exception()
        if error is not None:
            self._failures += 1
            # only a collision says that somebody has the address
            self._addresses.release(slot, rest=isinstance(error, Internal))
            if cancelled:
                raise asyncio.CancelledError from error
            if isinstance(error, DSecError):
                raise error
            raise Internal(f"network of {sandbox_id}: {error}") from error
        attachment, entry = future.result()
        self._live[slot] = (sandbox_id, entry)
        self._attaches += 1
        self._watch_table()
        if cancelled:
            await settle(asyncio.ensure_future(self.detach(attachment)))
            raise asyncio.CancelledError
        return attachment

    async def judge(self, attachment: Attachment, program: int) -> None:
        """Have the BPF program with descriptor `program` see all that the sandbox sends, in place
        of the one that did. Raises `Internal`."""
        future = self._submit(lambda plane: plane.judge(attachment.index, program))
        if await settle(future):
            raise asyncio.CancelledError
        future.result()

    async def detach(self, attachment: Attachment) -> None:
        """Disconnect the sandbox and free its address; a second time does nothing.

        Raises `Timeout` when the kernel takes longer than 30 s (it goes on in the background), and
        `Internal` when it refuses; then the same call may be tried again.
        """
        slot = attachment.slot
        if self._live.get(slot, ("",))[0] != attachment.sandbox:
            return
        future = self._leaving.get(slot)
        if future is None:
            future = self._leaving[slot] = asyncio.get_running_loop().create_future()
            self._queue.append(slot)
            if self._drain_task is None:
                self._drain_task = asyncio.create_task(self._drain())
        done, _ = await asyncio.wait({future}, timeout=DETACH_TIMEOUT_S)
        if not done:
            raise Timeout(f"detaching {attachment.sandbox} takes over {DETACH_TIMEOUT_S:.0f} s")
        error = future.exception()
        if error is not None:
            raise Internal(f"network of {attachment.sandbox}: {error}") from error

    async def recover(self, in_use: Iterable[tuple[str, Attachment]]) -> list[str]:
        """After a restart: keep what `in_use` names, remove all else that is ours.

        Returns the sandboxes whose interface is gone, which have no network any more. To be called
        once, before the first `attach`.
        """
        entries = []
        for sandbox_id, attachment in in_use:
            entry = self._entry(attachment.slot, ipv6=bool(attachment.address6))
            if (str(entry.address), entry.index) != (attachment.address, attachment.index):
                raise InvalidArgument(
                    f"{sandbox_id} has address {attachment.address}, which is not in "
                    f"{self._config.pool4}; stop all nat sandboxes before changing the pools",
                    field="network.pool4",
                )
            self._addresses.reserve(attachment.slot)
            self._live[attachment.slot] = (sandbox_id, entry)
            entries.append(entry)
        future = self._submit(lambda plane: plane.recover(entries))
        if await settle(future):
            raise asyncio.CancelledError
        if not entries and isinstance(future.exception(), Unsupported):
            return []  # a host that cannot do it has nothing left over
        if entries:
            self._watch_table()
        by_index = {entry.index: sandbox_id for sandbox_id, entry in self._live.values()}
        return [by_index[index] for index in future.result()]

    async def traffic(self, attachments: Sequence[Attachment]) -> dict[str, Traffic]:
        """Return the byte counters by sandbox; one that is detached is left out."""
        indexes = {a.index: a.sandbox for a in attachments}
        counters = await self._submit(lambda plane: plane.counters(list(indexes)))
        return {
            indexes[index]: Traffic(rx_bytes=received, tx_bytes=sent)
            for index, (received, sent) in counters.items()
        }

    def stats(self) -> NatStats:
        return NatStats(
            attached=len(self._live),
            attaches=self._attaches,
            detaches=self._detaches,
            failures=self._failures,
            addresses=self._addresses.size,
        )

    async def shutdown(self) -> None:
        """Finish pending detaches and close; with no sandbox left, put the host back as it was.

        While sandboxes live on without the daemon, their network stays too.
        """
        if self._closed:
            return
        self._closed = True
        if self._watching is not None:
            asyncio.get_running_loop().remove_reader(self._watching)
        for task in (self._repair_task, self._drain_task):
            if task is not None:
                await task
        used = self._plane is not None
        try:
            if used and not self._live:
                await self._submit(lambda plane: plane.clear())
        finally:
            if used:
                await self._submit(lambda plane: plane.close())
            if self._remover is not None:
                self._remover.close()
            self._thread.shutdown()
            self._removal_thread.shutdown()

    # --- parts --------------------------------------------------------------------------------

    def _submit(self, work: Callable[[Plane], _T]) -> asyncio.Future[_T]:
        return asyncio.get_running_loop().run_in_executor(self._thread, self._with_plane, work)

    def _with_plane(self, work: Callable[[Plane], _T]) -> _T:
        """Run in the thread: the plane belongs to it and is made there, with its first work."""
        if self._plane is None:
            try:
                self._plane = Plane(self._config, self._netns_fd)
            except OSError as error:
                reason = f"the kernel offers no nfnetlink: {error.strerror}"
                raise Unsupported(f"network=nat: {reason}", reason=reason) from error
        return work(self._plane)

    def _watch_table(self) -> None:
        """From the first sandbox on, notice when somebody removes our rules."""
        if self._watching is None and self._plane is not None:
            self._watching = self._plane.watch
            asyncio.get_running_loop().add_reader(self._watching, self._tables_changed)

    def _tables_changed(self) -> None:
        assert self._watching is not None
        if self._watching.saw_removal():
            self._removals += 1
            if self._repair_task is None:
                self._repair_task = asyncio.create_task(self._repair())

    async def _repair(self) -> None:
        """Load what was removed, until no removal was seen since the last look at the table."""
        seen = -1
        while seen != self._removals:
            seen = self._removals
            try:
                if await self._submit(lambda plane: plane.repair()):
                    log.warning("somebody removed the nftables table; it is loaded again")
            except Exception:
                log.exception("the nftables table is gone and cannot be loaded: sandboxes are open")
        self._repair_task = None

    def _remove(self, entries: Sequence[Entry]) -> None:
        """Run in the removal thread, to which the remover belongs."""
        if self._remover is None:
            self._remover = Remover(self._config, self._netns_fd)
        self._remover.remove(entries)

    def _entry(self, slot: int, *, ipv6: bool) -> Entry:
        address6 = self._addresses.address6(slot) if ipv6 else None
        return Entry(self._config.index(slot), self._addresses.address(slot), address6)

    def _attach(
        self, plane: Plane, slot: int, sandbox_id: str, netns_fd: int, program: int | None,
        tap_owner: int | None,
    ) -> tuple[Attachment, Entry]:  # fmt: skip
        entry = self._entry(slot, ipv6=plane.ipv6)
        resolv_conf = plane.attach(slot, sandbox_id, entry, netns_fd, program, tap_owner)
        attachment = Attachment(
            sandbox=sandbox_id,
            slot=slot,
            index=entry.index,
            ifname=f"{self._config.prefix}{slot}",
            address=str(entry.address),
            address6=str(entry.address6 or ""),
            gateway=str(GATEWAY),
            gateway6=str(GATEWAY6) if entry.address6 else "",
            resolv_conf=resolv_conf,
            guest=tap_owner is not None,
            mtu=plane.mtu,
        )
        return attachment, entry

    async def _drain(self) -> None:
        """Detach what is queued, in batches, until the queue is empty."""
        while self._queue:
            slots, self._queue = self._queue[:DETACH_BATCH], self._queue[DETACH_BATCH:]
            entries = [self._live[slot][1] for slot in slots]
            future = asyncio.get_running_loop().run_in_executor(
                self._removal_thread, self._remove, entries
            )
            await asyncio.wait({future})
            self._finish(slots, future.exception())
        self._drain_task = None

    def _finish(self, slots: Sequence[int], error: BaseException | None) -> None:
        for slot in slots:
            waiting = self._leaving.pop(slot)
            if error is None:
                _, entry = self._live.pop(slot)
                if self._plane is not None:
                    self._plane.drop_entry(entry)
                self._addresses.release(slot)
                self._detaches += 1
                waiting.set_result(None)
            else:
                self._failures += 1
                waiting.set_exception(error)
                waiting.exception()  # nobody may be waiting any more
        if error is not None:
            log.error("cannot detach %d sandboxes: %s", len(slots), error)
