"""``dsec`` through click's runner, against a real peer in a thread."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from dsec import copy, output
from dsec.main import cli
from libdsec.errors import Unsupported
from libdsec.model import Event, LayerInfo, VmArgs
from tests.unit.client_lab import GATE
from tests.unit.wire_server import WireServer, in_thread

ROOT = Path(__file__).parents[2]


@pytest.fixture
def server(tmp_path):
    server = WireServer(tmp_path)
    with in_thread(server) as loop:
        server.loop = loop
        yield server


@pytest.fixture
def dsec(server, monkeypatch):
    monkeypatch.setenv("DSEC_ENDPOINT", server.socket)

    def invoke(*args, code=0, stdin=None):
        result = CliRunner().invoke(cli, list(args), input=stdin)
        assert result.exit_code == code, (result.output, result.exception)
        return result

    return invoke


def script(server, *args, **options):
    """Run the command line as a process of its own."""
    env = {**os.environ, "DSEC_ENDPOINT": server.socket, "PYTHONPATH": f"{ROOT}:{ROOT}/src"}
    return subprocess.Popen([sys.executable, "-m", *args], env=env, **options)


def test_check_and_version(dsec):
    result = dsec("check")
    assert "core scheduling" in result.stdout
    assert "no SCHED_CORE" in result.stdout
    features = json.loads(dsec("check", "--json").stdout)
    assert [f["available"] for f in features] == [True, False]
    assert json.loads(dsec("--json", "version").stdout)["server"] == "dsecd/test"


def test_run_ps_exec_stop(server, dsec):
    made = dsec("run", "-m", "512", "-l", "job=a", "--allow", "pypi", "base/debian:12")
    name = made.stdout.strip()
    args = server.sandboxes[name].args
    assert (args.memory_limit_mb, args.network_rules) == (512, {"pypi": True})
    assert name in dsec("ps").stdout
    assert dsec("ps", "-q", "-l", "job=a").stdout.split() == [name]
    assert dsec("ps", "-q", "-l", "job=b").stdout == ""
    (row,) = json.loads(dsec("ps", "--json").stdout)
    assert (row["id"], row["labels"], row["state"]) == (name, {"job": "a"}, "running")
    assert dsec("exec", name, "echo", "-n", "--json").stdout == "--json"
    assert dsec("exec", name, "--", "echo", "-n", "--", "x").stdout == "-- x"
    assert dsec("stop", name).stdout.split() == [name]
    assert dsec("ps", "-q").stdout == ""
    assert dsec("ps", "-aq").stdout.split() == [name]


def test_run_makes_microvms(server, dsec):
    options = ("--vcpus", "2", "--layers", "block", "--data-disk", "64", "-m", "256")
    name = dsec("run", "--microvm", *options, "--allow", "pypi", "base/debian:12").stdout.strip()
    info = server.sandboxes[name]
    assert (info.backend, info.vm) == ("microvm", VmArgs(vcpus=2, layers="block", data_disk_mb=64))
    assert (info.args.memory_limit_mb, info.args.network_rules) == (256, {"pypi": True})
    plain = dsec("run", "base/debian:12").stdout.strip()
    rows = {line.split()[0]: line.split() for line in dsec("ps").stdout.splitlines()}
    assert (rows[name][2], rows[plain][2]) == ("microvm", "container")
    assert dsec("run", "--microvm", "--rm", "base/debian:12", "echo", "hi").stdout == "hi\n"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--vcpus", "2"), "--vcpus is of a microVM (--microvm) or a full VM"),
        (("--layers", "pmem"), "--layers is of a microVM"),
        (("--microvm", "--cpus", "2"), "--cpus is of a container, not of a microVM"),
        (("--fullvm", "--layers", "pmem"), "--layers is of a microVM (--microvm), not of a full"),
        (("--fullvm", "--microvm"), "is --microvm or --fullvm"),
        (("--microvm", "--upper", "memory"), "--upper is of a container"),
        (("--microvm", "--no-new-privileges"), "--no-new-privileges is of a container"),
        (("--microvm", "--layers", "fuse"), "'fuse' is not one of"),
    ],
)
def test_run_refuses_options_of_the_other_kind(server, dsec, options, told):
    assert told in dsec("run", *options, "base/debian:12", code=2).output
    assert not server.sandboxes


def test_run_says_what_a_host_without_microvms_needs(server, dsec):
    async def refuse(call):
        why = "qemu-system-x86_64 is not installed (vm.qemu): install qemu-system-x86"
        raise Unsupported(f"this host has no microvm backend: {why}", reason=why)

    server.on["sandbox.create"] = refuse
    assert "install qemu-system-x86" in dsec("run", "--microvm", "base/debian:12", code=1).output


def test_run_takes_secrets_from_a_file(server, dsec, tmp_path):
    file = tmp_path / "secrets.toml"
    file.write_text('["api.example.com"]\nAuthorization = "Bearer x"\n')
    name = dsec("run", "--secrets", str(file), "base/debian:12").stdout.strip()
    assert server.sandboxes[name].args.secrets == {"api.example.com": {"Authorization": "Bearer x"}}
    file.write_text('"api.example.com" = 1\n')
    assert "secrets.toml" in dsec("run", "--secrets", str(file), "base/debian:12", code=2).output
    missing = str(tmp_path / "missing")
    assert "No such file" in dsec("run", "--secrets", missing, "base/debian:12", code=2).output


def test_run_takes_a_command_after_two_dashes(server, dsec):
    assert dsec("run", "--rm", "base/debian:12", "--", "echo", "hi").stdout == "hi\n"


def test_exit_codes(server, dsec):
    name = dsec("run", "base/debian:12").stdout.strip()
    dsec("exec", name, "sh", "-c", "exit 7", code=7)
    dsec("exec", name, "sh", "-c", "kill -9 $$", code=137)
    timed_out = dsec("exec", "--timeout", "0.3", name, "sleep", "30", code=124)
    assert "timed out" in timed_out.stderr
    dsec("exec", name, code=2)
    dsec("stop", code=2)
    dsec("run", "--rm", "base/debian:12", code=2)
    assert not [c for c in server.world.commands.values() if not c.done.is_set()]
    assert not server.world.commands, "finished commands are forgotten"


def test_exec_passes_streams_apart_and_json(server, dsec):
    name = dsec("run", "base/debian:12").stdout.strip()
    result = dsec("exec", name, "sh", "-c", r"printf 'a\377'; echo e >&2")
    assert (result.stdout_bytes, result.stderr) == (b"a\xff", "e\n")
    printed = json.loads(dsec("exec", "--json", name, "sh", "-c", "echo x; exit 3", code=3).stdout)
    assert (printed["exit_code"], printed["stdout"], printed["signal"]) == (3, "x\n", None)


def test_run_a_command_and_remove(server, dsec):
    result = dsec("run", "--rm", "base/debian:12", "echo", "hi")
    assert result.stdout == "hi\n"
    assert [info.state for info in server.sandboxes.values()] == ["stopped"]
    result = dsec("run", "--json", "base/debian:12", "sh", "-c", "exit 4", code=4)
    assert json.loads(result.stdout)["result"]["exit_code"] == 4
    assert "goes on" in dsec("run", "base/debian:12", "true").stderr


def test_detached_command_and_its_logs(server, dsec):
    name = dsec("run", "base/debian:12").stdout.strip()
    assert "remembers no command" in dsec("logs", name, code=1).stderr
    cid = dsec("exec", "-d", name, "sh", "-c", f"echo one; {GATE}; echo two").stdout.strip()
    while not server.world.commands[cid].spool[1]:
        time.sleep(0.01)
    assert dsec("logs", name).stdout == "one\n"
    attach = server.on["exec.attach"]

    async def attached(call):
        (server.root / name / "gate").touch()  # no sooner
        return await attach(call)

    server.on["exec.attach"] = attached
    assert dsec("logs", "-f", name, cid).stdout == "one\ntwo\n"
    (known,) = json.loads(dsec("logs", "--json", name).stdout)
    assert known["cid"] == cid


def test_cp_both_ways(server, dsec, tmp_path):
    name = dsec("run", "base/debian:12").stdout.strip()
    tree = tmp_path / "tree"
    (tree / "sub").mkdir(parents=True)
    (tree / "sub" / "f").write_bytes(b"\x00\xff" * 100_000)
    dsec("cp", str(tree), f"{name}:/new")
    dsec("cp", str(tree), f"{name}:/new")  # a directory now: into it
    inside = server.root / name
    assert (inside / "new" / "sub" / "f").stat().st_size == 200_000
    assert (inside / "new" / "tree" / "sub" / "f").exists()
    dsec("cp", f"{name}:/new/sub/f", str(tmp_path / "one"))
    dsec("cp", f"{name}:/new/sub", str(tmp_path))
    assert (tmp_path / "one").stat().st_size == (tmp_path / "sub" / "f").stat().st_size == 200_000
    assert json.loads(dsec("cp", "--json", str(tmp_path / "one"), f"{name}:x").stdout) == {
        "bytes": 200_000
    }
    dsec("cp", "a", "b", code=2)
    assert "no such file" in dsec("cp", str(tmp_path / "none"), f"{name}:/x", code=1).stderr
    assert copy.split("./a:b") == ("", "./a:b")
    assert copy.split("n1-1:") == ("n1-1", ".")


def test_layers(server, dsec):
    dsec("layer", "import", "base/x:1", "/srv/x")
    assert "base/x:1" in dsec("layer", "ls").stdout
    (layer,) = json.loads(dsec("layer", "ls", "--json").stdout)
    assert layer == json.loads(dsec("layer", "ls", "--json").stdout)[0]
    assert set(layer) == set(LayerInfo.__struct_fields__)
    dsec("layer", "rm", "base/x:1")
    assert "dsec layer ls" in dsec("layer", "rm", "base/x:1", code=1).stderr


def test_stats(dsec):
    name = dsec("run", "base/debian:12").stdout.strip()
    assert name in dsec("stats", "--once").stdout
    printed = json.loads(dsec("stats", "--json", name).stdout)
    assert printed["host"]["node"] == "n1"
    assert printed["sandboxes"][0]["metrics"]["pids"] == 2


def test_events(server):
    with script(server, "dsec", "events", "--json", stdout=subprocess.PIPE, text=True) as process:
        while not server.subscribers:
            time.sleep(0.01)
        event = Event(time=1.0, sandbox="n1-1", kind="oom")
        server.loop.call_soon_threadsafe(server.subscribers[0].put_nowait, event)
        assert json.loads(process.stdout.readline())["kind"] == "oom"
        process.terminate()


# --- errors


def test_errors_are_one_line_that_says_what_to_do(dsec, tmp_path):
    result = dsec("exec", "n1-9", "true", code=1)
    assert result.stderr == "dsec: no sandbox n1-9; see `dsec ps`\n"
    result = dsec("--endpoint", str(tmp_path / "none"), "ps", code=1)
    assert result.stderr.count("\n") == 1
    assert "start it with" in result.stderr
    body = json.loads(dsec("--json", "exec", "n1-9", "true", code=1).stderr)
    assert body["error"]["code"] == "not_found"
    assert "dsec layer ls" in dsec("run", "missing", code=1).stderr
    dsec("ps", "-l", "nonsense", code=2)
    dsec("nonsense", code=2)


def test_stop_goes_on_after_a_failure(server, dsec):
    name = dsec("run", "base/debian:12").stdout.strip()
    result = dsec("stop", "n1-99", name, code=1)
    assert (result.stdout, "n1-99" in result.stderr) == (f"{name}\n", True)


# --- completion


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts(dsec, shell):
    text = dsec("completion", shell).stdout
    assert "_DSEC_COMPLETE" in text
    if shell == "bash":
        subprocess.run(["bash", "-n"], input=text.encode(), check=True)


def test_completion_asks_the_daemon(server, dsec, monkeypatch, tmp_path):
    name = dsec("run", "base/debian:12").stdout.strip()
    monkeypatch.setenv("COMP_WORDS", "dsec exec ")
    monkeypatch.setenv("COMP_CWORD", "2")

    def complete():
        return (
            CliRunner()
            .invoke(cli, [], prog_name="dsec", env={"_DSEC_COMPLETE": "bash_complete"})
            .stdout
        )

    assert name in complete()
    monkeypatch.setenv("DSEC_ENDPOINT", str(tmp_path / "none"))
    assert complete().strip() == ""


# --- with a process of its own


def test_stdin_is_passed_with_i(server, dsec):
    name = dsec("run", "base/debian:12").stdout.strip()
    data = os.urandom(1_000_000)
    with script(
        server, "dsec", "exec", "-i", name, "cat", stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.communicate(data)[0] == data
    assert process.returncode == 0


def test_shell_on_a_terminal(server, dsec):
    name = dsec("run", "base/debian:12").stdout.strip()
    leader, follower = pty.openpty()
    with script(server, "dsec", "shell", name, stdin=follower, stdout=follower) as process:
        os.close(follower)
        os.write(leader, b"echo $((40+2)); exit 5\n")
        seen, deadline = b"", time.monotonic() + 10
        while b"42\r" not in seen and time.monotonic() < deadline:
            if select.select([leader], [], [], 0.2)[0]:
                seen += os.read(leader, 4096)
        if b"42\r" not in seen:
            process.kill()
        assert process.wait(20) == 5, seen
    os.close(leader)


def test_interrupted_exec_kills_its_command(server, dsec):
    name = dsec("run", "base/debian:12").stdout.strip()
    with script(server, "dsec", "exec", name, "sleep", "60") as process:
        while not any(each.process for each in tuple(server.world.commands.values())):
            time.sleep(0.02)
        time.sleep(0.3)
        process.send_signal(2)
        assert process.wait(10) == 130
    (command,) = server.world.commands.values()
    asyncio.run_coroutine_threadsafe(command.done.wait(), server.loop).result(5)


def test_listing_1_as_a_file(server):
    with script(
        server, "libdsec", str(ROOT / "examples" / "listing1.py"), stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.communicate(timeout=20)[0] == "hello world\n"
    assert process.returncode == 0
    assert server.sandboxes["n1-1"].state == "stopped"


def test_script_runner_usage(server, tmp_path):
    for args, code in (([], 2), ([str(tmp_path / "none.py")], 2)):
        with script(server, "libdsec", *args, stderr=subprocess.DEVNULL) as process:
            assert process.wait(20) == code
    (tmp_path / "s.py").write_text(
        "import sys\nassert __name__ == '__main__'\nsys.exit(len(sys.argv))\n"
    )
    with script(server, "libdsec", str(tmp_path / "s.py"), "a") as process:
        assert process.wait(20) == 2


def test_sizes_and_times():
    assert [output.size(n) for n in (0, 1023, 1536, 1 << 40)] == [
        "0 B", "1023 B", "1.5 KiB", "1.0 TiB",
    ]  # fmt: skip
    assert [output.duration(n) for n in (-1, 59, 61, 7265)] == ["0s", "59s", "1m 1s", "2h 1m"]
