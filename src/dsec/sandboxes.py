"""``dsec run``, ``ps``, ``stop``: sandboxes come and go."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import click
import msgspec

from dsec import completion, execute, output, policy
from dsec.session import Settings, connected, json_option, report
from libdsec import (
    CpuClass,
    DSecClient,
    DSecContainerRunArgs,
    DSecError,
    DSecFullVMRunArgs,
    DSecMicroVMRunArgs,
    Sandbox,
    SandboxInfo,
)
from libdsec.model_vm import DiskBus, Firmware, VmLayers


def secrets_of(
    context: click.Context, parameter: click.Parameter, file: str | None
) -> dict[str, dict[str, str]] | None:
    """Read ``--secrets``: not on a command line, which every user of the host can see."""
    if file is None:
        return None
    try:
        return msgspec.toml.decode(Path(file).read_bytes(), type=dict[str, dict[str, str]])
    except (OSError, msgspec.DecodeError) as error:
        raise click.BadParameter(f"{file}: {error}") from error


def text_of(context: click.Context, parameter: click.Parameter, file: str | None) -> str | None:
    """Read the text of a file."""
    try:
        return None if file is None else Path(file).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise click.BadParameter(f"{file}: {error}") from error


_LIMITS: tuple[Callable[..., Any], ...] = (
    click.option("-m", "--memory", "memory_limit_mb", type=int, metavar="MB"),
    click.option("-c", "--cpus", "cpu_cores_limit", type=float, metavar="CORES"),
    click.option("--vcpus", type=int, metavar="COUNT", help="Processors of a VM."),
    click.option("--cpu-class", type=click.Choice(get_args(CpuClass)),
                 help="Who goes first when CPUs are short."),
    click.option("--pids", "pids_limit", type=int, metavar="COUNT"),
    click.option("--disk", "disk_limit_mb", type=int, metavar="MB"),
    click.option("--upper", type=click.Choice(["auto", "memory", "disk"])),
    click.option("--layers", type=click.Choice(get_args(VmLayers)),
                 help="How layers get into a microVM: mapped, or as disks."),
    click.option("--data-disk", "data_disk_mb", type=int, metavar="MB",
                 help="A second, empty disk of a microVM."),
    click.option("--firmware", type=click.Choice(get_args(Firmware)),
                 help="What starts the disk of a full VM."),
    click.option("--disk-bus", type=click.Choice(get_args(DiskBus)),
                 help="How a full VM sees its disk."),
    click.option("--user-data", metavar="FILE", callback=text_of,
                 help="For cloud-init in a full VM."),
    click.option("--ttl", "ttl_running_stop", type=float, metavar="SECONDS",
                 help="Stop it after so long without a call."),
    click.option("--max-lifetime", "max_lifetime_s", type=float, metavar="SECONDS"),
    click.option("--network", type=click.Choice(["none", "nat"])),
    click.option("--policy", metavar="FILE|PRESET", callback=policy.option,
                 help="What it may reach and do; see dsec policy."),
    click.option("--secrets", metavar="FILE", callback=secrets_of,
                 help="TOML, a table per host: headers that are added outside of the sandbox."),
    click.option("--strict", is_flag=True, default=None,
                 help="Make none unless the host enforces all of it."),
    click.option("--user", "init_user", metavar="USER"),
    click.option("-w", "--workdir", metavar="DIR"),
    click.option("--hostname", metavar="NAME"),
    click.option("--no-new-privileges", is_flag=True, default=None),
    click.option("--output-limit", "output_limit_mb", type=int, metavar="MB"),
    click.option("--spool-limit", "spool_limit_mb", type=int, metavar="MB"),
)  # fmt: skip


def _limit_options(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in reversed(_LIMITS):
        command = option(command)
    return command


@click.command(context_settings=execute.passing_arguments)
@click.argument("image", shell_complete=completion.layers)
@click.argument(
    "argv", nargs=-1, metavar="[COMMAND...]", type=click.UNPROCESSED,
    callback=execute.command_words,
)  # fmt: skip
@click.option(
    "--workspace", metavar="LAYER", shell_complete=completion.layers, help="Stacked on IMAGE."
)
@click.option(
    "--toolkit", "toolkits", multiple=True, metavar="LAYER", shell_complete=completion.layers,
    help="Stacked on these; may be repeated.",
)  # fmt: skip
@click.option("--microvm", is_flag=True, help="With a kernel of its own, not as a container.")
@click.option("--fullvm", is_flag=True, help="Boot the disk image IMAGE of the host.")
@click.option("--rm", is_flag=True, help="Stop the sandbox when COMMAND has ended.")
@click.option("-i", "--interactive", is_flag=True, help="Pass our stdin to COMMAND.")
@click.option("-t", "--tty", is_flag=True, help="Give COMMAND (default: a shell) a terminal.")
@click.option("-e", "--env", multiple=True, metavar="NAME=VALUE")
@click.option("-l", "--label", multiple=True, metavar="NAME=VALUE")
@click.option("--allow", multiple=True, metavar="SERVICE", help="Network rule, e.g. pypi.")
@click.option("--deny", multiple=True, metavar="SERVICE")
@click.option(
    "--timeout", type=float, metavar="SECONDS",
    help="For the creation, with the pull of IMAGE. [default: the daemon's, without it]",
)  # fmt: skip
@_limit_options
@json_option
@connected
async def run(
    settings: Settings,
    client: DSecClient,
    image: str,
    argv: tuple[str, ...],
    workspace: str | None,
    toolkits: tuple[str, ...],
    microvm: bool,
    fullvm: bool,
    rm: bool,
    interactive: bool,
    tty: bool,
    env: tuple[str, ...],
    label: tuple[str, ...],
    allow: tuple[str, ...],
    deny: tuple[str, ...],
    timeout: float | None,
    **limits: Any,
) -> int:
    """Create a sandbox from IMAGE and print its id, or run COMMAND in it.

    The exit code of COMMAND is ours, as with `dsec exec`.
    """
    if settings.json and (tty or interactive):
        raise click.UsageError("--json cannot be combined with -i or -t")
    if rm and not argv and not tty:
        raise click.UsageError("--rm needs a COMMAND or -t: the sandbox would end at once")
    rules = {**dict.fromkeys(allow, True), **dict.fromkeys(deny, False)}
    if microvm and fullvm:
        raise click.UsageError("a sandbox is --microvm or --fullvm")
    layers = {"workspace": workspace, "toolkits": list(toolkits)}
    given = dict(
        **{name: value for name, value in layers.items() if value},
        env=execute.pairs(env, "--env"),
        labels=execute.pairs(label, "--label"),
        network_rules=rules or None,
        **{name: value for name, value in limits.items() if value is not None},
    )
    kind = DSecFullVMRunArgs if fullvm else DSecMicroVMRunArgs if microvm else DSecContainerRunArgs
    _check_kind(given, kind)
    with output.stages(f"pulling {image}", silent=settings.json) as show:
        told = output.staged(show)
        if fullvm:
            sandbox = await client.run_fullvm(DSecFullVMRunArgs(image=image, **given), timeout)
        elif microvm:
            vm = DSecMicroVMRunArgs(image=image, **given)
            sandbox = await client.run_microvm(vm, timeout, on_progress=told)
        else:
            container = DSecContainerRunArgs(container_image=image, **given)
            sandbox = await client.run_container(container, timeout, on_progress=told)
    if not argv and not tty:
        _announce(settings, sandbox)
        return 0
    try:
        return await _run_in(settings, sandbox, argv, interactive, tty, keep=not rm)
    finally:
        if rm:
            await sandbox.kill()


_KINDS: dict[type[msgspec.Struct], str] = {
    DSecContainerRunArgs: "a container", DSecMicroVMRunArgs: "a microVM (--microvm)",
    DSecFullVMRunArgs: "a full VM (--fullvm)",
}  # fmt: skip


def _check_kind(given: dict[str, Any], wanted: type[msgspec.Struct]) -> None:
    """Refuse options of other kinds of sandboxes."""
    for parameter in run.params:
        name = parameter.name
        if name in given and name not in wanted.__struct_fields__:
            kinds = [text for kind, text in _KINDS.items() if name in kind.__struct_fields__]
            raise click.UsageError(
                f"{parameter.opts[-1]} is of {' or '.join(kinds)}, not of {_KINDS[wanted]}"
            )


def _announce(settings: Settings, sandbox: Sandbox) -> None:
    if settings.json:
        output.json(sandbox.info)
        return
    click.echo(sandbox.id)
    for note in sandbox.info.notes:
        click.echo(f"note: {note}", err=True)


async def _run_in(
    settings: Settings,
    sandbox: Sandbox,
    argv: tuple[str, ...],
    interactive: bool,
    tty: bool,
    *,
    keep: bool,
) -> int:
    if settings.json:
        result = await sandbox.run(*argv)
        output.json({"sandbox": sandbox.info, "result": execute.result_json(result)})
        return execute.exit_code(result)
    for note in sandbox.info.notes:
        click.echo(f"note: {note}", err=True)
    result = await execute.run_argv(sandbox, argv, interactive=interactive, tty=tty)
    execute.explain(result)
    if keep:
        click.echo(f"dsec: sandbox {sandbox.id} goes on; end it with dsec stop", err=True)
    return execute.exit_code(result)


@click.command()
@click.option("-a", "--all", "all_", is_flag=True, help="Also those that ended.")
@click.option("-q", "--quiet", is_flag=True, help="Only the ids.")
@click.option("-l", "--label", multiple=True, metavar="NAME=VALUE")
@json_option
@connected
async def ps(
    settings: Settings, client: DSecClient, all_: bool, quiet: bool, label: tuple[str, ...]
) -> int:
    """List sandboxes."""
    infos = await client.list_sandboxes(labels=execute.pairs(label, "--label"), all=all_)
    if settings.json:
        output.json(infos)
    elif quiet:
        for info in infos:
            click.echo(info.id)
    else:
        columns = (
            "SANDBOX", "IMAGE", "BACKEND", "STATE", "AGE>", "EXPIRES>", "ADDRESS", "LABELS",
        )  # fmt: skip
        output.show(output.table(columns, (_row(info) for info in infos)))
    return 0


def _row(info: SandboxInfo) -> tuple[str, ...]:
    state = f"{info.state} ({info.reason})" if info.reason else info.state
    left = "-" if info.expires_at is None else output.duration(info.expires_at - time.time())
    labels = ",".join(f"{name}={value}" for name, value in sorted(info.labels.items()))
    return (
        info.id, info.image, info.backend, state, output.age(info.created_at), left,
        info.address or "-", labels,
    )  # fmt: skip


@click.command()
@click.argument("sandbox_ids", nargs=-1, metavar="SANDBOX...", shell_complete=completion.sandboxes)
@click.option("-a", "--all", "all_", is_flag=True, help="Every sandbox that runs.")
@json_option
@connected
async def stop(
    settings: Settings, client: DSecClient, sandbox_ids: tuple[str, ...], all_: bool
) -> int:
    """Stop sandboxes and give back what they hold."""
    if bool(sandbox_ids) == all_:
        raise click.UsageError("name the sandboxes to stop, or give --all")
    ids = sandbox_ids or [info.id for info in await client.list_sandboxes()]
    stopped, failed = [], 0
    for name in ids:
        try:
            stopped.append(await (await client.connect(name)).stop())
        except DSecError as error:  # the others are stopped all the same
            report(settings, error)
            failed += 1
        else:
            if not settings.json:
                click.echo(name)
    if settings.json:
        output.json(stopped)
    return 1 if failed else 0
