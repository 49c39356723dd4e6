"""A container's request and resources compiled into the spawner's plan. Pure."""

from __future__ import annotations

import msgspec

from dsecd.backends.container_confine import Confinement
from dsecd.backends.inside import NO_NETWORK, generated_files, init_config
from dsecd.backends.spec import Spec
from dsecd.host.network import Attachment
from dsecd.host.plan import Bind, ContainerPlan, FileWrite, NewFile
from dsecd.host.upper import Upper
from dsecd.images.manifest import Config

# A memory upper is charged to the sandbox's memory: if it could fill all of it, a full disk would
# show as an OOM kill.
MEMORY_UPPER_SHARE = 0.75
MIN_MEMORY_UPPER = 1 << 20


class Template(msgspec.Struct, frozen=True, kw_only=True):
    """What is the same for every container of this host; made once, at start."""

    runtime: str
    spool: str
    dev_tree: str
    caps: int
    trace: bool = False


class Resources(msgspec.Struct, frozen=True, kw_only=True):
    """What one container was given."""

    sandbox: str
    uid_base: int
    owner_uid: int
    cgroup: str
    confinement: Confinement
    lowers: int
    raw_lowers: int = 0
    linked: bool = False
    writes: tuple[FileWrite, ...] = ()
    upper: Upper | None = None
    attachment: Attachment | None = None
    cpus: tuple[int, ...] = ()
    cpu_binds: tuple[Bind, ...] = ()
    trust_binds: tuple[Bind, ...] = ()  # of a container that has secrets
    defaults: Config = Config()  # of the environment
    dev_tree: str = ""  # when it is not the template's


def memory_upper_bytes(spec: Spec) -> int:
    """Return the size of a memory upper: what was asked, within the share of the memory limit."""
    share = int(spec.memory_bytes * MEMORY_UPPER_SHARE)
    return max(MIN_MEMORY_UPPER, min(spec.disk_bytes, share))


def on_disk(spec: Spec, disk_available: bool) -> bool:
    """Return whether the upper goes on disk: when asked for, or when memory could not hold it."""
    if spec.upper == "auto":
        return disk_available and spec.disk_bytes > spec.memory_bytes
    return spec.upper == "disk"


def runtime_dir(template: Template, sandbox: str) -> str:
    return f"{template.runtime}/{sandbox}"


def compile_plan(template: Template, spec: Spec, given: Resources) -> ContainerPlan:
    """Return the plan of one container."""
    upper = given.upper
    return ContainerPlan(
        sandbox=given.sandbox,
        lowers=given.lowers,
        raw_lowers=given.raw_lowers,
        linked=given.linked,
        uid_base=given.uid_base,
        owner_uid=given.owner_uid,
        cgroup=given.cgroup,
        writes=given.writes,
        runtime_dir=runtime_dir(template, given.sandbox),
        spool_dir=template.spool,
        upper_dir=upper.dir if upper else "",
        upper_bytes=0 if upper else memory_upper_bytes(spec),
        upper_project=upper.project if upper else 0,
        dev_tree=given.dev_tree or template.dev_tree,
        files=_files(spec, given),
        binds=given.cpu_binds + given.trust_binds + spec.binds,
        read_only=given.confinement.read_only,
        masked=given.confinement.masked,
        guards=given.confinement.guards,
        hostname=spec.hostname,
        cpus=given.cpus,
        init_config=init_config(
            given.sandbox,
            spec,
            given.defaults,
            caps=template.caps,
            seccomp=given.confinement.seccomp,
            landlock=given.confinement.landlock,
            apparmor=given.confinement.apparmor,
        ),
        trace=template.trace,
    )


def _files(spec: Spec, given: Resources) -> tuple[NewFile, ...]:
    attachment = given.attachment
    if attachment is None:
        return generated_files(given.sandbox, spec.hostname, "", "", NO_NETWORK)
    return generated_files(
        given.sandbox,
        spec.hostname,
        attachment.address,
        attachment.address6,
        attachment.resolv_conf,
    )


class CpuLoad:
    """How many live containers were bound to each CPU; new ones go where there are fewest."""

    def __init__(self, cpus: tuple[int, ...]) -> None:
        self._bound = dict.fromkeys(cpus, 0)

    def choose(self, count: int) -> tuple[int, ...]:
        """Return the `count` least loaded CPUs; () when that is all of them."""
        if count >= len(self._bound):
            return ()
        chosen = sorted(self._bound, key=lambda cpu: (self._bound[cpu], cpu))[:count]
        self.bind(tuple(sorted(chosen)))
        return tuple(sorted(chosen))

    def bind(self, cpus: tuple[int, ...]) -> None:
        for cpu in cpus:
            if cpu in self._bound:
                self._bound[cpu] += 1

    def free(self, cpus: tuple[int, ...]) -> None:
        for cpu in cpus:
            if cpu in self._bound:
                self._bound[cpu] -= 1
