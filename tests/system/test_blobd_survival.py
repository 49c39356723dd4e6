"""dsec-blobd: its processes are killed, dsecd goes and comes back, the readers do not notice."""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import signal
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from dsecd.host import fuse
from dsecd.images.blobd.client import Blobd
from tests.system import blobd_lab as lab
from tests.system.blobd_service import ALL, Service, in_thread, kill, running, until

pytestmark = [pytest.mark.root, pytest.mark.needs("erofs_file")]


@pytest.fixture(params=ALL)
async def service(request: pytest.FixtureRequest, test_name: str) -> AsyncIterator[Service]:
    async with running(request.param, test_name) as service:
        yield service


async def worker(service: Service, killed: int = 0) -> int:
    """Return the pid of the process that serves now, the client's again; not that of `killed`."""
    await until(lambda: service.blobd.hello.pid != killed)
    await service.blobd.stats()
    return service.blobd.hello.pid


class Readers:
    """Threads that read every file of an image again and again and compare the digests."""

    def __init__(self, mount: Path, digests: dict[str, str], count: int = 4) -> None:
        self.good, self.failed, self.wrong = 0, 0, 0
        self._mount, self._digests = mount, digests
        self._end = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(n,)) for n in range(count)]
        for thread in self._threads:
            thread.start()

    def _run(self, seed: int) -> None:
        rng = random.Random(seed)
        while not self._end.is_set():
            name = rng.choice(list(self._digests))
            try:
                content = (self._mount / name).read_bytes()
            except OSError:
                self.failed += 1
                continue
            if hashlib.sha256(content).hexdigest() == self._digests[name]:
                self.good += 1
            else:
                self.wrong += 1

    async def finish(self) -> None:
        self._end.set()
        for thread in self._threads:
            await in_thread(lambda t=thread: t.join(20))
        assert not any(thread.is_alive() for thread in self._threads), "a reader hangs"


async def image(service: Service, store: lab.HttpStore) -> tuple[Path, lab.Blob, dict[str, str]]:
    rng = random.Random(4)
    files = {f"file{n}": rng.randbytes(rng.randrange(1, 600_000)) for n in range(40)}
    path, blob = lab.build_image(service.root / "image", service.store, service.cache, files)
    await service.blobd.add(blob.id, store.source(blob))
    return path, blob, {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}


@pytest.mark.timeout(180)
@pytest.mark.parametrize("cache_bytes", [0, 4 << 20], ids=["all", "evicting"])
@pytest.mark.parametrize("victim", ["worker", "both"])
async def test_killed_under_load_readers_get_right_bytes(
    service: Service, victim: str, cache_bytes: int
) -> None:
    service.require("take_over")
    await service.blobd.configure(service.client(cache_bytes=cache_bytes)._settings)
    with lab.HttpStore(service.store, latency_s=0.005) as store:
        path, blob, digests = await image(service, store)
        with lab.mounted(path, service.path(blob), service.root / "mnt") as mount:
            readers, pid = Readers(mount, digests), 0
            for _ in range(4):
                await asyncio.sleep(0.15)
                await in_thread(lambda: lab.drop_cache(mount))
                pid, keeper = await worker(service, pid), service.blobd.hello.keeper
                if victim == "both":
                    kill(keeper)
                kill(pid)
            await asyncio.sleep(0.3)
            await worker(service, pid)
            await until(lambda: readers.good > 8)
            await readers.finish()
            assert readers.wrong == 0
            assert readers.failed == 0  # requests that the dead one had taken were sent again
            assert readers.good > 8
            await in_thread(lambda: lab.drop_cache(mount))
            for name, digest in digests.items():
                content = await in_thread((mount / name).read_bytes)
                assert hashlib.sha256(content).hexdigest() == digest
            assert (await service.blobd.stat(blob.id)).present > 0  # still registered
    assert service.blobd.restarts >= 4


