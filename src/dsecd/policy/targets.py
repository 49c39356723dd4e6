"""What a network rule is about: domains, networks and ports, read from text. Pure.

`place` is where the text stands in the policy; each error starts with it.
"""

from __future__ import annotations

import functools
import ipaddress
import re
import socket
from collections.abc import Sequence
from typing import NoReturn

from dsecd.policy.rules import LAST_PORT, Network, Protocol
from libdsec.errors import InvalidArgument

WEB_PORTS = (80, 443)
ALL_PORTS = ((0, LAST_PORT),)
MAPPED = ipaddress.IPv6Network("::ffff:0:0/96")  # RFC 4291, 2.5.5.2
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")  # RFC 6052
_SIX_TO_FOUR = ipaddress.IPv6Network("2002::/16")  # RFC 3056
_LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?")
_DIGITS = re.compile(r"[\d.]+")
_WITH_PORT = re.compile(r"[^:]+:[\d-]+")
_PORTS = re.compile(r"(\d{1,5})(?:-(\d{1,5}))?")

PortRange = tuple[int, int]  # first and last


def refuse(place: str, message: str) -> NoReturn:
    """Raise the error of every rule that cannot be compiled."""
    raise InvalidArgument(f"{place}: {message}", field=place)


def is_network(text: str) -> bool:
    """Say whether `text` is meant as an address or a network: it need not be a good one."""
    return "/" in text or ":" in text or _DIGITS.fullmatch(text) is not None


def network(text: str, place: str) -> Network:
    """Return the network, or the single address, in `text`; IPv4-mapped ones as IPv4."""
    if _WITH_PORT.fullmatch(text):
        refuse(place, f"{text!r} holds a port; write it in ports")
    try:
        found = _network(text)
    except ValueError:
        try:
            wide = ipaddress.ip_network(text, strict=False)
        except ValueError:
            refuse(place, f"{text!r} is not an address or a network such as 192.0.2.0/24")
        refuse(place, f"{text} has bits set behind its prefix; write {wide}")
    if isinstance(found, ipaddress.IPv4Network):
        return found
    if getattr(found.network_address, "scope_id", None):
        refuse(place, f"{text} names an interface; leave out what follows %")
    if found.subnet_of(MAPPED):
        return ipaddress.IPv4Network((int(found[0]) & 0xFFFFFFFF, found.prefixlen - 96))
    return found


@functools.lru_cache(4096)  # an agent's policies say the same again and again
def _network(text: str) -> Network:
    address, slash, bits = text.partition("/")
    try:  # reads the same, in a third of the time
        packed = socket.inet_pton(socket.AF_INET, address)
    except OSError:
        return ipaddress.ip_network(text)
    return ipaddress.IPv4Network((int.from_bytes(packed, "big"), bits if slash else 32))


def embedded(prefix: Network) -> tuple[ipaddress.IPv6Network, ...]:
    """Return the IPv6 networks through which a translator or tunnel reaches an IPv4 `prefix`."""
    if isinstance(prefix, ipaddress.IPv6Network):
        return ()
    address = int(prefix.network_address)
    return (
        ipaddress.IPv6Network((int(_NAT64[0]) | address, 96 + prefix.prefixlen)),
        ipaddress.IPv6Network((int(_SIX_TO_FOUR[0]) | address << 80, 16 + prefix.prefixlen)),
    )


def domain(text: str, place: str) -> str:
    """Return the pattern of a domain in the form of `rules.NameRule`: lower case, in IDNA."""
    if text == "*":
        return text
    wild = text.startswith("*.")
    name = text.removeprefix("*.").removesuffix(".")
    if "*" in name:
        refuse(place, f"{text!r}: only *.NAME is a wildcard, for every name below NAME")
    encoded = name.lower() if name.isascii() else _idna(name, place)
    labels = encoded.split(".")
    if len(encoded) > 253 or not all(_LABEL.fullmatch(label) for label in labels):
        refuse(place, f"{text!r} is not a domain name")
    if len(labels) < 2 and not wild:
        refuse(place, f"{text!r} is not a service of the catalogue, and a domain has a dot")
    if labels[-1].isdigit():
        refuse(place, f"{text!r} is neither a domain name nor an IPv4 address")
    return f"*.{encoded}" if wild else encoded


def _idna(name: str, place: str) -> str:
    try:
        return name.encode("idna").decode("ascii").lower()
    except UnicodeError:
        refuse(place, f"{name!r} is not a domain name")


def ports(values: Sequence[int | str], protocol: Protocol | None, place: str) -> list[PortRange]:
    """Return port ranges, sorted, with neighbours joined; [] for none."""
    if values and protocol == "icmp":
        refuse(place, "icmp has no ports; leave out ports, or name tcp or udp")
    ranges = sorted(_range(value, place) for value in values)
    joined: list[PortRange] = []
    for first, last in ranges:
        if joined and first <= joined[-1][1] + 1:
            joined[-1] = (joined[-1][0], max(last, joined[-1][1]))
        else:
            joined.append((first, last))
    return joined


def port(text: str, place: str) -> int:
    """Return the one port in `text`."""
    first, last = _range(text, place)
    if first != last:
        refuse(place, f"{text!r} is a range; ask about one port")
    return first


def _range(value: int | str, place: str) -> PortRange:
    found = _PORTS.fullmatch(value) if isinstance(value, str) else None
    if isinstance(value, str) and (found is None or not value.isascii()):
        refuse(place, f'{value!r} is not a port; write 443 or "8000-8010"')
    first = int(found[1]) if found else int(value)
    last = int(found[2]) if found and found[2] else first
    if not 0 <= first <= last <= LAST_PORT:
        refuse(place, f"{value!r} is not within the ports 0 to {LAST_PORT}, lowest first")
    return first, last
