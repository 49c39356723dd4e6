"""What scripts/build-guest runs: packaging/guest.config and a source package become a bzImage.

Built once for each source version, configuration, compiler and version of this file; the result is
kept in /var/cache/dsec-guest. Equal inputs give equal bytes. One build at a time: another one waits
and then finds the result.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import filecmp
import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

SOURCE = "linux-source-6.12"
TOOLS = ("bc", "bison", "flex", "gcc", "libc6-dev", "libelf-dev", "lz4", "make", "xz-utils")
TARBALL = Path(f"/usr/src/{SOURCE}.tar.xz")
FRAGMENT = Path(__file__).parents[1] / "packaging/guest.config"
CACHE = Path("/var/cache/dsec-guest")
LAST_LINES = 30  # of make's output, shown when it fails
MAKE_LINES = 2310  # that make prints for this configuration, for the progress bar

# A third of the source, none of it compiled for x86 without graphics and sound. What Kconfig reads
# stays.
UNUSED = (
    "arch/[!x]*/*.[chS]", "arch/*/boot/dts", "Documentation/*.rst", "Documentation/devicetree",
    "drivers/gpu/*.[ch]", "sound/*.[ch]", "tools/testing",
)  # fmt: skip
# Documentation/kbuild/reproducible-builds.rst; the rest of the caller's environment could change
# the result, too
ENVIRONMENT = {
    "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
    "LC_ALL": "C",
    "TZ": "UTC",
    "ARCH": "x86_64",
    "KBUILD_BUILD_TIMESTAMP": "Thu Jan  1 00:00:00 UTC 1970",
    "KBUILD_BUILD_USER": "dsec",
    "KBUILD_BUILD_HOST": "dsec",
    "KBUILD_BUILD_VERSION": "1",
}
SETTING = re.compile(r"(CONFIG_\w+)=(.+)|# (CONFIG_\w+) is not set")


class Failed(Exception):
    """No kernel was built; the message says why."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="build-guest", description="Build the guests' kernel.")
    parser.add_argument("--state", type=Path, default=Path("/var/lib/dsec"),
                        help="install as guest/kernel below this directory")  # fmt: skip
    parser.add_argument("--output", type=Path, help="copy to this file and install nothing")
    parser.add_argument("--force", action="store_true", help="build although it was built before")
    arguments = parser.parse_args()
    # ended from outside, it takes the compiler and its files along
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        image = build(arguments.force)
        install(image, arguments.output or arguments.state / "guest/kernel")
    except (Failed, OSError) as error:
        print(f"build-guest: {error}", file=sys.stderr)
        return 1
    return 0


def build(force: bool) -> Path:
    """Return the image, from the cache if it is there. Raises `Failed`."""
    fetch_packages()
    made = CACHE / key()
    image = made / "bzImage"
    if image.exists() and not force:
        return image
    with locked():
        if image.exists() and not force:
            return image  # by another run, while this one waited
        scratch = CACHE / "build"  # a fixed path, so what a killed run left goes here
        shutil.rmtree(scratch, ignore_errors=True)
        try:
            tree, result = scratch / "tree", scratch / "result"
            with step("unpacking the source"):
                unpack(tree)
            with step("configuring"):
                configure(tree)
            with step("compiling"):
                compile_image(tree)
            result.mkdir()
            shutil.copy(tree / "arch/x86/boot/bzImage", result / "bzImage")
            shutil.copy(tree / ".config", result / "config")
            shutil.rmtree(made, ignore_errors=True)
            result.rename(made)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return image


def fetch_packages() -> None:
    """Install what is missing. Raises `Failed`."""
    wanted = (SOURCE, *TOOLS)
    form = "${db:Status-Status} ${binary:Package}\n"
    shown = subprocess.run(
        ["dpkg-query", "-W", "-f", form, *wanted], capture_output=True, text=True, check=False
    ).stdout
    present = {
        line.split()[1].partition(":")[0]
        for line in shown.splitlines()
        if line.startswith("installed ")
    }
    missing = [name for name in wanted if name not in present]
    if not missing:
        return
    if os.geteuid() != 0:
        raise Failed(f"not root, so install these first: apt-get install {' '.join(missing)}")
    with step(f"installing {' '.join(missing)}"):
        environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
        # another apt may be at work: a second run of this script, or the daily one
        apt = ("apt-get", "-qq", "-o", "DPkg::Lock::Timeout=600")
        run(*apt, "update", environment=environment)
        run(*apt, "install", "-y", "--no-install-recommends", *missing, environment=environment)


