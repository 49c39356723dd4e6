"""``dsec layer``: the images that sandboxes are made of."""

from __future__ import annotations

from pathlib import Path

import click

from dsec import completion, output
from dsec.session import Settings, connected, json_option
from libdsec import DSecClient


@click.group()
def layer() -> None:
    """List, import and remove layers."""


@layer.command("ls")
@json_option
@connected
async def list_(settings: Settings, client: DSecClient) -> int:
    """List the layers of the host."""
    layers = await client.layers.list()
    if settings.json:
        output.json(layers)
        return 0
    rows = (
        (one.name, one.digest[:19], output.size(one.size_bytes), str(one.in_use),
         output.age(one.created_at))
        for one in layers
    )  # fmt: skip
    output.show(output.table(("NAME", "DIGEST", "SIZE>", "IN USE>", "AGE>"), rows))
    return 0


@layer.command("import")
@click.argument("name")
@click.argument("source", type=click.Path(path_type=Path))
@click.option("--replace", is_flag=True, help="Let NAME mean the new layer from now on.")
@json_option
@connected
async def import_(
    settings: Settings, client: DSecClient, name: str, source: Path, replace: bool
) -> int:
    """Make layer NAME of SOURCE, a directory or tar file on the daemon's host."""
    with output.progress(f"importing {name}", None, silent=settings.json):
        made = await client.layers.import_(name, str(source.absolute()), replace=replace)
    if settings.json:
        output.json(made)
    else:
        click.echo(f"{made.name} {made.digest} {output.size(made.size_bytes)}")
    return 0


@layer.command("rm")
@click.argument(
    "names", nargs=-1, required=True, metavar="NAME...", shell_complete=completion.layers
)
@json_option
@connected
async def remove(settings: Settings, client: DSecClient, names: tuple[str, ...]) -> int:
    """Remove layers that no sandbox uses."""
    for name in names:
        await client.layers.remove(name)
    if settings.json:
        output.json({"removed": list(names)})
    return 0
