"""The disk by which a machine is told what it is, before anybody can talk to it.

It is a NoCloud seed (cloud-init's name for it): a FAT file system labelled "cidata", with
`meta-data`, `user-data`, `vendor-data` and `network-config`. It brings the agent along, too: what
the guest runs is then what this daemon knows, however old the image is.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from libdsec.errors import Internal, Unsupported

PACKAGES = {"mkfs.vfat": "dosfstools", "mcopy": "mtools"}
LABEL = "cidata"
_SPARE_BYTES = 1 << 20  # tables and directories
_STEP_BYTES = 1 << 20
_SECONDS = 60.0


def missing() -> str:
    """Return the packages that `make` needs and this host has not, "" for none."""
    return " ".join(package for tool, package in PACKAGES.items() if shutil.which(tool) is None)


def make(image: Path, files: Mapping[str, bytes]) -> None:
    """Write the new file `image` with `files` in its root. Raises `Unsupported`, `Internal`."""
    if packages := missing():
        raise Unsupported(
            f"no seed can be made here: apt-get install {packages}", reason="tools are missing"
        )
    size = _SPARE_BYTES + sum(len(content) + 4096 for content in files.values())
    with image.open("xb") as file:
        os.truncate(file.fileno(), -(-size // _STEP_BYTES) * _STEP_BYTES)
    _run("mkfs.vfat", "-n", LABEL, str(image))
    with tempfile.TemporaryDirectory(dir=image.parent) as folder:
        sources = []
        for name, content in files.items():
            (Path(folder) / name).write_bytes(content)
            sources.append(str(Path(folder) / name))
        _run("mcopy", "-i", str(image), *sources, "::")


def _run(*command: str) -> None:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=_SECONDS, check=False,
        env={"PATH": os.environ.get("PATH", "/usr/sbin:/usr/bin:/sbin:/bin"), "LC_ALL": "C"},
    )  # fmt: skip
    if done.returncode:
        raise Internal(f"{command[0]} failed: {(done.stderr or done.stdout).strip()[-500:]}")
