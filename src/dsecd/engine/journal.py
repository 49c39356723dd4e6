"""What the daemon must still know after `kill -9`: a row for every sandbox, written before acting.

SQLite in WAL mode. A committed row survives the death of the process without any fsync, because the
pages are in the kernel; `synchronous=NORMAL` keeps the file consistent over a power cut, after
which no sandbox is alive anyway. Measured here: 45 µs of CPU for a commit of one row, 11 µs a row
in groups of 16. Writers therefore enqueue; one commit takes all that gathered: at once, or a
millisecond after the last one under load. What nobody waits for comes along with the next commit,
and of several rows of one sandbox only the last is written.
Checkpoints, which do fsync, run in a thread on their own connection.

States of a row: ``intent`` (resources are taken, nothing may exist yet or everything),
``running`` (also while it is being destroyed), ``ended`` (kept for a while to answer *why*).
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import threading
from pathlib import Path
from typing import Literal

import msgspec

from libdsec.errors import Internal
from libdsec.model import CONTAINER, CpuClass, DSecContainerRunArgs, VmArgs

SCHEMA_VERSION = 1
CHECKPOINT_BYTES = 4 << 20  # of WAL, before it is moved into the database
GROUP_S = 0.001  # between commits under load
POST_S = 0.02  # how long a row that nobody waits for may stay in memory
RESTART_BYTES = 64 << 20  # of WAL, before writers are held up to start it afresh
RowState = Literal["intent", "running", "ended"]
PausedBy = Literal["", "caller", "idle"]  # nobody, a request, the daemon
_UPSERT = (
    "INSERT INTO sandboxes (id, key, state, body) VALUES (?, ?, ?, ?) "
    "ON CONFLICT (id) DO UPDATE SET state = excluded.state, body = excluded.body"
)

_DELETE = "DELETE FROM sandboxes WHERE id = ?"


class Row(msgspec.Struct, kw_only=True):
    """One sandbox as it is journalled. `handle` is the backend's, `policy` `policies.Source`."""

    id: str
    key: str
    owner: str
    state: RowState
    final: str = ""  # of an ended one: stopped or failed
    reason: str = ""
    created_at: float
    ended_at: float | None = None
    idle_s: float | None = None
    args: DSecContainerRunArgs
    backend: str = CONTAINER  # its name; rows of a daemon that knew no other have none
    vm: VmArgs | None = None
    sealed: bytes = b""  # tells whether other secrets are asked for; the values are not here
    handle: bytes = b""
    address: str = ""
    address6: str = ""
    notes: list[str] = []
    policy: bytes = b""
    claimed: bool = False
    cpu_class: CpuClass | None = None  # when it was changed
    paused_by: PausedBy = ""
    own: bool = False  # the engine's: it ends with the daemon that made it


