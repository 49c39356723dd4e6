"""What the client asks for a microVM with, and that a container is asked for as before."""

from __future__ import annotations

import msgspec
import pytest

from libdsec import DSecContainerRunArgs, DSecMicroVMRunArgs, model
from tests.unit.client_lab import ARGS, connected, serving


@pytest.fixture
async def server(tmp_path):
    async with serving(tmp_path) as made:
        yield made


@pytest.fixture
async def client(server):
    async with connected(server) as made:
        yield made


async def test_a_microvm_is_asked_for_with_what_only_it_has(server, client):
    args = DSecMicroVMRunArgs(
        image="base/debian:12", memory_limit_mb=256, vcpus=2, layers="block", data_disk_mb=64,
        labels={"a": "b"}, policy="swe", env={"A": "1"},
    )  # fmt: skip
    sandbox = await client.run_microvm(args, timeout=120)
    assert (sandbox.info.backend, sandbox.info.labels) == ("microvm", {"a": "b"})
    vm = model.VmArgs(vcpus=2, layers="block", data_disk_mb=64)
    assert server.sandboxes[sandbox.id].vm == vm
    assert sandbox.info.args == DSecContainerRunArgs(
        container_image="base/debian:12", memory_limit_mb=256, cpu_cores_limit=2.0,
        labels={"a": "b"}, policy="swe", env={"A": "1"},
    )  # fmt: skip
    made = [item async for item in client.run_microvms(args, 3)]
    told = [(one.info.backend, server.sandboxes[one.id].vm) for one in made]
    assert told == [("microvm", vm)] * 3


async def test_a_container_is_asked_for_as_ever(server, client):
    sent = []

    async def noting(call):
        sent.append(msgspec.msgpack.decode(call.request.args))
        return await server.create(call)

    server.on["sandbox.create"] = noting
    sandbox = await client.run_container(ARGS)
    (create,) = sent
    assert create.keys() == {"key", "args"}
    assert create["args"] == {"container_image": "base/debian:12"}
    assert (sandbox.info.backend, server.sandboxes[sandbox.id].vm) == ("container", None)


async def test_a_branch_runs_in_what_its_origin_runs_in(server, client):
    async def checkpoint(call):
        return model.Checkpoint(id="c1", created_at=0.0, method="stack")

    server.on["sandbox.checkpoint"] = checkpoint
    args = DSecMicroVMRunArgs(image="base/debian:12", vcpus=3)
    origin = await client.run_microvm(args)
    (branch,) = await origin.branch(1)
    assert branch.info.backend == "microvm"
    assert server.sandboxes[branch.id].vm == model.VmArgs(vcpus=3)
    assert branch.info.args.from_checkpoint == f"{origin.id}/c1"


def test_arguments_of_both_kinds_have_the_same_names_and_defaults():
    """What a microVM has not, and what it says in another way, is listed here."""
    shared, guest = (
        {field.name: field.default for field in msgspec.structs.fields(kind)}
        for kind in (DSecContainerRunArgs, DSecMicroVMRunArgs)
    )
    assert shared.keys() - guest.keys() == {
        "container_image", "cpu_cores_limit", "from_checkpoint", "upper", "no_new_privileges",
    }  # fmt: skip
    assert guest.keys() - shared.keys() == {"image", "vcpus", "layers", "data_disk_mb"}
    differ = {name for name in shared.keys() & guest.keys() if shared[name] != guest[name]}
    assert differ == {"memory_limit_mb"}
