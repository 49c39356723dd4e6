"""How a command ended, as the caller sees it."""

from __future__ import annotations

import signal as signals
from dataclasses import dataclass

from libdsec import model
from libdsec.errors import CommandFailed


@dataclass(frozen=True, slots=True)
class CommandResult:
    """A finished command. Exactly one of `exit_code` and `signal` is set.

    `stdout_bytes` and `stderr_bytes` are exactly what the command wrote, up to the sandbox's
    output limit; beyond it `output_truncated` is set and `stdout_total` and `stderr_total` count
    all that was written. `timed_out`, `oom_killed` and `disk_full` are never encoded in
    `exit_code`. A pty's output is in `stdout_bytes`.
    """

    exit_code: int | None = None
    stdout_bytes: bytes = b""
    stderr_bytes: bytes = b""
    signal: int | None = None
    timed_out: bool = False
    oom_killed: bool = False
    disk_full: bool = False
    output_truncated: bool = False
    session_ended: bool = False
    stdout_total: int = 0
    stderr_total: int = 0
    duration_s: float = 0.0
    cid: str = ""

    @property
    def stdout(self) -> str:
        """Standard output as text; invalid UTF-8 becomes U+FFFD."""
        return self.stdout_bytes.decode(errors="replace")

    @property
    def stderr(self) -> str:
        """Standard error as text; invalid UTF-8 becomes U+FFFD."""
        return self.stderr_bytes.decode(errors="replace")

    @property
    def ok(self) -> bool:
        """Whether the command ended by itself with exit code 0."""
        return self.exit_code == 0 and not self.timed_out

    @property
    def ending(self) -> str:
        """How it ended, in words: ``exited with code 3``."""
        if self.timed_out:
            how = f"timed out after {self.duration_s:.1f} s"
        elif self.oom_killed:
            how = "ran out of memory and was killed"
        elif self.signal is not None:
            how = f"was killed by {_signal_name(self.signal)}"
        else:
            how = f"exited with code {self.exit_code}"
        return how + ("; the sandbox's disk limit was reached" if self.disk_full else "")

    def check(self) -> CommandResult:
        """Return self when `ok`. Raises `CommandFailed` otherwise."""
        if self.ok:
            return self
        error = CommandFailed(self._message(), exit_code=self.exit_code, signal=self.signal)
        error.result = self
        raise error

    def _message(self) -> str:
        tail = (self.stderr.strip() or self.stdout.strip())[-500:]
        return f"command {self.ending}" + (f": {tail}" if tail else "")


def _signal_name(number: int) -> str:
    try:
        return signals.Signals(number).name
    except ValueError:
        return f"signal {number}"


def from_model(end: model.CommandResult, stdout: bytes, stderr: bytes) -> CommandResult:
    """Join all output received (`stdout`, `stderr`) with the facts of the reply `end`."""
    return CommandResult(
        exit_code=end.exit_code,
        stdout_bytes=stdout,
        stderr_bytes=stderr,
        signal=end.signal,
        timed_out=end.timed_out,
        oom_killed=end.oom_killed,
        disk_full=end.disk_full,
        output_truncated=end.output_truncated,
        session_ended=end.session_ended,
        stdout_total=max(end.stdout_total, len(stdout)),
        stderr_total=max(end.stderr_total, len(stderr)),
        duration_s=end.duration_s,
        cid=end.cid,
    )
