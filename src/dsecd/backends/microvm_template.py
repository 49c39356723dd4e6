"""Templates: microVMs saved when their agent first answered, which later ones start from.

Until `vm.begin` nothing in a guest depends on the sandbox: its layers are not mounted, its upper is
as blank as the next one's, and none but our own code has run in it. So the first machine of an
environment is saved at that point, and goes on. Later ones take up its devices' state and a copy of
its memory, and are told who they are, the time, and fresh randomness as every guest is.

A template is found by all that it depends on, and made under another name, to be renamed when it is
complete. None outlives a start of the host: a file may have been cut then.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import secrets
import shutil
from pathlib import Path

import msgspec

from dsecd.backends.microvm_saved import SavedMachine
from dsecd.host import sparse
from dsecd.host.vm_plan import Machine, Vmm, VmPlan
from libdsec.errors import DSecError

logger = logging.getLogger("dsecd.microvm")


class Templates:
    """Below `directory`, at most `limit` of them; 0: none is made, and every machine boots."""

    def __init__(self, directory: Path, limit: int) -> None:
        self._directory, self._limit = directory, limit
        self._making: set[str] = set()

    def start(self) -> None:
        """Remove what another start of the host left, and what was not completed."""
        boot = sparse.boot_id()
        mark = self._directory / "boot"
        with contextlib.suppress(OSError):
            if not boot or mark.read_text() != boot:
                shutil.rmtree(self._directory)
        if not mark.exists():
            shutil.rmtree(self._directory, ignore_errors=True)
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        mark.write_text(boot)
        for left in self._directory.glob(".*"):
            shutil.rmtree(left)

    def find(self, key: str) -> SavedMachine | None:
        """Return the template `key`, which counts as used now."""
        place = self._directory / key
        try:
            os.utime(place)
        except FileNotFoundError:
            return None
        return SavedMachine(place)

    def wanted(self, key: str) -> bool:
        """Whether a machine that boots is to become the template `key`."""
        return self._limit > 0 and key not in self._making and not (self._directory / key).exists()

    async def make(self, key: str, root: Path, plan: VmPlan, machine: Machine) -> None:
        """Save `machine`, whose agent waits for `vm.begin`, and let it go on.

        What fails is logged: the machine is as good without. Raises only when it cannot go on.
        """
        self._making.add(key)
        place = self._directory / f".{secrets.token_hex(8)}"
        try:
            place.mkdir(mode=0o700)
            await machine.stop()
            try:
                await SavedMachine(place).take(root, plan, machine)
            finally:
                await machine.cont()
            await asyncio.to_thread(self._keep, place, key)
            logger.info("made the template %s of microVMs", key)
        except (DSecError, OSError) as error:
            if isinstance(error, DSecError) and await machine.status() != "running":
                raise
            logger.warning("no template of microVMs was made: %s", error)
        finally:
            self._making.discard(key)
            await asyncio.to_thread(shutil.rmtree, place, ignore_errors=True)

    def _keep(self, place: Path, key: str) -> None:
        place.rename(self._directory / key)
        there = [path for path in self._directory.iterdir() if len(path.name) == len(key)]
        there.sort(key=lambda path: path.stat().st_mtime)
        for oldest in there[: max(0, len(there) - self._limit)]:
            shutil.rmtree(oldest)

    async def forget(self, template: SavedMachine) -> None:
        """Remove one that did not work."""
        await asyncio.to_thread(shutil.rmtree, template.place, ignore_errors=True)


def key_of(
    plan: VmPlan, vmm: Vmm, layers: tuple[str, ...], disks: tuple[int, ...], *made: str
) -> str:
    """Return the name of the template that `plan` may start from.

    `layers` are digests, `disks` sizes, and `made` names what else a saved machine depends on:
    the monitor with all that it loads, guest kernel, initramfs.
    """
    parts = (vmm.name, vmm.compile(plan).argv, layers, disks, made)
    return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()[:32]
