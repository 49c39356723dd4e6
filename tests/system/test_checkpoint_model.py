"""Checkpoint, rollback and branch against full copies, under random file operations and writers.

Each test takes a seed of its own and prints it; ``DSEC_SEED`` repeats one.
"""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import shutil
import struct
import subprocess
from pathlib import Path

import pytest

from libdsec import DSecClient, DSecContainerRunArgs, Sandbox
from tests.system import tree_view
from tests.system.daemon import IMAGE, Daemon, until
from tests.system.spawner_lab import compile_c
from tests.system.tree_view import Tree, difference, sandbox_view, without_times
from tests.system.user_view import first_process, shell

pytestmark = pytest.mark.root
KINDS = ["memory", "disk"]
# shell text: all writers are at work; and another line was appended
BEGUN = "until [ -s mapped ] && [ -s whole ] && [ -e right ]; do sleep 0.01; done"
GOES_ON = "n=$(wc -c < appended); until [ $(wc -c < appended) -gt $n ]; do sleep 0.01; done"


@pytest.fixture(scope="module")
def churn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = Path(__file__).with_name("churn.c")
    return compile_c(source, tmp_path_factory.mktemp("churn") / "churn")


@pytest.fixture
def dice() -> random.Random:
    seed = int(os.environ.get("DSEC_SEED", "0")) or secrets.randbelow(1 << 30) + 1
    print(f"DSEC_SEED={seed}")
    return random.Random(seed)


class Model:
    """What /app must be: a directory of the host, copied whole at each checkpoint."""

    def __init__(self, churn: Path, folder: Path) -> None:
        self.churn, self.folder, self.now = churn, folder, folder / "now"
        self.now.mkdir()

    def change(self, seed: int, count: int) -> None:
        command = [self.churn, "ops", str(seed), str(count), "0"]
        subprocess.run(command, cwd=self.now, check=True)

    def save(self, name: str) -> None:
        _copy(self.now, self.folder / name)

    def back(self, name: str) -> None:
        shutil.rmtree(self.now)
        _copy(self.folder / name, self.now)

    def part(self) -> None:
        """Give each name a file of its own: overlayfs parts the names of a layer at a write."""
        parted = self.folder / "parted"
        _copy(self.now, parted, "--no-preserve=links")
        shutil.rmtree(self.now)
        parted.rename(self.now)

    def view(self) -> Tree:
        return without_times(tree_view.view(str(self.now)))


def _copy(source: Path, target: Path, *options: str) -> None:
    subprocess.run(["cp", "-a", *options, source, target], check=True)


async def start(client: DSecClient, churn: Path, upper: str, *toolkits: str) -> Sandbox:
    args = DSecContainerRunArgs(
        container_image=IMAGE, toolkits=list(toolkits), upper=upper, disk_limit_mb=128
    )  # type: ignore[arg-type]
    box = await client.run_container(args)
    await box.files.upload(churn, "/churn")
    await box.run("mkdir", "-p", "/app", check=True)
    return box


async def change(box: Sandbox, seed: int, count: int, bits: bool) -> None:
    await box.run("/churn", "ops", str(seed), str(count), str(int(bits)), cwd="/app", check=True)


async def seen(host: Daemon, box: Sandbox) -> Tree:
    return await sandbox_view(first_process(host, box.id), "/app")


async def expect(host: Daemon, box: Sandbox, model: Model) -> None:
    found = without_times(await seen(host, box))
    wrong = difference(found, model.view())
    assert not wrong, wrong


@pytest.mark.parametrize("upper", KINDS)
async def test_checkpoints_are_full_copies(
    host: Daemon,
    client: DSecClient,
    churn: Path,
    dice: random.Random,
    tmp_path: Path,
    upper: str,
) -> None:
    """The same operations on a layer's files, and on an ordinary directory that is copied whole."""
    model = Model(churn, tmp_path)
    model.change(dice.randrange(1 << 30), 300)
    model.part()
    await client.layers.import_("toolkit/app:1", str(model.now), at="/app")
    box = await start(client, churn, upper, "toolkit/app:1")
    methods, names = set(), []
    for _ in range(10):
        seed, count = dice.randrange(1 << 30), dice.randrange(150)
        await change(box, seed, count, bits=False)
        model.change(seed, count)
        sleeper = None
        if dice.random() < 0.4:
            sleeper = await box.commands.run(["sleep", "1000"], background=True)
        point = await box.checkpoint()
        if sleeper is not None:
            await sleeper.kill()
        await expect(host, box, model)
        methods.add(point.method)
        names.append(point.id)
        model.save(point.id)
        if dice.random() < 0.4:
            target = dice.choice(names)
            await box.rollback(target)
            model.back(target)
            await expect(host, box, model)
    for name in dice.sample(names, 3):
        (one,) = await box.branch(1, name)
        model.back(name)
        await expect(host, one, model)
        await change(one, 1, 50, bits=False)
        model.change(1, 50)
        await expect(host, one, model)
        await one.stop()
    await box.stop()
    print(f"methods: {methods}")


