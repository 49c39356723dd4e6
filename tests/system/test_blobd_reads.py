"""dsec-blobd: what a reader gets, from where, and what it gets when the store fails."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
import time
from collections.abc import AsyncIterator

import pytest

from dsecd.images.blobd.model import Settings
from tests.system import blobd_lab as lab
from tests.system.blobd_service import ALL, Service, in_thread, running, until

pytestmark = [pytest.mark.root, pytest.mark.needs("erofs_file")]


@pytest.fixture(params=ALL)
async def service(request: pytest.FixtureRequest, test_name: str) -> AsyncIterator[Service]:
    async with running(request.param, test_name) as service:
        yield service


# --- hits and misses --------------------------------------------------------------------------


@pytest.mark.parametrize("odd", [False, True], ids=["full", "odd"])
async def test_every_byte_is_that_of_the_blob(service: Service, odd: bool) -> None:
    blob = await service.blob(40, odd=odd)
    path, rng = service.path(blob), random.Random(2)
    for _ in range(60):
        offset, size = rng.randrange(len(blob.data)), rng.randrange(1, 300_000)
        got = await in_thread(lambda o=offset, n=size: lab.read(path, o, n))
        assert got == blob.data[offset : offset + size]
    assert await in_thread(lambda: lab.read(path, 0, 1 << 30)) == blob.data
    assert await in_thread(path.stat) is not None
    assert path.stat().st_size == len(blob.data)
    state = await service.blobd.stat(blob.id)
    assert state.whole
    assert state.present == state.chunks == 40
    assert (service.cache / "blobs" / blob.id).read_bytes() == blob.data


async def test_a_chunk_is_fetched_once(service: Service) -> None:
    blob = await service.blob(8)
    await service.read(blob, 3)
    before = await service.blobd.stats()
    blob.source.unlink()
    assert await service.read(blob, 3) == service.expect(blob, 3)
    after = await service.blobd.stats()
    assert after["fetches"] == before["fetches"]
    assert after["hits"] > before["hits"]


async def test_concurrent_readers_of_one_chunk_cause_one_fetch(service: Service) -> None:
    await service.blobd.configure(Settings(attempt_ms=60_000))  # no second one by the clock
    with lab.HttpStore(service.store, latency_s=0.2) as store:
        blob = lab.random_blob(service.store, service.cache, 8)
        await service.blobd.add(blob.id, store.source(blob))
        got = await asyncio.gather(*(service.read(blob, 5) for _ in range(12)))
        assert got == [service.expect(blob, 5)] * 12
        assert len(store.requests) == 1


async def test_a_request_covers_128_kib_and_more_on_a_slow_store(service: Service) -> None:
    with lab.HttpStore(service.store) as store:
        blob = lab.random_blob(service.store, service.cache, 400)
        await service.blobd.add(blob.id, store.source(blob))
        await service.read(blob, 1)
        assert store.requests[-1][1:] == (0, 2 * lab.CHUNK - 1)
        for chunk in range(10, 110, 10):  # how fast it sends is known then
            await service.read(blob, chunk)
        store.latency_s = 0.5  # so much comes meanwhile that a larger request costs little more
        for chunk in range(5, 105, 20):
            await service.read(blob, chunk)
        seen = set()
        for chunk in range(120, 400, 16):  # one that a busy machine slows down counts for a while
            await service.read(blob, chunk)
            _, first, last = store.requests[-1]
            seen.add((first // lab.CHUNK - chunk, (last + 1) // lab.CHUNK - chunk))
            if (-8, 8) in seen:
                break
        assert (-8, 8) in seen


async def test_a_read_goes_on_while_the_rest_of_its_request_comes(service: Service) -> None:
    if service.kind == "twin":
        pytest.skip("the twin looks at whole answers")
    await service.blobd.configure(Settings(demand_ms=5000, fetch_min=1 << 20))
    with lab.HttpStore(service.store) as store:
        blob = lab.random_blob(service.store, service.cache, 16)
        await service.blobd.add(blob.id, store.source(blob))
        store.pause.set()
        assert await service.read(blob, 1) == service.expect(blob, 1)
        last = asyncio.create_task(service.read(blob, 15))
        await asyncio.sleep(0.1)
        assert not last.done()
        store.pause.clear()
        assert await last == service.expect(blob, 15)
        assert len(store.requests) == 1


async def test_requests_one_after_the_other_use_one_connection(service: Service) -> None:
    if service.kind == "twin":
        pytest.skip("the twin has a connection per thread")
    # each comes whole before its read ends, and none is given up, whatever the pace of the store
    await service.blobd.configure(Settings(fetch_max=128 << 10, attempt_ms=60_000))
    with lab.HttpStore(service.store) as store:
        blob = lab.random_blob(service.store, service.cache, 100)
        await service.blobd.add(blob.id, store.source(blob))
        for chunk in range(0, 100, 10):
            assert await service.read(blob, chunk) == service.expect(blob, chunk)
        assert len(store.requests) > 3
        assert len(store.open) == 1


async def test_names_that_are_not_registered_do_not_exist(service: Service) -> None:
    blob = await service.blob(1)
    assert service.path(blob).exists()
    for name in ("0" * 64, "..", blob.id[:-1], blob.id.upper(), "x"):
        path = service.blobd.directory / name
        assert name == ".." or await in_thread(lambda p=path: lab.error_of(p.stat)) == "ENOENT"
    opened = await in_thread(lambda: lab.error_of(lambda: os.open(service.path(blob), os.O_RDWR)))
    assert opened == "EROFS"


async def test_a_removed_blob_is_gone_and_can_come_back(service: Service) -> None:
    blob = await service.blob(4)
    fd = await in_thread(lambda: os.open(service.path(blob), os.O_RDONLY))
    assert await in_thread(lambda: os.pread(fd, 10, 0)) == blob.data[:10]
    await service.blobd.remove(blob.id)
    assert await in_thread(lambda: lab.error_of(lambda: os.pread(fd, 10, 0))) in ("ESTALE", "EIO")
    await service.blobd.add(blob.id, lab.file_source(blob))
    assert await in_thread(lambda: os.pread(fd, 10, 0)) == blob.data[:10]
    os.close(fd)


# --- faults of the store ----------------------------------------------------------------------


async def test_a_corrupt_byte_is_an_error_until_the_store_is_healed(service: Service) -> None:
    blob = await service.blob(8)
    blob.spoil(4)
    assert await service.error(blob, 4) == "EIO"
    assert await service.read(blob, 5) == service.expect(blob, 5)  # came along and was good
    assert (await service.blobd.stats())["damaged_chunks"] > 0
    cached = (service.cache / "blobs" / blob.id).read_bytes()
    assert cached[4 * lab.CHUNK : 5 * lab.CHUNK] == bytes(lab.CHUNK)  # was never written
    blob.heal()
    assert await service.read(blob, 4) == service.expect(blob, 4)


async def test_a_neighbour_that_is_corrupt_does_no_harm(service: Service) -> None:
    blob = await service.blob(8)
    blob.spoil(1)
    assert await service.read(blob, 0) == service.expect(blob, 0)
    stats = await service.blobd.stats()
    assert stats["damaged_chunks"] == 1
    assert stats["fetch_faults"] == 0  # nobody wants it: it is not tried again
    assert stats["read_errors"] == 0


async def test_padding_is_zeros_whatever_the_store_says(service: Service) -> None:
    blob = await service.blob(4, odd=True)
    offset, size = blob.chunks[2]
    with blob.source.open("r+b") as file:
        file.seek(offset + size)
        file.write(b"\xff" * (-size % lab.BLOCK))
    end = offset + size + -size % lab.BLOCK
    got = await in_thread(lambda: lab.read(service.path(blob), offset, end - offset))
    assert got == blob.data[offset:end]


async def test_a_truncated_object_is_an_error(service: Service) -> None:
    blob = await service.blob(8)
    os.truncate(blob.source, 5 * lab.CHUNK - 7)
    assert await service.read(blob, 3) == service.expect(blob, 3)
    assert await service.error(blob, 4) == "EIO"
    assert await service.error(blob, 6) == "EIO"
    blob.heal()
    assert await service.read(blob, 4, 4) == service.expect(blob, 4, 4)


async def test_a_missing_object_is_an_error_soon(service: Service) -> None:
    await service.blobd.configure(Settings(demand_ms=60_000))
    blob = await service.blob(2)
    blob.source.unlink()
    assert await service.error(blob) == "EIO"
    stats = await service.blobd.stats()
    assert stats["deadline_errors"] == 0
    assert 0 < stats["fetch_faults"] <= 3  # tries
    blob.heal()
    assert await service.read(blob) == service.expect(blob)


@pytest.mark.parametrize("fault", ["stall", "truncate", "short", "status", "refused", "forbidden"])
async def test_http_faults_give_errors_in_bounded_time(service: Service, fault: str) -> None:
    await service.blobd.configure(Settings(demand_ms=400, attempt_ms=150))
    with lab.HttpStore(service.store) as store:
        blob = lab.random_blob(service.store, service.cache, 4)
        await service.blobd.add(blob.id, store.source(blob))
        if fault == "stall":
            store.stall.set()
        elif fault in ("truncate", "short"):
            setattr(store, fault, True)
        elif fault in ("status", "forbidden"):
            store.status = 503 if fault == "status" else 403
        else:
            await service.blobd.add(blob.id, lab.Source(kind="http", url="http://127.0.0.1:9/x"))
        start = time.monotonic()
        assert await service.error(blob, 2) == "EIO"
        assert time.monotonic() - start < 2.5
        store.stall.clear()
        store.status, store.truncate, store.short = 0, False, False
        await service.blobd.configure(Settings())  # what is healed may take its time
        await service.blobd.add(blob.id, store.source(blob))
        assert await service.read(blob, 2) == service.expect(blob, 2)


async def test_a_fault_that_passes_within_the_deadline_is_not_seen(service: Service) -> None:
    with lab.HttpStore(service.store, status=503) as store:
        blob = lab.random_blob(service.store, service.cache, 4)
        await service.blobd.add(blob.id, store.source(blob))
        reader = asyncio.create_task(service.read(blob, 1))
        await until(lambda: len(store.requests) >= 2)
        store.status = 0
        assert await reader == service.expect(blob, 1)


async def test_a_stalled_connection_is_replaced(service: Service) -> None:
    await service.blobd.configure(Settings(demand_ms=10_000, attempt_ms=300))
    with lab.HttpStore(service.store) as store:
        blob = lab.random_blob(service.store, service.cache, 4)
        await service.blobd.add(blob.id, store.source(blob))
        store.stall.set()
        reader = asyncio.create_task(service.read(blob, 1))
        await until(lambda: len(store.requests) >= 2)
        store.stall.clear()
        assert await reader == service.expect(blob, 1)


async def test_reads_of_a_stalled_store_do_not_stop_others(service: Service) -> None:
    with lab.HttpStore(service.store) as store:
        stalled = lab.random_blob(service.store, service.cache, 64, seed=7)
        good = await service.blob(4, seed=8)
        await service.blobd.add(stalled.id, store.source(stalled))
        store.stall.set()
        readers = [asyncio.create_task(service.error(stalled, chunk)) for chunk in (0, 20, 40)]
        await until(lambda: len(store.requests) >= 3)
        assert await service.read(good, 1) == service.expect(good, 1)
        assert not any(reader.done() for reader in readers)
        store.stall.clear()
        assert await asyncio.gather(*readers) == [""] * 3


# --- readers that are killed ------------------------------------------------------------------

_READER = "import os, sys; os.read(os.open(sys.argv[1], os.O_RDONLY), 100_000)"


@pytest.mark.parametrize("through", ["blob", "erofs", "erofs without directio"])
async def test_a_reader_blocked_on_a_stalled_store_can_be_killed(
    service: Service, through: str
) -> None:
    service.require("interrupt")
    await service.blobd.configure(Settings(demand_ms=60_000))
    with lab.HttpStore(service.store) as store:
        files = {"file": random.Random(3).randbytes(300_000)}
        image, blob = lab.build_image(service.root / "image", service.store, service.cache, files)
        await service.blobd.add(blob.id, store.source(blob))
        options = "" if through.endswith("directio") else "directio"
        mount = service.root / "mnt"
        with lab.mounted(image, service.path(blob), mount, options):
            store.stall.set()
            path = service.path(blob) if through == "blob" else mount / "file"
            reader = await in_thread(
                lambda: subprocess.Popen([sys.executable, "-c", _READER, str(path)])
            )
            await until(lambda: store.requests)
            await asyncio.sleep(0.1)
            assert reader.poll() is None
            reader.kill()
            await in_thread(lambda: reader.wait(5))
            # the store says nothing yet, and the read had not waited its 60 s
            assert (await service.blobd.stats())["deadline_errors"] == 0
            store.stall.clear()
            assert await in_thread((mount / "file").read_bytes) == files["file"]


async def test_a_mount_with_a_stalled_read_ends_when_the_blob_is_removed(service: Service) -> None:
    service.require("interrupt")
    await service.blobd.configure(Settings(demand_ms=60_000))
    with lab.HttpStore(service.store) as store:
        files = {"file": random.Random(3).randbytes(300_000)}
        image, blob = lab.build_image(service.root / "image", service.store, service.cache, files)
        await service.blobd.add(blob.id, store.source(blob))
        store.stall.set()
        with lab.mounted(image, service.path(blob), service.root / "mnt") as mount:
            reader = await in_thread(
                lambda: subprocess.Popen([sys.executable, "-c", _READER, str(mount / "file")])
            )
            await until(lambda: store.requests)
            reader.kill()
            await in_thread(reader.wait)
            await service.blobd.remove(blob.id)
        # it was the removal: the store says nothing yet, and no read had waited its 60 s
        assert (await service.blobd.stats())["deadline_errors"] == 0
        store.stall.clear()


async def test_a_blob_comes_back_while_a_fetch_of_it_is_under_way(service: Service) -> None:
    with lab.HttpStore(service.store, latency_s=0.01) as store:
        blob = lab.random_blob(service.store, service.cache, 200)
        await service.blobd.add(blob.id, store.source(blob))
        for chunk in range(0, 200, 10):
            reader = asyncio.create_task(service.error(blob, chunk))
            await asyncio.sleep(0.005)
            await service.blobd.remove(blob.id)
            await service.blobd.add(blob.id, store.source(blob))
            assert await reader in ("", "ESTALE", "ENOENT", "EIO")
            assert await service.read(blob, chunk) == service.expect(blob, chunk)

        async def counted_once() -> bool:
            stats, state = await service.blobd.stats(), await service.blobd.stat(blob.id)
            return abs(stats["used_bytes"] - state.bytes) <= 64 << 10

        await until(counted_once)  # when what came along with the last read is there
