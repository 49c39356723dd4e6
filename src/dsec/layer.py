"""``dsec layer`` and ``dsec pack``: the images that sandboxes are made of."""

from __future__ import annotations

import os
import time
from pathlib import Path

import click

from dsec import completion, execute, output
from dsec.session import Settings, connected, json_option
from libdsec import BuildStep, CommandFailed, DSecClient, ImageConfig, LayerInfo, Packed

REMOTE = ("docker:",)
SCHEMES = ("oci:", "oci-archive:", "docker-archive:", "git:")


def absolute(source: str) -> str:
    """Return a source with the path in it, if there is one, made absolute: the daemon has no cwd.

    What follows the path (a tag, a branch) stays behind it.
    """
    if source.startswith(REMOTE):
        return source
    scheme = next((scheme for scheme in SCHEMES if source.startswith(scheme)), "")
    place = source.removeprefix(scheme)
    if scheme == "git:" and ":" in place.partition("/")[0]:  # a URL
        return source
    return f"{scheme}{Path(place).absolute()}" if place else source


@click.group()
def layer() -> None:
    """List, import, build and remove layers."""


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
@click.argument("source")
@click.option("--replace", is_flag=True, help="Let NAME mean the new layer from now on.")
@click.option("--at", default="", metavar="DIR", help="Put the tree there, not at the root.")
@json_option
@connected
async def import_(
    settings: Settings, client: DSecClient, name: str, source: str, replace: bool, at: str
) -> int:
    """Make layer NAME of SOURCE, which the daemon reads.

    \b
    A directory, tar or EROFS image on the daemon's host:
      /srv/tree  tree.tar.zst
    A container image:
      docker://REGISTRY/NAME:TAG  oci:DIRECTORY  oci-archive:FILE  docker-archive:FILE
    A git repository, with a branch, tag or commit:
      git:https://host/project.git#v1.2  git:/srv/project

    A name that begins with workspace/, toolkit/ or snapshot/ says what the layer is for; a
    workspace from git is put at /workspace.
    """
    if client.endpoint.startswith("unix:"):  # its paths are ours
        source = absolute(source)
    with output.stages(f"importing {name}", silent=settings.json) as show:
        made = await client.layers.import_(
            name, source, replace=replace, at=at, on_progress=output.staged(show)
        )
    _show_layer(settings, made)
    return 0


def _show_layer(settings: Settings, made: LayerInfo) -> None:
    if settings.json:
        output.json(made)
    else:
        click.echo(f"{made.name} {made.digest} {output.size(made.size_bytes)}")


@layer.command()
@click.argument("source", metavar="NAME_OR_DIGEST", shell_complete=completion.layers)
@click.option("--to", "name", required=True, metavar="NAME", help="The new layer's name.")
@click.option("--replace", is_flag=True, help="Let NAME mean the new layer from now on.")
@json_option
@connected
async def collapse(
    settings: Settings, client: DSecClient, source: str, name: str, replace: bool
) -> int:
    """Make one layer of a layer and all that it was made on.

    Sandboxes of it have the same files and defaults, and look up names faster; it adds no content
    to the store.
    """
    with output.stages(f"collapsing {source}", silent=settings.json) as show:
        made = await client.layers.collapse(
            source, name, replace=replace, on_progress=output.staged(show)
        )
    _show_layer(settings, made)
    return 0


class _Log:
    """Steps with their times, and what commands write, on stderr."""

    def __init__(self, silent: bool) -> None:
        self._silent = silent
        self._began: float | None = None
        self._midline = False

    def step(self, step: BuildStep) -> None:
        self.done()
        self._began = time.monotonic()
        self._line(f"[{step.number}/{step.total}] {step.text}")

    def text(self, text: str) -> None:
        if not self._silent:
            click.echo(text, err=True, nl=False)
            self._midline = not text.endswith("\n")

    def done(self) -> None:
        """The step that ran has ended."""
        if self._began is not None:
            self._line(f"    {time.monotonic() - self._began:.1f} s")
        self._began = None

    def _line(self, text: str) -> None:
        if not self._silent:
            click.echo(("\n" if self._midline else "") + text, err=True)
            self._midline = False


def _argument(text: str) -> tuple[str, str]:
    """Return name and value of a build argument; without "=", the value of our environment."""
    name, equals, value = text.partition("=")
    if not equals and name in os.environ:
        return name, os.environ[name]
    if not name or not equals:
        raise click.BadParameter(
            f"{text!r} is neither NAME=VALUE nor a variable that is set", param_hint="--build-arg"
        )
    return name, value


