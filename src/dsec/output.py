"""Tables, JSON and progress on the terminal."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import click
import msgspec
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TransferSpeedColumn,
)
from rich.table import Table
from rich.text import Text

from libdsec import ImportProgress


def plain(value: Any) -> Any:
    """Return `value` with only JSON types; bytes become text (``surrogateescape`` → U+FFFD)."""
    if isinstance(value, msgspec.Struct):
        return {name: plain(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def json(value: Any) -> None:
    """Print `value` as one line of JSON. Fields are those of `libdsec.model`, all of them."""
    click.echo(msgspec.json.encode(plain(value)))


def error(as_json: bool, code: str, message: str, *, retryable: bool = False) -> None:
    """Print an error to stderr, in one line."""
    if as_json:
        body = {"error": {"code": code, "message": message, "retryable": retryable}}
        click.echo(msgspec.json.encode(body), err=True)
    else:
        click.echo(f"dsec: {message}", err=True)


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Return a table without lines; columns whose name ends in ">" are right-aligned."""
    made = Table(box=None, pad_edge=False, header_style="bold")
    for name in columns:
        right = name.endswith(">")
        made.add_column(name.rstrip(">"), justify="right" if right else "left", overflow="fold")
    for row in rows:
        made.add_row(*map(Text, row))  # names are not markup: they may hold brackets
    return made


def show(*parts: Any) -> None:
    """Print tables or text; not wrapped when the output is not a terminal."""
    console = Console(highlight=False, soft_wrap=False)
    if not console.is_terminal:
        console.width = 10_000
    for part in parts:
        console.print(part, markup=False) if isinstance(part, str) else console.print(part)


@contextmanager
def progress(label: str, total: int | None, *, silent: bool) -> Iterator[Any]:
    """Show a progress bar on stderr; yields a function that takes the bytes done since."""
    console = Console(stderr=True)
    if silent or not console.is_terminal:
        yield lambda size: None
        return
    columns = [SpinnerColumn(), TextColumn("{task.description}"), BarColumn()]
    columns += [DownloadColumn(), TransferSpeedColumn()] if total is not None else []
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as bar:
        task = bar.add_task(label, total=total)
        yield lambda size: bar.advance(task, size)


@contextmanager
def stages(label: str, *, silent: bool) -> Iterator[Callable[[str, int, int], None]]:
    """Show work of several stages; yields a function of stage, bytes done and in all (or 0).

    The bar comes with the first stage.
    """
    console = Console(stderr=True)
    if silent or not console.is_terminal:
        yield lambda stage, done, total: None
        return
    columns = (
        SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), DownloadColumn(),
        TimeElapsedColumn(),
    )  # fmt: skip
    bar = Progress(*columns, console=console, transient=True)
    with contextlib.ExitStack() as shown:
        task = bar.add_task(label, total=None)

        def show(stage: str, done: int, total: int) -> None:
            if not bar.live.is_started:  # nothing is shown of what needs none of it
                shown.enter_context(bar)
            # a source may hold more than its file's size says: an archive that is compressed
            bar.tasks[0].total = total if 0 < done <= total else None  # update() cannot unset it
            bar.update(task, description=f"{label}: {stage}", completed=done)

        yield show


def staged(show: Callable[[str, int, int], None]) -> Callable[[ImportProgress], None]:
    """Return what shows a daemon's progress by the function that `stages` yields."""
    return lambda progress: show(progress.stage, progress.done, progress.total)


def size(count: float) -> str:
    """Return a byte count for people: ``1.5 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def duration(seconds: float) -> str:
    """Return a time span for people: ``2h 5m``."""
    whole = int(max(seconds, 0))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60}s"
    return f"{whole // 3600}h {whole % 3600 // 60}m"


def age(since: float) -> str:
    """Return how long ago the time `since` was."""
    return duration(time.time() - since) if since else "-"
