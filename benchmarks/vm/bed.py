"""What all parts of `dsec-bench vm` work with: daemons that make microVMs, and a guest kernel."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsec_bench.bench import Context
from dsec_bench.create.daemon import NO_SWAP, Daemon
from dsec_bench.create.image import HOST_STATE, Root, place
from dsec_bench.create.sdk import LABEL, Sdk

from dsecd.host import kvm
from libdsec import DSecMicroVMRunArgs
from libdsec.sandbox import Sandbox

KERNELS = (HOST_STATE / "guest/kernel", Path("/var/cache/dsec-guest/kernel-for-tests"))
CREATE_S = 120.0  # an emulated guest on a busy host
ROUNDS, QUICK_ROUNDS = 5, 3
MEMORY_MB = 256
MIB = 1 << 20


class BedError(Exception):
    """No microVM can be made here; the message says what to do."""


@dataclass(slots=True)
class Host:
    """A daemon with its client."""

    daemon: Daemon
    sdk: Sdk

    def arguments(self, **fields: Any) -> DSecMicroVMRunArgs:
        """Return what a microVM is made with; it ends by itself should the bench not end it."""
        made: dict[str, Any] = {
            "image": self.sdk.args.container_image, "memory_limit_mb": MEMORY_MB,
            "disk_limit_mb": 512, "ttl_running_stop": 900, "max_lifetime_s": 3600,
            "labels": {LABEL: str(os.getpid())},
        }  # fmt: skip
        return DSecMicroVMRunArgs(**made | fields)

    async def create(self, **fields: Any) -> Sandbox:
        return await self.sdk.client.run_microvm(self.arguments(**fields), timeout=CREATE_S)


class Bed:
    """Of one run. `accel` says how guests run, and is part of every result."""

    def __init__(self, context: Context) -> None:
        self.context, self.report = context, context.report
        self.kernel = _kernel()
        self.accel, remark = kvm.accelerator()
        self.rounds = QUICK_ROUNDS if context.options.quick else ROUNDS
        self.tell("guests", kernel=str(self.kernel), why=remark)

    @property
    def quick(self) -> bool:
        return self.context.options.quick

    def tell(self, kind: str, **facts: Any) -> None:
        """Record facts, under `kind`."""
        self.report.run(kind, accel=self.accel, **facts)

    @contextlib.contextmanager
    def host(self, root: Root, **vm: object) -> Iterator[Host]:
        """Yield a daemon that has `root` as its image; `vm` is put into that table."""
        image = self.context.options.image
        table = {"enabled": "yes", "kernel": str(self.kernel), "accel": self.accel, **vm}
        lines = "\n".join(f"{name} = {_toml(value)}" for name, value in table.items())
        with Daemon(3, NO_SWAP, lines) as daemon:
            place(root, daemon.kept, image)
            daemon.start()
            sdk = Sdk(daemon.endpoint, image)
            try:
                sdk.open()
                yield Host(daemon, sdk)
            finally:
                sdk.close()


def _kernel() -> Path:
    """Return the first kernel there is. Raises BedError."""
    named = os.environ.get("DSEC_GUEST_KERNEL")
    found = [path for path in ((Path(named),) if named else KERNELS) if path.is_file()]
    if not found:
        raise BedError(
            "no guest kernel: scripts/build-guest makes one, or name it in DSEC_GUEST_KERNEL"
        )
    return found[0]


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, int) else f'"{value}"'
