"""The network policy of every sandbox: entered into the kernel's maps, changed and removed there.

The programs of ``bpf/`` run for one cgroup, the parent of all sandboxes', and find the policy of a
sandbox by the id of its cgroup. A policy is a number and rows under it, shared by all sandboxes
with equal tables; the addresses of names are a sandbox's own. An update enters everything new under
numbers that nothing uses, and then replaces the binding: one element, so that every packet is
judged by the old policy or by the new one.

All methods belong to one thread, the event loop's: each is a few bpf(2) calls, which never wait.
"""

from __future__ import annotations

import os
import sys
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from dsecd.host import mountinfo, nettable
from dsecd.host.bpf import Map, Ring
from dsecd.host.netpins import Programs
from dsecd.host.nettable import Counters, Denied, IpAddress, PortRange, Table, pack_address
from libdsec.errors import Exhausted, InvalidArgument, NotFound, Unsupported

EVENTS_BYTES = 1 << 18  # of the ring, as in bpf/maps.h
MAX_ADDRESSES = 4096  # of names, in one sandbox
_IDLE_POLICIES = 256
_GRACE_S = 0.05  # a program that read the old binding is done with its look-ups long before
_FIRST_CGROUP_NAMESPACE = 0xEFFFFFFB  # PROC_CGROUP_INIT_INO of include/linux/proc_ns.h
_NO_COUNTS = bytes(nettable.COUNTERS_BYTES)
_BITS = {6: nettable.TCP, 17: nettable.UDP}


class Access(msgspec.Struct, frozen=True, kw_only=True):
    """What a sandbox is bound to. `resolvers` (at most two) are allowed on port 53 of tcp and udp;
    with `dns_only` no other address is on that port. `own` (at most two) are its interface's
    addresses: calls to them stay inside. `raw` admits raw sockets; their packets are judged too."""

    table: Table
    resolvers: tuple[IpAddress, ...] = ()
    dns_only: bool = True
    own: tuple[IpAddress, ...] = ()
    raw: bool = False


class Opening(msgspec.Struct, frozen=True):
    """Ports of an address, opened by a name, for new calls until `until_ns` (monotonic clock)."""

    name: str
    ranges: tuple[PortRange, ...]
    until_ns: int


class _Policy(msgspec.Struct):
    number: int
    keys: list[bytes]
    users: int = 0


class _Bound(msgspec.Struct):
    access: Access
    policy: _Policy
    names: int
    openings: dict[bytes, dict[str, Opening]]  # by address and name
    link: int | None = None


