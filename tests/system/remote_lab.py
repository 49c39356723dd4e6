"""A store that is not on this host's disk, and daemons that read it through dsec-blobd."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from libdsec import DSecClient
from tests.system import stores_lab
from tests.system.daemon import Daemon, daemon
from tests.system.stores_lab import BUCKET, KEYS, FaultyProxy


@dataclass
class Remote:
    """A bucket behind a proxy that a test makes fail."""

    proxy: FaultyProxy
    section: dict[str, object]  # of a daemon's configuration

    @contextlib.asynccontextmanager
    async def host(self, **more: Any) -> AsyncIterator[tuple[Daemon, DSecClient]]:
        """A daemon on this store, without a base layer of its own, and a client of it."""
        async with (
            daemon(base=False, store=self.section, **more) as running,
            DSecClient(f"unix:{running.socket}") as client,
        ):
            yield running, client

    def cut(self, fault: str) -> None:
        """Nothing gets through from now on; `fault` as those of `FaultyProxy`."""
        self.proxy.fault = lambda method, path: fault


@contextlib.contextmanager
def remote(directory: Path, timeout_s: float) -> Iterator[Remote]:
    """`timeout_s`: how long dsecd tries before it gives a request up."""
    keys = directory / "keys"
    lines = [f"{name.lower()} = {value}" for name, value in KEYS.items()]
    keys.write_text("\n".join(["[default]", *lines]) + "\n")
    with stores_lab.moto(directory) as endpoint, FaultyProxy.before(endpoint) as proxy:
        options = {
            "endpoint": proxy.endpoint,
            "credentials_file": str(keys),
            "timeout_s": timeout_s,
        }
        yield Remote(proxy, {"url": f"s3://{BUCKET}/layers", "options": options})


def blobd_processes(running: Daemon) -> list[psutil.Process]:
    """Keeper and worker of the daemon's dsec-blobd."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if "dsec-blobd" in process.name() and str(running.root) in " ".join(process.cmdline()):
                found.append(process)
    return found


def random_files(directory: Path, count: int, size: int) -> None:
    directory.mkdir(parents=True)
    for n in range(count):
        (directory / f"file{n}").write_bytes(os.urandom(size))
