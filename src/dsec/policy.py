"""``dsec policy``: what a policy means, what enforces it here, and other rules for a sandbox."""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
import tomllib
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, Protocol, TypeVar

import click
from rich.text import Text

from dsec import completion, output
from dsec.session import Settings, connected, json_option, run_reporting
from libdsec import DSecClient, InvalidArgument, PolicyRow, Unavailable
from libdsec.model import (
    CONTAINER,
    MICROVM,
    NetworkMode,
    PolicyAnswer,
    PolicyArgs,
    PolicySummary,
    PolicyTest,
    SandboxInfo,
)

T = TypeVar("T")
Source = str | dict[str, Any]
_SANDBOX = re.compile(r"[a-z0-9]+(-[a-z0-9]+){3}")
_COLOURS = {"enforced": "green", "partly": "yellow", "closed": "yellow", "not enforced": "red"}


def read(text: str) -> Source:
    """Return the policy in a file, or the name of a preset.

    A file has a slash or ends with .toml or .json; "-" is TOML on stdin. Raises `InvalidArgument`,
    `OSError`.
    """
    if text != "-" and "/" not in text and not text.endswith((".toml", ".json")):
        return text
    try:
        data = sys.stdin.read() if text == "-" else Path(text).read_text("utf-8")
        value = json.loads(data) if text.endswith(".json") else tomllib.loads(data)
    except (ValueError, RecursionError) as error:  # of either language, and of UTF-8
        raise InvalidArgument(f"{text}: {error}", field="policy") from error
    if not isinstance(value, dict):
        raise InvalidArgument(f"{text}: a policy is an object", field="policy")
    return value


def option(context: click.Context, parameter: click.Parameter, text: str | None) -> Source | None:
    """Turn the value of ``--policy`` into a policy."""
    try:
        return None if text is None else read(text)
    except (InvalidArgument, OSError) as error:
        raise click.BadParameter(str(error)) from error


class Answers(Protocol):
    """What a client and `_Here` have in common."""

    async def check_policy(self, policy: Source) -> PolicySummary: ...
    async def explain_policy(
        self, policy: Source, *, network: NetworkMode = "none", backend: str = CONTAINER
    ) -> list[PolicyRow]: ...
    async def test_policy(self, questions: list[str], policy: Source) -> list[PolicyAnswer]: ...


class _Here:
    """Answers without a daemon, as one with the same configuration would give them."""

    def __init__(self) -> None:
        try:
            self._api: Any = importlib.import_module("dsecd.api.policies")
            made = importlib.import_module("dsecd.__main__").policies()
            self._policies, self._backends = made
        except ImportError as error:
            raise Unavailable(f"no daemon answers, dsecd is not installed here: {error}") from error

    async def check_policy(self, policy: Source) -> PolicySummary:
        made: PolicySummary = await self._api.check(self._policies, PolicyArgs(policy=policy))
        return made

    async def explain_policy(
        self, policy: Source, *, network: NetworkMode = "none", backend: str = CONTAINER
    ) -> list[PolicyRow]:
        args = PolicyArgs(policy=policy, network=network, backend=backend)
        rows: list[PolicyRow] = await self._api.explain(self._policies, self._backends, args)
        return rows

    async def test_policy(self, questions: list[str], policy: Source) -> list[PolicyAnswer]:
        args = PolicyTest(questions=questions, policy=policy)
        answers: list[PolicyAnswer] = await self._api.test(self._policies, args)
        return answers


def _asking(
    context: click.Context,
    work: Callable[[Answers], Awaitable[int | None]],
    *,
    as_root: bool = False,
) -> None:
    """Run `work` with the daemon, or without one if there is none; its result is the exit code.

    `as_root`: without a daemon the answer has to be tried out, which only root can.
    """
    settings = context.ensure_object(Settings)

    async def run() -> int | None:
        try:
            client = await settings.client().open()
        except Unavailable:
            if settings.endpoint or (as_root and os.geteuid() != 0):
                raise
            return await work(_Here())
        async with client:
            return await work(client)

    context.exit(run_reporting(settings, run))


async def _about(name: str, answer: Coroutine[Any, Any, T]) -> T:
    """Return the answer; what is wrong with a policy is said of its file."""
    try:
        return await answer
    except InvalidArgument as error:
        raise InvalidArgument(f"{name}: {error.message}", **error.detail) from error


@click.group()
def policy() -> None:
    """Policies: what a sandbox may reach and do.

    FILE is a policy in TOML or JSON: a name with a slash, or one that ends with .toml or .json; "-"
    is stdin. PRESET is sealed, grader, swe or open.
    """


@policy.command()
@click.argument("name", metavar="FILE|PRESET")
@json_option
@click.pass_context
def check(context: click.Context, name: str) -> None:
    """Say whether a policy is well-formed, and how large it is."""

    async def work(answers: Answers) -> int:
        found = await _about(name, answers.check_policy(read(name)))
        if context.obj.json:
            output.json(found)
            return 0
        counts = ((found.addresses, "for addresses"), (found.names, "for names"),
                  (found.files, "for files"), (found.system, "for system calls"))  # fmt: skip
        rules = ", ".join(f"{count} {what}" for count, what in counts if count) or "none"
        click.echo(f"{name}: good; {found.entries} entries; rules: {rules}")
        return 0

    _asking(context, work)


