"""The host's side of `network="nat"`: interfaces, rules and switches, for one dedicated thread.

Every call blocks in the kernel and is executed in the network namespace that the plane was started
in (or was given, which tests use to have a host of their own). Nothing here is asynchronous and
nothing decides; `dsecd.host.network` does.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import zlib
from collections.abc import Sequence, Set
from pathlib import Path

import msgspec

from dsecd.host import addresses, netns, network_survey, network_tc, network_veth, tap
from dsecd.host.network_nft import Entry, Firewall, Rules, load, removal, render
from dsecd.host.network_sysctl import Forwarding, has_ipv6
from dsecd.host.network_veth import Found, Link
from dsecd.host.network_watch import TableWatch
from dsecd.host.rtnetlink import Message, Netlink, NetlinkError
from libdsec.errors import Exhausted, Internal

_GONE = (errno.ENODEV, errno.ENOENT, errno.ESRCH)

# 169.254.0.0/16 and fd00:ec2::/32: the metadata services of clouds, which hand out the host's
# credentials to whoever asks from the host's address.
DEFAULT_BLOCKED = ("169.254.0.0/16", "fe80::/10", "fd00:ec2::/32")


class NatConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How sandboxes reach the world. Two daemons on one host differ in `name`, `prefix`, pools
    and `state`, and are stopped in the reverse order of their starts: each puts the forwarding
    switches back to what it found.

    `blocked` are networks no sandbox may reach; `resolvers` () takes the host's own; `state` is the
    file that remembers the host's forwarding switches.
    """

    state: Path
    name: str = "dsec"  # of the nftables table
    prefix: str = "ds"  # of interface names, at most 10 characters
    pool4: str = "10.213.0.0/16"
    pool6: str = "fd5d:ec::/64"
    quarantine_s: float = 60.0
    resolvers: tuple[str, ...] = ()
    blocked: tuple[str, ...] = DEFAULT_BLOCKED
    guard_forwarding: bool = True

    @property
    def tag(self) -> int:
        """The 15 bits that mark what is ours: upper half of interface index, group and mark."""
        return 0x4000 | zlib.crc32(self.name.encode()) & 0x3FFF

    def index(self, slot: int) -> int:
        """Return the interface index, and connection mark, of `slot`."""
        return self.tag << 16 | slot


class Remover:
    """Takes sandboxes off the network; sockets of its own, so that it has a thread of its own.

    Removing interfaces waits for an RCU grace period, mostly without the kernel's network lock:
    attaching others need not wait for it.
    """

    def __init__(self, config: NatConfig, netns_fd: int | None) -> None:
        if netns_fd is not None:
            netns.enter(netns_fd)
        self._group = config.tag << 16
        self._route = Netlink()
        try:
            self._firewall = Firewall(config.name)
        except OSError:
            self._route.close()
            raise

    def close(self) -> None:
        self._route.close()
        self._firewall.close()

    def remove(self, entries: Sequence[Entry]) -> None:
        """Disconnect sandboxes: elements, then interfaces, then their tracked connections.

        In this order no packet of the sandbox can make a connection that the last step misses.
        What is gone already is no error. Raises `Internal`; then it may be called again.
        """
        try:
            self._firewall.remove(entries)
            self.remove_links([entry.index for entry in entries])
            self._forget([entry.index for entry in entries])
        except OSError as error:
            raise Internal(f"network: {error.strerror}", errno=error.errno) from error

    def remove_links(self, indexes: Sequence[int]) -> None:
        """Remove interfaces together, as members of the group of the doomed. Raises OSError."""
        doomed = self._group + 1
        marked = self._route.request([network_veth.regroup(index, doomed) for index in indexes])
        present = [error for error in marked if error is None or error.errno not in _GONE]
        for error in present:
            if error is not None:
                raise error
        if present:
            (error,) = self._route.request([network_veth.remove_group(doomed)])
            if error is not None and error.errno not in _GONE:
                raise error

    def forget_except(self, keep: Set[int]) -> None:
        """Drop all connections of sandboxes but those with a mark in `keep`. Raises OSError."""
        if not keep:
            self._firewall.forget_connections(self._group, 0xFFFF0000)
            return
        for mark in self._firewall.connection_marks(self._group, 0xFFFF0000).keys() - keep:
            self._firewall.forget_connections(mark)

    def _forget(self, marks: Sequence[int]) -> None:
        """Drop the connections of `marks`; each flush walks the whole connection table."""
        if len(marks) > 2:
            present = self._firewall.connection_marks(self._group, 0xFFFF0000)
            marks = [mark for mark in marks if mark in present]
        for mark in marks:
            self._firewall.forget_connections(mark)


