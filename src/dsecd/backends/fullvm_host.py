"""The shared means of all full VMs of this host: monitor, firmware, disk images, the agent."""

from __future__ import annotations

import re
import shutil
import tempfile
from pathlib import Path

from dsecd.backends.fullvm_plan import Firmware, Image, full_of, seed
from dsecd.backends.spec import Spec
from dsecd.backends.vm_jail import JailImage
from dsecd.config import Config
from dsecd.host import binaries, kvm, qcow2
from dsecd.host import seed as seeds
from dsecd.host.fullvm_plan import DiskFormat
from dsecd.host.qemu_full import FullQemu
from dsecd.host.vm_plan import Accel
from libdsec.errors import InvalidArgument, NotFound, Unsupported

MIB = 1 << 20
_SEED = "seed-"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_FORMATS: dict[str, DiskFormat] = {".qcow2": "qcow2", ".raw": "raw"}
# of Debian's package ovmf, and of others: code and variables
_UEFI = (
    ("/usr/share/OVMF/OVMF_CODE_4M.fd", "/usr/share/OVMF/OVMF_VARS_4M.fd"),
    ("/usr/share/OVMF/OVMF_CODE.fd", "/usr/share/OVMF/OVMF_VARS.fd"),
    ("/usr/share/edk2/x64/OVMF_CODE.4m.fd", "/usr/share/edk2/x64/OVMF_VARS.4m.fd"),
)


class FullVMHost:
    """Made from the configuration; usable after `start`."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._state = config.state / "vm"
        self.images = config.vm_images
        self.vmm = FullQemu()
        self.jail = JailImage(config.vm.qemu, self._state)
        self.ping_s = config.vm.ping_s
        self.accel: Accel = "tcg"
        self.notes: tuple[str, ...] = ()

    def start(self) -> None:
        """Raises `Unsupported` with what is missing."""
        self._state.mkdir(parents=True, exist_ok=True, mode=0o700)
        for left in self._state.glob(f"{_SEED}*"):  # of a daemon that was killed
            shutil.rmtree(left, ignore_errors=True)
        self.jail.program()
        binaries.find(self._config.paths.init, "dsec-init")
        if packages := seeds.missing():
            raise Unsupported(f"apt-get install {packages}", reason="tools of the seed")
        wanted = self._config.vm.accel
        if wanted == "kvm":
            kvm.check()
        self.accel, remark = ("tcg", kvm.EMULATED) if wanted == "tcg" else kvm.accelerator()
        self.notes = (remark,) if remark else ()

    def image(self, spec: Spec) -> Image:
        """Return the image that `spec` names. Raises `NotFound`, `InvalidArgument`."""
        image = self._find(spec.image)
        if spec.disk_bytes < image.disk_bytes:
            raise InvalidArgument(
                f"disk_limit_mb: the disk of {image.name} has {-(-image.disk_bytes // MIB)} MiB",
                field="disk_limit_mb",
            )
        return image

    def _find(self, name: str) -> Image:
        if _NAME.fullmatch(name) is None:
            raise InvalidArgument(
                f"image: {name!r} is no name of a disk image (letters, digits, '.', '_', '-')",
                field="image",
            )
        for ending, kind in _FORMATS.items():
            path = self.images / f"{name}{ending}"
            if path.is_file():
                size = qcow2.virtual_bytes(path) if kind == "qcow2" else path.stat().st_size
                return Image(name=name, path=str(path.resolve()), format=kind, disk_bytes=size)
        raise NotFound(
            f"there is no disk image {name}: put {name}.qcow2 or {name}.raw into {self.images}"
        )

    def firmware(self, spec: Spec) -> Firmware | None:
        """Return the firmware of `spec`, None for the monitor's BIOS. Raises `Unsupported`."""
        if full_of(spec).firmware == "bios":
            return None
        for code, variables in _UEFI:
            if Path(code).is_file() and Path(variables).is_file():
                return Firmware(code=code, variables=variables)
        raise Unsupported(
            'this host has no UEFI for guests: apt-get install ovmf, or ask for firmware="bios"',
            reason="firmware",
        )

    def seed(self, sandbox: str, spec: Spec) -> bytes:
        """Return the disk by which a machine is told what it is. Raises as `seeds.make`."""
        agent = binaries.find(self._config.paths.init, "dsec-init").read_bytes()
        with tempfile.TemporaryDirectory(prefix=_SEED, dir=self._state) as folder:
            image = Path(folder) / "seed"
            seeds.make(image, seed(sandbox, spec, agent))
            return image.read_bytes()
