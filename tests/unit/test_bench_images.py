"""What `dsec-bench images` computes, promises and serves, without a host to measure."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from dsec_bench import leftovers
from dsec_bench.bench import Context, Options
from dsec_bench.images import IMAGES, builds, disk, environment, ondemand, parts, server, snapshots
from dsec_bench.images import selection as choosing
from dsec_bench.images.bed import MIB, Timed, note, summary
from dsec_bench.images.hosts import Buckets
from dsec_bench.images.plot import medians
from dsec_bench.images.selection import Selection
from dsec_bench.images.server import Client, read_range
from dsec_bench.images.workload import FILES, TASK, WORKLOADS
from dsec_bench.progress import Steps
from dsec_bench.report import Report

from dsecd import config
from dsecd.images.stores.abc import Conflict
from dsecd.images.stores.opening import open_store
from libdsec.errors import NotFound

PROMISED = {
    "second_sandbox_extra_ms", "first_uncached_ready_ms", "disk_writes_vs_tar",
    "disk_writes_vs_copy", "prefetch_5ms_vs_local", "small_change_store_mib", "checkpoint_ms",
    "rollback_ms", "branch100_s", "pack_diff_1mb_ms",
}  # fmt: skip
DIGEST = "ab" * 32


def test_every_promised_figure_has_a_part_that_measures_it() -> None:
    assert set(IMAGES.figures) == PROMISED
    assert len(IMAGES.figures) == len(PROMISED)
    assert set(IMAGES.parts) == set(parts.PARTS)


def test_a_running_daemon_is_not_measured() -> None:
    report = Report("images", IMAGES.figures, {})
    with Steps() as steps:
        IMAGES.run(Context(Options(endpoint="unix:/nowhere"), report, steps))
    assert set(report.missing) == PROMISED
    assert "not --endpoint" in report.missing["checkpoint_ms"]


# --- figures --------------------------------------------------------------------------------------


def timed(ready: float, work: float, written: int = 0) -> Timed:
    return Timed(ready, ready + work, written * MIB)


def test_figures_are_medians_and_the_prefetch_is_judged_in_pairs() -> None:
    taken = {
        ondemand.UNCACHED: [timed(0.09, 1, 80), timed(0.08, 1, 90), timed(0.5, 1, 85)],
        ondemand.AHEAD: [timed(0.2, 1.8), timed(0.2, 2.8), timed(0.2, 0.8)],
        ondemand.LOCAL: [timed(0.0, 1.0), timed(0.0, 2.0), timed(0.0, 2.0)],
        ondemand.TAR: [timed(9, 1, 1000)],
        ondemand.COPY: [timed(9, 1, 850)],
    }
    figures = ondemand.derive(taken)
    assert figures["first_uncached_ready_ms"] == pytest.approx(90)
    assert figures["disk_writes_vs_tar"] == pytest.approx(0.085)
    assert figures["disk_writes_vs_copy"] == pytest.approx(0.1)
    assert figures["prefetch_5ms_vs_local"] == pytest.approx(1.5)  # of 2.0, 1.5 and 0.5
    assert set(figures) == set(parts.PARTS["environment"][0])


def test_a_row_has_ready_and_work_apart() -> None:
    runs = [timed(0.1, 1.0, 10), timed(0.3, 3.0, 30), timed(0.2, 2.0, 20)]
    made = summary(runs)
    assert made.steps_ms == pytest.approx({"ready": 200, "work": 2000})
    assert made.p50_ms == pytest.approx(2200)
    assert note(runs) == "MiB: 20 written, 0 fetched"


def test_extra_of_second_sandboxes_is_paired() -> None:
    assert ondemand.paired_extra([5.0, 9.0, 7.0], [4.0, 4.0, 4.0]) == pytest.approx(3.0)


def test_what_the_client_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots.Sandbox, "checkpoint", None, raising=False)
    assert snapshots.lacks("checkpoint") == "libdsec's Sandbox has no checkpoint() yet"
    assert snapshots.lacks("pack_diff") == ""


def test_dirty_bytes_are_dealt_out_to_the_files() -> None:
    command = snapshots.EXTENT.command()
    assert "range(20000)" in command
    assert f"urandom({10 * MIB // 20000})" in command


def test_plots_take_medians_of_runs() -> None:
    report = Report("images", (), {})
    for way, mib in (("a", 1.0), ("a", 3.0), ("a", 2.0), ("b", None)):
        report.run("environment run", way=way, written_mib=mib)
    assert medians(report, "environment run", "way", "written_mib") == {"a": 2.0}


# --- bytes written --------------------------------------------------------------------------------


def test_growth_counts_new_processes_whole() -> None:
    assert disk.growth({1: 100, 2: 50}, {1: 130, 3: 7}) == 37


def test_descendants_are_found() -> None:
    assert os.getpid() in disk.descendants(os.getppid())


def test_processes_of_a_daemon_whose_bench_was_killed_are_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leftovers, "TEMPORARY", tmp_path)
    code = "import time; time.sleep(60)"
    ours, others = (
        subprocess.Popen([sys.executable, "-c", code, f"{tmp_path}/dsec-bench-{name}-x/config"])
        for name in ("1-0", "1-01")
    )
    # exec(2) closes the descriptor that Popen waits for before it shows the new arguments
    for process in (ours, others):
        while str(tmp_path) not in Path(f"/proc/{process.pid}/cmdline").read_text():
            time.sleep(0.001)
    try:
        assert leftovers.processes_of("dsec-bench-1-0") == {ours.pid}
        ender = threading.Thread(target=ours.wait)  # its parent is this process: it has to reap
        ender.start()
        assert leftovers.end_processes("dsec-bench-1-0") == 1
        ender.join()
        assert others.poll() is None
    finally:
        for process in (ours, others):
            process.kill()
            process.wait()


def test_hard_links_are_counted_once(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 8192)
    (tmp_path / "b").hardlink_to(tmp_path / "a")
    assert disk.occupied(tmp_path) == (tmp_path / "a").stat().st_blocks * 512


# --- environment ----------------------------------------------------------------------------------


def test_a_selection_takes_what_links_lead_to_and_directories_above(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choosing, "PLACES", (tmp_path,))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/tool-1").write_text("tool")
    (tmp_path / "bin/tool").symlink_to("tool-1")
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "secret").chmod(0o600)
    (tmp_path / "out").symlink_to("/proc/version")
    chosen = Selection()
    assert chosen.add(tmp_path / "bin/tool")
    assert not chosen.add(tmp_path / "secret")
    chosen.add(tmp_path / "out")
    assert {path for path in chosen.paths if path.startswith(f"{tmp_path}/")} == {
        f"{tmp_path}/{name}" for name in ("bin", "bin/tool", "bin/tool-1", "out")
    }
    assert chosen.size == 4
    assert str(tmp_path) in chosen.paths


def test_slices_have_no_file_in_common_and_keep_to_their_size() -> None:
    paths = {f"/usr/{number}": 10 + number % 7 for number in range(1000)}
    paths["/usr/huge"] = 900
    groups = environment.cut(paths, 5, 1000)
    flat = [path for group in groups for path in group]
    assert len(flat) == len(set(flat))
    assert "/usr/huge" not in flat
    assert all(900 < sum(paths[path] for path in group) <= 1000 for group in groups)


def test_what_a_host_lacks_is_filled_up(tmp_path: Path) -> None:
    made = environment.synthesise(tmp_path, 3 * MIB)
    assert made >= 3 * MIB
    assert sum(p.stat().st_size for p in tmp_path.rglob("*") if p.is_file()) == made
    assert environment.synthesise(tmp_path / "none", 0) == 0


def test_workloads_without_their_tools_are_replayed() -> None:
    assert WORKLOADS[0] is TASK
    for workload in WORKLOADS:
        assert workload.script in workload.text(lambda _: True)
        assert workload.replay in workload.text(lambda _: False)
        for name in FILES:
            assert f"/{name}" not in workload.text(lambda _: False)


def test_a_changed_version_differs_in_few_files(tmp_path: Path) -> None:
    for number in range(100):
        (tmp_path / str(number)).write_text("content\n")
    builds.change(tmp_path, 1)
    left = [path for path in tmp_path.iterdir() if path.name.isdigit()]
    assert len(left) == 100 - builds.REMOVED
    assert sum("version 1" in path.read_text() for path in left) == builds.EDITED
    assert len(list(tmp_path.glob("added-1-*"))) == builds.ADDED


# --- the store server -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [("bytes=0-9", (0, 10)), ("bytes=90-199", (90, 100)), ("bytes=5-", (5, 100)),
     ("bytes=-10", (90, 100)), ("bytes=100-", None)],
)  # fmt: skip
def test_ranges(text: str, expected: tuple[int, int] | None) -> None:
    assert read_range(text, 100) == expected


@pytest.mark.parametrize("text", ["bytes=-", "lines=1-2", "bytes=a-b"])
def test_ranges_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match=r".*"):
        read_range(text, 100)


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Have obstore start its threads, which end with the process, before leaks are counted."""

    async def once() -> None:
        store = await open_store("s3://plain", made.options(), {})
        await store.close()

    folder = tmp_path_factory.mktemp("runtime")
    (folder / "plain").mkdir()
    with server.serving(folder) as client:
        made = Buckets(client, folder)
        asyncio.run(once())


