"""The static programs that the package brings along."""

from __future__ import annotations

import os
from pathlib import Path

from libdsec.errors import Unsupported

DIRECTORY = Path(__file__).parents[1] / "bin"


def find(configured: str, name: str) -> Path:
    """Return where the program `name` is; `configured` has the word. Raises `Unsupported`."""
    path = Path(configured) if configured else DIRECTORY / name
    if not os.access(path, os.X_OK):
        raise Unsupported(f"{path} is missing: build it, or set paths.{name[5:]}", reason="no file")
    return path
