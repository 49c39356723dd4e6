"""The firewall of `network="nat"`: one nftables table, and one map element per family and sandbox.

The rules are constant and speak of interface *groups*, so their number does not grow with the
sandboxes. Adding a sandbox adds `interface . address : mark` to the maps, which is at once the
check against forged source addresses and the mark by which its connections are found when it ends.
Packets without a connection (`ct state invalid`) are dropped: the kernel does not translate them,
and they would leave with the sandbox's own address.

Refused connections get a reset at once. (An ICMP error that comes back while connect(2) still owns
the socket, as it does over veth, is only noted: the caller would wait for a retransmission.)

The rule set goes through nft(8), once per start; elements and connections go through nfnetlink
directly (linux/netfilter/nf_tables.h, nfnetlink_conntrack.h).
"""

from __future__ import annotations

import errno
import ipaddress
import shutil
import socket
import struct
import subprocess
from collections.abc import Iterable, Sequence

import msgspec

from dsecd.host.rtnetlink import (
    BATCH,
    NLM_F_ACK,
    NLM_F_CREATE,
    Message,
    Netlink,
    NetlinkError,
    attr,
    attr_text,
    attributes,
    nest,
    split,
)
from libdsec.errors import Internal, Unsupported

NFT_TIMEOUT_S = 20.0
NETLINK_NETFILTER = 12  # not in the socket module
_NFPROTO_INET = 1
_SUBSYS_NFTABLES, _SUBSYS_CTNETLINK = 10, 1
_BATCH_BEGIN, _BATCH_END = 0x10, 0x11
_GETTABLE, _DELTABLE, _NEWSETELEM, _DELSETELEM = 1, 2, 12, 14
_CT_GET, _CT_DELETE = 1, 2
_CTA_MARK, _CTA_MARK_MASK = 8, 21
_ALL_GROUPS = "1073741824-2147483647"  # of every daemon: NatConfig.tag << 16
_GEN = struct.Struct("=BBH")


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """What the table depends on. `guard` lists the families ("ipv4", "ipv6") that were not
    forwarded before we switched forwarding on: other interfaces' packets stay unforwarded."""

    table: str
    group: int  # of live interfaces; group + 1 holds those being removed
    pool4: ipaddress.IPv4Network
    pool6: ipaddress.IPv6Network | None
    blocked: tuple[str, ...] = ()  # networks no sandbox may reach
    resolvers: tuple[str, ...] = ()  # reachable on port 53 even when blocked or the host itself
    guard: tuple[str, ...] = ()


class Entry(msgspec.Struct, frozen=True):
    """One sandbox in the maps."""

    index: int  # of the host's interface; also the connection mark
    address: ipaddress.IPv4Address
    address6: ipaddress.IPv6Address | None


