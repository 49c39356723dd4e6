"""Containers under policies, straight from the backend: no API is in between.

A `Box` is a container of busybox, or of the Debian layer; `run` is a command in it, as dsecd would
have its agent run it.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import os
import shutil
import subprocess
import time
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import msgspec

from dsecd.backends.abc import Handle, Instance
from dsecd.backends.container import ContainerBackend
from dsecd.backends.spec import Spec
from dsecd.config import load
from dsecd.engine.request import compile_spec
from dsecd.model import Death
from dsecd.policy import language
from dsecd.policy.compile import Compiled, compile_policy
from libdsec.model import DSecContainerRunArgs, LayerImport
from tests import leaks
from tests.system.daemon import IMAGE, Daemon, make_rootfs
from tests.system.init_harness import InitClient

SETTLE_S = 5.0
PROBE = Path(__file__).with_name("confine_probe.c")


class _Listener:
    """What happens by itself must not happen here."""

    def __init__(self) -> None:
        self.deaths: list[str] = []

    def died(self, sandbox: str, death: Death) -> None:
        self.deaths.append(f"{sandbox}: {death}")

    def oom(self, sandbox: str, kills: int) -> None:
        self.deaths.append(f"{sandbox}: {kills} OOM kills")

    def denied(self, sandbox: str, detail: dict[str, str]) -> None:
        pass


Rules = Compiled | dict[str, Any] | str | None


def policy(value: Rules) -> Compiled | None:
    """Return the policy that is written like this; a text is the name of a preset."""
    if value is None or isinstance(value, Compiled):
        return value
    if isinstance(value, str):
        value = {"extends": value}
    return compile_policy(language.from_object(value))


async def _saved(handle: Handle) -> None:
    """There is no journal to write to."""


class Box:
    """One running container and a connection to its dsec-init."""

    def __init__(self, lab: Lab, instance: Instance, spec: Spec) -> None:
        self.lab, self.handle, self.spec, self.pid = lab, instance.handle, spec, instance.pid
        self.name = instance.handle.sandbox
        self.reconnect()

    def reconnect(self) -> None:
        path = self.lab.place.runtime / "sb" / self.name / "agent.sock"
        self.client = InitClient(str(path))

    def run(self, shell: str | None = None, **args: Any) -> tuple[int, str]:
        """Return the exit code of a command and all that it wrote."""
        result = self.client.run(shell, **args)
        text = (result["stdout"] + result["stderr"]).decode(errors="replace")
        return result["exit_code"], text

    def sh(self, shell: str, **args: Any) -> str:
        """Return what a command that succeeds wrote."""
        code, text = self.run(shell, **args)
        assert code == 0, (shell, code, text)
        return text

    async def checkpoint(self) -> str:
        return (await self.lab.backend.checkpoint(self.handle, _saved)).id

    async def rollback(self, checkpoint: str) -> None:
        await self.lab.backend.rollback(self.handle, checkpoint, _saved)


def _make_base(root: Path, links: dict[str, str], probes: Iterable[str]) -> None:
    make_rootfs(root)
    build = ["cc", "-O1", "-Wall", "-Werror", "-static", str(PROBE), "-o", str(root / "probe")]
    subprocess.run(build, check=True)
    for name in ("a/b/c/f", "a/b/g", "a/h", "data/secret", "data/open"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"content of {name}\n")
    for name in probes:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(root / "probe", root / name)
    for name, target in links.items():
        (root / name).symlink_to(target)


class Lab:
    """A backend of its own prefix; see `open_lab`."""

    def __init__(self) -> None:
        self.place = Daemon()
        self.backend = ContainerBackend(load(self.place.config_file))
        self.listener = _Listener()
        self._numbers = itertools.count(1)

    async def import_base(
        self, *, links: dict[str, str] | None = None, probes: Iterable[str] = ()
    ) -> None:
        """Make the base layer: busybox, /probe and copies of it, things to protect, and `links`."""
        root = self.place.root / "rootfs"
        _make_base(root, links or {}, probes)
        await self.backend.layers().import_(LayerImport(name=IMAGE, source=str(root)))

    async def create(self, rules: Rules, **args: Any) -> Box:
        """Return a new container under a policy; `args` as `DSecContainerRunArgs` has them."""
        name = f"s0-t0-1-{next(self._numbers)}"
        request = DSecContainerRunArgs(**({"container_image": IMAGE} | args))
        spec = msgspec.structs.replace(compile_spec(name, request), policy=policy(rules))
        if not spec.checkpoint:
            await self.backend.locate(spec)
        handle = self.backend.prepare(name, spec)
        try:
            return Box(self, await self.backend.create(handle, spec), spec)
        except BaseException:
            await self.backend.destroy(handle)
            raise

    @contextlib.asynccontextmanager
    async def box(self, rules: Rules, **args: Any) -> AsyncIterator[Box]:
        made = await self.create(rules, **args)
        try:
            yield made
        finally:
            made.client.close()
            await self.backend.destroy(made.handle)
            assert self.listener.deaths == []


@contextlib.asynccontextmanager
async def open_lab(*, base: bool = True, **options: Any) -> AsyncIterator[Lab]:
    """Start a backend, with the base layer; leave nothing, which is looked at in the end."""
    scope = leaks.Scope(
        host=True, own=str(os.getpid()) if os.environ.get("DSEC_LEAKS") == "own" else ""
    )
    before = leaks.take(scope)
    async with _open(base=base, **options) as lab:
        yield lab
    deadline = time.monotonic() + SETTLE_S
    while found := leaks.left_over(before, leaks.take(scope)):
        assert time.monotonic() < deadline, f"left behind: {found}"
        gc.collect()
        await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def _open(*, base: bool, **options: Any) -> AsyncIterator[Lab]:
    lab = Lab()
    try:
        await lab.backend.start(lab.listener)
        try:
            await lab.backend.sweep(())
            if base:
                await lab.import_base(**options)
            yield lab
        finally:
            await lab.backend.close()
    finally:
        await lab.place.close()