@pytest.fixture
def buckets(runtime: None, tmp_path: Path) -> Iterator[Buckets]:
    (tmp_path / "root/plain").mkdir(parents=True)
    with server.serving(tmp_path / "root") as client:
        yield Buckets(client, tmp_path)


async def test_the_daemons_store_works_on_the_server(buckets: Buckets, tmp_path: Path) -> None:
    store = await open_store("s3://plain/dsec", buckets.options(), {})
    try:
        assert {feature.name for feature in store.features if feature.available} == {
            "store_create", "store_swap",
        }  # fmt: skip
        key = f"blobs/{DIGEST}"
        assert await store.write(key, b"0123456789")
        assert not await store.write(key, b"0123456789")
        before = await asyncio.to_thread(buckets.server.counters)
        assert await store.read(key, 2, 5) == b"234"
        assert await store.read(key) == b"0123456789"
        assert await store.size(key) == 10
        after = await asyncio.to_thread(buckets.server.counters)
        assert after["blobs"] - before["blobs"] == 13  # a HEAD sends nothing
        assert after["requests"] - before["requests"] == 3
        with pytest.raises(NotFound):
            await store.read(f"blobs/{'cd' * 32}")
        version = await store.swap_name("names/base%2Fx%3A1", b"one", None)
        with pytest.raises(Conflict):
            await store.swap_name("names/base%2Fx%3A1", b"two", "0" * 32)
        await store.swap_name("names/base%2Fx%3A1", b"two", version)
        listed = [entry.key async for entry in store.list("names/")]
        assert listed == ["names/base%2Fx%3A1"]
        assert [entry.size async for entry in store.list("blobs/")] == [10]
        await store.delete(key)
        assert await store.size(key) is None
    finally:
        await store.close()


