"""The screen, keyboard and pointer of one full VM."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Sequence
from pathlib import Path

from dsecd.backends.fullvm_keys import key_named, keys_of
from dsecd.backends.fullvm_plan import SHOT
from dsecd.host import vm_disks
from dsecd.host.fullvm_plan import Button, ButtonEvent, FullMachine, KeyEvent, MoveEvent
from libdsec.errors import Exhausted, Internal, InvalidArgument
from libdsec.model import MouseButton, Screenshot
from libdsec.wire import MAX_FRAME

KEY_S = 0.03  # a guest's driver must have seen one key before the next: its controller keeps few
PNG_MOST = MAX_FRAME - (64 << 10)  # of a reply, with what is beside it
TEXT_MOST = 4096
CLICKS_MOST, STEPS_MOST, KEYS_MOST = 10, 1000, 8
_PNG_HEAD = b"\x89PNG\r\n\x1a\n"


class FullVMDisplay:
    """An `abc.Display`. `machine` returns what there is to talk to now, or raises."""

    def __init__(self, machine: Callable[[], FullMachine], root: Path) -> None:
        self._machine, self._root = machine, root
        self._turn = asyncio.Lock()  # keys of two callers would mix

    async def screenshot(self) -> Screenshot:
        """See `abc.Display`."""
        async with self._turn:
            return await self._screenshot()

    async def _screenshot(self) -> Screenshot:
        await asyncio.to_thread(vm_disks.remove, self._root, SHOT)
        await self._machine().screendump(SHOT)
        try:
            png = await asyncio.to_thread(vm_disks.read, self._root, SHOT, PNG_MOST + 1)
        finally:
            await asyncio.to_thread(vm_disks.remove, self._root, SHOT)
        if len(png) > PNG_MOST:
            raise Exhausted(
                f"the picture of the screen has more than {PNG_MOST >> 20} MiB: have the guest "
                "show fewer pixels"
            )
        if png[: len(_PNG_HEAD)] != _PNG_HEAD or png[12:16] != b"IHDR":
            raise Internal("the monitor wrote something else than a PNG image")
        width, height = struct.unpack_from(">II", png, 16)
        return Screenshot(width=width, height=height, png=png)

    async def click(self, x: int, y: int, button: MouseButton | None, count: int) -> None:
        """See `abc.Display`."""
        _require(0 <= count <= CLICKS_MOST, "count", f"0 to {CLICKS_MOST}")
        async with self._turn:
            await self._move(x, y)
            for _ in range(count if button is not None else 0):
                assert button is not None
                await self._press(button)

    async def scroll(self, x: int, y: int, steps: int) -> None:
        """See `abc.Display`."""
        _require(abs(steps) <= STEPS_MOST, "steps", f"at most {STEPS_MOST}")
        async with self._turn:
            await self._move(x, y)
            for _ in range(abs(steps)):
                await self._press("wheel-down" if steps > 0 else "wheel-up")

    async def type_text(self, text: str) -> None:
        """See `abc.Display`."""
        _require(len(text) <= TEXT_MOST, "text", f"at most {TEXT_MOST} characters")
        strokes = [keys_of(character) for character in text]
        async with self._turn:
            for keys in strokes:
                await self._strike(keys)

    async def press(self, keys: Sequence[str]) -> None:
        """See `abc.Display`."""
        _require(0 < len(keys) <= KEYS_MOST, "keys", f"1 to {KEYS_MOST}")
        held = [key_named(name) for name in keys]
        async with self._turn:
            await self._strike(held)

    async def _strike(self, keys: Sequence[str]) -> None:
        machine = self._machine()
        await machine.send_input(tuple(KeyEvent(key, True) for key in keys))
        await asyncio.sleep(KEY_S)
        await machine.send_input(tuple(KeyEvent(key, False) for key in reversed(keys)))
        await asyncio.sleep(KEY_S)

    async def _press(self, button: Button) -> None:
        machine = self._machine()
        await machine.send_input((ButtonEvent(button, True),))
        await asyncio.sleep(KEY_S)
        await machine.send_input((ButtonEvent(button, False),))
        await asyncio.sleep(KEY_S)

    async def _move(self, x: int, y: int) -> None:
        screen = await self._screenshot()  # for its size, which the guest may have changed
        inside = 0 <= x < screen.width and 0 <= y < screen.height
        _require(inside, "x", f"({x}, {y}) is not on the screen of {screen.width}x{screen.height}")
        place = MoveEvent((x + 0.5) / screen.width, (y + 0.5) / screen.height)
        await self._machine().send_input((place,))
        await asyncio.sleep(KEY_S)


def _require(condition: bool, field: str, message: str) -> None:
    if not condition:
        raise InvalidArgument(f"{field}: {message}", field=field)
