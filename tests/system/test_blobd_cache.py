"""dsec-blobd: the bound of the cache, and what of it is believed after a crash."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from dsecd.host import syscalls
from dsecd.images.blobd.model import Settings
from libdsec.errors import WrongState
from tests.system import blobd_lab as lab
from tests.system.blobd_service import ALL, Service, in_thread, running

pytestmark = [pytest.mark.root, pytest.mark.needs("erofs_file")]
MIB = 1 << 20


@pytest.fixture(params=ALL)
async def service(request: pytest.FixtureRequest, test_name: str) -> AsyncIterator[Service]:
    async with running(request.param, test_name) as service:
        yield service


def used(service: Service) -> int:
    """Bytes of disk below blobs/."""
    return sum(path.stat().st_blocks * 512 for path in (service.cache / "blobs").iterdir())


# --- the bound --------------------------------------------------------------------------------


@pytest.mark.timeout(180)
async def test_readers_are_right_while_the_cache_evicts(service: Service) -> None:
    """Four times as much as may stay, read by several at once; every byte is compared."""
    limit = 6 * MIB
    await service.blobd.configure(Settings(cache_bytes=limit))
    blobs = [await service.blob(128, seed=seed, odd=seed == 3) for seed in range(3)]
    rounds = 40 if service.kind == "twin" else 150
    largest = 0

    def reader(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(rounds):
            blob = rng.choice(blobs)
            offset, size = rng.randrange(len(blob.data)), rng.randrange(1, 400_000)
            got = lab.read(service.path(blob), offset, size)
            assert got == blob.data[offset : offset + size]

    async def watch() -> None:
        nonlocal largest
        while True:
            largest = max(largest, used(service))
            await asyncio.sleep(0.02)

    watcher = asyncio.create_task(watch())
    await asyncio.gather(*(in_thread(lambda s=seed: reader(s)) for seed in range(6)))
    watcher.cancel()
    stats = await service.blobd.stats()
    assert stats["evicted_bytes"] > limit
    assert stats["read_errors"] == 0
    assert stats["used_bytes"] <= limit
    assert largest <= limit + 4 * MIB  # what was being written, and the file system's own blocks


async def test_a_pinned_blob_is_not_evicted(service: Service) -> None:
    await service.blobd.configure(Settings(cache_bytes=4 * MIB))
    pinned, other = await service.blob(32, seed=1), await service.blob(64, seed=2)
    await service.read(pinned, 0, 32)
    assert (await service.blobd.pin(pinned.id)).whole
    await service.read(other, 0, 64)
    await service.read(other, 0, 64)
    state = await service.blobd.stat(pinned.id)
    assert state.whole
    assert state.pinned
    assert (service.cache / "blobs" / pinned.id).read_bytes() == pinned.data
    with pytest.raises(WrongState):
        await service.blobd.remove(pinned.id)
    await service.blobd.unpin(pinned.id)
    await service.read(other, 0, 64)
    await service.read(other, 0, 64)
    assert not (await service.blobd.stat(pinned.id)).whole


async def test_what_is_read_again_outlives_what_is_read_once(service: Service) -> None:
    await service.blobd.configure(Settings(cache_bytes=6 * MIB))
    hot, cold = await service.blob(16, seed=1), await service.blob(256, seed=2)
    await service.read(hot, 0, 16)
    for chunk in range(0, 256, 4):
        await service.read(hot, chunk % 16)
        await service.read(cold, chunk, 4)
    fetched = (await service.blobd.stats())["fetched_bytes"]
    assert fetched <= len(cold.data) + 2 * len(hot.data)


async def test_a_cache_full_of_pinned_blobs_is_an_error(service: Service) -> None:
    pinned, other = await service.blob(32, seed=1), await service.blob(16, seed=2)
    await service.read(pinned, 0, 32)
    await service.blobd.pin(pinned.id)
    await service.blobd.configure(Settings(cache_bytes=2 * MIB))
    assert await service.error(other) == "EIO"
    assert (await service.blobd.stats())["no_room"] > 0
    await service.blobd.configure(Settings(cache_bytes=8 * MIB))
    assert await service.read(other) == service.expect(other)


async def test_files_that_nobody_registered_go_first(service: Service) -> None:
    old, new = await service.blob(32, seed=1), await service.blob(32, seed=2)
    await service.read(old, 0, 32)
    await service.blobd.remove(old.id)
    await service.read(new, 0, 16)
    await service.blobd.configure(Settings(cache_bytes=3 * MIB))
    await service.read(new, 16, 16)
    assert not (service.cache / "blobs" / old.id).exists()
    assert (await service.blobd.stat(new.id)).whole
    assert (await service.blobd.stats())["used_bytes"] <= 3 * MIB


async def test_a_full_disk_evicts_then_fails_with_an_error(
    service: Service, tmp_path: Path
) -> None:
    await service.close()
    service.cache = tmp_path / "dsec-small"
    service.cache.mkdir()
    syscalls.mount("tmpfs", str(service.cache), "tmpfs", 0, "size=8m")
    try:
        await service.start()
        blobs = [await service.blob(64, seed=seed) for seed in range(3)]
        for blob in (*blobs, blobs[0]):
            assert await service.read(blob, 0, 64) == service.expect(blob, 0, 64)
        filler = service.cache / "filler"
        for blob in blobs:
            await service.blobd.pin(blob.id)
        with filler.open("wb") as file:
            while lab.error_of(lambda: file.write(bytes(lab.BLOCK)) and file.flush()) == "":
                pass
            os.truncate(filler, 4096)  # the buffer of the file object is written at its end
        state = await service.blobd.stat(blobs[1].id)
        missing = next(c for c in range(64) if not present(service, blobs[1], c))
        assert state.present < 64
        filler.write_bytes(b"")
        fill(filler)
        assert await service.error(blobs[1], missing) == "EIO"
        filler.unlink()
        assert await service.read(blobs[1], missing) == service.expect(blobs[1], missing)
    finally:
        await service.close()
        syscalls.umount(str(service.cache))


def fill(path: Path) -> None:
    """Write until the disk is full."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT)
    while lab.error_of(lambda: os.write(fd, bytes(lab.BLOCK))) == "":
        pass
    os.close(fd)


