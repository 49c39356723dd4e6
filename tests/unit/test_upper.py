"""Planning of disk uppers; what needs a volume is in tests/system/test_upper_volume.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsecd.host import upper as upper_module
from dsecd.host import volume as volume_module
from dsecd.host.upper import Upper, Uppers
from dsecd.host.volume import Volume, open_volume
from libdsec.errors import Exhausted, Unsupported


@pytest.fixture
def on_xfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Uppers:
    """Uppers that believe in an XFS volume with quotas; nothing here writes to it."""
    monkeypatch.setattr(upper_module, "open_volume", lambda *args: Volume(tmp_path, "xfs"))
    uppers = Uppers(tmp_path, tmp_path / "point")
    uppers.start()
    return uppers


def test_names_tell_nothing_and_are_stable(on_xfs: Uppers) -> None:
    first = on_xfs.plan("s0-n0-1-abc", 1 << 30)
    again = on_xfs.plan("s0-n0-1-abc", 1 << 30)
    assert first.dir == again.dir
    assert "abc" not in first.dir
    assert on_xfs.plan("s0-n0-1-abd", 1 << 30).dir != first.dir


def test_projects_are_never_shared(on_xfs: Uppers) -> None:
    projects = [on_xfs.plan(f"s{n}", 1 << 30).project for n in range(100)]
    assert len(set(projects)) == 100
    assert min(projects) >= 1 << 30


def test_a_tiny_limit_still_lets_the_sandbox_start(on_xfs: Uppers) -> None:
    assert on_xfs.plan("s", 1).limit_bytes == upper_module.MIN_BYTES


def test_a_full_volume_refuses_with_a_retryable_error(
    on_xfs: Uppers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upper_module, "RESERVE_BYTES", 1 << 62)
    with pytest.raises(Exhausted) as caught:
        on_xfs.plan("s", 1 << 30)
    assert caught.value.retryable


def test_without_a_volume_the_reason_is_given(tmp_path: Path) -> None:
    uppers = Uppers(tmp_path / "upper", tmp_path / "point", kinds=())
    uppers.start()
    assert not uppers.feature().available
    with pytest.raises(Unsupported, match="upper='memory'"):
        uppers.plan("s", 1 << 30)
    assert uppers.free_bytes() == 0


async def test_sweep_without_a_volume_does_nothing(tmp_path: Path) -> None:
    assert await Uppers(tmp_path, tmp_path / "point").sweep(["s"]) == []


def test_a_missing_mkfs_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(volume_module, "_existing", lambda directory: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Unsupported, match=r"btrfs-progs.*xfsprogs"):
        open_volume(tmp_path / "upper", tmp_path / "point", 1 << 30)
    assert list((tmp_path / "upper").iterdir()) == []


def test_a_small_disk_gets_no_volume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(volume_module, "SHARE", 1e-9)
    monkeypatch.setattr(volume_module, "_existing", lambda directory: None)
    with pytest.raises(Exhausted, match="free space"):
        open_volume(tmp_path / "upper", tmp_path / "point")


def test_an_upper_fits_into_a_journal() -> None:
    import msgspec

    upper = Upper("/run/dsec/upper/0011223344556677", 7, 1 << 30)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(upper), type=Upper) == upper
