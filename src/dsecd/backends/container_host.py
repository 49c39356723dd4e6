"""The shared means of all containers of this host: pools, spawners, layers, network, template.

Order of the start matters: what the spawners' mount namespaces must contain is mounted before they
start; pools that could take what a live sandbox holds are filled only after recovery.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import zlib
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import msgspec

from dsecd.backends import container_confine
from dsecd.backends.container_apparmor import AppArmor
from dsecd.backends.container_holding import Holding
from dsecd.backends.container_layers import ContainerLayers
from dsecd.backends.container_lsm import FileRules
from dsecd.backends.container_network import Networks
from dsecd.backends.container_plan import CpuLoad, Resources, Template, runtime_dir
from dsecd.backends.container_secrets import Secrets
from dsecd.backends.spec import Spec
from dsecd.config import Config
from dsecd.host import binaries, cgroup, probe, shared_limits, shell, sockets, spawner, tree
from dsecd.host.damon import Damon, Scheme
from dsecd.host.layers import LayerMounts
from dsecd.host.netns import NetnsPool
from dsecd.host.network import Nat, NatConfig
from dsecd.host.plan import Bind, DestroyPlan
from dsecd.host.ranges import RangePool
from dsecd.host.spawner import SpawnerPool
from dsecd.host.swap import Swap, Wanted
from dsecd.host.upper import Uppers
from dsecd.policy import capabilities, seccomp
from dsecd.policy.guards import in_kernel_tree
from libdsec.errors import DSecError, Unsupported
from libdsec.model import Feature

logger = logging.getLogger("dsecd.container")
MAX_SPAWNERS = 8
HOUSE_S = 60.0  # between two looks at what is unused
GARBAGE_LOOKS = 60  # every so many of them, also at the store


class ContainerHost:
    """Made from the configuration; usable after `start`."""

    template: Template
    tree: tree.Tree
    driver: cgroup.TreeDriver
    spawners: SpawnerPool

    def __init__(self, config: Config) -> None:
        self._config = config
        runtime, state = config.runtime, config.state
        self.mounts = LayerMounts(runtime / "layers")
        self.layers = ContainerLayers(config, self.mounts)
        self.uppers = Uppers(state / "upper", runtime / "upper")
        self.apparmor = AppArmor(config)
        self.damon = Damon(runtime / "damon.pid")
        self.disk_uppers = False
        self.swap = Swap(_wanted(config), runtime / "swap.json", state)
        self._keeper: asyncio.Task[None] | None = None
        self._cpu_binds: dict[int, tuple[Bind, ...]] = {}
        self.cpu_load = CpuLoad(tuple(sorted(os.sched_getaffinity(0))))
        self._sandboxes, self._spool = runtime / "sb", state / "spool"
        self._limits = runtime / "raised-limits.json"
        self.shell_missing = "not looked for yet"  # why the platform has no shell, "" when it has
        self._shell = -1
        self._undo = contextlib.AsyncExitStack()
        self._idle = False  # at the end: no sandbox lives, so what is ours is unmounted

    async def start(self) -> None:
        """Build and start everything but the pools. Raises `Unsupported` with what is missing.

        What a failed start leaves is ended by `close`, which undoes what was begun, in reverse.
        """
        config, undo, when_idle = self._config, self._undo, self._when_idle
        sockets.mount(self._sandboxes)
        undo.callback(when_idle, sockets.unmount, self._sandboxes)
        self._spool.mkdir(parents=True, exist_ok=True)
        self._spool.chmod(0o1733)  # every dsec-init puts files without a name here
        undo.callback(when_idle, shared_limits.restore_limits, self._limits)
        shared_limits.raise_limits(self._limits)
        self.tree = tree.build(config.runtime)
        undo.callback(when_idle, tree.remove, config.runtime)
        undo.callback(lambda: self.mounts.teardown() if self._idle else self.mounts.close())
        self.mounts.start()
        undo.callback(lambda: self.uppers.teardown() if self._idle else self.uppers.close())
        self.uppers.start()
        self.disk_uppers = self.uppers.feature().available
        # ends before the unmounts, which wait for reads under way, and those for an absent store
        undo.push_async_callback(lambda: self.layers.close(self._idle))
        await self.layers.start()
        undo.callback(lambda: self.swap.close(self._idle))
        self.swap.start()  # before the driver, which looks whether there is swap
        undo.callback(lambda: self._stop_damon() if self._idle else None)
        self._start_damon()
        pools = config.pools
        self.driver = cgroup.detect(config.cgroup.root, config.cgroup.name, pools.slots)
        undo.push_async_callback(self.driver.close)
        self.driver.start()
        self.nat = Nat(self._nat_config())
        undo.push_async_callback(self.nat.shutdown)
        self.ranges = RangePool(pools.uid_range_start, pools.uid_range_count, pools.ranges)
        undo.push_async_callback(self.ranges.close)
        self.netns = NetnsPool(pools.netns)
        undo.push_async_callback(self.netns.close)
        self.networks = Networks(config, self.netns, self.nat)
        undo.push_async_callback(lambda: self.networks.close(leave_nothing=self._idle))
        self.networks.start(self.driver)
        self.secrets = Secrets(config, self.netns, self.networks, self.tree.path)
        self.confiner = container_confine.for_host()
        self.file_rules = FileRules(config.runtime / "bpf-files")
        undo.callback(lambda: self.file_rules.close(leave_nothing=self._idle))
        self.file_rules.start(self.driver)
        undo.push_async_callback(self.apparmor.close)
        self.apparmor.start()
        self.template = self._make_template()
        undo.callback(self._close_shell)
        self._open_shell()
        self.spawners = await self._start_spawners()
        undo.push_async_callback(self.spawners.close)

    def _nat_config(self) -> NatConfig:
        config = self._config
        name = config.cgroup.name
        return NatConfig(
            state=config.runtime / "network.json",
            name=name,
            # interface names are short: a second daemon gets a hash of its name
            prefix="ds" if name == "dsec" else f"ds{zlib.crc32(name.encode()) & 0xFFFFF:05x}x",
            pool4=config.network.pool4,
            pool6=config.network.pool6,
            resolvers=config.network.resolvers,
        )

    def _make_template(self) -> Template:
        return Template(
            runtime=str(self._sandboxes),
            spool=str(self._spool),
            dev_tree=self.tree.dev,
            caps=capabilities.mask(),
            trace=self._config.log.level == "debug",
        )

    def _start_damon(self) -> None:
        """Have the kernel page out cold memory if the operator wants that and nobody else does."""
        wanted = self._config.reclaim.damon
        if self.damon.ours or not wanted:
            if not wanted:
                self._stop_damon()
            return
        try:
            self.damon.start(Scheme())
        except Unsupported as error:
            logger.warning("reclaim.damon has no effect: %s", error.message)

    def _stop_damon(self) -> None:
        if self.damon.ours:
            self.damon.stop()

    def _open_shell(self) -> None:
        try:
            self._shell = shell.open_shell(self._config.paths.shell or shell.DEFAULT)
            self.shell_missing = ""
        except Unsupported as error:
            self.shell_missing = error.message
            logger.warning("sandboxes use their own shell: %s", error.message)

    def _close_shell(self) -> None:
        if self._shell >= 0:
            os.close(self._shell)
            self._shell = -1

    async def _start_spawners(self) -> SpawnerPool:
        paths, pools = self._config.paths, self._config.pools
        binary = str(binaries.find(paths.spawner, "dsec-spawner"))
        init = str(binaries.find(paths.init, "dsec-init"))
        count = pools.spawners or min(MAX_SPAWNERS, 2 * (os.cpu_count() or 1))
        slots = self.driver.slots
        pool = SpawnerPool(
            binary,
            count,
            init=init,
            base_filter=seccomp.base_filter(),
            by_path=not probe.feature("overlay_lower_fd").available,
            shell=self._shell,
            take_slot=slots.acquire if slots else None,
            return_slot=_return_to(slots) if slots else None,
        )
        await pool.start()
        return pool

    def cpu_binds(self, cpu_cores: float) -> tuple[Bind, ...]:
        """Return what shows as many CPUs as the limit gives; looked up once per count."""
        count = self.tree.cpu_count(cpu_cores)
        if count not in self._cpu_binds:
            self._cpu_binds[count] = self.tree.cpu_binds(cpu_cores)
        return self._cpu_binds[count]

    def sys_binds(self, cpus: Collection[int]) -> tuple[Bind, ...]:
        """Return those that another root needs: what is below /proc comes along."""
        binds = self.cpu_binds(len(cpus)) if cpus else ()
        return tuple(bind for bind in binds if not in_kernel_tree(bind.target))

    def start_pools(self) -> None:
        """Fill the pools: recovery is done, what they take is nobody's."""
        if self.driver.slots is not None:
            self.driver.slots.end_recovery()
        self.ranges.start()
        self.netns.start()
        self._keeper = asyncio.get_running_loop().create_task(self._keep_house())

    async def _keep_house(self) -> None:
        """Unmount layers that nobody has used for long; collect garbage in the store, too."""
        looks = 0
        while True:
            try:
                await self.layers.unmount_idle()
                if looks % GARBAGE_LOOKS == GARBAGE_LOOKS - 1:
                    await self.layers.collect(None, None)
            except (OSError, DSecError) as error:
                logger.warning("cannot drop unused layers: %s", error)
            looks += 1
            await asyncio.sleep(HOUSE_S)

    async def sweep(self, known: Collection[str], volumes: Collection[str]) -> list[str]:
        """Remove what carries our names and belongs to no sandbox of `known`.

        `volumes` are directories of disk uppers that are needed though their sandbox is gone.
        """
        found: dict[str, str] = {}
        for name in self.driver.list_sandboxes():
            found.setdefault(name, "cgroup")
        for entry in self._sandboxes.iterdir():
            found.setdefault(entry.name, str(entry))
        stale = {name: what for name, what in found.items() if name not in known}
        for name in stale:
            plan = DestroyPlan(
                sandbox=name,
                cgroup=self.driver.group(name).path,
                runtime_dir=runtime_dir(self.template, name),
            )
            await self.spawners.destroy(plan)
        uppers = await self.uppers.sweep(known, volumes)
        return [*stale.values(), *uppers]

    def depths(self) -> Mapping[str, float]:
        """Return what is ready in each pool."""
        depths = {
            "netns": float(self.netns.stats().free),
            "ranges": float(self.ranges.ready),
            "layers_mounted": float(self.mounts.mounted()),
        }
        if self.driver.slots is not None:
            depths["slots"] = float(self.driver.slots.ready)
            depths["slots_draining"] = float(self.driver.slots.draining)
        return depths

    def features(self) -> list[Feature]:
        """Return the probe table, and where disk uppers would live."""
        rows = [
            Feature(
                name=row.name,
                available=row.available,
                reason=row.reason,
                needed_for=row.needed_for,
            )
            for row in probe.probe()
        ]
        started = hasattr(self, "spawners")  # before that nobody knows about the volume
        if not started:
            return rows
        own_shell = Feature(
            name="platform_shell",
            available=not self.shell_missing,
            reason=self.shell_missing or "a static bash, run by descriptor",
            needed_for="sessions, run_shell and verify without the sandbox's own shell",
        )
        own_swap = Feature(
            name="reclaim_swap",
            available=bool(self.swap.path),
            reason=self.swap.remark,
            needed_for="swap of dsecd's own for the memory of idle sandboxes",
        )
        return [*rows, self.uppers.feature(), own_shell, own_swap]

    async def close(self, leave_nothing: bool) -> None:
        """End helpers and pools. `leave_nothing`: no sandbox lives, so unmount what is ours.

        Also after a `start` that failed, when sandboxes of an earlier daemon may still live though
        nobody has adopted them: their sockets tell.
        """
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        self._idle = leave_nothing and not any(self._sandboxes.glob("*"))
        await self._undo.aclose()

    def _when_idle(self, undo: Callable[[Path], None], path: Path) -> None:
        if self._idle:
            undo(path)


