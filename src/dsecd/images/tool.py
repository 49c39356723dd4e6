"""Programs that fetch sources for us: run to their end, and dead when nobody waits any more."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from libdsec.errors import Unsupported
from libdsec.model_layers import ImportStage

# what a program makes ends up in layers; uvloop has no umask= for children
_USUAL_UMASK = ("/bin/sh", "-c", 'umask 022; exec "$0" "$@"')
_ERRORS_KEPT = 4000  # bytes of a program's standard error
_LOOK_S = 0.5  # between two looks at how much was fetched

Report = Callable[[ImportStage, int, int], None]  # bytes done, and in all or 0; from any thread


def unreported(stage: ImportStage, done: int, total: int) -> None:
    """The `Report` of callers that show no progress."""


class Ended(msgspec.Struct, frozen=True):
    """Exit code, and the end of standard error as text."""

    code: int
    errors: str
    output: str


async def run(command: Sequence[str], env: Mapping[str, str] | None = None) -> Ended:
    """Run a program without input. Raises `Unsupported` when it is not installed."""
    if shutil.which(command[0]) is None:
        raise Unsupported(
            f"this source needs {command[0]}: install the package {command[0]}",
            reason=f"{command[0]} is not installed",
        )
    process = await asyncio.create_subprocess_exec(
        *_USUAL_UMASK, *command, env=env, cwd="/", start_new_session=True,
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        output, errors = await process.communicate()
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        raise
    text = errors[-_ERRORS_KEPT:].decode("utf-8", "replace").strip()
    return Ended(process.returncode or 0, text, output.decode("utf-8", "replace").strip())


@contextlib.asynccontextmanager
async def watched(directory: Path, report: Report) -> AsyncIterator[None]:
    """Report as "fetching" how large `directory` is, while the block fills it."""

    async def look() -> None:
        while True:
            report("fetching", await asyncio.to_thread(_size, directory), 0)
            await asyncio.sleep(_LOOK_S)

    looking = asyncio.create_task(look())
    try:
        yield
    finally:
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)


def _size(directory: Path) -> int:
    total = 0
    for place, _, files in os.walk(directory):
        for name in files:
            with contextlib.suppress(FileNotFoundError):
                total += (Path(place) / name).lstat().st_size
    return total
