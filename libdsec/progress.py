"""What a daemon tells of a layer that is being made."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import msgspec

from libdsec import model
from libdsec.link import unpack

ImportCallback: TypeAlias = Callable[[model.ImportProgress], None]


def progress_items(
    on_progress: ImportCallback | None,
) -> Callable[[msgspec.Raw], None] | None:
    """Return what passes a call's items to `on_progress`, None when nobody asks."""
    if on_progress is None:
        return None
    return lambda raw: on_progress(unpack(raw, model.ImportProgress))
