"""Which address a sandbox gets, and what its resolver file says. Pure, except `host_resolvers`.

An address is a slot number: slot 5 of 10.213.0.0/16 and fd5d:ec::/64 is 10.213.0.5 and fd5d:ec::5.
"""

from __future__ import annotations

import contextlib
import ipaddress
import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path

from libdsec.errors import Exhausted, InvalidArgument

RESOLVER_FILES = (Path("/etc/resolv.conf"), Path("/run/systemd/resolve/resolv.conf"))
_RESOLVERS_MAX = 3  # MAXNS of resolv.conf(5)


class AddressPool:
    """Slots 1..size-2 of an IPv4 range and their IPv6 twins, least recently used first.

    A released slot rests for `quarantine_s`: a peer that still sends to, or a connection table
    elsewhere that still knows, the old sandbox must not meet the new one. `start` is where a fresh
    pool begins, so that a restarted daemon does not at once hand out what it used last.
    """

    def __init__(
        self,
        pool4: str,
        pool6: str,
        quarantine_s: float,
        *,
        start: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.network4 = _network4(pool4)
        self.network6 = _network6(pool6, self.network4)
        self.size = self.network4.num_addresses - 2  # without network and broadcast address
        self._quarantine_s = quarantine_s
        self._clock = clock
        self._start = start % self.size
        self._fresh = 0
        self._used: set[int] = set()
        self._resting: deque[tuple[float, int]] = deque()

    def acquire(self) -> int:
        """Return a slot; raises `Exhausted` when all are in use or still resting."""
        while self._fresh < self.size:
            slot = (self._start + self._fresh) % self.size + 1
            self._fresh += 1
            if slot not in self._used:
                self._used.add(slot)
                return slot
        if not self._resting:
            raise Exhausted(
                f"all {self.size} addresses of {self.network4} are in use; "
                "stop sandboxes or widen network.pool4"
            )
        wait_s = self._resting[0][0] + self._quarantine_s - self._clock()
        if wait_s > 0:
            raise Exhausted(
                f"no address of {self.network4} is free; the next one rests {wait_s:.0f} s more",
                retry_after_s=wait_s,
            )
        slot = self._resting.popleft()[1]
        self._used.add(slot)
        return slot

    def release(self, slot: int, *, rest: bool = True) -> None:
        """Put `slot` to rest, or back at once if nobody saw it; ignored when it is not in use."""
        if slot not in self._used:
            return
        self._used.remove(slot)
        if rest:
            self._resting.append((self._clock(), slot))
        else:
            self._resting.appendleft((-math.inf, slot))

    def reserve(self, slot: int) -> None:
        """Mark `slot` as in use: its sandbox was found running."""
        if not 1 <= slot <= self.size:
            raise InvalidArgument(f"slot {slot} is not in {self.network4}", field="slot")
        self._used.add(slot)

    def address(self, slot: int) -> ipaddress.IPv4Address:
        return self.network4[slot]

    def address6(self, slot: int) -> ipaddress.IPv6Address:
        return self.network6[slot]

    @property
    def in_use(self) -> int:
        return len(self._used)


def _network4(text: str) -> ipaddress.IPv4Network:
    try:
        network = ipaddress.IPv4Network(text)
    except ValueError as error:
        raise InvalidArgument(f"network.pool4: {error}", field="network.pool4") from error
    if not 16 <= network.prefixlen <= 29:  # the slot must fit 16 bits of a connection mark
        raise InvalidArgument("network.pool4 must be a /16 to a /29", field="network.pool4")
    return network


def _network6(text: str, network4: ipaddress.IPv4Network) -> ipaddress.IPv6Network:
    try:
        network = ipaddress.IPv6Network(text)
    except ValueError as error:
        raise InvalidArgument(f"network.pool6: {error}", field="network.pool6") from error
    if network.num_addresses < network4.num_addresses:
        raise InvalidArgument("network.pool6 is smaller than network.pool4", field="network.pool6")
    return network


def parse_resolvers(text: str, *, loopback: bool = False) -> list[str]:
    """Return the nameservers of a resolv.conf(5) that a sandbox can reach: no loopback ones."""
    servers: list[str] = []
    for line in text.splitlines():
        words = line.split()
        if len(words) < 2 or words[0] != "nameserver":
            continue
        try:
            address = ipaddress.ip_address(words[1])
        except ValueError:
            continue  # a resolver we could not name is one the sandbox cannot use
        # an IPv6 link-local resolver ("fe80::1%eth0") is on a link the sandbox does not have;
        # 169.254.x.x is routed, and is the only resolver on some clouds
        far = address.version == 4 or not address.is_link_local
        near = address.is_loopback or address.is_unspecified
        if far and (loopback or not near):
            servers.append(str(address))
    return servers


def host_resolvers(files: Iterable[Path] = RESOLVER_FILES) -> list[str]:
    """Return the host's upstream resolvers; [] when it has none that a sandbox can reach.

    /etc/resolv.conf of a host with systemd-resolved names only 127.0.0.53; the upstream servers
    are in its own file (systemd-resolved.service(8)).
    """
    for path in files:
        try:
            servers = parse_resolvers(path.read_text(errors="replace"))
        except OSError:
            continue
        if servers:
            return servers
    return []


def daemon_resolvers(files: Iterable[Path] = RESOLVER_FILES) -> list[str]:
    """Return the host's resolvers for the daemon itself, which reaches one on loopback, too."""
    found = host_resolvers(files)
    if not found:
        with contextlib.suppress(OSError):
            text = next(iter(files)).read_text(errors="replace")
            found = parse_resolvers(text, loopback=True)
    return found or ["127.0.0.1"]  # what libc asks where none is named (resolv.conf(5))


def resolv_conf(servers: Iterable[str]) -> str:
    """Return a resolv.conf(5) with the first three of `servers`."""
    lines = [f"nameserver {server}\n" for server in list(servers)[:_RESOLVERS_MAX]]
    return "".join(lines) + "options timeout:2 attempts:2\n"
