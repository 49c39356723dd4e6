"""One daemon as an object: what is started in which order, and ended in reverse.

Locks → journal → backends → recovery → listening. Nothing listens before recovery is done, so a
client never sees a sandbox missing that is about to be re-adopted.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
from pathlib import Path

from dsecd import __version__, log
from dsecd.api.auth import Gatekeeper
from dsecd.api.server import Server
from dsecd.config import Config
from dsecd.engine.admission import Host
from dsecd.engine.backends import Backends
from dsecd.engine.fncall import Pools
from dsecd.engine.journal import Journal
from dsecd.engine.manager import Manager, Step, no_step
from dsecd.engine.reclaiming import Reclaimer
from dsecd.engine.recovery import recover
from dsecd.metrics import BLOBD, Exposition, Registry
from libdsec.errors import Unavailable

logger = logging.getLogger("dsecd")


class Lock:
    """An exclusive lock on a directory, held as long as the process lives. `flock(2)`: a killed
    daemon leaves none behind."""

    def __init__(self, path: Path, what: str) -> None:
        self.path, self._what, self._fd = path, what, -1

    def take(self) -> None:
        """Raises `Unavailable` naming the holder's pid."""
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o755)
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(fd, 32).decode(errors="replace").strip() or "unknown"
            os.close(fd)
            raise Unavailable(
                f"another dsecd (pid {holder}) uses the {self._what} directory "
                f"{self.path.parent}; stop it, or give this one its own paths, cgroup.name and "
                "uid ranges",
                pid=holder,
            ) from None
        os.ftruncate(fd, 0)
        os.write(fd, f"{os.getpid()}\n".encode())
        self._fd = fd

    def release(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class Service:
    """A daemon; `step` is called at the points where a crash must be repairable (for tests)."""

    def __init__(
        self, config: Config, backends: Backends, host: Host, step: Step = no_step
    ) -> None:
        self.config, self.backends, self.host = config, backends, host
        self.registry = Registry()
        self.gatekeeper = Gatekeeper(config.listen)
        self._step = step
        self._locks = [
            Lock(config.state / "dsecd.lock", "state"),
            Lock(config.runtime / "dsecd.pid", "runtime"),
        ]
        self.manager: Manager
        self.server: Server
        self.reclaimer: Reclaimer
        self.fncalls: Pools
        self._metrics: Exposition | None = None

    async def start(self) -> None:
        """Start everything; on failure what was started is ended. Raises `DSecError`."""
        async with contextlib.AsyncExitStack() as undo:
            for lock in self._locks:
                lock.take()
                undo.callback(lock.release)
            config = self.config
            config.state.chmod(0o700)
            journal = Journal(config.state / "dsecd.db")
            undo.callback(journal.close)
            self.manager = manager = Manager(
                config, self.backends, journal, self.host, self.registry, self._step
            )
            undo.push_async_callback(self.backends.close)
            await self.backends.start(manager)
            self._gauges()
            kept, freed = await recover(manager)
            self.reclaimer = Reclaimer(manager, config.reclaim)
            self.reclaimer.start()
            undo.push_async_callback(self.reclaimer.close)
            self.fncalls = Pools(manager, config.fncall)
            undo.push_async_callback(self.fncalls.close)
            self.server = Server(config, manager, self.gatekeeper, self.fncalls)
            await self.server.start()
            undo.push_async_callback(self.server.close)
            if config.metrics_endpoint:
                self._metrics = Exposition(self.registry, config.metrics_endpoint)
                await self._metrics.start()
            undo.pop_all()
        log.event(
            logger, logging.INFO, "ready", version=__version__, socket=str(self.config.socket),
            readopted=kept, freed=freed, epoch=self.manager.epoch,
        )  # fmt: skip

    def _gauges(self) -> None:
        manager, registry = self.manager, self.registry

        def by_state() -> dict[str, float]:
            counts = {"creating": 0.0, "running": 0.0, "paused": 0.0, "stopping": 0.0}
            for sandbox in manager.live.values():
                counts[sandbox.state] = counts.get(sandbox.state, 0.0) + 1
            return counts

        registry.gauge("dsec_sandboxes", "Sandboxes by state.", "state", by_state)
        registry.gauge("dsec_pool", "What pools hold ready.", "pool", self.backends.pools)
        registry.gauge(
            "dsec_connections", "Open client connections.", "",
            lambda: {"": float(len(self.server.connections))},
        )  # fmt: skip
        registry.gauge(
            "dsec_memory_requested_bytes", "Memory limits of live sandboxes.", "",
            lambda: {"": float(manager.admission.memory_requested)},
        )  # fmt: skip
        registry.gauge(
            "dsec_overcommit_ratio", "What sandboxes asked for by what the host has.", "resource",
            lambda: {
                "memory": manager.admission.memory_overcommit,
                "cpu": manager.admission.cpu_overcommit,
            },
        )  # fmt: skip
        registry.gauge(
            "dsec_reclaim_need_bytes", "Memory above the target at the last look.", "",
            lambda: {"": float(self.reclaimer.need_bytes)},
        )  # fmt: skip
        registry.gauge(
            "dsec_fncall", "Pools of warm workers, and calls that wait for one.", "what",
            lambda: self.fncalls.numbers(),
        )  # fmt: skip
        registry.foreign(BLOBD, self.backends.own.layers().stats)

    async def close(self, keep: bool) -> None:
        """End the daemon; with `keep` the sandboxes go on and wait for the next one."""
        log.event(logger, logging.INFO, "stopping", keep=keep)
        server = asyncio.ensure_future(self.server.close())
        await self.reclaimer.close()
        await self.fncalls.close()
        try:
            await self.manager.close(keep)
        finally:
            await server
            if self._metrics is not None:
                await self._metrics.close()
            for lock in self._locks:
                lock.release()
