"""The parts of the store that need no server: records, options, errors, retries, threads."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsecd.images.stores import keys, record, s3_options
from dsecd.images.stores.abc import Source
from dsecd.images.stores.opening import open_store
from dsecd.images.stores.record import Damaged
from dsecd.images.stores.retry import Transient, retry
from dsecd.images.stores.s3_errors import BeyondEnd, Exists, Missing, translate
from dsecd.images.stores.s3_options import S3Options
from dsecd.images.stores.verify import PIECE, fetch_verified
from dsecd.images.stores.workers import Workers
from libdsec.errors import (
    Exhausted,
    Internal,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    Unavailable,
    Unsupported,
    from_wire,
    to_wire,
)
from tests.waiting import let_pass, on_the_loops_clock, until

KEYS = {"AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "secret"}

# --- records and keys -----------------------------------------------------------------------


@given(st.binary(min_size=1, max_size=300))
def test_a_record_comes_back(data: bytes) -> None:
    made = record.new(data)
    assert record.decode(record.encode(made)) == made


@given(st.data())
def test_a_damaged_record_is_never_taken_for_another(data: st.DataObject) -> None:
    body = bytearray(record.encode(record.new(b'{"digest":"abc"}')))
    at = data.draw(st.integers(0, len(body) - 1))
    body[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(Damaged):
        record.decode(bytes(body))


def test_a_deleted_record_has_a_size_of_its_own() -> None:
    assert len(record.encode(record.new(None))) == record.SIZE_DELETED
    assert len(record.encode(record.new(b"x"))) == record.SIZE_DELETED + 1
    assert record.new(b"x").version != record.new(b"x").version


@given(st.text())
def test_no_key_leaves_the_store(text: str) -> None:
    try:
        keys.check(text)
    except InvalidArgument:
        return
    prefix, _, rest = text.partition("/")
    assert f"{prefix}/" in keys.PREFIXES
    assert "/" not in rest
    assert rest not in ("", ".", "..")


# --- options --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "options", "hint"),
    [
        ("/tmp/x", {"timeouts": 1}, "timeouts is unknown for a directory; did you mean timeout_s"),
        ("/tmp/x", {"endpoint": "http://x"}, "unknown for a directory; it has timeout_s, threads"),
        ("s3://bucket", {"endpont": "http://x"}, "did you mean endpoint"),
        ("s3://bucket", {"secret_access_key": "x"}, "is unknown for S3"),
        ("s3://bucket", {"timeout_s": "long"}, "Expected `float`"),
        ("s3://bucket", {"timeout_s": 0}, "above 0"),
        ("/tmp/x", {"threads": 0}, "above 0"),
        ("s3://", {}, "is not s3://bucket/prefix"),
        ("s3://Bucket", {}, "is not s3://bucket/prefix"),
        ("s3://key:secret@bucket", {}, "is not s3://bucket/prefix"),
        ("s3://bucket/a/../b", {}, "dots"),
        ("s3://bucket/a//b", {}, "empty part"),
        ("s3://bucket/a b", {}, "may hold letters"),
        ("s3://bucket", {"endpoint": "host:9000"}, r"not http\(s\)"),
        ("s3://bucket", {"endpoint": "http://host/path"}, "without a path"),
        ("s3://bucket", {"ca_file": "/nonexistent"}, "cannot read /nonexistent"),
        ("s3://bucket", {"credentials_file": "/nonexistent"}, "cannot read /nonexistent"),
    ],
)
async def test_wrong_options_are_refused(url: str, options: dict[str, Any], hint: str) -> None:
    with pytest.raises(InvalidArgument, match=hint):
        await open_store(url, options, KEYS)


async def test_missing_credentials_say_how_to_give_them() -> None:
    with pytest.raises(InvalidArgument, match=r"AWS_ACCESS_KEY_ID.*credentials_file") as caught:
        await open_store("s3://bucket", {}, {})
    assert "instance" not in caught.value.message  # a daemon could not use them


def test_place_from_options_and_environment() -> None:
    place = s3_options.place("s3://bucket", S3Options(), {})
    assert place.endpoint == "https://s3.us-east-1.amazonaws.com"
    place = s3_options.place("s3://bucket/a/b/", S3Options(), {"AWS_REGION": "eu-central-1"})
    assert place.url("blobs/x") == "https://s3.eu-central-1.amazonaws.com/bucket/a/b/blobs/x"
    environ = {"AWS_ENDPOINT_URL": "http://one", "AWS_ENDPOINT_URL_S3": "http://two:9000/"}
    assert s3_options.place("s3://bucket", S3Options(), environ).endpoint == "http://two:9000"
    chosen = S3Options(endpoint="http://three", region="here")
    place = s3_options.place("s3://bucket", chosen, environ | {"AWS_REGION": "there"})
    assert (place.endpoint, place.region) == ("http://three", "here")


def test_credentials_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "credentials"
    file.write_text(
        "[default]\naws_access_key_id = one\naws_secret_access_key = per%cent\n"
        "[other]\naws_access_key_id = two\naws_secret_access_key = b\naws_session_token = t\n"
        "[half]\naws_access_key_id = three\n"
    )
    options = S3Options(credentials_file=str(file))
    found = s3_options.credentials(options, KEYS)
    assert (found.kind, found.key_id, found.secret) == ("file", "one", "per%cent")
    assert "per%cent" not in repr(found) + str(found)
    environ = {"AWS_SHARED_CREDENTIALS_FILE": str(file), "AWS_PROFILE": "other"}
    found = s3_options.credentials(S3Options(), environ)
    assert (found.key_id, found.token, found.profile) == ("two", "t", "other")
    for profile in ("half", "none"):
        with pytest.raises(InvalidArgument, match=rf"no profile \[{profile}\]"):
            s3_options.credentials(S3Options(profile=profile), environ)
    file.write_text("aws_secret_access_key = loose")
    with pytest.raises(InvalidArgument) as caught:
        s3_options.credentials(options, {})
    assert "loose" not in str(caught.value)
    assert caught.value.__cause__ is None


# --- errors of a server ---------------------------------------------------------------------


def answer(status: int, code: str = "") -> Exception:
    body = f"<Error><Code>{code}</Code></Error>" if code else ""
    return Exception(
        f"Error performing PUT http://x/y in 1ms - Server returned non-2xx status code: {status} "
        f"Reason: {body}\n\nDebug source:\nstatus code: 777 <Code>Never</Code>"
    )


@pytest.mark.parametrize(
    ("error", "kind", "hint"),
    [
        (answer(404, "NoSuchKey"), Missing, ""),
        (answer(404, "NoSuchBucket"), NotFound, "no such bucket; check bucket"),
        (FileNotFoundError("gone"), Missing, ""),
        (answer(412, "PreconditionFailed"), Exists, ""),
        (answer(416, "InvalidRange"), BeyondEnd, ""),
        (answer(409, "ConditionalRequestConflict"), Transient, "409 Conditional"),
        (answer(429), Transient, "answered 429"),
        (answer(500, "InternalError"), Transient, "500 InternalError"),
        (answer(503, "SlowDown"), Transient, "503 SlowDown"),
        (answer(501, "NotImplemented"), Unsupported, "501 NotImplemented"),
        (answer(507), Exhausted, "quota"),
        (answer(403, "AccessDenied"), PermissionDenied, "check the credentials"),
        (answer(403, "RequestTimeTooSkewed"), PermissionDenied, "clock"),
        (answer(400, "AuthorizationHeaderMalformed"), InvalidArgument, "check the region"),
        (answer(400, "EntityTooLarge"), Exhausted, "quota"),
        (answer(400, "Odd"), InvalidArgument, "check bucket, region and endpoint"),
        (Exception("x - HTTP error: error sending request"), Transient, "error sending request"),
        (Exception("x - HTTP error: operation timed out"), Transient, "timed out"),
        (Exception("x - Received redirect without LOCATION"), InvalidArgument, "region"),
        (Exception("http://169.254.169.254/latest - HTTP error: y"), PermissionDenied, "metadata"),
        (Exception("External AWS credential provider: no f"), PermissionDenied, "provider: no f"),
        (Exception("something else"), Internal, "something else"),
    ],
)
def test_what_an_answer_means(error: Exception, kind: type[Exception], hint: str) -> None:
    made = translate(error, "read blobs/x", "s3://bucket at http://host")
    assert type(made) is kind
    assert hint in str(made)
    assert "Never" not in str(made)


def test_a_conflict_passes_the_wire_as_already_exists() -> None:
    from dsecd.images.stores.abc import Conflict

    error = from_wire(to_wire(Conflict("moved", key="names/x")))
    assert error.code == "already_exists"
    assert error.detail == {"key": "names/x"}


# --- trying again ---------------------------------------------------------------------------


def failing(times: int) -> tuple[Callable[[], Any], list[float]]:
    calls: list[float] = []

    async def attempt() -> str:
        calls.append(time.monotonic())
        if len(calls) <= times:
            raise Transient("not yet")
        return "done"

    return attempt, calls


async def test_retry_until_it_works() -> None:
    attempt, calls = failing(3)
    assert await retry(attempt, "cannot do it", 5) == "done"
    assert len(calls) == 4


async def test_retry_ends_at_the_deadline_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    attempt, calls = failing(10**6)
    module, now = sys.modules[retry.__module__], 0.0

    async def sleep(pause: float) -> None:
        nonlocal now
        now += pause

    monkeypatch.setattr(module, "asyncio", SimpleNamespace(sleep=sleep))
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now))
    with pytest.raises(Unavailable, match=r"cannot do it: not yet; tried \d+ times in") as caught:
        await retry(attempt, "cannot do it", 0.5)
    assert 0.1 < now <= 0.5
    assert caught.value.detail["tries"] == len(calls) >= 3


# --- threads --------------------------------------------------------------------------------


@pytest.fixture
async def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have threads count the time that `let_pass` lets pass."""
    on_the_loops_clock(monkeypatch, sys.modules[Workers.__module__])


