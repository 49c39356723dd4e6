"""Who needs a saved upper: it goes with its last user, also when a removal fails at first."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dsecd.backends import container_checkpoints
from dsecd.backends.container_checkpoints import Checkpoints
from dsecd.backends.container_holding import Checkpoint, Holding, Pending, Roots, Saved
from dsecd.backends.container_roots import find, note, unneeded
from dsecd.host.upper import Upper
from libdsec.errors import Internal, NotFound


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


def point(name: str, *stack: str) -> Checkpoint:
    return Checkpoint(id=name, stack=stack, method="swap", created_at=1.0)


def test_what_something_stands_on_is_needed() -> None:
    saved = [Saved(path, 0) for path in ("a", "b", "c", "d", "e")]
    roots = Roots(saved=saved, stack=("a",), checkpoints=[point("c1", "a", "b")])
    assert [one.path for one in unneeded(roots)] == ["c", "d", "e"]
    roots.pending = Pending(mount_ns=1, stack=("a", "c"), upper_dir="")
    assert [one.path for one in unneeded(roots)] == ["d", "e"]


def test_an_id_is_not_used_again() -> None:
    roots = Roots(checkpoints=[point("c1"), point("c2")])  # of a journal that did not count
    assert note(roots, (), "swap").id == "c3"
    roots.checkpoints.remove(find(roots, "c3"))
    assert note(roots, (), "swap").id == "c4"
    with pytest.raises(NotFound, match="no checkpoint 'c3'; there are: c1, c2, c4"):
        find(roots, "c3")


@pytest.fixture
def discarded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    monkeypatch.setattr(container_checkpoints, "discard", lambda path: found.append(str(path)))
    return found


async def test_a_deleted_checkpoint_gives_back_what_only_it_needed(
    checkpoints: Checkpoints, volumes: Volumes, discarded: list[str]
) -> None:
    box = holding("box", [])
    box.roots.saved = [Saved(f"/volume/box/{at}u", 0, box.upper) for at in ("", "1/", "2/")]
    first, second, third = (saved.path for saved in box.roots.saved)
    box.roots.stack = (first, second)
    box.roots.checkpoints = [point("c1", first), point("c2", first, second, third)]
    checkpoints.hold(box)
    seen: list[tuple[list[str], int]] = []

    async def save() -> None:
        names = [each.id for each in box.roots.checkpoints]
        seen.append((names, len(discarded)))

    await checkpoints.delete(box, "c2", save)
    assert seen == [(["c1"], 0), (["c1"], 1)]  # the journal knows before anything goes
    assert discarded == ["/volume/box/2"]
    await checkpoints.delete(box, "c1", save)
    assert discarded == ["/volume/box/2"]  # the present files stand on the others
    box.roots.stack = ()
    assert await checkpoints.tidy(box)
    assert discarded == ["/volume/box/2", "/volume/box/u", "/volume/box/1"]
    assert volumes.removed == []
    assert checkpoints.kept_volumes() == {"/volume/box"}


async def test_a_deletion_that_is_not_journalled_has_not_happened(
    checkpoints: Checkpoints, discarded: list[str]
) -> None:
    box = holding("box", [])
    box.roots.saved = [Saved("/volume/box/u", 0, box.upper)]
    box.roots.checkpoints = [point("c1", "/volume/box/u")]
    checkpoints.hold(box)

    async def save() -> None:
        raise Internal("the journal cannot be written")

    with pytest.raises(Internal):
        await checkpoints.delete(box, "c1", save)
    assert find(box.roots, "c1")
    assert discarded == []


async def test_the_last_branch_takes_a_saved_upper_from_its_origins_directory(
    checkpoints: Checkpoints, volumes: Volumes, discarded: list[str]
) -> None:
    origin = holding("origin", [])
    branch = holding("branch", [Saved("/volume/origin/1/u", 0, origin.upper)])
    for each in (origin, branch):
        checkpoints.hold(each)
    await checkpoints.let_go(branch)
    assert discarded == ["/volume/origin/1"]
    assert volumes.removed == ["/volume/branch"]
