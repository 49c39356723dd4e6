"""What most tests ask for: a daemon with the base layer, and a client of it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from libdsec import DSecClient
from tests.system.daemon import Daemon, daemon


@pytest.fixture
async def host() -> AsyncIterator[Daemon]:
    async with daemon() as running:
        yield running


@pytest.fixture
async def client(host: Daemon) -> AsyncIterator[DSecClient]:
    async with DSecClient(f"unix:{host.socket}") as made:
        yield made
