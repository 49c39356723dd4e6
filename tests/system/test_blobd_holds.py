"""dsec-blobd: layers mounted on the files of its cache, which must stay as they are meanwhile."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator

import pytest

from dsecd.images.blobd.model import Settings
from libdsec.errors import Exhausted, InvalidArgument, NotFound, WrongState
from tests.system import blobd_lab as lab
from tests.system.blobd_service import ALL, Service, in_thread, kill, running, until

pytestmark = [pytest.mark.root, pytest.mark.needs("erofs_file")]
MIB = 1 << 20
ONE, TWO = "1" * 64, "2" * 64


@pytest.fixture(params=ALL)
async def service(request: pytest.FixtureRequest, test_name: str) -> AsyncIterator[Service]:
    async with running(request.param, test_name) as service:
        yield service


async def whole(service: Service, chunks: int, seed: int = 1) -> lab.Blob:
    blob = await service.blob(chunks, seed=seed)
    await service.read(blob, 0, chunks)
    return blob


async def test_only_whole_blobs_are_held(service: Service) -> None:
    good, part = await whole(service, 4, seed=1), await service.blob(32, seed=2)
    await service.read(part, 0)  # the half at most comes along
    with pytest.raises(WrongState):
        await service.blobd.hold(ONE, [good.id, part.id])
    assert await service.blobd.holds() == []
    assert not (await service.blobd.stat(good.id)).pinned  # all or none
    with pytest.raises(NotFound):
        await service.blobd.hold(ONE, [good.id, "0" * 64])
    for layer, blobs in ((ONE[:-1], [good.id]), (ONE, []), (ONE, ["x"])):
        with pytest.raises(InvalidArgument):
            await service.blobd.hold(layer, blobs)
    await service.blobd.remove(good.id)


async def test_a_held_blob_is_neither_evicted_nor_removed(service: Service) -> None:
    await service.blobd.configure(Settings(cache_bytes=6 * MIB))
    held = await whole(service, 32, seed=1)
    await service.blobd.hold(ONE, [held.id])
    await service.blobd.hold(ONE, [held.id])  # asked twice, as after a death
    await service.blobd.hold(TWO, [held.id])
    other = await service.blob(128, seed=2)

    async def squeeze() -> None:
        for _ in range(2):
            assert await service.read(other, 0, 128) == service.expect(other, 0, 128)

    for layer, left in ((ONE, [TWO]), (TWO, [])):
        await squeeze()
        state = await service.blobd.stat(held.id)
        assert state.whole
        assert state.pinned
        assert (service.cache / "blobs" / held.id).read_bytes() == held.data
        with pytest.raises(WrongState):
            await service.blobd.remove(held.id)
        await service.blobd.release(layer)
        await service.blobd.release(layer)
        assert await service.blobd.holds() == left
    await squeeze()
    assert not (await service.blobd.stat(held.id)).whole


async def test_another_hold_of_a_layer_replaces_the_first(service: Service) -> None:
    one, two = await whole(service, 2, seed=1), await whole(service, 2, seed=2)
    await service.blobd.hold(ONE, [one.id])
    await service.blobd.hold(ONE, [two.id])
    await service.blobd.remove(one.id)
    with pytest.raises(WrongState):
        await service.blobd.remove(two.id)


async def test_half_of_the_bound_stays_for_what_is_read_on_demand(service: Service) -> None:
    await service.blobd.configure(Settings(cache_bytes=5 * MIB))
    one, two = await whole(service, 32, seed=1), await whole(service, 16, seed=2)
    await service.blobd.hold(ONE, [one.id])
    await service.blobd.hold(TWO, [one.id])  # takes nothing more
    with pytest.raises(Exhausted):
        await service.blobd.hold(TWO, [one.id, two.id])
    other = await service.blob(64, seed=3)
    assert await service.read(other, 0, 64) == service.expect(other, 0, 64)
    assert (await service.blobd.stats())["no_room"] == 0


async def test_what_was_not_checked_since_the_machine_started_is_not_held(
    service: Service,
) -> None:
    blob = await whole(service, 8)
    await service.close()
    file = service.cache / "maps" / blob.id
    file.write_bytes(file.read_bytes().replace(lab.boot_id().encode(), b"0" * 36))
    await service.start()
    await service.blobd.add(blob.id, lab.file_source(blob))
    with pytest.raises(WrongState):
        await service.blobd.hold(ONE, [blob.id])
    await service.blobd.prefetch_whole(blob.id)
    await until(lambda: is_whole(service, blob))
    await service.blobd.hold(ONE, [blob.id])
    assert (await service.blobd.stats())["fetches"] == 0  # it was checked where it lay


async def is_whole(service: Service, blob: lab.Blob) -> bool:
    return (await service.blobd.stat(blob.id)).whole


async def test_a_layer_on_the_cache_reads_right_under_eviction_and_kills(service: Service) -> None:
    service.require("take_over")
    files = {f"f{n}": random.Random(n).randbytes(700_000) for n in range(3)}
    image, blob = lab.build_image(service.root / "image", service.store, service.cache, files)
    await service.blobd.add(blob.id, lab.file_source(blob))
    await service.blobd.prefetch_whole(blob.id)
    await until(lambda: is_whole(service, blob))
    await service.blobd.configure(Settings(cache_bytes=6 * MIB))
    await service.blobd.hold(ONE, [blob.id])
    other = await service.blob(128, seed=9)
    with lab.mounted(image, service.blobd.cached(blob.id), service.root / "mnt", "") as mount:
        for victim in ("worker", "both", "worker"):
            pid, keeper = service.blobd.hello.pid, service.blobd.hello.keeper
            if victim == "both":
                kill(keeper)
            kill(pid)
            for name, content in files.items():  # nobody is needed for it
                assert await in_thread((mount / name).read_bytes) == content
            await until(lambda pid=pid: service.blobd.hello.pid != pid)
            assert await service.read(other, 0, 128) == service.expect(other, 0, 128)
            assert await service.blobd.holds() == [ONE]
            assert await is_whole(service, blob)
            await in_thread(lambda: lab.drop_cache(mount))
            for name, content in files.items():
                assert await in_thread((mount / name).read_bytes) == content
            assert (await service.blobd.stats())["evicted_bytes"] > 0


async def test_a_blob_registered_after_its_hold_is_held(service: Service) -> None:
    """Its registration could not be restored, and the layer's mount is still there."""
    service.require("take_over")
    blob = await whole(service, 4)
    await service.blobd.hold(ONE, [blob.id])
    index = service.cache / "indexes" / blob.id
    index.rename(index.with_suffix(".away"))
    pid = service.blobd.hello.pid
    kill(pid)
    await until(lambda: service.blobd.hello.pid != pid)
    assert await service.blobd.blobs() == []
    index.with_suffix(".away").rename(index)
    state = await service.blobd.add(blob.id, lab.file_source(blob))
    assert state.pinned
    with pytest.raises(WrongState):
        await service.blobd.remove(blob.id)
    await service.blobd.release(ONE)
    await service.blobd.remove(blob.id)


async def test_a_hold_that_is_given_up_does_not_come_back(service: Service) -> None:
    service.require("take_over")
    blob = await whole(service, 4)
    await service.blobd.hold(ONE, [blob.id])
    await service.blobd.hold(TWO, [blob.id])
    await service.blobd.release(ONE)
    pid = service.blobd.hello.pid
    kill(pid)
    await until(lambda: service.blobd.hello.pid != pid)
    assert await service.blobd.holds() == [TWO]
    assert (await service.blobd.stat(blob.id)).pinned
