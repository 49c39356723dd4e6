"""``dsec check``, ``stats``, ``events``, ``version``: the daemon and its host."""

from __future__ import annotations

import asyncio
import importlib
import os
import time
from collections.abc import Iterable
from typing import Any

import click
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from dsec import completion, output
from dsec.session import Settings, connected, json_option, run_reporting
from libdsec import DSecClient, NotFound, Unavailable, __version__, model
from libdsec.wire import PROTOCOL


@click.command()
@json_option
@click.pass_obj
@click.pass_context
def check(context: click.Context, settings: Settings) -> None:
    """Show which kernel features this host has, and why not.

    Asks the daemon; without a daemon, root tries them here.
    """

    async def run() -> int:
        try:
            async with settings.client() as client:
                features = await client.check()
        except Unavailable:
            if settings.endpoint or os.geteuid() != 0:
                raise
            features = _probe_here()
        _show_features(settings, features)
        return 0

    context.exit(run_reporting(settings, run))


def _probe_here() -> list[model.Feature]:
    """Try the features without a daemon. `dsecd` may not be installed beside the client."""
    try:
        probe: Any = importlib.import_module("dsecd.host.probe").probe
    except ImportError as error:
        raise Unavailable(f"no daemon answers and dsecd is not installed here: {error}") from error
    table: Iterable[Any] = probe()
    rows = table.values() if isinstance(table, dict) else table
    return [
        model.Feature(
            name=row.name, available=row.available, reason=row.reason, needed_for=row.needed_for
        )
        for row in rows
    ]


def _show_features(settings: Settings, features: list[model.Feature]) -> None:
    if settings.json:
        output.json(features)
        return
    table = output.table(("FEATURE", "", "NEEDED FOR", "REASON"), ())
    for feature in features:
        mark = Text("yes", "green") if feature.available else Text("no", "red")
        table.add_row(Text(feature.name), mark, Text(feature.needed_for), Text(feature.reason))
    output.show(table)


@click.command()
@click.argument("ids", nargs=-1, metavar="[SANDBOX]...", shell_complete=completion.sandboxes)
@click.option("--once", is_flag=True, help="Print one reading and end (always so with --json).")
@click.option("--interval", type=float, default=1.0, show_default=True, help="Seconds.")
@json_option
@connected
async def stats(
    settings: Settings, client: DSecClient, ids: tuple[str, ...], once: bool, interval: float
) -> int:
    """Show what the host and its sandboxes use, live."""
    if settings.json:
        host, readings = await _read(client, ids)
        rows = [{"id": info.id, "metrics": metrics} for info, metrics in readings]
        output.json({"host": host, "sandboxes": rows})
        return 0
    console = Console(highlight=False)
    if once or not console.is_terminal:
        output.show(_usage(*await _read(client, ids), {}))
        return 0
    before: dict[str, tuple[float, float]] = {}
    with Live(console=console, screen=False, auto_refresh=False) as live:
        while True:
            host, readings = await _read(client, ids)
            live.update(_usage(host, readings, before), refresh=True)
            before = {info.id: (time.monotonic(), use.cpu_usage_s) for info, use in readings}
            await asyncio.sleep(max(interval, 0.1))


Readings = list[tuple[model.SandboxInfo, model.Metrics]]


async def _read(client: DSecClient, ids: tuple[str, ...]) -> tuple[model.HostStats, Readings]:
    sandboxes = [await client.connect(name) for name in ids] or [
        await client.connect(info.id) for info in await client.list_sandboxes()
    ]

    async def one(sandbox: Any) -> tuple[model.SandboxInfo, model.Metrics] | None:
        try:
            return sandbox.info, await sandbox.get_metrics()
        except NotFound:
            return None  # it ended meanwhile

    found = await asyncio.gather(*(one(sandbox) for sandbox in sandboxes))
    return await client.host_stats(), [reading for reading in found if reading is not None]


def _usage(
    host: model.HostStats, readings: Readings, before: dict[str, tuple[float, float]]
) -> Group:
    table = output.table(
        ("SANDBOX", "IMAGE", "CPU>", "MEMORY>", "LIMIT>", "PIDS>", "DISK>", "OOM>", "UP>"), ()
    )
    for info, use in readings:
        table.add_row(
            info.id,
            info.image,
            _cpu(before.get(info.id), use),
            output.size(use.memory_bytes),
            output.size(use.memory_limit_bytes),
            str(use.pids),
            output.size(use.disk_bytes),
            str(use.oom_kills),
            output.duration(use.uptime_s),
        )
    line = (
        f"{host.node or 'host'}: {host.sandboxes}/{host.sandboxes_max or '∞'} sandboxes, "
        f"{output.size(host.memory_available_bytes)} of {output.size(host.memory_total_bytes)} "
        f"memory free, {host.cpus} CPUs ({host.cpu_requested:g} asked for)"
    )
    return Group(Text(line), table)


def _cpu(last: tuple[float, float] | None, use: model.Metrics) -> str:
    """CPU in percent of one core since the last reading; at first the total in seconds."""
    if last is None:
        return f"{use.cpu_usage_s:.1f} s"
    passed = time.monotonic() - last[0]
    return f"{100 * (use.cpu_usage_s - last[1]) / passed:.0f}%"


@click.command()
@click.option(
    "--sandbox", default="", help="Only of this sandbox.", shell_complete=completion.sandboxes
)
@json_option
@connected
async def events(settings: Settings, client: DSecClient, sandbox: str) -> int:
    """Print what happens to sandboxes, as it happens. With --json one object per line."""
    async for event in client.events(sandbox):
        if settings.json:
            output.json(event)
            continue
        clock = time.strftime("%H:%M:%S", time.localtime(event.time))
        click.echo(f"{clock} {event.sandbox} {event.kind} {_detail(event)}".rstrip())
    return 0


def _detail(event: model.Event) -> str:
    """Return what an event says, for people: ``tcp 192.0.2.1 443 (where=connect pid=12)``."""
    detail = dict(event.detail)
    attempt = ""
    if event.kind == "denied":
        words = (detail.pop(name, "") for name in ("protocol", "name", "address", "port"))
        attempt = " ".join(filter(None, words))
    rest = " ".join(f"{name}={value}" for name, value in detail.items())
    return f"{attempt} ({rest})" if attempt and rest else attempt or rest


@click.command()
@json_option
@click.pass_obj
@click.pass_context
def version(context: click.Context, settings: Settings) -> None:
    """Print the versions of the client and, when one answers, of the daemon."""

    async def run() -> int:
        server = ""
        try:
            async with settings.client() as client:
                server = client.welcome.server
        except Unavailable:
            pass  # the client's own version is an answer too
        if settings.json:
            output.json({"client": __version__, "protocol": PROTOCOL, "server": server or None})
        else:
            click.echo(f"dsec {__version__} (protocol {PROTOCOL}), daemon: {server or 'none'}")
        return 0

    context.exit(run_reporting(settings, run))
