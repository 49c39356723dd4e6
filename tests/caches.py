"""Where tools of the tests keep what they know, by user.

Not in the checkout: what root's run leaves there stops the run of its owner, and the other way
round. ``scripts/test`` keeps Python's bytecode in the same place.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def directory(tool: str) -> Path | None:
    """Return this user's directory for `tool`; None where none can be made."""
    uid = os.geteuid()
    with contextlib.suppress(OSError, RuntimeError):  # RuntimeError: a user without a home
        top = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        place = top / f"dsec-tests-{uid}" / tool
        place.mkdir(parents=True, exist_ok=True)
        if place.stat().st_uid == uid and os.access(place, os.W_OK):
            return place
    return None
