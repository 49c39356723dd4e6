"""Where the content of files goes while a source is read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from dsecd.images.model import Chunk


class Sink(Protocol):
    """Takes the content of one file after the other and names its chunks.

    Both calls return one entry per 64 KiB of the file, None for a hole. They raise
    `InvalidArgument` when the content ends before `size` bytes.
    """

    def add(self, read: Callable[[int], bytes], size: int) -> list[Chunk | None]:
        """Consume `size` bytes from `read(n)`, which returns fewer than n only at the end."""

    def add_fd(self, fd: int, size: int) -> list[Chunk | None]:
        """Take the first `size` bytes of the open regular file `fd`, whose holes stay holes."""
