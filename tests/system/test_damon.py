"""A kdamond of ours on a kernel where nobody else has one; in the guest."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dsecd.host.damon import Damon, Scheme
from dsecd.host.kernelfs import KernelFiles

pytestmark = [pytest.mark.vm, pytest.mark.skipif(os.geteuid() != 0, reason="needs root")]


@pytest.mark.parametrize("pids", [(), (os.getpid(),)])
def test_a_kdamond_is_made_and_leaves_nothing(pids: tuple[int, ...], tmp_path: Path) -> None:
    """With a scheme that finds nothing: memory that is cold for an hour."""
    files, damon = KernelFiles(), Damon(tmp_path / "pid")
    if reason := damon.missing():
        pytest.skip(reason)
    damon.start(Scheme(pids=pids, cold_s=3600.0, low=1000))
    try:
        assert damon.ours
        assert Damon(tmp_path / "other").missing().startswith("1 kdamonds")
        assert damon.reclaimed_bytes() == 0
    finally:
        damon.stop()
    assert files.number("/sys/kernel/mm/damon/admin/kdamonds/nr_kdamonds") == 0
