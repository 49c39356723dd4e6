"""The probe table on this host: complete, honest, and without a trace."""

from __future__ import annotations

import faulthandler
import os
import signal
import struct
import time
from pathlib import Path

import pytest

from dsecd.host import probe, probe_mounts
from libdsec.errors import Unsupported


@pytest.mark.root
def test_table_is_complete_and_leaves_nothing() -> None:
    probe.probe.cache_clear()
    table = probe.probe()
    names = [row.name for row in table]
    assert len(names) == len(set(names))
    assert set(probe.REQUIRED) <= set(names)
    assert all(row.needed_for for row in table)
    assert all(row.reason for row in table if not row.available)
    assert not [row for row in table if "itself failed" in row.reason]
    assert probe.probe() is table
    with pytest.raises(KeyError):
        probe.feature("no such feature")


@pytest.mark.root
def test_this_host_can_make_sandboxes() -> None:
    assert probe.missing() == ()


def test_crash_hang_and_answer_of_a_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(scratch: Path) -> str:
        faulthandler.disable()  # pytest's would print a traceback of this deliberate crash
        os.kill(os.getpid(), signal.SIGSEGV)
        return ""

    def hang(scratch: Path) -> str:
        if os.fork() == 0:
            time.sleep(60)
        time.sleep(60)
        return ""

    def refuse(scratch: Path) -> str:
        raise Unsupported("x", reason="because")

    def wrong(scratch: Path) -> str:
        raise ValueError("bug")

    outcomes = {
        attempt.__name__: probe.run(probe.Trial("t", "n", attempt), tmp_path)
        for attempt in (crash, refuse, wrong, lambda scratch: "fine")
    }
    monkeypatch.setattr(probe, "TRIAL_S", 0.3)  # of this one: the others have the time they need
    outcomes["hang"] = probe.run(probe.Trial("t", "n", hang), tmp_path)
    assert "SIGSEGV" in outcomes["crash"].reason
    assert "no answer" in outcomes["hang"].reason
    assert outcomes["refuse"].reason == "because"
    assert "itself failed" in outcomes["wrong"].reason
    assert outcomes["<lambda>"].available
    assert outcomes["<lambda>"].reason == "fine"


def test_smallest_erofs_image_has_the_magic() -> None:
    image = probe_mounts.empty_erofs()
    assert len(image) == 4096
    assert image[1024:1028] == bytes.fromhex("e2e1f5e0")


@pytest.mark.root
@pytest.mark.needs("fuse")
def test_fuse_says_which_protocol_the_kernel_speaks() -> None:
    assert probe.feature("fuse").reason.startswith("protocol 7.")


@pytest.mark.parametrize(
    ("flags", "high", "short", "works"),
    [(1 << 30, 1 << 7, False, True), (1 << 30, 0, False, False), (0, 1 << 7, False, False),
     (1 << 30, 1 << 7, True, False)],
)  # fmt: skip
def test_a_kernel_that_does_not_resend_is_named(
    flags: int, high: int, short: bool, works: bool
) -> None:
    request = bytes(40) + struct.pack("<5I", 7, 41, 0, flags, high)
    text = probe_mounts.describe_fuse(request[:56] if short else request)
    assert text.startswith("protocol 7.41")
    assert ("6.9" in text) != works
    with pytest.raises(Unsupported):
        probe_mounts.describe_fuse(bytes(30))