class Journal:
    """The open database. One daemon per file: `dsecd.__main__` holds the lock."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._encoder = msgspec.msgpack.Encoder()
        self._pending: dict[str, tuple[str, str, str, bytes] | None] = {}  # by id; None: remove
        self._waiting: list[asyncio.Future[None]] = []
        self._flush_at: asyncio.TimerHandle | None = None
        self._flush_when = 0.0
        self._last_commit = 0.0
        self._checkpoint: threading.Thread | None = None
        self.commits = 0
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._db = self._open()

    def _open(self) -> sqlite3.Connection:
        """Open or make the database; a damaged file is set aside, `sweep` then cleans the host."""
        try:
            return _connect(self._path)
        except sqlite3.DatabaseError:
            for suffix in ("", "-wal", "-shm"):
                with contextlib.suppress(FileNotFoundError):
                    Path(f"{self._path}{suffix}").replace(f"{self._path}{suffix}.damaged")
            return _connect(self._path)

    def next_epoch(self) -> int:
        """Count and return this start of the daemon: part of every id made until the next."""
        with self._db:
            self._db.execute("UPDATE meta SET value = value + 1 WHERE name = 'epoch'")
        (epoch,) = self._db.execute("SELECT value FROM meta WHERE name = 'epoch'").fetchone()
        return int(epoch)

    def rows(self) -> list[Row]:
        """Return every row. A row that cannot be read is dropped; `sweep` finds what it held."""
        rows: list[Row] = []
        for name, body in self._db.execute("SELECT id, body FROM sandboxes").fetchall():
            try:
                rows.append(msgspec.msgpack.decode(body, type=Row))
            except msgspec.DecodeError:
                self._db.execute(_DELETE, (name,))
        return rows

    def write(self, row: Row) -> asyncio.Future[None]:
        """Enqueue `row`; the future is done when it is committed."""
        self._pending[row.id] = (row.id, row.key, row.state, self._encoder.encode(row))
        loop = asyncio.get_running_loop()
        self._schedule(max(loop.time(), self._last_commit + GROUP_S))
        future: asyncio.Future[None] = loop.create_future()
        self._waiting.append(future)
        return future

    def post(self, row: Row) -> None:
        """Enqueue `row` when nobody needs to wait for it."""
        self._pending[row.id] = (row.id, row.key, row.state, self._encoder.encode(row))
        self._schedule(asyncio.get_running_loop().time() + POST_S)

    def drop(self, sandbox: str) -> None:
        """Enqueue the removal of a row."""
        self._pending[sandbox] = None
        self._schedule(asyncio.get_running_loop().time() + POST_S)

    def _schedule(self, when: float) -> None:
        """Commit at loop time `when`, or earlier if that was arranged before."""
        if self._flush_at is not None:
            if self._flush_when <= when:
                return
            self._flush_at.cancel()
        self._flush_when = when  # uvloop's handles do not tell theirs
        self._flush_at = asyncio.get_running_loop().call_at(when, self._tick)

    def _tick(self) -> None:
        self._flush_at = None
        self.flush()
        self._last_commit = asyncio.get_running_loop().time()

    def flush(self) -> None:
        """Commit all that is enqueued, as one transaction."""
        pending, self._pending = self._pending, {}
        waiting, self._waiting = self._waiting, []
        if not pending:
            return
        error: Exception | None = None
        try:
            self._commit(pending)
            self.commits += 1
        except sqlite3.Error as caught:
            # disk full, I/O error: creates fail before anything is made; a lost end of a sandbox
            # leaves a row whose resources are found dead and freed again at the next start
            error = Internal(f"the journal {self._path} cannot be written: {caught}")
            with contextlib.suppress(sqlite3.Error):
                self._db.execute("ROLLBACK")
        for future in waiting:
            if future.done():
                continue
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)
        if self.commits % 256 == 0:
            self._maybe_checkpoint()

    def _commit(self, pending: dict[str, tuple[str, str, str, bytes] | None]) -> None:
        rows = [row for row in pending.values() if row is not None]
        gone = [(name,) for name, row in pending.items() if row is None]
        if len(pending) == 1:  # a statement is a transaction of its own, in two thirds of the time
            self._db.execute(*((_UPSERT, rows[0]) if rows else (_DELETE, gone[0])))
            return
        self._db.execute("BEGIN IMMEDIATE")
        self._db.executemany(_UPSERT, rows)
        self._db.executemany(_DELETE, gone)
        self._db.execute("COMMIT")

    def _maybe_checkpoint(self) -> None:
        if self._checkpoint is not None and self._checkpoint.is_alive():
            return
        try:
            if Path(f"{self._path}-wal").stat().st_size < CHECKPOINT_BYTES:
                return
        except FileNotFoundError:
            return
        self._checkpoint = threading.Thread(target=_checkpoint, args=(self._path,), daemon=True)
        self._checkpoint.start()

    def close(self) -> None:
        """Commit and close."""
        if self._flush_at is not None:
            self._flush_at.cancel()
            self._flush_at = None
        self.flush()
        if self._checkpoint is not None:
            self._checkpoint.join()
        self._db.close()


def _connect(path: Path) -> sqlite3.Connection:
    db = sqlite3.connect(path, isolation_level=None, timeout=10.0)
    try:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = NORMAL")
        db.execute("PRAGMA wal_autocheckpoint = 0")
        db.execute("CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value) WITHOUT ROWID")
        db.execute("INSERT OR IGNORE INTO meta VALUES ('schema', ?)", (SCHEMA_VERSION,))
        db.execute("INSERT OR IGNORE INTO meta VALUES ('epoch', 0)")
        db.execute(
            "CREATE TABLE IF NOT EXISTS sandboxes "
            "(id TEXT PRIMARY KEY, key TEXT NOT NULL, state TEXT NOT NULL, body BLOB NOT NULL) "
            "WITHOUT ROWID"
        )
        (version,) = db.execute("SELECT value FROM meta WHERE name = 'schema'").fetchone()
        if version != SCHEMA_VERSION:
            raise Internal(
                f"{path} has schema {version}, this dsecd needs {SCHEMA_VERSION}: stop all "
                "sandboxes with the dsecd that made it, then move the file away"
            )
    except BaseException:
        db.close()
        raise
    return db


def _checkpoint(path: Path) -> None:
    """Move the WAL into the database (fsyncs, hence a thread with a connection of its own)."""
    with contextlib.suppress(sqlite3.Error):
        db = sqlite3.connect(path, isolation_level=None, timeout=5.0)
        try:
            db.execute("PRAGMA wal_checkpoint(PASSIVE)")
            # writers that never pause keep a passive checkpoint from ever catching up; what is
            # left after it is small, so holding them up now is short
            if Path(f"{path}-wal").stat().st_size > RESTART_BYTES:
                db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        finally:
            db.close()
