"""dsecd with faults: ``STEP[:N]`` kills it with SIGKILL at the Nth time a step of the engine is
reached; ``fail-each-step`` makes each step of the spawner fail once, in turn; ``before-tidy`` and
``after-tidy`` kill it where the deletion of a checkpoint frees something, ``in-a-copy`` where a
checkpoint was copied, ``in-a-keep`` while what is graded is read, ``in-a-pause`` once all stands
still; ``fail-a-mount`` lets mounts of layers fail. ``only-apparmor`` and ``only-bpf-lsm`` leave out
the other mechanisms for files.

The product has no such switches: this file calls the same `run` with hooks of its own.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
from pathlib import Path

import msgspec

from dsecd import __main__ as entry
from dsecd import config as configuration
from dsecd import fastpath, log
from dsecd.backends import (
    container,
    container_apparmor,
    container_checkpoints,
    container_confine,
    container_keep,
    container_lsm,
)
from dsecd.backends.container_checkpoints import Checkpoints
from dsecd.backends.container_holding import Holding
from dsecd.backends.container_roots import unneeded
from dsecd.host.cgroup_base import TreeDriver
from dsecd.host.plan import STEPS, ContainerPlan
from dsecd.policy import seccomp
from tests.system import known_dsecd


def fail_each_step() -> None:
    """The next plans carry the name of the step that is to fail."""
    left, compile_plan = list(STEPS), container.compile_plan

    def compile_failing(*args: object) -> ContainerPlan:
        plan = compile_plan(*args)  # type: ignore[arg-type]
        return msgspec.structs.replace(plan, fail_step=left.pop(0)) if left else plan

    container.compile_plan = compile_failing  # type: ignore[assignment]


def die_in_a_deletion(after: bool) -> None:
    """SIGKILL when there is something to free, before or after it is."""
    tidy = Checkpoints.tidy

    async def deadly(self: Checkpoints, holding: Holding) -> bool:
        found = bool(unneeded(holding.roots))
        if after:
            await tidy(self, holding)
        if found:
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    Checkpoints.tidy = deadly  # type: ignore[method-assign]


def die_in_a_copy() -> None:
    """SIGKILL when a checkpoint's copy is made and not yet known of."""
    copy = container_checkpoints.copy_tree

    async def deadly(source: Path, target: Path) -> None:
        await copy(source, target)
        os.kill(os.getpid(), signal.SIGKILL)

    container_checkpoints.copy_tree = deadly


def die_in_a_keep() -> None:
    """SIGKILL while the agent stands still and what is graded of it is read."""

    def deadly(*args: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    container_keep.read_kept = deadly  # type: ignore[assignment]


def die_in_a_pause() -> None:
    """SIGKILL when a sandbox is frozen and nothing is journalled yet."""
    freeze = TreeDriver.freeze

    async def deadly(self: TreeDriver, path: str, timeout_s: float = 5.0) -> None:
        await freeze(self, path, timeout_s)
        os.kill(os.getpid(), signal.SIGKILL)

    TreeDriver.freeze = deadly  # type: ignore[method-assign]


def fail_a_mount(order: Path) -> None:
    """Fail the nth call that mounts a layer, when the file `order` says n."""

    def wrap(name: str) -> None:
        real = getattr(fastpath, name)

        def call(*args: object, **options: object) -> object:
            left = int(order.read_text()) if order.exists() else 0
            if left == 1:
                order.unlink()
                raise fastpath.StepError(errno.EIO, f"{name}, told to fail")
            if left:
                order.write_text(str(left - 1))
            return real(*args, **options)

        setattr(fastpath, name, call)

    for name in ("mount_erofs", "open_tree", "move_mount"):
        wrap(name)


# What to put in place of what, so that one mechanism for files is seen alone
ALONE: dict[str, tuple[tuple[object, str, object], ...]] = {
    # no mounts over what a policy closes, no Landlock, no BPF
    "only-apparmor": (
        (container_confine.guards, "for_policy", lambda *_: ()),
        (container_confine.landlock, "for_policy", lambda *_: None),
        (container_lsm.lsm, "concerns", lambda *_: False),
    ),
    # no AppArmor, no calls closed for a policy
    "only-bpf-lsm": (
        (container_apparmor.AppArmor, "start", lambda _: None),
        (container_confine, "_filter", lambda *_, **__: seccomp.command_filter()),
    ),
}


def main() -> int:
    """``crashing_dsecd.py STEP[:N]|FAULT --config FILE``"""
    name, _, nth = sys.argv[1].partition(":")
    left = int(nth or 1)

    def step(reached: str) -> None:
        nonlocal left
        if reached == name:
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    if name == "fail-each-step":
        fail_each_step()
    if name == "fail-a-mount":
        fail_a_mount(Path(sys.argv[3]).with_name("fail-a-mount"))
    for place, attribute, value in ALONE.get(name, ()):
        setattr(place, attribute, value)
    if name == "in-a-copy":
        die_in_a_copy()
    if name == "in-a-keep":
        die_in_a_keep()
    if name == "in-a-pause":
        die_in_a_pause()
    if name in ("before-tidy", "after-tidy"):
        die_in_a_deletion(after=name == "after-tidy")
    known_dsecd.adopt()
    config = configuration.load(Path(sys.argv[3]))
    log.configure(config.log)
    return entry.run(config, keep=False, step=step)


if __name__ == "__main__":
    sys.exit(main())
