"""faults.md, "Snapshots": what a restored sandbox, a branch, or one rolled back is told and keeps.

Files under every kind of operation and writer: test_checkpoint_model.py.
"""

from __future__ import annotations

import asyncio
import datetime
import hashlib
import random
import re
import time
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from libdsec import DSecClient, DSecContainerRunArgs, Sandbox
from libdsec.errors import DSecError, NotFound
from tests.system.daemon import IMAGE, Daemon, until
from tests.system.spawner_lab import compile_c
from tests.system.tree_view import difference, sandbox_view
from tests.system.user_view import commands_on_host, first_process, lend_programs, shell

pytestmark = pytest.mark.root
ARGS = DSecContainerRunArgs(container_image=IMAGE, disk_limit_mb=64)
BRANCHES = 5


async def restored(client: DSecClient, box: Sandbox, name: str) -> Sandbox:
    """A sandbox of what `box` changed, saved as layer `name`."""
    await box.pack_diff(name, clean=False)
    return await client.run_container(DSecContainerRunArgs(container_image=name))


def short_lived_certificate() -> str:
    """A certificate that is good from a minute ago to ten minutes from now."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "now")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=1))
        .not_valid_after(now + datetime.timedelta(minutes=10))
        .sign(key, hashes.SHA256())
    )
    return made.public_bytes(serialization.Encoding.PEM).decode()


async def test_after_a_restore_the_clock_is_right_and_tls_works(client: DSecClient) -> None:
    async with await client.run_container(ARGS) as box:
        await lend_programs(box, "/usr/bin/openssl")
        await box.files.write("/now.pem", short_lived_certificate())
        point = await box.checkpoint()
        await asyncio.sleep(1.1)  # a clock that was saved would be behind now
        branches = await box.branch(2, point)
        again = await restored(client, box, "snapshot/clock")
        await box.rollback(point)
        for one in (box, *branches, again):
            before, up = time.time(), time.clock_gettime(time.CLOCK_BOOTTIME)
            clock, uptime, _ = (await shell(one, "date +%s; cat /proc/uptime")).split()
            assert int(before) <= int(clock) <= time.time()
            assert up - 0.1 <= float(uptime) <= time.clock_gettime(time.CLOCK_BOOTTIME)
            assert await shell(one, "openssl verify -CAfile /now.pem /now.pem") == "/now.pem: OK\n"
        for one in (*branches, again):
            await one.stop()


async def test_entropy_does_not_repeat_across_clones(client: DSecClient) -> None:
    async with await client.run_container(ARGS) as box:
        point = await box.checkpoint()
        clones = [box, *await box.branch(BRANCHES, point), *await box.branch(BRANCHES, point)]
        clones.append(await restored(client, box, "snapshot/entropy"))
        sources = (
            "head -c 16 /dev/urandom | md5sum",
            "head -c 16 /dev/random | md5sum",
            "cat /proc/sys/kernel/random/uuid",
            "cat /proc/self/auxv | md5sum",  # AT_RANDOM: what a libc begins with
            "mktemp -u",
        )
        found = []
        for _ in range(2):
            for one in clones:
                found += (await shell(one, "; ".join(sources))).splitlines()
            await box.rollback(point)
        assert len(found) == 2 * len(clones) * len(sources)
        assert len(set(found)) == len(found)
        for one in clones[1:]:
            await one.stop()


async def test_machine_ids_do_not_repeat_and_stay_for_a_life(client: DSecClient) -> None:
    ask = "cat /etc/machine-id"
    async with await client.run_container(ARGS) as box:
        mine = await shell(box, ask)
        assert re.fullmatch(r"[0-9a-f]{32}\n", mine)
        point = await box.checkpoint()
        assert await shell(box, ask) == mine
        await box.rollback(point)
        assert await shell(box, ask) == mine
        clones = [*await box.branch(BRANCHES, point), await restored(client, box, "snapshot/id")]
        found = [await shell(one, ask) for one in clones]
        assert len({mine, *found}) == 1 + len(clones)
        for one, known in zip(clones, found, strict=True):
            again = await one.checkpoint()
            await one.rollback(again)
            assert await shell(one, ask) == known
        host_id = Path("/etc/machine-id")
        if host_id.exists():
            assert host_id.read_text() not in (mine, *found)
        for one in clones:
            await one.stop()


async def test_a_clone_has_a_host_name_of_its_own(client: DSecClient) -> None:
    ask = 'hostname; cat /etc/hostname; grep -c "$(hostname)$" /etc/hosts'
    args = DSecContainerRunArgs(container_image=IMAGE, hostname="origin")
    async with await client.run_container(args) as box:
        assert await shell(box, ask) == "origin\norigin\n1\n"
        point = await box.checkpoint()
        branches = await box.branch(2, point)
        await box.rollback(point)
        assert await shell(box, ask) == "origin\norigin\n1\n"
        for one in (*branches, await restored(client, box, "snapshot/name")):
            own = one.id.rpartition("-")[2]
            assert await shell(one, ask) == f"{own}\n{own}\n1\n"
            await one.rollback(await one.checkpoint())
            assert await shell(one, ask) == f"{own}\n{own}\n1\n"
            await one.stop()


@pytest.mark.parametrize("upper", ["memory", "disk"])
async def test_files_written_just_before_are_not_lost(client: DSecClient, upper: str) -> None:
    """Nothing is synced: the write's end is all there is between it and the checkpoint."""
    args = DSecContainerRunArgs(container_image=IMAGE, upper=upper, disk_limit_mb=64)  # type: ignore[arg-type]
    async with await client.run_container(args) as box:
        text = "".join(f"{n}\n" for n in range(200_000))
        for n in range(4):
            await asyncio.gather(
                box.files.write("/root/api", f"{n}{text}"),
                shell(
                    box, f"dd if=/dev/zero of=/root/big bs=65536 count=64 2>&1; echo {n} > /root/n"
                ),
            )
            point = await box.checkpoint()
            packed = await restored(client, box, f"snapshot/late:{n}")
            (branch,) = await box.branch(1, point)
            await shell(box, "rm -r /root; mkdir /root")
            await box.rollback(point)
            for kind, one in (("rolled back", box), ("branch", branch), ("packed", packed)):
                assert (await one.files.read("/root/api"))[:9] == f"{n}{text}"[:9], kind
                assert await one.files.read("/root/api") == f"{n}{text}", kind
                assert await shell(one, "cat /root/n; stat -c %s /root/big") == f"{n}\n4194304\n"
            await asyncio.gather(branch.stop(), packed.stop())


