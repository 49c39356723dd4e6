"""A shell in the sandbox whose state persists from command to command."""

from __future__ import annotations

from types import TracebackType

from libdsec import execution, model
from libdsec.commands import exec_args
from libdsec.execution import TextCallback, text_sink
from libdsec.link import Link
from libdsec.result import CommandResult


class Session:
    """A session: its working directory, variables and functions outlive each command.

    Commands of one session run one after another. Closing it kills every process it started.
    """

    def __init__(self, link: Link, sandbox_id: str, name: str) -> None:
        self._link = link
        self._sandbox_id = sandbox_id
        self._name = name

    @property
    def name(self) -> str:
        """The session's name, unique in its sandbox."""
        return self._name

    async def run(
        self,
        command: str | bytes,
        *,
        timeout: float | None = None,
        check: bool = False,
        on_stdout: TextCallback | None = None,
        on_stderr: TextCallback | None = None,
    ) -> CommandResult:
        """Run a shell command in the session. See `Sandbox.run_shell`.

        Directory, variables and user are the session's own: change them with shell commands.
        `session_ended` in the result says that the command ended the session's shell (``exit``).
        """
        args = exec_args(command, timeout=timeout, session=self._name)
        result = await execution.run(
            self._link,
            self._sandbox_id,
            args,
            stdout=text_sink(on_stdout),
            stderr=text_sink(on_stderr),
        )
        return result.check() if check else result

    async def close(self) -> None:
        """End the session and kill every process it started. Closing twice is no error."""
        args = model.SessionArgs(name=self._name)
        await execution.quietly(
            self._link.call("session.close", args, type(None), target=self._sandbox_id, retry=True)
        )

    async def __aenter__(self) -> Session:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()
