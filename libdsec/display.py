"""``sandbox.display``: the screen of a full VM, its keyboard and its pointer."""

from __future__ import annotations

from libdsec import model, model_vm
from libdsec.link import Link

_PER_KEY_S = 0.2  # what a key takes at most


class Display:
    """The display of one sandbox. Places are pixels from the upper left corner.

    Every call raises `Unsupported` for a sandbox without a display.
    """

    def __init__(self, link: Link, sandbox_id: str) -> None:
        self._link = link
        self._sandbox_id = sandbox_id

    async def size(self) -> tuple[int, int]:
        """Return width and height. The guest may change them."""
        shown = await self._show()
        return shown.width, shown.height

    async def screenshot(self) -> bytes:
        """Return what the screen shows as a PNG file."""
        return (await self._show()).png

    async def click(
        self, x: int, y: int, *, button: model.MouseButton = "left", count: int = 1
    ) -> None:
        """Press `button` at a place, `count` times: 2 is a double click."""
        args = model_vm.Click(id=self._sandbox_id, x=x, y=y, button=button, count=count)
        await self._link.call("display.click", args, type(None))

    async def move(self, x: int, y: int) -> None:
        """Move the pointer to a place."""
        args = model_vm.Click(id=self._sandbox_id, x=x, y=y, button=None)
        await self._link.call("display.click", args, type(None))

    async def scroll(self, x: int, y: int, steps: int) -> None:
        """Turn the wheel at a place: down, or up when `steps` is below 0."""
        args = model_vm.Scroll(id=self._sandbox_id, x=x, y=y, steps=steps)
        await self._link.call("display.scroll", args, type(None))

    async def type(self, text: str) -> None:
        """Type `text`, whose characters must be on an American keyboard."""
        args = model_vm.TypeText(id=self._sandbox_id, text=text)
        await self._link.call(
            "display.type", args, type(None), timeout_s=60.0 + len(text) * _PER_KEY_S
        )

    async def key(self, *keys: str) -> None:
        """Press keys together: ``key("ctrl", "alt", "delete")``."""
        args = model_vm.PressKeys(id=self._sandbox_id, keys=list(keys))
        await self._link.call("display.key", args, type(None))

    async def _show(self) -> model.Screenshot:
        ref = model_vm.DisplayRef(id=self._sandbox_id)
        return await self._link.call("display.screenshot", ref, model.Screenshot, retry=True)
