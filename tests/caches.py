"""Where tools of the tests keep what they know, by user and checkout.

Not in the checkout: what root's run leaves there stops the run of its owner, and the other way
round. Nor for several checkouts: mypy takes modules of the same name for one another.
``scripts/test`` keeps Python's bytecode in the same place.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from pathlib import Path

CHECKOUT = hashlib.sha256(str(Path(__file__).parents[1]).encode()).hexdigest()[:12]


def directory(tool: str) -> Path | None:
    """Return this user's directory for `tool`; None where none can be made."""
    uid = os.geteuid()
    with contextlib.suppress(OSError, RuntimeError):  # RuntimeError: a user without a home
        top = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        place = top / f"dsec-tests-{uid}" / f"{tool}-{CHECKOUT}"
        place.mkdir(parents=True, exist_ok=True)
        if place.stat().st_uid == uid and os.access(place, os.W_OK):
            return place
    return None
