"""The bare C loop with a sandbox's isolation, which no daemon can beat on this machine."""

from __future__ import annotations

from dsec_bench.create.image import Root
from dsec_bench.stats import Round
from dsec_bench.toolchain import ToolchainError


class Floor:
    """The contender "bare C loop"."""

    name = "bare C loop"

    def __init__(self, root: Root) -> None:
        self._root = root

    def open(self) -> None:
        raise ToolchainError("floor.c is missing")

    def round(self, concurrency: int, seconds: float) -> Round:
        raise ToolchainError("floor.c is missing")

    def close(self) -> None: ...
