"""The attempts on the network and where their packets are seen: in the world, on the wire.

Each has a number, and with it addresses of its own (`network_attempts`).
"""

from __future__ import annotations

import ast
import asyncio
import json
import socket
import struct
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from libdsec import Sandbox
from tests.system.network_lab import in_namespace
from tests.system.world_lab import World

_HERE = Path(__file__).parent
_KITS = ("kit.py", "network_kit.py")
_CALLS, _FRAMES = ("network_packets.py", "network_detours.py"), ("network_frames.py",)
_SCRIPT = "network_attempts.py"


def _registered(files: Sequence[str]) -> list[str]:
    """Return the names of the attempts in `files`."""
    return [
        node.name
        for name in files
        for node in ast.parse((_HERE / name).read_text()).body
        if isinstance(node, ast.FunctionDef)
        and any(isinstance(each, ast.Name) and each.id == "attempt" for each in node.decorator_list)
    ]


ATTEMPTS = _registered(_CALLS)
FRAMES = _registered(_FRAMES)  # of guests
_NUMBERS = {name: 100 + place for place, name in enumerate(sorted([*ATTEMPTS, *FRAMES]))}
POLICY: dict[str, Any] = {
    "network": {
        "rules": [
            {"allow": "good.example", "private": True, "ports": [80]},
            {"allow": "rebind.example", "private": True},
            {"allow": "inside.example"},
        ]
    }
}
# Where an attempt is seen, when not at the addresses of its own
SEEN_AT = {
    "tcp_to_another_port_of_an_allowed_address": ("203.0.113.10", 8100),
    "rebinding_to_the_metadata_service": ("169.254.169.254", 80),
    "rebinding_to_a_private_address": ("10.99.0.1", 80),
    "the_metadata_service": ("169.254.169.254", 80),
    "udp_broadcast": ("255.255.255.255", 80),
    "udp_multicast": ("239.1.2.3", 80),
    "frames_of_fragments_that_overlap": ("203.0.113.10", 8104),
    "port_made_of_a_checksum": ("203.0.113.10", 8105),
}
ASKED_FOR = {
    "data_in_the_labels_of_a_name": "61" * 20 + ".leak.example",
    "data_in_a_text_record": "leak.example TXT",
    "data_by_tcp": "secret.leak.example",
    "a_text_record_of_an_allowed_name": "good.example TXT",
    "a_zone_transfer": "zone.leak.example AXFR",
    "the_host_s_resolver": "direct.leak.example",
}


class Ran(msgspec.Struct):
    """What one sandbox did: outcomes by attempt, (address, port) on the wire, names asked for."""

    outcomes: dict[str, str]
    wire: set[tuple[str, int]]
    asked: set[str]

    def succeeded(self, name: str, by_outcome: Collection[str]) -> bool:
        """`by_outcome` succeed without a packet."""
        if name in by_outcome and self.outcomes[name] == "ok":
            return True
        if name in ASKED_FOR:
            return ASKED_FOR[name] in self.asked
        if name in SEEN_AT:
            return SEEN_AT[name] in self.wire
        number = _NUMBERS[name]
        v4 = f"203.0.113.{number}"
        packed = socket.inet_aton(v4).hex()
        mine = {v4, f"2600:db8::{number:x}", f"64:ff9b::{packed[:4]}:{packed[4:]}"}
        mine.add(f"2002:{packed[:4]}:{packed[4:]}::1")
        return any(address in mine for address, _ in self.wire)


class Wire:
    """All that reaches the world's interface."""

    def __init__(self, internet: World) -> None:
        def opened() -> socket.socket:
            made = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
            made.bind(("w0", 0))
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 20)
            made.setblocking(False)
            return made

        self.socket = in_namespace(internet.world, opened)

    def read(self) -> set[tuple[str, int]]:
        """Return (destination, port) of what was received since the last time."""
        found = set()
        while True:
            try:
                frame, address = self.socket.recvfrom(65536)
            except BlockingIOError:
                return found
            if address[2] != socket.PACKET_OUTGOING:
                found.add(_destination(frame))


def _destination(frame: bytes) -> tuple[str, int]:
    (kind,) = struct.unpack_from("!H", frame, 12)
    body = frame[14:]
    if kind == 0x0800:
        head, protocol = (body[0] & 15) * 4, body[9]
        target = socket.inet_ntop(socket.AF_INET, body[16:20])
    elif kind == 0x86DD:
        head, protocol = 40, body[6]
        target = socket.inet_ntop(socket.AF_INET6, body[24:40])
    else:
        return f"type {kind:x}", 0
    ported = protocol in (6, 17, 33, 132, 136) and len(body) >= head + 4
    return target, struct.unpack_from("!H", body, head + 2)[0] if ported else 0


def selected(request: pytest.FixtureRequest) -> list[str]:
    """Return the attempts of this file whose tests are to run."""
    return [
        item.callspec.params["name"]
        for item in request.session.items
        if isinstance(item, pytest.Function)
        and item.path == request.path
        and item.originalname == "test_attempt"
    ]


async def attempts(sandbox: Sandbox, internet: World, wire: Wire, names: list[str],
                   timeout: float) -> Ran:  # fmt: skip
    """Make the attempts `names` in `sandbox`."""
    for name in (*_KITS, *_CALLS, *_FRAMES, _SCRIPT):
        await sandbox.files.write(f"/attack/{name}", (_HERE / name).read_text(), user="root")
    wire.read()
    internet.asked.clear()
    done = await sandbox.run("python3", f"/attack/{_SCRIPT}", *names, user="root", timeout=timeout)
    assert done.ok, done.stderr
    await asyncio.sleep(0.3)
    outcomes: dict[str, str] = json.loads(done.stdout)
    return Ran(outcomes, wire.read(), set(internet.asked))