def render(rules: Rules, entries: Iterable[Entry] = ()) -> str:
    """Return the nft(8) script that replaces the table in one transaction.

    Established flows survive a replacement: their translation lives in the connection table.
    """
    listed = list(entries)
    groups = f"{{ {rules.group}, {rules.group + 1} }}"
    map4 = _elements(f"{e.index} . {e.address} : {e.index}" for e in listed)
    map6 = _elements(f"{e.index} . {e.address6} : {e.index}" for e in listed if e.address6)
    blocked4, blocked6 = _by_version(rules.blocked)
    resolvers4, resolvers6 = _by_version(rules.resolvers)
    guard = "".join(f"    meta nfproto {family} jump guard\n" for family in rules.guard)
    masquerade = f"    oifgroup != {groups} ip saddr {rules.pool4} masquerade\n"
    if rules.pool6 is not None:
        masquerade += f"    oifgroup != {groups} ip6 saddr {rules.pool6} masquerade\n"
    return f"""\
table inet {rules.table}
delete table inet {rules.table}
table inet {rules.table} {{
  map sandboxes4 {{ type iface_index . ipv4_addr : mark; {map4}}}
  map sandboxes6 {{ type iface_index . ipv6_addr : mark; {map6}}}
  set blocked4 {{ type ipv4_addr; flags interval; auto-merge; {blocked4}}}
  set blocked6 {{ type ipv6_addr; flags interval; auto-merge; {blocked6}}}
  set resolvers4 {{ type ipv4_addr; {resolvers4}}}
  set resolvers6 {{ type ipv6_addr; {resolvers6}}}
  chain source {{
    ct mark set iif . ip saddr map @sandboxes4 return
    ct mark set iif . ip6 saddr map @sandboxes6 return
    drop
  }}
  chain refuse {{
    meta l4proto tcp reject with tcp reset
    reject with icmpx type admin-prohibited
  }}
  chain dns {{
    ip daddr @resolvers4 meta l4proto {{ tcp, udp }} th dport 53 accept
    ip6 daddr @resolvers6 meta l4proto {{ tcp, udp }} th dport 53 accept
  }}
  chain to_host {{
    ct state established,related accept
    jump dns
    goto refuse
  }}
  chain from_sandbox {{
    ct state invalid drop
    oifgroup {groups} goto refuse
    jump dns
    ip daddr @blocked4 goto refuse
    ip6 daddr @blocked6 goto refuse
    accept
  }}
  chain to_sandbox {{
    ct state established,related accept
    drop
  }}
  chain guard {{
    iifgroup {_ALL_GROUPS} accept
    oifgroup {_ALL_GROUPS} accept
    drop
  }}
  chain prerouting {{
    type filter hook prerouting priority mangle; policy accept;
    iifgroup {groups} jump source
  }}
  chain input {{
    type filter hook input priority filter; policy accept;
    iifgroup {groups} jump to_host
  }}
  chain forward {{
    type filter hook forward priority filter; policy accept;
    iifgroup {groups} jump from_sandbox
    oifgroup {groups} jump to_sandbox
{guard}  }}
  chain postrouting {{
    type nat hook postrouting priority srcnat; policy accept;
{masquerade}  }}
}}
"""


def _by_version(texts: Iterable[str]) -> tuple[str, str]:
    """Return the element lists of the IPv4 and the IPv6 set with these networks or addresses."""
    networks = [
        ipaddress.ip_network(text) if "/" in text else ipaddress.ip_address(text) for text in texts
    ]
    four = _elements(str(n) for n in networks if n.version == 4)
    return four, _elements(str(n) for n in networks if n.version == 6)


def _elements(items: Iterable[str]) -> str:
    joined = ", ".join(items)
    return f"elements = {{ {joined} }}; " if joined else ""


def removal(table: str) -> str:
    """Return the script that removes the table, there or not."""
    return f"table inet {table}\ndelete table inet {table}\n"


def load(script: str) -> None:
    """Run `script` through nft(8) in the calling thread's network namespace. All of it or nothing.

    Raises `Unsupported` without nft, `Internal` when the kernel refuses the rules.
    """
    run_nft(["-f", "-"], script)


def run_nft(arguments: Sequence[str], text: str = "") -> str:
    """Run nft(8) with `text` as input and return its output; raises as `load` does."""
    binary = shutil.which("nft", path="/usr/sbin:/sbin:/usr/bin:/bin")
    if binary is None:
        raise Unsupported(
            "network=nat needs nft; install the package nftables", reason="nft is not installed"
        )
    try:
        done = subprocess.run(
            [binary, *arguments],
            input=text,
            capture_output=True,
            text=True,
            check=False,
            timeout=NFT_TIMEOUT_S,
            env={"LC_ALL": "C"},
        )
    except subprocess.TimeoutExpired as error:
        raise Internal(f"nft did not answer in {NFT_TIMEOUT_S:.0f} s") from error
    if done.returncode:
        raise Internal(f"nft refused the rules: {done.stderr.strip()[:500]}")
    return done.stdout