def status(url: str) -> int:
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(url, timeout=10)
    caught.value.close()
    return caught.value.code


def test_the_latency_is_that_of_every_answer(buckets: Buckets) -> None:
    def ask() -> float:
        begin = time.perf_counter()
        assert status(f"{buckets.server.endpoint}/plain/none") == 404
        return time.perf_counter() - begin

    buckets.server.set_latency(100)
    assert ask() >= 0.1
    buckets.server.set_latency(0)
    assert min(ask() for _ in range(5)) < 0.1


def test_nothing_outside_the_buckets_is_served(buckets: Buckets, tmp_path: Path) -> None:
    (tmp_path / "outside").write_text("outside")
    for path in ("%2e%2e/outside", "plain/%2e%2e/%2e%2e/outside", f"/{tmp_path}/outside"):
        assert status(f"{buckets.server.endpoint}/{path}") in (400, 404)


def test_the_daemon_takes_the_stores_section() -> None:
    client = Client(Path("/nowhere"), 1234)
    made = object.__new__(Buckets)
    made.server = client
    made._credentials = Path("/var/tmp/credentials")
    text = made.section("plain")
    parsed = config.parse(text)
    assert parsed.store.url == "s3://plain/dsec"
    assert tomllib.loads(text)["store"]["options"] == made.options()
