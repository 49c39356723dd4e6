"""Daemons whose layers are in a bucket: from an import on one to a sandbox on another."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psutil
import pytest

from libdsec import DSecClient, DSecContainerRunArgs
from tests.system import stores_lab
from tests.system.daemon import IMAGE, Daemon, daemon
from tests.system.stores_lab import BUCKET, KEYS, FaultyProxy

pytestmark = [pytest.mark.root, pytest.mark.timeout(300)]
CREDENTIALS = ["environment", "file"]


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with (
        stores_lab.moto(tmp_path_factory.mktemp("moto")) as address,
        FaultyProxy.before(address) as proxy,  # it makes moto atomic
    ):
        yield proxy.endpoint


@pytest.fixture(params=CREDENTIALS)
def store(
    request: pytest.FixtureRequest, endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> dict[str, object]:
    """The section of the configuration, for keys in the environment and in a file."""
    options: dict[str, object] = {"endpoint": endpoint, "timeout_s": 20.0}
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    if request.param == "environment":
        for name, value in KEYS.items():
            monkeypatch.setenv(name, value)
    else:
        file = tmp_path / "keys"
        file.write_text(
            f"[default]\naws_access_key_id = {KEYS['AWS_ACCESS_KEY_ID']}\n"
            f"aws_secret_access_key = {KEYS['AWS_SECRET_ACCESS_KEY']}\n"
        )
        options["credentials_file"] = str(file)
    return {"url": f"s3://{BUCKET}/{request.param}", "options": options}


@contextlib.asynccontextmanager
async def host(
    store: dict[str, object], base: bool = False
) -> AsyncIterator[tuple[Daemon, DSecClient]]:
    async with (
        daemon(base, store=store) as running,
        DSecClient(f"unix:{running.socket}") as client,
    ):
        yield running, client


def blobd_of(running: Daemon) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # it ended
            if "dsec-blobd" in process.name() and str(running.root) in " ".join(process.cmdline()):
                found.append(process)
    return found


async def test_from_an_import_to_a_sandbox_on_another_host(
    store: dict[str, object], tmp_path: Path
) -> None:
    content = os.urandom(3 << 20)
    (tmp_path / "t").mkdir()
    (tmp_path / "t/data").write_bytes(content)
    args = DSecContainerRunArgs(container_image=IMAGE, toolkits=["toolkit/t:1"])
    async with host(store, base=True) as (_, client):
        await client.layers.import_("toolkit/t:1", str(tmp_path / "t"))
    async with host(store) as (running, client):
        keys_nowhere_to_be_seen(running)
        async with await client.run_container(args) as box:
            assert await box.files.read("/data", "bytes") == content
            await box.files.write("/root/made", "one")
            point = await box.checkpoint()
            await box.files.write("/root/made", "two")
            await box.rollback(point)
            assert await box.files.read("/root/made") == "one"
            await box.pack_diff("snapshot/made:1")
            running.kill()  # dsec-blobd reads on with the keys it was left
            await running.start()
            async with DSecClient(f"unix:{running.socket}") as again:
                assert await (await again.connect(box.id)).files.read("/root/made") == "one"
                await (await again.connect(box.id)).stop()
    restored = DSecContainerRunArgs(container_image="snapshot/made:1")
    async with host(store) as (_, client), await client.run_container(restored) as box:
        assert await box.files.read("/root/made") == "one"
        assert await box.files.read("/data", "bytes") == content


def keys_nowhere_to_be_seen(running: Daemon) -> None:
    """Neither in a command line, nor in the environment, nor in a file that others may read."""
    processes = blobd_of(running)
    assert processes
    for process in processes:
        told = " ".join(process.cmdline()) + str(process.environ())
        assert KEYS["AWS_SECRET_ACCESS_KEY"] not in told
    for path in running.runtime.iterdir():
        if path.is_file() and KEYS["AWS_SECRET_ACCESS_KEY"] in path.read_text(errors="replace"):
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
