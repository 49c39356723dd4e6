"""Network policies as bytes, for the journal. Pure."""

from __future__ import annotations

import ipaddress
from typing import Any

import msgspec

from dsecd.policy.rules import NameRule, NetPolicy, NetRule


def pack(policy: NetPolicy) -> bytes:
    """Return `policy` in a form of its own that `unpack` reads."""
    return msgspec.msgpack.encode(policy, enc_hook=str)


def unpack(data: bytes) -> NetPolicy:
    """Return the policy in `data`. Raises `ValueError` or `KeyError` for anything else."""
    value: dict[str, Any] = msgspec.msgpack.decode(data)
    rules = [rule | {"prefix": ipaddress.ip_network(rule["prefix"])} for rule in value["rules"]]
    return NetPolicy(
        rules=tuple(NetRule(**rule) for rule in rules),
        names=tuple(NameRule(**name) for name in value["names"]),
        default=value["default"],
        check_names=value.get("check_names", False),  # those of earlier versions do not have it
    )