def _return_to(slots: cgroup.SlotPool) -> Callable[[spawner.Slot], None]:
    def give_back(slot: spawner.Slot) -> None:
        assert isinstance(slot, cgroup.Slot)  # they all come from this pool
        slots.release(slot)

    return give_back


def _wanted(config: Config) -> Wanted:
    reclaim = config.reclaim
    return Wanted(
        kind=reclaim.swap, size_bytes=reclaim.swap_mb << 20, algorithm=reclaim.swap_algorithm
    )


def resources(
    host: ContainerHost, holding: Holding, spec: Spec, slot: cgroup.Slot | None
) -> Resources:
    """Return what a container that is about to be made was given, for its plan."""
    assert holding.range is not None
    assert holding.cgroup is not None
    target = slot or holding.cgroup
    return Resources(
        sandbox=holding.sandbox,
        uid_base=holding.range.uid_base,
        owner_uid=holding.range.owner_uid,
        cgroup=holding.cgroup.path,
        confinement=msgspec.structs.replace(
            host.confiner.confine(spec.policy), apparmor=holding.apparmor
        ),
        lowers=len(holding.layers) + len(holding.roots.saved),
        raw_lowers=len(holding.roots.saved),
        linked=bool(holding.roots.saved) and holding.roots.saved[-1].linked,
        writes=host.driver.limits(target, spec.memory_bytes, spec.cpu_cores, spec.pids),
        upper=holding.upper,
        attachment=holding.attachment,
        cpus=holding.cpus,
        cpu_binds=host.cpu_binds(spec.cpu_cores) if holding.cpus else (),
        trust_binds=host.secrets.binds(holding.sandbox),
        defaults=holding.defaults,
        dev_tree=host.tree.dev_with(spec.devices),
    )
