"""The fake backend with a network, and with mechanisms, on a host that has some of them."""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from dsecd.backends.fake import FakeBackend
from dsecd.policy.mechanisms import NEEDS
from libdsec.model import Feature

ROWS = sorted({row for needs in NEEDS.values() for row in needs})


class PolicyBackend(FakeBackend):
    """`applied` are the mechanisms of its capabilities, `missing` the rows its probe lacks."""

    def __init__(
        self, applied: Collection[str] = tuple(NEEDS), missing: Collection[str] = ()
    ) -> None:
        super().__init__()
        self.capabilities = msgspec.structs.replace(
            self.capabilities, network=("none", "nat"), survives_daemon=True,
            mechanisms=tuple(applied),
        )  # fmt: skip
        self.missing = missing

    def features(self) -> list[Feature]:
        return [
            Feature(
                name=name,
                available=name not in self.missing,
                reason="refused here" if name in self.missing else "",
            )
            for name in ROWS
        ]
