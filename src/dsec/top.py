"""``dsec top``: what the host and its sandboxes use, live and sorted.

CPU and network are rates between two readings of one sandbox, over the time that its daemon counted
between them. `rows`, `ordered` and `picture` are pure; `Reader` asks the daemon.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import click
import msgspec
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from dsec import completion, execute, output, terminal
from dsec.session import Settings, connected, json_option
from libdsec import DSecClient, NotFound, Sandbox, WrongState, model

PARALLEL = 32  # readings asked for at once
SHORTEST_S = 0.1


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One sandbox. Rates are None when there is no earlier reading to compare with.

    `memory_bytes` is charged to the sandbox, `memory_shared_bytes` its share of pages that several
    processes map, `stalled` the percent of 10 s in which a task of it waited for a resource.
    """

    id: str
    state: str
    cpu_class: model.CpuClass
    image: str
    cpu_percent: float | None  # of one CPU
    memory_bytes: int
    memory_shared_bytes: int
    memory_swapped_bytes: int
    disk_bytes: int
    rx_bytes_per_s: float | None
    tx_bytes_per_s: float | None
    stalled: dict[str, float]
    uptime_s: float

    @property
    def network(self) -> float:
        return (self.rx_bytes_per_s or 0.0) + (self.tx_bytes_per_s or 0.0)

    @property
    def pressure(self) -> float:
        return max(self.stalled.values(), default=0.0)


@dataclass(frozen=True, slots=True)
class Reading:
    """What the host and each sandbox had used when they were asked."""

    host: model.HostStats = field(default_factory=model.HostStats)
    sandboxes: Mapping[str, tuple[model.SandboxInfo, model.Metrics]] = field(default_factory=dict)


def rows(before: Reading, after: Reading) -> list[Row]:
    """Return a row for each sandbox of `after`, by id. Pure."""
    found = []
    for name in sorted(after.sandboxes):
        info, use = after.sandboxes[name]
        last = before.sandboxes.get(name)
        found.append(_row(info, last[1] if last is not None else None, use))
    return found


def _row(info: model.SandboxInfo, last: model.Metrics | None, use: model.Metrics) -> Row:
    passed_s = use.uptime_s - last.uptime_s if last is not None else 0.0

    def rate(counter: Callable[[model.Metrics], float]) -> float | None:
        if last is None or passed_s <= 0:
            return None
        return max(0.0, counter(use) - counter(last)) / passed_s

    cpu = rate(lambda metrics: metrics.cpu_usage_s)
    return Row(
        id=info.id,
        state=info.state,
        cpu_class=info.cpu_class,
        image=info.image,
        cpu_percent=None if cpu is None else 100 * cpu,
        memory_bytes=use.memory_bytes,
        memory_shared_bytes=use.memory_shared_bytes,
        memory_swapped_bytes=use.memory_swapped_bytes,
        disk_bytes=use.disk_bytes,
        rx_bytes_per_s=rate(lambda metrics: metrics.rx_bytes),
        tx_bytes_per_s=rate(lambda metrics: metrics.tx_bytes),
        stalled=use.stalled,
        uptime_s=use.uptime_s,
    )


# --- order ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Order:
    """What can be sorted by: the key to press, the columns it marks, the highest first or not."""

    key: str
    columns: tuple[str, ...]
    value: Callable[[Row], float | str]
    highest_first: bool = True


ORDERS: dict[str, Order] = {
    "cpu": Order("c", ("CPU>",), lambda row: row.cpu_percent or 0.0),
    "memory": Order("m", ("MEM>",), lambda row: row.memory_bytes),
    "shared": Order("s", ("SHARED>",), lambda row: row.memory_shared_bytes),
    "swapped": Order("w", ("SWAP>",), lambda row: row.memory_swapped_bytes),
    "disk": Order("d", ("DISK>",), lambda row: row.disk_bytes),
    "network": Order("n", ("RX/S>", "TX/S>"), lambda row: row.network),
    "pressure": Order("p", ("STALLED>",), lambda row: row.pressure),
    "uptime": Order("u", ("UP>",), lambda row: row.uptime_s),
    "id": Order("i", ("SANDBOX",), lambda row: row.id, highest_first=False),
}
_BY_KEY = {order.key: name for name, order in ORDERS.items()}
_KEYS = "sort: " + " ".join(f"{order.key}={name}" for name, order in ORDERS.items())
_COLUMNS = (
    "SANDBOX", "STATE", "CLASS", "CPU>", "MEM>", "SHARED>", "SWAP>", "DISK>", "RX/S>", "TX/S>",
    "STALLED>", "UP>", "IMAGE",
)  # fmt: skip
_CLASSES: dict[model.CpuClass, str] = {
    "latency_sensitive": "sens", "standard": "std", "best_effort": "best",
}  # fmt: skip


