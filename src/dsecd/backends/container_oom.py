"""Hearing of containers that run out of memory."""

from __future__ import annotations

import asyncio
import logging

from dsecd.backends.abc import Listener
from dsecd.backends.container_holding import Holding
from dsecd.backends.container_host import ContainerHost
from libdsec.errors import DSecError

logger = logging.getLogger("dsecd.container")
WATCH_AFTER_S = 1.0


class OomEars:
    """Tells `listener` of OOM kills. Methods belong to one event loop."""

    def __init__(self, host: ContainerHost) -> None:
        self._host = host
        self.listener: Listener | None = None

    def listen_later(self, holding: Holding) -> None:
        """Arm the watch, but not for containers that live for one short command.

        Arming costs as much as the rest of the bookkeeping; until then, and for every command that
        ends badly, the counter itself is read.
        """
        loop = asyncio.get_running_loop()
        holding.watch_timer = loop.call_later(WATCH_AFTER_S, self._listen, holding)

    def _listen(self, holding: Holding) -> None:
        holding.watch_timer = None
        if holding.cgroup is None:
            return
        try:
            holding.watch = self._host.driver.watch_oom(
                holding.cgroup, holding.slot, lambda kills: self._heard(holding, kills)
            )
        except DSecError as error:
            logger.warning("no OOM events of %s: %s", holding.sandbox, error.message)
            return
        kills = self.count(holding)
        if kills:
            self._heard(holding, kills)

    def _heard(self, holding: Holding, kills: int) -> None:
        if self.listener is not None:
            self.listener.oom(holding.sandbox, kills)

    def count(self, holding: Holding) -> int:
        """Return the number of kills so far, read now."""
        if holding.cgroup is None:
            return 0
        return self._host.driver.oom_kills(holding.cgroup, holding.slot)

    def stop(self, holding: Holding) -> None:
        """Listen no more, without touching the container."""
        if holding.watch_timer is not None:
            holding.watch_timer.cancel()
            holding.watch_timer = None
        watch, holding.watch = holding.watch, None
        if watch is not None:
            watch.close()
