"""Part (d): building a layer and a slightly changed one, beside mkfs.erofs and an archive.

The archive is what a container image gets from copying the workspace into it: a tar.gz of all of
it, again for each version.
"""

from __future__ import annotations

import random
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from dsec_bench.images import disk, selection
from dsec_bench.images.bed import MIB, Bed, TaskError
from dsec_bench.images.hosts import Host, host
from dsec_bench.images.selection import Selection
from dsec_bench.report import Row
from dsec_bench.stats import Round, Summary

SIZE = 190 << 20
FILE_MAX = 4 << 20
VERSIONS = 5  # after the first one
SLOW_VERSIONS = 1  # of the archive, which is made anew each time, whatever has changed
EDITED, ADDED, REMOVED = 20, 5, 5
OURS = "dsec layer"
ARCHIVE = "tar.gz of a container image"


def build(bed: Bed) -> None:
    """Import a workspace and its next versions, in every way."""
    steps = bed.context.steps
    steps.now("workspace for the builds")
    tree = bed.folder / "workspace"
    size = make_tree(tree, SIZE)
    entries = sum(1 for _ in tree.rglob("*"))
    bed.context.report.run("workspace", mib=size / MIB, entries=entries)
    ways: dict[str, Callable[[int], int]] = {}
    with host(0, "") as made:
        ways[OURS] = lambda version: ours(made, tree, version)
        if shutil.which("mkfs.erofs") is not None:
            ways["mkfs.erofs"] = lambda version: mkfs(tree, bed.folder, version, ())
            if compresses():
                ways["mkfs.erofs -zlz4"] = lambda version: mkfs(
                    tree, bed.folder, version, ("-zlz4",)
                )
        ways[ARCHIVE] = lambda version: archive(tree, bed.folder, version)
        steps.expect((len(ways) - 1) * (VERSIONS + 1) + SLOW_VERSIONS + 1)
        rows = turns(bed, tree, ways)
    for name, (grown, seconds) in rows.items():
        told = f"first {grown[0] / MIB:,.1f} MiB in {seconds[0]:.2f} s, "
        told += f"then {statistics.median(grown[1:]) / MIB:,.2f} MiB"
        times = [second * 1e3 for second in seconds[1:]]
        rate = 1e3 / statistics.median(times)
        row = Row("build of a changed version", name, Summary.of([Round(rate, times)]), 1, told)
        bed.context.report.row(row)
    grown = rows[OURS][0]
    bed.context.report.figure("small_change_store_mib", statistics.median(grown[1:]) / MIB)


def turns(
    bed: Bed, tree: Path, ways: dict[str, Callable[[int], int]]
) -> dict[str, tuple[list[int], list[float]]]:
    """Return, of each way, the bytes that each version took and the seconds."""
    rows: dict[str, tuple[list[int], list[float]]] = {name: ([], []) for name in ways}
    for version in range(VERSIONS + 1):
        if version:
            change(tree, version)
        for name, way in ways.items():
            if name == ARCHIVE and version > SLOW_VERSIONS:
                continue
            bed.context.steps.now(f"build {version + 1} of {VERSIONS + 1}: {name}")
            begin = time.perf_counter()
            grown = way(version)
            seconds = time.perf_counter() - begin
            rows[name][0].append(grown)
            rows[name][1].append(seconds)
            bed.context.report.run(
                "build", way=name, version=version, mib=grown / MIB, seconds=seconds
            )
            bed.context.steps.done()
    return rows


def ours(made: Host, tree: Path, version: int) -> int:
    """Import a version through the daemon; return by how much its store grew."""
    store = made.state / "var" / "store"
    before = disk.occupied(store)
    layers = made.sdk.client.layers
    made.sdk.run(layers.import_(f"workspace/bench:{version + 1}", str(tree)))
    return disk.occupied(store) - before


def compresses() -> bool:
    """Whether this mkfs.erofs was built with lz4."""
    done = subprocess.run(["mkfs.erofs", "--help"], capture_output=True, text=True)
    return "lz4" in done.stdout + done.stderr


def mkfs(tree: Path, folder: Path, version: int, options: tuple[str, ...]) -> int:
    """Make an EROFS image of a version; return its size."""
    image = folder / f"image-{version}.erofs"
    return _made(image, ["mkfs.erofs", "--quiet", "-T0", *options, str(image), str(tree)])


def archive(tree: Path, folder: Path, version: int) -> int:
    """Make the layer of a container image of a version; return its size."""
    file = folder / f"layer-{version}.tar.gz"
    return _made(file, ["tar", "--create", "--gzip", "--file", str(file), "-C", str(tree), "."])


def _made(file: Path, command: list[str]) -> int:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise TaskError(f"{command[0]}: {done.stderr.strip()[-300:]}")
    try:
        return file.stat().st_size
    finally:
        file.unlink()


def make_tree(tree: Path, size: int) -> int:
    """Copy a sample of the host's files to `tree`, about `size` bytes; return how many."""
    sample = Selection()
    for path in sorted(selection.below(Path("/usr")), key=selection.drawn):
        if sample.size >= size:
            break
        if not path.is_symlink() and path.stat().st_size <= FILE_MAX:
            sample.add(path)
    for name, length in sample.paths.items():
        if length:
            target = tree / name.removeprefix("/usr/")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(name, target)
    return sample.size


def change(tree: Path, version: int) -> None:
    """Make the next version: some files edited at their end, a few more, a few less."""
    draw = random.Random(version)
    files = sorted(path for path in tree.rglob("*") if path.is_file())
    chosen = draw.sample(files, EDITED + REMOVED)
    for path in chosen[:EDITED]:
        with path.open("ab") as file:
            file.write(b"# version %d\n" % version)
    for path in chosen[EDITED:]:
        path.unlink()
    for number in range(ADDED):
        (tree / f"added-{version}-{number}").write_bytes(draw.randbytes(8192))