@dataclass(slots=True)
class View:
    """What the user chose, on the command line and by keys since."""

    sort: str = "cpu"
    reverse: bool = False
    ended: bool = False

    @property
    def descending(self) -> bool:
        return ORDERS[self.sort].highest_first != self.reverse

    def press(self, typed: str) -> None:
        """Take what was typed; what has no meaning is ignored, as are arrows and the like."""
        if typed.startswith("\x1b"):
            return
        for key in typed:
            if key == "q":
                self.ended = True
            elif key == "r":
                self.reverse = not self.reverse
            elif key in _BY_KEY:
                self.sort, self.reverse = _BY_KEY[key], False


def ordered(found: Iterable[Row], view: View) -> list[Row]:
    """Return the rows as `view` sorts them; equal ones by id. Pure."""
    by_id = sorted(found, key=lambda row: row.id)
    return sorted(by_id, key=ORDERS[view.sort].value, reverse=view.descending)


# --- what is shown --------------------------------------------------------------------------------


def picture(
    host: model.HostStats, found: Sequence[Row], view: View, height: int | None = None
) -> Group:
    """Return the host's lines and the table, cut to `height` lines with the keys below. Pure."""
    head = [Text(line, no_wrap=True, overflow="ellipsis") for line in _host_lines(host)]
    shown = ordered(found, view)
    if height is None:
        return Group(*head, _table(shown, view))
    room = max(0, height - len(head) - 2)  # the table's head, and the line of the keys
    more = f"{len(shown) - room} more; " if len(shown) > room else ""
    keys = Text(f"{more}{_KEYS} r=reverse q=quit", "dim", no_wrap=True, overflow="ellipsis")
    return Group(*head, _table(shown[:room], view), keys)


def _host_lines(host: model.HostStats) -> tuple[str, str, str]:
    used = host.memory_total_bytes - host.memory_available_bytes
    swapped = host.swap_total_bytes - host.swap_free_bytes
    need = f", {_size(host.reclaim_need_bytes)} to reclaim" if host.reclaim_need_bytes else ""
    return (
        f"{host.node or 'host'}: {host.sandboxes}/{host.sandboxes_max or '∞'} sandboxes, "
        f"dsecd {host.version} up {output.duration(host.uptime_s)}",
        f"memory: {_size(used)} of {_size(host.memory_total_bytes)} in use, "
        f"swap: {_size(swapped)} of {_size(host.swap_total_bytes)}{need}",
        f"asked for: {_size(host.memory_requested_bytes)} memory "
        f"({host.memory_overcommit:.2f} of the host's), {host.cpu_requested:g} CPUs "
        f"({host.cpu_overcommit:.2f} of {host.cpus})",
    )


def _table(shown: Iterable[Row], view: View) -> Table:
    mark = "↓" if view.descending else "↑"
    sorted_by = ORDERS[view.sort].columns
    names = [f"{mark}{name}" if name in sorted_by else name for name in _COLUMNS]
    table = output.table(names, ())
    table.padding = (0, 1, 0, 0)
    for column in table.columns[:-1]:
        column.no_wrap, column.overflow = True, "ellipsis"
    for row in shown:
        # the image is what gives way in a narrow terminal; one sandbox is one line in any
        image = Text(row.image, no_wrap=True, overflow="ellipsis")
        table.add_row(*map(Text, _cells(row)), image)
    return table


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row.id,
        row.state,
        _CLASSES[row.cpu_class],
        "-" if row.cpu_percent is None else f"{row.cpu_percent:.0f}%",
        _size(row.memory_bytes),
        _size(row.memory_shared_bytes),
        _size(row.memory_swapped_bytes),
        _size(row.disk_bytes),
        "-" if row.rx_bytes_per_s is None else _size(row.rx_bytes_per_s),
        "-" if row.tx_bytes_per_s is None else _size(row.tx_bytes_per_s),
        _stalled(row.stalled),
        output.duration(row.uptime_s).partition(" ")[0],
    )


def _stalled(stalled: Mapping[str, float]) -> str:
    """Return the resource most waited for: ``mem 12%``; "-" without PSI."""
    if not stalled:
        return "-"
    name = max(sorted(stalled), key=lambda each: stalled[each])
    return f"{name[:3]} {stalled[name]:.0f}%" if stalled[name] >= 0.5 else "0%"


def _size(count: float) -> str:
    """Return a byte count in at most five characters: ``1.5M``."""
    for unit in ("", "K", "M", "G"):
        if count < 999.5:
            return f"{count:.1f}{unit}" if unit and count < 99.95 else f"{count:.0f}{unit}"
        count /= 1024
    return f"{count:.1f}T"


