"""The bench's end of an arena: starts it, asks it for rounds, and sees that nothing is left."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from dsec_bench import cgroups
from dsec_bench.peers.drivers import PEERS
from dsec_bench.stats import Operation, Round
from dsec_bench.toolchain import compile_c

MAX_OPERATIONS = 200_000  # of one round


class StageError(Exception):
    """The peer could not be set up, or broke; the message says how."""


class Stage:
    """One peer in its arena. `open` may take seconds; `round` measures; `close` cleans up."""

    def __init__(self, peer: str, base: Path, command: Sequence[str] = ("/bin/true",)) -> None:
        self.name = peer
        self.version = ""
        self._base = base
        self._command = list(command)
        self._group = f"{cgroups.own_group()}/{peer}"
        self._process: subprocess.Popen[str] | None = None

    def open(self) -> None:
        """Start the arena and set the peer up. Raises StageError with the reason."""
        reason = PEERS[self.name]().probe()
        if reason:
            raise StageError(reason)
        parameters = {
            "peer": self.name,
            "base": str(self._base.resolve()),
            "command": self._command,
            "load": str(compile_c("load.c")),
            "cgroups": [str(path) for path in cgroups.make(self._group)],
        }
        arena = [sys.executable, "-m", "dsec_bench.peers.arena", json.dumps(parameters)]
        isolate = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        # a session of its own: Ctrl-C must reach us alone, or there is nobody to clean up in order
        self._process = subprocess.Popen(
            [*isolate, *arena],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        answer = self._answer()
        if "ready" not in answer:
            self.close()
            raise StageError(answer.get("error", "the arena ended without a word"))
        self.version = answer["ready"]

    def _answer(self) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        answer: dict[str, Any] = json.loads(line) if line else {}
        return answer

    def _send(self, order: dict[str, Any]) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()

    def round(self, concurrency: int, seconds: float, count: int = MAX_OPERATIONS) -> Round:
        """Run for `seconds` or `count` operations, `concurrency` at a time."""
        try:
            self._send({"concurrency": concurrency, "count": count, "seconds": seconds})
            answer = self._answer()
        except OSError as error:
            raise StageError(f"the arena is gone: {error}") from error
        if "operations" not in answer:
            raise StageError("the arena ended in the middle of a round")
        operations = [
            Operation(worker, start, end, status == 0)
            for worker, start, end, status in answer["operations"]
        ]
        failed = any(not operation.ok for operation in operations) or not operations
        return Round.of(operations, answer["stderr"] if failed else "")

    def close(self) -> None:
        """End the arena with all that runs in it, and remove its cgroups."""
        process, self._process = self._process, None
        if process is not None:
            # --kill-child: the arena's PID 1 dies with unshare, and with it its PID namespace; no
            # daemon in there has anything outside that it would have to put in order
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):
                    assert stream is not None
                    stream.close()
        cgroups.remove(self._group)

    def __enter__(self) -> Stage:
        self.open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


@contextlib.contextmanager
def stages(names: Sequence[str], base: Path) -> Iterator[tuple[list[Stage], dict[str, str]]]:
    """Open a stage for each peer of `names`; yield those that came up, and why others did not."""
    opened: list[Stage] = []
    reasons: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        stack.callback(cgroups.remove, cgroups.own_group())
        for name in names:
            stage = Stage(name, base)
            stack.callback(stage.close)
            try:
                stage.open()
            except StageError as error:
                reasons[name] = str(error)
            else:
                opened.append(stage)
        yield opened, reasons
