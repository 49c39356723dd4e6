"""``dsec fncall``: calls of functions in warm workers (docs/fncall.md)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import msgspec

from dsec import completion, execute, output, terminal
from dsec.session import Settings, connected, json_option
from libdsec import DSecClient, DSecFnCallArgs, FnCallResult


@click.group()
def fncall() -> None:
    """Call functions in warm workers."""


@fncall.command()
@click.argument("image", shell_complete=completion.layers)
@click.argument(
    "code", required=False, type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="[FILE.py]",
)  # fmt: skip
@click.option("--entry", default="main", metavar="NAME", help="Function, or module:function.")
@click.option("--input", "given", metavar="JSON", help="The function's argument.")
@click.option(
    "--import", "imports", multiple=True, metavar="MODULE", help="Warmed by the pool; repeatable."
)
@click.option(
    "--toolkit", "toolkits", multiple=True, metavar="LAYER", shell_complete=completion.layers
)
@click.option("--policy", metavar="NAME", help="A preset: what of the network may be reached.")
@click.option("--timeout", type=float, default=60.0, show_default=True, metavar="SECONDS")
@json_option
@connected
async def run(
    settings: Settings,
    client: DSecClient,
    image: str,
    code: Path | None,
    entry: str,
    given: str | None,
    imports: tuple[str, ...],
    toolkits: tuple[str, ...],
    policy: str | None,
    timeout: float,
) -> int:
    """Call the function that FILE.py defines, or one of IMAGE's, and print what it returns.

    What it writes to stdout and stderr goes to ours, behind it the value as JSON.
    """
    args = DSecFnCallArgs(
        container_image=image, code=code.read_text() if code else "", entry=entry,
        input=_value(given), imports=list(imports), toolkits=list(toolkits), policy=policy,
        timeout_s=timeout,
    )  # fmt: skip
    result = await client.run_fncall(args)
    _show(settings, result)
    return execute.exit_code(result)


def _value(text: str | None) -> Any:
    if text is None:
        return None
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise click.BadParameter(f"not JSON: {error}", param_hint="--input") from error


def _show(settings: Settings, result: FnCallResult) -> None:
    if settings.json:
        output.json(
            {
                "value": result.value, "exit_code": result.exit_code, "signal": result.signal,
                "timed_out": result.timed_out, "oom_killed": result.oom_killed,
                "stdout": result.stdout.decode(errors="replace"),
                "stderr": result.stderr.decode(errors="replace"),
                "queued_s": result.queued_s, "run_s": result.run_s,
            }
        )  # fmt: skip
        return
    terminal.write(1, result.stdout)
    terminal.write(2, result.stderr)
    if result.ok:
        terminal.write(1, result.value_json + b"\n")
    elif result.oom_killed:
        click.echo("killed: out of memory", err=True)
    elif result.timed_out:
        click.echo("killed: its time was over", err=True)
