"""``dsec audit``: what an agent could exploit, and a policy against it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import click

from dsec import completion, output
from dsec.session import Settings, connected, json_option
from libdsec import DSecClient, DSecContainerRunArgs, NotFound, Sandbox
from libdsec import audit as auditing
from libdsec.audit import RISKS, Report, Risk, Wanted
from libdsec.audit.report import shown
from libdsec.model import ImageConfig


@click.command()
@click.argument("target", metavar="SANDBOX|IMAGE", shell_complete=completion.layers)
@click.option("--workspace", metavar="LAYER", shell_complete=completion.layers)
@click.option(
    "--toolkit", "toolkits", multiple=True, metavar="LAYER", shell_complete=completion.layers,
    help="With IMAGE: the layers stacked on it, as with dsec run.",
)  # fmt: skip
@click.option("--user", "init_user", metavar="USER", help="With IMAGE: who the agent is.")
@click.option(
    "--grader", multiple=True, metavar="PATH", help="A file or directory that the grader uses."
)
@click.option(
    "--answers", multiple=True, metavar="PATTERN",
    help="What the agent must not read; a name without a slash is looked for everywhere.",
)  # fmt: skip
@click.option("--fix-commit", default="", metavar="SHA", help="The commit that solves the task.")
@click.option(
    "--fail-on", type=click.Choice(RISKS),
    help="Exit 1 when something of this risk is found, or some place could not be looked at.",
)  # fmt: skip
@json_option
@connected
async def audit(
    settings: Settings,
    client: DSecClient,
    target: str,
    workspace: str | None,
    toolkits: tuple[str, ...],
    init_user: str | None,
    grader: tuple[str, ...],
    answers: tuple[str, ...],
    fix_commit: str,
    fail_on: Risk | None,
) -> int:
    """Look for what an agent could exploit in a sandbox, or in sandboxes of an image.

    Readable answers and tests, writable paths of the grader, import hooks, commits beyond HEAD,
    credentials, leftovers, services; the riskiest first, and a policy to begin with. Nothing is run
    in the sandbox. An image is looked at in a sandbox of its own without a network.
    """
    wanted = Wanted(grader=grader, answers=answers, fix_commit=fix_commit)
    stack = DSecContainerRunArgs(
        container_image=target, workspace=workspace, toolkits=list(toolkits), init_user=init_user
    )
    async with _opened(settings, client, stack) as sandbox:
        config = await _config(client, sandbox.info.args or stack)
        report = await auditing.audit(sandbox, wanted, target=target, config=config)
    if settings.json:
        output.json(report)
    else:
        _print(report)
    return 1 if fail_on and (report.at_least(fail_on) or report.limits) else 0


@contextlib.asynccontextmanager
async def _opened(
    settings: Settings, client: DSecClient, stack: DSecContainerRunArgs
) -> AsyncIterator[Sandbox]:
    """Yield the sandbox of this name, or one of the image of this name, which ends afterwards."""
    name = stack.container_image
    sandbox = await _living(client, name)
    if sandbox is not None:
        if stack != DSecContainerRunArgs(container_image=name):
            raise click.UsageError("--workspace, --toolkit and --user are for an IMAGE")
        yield sandbox
        return
    with output.stages(f"pulling {name}", silent=settings.json) as show:
        made = await client.run_container(stack, on_progress=output.staged(show))
    async with made:
        yield made


async def _living(client: DSecClient, name: str) -> Sandbox | None:
    with contextlib.suppress(NotFound):
        return await client.connect(name)
    return None


async def _config(client: DSecClient, args: DSecContainerRunArgs) -> ImageConfig:
    """Return what the layers of a sandbox say together; each is put over those below it."""
    whole = ImageConfig()
    for name in (args.container_image, args.workspace, *args.toolkits):
        if not name:
            continue
        with contextlib.suppress(NotFound):  # an image of a registry, or of a checkpoint
            one = (await client.layers.get(name)).config or ImageConfig()
            whole.env = {**whole.env, **one.env}
            whole.workdir = one.workdir or whole.workdir
    return whole


def _print(report: Report) -> None:
    head = f"{shown(report.target)}: {len(report.findings)} findings for an agent that is"
    click.echo(f"{head} {report.agent}, in {report.entries} files and directories")
    if report.findings:
        rows = (
            (found.risk, found.kind, shown(found.path), _why(found.reason, found.evidence))
            for found in report.findings
        )
        click.echo()
        output.show(output.table(("RISK", "KIND", "PATH", "WHY"), rows))
    for limit in (*report.limits, *report.omitted):
        click.echo(f"note: {shown(limit)}", err=True)
    click.echo(f"\n{report.policy}", nl=False)


def _why(reason: str, evidence: str) -> str:
    return f"{reason} [{shown(evidence)}]" if evidence else reason
