"""The cgroup drivers over a recording twin of the kernel's files."""

from __future__ import annotations

import asyncio
import errno
import math
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from dsecd.host.cgroup import HybridDriver, SandboxCgroup, Slot, UnifiedDriver, Usage, detect
from dsecd.host.kernelfs import KernelFiles
from libdsec.errors import AlreadyExists, Internal, InvalidArgument, NotFound, Unsupported

V2_FILES = {
    "cgroup.controllers": "", "cgroup.procs": "", "cgroup.threads": "",
    "cgroup.subtree_control": "",
    "cgroup.kill": "", "cgroup.freeze": "0\n", "cgroup.events": "populated 0\nfrozen 0\n",
    "cpu.stat": "usage_usec 2500000\nuser_usec 1\n",
}  # fmt: skip
V2_CONTROLLED = {
    "memory.max": "max\n", "memory.swap.max": "max\n", "memory.current": "5000\n",
    "memory.stat": "anon 1000\nfile 3000\nshmem 500\n", "memory.events": "oom 1\noom_kill 2\n",
    "cpu.max": "max 100000\n", "cpu.max.burst": "0\n", "cpu.weight": "100\n", "cpu.idle": "0\n",
    "pids.max": "max\n", "pids.current": "4\n",
}  # fmt: skip
V1_FILES = {
    "memory": {
        "cgroup.procs": "", "memory.limit_in_bytes": "-1\n", "memory.memsw.limit_in_bytes": "-1\n",
        "memory.usage_in_bytes": "0\n", "memory.max_usage_in_bytes": "0\n",
        "memory.kmem.usage_in_bytes": "0\n",
        "memory.stat": "cache 0\nrss 0\nshmem 0\n", "memory.force_empty": "",
        "memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 0\n",
    },
    "cpu": {
        "cgroup.procs": "", "cpu.cfs_quota_us": "-1\n", "cpu.cfs_burst_us": "0\n",
        "cpu.shares": "1024\n", "cpu.idle": "0\n",
    },
    "pids": {"cgroup.procs": "", "pids.max": "max\n", "pids.current": "0\n"},
}  # fmt: skip


class TwinFiles(KernelFiles):
    """Directories on disk that fill themselves as cgroupfs does; writes are also recorded."""

    def __init__(self, root: Path, kind: str) -> None:
        self.root = root
        self.writes: list[tuple[str, str]] = []
        self.owners: dict[str, int] = {}
        self.tags: dict[str, str] = {}
        self.fail: dict[str, int] = {}  # last component of a written path: errno
        v2 = root if kind == "v2" else root / "unified"
        self._v2 = v2
        if kind == "hybrid":
            for controller in V1_FILES:
                self._populate(root / controller)
        self._populate(v2)
        (v2 / "cgroup.controllers").write_text("cpu memory pids\n" if kind == "v2" else "\n")
        self.kind = kind

    def _populate(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)
        files = dict(V2_FILES)
        if path.is_relative_to(self._v2) and not any(
            path.is_relative_to(self.root / c) for c in V1_FILES
        ):
            files |= V2_CONTROLLED if self._v2 == self.root else {}
        else:
            files = V1_FILES[path.relative_to(self.root).parts[0]]
        for name, text in files.items():
            (path / name).write_text(text)

    def mkdir(self, path: str) -> None:
        super().mkdir(path)
        self._populate(Path(path))

    def rmdir(self, path: str) -> None:
        directory = Path(path)
        if (directory / "cgroup.procs").read_text().strip():
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), path)
        if any(entry.is_dir() for entry in directory.iterdir()):
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), path)
        for entry in directory.iterdir():
            entry.unlink()
        directory.rmdir()

    def write(self, path: str, value: str) -> None:
        if code := self.fail.get(Path(path).name):
            raise OSError(code, os.strerror(code), path)
        if path.endswith("limit_in_bytes"):
            self._check_limits(Path(path), value)
        self.writes.append((str(Path(path).relative_to(self.root)), value))
        Path(path).write_text(value)
        if path.endswith("cgroup.freeze"):
            Path(path).with_name("cgroup.events").write_text(f"populated 1\nfrozen {value}\n")

    def _check_limits(self, path: Path, value: str) -> None:
        """Refuse a limit of memory above that of memory and swap (mem_cgroup_resize_max)."""
        names = ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes")
        now = {name: path.with_name(name).read_text() for name in names} | {path.name: value}
        memory, both = (float(now[name]) if int(now[name]) >= 0 else math.inf for name in names)
        if memory > both:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), str(path))

    def chown(self, path: str, uid: int) -> None:
        self.owners[path] = uid

    def tag(self, path: str, value: str) -> None:
        self.tags[path] = value

    def tagged(self, path: str) -> str:
        return self.tags.get(path, "")


