"""Host-wide counters: raised once, noted, restored, and never over an administrator's change."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsecd.host.shared_limits import RAISED, raise_limits, restore_limits


@pytest.fixture
def sys(tmp_path: Path) -> Path:
    for name in RAISED:
        path = tmp_path / "sys" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("4096\n")
    return tmp_path / "sys"


def value(sys: Path, name: str) -> int:
    return int((sys / name).read_text())


def test_raised_and_restored_also_by_a_later_daemon(sys: Path, tmp_path: Path) -> None:
    state = tmp_path / "limits.json"
    raise_limits(state, sys)
    raise_limits(state, sys)  # the next daemon: what the first found still counts
    assert {name: value(sys, name) for name in RAISED} == RAISED
    restore_limits(state, sys)
    assert {value(sys, name) for name in RAISED} == {4096}
    assert not state.exists()


def test_what_is_high_enough_or_changed_since_is_left_alone(sys: Path, tmp_path: Path) -> None:
    state = tmp_path / "limits.json"
    (sys / "kernel/pty/max").write_text(str(1 << 20))
    raise_limits(state, sys)
    assert value(sys, "kernel/pty/max") == 1 << 20
    (sys / "fs/aio-max-nr").write_text("9")
    restore_limits(state, sys)
    assert value(sys, "fs/aio-max-nr") == 9
    assert value(sys, "kernel/pty/max") == 1 << 20


def test_a_limit_that_cannot_be_raised_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    raise_limits(tmp_path / "limits.json", tmp_path / "absent")
    assert "cannot raise kernel/pty/max" in caplog.text
