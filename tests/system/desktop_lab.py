"""The disk image that tests of full VMs boot: a Debian desktop, made once per change of its recipe.

It takes some minutes and hundreds of megabytes, so a host without it makes it only when it is told
to (DSEC_BUILD_DESKTOP=1).
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
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
    made = (place() / f"{NAME}.raw").exists() or os.environ.get("DSEC_BUILD_DESKTOP") == "1"
    return "" if made else f"no image in {place()}: DSEC_BUILD_DESKTOP=1 makes it"


def build() -> Path:
    """Return the directory with the image, which is made when it is not there."""
    folder = place()
    if not (folder / f"{NAME}.raw").exists():
        command = [str(SCRIPTS / "build-vm"), NAME, "--desktop", "--to", str(folder)]
        subprocess.run(command, check=True, timeout=1200)
    return folder
