"""What a running container changed, saved as a layer.

The sandbox is frozen while its upper is read, so the layer is one moment of it; what it holds only
in memory is not in it. The chunks go to a file of the host meanwhile, to the store after the thaw.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import msgspec

from dsecd.backends import packing
from dsecd.backends.container_holding import Holding
from dsecd.backends.container_layers import ContainerLayers
from dsecd.backends.container_roots import stack
from dsecd.host import processes
from dsecd.host.cgroup import TreeDriver
from dsecd.images.library import Gate
from dsecd.images.manifest import Config
from dsecd.images.model import Node
from dsecd.images.sources.report import Report
from dsecd.images.sources.sink import Sink
from dsecd.images.sources.upper import read_upper
from libdsec.model import PackArgs, Packed

FD_UPPER = 12  # in dsec-init: the file system that the upper is in
UPPER = "u"  # the upper's directory there


class Subject(msgspec.Struct, frozen=True, kw_only=True):
    """A running container, as far as it takes part."""

    sandbox: str
    pid: int  # of dsec-init
    cgroup: str
    uid_base: int
    layers: tuple[str, ...]  # digests, bottom first
    defaults: Config
    below: tuple[tuple[str, int], ...] = ()  # saved uppers and whose ids they have, oldest first


def subject(holding: Holding) -> Subject:
    """Return a container that runs as what takes part."""
    assert holding.range is not None
    assert holding.cgroup is not None
    return Subject(
        sandbox=holding.sandbox,
        pid=holding.pid,
        cgroup=holding.cgroup.path,
        uid_base=holding.range.uid_base,
        layers=tuple(layer.digest for layer in holding.layers),
        defaults=holding.defaults,
        below=tuple((saved.path, saved.uid_base) for saved in stack(holding.roots)),
    )


def open_upper(subject: Subject) -> int:
    """Return a descriptor of the present upper's directory. The subject must be alive and stay so.

    By the init's descriptor: a checkpoint gives it another upper, on disk in another directory.
    """
    path = processes.descriptor(subject.pid, FD_UPPER) / UPPER
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


class Freeze:
    """Holds a container's processes still; `ms` says for how long, the last time."""

    def __init__(self, driver: TreeDriver, cgroup: str) -> None:
        self._driver, self._cgroup = driver, cgroup
        self.ms = 0.0

    @contextlib.asynccontextmanager
    async def hold(self) -> AsyncIterator[None]:
        begun = time.monotonic()
        try:
            await self._driver.freeze(self._cgroup)
            yield
        finally:
            self.ms = round((time.monotonic() - begun) * 1e3, 3)
            await self._driver.thaw(self._cgroup)


async def pack_diff(
    layers: ContainerLayers, driver: TreeDriver, subject: Subject, args: PackArgs
) -> Packed:
    """Make the layer and name it. Raises what the freeze, the writer and the store raise."""
    freeze = Freeze(driver, subject.cgroup)
    reports: list[Report] = []
    rules = packing.rules(args)

    upper = open_upper(subject)
    gate = Gate()

    def read(sink: Sink) -> Sequence[Node]:
        uppers: list[tuple[Path | int, int]] = [(Path(p), base) for p, base in subject.below]
        uppers.append((upper, subject.uid_base))
        found = [
            read_upper(each, base, sink, residue=rules, check=gate.check) for each, base in uppers
        ]
        reports[:] = [report for _, report in found]
        return [root for root, _ in found]

    base = packing.Base(subject.sandbox, subject.layers, subject.defaults)
    try:
        made = await packing.make_layer(layers.library, base, args, read, gate, freeze.hold)
    finally:
        os.close(upper)
    return packing.packed(made, freeze.ms, reports)