class Plane:
    """Interfaces, firewall and forwarding of one daemon. Construct and use it in one thread."""

    def __init__(self, config: NatConfig, netns_fd: int | None) -> None:
        if netns_fd is not None:
            netns.enter(netns_fd)
        self._config = config
        with contextlib.ExitStack() as undo:
            self._home = netns.open_current()
            undo.callback(os.close, self._home)
            self._remover = undo.enter_context(contextlib.closing(Remover(config, None)))
            self._route = undo.enter_context(contextlib.closing(Netlink()))
            self._firewall = undo.enter_context(contextlib.closing(Firewall(config.name)))
            self.watch = undo.enter_context(contextlib.closing(TableWatch()))
            self._resources = undo.pop_all()
        self._forwarding = Forwarding(config.state)
        self._group = config.tag << 16
        self._active = False
        self._entries: dict[int, Entry] = {}  # by index: what a reloaded table must hold
        self._mtu = network_survey.DEFAULT_MTU
        self.ipv6 = has_ipv6()

    def close(self) -> None:
        self._resources.close()

    # --- the table and the switches -----------------------------------------------------------

    def activate(self, *, survey: bool = True) -> None:
        """Switch forwarding on and load the rules, with the known sandboxes in them; once.

        Raises `InvalidArgument` when the pools collide with the host's routes.
        """
        if self._active:
            return
        config = self._config
        pool4 = ipaddress.IPv4Network(config.pool4)
        pool6 = ipaddress.IPv6Network(config.pool6) if self.ipv6 else None
        if survey:
            pools = [pool for pool in (pool4, pool6) if pool is not None]
            network_survey.refuse_overlap(pools, self._is_ours)
        self._mtu = network_survey.uplink_mtu()
        guard = self._forwarding.remember(self.ipv6)
        rules = Rules(
            table=config.name,
            group=self._group,
            pool4=pool4,
            pool6=pool6,
            blocked=config.blocked,
            resolvers=tuple(config.resolvers or addresses.host_resolvers()),
            guard=guard if config.guard_forwarding else (),
        )
        try:
            load(render(rules, list(self._entries.values())))
            self._forwarding.enable()
        except BaseException:
            if not self._entries:
                self._forwarding.restore()
            raise
        self._active = True

    def repair(self) -> bool:
        """Load the rules again if somebody removed them; return whether that was so."""
        if not self._active or self._firewall.is_loaded():
            return False
        self._active = False
        self.activate(survey=False)
        return True

    def drop_entry(self, entry: Entry) -> None:
        """Forget a sandbox that was removed; may be called from any thread."""
        self._entries.pop(entry.index, None)

    def clear(self) -> None:
        """Remove everything that is ours, found by its marks, and put the switches back."""
        self._remover.remove_links([link.index for link in self.links()])
        if self._has_table():
            load(removal(self._config.name))
            self._remover.forget_except(frozenset())
        self._forwarding.restore()
        self._active = False

    @property
    def mtu(self) -> int:
        return self._mtu

    def resolv_conf(self) -> str:
        """Return the sandbox's resolver file, of the host's resolvers as they are now."""
        return addresses.resolv_conf(self._config.resolvers or addresses.host_resolvers())

    # --- one sandbox --------------------------------------------------------------------------

    def link(self, slot: int, sandbox_id: str, entry: Entry) -> Link:
        return Link(
            name=f"{self._config.prefix}{slot}",
            index=entry.index,
            group=self._group,
            mtu=self._mtu,
            alias=sandbox_id,
            address=entry.address,
            address6=entry.address6,
        )

    def attach(
        self, slot: int, sandbox_id: str, entry: Entry, netns_fd: int, program: int | None = None,
        tap_owner: int | None = None,
    ) -> str:  # fmt: skip
        """Connect the namespace `netns_fd`; return its resolver file. On failure nothing stays.

        With `tap_owner` the addresses are for a guest at a tap of that user's.

        Raises `Internal` naming the request that failed; `Exhausted` without memory.
        """
        self.activate()
        link = self.link(slot, sandbox_id, entry)
        try:
            # alone: after a collision the requests that follow would change somebody's interface
            self._demand(self._route, [network_veth.create(link, netns_fd)])
            try:
                if program is not None:  # before the link is up
                    self.judge(entry.index, program)
                self._demand(self._route, network_veth.host_end(link))
                self._configure_inside(link, netns_fd, tap_owner)
                network_veth.settle_carrier(self._route.fileno(), link.name)
                self._entries[entry.index] = entry
                self._add(entry)
            except BaseException:
                self.drop_entry(entry)
                self._remover.remove([entry])
                raise
        except OSError as error:
            kind = Exhausted if error.errno in (errno.ENOMEM, errno.ENFILE) else Internal
            raise kind(f"network of {sandbox_id}: {error.strerror}", errno=error.errno) from error
        return self.resolv_conf()

    def judge(self, index: int, program: int) -> None:
        """Run a BPF program on what comes from a sandbox. Raises `Internal`."""
        added, placed = self._route.request(
            [network_tc.qdisc(index), network_tc.program(index, program)]
        )
        if added is not None and added.errno == errno.EEXIST:
            added = None
        error = added or placed
        if error is not None:
            raise Internal(f"network: {error.strerror}", errno=error.errno) from error

    def counters(self, indexes: Sequence[int]) -> dict[int, tuple[int, int]]:
        """Return (received, sent) bytes from the sandboxes' side, by interface index."""
        found = {}
        for index in indexes:
            try:
                received, sent = network_veth.parse_bytes(self._route.get(network_veth.read(index)))
            except NetlinkError as error:
                if error.errno in _GONE:
                    continue
                raise
            found[index] = (sent, received)  # what the host's end sent, the sandbox received
        return found

    def links(self) -> list[Found]:
        """Return the interfaces of the host that are ours, by group or index."""
        found = [network_veth.parse(data) for data in self._route.dump(network_veth.list_all())]
        return [link for link in found if self._is_ours(link.index) or self._in_group(link)]

    def recover(self, entries: Sequence[Entry]) -> list[int]:
        """Keep `entries` and remove all else that is ours; return indexes whose interface is gone.

        Rules are loaded anew: the daemon that made the old ones may have been another version.
        """
        if not entries:
            self.clear()
            return []
        keep = {entry.index for entry in entries}
        present = self.links()
        self._remover.remove_links([link.index for link in present if link.index not in keep])
        self._entries = {entry.index: entry for entry in entries}
        self.activate(survey=False)
        self._remover.forget_except(keep)
        return sorted(keep - {link.index for link in present})

    # --- parts --------------------------------------------------------------------------------

    def _is_ours(self, index: int) -> bool:
        return index >> 16 == self._config.tag

    def _in_group(self, link: Found) -> bool:
        return link.group in (self._group, self._group + 1)

    def _has_table(self) -> bool:
        try:
            return self._firewall.is_loaded()
        except NetlinkError as error:
            if error.errno in (errno.EOPNOTSUPP, errno.EINVAL, errno.EPROTONOSUPPORT):
                return False  # a kernel without nf_tables never had one
            raise

    def _add(self, entry: Entry) -> None:
        try:
            self._firewall.add(entry)
        except NetlinkError as error:
            # ENOENT: the table went a moment ago, and its watch has not told yet
            if error.errno != errno.ENOENT or not self.repair():
                raise

    def _configure_inside(self, link: Link, netns_fd: int, tap_owner: int | None) -> None:
        messages = network_veth.inside_end(link)
        with netns.inside(netns_fd, self._home):
            if tap_owner is not None:
                messages = network_veth.guest_end(link, tap.make(network_veth.TAP, tap_owner))
                tap.forward()
            route = Netlink()  # belongs to the namespace it was opened in, wherever it is used
        try:
            self._demand(route, messages)
            if tap_owner is not None:
                network_veth.finish_checksums(route.fileno(), network_veth.INSIDE)
        finally:
            route.close()

    def _demand(self, route: Netlink, messages: Sequence[Message]) -> None:
        for error in route.request(messages):
            if error is not None:
                raise error
