"""Commands in a real dsec-init: one regression test per fault that users of such systems report."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from libdsec import wire
from libdsec.errors import (
    DSecError,
    Exhausted,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    Unavailable,
    WrongState,
)  # fmt: skip
from tests.system.init_harness import Init, InitClient, client, running, wait_until

__all__ = ["client"]

pytestmark = [
    pytest.mark.root,
    pytest.mark.leaky(
        "one init serves many tests and pools cgroup directories until it is stopped"
    ),
]


@pytest.fixture(scope="module", params=["plain", "owned"])
def init(request: pytest.FixtureRequest) -> Iterator[Init]:
    with running(owned=request.param == "owned", env={"FROM_CONFIG": "yes"}) as started:
        yield started


def alive(marker: str) -> bool:
    """Does any process on the host carry `marker` in its command line?"""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if marker.encode() in (entry / "cmdline").read_bytes():
                    return True
            except OSError:
                continue
    return False


# --- results ----------------------------------------------------------------------------------


def test_exit_code_stdout_and_stderr_are_apart(client: InitClient) -> None:
    result = client.run("printf out; printf err >&2; exit 3")
    assert (result["exit_code"], result["stdout"], result["stderr"]) == (3, b"out", b"err")
    assert "signal" not in result


def test_a_signal_death_is_told_from_an_exit_code(client: InitClient) -> None:
    died, exited = client.run("kill -TERM $$"), client.run("exit 143")
    assert died["signal"] == 15
    assert "exit_code" not in died
    assert exited["exit_code"] == 143
    assert "signal" not in exited


@pytest.mark.parametrize(
    ("args", "error"),
    [
        ({"argv": [b"no-such-command"]}, NotFound),
        ({"argv": [b"/etc/passwd"]}, PermissionDenied),
        ({"argv": [b"true"], "cwd": b"/no/such/place"}, NotFound),
        ({"argv": [b"true"], "user": "nobody-here"}, NotFound),
        ({"argv": [], "cid": "x"}, InvalidArgument),
        ({"cid": "x"}, InvalidArgument),
        ({"shell": b"true", "argv": [b"true"]}, InvalidArgument),
        ({"shell": b"true", "misspelt": 1}, InvalidArgument),
        ({"shell": b"true", "session": "absent"}, NotFound),
    ],
)
def test_what_cannot_start_says_why(
    client: InitClient, args: dict[str, object], error: type[DSecError]
) -> None:
    with pytest.raises(error):
        client.run(None, **args)


def test_environment_is_merged_and_user_is_entered(init: Init, client: InitClient) -> None:
    result = client.run('echo "$FROM_CONFIG $MINE $HOME $USER"; pwd', env={"MINE": "a b"})
    assert result["stdout"].decode() == f"yes a b /root root\n{init.work}\n"
    result = client.run("id -u; id -g; grep -c '^CapEff:.*0000000000000000' /proc/self/status",
                        user="1234:4321", cwd=b"/")  # fmt: skip
    assert result["stdout"] == b"1234\n4321\n1\n"
    assert client.run("id -G", user="0:0", groups=[5, 6], cwd=b"/")["stdout"] == b"0 5 6\n"


def test_bytes_are_bytes(client: InitClient) -> None:
    data = bytes(range(256)) * 4 + b"no newline at the end"
    client.call("files.write", path=b"raw.bin", data=data)
    assert client.run("cat raw.bin")["stdout"] == data
    assert client.run(None, argv=[b"printf", b"%s", b"\xff\xfe"])["stdout"] == b"\xff\xfe"


# --- faults -----------------------------------------------------------------------------------


def test_timeout_kills_the_whole_tree(client: InitClient) -> None:
    marker = f"7{time.monotonic_ns()}"
    sleep = f"sleep {marker}"
    script = f"echo before; setsid {sleep} & (setsid sh -c '{sleep} & {sleep}' &) ; {sleep}"
    for timeout_s in (0.3, 1.2, 4.8):  # a busy machine may need longer to come as far as the echo
        started = time.monotonic()
        result = client.run(script, timeout_s=timeout_s)
        assert time.monotonic() - started - timeout_s < 4.7
        assert result["timed_out"]
        assert result["signal"] == 9
        assert "exit_code" not in result
        wait_until(lambda: not alive(marker))
        if result["stdout"]:
            break
    assert result["stdout"] == b"before\n"
    assert client.run("echo next")["stdout"] == b"next\n"  # the killed cgroup is not used again


def test_background_command_outlives_its_call_and_its_connection(init: Init) -> None:
    first = InitClient(init.path)
    info = first.call("exec.start", cid="bg", shell=b"sleep 0.4; echo done", background=True)
    assert info["running"]
    assert info["pid"] > 1
    first.close()
    second = InitClient(init.path)
    assert any(c["cid"] == "bg" and c["background"] for c in second.call("exec.list"))
    result, items = second.finish(second.open("exec.attach", cid="bg"))
    assert result["exit_code"] == 0
    assert items == [{"stream": 1, "offset": 0, "data": b"done\n"}]
    _, rest = second.finish(second.open("exec.attach", cid="bg", stdout_offset=2))
    assert rest[0]["data"] == b"ne\n"
    assert second.call("exec.wait", cid="bg")["stdout_total"] == 5
    second.call("exec.forget", cid="bg")
    with pytest.raises(NotFound):
        second.call("exec.wait", cid="bg")
    second.close()


def test_a_child_that_keeps_the_pipe_does_not_hold_the_call(client: InitClient) -> None:
    client.run("mkfifo hold")
    result = client.run(
        "(read go < hold; echo late; echo late; echo survived > orphan.txt) & echo now"
    )
    assert result["stdout"] == b"now\n"
    client.run("echo go > hold")
    # and it does not die by SIGPIPE either
    wait_until(lambda: client.run("cat orphan.txt")["stdout"] == b"survived\n")


def test_an_orphan_that_writes_for_ever_does_not_hold_the_call(client: InitClient) -> None:
    result = client.run("yes & echo $!", cid="yes-orphan")
    assert result["exit_code"] == 0
    client.call("exec.kill", cid="yes-orphan")


def test_the_call_ends_with_the_command_without_a_fixed_delay(client: InitClient) -> None:
    started = time.monotonic()
    for _ in range(20):
        client.run("true")
    assert (time.monotonic() - started) / 20 < 0.2


@pytest.mark.parametrize("script", ["yes | head -c 3000000", "seq 1 200000"])
def test_streams_are_complete_and_end(client: InitClient, script: str) -> None:
    expected = subprocess.run(["sh", "-c", script], capture_output=True).stdout
    for stream in (True, False):
        assert client.run(script, stream=stream)["stdout"] == expected


def test_pty_does_not_truncate_the_end(client: InitClient) -> None:
    for _ in range(5):
        result = client.run("seq 1 5000; printf END", pty={"rows": 30, "cols": 90})
        assert result["stdout"].endswith(b"\r\nEND")
        assert len(result["stdout"].splitlines()) == 5001


def test_pty_is_a_terminal_of_the_asked_size_and_resizes(client: InitClient) -> None:
    client.call("exec.start", cid="pty", shell=b"stty size; read x; stty size; cat; echo bye",
                pty={"rows": 30, "cols": 90})  # fmt: skip
    call = client.open("exec.attach", cid="pty")
    assert client.frame(call).data  # type: ignore[union-attr]
    client.call("exec.resize", cid="pty", rows=11, cols=22)
    client.call("exec.stdin", cid="pty", data=b"x\n")
    client.call("exec.stdin", cid="pty", data=b"", eof=True)
    result, items = client.finish(call)
    assert b"11 22" in b"".join(item["data"] for item in items)
    assert result["exit_code"] == 0


def test_gigabytes_of_yes_are_capped_and_say_so() -> None:
    with running(output_limit=1 << 20, spool_limit=3 << 20) as init:
        result = init.client.run("yes | head -c 300000000; exit 5")
        assert result["output_truncated"]
        assert result["exit_code"] == 5
        assert result["stdout_total"] == 300000000
        assert len(result["stdout"]) == 1 << 20
        assert (
            init.client.run("yes | head -c 9000", output_limit_bytes=100)["stdout"] == b"y\n" * 50
        )
        for name in "abcdef":  # the sandbox's cap: the oldest finished output goes first
            init.client.call("exec.start", cid=name, shell=b"yes | head -c 1000000")
            init.client.call("exec.wait", cid=name)
        assert init.client.call("sys.stats")["spool_bytes"] <= 3 << 20
        assert init.client.call("exec.wait", cid="a")["output_truncated"]
        _, items = init.client.finish(init.client.open("exec.attach", cid="f"))
        assert sum(len(item["data"]) for item in items) == 1000000


def test_a_client_that_reads_nothing_holds_neither_command_nor_agent(init: Init) -> None:
    lazy, other = InitClient(init.path), InitClient(init.path)
    call = lazy.open("exec.run", cid="lazy", shell=b"seq 1 3000000; touch lazy-done", stream=True)
    wait_until(lambda: other.run("test -e lazy-done")["exit_code"] == 0, 20)
    assert other.run("echo alive")["stdout"] == b"alive\n"
    result, items = lazy.finish(call)
    assert sum(len(item["data"]) for item in items) == result["stdout_total"] == 22888896
    lazy.close()
    other.close()


def test_a_full_spool_disk_truncates_and_never_blocks(tmp_path: Path) -> None:
    os.system(f"mount -t tmpfs -o size=256k none {tmp_path}")
    try:
        with running() as init:
            pid = init.pid()
            # init's own spool is elsewhere: fill what it writes to by a limit of the file size
            os.system(f"prlimit --fsize=262144:262144 --pid {pid}")
            result = init.client.run("yes | head -c 5000000; exit 4")
            assert result["exit_code"] == 4
            assert result["output_truncated"]
            assert result["stdout_total"] == 5000000
    finally:
        os.system(f"umount {tmp_path}")


def test_closed_stdin_is_seen(client: InitClient) -> None:
    client.call("exec.start", cid="cat", argv=[b"cat"], stdin=True)
    client.call("exec.stdin", cid="cat", data=b"hello")
    client.call("exec.stdin", cid="cat", data=b" world", eof=True)
    result, items = client.finish(client.open("exec.attach", cid="cat"))
    assert b"".join(item["data"] for item in items) == b"hello world"
    assert result["exit_code"] == 0
    with pytest.raises(WrongState):
        client.call("exec.stdin", cid="cat", data=b"x")
    assert client.run("cat; echo end")["stdout"] == b"end\n"  # without stdin: /dev/null


def test_stdin_to_a_command_that_closed_it_fails(client: InitClient) -> None:
    client.call("exec.start", cid="deaf", shell=b"exec 0<&-; echo closed; sleep 5", stdin=True)
    call = client.open("exec.attach", cid="deaf")
    client.frame(call)
    with pytest.raises(WrongState):
        client.call("exec.stdin", cid="deaf", data=b"x")
    client.call("exec.kill", cid="deaf")


def test_stdin_larger_than_the_pipe_does_not_deadlock(client: InitClient) -> None:
    data = os.urandom(3 << 20)
    client.call("exec.start", cid="big", argv=[b"cat"], stdin=True)
    run = client.open("exec.attach", cid="big")
    writes = [client.open("exec.stdin", cid="big", data=data[:1 << 20]),
              client.open("exec.stdin", cid="big", data=data[1 << 20:], eof=True)]  # fmt: skip
    _, items = client.finish(run)
    assert b"".join(item["data"] for item in items) == data
    for call in writes:
        client.finish(call)
    small = client.run(None, argv=[b"md5sum"], input=data[: wire.INLINE])
    assert small["exit_code"] == 0


def test_starting_a_cid_twice_runs_once(client: InitClient) -> None:
    script = b"echo run >> twice.txt; sleep 0.2; cat twice.txt"
    calls = [client.open("exec.run", cid="twice", shell=script) for _ in range(3)]
    for call in calls:
        assert client.finish(call)[0]["stdout"] == b"run\n"
    assert client.run(script.decode(), cid="twice")["stdout"] == b"run\n"  # after its end as well


def test_cancel_kills_what_the_call_runs(client: InitClient) -> None:
    marker = f"6{time.monotonic_ns()}"
    call = client.open(
        "exec.run", cid=marker, shell=f"setsid sleep {marker} & sleep {marker}".encode()
    )
    wait_until(lambda: alive(marker))
    client.send(wire.Cancel(call))
    result, _ = client.finish(call)
    assert result["signal"] == 9
    wait_until(lambda: not alive(marker))


def test_signal_kill_and_a_killed_agent_child(client: InitClient) -> None:
    script = b"trap 'echo got; exit 7' USR1; echo set; while :; do sleep 0.02; done"
    client.call("exec.start", cid="s", shell=script)
    call = client.open("exec.attach", cid="s")
    client.frame(call)  # its trap is set
    client.call("exec.signal", cid="s", signal=10)
    result, items = client.finish(call)
    assert (result["exit_code"], items[0]["data"]) == (7, b"got\n")
    client.call("exec.start", cid="k", shell=b"sleep 100 & wait")
    client.call("exec.kill", cid="k")
    assert client.call("exec.wait", cid="k")["signal"] == 9


@pytest.mark.needs("clone_into_cgroup")
def test_a_cgroup_is_used_again_only_when_its_last_process_is_gone() -> None:
    def directories() -> list[str]:
        return sorted(entry.name for entry in init.cgroup.iterdir() if entry.is_dir())

    with running(owned=True) as init:
        client, marker = init.client, f"6{time.monotonic_ns()}"
        for _ in range(3):
            client.run("sleep 0.01 & wait")
        assert directories() == ["0"]
        client.run(f"(setsid sleep {marker} &) &", cid="parent")
        wait_until(lambda: alive(marker))
        client.run("true", cid="next")
        assert directories() == ["0", "1"]
        client.call("exec.kill", cid="next")
        assert alive(marker)
        client.call("exec.kill", cid="parent")
        wait_until(lambda: not alive(marker))


def test_a_fork_storm_does_not_kill_the_agent(client: InitClient) -> None:
    bomb = "ulimit -u 200 2>/dev/null; f() { f | f & }; for i in 1 2 3; do f; done; sleep 30"
    call = client.open("exec.run", cid="bomb", shell=bomb.encode(), timeout_s=0.7, user="4321:4321",
                       cwd=b"/")  # fmt: skip
    for _ in range(5):
        assert client.call("sys.ping") is None
        time.sleep(0.05)
    result, _ = client.finish(call)
    assert result.get("timed_out") or "exit_code" in result
    client.call("exec.kill", cid="bomb")
    assert client.run("echo alive")["stdout"] == b"alive\n"


def test_no_process_left_to_start_is_exhausted_not_a_crash() -> None:
    limit = Path("/sys/fs/cgroup/pids") / f"dsec-inittest-{os.getpid()}"
    if not limit.parent.exists():
        pytest.skip("no pids controller (v1) here")
    with running() as init:
        limit.mkdir()
        try:
            (limit / "cgroup.procs").write_text(str(init.pid()))
            (limit / "pids.max").write_text("4")
            init.client.call("exec.start", cid="hold", shell=b"sleep 100 & sleep 100 & wait")
            wait_until(lambda: (limit / "pids.current").read_text() == "4\n")
            with pytest.raises(Exhausted):
                init.client.run("true")
            with pytest.raises(Exhausted):
                init.client.call("files.stat", path=b"/")
            init.client.call("exec.kill", cid="hold")
            wait_until(lambda: init.client.call("sys.stats")["commands"] == 0)
            assert init.client.run("echo again")["stdout"] == b"again\n"
        finally:
            init.stop()

            def removed() -> bool:
                with contextlib.suppress(OSError):  # who is about to end is in no list and in here
                    limit.rmdir()
                return not limit.exists()

            wait_until(removed)


def test_descriptors_run_out_and_come_back() -> None:
    with running() as init:
        pid = init.pid()
        used = len(list(Path(f"/proc/{pid}/fd").iterdir()))
        os.system(f"prlimit --nofile={used + 3}:20000 --pid {pid}")
        with pytest.raises(Exhausted):
            init.client.run("true")
        os.system(f"prlimit --nofile=1024:20000 --pid {pid}")
        assert init.client.run("echo back")["stdout"] == b"back\n"


def test_more_commands_than_fit_are_refused() -> None:
    with running() as init:
        for n in range(256):
            init.client.call("exec.start", cid=f"c{n}", argv=[b"sleep", b"100"])
        with pytest.raises(Exhausted):
            init.client.run("true")
        init.client.call("exec.kill", cid="c7")
        init.client.call("exec.wait", cid="c7")
        assert init.client.run("true")["exit_code"] == 0


def test_orphans_are_reaped(init: Init, client: InitClient) -> None:
    client.run("for i in 1 2 3 4 5; do (setsid sh -c 'sleep 0.1' &) ; done")
    before = init.processes()
    wait_until(lambda: not [p for p in before | init.processes() if _zombie(p)])


def _zombie(pid: int) -> bool:
    try:
        return ") Z " in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


def test_without_cgroups_the_tree_is_walked() -> None:
    with running(cgroup=False) as init:
        assert init.client.call("sys.stats")["kill"] == "tree"
        marker = f"5{time.monotonic_ns()}"
        result = init.client.run(f"sh -c 'sleep {marker} & sleep {marker}'", timeout_s=0.3)
        assert result["timed_out"]
        wait_until(lambda: not alive(marker))


# --- the channel ------------------------------------------------------------------------------


def test_a_peer_from_inside_is_refused(init: Init, client: InitClient) -> None:
    connect = f"s = socket.socket(socket.AF_UNIX); s.connect({init.path!r}); print(s.recv(1))"
    script = f"import socket; {connect}"
    Path(init.path).chmod(0o777)
    result = client.run(None, argv=[b"python3", b"-c", script.encode()])
    assert result["stdout"] == b"b''\n" or b"ConnectionReset" in result["stderr"]


def test_broken_frames_close_only_their_connection(init: Init, client: InitClient) -> None:
    for junk in (b"\xff\xff\xff\xff", b"\0\0\0\1\xc1", b"\0\0\0\2\x91\x07", b"\0\0\0\3\x93\1\1"):
        bad = InitClient(init.path)
        bad.socket.sendall(junk + bytes(16))
        with pytest.raises((Unavailable, ConnectionError)):
            bad.frame(1)
        bad.close()
    assert client.run("echo fine")["stdout"] == b"fine\n"


def test_a_half_frame_does_not_block_others(init: Init, client: InitClient) -> None:
    half = InitClient(init.path)
    half.socket.sendall(wire.encode(wire.Request(1, "sys.ping", wire.pack({})))[:7])
    assert client.call("sys.ping") is None
    half.close()


def test_init_cannot_be_touched_from_inside() -> None:
    with running(owned=True) as init:
        run = init.client.run
        assert run("kill -9 1; kill -STOP 1; echo $?")["stdout"] == b"1\n"
        for name in ("environ", "maps", "mem"):
            assert run(f"head -c1 /proc/1/{name}")["exit_code"] != 0
        assert run("ls /proc/1/fd; readlink /proc/1/exe")["stdout"] == b""
        assert init.client.call("sys.ping") is None
        assert run("ls -l /proc/self/fd | grep -c -- '->'")["stdout"] == b"4\n"  # 0,1,2 and the dir


def test_capabilities_and_seccomp_are_bounded_while_sudo_may_work() -> None:
    import struct

    # mkdir (83) gives EPERM, all else is allowed; x86_64 numbers
    filter_ = b"".join(struct.pack("HBBI", *row) for row in (
        (0x20, 0, 0, 0), (0x15, 0, 1, 83), (0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7FFF0000),
    ))  # fmt: skip
    with running(owned=True, caps=0b1011_0000, seccomp=filter_) as init:
        status = init.client.run("cat /proc/self/status")["stdout"].decode()
        fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
        for name in ("CapEff", "CapBnd", "CapPrm"):
            assert int(fields[name], 16) == 0b1011_0000
        assert fields["Seccomp"] == "2"
        assert fields["NoNewPrivs"] == "0"
        assert init.client.run(None, argv=[b"mkdir", b"/tmp/never-made"])["exit_code"] == 1


def test_no_command_runs_without_the_profile_it_was_to_have() -> None:
    with running(owned=True, apparmor="dsec-no-such-profile") as init:
        for call in ({"shell": b"true"}, {"argv": [b"/bin/true"]}):
            with pytest.raises(DSecError, match="AppArmor"):
                init.client.call("exec.run", cid=f"c-{next(iter(call))}", **call)
        init.client.call("files.mkdir", path=b"by-the-platform")  # not a command


def test_idle_memory_is_small(init: Init, client: InitClient) -> None:
    for _ in range(50):
        client.run("seq 1 20000")
    text = Path(f"/proc/{init.pid()}/smaps_rollup").read_text()
    anonymous = next(line for line in text.splitlines() if line.startswith("Anonymous:"))
    if "asan" not in os.environ.get("DSEC_INIT", ""):
        assert int(anonymous.split()[1]) <= 400


def test_no_time_passes_for_timeouts_from_a_pause_to_the_next_request(client: InitClient) -> None:
    """A fault of pauses: what was frozen for long had all its timeouts at once afterwards.

    A machine that stands still makes anything late: not five times one after the other.
    """
    for cid in ("paused-1", "paused-2", "paused-3", "paused-4", "paused-5"):
        opened = time.monotonic()
        call = client.open("exec.run", cid=cid, argv=[b"sleep", b"30"], timeout_s=0.8)
        time.sleep(0.2)
        client.call("sys.pause")
        paused = time.monotonic()
        time.sleep(1.5)
        asked = time.monotonic()
        shown = [c["running"] for c in client.call("exec.list") if c["cid"] == cid]
        result, _ = client.finish(call)
        ended = time.monotonic()
        assert result["timed_out"]
        if paused - opened < 0.8:  # else its time was over before the pause
            assert shown == [True]
            assert ended - opened > 0.79 + (asked - paused)
            if ended - asked < 1.5 and result["duration_s"] < 1.5:
                return
    pytest.fail("it had more time than it was given")
