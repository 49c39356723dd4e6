"""Copies of images and indexes in a host's cache: which go when there are too many."""

from __future__ import annotations

import os
import time
from pathlib import Path

from dsecd.config import parse
from dsecd.images.copies import Copies

KB = 1024


def put(path: Path, size: int, age_s: float = 0.0) -> Path:
    path.write_bytes(bytes(size))
    then = time.time() - age_s
    os.utime(path, (then, then))
    return path


def test_the_least_recently_used_go_until_the_rest_fits(tmp_path: Path) -> None:
    copies = Copies(tmp_path, 10 * KB)
    old = put(tmp_path / "images/old.erofs", 4 * KB, 300)
    older = put(tmp_path / "indexes/older", 4 * KB, 400)
    young = put(tmp_path / "images/young.erofs", 4 * KB, 100)
    assert copies.trim(()) == {older}
    assert (old.exists(), older.exists(), young.exists()) == (True, False, True)
    assert copies.trim(()) == set()


def test_what_is_used_stays_and_counts(tmp_path: Path) -> None:
    copies = Copies(tmp_path, 10 * KB)
    used = put(tmp_path / "images/used.erofs", 20 * KB, 500)
    index = put(tmp_path / "indexes/used", KB, 500)
    other = put(tmp_path / "indexes/other", KB)
    assert copies.trim({"used.erofs", "used"}) == {other}
    assert used.exists()
    assert index.exists()


def test_use_is_remembered_when_it_ends(tmp_path: Path) -> None:
    copies = Copies(tmp_path, 10 * KB)
    used = put(tmp_path / "images/used.erofs", 6 * KB, 7200)
    put(tmp_path / "images/other.erofs", 4 * KB, 3600)
    assert copies.trim({"used.erofs"}) == set()
    third = put(tmp_path / "images/third.erofs", KB)
    assert copies.trim(()) == {tmp_path / "images/other.erofs"}
    assert used.exists()
    assert third.exists()


def test_without_a_bound_nothing_goes(tmp_path: Path) -> None:
    copies = Copies(tmp_path, 0)
    put(tmp_path / "images/big.erofs", 100 * KB, 9999)
    assert copies.trim(()) == set()


def test_what_a_killed_daemon_was_fetching_goes_at_the_next_start(tmp_path: Path) -> None:
    Copies(tmp_path, 0)
    half = put(tmp_path / "images/.0123.erofs.abcd", KB)
    whole = put(tmp_path / "images/0123.erofs", KB)
    copies = Copies(tmp_path, 1)
    assert (half.exists(), whole.exists()) == (False, True)
    fetching = put(tmp_path / "images/.4567.erofs.abcd", KB)
    assert copies.trim(()) == {whole}
    assert fetching.exists()


def test_copies_and_chunks_share_the_bound() -> None:
    cache = parse("[cache]\nsize_mb = 80").cache
    assert (cache.copies_bytes, cache.chunks_bytes) == (10 << 20, 70 << 20)
    assert parse("").cache.chunks_bytes == 0  # no bound
