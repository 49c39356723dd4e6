"""Environments of several layers, and sandboxes saved as layers, in a real daemon."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from libdsec import DSecClient, DSecContainerRunArgs
from libdsec.errors import AlreadyExists, InvalidArgument, NotFound
from tests.system.daemon import IMAGE, Daemon
from tests.system.user_view import shell

pytestmark = pytest.mark.root
BASE = DSecContainerRunArgs(container_image=IMAGE, disk_limit_mb=64)


def directory(parent: Path, name: str, **files: str) -> str:
    root = parent / name
    for path, content in files.items():
        target = root / path.replace("__", "/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(content)
    return str(root)


async def test_workspace_and_toolkits_are_stacked(client: DSecClient, tmp_path: Path) -> None:
    await client.layers.import_(
        "workspace/app:1", directory(tmp_path, "ws", app__main="app", etc__which="workspace")
    )
    await client.layers.import_(
        "toolkit/a:1", directory(tmp_path, "a", opt__a="a", etc__which="toolkit a")
    )
    await client.layers.import_(
        "toolkit/b:1", directory(tmp_path, "b", opt__b="b", etc__which="toolkit b")
    )
    args = DSecContainerRunArgs(
        container_image=IMAGE, workspace="workspace/app:1", toolkits=["toolkit/a:1", "toolkit/b:1"]
    )
    async with await client.run_container(args) as box:
        assert await shell(box, "cat /app/main /opt/a /opt/b /etc/which") == "appabtoolkit b"
        assert (await box.run("busybox", "true")).ok  # the base is below
    infos = {info.name: info for info in await client.layers.list()}
    assert set(infos) == {IMAGE, "workspace/app:1", "toolkit/a:1", "toolkit/b:1"}


async def test_missing_parts_are_named(client: DSecClient) -> None:
    args = DSecContainerRunArgs(container_image=IMAGE, workspace="workspace/none:1")
    with pytest.raises(NotFound, match="no layer 'workspace/none:1'"):
        await client.run_container(args)


@pytest.mark.parametrize("upper", ["memory", "disk"])
async def test_a_packed_sandbox_restores_as_it_was(client: DSecClient, upper: str) -> None:
    args = DSecContainerRunArgs(container_image=IMAGE, upper=upper, disk_limit_mb=64)
    async with await client.run_container(args) as box:
        await shell(
            box,
            "echo new > /root/new && mkdir -p /srv/d && echo deep > /srv/d/f && ln /srv/d/f /srv/g"
            " && ln -s d/f /srv/l && chown 1000:1000 /srv/g && chmod 4711 /srv/d/f"
            " && rm /etc/group && rm -r /home/agent && mkdir /home/agent && touch /home/agent/x"
            " && mv /var/tmp /var/moved && echo h > /root/.ash_history && echo t > /tmp/t",
        )
        packed = await box.pack_diff("snapshot/one:1")
        # it went on, and what it does now is not in the layer
        await shell(box, "echo later > /root/later")
    assert packed.name == "snapshot/one:1"
    assert 0 < packed.frozen_ms < 5000
    assert any("tmp" in note for note in packed.notes)
    async with await client.run_container(
        DSecContainerRunArgs(container_image="snapshot/one:1")
    ) as box:
        assert await shell(box, "cat /root/new /srv/l /srv/g") == "new\ndeep\ndeep\n"
        assert await shell(box, "stat -c '%u %a %h' /srv/d/f") == "1000 4711 2\n"
        assert await shell(box, "ls -A /home/agent /var") == ("/home/agent:\nx\n\n/var:\nmoved\n")
        gone = await box.run_shell("ls /etc/group /root/later /tmp/t /root/.ash_history")
        assert gone.stdout == ""
        assert gone.stderr.count("No such file") == 4
        assert await shell(box, "ls -A /tmp") == ""


async def test_snapshots_stack_and_branch(client: DSecClient) -> None:
    async with await client.run_container(BASE) as box:
        await shell(box, "echo 1 > /root/a; echo 1 > /root/b")
        await box.pack_diff("snapshot/first")
    first = DSecContainerRunArgs(container_image="snapshot/first")
    async with await client.run_container(first) as box:
        await shell(box, "rm /root/a; echo 2 > /root/b")
        await box.pack_diff("snapshot/second")
    for name, listing in (("snapshot/first", "a\nb\n"), ("snapshot/second", "b\n")):
        args = DSecContainerRunArgs(container_image=name)
        async with await client.run_container(args) as box:
            assert await shell(box, "ls /root") == listing


async def test_a_layer_of_other_parents_is_refused(client: DSecClient, tmp_path: Path) -> None:
    await client.layers.import_("base/other:1", directory(tmp_path, "other", x="1"))
    async with await client.run_container(BASE) as box:
        await shell(box, "echo 1 > /root/a")
        await box.pack_diff("workspace/made-here:1")
    wrong = DSecContainerRunArgs(container_image="base/other:1", workspace="workspace/made-here:1")
    with pytest.raises(InvalidArgument, match="was made on top of other layers"):
        await client.run_container(wrong)
    right = DSecContainerRunArgs(container_image=IMAGE, workspace="workspace/made-here:1")
    async with await client.run_container(right) as box:
        assert await shell(box, "cat /root/a") == "1\n"


async def test_packing_while_processes_write_takes_one_moment(client: DSecClient) -> None:
    """Two files written in turn never differ by more than one step in the layer."""
    async with await client.run_container(BASE) as box:
        loop = "i=0; while :; do i=$((i+1)); echo $i > /root/a; echo $i > /root/b; done"
        await box.commands.run(["sh", "-c", loop], background=True)
        await shell(box, "until [ -s /root/b ]; do sleep 0.01; done")  # from then on both are there
        for n in range(5):
            await asyncio.sleep(0.05)
            await box.pack_diff(f"snapshot/moving:{n}")
    for n in range(5):
        args = DSecContainerRunArgs(container_image=f"snapshot/moving:{n}")
        async with await client.run_container(args) as box:
            texts = (await shell(box, "cat /root/a; echo -; cat /root/b")).split("-")
            # a file that was just opened for writing is empty
            numbers = [int(text) for text in texts if text.strip()]
            assert max(numbers) - min(numbers) <= 1


async def test_a_taken_name_is_refused_before_the_freeze(client: DSecClient) -> None:
    async with await client.run_container(BASE) as box:
        with pytest.raises(AlreadyExists, match="use replace"):
            await box.pack_diff(IMAGE)
        await box.pack_diff("snapshot/x")
        await box.pack_diff("snapshot/x", replace=True)


async def test_a_layer_removed_meanwhile_does_not_break_its_sandboxes(client: DSecClient) -> None:
    """Names go at once, bytes when nobody uses them: creation and removal may cross."""
    first = asyncio.Event()

    async def create() -> None:
        async with await client.run_container(BASE) as box:
            first.set()
            await asyncio.sleep(0.1)
            assert (await box.run("ls", "/bin")).ok

    creates = [asyncio.create_task(create()) for _ in range(10)]
    await asyncio.wait_for(first.wait(), 30)  # the others are at any of their steps
    await client.layers.remove(IMAGE)
    for _ in range(3):
        await client.layers.collect(grace_s=0, wait_s=0)
    results = await asyncio.gather(*creates, return_exceptions=True)
    for result in results:
        assert result is None or isinstance(result, NotFound), result
    assert any(result is None for result in results)


async def test_garbage_leaves_what_sandboxes_use(client: DSecClient, tmp_path: Path) -> None:
    await client.layers.import_("toolkit/t:1", directory(tmp_path, "t", opt__t="x" * 10000))
    args = DSecContainerRunArgs(container_image=IMAGE, toolkits=["toolkit/t:1"])
    async with await client.run_container(args) as box:
        await client.layers.remove("toolkit/t:1")
        for _ in range(2):
            await client.layers.collect(grace_s=0, wait_s=0)
        assert len(await shell(box, "cat /opt/t")) == 10000


async def test_a_new_toolkit_rebuilds_one_layer_for_fifty_workspaces(
    host: Daemon, client: DSecClient, tmp_path: Path
) -> None:
    def objects() -> dict[str, set[str]]:
        return {
            kind: {path.name for path in (host.state / "store" / kind).iterdir()}
            for kind in ("layers", "images", "blobs")
        }

    for n in range(50):
        source = directory(tmp_path, f"ws{n}", app__main=f"app {n}", app__data="d" * 50_000)
        await client.layers.import_(f"workspace/app-{n}:1", source)
    await client.layers.import_("toolkit/t:1", directory(tmp_path, "t1", opt__t="one", opt__u="u"))
    before = objects()
    await client.layers.import_("toolkit/t:2", directory(tmp_path, "t2", opt__t="two", opt__u="u"))
    new = {kind: names - before[kind] for kind, names in objects().items()}
    assert {kind: len(names) for kind, names in new.items()} == {
        "layers": 1, "images": 1, "blobs": 1,
    }  # fmt: skip

    async def runs(n: int) -> None:
        args = DSecContainerRunArgs(
            container_image=IMAGE, workspace=f"workspace/app-{n}:1", toolkits=["toolkit/t:2"]
        )
        async with await client.run_container(args) as box:
            assert await shell(box, "cat /app/main /opt/t") == f"app {n}two"

    await asyncio.gather(*(runs(n) for n in range(50)))
    assert len(objects()["layers"]) == len(before["layers"]) + 1
