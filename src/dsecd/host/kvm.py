"""Whether KVM runs guests here, and what runs them where it does not.

A KVM that answers may still be unable to run a stock kernel: it may be page-table virtualisation
(PVM), as clouds offer it inside guests without nested VMX or SVM. It runs small pieces of code, and
kernels made for it; others die early, under every VMM.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from dsecd.host import syscalls
from dsecd.host.vm_plan import Accel
from libdsec.errors import Unsupported

DEVICE = Path("/dev/kvm")
_MODULES = Path("/sys/module")
_GET_API_VERSION, _CREATE_VM = 0xAE00, 0xAE01  # linux/kvm.h
_API_VERSION = 12  # the only one there ever was, since Linux 2.6.22
EMULATED = (
    "guests are emulated (TCG): what computes in them takes some 10 to 20 times as long as on this "
    "host"
)


def check(device: Path = DEVICE, modules: Path = _MODULES) -> str:
    """Return which KVM this is. Raises `Unsupported` with the reason when it runs no guest."""
    try:
        fd = os.open(device, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        raise _unsupported(f"there is no {device}: no virtualisation here, or it is off") from None
    except OSError as error:
        raise _unsupported(f"{device}: {error.strerror}") from error
    try:
        kind = _kind(modules)
        _make_machine(fd)
    finally:
        os.close(fd)
    return kind


def accelerator() -> tuple[Accel, str]:
    """Return what runs guests here, and what there is to say about it ("" for nothing)."""
    try:
        check()
    except Unsupported as error:
        return "tcg", f"{EMULATED}; no KVM: {error.detail['reason']}"
    return "kvm", ""


def _kind(modules: Path) -> str:
    for module in ("kvm_intel", "kvm_amd"):
        if (modules / module).is_dir():
            return module
    if syscalls.host_arch() == "aarch64":
        return "arm64"
    raise _unsupported(
        "/dev/kvm answers, but neither kvm_intel nor kvm_amd is loaded: it is page-table "
        "virtualisation, which boots no stock kernel"
    )


def _make_machine(fd: int) -> None:
    """Make a machine without memory or vCPUs: fails while another hypervisor has the CPU."""
    try:
        version = fcntl.ioctl(fd, _GET_API_VERSION)
        if version != _API_VERSION:
            raise _unsupported(f"KVM's API has version {version}, expected {_API_VERSION}")
        os.close(fcntl.ioctl(fd, _CREATE_VM, 0))
    except OSError as error:
        raise _unsupported(f"KVM makes no machine: {error.strerror}") from error


def _unsupported(reason: str) -> Unsupported:
    return Unsupported(f"KVM cannot be used: {reason}", reason=reason)
