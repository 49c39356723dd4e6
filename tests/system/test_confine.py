"""Policies on files and calls in real containers: what they mean, for whom, and for how long."""

from __future__ import annotations

import errno
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from dsecd.host import probe
from dsecd.host.syscalls import host_arch, number
from dsecd.policy import explain, seccomp
from libdsec import model
from libdsec.errors import InvalidArgument, PermissionDenied
from tests.system.confine_lab import Box, Lab, open_lab, policy
from tests.system.daemon import IMAGE, daemon

pytestmark = [pytest.mark.root, pytest.mark.asyncio(loop_scope="module")]
AF_VSOCK = 40
LANDLOCK = pytest.mark.needs("landlock")
GUARDED: dict[str, Any] = {
    "files": {
        "hide": ["/data/secret", "/later/deep/secret"],
        "rules": [
            {"paths": ["/a/b/c", "/later/file", "/link"], "deny": ["write"]},
            {"paths": ["/data/tool"], "deny": ["execute"]},
        ],
    }
}
# what busybox needs, and a place to work
CLOSED: dict[str, Any] = {
    "files": {
        "default": "deny",
        "rules": [
            {"paths": ["/bin", "/probe"], "allow": ["read", "execute"]},
            {"paths": ["/a", "/not/there"], "allow": ["read", "write"]},
            {"paths": ["/data/open", "/sly"], "allow": ["read"]},
            {"paths": ["/a/b/c"], "deny": ["write"]},
        ],
    }
}


@pytest.fixture(autouse=True)
def nothing_left_behind() -> None:
    """The module's lab looks after itself."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def lab() -> AsyncIterator[Lab]:
    links = {"link": "a", "sly": "data", "etc/alias": "/etc/hostname"}
    async with open_lab(links=links, probes=["data/tool"]) as made:
        yield made


def calls(box: Box, asked: list[tuple[str, int]]) -> list[int]:
    """Return the errno of each system call, given by its name and first argument."""
    told = "".join(f"S\t{number(name, host_arch())}\t{first}\n" for name, first in asked)
    return [int(line) for line in box.run(argv=["/probe"], input=told.encode())[1].split()]


def refused(box: Box, shell: str, *, user: str = "root", **args: Any) -> bool:
    """Say whether a command fails; it must be for the policy's reasons."""
    code, text = box.run(shell, user=user, **args)
    reasons = ("ermission denied", "Read-only", "busy", "not permitted", "Invalid cross-device")
    assert code == 0 or any(reason in text for reason in reasons), (shell, code, text)
    return code != 0


def assert_guarded(box: Box) -> None:
    for shell in (
        "cat /data/secret", "echo x > /a/b/c/f", "echo x > /a/b/c/new", "mv /a /z", "rm /link",
        "mv /link /z", "/data/tool x", "cat /later/deep/secret", "echo x > /later/deep/secret",
        "echo x > /later/file", "mv /later /z", "mount -t tmpfs none /tmp", "chmod 777 /a/b/c/f",
    ):  # fmt: skip
        assert refused(box, shell), shell
    for shell in ("cat /a/b/c/f", "cat /link/h", "cat /data/open", "cat /data/tool", "ls /later"):
        box.sh(shell)


# --- guards ---------------------------------------------------------------------------------------


async def test_guards_hold_and_the_rest_stays_as_it_was(lab: Lab) -> None:
    async with lab.box(GUARDED) as box:
        assert_guarded(box)
        box.sh("echo x > /a/b/new; mv /a/b/new /a/b/newer; ln /a/b/newer /a/b/third")
        box.sh("echo x > /data/new; echo x > /later/deep/other; echo x > /later/other")
        assert box.sh("cat /later/file") == ""


async def test_guards_bind_the_files_api_too(lab: Lab) -> None:
    """It enters the sandbox's own tree, and the tree has them."""
    async with lab.box(GUARDED) as box:
        with pytest.raises(PermissionDenied):
            box.client.call("files.write", path=b"/a/b/c/f", data=b"x")
        with pytest.raises(PermissionDenied):
            box.client.call("files.read", path=b"/data/secret")
        box.client.call("files.write", path=b"/a/b/g", data=b"x")