@pytest.fixture
def v2(tmp_path: Path) -> TwinFiles:
    return TwinFiles(tmp_path, "v2")


@pytest.fixture
def hybrid(tmp_path: Path) -> TwinFiles:
    return TwinFiles(tmp_path, "hybrid")


def detected(files: TwinFiles, slots: int = 2) -> UnifiedDriver | HybridDriver:
    driver = detect(str(files.root), "dsec-test", slots, files)
    assert isinstance(driver, UnifiedDriver | HybridDriver)
    return driver


# --- detection --------------------------------------------------------------------------------


def test_v2_is_detected_and_controllers_are_enabled(v2: TwinFiles) -> None:
    driver = detected(v2)
    assert driver.kind == "v2"
    assert driver.slots is None
    assert ("cgroup.subtree_control", "+cpu +memory +pids") in v2.writes
    assert ("dsec-test/cgroup.subtree_control", "+cpu +memory +pids") in v2.writes
    assert driver.list_sandboxes() == []  # the trial is gone


def test_hybrid_is_detected_and_leaves_no_trial(hybrid: TwinFiles) -> None:
    driver = detected(hybrid)
    assert driver.kind == "hybrid"
    for controller in V1_FILES:
        assert hybrid.directories(str(hybrid.root / controller / "dsec-test")) == []
    driver.discard()
    assert not (hybrid.root / "memory/dsec-test").exists()
    assert not (hybrid.root / "unified/dsec-test").exists()


def test_no_v2_hierarchy_is_unsupported(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="no cgroup v2"):
        detect(str(tmp_path), files=KernelFiles())


def test_missing_controllers_are_named(hybrid: TwinFiles) -> None:
    (hybrid.root / "pids/cgroup.procs").unlink()
    with pytest.raises(Unsupported, match="pids are neither"):
        detected(hybrid)


def test_refused_limits_are_unsupported_with_advice(v2: TwinFiles) -> None:
    v2.fail["cgroup.subtree_control"] = errno.EBUSY
    with pytest.raises(Unsupported, match="Delegate=yes"):
        detected(v2)


# --- a sandbox's directory --------------------------------------------------------------------


def test_directory_is_delegated_without_limits_or_kill(hybrid: TwinFiles) -> None:
    driver = detected(hybrid)
    hybrid.owners.clear()
    cgroup = driver.make("s0-n0-1-abcd", 65535)
    try:
        assert cgroup.fd >= 0
        names = {Path(p).name for p in hybrid.owners}
        assert names == {"s0-n0-1-abcd", "cgroup.procs"}
        assert set(hybrid.owners.values()) == {65535}
        with pytest.raises(AlreadyExists):
            driver.make("s0-n0-1-abcd", 65535)
    finally:
        cgroup.close()
    assert cgroup.fd == -1
    cgroup.close()
    assert driver.list_sandboxes() == ["s0-n0-1-abcd"]
    assert driver.find("s0-n0-1-abcd") == SandboxCgroup("s0-n0-1-abcd", cgroup.path)
    assert driver.find("gone") is None


