"""The relays of containers whose policy has their names checked: see `dsecd.relay`.

While no daemon runs such names are not answered, and connections through the relay have ended.
"""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import Callable

from dsecd.backends.container_doors import bind_inside
from dsecd.backends.container_holding import Holding
from dsecd.doors.gate import Doors, Refusal
from dsecd.doors.reach import Reach
from dsecd.doors.upstream import Dialer
from dsecd.host.netns import NetnsPool
from dsecd.host.nettable import IpAddress
from dsecd.policy.rules import CHECKED_PORTS, NetPolicy
from dsecd.relay.relay import SandboxRelay
from libdsec.errors import Unavailable

logger = logging.getLogger("dsecd.container")
NETWORK = 78  # 127.78.x.x
HTTP, TLS = CHECKED_PORTS

Tell = Callable[[Holding, dict[str, str]], None]


class Relays:
    """The relays of all containers of one daemon; `tell` passes on what was refused."""

    def __init__(self, netns: NetnsPool, tell: Tell) -> None:
        self._netns, self._tell = netns, tell
        self._served: dict[str, SandboxRelay] = {}
        self._open_tls, self._open_http = Dialer(None, port=TLS).open, Dialer(None, port=HTTP).open

    async def open(self, holding: Holding, policy: NetPolicy, *, taken_over: bool = False) -> None:
        """Serve a container that `policy` wants it for. Raises `Unavailable`.

        With `taken_over` the processes of the container may hold every address by now; then none of
        its names is answered, which hurts nobody but itself.
        """
        if not policy.check_names or holding.sandbox in self._served:
            return
        assert holding.netns is not None
        try:
            (doors,) = await bind_inside(self._netns, holding.netns, NETWORK, 1)
        except Unavailable as error:
            if not taken_over:
                raise
            logger.error("%s gets no checked names: %s", holding.sandbox, error.message)
            self._tell(holding, {"where": "relay", "name": "", "reason": error.message})
            return
        relay = self._served[holding.sandbox] = self._make(holding, doors, Reach(policy))
        holding.relay = ipaddress.ip_address(relay.address)
        relay.start()

    def _make(self, holding: Holding, doors: Doors, reach: Reach) -> SandboxRelay:
        async def find(host: str) -> list[IpAddress]:
            names = holding.names
            if names is None or names.served is None:
                return []
            return await names.served.resolver.find(host)

        def refused(refusal: Refusal) -> None:
            detail = {"where": "relay", "name": refusal.host, "reason": refusal.reason}
            self._tell(holding, detail)

        return SandboxRelay(
            doors, reach, find=find, open_tls=self._open_tls, open_http=self._open_http,
            on_refusal=refused,
        )  # fmt: skip

    async def follow(self, holding: Holding) -> None:
        """Cut what the policy in force does not open; end the relay when it wants none."""
        relay = self._served.get(holding.sandbox)
        if relay is None:
            return
        if holding.policy is None or not holding.policy.check_names:
            await self.close(holding)
            return
        relay.replace(Reach(holding.policy))

    async def close(self, holding: Holding) -> None:
        """End the relay of a container, if it has one."""
        relay = self._served.pop(holding.sandbox, None)
        holding.relay = None
        if relay is not None:
            await relay.close()
