"""What a sandbox is denied in its files, in the form of the kernel's tables, and its bytes
(bpf/lsm/layout.h). Pure data.

`dsecd.policy.lsm` makes tables from rules, `dsecd.host.lsmpolicy` enters them.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Mapping

import msgspec

# bits of `Denial.access`
READ, WRITE, EXECUTE, SEE, REPLACE, CONNECT = 1, 2, 4, 8, 16, 32
EVERYTHING = 63
EVERY_TYPE = (1 << 64) - 1
MAX_TYPES = 63  # of file systems that rules name; the first bit is for all others
MAX_PEERS = 16
NAME_BYTES = 255  # NAME_MAX
ABSTRACT_BYTES = 107
HOLDS, ABSTRACT_DENY, VSOCK_DENY = 1, 2, 4  # flags of a table

_DENIAL = struct.Struct("=QII")
_NODE_TAIL = struct.Struct("=II")
_NAME_KEY = struct.Struct("=QI256sI")
_ROOT_KEY = struct.Struct("=QII")
_BINDING_TAIL = struct.Struct("=II")
_PEER = struct.Struct("=5I")
_TYPE_KEY = struct.Struct("=Q64s")
_ABSTRACT_KEY = struct.Struct("=QI108s")

DENIAL_BYTES = _DENIAL.size
NODE_BYTES = 2 * _DENIAL.size + _NODE_TAIL.size
NAME_KEY_BYTES, ROOT_KEY_BYTES = _NAME_KEY.size, _ROOT_KEY.size
BINDING_BYTES = 2 * _DENIAL.size + _BINDING_TAIL.size + MAX_PEERS * _PEER.size
PEER_BYTES, TYPE_KEY_BYTES = _PEER.size, _TYPE_KEY.size
ABSTRACT_KEY_BYTES = _ABSTRACT_KEY.size


class Place(msgspec.Struct, frozen=True):
    """A mount of a sandbox: the part `root` of the file system `device` is seen at `point`.

    `device` is the kernel's number: major << 20 | minor.
    """

    device: int
    root: str
    point: str


class Denial(msgspec.Struct, frozen=True):
    """Accesses, and types of file systems that may not be mounted, as bits."""

    access: int = 0
    mounts: int = 0


NOTHING = Denial()
ALL = Denial(EVERYTHING, EVERY_TYPE)


class Node(msgspec.Struct, frozen=True):
    """What holds at a place, and below it where there is no other; `number` keys those."""

    here: Denial
    below: Denial
    number: int = 0
    has_places: bool = False


class Peer(msgspec.Struct, frozen=True):
    """A rule on AF_VSOCK, `cid` None for every context."""

    cid: int | None
    first_port: int
    last_port: int
    deny: bool


class Table(msgspec.Struct, frozen=True, kw_only=True):
    """All that is entered for a sandbox. Roots by device; names by number and bytes; the bit of a
    type of file system; whether an abstract name is denied."""

    roots: Mapping[int, Node]
    names: Mapping[tuple[int, bytes], Node]
    own: Denial = NOTHING
    foreign: Denial = NOTHING
    flags: int = 0
    peers: tuple[Peer, ...] = ()
    types: Mapping[str, int] = {}
    abstracts: Mapping[bytes, bool] = {}


Rows = dict[bytes, bytes]


def pack(table: Table, cgroup: int, base: int) -> dict[str, Rows]:
    """Return the rows of each map; `base` is added to the numbers of nodes."""
    return {
        "names": {
            _NAME_KEY.pack(cgroup, base + number, name, 0): _node(node, base)
            for (number, name), node in table.names.items()
        },
        "mount_types": {
            _TYPE_KEY.pack(cgroup, name.encode()): bit.to_bytes(4, sys.byteorder)
            for name, bit in table.types.items()
        },
        "abstracts": {
            _ABSTRACT_KEY.pack(cgroup, len(name), name): deny.to_bytes(4, sys.byteorder)
            for name, deny in table.abstracts.items()
        },
        "roots": {
            _ROOT_KEY.pack(cgroup, device, 0): _node(node, base)
            for device, node in table.roots.items()
        },
        "bindings": {cgroup.to_bytes(8, sys.byteorder): _binding(table)},
    }


def cgroup_of(key: bytes) -> int:
    """Return the cgroup in a key of any map."""
    return int.from_bytes(key[:8], sys.byteorder)


def number_of(key: bytes) -> int:
    """Return the number in a key of `names`."""
    return int(_NAME_KEY.unpack(key)[1])


def _denial(denial: Denial) -> bytes:
    return _DENIAL.pack(denial.mounts, denial.access, 0)


def _node(node: Node, base: int) -> bytes:
    tail = _NODE_TAIL.pack(base + node.number, node.has_places)
    return _denial(node.here) + _denial(node.below) + tail


def _binding(table: Table) -> bytes:
    peers = [
        _PEER.pack(peer.cid is None, peer.cid or 0, peer.first_port, peer.last_port, peer.deny)
        for peer in table.peers
    ]
    padding = bytes(_PEER.size * (MAX_PEERS - len(peers)))
    tail = _BINDING_TAIL.pack(table.flags, len(peers))
    return _denial(table.own) + _denial(table.foreign) + tail + b"".join(peers) + padding
