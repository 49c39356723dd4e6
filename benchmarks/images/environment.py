"""The environment of about 1 GB that everything runs on, made once of the host's own files.

It lies in a cache between runs: the archive that a container image would be, its layers in a store,
and slices of it as images that have nothing in common. The name of the cache tells what it was made
of, so a change of tools or of this code makes another one; older ones are removed.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import importlib.metadata
import json
import os
import platform
import random
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from dsec_bench.images import selection
from dsec_bench.images.selection import Selection
from dsec_bench.images.workload import (
    DIRECTORY,
    FILES,
    PYTEST,
    SITE,
    UNITTEST,
    WORKLOADS,
)
from dsec_bench.progress import Steps

from dsecd.images import importing
from dsecd.images.builder import Recipe
from dsecd.images.library import open_library

CACHE = Path("/var/cache/dsec-bench")
VERSION = 2
SIZE = 1 << 30
SLICES = 10
SLICE_SIZE = 32 << 20
SLICE_SHARE = 20  # every so manieth file of a slice is read
REPOSITORY = 2000  # files under version control in the workspace
NAME = "base/bench:1"
COMPRESS = "gzip -4"
EMPTY = ("proc", "dev", "sys", "run", "root", "var/tmp", "tmp")
SITE_PACKAGES = ("pytest", "pluggy", "iniconfig", "packaging", "pygments")
SLICE_PROGRAMS = ("sh", "cat", "true")


class EnvironmentError(Exception):
    """The environment cannot be made here; the message says what to do."""


class Facts(msgspec.Struct, frozen=True):
    """What is known of a finished cache."""

    content_bytes: int
    archive_bytes: int
    entries: int
    digest: str
    programs: list[str]  # that the workloads find
    slices: list[str]  # names of layers
    made_s: float
    synthetic_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Environment:
    """The cache at `folder`."""

    folder: Path
    facts: Facts

    @property
    def archive(self) -> Path:
        return self.folder / "environment.tar.gz"

    @property
    def store(self) -> Path:
        return self.folder / "store"

    def slice_archive(self, number: int) -> Path:
        return self.folder / f"slice-{number}.tar.gz"

    def has(self, program: str) -> bool:
        return program in self.facts.programs


def key() -> str:
    """Return what the cache depends on, as a name."""
    texts = [str(VERSION), str(SIZE), str(SLICES), str(SLICE_SIZE), platform.platform()]
    texts += [workload.script + workload.replay for workload in WORKLOADS]
    texts += [f"{name}\n{text}" for name, text in FILES.items()]
    for program in selection.PROGRAMS:
        found = shutil.which(program, path=selection.SYSTEM_PATH)
        texts.append(f"{found} {Path(found).stat().st_size}" if found else program)
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


@contextlib.contextmanager
def environment(steps: Steps) -> Iterator[Environment]:
    """Yield the environment, made first when there is none; nobody removes it meanwhile."""
    CACHE.mkdir(parents=True, exist_ok=True, mode=0o700)
    with (CACHE / "lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            steps.now("waiting for another bench that uses the environment")
            fcntl.flock(lock, fcntl.LOCK_EX)
        folder = CACHE / f"images-{key()}"
        found = load(folder)
        if found is None:
            for old in CACHE.glob("images-*"):
                shutil.rmtree(old)
            try:
                found = make(folder, steps)
            except BaseException:
                shutil.rmtree(folder, ignore_errors=True)
                raise
        yield found


def load(folder: Path) -> Environment | None:
    """Return the environment in `folder` when it is whole and its layers can still be read."""
    try:
        facts = msgspec.json.decode((folder / "facts.json").read_bytes(), type=Facts)
        digest = asyncio.run(_digest(folder))
    except Exception:  # of another version of the daemon, or damaged: it is made again
        return None
    return Environment(folder, facts) if digest == facts.digest else None


async def _digest(folder: Path) -> str:
    async with open_library(folder / "state", str(folder / "store")) as library:
        return (await library.resolve(NAME)).digest


def make(folder: Path, steps: Steps) -> Environment:
    """Make archive, layers and slices. Raises EnvironmentError."""
    begin = time.monotonic()
    steps.now("choosing the files of the environment (once)")
    if shutil.which("tar") is None or shutil.which("gzip") is None:
        raise EnvironmentError("making an environment needs tar and gzip")
    (folder / "store").mkdir(parents=True)
    chosen = selection.choose(SIZE)
    staging = folder / "staging"
    stage(staging, chosen)
    synthetic = synthesise(staging / "usr/share/filler", SIZE - chosen.size)
    steps.now("packing the environment (once)")
    archive = folder / "environment.tar.gz"
    pack(archive, folder, list(chosen.paths), staging)
    steps.now("importing the environment (once)")
    digest, content, entries = asyncio.run(_import(folder, "environment", NAME, archive))
    shutil.rmtree(staging)
    names = slices(folder, chosen, steps)
    facts = Facts(
        content_bytes=content,
        archive_bytes=archive.stat().st_size,
        entries=entries,
        digest=digest,
        programs=[name for name in selection.PROGRAMS if chosen.has(name)],
        slices=names,
        made_s=round(time.monotonic() - begin, 1),
        synthetic_bytes=synthetic,
    )
    (folder / "facts.json").write_bytes(msgspec.json.encode(facts))
    return Environment(folder, facts)


# --- what is beside the host's files --------------------------------------------------------------


def stage(staging: Path, chosen: Selection) -> None:
    """Make the directories, accounts, test packages and the workspace of the environment."""
    skeleton(staging)
    has_pytest = copy_site(staging / SITE.removeprefix("/"))
    workspace = staging / DIRECTORY.removeprefix("/")
    project, tasks = workspace / "project", workspace / "tasks"
    for directory in (project, tasks):
        directory.mkdir(parents=True)
    for name, text in FILES.items():
        (project / name).write_text(text)
    tester = PYTEST if has_pytest else UNITTEST
    for workload in WORKLOADS:
        text = workload.text(chosen.has).replace("TESTER", tester)
        (tasks / f"{workload.name}.sh").write_text(text)
    sources = [Path(path) for path in chosen.paths if path.endswith((".py", ".h"))]
    for path in [path for path in sources if path.is_relative_to("/usr")][:REPOSITORY]:
        target = workspace / "library" / path.relative_to("/usr")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    if chosen.has("git"):
        commit(workspace)


def skeleton(root: Path) -> None:
    """Make what every root has: empty directories, accounts, links where /usr is merged."""
    for name in EMPTY:
        (root / name).mkdir(parents=True, exist_ok=True)
    for name in ("tmp", "var/tmp"):
        (root / name).chmod(0o1777)
    (root / "etc").mkdir()
    (root / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
    (root / "etc/group").write_text("root:x:0:\n")
    for name in ("bin", "sbin", "lib", "lib32", "lib64"):
        link = Path("/") / name
        if link.is_symlink():
            (root / name).symlink_to(link.readlink())


def copy_site(target: Path) -> bool:
    """Copy pytest and what it needs from the bench's own packages; False when it is not there."""
    for name in SITE_PACKAGES:
        try:
            files = importlib.metadata.distribution(name).files or []
        except importlib.metadata.PackageNotFoundError:
            if name == "pytest":
                return False
            continue
        for file in files:
            if ".." in file.parts or file.suffix == ".pyc":
                continue
            to = target.joinpath(*file.parts)
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(str(file.locate()), to)
    return True


