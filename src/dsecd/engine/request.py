"""A create request, checked and put into the units of the kernel. Pure."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping
from typing import Protocol

import msgspec

from dsecd.backends.abc import Backend
from dsecd.backends.spec import Spec, VmSpec
from dsecd.engine.backends import require
from dsecd.engine.policies import Account
from libdsec.errors import InvalidArgument, Unsupported
from libdsec.model import CONTAINER, DSecContainerRunArgs, FullVmArgs, VmArgs

MIB = 1 << 20
MIN_MEMORY_MB = 8
MIN_GUEST_MB = 64  # less holds no kernel with its initramfs and agent
MAX_VCPUS = 64
MAX_USER_DATA = 64 << 10
MAX_KEY = 200
_decode = msgspec.msgpack.Decoder(DSecContainerRunArgs).decode
_HOSTNAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,61}[A-Za-z0-9])?")
_ENV_NAME = re.compile(r"[^=\0]+")
_USER = re.compile(r"[^:\0\n/]{1,64}(:[^:\0\n/]{1,64})?")


def _require(condition: bool, field: str, message: str) -> None:
    if not condition:
        raise InvalidArgument(f"{field}: {message}", field=field)


def check_key(key: str) -> None:
    """Raise `InvalidArgument` for an idempotency key that cannot be used."""
    _require(0 < len(key) <= MAX_KEY, "key", f"1 to {MAX_KEY} characters are required")


class Kind(msgspec.Struct, frozen=True, kw_only=True):
    """What a sandbox runs in, and what only that has: the part of a request beside its `args`."""

    backend: str = CONTAINER
    vm: VmArgs | None = None


CONTAINERS = Kind()


def settle(kind: Kind, backend: Backend) -> Kind:
    """Return what `kind` comes to in `backend`. Raises `InvalidArgument`."""
    able = backend.capabilities.vm
    if kind.vm is not None and not able:
        raise InvalidArgument(
            f"vm: sandboxes of the {backend.name} backend have no kernel of their own; "
            'leave it out, or ask for backend "microvm"',
            field="vm",
        )
    vm = (kind.vm or VmArgs()) if able else None
    if vm is not None and backend.capabilities.whole:
        vm = msgspec.structs.replace(vm, full=vm.full or FullVmArgs())
    elif vm is not None and vm.full is not None:
        raise InvalidArgument(
            f"vm.full: sandboxes of the {backend.name} backend are made of layers", field="vm"
        )
    return Kind(backend=backend.name, vm=vm)


def compile_spec(
    sandbox: str,
    args: DSecContainerRunArgs,
    account: Account | None = None,
    kind: Kind = CONTAINERS,
) -> Spec:
    """Return the spec of `args` for a settled `kind`, with the policy of `account`.

    Raises `InvalidArgument` naming the field.
    """
    if args.policy is not None:  # it is in the account, and may be long
        args = msgspec.structs.replace(args, policy=None)
    if args.secrets:  # `grants` adds them: what is remembered here has none
        args = msgspec.structs.replace(args, secrets={})
    spec = _checked(msgspec.msgpack.encode(args), kind)
    hostname = spec.hostname or sandbox.rpartition("-")[2]
    if account is None:
        return msgspec.structs.replace(spec, hostname=hostname)
    return msgspec.structs.replace(
        spec, hostname=hostname, network=account.source.network, policy=account.compiled
    )


class Placed(Protocol):
    """A sandbox, of which only its backend matters."""

    backend: Backend


def check_offered(spec: Spec, backend: Backend, live: Mapping[str, Placed]) -> None:
    """Raise `Unsupported` for what `backend` does not offer.

    `live` are the sandboxes to branch from: one of another backend raises `InvalidArgument`.
    """
    able = backend.capabilities
    if spec.checkpoint:
        require(backend, "checkpoints")
        origin = live.get(spec.checkpoint.rpartition("/")[0])
        same = origin is None or origin.backend is backend
        _require(same, "from_checkpoint", f"its sandbox is not of the {backend.name} backend")
    for field, asked, offered in (
        ("network", spec.network, able.network),
        ("upper", spec.upper, able.upper),
    ):
        if asked not in offered:
            raise Unsupported(
                f"{field}={asked!r} is not offered by the {backend.name} backend here",
                reason=f"offered: {', '.join(offered)}",
            )


@functools.lru_cache(maxsize=64)
def _checked(encoded: bytes, kind: Kind) -> Spec:
    """Return the spec of a request, "" for a host name to be made; a burst repeats one request."""
    args = _decode(encoded)
    _check_limits(args)
    _check_texts(args)
    return Spec(
        backend=kind.backend,
        vm=None if kind.vm is None else _vm(kind.vm, args),
        image=args.container_image,
        workspace=args.workspace or "",
        toolkits=tuple(args.toolkits),
        checkpoint=args.from_checkpoint or "",
        memory_bytes=args.memory_limit_mb * MIB,
        cpu_cores=args.cpu_cores_limit,
        pids=args.pids_limit,
        disk_bytes=args.disk_limit_mb * MIB,
        upper=args.upper,
        network=args.network,
        user=args.init_user or "",
        workdir=args.workdir or "",
        env=args.env,
        hostname=args.hostname or "",
        no_new_privileges=args.no_new_privileges,
        output_limit=args.output_limit_mb * MIB,
        spool_limit=args.spool_limit_mb * MIB,
    )


def _vm(vm: VmArgs, args: DSecContainerRunArgs) -> VmSpec:
    least = MIN_GUEST_MB
    _require(args.memory_limit_mb >= least, "memory_limit_mb", f"at least {least} MiB for a guest")
    _require(1 <= vm.vcpus <= MAX_VCPUS, "vcpus", f"1 to {MAX_VCPUS}")
    _require(0 <= vm.data_disk_mb <= 1 << 24, "data_disk_mb", "0 (none) to 16 TiB")
    if vm.full is not None:
        _check_full(vm.full, args)
        _require(not vm.data_disk_mb, "data_disk_mb", "a full VM has one disk")
    return VmSpec(
        vcpus=vm.vcpus, layers=vm.layers, data_disk_bytes=vm.data_disk_mb * MIB, full=vm.full
    )


def _check_full(full: FullVmArgs, args: DSecContainerRunArgs) -> None:
    made = args.workspace or args.toolkits or args.from_checkpoint
    _require(not made, "image", "a full VM is made of its image alone")
    for field, size in (("width", full.width), ("height", full.height)):
        _require(200 <= size <= 4096, field, "200 to 4096 pixels")
    _require(len(full.user_data) <= MAX_USER_DATA, "user_data", f"at most {MAX_USER_DATA} bytes")
    good = math.isfinite(full.boot_timeout) and full.boot_timeout > 0
    _require(good, "boot_timeout", "a positive number of seconds")


def _check_limits(args: DSecContainerRunArgs) -> None:
    _require(bool(args.container_image), "container_image", "a layer's name or digest is required")
    if args.from_checkpoint is not None:
        form = re.fullmatch(r"[a-z0-9-]+/[a-z0-9]+", args.from_checkpoint) is not None
        _require(form, "from_checkpoint", "SANDBOX/CHECKPOINT is required")
    _require(all(args.toolkits), "toolkits", "each is a layer's name or digest")
    _require(
        args.memory_limit_mb >= MIN_MEMORY_MB, "memory_limit_mb", f"at least {MIN_MEMORY_MB} MiB"
    )
    _require(args.memory_limit_mb <= 1 << 24, "memory_limit_mb", "at most 16 TiB")
    cores = args.cpu_cores_limit
    _require(math.isfinite(cores) and 0.01 <= cores <= 4096, "cpu_cores_limit", "0.01 to 4096")
    _require(16 <= args.pids_limit <= 4194304, "pids_limit", "16 to 4194304")
    _require(1 <= args.disk_limit_mb <= 1 << 24, "disk_limit_mb", "1 MiB to 16 TiB")
    _require(1 <= args.output_limit_mb <= 1 << 16, "output_limit_mb", "1 MiB to 64 GiB")
    _require(1 <= args.spool_limit_mb <= 1 << 16, "spool_limit_mb", "1 MiB to 64 GiB")
    for field in ("ttl_running_stop", "max_lifetime_s"):
        value = getattr(args, field)
        good = value is None or (math.isfinite(value) and value > 0)
        _require(good, field, "a positive number of seconds, or none")


def _check_texts(args: DSecContainerRunArgs) -> None:
    if args.hostname is not None:
        _require(bool(_HOSTNAME.fullmatch(args.hostname)), "hostname", "not a valid host name")
    if args.init_user is not None:
        _require(bool(_USER.fullmatch(args.init_user)), "init_user", "a name, uid, or uid:gid")
    if args.workdir is not None:
        good = args.workdir.startswith("/") and "\0" not in args.workdir
        _require(good, "workdir", "an absolute path is required")
    for name, value in args.env.items():
        _require(bool(_ENV_NAME.fullmatch(name)), "env", f"{name!r} is not a variable name")
        _require("\0" not in value, "env", f"the value of {name} contains a NUL")
    size = sum(len(k) + len(v) for k, v in (*args.env.items(), *args.labels.items()))
    _require(size <= 128 << 10, "env", "env and labels together may hold 128 KiB")
