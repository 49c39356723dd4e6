"""The cgroup drivers over a recording twin of the kernel's files."""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path

import pytest

from dsecd.host import mountinfo
from dsecd.host.cgroup import (
    HybridDriver,
    SandboxCgroup,
    Slot,
    UnifiedDriver,
    Usage,
    detect,
    members_of,
)
from dsecd.host.kernelfs import KernelFiles
from libdsec.errors import AlreadyExists, Internal, InvalidArgument, NotFound, Unsupported
from tests.unit.cgroup_lab import V1_FILES, TwinFiles, detected, placed, read


@pytest.fixture
def v2(tmp_path: Path) -> TwinFiles:
    return TwinFiles(tmp_path, "v2")


@pytest.fixture
def hybrid(tmp_path: Path) -> TwinFiles:
    return TwinFiles(tmp_path, "hybrid")


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
    driver, slot, cgroup = placed(hybrid)
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


# --- whom memory is charged to ----------------------------------------------------------------

MOUNTS = """\
30 25 0:27 / /sys/fs/cgroup rw - tmpfs tmpfs rw
31 30 0:28 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw
32 30 0:29 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct
33 30 0:30 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory
"""
OF_PART = "31 30 0:28 /outer /elsewhere rw - cgroup2 cgroup2 rw\n"


@pytest.mark.parametrize(
    ("mounts", "text", "members"),
    [
        (MOUNTS, "4:cpu,cpuacct:/a\n3:memory:/dsec/b\n0::/c\n", "/sys/fs/cgroup/memory/dsec/b"),
        (MOUNTS, "4:cpu,cpuacct:/a\n0::/dsec/c\n", "/sys/fs/cgroup/unified/dsec/c"),
        (OF_PART, "0::/outer/dsec/c\n", "/elsewhere/dsec/c"),
        (OF_PART, "0::/other/c\n", None),
        (OF_PART, "3:memory:/outer/b\n0::/outer/c\n", None),
    ],
)
def test_memory_is_charged_where_its_controller_is(
    mounts: str, text: str, members: str | None
) -> None:
    found = members_of(text, mountinfo.parse(mounts))
    assert found == (Path(members, "cgroup.procs") if members else None)
