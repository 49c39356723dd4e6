"""What a hostile sandbox or caller does to dsec-init: children stopped or frozen, pipes held."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from libdsec import wire
from libdsec.errors import Timeout, Unavailable
from tests.system.init_harness import Init, InitClient, client, here, init, running, wait_until

__all__ = ["client", "here", "init"]

pytestmark = [
    pytest.mark.root,
    pytest.mark.leaky(
        "one init serves many tests and pools cgroup directories until it is stopped"
    ),
]


def only_member(group: Path) -> int:
    """Wait for the one process of a cgroup and return its host pid."""
    wait_until(lambda: (group / "cgroup.procs").read_text().strip())
    return int((group / "cgroup.procs").read_text())


def stopped(init: Init) -> int:
    """Return how many processes below init are in state T."""
    found = 0
    for pid in init.processes():
        with contextlib.suppress(OSError):  # it may end meanwhile
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            found += state == "T"
    return found


@pytest.mark.needs("clone_into_cgroup")
@pytest.mark.parametrize("op", ["exec.run", "exec.start", "session.open"])
def test_a_child_stopped_before_its_exec_fails_its_call(op: str) -> None:
    with running(owned=True) as init:
        assert init.client.run("exit 7")["exit_code"] == 7
        group = init.cgroup / "0"  # pooled, and the next to be used
        (group / "cgroup.freeze").write_text("1")
        args = {"name": "s"} if op == "session.open" else {"cid": "c", "argv": [b"true"]}
        call = init.client.open(op, **args)
        pid = only_member(group)
        os.kill(pid, signal.SIGSTOP)
        (group / "cgroup.freeze").write_text("0")
        with pytest.raises(Unavailable, match="stopped from inside"):
            init.client.finish(call, timeout_s=5)
        wait_until(lambda: not init.processes())
        assert init.client.call("exec.list") == []
        assert init.client.call("session.list") == []
        assert init.client.run("echo on")["stdout"] == b"on\n"


def test_a_running_command_that_is_stopped_stays_stopped(init: Init, client: InitClient) -> None:
    """Job control is the sandbox's own: of the command, of its child, and of an orphan."""
    client.call("exec.start", cid="job", shell=b"sleep 41.5 & kill -STOP $!; wait", background=True)
    client.run("sh -c 'sleep 41.25 & kill -STOP $!'")
    wait_until(lambda: stopped(init) == 2)
    client.call("exec.signal", cid="job", signal=int(signal.SIGSTOP))
    wait_until(lambda: stopped(init) == 3)
    time.sleep(0.1)
    assert stopped(init) == 3
    client.call("exec.signal", cid="job", signal=int(signal.SIGCONT))
    wait_until(lambda: stopped(init) == 2)
    client.call("exec.kill", cid="job", signal=15)  # the shared arguments' signal is accepted
    client.run("pkill -9 -f 'sleep 41.25'")
    client.call("exec.wait", cid="job")
    client.call("exec.forget", cid="job", signal=15)


def test_init_keeps_the_oom_score_it_was_given() -> None:
    score = Path("/proc/self/oom_score_adj")
    before = score.read_text()
    score.write_text("150")
    try:
        with running(owned=True, oom_score_adj=600) as init:
            inside = init.client.run("cat /proc/self/oom_score_adj")["stdout"]
            assert (inside, init_score(init)) == (b"600\n", "150\n")
    finally:
        score.write_text(before)


def init_score(init: Init) -> str:
    return Path(f"/proc/{init.pid()}/oom_score_adj").read_text()


def test_a_frame_announced_too_large_costs_no_memory_while_requests_are_held(init: Init) -> None:
    before = peak_kib(init)
    broken = InitClient(init.path)
    watch = wire.encode(wire.Request(1, "files.watch", wire.pack({"path": b"/"})))
    broken.socket.sendall(watch + b"\xff\xff\xff\xf0" + b"x" * 100)
    with pytest.raises(Unavailable):
        broken.finish(1)
    broken.close()
    assert peak_kib(init) - before < 1 << 20


def peak_kib(init: Init) -> int:
    status = Path(f"/proc/{init.pid()}/status").read_text()
    return int(status.partition("VmPeak:")[2].split()[0])


def test_what_waited_for_a_watch_has_its_timeout_looked_at(client: InitClient) -> None:
    client.open("files.watch", path=b"/")
    assert client.run("sleep 1000", timeout_s=0.2).get("timed_out")  # else nothing wakes init


