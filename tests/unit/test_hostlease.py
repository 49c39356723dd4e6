"""The lease of a host on the layers that it has mounted, by a clock that is moved by hand."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import pytest

from dsecd.images import collect as garbage
from dsecd.images import hostlease, marks, records
from dsecd.images.hostlease import HELD_S, INHERITED_S, HostLease
from dsecd.images.manifest import Manifest
from dsecd.images.records import Lease
from dsecd.images.stores.directory import DirectoryStore
from libdsec.errors import NotFound, Unavailable

A, B, C = ("a" * 64, "b" * 64, "c" * 64)


class Clock:
    def __init__(self) -> None:
        self.now = time.time()

    def __call__(self) -> float:
        return self.now


class CountingStore(DirectoryStore):
    """Counts moves; `away`: none gets through, `lost`: the answers of so many do not."""

    moves = lost = 0
    away = False

    async def swap_name(self, key: str, data: bytes | None, expected: str | None) -> str:
        self.moves += 1
        if self.away:
            raise Unavailable("away")
        version = await super().swap_name(key, data, expected)
        if self.lost > 0:
            self.lost -= 1
            raise Unavailable("the answer was lost")
        return version


async def put(store: DirectoryStore, digest: str) -> None:
    """Put a layer without content."""
    manifest = Manifest(
        digest=digest, kind="base", image="0" * 64, image_bytes=0, blobs=[], content_bytes=0,
        entries=1,
    )  # fmt: skip
    await store.write(f"layers/{digest}", records.encode_manifest(manifest))


class Host:
    """A host with a state directory, whose mounts are set by hand."""

    def __init__(self, store: DirectoryStore, state: Path, clock: Clock) -> None:
        state.mkdir(exist_ok=True)
        self.used: set[str] = set()
        self.lost: list[str] = []
        self.lease = HostLease(store, state, lambda: self.used, self.lost.append, clock)

    async def mount(self, *layers: str) -> None:
        with self.lease.needing(layers):
            await self.lease.secure(layers)
            self.used.update(layers)


@pytest.fixture
def place() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as made:
        yield Path(made)


@pytest.fixture
async def store(place: Path) -> AsyncIterator[CountingStore]:
    made = CountingStore(place / "store")
    await made.start()
    for digest in (A, B, C):
        await put(made, digest)
    yield made
    await made.close()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def host(store: CountingStore, place: Path, clock: Clock) -> AsyncIterator[Host]:
    made = Host(store, place / "one", clock)
    await made.lease.start()
    yield made
    await made.lease.close(leave_nothing=True)


async def leases(store: DirectoryStore) -> dict[str, Lease]:
    found = {}
    async for entry in store.list("leases/"):
        record = await store.read_name(entry.key)
        assert record is not None
        found[entry.key] = msgspec.json.decode(record[0], type=Lease)
    return found


async def listed(store: DirectoryStore) -> set[str]:
    return {layer for lease in (await leases(store)).values() for layer in lease.layers}


async def test_a_layer_is_listed_before_its_first_mount_and_costs_nothing_after_it(
    host: Host, store: CountingStore
) -> None:
    await host.mount(A)
    assert await listed(store) == {A}
    moves = store.moves
    for _ in range(10):
        await host.mount(A)
    assert store.moves == moves
    await host.mount(A, B)
    assert await listed(store) == {A, B}


async def test_a_burst_of_first_mounts_is_one_write_or_two(
    host: Host, store: CountingStore
) -> None:
    layers = [f"{n:064x}" for n in range(40)]
    for digest in layers:
        await put(store, digest)
    moves = store.moves
    await asyncio.gather(*(host.mount(layer) for layer in layers))
    assert await listed(store) == set(layers)
    assert store.moves - moves <= 2


async def test_a_renewal_drops_what_is_not_mounted_any_more(
    host: Host, store: CountingStore, clock: Clock
) -> None:
    await host.mount(A, B)
    host.used = {B}
    clock.now += hostlease.RENEW_S
    await host.lease.renew()
    (lease,) = (await leases(store)).values()
    assert lease.layers == [B]
    assert lease.expires_at == clock.now + HELD_S


async def test_a_clean_stop_removes_the_lease_one_that_keeps_sandboxes_does_not(
    store: CountingStore, place: Path, clock: Clock
) -> None:
    one = Host(store, place / "one", clock)
    await one.lease.start()
    await one.mount(A)
    clock.now += 100
    one.used = set()  # its mounts are the next daemon's
    await one.lease.close(leave_nothing=False)
    (lease,) = (await leases(store)).values()
    assert (lease.layers, lease.expires_at) == ([A], clock.now + HELD_S)
    two = Host(store, place / "one", clock)
    two.used = {A}
    await two.lease.start()
    assert two.lease.id == one.lease.id
    two.used = set()
    await two.lease.close(leave_nothing=True)
    assert await leases(store) == {}


async def test_more_layers_than_fit_one_record(
    host: Host, store: CountingStore, place: Path, clock: Clock
) -> None:
    layers = [f"{n:064x}" for n in range(2 * hostlease.PART + 10)]
    for digest in layers:
        await put(store, digest)
    await host.mount(*layers)
    assert await listed(store) == set(layers)
    assert len(await leases(store)) == 3
    moves = store.moves
    await host.mount(A)
    assert store.moves == moves + 1  # only the part that changed
    again = Host(store, place / "one", clock)
    again.used = host.used
    await again.lease.start()
    again.used = {B}
    await again.lease.renew()
    assert await listed(store) == {B}
    assert len(await leases(store)) == 1
    await again.lease.close(leave_nothing=True)


async def test_a_dead_host_protects_until_its_lease_expires(
    host: Host, store: CountingStore, clock: Clock
) -> None:
    await host.mount(A)
    for _ in range(2):
        await garbage.collect(store, grace_s=0, wait_s=0)
    assert await store.size(f"layers/{A}") is not None
    assert await store.size(f"layers/{B}") is None
    clock.now -= HELD_S + 60  # as if it had been renewed so long ago
    await host.lease.renew()
    for _ in range(2):
        await garbage.collect(store, grace_s=0, wait_s=0)
    assert await store.size(f"layers/{A}") is None
    assert await leases(store)  # its host may yet come back, with another clock
    clock.now -= garbage.EXPIRED_S
    await host.lease.renew()
    await garbage.collect(store, grace_s=0, wait_s=0)
    assert await leases(store) == {}


async def test_a_lease_that_expired_is_taken_again_and_what_went_is_told(
    host: Host, store: CountingStore, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    await host.mount(A, B)
    store.away = True
    with pytest.raises(Unavailable):
        await host.lease.renew()
    for key in await leases(store):
        await store.delete(key)  # collected, a day after it expired
    await store.delete(f"layers/{B}")
    store.away = False
    clock.now += HELD_S + 1
    await host.lease.renew()
    assert await listed(store) == {A, B}
    assert host.lost == [B]
    assert f"layer {B[:12]} was collected while this host had no lease" in caplog.text


async def test_a_create_after_the_lease_expired_takes_it_again(
    host: Host, store: CountingStore, clock: Clock
) -> None:
    await host.mount(A)
    clock.now += HELD_S + 1
    await store.delete(f"layers/{A}")
    await host.mount(B)
    assert host.lost == [A]
    assert {lease.expires_at for lease in (await leases(store)).values()} == {clock.now + HELD_S}


async def test_a_write_whose_answer_was_lost_is_recognised(
    host: Host, store: CountingStore
) -> None:
    before = host.lease.id
    store.lost = 1
    with pytest.raises(Unavailable):
        await host.mount(A)
    await host.mount(A)
    assert await listed(store) == {A}
    assert host.lease.id == before


async def test_copied_state_directories_end_up_with_two_leases(
    host: Host, store: CountingStore, place: Path, clock: Clock
) -> None:
    await host.mount(A)
    shutil.copytree(place / "one", place / "copy")
    copy = Host(store, place / "copy", clock)
    await copy.lease.start()
    await copy.mount(B)
    assert await listed(store) == {A, B}  # A is not the copy's, but it may be somebody's
    await host.lease.renew()
    assert host.lease.id != copy.lease.id
    clock.now += INHERITED_S + 1
    await copy.lease.renew()
    await host.mount(C)
    found = {key: lease.layers for key, lease in (await leases(store)).items()}
    assert found == {
        f"leases/host-{host.lease.id}": [A, C],
        f"leases/host-{copy.lease.id}": [B],
    }
    assert (place / "one/host-id").read_text().strip() == host.lease.id
    await copy.lease.close(leave_nothing=True)
    assert await listed(store) == {A, C}


async def test_a_copy_that_stops_at_once_does_not_end_the_lease_of_its_origin(
    host: Host, store: CountingStore, place: Path, clock: Clock
) -> None:
    await host.mount(A)
    shutil.copytree(place / "one", place / "copy")
    copy = Host(store, place / "copy", clock)
    await copy.lease.start()
    await copy.lease.close(leave_nothing=True)
    assert await listed(store) == {A}


async def test_a_layer_that_is_gone_is_not_mounted(host: Host, store: CountingStore) -> None:
    await store.delete(f"layers/{A}")
    with pytest.raises(NotFound, match="layer aaaaaaaaaaaa was removed from the store; import"):
        await host.mount(A)
    assert host.used == set()


async def test_a_marked_layer_waits_for_who_deletes_now(host: Host, store: CountingStore) -> None:
    await store.write(f"trash/{A}", b"garbage\n")
    await host.mount(A)  # nobody deletes: whoever begins now sees the lease
    await store.write(f"trash/{B}", b"garbage\n")
    async with marks.deleting(store, "other"):
        mounting = asyncio.create_task(host.mount(B))
        await asyncio.sleep(0.5)
        assert not mounting.done()
        await store.delete(f"layers/{B}")
    with pytest.raises(NotFound):
        await mounting


async def test_who_deletes_for_long_is_not_waited_for(
    host: Host, store: CountingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(marks, "_PATIENCE_S", 0.3)
    await store.write(f"trash/{A}", b"garbage\n")
    async with marks.deleting(store, "other"):
        with pytest.raises(Unavailable, match="garbage of the store is being deleted; try again"):
            await host.mount(A)


async def test_mounts_and_collections_at_once_lose_nothing_that_is_mounted(
    host: Host, store: CountingStore
) -> None:
    """Layers without a name, found as garbage while a host is about to mount them."""
    stop = asyncio.Event()

    async def collect_all_the_time() -> None:
        while not stop.is_set():
            await garbage.collect(store, grace_s=0, wait_s=0)

    collector = asyncio.create_task(collect_all_the_time())
    refused = 0
    for n in range(30):
        digest = f"{n:064x}"
        await put(store, digest)
        await asyncio.sleep(0.001 * (n % 20))
        try:
            await host.mount(digest)
        except NotFound:
            refused += 1
    stop.set()
    await collector
    for digest in host.used:
        assert await store.size(f"layers/{digest}") is not None
    assert refused + len(host.used) == 30


async def test_a_store_that_is_away_does_not_keep_a_daemon_from_stopping(
    store: CountingStore, place: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    host = Host(store, place / "one", clock)
    await host.lease.start()
    await host.mount(A)
    store.away = True
    await host.lease.close(leave_nothing=False)
    assert "the lease of this host stays in the store as it is: away" in caplog.text
    assert await listed(store) == {A}