# --- asking ---------------------------------------------------------------------------------------


class Reader:
    """Takes readings of the sandboxes with some labels; with `chosen`, of those among them."""

    def __init__(
        self, client: DSecClient, labels: Mapping[str, str], chosen: Iterable[Sandbox]
    ) -> None:
        self._client, self._labels = client, labels
        self._known = {sandbox.id: sandbox for sandbox in chosen}
        self._chosen = frozenset(self._known)

    async def read(self) -> Reading:
        """Ask for everything once; left out is what has nothing to measure yet or any more.

        Raises `NotFound` when none of the chosen is left, and what a call raises.
        """
        infos = await self._client.list_sandboxes(labels=self._labels)
        if self._chosen:
            infos = [info for info in infos if info.id in self._chosen]
            if not infos:
                raise NotFound(f"no sandbox {', '.join(sorted(self._chosen))}")
        here = {info.id for info in infos}
        self._known = {name: sandbox for name, sandbox in self._known.items() if name in here}
        gate = asyncio.Semaphore(PARALLEL)

        async def one(info: model.SandboxInfo) -> model.Metrics | None:
            async with gate:
                try:
                    return await (await self._sandbox(info.id)).get_metrics()
                except (NotFound, WrongState):
                    return None

        found = await asyncio.gather(*map(one, infos))
        pairs = zip(infos, found, strict=True)
        measured = {info.id: (info, use) for info, use in pairs if use is not None}
        return Reading(await self._client.host_stats(), measured)

    async def _sandbox(self, name: str) -> Sandbox:
        if name not in self._known:
            self._known[name] = await self._client.connect(name)
        return self._known[name]


# --- the command ----------------------------------------------------------------------------------


@click.command()
@click.argument("ids", nargs=-1, metavar="[SANDBOX]...", shell_complete=completion.sandboxes)
@click.option("-l", "--label", multiple=True, metavar="NAME=VALUE")
@click.option(
    "-s", "--sort", type=click.Choice(list(ORDERS)), default="cpu", show_default=True,
    help="In the live view also by keys, which its last line shows.",
)  # fmt: skip
@click.option("-r", "--reverse", is_flag=True, help="The lowest first.")
@click.option("--once", is_flag=True, help="Measure for one interval, print it and end.")
@click.option(
    "--interval", type=click.FloatRange(min=SHORTEST_S), default=1.0, show_default=True,
    metavar="SECONDS",
)  # fmt: skip
@json_option
@connected
async def top(
    settings: Settings,
    client: DSecClient,
    ids: tuple[str, ...],
    label: tuple[str, ...],
    sort: str,
    reverse: bool,
    once: bool,
    interval: float,
) -> int:
    """Show what sandboxes use, the heaviest first, and what the host has promised.

    With --json one object per interval, on a line. Without a terminal as with --once.
    """
    chosen = [await client.connect(name) for name in ids]
    reader = Reader(client, execute.pairs(label, "--label"), chosen)
    view = View(sort, reverse)
    console = Console(highlight=False)
    if settings.json or once or not console.is_terminal:
        await _print(reader, view, interval, as_json=settings.json, once=once or not settings.json)
    else:
        await _watch(reader, view, interval, console)
    return 0


async def _print(reader: Reader, view: View, interval: float, *, as_json: bool, once: bool) -> None:
    before = await reader.read()
    while True:
        await asyncio.sleep(interval)
        after = await reader.read()
        found = rows(before, after)
        if as_json:
            output.json({"host": after.host, "sandboxes": ordered(found, view)})
        else:
            output.show(picture(after.host, found, view))
        if once:
            return
        before = after


async def _watch(reader: Reader, view: View, interval: float, console: Console) -> None:
    """Read in one task, draw in another: keys are answered while thousands are being asked."""
    before, after = Reading(), await reader.read()
    changed = asyncio.Event()

    async def follow() -> None:
        nonlocal before, after
        while True:
            await asyncio.sleep(interval)
            before, after = after, await reader.read()
            changed.set()

    def typed(text: str) -> None:
        view.press(text)
        changed.set()

    following = asyncio.create_task(follow())
    following.add_done_callback(lambda task: changed.set())
    try:
        with (
            Live(console=console, screen=True, auto_refresh=False) as live,
            terminal.keys(typed),
            terminal.on_resize(changed.set),
        ):
            while not (view.ended or following.done()):
                shown = picture(after.host, rows(before, after), view, console.height)
                live.update(shown, refresh=True)
                await changed.wait()
                changed.clear()
        if following.done():
            following.result()  # only an error ends it
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
