"""``dsec-bench``: the command line over the table of benches."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import click
from dsec_bench import leftovers, machine
from dsec_bench.bench import Bench, Context, Options
from dsec_bench.create import CREATE
from dsec_bench.density import DENSITY
from dsec_bench.images import IMAGES
from dsec_bench.interrupts import installed
from dsec_bench.peers.drivers import PEERS
from dsec_bench.policy import POLICY
from dsec_bench.progress import Steps
from dsec_bench.report import Report, show
from dsec_bench.vm import VM
from rich.console import Console

PIPE_WIDTH = 130
BENCHES: tuple[Bench, ...] = (CREATE, IMAGES, POLICY, DENSITY, VM)


def execute(bench: Bench, options: Options, json_file: Path | None, plot: Path | None) -> int:
    """Run `bench`, show and write its report. Returns the exit code: 1 when a figure is missing."""
    report = Report(bench.name, bench.figures, machine.describe(), options.quick)
    leftovers.sweep_stale()
    interrupted = False
    with installed(), Steps() as steps:
        try:
            bench.run(Context(options, report, steps))
        except KeyboardInterrupt:
            interrupted = True
    console = Console()
    if not console.is_terminal:
        console = Console(width=PIPE_WIDTH)  # else 80 columns, which cut the tables
    show(report, console)
    if json_file is not None:
        report.write(json_file)
    if plot is not None and report.rows:
        bench.plot(report, plot)
    if interrupted:
        return 130
    return 0 if report.complete else 1


def _command(bench: Bench) -> click.Command:
    """Return the click command of `bench`; all benches take the same options."""

    def run(
        quick: bool,
        json_file: Path | None,
        plot: Path | None,
        peers: str | None,
        endpoint: str,
        rootfs: Path | None,
        image: str,
        only: tuple[str, ...],
    ) -> None:
        chosen = None if peers is None else tuple(filter(None, peers.split(",")))
        unknown = set(chosen or ()) - set(PEERS)
        if unknown:
            raise click.BadParameter(
                f"no such peer: {', '.join(sorted(unknown))}; known: {', '.join(PEERS)}"
            )
        if plot is not None:
            _need_matplotlib()
        options = Options(quick, chosen, endpoint, rootfs, image, only)
        sys.exit(execute(bench, options, json_file, plot))

    file = click.Path(dir_okay=False, path_type=Path)
    decorators: list[Callable[[Callable[..., None]], Callable[..., None]]] = [
        click.option("--quick", is_flag=True, help="Shorter rounds; under five minutes."),
        click.option("--json", "json_file", type=file, help="Write the report here."),
        click.option("--plot", type=file, help="Draw the report into this PNG file."),
        click.option("--peers", help="Comma-separated; default all: " + ", ".join(PEERS)),
        click.option(
            "--endpoint", default="", help="A running daemon; default: one of the bench's own."
        ),
        click.option(
            "--rootfs",
            type=click.Path(exists=True, path_type=Path),
            help="Directory or EROFS image all run on; default: the host's base layer.",
        ),
        click.option(
            "--image", default="base/debian:12", show_default=True, help="Layer of --endpoint's."
        ),
        click.option(
            "--only", multiple=True, type=click.Choice(bench.parts), help="Run these parts alone."
        ),
    ]
    for decorate in decorators:
        run = decorate(run)
    return click.command(bench.name, help=bench.summary)(run)


def _need_matplotlib() -> None:
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError:
        raise click.UsageError("--plot needs matplotlib: pip install 'dsec[bench]'") from None


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Measure DSec, beside its peers, on this machine."""


for _bench in BENCHES:
    main.add_command(_command(_bench))


if __name__ == "__main__":
    main()
