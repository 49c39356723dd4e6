"""dsec-blobd: its control socket, traces and prefetches."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dsecd.images.blobd.model import Settings, Trace
from libdsec.errors import AlreadyExists, DSecError, InvalidArgument, NotFound, Unsupported
from tests.system import blobd_lab as lab
from tests.system.blobd_service import ALL, Service, in_thread, running, until

pytestmark = [pytest.mark.root, pytest.mark.needs("erofs_file")]


@pytest.fixture(params=ALL)
async def service(request: pytest.FixtureRequest, test_name: str) -> AsyncIterator[Service]:
    async with running(request.param, test_name) as service:
        yield service


class Raw:
    """A connection that sends what it likes."""

    def __init__(self, service: Service) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(5)
        try:
            self.socket.connect(str(service.runtime / "blobd.sock"))
        except OSError:
            self.socket.close()
            raise

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *exc: object) -> None:
        self.socket.close()

    def send(self, frame: bytes) -> bytes:
        """Return the answer, b"" when the connection was closed."""
        try:
            self.socket.send(frame)
            return self.socket.recv(1 << 17)
        except (ConnectionResetError, BrokenPipeError):
            return b""

    def call(self, operation: str, arguments: Any) -> Any:
        return msgspec.msgpack.decode(self.send(msgspec.msgpack.encode((1, operation, arguments))))


async def test_bad_frames_end_their_connection_only(service: Service) -> None:
    blob = await service.blob(2)
    rng = random.Random(5)
    good = msgspec.msgpack.encode((1, "stat", {"id": blob.id}))
    frames = [
        b"\xc1", b"\x93", b"\x93\x01\xa4stat", b"\x80", good[:-1], good + b"\x00",
        msgspec.msgpack.encode((1, 2, {})), msgspec.msgpack.encode(("x", "stat", {})),
        msgspec.msgpack.encode((1, "stat")), bytes(100_000), b"\x93\x01\xdb\xff\xff\xff\xff",
        b"\x93\x01\xa4stat\xdf\xff\xff\xff\xff",
        *(rng.randbytes(rng.randrange(1, 200)) for _ in range(40)),
    ]  # fmt: skip
    with Raw(service) as other:
        for frame in frames:
            with Raw(service) as raw:
                answer = await in_thread(lambda r=raw, f=frame: r.send(f))
                assert answer == b"" or msgspec.msgpack.decode(answer)[1] is not None
        assert (await in_thread(lambda: other.call("stat", {"id": blob.id})))[1] is None
    assert await service.read(blob) == service.expect(blob)


async def test_mutated_requests_do_no_harm(service: Service) -> None:
    blob = await service.blob(4)
    rng = random.Random(6)
    seeds = [
        ("hello", {"version": 1}),
        ("stat", {"id": blob.id}),
        ("add", {"id": blob.id, "source": {"kind": "file", "path": str(blob.source)}}),
        ("prefetch", {"blobs": [blob.id], "ranges": [[0, 0, 4]], "priority": 1}),
        ("trace_start", {"trace": 1, "blobs": [blob.id]}),
        ("trace_read", {"trace": 1, "from": 0}),
        ("hold", {"layer": "1" * 64, "blobs": [blob.id], "watch": True}),
        ("holds", {"from": 0}),
        ("release", {"layer": "1" * 64}),
        ("descriptor", {"which": 1}),
    ]

    def storm() -> None:
        for _ in range(400):
            frame = bytearray(msgspec.msgpack.encode((1, *rng.choice(seeds))))
            for _ in range(rng.randrange(1, 4)):
                frame[rng.randrange(len(frame))] = rng.randrange(256)
            with Raw(service) as raw:
                raw.send(bytes(frame))

    await in_thread(storm)
    await service.blobd.add(blob.id, lab.file_source(blob))
    assert await service.read(blob) == service.expect(blob)


async def test_many_connections_do_not_lock_others_out(service: Service) -> None:
    blob = await service.blob(1)
    with contextlib.ExitStack() as stack:
        for _ in range(40):
            with contextlib.suppress(OSError):
                stack.enter_context(Raw(service))
        assert (await service.blobd.stat(blob.id)).chunks == 1


async def test_impossible_requests_get_an_error_that_names_the_reason(service: Service) -> None:
    blob = await service.blob(2)
    client = service.blobd
    source = lab.file_source(blob)
    with pytest.raises(NotFound):
        await client.add("0" * 64, source)
    with pytest.raises(NotFound):
        await client.stat("0" * 64)
    with pytest.raises(NotFound):
        await client.remove("0" * 64)
    for name in ("..", "x" * 64, blob.id[:-1], blob.id.upper()):
        with pytest.raises(InvalidArgument):
            await client.add(name, source)
    with pytest.raises(InvalidArgument):
        await client.add(blob.id, lab.Source(kind="file", path="relative"))
    with pytest.raises(InvalidArgument):
        await client.add(blob.id, lab.Source(kind="http", url="ftp://host/x"))
    with pytest.raises(Unsupported):
        await client.add(blob.id, lab.Source(kind="http", url="http://x", credentials="instance"))
    with pytest.raises(InvalidArgument):
        await client.prefetch(Trace((blob.id,), ((0, 1, 2),)))
    with pytest.raises(InvalidArgument):
        await client.prefetch(Trace((blob.id,), ((1, 0, 1),)))
    with pytest.raises(InvalidArgument):
        await client.configure(Settings(fetch_min=1))
    with pytest.raises(NotFound):
        await client.stop_trace(9, [blob.id])
    with Raw(service) as raw:
        assert raw.call("format", {})[1]["code"] == "invalid_argument"
        assert raw.call("stat", [])[1]["code"] == "invalid_argument"
        assert raw.call("hello", {"version": 99})[1]["code"] == "unsupported"


@pytest.mark.parametrize("damage", ["flip", "short", "long", "gap", "size", "empty"])
async def test_an_index_that_is_not_right_is_refused(service: Service, damage: str) -> None:
    import hashlib

    blob = lab.random_blob(service.store, service.cache, 3)
    index = bytearray(blob.index)
    name = blob.id
    if damage == "flip":
        index[20] ^= 1
    elif damage == "short":
        index = index[:-40]
    elif damage == "long":
        index += bytes(40)
    else:  # the id proves it, and still it is not an index
        if damage == "gap":
            index[16 + 40 + 32] += 1
        elif damage == "size":
            index[16 + 36 : 16 + 40] = (65537).to_bytes(4, "little")
        else:
            index = bytearray(b"DSECIDX1" + bytes(8))
        name = hashlib.sha256(index).hexdigest()
    (service.cache / "indexes" / name).write_bytes(index)
    with pytest.raises(InvalidArgument):
        await service.blobd.add(name, lab.file_source(blob))
    assert not service.path(blob).exists()


async def test_all_registered_blobs_are_listed(service: Service) -> None:
    blobs = [(await service.blob(1, seed=seed)).id for seed in range(12)]
    assert sorted(await service.blobd.blobs()) == sorted(blobs)
    assert service.blobd.hello.version == 1
    assert (await service.blobd.stats())["blobs"] == 12


# --- traces and prefetches --------------------------------------------------------------------


async def test_a_trace_names_first_reads_in_their_order(service: Service) -> None:
    one, two = await service.blob(16, seed=1), await service.blob(16, seed=2)
    await service.read(one, 0)
    await service.blobd.start_trace(7, [one.id, two.id])
    with pytest.raises(AlreadyExists):
        await service.blobd.start_trace(7, [one.id])
    for blob, chunk, count in ((two, 5, 1), (one, 0, 1), (one, 1, 2), (two, 5, 1), (one, 9, 1)):
        await service.read(blob, chunk, count)
    trace = await service.blobd.stop_trace(7, [one.id, two.id])
    assert trace == Trace((one.id, two.id), ((1, 5, 1), (0, 0, 3), (0, 9, 1)))
    with pytest.raises(NotFound):
        await service.blobd.stop_trace(7, [one.id])


async def test_a_trace_is_replayed_in_order_in_small_requests(service: Service) -> None:
    await service.blobd.configure(Settings(fetch_max=128 << 10))  # whatever the pace of the store
    with lab.HttpStore(service.store, latency_s=0.01) as store:
        blob = lab.random_blob(service.store, service.cache, 64)
        await service.blobd.add(blob.id, store.source(blob))
        trace = Trace((blob.id,), ((0, 40, 4), (0, 0, 8), (0, 20, 1)))
        assert await service.blobd.prefetch(trace) == 3
        await until(lambda: settled(service))
        state = await service.blobd.stat(blob.id)
        assert state.present == 13
        sizes = [last - first + 1 for _, first, last in store.requests]
        assert max(sizes) == 2 * lab.CHUNK
        assert len(sizes) == 2 + 4 + 1
        assert store.requests[0][1] >= 20 * lab.CHUNK or store.requests[0][1] == 0
        for chunk in (40, 0, 20):
            assert await service.read(blob, chunk) == service.expect(blob, chunk)
        assert len(store.requests) == 7  # all of it was there


async def test_a_prefetch_takes_in_what_is_wanted_nearby(service: Service) -> None:
    if service.kind == "twin":
        pytest.skip("the twin asks for each range by itself")
    await service.blobd.configure(Settings(fetch_min=1 << 20))
    with lab.HttpStore(service.store) as store:
        blob = lab.random_blob(service.store, service.cache, 350)
        await service.blobd.add(blob.id, store.source(blob))
        store.stall.set()
        others = tuple((0, 40 + 20 * number, 1) for number in range(16))  # one for each thread
        await service.blobd.prefetch(Trace((blob.id,), others))
        await until(lambda: len(store.requests) == 16)
        trace = Trace((blob.id,), ((0, 9, 1), (0, 2, 1), (0, 6, 2), (0, 13, 1)))
        await service.blobd.prefetch(trace)
        store.stall.clear()
        await until(lambda: settled(service))
        ranges = sorted((first, last) for _, first, last in store.requests[16:])
        chunk = lab.CHUNK
        # a gap of one chunk is read, one of three is not
        assert ranges == [(2 * chunk, 3 * chunk - 1), (6 * chunk, 10 * chunk - 1),
                          (13 * chunk, 14 * chunk - 1)]  # fmt: skip
        assert (await service.blobd.stat(blob.id)).present == 16 + 1 + 4 + 1


async def test_the_table_of_descriptors_is_large_before_there_are_threads(
    service: Service,
) -> None:
    """Growing it later makes reads wait for an RCU grace period."""
    if service.kind == "twin":
        pytest.skip("the twin has one thread")
    status = Path(f"/proc/{service.blobd.hello.pid}/status").read_text()
    assert int(status.partition("FDSize:")[2].split()[0]) >= 1024


async def settled(service: Service) -> bool:
    return (await service.blobd.stats())["prefetch_pending"] == 0


async def test_a_demand_does_not_wait_behind_prefetches(service: Service) -> None:
    with lab.HttpStore(service.store) as store:
        blob = lab.random_blob(service.store, service.cache, 400)
        await service.blobd.add(blob.id, store.source(blob))
        store.stall.set()
        for number in range(100):
            await service.blobd.prefetch(Trace((blob.id,), ((0, number * 3, 3),)), priority=2)
        await service.blobd.prefetch_whole(blob.id)
        await until(lambda: store.requests)
        reader = asyncio.create_task(service.read(blob, 399))
        place = 399 * lab.CHUNK
        # while no prefetch at all comes to its end
        await until(lambda: any(first <= place <= last for _, first, last in store.requests))
        assert not await settled(service)
        store.stall.clear()
        assert await reader == service.expect(blob, 399)


async def test_a_read_joins_a_prefetch_and_outlives_its_failure(service: Service) -> None:
    await service.blobd.configure(Settings(attempt_ms=60_000))  # no second one by the clock
    with lab.HttpStore(service.store, latency_s=0.2) as store:
        blob = lab.random_blob(service.store, service.cache, 4)
        await service.blobd.add(blob.id, store.source(blob))
        await service.blobd.prefetch_whole(blob.id)
        await until(lambda: store.requests)
        assert await service.read(blob, 1) == service.expect(blob, 1)
        assert [first for _, first, _ in store.requests].count(0) == 1


async def test_a_whole_blob_can_be_brought(service: Service) -> None:
    blob = await service.blob(50, odd=True)
    await service.blobd.pin(blob.id)
    await service.blobd.prefetch_whole(blob.id)
    await until(lambda: settled(service))
    assert (await service.blobd.stat(blob.id)).whole
    assert (service.cache / "blobs" / blob.id).read_bytes() == blob.data


async def test_requests_are_signed_with_the_credentials_of_the_file(service: Service) -> None:
    service.require("sigv4")
    with lab.HttpStore(service.store) as store:
        blob = lab.random_blob(service.store, service.cache, 2)
        file = service.root / "credentials"
        file.write_text(
            "[default]\naws_access_key_id = AKDEFAULT\naws_secret_access_key = x\n"
            "[other]\naws_access_key_id=AKOTHER\naws_secret_access_key=y\naws_session_token=TOKEN\n"
        )
        source = store.source(
            blob, region="eu-1", credentials="file", credentials_file=str(file), profile="other"
        )
        await service.blobd.add(blob.id, source)
        assert await service.read(blob) == service.expect(blob)
        headers = {key.lower(): value for key, value in store.headers[0].items()}
        assert "AKOTHER/" in headers["authorization"]
        assert "/eu-1/s3/aws4_request" in headers["authorization"]
        assert headers["x-amz-security-token"] == "TOKEN"
        file.unlink()
        assert await service.read(blob) == service.expect(blob)


async def test_shutdown_ends_the_process_and_the_files(service: Service) -> None:
    blob = await service.blob(1)
    fd = await in_thread(lambda: os.open(service.path(blob), os.O_RDONLY))
    await service.close()
    assert lab.error_of(lambda: os.pread(fd, 1, 0)) in ("ENOTCONN", "ECONNABORTED")
    with contextlib.suppress(OSError):
        os.close(fd)
    with pytest.raises(DSecError):
        async with asyncio.timeout(15):
            await service.blobd.stats()
