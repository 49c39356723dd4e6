"""The operations about displays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dsecd.api.local import LocalCall
from dsecd.engine.display import seen
from dsecd.engine.manager import Manager
from libdsec import model, model_vm


def entries(manager: Manager) -> list[tuple[str, Any, Callable[..., Any], bool]]:
    """Return the rows of the table of operations."""
    operations = DisplayOperations(manager)
    return [
        ("display.screenshot", model_vm.DisplayRef, operations.screenshot, False),
        ("display.click", model_vm.Click, operations.click, False),
        ("display.scroll", model_vm.Scroll, operations.scroll, False),
        ("display.type", model_vm.TypeText, operations.type, False),
        ("display.key", model_vm.PressKeys, operations.key, False),
    ]


class DisplayOperations:
    """The operations, bound to one engine."""

    def __init__(self, manager: Manager) -> None:
        self._manager = manager

    async def screenshot(self, call: LocalCall, args: model_vm.DisplayRef) -> model.Screenshot:
        async with seen(self._manager, args.id) as display:
            return await display.screenshot()

    async def click(self, call: LocalCall, args: model_vm.Click) -> None:
        async with seen(self._manager, args.id) as display:
            await display.click(args.x, args.y, args.button, args.count)

    async def scroll(self, call: LocalCall, args: model_vm.Scroll) -> None:
        async with seen(self._manager, args.id) as display:
            await display.scroll(args.x, args.y, args.steps)

    async def type(self, call: LocalCall, args: model_vm.TypeText) -> None:
        async with seen(self._manager, args.id) as display:
            await display.type_text(args.text)

    async def key(self, call: LocalCall, args: model_vm.PressKeys) -> None:
        async with seen(self._manager, args.id) as display:
            await display.press(args.keys)
