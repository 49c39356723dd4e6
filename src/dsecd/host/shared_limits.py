"""Counters of the whole host that one sandbox could use up for all: raised while dsecd runs.

Pseudo terminals and asynchronous I/O contexts are counted per host, by no cgroup; their memory is
charged to the sandbox, so its memory limit bounds what it takes of the raised numbers. The values
found at first are kept in a file until they are restored, also by a later daemon.
"""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec

logger = logging.getLogger(__name__)
_SYS = Path("/proc/sys")
RAISED = {"kernel/pty/max": 1 << 18, "fs/aio-max-nr": 1 << 22}


def raise_limits(state: Path, root: Path = _SYS) -> None:
    """Raise what is lower, noting what it was in the file `state`.

    A limit that cannot be raised is logged: the host then stays as exposed as it was.
    """
    before = _load(state)
    for name, wanted in RAISED.items():
        try:
            found = int((root / name).read_text())
            if found >= wanted:
                continue
            before.setdefault(name, found)
            state.write_bytes(msgspec.json.encode(before))
            (root / name).write_text(str(wanted))
        except OSError as error:
            logger.warning("cannot raise %s: %s", name, error.strerror)


def restore_limits(state: Path, root: Path = _SYS) -> None:
    """Put back what `raise_limits` found, unless somebody has changed it since."""
    for name, value in _load(state).items():
        try:
            if int((root / name).read_text()) == RAISED.get(name):
                (root / name).write_text(str(value))
        except OSError as error:
            logger.warning("cannot restore %s: %s", name, error.strerror)
    state.unlink(missing_ok=True)


def _load(state: Path) -> dict[str, int]:
    try:
        return msgspec.json.decode(state.read_bytes(), type=dict[str, int])
    except (FileNotFoundError, msgspec.DecodeError):
        return {}
