"""Who needs a saved upper: it goes with its last user, also when a removal fails at first."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dsecd.backends.container_checkpoints import Checkpoints
from dsecd.backends.container_holding import Holding, Roots, Saved
from dsecd.host.upper import Upper
from libdsec.errors import Internal


class Volumes:
    """Removes directories, or fails as often as it is told to."""

    def __init__(self) -> None:
        self.removed: list[str] = []
        self.failures = 0

    async def release(self, upper: Upper) -> None:
        if self.failures:
            self.failures -= 1
            raise Internal("busy")
        self.removed.append(upper.dir)


@pytest.fixture
def volumes() -> Volumes:
    return Volumes()


@pytest.fixture
def checkpoints(volumes: Volumes, tmp_path: Path) -> Checkpoints:
    return Checkpoints(cast(Any, SimpleNamespace(uppers=volumes)), tmp_path)


def holding(name: str, saved: list[Saved]) -> Holding:
    made = Holding(name)
    made.upper = Upper(f"/volume/{name}", 0, 1 << 20)
    made.roots = Roots(saved=saved)
    return made


async def test_a_directory_goes_with_its_last_user(
    checkpoints: Checkpoints, volumes: Volumes
) -> None:
    origin = holding("origin", [])
    origin.roots.saved.append(Saved("/volume/origin/u", 0, origin.upper))
    branch = holding("branch", list(origin.roots.saved))
    for each in (origin, branch):
        checkpoints.hold(each)
    await checkpoints.let_go(origin)
    assert volumes.removed == []
    assert checkpoints.kept_volumes() == {"/volume/origin", "/volume/branch"}
    await checkpoints.let_go(branch)
    assert volumes.removed == ["/volume/origin", "/volume/branch"]
    assert checkpoints.kept_volumes() == set()


async def test_a_removal_that_is_tried_again_takes_nothing_from_others(
    checkpoints: Checkpoints, volumes: Volumes
) -> None:
    origin = holding("origin", [])
    shared = Saved("/volume/origin/u", 0, origin.upper)
    branches = [holding(f"branch{n}", [shared]) for n in range(2)]
    for each in branches:
        checkpoints.hold(each)
    volumes.failures = 3
    for _ in range(3):
        with pytest.raises(Internal):
            await checkpoints.let_go(branches[0])
    await checkpoints.let_go(branches[0])
    assert volumes.removed == ["/volume/branch0"]
    assert "/volume/origin" in checkpoints.kept_volumes()
    await checkpoints.let_go(branches[1])
    assert volumes.removed == ["/volume/branch0", "/volume/origin", "/volume/branch1"]


def test_a_container_that_was_never_made_needs_nothing(checkpoints: Checkpoints) -> None:
    never = holding("never", [Saved("/saved", 0)])
    checkpoints.hold(never)
    checkpoints.forget(never)
    assert checkpoints.kept_volumes() == set()
    assert never.roots == Roots()
