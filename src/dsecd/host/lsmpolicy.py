"""The programs of bpf/lsm and what sandboxes are denied: entered into the kernel's maps.

The programs run for every process of the host and find what binds it by the id of the sandbox's
cgroup; who is not in a bound cgroup, or acts with the rights of the host's user namespace, is let
through after a few loads. All rows of a sandbox begin with the id of its cgroup: nothing is shared,
for most rows are a sandbox's own anyway (the devices of its file systems, the paths found in them),
and so a daemon that takes over needs to know nothing to remove them. A row takes some 400 bytes.

Links and maps are pinned in one directory, whose name tells programs and constants apart, as
`dsecd.host.netpins` does it: a killed daemon opens nothing. One with other programs enters the
living sandboxes into its own before it removes the old ones: what both allow passes.

All methods belong to one thread; each is a few bpf(2) calls, which never wait.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from dsecd import fastpath
from dsecd.fastpath import StepError
from dsecd.host import bpf, lsmtable
from dsecd.host.bpf import Map
from dsecd.host.lsmtable import Rows, Table
from dsecd.host.netpins import remove_pins
from libdsec.errors import Exhausted, Internal, Unsupported

_SIZES = {  # in the order of `fastpath.load_file_programs`
    "bindings": (8, lsmtable.BINDING_BYTES),
    "roots": (lsmtable.ROOT_KEY_BYTES, lsmtable.NODE_BYTES),
    "names": (lsmtable.NAME_KEY_BYTES, lsmtable.NODE_BYTES),
    "mount_types": (lsmtable.TYPE_KEY_BYTES, 4),
    "abstracts": (lsmtable.ABSTRACT_KEY_BYTES, 4),
}
_PLACES = ("names", "mount_types", "abstracts")
_LEADING = ("roots", "bindings")  # to places: entered after them, and removed before
_LAST_NUMBER = (1 << 32) - 1


def load(level: int) -> tuple[dict[str, int], list[int]]:
    """Load the programs; return descriptors of the maps and of the programs.

    `level` is the depth of a sandbox's cgroup below the v2 root. Raises `Unsupported` where the
    kernel refuses.
    """
    try:
        maps, programs = fastpath.load_file_programs(level)
    except StepError as error:
        raise Unsupported(
            f"the kernel does not take the programs for files ({error})", reason=str(error)
        ) from error
    *maps, constants = maps
    os.close(constants)  # the programs keep it
    return dict(zip(_SIZES, maps, strict=True)), programs


class FilePolicies:
    """Binds cgroups to tables. Order of a start: construct, `keep` or `enter` all that live,
    `start`. `pins` is a directory of our own in a BPF file system, None when the programs may end
    with this process. Raises `Unsupported`, `Internal`.
    """

    def __init__(self, level: int, pins: Path | None) -> None:
        self._pins = pins
        self._name = f"{fastpath.file_programs_version():016x}-{level}"
        self._links: list[int] = []
        self._programs: list[int] = []
        self.adopted = pins is not None and (pins / self._name).is_dir()
        if self.adopted:
            self._fds = {name: bpf.open_pin(self._directory / name) for name in _SIZES}
        else:
            self._fds, self._programs = load(level)
        self._maps = {name: Map(self._fds[name], *sizes, name) for name, sizes in _SIZES.items()}
        self._entered: dict[int, dict[str, set[bytes]]] = {}
        self._next = 0
        if self.adopted:
            self._read()
        self._live: set[int] = set()

    @property
    def _directory(self) -> Path:
        if self._pins is None:
            raise Internal("programs without pins have no directory")
        return self._pins / self._name

    def _read(self) -> None:
        """Learn what a daemon before this one has entered."""
        for name, map_ in self._maps.items():
            for key in map_.all_keys():
                rows = self._entered.setdefault(lsmtable.cgroup_of(key), _no_rows())
                rows[name].add(key)
                if name == "names":
                    self._next = max(self._next, lsmtable.number_of(key))

    def start(self) -> None:
        """Enforce: attach the programs. What nobody kept or entered again is removed."""
        for cgroup in self._entered.keys() - self._live:
            self.remove(cgroup)
        if not self.adopted:
            self._links = [bpf.link_lsm(program) for program in self._programs]
            if self._pins is not None:
                self._pin()
        if self._pins is not None:
            for path in self._pins.iterdir():
                if path.name != self._name:
                    remove_pins(path)

    def _pin(self) -> None:
        part = self._directory.with_name(f"{self._name}-part")  # a name with a dot is refused
        remove_pins(part)
        part.mkdir(mode=0o700)
        for name, fd in self._fds.items():
            bpf.pin(fd, part / name)
        for number, fd in enumerate(self._links):
            bpf.pin(fd, part / f"at_{number}")
        part.rename(self._directory)

    def close(self, *, remove: bool = False) -> None:
        """Let go. With pins the programs go on, unless `remove`, for a stop without sandboxes."""
        for fd in (*self._fds.values(), *self._programs, *self._links):
            os.close(fd)
        self._fds, self._programs, self._links = {}, [], []
        if remove and self._pins is not None:
            for path in list(self._pins.iterdir()):
                remove_pins(path)

    # --- sandboxes ------------------------------------------------------------------------------

    def keep(self, cgroup: int) -> bool:
        """Go on with what an earlier daemon entered; return whether there is anything."""
        if cgroup in self._entered:
            self._live.add(cgroup)
        return cgroup in self._live

    def enter(self, cgroup: int, table: Table, *, beside: bool = False) -> None:
        """Bind the cgroup with id `cgroup`, or give it another table.

        `beside`: what holds for file systems that the new table lacks goes on, for one that is
        about to be swapped. Raises `Exhausted` when a map is full; nothing is opened by that.
        """
        before = self._entered.get(cgroup) or _no_rows()
        base, self._next = self._next, self._next + len(table.names) + len(table.roots)
        if self._next > _LAST_NUMBER:
            raise Exhausted("the numbers of places are used up: restart the daemon")
        rows = lsmtable.pack(table, cgroup, base)
        new = {name: set(part) for name, part in rows.items()}
        old = {name: before[name] - new[name] for name in new}
        try:
            for name in _PLACES:
                self._update(name, rows[name])
        except BaseException:
            self._delete({name: new[name] - before[name] for name in _PLACES})
            raise
        self._entered[cgroup] = {name: new[name] | old[name] for name in new}
        self._live.add(cgroup)
        for name in _LEADING:
            self._update(name, rows[name])
        if not beside:
            self._delete(old)
            self._entered[cgroup] = new

    def remove(self, cgroup: int) -> None:
        """Forget a sandbox whose processes are gone; one that is not bound is fine."""
        self._live.discard(cgroup)
        rows = self._entered.pop(cgroup, None)
        if rows is not None:
            self._delete(rows)

    def _update(self, name: str, rows: Rows) -> None:
        self._maps[name].update_all(list(rows), list(rows.values()))

    def _delete(self, rows: Mapping[str, set[bytes]]) -> None:
        for name in (*reversed(_LEADING), *_PLACES):
            self._maps[name].delete_all(list(rows.get(name, ())))


def _no_rows() -> dict[str, set[bytes]]:
    return {name: set() for name in _SIZES}
