"""The programs of the security module in real sandboxes, as root inside, against the reference."""

from __future__ import annotations

import contextlib
import os
import random
import struct
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from dsecd.host import bpf, lsmtable
from dsecd.host.lsmtable import Denial, Node, Table
from dsecd.policy import language
from dsecd.policy.compile import compile_policy
from libdsec import DSecClient, DSecContainerRunArgs, Sandbox, model
from libdsec.errors import DSecError
from tests.system import lsm_lab as lab
from tests.system.daemon import Daemon, until

pytestmark = [
    pytest.mark.root,
    pytest.mark.vm,
    pytest.mark.needs("bpf_lsm", "bpf_fs"),
    pytest.mark.asyncio(loop_scope="module"),
]
IMAGE, ALONE = "base/lsm:1", "only-bpf-lsm"
POLICIES, ROUNDS = 8, 6
READ_ONLY = {"files": {"rules": [{"paths": ["/t/a"], "deny": ["write"]}], "hide": ["/t/b/f"]}}
TRIES = [("read", "/t/a/f", ""), ("write", "/t/a/f", ""), ("read", "/t/b/f", "")]
ANSWERS = [0, lab.EACCES, lab.EACCES]
SIZES = {
    "bindings": (8, lsmtable.BINDING_BYTES),
    "roots": (lsmtable.ROOT_KEY_BYTES, lsmtable.NODE_BYTES),
    "names": (lsmtable.NAME_KEY_BYTES, lsmtable.NODE_BYTES),
}
LENT = pytest.mark.leaky("the daemon lives longer than the test")
_LINK_NEXT = 31


@contextlib.asynccontextmanager
async def lent() -> AsyncIterator[Daemon]:
    """A daemon with the layer; no other mechanism is there to deny anything."""
    made = Daemon()
    try:
        await made.start(ALONE)
        tree = made.root / "tree"
        lab.make_tree(tree)
        client = await made.client()
        await client.call("layer.import", model.LayerImport(name=IMAGE, source=str(tree)))
        yield made
    finally:
        await made.close()


# One for most tests: in the guest it takes long to start.
@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running() -> AsyncIterator[Daemon]:
    async with lent() as made:
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(running: Daemon) -> AsyncIterator[DSecClient]:
    async with DSecClient(f"unix:{running.socket}") as made:
        yield made


async def make(client: DSecClient, policy: dict[str, Any] | None, **more: Any) -> Sandbox:
    options = {"memory_limit_mb": 128, "disk_limit_mb": 64, "policy": policy, **more}
    return await client.run_container(
        DSecContainerRunArgs(container_image=IMAGE, **options), timeout=120
    )


def links() -> set[int]:
    """Return the ids of all BPF links of the host."""
    found, number = set(), 0
    while True:
        attr = bytearray(struct.pack("=IIII", number, 0, 0, 0))
        array = (bpf.ctypes.c_char * len(attr)).from_buffer(attr)
        if bpf._bpf(_LINK_NEXT, array) < 0:
            return found
        (number,) = struct.unpack_from("=I", attr, 4)
        found.add(number)


@LENT
async def test_every_attempt_succeeds_without_rules(client: DSecClient) -> None:
    async with await make(client, None) as sandbox:
        tries = lab.attempts()
        found = await lab.outcomes(sandbox, tries)
        assert [(one, code) for one, code in zip(tries, found, strict=True) if code] == []


@LENT
async def test_the_kernel_agrees_with_the_reference(client: DSecClient) -> None:
    source, tries, cases, denied = random.Random(4), lab.attempts(), 0, 0
    wrong = []
    for number in range(POLICIES):
        policy = lab.draw(source)
        says = lab.Model(compile_policy(language.from_object(policy)))
        async with await make(client, policy, upper=("memory", "disk")[number % 2]) as sandbox:
            found = await lab.outcomes(sandbox, tries)
        for one, code in zip(tries, found, strict=True):
            cases += 1
            if says.allows(*one) == lab.is_denied(code):
                wrong.append((policy, one, code))
            denied += code != 0
    print(f"{cases} cases, {denied} denied")
    assert not wrong, wrong[:20]
    assert cases / 10 < denied < cases * 9 / 10  # neither answer is the only one


async def test_rules_outlive_the_daemon_and_nothing_outlives_the_sandbox() -> None:
    before = links()
    async with lent() as running, DSecClient(f"unix:{running.socket}") as client:
        sandbox = await make(client, READ_ONLY)
        attached = links() - before
        assert await lab.outcomes(sandbox, TRIES) == ANSWERS
        running.kill()
        assert links() - before == attached
        await running.start(ALONE)
        assert links() - before == attached
        assert await lab.outcomes(sandbox, TRIES) == ANSWERS
        second = await make(client, {"files": {"hide": ["/t/a/f"]}})
        assert await lab.outcomes(second, TRIES) == [lab.EACCES, lab.EACCES, 0]
        await second.stop()
        await sandbox.stop()
        assert rows(running) == 0
    assert attached
    await until(lambda: not links() & attached)  # the kernel frees what was pinned a little later


@contextlib.contextmanager
def pinned(running: Daemon, name: str) -> Iterator[bpf.Map]:
    """Lend a map of the daemon's."""
    (directory,) = (running.runtime / "bpf-files").iterdir()
    fd = bpf.open_pin(directory / name)
    try:
        yield bpf.Map(fd, *SIZES[name], name)
    finally:
        os.close(fd)


