"""The network programs and their maps: loaded, or taken over from the daemon that was before.

Links and maps are pinned in one directory, ``<pins>/<name>``, whose name tells programs and
constants apart. It is filled as ``<name>-part`` and renamed, so a directory with the right name is
whole. As long as it is there, the programs run, daemon or not: a killed one opens nothing. A daemon
with other programs attaches its own first, beside the old ones, and then removes these: a packet
passes that both allow, so the change opens nothing either.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from dsecd import fastpath
from dsecd.fastpath import StepError
from dsecd.host import bpf
from libdsec.errors import Internal, Unsupported

MAPS = ("bindings", "counts", "links", "rules", "names", "fragments", "events", "constants")
PROGRAMS = (
    "connect4", "connect6", "egress", "ingress", "link", "sendmsg4", "sendmsg6", "sock_create",
)  # fmt: skip
ATTACHED = {
    "egress": bpf.EGRESS, "ingress": bpf.INGRESS, "sock_create": bpf.SOCK_CREATE,
    "connect4": bpf.CONNECT4, "connect6": bpf.CONNECT6,
    "sendmsg4": bpf.SENDMSG4, "sendmsg6": bpf.SENDMSG6,
}  # fmt: skip
_KEPT = ("bindings", "counts", "links", "rules", "names", "events")


class Programs:
    """Descriptors of the maps and of the program for interfaces; `adopted` ones run already."""

    def __init__(
        self,
        cgroup_fd: int,
        *,
        level: int,
        deny_unbound: bool,
        events_per_s: int,
        pins: Path | None,
    ) -> None:
        version = fastpath.network_programs_version()
        self._pins = pins
        self._cgroup_fd = cgroup_fd
        self._name = f"{version:016x}-{level}-{int(deny_unbound)}-{events_per_s}"
        self._options = (level, deny_unbound, events_per_s)
        self.fds: dict[str, int] = {}
        self._loaded: dict[str, int] = {}
        self._links: dict[str, int] = {}
        self.adopted = False
        try:
            if pins is not None and self._is_attached(pins / self._name):
                self._adopt()
            else:
                self._load()
        except BaseException:
            self.close()
            raise

    def _is_attached(self, directory: Path) -> bool:
        """Whether all programs of a directory run for our cgroup, not for one that is gone."""
        if not directory.is_dir():
            return False
        cgroup = os.fstat(self._cgroup_fd).st_ino
        for name in ATTACHED:
            link = bpf.open_pin(directory / f"at_{name}")
            try:
                if bpf.linked_cgroup(link) != cgroup:
                    return False
            finally:
                os.close(link)
        return True

    def _adopt(self) -> None:
        self.adopted = True
        for name in (*_KEPT, "link"):
            self.fds[name] = bpf.open_pin(self._directory / name)

    def _load(self) -> None:
        try:
            maps, programs = fastpath.load_network_programs(*self._options)
        except StepError as error:
            raise Unsupported(
                f"the kernel does not take the network programs ({error}): network rules cannot be"
                " enforced on this host",
                reason=str(error),
            ) from error
        self.fds = dict(zip(MAPS, maps, strict=True))
        self._loaded = dict(zip(PROGRAMS, programs, strict=True))
        self.fds["link"] = self._loaded.pop("link")

    @property
    def _directory(self) -> Path:
        if self._pins is None:
            raise Internal("network programs without pins have no directory")
        return self._pins / self._name

    def attach(self) -> None:
        """Attach to the parent of all sandboxes' cgroups, pin, and remove what others pinned.

        Raises `Internal`; then `close` detaches what was attached.
        """
        if not self.adopted:
            for name, kind in ATTACHED.items():
                self._links[name] = bpf.link_cgroup(self._loaded[name], self._cgroup_fd, kind)
            if self._pins is not None:
                self._pin()
        self._remove_others()

    def _pin(self) -> None:
        part = self._directory.with_name(f"{self._name}-part")  # a name with a dot is refused
        remove_pins(part)
        part.mkdir(mode=0o700)
        for name in (*_KEPT, "link"):
            bpf.pin(self.fds[name], part / name)
        for name, fd in self._links.items():
            bpf.pin(fd, part / f"at_{name}")
        remove_pins(self._directory)  # of a cgroup that is gone
        part.rename(self._directory)

    def _remove_others(self) -> None:
        if self._pins is None:
            return
        for path in self._pins.iterdir():
            if path.name != self._name:
                remove_pins(path)

    def close(self, *, remove: bool = False) -> None:
        """Close the descriptors. With `remove` the programs go too: nothing is enforced then."""
        for fd in (*self.fds.values(), *self._loaded.values(), *self._links.values()):
            os.close(fd)
        self.fds, self._loaded, self._links = {}, {}, {}
        if remove and self._pins is not None:
            remove_pins(self._directory)
            self._remove_others()


def remove_pins(directory: Path) -> None:
    """Unpin all of a directory, links last: until then the programs find their maps."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for path in sorted(directory.iterdir(), key=lambda p: p.name.startswith("at_")):
            path.unlink()
        directory.rmdir()
