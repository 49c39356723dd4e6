"""The ways that need the whole environment on the disk before a sandbox can start: extraction of a
tar.gz, and a copy of a directory. No network is counted for either, and no daemon: the task runs in
namespaces and a root directory of its own, with nothing that would slow it down.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from pathlib import Path

from dsec_bench.images import disk
from dsec_bench.images.bed import Bed, TaskError, Timed
from dsec_bench.images.workload import TASK

TASK_S = 600.0
# mounts of a namespace that ends with its only process: nothing is left on the host
ENTER = (
    'mount --rbind /dev "$0/dev" && mount -t proc proc "$0/proc" && exec chroot "$0" /bin/sh "$@"'
)


def inside(root: Path, *words: str) -> None:
    """Run sh with `words` in the directory `root`. Raises TaskError."""
    namespaces = ["unshare", "--mount", "--pid", "--fork", "--kill-child"]
    command = [*namespaces, "sh", "-c", ENTER, str(root), *words]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TASK_S
    )
    if done.returncode != 0:
        text = (done.stderr or done.stdout)[-300:]
        raise TaskError(f"{' '.join(words)}: {done.returncode}: {text}")


def extract(archive: Path, root: Path) -> None:
    """Unpack a tar.gz. Raises TaskError."""
    root.mkdir(parents=True)
    command = ["tar", "--extract", "--gzip", "--file", str(archive), "--directory", str(root)]
    done = subprocess.run([*command, "--numeric-owner"], capture_output=True, text=True)
    if done.returncode != 0:
        raise TaskError(f"tar: {done.stderr[-300:]}")


def copy(source: Path, root: Path) -> None:
    """Copy a directory, every byte of it. Raises TaskError."""
    command = ["cp", "--archive", "--reflink=never", str(source), str(root)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise TaskError(f"cp: {done.stderr[-300:]}")


def extraction(bed: Bed, root: Path) -> Timed:
    """Time a sandbox made by unpacking the archive to `root`, which stays."""
    size = bed.environment.facts.archive_bytes
    return _timed(bed, root, lambda: extract(bed.environment.archive, root), size)


def full_copy(bed: Bed, source: Path) -> Timed:
    """Time a sandbox made by copying the directory `source`."""
    root = bed.folder / "copy"
    try:
        size = bed.environment.facts.content_bytes
        return _timed(bed, root, lambda: copy(source, root), size)
    finally:
        remove(root)


def _timed(bed: Bed, root: Path, prepare: object, fetched: int) -> Timed:
    assert callable(prepare)
    disk.settle()
    written, device = disk.own_written(), disk.device_written(bed.folder)
    begin = time.perf_counter()
    prepare()
    inside(root, "-c", "true")
    ready = time.perf_counter() - begin
    inside(root, TASK.path)
    total = time.perf_counter() - begin
    grown = disk.own_written() - written
    disk.settle()
    now = disk.device_written(bed.folder)
    on_device = None if device is None or now is None else now - device
    return Timed(ready, total, grown, fetched, on_device)


def remove(root: Path) -> None:
    shutil.rmtree(root, ignore_errors=True)