@pytest.mark.usefixtures("clock")
async def test_a_busy_pool_is_not_a_stalled_one() -> None:
    """Calls wait longer than the limit behind others that go on."""
    workers, go = Workers(1, 60, "it"), threading.Semaphore(0)
    asked = [asyncio.ensure_future(workers.run(lambda _: go.acquire(timeout=20))) for _ in range(8)]
    for number in range(8):
        let_pass(40)
        await asyncio.sleep(0.01)
        go.release()
        await until(lambda: sum(one.done() for one in asked) > number)  # noqa: B023
    assert await asyncio.gather(*asked) == [True] * 8
    workers.close()


@pytest.mark.usefixtures("clock")
async def test_a_long_call_with_progress_is_not_stalled() -> None:
    go, beats = threading.Semaphore(0), []

    def long(call: Any) -> int:
        for number in range(8):
            go.acquire(timeout=20)
            call.beat()
            beats.append(number)
        return 7

    workers = Workers(1, 60, "it")
    asked = asyncio.ensure_future(workers.run(long))
    for number in range(8):
        let_pass(40)
        await asyncio.sleep(0.01)
        go.release()
        await until(lambda: len(beats) > number)  # noqa: B023
    assert await asked == 7
    workers.close()


@pytest.mark.usefixtures("clock")
async def test_stuck_threads_do_not_take_the_place_of_free_ones() -> None:
    gate = threading.Event()
    workers = Workers(4, 60, "it")
    stuck = asyncio.ensure_future(workers.run(lambda _: gate.wait(20)))
    await asyncio.sleep(0.01)
    let_pass(90)
    with pytest.raises(Unavailable):
        await stuck
    assert await workers.run(lambda _: 5) == 5
    gate.set()
    workers.close()


