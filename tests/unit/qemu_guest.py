"""A guest of a few instructions in a BIOS of 64 KiB: what it does is known to the byte."""

from __future__ import annotations

import struct
from pathlib import Path

_SIZE = 64 << 10
_SERIAL, _PVPANIC, _RESET = 0x3F8, 0x505, 0xCF9


def say(text: str) -> bytes:
    """Write to the first serial port."""
    return b"".join(_out8(_SERIAL, byte) for byte in text.encode())


def store(address: int, value: int) -> bytes:
    """Write 16 bits to memory below 64 KiB: mov word [address], value."""
    return b"\xc7\x06" + struct.pack("<HH", address, value)


def count(address: int) -> bytes:
    """Add one to 16 bits of memory: inc word [address]."""
    return b"\xff\x06" + struct.pack("<H", address)


def panic() -> bytes:
    """Tell pvpanic, as a kernel does."""
    return _out8(_PVPANIC, 1)


def reset() -> bytes:
    """Reset the machine by the chipset."""
    return _out8(_RESET, 0x0E)


def power_off() -> bytes:
    """Have the chipset's ACPI registers at 0x600, and enter S5."""
    lpc = 0x8000F800
    return (
        _out32(0xCF8, lpc | 0x40)
        + _out32(0xCFC, 0x601)
        + _out32(0xCF8, lpc | 0x44)
        + _out32(0xCFC, 0x80)
        + _out16(0x604, 1 << 13)
    )


def for_ever(program: bytes) -> bytes:
    """Run `program` again and again: jmp to its begin."""
    return program + b"\xe9" + struct.pack("<h", -len(program) - 3)


def write_bios(path: Path, program: bytes) -> None:
    """Write a BIOS that runs `program`, then halts."""
    code = b"\xfa" + program + b"\xf4\xeb\xfd"  # cli ... hlt, for ever
    vector = b"\xea" + struct.pack("<HH", 0, 0xF000)  # jmp f000:0000
    image = code.ljust(_SIZE - 16, b"\xff") + vector
    path.write_bytes(image.ljust(_SIZE, b"\xff"))


def _out8(port: int, value: int) -> bytes:
    return b"\xba" + struct.pack("<H", port) + b"\xb0" + bytes([value]) + b"\xee"


def _out16(port: int, value: int) -> bytes:
    return b"\xba" + struct.pack("<H", port) + b"\xb8" + struct.pack("<H", value) + b"\xef"


def _out32(port: int, value: int) -> bytes:
    return b"\xba" + struct.pack("<H", port) + b"\x66\xb8" + struct.pack("<I", value) + b"\x66\xef"
