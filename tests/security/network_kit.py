"""What the attempts on the network share: their registry and their sockets."""

# ruff: noqa: F403 - what is imported is beside this file inside the sandbox

from __future__ import annotations

import socket
from collections.abc import Callable

from kit import *  # type: ignore[import-not-found]

INET, INET6 = socket.AF_INET, socket.AF_INET6
STREAM, DGRAM, RAW = socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW
ALLOWED = "203.0.113.10"  # its port 80 is open, when good.example was asked for
Attempt = Callable[[str, str], object]
ATTEMPTS: dict[str, Attempt] = {}


def attempt(function: Attempt) -> Attempt:
    ATTEMPTS[function.__name__] = function
    return function


def sock(family: int, kind: int, protocol: int = 0) -> socket.socket:
    made = socket.socket(family, kind, protocol)
    made.settimeout(0.5)
    return made


def own() -> str:
    return socket.gethostbyname(socket.gethostname())
