"""Running the parts of a bench one after the other: what fails costs its own figures only."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import TypeVar

from dsec_bench.bench import Context

T = TypeVar("T")
Part = tuple[tuple[str, ...], Callable[[T], None]]  # the figures it gives, and what measures them


def run_parts(
    context: Context,
    parts: Mapping[str, Part[T]],
    make: Callable[[contextlib.ExitStack], T],
    expected: tuple[type[BaseException], ...],
) -> None:
    """Run the chosen parts on what `make` sets up; it is closed with the stack it gets.

    What fails with one of `expected` is reported as absent, with its reason.
    """
    chosen = context.options.parts or tuple(parts)
    context.steps.expect(len(chosen))
    with contextlib.ExitStack() as stack:
        try:
            bed = make(stack)
        except expected as error:
            for figures, _ in parts.values():
                for name in figures:
                    context.report.absent(name, f"nothing to measure: {said(error)}")
            return
        for part in chosen:
            figures, act = parts[part]
            context.steps.now(part)
            try:
                act(bed)
            except expected as error:
                context.steps.note(f"{part}: {said(error)}")
                for name in figures:
                    context.report.absent(name, f"{part}: {said(error)}")
            context.steps.done()


def said(error: BaseException) -> str:
    """Say what went wrong; of a group, the first."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