async def test_guards_hold_for_every_way_in(lab: Lab) -> None:
    async with lab.box(GUARDED) as box:
        terminal = {"pty": {"rows": 24, "cols": 80}}
        for args in ({}, {"user": "agent"}, terminal, {"background": False, "want_stdin": False}):
            given = {key: value for key, value in args.items() if key != "want_stdin"}
            assert box.run("cat /data/secret", **given)[0] != 0
        box.client.call("session.open", name="s")
        assert box.run("cat /data/secret", session="s")[0] != 0
        assert box.run("mount -t tmpfs none /tmp", session="s")[0] != 0
        box.client.call("session.close", name="s")


async def test_guards_outlast_checkpoint_rollback_and_branch(lab: Lab) -> None:
    async with lab.box(GUARDED) as box:
        box.sh("echo kept > /a/kept")
        point = await box.checkpoint()
        assert_guarded(box)
        box.sh("rm /a/kept")
        again = await box.checkpoint()
        await box.rollback(point)
        assert_guarded(box)
        assert box.sh("cat /a/kept") == "kept\n"
        await box.rollback(again)
        assert_guarded(box)
        async with lab.box(GUARDED, from_checkpoint=f"{box.name}/{point}") as other:
            assert_guarded(other)
            assert other.sh("cat /a/kept") == "kept\n"
        async with lab.box(None, from_checkpoint=f"{box.name}/{point}") as free:
            free.sh("echo x > /a/b/c/f; cat /data/secret; mv /later /moved")


async def test_guards_outlast_the_daemon() -> None:
    """What a later root needs of them is in the journal."""
    rules = {"files": {"rules": [{"paths": ["/etc"], "deny": ["write"]}], "hide": ["/home/agent"]}}
    shell = "echo x > /etc/x || mv /etc /z || mv /home /z || ls /home/agent"
    async with daemon() as own:
        made = await (await own.client()).create("k", IMAGE, policy=rules)
        await own.restart()
        client = await own.client()
        assert (await client.run(made.id, "sh", "-c", shell)).exit_code != 0
        await client.call("sandbox.checkpoint", model.SandboxRef(id=made.id))
        assert (await client.run(made.id, "sh", "-c", shell)).exit_code != 0
        await client.stop(made.id)


async def test_a_guard_on_the_root_leaves_devices_and_proc(lab: Lab) -> None:
    async with lab.box({"files": {"rules": [{"paths": ["/"], "deny": ["write"]}]}}) as box:
        for shell in ("echo x > /tmp/x", "echo x > /dev/shm/x", "mkdir /new", "rm /a/h"):
            assert refused(box, shell), shell
        box.sh("echo x > /dev/null; echo 0 > /proc/self/oom_score_adj || true; cat /a/h")
        point = await box.checkpoint()
        assert refused(box, "echo x > /dev/shm/x")
        await box.rollback(point)
        assert refused(box, "echo x > /tmp/x")


async def test_masks_and_locks_in_proc_and_dev(lab: Lab) -> None:
    rules = {
        "files": {
            "hide": ["/proc/cpuinfo", "/dev/shm/x"],
            "rules": [{"paths": ["/dev"], "deny": ["write"]}],
        }
    }
    async with lab.box(rules) as box:
        for _ in range(2):
            assert refused(box, "cat /proc/cpuinfo")
            assert refused(box, "echo x > /dev/shm/y")
            box.sh("echo x > /dev/null; cat /proc/meminfo")
            assert "/dev/pts" in box.sh("tty", pty={"rows": 2, "cols": 2})
            await box.checkpoint()


async def test_a_path_through_a_symbolic_link_is_refused_with_its_name(lab: Lab) -> None:
    with pytest.raises(InvalidArgument, match="/link/b leads through a symbolic link"):
        await lab.create({"files": {"hide": ["/link/b"]}})


async def test_a_path_below_a_file_needs_nothing(lab: Lab) -> None:
    async with lab.box({"files": {"hide": ["/a/h/x"]}}) as box:
        assert refused(box, "rm /a/h")
        assert refused(box, "mv /a/h /a/z")
        assert box.sh("cat /a/h") == "content of a/h\n"


