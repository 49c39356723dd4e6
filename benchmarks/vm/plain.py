"""QEMU started by hand, with nothing of DSec but the guest's kernel: what it is compared with."""

from __future__ import annotations

import contextlib
import select
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType

from dsec_bench.cgroups import own_group
from dsec_bench.leftovers import TEMPORARY

from dsecd.host.vm_plan import Accel
from dsecd.images import cpio

QEMU = "qemu-system-x86_64"
BUSYBOX = Path("/bin/busybox")
PATIENCE_S = 300.0
INIT = """\
#!/bin/busybox sh
/bin/busybox --install -s /bin
mount -t devtmpfs none /dev
mkdir /l /t
mount -t tmpfs none /t
for disk in /dev/vd*; do mount -t erofs -o ro $disk /l; [ -e /l{data} ] && break; umount /l; done
cat /l{data} > /dev/null
echo read
read line
cat /l{data} > /t/used && rm /t/used
echo used
read line
"""


class PlainError(Exception):
    """No such guest can be started here."""


@contextlib.contextmanager
def initrd(data: Path) -> Iterator[Path]:
    """Yield an initramfs that reads `data` of the first layer that has it. Raises PlainError."""
    if shutil.which(QEMU) is None or not BUSYBOX.is_file():
        raise PlainError(f"not available: it takes {QEMU} and {BUSYBOX} (busybox-static)")
    entries = [
        cpio.directory("bin"),
        cpio.directory("dev"),
        cpio.character_device("dev/console", 5, 1),
    ]
    entries.append(cpio.file("bin/busybox", BUSYBOX.read_bytes(), 0o755))
    entries.append(cpio.file("init", INIT.format(data=data).encode(), 0o755))
    with TemporaryDirectory(prefix=own_group("-initrd-"), dir=TEMPORARY) as name:
        path = Path(name, "initrd")
        path.write_bytes(cpio.archive(entries))
        yield path


class Guest:
    """One, until the context ends."""

    def __init__(
        self, kernel: Path, initrd: Path, layers: Sequence[Path], memory_mb: int, accel: Accel
    ) -> None:
        cpu = "host" if accel == "kvm" else "max,-cx16"  # see dsecd.host.qemu
        argv = [QEMU, "-machine", "q35", "-accel", accel, "-cpu", cpu, "-m", str(memory_mb)]
        argv += ["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"]
        argv += ["-kernel", str(kernel), "-initrd", str(initrd), "-serial", "stdio"]
        argv += ["-append", "console=ttyS0 quiet no_timer_check tsc=reliable swiotlb=noforce"]
        for layer in layers:
            argv += ["-drive", f"file={layer},format=raw,if=virtio,readonly=on"]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT)
        self._heard = b""

    @property
    def pid(self) -> int:
        return self._process.pid

    def said(self, word: str, wait_s: float) -> bool:
        """Whether the guest has written `word`; waits so long for something new."""
        assert self._process.stdout is not None
        if select.select([self._process.stdout], [], [], wait_s)[0]:
            new = self._process.stdout.read1()
            if not new:
                raise PlainError(f"it ended: {self._heard[-300:].decode(errors='replace')}")
            self._heard += new
        return word.encode() in self._heard.split()

    def go_on(self) -> None:
        """Answer the guest, which waits."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n")
        self._process.stdin.flush()

    def __enter__(self) -> Guest:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.communicate()
