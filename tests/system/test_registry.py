"""Images of a real registry (Debian's docker-registry, on loopback) become layers and run."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import io
import json
import re
import subprocess
import sys
import tarfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from libdsec import DSecClient, DSecContainerRunArgs, ImportProgress, Sandbox
from libdsec.errors import NotFound, Unavailable
from tests.system.daemon import Daemon, daemon, make_rootfs

pytestmark = pytest.mark.root
CONFIG = """
version: 0.1
storage: {{filesystem: {{rootdirectory: {root}}}}}
http: {{addr: "127.0.0.1:0"}}
log: {{level: info}}
"""
LISTENING = re.compile(r'"listening on 127\.0\.0\.1:(\d+)"')  # at a port that was free then


class Layout:
    """An OCI image layout with one image, layer by layer."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "blobs/sha256").mkdir(parents=True)
        self.layers: list[dict[str, object]] = []
        self.diff_ids: list[str] = []

    def _blob(self, data: bytes, kind: str) -> dict[str, object]:
        digest = hashlib.sha256(data).hexdigest()
        (self.root / "blobs/sha256" / digest).write_bytes(data)
        return {"mediaType": kind, "digest": f"sha256:{digest}", "size": len(data)}

    def layer(self, tar: bytes) -> None:
        self.diff_ids.append(f"sha256:{hashlib.sha256(tar).hexdigest()}")
        kind = "application/vnd.oci.image.layer.v1.tar+gzip"
        self.layers.append(self._blob(gzip.compress(tar, mtime=0), kind))

    def finish(self, **process: object) -> Path:
        config = {
            "architecture": "amd64",
            "os": "linux",
            "config": process,
            "rootfs": {"type": "layers", "diff_ids": self.diff_ids},
        }
        kind = "application/vnd.oci.image"
        manifest = {
            "schemaVersion": 2,
            "mediaType": f"{kind}.manifest.v1+json",
            "config": self._blob(json.dumps(config).encode(), f"{kind}.config.v1+json"),
            "layers": self.layers,
        }
        entry = self._blob(json.dumps(manifest).encode(), f"{kind}.manifest.v1+json")
        (self.root / "index.json").write_text(
            json.dumps({"schemaVersion": 2, "manifests": [entry]})
        )
        (self.root / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
        return self.root


def tar_of(root: Path) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as archive:
        archive.add(root, arcname=".")
    return made.getvalue()


def whiteout(name: str) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as archive:
        archive.addfile(tarfile.TarInfo(name))
        release = tarfile.TarInfo("etc/release")
        release.size = 4
        archive.addfile(release, io.BytesIO(b"two\n"))
    return made.getvalue()


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a registry that lives for this module."""
    root = tmp_path_factory.mktemp("registry")
    (root / "config.yml").write_text(CONFIG.format(root=root / "data"))
    with (root / "log").open("wb") as log:
        process = subprocess.Popen(
            ["docker-registry", "serve", str(root / "config.yml")], stdout=log, stderr=log
        )
    try:
        deadline = time.monotonic() + 20
        while not (found := LISTENING.search((root / "log").read_text())):
            assert process.poll() is None, (root / "log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield f"localhost:{found[1]}"
    finally:
        process.terminate()
        process.wait()


@pytest.fixture(scope="module")
def pushed(registry: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """An image of two layers with defaults, in the registry; the second one removes a file."""
    root = tmp_path_factory.mktemp("image")
    make_rootfs(root / "rootfs")
    (root / "rootfs/etc/release").write_text("one\n")
    (root / "rootfs/etc/secret").write_text("gone\n")
    layout = Layout(root / "layout")
    layout.layer(tar_of(root / "rootfs"))
    layout.layer(whiteout("etc/.wh.secret"))
    layout.finish(
        Env=["PATH=/usr/bin:/bin", "GREETING=hello"],
        User="agent",
        WorkingDir="/home/agent",
        Entrypoint=["/bin/sh"],
    )
    name = f"{registry}/team/app:1"
    subprocess.run(
        [
            "skopeo",
            "copy",
            "-q",
            "--dest-tls-verify=false",
            f"oci:{layout.root}",
            f"docker://{name}",
        ],
        check=True,
    )
    return name


@pytest.fixture
async def host() -> AsyncIterator[Daemon]:
    async with daemon(base=False) as running:
        yield running


async def test_an_image_is_pulled_once_at_its_first_use(
    host: Daemon, client: DSecClient, pushed: str
) -> None:
    args = DSecContainerRunArgs(container_image=pushed)
    boxes = await asyncio.gather(*(client.run_container(args) for _ in range(4)))
    for box in boxes:
        done = await box.run_shell("id -un; pwd; echo $GREETING; cat /etc/release; ls /etc/secret")
        assert done.stdout == "agent\n/home/agent\nhello\ntwo\n"
        assert "No such file" in done.stderr
    assert [info.name for info in await client.layers.list()] == [pushed]
    assert host.log().count("from its registry") == 1
    await asyncio.gather(*(box.stop() for box in boxes))


async def test_a_pull_shows_how_far_it_is_and_a_batch_pulls_once(
    host: Daemon, client: DSecClient, pushed: str
) -> None:
    seen: list[ImportProgress] = []
    args = DSecContainerRunArgs(container_image=pushed)
    first = asyncio.ensure_future(client.run_container(args, on_progress=seen.append))
    await asyncio.sleep(0)  # it asks first: of what was pulled before, nothing would be seen
    made = [one async for one in client.run_containers(args, 8)]
    boxes = [*[one for one in made if isinstance(one, Sandbox)], await first]
    assert len(boxes) == 9, made
    assert host.log().count("from its registry") == 1
    assert seen
    assert {item.stage for item in seen} <= {"waiting", "fetching", "reading", "storing"}
    await asyncio.gather(*(box.stop() for box in boxes))


async def test_a_failed_image_pull_is_visible_to_the_client(
    host: Daemon, client: DSecClient, registry: str
) -> None:
    nobody = DSecContainerRunArgs(container_image="localhost:1/nobody/listens:1")
    nothing = DSecContainerRunArgs(container_image=f"{registry}/nobody/nothing:1")
    for args in (nobody, nothing):
        wanted = f"{args.container_image} cannot be copied from its registry: ."
        with pytest.raises(Unavailable, match=wanted):
            await client.run_container(args, on_progress=lambda item: None)
        made = [one async for one in client.run_containers(args, 2)]
        assert all(isinstance(one, Unavailable) and wanted[:-1] in str(one) for one in made)
        command = ["-m", "dsec", "--endpoint", f"unix:{host.socket}", "run", args.container_image]
        ran = await asyncio.to_thread(
            subprocess.run, [sys.executable, *command], capture_output=True, text=True, check=False
        )
        assert ran.returncode == 1
        assert ran.stderr.startswith(f"dsec: {wanted[:-1]}"), ran.stderr
    assert await client.list_sandboxes() == []


async def test_what_was_asked_for_wins_over_the_images_defaults(
    client: DSecClient, pushed: str
) -> None:
    args = DSecContainerRunArgs(
        container_image=f"docker://{pushed}",
        init_user="root",
        workdir="/tmp",
        env={"GREETING": "hi"},
    )
    async with await client.run_container(args) as box:
        done = await box.run_shell("id -un; pwd; echo $GREETING")
        assert done.stdout == "root\n/tmp\nhi\n"


async def test_an_imported_image_has_a_name_of_ones_own(client: DSecClient, pushed: str) -> None:
    made = await client.layers.import_("base/app:1", f"docker://{pushed}")
    again = await client.layers.import_("base/app:2", f"docker://{pushed}")
    assert made.digest == again.digest
    async with await client.run_container(
        DSecContainerRunArgs(container_image="base/app:1")
    ) as box:
        assert (await box.run("cat", "/etc/release")).stdout == "two\n"


async def test_two_images_run_side_by_side(
    client: DSecClient, pushed: str, registry: str, tmp_path: Path
) -> None:
    make_rootfs(tmp_path / "rootfs")
    (tmp_path / "rootfs/etc/release").write_text("other\n")
    layout = Layout(tmp_path / "layout")
    layout.layer(tar_of(tmp_path / "rootfs"))
    other = f"{registry}/other:latest"
    command = ["skopeo", "copy", "-q", "--dest-tls-verify=false"]
    await asyncio.to_thread(
        subprocess.run, [*command, f"oci:{layout.finish()}", f"docker://{other}"], check=True
    )
    async with (
        await client.run_container(DSecContainerRunArgs(container_image=pushed)) as one,
        await client.run_container(DSecContainerRunArgs(container_image=other)) as two,
    ):
        assert (await one.run("cat", "/etc/release")).stdout == "two\n"
        assert (await two.run("cat", "/etc/release")).stdout == "other\n"


async def test_what_the_registry_does_not_have_is_said(client: DSecClient, registry: str) -> None:
    args = DSecContainerRunArgs(container_image=f"{registry}/nobody/nothing:1")
    with pytest.raises(
        Unavailable, match=r"nothing:1 cannot be copied from its registry: .*unknown"
    ):
        await client.run_container(args)
    assert await client.layers.list() == []
    with pytest.raises(NotFound, match="no layer 'plain/name:1'"):
        await client.run_container(DSecContainerRunArgs(container_image="plain/name:1"))