async def test_cancelled_call_stops_at_its_next_beat() -> None:
    gate, ended = threading.Event(), []

    def work(call: Any) -> None:
        gate.wait(20)
        call.beat()
        ended.append("went on")

    workers = Workers(2, 5, "it")
    task = asyncio.ensure_future(workers.run(work))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    gate.set()
    await workers.run(lambda _: None)
    await asyncio.sleep(0.05)
    assert ended == []
    workers.close()


# --- verification ---------------------------------------------------------------------------


class Shelf:
    """A store that has one object and reads it as it is told."""

    url = "shelf:"

    def __init__(self, data: bytes, size: int | None = None) -> None:
        self.data, self.reads = data, 0
        self.length = len(data) if size is None else size
        self.damage: Callable[[int, bytes], bytes] = lambda _, piece: piece

    async def size(self, key: str) -> int | None:
        return self.length

    async def read(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        self.reads += 1
        return self.damage(self.reads, self.data[start:end])

    def source(self, key: str) -> Source:
        return Source(kind="file")


@pytest.mark.parametrize("size", [0, 1, PIECE, PIECE + 1, 2 * PIECE + 5])
async def test_fetching_any_size(tmp_path: Path, size: int) -> None:
    shelf = Shelf(os.urandom(size))
    target = tmp_path / "target"
    await fetch_verified(shelf, "k", hashlib.sha256(shelf.data).hexdigest(), target)  # type: ignore[arg-type]
    assert target.read_bytes() == shelf.data
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize("lasting", [False, True])
@pytest.mark.parametrize("damage", [lambda piece: piece[:-1], lambda piece: piece + b"x", bytes])
async def test_damage_is_read_once_more_then_named(
    tmp_path: Path, lasting: bool, damage: Callable[[bytes], bytes]
) -> None:
    shelf = Shelf(os.urandom(PIECE + 100))
    shelf.damage = lambda n, piece: (
        damage(piece[:-1] + bytes([piece[-1] ^ 1])) if n == 2 or (lasting and n > 2) else piece
    )
    digest, target = hashlib.sha256(shelf.data).hexdigest(), tmp_path / "target"
    fetch = fetch_verified(shelf, "images/x", digest, target)  # type: ignore[arg-type]
    if lasting:
        with pytest.raises(Internal, match=f"images/x in the store shelf: .*{digest}"):
            await fetch
        assert list(tmp_path.iterdir()) == []
    else:
        await fetch
        assert target.read_bytes() == shelf.data
    assert shelf.reads == 4


async def test_fault_or_cancel_while_fetching_leaves_nothing(tmp_path: Path) -> None:
    shelf = Shelf(os.urandom(3 * PIECE))

    def break_off(number: int, piece: bytes) -> bytes:
        if number == 3:
            raise Unavailable("gone")
        return piece

    shelf.damage = break_off
    with pytest.raises(Unavailable):
        await fetch_verified(shelf, "k", "0" * 64, tmp_path / "target")  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


async def test_full_disk_while_fetching(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(Exhausted, match="is full"):
        await fetch_verified(Shelf(b"x"), "k", "0" * 64, tmp_path / "target")  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []
