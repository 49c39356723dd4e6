"""What scripts/build-base runs: mmdebstrap into a directory, then a layer of it in the store.

The daemon imports the directory when it is running, else the store is used directly. Suite, mirror,
keyrings and the way to reach the mirror (proxy, CA) are those of this host's apt; of these only the
sources and their keys become part of the layer.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from pathlib import Path

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from dsecd.config import load
from dsecd.images.importing import import_layer
from dsecd.images.library import Library, open_library
from dsecd.images.names import normalise
from libdsec import DSecClient
from libdsec.errors import DSecError, NotFound, Unavailable

PACKAGES = ("ca-certificates", "git", "less", "procps", "python3", "sudo")
# of the host's apt configuration, what it takes to reach and to trust the mirror
NEEDED = re.compile(
    r"Acquire::(?:(?:https?|ftp)::.*|Check-Valid-Until|Check-Date|Retries|ForceIPv[46])$", re.I
)
KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
PHASES = (
    ("apt-get update", 5),
    ("downloading packages", 10),
    ("extracting archives", 35),
    ("installing essential", 45),
    ("installing remaining", 55),
    ("cleaning package", 95),
    ("success", 100),
)  # percent of mmdebstrap's time when its message appears
TRIM = r"""
set -e
cd "$1"
find usr/share/doc -mindepth 1 ! -type d ! -name copyright -delete 2>/dev/null || true
find usr/share/doc -mindepth 1 -type d -empty -delete 2>/dev/null || true
rm -rf usr/share/man/?? usr/share/man/??_* usr/share/info/* usr/share/lintian/*
find usr/share/man -type f -delete 2>/dev/null || true
find usr/share/locale -mindepth 1 -maxdepth 1 ! -name 'en*' -exec rm -rf {} + 2>/dev/null || true
rm -rf var/lib/apt/lists/* var/cache/apt/* var/cache/debconf/*-old var/lib/dpkg/*-old
find var/log -type f -delete
rm -f etc/apt/apt.conf.d/99mmdebstrap etc/dpkg/dpkg.cfg.d/99mmdebstrap
mkdir -p var/lib/apt/lists/partial var/cache/apt/archives/partial
: > etc/machine-id
: > etc/resolv.conf; chmod 644 etc/resolv.conf etc/machine-id
echo localhost > etc/hostname
printf '127.0.0.1 localhost\n::1 localhost\n' > etc/hosts
"""


def main() -> int:
    arguments = parse()
    end_tidily()
    try:
        asyncio.run(build(arguments))
    except DSecError as error:
        print(f"build-base: {error.message}", file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as error:
        print(f"build-base: {error.cmd[0]} failed ({error.returncode})", file=sys.stderr)
        return 1
    return 0


def end_tidily() -> None:
    """Have SIGTERM end this program as Ctrl-C does: what was begun is removed."""
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="build-base", description="Make a Debian base layer.")
    parser.add_argument("name", help="name of the layer, for example base/debian:12")
    parser.add_argument("--suite", help="Debian release (default: this host's)")
    parser.add_argument("--packages", default="", help="further packages, comma-separated")
    parser.add_argument("--state", type=Path, help="state directory (default: as configured)")
    parser.add_argument("--force", action="store_true", help="build although the layer exists")
    return parser.parse_args()


async def build(arguments: argparse.Namespace) -> None:
    """Build and import. Raises `DSecError`, `CalledProcessError`."""
    begin = time.monotonic()
    async with target(arguments.state) as layers:
        if not arguments.force and (found := await layers.find(arguments.name)):
            print(f"layer {arguments.name} exists ({found[:12]}); --force builds it again")
            return
        check_host()
        suite = arguments.suite or host_suite()
        extra = [name for name in re.split(r"[,\s]+", arguments.packages) if name]
        packages = sorted({*PACKAGES, *extra})
        with scratch() as directory, bar() as progress:
            root = directory / "root"
            debootstrap(suite, packages, directory, root, progress)
            digest = await layers.add(arguments.name, root, progress)
    print(f"layer {arguments.name} = {digest[:12]} in {time.monotonic() - begin:.0f} s")


def check_host() -> None:
    if shutil.which("mmdebstrap") is None:
        raise NotFound("mmdebstrap is not installed: apt-get install mmdebstrap")
    if os.geteuid() != 0:
        raise NotFound("run it as root: files of the base belong to many users")


class Daemon:
    """Layers of a running daemon."""

    def __init__(self, client: DSecClient) -> None:
        self._client = client

    async def find(self, name: str) -> str | None:
        layers = await self._client.layers.list()
        full = normalise(name)
        return next((layer.digest for layer in layers if layer.name == full), None)

    async def add(self, name: str, root: Path, progress: Progress) -> str:
        task = progress.add_task("import", total=None)
        made = await self._client.layers.import_(name, str(root), replace=True)
        progress.update(task, total=1, completed=1)
        return str(made.digest)


class Files:
    """Layers of a store that no daemon serves."""

    def __init__(self, library: Library) -> None:
        self._library = library

    async def find(self, name: str) -> str | None:
        try:
            return (await self._library.resolve(name)).digest
        except NotFound:
            return None

    async def add(self, name: str, root: Path, progress: Progress) -> str:
        task = progress.add_task("import", total=content_bytes(root))

        def show(done: int) -> None:
            progress.update(task, completed=done)

        made = await import_layer(self._library, name, str(root), replace=True, check=show)
        progress.update(task, total=1, completed=1)
        return made.digest


@asynccontextmanager
async def target(state: Path | None) -> AsyncIterator[Daemon | Files]:
    """Yield the daemon if one answers and no state directory is named, else the store itself."""
    client = DSecClient()
    try:
        if state is None:
            try:
                await client.open()
            except Unavailable:
                pass
            else:
                yield Daemon(client)
                return
        async with configured_library(state) as library:
            yield Files(library)
    finally:
        await client.close()


def configured_library(state: Path | None) -> AbstractAsyncContextManager[Library]:
    """Open the store below `state`, or the one that the daemon's configuration names."""
    if state is not None:
        return open_library(state)
    config = load()
    return open_library(config.state, config.store.url, config.store.options)


def content_bytes(root: Path) -> int:
    """Return the bytes of all regular files, a hard link counted for each of its names."""
    found = (path.lstat() for path in root.rglob("*"))
    return sum(status.st_size for status in found if stat.S_ISREG(status.st_mode))


@contextmanager
def scratch() -> Iterator[Path]:
    """A directory on disk for the tree; /tmp may be a small tmpfs, or nodev."""
    directory = Path(tempfile.mkdtemp(prefix="dsec-base-", dir="/var/tmp"))
    directory.chmod(0o755)  # apt's own user reads below it
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def bar() -> Progress:
    return Progress(
        TextColumn("  {task.description:<28}"), BarColumn(), TimeElapsedColumn(), transient=False
    )


def debootstrap(
    suite: str, packages: list[str], directory: Path, root: Path, progress: Progress,
    options: Sequence[str] = (),
) -> None:  # fmt: skip
    """Run mmdebstrap into `root`; its log is shown when it fails."""
    sources = directory / "sources.sources"
    stanzas = list(host_sources(suite))
    if not stanzas:
        raise NotFound(f"this host's apt has no enabled source for {suite}; give another --suite")
    sources.write_text("\n".join(stanzas))
    hook = directory / "trim"
    hook.write_text(TRIM)
    command = [
        "mmdebstrap", "--variant=minbase", "--format=directory", f"--include={','.join(packages)}",
        *(f"--aptopt={option}" for option in apt_options()),
        *(f"--customize-hook={line}" for line in keyring_hooks(stanzas)),
        *options,
        f'--customize-hook=sh {shlex.quote(str(hook))} "$1"',
        # before the hooks' clean-up the lists are still wanted; ours removes more than mmdebstrap's
        suite, str(root), str(sources),
    ]  # fmt: skip
    log: list[str] = []
    task = progress.add_task(f"mmdebstrap {suite}", total=100)
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    assert process.stdout is not None
    try:
        for line in process.stdout:
            log.append(line)
            for phrase, percent in PHASES:
                if phrase in line:
                    shown = line[3:].strip(" .\n")[:28]
                    progress.update(task, completed=percent, description=shown)
    except BaseException:
        process.terminate()  # it unmounts what it has mounted
        process.wait()
        raise
    if process.wait() != 0:
        progress.stop()
        sys.stderr.writelines(log[-30:])
        raise subprocess.CalledProcessError(process.returncode, command)
    progress.update(task, completed=100)


def host_suite() -> str:
    fields = dict(
        line.split("=", 1)
        for line in Path("/etc/os-release").read_text().splitlines()
        if "=" in line
    )
    if fields.get("ID") != "debian" or not fields.get("VERSION_CODENAME"):
        raise NotFound("this host is not a Debian release; say which one with --suite")
    return fields["VERSION_CODENAME"].strip('"')


def host_sources(suite: str) -> Iterator[str]:
    """Yield deb822 stanzas of the host's enabled binary sources for `suite` and its updates."""
    wanted = {suite, f"{suite}-updates", f"{suite}-security"}
    files = [Path("/etc/apt/sources.list"), *sorted(Path("/etc/apt/sources.list.d").glob("*"))]
    for file in files:
        if file.suffix == ".list" and file.is_file():
            parts: Callable[[str], Iterator[dict[str, str]]] = one_line_entries
        elif file.suffix == ".sources" and file.is_file():
            parts = stanza_entries
        else:
            continue
        for entry in parts(file.read_text()):
            suites = [name for name in entry.get("suites", "").split() if name in wanted]
            enabled = entry.get("enabled", "yes").lower() in ("yes", "true", "1")
            if suites and enabled and "deb" in entry.get("types", "").split():
                yield stanza(entry, suites)


def stanza(entry: dict[str, str], suites: list[str]) -> str:
    lines = [
        "Types: deb",
        f"URIs: {entry['uris']}",
        f"Suites: {' '.join(suites)}",
        f"Components: {entry.get('components', 'main')}",
    ]
    signed_by = entry.get("signed-by", KEYRING if Path(KEYRING).exists() else "")
    if signed_by:
        lines.append(f"Signed-By: {signed_by}")
    lines += ["Trusted: yes"] if entry.get("trusted", "").lower() in ("yes", "true", "1") else []
    return "\n".join(lines) + "\n"


def stanza_entries(text: str) -> Iterator[dict[str, str]]:
    """Yield the stanzas of a deb822 file, keys in lower case."""
    for block in re.split(r"\n\s*\n", text):
        entry: dict[str, str] = {}
        key = ""
        for line in block.splitlines():
            if line.startswith("#"):
                continue
            if line[:1] in (" ", "\t") and key:
                entry[key] += "\n" + line
            elif ":" in line:
                key, _, value = line.partition(":")
                key = key.strip().lower()
                entry[key] = value.strip()
        if entry:
            yield entry


def one_line_entries(text: str) -> Iterator[dict[str, str]]:
    """Yield the entries of a sources.list as the stanzas they stand for."""
    pattern = re.compile(
        r"^deb\s+(?:\[(?P<options>[^\]]*)\]\s+)?(?P<uri>\S+)\s+(?P<suite>\S+)\s*(?P<rest>.*)$"
    )
    for line in text.splitlines():
        match = pattern.match(line.split("#")[0].strip())
        if match is None:
            continue
        options = dict(
            option.split("=", 1) for option in (match["options"] or "").split() if "=" in option
        )
        entry = {"types": "deb", "uris": match["uri"], "suites": match["suite"]}
        entry["components"] = match["rest"].strip() or "main"
        entry.update({key.lower(): value for key, value in options.items()})
        yield entry


def apt_options() -> Iterator[str]:
    """Yield this host's apt settings for reaching its mirror, while building only."""
    dump = subprocess.run(["apt-config", "dump"], capture_output=True, text=True, check=True)
    for line in dump.stdout.splitlines():
        name, _, value = line.partition(" ")
        if NEEDED.match(name) and value not in ('"";', ""):
            yield f"{name} {value.rstrip(';')}"
    yield 'Acquire::Languages "none"'


def keyring_hooks(stanzas: list[str]) -> Iterator[str]:
    """Yield commands that put keyrings named by the sources, and in no package, into the tree."""
    for path in sorted(set(re.findall(r"^Signed-By: (/\S+)$", "\n".join(stanzas), re.M))):
        quoted = shlex.quote(path)
        yield f'[ -e "$1"{quoted} ] || install -D -m 644 {quoted} "$1"{quoted}'


if __name__ == "__main__":
    sys.exit(main())