def commit(workspace: Path) -> None:
    """Make a repository of the workspace, so that `git status` has something to look at."""
    environ = {
        "PATH": selection.SYSTEM_PATH, "HOME": "/nonexistent", "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_AUTHOR_NAME": "bench", "GIT_AUTHOR_EMAIL": "bench@localhost",
        "GIT_COMMITTER_NAME": "bench", "GIT_COMMITTER_EMAIL": "bench@localhost",
    }  # fmt: skip
    # the stat data that changes when files are moved between hosts is not looked at
    settings = ["-c", "core.checkStat=minimal", "-c", "core.trustctime=false"]
    for words in (
        ["init", "--quiet"],
        ["config", "core.checkStat", "minimal"],
        ["config", "core.trustctime", "false"],
        ["add", "--all"],
        ["commit", "--quiet", "--message", "the workspace"],
    ):
        subprocess.run(
            ["git", *settings, *words], cwd=workspace, env=environ, check=True, capture_output=True
        )


def synthesise(folder: Path, size: int) -> int:
    """Fill up what the host does not have, with sizes as file trees have them; return how much."""
    made = 0
    draw = random.Random(0)
    while made < size:
        length = min(int(draw.lognormvariate(9.0, 2.0)) + 1, 32 << 20)
        path = folder / f"{made >> 24:x}" / f"{made:x}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(draw.randbytes((length + 1) // 2).hex().encode()[:length])
        made += length
    return made