@layer.command()
@click.argument("name")
@click.argument("context", default=".", type=click.Path(path_type=Path))
@click.option("-f", "--file", type=click.Path(path_type=Path), help="[default: CONTEXT/Dockerfile]")
@click.option("--build-arg", "arguments", multiple=True, metavar="NAME=VALUE")
@click.option("--replace", is_flag=True, help="Let NAME mean the new layer from now on.")
@click.option("--no-clean", is_flag=True, help="Keep caches, logs, histories and /tmp.")
@click.option("-m", "--memory", type=int, default=2048, show_default=True, metavar="MB")
@click.option("-c", "--cpus", type=float, default=2.0, show_default=True, metavar="CORES")
@click.option("--pids", type=int, default=4096, show_default=True, metavar="COUNT")
@click.option("--disk", type=int, default=16384, show_default=True, metavar="MB")
@click.option(
    "--network", type=click.Choice(["none", "nat"]), default="nat", show_default=True
)  # fmt: skip
@json_option
@connected
async def build(
    settings: Settings,
    client: DSecClient,
    name: str,
    context: Path,
    file: Path | None,
    arguments: tuple[str, ...],
    replace: bool,
    no_clean: bool,
    memory: int,
    cpus: float,
    pids: int,
    disk: int,
    network: str,
) -> int:
    """Make layer NAME by the Dockerfile of the directory CONTEXT.

    The steps run in a sandbox of the base that FROM names, a layer or an image of a registry.
    """
    log = _Log(settings.json)
    try:
        made = await client.layers.build(
            name,
            context,
            dockerfile=str(file.absolute()) if file else "Dockerfile",
            arguments=dict(map(_argument, arguments)),
            replace=replace,
            clean=not no_clean,
            on_output=log.text,
            on_step=log.step,
            network="nat" if network == "nat" else "none",
            memory_limit_mb=memory,
            cpu_cores_limit=cpus,
            pids_limit=pids,
            disk_limit_mb=disk,
        )
    except CommandFailed as error:
        if settings.json:
            raise
        log.done()  # its output was shown already
        output.error(False, error.code, error.message.partition("\n")[0].rstrip(":"))
        return 1
    log.done()
    _show_packed(settings, made)
    return 0


@click.command()
@click.argument("sandbox_id", metavar="SANDBOX", shell_complete=completion.sandboxes)
@click.argument("name")
@click.option("--replace", is_flag=True, help="Let NAME mean the new layer from now on.")
@click.option("--no-clean", is_flag=True, help="Keep caches, logs, histories and /tmp.")
@click.option(
    "--omit", multiple=True, metavar="PATTERN", help="Leave out paths, as srv/*.o or **/.cache."
)
@click.option("-e", "--env", multiple=True, metavar="NAME=VALUE", help="A default of the layer.")
@click.option("--user", default="", metavar="USER", help="A default of the layer.")
@click.option("-w", "--workdir", default="", metavar="DIR", help="A default of the layer.")
@json_option
@connected
async def pack(
    settings: Settings,
    client: DSecClient,
    sandbox_id: str,
    name: str,
    replace: bool,
    no_clean: bool,
    omit: tuple[str, ...],
    env: tuple[str, ...],
    user: str,
    workdir: str,
) -> int:
    """Save what was changed in SANDBOX as layer NAME; it goes on."""
    sandbox = await client.connect(sandbox_id)
    config = ImageConfig(env=execute.pairs(env, "--env"), user=user, workdir=workdir)
    packed = await sandbox.pack_diff(
        name, replace=replace, clean=not no_clean, omit=omit, config=config
    )
    _show_packed(settings, packed)
    return 0


def _show_packed(settings: Settings, packed: Packed) -> None:
    if settings.json:
        output.json(packed)
        return
    for note in packed.notes:
        click.echo(f"note: {note}", err=True)
    click.echo(f"{packed.name} {packed.digest} {output.size(packed.size_bytes)}")


@layer.command("rm")
@click.argument(
    "names", nargs=-1, required=True, metavar="NAME...", shell_complete=completion.layers
)
@json_option
@connected
async def remove(settings: Settings, client: DSecClient, names: tuple[str, ...]) -> int:
    """Remove names of layers; sandboxes that use them keep them.

    What no name leads to any more is deleted by the daemon later, or by `dsec layer gc`.
    """
    for name in names:
        await client.layers.remove(name)
    if settings.json:
        output.json({"removed": list(names)})
    return 0


@layer.command()
@click.option(
    "--grace", type=float, metavar="SECONDS", help="Spare what was used since. [default: daemon's]"
)
@click.option(
    "--wait", type=float, metavar="SECONDS", help="Between mark and deletion. [default: daemon's]"
)
@json_option
@connected
async def gc(
    settings: Settings, client: DSecClient, grace: float | None, wait: float | None
) -> int:
    """Delete what no name leads to.

    The first look marks, one after the wait deletes. The daemon does so by itself, too.
    """
    done = await client.layers.collect(grace_s=grace, wait_s=wait)
    if settings.json:
        output.json(done)
    else:
        click.echo(f"{done.marked} marked, {done.deleted} deleted, {output.size(done.freed_bytes)}")
    return 0
