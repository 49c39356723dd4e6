"""``dsec exec``, ``shell``, ``logs``: commands in a sandbox that exists."""

from __future__ import annotations

import asyncio
import contextlib
import os

import click

from dsec import completion, output, terminal
from dsec.session import Settings, connected, json_option
from libdsec import (
    CommandHandle,
    CommandResult,
    DSecClient,
    DSecError,
    FnCallResult,
    NotFound,
    Sandbox,
)

TIMED_OUT = 124  # as timeout(1)
_QUIET_S = 0.3  # `logs` without --follow ends when a running command is silent for so long

passing_arguments = {"ignore_unknown_options": True, "allow_interspersed_args": False}


def command_words(
    _context: click.Context, _parameter: click.Parameter, words: tuple[str, ...]
) -> tuple[str, ...]:
    """Drop the ``--`` that may stand between our arguments and the command."""
    return words[1:] if words[:1] == ("--",) else words


def exit_code(result: CommandResult | FnCallResult) -> int:
    """Return what a shell would: the exit code, 128 + signal, 124 for a timeout."""
    if result.timed_out:
        return TIMED_OUT
    if result.signal is not None:
        return 128 + result.signal
    return result.exit_code or 0


def pairs(values: tuple[str, ...], option: str) -> dict[str, str]:
    """Turn ``NAME=VALUE`` options into a dict. Raises `click.BadParameter`."""
    found: dict[str, str] = {}
    for value in values:
        name, equals, content = value.partition("=")
        if not name or not equals:
            raise click.BadParameter(f"{value!r} is not NAME=VALUE", param_hint=option)
        found[name] = content
    return found


async def attend(handle: CommandHandle, *, stdin: bool, tty: bool) -> CommandResult:
    """Pass output (and input) through until the command ends; kill it when we are interrupted."""
    feeder = asyncio.create_task(_feed(handle, tty)) if stdin else None
    try:
        async for part in handle:
            terminal.write(part.stream, part.data)
        return await handle.wait()
    except BaseException:
        with contextlib.suppress(DSecError):
            await handle.kill()
        raise
    finally:
        if feeder is not None:
            feeder.cancel()
            await asyncio.gather(feeder, return_exceptions=True)


async def _feed(handle: CommandHandle, tty: bool) -> None:
    try:
        async for data in terminal.stdin_blocks():
            await handle.send_stdin(data)
        if tty:
            await handle.send_stdin(b"\x04")
        else:
            await handle.close_stdin()
    except DSecError:
        return  # the command reads no more: its end is reported by its output


async def on_terminal(
    sandbox: Sandbox,
    argv: tuple[str, ...],
    *,
    user: str | None,
    cwd: str | None,
    env: dict[str, str],
    timeout: float | None = None,
) -> CommandResult:
    """Run `argv` (default: a login shell) on a terminal joined to ours."""
    handle = await sandbox.pty.create(
        terminal.size(), cmd=argv or None, user=user, cwd=cwd, envs=env, timeout=timeout
    )
    pending: set[asyncio.Task[None]] = set()

    def resized() -> None:
        task = asyncio.ensure_future(sandbox.pty.resize(handle.cid, terminal.size()))
        pending.add(task)
        task.add_done_callback(pending.discard)

    with terminal.raw(), terminal.on_resize(resized):
        try:
            return await attend(handle, stdin=True, tty=True)
        finally:
            await asyncio.gather(*pending, return_exceptions=True)


async def run_argv(
    sandbox: Sandbox,
    argv: tuple[str, ...],
    *,
    interactive: bool,
    tty: bool,
    user: str | None = None,
    cwd: str | None = None,
    env: dict[str, str] | None = None,
    timeout: float | None = None,
) -> CommandResult:
    """Run `argv` with our stdout and stderr; forget it afterwards."""
    if tty:
        result = await on_terminal(
            sandbox, argv, user=user, cwd=cwd, env=env or {}, timeout=timeout
        )
    else:
        handle = await sandbox.commands.run(
            argv, True, user=user, cwd=cwd, env=env, timeout=timeout, stdin=interactive
        )
        result = await attend(handle, stdin=interactive, tty=False)
    with contextlib.suppress(DSecError):
        await sandbox.commands.forget(result.cid)
    return result


def explain(result: CommandResult) -> None:
    """Say on stderr what an exit code cannot."""
    if result.timed_out:
        click.echo(f"dsec: killed: timed out after {result.duration_s:.1f} s", err=True)
    elif result.oom_killed:
        click.echo("dsec: killed: out of memory; give the sandbox more with --memory", err=True)
    if result.disk_full:
        click.echo("dsec: the sandbox's disk limit was reached; see --disk", err=True)
    if result.output_truncated:
        total = output.size(result.stdout_total + result.stderr_total)
        click.echo(f"dsec: output was cut off; the command wrote {total}", err=True)


