"""Limits and privileges: cgroups, resource limits, CPU time, set-id programs."""

from __future__ import annotations

import pytest

from dsecd.policy import capabilities
from libdsec import Sandbox
from tests.security.conftest import USER, Target, attack

pytestmark = [pytest.mark.root, pytest.mark.asyncio(loop_scope="module")]
BOTH = pytest.mark.parametrize("user", ["root", USER])


async def test_no_cgroup_tree_can_be_mounted(box: Sandbox) -> None:
    """Its cgroup namespace is the host's: root inside can mount no hierarchy at all."""
    found = await attack(
        box,
        """
def unified():
    call("unshare", NEWNS)
    return mount("none", "/mnt/v2", "cgroup2")
def first(kind):
    call("unshare", NEWNS)
    return [mount("none", "/mnt/v1", "cgroup", data=kind)]
kinds = ("memory", "cpu", "pids", "devices", "freezer", "cpuset", "blkio", "none,name=new")
report(unified=apart(unified), first={k: apart(lambda: first(k)) for k in kinds},
       shown=peek("/proc/self/cgroup"))
""",
    )
    assert found["unified"] == "EPERM"
    # ENODEV: a controller that is on v2 only, or that this kernel lacks
    assert {outcome for (outcome,) in found["first"].values()} <= {"EPERM", "ENODEV", "EINVAL"}
    assert "EPERM" in found["first"]["devices"]


@BOTH
async def test_resource_limits_only_fall(box: Sandbox, user: str) -> None:
    found = await attack(
        box,
        """
import resource
names = {"NOFILE": 65536, "CORE": 0, "MEMLOCK": None, "NPROC": None, "RTPRIO": 0, "NICE": 0}
hard = {n: resource.getrlimit(getattr(resource, "RLIMIT_" + n))[1] for n in names}
def raised(name):
    kind = getattr(resource, "RLIMIT_" + name)
    try:
        resource.setrlimit(kind, (0, hard[name] + 1))
    except ValueError:
        return "refused"
    return "raised"
report(hard=hard, raised={n: apart(lambda: raised(n)) for n in names if hard[n] >= 0},
       lower=apart(lambda: tried(resource.setrlimit, resource.RLIMIT_NOFILE, (10, 10))))
""",
        user,
    )
    assert found["hard"]["CORE"] == found["hard"]["RTPRIO"] == found["hard"]["NICE"] == 0
    assert 0 < found["hard"]["NOFILE"] <= 65536
    assert set(found["raised"].values()) == {"refused"}
    assert found["lower"] == "ok"  # control


async def test_more_cpus_do_not_give_more_cpu_time(target: Target) -> None:
    box = await target.sibling(cpu_cores_limit=0.5)
    found = await attack(
        box,
        """
import resource, time
widened = tried(os.sched_setaffinity, 0, range(1024))
end = time.monotonic() + 3
pids = []
for _ in range(4):
    pid = os.fork()
    if pid == 0:
        while time.monotonic() < end:
            pass
        os._exit(0)
    pids.append(pid)
for pid in pids:
    os.waitpid(pid, 0)
used = resource.getrusage(resource.RUSAGE_CHILDREN)
report(widened=widened, share=(used.ru_utime + used.ru_stime) / 3)
""",
    )
    assert found["widened"] == "ok"
    assert found["share"] < 0.5 * 1.3 + 0.1
    await box.stop()


async def test_a_fork_bomb_ends_at_the_limit(target: Target) -> None:
    box = await target.sibling(pids_limit=64)
    found = await attack(
        box,
        """
import time
made, last = 0, "ok"
pids = []
while last == "ok" and made < 500:
    try:
        pid = os.fork()
    except OSError as error:
        last = errno.errorcode[error.errno]
        break
    if pid == 0:
        time.sleep(60)
        os._exit(0)
    pids.append(pid); made += 1
for pid in pids:
    os.kill(pid, 9); os.waitpid(pid, 0)
report(made=made, last=last)
""",
    )
    assert found["last"] == "EAGAIN"
    assert found["made"] < 64
    bomb = await box.run_shell(":(){ :|:& };:; sleep 60", timeout=2)
    assert bomb.timed_out or not bomb.ok
    assert (await box.run("echo", "alive", timeout=10)).stdout == "alive\n"
    await box.stop()


