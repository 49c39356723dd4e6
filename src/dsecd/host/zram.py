"""zram devices: compressed memory as a block device (Documentation/admin-guide/blockdev/zram.rst).

Only devices that this module added are ever written to or removed. Reading `hot_add` makes a device
and answers its number; an unused one has a size of 0 and holds no memory.
"""

from __future__ import annotations

import errno
import time
from pathlib import Path

from dsecd.host.kernelfs import KernelFiles
from libdsec.errors import Unsupported

CONTROL = "/sys/class/zram-control"
BLOCK = "/sys/block"
REMOVE_S = 2.0  # udev may look at a device that has just been switched off


def missing(files: KernelFiles) -> str:
    """Return why no device can be added, "" when one can."""
    if files.exists(f"{CONTROL}/hot_add"):
        return ""
    return "the kernel has no zram; load the module `zram`"


def device(number: int) -> str:
    return f"/dev/zram{number}"


def is_device(path: str) -> bool:
    return path.startswith("/dev/zram")


def add(files: KernelFiles) -> int:
    """Make a device; return its number. Raises `Unsupported`, `OSError`."""
    if reason := missing(files):
        raise Unsupported(f"no zram device: {reason}", reason=reason)
    return files.number(f"{CONTROL}/hot_add")


def configure(files: KernelFiles, number: int, size_bytes: int, algorithm: str) -> None:
    """Give a new device its size; `algorithm` "" is the kernel's choice. Raises `Unsupported`."""
    base = f"{BLOCK}/zram{number}"
    if algorithm:
        offered = files.read(f"{base}/comp_algorithm").replace("[", "").replace("]", "").split()
        if algorithm not in offered:
            raise Unsupported(
                f"zram compresses by {', '.join(offered)} here, not by {algorithm!r}; change "
                "reclaim.swap_algorithm",
                reason=f"no {algorithm}",
            )
        files.write(f"{base}/comp_algorithm", algorithm)
    files.write(f"{base}/disksize", str(size_bytes))


def remove(files: KernelFiles, number: int) -> None:
    """Remove a device that is ours and out of use. Raises `OSError`."""
    deadline = time.monotonic() + REMOVE_S
    while True:
        try:
            files.write(f"{CONTROL}/hot_remove", str(number))
            return
        except OSError as error:
            if error.errno == errno.ENODEV:
                return  # gone already
            if error.errno != errno.EBUSY or time.monotonic() > deadline:
                raise
        time.sleep(0.02)


def numbers() -> list[int]:
    """Return the devices there are, anybody's."""
    found = [path.name.removeprefix("zram") for path in Path(BLOCK).glob("zram*")]
    return sorted(int(text) for text in found if text.isdigit())
