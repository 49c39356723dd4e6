"""The disk image that tests of full VMs boot: a Debian desktop, made once per change of its recipe.

It takes minutes and hundreds of megabytes: scripts/test has it made beside other tests, by this
module as a program. Tests that are run otherwise are skipped where it is not there.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

SCRIPTS = Path(__file__).parents[2] / "scripts"
CACHE = Path("/var/cache/dsec-guest")
NAME = "desktop"


def place() -> Path:
    """Return the directory of the image, whose name changes with what it is made by."""
    digest = hashlib.sha256()
    for script in ("build_vm.py", "build_base.py"):
        digest.update((SCRIPTS / script).read_bytes())
    return CACHE / f"desktop-{digest.hexdigest()[:16]}"


def missing() -> str:
    """Return why full VMs cannot be tested here, ""."""
    for program, package in {"qemu-system-x86_64": "qemu-system-x86", "mcopy": "mtools"}.items():
        if shutil.which(program) is None:
            return f"{package} is missing"
    if not Path("/usr/share/OVMF").is_dir():
        return "ovmf is missing"
    made = (place() / f"{NAME}.raw").exists()
    return "" if made else f"no image in {place()}: python -m tests.system.desktop_lab makes it"


def build() -> None:
    """Become the program that makes the image, when it is not there; earlier ones go."""
    folder = place()
    for other in CACHE.glob("desktop-*"):
        if other != folder:
            shutil.rmtree(other)
    if not (folder / f"{NAME}.raw").exists():
        program = str(SCRIPTS / "build-vm")
        os.execv(program, [program, NAME, "--desktop", "--to", str(folder)])


if __name__ == "__main__":
    build()
