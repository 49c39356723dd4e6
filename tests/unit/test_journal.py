"""The journal: durable without fsync, grouped, readable by the next daemon."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dsecd.engine import journal as journals
from dsecd.engine.journal import Journal, Row
from libdsec.errors import Internal
from libdsec.model import DSecContainerRunArgs


def row(name: str, state: str = "intent", **more: object) -> Row:
    return Row(
        id=name, key=f"key-{name}", owner="uid:0", state=state, created_at=time.time(),
        args=DSecContainerRunArgs(container_image="base/x"), handle=b"h", **more,
    )  # fmt: skip


async def test_a_row_is_there_after_reopening(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j.db")
    await journal.write(row("a"))
    await journal.write(row("a", "running", reason="r", notes=["n"]))
    await journal.write(row("b"))
    journal.drop("b")
    journal.close()
    journal = Journal(tmp_path / "j.db")
    (found,) = journal.rows()
    assert (found.id, found.state, found.reason, found.notes) == ("a", "running", "r", ["n"])
    journal.close()


async def test_concurrent_writers_share_a_commit(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j.db")
    await asyncio.gather(*(asyncio.ensure_future(journal.write(row(f"s{i}"))) for i in range(200)))
    assert journal.commits <= 2
    assert len(journal.rows()) == 200
    journal.close()


async def test_of_several_rows_of_one_sandbox_the_last_is_kept(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j.db")
    await asyncio.gather(journal.write(row("a")), journal.write(row("a", "running")))
    assert journal.commits == 1
    journal.post(row("b", "ended"))
    journal.drop("b")
    journal.drop("a")
    journal.post(row("a", "ended"))
    journal.flush()
    assert [(found.id, found.state) for found in journal.rows()] == [("a", "ended")]
    journal.close()


async def test_epochs_grow(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j.db")
    first = journal.next_epoch()
    journal.close()
    journal = Journal(tmp_path / "j.db")
    assert journal.next_epoch() == first + 1
    journal.close()


@pytest.mark.parametrize("names", ["b", "bc"])  # one row is a transaction without BEGIN
async def test_a_failed_commit_fails_every_waiting_create(tmp_path: Path, names: str) -> None:
    journal = Journal(tmp_path / "j.db")
    await journal.write(row("a"))
    blocker = sqlite3.connect(tmp_path / "j.db", isolation_level=None)
    blocker.execute("BEGIN IMMEDIATE")
    journal._db.execute("PRAGMA busy_timeout = 1")
    waiting = [journal.write(row(name)) for name in names]
    for future in waiting:
        with pytest.raises(Internal, match="cannot be written"):
            await future
    blocker.execute("ROLLBACK")
    blocker.close()
    await journal.write(row("d"))
    assert {found.id for found in journal.rows()} == {"a", "d"}
    journal.close()


def test_a_damaged_file_is_set_aside(tmp_path: Path) -> None:
    path = tmp_path / "j.db"
    path.write_bytes(b"this is no database, whatever it was before" * 100)
    journal = Journal(path)
    assert journal.rows() == []
    assert (tmp_path / "j.db.damaged").exists()
    journal.close()


def test_another_schema_is_refused(tmp_path: Path) -> None:
    Journal(tmp_path / "j.db").close()
    db = sqlite3.connect(tmp_path / "j.db")
    db.execute("UPDATE meta SET value = 99 WHERE name = 'schema'")
    db.commit()
    db.close()
    with pytest.raises(Internal, match="schema 99"):
        Journal(tmp_path / "j.db")


async def test_an_unreadable_row_is_dropped_not_fatal(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j.db")
    await journal.write(row("a"))
    journal._db.execute("INSERT INTO sandboxes VALUES ('bad', 'k', 'running', x'c1c1')")
    assert [found.id for found in journal.rows()] == ["a"]
    assert [found.id for found in journal.rows()] == ["a"]
    journal.close()


async def test_the_wal_is_checkpointed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journals, "CHECKPOINT_BYTES", 4096)
    journal = Journal(tmp_path / "j.db")
    for i in range(256 - journal.commits % 256):
        await journal.write(row(f"s{i}"))
    assert journal._checkpoint is not None
    journal._checkpoint.join()
    size = (tmp_path / "j.db-wal").stat().st_size
    for i in range(50):
        await journal.write(row(f"t{i}"))
    assert (tmp_path / "j.db-wal").stat().st_size == size  # the log starts afresh
    journal.close()


WRITER = """
import asyncio, sys
from pathlib import Path
from dsecd.engine.journal import Journal, Row
from libdsec.model import DSecContainerRunArgs
async def main():
    journal = Journal(Path(sys.argv[1]))
    args = DSecContainerRunArgs(container_image="x")
    n = 0
    while True:
        await journal.write(
            Row(id=f"s{n}", key=str(n), owner="", state="intent", created_at=0.0, args=args))
        print(n, flush=True)
        n += 1
asyncio.run(main())
"""


def test_what_was_committed_survives_kill_9(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path / "j.db")], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    for line in process.stdout:
        if int(line) > 300:
            break
    os.kill(process.pid, signal.SIGKILL)
    last = [int(line) for line in process.stdout.read().split()]
    process.stdout.close()
    process.wait()
    journal = Journal(tmp_path / "j.db")
    names = {found.id for found in journal.rows()}
    assert {f"s{n}" for n in range((last or [301])[-1] + 1)} <= names
    journal.close()
