"""Whether KVM can be used, by what the host shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsecd.host import kvm
from libdsec.errors import Unsupported


def test_no_device_is_no_kvm(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="there is no") as caught:
        kvm.check(tmp_path / "kvm")
    assert str(tmp_path / "kvm") in caught.value.detail["reason"]


def test_a_device_without_hardware_behind_it_is_page_table_virtualisation(tmp_path: Path) -> None:
    (tmp_path / "kvm").touch()
    (tmp_path / "modules/kvm").mkdir(parents=True)
    (tmp_path / "modules/kvm_pvm").mkdir()
    with pytest.raises(Unsupported, match="boots no stock kernel"):
        kvm.check(tmp_path / "kvm", tmp_path / "modules")


@pytest.mark.parametrize("module", ["kvm_intel", "kvm_amd"])
def test_a_loaded_module_is_not_believed_alone(tmp_path: Path, module: str) -> None:
    (tmp_path / "kvm").touch()
    (tmp_path / "modules" / module).mkdir(parents=True)
    with pytest.raises(Unsupported, match="makes no machine"):  # a file knows no ioctl
        kvm.check(tmp_path / "kvm", tmp_path / "modules")


def test_without_kvm_guests_are_emulated_and_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> str:
        raise Unsupported("KVM", reason="none here")

    monkeypatch.setattr(kvm, "check", refuse)
    accel, note = kvm.accelerator()
    assert accel == "tcg"
    assert "emulated" in note
    assert note.endswith("none here")
    monkeypatch.setattr(kvm, "check", lambda: "kvm_intel")
    assert kvm.accelerator() == ("kvm", "")
