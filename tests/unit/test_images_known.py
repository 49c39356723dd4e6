"""The table of known chunks: what it finds, and what it does with damage."""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path

import pytest

from dsecd.images.chunks import Index, blob_id, decode_index, encode_index
from dsecd.images.known import KnownChunks
from dsecd.images.model import CHUNK, Chunk


def index_of(*digests: bytes) -> Index:
    found = [Chunk(digest, CHUNK) for digest in digests]
    data = encode_index(found)
    return decode_index(data, blob_id(data))


def test_known_chunks_come_and_go(tmp_path: Path) -> None:
    a, b, c = (letter * 32 for letter in (b"a", b"b", b"c"))
    with KnownChunks(tmp_path / "known.db") as known:
        known.add("one", index_of(a, b))
        known.add("two", index_of(b, c))
        known.add("two", index_of(b, c))
        assert known.find([a, b, c, b"d" * 32]) == {a: ("one", 0), b: ("one", 16), c: ("two", 16)}
        assert (len(known), known.size("two"), known.blobs()) == (2, 2 * CHUNK, {"one", "two"})
    with KnownChunks(tmp_path / "known.db") as known:
        known.remove("one")
        known.remove("unknown")
        assert known.find([a, b, c]) == {b: ("two", 0), c: ("two", 16)}
        assert known.find([]) == {}
        with pytest.raises(KeyError):
            known.size("one")
        known.add("one", index_of(a))
        assert known.find([a]) == {a: ("one", 0)}


def test_known_chunks_are_quick_and_bear_threads(tmp_path: Path) -> None:
    digests = [hashlib.sha256(b"%d" % number).digest() for number in range(20_000)]
    with KnownChunks(tmp_path / "known.db") as known:
        known.add("large", index_of(*digests))
        results: list[int] = []
        threads = [
            threading.Thread(target=lambda: results.append(len(known.find(digests))))
            for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        for number in range(20):
            known.add(f"small{number}", index_of(b"%032d" % number))
        for thread in threads:
            thread.join()
        assert results == [20_000, 20_000]
        known.remove("large")
        assert known.find(digests) == {}


def test_a_damaged_table_is_begun_anew(tmp_path: Path) -> None:
    for damage in (b"garbage" * 1000, b"", b"SQLite format 3\0" + bytes(5000)):
        (tmp_path / "known.db").write_bytes(damage)
        with KnownChunks(tmp_path / "known.db") as known:
            assert known.blobs() == set()
            known.add("one", index_of(b"a" * 32))
            assert known.find([b"a" * 32]) == {b"a" * 32: ("one", 0)}
        (tmp_path / "known.db").unlink()


def test_half_an_index_is_never_known(tmp_path: Path) -> None:
    index = index_of(b"a" * 32, b"b" * 32)
    index.blocks[1] = 1 << 80  # what SQLite refuses, after the first row
    with KnownChunks(tmp_path / "known.db") as known:
        with pytest.raises(OverflowError):
            known.add("one", index)
        assert (known.find([b"a" * 32]), known.blobs()) == ({}, set())
