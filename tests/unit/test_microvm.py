"""The microVM backend on a fake jail and a fake monitor: what is taken, and given back, when."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from dsecd.backends import microvm, microvm_machine
from dsecd.backends.abc import Handle
from dsecd.backends.microvm_holding import Held
from dsecd.host.plan import Bind
from dsecd.policy.compile import Compiled
from dsecd.policy.rules import FilePolicy, NetPolicy, SystemPolicy
from libdsec.errors import InvalidArgument, Unavailable, Unsupported
from tests.unit.microvm_bed import ID, JAIL, MIB, NETWORK, Bed, spec, until


@pytest.fixture
async def bed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Bed]:
    made = Bed(tmp_path)
    monkeypatch.setattr(microvm.vm_disks, "root_of", lambda pid: made.root)
    monkeypatch.setattr(microvm_machine, "EXPLAIN_S", 0.05)
    await made.start()
    yield made
    await made.backend.close()
    made.vmm.end()


async def test_the_jail_has_room_for_the_guest_and_its_monitor(bed: Bed) -> None:
    await bed.create(spec(data_disk_bytes=32 * MIB))
    asked = bed.jail.specs[0]
    assert (asked.image, asked.user, asked.upper) == (JAIL, "vmm", "disk")
    assert asked.memory_bytes == (130 + 100) * MIB, "the guest's in steps of 2 MiB, and the VMM's"
    assert asked.disk_bytes > (64 + 32) * MIB
    assert asked.no_new_privileges
    flat = bed.backend._host.flats.find(bed.local.digest)
    assert flat is not None
    assert Bind(flat.path, "/vm/layer0") in asked.binds
    assert all(bind.read_only for bind in asked.binds)


async def test_the_guest_gets_what_was_asked_for_and_what_its_image_says(bed: Bed) -> None:
    bed.backend._host.min_age_s = 60
    await bed.create(msgspec.structs.replace(spec(), env={"MINE": "1"}, workdir="/w"))
    begun = next(args for op, args in bed.vmm.agent.asked if op == "vm.begin")
    config = msgspec.msgpack.decode(begun["config"])
    assert config["env"]["FROM"] == "image"
    assert (config["env"]["MINE"], config["workdir"]) == ("1", "/w")
    assert {name for name, _, _ in begun["files"]} >= {"etc/hosts", "etc/machine-id"}
    assert begun["dax"] is True
    assert begun["reclaim"] == {"min_age_s": 60, "swap_bytes": 65 * MIB}


async def test_its_disks_lie_in_the_jail_and_belong_to_the_monitor(bed: Bed) -> None:
    await bed.create(spec(data_disk_bytes=32 * MIB))
    upper, data = ((bed.root / "vm" / name).stat() for name in ("upper.img", "data.img"))
    assert (upper.st_size, data.st_size, data.st_blocks) == (64 * MIB, 32 * MIB, 0)
    assert upper.st_blocks * 512 < MIB, "sparse"
    assert upper.st_uid == (bed.root / "vm").stat().st_uid


async def test_layers_have_a_user_for_as_long_as_the_sandbox_lives(bed: Bed) -> None:
    handle = await bed.create(spec())
    await asyncio.sleep(0)
    assert bed.users() == 1
    await bed.backend.destroy(handle)
    assert bed.users() == 0
    assert bed.jail.sandboxes == {}
    await bed.backend.destroy(handle)  # again: nothing to do, and counted once
    assert bed.users() == 0


async def test_what_was_only_prepared_is_given_back(bed: Bed) -> None:
    await bed.backend.locate(spec())
    handle = bed.backend.prepare(ID, spec())
    await asyncio.sleep(0)
    assert bed.users() == 1
    bed.backend.release(handle)
    assert bed.users() == 0
    assert bed.jail.prepared == set()


async def test_a_location_that_is_not_used_leaves_no_user(bed: Bed) -> None:
    await bed.backend.locate(spec())
    assert bed.backend.located(spec())
    await asyncio.sleep(0)
    assert bed.users() == 0


async def test_nothing_is_prepared_of_layers_that_are_not_here(bed: Bed) -> None:
    assert not bed.backend.located(spec())
    with pytest.raises(Unavailable, match="not located"):
        bed.backend.prepare(ID, spec())


async def test_a_machine_that_cannot_be_takes_nothing(
    bed: Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(plan: object) -> None:
        raise InvalidArgument("300 layers", field="layers")

    await bed.backend.locate(spec())
    monkeypatch.setattr(bed.vmm, "compile", refuse)
    with pytest.raises(InvalidArgument):
        bed.backend.prepare(ID, spec())
    await asyncio.sleep(0)
    assert (bed.users(), bed.jail.prepared) == (0, set())


async def test_a_class_is_of_the_jail_with_the_monitor(bed: Bed) -> None:
    handle = await bed.create(spec())
    notes = await bed.backend.set_cpu_class(handle, "latency_sensitive")
    assert bed.jail.sandboxes[ID].cpu_class == "latency_sensitive"
    assert notes == ("fake: no CPU is shared",)


async def test_the_next_daemon_takes_a_machine_up_again(bed: Bed) -> None:
    handle = await bed.create(spec())
    await bed.backend.close()
    assert "quit" not in bed.vmm.machine.did
    bed.backend = bed.make()
    await bed.start()
    instance = await bed.backend.recover(handle)
    assert instance is not None
    assert bed.users() == 1
    assert bed.vmm.agent.asked[0][0] == "sys.ping"
    await bed.backend.destroy(handle)
    assert bed.users() == 0


async def test_a_machine_whose_jail_is_gone_is_not_recovered_and_can_be_freed(bed: Bed) -> None:
    handle = await bed.create(spec())
    await bed.backend.close()
    bed.jail.sandboxes.clear()
    bed.backend = bed.make()
    await bed.start()
    assert await bed.backend.recover(handle) is None
    await bed.backend.destroy(handle)
    assert bed.users() == 0


async def test_deaths_and_kills_reach_the_engine_until_it_is_destroyed(bed: Bed) -> None:
    handle = await bed.create(spec())
    await until(lambda: ("vm.watch", {}) in bed.vmm.agent.asked)
    await bed.vmm.agent.killed(2)
    await until(lambda: bed.ears.ooms == [2])
    assert bed.backend.oom_kills(handle) == 2
    assert (await bed.backend.usage(handle)).oom_kills == 2
    bed.vmm.machine.happen("panicked")
    await until(lambda: bool(bed.ears.deaths))
    assert bed.ears.deaths[0][1].reason == "the guest's kernel panicked"
    await bed.backend.destroy(handle)
    assert len(bed.ears.deaths) == 1


async def test_a_guest_s_network_is_the_jail_s(bed: Bed) -> None:
    await bed.create(msgspec.structs.replace(spec(), network="nat"))
    asked = bed.jail.specs[0]
    assert (asked.network, asked.tap_user) == ("nat", 1000)
    assert "net/tun" in asked.devices
    begun = next(args for op, args in bed.vmm.agent.asked if op == "vm.begin")
    assert begun["network"]["addresses"] == list(NETWORK.addresses)
    assert begun["network"]["neighbours"] == [["169.254.1.1", "02:d5:ec:02:00:01"]]
    assert begun["network"]["mtu"] == 1400
    files = {name: content for name, content, _ in begun["files"]}
    assert files["etc/resolv.conf"] == NETWORK.resolv_conf.encode()


async def test_one_without_a_network_has_no_tap(bed: Bed) -> None:
    handle = await bed.create(spec())
    assert bed.jail.specs[0].devices == ()
    assert msgspec.msgpack.decode(handle.resources, type=Held).plan.network is None


async def test_the_first_rules_bring_the_resolver_that_knows_them(bed: Bed) -> None:
    handle = await bed.create(msgspec.structs.replace(spec(), network="nat"))
    saved: list[Handle] = []

    async def save(handle: Handle) -> None:
        saved.append(handle)

    for _ in range(2):
        await bed.backend.update_network(handle, NetPolicy(), save)
    assert len(bed.jail.policies) == len(saved) == 2
    written = [args for op, args in bed.vmm.agent.asked if op == "files.write"]
    assert [args["data"].splitlines()[0] for args in written] == [b"nameserver 169.254.1.53"]
    with pytest.raises(Unsupported, match="check_names"):
        await bed.backend.update_network(handle, NetPolicy(check_names=True), save)
    assert len(bed.jail.policies) == 2


async def test_rules_on_files_are_not_the_monitor_s(bed: Bed) -> None:
    policy = Compiled(
        net=NetPolicy(), files=FilePolicy(hidden=("/vm",)), system=SystemPolicy(), lines=()
    )
    await bed.create(msgspec.structs.replace(spec(), policy=policy))
    asked = bed.jail.specs[0].policy
    assert asked is not None
    assert (asked.net, asked.files) == (NetPolicy(), FilePolicy())