async def test_memory_of_every_kind_is_counted(target: Target) -> None:
    """A ramfs has no size and shared memory no owner: both end at the sandbox's limit."""
    for where in ("ramfs", "tmpfs", "shm"):
        box = await target.sibling(memory_limit_mb=64, disk_limit_mb=16)
        prepare = f"mount -t {where} none /mnt && cd /mnt" if where != "shm" else "cd /dev/shm"
        done = await box.run_shell(f"{prepare} && dd if=/dev/zero of=f bs=1M count=300", timeout=30)
        assert not done.ok, where
        assert done.oom_killed or done.signal or "No space" in done.stderr, (where, done)
        await box.stop()


async def test_the_disk_limit_holds_for_each_way_of_writing(target: Target) -> None:
    box = await target.sibling(disk_limit_mb=16)
    ways = (
        "fallocate -l 64M /f",
        "dd if=/dev/zero of=/f bs=1M count=64",
        "while echo >> /d/$((i % 50))-$((i += 1)); do :; done 2>/dev/null; false",
    )
    for script in ways:
        done = await box.run_shell(f"mkdir -p /d; {script}", timeout=20, user="root")
        assert not done.ok, script
        used = (await box.run_shell("rm -rf /f; df -k --output=used / | tail -1")).stdout
        assert int(used) <= 17 << 10, script
    await box.stop()


async def test_terminals_of_one_sandbox_leave_some_for_others(target: Target) -> None:
    greedy, other = await target.sibling(), await target.sibling()
    script = """
import time
for folder in ("/dev", "/mnt/own"):
    if folder != "/dev":
        mount("none", folder, "devpts", data="ptmxmode=666")
    try:
        for _ in range(5000):
            os.open(folder + "/ptmx", os.O_RDWR | os.O_NOCTTY)
    except OSError:
        pass
print("held", flush=True)
time.sleep(20)
"""
    source = "import sys; sys.path.insert(0, '/attack')\nfrom kit import *\n" + script
    holding = await greedy.commands.run(["python3", "-c", source], background=True)
    async for item in holding:
        assert item.data == b"held\n"
        break
    try:
        done = await (await other.pty.create(cmd=["echo", "mine"])).wait()
    finally:
        await holding.kill()
        await greedy.stop()
        await other.stop()
    assert done.stdout_bytes == b"mine\r\n"


SETUID = """
install -m 4755 /usr/bin/cat /usr/local/bin/rootcat
install -m 0755 /usr/bin/cat /usr/local/bin/plaincat
"""


async def test_set_id_programs_work_unless_forbidden(target: Target) -> None:
    free, bound = await target.sibling(), await target.sibling(no_new_privileges=True)
    sudoers = f"echo '{USER} ALL=(ALL) NOPASSWD: ALL' > /etc/sudoers.d/{USER}"
    for box in (free, bound):
        await box.run_shell(SETUID + sudoers, check=True)
        assert not (await box.run("plaincat", "/etc/shadow", user=USER)).ok  # control
    assert "root:" in (await free.run("rootcat", "/etc/shadow", user=USER)).stdout
    assert (await free.run("sudo", "id", "-u", user=USER)).stdout == "0\n"
    refused = await bound.run("rootcat", "/etc/shadow", user=USER)
    assert refused.exit_code == 1
    assert "Permission denied" in refused.stderr
    sudo = await bound.run("sudo", "-n", "id", "-u", user=USER)
    assert not sudo.ok
    assert "no new privileges" in sudo.stderr
    status = await bound.run_shell("grep NoNewPrivs /proc/self/status", user=USER)
    assert status.stdout.split() == ["NoNewPrivs:", "1"]
    await free.stop()
    await bound.stop()


@BOTH
async def test_capabilities_stay_within_the_list(box: Sandbox, user: str) -> None:
    text = (await box.run("cat", "/proc/self/status", user=user)).stdout
    found = {k: v.strip() for k, v in (line.split(":", 1) for line in text.splitlines())}
    held = {name: int(found[name], 16) for name in ("CapPrm", "CapEff", "CapBnd")}
    assert held["CapBnd"] == capabilities.mask()
    expected = capabilities.mask() if user == "root" else 0
    assert held["CapPrm"] == held["CapEff"] == expected
    assert int(found["CapInh"], 16) == int(found["CapAmb"], 16) == 0
    assert (found["Seccomp"], found["Seccomp_filters"]) == ("2", "2")  # base and command