@policy.command()
@click.argument("name", metavar="FILE|PRESET|SANDBOX")
@click.option("--network", type=click.Choice(["none", "nat"]), default="none")
@click.option("--microvm", is_flag=True, help="In a microVM, not a container.")
@click.option("--strict", is_flag=True, help="Exit 1 unless all of it is enforced.")
@json_option
@click.pass_context
def explain(
    context: click.Context, name: str, network: NetworkMode, microvm: bool, strict: bool
) -> None:
    """Show for each entry of a policy what enforces it here, or that nothing does.

    For a SANDBOX it is the policy in force. Asks the daemon; without a daemon, root tries what the
    host can do.
    """

    async def work(answers: Answers) -> int:
        if _SANDBOX.fullmatch(name):
            if not isinstance(answers, DSecClient):
                raise Unavailable(f"no daemon answers that could tell about sandbox {name}")
            rows = (await (await answers.connect(name)).policy()).rows
        else:
            backend = MICROVM if microvm else CONTAINER
            answer = answers.explain_policy(read(name), network=network, backend=backend)
            rows = await _about(name, answer)
        output.json(rows) if context.obj.json else _show(rows)
        short = sum(row.state != "enforced" for row in rows)
        if not strict or not short:
            return 0
        message = f"{short} of {len(rows)} entries are not fully enforced here"
        output.error(context.obj.json, "unsupported", message)
        return 1

    _asking(context, work, as_root=True)


def _show(rows: list[PolicyRow]) -> None:
    table = output.table(("RULE", "WHAT", "", "BY", "REMARKS"), ())
    for row in rows:
        table.add_row(
            Text(f"{row.layer}: {row.place}" if row.layer else row.place),
            Text(f"{row.verdict} {row.text}"),
            Text(row.state, _COLOURS[row.state]),
            Text(", ".join(row.by) or "-"),
            Text("; ".join((*row.reasons, *row.remarks))),
        )
    output.show(table)


@policy.command()
@click.argument("name", metavar="FILE|PRESET")
@click.argument("words", metavar="QUESTION...", nargs=-1, required=True)
@click.option(
    "--expect", type=click.Choice(["allow", "deny"]), help="Exit 1 if an answer is another."
)
@json_option
@click.pass_context
def test(context: click.Context, name: str, words: tuple[str, ...], expect: str | None) -> None:
    """Ask what a policy says, and which entries decide. Nothing is tried.

    \b
      dsec policy test swe name pypi.org
      dsec policy test my.toml "tcp 192.0.2.1 443" "read /etc/shadow" "unix @x"

    Questions are: tcp|udp ADDRESS|NAME PORT, icmp ADDRESS|NAME, name NAME, read|write|execute PATH,
    rename PATH PATH, mount TYPE PATH, ioctl REQUEST, unix PATH|@NAME, vsock CID PORT.
    """
    several = any(" " in word for word in words)
    questions = list(words) if several else [" ".join(words)]

    async def work(answers: Answers) -> int:
        found = await _about(name, answers.test_policy(questions, read(name)))
        if context.obj.json:
            output.json(found)
        else:
            for answer in found:
                why = " and ".join(answer.because) or f"{answer.table}.default"
                click.echo(f"{answer.question}: {answer.verdict} by {why}")
        return int(expect is not None and any(answer.verdict != expect for answer in found))

    _asking(context, work)


@policy.command()
@click.pass_context
def schema(context: click.Context) -> None:
    """Print the JSON schema of policies, for editors."""

    async def run() -> int:
        try:
            language: Any = importlib.import_module("dsecd.policy.language")
        except ImportError as error:
            raise Unavailable(f"dsecd is not installed here: {error}") from error
        click.echo(language.schema())
        return 0

    context.exit(run_reporting(context.ensure_object(Settings), run))


@policy.command("set")
@click.argument("sandbox_id", metavar="SANDBOX", shell_complete=completion.sandboxes)
@click.argument("name", metavar="[FILE|PRESET]", required=False)
@click.option("--allow", multiple=True, metavar="SERVICE", help="Network rule, e.g. pypi.")
@click.option("--deny", multiple=True, metavar="SERVICE")
@click.option("--strict", is_flag=True, help="Change nothing unless all of it is enforced.")
@json_option
@connected
async def set_(
    settings: Settings,
    client: DSecClient,
    sandbox_id: str,
    name: str | None,
    allow: tuple[str, ...],
    deny: tuple[str, ...],
    strict: bool,
) -> int:
    """Give SANDBOX other network rules while it runs; what they do not allow is cut.

    They take the place of those before. Files and system calls stay as they were closed when it
    was created.
    """
    rules = {**dict.fromkeys(allow, True), **dict.fromkeys(deny, False)}
    if name is None and not rules:
        raise click.UsageError("give FILE, PRESET, --allow or --deny")
    chosen = None if name is None else read(name)
    sandbox = await client.connect(sandbox_id)
    _announce(settings, await sandbox.update_network(rules or None, policy=chosen, strict=strict))
    return 0


def _announce(settings: Settings, info: SandboxInfo) -> None:
    if settings.json:
        output.json(info)
        return
    click.echo(info.id)
    for note in info.notes:
        click.echo(f"note: {note}", err=True)