def control(host: Daemon, box: Sandbox, name: str) -> Path:
    for tree in ("/sys/fs/cgroup/unified", "/sys/fs/cgroup"):
        file = Path(tree) / host.name / box.id / name
        if file.exists():
            return file
    raise AssertionError(f"{box.id} has no {name}")


async def freeze(host: Daemon, box: Sandbox) -> None:
    control(host, box, "cgroup.freeze").write_text("1")
    await until(lambda: "frozen 1" in control(host, box, "cgroup.events").read_text())


@pytest.mark.parametrize("upper", KINDS)
async def test_a_checkpoint_amid_writers_is_the_moment_it_was_made(
    host: Daemon, client: DSecClient, churn: Path, dice: random.Random, upper: str
) -> None:
    """Writers append, map, rename and link; stopped at any instant, all of it is compared."""
    box = await start(client, churn, upper)
    history: dict[str, Tree] = {}
    methods = set()
    for number in range(10):
        await change(box, dice.randrange(1 << 30), 100, bits=True)
        writers = None
        if number % 2:
            writers = await box.commands.run(["/churn", "write"], cwd="/app", background=True)
            await asyncio.sleep(dice.uniform(0.02, 0.2))
            await freeze(host, box)
        tree = await seen(host, box)
        point = await box.checkpoint()  # lets them go on
        methods.add(point.method)
        history[point.id] = tree
        if writers is not None:
            await asyncio.sleep(0.01)
            await box.rollback(point)
            assert (await writers.wait()).signal == 9
            assert difference(await seen(host, box), tree) == {}
    assert methods == {"swap", "copy"}
    for name in dice.sample(list(history), len(history)):
        await box.rollback(name)
        assert difference(await seen(host, box), history[name]) == {}
    some = dice.choice(list(history))
    for one in await box.branch(2, some):
        assert difference(await seen(host, one), history[some]) == {}
        await one.stop()
    await box.stop()


@pytest.mark.parametrize("upper", KINDS)
async def test_no_file_of_a_writer_is_torn_by_a_checkpoint(
    client: DSecClient, churn: Path, dice: random.Random, upper: str
) -> None:
    """Nobody stops the writers but the checkpoint: what it saves is one instant for all of them."""
    box = await start(client, churn, upper)
    await box.commands.run(["/churn", "write"], cwd="/app", background=True)
    await shell(box, f"cd /app; {BEGUN}")
    points = []
    for _ in range(8):
        await shell(box, f"cd /app; {GOES_ON}")
        await asyncio.sleep(dice.uniform(0.005, 0.1))
        points.append(await box.checkpoint())
    assert {point.method for point in points} == {"copy"}
    lengths = []
    for point in points:
        await box.rollback(point)
        lines = (await box.files.read("/app/appended", format="bytes")).split()
        assert [int(line) for line in lines] == list(range(1, len(lines) + 1))
        lengths.append(len(lines))
        mapped = await box.files.read("/app/mapped", format="bytes")
        first, last = (struct.unpack_from("=Q", mapped, at)[0] for at in (0, len(mapped) - 4096))
        assert first - last in (0, 1)
        whole = await box.files.read("/app/whole", format="bytes")
        assert len(whole) == 4000
        assert len(set(struct.unpack("=1000I", whole))) == 1
        assert not await box.files.exists("/app/gone")
    assert lengths == sorted(lengths)
    assert lengths[0] < lengths[-1]
    await box.stop()


@pytest.mark.parametrize("upper", KINDS)
async def test_a_layer_packed_amid_writers_is_the_moment_it_was_packed(
    host: Daemon, client: DSecClient, churn: Path, dice: random.Random, upper: str
) -> None:
    """With hard links, attributes and dirty pages, over checkpoints of both kinds."""
    box = await start(client, churn, upper)
    for number in range(4):
        await change(box, dice.randrange(1 << 30), 100, bits=True)
        if number == 1:
            assert (await box.checkpoint()).method == "swap"
        writers = await box.commands.run(["/churn", "write"], cwd="/app", background=True)
        await asyncio.sleep(dice.uniform(0.02, 0.2))
        if number == 2:
            assert (await box.checkpoint()).method == "copy"
        await freeze(host, box)
        tree = await seen(host, box)
        name = f"snapshot/moment:{number}"
        await box.pack_diff(name, clean=False)  # lets them go on
        await writers.kill()
        # all of them: what still ends would make the next checkpoint a copy
        await until(lambda: host.pids_of(box.id) == [first_process(host, box.id)])
        args = DSecContainerRunArgs(container_image=name)
        async with await client.run_container(args) as again:
            wrong = difference(await seen(host, again), tree)
            assert not wrong, wrong
    await box.stop()
