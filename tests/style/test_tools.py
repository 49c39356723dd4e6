"""The linters are part of the tests: the same command runs here and in CI."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import caches

ROOT = Path(__file__).resolve().parents[2]


def run(*command: str) -> None:
    """Run a tool of this environment and show what it says when it objects."""
    cache = caches.directory(command[0])
    environment = os.environ | {
        "MYPYPATH": f"{ROOT / 'src'}:{ROOT}",
        "MYPY_CACHE_DIR": str(cache or os.devnull),  # this one mypy takes for "none"
        **({"RUFF_CACHE_DIR": str(cache)} if cache else {"RUFF_NO_CACHE": "true"}),
    }
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-6000:]}{done.stderr[-2000:]}"


def test_ruff_finds_nothing() -> None:
    run("ruff", "check", ".")


def test_formatting_is_ruffs() -> None:
    sources = ("src", "libdsec", "tests", "benchmarks", "examples", "setup.py")
    run("ruff", "format", "--check", *(name for name in sources if (ROOT / name).exists()))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_types_hold_strictly() -> None:
    run("mypy", "--strict")
