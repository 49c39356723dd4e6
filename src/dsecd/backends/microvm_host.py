"""The shared means of all microVMs of this host: monitor, guest kernel, layers' files, disks."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import tempfile
from pathlib import Path

from dsecd.backends.abc import Layers
from dsecd.backends.microvm_saved import SavedMachines
from dsecd.backends.microvm_template import Templates, key_of
from dsecd.backends.spec import Spec
from dsecd.backends.vm_jail import JailImage
from dsecd.config import Config
from dsecd.host import binaries, ext4, kvm, shell
from dsecd.host.qemu import Qemu
from dsecd.host.vm_plan import Accel, Vmm, VmPlan
from dsecd.images.flat_cache import FlatLayers
from dsecd.images.guest import COMMAND_LINE
from dsecd.images.initramfs import initramfs
from libdsec.errors import Unsupported

logger = logging.getLogger("dsecd.microvm")
MIB = 1 << 20


class MicroVMHost:
    """Made from the configuration; usable after `start`."""

    command_line = COMMAND_LINE

    def __init__(self, config: Config) -> None:
        self._config = config
        self._state = config.state / "vm"
        self.vmm: Vmm = Qemu()
        self.kernel = config.guest_kernel
        self.ping_s = config.vm.ping_s
        self.reporting = config.vm.free_page_reporting
        # what the guest gives up, and nobody is told of, would be of use to nobody
        self.min_age_s = config.vm.damon_min_age_s if self.reporting else 0
        self.initrd = self._state / "initrd"
        self.flats = FlatLayers(self._state / "layers", config.vm.layers_cache_mb * MIB)
        self.templates = Templates(self._state / "templates", config.vm.templates)
        self.saved = SavedMachines(self._state / "saved")
        self.accel: Accel = "tcg"
        self.notes: tuple[str, ...] = ()
        self.jail = JailImage(config.vm.qemu, self._state)

    async def start(self) -> None:
        """Raises `Unsupported` with what is missing."""
        if not self.kernel.is_file():
            raise Unsupported(
                f"no guest kernel at {self.kernel}: scripts/build-guest makes one", reason="kernel"
            )
        self._state.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.jail.program()
        self._choose_accel()
        await asyncio.to_thread(self._write_initrd)
        self.flats.start()
        await asyncio.to_thread(self.templates.start)
        self.saved.start()

    def _choose_accel(self) -> None:
        wanted = self._config.vm.accel
        if wanted == "kvm":
            kvm.check()
        self.accel, remark = ("tcg", kvm.EMULATED) if wanted == "tcg" else kvm.accelerator()
        self.notes = (remark,) if remark else ()

    def _write_initrd(self) -> None:
        init = binaries.find(self._config.paths.init, "dsec-init")
        fd = shell.open_shell(self._config.paths.shell or shell.DEFAULT)
        try:
            static = os.pread(fd, os.fstat(fd).st_size, 0)
        finally:
            os.close(fd)
        content = initramfs(init.read_bytes(), static)
        # by content: guests that an earlier version started go on with theirs
        name = f"initrd-{hashlib.sha256(content).hexdigest()[:16]}"
        self.initrd = self._state / name
        if not self.initrd.exists():
            with tempfile.NamedTemporaryFile(dir=self._state, prefix=".", delete=False) as file:
                file.write(content)
                Path(file.name).chmod(0o444)
                Path(file.name).rename(self.initrd)

    def blank(self, size: int) -> Path:
        """Return an empty disk of `size` bytes, to be copied. Raises what `blank_ext4` does."""
        return ext4.blank_ext4(self._state / "disks", size)

    def checked(self, plan: VmPlan) -> VmPlan:
        """Return `plan`. Raises `InvalidArgument`, `Unsupported` when it cannot be a machine."""
        self.vmm.compile(plan)
        return plan

    def template_key(self, plan: VmPlan, spec: Spec, layers: tuple[str, ...]) -> str:
        """Return the name of what a machine of `plan` can start from."""
        assert spec.vm is not None
        made = (self.jail_image, _identity(self.kernel), self.initrd.name)
        disks = (spec.disk_bytes, spec.vm.data_disk_bytes)
        return key_of(plan, self.vmm, layers, disks, *made)

    async def provide_jail_image(self, layers: Layers) -> str:
        """Return the name of the layer that the monitor's jail has, made when it is not there."""
        return await self.jail.provide(layers)

    @property
    def jail_image(self) -> str:
        """The name of the layer with the monitor, "" until it is there."""
        return self.jail.name

    async def close(self) -> None:
        await self.flats.close()


def _identity(path: Path) -> str:
    """Return what changes when another file takes the place of this one."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return ""
    return f"{found.st_dev} {found.st_ino} {found.st_size} {found.st_mtime_ns}"