def test_a_watch_cancelled_behind_itself_is_not_mixed_up_with_the_next(client: InitClient) -> None:
    frames = []
    for n in range(40):
        frames += [
            wire.Request(1000 + n, "files.watch", wire.pack({"path": b"/"})),
            wire.Cancel(1000 + n),
            wire.Request(2000 + n, "files.stat", wire.pack({"path": b"/"})),
        ]
    client.socket.sendall(b"".join(map(wire.encode, frames)))
    for n in range(40):
        assert client.finish(1000 + n)[0] is None
        assert client.finish(2000 + n)[0]["type"] == "dir"


def test_pipes_of_forgotten_commands_cannot_use_up_descriptors() -> None:
    """Of more than 2048 the oldest is given up: its writer gets SIGPIPE, the newest goes on."""
    with running(owned=True, cgroup=False) as init:
        client = init.client
        client.run("(while sleep 0.05; do echo on; done; :) & echo $! > oldest")
        for _ in range(1060):
            client.run("sleep 987 &")
        client.run("(while sleep 0.05; do echo on; done; :) & echo $! > newest")
        for _ in range(20):
            client.run("true")  # more than are remembered: the one before is forgotten
        assert client.run("sleep 0.2; kill -0 $(cat newest)")["exit_code"] == 0
        # by the signal, when it next writes
        wait_until(lambda: client.run("kill -0 $(cat oldest)")["exit_code"] != 0)
        assert len(list(Path(f"/proc/{init.pid()}/fd").iterdir())) < 2048 + 100


# Thirty processes, each of which forks its successor and ends.
STORM = b"""
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>
#define FORK() syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0)
int main(void)
{
    for (int i = 0; i < 30; i++)
        if (FORK() == 0)
            for (;;)
                if (FORK() > 0)
                    _exit(0);
    pause();
}
"""


def test_a_storm_of_ending_children_does_not_starve_a_timeout() -> None:
    """Reaping went on for as long as children ended, and nothing else had its turn."""
    with running(owned=True) as init:
        program = init.work / "storm"
        compiler = ["cc", "-x", "c", "-O1", "-static", "-", "-o", str(program)]
        subprocess.run(compiler, input=STORM, check=True)
        for number in range(3):
            started = time.monotonic()
            result = init.client.run(None, cid=f"s{number}", argv=[b"./storm"], timeout_s=0.3)
            assert result["timed_out"]
            assert time.monotonic() - started < 5
        wait_until(lambda: not init.processes())


def new_child(init: Init, before: set[int]) -> int:
    wait_until(lambda: init.processes() - before)
    (pid,) = init.processes() - before
    return pid


@pytest.mark.parametrize("op", ["files.watch", "files.upload", "files.write", "files.read"])
def test_a_stopped_file_operation_fails_its_call(
    init: Init, client: InitClient, here: bytes, op: str
) -> None:
    client.call("files.write", path=here + b"/big", data=b"")
    client.run("head -c 20000000 /dev/zero > big", cwd=here)
    before = init.processes()
    path = {"files.read": b"/big", "files.write": b"/new"}.get(op, b"")
    call = client.open(op, path=here + path)
    pid = new_child(init, before)
    time.sleep(0.1)  # it waits: for events, for content, for credit
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(Unavailable, match="stopped from inside"):
        client.finish(call, grant=False, timeout_s=5)
    wait_until(lambda: not Path(f"/proc/{pid}").exists())
    assert client.call("files.stat", path=here)["type"] == "dir"


@pytest.mark.needs("clone_into_cgroup")
@pytest.mark.parametrize("how", ["cancelled", "disconnected"])
def test_the_child_of_an_abandoned_upload_ends_even_when_it_cannot(
    init: Init, here: bytes, how: str
) -> None:
    client = InitClient(init.path)
    held = init.cgroup / "held"
    held.mkdir()
    before = init.processes()
    call = client.open("files.upload", path=here)
    pid = new_child(init, before)
    try:
        time.sleep(0.1)
        (held / "cgroup.procs").write_text(str(pid))
        (held / "cgroup.freeze").write_text("1")
        if how == "cancelled":
            client.send(wire.Cancel(call))
            with pytest.raises(Timeout):
                client.finish(call)
        client.close()
        wait_until(lambda: not Path(f"/proc/{pid}").exists(), timeout_s=6)
    finally:
        wait_until(lambda: not (held / "cgroup.procs").read_text())
        held.rmdir()
