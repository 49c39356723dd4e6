"""dsec-blobd: layers on cache files that are not whole, filled when they are read (pre-access)."""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import random
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from dsecd.images.blobd.client import Blobd
from dsecd.images.blobd.model import Settings
from libdsec.errors import WrongState
from tests.system import blobd_lab as lab
from tests.system.blobd_service import ALL, COMMANDS, Service, in_thread, kill, running, until
from tests.system.test_blobd_survival import Readers

pytestmark = [pytest.mark.root, pytest.mark.needs("erofs_file", "pre_access")]
ONE = "1" * 64
FILES = {f"f{n}": random.Random(n).randbytes(500_000 + 77 * n) for n in range(12)}
_READ = "import sys; sys.stdout.buffer.write(open(sys.argv[1], 'rb').read())"


class Watching(Service):
    """Its client asks for pre-access."""

    def client(self, *options: str, **settings: object) -> Blobd:
        plain = super().client(*options, **settings)
        return Blobd(
            self.runtime, self.cache, plain._settings,
            binary=(*COMMANDS[self.kind], *options), pre_access=True,
        )  # fmt: skip

    async def prepare(self, store: lab.HttpStore | None = None) -> None:
        self.image, self.held = lab.build_image(self.root / "image", self.store, self.cache, FILES)
        source = store.source(self.held) if store else lab.file_source(self.held)
        await self.blobd.add(self.held.id, source)
        await self.blobd.hold(ONE, [self.held.id], watch=True)

    @contextlib.contextmanager
    def mounted(self, options: str = "") -> Iterator[Path]:
        with lab.mounted(
            self.image, self.blobd.cached(self.held.id), self.root / "mnt", options
        ) as mount:
            yield mount

    async def check(self, mount: Path) -> None:
        for name, content in FILES.items():
            assert await in_thread((mount / name).read_bytes) == content


@pytest.fixture(params=[kind for kind in ALL if kind != "twin"])  # which says that it cannot
async def service(request: pytest.FixtureRequest, test_name: str) -> AsyncIterator[Watching]:
    async with running(request.param, test_name) as plain:
        await plain.close()
        service = Watching(plain.root, plain.kind)
        await service.start()
        plain.blobd = service.blobd
        try:
            yield service
        finally:
            plain.blobd = service.blobd


@pytest.mark.parametrize("options", ["", "directio"])
async def test_every_byte_is_that_of_the_blob(service: Watching, options: str) -> None:
    await service.prepare()
    with service.mounted(options) as mount:
        assert (await service.blobd.stat(service.held.id)).present == 0
        rng = random.Random(2)
        for _ in range(60):
            name = rng.choice(list(FILES))
            offset, size = rng.randrange(400_000), rng.randrange(1, 200_000)
            got = await in_thread(lambda n=name, o=offset, s=size: lab.read(mount / n, o, s))
            assert got == FILES[name][offset : offset + size]
            await in_thread(lambda: lab.drop_cache(mount))
        await service.check(mount)
        assert (await service.blobd.stat(service.held.id)).whole
        reads = (await service.blobd.stats())["reads"]
        await in_thread(lambda: lab.drop_cache(mount))
        await service.check(mount)
        assert (await service.blobd.stats())["reads"] <= reads + 1  # nobody is asked any more
    await service.blobd.release(ONE)
    await service.blobd.remove(service.held.id)


async def test_page_faults_wait_too(service: Watching) -> None:
    await service.prepare()
    with service.mounted() as mount:

        def fault(name: str) -> bytes:
            with (
                (mount / name).open("rb") as file,
                mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as memory,
            ):
                memory.madvise(mmap.MADV_RANDOM)
                return bytes(memory[::4096])

        for name, content in FILES.items():
            assert await in_thread(lambda n=name: fault(n)) == content[::4096]


async def test_damage_and_a_missing_object_are_errors_until_healed(service: Watching) -> None:
    await service.prepare()
    service.held.source.rename(service.held.source.with_suffix(".away"))
    with service.mounted() as mount:
        for _ in range(2):
            assert await in_thread(lambda: lab.error_of((mount / "f1").read_bytes)) == "EIO"
        service.held.source.with_suffix(".away").rename(service.held.source)
        service.held.spoil(0)
        first = await in_thread(lambda: [lab.error_of((mount / n).read_bytes) for n in FILES])
        assert first.count("EIO") >= 1
        service.held.heal()
        await service.check(mount)


async def test_a_stalled_store_is_an_error_in_time_and_a_reader_can_be_killed(
    service: Watching,
) -> None:
    await service.blobd.configure(Settings(demand_ms=60_000))
    with lab.HttpStore(service.store) as store:
        await service.prepare(store)
        with service.mounted() as mount:
            store.stall.set()
            path = str(mount / "f0")
            reader = await in_thread(lambda: subprocess.Popen([sys.executable, "-c", _READ, path]))
            await until(lambda: store.requests)
            reader.kill()
            await in_thread(lambda: reader.wait(5))
            # the store says nothing yet, and the read had not waited its 60 s
            assert (await service.blobd.stats())["deadline_errors"] == 0
            await service.blobd.configure(Settings(demand_ms=1500, attempt_ms=400))
            start = time.monotonic()
            assert await in_thread(lambda: lab.error_of((mount / "f1").read_bytes)) == "EIO"
            assert time.monotonic() - start < 10
            await service.blobd.configure(Settings())  # what is healed may take its time
            store.stall.clear()
            await service.check(mount)


