"""What a create of each kind of sandbox sends: shared arguments, the backend, those of a VM."""

from __future__ import annotations

import msgspec

from libdsec.model import (
    CONTAINER,
    FULLVM,
    MICROVM,
    DSecContainerRunArgs,
    DSecFullVMRunArgs,
    DSecMicroVMRunArgs,
    FullVmArgs,
    VmArgs,
)

_VM = frozenset(VmArgs.__struct_fields__) & frozenset(DSecMicroVMRunArgs.__struct_fields__)
_FULL = frozenset(FullVmArgs.__struct_fields__)
_RENAMED = {"image": "container_image"}


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of `CreateArgs` and `CreateManyArgs` that say what is to be made."""

    args: DSecContainerRunArgs
    backend: str = CONTAINER
    vm: VmArgs | None = None


def request_of(args: DSecContainerRunArgs | DSecMicroVMRunArgs | DSecFullVMRunArgs) -> Request:
    """Return what is sent for `args`."""
    if isinstance(args, DSecContainerRunArgs):
        return Request(args=args)
    given = msgspec.structs.asdict(args)
    if isinstance(args, DSecFullVMRunArgs):
        full = FullVmArgs(**{name: given.pop(name) for name in _FULL})
        vm, backend = VmArgs(vcpus=given.pop("vcpus"), full=full), FULLVM
    else:
        vm, backend = VmArgs(**{name: given.pop(name) for name in _VM}), MICROVM
    shared = {_RENAMED.get(name, name): value for name, value in given.items()}
    return Request(
        args=DSecContainerRunArgs(**shared, cpu_cores_limit=float(vm.vcpus)),
        backend=backend,
        vm=vm,
    )