def result_json(result: CommandResult) -> dict[str, object]:
    """Return `result` as `--json` prints it."""
    names = (
        "cid", "exit_code", "signal", "stdout", "stderr", "timed_out", "oom_killed", "disk_full",
        "output_truncated", "stdout_total", "stderr_total", "duration_s",
    )  # fmt: skip
    return {name: getattr(result, name) for name in names}


@click.command("exec", context_settings=passing_arguments)
@click.argument("sandbox_id", metavar="SANDBOX", shell_complete=completion.sandboxes)
@click.argument(
    "argv", nargs=-1, required=True, metavar="COMMAND...", type=click.UNPROCESSED,
    callback=command_words,
)  # fmt: skip
@click.option("-i", "--interactive", is_flag=True, help="Pass our stdin to the command.")
@click.option("-t", "--tty", is_flag=True, help="Give it a terminal (passes stdin, too).")
@click.option("-e", "--env", multiple=True, metavar="NAME=VALUE")
@click.option("-w", "--workdir", metavar="DIR")
@click.option("-u", "--user", metavar="USER")
@click.option("--timeout", type=float, metavar="SECONDS", help="Kill its whole tree after this.")
@click.option("-d", "--detach", is_flag=True, help="Start it in the background; print its id.")
@json_option
@connected
async def exec_(
    settings: Settings,
    client: DSecClient,
    sandbox_id: str,
    argv: tuple[str, ...],
    interactive: bool,
    tty: bool,
    env: tuple[str, ...],
    workdir: str | None,
    user: str | None,
    timeout: float | None,
    detach: bool,
) -> int:
    """Run COMMAND in SANDBOX; its exit code is ours (128 + signal; 124 for a timeout).

    With --json the result is printed as one object instead of the output.
    """
    if settings.json and (tty or interactive):
        raise click.UsageError("--json cannot be combined with -i or -t")
    sandbox = await client.connect(sandbox_id)
    variables = pairs(env, "--env")
    if detach:
        handle = await sandbox.commands.run(
            argv, True, user=user, cwd=workdir, env=variables, timeout=timeout
        )
        if settings.json:
            output.json({"cid": handle.cid, "pid": handle.pid})
        else:
            click.echo(handle.cid)
        return 0
    if settings.json:
        result = await sandbox.run(*argv, user=user, cwd=workdir, env=variables, timeout=timeout)
        output.json(result_json(result))
        return exit_code(result)
    result = await run_argv(
        sandbox, argv, interactive=interactive, tty=tty, user=user, cwd=workdir, env=variables,
        timeout=timeout,
    )  # fmt: skip
    explain(result)
    return exit_code(result)


@click.command()
@click.argument("sandbox_id", metavar="SANDBOX", shell_complete=completion.sandboxes)
@click.option("-e", "--env", multiple=True, metavar="NAME=VALUE")
@click.option("-w", "--workdir", metavar="DIR")
@click.option("-u", "--user", metavar="USER")
@connected
async def shell(
    settings: Settings,
    client: DSecClient,
    sandbox_id: str,
    env: tuple[str, ...],
    workdir: str | None,
    user: str | None,
) -> int:
    """Open an interactive shell in SANDBOX; its exit code is ours."""
    sandbox = await client.connect(sandbox_id)
    variables = {"TERM": os.environ.get("TERM", "xterm-256color"), **pairs(env, "--env")}
    result = await run_argv(
        sandbox, (), interactive=True, tty=True, user=user, cwd=workdir, env=variables
    )
    return exit_code(result)


@click.command()
@click.argument("sandbox_id", metavar="SANDBOX", shell_complete=completion.sandboxes)
@click.argument("cid", required=False, metavar="[COMMAND-ID]")
@click.option("-f", "--follow", is_flag=True, help="Go on until the command ends.")
@json_option
@connected
async def logs(
    settings: Settings, client: DSecClient, sandbox_id: str, cid: str | None, follow: bool
) -> int:
    """Print the output of a command of SANDBOX, from its start.

    Without COMMAND-ID: of the one started last. `dsec events --sandbox` tells what happened to
    the sandbox itself. With --json the commands known to the sandbox are listed.
    """
    sandbox = await client.connect(sandbox_id)
    known = await sandbox.commands.list()
    if settings.json:
        output.json([one for one in known if cid in (None, one.cid)])
        return 0
    if cid is None:
        if not known:
            raise NotFound(f"{sandbox_id} remembers no command; start one with dsec exec -d")
        cid = max(known, key=lambda one: one.started_at).cid
    handle = await sandbox.commands.connect(cid)
    try:
        while (part := await _next(handle, None if follow else _QUIET_S)) is not None:
            terminal.write(*part)
    finally:
        await handle.disconnect()
    return 0


async def _next(handle: CommandHandle, patience_s: float | None) -> tuple[int, bytes] | None:
    try:
        async with asyncio.timeout(patience_s):
            part = await anext(handle)
    except (StopAsyncIteration, TimeoutError):
        return None
    return part.stream, part.data
