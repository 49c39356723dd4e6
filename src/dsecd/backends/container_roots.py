"""Which saved uppers a container's present files, and each of its checkpoints, stand on. Pure."""

from __future__ import annotations

import time

import msgspec

from dsecd.backends.container_holding import Checkpoint, Roots, Saved
from libdsec import model
from libdsec.errors import NotFound


def describe(checkpoint: Checkpoint, took_ms: float = 0.0) -> model.Checkpoint:
    """Return what a user hears of it."""
    return model.Checkpoint(
        id=checkpoint.id,
        method=checkpoint.method,
        created_at=checkpoint.created_at,
        took_ms=round(took_ms, 3),
    )


def note(roots: Roots, stack: tuple[str, ...], method: str) -> Checkpoint:
    """Add a checkpoint that stands on `stack`. An id is never used twice."""
    roots.made = max(roots.made, len(roots.checkpoints)) + 1  # journals of old do not count
    made = Checkpoint(id=f"c{roots.made}", stack=stack, method=method, created_at=time.time())
    roots.checkpoints.append(made)
    return made


def find(roots: Roots, name: str) -> Checkpoint:
    """Return a checkpoint by its id. Raises `NotFound`."""
    for checkpoint in roots.checkpoints:
        if checkpoint.id == name:
            return checkpoint
    known = ", ".join(checkpoint.id for checkpoint in roots.checkpoints) or "none"
    raise NotFound(f"no checkpoint {name!r}; there are: {known}", name=name)


def without_links(saved: Saved) -> Saved:
    """Return it as one that is known to have no file of several names."""
    return msgspec.structs.replace(saved, linked=False)


def stack(roots: Roots) -> list[Saved]:
    """Return the saved uppers below the present one, the oldest first."""
    by_path = {saved.path: saved for saved in roots.saved}
    return [by_path[path] for path in roots.stack]


def branch(roots: Roots, name: str) -> Roots:
    """Return the roots of a sandbox that begins where another one had a checkpoint."""
    target = find(roots, name)
    by_path = {saved.path: saved for saved in roots.saved}
    return Roots(saved=[by_path[path] for path in target.stack], stack=target.stack)


def unneeded(roots: Roots) -> list[Saved]:
    """Return the saved uppers that nothing of this container stands on any more."""
    stacks = [roots.stack, *(checkpoint.stack for checkpoint in roots.checkpoints)]
    if roots.pending is not None:
        stacks.append(roots.pending.stack)
    needed = {path for paths in stacks for path in paths}
    return [saved for saved in roots.saved if saved.path not in needed]
