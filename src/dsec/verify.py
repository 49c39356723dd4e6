"""``dsec verify``, ``verify-record``, ``verify-key``: grading, and checking what was graded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import click

from dsec import completion, execute, output, terminal
from dsec.session import Settings, connected, json_option, run_reporting
from libdsec import DSecClient, KeptWarning, Record, Verified, check_record


@click.command()
@click.argument("sandbox_id", metavar="SANDBOX", shell_complete=completion.sandboxes)
@click.argument("argv", nargs=-1, required=True, metavar="-- COMMAND...", type=click.UNPROCESSED)
@click.option("--keep", multiple=True, required=True, metavar="PATH", help="What is graded.")
@click.option(
    "--toolkit", "toolkits", multiple=True, metavar="LAYER", shell_complete=completion.layers,
    help="The grader's own files; may be repeated.",
)  # fmt: skip
@click.option("--no-workspace", is_flag=True, help="Leave the sandbox's workspace layer out.")
@click.option("--strict", is_flag=True, help="Refuse files that could change the grader's mind.")
@click.option("-e", "--env", multiple=True, metavar="NAME=VALUE")
@click.option("-w", "--workdir", metavar="DIR")
@click.option("-u", "--user", metavar="USER")
@click.option("--timeout", type=float, metavar="SECONDS", help="Kill the grader after this.")
@click.option(
    "--record", "record_file", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
    help="Write the signed record here.",
)  # fmt: skip
@json_option
@connected
async def verify(
    settings: Settings,
    client: DSecClient,
    sandbox_id: str,
    argv: tuple[str, ...],
    keep: tuple[str, ...],
    toolkits: tuple[str, ...],
    no_workspace: bool,
    strict: bool,
    env: tuple[str, ...],
    workdir: str | None,
    user: str | None,
    timeout: float | None,
    record_file: Path | None,
) -> int:
    """Grade what SANDBOX holds at the kept paths, by COMMAND in a fresh sandbox.

    The exit code of COMMAND is ours, as with `dsec exec`.
    """
    sandbox = await client.connect(sandbox_id)
    out, err = (None, None) if settings.json else (_printer(1), _printer(2))
    verified = await sandbox.verify(
        argv, keep, toolkit=toolkits, timeout_s=timeout, env=execute.pairs(env, "--env"),
        user=user, cwd=workdir, workspace=not no_workspace, strict=strict,
        on_stdout=out, on_stderr=err,
    )  # fmt: skip
    if record_file is not None:
        record_file.write_bytes(verified.signed.to_json() + b"\n")
    _show(settings, verified)
    return execute.exit_code(verified.result)


def _printer(stream: Literal[1, 2]) -> Callable[[str], None]:
    return lambda text: terminal.write(stream, text.encode())


def _show(settings: Settings, verified: Verified) -> None:
    if settings.json:
        result = execute.result_json(verified.result)
        output.json({"result": result, "record": verified.record})
        return
    execute.explain(verified.result)
    _show_warnings(verified.warnings)


def _show_warnings(warnings: list[KeptWarning]) -> None:
    for one in warnings:
        where = one.path or f"{one.count} in all"
        what = f"{one.kind}, left out" if one.dropped else one.kind
        click.echo(f"warning: {what}: {where}", err=True)


@click.command("verify-record")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--key", required=True, metavar="KEY", help="ed25519:…, or a file with it (dsec verify-key)."
)
@json_option
@click.pass_obj
@click.pass_context
def verify_record(context: click.Context, settings: Settings, file: Path, key: str) -> None:
    """Check that the holder of KEY signed the record in FILE. Needs no daemon."""

    async def run() -> int:
        text = Path(key).read_text() if Path(key).is_file() else key
        record = check_record(file.read_bytes(), text)
        if settings.json:
            output.json(record)
        else:
            _describe(record)
        return 0

    context.exit(run_reporting(settings, run))


def _describe(record: Record) -> None:
    ended = f"exit code {record.exit_code}"
    if record.timed_out:
        ended = "timed out"
    elif record.signal is not None:
        ended = f"signal {record.signal}"
    click.echo(f"good signature: sandbox {record.sandbox} on {record.node}, {ended}")
    click.echo(f"kept {record.kept}, toolkits {', '.join(record.toolkits) or 'none'}")
    for path in record.paths:
        click.echo(f"{path.path} {path.kind} {path.sha256 or '-'} {output.size(path.size_bytes)}")
    _show_warnings(record.warnings)


@click.command("verify-key")
@connected
async def verify_key(settings: Settings, client: DSecClient) -> int:
    """Print the public key that the daemon's host signs its records with."""
    key = await client.verify_key()
    output.json({"key": key}) if settings.json else click.echo(key)
    return 0