def key() -> str:
    """Return the name of what would be built now."""
    version = run("dpkg-query", "-W", "-f", "${Version}", SOURCE)
    compiler, linker = run("gcc", "--version"), run("ld", "--version")
    parts = (version, compiler, linker, FRAGMENT.read_text(), Path(__file__).read_text())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


@contextlib.contextmanager
def locked() -> Iterator[None]:
    """Hold the one lock of all builds."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("another run is building; waiting for it", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def step(name: str) -> Iterator[None]:
    """Print what is being done, and how long it took."""
    print(f"{name} ...", flush=True)
    begin = time.monotonic()
    yield
    print(f"{name}: {time.monotonic() - begin:.1f} s", flush=True)


def unpack(tree: Path) -> None:
    tree.mkdir(parents=True)
    unused = (f"--exclude={SOURCE}/{pattern}" for pattern in UNUSED)
    command = ("tar", "-x", "-f", str(TARBALL), "-C", str(tree), "--strip-components=1")
    run(*command, "--no-same-owner", *unused, environment=ENVIRONMENT | {"XZ_DEFAULTS": "-T0"})


def configure(tree: Path) -> None:
    """Write .config: what the fragment says and nothing that it does not need. Raises `Failed`."""
    environment = ENVIRONMENT | {"KCONFIG_ALLCONFIG": str(FRAGMENT)}
    run("make", "-s", "-C", str(tree), "allnoconfig", environment=environment)
    fragment = FRAGMENT.read_text()
    if lines := unmet(fragment, (tree / ".config").read_text()):
        raise Failed(
            "these lines of packaging/guest.config do not hold: what they depend on is missing, "
            "or the option has another name in this version\n  " + "\n  ".join(lines)
        )


def unmet(fragment: str, config: str) -> list[str]:
    """Return the lines of `fragment` that `config`, a whole one, contradicts or lacks."""
    have = dict(settings(config))
    return [f"{name}={value}" for name, value in settings(fragment) if have.get(name, "n") != value]


def settings(text: str) -> Iterator[tuple[str, str]]:
    """Yield options with their values; "n" for one that is not set."""
    for line in text.splitlines():
        if match := SETTING.fullmatch(line):
            name, value, unset = match.groups()
            yield (unset, "n") if unset else (name, value)


def compile_image(tree: Path) -> None:
    """Run make, with a bar of its progress. Raises `Failed` with the end of its output."""
    jobs = len(os.sched_getaffinity(0))
    last: list[str] = []
    columns = (TextColumn("  {task.description:<40}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, transient=True) as progress:
        task = progress.add_task("make", total=MAKE_LINES)
        with compiler("make", "-C", str(tree), f"-j{jobs}", "bzImage") as process:
            assert process.stdout is not None
            for line in process.stdout:
                last = [*last[1 - LAST_LINES :], line]
                progress.update(task, advance=1, description=line.split()[-1][-40:])
    if process.returncode:
        raise Failed(f"make ended with {process.returncode}\n{''.join(last)}")


@contextlib.contextmanager
def compiler(*command: str) -> Iterator[subprocess.Popen[str]]:
    """Yield the running command; it and all that it started is gone afterwards."""
    process = subprocess.Popen(
        command, env=ENVIRONMENT, text=True, errors="replace", start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        yield process
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        raise
    finally:
        process.wait()


def install(image: Path, target: Path) -> None:
    """Copy `image` to `target`, which at no time is half a file."""
    if target.exists() and filecmp.cmp(image, target, shallow=False):
        print(f"{target} is up to date")
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    new = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        shutil.copyfile(image, new)
        new.chmod(0o644)
        new.replace(target)
    finally:
        new.unlink(missing_ok=True)
    print(f"{target}: {target.stat().st_size / 1e6:.1f} MB")


def run(*command: str, environment: dict[str, str] | None = None) -> str:
    """Return what a command prints. Raises `Failed` with what it says when it fails."""
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Failed(f"{command[0]} failed: {(done.stderr or done.stdout).strip()[-2000:]}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
