"""What the host's network looks like before sandboxes join it; rare work.

Everything looks at the network namespace of the calling thread.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import threading
from collections.abc import Callable

import msgspec

from dsecd.host import network_nft, network_veth, syscalls
from dsecd.host.netns import CLONE_NEWNET, open_current
from dsecd.host.network_sysctl import has_ipv6
from dsecd.host.rtnetlink import Netlink
from libdsec.errors import DSecError, InvalidArgument
from libdsec.model import Feature

_IPNetwork = ipaddress.IPv4Network | ipaddress.IPv6Network
DEFAULT_MTU = 1500
_CHECK_GROUP = 0x5EC0000


def overlapping_routes(pools: list[_IPNetwork], own: Callable[[int], bool]) -> list[str]:
    """Return the host's routes that a pool would shadow, as text.

    `own(index)` says whether an interface index is one of ours. Default routes do not count.
    """
    return [
        str(route.target)
        for route in _routes()
        if route.target.prefixlen
        and not route.target.is_multicast
        and not own(route.index)
        and any(_overlap(route.target, pool) for pool in pools)
    ]


def _routes() -> list[network_veth.Route]:
    with contextlib.closing(Netlink()) as netlink:
        return [
            network_veth.parse_route(data)
            for family in (network_veth.AF_INET, network_veth.AF_INET6)
            for data in netlink.dump(network_veth.list_routes(family))
        ]


def _overlap(one: _IPNetwork, other: _IPNetwork) -> bool:
    return one.version == other.version and one.overlaps(other)


def refuse_overlap(pools: list[_IPNetwork], own: Callable[[int], bool]) -> None:
    """Raise `InvalidArgument` when a pool collides with a network that the host knows."""
    routes = overlapping_routes(pools, own)
    if routes:
        raise InvalidArgument(
            f"the addresses for sandboxes ({', '.join(map(str, pools))}) overlap routes of this "
            f"host ({', '.join(routes[:5])}); set network.pool4 and network.pool6 to free ranges",
            field="network.pool4",
        )


def uplink_mtu() -> int:
    """Return the smallest MTU among the interfaces of the host's default routes, in bytes."""
    indices = {
        route.index
        for route in _routes()
        if not route.target.prefixlen and route.table == network_veth.RT_TABLE_MAIN
    }
    with contextlib.closing(Netlink()) as netlink:
        sizes = [
            network_veth.parse_mtu(netlink.get(network_veth.read(index))) for index in indices - {0}
        ]
    return min((size for size in sizes if size), default=DEFAULT_MTU)


# --- what HOST's probe asks -------------------------------------------------------------------


def check() -> list[Feature]:
    """Try on this host what `network="nat"` needs, in a namespace that ends with the check.

    The rows stand in the order in which things are needed; one that cannot be tried because an
    earlier one failed says so.
    """
    rows: list[Feature] = [_foreign_forward_drops()]
    # a thread of its own: unshare moves the calling thread, and this one never comes back
    thread = threading.Thread(target=_check_in_new_namespace, args=(rows,), name="network-check")
    thread.start()
    thread.join()
    return rows


def _check_in_new_namespace(rows: list[Feature]) -> None:
    steps: list[tuple[str, Callable[[], None]]] = [
        ("network namespace", _new_namespace),
        ("veth", _try_veth),
        ("nftables nat", _try_rules),
        ("connection tracking by netlink", _try_conntrack),
        ("ipv6", _try_ipv6),
    ]
    blocked_by = ""
    for name, step in steps:
        reason = f"not tried: no {blocked_by}" if blocked_by else _reason(step)
        if reason and name == "network namespace":
            blocked_by = name
        rows.append(
            Feature(name=name, available=not reason, reason=reason, needed_for="network=nat")
        )


def _new_namespace() -> None:
    syscalls.call("unshare", CLONE_NEWNET)


def _reason(step: Callable[[], None]) -> str:
    try:
        step()
    except DSecError as error:
        return str(error.detail.get("reason") or error.message)
    except OSError as error:
        return str(error.strerror or error)
    return ""


def _entry() -> network_nft.Entry:
    return network_nft.Entry(
        _CHECK_GROUP + 1, ipaddress.IPv4Address("10.0.0.1"), ipaddress.IPv6Address("fd00::1")
    )


def _try_veth() -> None:
    entry = _entry()
    link = network_veth.Link(
        name="check0",
        index=entry.index,
        group=_CHECK_GROUP,
        mtu=DEFAULT_MTU,
        alias="check",
        address=entry.address,
        address6=None,
    )
    home, route = open_current(), Netlink()
    try:
        for message in (network_veth.create(link, home), network_veth.remove(link.index)):
            (error,) = route.request([message])
            if error is not None:
                raise error
    finally:
        route.close()
        os.close(home)


def _try_rules() -> None:
    entry = _entry()
    rules = network_nft.Rules(
        table="dsec-check",
        group=_CHECK_GROUP,
        pool4=ipaddress.IPv4Network("10.0.0.0/16"),
        pool6=ipaddress.IPv6Network("fd00::/64"),
        blocked=("192.0.2.0/24", "2001:db8::/32"),
        resolvers=("192.0.2.1", "2001:db8::1"),
        guard=("ipv4", "ipv6"),
    )
    network_nft.load(network_nft.render(rules))
    firewall = network_nft.Firewall(rules.table)
    try:
        firewall.add(entry)
    finally:
        firewall.close()


def _try_conntrack() -> None:
    firewall = network_nft.Firewall("dsec-check")
    try:
        firewall.forget_connections(_CHECK_GROUP)
    finally:
        firewall.close()


def _try_ipv6() -> None:
    if not has_ipv6():
        raise OSError("IPv6 is off in this kernel; sandboxes get IPv4 only")


def _foreign_forward_drops() -> Feature:
    """Look for another table whose forward chain drops by default (Docker's iptables, firewalld).

    A verdict of our table cannot undo it: packets of sandboxes would vanish without a trace.
    """
    needed = "network=nat"
    try:
        text = network_nft.run_nft(["-j", "list", "chains"])
    except DSecError as error:
        return Feature(name="forwarding", available=False, reason=error.message, needed_for=needed)
    droppers = [
        f"{chain['family']} {chain['table']} {chain['name']}"
        for item in msgspec.json.decode(text)["nftables"]
        if (chain := item.get("chain"))
        and chain.get("hook") == "forward"
        and chain.get("policy") == "drop"
    ]
    if not droppers:
        return Feature(name="forwarding", available=True, needed_for=needed)
    reason = (
        f"policy drop in {', '.join(droppers)} also drops sandboxes' packets: accept there what "
        "comes from and goes to interfaces named ds+"
    )
    return Feature(name="forwarding", available=False, reason=reason, needed_for=needed)
