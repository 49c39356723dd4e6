"""DAMON's sysfs files: what is written, and whose kdamond is left alone."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from dsecd.host.damon import ADMIN, Damon, Scheme, writes
from dsecd.host.kernelfs import KernelFiles
from libdsec.errors import Unsupported, WrongState


class Recorder(KernelFiles):
    """Records what is written, and answers numbers as the kernel would."""

    def __init__(self, kdamonds: int | None = 0) -> None:
        self.numbers = {} if kdamonds is None else {f"{ADMIN}/nr_kdamonds": kdamonds}
        self.written: list[tuple[str, str]] = []
        self.refused = ""

    def number(self, path: str) -> int:
        if path not in self.numbers:
            raise OSError(errno.ENOENT, "No such file or directory", path)
        return self.numbers[path]

    def write(self, path: str, value: str) -> None:
        if self.refused and path.endswith(self.refused):
            raise OSError(errno.EINVAL, "Invalid argument", path)
        self.written.append((path.removeprefix(ADMIN + "/"), value))
        if path.endswith("nr_kdamonds"):
            self.numbers[path] = int(value)
        if (path, value) == (f"{ADMIN}/0/state", "on"):
            self.numbers[f"{ADMIN}/0/pid"] = 4711


@pytest.fixture
def record(tmp_path: Path) -> Path:
    return tmp_path / "damon.pid"


def test_a_kdamond_that_is_there_is_never_touched(record: Path) -> None:
    files = Recorder(kdamonds=1)
    with pytest.raises(Unsupported, match="not ours"):
        Damon(record, files).start(Scheme())
    assert files.written == []


def test_one_that_somebody_else_put_in_the_place_of_ours_is_left_alone(record: Path) -> None:
    files = Recorder()
    damon = Damon(record, files)
    damon.start(Scheme())
    files.numbers[f"{ADMIN}/0/pid"] = 4712
    files.written.clear()
    assert not damon.ours
    for touch in (damon.stop, damon.reclaimed_bytes):
        with pytest.raises(WrongState):
            touch()
    assert files.written == []


def test_a_later_daemon_knows_it_again(record: Path) -> None:
    files = Recorder()
    Damon(record, files).start(Scheme())
    later = Damon(record, files)
    assert later.ours
    later.stop()
    assert not record.exists()
    assert not Damon(record, files).ours


def test_so_is_a_list_that_has_grown(record: Path) -> None:
    files = Recorder()
    damon = Damon(record, files)
    damon.start(Scheme())
    files.numbers[f"{ADMIN}/nr_kdamonds"] = 2
    with pytest.raises(WrongState):
        damon.stop()


def test_start_and_stop_leave_the_list_as_it_was(record: Path) -> None:
    files = Recorder()
    damon = Damon(record, files)
    damon.start(Scheme())
    assert damon.ours
    files.numbers[f"{ADMIN}/0/contexts/0/schemes/0/stats/sz_applied"] = 8192
    assert damon.reclaimed_bytes() == 8192
    damon.stop()
    assert files.written[0] == ("nr_kdamonds", "1")
    assert files.written[-2:] == [("0/state", "off"), ("nr_kdamonds", "0")]
    assert not damon.ours


def test_what_the_kernel_cannot_watch_is_refused_and_undone(record: Path) -> None:
    files = Recorder()
    files.refused = "operations"
    with pytest.raises(Unsupported, match="processes"):
        Damon(record, files).start(Scheme(pids=(7,)))
    assert files.written[-1] == ("nr_kdamonds", "0")


def test_a_kernel_without_damon_says_so(record: Path) -> None:
    assert "CONFIG_DAMON_SYSFS" in Damon(record, Recorder(kdamonds=None)).missing()


def test_counts_come_before_what_they_make() -> None:
    """A directory exists only after its number was written."""
    made = ["contexts/0/"]
    for path, value in writes(Scheme(pids=(7, 8))):
        if path == "contexts/nr_contexts":
            continue
        assert any(path.startswith(prefix) for prefix in made), path
        for counter, below in (("nr_targets", "targets"), ("nr_schemes", "schemes")):
            if path.endswith(counter):
                made += [f"contexts/0/{below}/{n}/" for n in range(int(value))]
    found = dict(writes(Scheme(pids=(7, 8), cold_s=30.0, aggregate_us=2_000_000)))
    assert found["contexts/0/operations"] == "vaddr"
    assert found["contexts/0/targets/1/pid_target"] == "8"
    assert found["contexts/0/schemes/0/access_pattern/age/min"] == "15"
    assert dict(writes(Scheme()))["contexts/0/operations"] == "paddr"
