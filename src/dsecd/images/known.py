"""Chunks the host knows of, by digest: a table over the indexes of its blobs, on disk.

A cache: when the file is lost or no table any more, an empty one takes its place, to be filled
again from the indexes. Its calls raise `sqlite3.Error` when the disk is full or fails.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Collection
from itertools import islice
from pathlib import Path
from types import TracebackType

from dsecd.images.chunks import Index, Place

_SCHEMA = """
CREATE TABLE IF NOT EXISTS blobs (
    number INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, size INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS chunks (
    digest BLOB NOT NULL, blob INTEGER NOT NULL, block INTEGER NOT NULL,
    PRIMARY KEY (digest, blob)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS chunks_by_blob ON chunks (blob);
"""
_BATCH = 500  # parameters of one statement
_PATIENCE_S = 60.0  # with another process that writes


class KnownChunks:
    """The table at `path`. For several threads; several processes may read and write it, too.

    A chunk that lies in several blobs is found in the one that became known first.
    """

    def __init__(self, path: Path) -> None:
        self._lock = threading.Lock()
        try:
            self._db = _open(path)
        except sqlite3.OperationalError:  # the disk, not the content
            raise
        except sqlite3.DatabaseError:
            for suffix in ("", "-wal", "-shm"):
                path.with_name(path.name + suffix).unlink(missing_ok=True)
            self._db = _open(path)

    def __enter__(self) -> KnownChunks:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        with self._lock:
            self._db.close()

    def __len__(self) -> int:
        with self._lock:
            (count,) = self._db.execute("SELECT count(*) FROM blobs").fetchone()
        return int(count)

    def blobs(self) -> set[str]:
        with self._lock:
            return {blob for (blob,) in self._db.execute("SELECT id FROM blobs")}

    def size(self, blob: str) -> int:
        """Return the blob's length in bytes. Raises `KeyError` when it is not known."""
        with self._lock:
            row = self._db.execute("SELECT size FROM blobs WHERE id = ?", (blob,)).fetchone()
        if row is None:
            raise KeyError(blob)
        return int(row[0])

    def add(self, blob: str, index: Index) -> None:
        """Make the chunks of `blob` known, all or none; again is no error."""
        rows = [
            (chunk.digest, block) for chunk, block in zip(index.chunks, index.blocks, strict=True)
        ]
        rows.sort()
        with self._lock, self._transaction():
            added = self._db.execute(
                "INSERT OR IGNORE INTO blobs (id, size) VALUES (?, ?)", (blob, index.size)
            )
            if added.rowcount:
                number = added.lastrowid
                self._db.executemany(
                    "INSERT OR IGNORE INTO chunks VALUES (?, ?, ?)",
                    ((digest, number, block) for digest, block in rows),
                )

    def remove(self, blob: str) -> None:
        """Forget `blob`; unknown is no error."""
        with self._lock, self._transaction():
            self._db.execute(
                "DELETE FROM chunks WHERE blob = (SELECT number FROM blobs WHERE id = ?)", (blob,)
            )
            self._db.execute("DELETE FROM blobs WHERE id = ?", (blob,))

    def find(self, digests: Collection[bytes]) -> dict[bytes, Place]:
        """Return the places of those `digests` that are known."""
        found: dict[bytes, Place] = {}
        left = iter(digests)
        while batch := tuple(islice(left, _BATCH)):
            marks = ",".join("?" * len(batch))
            with self._lock:
                rows = self._db.execute(
                    "SELECT digest, id, block FROM chunks JOIN blobs ON number = blob "
                    f"WHERE digest IN ({marks}) ORDER BY blob DESC",
                    batch,
                ).fetchall()
            for digest, blob, block in rows:
                found[digest] = (blob, block)
        return found

    def _transaction(self) -> _Transaction:
        return _Transaction(self._db)


def _open(path: Path) -> sqlite3.Connection:
    db = sqlite3.connect(path, _PATIENCE_S, check_same_thread=False, isolation_level=None)
    try:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = NORMAL")
        db.executescript(_SCHEMA)
    except BaseException:
        db.close()
        raise
    return db


class _Transaction:
    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def __enter__(self) -> None:
        self._db.execute("BEGIN IMMEDIATE")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._db.execute("COMMIT" if error is None else "ROLLBACK")