class Firewall:
    """Elements and connections of the table, over one nfnetlink socket; for one thread."""

    def __init__(self, table: str) -> None:
        self._table = table
        self._socket = Netlink(NETLINK_NETFILTER)

    def close(self) -> None:
        self._socket.close()

    def is_loaded(self) -> bool:
        """Whether the table is there. Raises `NetlinkError`."""
        payload = _GEN.pack(_NFPROTO_INET, 0, 0) + attr_text(1, self._table)
        try:
            self._socket.get(Message(_SUBSYS_NFTABLES << 8 | _GETTABLE, 0, payload, "find table"))
        except NetlinkError as error:
            if error.errno == errno.ENOENT:
                return False
            raise
        return True

    def add(self, entry: Entry) -> None:
        """Let the sandbox's packets pass. Raises `NetlinkError`; then nothing was added."""
        messages = _element_messages(self._table, _NEWSETELEM, NLM_F_CREATE, entry)
        error = self._transact(messages)
        if error is not None:
            raise error

    def remove(self, entries: Sequence[Entry]) -> None:
        """Take the sandboxes' elements away; those that are gone already are no error."""
        for start in range(0, len(entries), BATCH // 2):
            chunk = entries[start : start + BATCH // 2]
            grouped = [_element_messages(self._table, _DELSETELEM, 0, entry) for entry in chunk]
            if self._transact([m for messages in grouped for m in messages]) is None:
                continue
            # one unknown element undoes the whole transaction: go on one at a time
            for message in (m for messages in grouped for m in messages):
                error = self._transact([message])
                if error is not None and error.errno != errno.ENOENT:
                    raise error

    def forget_connections(self, mark: int, mask: int = 0xFFFFFFFF) -> None:
        """Delete every tracked connection whose mark under `mask` is `mark`, of both families."""
        payload = _GEN.pack(0, 0, 0) + _u32be(_CTA_MARK, mark) + _u32be(_CTA_MARK_MASK, mask)
        message = Message(_SUBSYS_CTNETLINK << 8 | _CT_DELETE, 0, payload, "flush connections")
        (error,) = self._socket.request([message])
        if error is not None and error.errno != errno.ENOENT:
            raise error

    def connection_marks(self, mark: int, mask: int) -> dict[int, int]:
        """Return how many tracked connections carry each mark that is `mark` under `mask`."""
        payload = _GEN.pack(0, 0, 0) + _u32be(_CTA_MARK, mark) + _u32be(_CTA_MARK_MASK, mask)
        message = Message(_SUBSYS_CTNETLINK << 8 | _CT_GET, 0, payload, "list connections")
        marks: dict[int, int] = {}
        for answer in self._socket.dump(message):
            value = attributes(answer, _GEN.size).get(_CTA_MARK)
            if value is not None:
                number = int.from_bytes(value, "big")
                marks[number] = marks.get(number, 0) + 1
        return marks

    def _transact(self, messages: Sequence[Message]) -> NetlinkError | None:
        edge = _GEN.pack(0, 0, socket.htons(_SUBSYS_NFTABLES))
        return self._socket.transact(
            Message(_BATCH_BEGIN, 0, edge), messages, Message(_BATCH_END, 0, edge)
        )


def is_table_removal(data: bytes) -> bool:
    """Whether a buffer of nftables events tells that some table was removed."""
    return any(kind == _SUBSYS_NFTABLES << 8 | _DELTABLE for kind, *_ in split(data))


def _element_messages(table: str, kind: int, flags: int, entry: Entry) -> list[Message]:
    pairs: list[tuple[str, bytes]] = [("sandboxes4", entry.address.packed)]
    if entry.address6 is not None:
        pairs.append(("sandboxes6", entry.address6.packed))
    messages = []
    index = struct.pack("=I", entry.index)
    for name, packed in pairs:
        element = nest(1, attr(1, index + packed))  # NFTA_SET_ELEM_KEY { NFTA_DATA_VALUE }
        if kind == _NEWSETELEM:
            element += nest(2, attr(1, index))  # NFTA_SET_ELEM_DATA
        payload = (
            _GEN.pack(_NFPROTO_INET, 0, 0)
            + attr_text(1, table)
            + attr_text(2, name)
            + nest(3, nest(1, element))  # NFTA_SET_ELEM_LIST_ELEMENTS { NFTA_LIST_ELEM }
        )
        what = f"{'add to' if kind == _NEWSETELEM else 'remove from'} {name}"
        messages.append(Message(_SUBSYS_NFTABLES << 8 | kind, flags | NLM_F_ACK, payload, what))
    return messages


def _u32be(kind: int, value: int) -> bytes:
    return attr(kind, value.to_bytes(4, "big"))
