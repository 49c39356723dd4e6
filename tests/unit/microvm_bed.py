"""The microVM backend on a fake jail and a fake monitor, for tests."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import msgspec

from dsecd.backends.abc import GuestNetwork, Handle
from dsecd.backends.fake import FakeBackend
from dsecd.backends.microvm import MicroVMBackend
from dsecd.backends.spec import Spec, VmSpec
from dsecd.config import Config, Paths
from dsecd.engine.request import compile_spec
from dsecd.images.local import Local, Located
from dsecd.images.manifest import Config as Defaults
from dsecd.images.tool import Report
from dsecd.model import Death
from dsecd.policy.rules import NetPolicy
from libdsec.model import DSecContainerRunArgs
from tests.unit.flat_layers import make_layer, of_files
from tests.unit.microvm_fakes import FakeVmm

MIB = 1 << 20
ID = "s0-n0-1-1"
JAIL = "base/dsec-qemu:test"
NETWORK = GuestNetwork(
    addresses=("10.213.0.7/32", "fd5d:ec::7/128"),
    gateways=("169.254.1.1", "fe80::1"),
    neighbours=(("169.254.1.1", "02:d5:ec:02:00:01"),),
    mtu=1400,
    resolv_conf="nameserver 192.0.2.1\n",
)


class Environments:
    """One layer, which is known for as long as `locate` was called."""

    def __init__(self, local: Local) -> None:
        self.local, self.known = local, False

    def recall(self, spec: Spec, aged: bool = False) -> Located | None:
        return Located(Defaults(env={"FROM": "image"}), (self.local,)) if self.known else None

    async def locate(self, spec: Spec) -> Located:
        self.known = True
        found = self.recall(spec)
        assert found is not None
        return found

    async def pull(self, spec: Spec, report: Report) -> None: ...


class Jail(FakeBackend):
    """Remembers what it was asked to be."""

    def __init__(self, vmm: FakeVmm) -> None:
        super().__init__(name="container")
        self.vmm = vmm
        self.specs: list[Spec] = []
        self.policies: list[NetPolicy] = []

    async def create(self, handle: Handle, spec: Spec):  # type: ignore[no-untyped-def]
        self.specs.append(spec)
        made = await super().create(handle, spec)
        self.vmm.runs_in(self.sandboxes[handle.sandbox])
        guest = NETWORK if spec.network == "nat" else None
        return msgspec.structs.replace(made, guest=guest)

    async def update_network(self, handle, policy, save):  # type: ignore[no-untyped-def]
        self.policies.append(policy)
        await save(handle)


class Ears:
    def __init__(self) -> None:
        self.deaths: list[tuple[str, Death]] = []
        self.ooms: list[int] = []

    def died(self, sandbox: str, death: Death) -> None:
        self.deaths.append((sandbox, death))

    def oom(self, sandbox: str, kills: int) -> None:
        self.ooms.append(kills)

    def denied(self, sandbox: str, detail: dict[str, str]) -> None: ...


class Bed:
    def __init__(self, tmp_path: Path) -> None:
        store = tmp_path / "store"
        store.mkdir()
        self.local = make_layer(store, of_files(os.urandom(MIB)))[1]
        self.root = tmp_path / "root"
        (self.root / "vm").mkdir(parents=True)
        self.environments, self.vmm = Environments(self.local), FakeVmm()
        self.jail = Jail(self.vmm)
        self.ears = Ears()
        self.config = Config(paths=Paths(state=str(tmp_path / "state")))
        self.backend = self.make()

    def make(self) -> MicroVMBackend:
        backend = MicroVMBackend(self.config, self.jail, self.environments)
        backend._host.vmm = self.vmm

        async def image(layers: object) -> str:
            backend._host.jail.name = JAIL
            return JAIL

        async def start() -> None:
            backend._host.flats.start()
            backend._host.saved.start()

        backend._host.provide_jail_image = image  # type: ignore[method-assign,assignment]
        backend._host.start = start  # type: ignore[method-assign]
        return backend

    async def start(self) -> None:
        await self.jail.start(self.ears)
        await self.backend.start(self.ears)

    async def create(self, asked: Spec) -> Handle:
        await self.backend.locate(asked)
        handle = self.backend.prepare(ID, asked)
        return (await self.backend.create(handle, asked)).handle

    def users(self) -> int:
        return self.backend._host.flats.users(self.local.digest)


def spec(**vm: object) -> Spec:
    args = DSecContainerRunArgs(container_image="base/x", memory_limit_mb=129, disk_limit_mb=64)
    shared = compile_spec(ID, args)
    wanted = {"vcpus": 2, "layers": "pmem", "data_disk_bytes": 0} | vm
    return msgspec.structs.replace(shared, vm=VmSpec(**wanted))  # type: ignore[arg-type]


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not true():  # noqa: ASYNC110
            await asyncio.sleep(0.005)
