"""What `dsec-bench create` computes, promises and accepts, without a host to measure."""

from __future__ import annotations

import asyncio
import errno
import itertools
from pathlib import Path

import pytest
from click.testing import CliRunner
from dsec_bench import main as command_line
from dsec_bench.bench import Context, Options
from dsec_bench.create import CREATE, parts
from dsec_bench.create.daemon import UID_RANGES, configuration
from dsec_bench.create.floor import as_round
from dsec_bench.create.floor import command as floor_command
from dsec_bench.create.growth import Level, idle_mib
from dsec_bench.create.image import Root, place
from dsec_bench.create.memory import used_bytes
from dsec_bench.progress import Steps
from dsec_bench.report import Report
from dsec_bench.stats import Summary

from dsecd import config
from dsecd.images.importing import import_layer
from dsecd.images.library import Named, open_library
from dsecd.images.local import Direct, Local

PROMISED = {
    "sdk_vs_crun", "sdk_vs_bubblewrap", "sdk_vs_docker", "native_vs_crun", "native_vs_floor",
    "burst2000_succeeded", "p99_live3000_vs_live0", "idle_mib_per_sandbox", "roundtrip_ms",
    "readopt500_s",
}  # fmt: skip
MIB = 1 << 20


def test_every_promised_figure_has_a_part_that_measures_it() -> None:
    assert set(CREATE.figures) == PROMISED
    measured = {figure for figures, _ in parts.PARTS.values() for figure in figures}
    assert measured == PROMISED


@pytest.mark.parametrize("serial", [0, 1, 2])
def test_our_daemons_share_nothing_with_a_default_one(serial: int) -> None:
    ours = config.parse(configuration("bench-x", Path("/run/x"), Path("/var/tmp/x"), serial))
    theirs = config.Config()
    assert ours.cgroup.name != theirs.cgroup.name
    assert ours.paths.runtime != theirs.paths.runtime
    assert ours.network.pool4 != theirs.network.pool4
    assert ours.network.pool6 != theirs.network.pool6
    top = theirs.pools.uid_range_start + theirs.pools.uid_range_count * config.RANGE_SIZE
    assert ours.pools.uid_range_start >= top
    assert ours.pools.uid_range_count == UID_RANGES
    assert ours.limits.sandboxes > max(parts.LIVE) + parts.CONCURRENCY


def test_memory_in_use_counts_tmpfs_but_no_page_cache() -> None:
    table = {"MemTotal": 1000, "MemFree": 300, "Buffers": 50, "Cached": 200, "Shmem": 80}
    assert used_bytes(table) == 1000 - 300 - 50 - 200 + 80


def test_idle_memory_is_the_growth_per_sandbox() -> None:
    first, last = Level(0, [], 100 * MIB), Level(1000, [], 600 * MIB)
    assert idle_mib(first, last) == pytest.approx(0.5)
    assert idle_mib(Level(0, [], None), last) is None
    assert idle_mib(last, last) is None


def layer(state: Path, tree: Path) -> Root:
    async def make() -> tuple[Named, Local]:
        async with open_library(state) as library:
            made = await import_layer(library, "base/x:1", str(tree))
            return made, await Direct(state / "store").provide(made.manifest)

    made, local = asyncio.run(make())
    return Root("test", tree, state / "store", made.manifest, local)


def resolved(state: Path, name: str) -> Named:
    async def resolve() -> Named:
        async with open_library(state) as library:
            return await library.resolve(name)

    return asyncio.run(resolve())


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "tree"
    root.mkdir()
    (root / "f").write_bytes(b"content" * 10_000)
    return root


def test_a_layer_is_placed_by_links(tmp_path: Path, tree: Path) -> None:
    root = layer(tmp_path / "host", tree)
    place(root, tmp_path / "ours", "base/debian:12")
    assert resolved(tmp_path / "ours", "base/debian:12").manifest == root.manifest
    for path in (root.local.image, *root.local.devices):
        ours = tmp_path / "ours" / Path(path).relative_to(tmp_path / "host")
        assert ours.samefile(path)


def test_a_layer_on_another_file_system_is_imported_from_its_tree(
    tmp_path: Path, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    root = layer(tmp_path / "host", tree)
    monkeypatch.setattr("dsec_bench.create.image.link_layer", refuse)
    place(root, tmp_path / "ours", "base/debian:12")
    assert resolved(tmp_path / "ours", "base/debian:12").digest == root.manifest.digest


def test_the_bare_loop_gets_every_blob() -> None:
    argv = floor_command(Path("/f"), Path("/g"), Local("d", "/image", ("/blob1", "/blob2")))
    pairs = list(itertools.pairwise(argv))
    assert [value for option, value in pairs if option == "-b"] == ["/blob1", "/blob2"]
    assert ("-i", "/image") in pairs


@pytest.mark.leaky("libuv keeps one signal pipe per process")
def test_a_run_without_daemon_reports_every_figure_as_missing(tmp_path: Path) -> None:
    report = Report("create", CREATE.figures, {})
    options = Options(quick=True, endpoint=f"unix:{tmp_path}/no.sock")
    with Steps() as steps:
        CREATE.run(Context(options, report, steps))
    assert set(report.missing) == PROMISED
    assert all("no.sock does not exist" in reason for reason in report.missing.values())
    assert not report.complete


def test_the_command_refuses_unknown_peers_and_parts() -> None:
    runner = CliRunner()
    result = runner.invoke(command_line.main, ["create", "--peers", "crun,rkt"])
    assert result.exit_code == 2
    assert "no such peer: rkt" in result.output
    assert runner.invoke(command_line.main, ["create", "--only", "nothing"]).exit_code == 2


@pytest.mark.leaky("libuv keeps one signal pipe per process")
def test_a_missing_figure_is_exit_code_one(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    argv = ["create", "--endpoint", f"unix:{tmp_path}/no.sock", "--json", str(file)]
    result = CliRunner().invoke(command_line.main, argv)
    assert result.exit_code == 1
    assert '"figures": {}' in file.read_text()


def test_the_bare_loop_gives_medians_and_a_count() -> None:
    answer = {
        "operations": 80,
        "per_second": 1000.0,
        "p50_us": {"clone": 90.0, "create": 500.0, "command": 200.0, "destroy": 300.0},
    }
    result = as_round(answer)
    assert result.rate == 1000
    assert result.latencies_ms == [1.0]
    assert result.steps_ms["first command"] == [0.2]
    assert result.steps_ms["create: clone"] == [0.09]
    assert Summary.of([result, result]).operations == 160
