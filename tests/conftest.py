"""Rules for all tests: nothing stays behind, and a skip says which feature of the host is missing.

Markers: ``root`` needs root; ``needs("cgroup_freeze", …)`` needs features of the probe table
(`dsecd check`), and the skip quotes the probe's reason. ``leaky("why")`` turns the census off for a
test that leaves something on purpose. ``DSEC_MUST_RUN=all``, or a list of features ("root,kvm"),
makes such a skip a failure: where a feature must work, a skip would hide that it does not.
"guest_kernel" is one of these features, though of no probe: see `guest_kernel`.
"""

from __future__ import annotations

import fcntl
import gc
import os
import signal
import time
from collections.abc import Generator, Iterator
from pathlib import Path

import hypothesis.configuration
import pytest

from tests import caches, leaks

_GUEST_KERNEL = "/var/cache/dsec-guest/kernel-for-tests"  # where scripts/test has it built
_SETTLE_S = 5.0  # teardown is asynchronous by design; this is how long it may take


def pytest_configure(config: pytest.Config) -> None:
    # a shell starts what it puts in the background deaf to ^C, and all below it would inherit that
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for line in (
        "needs(*features): needs these rows of the probe table",
        "leaky(reason): may leave things behind, for the reason given",
        "guest_kernel: boots the kernel of microVMs",
    ):
        config.addinivalue_line("markers", line)


def _boots(item: pytest.Item) -> bool:
    """Whether it boots the kernel of microVMs; one whose parameter decides has the marker."""
    return "guest_kernel" in getattr(item, "fixturenames", ()) or bool(
        item.get_closest_marker("guest_kernel")
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=_boots)  # last: scripts/test may still have the kernel built


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Wait for the kernel, outside of the test's time."""
    lock = os.environ.get("DSEC_GUEST_KERNEL_LOCK")
    if lock and _boots(item):
        with Path(lock).open() as file:
            fcntl.flock(file, fcntl.LOCK_SH)
    return (yield)


def pytest_collection_finish() -> None:
    # The tests themselves are a million objects, and stay: no collection of a test looks at them.
    gc.collect()
    gc.freeze()


_EXAMPLES = caches.directory("hypothesis")
if _EXAMPLES is not None:
    hypothesis.configuration.set_hypothesis_home_dir(_EXAMPLES)
hypothesis.settings.register_profile(
    "dsec",
    deadline=None,  # two busy cores miss any
    **({} if _EXAMPLES else {"database": None}),
)
hypothesis.settings.load_profile("dsec")


def _must_run(feature: str) -> bool:
    listed = os.environ.get("DSEC_MUST_RUN", "").replace(" ", "").split(",")
    return "all" in listed or feature in listed


def _skip(feature: str, reason: str) -> None:
    text = f"{feature}: {reason}"
    if _must_run(feature):
        pytest.fail(f"must run here (DSEC_MUST_RUN), but {text}", pytrace=False)
    pytest.skip(text)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("root") and os.geteuid() != 0:
        _skip("root", f"running as uid {os.geteuid()}")
    for marker in item.iter_markers("needs"):
        from dsecd.host.probe import feature

        for name in marker.args:
            row = feature(name)
            if not row.available:
                _skip(name, row.reason)


def _scope(request: pytest.FixtureRequest) -> leaks.Scope:
    host = bool(request.node.get_closest_marker("root")) and os.geteuid() == 0
    own = str(os.getpid()) if os.environ.get("DSEC_LEAKS") == "own" else ""
    return leaks.Scope(host=host, own=own)


@pytest.fixture(autouse=True)
def nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves a mount, cgroup, namespace, process, descriptor, directory, pin."""
    if request.node.get_closest_marker("leaky"):
        yield
        return
    scope = _scope(request)
    before = leaks.take(scope)
    yield
    deadline, wait = time.monotonic() + _SETTLE_S, 0.005
    while found := leaks.left_over(before, leaks.take(scope)):
        if time.monotonic() > deadline:
            pytest.fail("left behind:\n  " + "\n  ".join(found), pytrace=False)
        gc.collect()  # what only waits for the collector is not a leak of the host
        time.sleep(wait)
        wait = min(wait * 2, 0.25)


@pytest.fixture
def test_name(request: pytest.FixtureRequest) -> str:
    """A name of this test alone for cgroups, directories and tables; it holds our pid."""
    return f"dsec-test-{os.getpid()}-{abs(hash(request.node.nodeid)) % 10**6}"


@pytest.fixture(scope="session")
def guest_kernel() -> Path:
    """The kernel that microVMs boot: that of DSEC_GUEST_KERNEL, or what scripts/test had built."""
    kernel = Path(os.environ.get("DSEC_GUEST_KERNEL", _GUEST_KERNEL))
    if not kernel.is_file():
        _skip("guest_kernel", f"no {kernel}: scripts/build-guest --output {kernel} makes it")
    return kernel