async def test_a_hostile_checkpoint_cannot_lead_a_guard_astray(lab: Lab) -> None:
    """A branch's policy meets what the agent made of the paths: links, files, devices of pipes."""
    async with lab.box(None) as box:
        box.sh("rm -r /data; ln -s /etc /data; mkfifo /pipe; ln -s /pipe /a/secret")
        point = await box.checkpoint()
        origin = f"{box.name}/{point}"
        with pytest.raises(InvalidArgument, match="/data/secret"):
            await lab.create({"files": {"hide": ["/data/secret"]}}, from_checkpoint=origin)
        async with lab.box(
            {"files": {"hide": ["/a/secret", "/pipe"]}}, from_checkpoint=origin
        ) as other:
            assert other.sh("cat /etc/hostname")
            assert refused(other, "cat /a/secret")
            assert refused(other, "mv /a/secret /a/z")


# --- Landlock -------------------------------------------------------------------------------------


@LANDLOCK
async def test_a_closed_policy_opens_what_it_lists(lab: Lab) -> None:
    async with lab.box(CLOSED) as box:
        for shell in (
            "cat /etc/passwd", "ls /", "ls /etc", "echo x > /tmp/x", "echo x > /bin/x",
            "echo x > /data/open", "cat /data/secret", "echo x > /a/b/c/f", "ls /dev",
            "mount -t tmpfs none /tmp", "rm /data/open", "mv /a/h /tmp/h", "ln /a/h /tmp/h",
        ):  # fmt: skip
            assert refused(box, shell), shell
        box.sh("cat /a/b/c/f /data/open; ls /a; echo x > /a/new; mv /a/new /a/b/new; rm /a/b/new")


@LANDLOCK
async def test_every_command_is_closed_in_whatever_way_it_starts(lab: Lab) -> None:
    async with lab.box(CLOSED) as box:
        size = {"rows": 30, "cols": 90}
        for user in ("root", "agent"):
            assert refused(box, "cat /etc/passwd", user=user)
            code, text = box.run("tty; cat /etc/passwd", user=user, pty=size)
            assert code != 0
            assert text.startswith("/dev/pts/")
        said = box.run("stat -c %u $(tty); tty", user="agent", pty=size)[1].split()
        assert said[0] == "1000", said
        box.client.call("session.open", name="s", user="root")
        assert box.run("cat /etc/passwd", session="s")[0] != 0
        box.client.call("session.close", name="s")
        assert refused(box, "sh -c 'sh -c \"cat /etc/passwd\"'")


@LANDLOCK
async def test_the_ruleset_is_for_the_agent_not_for_the_client(lab: Lab) -> None:
    async with lab.box(CLOSED) as box:
        assert box.client.call("files.read", path=b"/etc/passwd")["size"] > 0
        box.client.call("files.write", path=b"/etc/given", data=b"x")
        with pytest.raises(PermissionDenied):  # a guard is in the tree itself
            box.client.call("files.write", path=b"/a/b/c/f", data=b"x")
        assert refused(box, "cat /etc/given")


@LANDLOCK
async def test_paths_are_opened_for_each_command_and_through_no_link(lab: Lab) -> None:
    async with lab.box(CLOSED) as box:
        assert refused(box, "ls /sly/")  # a rule for a link opens nothing
        assert refused(box, "cat /sly/secret")
        assert refused(box, "mkdir -p /not/there")
        box.client.call("files.mkdir", path=b"/not/there")
        box.sh("echo x > /not/there/x")  # it is there now
        box.client.call("files.remove", path=b"/not/there", recursive=True)
        box.client.call("files.rename", path=b"/etc/alias", target=b"/not/there")
        assert refused(box, "cat /not/there")
        point = await box.checkpoint()
        assert refused(box, "cat /etc/passwd")
        await box.rollback(point)
        assert refused(box, "cat /etc/passwd")


@LANDLOCK
async def test_commands_of_a_closed_policy_are_apart(lab: Lab) -> None:
    opened = {"paths": ["/bin", "/proc", "/a"], "allow": ["read", "write", "execute"]}
    for default, apart in (("allow", False), ("deny", True)):
        async with lab.box({"files": {"default": default, "rules": [opened]}}) as box:
            box.client.call("session.open", name="s")
            pid = int(box.sh("sleep 100 >/a/out 2>&1 </a/h & echo $!", session="s"))
            assert (box.run(f"cat /proc/{pid}/environ")[0] != 0) == apart
            assert (box.run(f"test -d /proc/{pid}")[0] != 0) == apart  # hidepid=invisible
            box.sh(f"kill {pid}")
            box.client.call("session.close", name="s")


