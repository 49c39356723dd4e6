"""The census itself: what it must see."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path

import pytest

from tests import leaks


def test_a_descriptor_and_a_process_are_seen() -> None:
    scope = leaks.Scope(host=False)
    before = leaks.take(scope)
    reader, writer = os.pipe()
    with subprocess.Popen(["sleep", "60"]) as child:
        # exec(2) closes the descriptor that Popen waits for before it shows the new arguments
        while not Path(f"/proc/{child.pid}/cmdline").read_text().startswith("sleep"):
            time.sleep(0.001)
        found = leaks.left_over(before, leaks.take(scope))
        child.kill()
    os.close(reader)
    os.close(writer)
    assert any(line.startswith("process:") and "sleep 60" in line for line in found)
    assert "descriptor: pipe (×2)" in found
    assert leaks.left_over(before, leaks.take(scope)) == []


def test_only_what_is_new_is_named() -> None:
    before = {"mount": Counter({"/run/dsec": 1})}
    after = {"mount": Counter({"/run/dsec": 2, "/run/dsec/x": 1})}
    assert leaks.left_over(before, after) == ["mount: /run/dsec", "mount: /run/dsec/x"]
    assert leaks.left_over(after, before) == []


@pytest.mark.root
def test_a_cgroup_and_a_directory_are_seen(test_name: str) -> None:
    """A create that failed half-way leaked its cgroup."""
    scope = leaks.Scope(host=True, own=test_name)
    before = leaks.take(scope)
    root = next(p for p in ("/sys/fs/cgroup/unified", "/sys/fs/cgroup") if Path(p).is_dir())
    made = [Path(root, test_name), Path("/run", test_name)]
    for path in made:
        path.mkdir()
    try:
        found = leaks.left_over(before, leaks.take(scope))
    finally:
        for path in made:
            path.rmdir()
    assert f"cgroup: {root}/{test_name}" in found
    assert f"directory: /run/{test_name}" in found


@pytest.mark.root
@pytest.mark.parametrize(("name", "uid"), [("dsec-orphan", 0), ("sleep", leaks.FIRST_UID)])
def test_a_program_of_ours_that_is_no_child_is_seen(name: str, uid: int, tmp_path: Path) -> None:
    program = shutil.copy("/bin/sleep", tmp_path / name)
    scope = leaks.Scope(host=True)
    before = leaks.take(scope)
    there = subprocess.run(
        ["sh", "-c", '"$0" 60 >&- 2>&- & echo $!', "/bin/sleep" if uid else program],
        user=uid, check=True, capture_output=True, text=True,
    )  # fmt: skip
    pid = int(there.stdout)
    while not Path(f"/proc/{pid}/cmdline").read_text().endswith("\x0060\x00"):
        time.sleep(0.001)
    found = leaks.left_over(before, leaks.take(scope))
    os.kill(pid, signal.SIGKILL)
    assert any(line.startswith(f"process: {pid} ") for line in found)
