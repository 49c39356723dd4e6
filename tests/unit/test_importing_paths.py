"""Which path a source names, and that it does not depend on where the daemon was started."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsecd.images.importing import opened
from dsecd.images.sources.report import unchecked
from libdsec.errors import InvalidArgument


@pytest.mark.parametrize(
    "source", ["tree", "./tree", "oci:layout", "oci:layout:tag", "oci-archive:x", "git:tree"]
)
async def test_a_relative_path_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    """It used to be looked for in the daemon's working directory."""
    for name in ("tree", "layout", "x"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidArgument, match="absolute path") as caught:
        async with opened(source, tmp_path, unchecked, insecure=False):
            pass
    assert caught.value.detail["field"] == "source"


@pytest.mark.parametrize(
    ("source", "missing"),
    [
        ("oci:{0}/none:tag", "{0}/none does not exist"),
        ("docker-archive:{0}/a:b/none.tar", "{0}/a does not exist"),
        ("docker-archive:{0}/c:d/there:name:tag", "{0}/c:d/there is not a readable tar"),
    ],
)
async def test_what_follows_the_path_is_found_behind_the_longest_that_exists(
    tmp_path: Path, source: str, missing: str
) -> None:
    (tmp_path / "c:d").mkdir()
    (tmp_path / "c:d/there").write_bytes(b"nothing")
    with pytest.raises(InvalidArgument) as caught:
        async with opened(source.format(tmp_path), tmp_path, unchecked, insecure=False):
            pass
    assert missing.format(tmp_path) in caught.value.message
