"""Where this host's apt gets its packages from (sources.list(5))."""

from __future__ import annotations

import re
from pathlib import Path

_SITE = re.compile(r"\bhttps?://(?:[^/@\s]*@)?([A-Za-z0-9.-]+)")


def hosts(directory: Path = Path("/etc/apt")) -> list[str]:
    """Return the hosts of all sources that are not commented out, each once; [] without apt."""
    files = [directory / "sources.list", *sorted((directory / "sources.list.d").glob("*"))]
    found: dict[str, None] = {}
    for file in files:
        if file.suffix in (".list", ".sources") and file.is_file():
            for line in file.read_text(errors="replace").splitlines():
                found.update(dict.fromkeys(_SITE.findall(line.partition("#")[0].lower())))
    return list(found)
