"""The part of `libdsec.model` that is about microVMs; import it from there."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from libdsec.model_pause import CpuClass
from libdsec.model_policy import NetworkMode

VmLayers = Literal["pmem", "block"]


class DSecMicroVMRunArgs(
    msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True, kw_only=True
):
    """What a microVM sandbox is made of: a sandbox with a kernel of its own, under a VMM.

    `image`, `workspace` and `toolkits` are layers, as those of `DSecContainerRunArgs`, and so is
    all that has the same name there. `memory_limit_mb` is the memory of the guest, `vcpus` are the
    processors that it sees and may use in full.

    `layers` says how the layers get into the guest: "pmem" maps them, so that all guests share the
    host's copy of what they read; "block" are disks, of which each guest caches its own.
    `data_disk_mb` above 0 adds an empty raw disk, the last of the guest's disks, for workloads that
    want a file system of their own (Docker).
    """

    image: str
    workspace: str | None = None
    toolkits: list[str] = []
    memory_limit_mb: int = 512
    vcpus: int = 1
    cpu_class: CpuClass = "standard"
    pids_limit: int = 1024
    disk_limit_mb: int = 1024
    layers: VmLayers = "pmem"
    data_disk_mb: int = 0
    ttl_running_stop: float | None = None
    max_lifetime_s: float | None = None
    network: NetworkMode = "none"
    network_rules: dict[str, bool] | None = None
    policy: str | dict[str, Any] | None = None
    strict: bool = False
    secrets: dict[str, dict[str, str] | str] = {}
    init_user: str | None = None
    workdir: str | None = None
    env: dict[str, str] = {}
    hostname: str | None = None
    labels: dict[str, str] = {}
    output_limit_mb: int = 64
    spool_limit_mb: int = 256


class VmArgs(
    msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True, kw_only=True, frozen=True
):
    """Of `CreateArgs`: what a sandbox with a kernel of its own has beside what all have."""

    vcpus: int = 1
    layers: VmLayers = "pmem"
    data_disk_mb: int = 0