async def test_nothing_is_taken_out_of_a_watched_file(service: Watching) -> None:
    await service.blobd.configure(Settings(cache_bytes=24 << 20))
    await service.prepare()
    other = await service.blob(500, seed=9)
    with service.mounted() as mount:
        await in_thread((mount / "f3").read_bytes)
        before = (await service.blobd.stat(service.held.id)).present
        for _ in range(2):
            assert await service.read(other, 0, 500) == service.expect(other, 0, 500)
        assert (await service.blobd.stats())["evicted_bytes"] > 0
        assert (await service.blobd.stat(service.held.id)).present >= before
        await in_thread(lambda: lab.drop_cache(mount))
        await service.check(mount)
        with pytest.raises(WrongState):
            await service.blobd.remove(service.held.id)


@pytest.mark.parametrize("victim", ["worker", "both"])
async def test_a_read_under_way_is_answered_by_the_next_process(
    service: Watching, victim: str
) -> None:
    with lab.HttpStore(service.store) as store:
        await service.prepare(store)
        with service.mounted() as mount:
            store.stall.set()
            readers = [
                asyncio.create_task(in_thread((mount / f"f{n}").read_bytes)) for n in range(6)
            ]
            await until(lambda: len(store.requests) >= 3)
            pid, keeper = service.blobd.hello.pid, service.blobd.hello.keeper
            if victim == "both":
                kill(keeper)
            kill(pid)
            await asyncio.sleep(0.05)
            late = asyncio.create_task(in_thread((mount / "f7").read_bytes))
            await until(lambda: service.blobd.hello.pid != pid)
            store.stall.clear()
            assert await asyncio.gather(*readers) == [FILES[f"f{n}"] for n in range(6)]
            assert await late == FILES["f7"]
            await service.check(mount)


@pytest.mark.timeout(120)
async def test_readers_never_see_zeros_while_processes_are_killed(service: Watching) -> None:
    with lab.HttpStore(service.store, latency_s=0.002) as store:
        await service.prepare(store)
        import hashlib

        digests = {name: hashlib.sha256(content).hexdigest() for name, content in FILES.items()}
        with service.mounted() as mount:
            readers = Readers(mount, digests)
            for victim in ("worker", "both", "worker", "both"):
                await asyncio.sleep(0.05)
                pid, keeper = service.blobd.hello.pid, service.blobd.hello.keeper
                if victim == "both":
                    kill(keeper)
                kill(pid)
                await until(lambda pid=pid: service.blobd.hello.pid != pid)
            await asyncio.sleep(0.2)
            await until(lambda: readers.good > 8)
            await readers.finish()
            assert readers.wrong == 0
            assert readers.good > 8
            await in_thread(lambda: lab.drop_cache(mount))
            await service.check(mount)


async def test_the_next_dsecd_holds_the_group(service: Watching) -> None:
    await service.prepare()
    with service.mounted() as mount:
        await in_thread((mount / "f0").read_bytes)
        process = service.blobd._process
        await service.blobd.detach()
        assert await in_thread((mount / "f1").read_bytes) == FILES["f1"]
        service.blobd = service.client()
        assert await service.blobd.adopt()
        assert service.blobd.watches
        pid = service.blobd.hello.pid
        kill(service.blobd.hello.keeper)
        kill(pid)
        assert process is not None
        await in_thread(process.wait)
        await service.check(mount)
        await until(lambda: service.blobd.hello.pid != pid)


async def test_without_the_option_it_cannot_watch(service: Watching) -> None:
    await service.close()
    service.blobd = Service.client(service)
    await service.blobd.start()
    assert not service.blobd.watches
    blob = await service.blob(4)
    with pytest.raises(WrongState):
        await service.blobd.hold(ONE, [blob.id], watch=True)


async def test_a_mount_that_nobody_watches_any_more_gives_zeros(service: Watching) -> None:
    """What the documentation warns of: this test fails when the kernel learns to fail closed."""
    await service.prepare()
    with service.mounted() as mount:
        process = service.blobd._process
        pids = (service.blobd.hello.keeper, service.blobd.hello.pid)
        await service.blobd.detach()
        for pid in pids:
            kill(pid)
        assert process is not None
        await in_thread(process.wait)
        await asyncio.sleep(0.1)
        assert await in_thread((mount / "f0").read_bytes) == bytes(len(FILES["f0"]))
        await service.start()  # and from now on it is watched again
        assert await in_thread((mount / "f5").read_bytes) == FILES["f5"]
