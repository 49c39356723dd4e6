"""One suite, every backend: each test gets a connected client and an image that exists."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest

from tests.system.daemon import IMAGE, daemon
from tests.unit.engine_fixtures import bench
from tests.wire_client import WireClient


@dataclass
class Subject:
    """What a conformance test may use."""

    client: WireClient
    image: str
    backend: str


@pytest.fixture(params=["fake", pytest.param("container", marks=pytest.mark.root)])
async def subject(request: pytest.FixtureRequest) -> AsyncIterator[Subject]:
    if request.param == "fake":
        async with bench() as b:
            yield Subject(await b.client(), "base/any:1", "fake")
        return
    if os.geteuid() != 0:
        pytest.skip("root: the container backend needs it")
    async with daemon() as d:
        yield Subject(await d.client(), IMAGE, "container")
