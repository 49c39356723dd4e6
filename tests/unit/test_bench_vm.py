"""What `dsec-bench vm` computes and promises, without a machine."""

from __future__ import annotations

from pathlib import Path

import pytest
from dsec_bench.bench import Context, Options
from dsec_bench.create.daemon import NO_SWAP, configuration
from dsec_bench.progress import Steps
from dsec_bench.report import Report
from dsec_bench.vm import VM, bed, monitors, parts, plain
from dsec_bench.vm.layers import Run

from dsecd import config

SMAPS = """\
55d0-55d1 r-xp 00000000 00:2a 77                         /usr/bin/qemu-system-x86_64
Rss:                 900 kB
Pss:                 300 kB
Pss_Dirty:             0 kB
7f00-7f10 r--s 00000000 fe:01 1201                       /vm/layer0
Rss:              184320 kB
Pss:               92160 kB
VmFlags: rd sh mr mw me ms sd
7f20-7f30 rw-s 00000000 00:01 1034                       /memfd:memory-backend-memfd (deleted)
Rss:               61440 kB
Pss:               61440 kB
7f40-7f50 rw-p 00000000 00:00 0
Pss:                 100 kB
"""


def test_every_figure_has_a_part() -> None:
    assert set(VM.figures) == {
        "cold_start_s", "template_start_s", "roundtrip_extra_ms", "pmem_saving_4_guests",
        "fpr_returned_share", "damon_fpr_memory_time_saving", "checkpoint_pause_ms", "branch4_s",
        "branch_private_mib",
    }  # fmt: skip
    assert set(VM.parts) == set(parts.PARTS)


def test_a_running_daemon_is_not_measured() -> None:
    report = Report("vm", VM.figures, {})
    with Steps() as steps:
        VM.run(Context(Options(endpoint="unix:/nowhere"), report, steps))
    assert set(report.missing) == set(VM.figures)


def test_without_a_kernel_it_is_said_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSEC_GUEST_KERNEL", "/nowhere/kernel")
    report = Report("vm", VM.figures, {})
    with Steps() as steps:
        VM.run(Context(Options(), report, steps))
    assert set(report.missing) == set(VM.figures)
    assert "scripts/build-guest" in report.missing["cold_start_s"]


def test_a_layer_counts_where_the_page_cache_has_it() -> None:
    """And not once more for each monitor that maps it."""
    assert monitors.own_bytes(SMAPS) == (300 + 61440 + 100) * 1024
    assert monitors.own_bytes(SMAPS, shared="/nowhere") == (300 + 92160 + 61440 + 100) * 1024


def test_the_page_cache_s_part_is_counted_once(tmp_path: Path) -> None:
    file = tmp_path / "layer"
    file.write_bytes(bytes(1 << 20))
    assert monitors.cached_bytes([]) == 0
    assert monitors.held_bytes([], [file]) == monitors.cached_bytes([file])


def test_what_was_held_before_is_not_the_guests() -> None:
    run = Run(before=100, seen=[(0.0, 0), (2.0, 50), (3.0, 30)])
    assert run.peak == 50
    assert run.integral == pytest.approx(50 + 40)
    assert run.mean == pytest.approx(30)
    run.look(0.0, 160)
    assert run.seen[-1][1] == 60


def test_the_daemon_s_configuration_is_one(tmp_path: Path) -> None:
    lines = 'enabled = "yes"\ndamon_min_age_s = 4\nfree_page_reporting = false'
    text = configuration("dsec-bench-1-3", tmp_path / "run", tmp_path / "var", 3, NO_SWAP, lines)
    made = config.parse(text)
    assert (made.vm.damon_min_age_s, made.vm.free_page_reporting) == (4, False)
    assert bed._toml(False) == "false"
    assert bed._toml("tcg") == '"tcg"'


def test_plain_qemu_is_missing_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain, "QEMU", "qemu-of-nobody")
    with pytest.raises(plain.PlainError, match="not available"), plain.initrd(Path("/data")):
        raise AssertionError("there is none")