# --- the map ----------------------------------------------------------------------------------


def states(service: Service, blob: lab.Blob) -> bytes:
    return (service.cache / "maps" / blob.id).read_bytes()[lab.BLOCK :]


def present(service: Service, blob: lab.Blob, chunk: int) -> bool:
    return states(service, blob)[chunk] == 0x5A


async def restart(service: Service) -> None:
    await service.close()
    await service.start()


async def test_what_is_there_is_believed_after_a_restart(service: Service) -> None:
    await service.blobd.configure(Settings(fetch_max=128 << 10))  # whatever the pace of the disk
    blob = await service.blob(8)
    await service.read(blob, 0, 4)
    await restart(service)
    state = await service.blobd.add(blob.id, lab.file_source(blob))
    assert state.present == 4
    blob.source.unlink()
    assert await service.read(blob, 0, 4) == service.expect(blob, 0, 4)
    assert (await service.blobd.stats())["verified_chunks"] == 0


async def test_after_a_restart_of_the_machine_chunks_are_checked_first(service: Service) -> None:
    blob = await service.blob(8, odd=True)
    await service.read(blob, 0, 8)
    await service.close()
    file = service.cache / "maps" / blob.id
    content = file.read_bytes()
    assert lab.boot_id().encode() in content
    file.write_bytes(content.replace(lab.boot_id().encode(), b"0" * 36))
    with (service.cache / "blobs" / blob.id).open("r+b") as data:  # a block that was lost
        data.seek(blob.chunks[5][0])
        data.write(bytes(lab.BLOCK))
    await service.start()
    state = await service.blobd.add(blob.id, lab.file_source(blob))
    assert state.present == 0
    assert await service.read(blob, 0, 8) == service.expect(blob, 0, 8)
    stats = await service.blobd.stats()
    assert stats["verified_chunks"] == 7
    assert 0 < stats["fetched_bytes"] <= lab.CHUNK
    assert (await service.blobd.stat(blob.id)).whole


@pytest.mark.parametrize("damage", ["magic", "short", "long", "state", "gone", "id", "noise"])
async def test_a_damaged_map_is_not_believed(service: Service, damage: str) -> None:
    blob = await service.blob(8)
    await service.read(blob, 0, 4)
    await service.close()
    file = service.cache / "maps" / blob.id
    content = bytearray(file.read_bytes())
    assert len(content) == lab.BLOCK + 8
    if damage == "magic":
        content[0] ^= 1
    elif damage == "short":
        del content[-1:]
    elif damage == "long":
        content += b"\x5a"
    elif damage == "state":
        content[lab.BLOCK + 6] ^= 0x40
    elif damage == "id":
        content[60] ^= 1
    elif damage == "noise":
        content[:] = random.Random(1).randbytes(len(content))
    file.write_bytes(content)
    if damage == "gone":
        file.unlink()
    await service.start()
    assert (await service.blobd.add(blob.id, lab.file_source(blob))).present == 0
    assert await service.read(blob, 0, 8) == service.expect(blob, 0, 8)


async def test_a_chunk_the_map_claims_but_the_file_lacks_is_fetched(service: Service) -> None:
    await service.blobd.configure(Settings(fetch_max=128 << 10))  # whatever the pace of the disk
    blob = await service.blob(8)
    await service.read(blob, 0, 4)
    await service.close()
    file = service.cache / "maps" / blob.id
    content = bytearray(file.read_bytes())
    content[lab.BLOCK :] = b"\x5a" * 8
    file.write_bytes(content)
    await service.start()
    state = await service.blobd.add(blob.id, lab.file_source(blob))
    assert state.present == 4
    assert await service.read(blob, 0, 8) == service.expect(blob, 0, 8)


async def test_another_data_file_is_not_the_map_s(service: Service) -> None:
    blob = await service.blob(4)
    await service.read(blob, 0, 4)
    await service.close()
    data = service.cache / "blobs" / blob.id
    data.rename(data.with_suffix(".old"))
    data.write_bytes(b"x" * len(blob.data))
    data.with_suffix(".old").unlink()
    await service.start()
    await service.blobd.add(blob.id, lab.file_source(blob))
    assert await service.read(blob, 0, 4) == blob.data
