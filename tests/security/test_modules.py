"""The attempts of test_guards where one security module alone stands in their way.

Each runs in the guest of scripts/vm-test. That all get through there without a policy is looked at
by ``scripts/vm-test -m root tests/security/test_modules.py``, on the host each time by test_guards.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.security.test_guards import (
    CHANGES,
    POLICY,
    REFUSED_ANYWAY,
    REVEALS,
    TOOLKIT,
    attempted,
    furnish,
)
from tests.system.compat.debian import SMALL, build
from tests.system.confine_lab import Lab, open_lab
from tests.system.crashing_dsecd import ALONE

pytestmark = [pytest.mark.root, pytest.mark.asyncio(loop_scope="module")]
ATTEMPTS = CHANGES | REVEALS
MODULES = {"apparmor": "only-apparmor", "bpf_lsm": "only-bpf-lsm"}
# What gets through, as `dsecd.policy.mechanisms` says of the module
OPEN: dict[str, set[str]] = {"apparmor": {"set an attribute", "set the times"}, "bpf_lsm": set()}


@pytest.fixture(autouse=True)
def nothing_left_behind() -> None:
    """The module's lab looks after itself."""


def needing(name: str) -> Any:
    return pytest.param(name, marks=pytest.mark.needs(name))


@pytest.fixture(scope="module", params=[needing(name) for name in MODULES])
def module(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def lab(module: str) -> AsyncIterator[Lab]:
    """A lab where this module is all that enforces rules for files."""
    layer = await build(SMALL)
    with pytest.MonkeyPatch.context() as patch:
        for place, attribute, value in ALONE[MODULES[module]]:
            patch.setattr(place, attribute, value)
        async with open_lab(base=False) as made:
            await furnish(made, layer)
            yield made


@pytest.mark.vm
@pytest.mark.parametrize("name", ATTEMPTS)
async def test_an_attempt_gets_nowhere(lab: Lab, module: str, name: str) -> None:
    """In a sandbox of its own, so that one that gets through spoils no other."""
    async with lab.box(POLICY, container_image=SMALL, toolkits=[TOOLKIT]) as box:
        said, broken = attempted(box, ATTEMPTS[name])
        assert broken == (name in OPEN[module]), said


@pytest.mark.parametrize("name", ATTEMPTS)
@pytest.mark.parametrize("module", [needing("bpf_lsm")], indirect=True)
async def test_without_the_policy_it_gets_through(lab: Lab, name: str) -> None:
    """With one of the modules: no rule of either is there."""
    async with lab.box(None, container_image=SMALL, toolkits=[TOOLKIT]) as box:
        said, broken = attempted(box, ATTEMPTS[name])
        assert broken != (name in REFUSED_ANYWAY), said
