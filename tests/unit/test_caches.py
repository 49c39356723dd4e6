"""Where the tools' caches go: a directory of this user's own, or nowhere."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests import caches


def test_each_user_has_a_directory_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """mypy ended with an internal error over a cache that root's run had left in the checkout."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    place = caches.directory("mypy")
    assert place is not None
    assert place.is_relative_to(tmp_path)
    assert str(os.geteuid()) in str(place)
    other = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: other)
    assert caches.directory("mypy") is None, "made by somebody else"


def test_without_a_place_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert caches.directory("mypy") is None
