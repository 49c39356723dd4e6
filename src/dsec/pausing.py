"""``dsec pause``, ``resume``, ``class``: sandboxes that give way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast, get_args

import click

from dsec import completion, execute, output
from dsec.session import Settings, connected, json_option, report
from libdsec import CpuClass, DSecClient, DSecError, Paused, Resumed, SandboxInfo
from libdsec.errors import from_wire

MIB = 1 << 20
_sandboxes = click.argument(
    "sandbox_ids", nargs=-1, metavar="[SANDBOX...]", shell_complete=completion.sandboxes
)
_label = click.option(
    "-l", "--label", multiple=True, metavar="NAME=VALUE", help="All sandboxes that carry it."
)


def _subjects(sandbox_ids: tuple[str, ...], label: tuple[str, ...]) -> dict[str, str]:
    """Return the labels given. Either those or ids are required."""
    if bool(sandbox_ids) == bool(label):
        raise click.UsageError("name the sandboxes, or give --label")
    return execute.pairs(label, "--label")


def _show(settings: Settings, found: Sequence[Paused | Resumed], line: Callable[[Any], str]) -> int:
    failed = 0
    for one in found:
        if one.error is not None:
            report(settings, from_wire(one.error))
            failed += 1
        elif not settings.json:
            click.echo(line(one))
    if settings.json:
        output.json(list(found))
    return 1 if failed else 0


@click.command()
@_sandboxes
@_label
@click.option("--target", type=click.IntRange(min=0), metavar="MB",
              help="Of memory that each may keep. [default: none]")  # fmt: skip
@json_option
@connected
async def pause(
    settings: Settings,
    client: DSecClient,
    sandbox_ids: tuple[str, ...],
    label: tuple[str, ...],
    target: int | None,
) -> int:
    """Freeze sandboxes and page their memory out; whatever calls into one resumes it."""
    labels, target_bytes = _subjects(sandbox_ids, label), None if target is None else target * MIB
    if labels:
        return _show(settings, await client.pause_sandboxes(labels, target_bytes), _freed)
    found, failed = [], 0
    for name in sandbox_ids:
        try:
            found.append(await (await client.connect(name)).pause(target_bytes))
        except DSecError as error:  # the others are paused all the same
            report(settings, error)
            failed += 1
    return _show(settings, found, _freed) or bool(failed)


def _freed(paused: Paused) -> str:
    before, after = paused.memory_before_bytes / MIB, paused.memory_bytes / MIB
    notes = "".join(f"; {note}" for note in paused.notes)
    return f"{paused.id}  {before:.1f} -> {after:.1f} MiB{notes}"


@click.command()
@_sandboxes
@_label
@json_option
@connected
async def resume(
    settings: Settings, client: DSecClient, sandbox_ids: tuple[str, ...], label: tuple[str, ...]
) -> int:
    """Let paused sandboxes go on."""
    labels = _subjects(sandbox_ids, label)
    if labels:
        return _show(settings, await client.resume_sandboxes(labels), lambda one: str(one.id))
    found, failed = [], 0
    for name in sandbox_ids:
        try:
            await (await client.connect(name)).resume()
            found.append(Resumed(id=name))
        except DSecError as error:
            report(settings, error)
            failed += 1
    return _show(settings, found, lambda one: str(one.id)) or bool(failed)


@click.command("class")
@click.argument("cpu_class", metavar="CLASS", type=click.Choice(get_args(CpuClass)))
@_sandboxes
@_label
@json_option
@connected
async def class_(
    settings: Settings,
    client: DSecClient,
    cpu_class: str,
    sandbox_ids: tuple[str, ...],
    label: tuple[str, ...],
) -> int:
    """Set who goes first when CPUs are short: latency_sensitive, standard or best_effort."""
    labels = _subjects(sandbox_ids, label)
    ids = sandbox_ids or [info.id for info in await client.list_sandboxes(labels=labels)]
    changed, failed = list[SandboxInfo](), 0
    for name in ids:
        try:
            sandbox = await client.connect(name)
            changed.append(await sandbox.set_cpu_class(cast(CpuClass, cpu_class)))
        except DSecError as error:
            report(settings, error)
            failed += 1
            continue
        if not settings.json:
            click.echo(name)
            for note in changed[-1].notes:
                click.echo(f"note: {note}", err=True)
    if settings.json:
        output.json(changed)
    return 1 if failed else 0
