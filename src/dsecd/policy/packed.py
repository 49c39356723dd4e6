"""Network policies as bytes, for the journal. Pure."""

from __future__ import annotations

import ipaddress
from typing import Any

import msgspec

from dsecd.policy.rules import NameRule, NetPolicy, NetRule, Network


def pack(policy: NetPolicy) -> bytes:
    """Return `policy` in a form of its own that `unpack` reads."""
    return _ENCODER.encode(policy)


def unpack(data: bytes) -> NetPolicy:
    """Return the policy in `data`. Raises `ValueError` or `KeyError` for anything else."""
    value: dict[str, Any] = msgspec.msgpack.decode(data)
    rules = [rule | {"prefix": _network(rule["prefix"])} for rule in value["rules"]]
    return NetPolicy(
        rules=tuple(NetRule(**rule) for rule in rules),
        names=tuple(NameRule(**name) for name in value["names"]),
        default=value["default"],
        check_names=value.get("check_names", False),  # those of earlier versions do not have it
    )


def _packed(network: Network) -> bytes:
    """Return the address and the length of the prefix: text would be most of what `pack` costs."""
    return network.network_address.packed + bytes((network.prefixlen,))


def _network(packed: bytes | str) -> Network:
    """Undo `_packed`; earlier versions wrote text."""
    return ipaddress.ip_network(packed if isinstance(packed, str) else (packed[:-1], packed[-1]))


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_packed)
