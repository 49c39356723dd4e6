"""``dsec display``: the screen of a full VM."""

from __future__ import annotations

from pathlib import Path

import click

from dsec import completion
from dsec.session import Settings, connected
from libdsec import DSecClient
from libdsec.model import MouseButton


@click.group()
def display() -> None:
    """Look at the screen of a full VM, type, and click."""


_sandbox = click.argument("sandbox_id", metavar="SANDBOX", shell_complete=completion.sandboxes)
_BUTTONS: list[MouseButton] = ["left", "middle", "right"]


@display.command()
@_sandbox
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@connected
async def screenshot(settings: Settings, client: DSecClient, sandbox_id: str, file: Path) -> int:
    """Write what the screen shows to FILE, as PNG."""
    sandbox = await client.connect(sandbox_id)
    file.write_bytes(await sandbox.display.screenshot())
    return 0


@display.command()
@_sandbox
@connected
async def size(settings: Settings, client: DSecClient, sandbox_id: str) -> int:
    """Print width and height of the screen."""
    width, height = await (await client.connect(sandbox_id)).display.size()
    click.echo(f"{width} {height}")
    return 0


@display.command(name="click")
@_sandbox
@click.argument("x", type=int)
@click.argument("y", type=int)
@click.option("--button", type=click.Choice(_BUTTONS), default="left", show_default=True)
@click.option("--count", type=int, default=1, help="2 is a double click.")
@connected
async def click_(
    settings: Settings,
    client: DSecClient,
    sandbox_id: str,
    x: int,
    y: int,
    button: MouseButton,
    count: int,
) -> int:
    """Press a button of the pointer at a pixel."""
    sandbox = await client.connect(sandbox_id)
    await sandbox.display.click(x, y, button=button, count=count)
    return 0


@display.command(name="type")
@_sandbox
@click.argument("text")
@connected
async def type_(settings: Settings, client: DSecClient, sandbox_id: str, text: str) -> int:
    """Type TEXT on the keyboard."""
    await (await client.connect(sandbox_id)).display.type(text)
    return 0


@display.command()
@_sandbox
@click.argument("keys", nargs=-1, required=True)
@connected
async def key(
    settings: Settings, client: DSecClient, sandbox_id: str, keys: tuple[str, ...]
) -> int:
    """Press KEYS together, as in: ctrl alt delete."""
    await (await client.connect(sandbox_id)).display.key(*keys)
    return 0