class NetworkPolicies:
    """Binds sandboxes to tables. Order of a start: construct, `bind` all that live, `start`.

    `cgroup_fd` is the parent of all sandboxes' cgroups, open as long as this object lives; `level`
    is the depth of a sandbox's cgroup below the v2 root; `pins` a directory of our own in a
    BPF file system, or None when the programs may end with this process. `deny_unbound` is the
    verdict on a cgroup below ours that nobody bound. Raises `Unsupported`, `Internal`.
    """

    def __init__(
        self,
        cgroup_fd: int,
        *,
        level: int,
        pins: Path | None,
        deny_unbound: bool = True,
        events_per_s: int = 64,
    ) -> None:
        self.programs = Programs(
            cgroup_fd,
            level=level,
            deny_unbound=deny_unbound,
            events_per_s=events_per_s,
            pins=pins,
        )
        fds = self.programs.fds
        self._bindings = Map(fds["bindings"], 8, nettable.BINDING_BYTES, "bindings")
        self._counts = Map(fds["counts"], 8, nettable.COUNTERS_BYTES, "counts")
        self._links = Map(fds["links"], 4, nettable.LINK_BYTES, "links")
        self._rules = Map(fds["rules"], nettable.RULE_KEY_BYTES, nettable.PORTS_BYTES, "rules")
        self._names = Map(fds["names"], nettable.NAME_KEY_BYTES, nettable.NAME_BYTES, "names")
        self._ring = Ring(fds["events"], EVENTS_BYTES)
        self._bound: dict[int, _Bound] = {}
        self._policies: dict[Table, _Policy] = {}
        self._idle: OrderedDict[Table, None] = OrderedDict()
        self._dead_names: list[tuple[float, list[bytes]]] = []
        self._earlier: dict[int, list[tuple[IpAddress, Opening]]] = {}
        self._next = 1 + (self._highest() if self.programs.adopted else 0)

    # --- start and end ------------------------------------------------------------------------

    def start(self) -> None:
        """Enforce: attach the programs to the parent cgroup. What a daemon before this one had
        entered and nobody bound again is removed. Raises `Internal`."""
        self.programs.attach()
        if self.programs.adopted:
            self._sweep()
            self._earlier = {}

    def close(self, *, remove: bool = False) -> None:
        """Let go. With pins the programs go on, unless `remove`, for a stop without sandboxes."""
        self._ring.close()
        self.programs.fds.pop("events", None)
        self.programs.close(remove=remove)

    @property
    def event_fd(self) -> int:
        """Readable when `events` has something."""
        return self._ring.fd

    @property
    def link_program(self) -> int:
        """The descriptor of the program for the host's end of an interface (`network_tc`)."""
        return self.programs.fds["link"]

    # --- sandboxes ----------------------------------------------------------------------------

    def bind(
        self,
        cgroup: int,
        access: Access,
        openings: Iterable[tuple[IpAddress, Opening]] = (),
    ) -> None:
        """Bind the cgroup with id `cgroup`, or give it another policy, with all addresses of its
        names; those it had are gone. Before its first process this leaves nothing unjudged.

        Raises `Exhausted` when a map is full; then what held before holds on.
        """
        self._bury()
        before = self._bound.get(cgroup)
        key, policy = _u64(cgroup), self._policy(access.table)
        bound = _Bound(access, policy, self._number(), {}, before.link if before else None)
        try:
            for address, opening in openings:
                self._open(bound, pack_address(address), opening)
            if before is None:
                self._counts.enter(key, _NO_COUNTS)
            self._bindings.update(key, _packed(bound))
        except BaseException:
            self._discard(bound)
            raise
        self._bound[cgroup] = bound
        if before is not None:
            self._discard(before)

    def unbind(self, cgroup: int) -> None:
        """Forget a sandbox whose processes are gone; one that is not bound is fine."""
        self._bury()
        bound = self._bound.pop(cgroup, None)
        if bound is None:
            return
        if bound.link is not None:
            self._links.delete(_u32(bound.link))
        self._bindings.delete(_u64(cgroup))
        self._counts.delete(_u64(cgroup))
        self._discard(bound)

    def bind_link(self, cgroup: int, index: int, *, neighbours: bool = False) -> None:
        """Judge what comes from interface `index` of the host by the policy of `cgroup`.

        `neighbours`: ARP and neighbour discovery pass, for a virtual machine. Raises `NotFound`.
        """
        bound = self._find(cgroup)
        flags = nettable.NEIGHBOURS if neighbours else 0
        self._links.update(_u32(index), nettable.pack_link(cgroup, flags))
        bound.link = index

    def admit(self, cgroup: int, address: IpAddress, opening: Opening) -> bool:
        """Open an address that the resolver got for a name, less the ports that a rule denies.

        Two names at one address open the ports of both, until the later end. Returns whether
        anything is open. Raises `NotFound`, `Exhausted`.
        """
        bound = self._find(cgroup)
        first = not bound.openings
        opened = self._open(bound, pack_address(address), opening)
        if opened and first:
            self._bindings.update(_u64(cgroup), _packed(bound))
        return opened

    def forget(self, cgroup: int, address: IpAddress, name: str) -> None:
        """Close what `name` opened at `address`, for open connections too. Raises `NotFound`."""
        bound = self._find(cgroup)
        packed = pack_address(address)
        openings = bound.openings.get(packed, {})
        if openings.pop(name, None) is None:
            return
        if openings:
            self._enter(bound.names, packed, openings.values())
        else:
            del bound.openings[packed]
            self._names.delete(nettable.name_key(bound.names, packed))

    def openings(self, cgroup: int) -> list[tuple[IpAddress, Opening]]:
        """Return all that names opened, for another `bind`. Raises `NotFound`."""
        return [
            (nettable.unpack_address(address), opening)
            for address, openings in self._find(cgroup).openings.items()
            for opening in openings.values()
        ]

    def earlier_openings(self, cgroup: int) -> list[tuple[IpAddress, Opening]]:
        """Return what names of a sandbox had open under the daemon before, all as name "": given
        to `bind`, its connections go on."""
        return self._earlier.get(cgroup, [])

    def allows(self, cgroup: int, protocol: int, address: IpAddress, port: int) -> bool:
        """Say what the programs say of a packet of TCP (6) or UDP (17). Raises `NotFound`."""
        bound = self._find(cgroup)
        access, bit, packed = bound.access, _BITS[protocol], pack_address(address)
        if address.is_loopback or address.is_unspecified or address in access.own:
            return True
        if port == 53 and address in access.resolvers:
            return True
        if port == 53 and access.dns_only:
            return False
        named = [r for o in bound.openings.get(packed, {}).values() for r in o.ranges]
        return nettable.covers([*nettable.find(access.table.rows, packed), *named], bit, port)

    def counters(self, cgroup: int) -> Counters:
        """Return the totals of a sandbox. Raises `NotFound`."""
        data = self._counts.get(_u64(cgroup))
        if data is None:
            raise NotFound(f"no network policy is bound to cgroup {cgroup}")
        return nettable.unpack_counters(data)

    def events(self) -> Iterator[Denied]:
        """Yield the denied attempts since the last call."""
        return map(nettable.unpack_event, self._ring.read())

    # --- parts --------------------------------------------------------------------------------

    def _find(self, cgroup: int) -> _Bound:
        bound = self._bound.get(cgroup)
        if bound is None:
            raise NotFound(f"no network policy is bound to cgroup {cgroup}")
        return bound

    def _number(self) -> int:
        self._next += 1
        if self._next >= 1 << (32 - nettable.PART_BITS):
            raise Exhausted("the numbers of network policies are used up: restart the daemon")
        return self._next

    def _policy(self, table: Table) -> _Policy:
        """Return the policy of a table, entered; one more uses it."""
        policy = self._policies.get(table)
        if policy is None:
            number = self._number()
            keys, values = nettable.pack_rows(number, table.rows)
            try:
                self._rules.update_all(keys, values)
            except BaseException:
                self._rules.delete_all(keys)
                raise
            policy = self._policies[table] = _Policy(number, keys)
        self._idle.pop(table, None)
        policy.users += 1
        return policy

    def _discard(self, bound: _Bound) -> None:
        """Let go of a binding's policy and names; a program may be looking at them just now.

        Unused policies wait in a queue, for the next sandbox that wants one.
        """
        table = bound.access.table
        bound.policy.users -= 1
        if not bound.policy.users:
            self._idle[table] = None
            if len(self._idle) > _IDLE_POLICIES:
                oldest, _ = self._idle.popitem(last=False)
                self._rules.delete_all(self._policies.pop(oldest).keys)
        keys = [nettable.name_key(bound.names, address) for address in bound.openings]
        if keys:
            self._dead_names.append((time.monotonic() + _GRACE_S, keys))

    def _bury(self) -> None:
        while self._dead_names and self._dead_names[0][0] < time.monotonic():
            self._names.delete_all(self._dead_names.pop(0)[1])

    def _open(self, bound: _Bound, address: bytes, opening: Opening) -> bool:
        ranges = _permitted(bound.access.table, address, opening.ranges)
        if not ranges:
            return False
        if address not in bound.openings and len(bound.openings) >= MAX_ADDRESSES:
            raise Exhausted(f"the names of this sandbox have {MAX_ADDRESSES} addresses open")
        openings = bound.openings.setdefault(address, {})
        openings[opening.name] = Opening(opening.name, ranges, opening.until_ns)
        self._enter(bound.names, address, openings.values())
        return True

    def _enter(self, names: int, address: bytes, openings: Iterable[Opening]) -> None:
        openings = list(openings)
        ranges = nettable.combine(r for opening in openings for r in opening.ranges)
        if len(ranges) > nettable.RANGES:
            raise InvalidArgument(
                f"the names at {nettable.unpack_address(address)} open {len(ranges)} separate port"
                f" ranges, at most {nettable.RANGES} fit: join some of them"
            )
        until_ns = max(opening.until_ns for opening in openings)
        self._names.update(nettable.name_key(names, address), nettable.pack_name(ranges, until_ns))

    def _highest(self) -> int:
        """Return the highest number in the maps, and remember what names had open before us."""
        bound = {key: self._bindings.get(key) for key in self._bindings.all_keys()}
        numbers = {key: nettable.unpack_binding(data) for key, data in bound.items() if data}
        by_names: dict[int, list[tuple[IpAddress, Opening]]] = {}
        for key in self._names.all_keys():
            value, (number, address) = self._names.get(key), nettable.unpack_name_key(key)
            if value is not None:
                until_ns, ranges = nettable.unpack_name(value)
                opening = Opening("", ranges, until_ns)
                by_names.setdefault(number, []).append((nettable.unpack_address(address), opening))
        self._earlier = {
            _number_of(k): by_names.get(names, []) for k, (_, names) in numbers.items()
        }
        rules = [nettable.rule_number(key) for key in self._rules.all_keys()]
        return max([*by_names, *rules, *(n for pair in numbers.values() for n in pair)], default=0)

    def _sweep(self) -> None:
        """Remove what the daemon before had entered; everything of ours has higher numbers."""
        rules = {policy.number for policy in self._policies.values()}
        names = {bound.names for bound in self._bound.values()}
        links = {bound.link for bound in self._bound.values()}
        for map_ in (self._bindings, self._counts):
            map_.delete_all([key for key in map_.all_keys() if _number_of(key) not in self._bound])
        self._links.delete_all([k for k in self._links.all_keys() if _number_of(k) not in links])
        self._rules.delete_all(
            [k for k in self._rules.all_keys() if nettable.rule_number(k) not in rules]
        )
        self._names.delete_all(
            [k for k in self._names.all_keys() if nettable.unpack_name_key(k)[0] not in names]
        )