async def test_later_snapshots_lose_no_files(
    host: Daemon, client: DSecClient, tmp_path: Path
) -> None:
    """Ten lives, each begun from what the one before saved; nothing is lost on the way."""
    churn = compile_c(Path(__file__).with_name("churn.c"), tmp_path / "churn")
    box = await client.run_container(ARGS)
    await box.files.upload(churn, "/churn")
    await shell(box, "mkdir /app")
    seed = random.randrange(1 << 30)
    compared = 0
    for n in range(10):
        await shell(box, f"cd /app && /churn ops {seed + n} 80 1")
        before = await sandbox_view(first_process(host, box.id), "/app")
        compared += len(before)  # now and then the last operations empty it
        again = await restored(client, box, f"snapshot/life:{n}")
        await box.stop()
        wrong = difference(await sandbox_view(first_process(host, again.id), "/app"), before)
        assert not wrong, (seed, n, wrong)
        box = again
    assert compared > 50
    await box.stop()


async def test_a_file_of_two_names_is_one_file_after_a_checkpoint(client: DSecClient) -> None:
    async with await client.run_container(ARGS) as box:
        await shell(box, "echo one > /root/a; ln /root/a /root/b")
        await box.checkpoint()
        await shell(box, "echo two >> /root/a")
        assert await shell(box, "cat /root/b") == "one\ntwo\n"


async def test_background_processes_are_promised_by_nobody(
    host: Daemon, client: DSecClient
) -> None:
    """They go on through a checkpoint, end with a rollback, which says so, and are in no clone."""
    names = "ps -o args | grep ^sleep"
    async with await client.run_container(ARGS) as box:
        running = await box.commands.run(["sleep", "1234"], background=True)
        session = await box.create_session()
        point = await box.checkpoint()
        assert await shell(box, names) == "sleep 1234\n"
        for one in (*await box.branch(1, point), await restored(client, box, "snapshot/quiet")):
            assert commands_on_host(host, one.id) == set()
            assert await one.commands.list() == []
            await one.stop()
        assert await shell(box, names) == "sleep 1234\n"
        await box.rollback(point)
        # one of dsec-init's own takes the old root down
        await until(lambda: commands_on_host(host, box.id) == set())
        assert await shell(box, "ps -o args | grep -c ^sleep || true") == "0\n"
        ended = await asyncio.wait_for(running.wait(), 5)
        assert (ended.signal, ended.timed_out) == (9, False)
        with pytest.raises(DSecError, match="session"):
            await asyncio.wait_for(session.run("true"), 5)
        assert [info.cid for info in await box.commands.list() if info.running] == []


async def test_removing_a_layer_does_not_break_a_create_from_it(
    client: DSecClient, tmp_path: Path
) -> None:
    """Creates, removals, collections and imports of one name cross, a hundred times and more.

    On a busy machine removals may overtake most creates: it goes on until enough of both were seen.
    A create gets a sandbox that has all its files, or hears that there is no such layer.
    """
    source = tmp_path / "tool"
    (source / "opt").mkdir(parents=True)
    made = refused = 0
    args = DSecContainerRunArgs(container_image=IMAGE, toolkits=["toolkit/t:1"], memory_limit_mb=32)

    async def create(gone: asyncio.Event | None) -> None:
        nonlocal made, refused
        await (gone.wait() if gone else asyncio.sleep(random.random() / 10))
        (box,) = await asyncio.gather(client.run_container(args), return_exceptions=True)
        if isinstance(box, NotFound):
            refused += 1
            return
        assert isinstance(box, Sandbox), box
        made += 1
        small, big = (await shell(box, "cat /opt/n; md5sum < /opt/big")).split()[:2]
        assert big == sums[int(small)]
        await box.stop()

    async def remove(gone: asyncio.Event) -> None:
        await asyncio.sleep(random.random() / 10)
        await client.layers.remove("toolkit/t:1")
        gone.set()
        for _ in range(3):
            await client.layers.collect(grace_s=0, wait_s=0)

    sums: dict[int, str] = {}
    while len(sums) < 10 or made <= 10:
        n = len(sums)
        (source / "opt/n").write_text(f"{n}\n")
        content = random.randbytes(300_000)
        (source / "opt/big").write_bytes(content)
        sums[n] = hashlib.md5(content).hexdigest()
        await client.layers.import_("toolkit/t:1", str(source), replace=True)
        gone = asyncio.Event()
        late = [create(gone) for _ in range(2)]
        await asyncio.gather(remove(gone), *late, *(create(None) for _ in range(8)))
    assert made + refused == 10 * len(sums)
    assert made > 10
    assert refused >= 20
