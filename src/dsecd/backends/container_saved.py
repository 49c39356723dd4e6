"""Where saved uppers lie on disk: copying and removing them."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

from dsecd import fastpath
from dsecd.backends.container_holding import Saved
from dsecd.host.upper import Upper
from libdsec.errors import Exhausted, Internal


def place(saved: Saved, volume: Upper) -> Path:
    """Return the directory that holds a saved upper only; the first one lies among others."""
    path = Path(saved.path)
    return path if str(path.parent) == volume.dir else path.parent


async def copy_tree(source: Path, target: Path) -> None:
    """Copy the directory `source` into `target` with everything that it has, as cp(1) does.

    Raises `Exhausted`, `Internal`.
    """
    command = ("cp", "-a", "--reflink=auto", "--sparse=auto", "--", str(source), str(target))
    process = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        _, errors = await process.communicate()
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        raise
    if process.returncode:
        text = errors.decode("utf-8", "replace").strip().rpartition("\n")[2]
        kind = Exhausted if "No space left" in text or "quota" in text else Internal
        raise kind(f"the checkpoint cannot be copied: {text}")


def discard(directory: Path) -> None:
    """Remove a saved upper's directory as far as that is possible."""
    with contextlib.suppress(fastpath.StepError):
        fastpath.remove_tree(directory)
