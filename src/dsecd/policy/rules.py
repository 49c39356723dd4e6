"""Typed rules: what a policy means, between the compiler and whatever enforces it. Pure data.

A policy is compiled once and then shared, so every struct is frozen and hashable: equal policies
are equal keys. Two laws hold everywhere: a rule that denies wins over any rule that allows,
whatever the length of a prefix or the order of the rules; what no rule matches gets the default.

Network, in the words of a verdict on (protocol, address, port), the remote end of what leaves:

* A rule covers a packet or call when its protocol is the packet's or `any`, its prefix holds the
  address, and its ports hold the port. `any` is every IP protocol. Rules of `any` and `icmp` always
  have the ports 0..65535: the compiler splits a rule for "any protocol, port 53" into tcp and udp.
* An IPv4-mapped address (::ffff:a.b.c.d) is judged as the IPv4 address, and no IPv6 prefix covers
  it; the compiler emits no rule inside ::ffff:0:0/96. A denial of an IPv4 prefix comes with denials
  of its NAT64 and 6to4 forms (RFC 6052, RFC 3056), made by the compiler.
* Loopback (127.0.0.0/8, ::1, and the unspecified address, which the kernel takes for it) is the
  sandbox's own and always allowed. The address of the sandbox's resolver, port 53 of tcp and udp,
  is allowed by whoever binds the policy; it is in no rule.
* Port 53 of tcp and udp is closed for every other address, whatever the default, unless some rule
  of the policy opens that port by number (`opens_dns`): any resolver that the sandbox reached could
  carry data out for it.

Names, in the words of a question to the sandbox's resolver:

* A name's openings are the ports of all allowing rules that cover it, less those of all denying
  rules that cover it. When the default is `deny`, a name without an opening is NXDOMAIN; each
  address in an answer is allowed for exactly the openings, and is entered before the answer leaves.
  When the default is `allow`, the name is refused if a denying rule covers it, and nothing is
  entered. A `NetRule` that denies still wins over an address so entered.
* `pypi.org` covers that name only, `*.pypi.org` every name below it at any depth but not itself,
  `*` every name. A rule for a name that allows is never of `any`: the compiler splits it. Patterns
  are lower case, IDNA-encoded, without the final dot; so are names before they are judged.
* Addresses in answers that are not global are dropped. If an allowing rule that covers the name has
  `private`, addresses of private networks are kept; loopback, link-local (metadata services of
  clouds), multicast, IPv4-mapped and the like (`NEVER` in resolver/reserved.py) never are.
* With `check_names` (the default is `deny` then) a name opens no address at all: of its openings
  those of tcp 443 and 80 are left (`CHECKED_PORTS`), and a name without them is NXDOMAIN. It is
  answered with an address on the sandbox's own loopback, where a relay of the daemon passes on what
  names, by SNI or by Host, a name that the same rules open at that port, to an address of that name
  that no `NetRule` denies at that port.

Files: see `FilePolicy`. System calls: see `SystemPolicy`.
"""

from __future__ import annotations

import ipaddress
from typing import Literal

import msgspec

Verdict = Literal["allow", "deny"]
Protocol = Literal["tcp", "udp", "icmp", "any"]
Access = Literal["read", "write", "execute"]
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

LAST_PORT = 65535
DNS_PORT = 53
CHECKED_PORTS = (80, 443)  # HTTP and TLS, which say whom they are for
EVERY_ACCESS: frozenset[Access] = frozenset({"read", "write", "execute"})


class NetRule(msgspec.Struct, frozen=True, kw_only=True, cache_hash=True):
    """A verdict on a prefix of addresses; `icmp` is ICMP for IPv4 and ICMPv6 for IPv6."""

    verdict: Verdict
    protocol: Protocol
    prefix: Network
    first_port: int = 0
    last_port: int = LAST_PORT


class NameRule(msgspec.Struct, frozen=True, kw_only=True, cache_hash=True):
    """A verdict on the addresses that the resolver gets for a name; `pattern` as above."""

    verdict: Verdict
    pattern: str
    protocol: Protocol
    first_port: int = 0
    last_port: int = LAST_PORT
    private: bool = False  # keep addresses that are not global in the answers


class NetPolicy(msgspec.Struct, frozen=True, kw_only=True, cache_hash=True):
    """All that is decided about traffic; no rules and `deny` is closed."""

    rules: tuple[NetRule, ...] = ()
    names: tuple[NameRule, ...] = ()
    default: Verdict = "deny"
    check_names: bool = False


def opens_dns(policy: NetPolicy) -> bool:
    """Say whether a rule that allows gives port 53 by number: its ports hold it and are not all."""
    rules: tuple[NetRule | NameRule, ...] = (*policy.rules, *policy.names)
    return any(
        rule.verdict == "allow"
        and rule.protocol in ("tcp", "udp", "any")
        and rule.first_port <= DNS_PORT <= rule.last_port
        and (rule.first_port > 1 or rule.last_port < LAST_PORT)
        for rule in rules
    )


class FileRule(msgspec.Struct, frozen=True, kw_only=True):
    """A verdict on accesses to the paths that `pattern` covers."""

    verdict: Verdict
    pattern: str
    access: frozenset[Access]


class FilePolicy(msgspec.Struct, frozen=True, kw_only=True):
    """Which paths, as seen inside, may be used and how.

    A pattern is absolute; `?` is one character and `*` any number of them, none being `/`; `**` is
    any number of characters, and between two slashes may be nothing: `/**/x` covers `/x`. A pattern
    covers each path it matches and everything beneath that path.
    `write` is every change: content, creation, removal, renaming, mode, owner, attributes. Renaming
    a file takes `read` of it, too, and a hard link may not open more than the name before.
    A path that a pattern of `hidden` covers cannot be used at all, and its content not be seen.
    """

    rules: tuple[FileRule, ...] = ()
    hidden: tuple[str, ...] = ()
    default: Verdict = "allow"


class IoctlRule(msgspec.Struct, frozen=True, kw_only=True):
    """A verdict on one ioctl(2) request: the low 32 bits, all that the kernel looks at."""

    verdict: Verdict
    request: int


class MountRule(msgspec.Struct, frozen=True, kw_only=True):
    """A verdict on mount(2) of a file system type, `*` for every type, at a path pattern.

    `bind` and `overlay` are types here.
    """

    verdict: Verdict
    fstype: str
    pattern: str = "/**"


class UnixRule(msgspec.Struct, frozen=True, kw_only=True):
    """A verdict on connect(2) and sendto(2) to a unix socket: a path pattern as in `FilePolicy`.

    `@name` is the abstract name, with the same wildcards; an abstract name has nothing beneath.
    """

    verdict: Verdict
    pattern: str


class VsockRule(msgspec.Struct, frozen=True, kw_only=True):
    """A verdict on AF_VSOCK to a context id (None: every one) and a range of ports."""

    verdict: Verdict
    cid: int | None = None
    first_port: int = 0
    last_port: int = 0xFFFFFFFF


class SystemPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """What is decided about system calls beyond files; each default is for what no rule matches.

    ioctls and unix sockets are open by default (unmodified software needs them, and the platform's
    own protections hold in any case); vsock, which reaches the host, is closed.
    """

    ioctls: tuple[IoctlRule, ...] = ()
    mounts: tuple[MountRule, ...] = ()
    unix: tuple[UnixRule, ...] = ()
    vsock: tuple[VsockRule, ...] = ()
    ioctl_default: Verdict = "allow"
    mount_default: Verdict = "allow"
    unix_default: Verdict = "allow"
    vsock_default: Verdict = "deny"
