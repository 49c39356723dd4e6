"""The progress bar of a bench: steps that are counted beforehand, and what runs now."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn


class Steps:
    """Context manager that shows how many of the planned steps are done.

    Writes to stderr, so that a report on stdout stays clean; where stderr is no terminal each
    step is a line.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._bar = Progress(
            TextColumn("{task.description:<44}"),
            BarColumn(),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TimeElapsedColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task: TaskID | None = None

    def __enter__(self) -> Steps:
        self._bar.start()
        self._task = self._bar.add_task("", total=0)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def expect(self, steps: int) -> None:
        """Announce `steps` more steps."""
        assert self._task is not None
        total = self._bar.tasks[self._task].total or 0
        self._bar.update(self._task, total=total + steps)

    def now(self, text: str) -> None:
        """Say what runs now; it counts when `done` is called."""
        assert self._task is not None
        self._bar.update(self._task, description=text)
        if not self._console.is_terminal:
            self._console.print(text, markup=False, highlight=False)

    def done(self, steps: int = 1) -> None:
        """Count `steps` as done."""
        assert self._task is not None
        self._bar.advance(self._task, steps)

    def note(self, text: str) -> None:
        """Print a line above the bar."""
        self._console.print(text, markup=False, highlight=False)