# --- archives and layers --------------------------------------------------------------------------


def pack(archive: Path, folder: Path, paths: Sequence[str], staging: Path) -> None:
    """Make a tar.gz of `paths` of the host and all of `staging`."""
    listing = folder / "files"
    own = {
        "/" + path.relative_to(staging).as_posix() for path in staging.rglob("*") if path != staging
    }
    wanted = [path for path in paths if path not in own]
    listing.write_bytes(b"\0".join(os.fsencode(path.removeprefix("/")) for path in wanted))
    command = [
        "tar", "--create", "--file", str(archive), "--use-compress-program", COMPRESS,
        "--owner=0", "--group=0", "--numeric-owner", "--directory", "/", "--no-recursion",
        "--null", "--files-from", str(listing), "--directory", str(staging), "--recursion", ".",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    listing.unlink()
    if done.returncode != 0:
        raise EnvironmentError(f"tar failed: {done.stderr.strip()[-300:]}")


async def _import(folder: Path, state: str, name: str, archive: Path) -> tuple[str, int, int]:
    """Make layer `name` of the archive; return its digest, bytes and entries.

    Each `state` knows only its own chunks, so that layers of different ones share no blobs.
    """
    path = folder / "state" / state
    path.mkdir(parents=True)
    async with (
        open_library(path, str(folder / "store")) as library,
        importing.opened(str(archive), path, lambda _: None, insecure=False) as source,
    ):
        named = await library.make(name, source.read, Recipe(kind="base"))
    shutil.rmtree(path)
    return named.digest, named.manifest.content_bytes, named.manifest.entries


def slices(folder: Path, chosen: Selection, steps: Steps) -> list[str]:
    """Make images of different files each; return their names."""
    common = Selection()
    for program in SLICE_PROGRAMS:
        common.add_program(program)
    names = []
    for number, paths in enumerate(cut(chosen.paths, SLICES, SLICE_SIZE)):
        steps.now(f"slice {number + 1} of {SLICES} (once)")
        staging = folder / "staging"
        skeleton(staging)
        read = [path for path in paths if chosen.paths[path] and " " not in path][::SLICE_SHARE]
        (staging / "etc/read").write_text(" ".join(read))
        archive = folder / f"slice-{number}.tar.gz"
        pack(archive, folder, list(dict.fromkeys([*common.paths, *paths])), staging)
        shutil.rmtree(staging)
        name = f"base/slice-{number}:1"
        asyncio.run(_import(folder, f"slice-{number}", name, archive))
        names.append(name)
    return names


def cut(paths: dict[str, int], count: int, size: int) -> list[list[str]]:
    """Deal `paths` (with sizes) out to `count` groups of about `size` bytes each. Pure."""
    groups: list[list[str]] = [[] for _ in range(count)]
    filled = [0] * count
    number = 0
    for path, length in sorted(paths.items(), key=lambda item: selection.drawn(Path(item[0]))):
        if length > size // 2:
            continue
        if filled[number] + length <= size:
            groups[number].append(path)
            filled[number] += length
        number = (number + 1) % count
    return groups


def facts_of(environment: Environment) -> dict[str, object]:
    """Return the facts as a run of the report."""
    facts: dict[str, object] = json.loads(msgspec.json.encode(environment.facts))
    return facts