def sandbox_level(parent: Path) -> int:
    """Return the depth of a sandbox's cgroup below the v2 root: one more than that of `parent`.

    Raises `Unsupported` in a cgroup namespace, where the depth cannot be seen.
    """
    if Path("/proc/self/ns/cgroup").stat().st_ino != _FIRST_CGROUP_NAMESPACE:
        raise Unsupported(
            "network rules need dsecd in the host's cgroup namespace: run it with"
            " --cgroupns=host, or without a container",
            reason="a cgroup namespace hides the depth of cgroups",
        )
    mount = mountinfo.holding(parent)
    below = Path(os.path.realpath(parent)).relative_to(mount.point)
    return len(Path(mount.root).relative_to("/").parts) + len(below.parts) + 1


def _permitted(table: Table, address: bytes, ranges: Iterable[PortRange]) -> tuple[PortRange, ...]:
    """Return `ranges` less the ports that a rule denies at `address`."""
    return nettable.combine(ranges, nettable.find(table.denials, address))


def _packed(bound: _Bound) -> bytes:
    access = bound.access
    flags = nettable.DNS_ONLY * access.dns_only | nettable.RAW * access.raw
    resolvers = [pack_address(address) for address in access.resolvers]
    own = [pack_address(address) for address in access.own]
    names = bound.names if bound.openings else 0
    number, lengths = bound.policy.number, access.table.lengths
    return nettable.pack_binding(number, lengths, names, flags, resolvers, own)


def _u64(value: int) -> bytes:
    return value.to_bytes(8, sys.byteorder)


def _u32(value: int) -> bytes:
    return value.to_bytes(4, sys.byteorder)


def _number_of(key: bytes) -> int:
    return int.from_bytes(key, sys.byteorder)
