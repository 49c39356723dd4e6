"""The peers' table, the bundle they get, and the program that runs them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from dsec_bench import cgroups, toolchain
from dsec_bench.peers import drivers, oci, stage
from dsec_bench.peers.drivers import PEERS, Peer
from dsec_bench.toolchain import ToolchainError, compile_c


@pytest.fixture(scope="module")
def load() -> str:
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    return str(compile_c("load.c", "-Wall", "-Wextra", "-Werror"))


def run(load: str, *argv: str) -> list[list[int]]:
    done = subprocess.run([load, *argv], capture_output=True, text=True, check=True)
    return [[int(word) for word in line.split()] for line in done.stdout.splitlines()]


def test_a_missing_peer_gives_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drivers.shutil, "which", lambda name: None)
    for name, kind in PEERS.items():
        reason = kind().probe()
        assert "not found" in reason, name
        assert "install" in reason, name


@pytest.mark.parametrize("name", PEERS)
def test_every_peer_runs_the_command_on_the_common_root(name: str) -> None:
    arena = cast(Any, SimpleNamespace(command=["/bin/true"], state=Path("/state")))
    argv = PEERS[name]().argv(arena)
    assert all(isinstance(word, str) for word in argv)
    if PEERS[name].root == "bundle":
        assert "--bundle=@BUNDLE@" in argv
    else:
        assert argv[-1] == "/bin/true"
    if PEERS[name].root == "overlay":
        assert any("@ROOT@" in word for word in argv)


def test_the_bundle_limits_and_isolates_like_ours() -> None:
    config = oci.configuration(["/bin/true"])
    linux = config["linux"]
    assert {space["type"] for space in linux["namespaces"]} == {
        "pid", "mount", "ipc", "uts", "network", "cgroup",
    }  # fmt: skip
    assert linux["resources"]["memory"]["limit"] == 256 << 20
    assert linux["resources"]["cpu"] == {"quota": 100_000, "period": 100_000}
    assert "CAP_SYS_ADMIN" not in config["process"]["capabilities"]["bounding"]


def test_load_runs_the_count_asked_for(load: str) -> None:
    operations = run(load, "-c", "3", "-n", "7", "--", "/bin/true")
    assert len(operations) == 7
    assert {worker for worker, *_ in operations} <= {0, 1, 2}
    assert all(end > start for _, start, end, _ in operations)
    assert all(status == 0 for *_, status in operations)


def test_load_stops_at_the_deadline_but_runs_at_least_once(load: str) -> None:
    assert len(run(load, "-c", "2", "-n", "1000", "-s", "0", "--", "/bin/true")) == 2


def test_load_tells_exit_status_and_signal(load: str) -> None:
    assert [op[3] for op in run(load, "-n", "1", "--", "/bin/sh", "-c", "exit 5")] == [5]
    assert [op[3] for op in run(load, "-n", "1", "--", "/bin/sh", "-c", "kill -9 $$")] == [137]
    assert [op[3] for op in run(load, "-n", "1", "--", "/no/such/program")] == [127]


def test_load_gives_each_operation_a_name_of_its_own(load: str, tmp_path: Path) -> None:
    argv = ["/bin/sh", "-c", f"mkdir {tmp_path}/@ID@"]
    run(load, "-c", "4", "-n", "20", "--", *argv)
    assert len(list(tmp_path.iterdir())) == 20


def test_load_reaps_orphans_and_does_not_wait_for_long_ones(load: str) -> None:
    operations = run(load, "-n", "2", "--", "/bin/sh", "-c", "sleep 0.1 & exit 0")
    assert all(status == 0 for *_, status in operations)


def test_compiling_says_what_is_wrong(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(toolchain, "__file__", str(tmp_path / "toolchain.py"))
    with pytest.raises(ToolchainError, match="missing"):
        compile_c("broken.c")
    (tmp_path / "broken.c").write_text("int main(void) { return }")
    with pytest.raises(ToolchainError, match="does not compile"):
        compile_c("broken.c")
    (tmp_path / "broken.c").write_text("int main(void) { return 3; }")
    assert subprocess.run([compile_c("broken.c")]).returncode == 3
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(ToolchainError, match="no C compiler"):
        compile_c("broken.c")


def test_an_unknown_root_owner_is_impossible() -> None:
    assert {kind.root for kind in PEERS.values()} <= {"own", "overlay", "bundle"}
    assert all(issubclass(kind, Peer) and kind.package for kind in PEERS.values())


@pytest.mark.root
@pytest.mark.parametrize("name", ["crun", "bubblewrap", "unshare"])
def test_an_arena_leaves_nothing_behind(name: str, tmp_path: Path) -> None:
    """Also when its round is cut short: closing kills the PID namespace with all in it."""
    from dsec_bench.rootfs import RootfsError, small_root

    reason = PEERS[name]().probe()
    if reason:
        pytest.skip(reason)
    mounts = Path("/proc/self/mountinfo").read_text()
    try:
        with small_root() as root, stage.stages([name], root) as (opened, reasons):
            assert reasons == {}
            result = opened[0].round(2, 0.3)
            assert result.failures == 0, result.error
            assert result.latencies_ms
            # a long round, not waited for
            opened[0]._send({"concurrency": 2, "count": 10**6, "seconds": 60})
    except RootfsError as error:
        pytest.skip(str(error))
    assert Path("/proc/self/mountinfo").read_text() == mounts
    for hierarchy in cgroups.hierarchies():
        assert not (hierarchy / cgroups.own_group()).exists()
