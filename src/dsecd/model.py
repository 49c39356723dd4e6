"""Values that several layers of the daemon share; they import no other part of it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

_ID = re.compile(r"([a-z0-9]{1,12})-([a-z0-9]{1,12})-([0-9a-z]{1,8})-([0-9a-z]{1,14})")
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"


class Principal(msgspec.Struct, frozen=True):
    """Who is at the other end of a connection: the seam where projects and quotas will attach."""

    name: str
    kind: Literal["peer", "token", "loopback"]
    uid: int | None = None


class IdParts(msgspec.Struct, frozen=True):
    """A sandbox id taken apart: enough to route a call without a lookup."""

    shard: str
    node: str
    epoch: int
    serial: str


def base36(number: int) -> str:
    """Return the non-negative `number` in base 36."""
    digits = ""
    while number:
        number, rest = divmod(number, 36)
        digits = _DIGITS[rest] + digits
    return digits or "0"


def make_id(shard: str, node: str, epoch: int, serial: int) -> str:
    """Return ``shard-node-epoch-serial``; four random characters make ids hard to guess."""
    noise = base36(int.from_bytes(os.urandom(8)) % 36**4).rjust(4, "0")
    return f"{shard}-{node}-{base36(epoch)}-{base36(serial)}{noise}"


def parse_id(text: str) -> IdParts | None:
    """Return the parts of a sandbox id, or None when `text` is not one."""
    match = _ID.fullmatch(text)
    if match is None:
        return None
    shard, node, epoch, serial = match.groups()
    return IdParts(shard, node, int(epoch, 36), serial)


class Death(msgspec.Struct, frozen=True):
    """Why a sandbox ended without being asked to."""

    reason: str
    detail: Mapping[str, Any] = {}


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """The state of the host at one moment. `critical` names a pressure that forbids new work."""

    memory_total_bytes: int
    memory_available_bytes: int
    tasks: int
    tasks_max: int
    disk_free_bytes: int = 1 << 62
    swap_total_bytes: int = 0
    swap_free_bytes: int = 0
    critical: str = ""
