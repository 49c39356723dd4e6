"""What is saved of microVMs: machines that others start from, and their changes as layers."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from libdsec import DSecClient, DSecContainerRunArgs, Sandbox
from libdsec.errors import AlreadyExists, Unsupported
from tests.system.daemon import IMAGE, Daemon
from tests.system.vm_lab import boot, monitor_of, vm_daemon

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]
IDENTITY = (
    "cat /proc/sys/kernel/random/uuid /etc/machine-id /proc/sys/kernel/hostname;"
    "head -c 16 /dev/urandom | od -An -tx1 | tr -d ' '"
)
CHANGES = (
    "mkdir -p /made/deep && echo text > /made/deep/file && ln /made/deep/file /made/other;"
    "ln -s deep/file /made/link; chmod 600 /made/deep/file; chown 1000:1000 /made/deep;"
    "rm /etc/group; rm -r /home && mkdir /home && touch /home/new; mknod /made/pipe p"
)
SEEN = (
    "cd /; find made home etc | sort | xargs stat -c '%n %F %a %u %g %h' | grep -v ' link ';"
    "cat /made/deep/file; readlink /made/link"
)


@pytest.fixture(autouse=True)
def nothing_left_behind() -> None:
    """One census for the module, around its daemon."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def host(guest_kernel: Path) -> AsyncIterator[Daemon]:
    async with vm_daemon(guest_kernel) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(host: Daemon) -> AsyncIterator[DSecClient]:
    async with DSecClient(f"unix:{host.socket}") as made:
        yield made


def was_saved(host: Daemon, box: Sandbox) -> bool:
    """Whether its machine began as a saved one."""
    return "-incoming" in psutil.Process(monitor_of(host, box.id)).cmdline()


async def identity(box: Sandbox) -> list[str]:
    done = await box.run_shell(IDENTITY)
    assert done.ok, done.stderr
    return done.stdout.split()


async def test_machines_of_one_template_are_each_their_own(
    host: Daemon, client: DSecClient
) -> None:
    async with (
        await boot(client) as first,
        await boot(client) as second,
        await boot(client) as third,
    ):
        assert [was_saved(host, box) for box in (first, second, third)] == [False, True, True]
        known = [await identity(box) for box in (first, second, third)]
        for values in zip(*known, strict=True):
            assert len(set(values)) == 3, values
        for box in (first, second, third):
            before = time.time()
            clock = int((await box.run_shell("date +%s")).stdout)
            assert before - 5 < clock < time.time() + 5
            await box.files.write("/etc/mine", box.id)
        assert [await box.files.read("/etc/mine") for box in (first, second, third)] == [
            first.id, second.id, third.id,
        ]  # fmt: skip


async def test_a_template_that_was_cut_is_not_used_again(host: Daemon, client: DSecClient) -> None:
    async with await boot(client):
        pass  # there is one from here on
    templates = host.state / "vm/templates"
    (place,) = [entry for entry in templates.iterdir() if entry.is_dir()]
    os.truncate(place / "state", (place / "state").stat().st_size // 2)
    async with await boot(client) as box:
        assert (await box.run_shell("echo here")).stdout == "here\n"
        assert not was_saved(host, box)
    assert "its template failed" in host.log()
    async with await boot(client) as box:
        assert was_saved(host, box), "another one was made"


async def test_what_a_machine_changed_is_a_layer_for_all(client: DSecClient) -> None:
    container = DSecContainerRunArgs(container_image=IMAGE)
    async with await boot(client) as box, await client.run_container(container) as twin:
        for one in (box, twin):
            done = await one.run_shell(CHANGES)
            assert done.ok, done.stderr
        await box.pack_diff("snapshot/machine")
        await twin.pack_diff("snapshot/container")
        with pytest.raises(AlreadyExists):
            await box.pack_diff("snapshot/machine")
        assert (await box.run_shell("echo goes on")).stdout == "goes on\n"
    seen = []
    for name in ("snapshot/machine", "snapshot/container"):
        args = DSecContainerRunArgs(container_image=name)
        async with await client.run_container(args) as one, await boot(client, image=name) as two:
            seen += [(await box.run_shell(SEEN)).stdout for box in (one, two)]
    assert "made/deep/file regular file 600 0 0 2" in seen[0]
    assert "home/agent" not in seen[0]
    assert "etc/group" not in seen[0]
    assert seen[1:] == seen[:1] * 3


async def test_what_machines_lack_is_refused(client: DSecClient) -> None:
    async with await boot(client) as box:
        with pytest.raises(Unsupported, match="grading"):
            await box.verify(["true"], keep=["/etc"])
