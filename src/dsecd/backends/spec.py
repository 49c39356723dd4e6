"""What a caller asked for, validated: the engine's side of the contract with the backends."""

from __future__ import annotations

from typing import Literal

import msgspec

from dsecd.host.plan import Bind
from dsecd.policy.compile import Compiled
from dsecd.secrets.secret import Secret
from libdsec.model import CONTAINER
from libdsec.model_vm import FullVmArgs, VmLayers


class VmSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What only a sandbox with a kernel of its own has; its memory is that of the guest."""

    vcpus: int
    layers: VmLayers
    data_disk_bytes: int  # 0: none
    full: FullVmArgs | None = None  # of one that boots a disk image


class Spec(msgspec.Struct, frozen=True, kw_only=True):
    """A validated create request, in the units of the kernel.

    With `network` "none" and a policy the policy opens nothing. `vm` is given to a backend whose
    `Capabilities.vm` says so, and to no other.
    """

    backend: str = CONTAINER  # its name
    vm: VmSpec | None = None

    image: str
    workspace: str = ""
    toolkits: tuple[str, ...] = ()
    checkpoint: str = ""  # SANDBOX/CHECKPOINT to begin from, instead of image and so on
    memory_bytes: int
    cpu_cores: float
    pids: int
    disk_bytes: int
    upper: Literal["auto", "memory", "disk"]
    network: Literal["none", "nat"]
    policy: Compiled | None = None  # None: no rules were given
    secrets: tuple[Secret, ...] = ()  # all of names that the policy opens
    user: str  # "": the image's
    workdir: str  # "": the image's
    env: dict[str, str]
    hostname: str
    no_new_privileges: bool
    output_limit: int
    spool_limit: int
    # of a backend that builds on another
    binds: tuple[Bind, ...] = ()  # of the host's files
    devices: tuple[str, ...] = ()  # nodes of /dev that no other sandbox has: `tree.Tree.dev_with`
    tap_user: int | None = None  # inside: its network is a guest's, at a tap of that user
