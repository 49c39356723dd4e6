"""A daemon with several backends: whose each sandbox is, what each can do, who starts and ends."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from dsecd.backends.abc import Capabilities
from dsecd.backends.fake import CAPABILITIES, FakeBackend
from dsecd.config import Limits, Reclaim
from dsecd.engine.admission import FILES_RESERVE, Admission
from dsecd.engine.backends import Backends
from dsecd.engine.reclaiming import Reclaimer
from dsecd.engine.request import Kind, compile_spec
from dsecd.host.vitals import Reading
from dsecd.model import Death
from libdsec import model, wire
from libdsec.errors import (
    AlreadyExists,
    Exhausted,
    InvalidArgument,
    Unavailable,
    Unsupported,
)
from libdsec.model import DSecContainerRunArgs, Feature, VmArgs
from tests.unit.engine_fixtures import QuietHost, bench
from tests.unit.policy_backend import PolicyBackend
from tests.unit.two_backends import ABLE, VM, NotedBackend, both, manager_of, restart, two
from tests.wire_client import WireClient

# --- which backend


async def test_each_sandbox_is_made_used_and_ended_in_its_backend() -> None:
    async with two() as (made, guests):
        client = await made.client()
        plain, guest = await both(client)
        assert (set(made.backend.sandboxes), set(guests.sandboxes)) == ({plain}, {guest})
        spec = guests.sandboxes[guest].spec
        assert spec.vm is not None
        assert (spec.backend, spec.vm.vcpus, spec.vm.layers) == ("microvm", 2, "block")
        assert (spec.vm.data_disk_bytes, spec.memory_bytes) == (8 << 20, 512 << 20)
        assert made.backend.sandboxes[plain].spec.vm is None
        for name, backend, vm in ((plain, "fake", None), (guest, "microvm", VM)):
            info = await client.get(name)
            assert (info.backend, info.vm) == (backend, vm)
            assert (await client.run(name, "echo", "hi")).stdout == b"hi\n"
            metrics = await client.call("sandbox.metrics", {"id": name}, kind=model.Metrics)
            assert metrics.uptime_s >= 0
        await client.run(guest, "oom")
        assert (manager_of(made).get(guest).oom_kills, manager_of(made).get(plain).oom_kills) == (
            1,
            0,
        )
        assert {info.backend for info in await client.list()} == {"fake", "microvm"}
        await client.stop(guest)
        assert (set(made.backend.sandboxes), set(guests.sandboxes)) == ({plain}, set())


async def test_a_vm_that_says_nothing_of_itself_is_the_smallest() -> None:
    async with two() as (made, guests):
        client = await made.client()
        info = await client.create("v", backend="microvm")
        assert guests.sandboxes[info.id].spec.vm is not None
        assert (await client.create("v", backend="microvm", vm=VmArgs())).id == info.id


async def test_containers_are_the_hosts_own_whatever_it_is_called() -> None:
    async with two() as (made, _):
        client = await made.client()
        assert (await client.create("a", backend="container")).backend == "fake"
        assert (await client.create("b", backend="fake")).backend == "fake"


async def test_many_are_made_in_the_backend_that_is_asked_for() -> None:
    async with two() as (made, guests):
        client = await made.client()
        args = DSecContainerRunArgs(container_image="base/x")
        batch = model.CreateManyArgs(keys=["a", "b"], args=args, backend="microvm", vm=VM)
        call = client.open("sandbox.create_many", batch)
        infos = [item.info async for item in call.stream(model.Created)]
        assert [info.backend for info in infos] == ["microvm"] * 2
        assert len(guests.sandboxes) == 2


async def test_a_key_is_of_one_kind() -> None:
    async with two() as (made, _):
        client = await made.client()
        first = await client.create("k", backend="microvm", vm=VM)
        assert (await client.create("k", backend="microvm", vm=VM)).id == first.id
        with pytest.raises(AlreadyExists):
            await client.create("k", backend="microvm", vm=VmArgs(vcpus=3))
        with pytest.raises(AlreadyExists):
            await client.create("k")


async def test_the_daemon_says_which_it_has() -> None:
    async with two() as (made, _):
        client = await WireClient.connect(made.config.socket, hello=False)
        hello = model.Hello(protocol=wire.PROTOCOL)
        welcome = await client.call("hello", hello, kind=model.Welcome)
        assert welcome.capabilities == ["fake", "microvm"]
        await client.close()


async def test_a_backend_that_is_absent_says_why_and_one_nobody_knows_is_refused() -> None:
    async with bench() as made:
        manager_of(made).backends.absent["microvm"] = "QEMU is not installed: install it"
        client = await made.client()
        with pytest.raises(Unsupported, match="no microvm backend: QEMU is not inst") as caught:
            await client.create("k", backend="microvm", vm=VM)
        assert caught.value.detail["reason"] == "QEMU is not installed: install it"
        with pytest.raises(InvalidArgument, match="'quantum' is none of fake, microvm"):
            await client.create("k", backend="quantum")
        rows = await client.call("host.check", {}, kind=list[Feature])
        assert [(row.name, row.available) for row in rows] == [("fake", True), ("microvm", False)]
        assert "QEMU" in rows[1].reason


@pytest.mark.parametrize(
    ("backend", "vm", "fields", "field"),
    [
        ("container", VM, {}, "vm"),
        ("microvm", VmArgs(vcpus=0), {}, "vcpus"),
        ("microvm", VmArgs(vcpus=1000), {}, "vcpus"),
        ("microvm", VmArgs(data_disk_mb=-1), {}, "data_disk_mb"),
        ("microvm", VM, {"memory_limit_mb": 32}, "memory_limit_mb"),
    ],
)
async def test_what_no_guest_could_have_is_refused(
    backend: str, vm: VmArgs, fields: dict[str, Any], field: str
) -> None:
    async with two() as (made, _):
        client = await made.client()
        with pytest.raises(InvalidArgument) as caught:
            await client.create("k", backend=backend, vm=vm, **fields)
        assert caught.value.detail["field"] == field
        unknown = {"key": "k", "args": {"container_image": "x"}, "vm": {"layers": "fuse"}}
        with pytest.raises(InvalidArgument, match="layers"):
            await client.call("sandbox.create", {**unknown, "backend": "microvm"})
        assert manager_of(made).admission.sandboxes == 0


def test_what_older_clients_send_is_what_ours_send_for_containers() -> None:
    args = DSecContainerRunArgs(container_image="base/x", memory_limit_mb=64)
    one, many = {"key": "k", "args": args}, {"keys": ["k"], "args": args}
    packed = msgspec.msgpack.encode
    assert packed(model.CreateArgs(key="k", args=args)) == packed(one)
    assert packed(model.CreateManyArgs(keys=["k"], args=args)) == packed(many)
    info = model.SandboxInfo(id="i", state="running", image="base/x")  # as much as 15 fields
    assert packed(info) == packed({"id": "i", "state": "running", "image": "base/x"})
    assert packed(model.PolicyArgs(policy="swe")) == packed({"policy": "swe"})


# --- what each can do


async def test_what_a_backend_cannot_do_is_refused_by_its_capabilities() -> None:
    async with two() as (made, guests):
        every = msgspec.structs.replace(ABLE, vm=False, checkpoints=True, pack=True)
        made.backend.capabilities = every
        guests.capabilities = msgspec.structs.replace(ABLE, pause=False, network=("none",))
        client = await made.client()
        plain, guest = await both(client)
        verify = model.VerifyArgs(id=guest, argv=[b"true"], keep=[b"/x"])
        refused: list[tuple[str, Any, str]] = [
            ("sandbox.checkpoint", {"id": guest}, "keeps no checkpoints"),
            ("sandbox.rollback", {"id": guest, "checkpoint": "c"}, "keeps no checkpoints"),
            ("sandbox.delete_checkpoint", {"id": guest, "checkpoint": "c"}, "keeps no checkpoints"),
            ("sandbox.pack_diff", {"id": guest, "name": "n"}, "keeps no layers"),
            ("sandbox.verify", verify, "keeps no layers"),
            ("sandbox.pause", {"id": guest}, "cannot pause"),
        ]
        for op, args, why in refused:
            with pytest.raises(Unsupported, match=f"the microvm backend {why}") as caught:
                await client.call(op, args)
            assert caught.value.detail["reason"] == "backend", "by the engine, not the backend"
        assert await client.call("sandbox.checkpoints", {"id": guest}) == []
        with pytest.raises(Unsupported, match="keeps no checkpoints"):
            await client.create("b", backend="microvm", from_checkpoint=f"{plain}/c1")
        guests.capabilities = msgspec.structs.replace(guests.capabilities, checkpoints=True)
        for key, backend, origin in (("p", "microvm", plain), ("g", "container", guest)):
            with pytest.raises(InvalidArgument, match="its sandbox is not of the") as wrong:
                await client.create(key, backend=backend, from_checkpoint=f"{origin}/c1")
            assert wrong.value.detail["field"] == "from_checkpoint"
        with pytest.raises(Unsupported, match="microvm backend"):
            await client.create("n", backend="microvm", network="nat")
        # the other one is asked, and says for itself that it cannot
        with pytest.raises(Unsupported, match="the fake backend keeps no checkpoints") as caught:
            await client.call("sandbox.checkpoint", {"id": plain})
        assert caught.value.detail["reason"] == "fake"
        await client.call("sandbox.pause", {"id": plain})
        assert (await client.get(plain)).state == "paused"


async def test_secrets_are_a_matter_of_the_backend() -> None:
    own = PolicyBackend()
    own.capabilities = msgspec.structs.replace(own.capabilities, secrets=True)
    guests = PolicyBackend()
    guests.name = "microvm"
    guests.capabilities = msgspec.structs.replace(guests.capabilities, vm=True)
    async with bench(backend=own, others=[guests]) as made:
        client = await made.client()
        fields: dict[str, Any] = {
            "policy": {"network": {"rules": [{"allow": "api.example.com"}]}},
            "secrets": {"api.example.com": {"Authorization": "x"}},
        }
        assert (await client.create("c", **fields)).state == "running"
        with pytest.raises(Unsupported, match="not offered by the microvm backend"):
            await client.create("v", backend="microvm", **fields)


async def test_function_calls_go_to_the_first_backend_with_streams() -> None:
    own, guests = FakeBackend(), FakeBackend(name="microvm", capabilities=ABLE)
    with pytest.raises(Unsupported, match="function calls are not offered by the fake backend"):
        Backends([own, guests]).streaming()
    guests.capabilities = msgspec.structs.replace(ABLE, streams=True)
    assert Backends([own, guests]).streaming() is guests
    own.capabilities = msgspec.structs.replace(CAPABILITIES, streams=True)
    assert Backends([own, guests]).streaming() is own


async def test_a_policy_is_enforced_by_what_the_backend_applies() -> None:
    guests = PolicyBackend(applied=("netns", "seccomp"))
    guests.name = "microvm"
    guests.capabilities = msgspec.structs.replace(guests.capabilities, vm=True)
    async with bench(backend=PolicyBackend(), others=[guests]) as made:
        client = await made.client()
        for policy in ("swe", {"network": {"services": {"pypi": True}}}):
            found = {
                backend: await client.call(
                    "policy.explain",
                    model.PolicyArgs(policy=policy, backend=backend),
                    kind=list[model.PolicyRow],
                )
                for backend in ("container", "microvm")
            }
            assert all(row.state == "enforced" for row in found["container"])
            short = [row for row in found["microvm"] if row.state != "enforced"]
            assert short
            name = str(policy)
            plain = await client.create(f"c-{name}", policy=policy, strict=True)
            guest = await client.create(f"v-{name}", backend="microvm", policy=policy)
            assert (plain.notes, len(guest.notes)) == ([], len(short))
            with pytest.raises(Unsupported, match="strict"):
                await client.create(f"s-{name}", backend="microvm", policy=policy, strict=True)
            # the same is said of a network that is put in force later
            rules = {"id": guest.id, "network_rules": {"debian": True}}
            with pytest.raises(Unsupported, match="strict"):
                await client.call("sandbox.update_network", {**rules, "strict": True})
            info = await client.call(
                "sandbox.update_network", {**rules, "id": plain.id, "strict": True},
                kind=model.SandboxInfo,
            )  # fmt: skip
            assert info.notes == []


async def test_memory_is_taken_from_those_that_can_give_it() -> None:
    async with two() as (made, guests):
        guests.capabilities = msgspec.structs.replace(ABLE, pause=False)
        client = await made.client()
        plain, guest = await both(client)
        inside = [made.backend.sandboxes[plain], guests.sandboxes[guest]]
        for sandbox in inside:
            sandbox.memory_bytes = 64 << 20
        config = Reclaim(when="always", trim_after_s=0.01, pause_after_s=0.02, rest_s=0.01)
        subject = Reclaimer(manager_of(made), config)
        await asyncio.sleep(0.05)
        await subject.round()  # the first look only notes who uses the processor
        await asyncio.sleep(0.05)
        await subject.round()
        assert (await client.get(plain)).state == "paused"
        assert (await client.get(guest)).state == "running"
        assert inside[1].swapped_bytes > 0
        guests.capabilities = msgspec.structs.replace(ABLE, pause=False, trim=False)
        inside[1].memory_bytes = 64 << 20
        await client.run(guest, "true")
        await asyncio.sleep(0.05)
        await subject.round()
        await asyncio.sleep(0.05)
        assert not (await subject.round()).decisions


def test_memory_is_counted_with_what_the_backend_needs_beside() -> None:
    host = QuietHost()
    able = {
        "container": Capabilities(),
        "microvm": Capabilities(memory_each=100 << 20, memory_each_cpu=10 << 20),
    }
    args = DSecContainerRunArgs(container_image="x", memory_limit_mb=256)
    admission = Admission(Limits(), host, able)
    admission.take(compile_spec("s-n-1-a", args), 0)
    assert admission.memory_requested == 256 << 20
    guest = compile_spec("s-n-1-b", args, kind=Kind(backend="microvm", vm=VmArgs(vcpus=2)))
    admission.take(guest, 0)
    assert admission.memory_requested == (256 + 256 + 100 + 20) << 20
    admission.give_back(guest)
    assert admission.memory_requested == 256 << 20
    # room for both limits, not for the monitor
    tight = Admission(Limits(memory_overcommit=600 / (64 << 10)), host, able)
    tight.take(compile_spec("s-n-1-c", args), 0)
    with pytest.raises(Exhausted, match="are promised"):
        tight.take(guest, 0)


def test_descriptors_are_counted_by_what_the_backend_costs() -> None:
    host = QuietHost()
    host.files_max = FILES_RESERVE + 20
    able = {"container": Capabilities(files_each=5), "microvm": Capabilities(files_each=8)}
    admission = Admission(Limits(), host, able)
    args = DSecContainerRunArgs(container_image="x")
    plain = compile_spec("s-n-1-a", args)
    guest = compile_spec("s-n-1-b", args, kind=Kind(backend="microvm", vm=VmArgs()))
    admission.take(guest, 0)
    admission.take(guest, 0)
    with pytest.raises(Exhausted, match="open file limit"):
        admission.take(plain, 0)
    admission.give_back(guest)
    admission.take(plain, 0)
    admission.take(plain, 0)
    assert admission.sandboxes_max == 4


# --- all of them


async def test_one_that_need_not_start_is_left_out_with_its_reason() -> None:
    said: list[Any] = []
    async with two(said) as (made, guests):
        assert isinstance(guests, NotedBackend)
        guests.unable, made.optional = "no guest boots here", ("microvm",)
        said.clear()
        client = await restart(made)
        assert ("close", "microvm") in said[said.index(("start", "microvm")) :]
        with pytest.raises(Unsupported, match="no guest boots here"):
            await client.create("k", backend="microvm")
        assert (await client.create("c")).state == "running"
        assert manager_of(made).backends.names == ["fake"]


async def test_one_that_has_to_start_ends_the_daemon() -> None:
    said: list[Any] = []
    async with two(said) as (made, guests):
        await made.close()
        assert isinstance(guests, NotedBackend)
        guests.unable = "no guest boots here"
        said.clear()
        with pytest.raises(Unsupported, match="no guest boots here"):
            await made.start()
        assert said[2:] == [("close", "microvm"), ("close", "fake")]
        made.service = None
        assert not made.config.socket.exists()


async def test_one_that_does_not_close_does_not_keep_the_others_from_it() -> None:
    closed: list[str] = []

    class Unclosed(FakeBackend):
        async def close(self) -> None:
            closed.append(self.name)
            if self.name == "b":
                raise Unavailable("busy")

    with pytest.raises(Unavailable, match="busy"):
        await Backends([Unclosed(name=name) for name in "abc"]).close()
    assert closed == ["c", "b", "a"]


def test_pools_and_rows_of_all_are_shown_once() -> None:
    class Shown(FakeBackend):
        def pools(self) -> dict[str, float]:
            return {"ready": 1.0}

        def features(self) -> list[Feature]:
            own = Feature(name=self.name, available=True)
            return [Feature(name="kvm", available=self.name == "fake"), own]

    both = Backends([Shown(), Shown(name="microvm")])
    assert both.pools() == {"ready": 1.0, "microvm_ready": 1.0}
    rows = [(row.name, row.available) for row in both.features()]
    assert rows == [("kvm", True), ("fake", True), ("microvm", True)]


async def test_what_a_backend_reports_is_about_any_sandbox() -> None:
    """A guest's container is of the host's own backend, which hears of its end first."""
    async with two() as (made, guests):
        client = await made.client()
        _, guest = await both(client)
        manager_of(made).died(guest, Death("its init ended"))
        sandbox = manager_of(made).get(guest)
        await sandbox.gone
        assert (sandbox.state, sandbox.reason) == ("failed", "its init ended")
        assert not guests.sandboxes


async def test_a_host_without_room_says_so_of_guests_too() -> None:
    async with two() as (made, _):
        made.host.reading = Reading(
            memory_total_bytes=1 << 30, memory_available_bytes=1 << 30, tasks=1, tasks_max=1 << 20
        )
        client = await made.client()
        with pytest.raises(InvalidArgument, match="more than the host has"):
            await client.create("k", backend="microvm", memory_limit_mb=2048)
