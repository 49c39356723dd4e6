"""One audit, from the first directory to the report."""

from __future__ import annotations

import asyncio
import contextlib
import posixpath
from collections.abc import Iterable, Iterator, Mapping

from libdsec.audit import githistory, gitsource, hooks, names, proposal, rights, running, secrets
from libdsec.audit.githistory import Repository
from libdsec.audit.patterns import Pattern
from libdsec.audit.places import Places
from libdsec.audit.report import Finding, Report, Wanted, ranked, shortened
from libdsec.audit.source import Bounds, Source
from libdsec.audit.tree import Agent, Entry, Tree
from libdsec.errors import InvalidArgument, WrongState
from libdsec.model import ImageConfig, SandboxInfo, SandboxPolicy
from libdsec.sandbox import Sandbox

_HEXADECIMAL = frozenset("0123456789abcdef")


async def audit(
    sandbox: Sandbox,
    wanted: Wanted | None = None,
    *,
    target: str = "",
    config: ImageConfig | None = None,
    bounds: Bounds | None = None,
) -> Report:
    """Return what an agent in `sandbox` could exploit; nothing is run in it, nothing changed.

    `wanted` is what the caller knows of the task. `target` names what is audited in the report, the
    sandbox by default; `config` is what its image says of environment and workdir. Takes as long as
    `bounds` allow, for 100,000 files some ten seconds; what was left out is in `Report.limits`.
    Raises `InvalidArgument` for a `wanted` that makes no sense, `NotFound`, `WrongState`.
    """
    wanted = wanted or Wanted()
    _check(wanted)
    info = await sandbox.get_info()
    if info.state != "running":
        raise WrongState(f"sandbox {info.id} is {info.state}; only one that runs can be audited")
    source = Source(sandbox.files, bounds or Bounds())
    agent = await source.agent()
    in_force = await sandbox.policy()
    hidden, fixed = _protected(in_force)
    tree = Tree(await source.walk(), agent, hidden, fixed)
    places = Places(_workdir(info, config))
    contents = await source.read_all(_telling(tree, places))
    env = {**await source.environment(), **_environment(info, config)}
    services = await _services(source, tree)
    repositories = await gitsource.repositories(tree, source)
    found = await asyncio.to_thread(
        lambda: list(judged(tree, places, wanted, contents, env, repositories))
    )
    findings = ranked([*services, *running.network(info.id, in_force), *found])
    kept, cut = shortened(findings)
    name = target or sandbox.id
    policy = proposal.policy(name, findings, hooks.guarded(places, wanted))
    return Report(
        target=name, agent=_who(agent), findings=kept, policy=policy,
        limits=source.limits, omitted=cut, entries=len(tree), read_bytes=source.read_bytes,
    )  # fmt: skip


def judged(
    tree: Tree,
    places: Places,
    wanted: Wanted,
    contents: Mapping[str, bytes],
    env: Mapping[str, str],
    repositories: Iterable[Repository] = (),
) -> Iterator[Finding]:
    """Yield what follows from a tree, contents of some of its files, and an environment. Pure."""
    yield from names.find(tree, places, wanted)
    yield from hooks.find(tree, places, wanted, contents, env)
    yield from rights.find(tree, wanted, env.get("PATH", ""))
    yield from secrets.find(tree, places, contents)
    yield from secrets.in_environment(env)
    for repository in repositories:
        yield from githistory.find(repository, wanted.fix_commit)


def _check(wanted: Wanted) -> None:
    for path in wanted.grader:
        if posixpath.normpath(path) != path or not path.startswith("/"):
            raise InvalidArgument(f"grader path {path!r} is not absolute", field="grader")
    for text in wanted.answers:
        Pattern(text)
    commit = wanted.fix_commit
    if commit and (not 7 <= len(commit) <= 64 or set(commit.lower()) - _HEXADECIMAL):
        raise InvalidArgument(
            f"{commit!r} is no commit: give at least 7 hexadecimal digits", field="fix_commit"
        )


def _protected(in_force: SandboxPolicy) -> tuple[list[Pattern], list[Pattern]]:
    """Return what the sandbox's own policy hides and denies to write, as far as it is enforced."""
    files = (in_force.policy or {}).get("files", {})
    weak = {row.place for row in in_force.rows if row.state != "enforced" and not row.layer}
    hidden = (t for at, t in enumerate(files.get("hide", ())) if f"files.hide[{at}]" not in weak)
    fixed = (
        path
        for at, rule in enumerate(files.get("rules", ()))
        if "write" in rule.get("deny", ()) and f"files.rules[{at}]" not in weak
        for path in rule["paths"]
    )
    return _patterns(hidden), _patterns(fixed)


def _patterns(texts: Iterable[str]) -> list[Pattern]:
    found: list[Pattern] = []
    for text in texts:
        # a form that only the daemon knows: what it covers is reported once more than needed
        with contextlib.suppress(InvalidArgument):
            found.append(Pattern(text))
    return found


def _telling(tree: Tree, places: Places) -> Iterator[tuple[str, int]]:
    """Yield which files to read, and how far; those whose name promises most first."""
    rest: list[Entry] = []
    for entry in tree:
        if entry.type != "file" or not entry.size:
            continue
        if hooks.tells(entry) or secrets.holds_credentials(entry.path):
            yield entry.path, min(entry.size, secrets.MAX_CONTENT)
        elif secrets.may_hold_tokens(entry, places):
            rest.append(entry)
    rest.sort(key=lambda entry: (entry.path.count("/"), entry.size))
    yield from ((entry.path, entry.size) for entry in rest)


def _workdir(info: SandboxInfo, config: ImageConfig | None) -> str:
    asked = info.args.workdir if info.args else None
    return asked or (config.workdir if config else "") or "/"


def _environment(info: SandboxInfo, config: ImageConfig | None) -> dict[str, str]:
    return {**(config.env if config else {}), **(info.args.env if info.args else {})}


async def _services(source: Source, tree: Tree) -> list[Finding]:
    texts = {
        name: (await source.read(f"/proc/net/{name}", 4 << 20) or b"").decode(errors="replace")
        for name in ("tcp", "tcp6", "unix")
    }
    return list(running.sockets((texts["tcp"], texts["tcp6"]), texts["unix"], tree))


def _who(agent: Agent) -> str:
    return "root" if agent.is_root else f"user {agent.uid}"