async def test_it_serves_again_within_100_ms(service: Service) -> None:
    service.require("take_over")
    blob = await service.blob(64)
    delays, pid = [], 0
    for chunk in range(0, 20, 4):
        await service.read(blob, chunk)
        both = chunk >= 8
        pid, keeper = await worker(service, pid), service.blobd.hello.keeper
        start = time.monotonic()
        if both:
            kill(keeper)
        kill(pid)
        assert await service.read(blob, chunk + 2) == service.expect(blob, chunk + 2)
        delays.append(time.monotonic() - start)
        await asyncio.sleep(0.05)
    if service.kind == "c":
        assert sorted(delays)[len(delays) // 2] < 0.1, delays


async def test_a_read_under_way_is_answered_by_the_next_process(service: Service) -> None:
    service.require("take_over")
    with lab.HttpStore(service.store) as store:
        blob = lab.random_blob(service.store, service.cache, 4)
        await service.blobd.add(blob.id, store.source(blob))
        store.stall.set()
        reader = asyncio.create_task(service.read(blob, 2))
        await until(lambda: store.requests)
        kill(await worker(service))
        await until(lambda: len(store.requests) > 1)
        store.stall.clear()
        assert await reader == service.expect(blob, 2)


async def test_without_resend_readers_get_an_error_and_do_not_hang(service: Service) -> None:
    service.require("take_over")
    await service.close()
    await service.start("--no-resend")
    assert not service.blobd.hello.resend
    with lab.HttpStore(service.store) as store:
        blob = lab.random_blob(service.store, service.cache, 4)
        await service.blobd.add(blob.id, store.source(blob))
        store.stall.set()
        reader = asyncio.create_task(service.error(blob, 2))
        await until(lambda: store.requests)
        kill(await worker(service))
        assert await asyncio.wait_for(reader, 5) in ("ECONNABORTED", "ENOTCONN", "EIO")
        store.stall.clear()


async def test_the_next_dsecd_adopts_it(service: Service) -> None:
    service.require("take_over")
    blob = await service.blob(8)
    old = service.blobd
    pid = await worker(service)
    process = old._process
    await old.detach()
    assert await in_thread(lambda: lab.read(old.path(blob.id), 0, 10)) == blob.data[:10]

    service.blobd = service.client()
    assert await service.blobd.adopt()
    assert service.blobd.hello.pid == pid
    assert await service.blobd.blobs() == [blob.id]
    # with both processes dead, the descriptor that was handed over is all that is left
    kill(service.blobd.hello.keeper)
    kill(pid)
    assert process is not None
    await in_thread(process.wait)
    assert await service.read(blob, 5) == service.expect(blob, 5)
    assert await worker(service, pid) != pid


async def test_a_start_beside_a_running_one_adopts_it(service: Service) -> None:
    blob = await service.blob(4)
    pid = await worker(service)
    process = service.blobd._process
    await service.blobd.detach()
    service.blobd = service.client()
    await service.blobd.start()
    assert service.blobd.hello.pid == pid
    assert await service.read(blob, 1) == service.expect(blob, 1)
    service.blobd._process = process  # for the clean-up to reap it


async def test_killed_while_dsecd_is_away_it_serves_again(service: Service) -> None:
    service.require("take_over")
    blob = await service.blob(8)
    await service.blobd.pin(blob.id)
    await service.blobd.configure(service.client(cache_bytes=1 << 30)._settings)
    pid, process = await worker(service), service.blobd._process
    await service.blobd.detach()
    kill(pid)
    got = await in_thread(lambda: lab.read(service.path(blob), 0, len(blob.data)))
    assert got == blob.data

    service.blobd = service.client(cache_bytes=1 << 30)
    await until(service.blobd.adopt)
    assert service.blobd.hello.pid != pid
    state = await service.blobd.stat(blob.id)
    assert state.pinned
    assert state.whole
    service.blobd._process = process  # for the clean-up to reap it


async def test_a_keeper_may_die_while_dsecd_reconnects(service: Service) -> None:
    """Nobody is left then who would start another: waiting for an answer is in vain."""
    service.require("take_over")
    blob = await service.blob(4)
    pid, process = await worker(service), service.blobd._process
    assert process is not None
    await service.blobd.detach()
    service.blobd = service.client()
    await until(service.blobd.adopt)
    os.kill(service.blobd.hello.keeper, signal.SIGSTOP)
    kill(pid)
    await until(lambda: service.blobd.restarts)
    await asyncio.sleep(0.1)
    kill(service.blobd.hello.keeper)
    await until(lambda: service.blobd.hello.pid != pid, patience_s=5.0)
    assert await service.read(blob, 1) == service.expect(blob, 1)
    await in_thread(process.wait)


async def test_without_a_running_one_there_is_nothing_to_adopt(service: Service) -> None:
    await service.close()
    client = service.client()
    assert not await client.adopt()
    (service.runtime / "blobd.sock").unlink(missing_ok=True)
    assert not await client.adopt()


async def test_a_dead_mount_is_replaced_at_the_start(service: Service) -> None:
    """dsecd and both processes were killed: the connection is dead, its mount is still there."""
    blob = await service.blob(4)
    pid, keeper, process = await worker(service), service.blobd.hello.keeper, service.blobd._process
    await service.blobd.detach()
    if keeper:
        kill(keeper)
    kill(pid)
    assert process is not None
    await in_thread(process.wait)
    error = await in_thread(lambda: lab.error_of(service.path(blob).stat))
    assert error in ("ENOTCONN", "ECONNABORTED")
    await service.start()
    assert fuse.connection(service.blobd.directory)
    await service.blobd.add(blob.id, lab.file_source(blob))
    assert await service.read(blob, 1) == service.expect(blob, 1)


def test_the_client_names_a_program_that_does_not_start(test_name: str, tmp_path: Path) -> None:
    from libdsec.errors import Internal

    async def run() -> None:
        client = Blobd(tmp_path / "run", tmp_path / "cache", binary=("/bin/false",))
        with pytest.raises(Internal, match="does not start"):
            await client.start()

    asyncio.run(run())
