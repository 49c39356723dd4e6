"""``sandbox.pty``: commands on a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from libdsec import commands, execution, model
from libdsec.commands import CommandHandle, Word
from libdsec.execution import DataCallback, data_sink
from libdsec.link import Link

# a login shell: bash where the image has it
_SHELL = (
    b"/bin/sh",
    b"-c",
    b"if [ -x /bin/bash ]; then exec /bin/bash -l; else exec /bin/sh -l; fi",
)


class Pty:
    """The terminals of one sandbox. A terminal is a command: its id is a `cid`."""

    def __init__(self, link: Link, sandbox_id: str) -> None:
        self._link = link
        self._sandbox_id = sandbox_id

    async def create(
        self,
        size: model.PtySize | tuple[int, int] | None = None,
        on_data: DataCallback | None = None,
        *,
        cmd: str | bytes | Sequence[Word] | None = None,
        user: str | None = None,
        cwd: Word | None = None,
        envs: Mapping[str, str] | None = None,
        timeout: float | None = None,
        background: bool = True,
    ) -> CommandHandle:
        """Run `cmd` (default: a login shell) on a new terminal of `size` (rows, columns).

        Output bytes go to `on_data`, or come from iterating the handle.
        """
        args = commands.exec_args(
            _SHELL if cmd is None else cmd,
            timeout=timeout,
            env={"TERM": "xterm-256color", **(envs or {})},
            cwd=cwd,
            user=user,
        )
        args.pty, args.stdin, args.background = _size(size), True, background
        return await commands.start(self._link, self._sandbox_id, args, stdout=data_sink(on_data))

    async def send_input(self, cid: str, data: str | bytes) -> None:
        """Type `data`."""
        raw = data.encode() if isinstance(data, str) else data
        await execution.send_stdin(self._link, self._sandbox_id, cid, raw, eof=False)

    async def resize(self, cid: str, size: model.PtySize | tuple[int, int]) -> None:
        """Tell the terminal its new size (rows, columns)."""
        new = _size(size)
        args = model.ResizeArgs(cid=cid, rows=new.rows, cols=new.cols)
        await self._link.call("exec.resize", args, type(None), target=self._sandbox_id, retry=True)

    async def kill(self, cid: str) -> bool:
        """Kill the terminal's command and all it started. False when there is no such command."""
        return await commands.kill(self._link, self._sandbox_id, cid)


def _size(size: model.PtySize | tuple[int, int] | None) -> model.PtySize:
    if size is None:
        return model.PtySize()
    return size if isinstance(size, model.PtySize) else model.PtySize(rows=size[0], cols=size[1])
