"""Layers as a sandbox sees them, stacked by the kernel, without a sandbox."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence

from dsecd.host import syscalls

_SET_STRING, _SET_FD, _CREATE = 1, 5, 6  # fsconfig(2)
_CLOEXEC = 1  # of fsopen(2) and fsmount(2)
_RDONLY, _NOSUID, _NODEV, _NOEXEC = 1, 2, 4, 8  # mount_setattr(2)
# as dsec-spawner stacks them, but that nothing is written
_SETTINGS = (("redirect_dir", "follow"), ("index", "off"), ("metacopy", "off"))


class StackError(OSError):
    """The kernel does not stack these; says why, if it told."""


@contextlib.contextmanager
def merged(lowers: Sequence[int]) -> Iterator[int]:
    """Yield the root of a read-only overlay of the mounts `lowers`, at least two, bottom first.

    It is attached nowhere and ends with its descriptor, whoever dies. Raises `StackError`.
    """
    mount = _mount(lowers)
    try:
        yield mount
    finally:
        os.close(mount)


def _mount(lowers: Sequence[int]) -> int:
    context = -1
    try:
        context = syscalls.call("fsopen", b"overlay", _CLOEXEC)
        for lower in reversed(lowers):
            _configure(context, _SET_FD, "lowerdir+", aux=lower)
        for key, value in _SETTINGS:
            _configure(context, _SET_STRING, key, value)
        _configure(context, _CREATE)
        flags = _RDONLY | _NOSUID | _NODEV | _NOEXEC
        return syscalls.call("fsmount", context, _CLOEXEC, flags)
    except OSError as error:
        raise StackError(error.errno, _explanation(context) or error.strerror) from error
    finally:
        if context >= 0:
            os.close(context)


def _configure(context: int, command: int, key: str = "", value: str = "", aux: int = 0) -> None:
    """fsconfig(2)."""
    syscalls.call("fsconfig", context, command, key.encode() or None, value.encode() or None, aux)


def _explanation(context: int) -> str:
    """Return what the kernel says about a refusal, "" when it says nothing."""
    try:
        return os.read(context, 4096).decode("utf-8", "replace").strip().removeprefix("e ")
    except OSError:
        return ""