@LANDLOCK
async def test_set_user_id_programs_still_gain_their_rights(lab: Lab) -> None:
    """The ruleset is taken on with rights, so it needs no no_new_privs."""
    rules = {
        "files": {
            "default": "deny",
            "rules": [{"paths": ["/"], "allow": ["read", "write", "execute"]}],
        }
    }
    async with lab.box(rules) as box:
        box.sh("cp /probe /a/p && chmod 4755 /a/p")
        assert box.run(argv=["/a/p"], user="agent", input=b"e\t\n") == (0, "0\n")
        assert box.run(argv=["/probe"], user="agent", input=b"e\t\n") == (0, "1000\n")


# --- the filter -----------------------------------------------------------------------------------


async def test_ioctls_by_list(lab: Lab) -> None:
    size = {"rows": 30, "cols": 90}
    async with lab.box({"ioctls": {"deny": ["TIOCGWINSZ"]}}) as box:
        assert "not permitted" in box.run("stty size", pty=size)[1]
        assert box.run("tty", pty=size)[1].startswith("/dev/pts/")
    allowed = {"ioctls": {"default": "deny", "allow": ["TCGETS", "TIOCGWINSZ"]}}
    async with lab.box(allowed) as box:
        assert box.run("stty size", pty=size)[1].strip() == "30 90"
        assert "not permitted" in box.run("stty cols 50", pty=size)[1]
        assert box.run(argv=["/probe"], input=b"i\t0\t0x541b\ni\t0\t0x5401\n")[1] == "1\n25\n"


async def test_closed_mounts(lab: Lab) -> None:
    async with lab.box({"mounts": {"default": "deny"}}) as box:
        assert refused(box, "mount -t tmpfs none /tmp")
        assert refused(box, "umount /proc")
        here = [name for name in seccomp.MOUNT_CALLS if number(name, host_arch()) is not None]
        assert calls(box, [(name, 0) for name in here]) == [errno.EPERM] * len(here)
    async with lab.box({"mounts": {"rules": [{"deny": "*", "at": "/"}]}}) as box:
        assert refused(box, "mount -t tmpfs none /tmp")
    async with lab.box({"mounts": {"default": "allow"}}) as box:
        box.sh("mount -t tmpfs none /tmp && umount /tmp")


async def test_a_denied_socket_cannot_be_listened_on(lab: Lab) -> None:
    async with lab.box({"unix": {"deny": ["/run/x.sock"]}}) as box:
        assert refused(box, "echo x > /run/x.sock")
        assert box.run("nc -lU /run/x.sock < /dev/null & sleep 0.2; test -S /run/x.sock")[0] != 0


# --- what is said of it ---------------------------------------------------------------------------


@pytest.mark.parametrize("preset", ["swe", "grader", "sealed", "open"])
async def test_what_explain_says_of_presets_is_true_here(lab: Lab, preset: str) -> None:
    made = policy(preset)
    assert made is not None
    rows = explain.Host(probe.probe(), lab.backend.capabilities.mechanisms).explain(made)
    files = [row for row in rows if row.place.startswith(("files", "mounts", "ioctls", "vsock"))]
    assert {row.state for row in files} == {"enforced"}
    network = "none" if preset in ("grader", "sealed") else "nat"
    async with lab.box(preset, network=network) as box:
        if preset == "grader":
            for shell in ("echo x > /etc/passwd", "echo x > /usr/x", "rm /bin/sh", "mv /etc /z"):
                assert refused(box, shell), shell
        else:
            box.sh("echo x > /usr/x")
        assert refused(box, "mount -t tmpfs none /tmp") == (preset == "grader")
        assert calls(box, [("socket", AF_VSOCK)]) == [errno.EAFNOSUPPORT]


async def test_confinements_are_made_once_per_policy(lab: Lab) -> None:
    confiner = lab.backend._host.confiner
    first, second = (confiner.confine(policy(GUARDED)) for _ in range(2))
    assert first is second
    assert confiner.confine(None) is confiner.confine(None)
    plain = confiner.confine(policy("sealed"))
    assert (plain.guards, plain.landlock) == ((), None)
    assert plain.seccomp == confiner.confine(None).seccomp
