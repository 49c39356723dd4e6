"""Addresses that the answer to a public name has no business to hold (DNS rebinding). Pure.

Whoever owns an allowed name decides its addresses; he must not be able to open the host's network
with it. The tables are the IANA special-purpose address registries (RFC 6890 and its successors),
kept here because `ipaddress.is_global` changed its mind between patch releases of Python.
"""

from __future__ import annotations

import functools
import ipaddress
from collections.abc import Iterable
from typing import Literal

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Reach = Literal["global", "private", "never"]

# Not reachable from the internet, but a real place in somebody's network: `private` rules keep them
PRIVATE = (
    "10.0.0.0/8",
    "100.64.0.0/10",  # carrier-grade NAT, and the inside of some clouds
    "172.16.0.0/12",
    "192.0.0.0/24",
    "192.0.2.0/24",
    "192.168.0.0/16",
    "198.18.0.0/15",
    "198.51.100.0/24",
    "203.0.113.0/24",
    "fc00::/7",
    "fec0::/10",  # site-local: deprecated by RFC 3879, still routed by kernels
)
# Never the address of a host somewhere else: the sandbox itself, its link, a group. So is all of
# IPv6 that is not listed here and outside of 2000::/3, where hosts are: spellings of IPv4 addresses
# that the kernel or a translator takes for them (::ffff:127.0.0.1, 64:ff9b:1::/48), links, groups
NEVER = (
    "0.0.0.0/8",
    "127.0.0.0/8",
    "169.254.0.0/16",
    "192.88.99.0/24",
    "224.0.0.0/4",
    "240.0.0.0/4",  # with the broadcast address
    "2001::/23",  # protocols of the IETF: Teredo, benchmarks, ORCHID
    "2001:db8::/32",
    "2002::/16",  # 6to4 (RFC 7526 retired it)
    "3fff::/20",
)

_PRIVATE = tuple(ipaddress.ip_network(text) for text in PRIVATE)
_NEVER = tuple(ipaddress.ip_network(text) for text in NEVER)
_HOSTS6 = ipaddress.IPv6Network("2000::/3")  # all that IANA has given out
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


def embedded(address: Address) -> ipaddress.IPv4Address | None:
    """Return the IPv4 address that a NAT64 address (RFC 6052) leads to, None for all others."""
    if address.version == 6 and address in _NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return None


@functools.lru_cache(4096)
def reach(address: Address) -> Reach:
    """Return where `address` leads: the internet, somebody's own network, or nowhere."""
    inner = embedded(address)
    if inner is not None:
        return reach(inner)
    if any(address in network for network in _PRIVATE):
        return "private"
    if any(address in network for network in _NEVER):
        return "never"
    return "global" if address.version == 4 or address in _HOSTS6 else "never"


def keep(
    addresses: Iterable[Address], *, private: bool, refused: tuple[Network, ...] = ()
) -> tuple[Address, ...]:
    """Return those of `addresses` that an answer may hold.

    `refused` are networks of this host that no name may lead to, whatever a rule says.
    """
    wanted = ("global", "private") if private else ("global",)
    return tuple(
        address
        for address in addresses
        if reach(address) in wanted
        and not any(
            form in network for form in (address, embedded(address)) if form for network in refused
        )
    )
