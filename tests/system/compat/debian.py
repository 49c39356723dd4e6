"""Debian layers, built once and kept: `IMAGE` with the software of the compatibility tests, `SMALL`
with Python and little else.

They are built from the host's own mirror by scripts/build-base into a cache (DSEC_TEST_CACHE,
default /var/cache/dsec-tests) and linked from there into the store of each test's daemon. Run as a
program this builds both, so that no test waits for it; with a directory, it is a cache with the
small one: the disk of the guest of scripts/vm-test starts with that, for it reaches no mirror.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

from dsecd.images.library import Named, open_library
from dsecd.images.links import keys_of, link_layer
from dsecd.images.manifest import Manifest
from libdsec import DSecClient, DSecContainerRunArgs, Sandbox
from libdsec.errors import NotFound
from tests.system.daemon import daemon

IMAGE, SMALL = "base/debian-compat:12", "base/debian:12"
PACKAGES = {
    IMAGE: (
        "postgresql", "tmux", "chromium", "nodejs", "npm", "gcc", "make", "libc6-dev",
        "python3-venv", "python3-pip", "python3-wheel", "dpkg-dev",
    ),
    SMALL: (),
}  # fmt: skip
CACHE = Path(os.environ.get("DSEC_TEST_CACHE", "/var/cache/dsec-tests"))
_REPOSITORY = Path(__file__).parents[3]


def _state(name: str, cache: Path = CACHE) -> Path:
    """Return where a layer is kept. A store writes what layers share once, into the blob of the one
    that came first: the small one would take the other's 1.5 GB along.
    """
    return cache / "small" if name == SMALL else cache


async def build(name: str = IMAGE) -> Named:
    """Return a layer of the cache, building it when it is not there (some minutes)."""
    state = _state(name)
    async with open_library(state) as library:
        with contextlib.suppress(NotFound):
            return await library.resolve(name)
    command = [str(_REPOSITORY / "scripts/build-base"), name, "--state", str(state)]
    command += ["--packages", ",".join(PACKAGES[name])]
    await asyncio.to_thread(subprocess.run, command, check=True, capture_output=True)
    async with open_library(state) as library:
        return await library.resolve(name)


async def lend(layer: Named, state: Path) -> None:
    """Name the layer in the store below `state`, where its files are linked or copied to."""
    store = _state(layer.name) / "store"
    async with open_library(state) as library:
        try:
            link_layer(layer.manifest, store, state / "store")
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            await asyncio.to_thread(_copy, layer.manifest, store, state / "store")
        await library.point(layer.name, layer.digest)


def _copy(manifest: Manifest, source: Path, target: Path) -> None:
    """Copy the layer from the cache, its record last; a store gives a guest too little time."""
    for key in keys_of(manifest):
        shutil.copyfile(source / key, target / key)


@contextlib.asynccontextmanager
async def debian(**args: object) -> AsyncIterator[Sandbox]:
    """A sandbox of the Debian layer in a daemon of its own; keywords go into its run arguments."""
    layer = await build()
    options = {"memory_limit_mb": 2048, "cpu_cores_limit": 2, "disk_limit_mb": 1024, **args}
    resolvers = [
        fields[1]
        for fields in map(str.split, Path("/etc/resolv.conf").read_text().splitlines())
        if len(fields) > 1 and fields[0] == "nameserver"
    ]
    async with daemon(network={"resolvers": resolvers}) as running:
        await lend(layer, running.state)
        async with DSecClient(f"unix:{running.socket}") as client:
            run = DSecContainerRunArgs(container_image=IMAGE, **options)  # type: ignore[arg-type]
            async with await client.run_container(run, timeout=60) as sandbox:
                yield sandbox


def mirror_answers() -> bool:
    """Return whether the host's own apt can fetch from its mirror now."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["apt-get", "-q", "-o", "APT::Sandbox::User=root", "download", "hello"]
        return subprocess.run(command, cwd=folder, check=False, capture_output=True).returncode == 0


def download(package: str) -> Path | None:
    """Return a real Debian package, fetched once by the host's apt; None without a mirror."""
    directory = CACHE / "packages"
    directory.mkdir(parents=True, exist_ok=True)
    directory.chmod(0o755)
    found = sorted(directory.glob(f"{package}_*.deb"))
    if not found:
        command = ["apt-get", "-q", "-o", "APT::Sandbox::User=root", "download", package]
        subprocess.run(command, cwd=directory, check=False, capture_output=True)
        found = sorted(directory.glob(f"{package}_*.deb"))
    return found[-1] if found else None


async def _main(cache: Path | None = None) -> None:
    small = await build(SMALL)
    if cache is None:
        await build(IMAGE)
    else:
        await lend(small, _state(SMALL, cache))


if __name__ == "__main__":
    asyncio.run(_main(*map(Path, sys.argv[1:])))
