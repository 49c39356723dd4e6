"""What a bench is: a function that fills a report, and the names of the figures it promises."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dsec_bench.progress import Steps
from dsec_bench.report import Report


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line chose. `peers` None: all that are known."""

    quick: bool = False
    peers: tuple[str, ...] | None = None
    endpoint: str = ""  # "" → a daemon of the bench's own
    rootfs: Path | None = None  # None → the host's base layer, else a small root of host files
    image: str = "base/debian:12"
    parts: tuple[str, ...] = ()  # () → all parts of the bench


@dataclass(frozen=True, slots=True)
class Context:
    """What a bench works with."""

    options: Options
    report: Report
    steps: Steps


@dataclass(frozen=True, slots=True)
class Bench:
    """An entry of the table in `main`. `figures` are those of SPECIFICATION.md; `parts` can be run
    alone with `--only`; `plot` draws a finished report into a PNG file."""

    name: str
    summary: str
    figures: tuple[str, ...]
    parts: tuple[str, ...]
    run: Callable[[Context], None]
    plot: Callable[[Report, Path], None]
