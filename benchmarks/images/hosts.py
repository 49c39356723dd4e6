"""Hosts that have never seen the environment: daemons of the bench, and the stores they read."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import msgspec
from dsec_bench import cgroups, leftovers
from dsec_bench.create.daemon import Daemon
from dsec_bench.create.sdk import Sdk
from dsec_bench.images import disk
from dsec_bench.images.environment import Environment
from dsec_bench.images.server import Client

from dsecd.images.library import open_library
from libdsec import DSecContainerRunArgs
from libdsec.errors import Unavailable

OBJECTS = ("blobs", "images", "indexes", "layers")
PLAIN, TRACED = "plain", "traced"  # buckets: without and with a trace of what the task reads
CREDENTIALS = "[default]\naws_access_key_id = bench\naws_secret_access_key = bench\n"
CONNECT_S = 10.0
MEMORY_MB = 4096
DISK_MB = 2048


def link(source: Path, target: Path) -> None:
    """Make `target` the same file, a copy where the file systems differ."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def link_objects(store: Path, target: Path, kinds: Sequence[str] = OBJECTS) -> None:
    """Give the store or bucket `target` the objects of `store`; names are not among them."""
    for kind in kinds:
        (target / kind).mkdir(parents=True, exist_ok=True)
        if (store / kind).is_dir():
            for path in (store / kind).iterdir():
                link(path, target / kind / path.name)


async def point(state: Path, url: str, options: Mapping[str, Any], names: dict[str, str]) -> None:
    """Let each name of the store at `url` lead to a digest."""
    async with open_library(state, url, options) as library:
        for name, digest in names.items():
            await library.point(name, digest)


async def names_of(environment: Environment) -> dict[str, str]:
    """Return name → digest of every layer of the cache."""
    async with open_library(environment.folder / "state", str(environment.store)) as library:
        return {named.name: named.digest for named in await library.list()}


class Buckets:
    """The shared store: a server, its buckets, and how daemons get at it."""

    def __init__(self, server: Client, folder: Path) -> None:
        self.server = server
        self._folder = folder
        self._credentials = folder / "credentials"
        self._credentials.write_text(CREDENTIALS)

    def options(self) -> dict[str, Any]:
        """Return the [store.options] of a daemon."""
        return {
            "endpoint": self.server.endpoint,
            "region": "us-east-1",
            "credentials_file": str(self._credentials),
        }

    def section(self, bucket: str) -> str:
        """Return the part of a daemon's configuration that names `bucket`."""
        lines = [f'[store]\nurl = "s3://{bucket}/dsec"\n[store.options]']
        lines += [f'{key} = "{value}"' for key, value in self.options().items()]
        return "\n".join(lines) + "\n"

    def fill(self, environment: Environment, names: dict[str, str]) -> None:
        """Make the buckets of what the cache holds; `TRACED` has the traces that are known."""
        for bucket in (PLAIN, TRACED):
            root = self.server.root / bucket / "dsec"
            kinds = (*OBJECTS, "traces") if bucket == TRACED else OBJECTS
            link_objects(environment.store, root, kinds)
            url = f"s3://{bucket}/dsec"
            asyncio.run(point(self._folder / "state", url, self.options(), names))

    def trace(self, bucket: str, digest: str) -> Path:
        """Return where the trace of a layer is, or will be."""
        return self.server.root / bucket / "dsec" / "traces" / digest


class Host(Daemon):
    """A daemon with `section` in its configuration, a client of it, and what both wrote."""

    def __init__(self, serial: int, image: str, section: str = "") -> None:
        super().__init__(serial)
        self._section = section
        self._image = image
        self._sdk: Sdk | None = None

    @property
    def sdk(self) -> Sdk:
        assert self._sdk is not None
        return self._sdk

    def prepare(self) -> None:
        super().prepare()
        with self.config_file.open("a") as file:
            file.write(self._section)

    def open(self) -> None:
        """Start the daemon, connect to it, and let it finish its own start."""
        self.start()
        self._sdk = Sdk(self.endpoint, self._image)
        deadline = time.monotonic() + CONNECT_S
        while True:
            try:
                return self._sdk.open()
            except Unavailable:  # its socket is bound, and not yet listened on
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)

    def arguments(self, image: str = "", **more: Any) -> DSecContainerRunArgs:
        """Return what sandboxes of these benches are made with."""
        changes: dict[str, Any] = {
            "container_image": image or self._image,
            "memory_limit_mb": MEMORY_MB,
            "disk_limit_mb": DISK_MB,
            "cpu_cores_limit": float(os.cpu_count() or 1),
            **more,
        }
        return msgspec.structs.replace(self.sdk.args, **changes)

    def written(self) -> dict[int, int]:
        """Return the bytes that each process of daemon and sandboxes caused to be written."""
        pids = {*disk.descendants(self.pid), *cgroups.processes_in(self.name)}
        return disk.written(pids)

    def close(self) -> None:
        sdk, self._sdk = self._sdk, None
        if sdk is not None:
            sdk.close()
        super().close()


@contextlib.contextmanager
def host(serial: int, image: str, section: str = "") -> Iterator[Host]:
    """Yield a running daemon with a client. Raises DaemonError, DSecError."""
    made = Host(serial, image, section)
    with made:
        made.open()
        yield made


@contextlib.contextmanager
def local_host(
    serial: int, environment: Environment, names: dict[str, str], image: str
) -> Iterator[Host]:
    """Yield a daemon that has the layers on its own disk."""
    made = Host(serial, image)
    with made:
        state = made.state / "var"
        state.mkdir(mode=0o700)
        link_objects(environment.store, state / "store")
        asyncio.run(point(state, "", {}, names))
        made.open()
        yield made


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """Yield a directory on a disk that goes at the end, whatever happens."""
    folder = Path(mkdtemp(prefix=cgroups.own_group("-images-"), dir=leftovers.TEMPORARY))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
