"""AppArmor on containers: whose policy needs a profile gets one, shared by all of that policy."""

from __future__ import annotations

import asyncio

from dsecd.backends.container_holding import Holding
from dsecd.backends.spec import Spec
from dsecd.config import Config
from dsecd.host import probe
from dsecd.host.apparmor import Profiles
from dsecd.policy.apparmor import compile_profile
from dsecd.policy.mechanisms import NEEDS


class AppArmor:
    """The profiles of one daemon's containers; without AppArmor every method does nothing."""

    def __init__(self, config: Config) -> None:
        self._prefix, self._cache = config.cgroup.name, config.state / "apparmor"
        self._profiles: Profiles | None = None
        self.lost: set[str] = set()  # sandboxes that somebody took the profile from

    def start(self) -> None:
        if probe.has(NEEDS["apparmor"]):
            self._profiles = Profiles(self._prefix, self._cache)
            self._profiles.start()

    async def confine(self, holding: Holding, spec: Spec) -> None:
        """Have the profile of a container's policy loaded, and note its name."""
        if self._profiles is None or spec.policy is None:
            return
        profile = await asyncio.to_thread(  # thousands of rules take a second
            compile_profile, spec.policy.files, spec.policy.system, self._prefix
        )
        await self._profiles.acquire(holding.sandbox, profile.name, profile.text)
        holding.apparmor = profile.name

    def release(self, holding: Holding) -> None:
        """Give the profile back; nobody is in it any more."""
        self.lost.discard(holding.sandbox)
        if self._profiles is not None and holding.apparmor:
            self._profiles.release(holding.sandbox, holding.apparmor)
        holding.apparmor = ""

    def recover(self, holding: Holding) -> None:
        """Take over the profile of a container that lived on while there was no daemon."""
        if not holding.apparmor:
            return
        if self._profiles is None or not self._profiles.adopt(holding.sandbox, holding.apparmor):
            self.lost.add(holding.sandbox)

    def sweep(self) -> list[str]:
        """All living containers are recovered: remove what is nobody's, and return it."""
        swept = self._profiles.sweep() if self._profiles is not None else []
        return [f"AppArmor profile {name}" for name in swept]

    async def close(self) -> None:
        if self._profiles is not None:
            await self._profiles.close()
