"""The host's forwarding switches: on while a sandbox needs them, and then as they were.

Values found at first are kept in a file until they are restored, so that a daemon that was killed
still puts back the administrator's settings and not its own.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from libdsec.errors import Internal

_NET = Path("/proc/sys/net")
_FORWARD4 = "ipv4/ip_forward"
_FORWARD6 = "ipv6/conf/all/forwarding"


def has_ipv6() -> bool:
    """Whether the calling thread's network namespace speaks IPv6."""
    try:
        return _read("ipv6/conf/all/disable_ipv6") == "0"
    except OSError:  # built without, or ipv6.disable=1
        return False


class Forwarding:
    """Switches forwarding in the calling thread's network namespace; for one thread."""

    def __init__(self, state: Path) -> None:
        self._state = state

    def remember(self, ipv6: bool) -> tuple[str, ...]:
        """Note the switches as they are; return the families ("ipv4", "ipv6") that are off.

        What an earlier life of the daemon noted and did not restore counts, not what it left.
        IPv6 forwarding makes the kernel ignore router advertisements (accept_ra 1), by which the
        host may have its own default route: such interfaces get accept_ra 2 (ip-sysctl.rst).
        """
        before = self._load()
        if before is None:
            before = {_FORWARD4: _read(_FORWARD4)}
            if ipv6:
                before[_FORWARD6] = _read(_FORWARD6)
                if before[_FORWARD6] == "0":
                    before |= dict.fromkeys(_accepting_interfaces(), "1")
            self._save(before)
        pairs = (("ipv4", _FORWARD4), ("ipv6", _FORWARD6))
        return tuple(family for family, name in pairs if before.get(name) == "0")

    def enable(self) -> None:
        """Switch on what `remember` noted; after the rules that guard it are loaded."""
        for name in reversed(self._load() or {}):  # accept_ra before the forwarding that needs it
            _write(name, "2" if name.endswith("/accept_ra") else "1")

    def restore(self) -> None:
        """Put back what `remember` found, also in an earlier life of the daemon."""
        before = self._load()
        if before is None:
            return
        for name, value in before.items():
            try:
                _write(name, value)
            except FileNotFoundError:
                continue  # the interface is gone
        self._state.unlink(missing_ok=True)

    def _load(self) -> dict[str, str] | None:
        try:
            return msgspec.json.decode(self._state.read_bytes(), type=dict[str, str])
        except FileNotFoundError:
            return None
        except msgspec.DecodeError as error:
            raise Internal(f"{self._state} is damaged; remove it: {error}") from error

    def _save(self, values: dict[str, str]) -> None:
        self._state.parent.mkdir(parents=True, exist_ok=True)
        temporary = self._state.with_name(self._state.name + ".new")
        temporary.write_bytes(msgspec.json.encode(values))
        temporary.replace(self._state)


def _accepting_interfaces() -> list[str]:
    found = []
    for directory in (_NET / "ipv6/conf").iterdir():
        name = directory.name
        path = f"ipv6/conf/{name}/accept_ra"
        if name not in ("all", "default", "lo") and _read(path) == "1":
            found.append(path)
    return found


def _read(name: str) -> str:
    return (_NET / name).read_text().strip()


def _write(name: str, value: str) -> None:
    path = _NET / name
    if path.read_text().strip() != value:  # a write of all/forwarding walks every interface
        path.write_text(value)
