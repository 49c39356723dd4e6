"""AppArmor on real sandboxes, as root inside. Runs in the guest of scripts/vm-test."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from dsecd.host import apparmor
from dsecd.policy import language
from dsecd.policy.compile import Compiled, compile_policy
from libdsec import model
from libdsec.errors import DSecError, InvalidArgument
from tests.system import apparmor_lab as lab
from tests.system.apparmor_lab import IMAGE, attempt, probed
from tests.system.daemon import Daemon, until

pytestmark = [pytest.mark.root, pytest.mark.vm, pytest.mark.needs("apparmor")]


@pytest.fixture(scope="module")
def probe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lab.build_probe(tmp_path_factory.mktemp("probe"))


def profiles(d: Daemon) -> list[str]:
    """Return the profiles of a daemon that the kernel has."""
    return sorted(name for name in apparmor.loaded() if name.startswith(f"{d.name}-"))


def compiled(policy: dict[str, Any]) -> Compiled:
    return compile_policy(language.from_object(policy))


def denying(path: str, *access: str, **more: Any) -> dict[str, Any]:
    return {"files": {"rules": [{"paths": [path], "deny": list(access)}]}, **more}


# --- attempts to get around a rule ----------------------------------------------------------------

SECRET = "/t/a/b/f"
HIDDEN = {"files": {"hide": [SECRET]}}
KEPT = denying("/t/a/b", "write")
NOT_RUN = denying("/t/a/b", "execute")

ATTEMPTS: list[tuple[str, dict[str, Any], lab.Operation]] = [
    ("read", HIDDEN, ("read", SECRET, "")),
    ("write", HIDDEN, ("write", SECRET, "")),
    ("execute", HIDDEN, ("execute", SECRET, "")),
    ("symlink", HIDDEN, ("read_link", "/t/free/l", SECRET)),
    ("hard link", HIDDEN, ("link", SECRET, "/t/free/l")),
    ("rename", HIDDEN, ("rename", SECRET, "/t/free/l")),
    ("rename of the parent", HIDDEN, ("rename", "/t/a/b", "/t/free/l")),
    ("rename of a grandparent", HIDDEN, ("rename", "/t/a", "/t/l")),
    ("exchange of the parent", HIDDEN, ("exchange", "/t/a/b", "/t/free")),
    ("/proc/self/root", HIDDEN, ("read", f"/proc/self/root{SECRET}", "")),
    ("/proc/self/cwd", HIDDEN, ("read", f"/proc/self/cwd/{SECRET}", "")),
    ("chroot", HIDDEN, ("chroot_read", "/t/a", "/b/f")),
    ("bind", HIDDEN, ("bind", "/t/a", "/t/free")),
    ("recursive bind", HIDDEN, ("rbind", "/t/a", "/t/free")),
    ("clone of a mount", HIDDEN, ("detached_read", "/t/a", "b/f")),
    ("clone of a mount, attached", HIDDEN, ("tree_mount", "/t/a", "/t/free")),
    ("overlay", HIDDEN, ("overlay_mount", "/t/a:/t/free", "/t/free")),
    ("pivot_root", HIDDEN, ("pivot", "/t/free", SECRET)),
    ("mount over the parent", HIDDEN, ("type_mount", "tmpfs", "/t/a/b")),
    ("mount over a grandparent", HIDDEN, ("type_mount", "tmpfs", "/t")),
    ("new mount over the parent", HIDDEN, ("new_mount", "tmpfs", "/t/a/b")),
    ("moved mount over the parent", HIDDEN, ("move_tmpfs", "/t/free", "/t/a/b")),
    ("write", KEPT, ("write", SECRET, "")),
    ("create", KEPT, ("create", "/t/a/b/new", "")),
    ("open with O_CREAT", KEPT, ("open_rw", SECRET, "")),
    ("mkdir", KEPT, ("mkdir", "/t/a/b/new", "")),
    ("mknod", KEPT, ("mknod", "/t/a/b/new", "")),
    ("symlink", KEPT, ("symlink", "/t/a/b/new", "/etc")),
    ("hard link into it", KEPT, ("link", "/t/free/f", "/t/a/b/new")),
    ("hard link out of it", KEPT, ("link", SECRET, "/t/free/l")),
    ("rename out of it", KEPT, ("rename", SECRET, "/t/free/l")),
    ("rename into it", KEPT, ("rename", "/t/free/f", "/t/a/b/new")),
    ("rename of it", KEPT, ("rename", "/t/a/b", "/t/free/l")),
    ("rename of the parent", KEPT, ("rename", "/t/a", "/t/free/l")),
    ("exchange", KEPT, ("exchange", SECRET, "/t/free/f")),
    ("chmod", KEPT, ("chmod", SECRET, "")),
    ("chmod through a descriptor", KEPT, ("chmod_fd", SECRET, "")),
    ("chmod of the directory", KEPT, ("chmod", "/t/a/b", "")),
    ("chown", KEPT, ("chown", SECRET, "")),
    ("truncate", KEPT, ("truncate", SECRET, "")),
    ("/proc/self/root", KEPT, ("write", f"/proc/self/root{SECRET}", "")),
    ("bind of other content", KEPT, ("bind", "/t/free", "/t/a/b")),
    ("bind of a file", KEPT, ("bind", "/t/free/f", SECRET)),
    ("mount over it", KEPT, ("type_mount", "tmpfs", "/t/a/b")),
    ("mount beneath it", KEPT, ("type_mount", "ramfs", "/t/a/b/d")),
    ("execute", NOT_RUN, ("execute", SECRET, "")),
    ("execute a descriptor", NOT_RUN, ("execute_fd", SECRET, "")),
    ("map code", NOT_RUN, ("map_code", SECRET, "")),
    ("hard link", NOT_RUN, ("link", SECRET, "/t/free/l")),
    ("rename of the directory", NOT_RUN, ("rename", "/t/a/b", "/t/free/l")),
    ("leave the profile", KEPT, ("change_profile", "changeprofile unconfined", "")),
]  # fmt: skip


async def test_no_way_around_a_rule(probe: Path) -> None:
    """Each attempt succeeds where there is no policy, and fails where there is one."""
    async with probed(probe) as d:
        client = await d.client()
        free = await client.create("free", IMAGE)
        without = await attempt(client, free.id, [operation for _, _, operation in ATTEMPTS])
        assert [
            (title, found)
            for (title, _, _), found in zip(ATTEMPTS, without, strict=True)
            if found != "ok" and title != "leave the profile"  # there is none to leave
        ] == []
        for number, policy in enumerate((HIDDEN, KEPT, NOT_RUN)):
            held = await client.create(f"held{number}", IMAGE, policy=policy)
            mine = [(title, op) for title, owner, op in ATTEMPTS if owner is policy]
            tried = await attempt(client, held.id, [op for _, op in mine])
            got = {title: found for (title, _), found in zip(mine, tried, strict=True)}
            assert {title: found for title, found in got.items() if found != "EACCES"} == {}


async def test_other_mechanisms_beside_it_weaken_nothing(probe: Path) -> None:
    async with probed(probe, alone=False) as d:
        client = await d.client()
        for number, policy in enumerate((HIDDEN, KEPT, NOT_RUN)):
            held = await client.create(f"held{number}", IMAGE, policy=policy)
            mine = [(title, op) for title, owner, op in ATTEMPTS if owner is policy]
            tried = await attempt(client, held.id, [op for _, op in mine])
            assert [t for (t, _), found in zip(mine, tried, strict=True) if found == "ok"] == []


# --- the reference model -------------------------------------------------------------------------


async def test_files_as_the_reference_model_says(probe: Path) -> None:
    """Thousands of operations under random policies: the kernel and the model agree."""
    draw, cases, wrong = random.Random(20260), 0, []
    async with probed(probe) as d:
        client = await d.client()
        for number in range(24):
            policy = {"files": lab.random_files(draw)}
            try:
                rules = compiled(policy).files
            except InvalidArgument:
                continue  # it contradicts itself
            box = await client.create(f"k{number}", IMAGE, policy=policy)
            operations = lab.random_operations(draw, rules, 80)
            tried = await attempt(client, box.id, operations)
            await client.stop(box.id)
            for operation, found in zip(operations, tried, strict=True):
                cases += 1
                verdict = lab.expected(rules, operation)
                if found != ("ok" if verdict == "allow" else "EACCES"):
                    wrong.append((policy, operation, verdict, found))
    assert wrong == []
    assert cases > 1000


async def test_mounts_as_the_reference_model_says(probe: Path) -> None:
    draw, cases, wrong = random.Random(20261), 0, []
    kinds = lab.mount_operations()
    async with probed(probe) as d:
        client = await d.client()
        free = await client.create("free", IMAGE)
        assert set(await attempt(client, free.id, [op for op, _, _ in kinds])) == {"ok"}
        for number in range(16):
            policy = {"mounts": lab.random_mounts(draw)}
            try:
                system = compiled(policy).system
            except InvalidArgument:
                continue
            box = await client.create(f"k{number}", IMAGE, policy=policy)
            tried = await attempt(client, box.id, [operation for operation, _, _ in kinds])
            await client.stop(box.id)
            for (operation, fstype, place), found in zip(kinds, tried, strict=True):
                cases += 1
                verdict = lab.expected_mount(system, fstype, place)
                # EPERM: a policy without any mount closes the calls themselves
                if found not in (("ok",) if verdict == "allow" else ("EACCES", "EPERM")):
                    wrong.append((policy, operation, verdict, found))
    assert wrong == []
    assert cases > 100


# --- who is confined, and for how long ------------------------------------------------------------

LABEL = ("/bin/cat", "/proc/self/attr/apparmor/current")


async def test_every_way_to_run_a_command_is_confined(probe: Path) -> None:
    async with probed(probe) as d:
        client = await d.client()
        box = await client.create("k", IMAGE, policy=KEPT)
        (name,) = profiles(d)
        label = f"{name} (enforce)\n".encode()
        assert (await client.run(box.id, *LABEL)).stdout == label
        assert (await client.run(box.id, *LABEL, user="agent")).stdout == label
        terminal = await client.run(box.id, *LABEL, pty=model.PtySize(rows=9, cols=99))
        assert terminal.stdout.replace(b"\r", b"") == label
        nnp = await client.create("n", IMAGE, policy=KEPT, no_new_privileges=True)
        assert (await client.run(nnp.id, *LABEL)).stdout == label
        await client.call("session.open", model.SessionArgs(name="s"), box.id)
        text = " ".join(LABEL).encode()
        call = model.ExecArgs(cid="in", shell=text, session="s")
        done = await client.call("exec.run", call, box.id, kind=model.CommandResult)
        assert done.stdout == label
        alone = model.ExecArgs(cid="sh", shell=text)
        done = await client.call("exec.run", alone, box.id, kind=model.CommandResult)
        assert done.stdout == label
        free = await client.create("free", IMAGE)
        assert (await client.run(free.id, *LABEL)).stdout == b"unconfined\n"


async def test_a_policy_has_one_profile_and_leaves_none(probe: Path) -> None:
    async with probed(probe) as d:
        client = await d.client()
        for key in ("a", "b"):
            await client.create(key, IMAGE, policy=KEPT)
        await client.create("c", IMAGE, policy=HIDDEN)
        assert len(profiles(d)) == 2
        await d.end()
        assert profiles(d) == []
        await d.start()


async def test_profiles_outlive_a_killed_daemon(probe: Path) -> None:
    """The one in use goes on; the one that only the dead daemon knew is removed."""
    write = [("write", SECRET, "")]
    async with probed(probe) as d:
        client = await d.client()
        box = await client.create("k", IMAGE, policy=KEPT)
        gone = await client.create("gone", IMAGE, policy=HIDDEN)
        await client.stop(gone.id)
        assert len(profiles(d)) == 2  # unused, and kept for the next of its kind
        await d.restart()
        client = await d.client()
        await until(lambda: len(profiles(d)) == 1)
        assert await attempt(client, box.id, write) == ["EACCES"]
        other = await client.create("other", IMAGE, policy=KEPT)
        assert len(profiles(d)) == 1
        await client.stop(box.id)
        assert await attempt(client, other.id, write) == ["EACCES"]


async def test_no_command_runs_without_its_profile(probe: Path) -> None:
    async with probed(probe) as d:
        client = await d.client()
        box = await client.create("k", IMAGE, policy=KEPT)
        (name,) = profiles(d)
        apparmor.remove(name)
        with pytest.raises(DSecError, match="cannot enter the AppArmor profile"):
            await client.run(box.id, "/bin/true")
        await d.restart()
        client = await d.client()
        found = await client.get(box.id)
        assert (found.state, found.reason) == ("failed", "its AppArmor profile is gone")