def rows(running: Daemon) -> int:
    """Return how many rows sandboxes have."""
    total = 0
    for name in SIZES:
        with pinned(running, name) as map_:
            total += len(map_.all_keys())
    return total


@LENT
async def test_rules_hold_in_every_root_of_a_sandbox(client: DSecClient) -> None:
    sandbox = await make(client, READ_ONLY, upper="disk")
    first = await sandbox.checkpoint()
    assert first.method == "swap"
    assert await lab.outcomes(sandbox, TRIES) == ANSWERS
    await sandbox.run("/bin/sh", "-c", "echo new > /t/c/f", check=True)
    await sandbox.rollback(first)
    assert await lab.outcomes(sandbox, TRIES) == ANSWERS
    await sandbox.stop()


@LENT
async def test_a_copied_up_file_keeps_its_rules(client: DSecClient) -> None:
    """Its inode is another one once it was dropped from memory: see dsecd.policy.lsm."""
    policy = {"files": {"rules": [{"paths": ["/t/a/f"], "deny": ["read"]}]}}
    sandbox = await make(client, policy, disk_limit_mb=64)
    await sandbox.run("/bin/sh", "-c", "echo more >> /t/a/f; chmod 700 /t/a", check=True)
    Path("/proc/sys/vm/drop_caches").write_text("2")
    tries = [("read", "/t/a/f", ""), ("read", "/t/a/k.key", ""), ("unlink", "/t/a/f", "")]
    assert await lab.outcomes(sandbox, tries) == [lab.EACCES, 0, lab.EACCES]
    await sandbox.stop()


@LENT
async def test_a_rule_holds_for_what_is_made_later(client: DSecClient) -> None:
    policy = {"files": {"rules": [{"paths": ["/t/new/deep"], "deny": ["execute", "write"]}]}}
    sandbox = await make(client, policy)
    tries = [
        ("mkdir", "/t/new", ""), ("mkdir", "/t/new/deep", ""), ("create", "/t/new/deep", ""),
        ("rename", "/t/b/rnd", "/t/new/deep"), ("link", "/t/b/f", "/t/new/deep"),
        ("rename", "/t/new", "/t/other"), ("rmdir", "/t/new", ""), ("create", "/t/new/x", ""),
    ]  # fmt: skip
    denied = lab.EACCES
    assert await lab.outcomes(sandbox, tries) == [0, *[denied] * 6, 0]
    await sandbox.stop()


@LENT
async def test_a_program_without_execute_is_no_argument_of_the_loader_either(
    client: DSecClient,
) -> None:
    """What holds: nobody maps it as code. What does not: reading it, and writing a copy."""
    policy = {"files": {"rules": [{"paths": ["/t"], "deny": ["execute"]}]}}
    sandbox = await make(client, policy)
    tries = [("execute", "/t/a/f", ""), ("map_exec", "/t/a/f", ""), ("read", "/t/a/f", "")]
    assert await lab.outcomes(sandbox, tries) == [lab.EACCES, lab.EACCES, 0]
    done = await sandbox.run("/bin/sh", "-c", "cp /t/a/f /srv/f; exec /srv/f")
    assert done.exit_code == 0
    await sandbox.stop()


@LENT
async def test_too_many_types_are_refused_and_leave_nothing(
    running: Daemon, client: DSecClient
) -> None:
    before = rows(running)
    rules = [{"deny": f"type{number}", "at": "/t"} for number in range(64)]
    with pytest.raises(DSecError, match="types of file systems"):
        await make(client, {"mounts": {"rules": rules}})
    assert rows(running) == before


async def nanoseconds(sandbox: Sandbox) -> list[float]:
    """Return what an open(2) takes of a file that rules are about, and of another one."""
    timed = [("time", path, "3000") for path in ("/t/a/d/f", "/bin/tiny")]
    data = "".join(f"{word}\0" for one in timed for word in one).encode()
    done = await sandbox.run(lab.PROBE, input=data, timeout=600, check=True)
    return [float(line.split()[0]) for line in str(done.stdout).splitlines()]


@LENT
async def test_open_costs_the_same_beside_a_thousand_policies(
    running: Daemon, client: DSecClient
) -> None:
    node = Node(Denial(), Denial(), 1, has_places=True)
    table = Table(roots={1: node}, names={(1, b"%d" % number): node for number in range(20)})
    others = [lsmtable.pack(table, (1 << 40) + number, 1 << 20) for number in range(1000)]
    found: dict[str, list[list[float]]] = {"no policy": [], "one": [], "1,000 others": []}
    plain, bound = await make(client, None), await make(client, READ_ONLY)
    with pinned(running, "names") as names, pinned(running, "roots") as roots:
        maps = {"names": names, "roots": roots}
        for _ in range(ROUNDS):  # in turn, for the machine has other things to do
            found["no policy"].append(await nanoseconds(plain))
            found["one"].append(await nanoseconds(bound))
            for other in others:
                for name, map_ in maps.items():
                    map_.update_all(list(other[name]), list(other[name].values()))
            found["1,000 others"].append(await nanoseconds(bound))
            for other in others:
                for name, map_ in maps.items():
                    map_.delete_all(list(other[name]))
    best = {
        name: [min(column) for column in zip(*rounds, strict=True)]
        for name, rounds in found.items()
    }
    print(f"open, ns: {best}")
    assert all(b < 1.5 * a for a, b in zip(best["one"], best["1,000 others"], strict=True))
    for sandbox in (plain, bound):
        await sandbox.stop()
