"""Building a layer: the steps of a Dockerfile, done in a sandbox that is then saved.

All of it happens on the client's side with calls that any client can make; the daemon knows nothing
of builds. A build that fails or is cancelled leaves neither a sandbox nor a name.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
import posixpath
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import NamedTuple, TypeAlias

import msgspec

from libdsec import context as contexts
from libdsec import dockerfile as dockerfiles
from libdsec import model, transfer
from libdsec.context import Context, Entry, Ignore, Owner
from libdsec.dockerfile import PROXIES, Copy, Recipe, Run, Workdir
from libdsec.errors import CommandFailed, DSecError, InvalidArgument, NotFound
from libdsec.execution import TextCallback
from libdsec.link import Link
from libdsec.result import CommandResult
from libdsec.sandbox import Sandbox

ROOT = "0"  # a user that exists without /etc/passwd as well
_TAIL = 2000  # characters of a failed command's output that its error shows
_IDLE_S = 600.0  # a build whose client died is stopped after so long


class BuildStep(NamedTuple):
    """A step that begins: `number` of `total`, the `line` it stands on, and its `text`."""

    number: int
    total: int
    line: int
    text: str


StepCallback: TypeAlias = Callable[[BuildStep], None]
Create: TypeAlias = Callable[[model.DSecContainerRunArgs], Awaitable[Sandbox]]
Describe: TypeAlias = Callable[[str], Awaitable[model.LayerInfo]]


class Plan(NamedTuple):
    """What to build, of what, and what is said meanwhile."""

    text: str
    context: Context
    arguments: Mapping[str, str]
    on_output: TextCallback | None
    on_step: StepCallback | None


def read_plan(
    context: Path,
    dockerfile: str,
    arguments: Mapping[str, str],
    on_output: TextCallback | None,
    on_step: StepCallback | None,
) -> Plan:
    """Read the Dockerfile (relative to the context) and what its .dockerignore leaves out."""
    file = context / dockerfile
    try:
        text = file.read_text()
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        raise InvalidArgument(f"there is no Dockerfile {file}", field="dockerfile") from error
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"{file} is not UTF-8 text", field="dockerfile") from error
    ignored = ""
    for name in (file.with_name(f"{file.name}.dockerignore"), context / ".dockerignore"):
        if name.is_file():
            ignored = name.read_text()
            break
    place = Context(context, Ignore(ignored))
    return Plan(text, place, arguments, on_output, on_step)


async def build(
    link: Link, create: Create, describe: Describe, plan: Plan, pack: model.PackArgs,
    limits: model.DSecContainerRunArgs,
) -> model.Packed:  # fmt: skip
    """Build and save. `limits` describes the sandbox but for its image; `pack` the layer."""
    base = dockerfiles.parse(plan.text, plan.arguments).base
    args = msgspec.structs.replace(limits, container_image=base, ttl_running_stop=_IDLE_S)
    async with await create(args) as sandbox:
        config = (await describe(base.removeprefix("docker://"))).config or model.ImageConfig()
        recipe = dockerfiles.parse(plan.text, plan.arguments, _with_path(config))
        await _Builder(link, sandbox, plan).run(recipe)
        packed = await sandbox.pack_diff(
            pack.name, replace=pack.replace, clean=pack.clean, omit=pack.omit, config=recipe.config
        )
    return msgspec.structs.replace(packed, notes=recipe.notes + packed.notes)


def _with_path(config: model.ImageConfig) -> model.ImageConfig:
    """A base that sets no PATH has the usual one, which ``$PATH`` then means."""
    path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    return msgspec.structs.replace(config, env={"PATH": path} | config.env)


class _Builder:
    def __init__(self, link: Link, sandbox: Sandbox, plan: Plan) -> None:
        self._link, self._sandbox, self._plan = link, sandbox, plan
        given = {name: value for name, value in plan.arguments.items() if name in PROXIES}
        ours = {name: os.environ[name] for name in PROXIES if name in os.environ}
        self._proxies = ours | given  # for the commands only, never in the layer
        self._tail = ""

    async def run(self, recipe: Recipe) -> None:
        for number, step in enumerate(recipe.steps, 1):
            if self._plan.on_step is not None:
                self._plan.on_step(BuildStep(number, len(recipe.steps), step.line, str(step)))
            try:
                if isinstance(step, Run):
                    await self._command(step)
                elif isinstance(step, Copy):
                    await self._copy(step)
                else:
                    await self._directory(step)
            except CommandFailed:
                raise
            except DSecError as error:
                where = f"Dockerfile line {step.line}: {step}: {error.message}"
                raise type(error)(where, **error.detail | {"line": step.line}) from error

    # --- RUN

    async def _command(self, step: Run) -> None:
        words = step.command
        argv = ["/bin/sh", "-c", words] if isinstance(words, str) else words
        self._tail = ""
        result = await self._sandbox.run(
            *argv,
            env=self._proxies | step.env,
            cwd=step.workdir,
            user=step.user or None,
            on_stdout=self._hear,
            on_stderr=self._hear,
        )
        # what it left in the background is not to change files under the next step
        await self._sandbox.commands.kill(result.cid)
        await self._sandbox.commands.forget(result.cid)
        if not result.ok:
            raise self._failure(step, result)

    async def _hear(self, text: str) -> None:
        self._tail = (self._tail + text)[-_TAIL:]
        if self._plan.on_output is not None:
            answer = self._plan.on_output(text)
            if inspect.isawaitable(answer):
                await answer

    def _failure(self, step: Run, result: CommandResult) -> CommandFailed:
        message = f"Dockerfile line {step.line}: {step}: command {result.ending}"
        tail = self._tail.strip()
        error = CommandFailed(
            message + (f":\n{tail}" if tail else ""),
            line=step.line, exit_code=result.exit_code, signal=result.signal,
        )  # fmt: skip
        error.result = result
        return error

    # --- WORKDIR and COPY

    async def _directory(self, step: Workdir) -> None:
        await self._make(step.path, step.owner)

    async def _make(self, path: str, owner: str) -> None:
        """Make directory `path`; it and the parents made with it become `owner`'s."""
        files, missing = self._sandbox.files, []
        while path != "/" and not await files.exists(path, user=ROOT):
            missing.append(path)
            path = posixpath.dirname(path)
        for one in reversed(missing):
            await files.make_dir(one, user=ROOT, mode=0o755)
        if owner and missing:
            who = await self._owner(owner)
            for one in missing:
                await files.chown(one, f"{who.uid}:{who.gid}", user=ROOT)

    async def _copy(self, step: Copy) -> None:
        target = step.target.rstrip("/") or "/"
        select = functools.partial(self._plan.context.select, step.sources)
        into = (
            step.target.endswith("/")
            or (len(step.sources) == 1 and self._plan.context.is_directory(step.sources[0]))
            or await self._is_directory(target)
        )
        entries = await asyncio.to_thread(select, into)
        if entries and not entries[0].name:  # one file that gets the target's own name
            target, name = posixpath.split(target)
            entries = [entries[0]._replace(name=name)]
        await self._make(target, step.owner)
        known = await self._known_directories(target, entries)
        entries = [entry for entry in entries if entry.name not in known]
        owner = await self._owner(step.owner)
        args = model.TarArgs(path=os.fsencode(target), user=ROOT)
        pack = functools.partial(contexts.pack, entries, owner, step.mode)
        await transfer.upload_archive(self._link, self._sandbox.id, args, pack)

    async def _is_directory(self, path: str) -> bool:
        try:
            return (await self._sandbox.files.get_info(path, user=ROOT)).type == "dir"
        except NotFound:
            return False

    async def _known_directories(self, target: str, entries: list[Entry]) -> set[str]:
        """Return the directories that exist already: these keep their owner and permissions."""
        known = {""}
        for entry in entries:
            below_known = entry.is_directory and posixpath.dirname(entry.name) in known
            if below_known and await self._is_directory(posixpath.join(target, entry.name)):
                known.add(entry.name)
        return known

    async def _owner(self, text: str) -> Owner:
        """Return the ids of user[:group], by the accounts of the image itself."""
        if not text:
            return Owner(0, 0)
        user, colon, group = text.partition(":")
        if user.isdecimal():
            uid = gid = int(user)
        else:
            uid, gid = await self._account("/etc/passwd", user)
        if colon and group.isdecimal():
            gid = int(group)
        elif colon:
            gid, _ = await self._account("/etc/group", group)
        return Owner(uid, gid)

    async def _account(self, file: str, name: str) -> tuple[int, int]:
        try:
            text = await self._sandbox.files.read(file, user=ROOT)
        except NotFound:
            text = ""
        for line in text.splitlines():
            fields = line.split(":")
            if fields[0] == name and len(fields) > 3:
                numbers = [int(field) if field.isdecimal() else 0 for field in fields[2:4]]
                return numbers[0], numbers[1]
        raise InvalidArgument(f"{name!r} is not in {file} of the image", field="dockerfile")
