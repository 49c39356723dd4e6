"""The system-call layer: C behind Cython, or its Python twin.

The only importer of `_fastpath`. ``DSEC_FASTPATH=c|python`` forces one and fails when it is
missing; without it the extension is taken when it was built. `IMPLEMENTATION` names what was
chosen; the contract of the functions is `_fastpath/_core.pyi`.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING

from _fastpath import StepError
from libdsec.errors import Unsupported

if TYPE_CHECKING:
    from _fastpath import _core

_MODULES = {"c": "_fastpath._core", "python": "_fastpath.twin"}


def _choose() -> tuple[str, object]:
    """Return the implementation's name and module."""
    forced = os.environ.get("DSEC_FASTPATH", "")
    if forced and forced not in _MODULES:
        raise ImportError(f"DSEC_FASTPATH={forced!r}: must be one of {', '.join(_MODULES)}")
    reasons = []
    for name in [forced] if forced else list(_MODULES):
        try:
            return name, importlib.import_module(_MODULES[name])
        except ImportError as error:
            reasons.append(f"{name}: {error}")
    raise ImportError("no fast path: " + "; ".join(reasons))


IMPLEMENTATION, _module = _choose()
if not TYPE_CHECKING:
    _core = _module

make_userns = _core.make_userns
make_shift_userns = _core.make_shift_userns
make_netns = _core.make_netns
netns_reusable = _core.netns_reusable
mount_erofs = _core.mount_erofs
open_tree = _core.open_tree
move_mount = _core.move_mount
idmap_mount = _core.idmap_mount
umount = _core.umount
remove_tree = _core.remove_tree
remove_cgroup = _core.remove_cgroup
set_project = _core.set_project
set_project_quota = _core.set_project_quota
get_project_usage = _core.get_project_usage
build_erofs = _core.build_erofs
read_chunks = _core.read_chunks
load_network_programs = _core.load_network_programs
network_programs_version = _core.network_programs_version
load_file_programs = _core.load_file_programs
file_programs_version = _core.file_programs_version
update_map = _core.update_map
update_map_batch = _core.update_map_batch
delete_map_batch = _core.delete_map_batch


def make_sched_cookie(pid: int) -> None:
    """Give the process `pid` a fresh core-scheduling cookie. Raises `Unsupported`, `StepError`."""
    try:
        _core.make_sched_cookie(pid)
    except StepError as error:
        raise _cookie_error(error) from error


def share_sched_cookie(source: int, target: int) -> None:
    """Give `target` the cookie of `source`. Raises `Unsupported`, `StepError`."""
    try:
        _core.share_sched_cookie(source, target)
    except StepError as error:
        raise _cookie_error(error) from error


def get_sched_cookie(pid: int) -> int:
    """Return the cookie of `pid`, 0 for none. Raises `Unsupported`, `StepError`."""
    try:
        return _core.get_sched_cookie(pid)
    except StepError as error:
        raise _cookie_error(error) from error


def _cookie_error(error: StepError) -> Exception:
    """A kernel without CONFIG_SCHED_CORE answers EINVAL, one without SMT siblings ENODEV."""
    reasons = {22: "the kernel has no CONFIG_SCHED_CORE", 19: "the processor has no SMT"}
    reason = reasons.get(error.errno or 0)
    return Unsupported(f"core scheduling: {reason}", reason=reason) if reason else error


__all__ = [
    "IMPLEMENTATION",
    "StepError",
    "build_erofs",
    "file_programs_version",
    "get_project_usage",
    "get_sched_cookie",
    "idmap_mount",
    "load_file_programs",
    "load_network_programs",
    "make_netns",
    "make_sched_cookie",
    "make_shift_userns",
    "make_userns",
    "mount_erofs",
    "move_mount",
    "netns_reusable",
    "network_programs_version",
    "open_tree",
    "read_chunks",
    "remove_cgroup",
    "remove_tree",
    "set_project",
    "set_project_quota",
    "share_sched_cookie",
    "umount",
]
