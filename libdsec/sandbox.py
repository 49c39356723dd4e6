"""A sandbox, as its user holds it."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, TypeAlias

import msgspec

from libdsec import execution, forward, model, verification
from libdsec.batch import Batch
from libdsec.commands import Commands, Word, encode_word, exec_args
from libdsec.connection import ConnectionLost
from libdsec.display import Display
from libdsec.errors import AlreadyExists, DSecError, Internal, NotFound
from libdsec.execution import TextCallback, text_sink
from libdsec.files import Files
from libdsec.forward import ForwardServer
from libdsec.link import Link
from libdsec.pty import Pty
from libdsec.record import Verified
from libdsec.request import Request
from libdsec.result import CommandResult
from libdsec.session import Session

Checkpoints: TypeAlias = list[model.Checkpoint]


class Sandbox:
    """A running sandbox. As an async context manager it is stopped at the end.

    It lives on the daemon's host, not in this object: dropping the object leaves it running until
    its idle timeout, and `DSecClient.connect` takes it up again by `id`.
    """

    def __init__(self, link: Link, info: model.SandboxInfo) -> None:
        self._link = link
        self._info = info
        self._commands = Commands(link, info.id)
        self._files = Files(link, info.id)
        self._pty = Pty(link, info.id)
        self._display = Display(link, info.id)

    def __repr__(self) -> str:
        return f"<Sandbox {self._info.id} {self._info.state}>"

    @property
    def id(self) -> str:
        """The sandbox's id; it names its daemon too."""
        return self._info.id

    @property
    def info(self) -> model.SandboxInfo:
        """The state last seen; `get_info` asks again."""
        return self._info

    @property
    def commands(self) -> Commands:
        """Commands: run, list, connect, kill, send_stdin."""
        return self._commands

    @property
    def files(self) -> Files:
        """Files: read, write, list, copy, watch."""
        return self._files

    @property
    def pty(self) -> Pty:
        """Terminals."""
        return self._pty

    @property
    def display(self) -> Display:
        """The screen of a full VM: screenshot, click, type, key, scroll."""
        return self._display

    # --- commands

    async def run_shell(
        self,
        command: str | bytes,
        *,
        timeout: float | None = None,
        env: Mapping[str, str] | None = None,
        cwd: Word | None = None,
        user: str | None = None,
        check: bool = False,
        session: str | None = None,
        shell: str | None = None,
        on_stdout: TextCallback | None = None,
        on_stderr: TextCallback | None = None,
        input: str | bytes | None = None,
    ) -> CommandResult:
        """Run `command` in a shell and return its result when the command itself has ended.

        The shell is a bash of the platform's that nothing in the sandbox can change, started as
        ``bash -p``, which reads neither start-up files nor BASH_ENV; `shell` is the path of one in
        the sandbox instead.
        `timeout` (seconds) kills its whole process tree and sets `timed_out`; a child left in the
        background does not hold the call. `env` is merged over the sandbox's; `input` is its
        stdin (otherwise empty). A command of a `session` has the session's own and takes none of
        `env`, `cwd`, `user`, `input`. Non-zero exit raises `CommandFailed` only with `check`.
        Output goes to the callbacks as text while it comes, and into the result. A cancelled call
        kills the command. A restart of the daemon in between is not noticed.
        """
        args = exec_args(
            command, timeout=timeout, env=env, cwd=cwd, user=user, session=session,
            interpreter=shell,
        )  # fmt: skip
        return await self._run(args, check, on_stdout, on_stderr, input)

    async def run(
        self,
        *argv: Word,
        timeout: float | None = None,
        env: Mapping[str, str] | None = None,
        cwd: Word | None = None,
        user: str | None = None,
        check: bool = False,
        on_stdout: TextCallback | None = None,
        on_stderr: TextCallback | None = None,
        input: str | bytes | None = None,
    ) -> CommandResult:
        """Run the program ``argv[0]`` with its arguments, without a shell; see `run_shell`."""
        args = exec_args(argv, timeout=timeout, env=env, cwd=cwd, user=user)
        return await self._run(args, check, on_stdout, on_stderr, input)

    async def _run(
        self,
        args: model.ExecArgs,
        check: bool,
        on_stdout: TextCallback | None,
        on_stderr: TextCallback | None,
        input: str | bytes | None,
    ) -> CommandResult:
        result = await execution.run(
            self._link,
            self.id,
            args,
            stdout=text_sink(on_stdout),
            stderr=text_sink(on_stderr),
            stdin=input.encode() if isinstance(input, str) else input,
        )
        return result.check() if check else result

    async def create_session(
        self,
        name: str | None = None,
        *,
        env: Mapping[str, str] | None = None,
        cwd: Word | None = None,
        user: str | None = None,
        shell: str | None = None,
    ) -> Session:
        """Open a shell session whose state persists. Raises `AlreadyExists` for a taken name.

        `shell` as in `run_shell`.
        """
        args = model.SessionArgs(
            name=name or f"s-{uuid.uuid4().hex[:12]}",
            env=dict(env or {}),
            cwd=None if cwd is None else exec_args([cwd]).argv[0],  # type: ignore[index]
            user=user,
            shell=shell,
        )
        try:
            await self._link.call("session.open", args, type(None), target=self.id)
        except ConnectionLost:
            await self._reopen(args, ours=name is None)
        except asyncio.CancelledError:
            self._link.post("session.close", model.SessionArgs(name=args.name), self.id)
            raise
        return Session(self._link, self.id, args.name)

    async def _reopen(self, args: model.SessionArgs, *, ours: bool) -> None:
        """The answer was lost: a name that we made up and that exists is the session we opened."""
        try:
            await self._link.call("session.open", args, type(None), target=self.id)
        except AlreadyExists:
            if not ours:
                raise

    # --- life

    async def get_info(self) -> model.SandboxInfo:
        """Ask the daemon for the sandbox's state. Raises `NotFound` once it is forgotten."""
        ref = model.SandboxRef(id=self.id)
        self._info = await self._link.call("sandbox.get", ref, model.SandboxInfo, retry=True)
        return self._info

    async def is_running(self) -> bool:
        """Return whether the sandbox runs now, or would when it is called into (paused)."""
        try:
            return (await self.get_info()).state in ("running", "paused")
        except NotFound:
            return False

    async def get_metrics(self) -> model.Metrics:
        """Return what the sandbox uses of memory, CPU, processes, disk and network."""
        ref = model.SandboxRef(id=self.id)
        return await self._link.call("sandbox.metrics", ref, model.Metrics, retry=True)

    async def set_timeout(self, timeout: float | None) -> model.SandboxInfo:
        """Set the idle timeout to `timeout` seconds from now on; None ends it."""
        args = model.SetTimeout(id=self.id, ttl_running_stop=timeout)
        self._info = await self._link.call(
            "sandbox.set_timeout", args, model.SandboxInfo, retry=True
        )
        return self._info

    async def set_cpu_class(self, cpu_class: model.CpuClass) -> model.SandboxInfo:
        """Set who goes first when CPUs are short (docs/density.md); it need not stop for that.

        What the host does not give of it is in the notes of the result.
        """
        args = model.SetCpuClass(id=self.id, cpu_class=cpu_class)
        self._info = await self._link.call(
            "sandbox.set_cpu_class", args, model.SandboxInfo, retry=True
        )
        return self._info

    async def pause(self, target_bytes: int | None = None) -> model.Paused:
        """Have all processes stand still, and page out until `target_bytes` of memory are left.

        Without a target as much goes as can. It stays so, without an idle timeout, until it is
        resumed, which any call into it does by itself; calls that are open wait, and their
        timeouts with them. `max_lifetime_s` runs on. Raises `WrongState`, `Unsupported`.
        """
        args = model.PauseArgs(id=self.id, target_bytes=target_bytes)
        return await self._link.call("sandbox.pause", args, model.Paused, retry=True, timeout_s=0)

    async def resume(self) -> model.SandboxInfo:
        """Let a paused sandbox go on; returns when it answers. Raises `WrongState`."""
        ref = model.SandboxRef(id=self.id)
        self._info = await self._link.call("sandbox.resume", ref, model.SandboxInfo, retry=True)
        return self._info

    async def checkpoint(self) -> model.Checkpoint:
        """Remember the files as they are, to come back to by `rollback` or to `branch` from.

        Takes milliseconds when no process lives in the sandbox; else the changes are copied while
        its processes stand still. Memory of processes is not part of it, but of a microVM it is,
        with all else of the machine. A checkpoint lasts as long as the sandbox, or until it is
        deleted. Raises `Exhausted` when the disk has no room, or too many lie on one another:
        `pack_diff` makes a layer of them.
        """
        ref = model.SandboxRef(id=self.id)
        return await self._link.call("sandbox.checkpoint", ref, model.Checkpoint)

    async def checkpoints(self) -> Checkpoints:
        """Return the sandbox's checkpoints, the oldest first."""
        ref = model.SandboxRef(id=self.id)
        return await self._link.call("sandbox.checkpoints", ref, list[model.Checkpoint], retry=True)

    async def rollback(self, checkpoint: str | model.Checkpoint) -> model.Checkpoint:
        """End every process and session, and put the files back as they were at `checkpoint`.

        A microVM is then all that it was, its processes too. Later checkpoints stay. Raises
        `NotFound`, and `WrongState` while files are transferred or watched.
        """
        name = checkpoint if isinstance(checkpoint, str) else checkpoint.id
        args = model.CheckpointRef(id=self.id, checkpoint=name)
        return await self._link.call("sandbox.rollback", args, model.Checkpoint)

    async def delete_checkpoint(self, checkpoint: str | model.Checkpoint) -> None:
        """Forget a checkpoint; its id is not used again.

        What it saved is freed as soon as nothing stands on it: the present files, another
        checkpoint, a branch. Raises `NotFound`.
        """
        name = checkpoint if isinstance(checkpoint, str) else checkpoint.id
        args = model.CheckpointRef(id=self.id, checkpoint=name)
        await self._link.call("sandbox.delete_checkpoint", args, type(None))

    async def branch(
        self,
        count: int = 1,
        checkpoint: str | model.Checkpoint | None = None,
        *,
        secrets: Mapping[str, dict[str, str] | str] | None = None,
    ) -> Sequence[Sandbox]:
        """Return `count` new sandboxes that begin with this one's files, and go their own ways.

        From `checkpoint`, or from the present; those of a microVM go on with its processes. They
        share all that is not changed, and outlive this sandbox. Limits and options are this one's,
        but for `secrets`, whose values nobody tells: they are given again. Raises the first error,
        and then leaves none.
        """
        if checkpoint is None:
            checkpoint = await self.checkpoint()
        name = checkpoint if isinstance(checkpoint, str) else checkpoint.id
        info = await self._link.call(
            "sandbox.get", model.SandboxRef(id=self.id), model.MicroVMInfo, retry=True
        )
        if info.args is None:
            raise Internal("the daemon did not say what the sandbox is made of")
        args = msgspec.structs.replace(
            info.args,
            from_checkpoint=f"{self.id}/{name}",
            hostname=None,
            secrets=info.args.secrets if secrets is None else dict(secrets),
        )
        wanted = Request(args=args, backend=info.backend, vm=info.vm)
        batch = Batch(self._link, wanted, count, None)
        made: list[Sandbox] = []
        try:
            while (one := await batch.next()) is not None:
                if isinstance(one, DSecError):
                    raise one
                made.append(Sandbox(self._link, one))
        except BaseException:
            batch.abandon()
            for sandbox in made:
                self._link.post("sandbox.stop", model.SandboxRef(id=sandbox.id))
            raise
        return made

    async def pack_diff(
        self,
        name: str,
        *,
        replace: bool = False,
        clean: bool = True,
        omit: Sequence[str] = (),
        config: model.ImageConfig | None = None,
        builder: str = "",
    ) -> model.Packed:
        """Save what was changed since the sandbox began as layer `name`, for further sandboxes.

        Running processes stand still for the `frozen_ms` of the result. What builders leave behind
        (shell histories, caches, logs, /tmp) is left out unless `clean` is false, and so is what
        matches `omit` (relative to the root; ``*``, ``?``, ``**``). `config` sets defaults for
        those sandboxes, over what this one's layers say. Raises `AlreadyExists` when the name is
        taken, unless `replace`.
        """
        args = model.PackArgs(
            id=self.id, name=name, replace=replace, clean=clean, omit=list(omit), config=config,
            builder=builder,
        )  # fmt: skip
        return await self._link.call("sandbox.pack_diff", args, model.Packed, timeout_s=0)

    async def verify(
        self,
        command: str | bytes | Sequence[Word],
        keep: Sequence[Word],
        *,
        toolkit: str | Sequence[str] = (),
        timeout_s: float | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        cwd: Word | None = None,
        workspace: bool = True,
        strict: bool = False,
        on_stdout: TextCallback | None = None,
        on_stderr: TextCallback | None = None,
    ) -> Verified:
        """Grade what the sandbox holds at the paths `keep`, where nothing else of it can reach.

        `command` (shell text for the platform's shell, or an argv) runs in a fresh sandbox: the
        layers that this one began with, the kept paths over them as they are now, and the layers
        `toolkit`, the grader's own, on top. It has no network, the image's environment with `env`
        over it, this sandbox's limits, and sees none of its processes, which stand still while
        their files are read. Without `workspace` its workspace layer is left out.

        The result has the signed record of what was graded. What could make a grader say what the
        agent wants is in its warnings (docs/verify.md); with `strict` such files raise
        `PermissionDenied`. Raises `InvalidArgument` for a path that cannot be kept, `NotFound`,
        `WrongState`, `Exhausted`; a command that fails is a result.
        """
        described = exec_args(command, cwd=cwd)
        args = model.VerifyArgs(
            id=self.id,
            argv=described.argv,
            shell=described.shell,
            keep=[encode_word(path) for path in keep],
            toolkits=[toolkit] if isinstance(toolkit, str) else list(toolkit),
            timeout_s=timeout_s,
            env=dict(env or {}),
            user=user,
            cwd=described.cwd,
            workspace=workspace,
            strict=strict,
        )
        return await verification.run(self._link, args, text_sink(on_stdout), text_sink(on_stderr))

    async def stop(self) -> model.SandboxInfo:
        """Kill everything in the sandbox and give back what it held. Raises `NotFound`."""
        ref = model.SandboxRef(id=self.id)
        self._info = await self._link.call("sandbox.stop", ref, model.SandboxInfo, retry=True)
        return self._info

    async def kill(self) -> bool:
        """Stop the sandbox; False when it is not known any more."""
        return await execution.quietly(self.stop())

    async def __aenter__(self) -> Sandbox:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.kill()

    # --- network and policy

    async def update_network(
        self,
        network_rules: Mapping[str, bool] | None = None,
        *,
        policy: str | Mapping[str, Any] | None = None,
        strict: bool = False,
    ) -> model.SandboxInfo:
        """Put other network rules in force; connections that they do not allow are cut.

        They take the place of those before: ``{"pypi": True}`` opens PyPI and closes all else.
        `policy` is a preset's name or a policy as an object, of which only the network may differ
        from what the sandbox was created with. What the host cannot enforce is in `notes` of the
        result; with `strict` it is an `Unsupported`, and the former rules stay. Raises
        `InvalidArgument`, `WrongState` for a sandbox that was created without a network.
        """
        args = model.UpdateNetwork(
            id=self.id,
            network_rules=None if network_rules is None else dict(network_rules),
            policy=dict(policy) if isinstance(policy, Mapping) else policy,
            strict=strict,
        )
        self._info = await self._link.call(
            "sandbox.update_network", args, model.SandboxInfo, retry=True
        )
        return self._info

    async def policy(self) -> model.SandboxPolicy:
        """Return the policy in force and, entry by entry, what enforces it."""
        ref = model.SandboxRef(id=self.id)
        return await self._link.call("sandbox.policy", ref, model.SandboxPolicy, retry=True)

    async def forward(self, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect to TCP `port` on the sandbox's loopback.

        A refused or broken connection is a `ConnectionResetError` of the reader.
        """
        return await forward.connect(self._link, self.id, port)

    async def forward_server(
        self, local_port: int = 0, port: int | None = None, *, host: str = "127.0.0.1"
    ) -> ForwardServer:
        """Listen on `local_port` (0: any) and forward each connection to `port` in the sandbox."""
        server = ForwardServer(self._link, self.id, local_port if port is None else port)
        await server.start(host, local_port)
        return server