@pytest.mark.parametrize("name", ["", "..", ".", "a/b", "-x", "a" * 129, "a\n"])
def test_names_cannot_leave_the_parent(hybrid: TwinFiles, name: str) -> None:
    with pytest.raises(InvalidArgument):
        detected(hybrid).make(name, 1)


def test_failed_delegation_removes_the_directory(
    hybrid: TwinFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = detected(hybrid)

    def refuse(path: str, uid: int) -> None:
        raise PermissionError(errno.EPERM, "no", path)

    monkeypatch.setattr(hybrid, "chown", refuse)
    with pytest.raises(Internal, match="delegate"):
        driver.make("half", 1)
    assert driver.list_sandboxes() == []


async def test_freeze_waits_for_the_kernel(hybrid: TwinFiles) -> None:
    driver = detected(hybrid)
    cgroup = driver.make("a", 1)
    cgroup.close()
    await driver.freeze(cgroup.path)
    assert "frozen 1" in Path(cgroup.path, "cgroup.events").read_text()
    await driver.thaw(cgroup.path)
    with pytest.raises(NotFound):
        await driver.freeze(cgroup.path + "-gone")


async def test_freeze_that_never_comes_is_an_error(
    hybrid: TwinFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = detected(hybrid)
    cgroup = driver.make("a", 1)
    cgroup.close()
    monkeypatch.setattr(hybrid, "write", lambda path, value: None)
    with pytest.raises(Internal, match="not done"):
        await driver.freeze(cgroup.path, 0.02)


async def test_remove_takes_children_first_and_waits_for_the_dying(hybrid: TwinFiles) -> None:
    driver = detected(hybrid)
    cgroup = driver.make("a", 1)
    cgroup.close()
    for child in ("cmd-1", "cmd-1/deep", "cmd-2"):
        hybrid.mkdir(f"{cgroup.path}/{child}")
    procs = Path(cgroup.path, "cmd-2/cgroup.procs")
    procs.write_text("77\n")
    assert driver.pids(cgroup) == (77,)
    asyncio.get_running_loop().call_later(0.03, procs.write_text, "")
    await driver.remove(cgroup.path)
    assert not Path(cgroup.path).exists()
    await driver.remove(cgroup.path)  # again is no error
    driver.kill(cgroup.path)


async def test_remove_is_bounded_and_names_who_stays(hybrid: TwinFiles) -> None:
    driver = detected(hybrid)
    cgroup = driver.make("a", 1)
    cgroup.close()
    Path(cgroup.path, "cgroup.procs").write_text("4242\n")
    with pytest.raises(Internal, match="4242"):
        await driver.remove(cgroup.path, 0.02)


# --- limits and usage -------------------------------------------------------------------------


def test_limits_on_v2(v2: TwinFiles) -> None:
    driver = detected(v2)
    cgroup = driver.make("a", 1)
    cgroup.close()
    writes = driver.limits(cgroup, 1 << 30, 1.5, 100)
    assert [(Path(w.path).name, w.value) for w in writes] == [
        ("memory.max", "1073741824"),
        ("memory.swap.max", "0"),
        ("cpu.max", "150000 100000"),
        ("pids.max", "101"),  # and one for dsec-init
    ]
    assert all(w.path.startswith(cgroup.path) for w in writes)
    with pytest.raises(Internal):
        driver.limits(Slot("slot-0", {}), 1, 1, 1)


def test_limits_on_hybrid(hybrid: TwinFiles) -> None:
    driver = detected(hybrid)
    assert isinstance(driver, HybridDriver)
    slot = driver.slots.acquire()
    writes = driver.limits(slot, 1 << 28, 0.001, 10)
    named = {Path(w.path).name: w.value for w in writes}
    assert named["memory.limit_in_bytes"] == str(1 << 28)
    assert named["cpu.cfs_quota_us"] == "1000"  # the kernel's floor
    assert named["pids.max"] == "11"
    assert len(slot.procs_paths) == 3
    assert all(path.endswith("/cgroup.procs") for path in slot.procs_paths)
    cgroup = driver.make("a", 1)
    cgroup.close()
    with pytest.raises(Internal):
        driver.limits(cgroup, 1, 1, 1)


def test_usage_on_v2(v2: TwinFiles) -> None:
    driver = detected(v2)
    cgroup = driver.make("a", 1)
    cgroup.close()
    assert driver.usage(cgroup) == Usage(
        memory_bytes=5000, cache_bytes=2500, cpu_usage_s=2.5, pids=3, oom_kills=2
    )
    assert driver.usage(SandboxCgroup("gone", cgroup.path + "-gone")) == Usage()


def test_usage_on_hybrid_leaves_earlier_lives_out(hybrid: TwinFiles) -> None:
    driver = detected(hybrid)
    assert isinstance(driver, HybridDriver)
    cgroup = driver.make("a", 1)
    cgroup.close()
    slot = driver.slots.acquire()
    memory = Path(slot.directories["memory"])
    (memory / "memory.stat").write_text("cache 9000\nrss 700\nshmem 1000\n")
    (memory / "memory.kmem.usage_in_bytes").write_text("300\n")
    (memory / "memory.oom_control").write_text("oom_kill_disable 0\noom_kill 5\n")
    Path(slot.directories["pids"], "pids.current").write_text("8\n")
    slot.residue_bytes, slot.oom_kills = 6100, 4
    assert driver.usage(cgroup, slot) == Usage(
        memory_bytes=700 + 1000 + 2200, cache_bytes=2200, cpu_usage_s=2.5, pids=7, oom_kills=1
    )
    assert driver.oom_kills(cgroup, slot) == 1
    slot.residue_bytes = 1 << 40  # reclaimed since: never negative
    assert driver.usage(cgroup, slot).cache_bytes == 0
    assert driver.usage(cgroup) == Usage(cpu_usage_s=2.5)


# --- slots ------------------------------------------------------------------------------------


async def until(condition: Callable[[], bool]) -> None:
    """Wait for the background task, which tells nobody what it did."""
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def test_pool_fills_hands_out_once_and_recycles(hybrid: TwinFiles) -> None:
    driver = detected(hybrid, slots=3)
    assert isinstance(driver, HybridDriver)
    driver.start()
    slots = driver.slots
    await until(lambda: slots.ready == 3)
    taken = [slots.acquire() for _ in range(10)]
    assert len({slot.name for slot in taken}) == 10
    slot = taken[0]
    pids = Path(slot.directories["pids"], "pids.current")
    pids.write_text("1\n")  # a process is still leaving
    Path(slot.directories["cpu"], "cpu.cfs_quota_us").write_text("1000\n")
    memory = Path(slot.directories["memory"])
    (memory / "memory.stat").write_text("cache 5000\nrss 0\nshmem 0\n")
    (memory / "memory.usage_in_bytes").write_text("5000\n")
    (memory / "memory.oom_control").write_text("oom_kill 3\n")
    slots.release(slot)
    await asyncio.sleep(0.05)
    assert slots.draining == 1
    pids.write_text("0\n")
    await until(lambda: slots.draining == 0)
    assert (slot.residue_bytes, slot.oom_kills) == (5000, 3)
    assert Path(slot.directories["cpu"], "cpu.cfs_quota_us").read_text() == "-1"
    assert hybrid.tags[str(memory)] == "5000 3"
    with pytest.raises(Internal, match="twice"):
        slots.release(slot)
    for other in taken[1:]:
        slots.release(other)
    await driver.close()
    assert not (hybrid.root / "memory/dsec-test").exists()
    assert not (hybrid.root / "cpu/dsec-test").exists()


async def test_fault_swap_that_came_later_was_not_limited(hybrid: TwinFiles) -> None:
    driver = detected(hybrid, slots=0)
    assert isinstance(driver, HybridDriver)
    driver.start()
    for mib in (256, 64, 128):  # lives of one slot
        slot = driver.slots.acquire()
        for write in driver.limits(slot, mib << 20, 1.0, 10):
            hybrid.write(write.path, write.value)
        both = Path(slot.directories["memory"], "memory.memsw.limit_in_bytes")
        assert both.read_text() == str(mib << 20)
        Path(slot.directories["memory"], "memory.usage_in_bytes").write_text(str(1 << 30))
        driver.slots.release(slot)
        await until(lambda: driver.slots.ready == 1)
    await driver.close()


async def test_too_much_page_cache_is_trimmed(hybrid: TwinFiles) -> None:
    driver = detected(hybrid, slots=0)
    assert isinstance(driver, HybridDriver)
    driver.start()
    slot = driver.slots.acquire()
    Path(slot.directories["memory"], "memory.usage_in_bytes").write_text(str(1 << 30))
    hybrid.writes.clear()
    driver.slots.release(slot)
    await until(lambda: driver.slots.ready == 1)
    limits = [value for path, value in hybrid.writes if path.endswith("memory.limit_in_bytes")]
    assert limits == [str(32 << 20), "-1"]
    await driver.close()


async def test_restarted_daemon_finds_slots_and_their_baseline(hybrid: TwinFiles) -> None:
    first = detected(hybrid, slots=0)
    assert isinstance(first, HybridDriver)
    first.start()
    live, dead = first.slots.acquire(), first.slots.acquire()
    Path(live.directories["memory"], "cgroup.procs").write_text("101\n102\n")
    Path(dead.directories["memory"], "cgroup.procs").write_text("103\n")
    Path(dead.directories["pids"], "pids.current").write_text("1\n")
    hybrid.tags[live.directories["memory"]] = "11 33"
    # killed: no close
    assert first.slots._task is not None
    first.slots._task.cancel()

    second = detected(hybrid, slots=0)
    assert isinstance(second, HybridDriver)
    second.start()
    assert second.list_slots() == {live.name: (101, 102), dead.name: (103,)}
    adopted = second.slots.adopt(live.name)
    assert (adopted.residue_bytes, adopted.oom_kills) == (11, 33)
    with pytest.raises(NotFound):
        second.slots.adopt(live.name)
    second.slots.end_recovery()
    fresh = second.slots.acquire()
    assert fresh.name not in (live.name, dead.name)
    assert second.slots.ready == 0
    Path(dead.directories["pids"], "pids.current").write_text("0\n")
    await until(lambda: second.slots.ready == 1)
    second.slots.release(fresh)
    await second.close()
    assert Path(live.directories["memory"]).exists()  # it lives


async def test_half_made_slot_is_undone_and_half_left_one_completed(
    hybrid: TwinFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = detected(hybrid, slots=0)
    assert isinstance(driver, HybridDriver)
    mkdir = hybrid.mkdir

    def refuse(path: str) -> None:
        if "/pids/" in path:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        mkdir(path)

    monkeypatch.setattr(hybrid, "mkdir", refuse)
    with pytest.raises(Exception, match="slot"):
        driver.slots.acquire()
    assert hybrid.directories(str(hybrid.root / "memory/dsec-test")) == []
    monkeypatch.setattr(hybrid, "mkdir", mkdir)
    hybrid.mkdir(str(hybrid.root / "memory/dsec-test/slot-7"))
    driver.start()
    await until(lambda: driver.slots.ready == 1)
    assert (hybrid.root / "pids/dsec-test/slot-7/pids.max").exists()
    await driver.close()


def test_v2_trim_opens_swap_only_while_it_reclaims(v2: TwinFiles) -> None:
    driver = UnifiedDriver(v2, str(v2.root), "dsec")
    driver.prepare()
    cgroup = driver.make("s0-n0-1-abcd", 1000)
    cgroup.close()
    for code in (0, errno.EAGAIN):  # as much as was asked for, or less
        v2.fail = {"memory.reclaim": code} if code else {}
        v2.writes.clear()
        driver.trim(cgroup, 4096)
        done = [(Path(path).name, value) for path, value in v2.writes]
        assert done[0] == ("memory.swap.max", "max")
        assert done[-1] == ("memory.swap.max", "0")
    v2.fail = {"memory.reclaim": errno.EINVAL}
    v2.writes.clear()
    with pytest.raises(OSError, match="Invalid"):
        driver.trim(cgroup, 4096)
    assert v2.writes[-1][1] == "0"


def test_v2_a_trim_cut_by_a_kill_leaves_no_swap_to_a_sandbox(v2: TwinFiles) -> None:
    driver = UnifiedDriver(v2, str(v2.root), "dsec")
    driver.prepare()
    driver.make("s0-n0-1-abcd", 1000).close()
    path = v2.root / "dsec/s0-n0-1-abcd/memory.swap.max"
    path.write_text("max")
    assert UnifiedDriver(v2, str(v2.root), "dsec").find("s0-n0-1-abcd") is not None
    assert path.read_text() == "0"


async def test_fault_v1_what_is_swapped_and_still_cached_was_nowhere(hybrid: TwinFiles) -> None:
    """Paged out to a disk it is neither mapped nor in the count of swap: 48 MiB were missing."""
    driver = detected(hybrid)
    assert driver.slots is not None
    driver.start()
    slot = driver.slots.acquire()
    cgroup = driver.make("a", 1)
    cgroup.close()
    stat = "cache 2000\nrss 300\nshmem 100\nswap 40\nactive_anon 50\ninactive_anon 5000\n"
    Path(slot.directories["memory"], "memory.stat").write_text(stat)
    found = driver.usage(cgroup, slot)
    assert found.swapped_bytes == 40 + 5050 - 400
    assert found.memory_bytes - found.cache_bytes == 400
    await driver.close()


def test_cpu_classes_on_v2(v2: TwinFiles) -> None:
    driver = detected(v2)
    cgroup = driver.make("a", 1)
    cgroup.close()
    for write in driver.limits(cgroup, 64 << 20, 1.5, 16):
        v2.write(write.path, write.value)
    for cpu_class, idle, weight, burst in (
        ("latency_sensitive", "0", "800", "150000"),
        ("standard", "0", "100", "0"),
    ):
        assert driver.set_cpu_class(cgroup, None, cpu_class) == ()  # type: ignore[arg-type]
        assert read(cgroup.path, "cpu.idle", "cpu.weight", "cpu.max.burst") == [idle, weight, burst]
    v2.writes.clear()
    assert driver.set_cpu_class(cgroup, None, "best_effort") == ()
    assert read(cgroup.path, "cpu.idle", "cpu.max.burst") == ["1", "0"]
    assert not any("cpu.weight" in path for path, _ in v2.writes)  # EINVAL while it is idle


def test_a_kernel_without_cpu_idle_or_bursts_is_said(v2: TwinFiles) -> None:
    driver = detected(v2)
    cgroup = driver.make("a", 1)
    cgroup.close()
    for name in ("cpu.idle", "cpu.max.burst"):
        Path(cgroup.path, name).unlink()
    (missing,) = driver.set_cpu_class(cgroup, None, "best_effort")
    assert "cpu.idle" in missing
    assert read(cgroup.path, "cpu.weight") == ["1"]
    (missing,) = driver.set_cpu_class(cgroup, None, "latency_sensitive")
    assert "burst" in missing


async def test_the_next_life_of_a_slot_has_no_class(hybrid: TwinFiles) -> None:
    driver = detected(hybrid)
    assert driver.slots is not None
    driver.start()
    slot = driver.slots.acquire()
    cgroup = driver.make("a", 1)
    cgroup.close()
    assert driver.set_cpu_class(cgroup, slot, "best_effort") == ()
    assert read(slot.directories["cpu"], "cpu.idle") == ["1"]
    await driver.slots._recycle(slot)
    assert read(slot.directories["cpu"], "cpu.idle", "cpu.shares") == ["0", "1024"]
    await driver.close()


def read(directory: str, *names: str) -> list[str]:
    return [Path(directory, name).read_text().strip() for name in names]
