"""dsec-spawner on a real kernel: what a container is, what root inside cannot, what is undone."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import select
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from dsecd import fastpath
from dsecd.host import probe
from dsecd.host.plan import STEPS, Bind, FileWrite
from libdsec.errors import DSecError, Exhausted, Internal
from tests.system.daemon import until
from tests.system.spawner_lab import BINARY, UID_BASE, Lab, build_base, compile_c, open_lab, traces

pytestmark = pytest.mark.root


@pytest.fixture(scope="session")
def parts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("spawner")
    init = compile_c(Path(__file__).with_name("spawner_init.c"), folder / "init")
    return build_base(folder), init


@pytest.fixture(params=["by descriptor", "by path"])
async def lab(
    request: pytest.FixtureRequest, tmp_path: Path, parts: tuple[Path, Path]
) -> AsyncIterator[Lab]:
    by_path = request.param == "by path"
    if not by_path and not probe.feature("overlay_lower_fd").available:
        pytest.skip(probe.feature("overlay_lower_fd").reason)
    async with open_lab(tmp_path, *parts, by_path=by_path) as lab:
        yield lab


async def nothing_left(lab: Lab, before: dict[str, object], step: str = "") -> None:
    """All is as before, soon: the dead are reaped, and a creator closes a pidfd it has sent."""
    with contextlib.suppress(AssertionError):
        await until(lambda: traces(lab) == before)
    assert traces(lab) == before, step


async def test_a_container_is_what_its_plan_says(lab: Lab) -> None:
    before = traces(lab)
    async with lab.container("a", cpus=(0,)):
        status, text = await lab.say("a", "id -u; hostname; nproc; cat /etc/hostname; ls /proc")
        assert status == 0
        assert text.splitlines()[:4] == ["0", "box", "1", "box"]
        assert "sys" in text
        command = "stat -c '%u %a' / /etc/x /etc/x/y /dev/shm; cat /etc/x/y"
        status, text = await lab.say("a", command)
        assert text.split() == ["0", "755", "0", "755", "0", "600", "0", "1777", "deep"]
        assert (lab.folder / "sb/a").stat().st_mode & 0o777 == 0o700
    await nothing_left(lab, before)


async def test_pid_1_is_unprivileged_and_holds_only_its_descriptors(lab: Lab) -> None:
    async with lab.container("a"):
        _, text = await lab.say("a", "@init")
    owner = UID_BASE + 65535
    assert text.startswith(
        f"pid 1 pgid 1 uid {owner} euid {owner} gid {owner} groups 0 config 3000\n"
    )
    fds = dict(re.findall(r"^fd (\d+) (\S+)", text, re.M))
    assert sorted(map(int, fds)) == [*range(11), 12]  # 11: the cgroup namespace, its own
    assert {fds["0"], fds["1"], fds["2"]} == {"/dev/null"}
    kinds = [fds[str(fd)].partition(":")[0] for fd in range(7, 11)]
    assert kinds == ["user", "mnt", "ipc", "uts"]
    assert fds["12"] == "/"  # of the upper's own mount


async def test_spawners_and_pid_1_are_under_the_base_filter(lab: Lab) -> None:
    async with lab.container("a") as spawned:
        workers = [*lab.pool._creators, *lab.pool._destroyers, *lab.pool._rerooters]
        for pid in (*(worker._process.pid for worker in workers), spawned.pid):
            status = Path(f"/proc/{pid}/status").read_text()
            fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
            assert (fields["Seccomp"], fields["Seccomp_filters"]) == ("2", "1")
            assert fields["NoNewPrivs"] == "0"  # set-user-ID programs work in a sandbox


@pytest.mark.vm
async def test_root_inside_has_no_power_over_pid_1_masks_or_devices(lab: Lab) -> None:
    async with lab.container("a"):
        status, text = await lab.say("a", "attack")
        assert status == 0
        outcome = dict(line.split() for line in text.splitlines())
        assert outcome.pop("own_tmpfs") == "DONE"  # the attacks themselves did run
        done = [name for name, result in outcome.items() if result == "DONE"]
        assert done == []
        assert len(outcome) == 21
        _, text = await lab.say("a", "cat /proc/keys; cat /proc/kpagecgroup | wc -c; ls /proc/fs")
        assert text.split() == ["0"]
        command = "kill -9 1; ls -d /proc/1; find / -name agent.sock; id -u"
        status, text = await lab.say("a", command)
        assert text.splitlines()[-1] == "0"
        assert "/agent.sock" not in text


async def test_generated_files_and_their_directories_are_roots(lab: Lab) -> None:
    files = (("etc/x/y", b"deep", 0o600), ("etc/x/z", b"", 0o444), ("top", b"t", 0o755))
    async with lab.container("a", files=files):
        paths = "/etc /etc/x /etc/x/y /etc/x/z /top /dev/shm"
        _, text = await lab.say("a", f"stat -c '%a %u' {paths}; cat /etc/x/y")
    assert text.splitlines() == ["755 0", "755 0", "600 0", "444 0", "755 0", "1777 0", "deep"]


async def test_pid_1_owns_no_limit_of_its_cgroup(lab: Lab) -> None:
    async with lab.container("a"):
        group = lab.cgroup / "a"
        owned = {each.name for each in group.iterdir() if each.stat().st_uid == UID_BASE + 65535}
    assert owned == {"cgroup.procs"}


async def test_a_process_cannot_leave_its_cgroup(lab: Lab) -> None:
    async with lab.container("a") as spawned:
        _, text = await lab.say(
            "a",
            "mkdir /c; mount -t cgroup2 none /c; mount -t cgroup -o devices none /c;"
            "cat /proc/self/cgroup",
        )
        assert "0::/\n" in text
        assert text.count("ermission denied") == 2
        groups = Path(f"/proc/{spawned.pid}/cgroup").read_text()
        assert f"0::/{lab.cgroup.name}/a\n" in groups


async def test_lower_directories_behave_as_ordinary_ones(lab: Lab) -> None:
    async with lab.container("a"):
        status, text = await lab.say(
            "a",
            "set -e; mv /lib/a /lib/c; cat /lib/c/b/file; chown -R 1000:1000 /lib;"
            "stat -c %u /lib/c/b/file; chmod 700 /lib; rm -r /lib/c; ls /lib | wc -l",
        )
        assert (status, text.split()) == (0, ["content", "1000", "0"])


async def test_devices_work_and_cannot_be_made(lab: Lab) -> None:
    async with lab.container("a"):
        _, text = await lab.say(
            "a",
            "echo x > /dev/null && head -c 4 /dev/zero | wc -c; head -c 4 /dev/urandom | wc -c;"
            "ls -l /dev/ptmx /dev/pts/ptmx | wc -l; script=1; touch /dev/new; echo s > /dev/shm/s;"
            "cat /dev/shm/s; mknod /tmp/d b 8 0",
        )
        assert text.split()[:3] == ["4", "4", "2"]
        assert "/dev/new: Read-only file system" in text
        assert "s\n" in text
        assert "/tmp/d: Operation not permitted" in text


async def test_set_user_id_programs_work(lab: Lab) -> None:
    async with lab.container("a"):
        status, text = await lab.say("a", "attack drop")
    assert (status, text.split()) == (0, ["uid", "1000", "euid", "0"])


async def test_mounts_inside_name_nothing_of_the_host(lab: Lab) -> None:
    async with lab.container("a"):
        _, text = await lab.say("a", "cat /proc/self/mountinfo")
    assert str(lab.folder) not in text
    expected = "upperdir=u,workdir=w" if lab.by_path else "upperdir=/u,workdir=/w"
    assert expected in text


async def test_an_upper_that_is_full_says_so(lab: Lab) -> None:
    async with lab.container("a", upper_bytes=1 << 20):
        _, text = await lab.say("a", "dd if=/dev/zero of=/big bs=64k count=64")
    assert "No space left on device" in text


async def test_a_disk_upper_and_binds_of_the_host(lab: Lab) -> None:
    upper = lab.folder / "upper/a"
    shown = lab.folder / "shown"
    shown.write_text("from the host\n")
    before = traces(lab)
    binds = (Bind(str(shown), "/etc/passwd"), Bind(str(lab.folder / "spool"), "/host", False))
    async with lab.container("a", upper_dir=str(upper), binds=binds, dev_tree="/dev"):
        _, text = await lab.say(
            "a", "cat /etc/passwd; echo x > /etc/passwd; echo y > /kept; echo z > /dev/shm/z"
        )
        assert text.startswith("from the host\n")
        assert "Read-only" in text
        assert (upper / "u/kept").read_text() == "y\n"
        assert (upper / "u/kept").stat().st_uid == UID_BASE
        assert (upper / "s/z").exists()
    await nothing_left(lab, before)


async def test_layers_attached_on_the_host_or_cloned_there_serve_as_lowers(lab: Lab) -> None:
    """As after a restart of the daemon, which has the mounts but not the fsmount descriptors."""
    if lab.by_path:
        pytest.skip("by path every lower is such a clone")
    point, shared = lab.layer, lab.lowers[0]
    fastpath.move_mount(shared, point)
    try:
        async with lab.container("a"):
            assert (await lab.say("a", "cat /lib/a/b/file"))[1] == "content\n"
        lab.lowers[0] = fastpath.open_tree(point, clone=True)
        try:
            async with lab.container("b"):
                assert (await lab.say("b", "cat /lib/a/b/file"))[1] == "content\n"
        finally:
            os.close(lab.lowers[0])
    finally:
        lab.lowers[0] = shared
        fastpath.umount(point)


@pytest.mark.parametrize("upper", ["memory", "disk"])
async def test_a_failure_at_any_step_undoes_the_others(lab: Lab, upper: str) -> None:
    directory = str(lab.folder / "upper/a") if upper == "disk" else ""
    before = traces(lab)
    async with lab.container("warm", upper_dir=directory):
        pass
    await nothing_left(lab, before)
    for step in STEPS:
        with pytest.raises(Internal) as caught:
            await lab.create("a", upper_dir=directory, fail_step=step)
        assert caught.value.detail == {"step": step, "errno": "ECANCELED"}
        await nothing_left(lab, before, step)
        assert not (lab.cgroup / "a").exists(), step
    async with lab.container("a", upper_dir=directory):
        assert (await lab.say("a", "echo fine"))[1] == "fine\n"


async def test_a_step_that_fails_by_itself_is_named(lab: Lab) -> None:
    with pytest.raises(Internal, match=r"'limits' failed: No such file"):
        await lab.create("a", writes=(FileWrite("/sys/fs/cgroup/none/file", "1"),))
    (lab.folder / "sb/b").mkdir()
    with pytest.raises(Internal, match=r"'runtime_dir' failed: File exists"):
        await lab.create("b")
    with pytest.raises(Internal, match=r"'plan' failed"):
        await lab.create("c", files=(("a\0b", b"", 0),))
    with pytest.raises(Exhausted, match=r"'files' failed: No space"):
        await lab.create("d", upper_bytes=4096, files=(("f", b"x" * 9000, 0o644),))
    assert (lab.folder / "sb/b").is_dir()  # what was there before is not ours to undo


async def test_a_plan_cannot_name_a_way_out_of_the_upper(lab: Lab) -> None:
    for number, target in enumerate(("../../../escaped", "/etc/passwd", "a//b")):
        try:
            async with lab.container(f"c{number}", files=((target, b"x", 0o644),)):
                pass
        except DSecError:
            continue
    assert not list(lab.folder.glob("**/escaped"))


async def test_every_step_is_timed_when_asked(lab: Lab) -> None:
    async with lab.container("a", trace=True) as spawned:
        assert set(spawned.micros) == set(STEPS)


async def test_destroy_may_be_repeated_and_kills_child_groups(lab: Lab) -> None:
    before = traces(lab)
    spawned = await lab.create("a")
    inner = lab.cgroup / "a/7/deep"
    inner.mkdir(parents=True)
    await lab.destroy("a", spawned)
    await lab.destroy("a", None)
    await lab.destroy("never-made", None)
    assert not (lab.cgroup / "a").exists()
    await nothing_left(lab, before)


async def test_destroy_never_follows_a_link_out(lab: Lab) -> None:
    outside = lab.folder / "outside"
    outside.mkdir()
    (outside / "precious").write_text("kept")
    spawned = await lab.create("a")
    (lab.folder / "sb/a/link").symlink_to(outside)
    await lab.destroy("a", spawned)
    (lab.folder / "sb/b").symlink_to(outside)
    await lab.destroy("b", None)
    assert (outside / "precious").read_text() == "kept"
    assert not (lab.folder / "sb/b").is_symlink()


async def test_destroying_without_its_pidfd_waits_for_the_group(lab: Lab) -> None:
    spawned = await lab.create("a")
    await lab.say("a", "(sleep 1000 & sleep 1000 &) >/dev/null 2>&1")
    await lab.destroy("a", None)
    assert not (lab.cgroup / "a").exists()
    # who ends leaves its group before it is dead
    await until(lambda: select.select([spawned.pidfd], [], [], 0)[0])
    os.close(spawned.pidfd)


async def test_many_at_once(lab: Lab) -> None:
    before = traces(lab)
    names = [f"m{number}" for number in range(40)]
    made = await asyncio.gather(*(lab.create(name) for name in names))
    answers = await asyncio.gather(*(lab.say(name, "echo $$") for name in names))
    assert all(status == 0 for status, _ in answers)
    await asyncio.gather(*(lab.destroy(*pair) for pair in zip(names, made, strict=True)))
    await nothing_left(lab, before)


async def test_the_sanitized_build_makes_and_unmakes(
    tmp_path: Path, parts: tuple[Path, Path]
) -> None:
    binary = BINARY.parent / "asan/dsec-spawner"
    if not binary.exists():
        pytest.skip("built only with DSEC_SANITIZE=1")
    async with open_lab(tmp_path, *parts, binary=binary) as lab:
        async with lab.container("a"):
            assert (await lab.say("a", "echo fine"))[1] == "fine\n"
        for step in ("overlay", "masks", "unshare", "exec"):
            with pytest.raises(Internal):
                await lab.create("b", fail_step=step)
