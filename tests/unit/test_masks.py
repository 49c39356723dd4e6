"""Masks and capabilities: what exists is chosen once, and what root keeps is what we say."""

from __future__ import annotations

from pathlib import Path

from dsecd.policy import capabilities, masks


def test_what_modes_close_already_is_not_masked_again(tmp_path: Path) -> None:
    (tmp_path / "proc/sys").mkdir(parents=True)
    for name, mode in {"kcore": 0o400, "keys": 0o444, "kallsyms": 0o444}.items():
        (tmp_path / "proc" / name).touch()
        (tmp_path / "proc" / name).chmod(mode)
    (tmp_path / "proc/scsi").mkdir()
    (tmp_path / "proc/scsi/scsi").touch(0o644)
    found = masks.for_host(str(tmp_path))
    assert found.masked == ("/proc/kallsyms", "/proc/keys")
    assert found.read_only == ("/proc/sys",)
    (tmp_path / "proc/scsi/scsi").chmod(0o666)
    assert masks.for_host(str(tmp_path)).read_only == ("/proc/scsi", "/proc/sys")


def test_kpagecgroup_is_closed_on_this_host() -> None:
    """`grep -r /` reading /proc/kpagecgroup crashed a production kernel."""
    assert "/proc/kpagecgroup" in masks.MASKED
    found, path = masks.for_host(), Path("/proc/kpagecgroup")
    if path.exists():
        assert path.stat().st_mode & 0o007 == 0 or str(path) in found.masked
    assert "/proc/sys" in found.read_only


def test_capability_mask() -> None:
    bits = capabilities.mask()
    kept = set(capabilities.names(bits))
    assert kept == set(capabilities.KEPT) | set(capabilities.INERT)
    for never in ("sys_module", "sys_rawio", "sys_boot", "sys_time", "bpf", "perfmon", "mknod"):
        assert never not in kept
    assert capabilities.mask(("chown", "kill")) == 0b100001
