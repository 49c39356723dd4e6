"""Masks and capabilities: what exists is chosen once, and what root keeps is what we say."""

from __future__ import annotations

from pathlib import Path

from dsecd.policy import capabilities, masks


def test_only_existing_paths_are_masked(tmp_path: Path) -> None:
    (tmp_path / "proc/sys").mkdir(parents=True)
    (tmp_path / "proc/kcore").touch()
    (tmp_path / "proc/keys").touch()
    found = masks.for_host(str(tmp_path))
    assert found.masked == ("/proc/kcore", "/proc/keys")
    assert found.read_only == ("/proc/sys",)


def test_kpagecgroup_is_masked_on_this_host() -> None:
    """`grep -r /` reading /proc/kpagecgroup crashed a production kernel."""
    assert "/proc/kpagecgroup" in masks.MASKED
    assert Path("/proc/kpagecgroup").exists() == ("/proc/kpagecgroup" in masks.for_host().masked)
    assert "/proc/sys" in masks.for_host().read_only


def test_capability_mask() -> None:
    bits = capabilities.mask()
    kept = set(capabilities.names(bits))
    assert kept == set(capabilities.KEPT) | set(capabilities.INERT)
    for never in ("sys_module", "sys_rawio", "sys_boot", "sys_time", "bpf", "perfmon", "mknod"):
        assert never not in kept
    assert capabilities.mask(("chown", "kill")) == 0b100001
