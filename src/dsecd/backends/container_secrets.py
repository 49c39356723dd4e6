"""The secrets of containers: the proxy of each that has some, and what the container trusts.

What a daemon that takes over needs is in the vault; the certificate's authority outlives it, too.
While no daemon runs, names with secrets are not answered.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from dsecd.backends.abc import Listener
from dsecd.backends.container_doors import bind_inside
from dsecd.backends.container_holding import Holding
from dsecd.backends.container_network import Networks
from dsecd.backends.spec import Spec
from dsecd.config import Config
from dsecd.doors.gate import Refusal
from dsecd.doors.reach import Reach
from dsecd.doors.upstream import Dialer, client_context
from dsecd.host.netns import NetnsPool
from dsecd.host.plan import Bind
from dsecd.secrets import trust
from dsecd.secrets.proxy import SandboxProxy
from dsecd.secrets.secret import Secret
from dsecd.secrets.vault import Vault
from libdsec.errors import DSecError, Unsupported

if TYPE_CHECKING:
    from dsecd.secrets.authority import Authority

logger = logging.getLogger("dsecd.container")
NETWORK = 77  # 127.77.x.x


class Secrets:
    """The proxies of all containers of one daemon. Methods belong to one event loop."""

    listener: Listener | None = None

    def __init__(self, config: Config, netns: NetnsPool, networks: Networks, tree: Path) -> None:
        directory = config.state / "secrets"
        self._directory, self._vault = directory, Vault(directory)
        self._netns, self._networks, self._trust = netns, networks, tree / "trust"
        self._authorities = config.secrets.authorities
        self._means: tuple[Authority, Dialer] | None = None  # made at the first use
        if self._authorities:
            client_context(self._authorities)  # what is no such file is said at start
        self._served: dict[str, tuple[SandboxProxy, tuple[Secret, ...]]] = {}

    # --- one container --------------------------------------------------------------------------

    async def open(self, holding: Holding, spec: Spec) -> None:
        """Serve the secrets of a container with a network that has no process yet.

        Raises `Unsupported`, `Unavailable`.
        """
        if not spec.secrets:
            return
        if holding.names is None or holding.policy is None:
            raise Unsupported(
                "secrets need rules of the network that this host enforces",
                reason="no resolver answers the sandbox; see dsec check",
            )
        self._vault.keep(holding.sandbox, spec.secrets)
        await self._serve(holding, spec.secrets)

    async def recover(self, holding: Holding) -> None:
        """Take over a living container, before its names are answered again.

        Its processes may hold every address by now. Then it goes on without its secrets, which
        hurts nobody but itself.
        """
        try:
            secrets = self._vault.recall(holding.sandbox)
            if secrets and holding.policy is not None:
                await self._serve(holding, secrets)
        except DSecError as error:
            logger.error("the secrets of %s are not served: %s", holding.sandbox, error.message)
            self._tell(holding.sandbox, "", error.message)

    async def _serve(self, holding: Holding, secrets: tuple[Secret, ...]) -> None:
        netns, sandbox = holding.netns, holding.sandbox
        assert netns is not None
        assert holding.policy is not None
        authority, dialer = self._prepare()
        doors = await bind_inside(self._netns, netns, NETWORK, len(secrets))
        holding.reach = Reach(holding.policy)

        def refused(refusal: Refusal) -> None:
            self._tell(sandbox, refusal.host, refusal.reason)

        async def find(host: str) -> list[str]:
            return await self._find(holding, host)

        proxy = SandboxProxy(
            secrets, doors, authority.context,
            find=find, open_link=dialer.open, on_refusal=refused,
        )  # fmt: skip
        holding.overrides = proxy.overrides
        self._served[sandbox] = (proxy, secrets)
        proxy.start()
        self.judge(holding)

    def judge(self, holding: Holding) -> None:
        """Follow the container's policy: names that it no longer opens are cut off."""
        served = self._served.get(holding.sandbox)
        if served is None or holding.policy is None:
            return
        proxy, secrets = served
        holding.reach = reach = Reach(holding.policy)
        proxy.replace([each.host for each in secrets if reach.ruling(each.host) is not None])

    async def close(self, holding: Holding, *, leave: bool = False) -> None:
        """Stop serving a container, if it is; its secrets are forgotten but with `leave`."""
        served = self._served.pop(holding.sandbox, None)
        holding.overrides = {}
        if served is not None:
            await served[0].close()
        if not leave:
            self._vault.forget(holding.sandbox)

    def sweep(self, known: set[str]) -> list[str]:
        """Forget the secrets of containers that are gone; return what was removed, for the log."""
        return self._vault.sweep(known)

    def binds(self, sandbox: str) -> tuple[Bind, ...]:
        """Return what a container that has secrets sees of the host: whom to trust."""
        if sandbox not in self._served and not self._vault.holds(sandbox):
            return ()
        self._prepare()
        return (Bind(str(self._trust), trust.INSIDE),)

    # --- for the proxies ------------------------------------------------------------------------

    async def _find(self, holding: Holding, host: str) -> list[str]:
        """Return where the policy lets the container reach `host`."""
        reach = holding.reach
        ruling = reach.ruling(host) if reach is not None else None
        if reach is None or ruling is None:
            return []
        return reach.allowed(await self._networks.addresses(host, private=ruling.private))

    def _prepare(self) -> tuple[Authority, Dialer]:
        """Return what issues certificates and what connects to the real names.

        The authority is the daemon's own, kept over restarts; what it means inside is written.
        """
        if self._means is None:
            from dsecd.secrets.authority import Authority

            authority = Authority.load(self._directory)
            bundle = trust.host_bundle()
            if not bundle:
                logger.warning("this host has no bundle of authorities: sandboxes trust only ours")
            trust.write(self._trust, authority.pem, bundle)
            self._means = authority, Dialer(client_context(self._authorities))
        return self._means

    def _tell(self, sandbox: str, host: str, reason: str) -> None:
        if self.listener is not None:
            detail = {"where": "secret", "name": host, "reason": reason}
            self.listener.denied(sandbox, detail)
