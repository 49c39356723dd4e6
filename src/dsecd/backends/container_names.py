"""How one container asks for names: the resolver's sockets in its network namespace, and the sink
that opens in the kernel what it was answered.

The resolver listens on loopback inside, where nothing but the container's own processes can ask:
they were not there yet when it was bound, and have no right over the namespace. For a guest, which
does not reach that, it listens at an address of the namespace, where only the guest's tap leads.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence

from dsecd.host import addresses, conntrack, netpolicy, network_veth, sockdiag
from dsecd.host.netpolicy import NetworkPolicies
from dsecd.host.nettable import IpAddress, PortRange
from dsecd.host.network import Attachment
from dsecd.host.rtnetlink import Netlink
from dsecd.policy.table import PROTOCOLS
from dsecd.resolver import listener
from dsecd.resolver.listener import Sockets
from dsecd.resolver.names import Opening
from dsecd.resolver.service import Served
from libdsec.errors import DSecError, Unavailable

logger = logging.getLogger("dsecd.container")
RESOLVERS = ("127.0.0.53", "::1")


def resolv_conf(attachment: Attachment) -> str:
    """Return what names the resolver."""
    return addresses.resolv_conf((str(network_veth.RESOLVER),) if attachment.guest else RESOLVERS)


def _listens_at(attachment: Attachment) -> tuple[str, ...]:
    if attachment.guest:
        return (str(network_veth.RESOLVER),)
    return RESOLVERS if attachment.address6 else RESOLVERS[:1]


class Names:
    """The sockets of one container's resolver, and of the diagnosis of its connections.

    Construct it in a thread that is in the container's network namespace. With `taken_over` the
    container lived on without a daemon: where a process of its own listens by now, it gets no
    answers, which hurts nobody but itself. Raises `Unavailable`, `OSError`.
    """

    def __init__(self, attachment: Attachment, *, taken_over: bool = False) -> None:
        # a guest's sockets are not in the namespace
        self._mark = attachment.index if attachment.guest else 0
        self.served: Served | None = None
        self.sockets: list[Sockets] = []
        self.diag: Netlink | None = None
        try:
            for address in _listens_at(attachment):
                try:
                    self.sockets.append(listener.bind(address))
                except Unavailable as error:
                    if not taken_over:
                        raise
                    logger.error("a sandbox gets no names: %s", error.message)
            self.diag = sockdiag.open_diag()
        except BaseException:
            self._close_sockets()
            raise

    def serve(self, served: Served) -> None:
        """The sockets are the resolver's from now on."""
        self.served, self.sockets = served, []

    def peers(self) -> set[IpAddress]:
        """Return the addresses to which there are connections. Raises OSError."""
        if self._mark:
            return conntrack.peers(self._mark)
        assert self.diag is not None
        return set(sockdiag.peers(self.diag))

    async def close(self, *, leave: bool = False) -> None:
        """Close all; with `leave` the addresses of names stay open, for the next daemon."""
        served, self.served = self.served, None
        try:
            if served is not None:
                await (served.leave() if leave else served.close())
        finally:
            self._close_sockets()

    def _close_sockets(self) -> None:
        for pair in self.sockets:
            pair.udp.close()
            pair.tcp.close()
        self.sockets = []
        if self.diag is not None:
            self.diag.close()
            self.diag = None


class KernelSink:
    """Enters what names opened for one container into the kernel: a `resolver.pins.Sink`."""

    def __init__(self, policies: NetworkPolicies, cgroup: int, names: Names) -> None:
        self._policies, self._cgroup, self._names = policies, cgroup, names

    def admit(self, opening: Opening, addresses: Sequence[IpAddress], ttl_s: float) -> None:
        until_ns = time.monotonic_ns() + int(ttl_s * 1e9)
        entry = netpolicy.Opening(_name(opening), (_ports(opening),), until_ns)
        for address in addresses:
            self._policies.admit(self._cgroup, address, entry)

    def withdraw(self, opening: Opening, addresses: Sequence[IpAddress]) -> None:
        for address in addresses:
            try:
                self._policies.forget(self._cgroup, address, _name(opening))
            except (DSecError, OSError) as error:
                logger.error("address %s of a name stays open: %s", address, error)

    def in_use(self, addresses: Sequence[IpAddress]) -> Iterable[IpAddress]:
        try:
            return self._names.peers().intersection(addresses)
        except OSError as error:
            logger.warning("cannot list connections, addresses of names stay open: %s", error)
            return addresses


def _name(opening: Opening) -> str:
    return f"{opening.protocol} {opening.first_port}-{opening.last_port}"


def _ports(opening: Opening) -> PortRange:
    """ICMP has no ports: the kernel asks for port 0."""
    return PortRange(opening.first_port, opening.last_port, PROTOCOLS[opening.protocol])
