"""Listing 1 and the ``dsec`` command, as processes of their own, against a real daemon."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from libdsec import model
from tests.system.daemon import IMAGE, Daemon, daemon, make_rootfs

pytestmark = pytest.mark.root

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 60


@dataclass
class Shell:
    """Where the commands run: with DSEC_ENDPOINT set to the daemon of the test."""

    daemon: Daemon

    @property
    def env(self) -> dict[str, str]:
        path = f"{ROOT}:{ROOT}/src"
        return {**os.environ, "DSEC_ENDPOINT": f"unix:{self.daemon.socket}", "PYTHONPATH": path}

    async def __call__(self, *words: str, code: int = 0, stdin: bytes = b"") -> str:
        """Run ``dsec`` and return its stdout."""
        command = [sys.executable, "-m", "dsec", *words]
        done = await asyncio.to_thread(
            subprocess.run, command, input=stdin, capture_output=True, env=self.env,
            timeout=TIMEOUT_S,
        )  # fmt: skip
        assert done.returncode == code, (words, done)
        return done.stdout.decode()

    def start(self, *words: str, **streams: Any) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "dsec", *words]
        return subprocess.Popen(command, env=self.env, start_new_session=True, **streams)

    async def json(self, *words: str) -> Any:
        return json.loads(await self("--json", *words))


@contextlib.asynccontextmanager
async def shell() -> AsyncIterator[Shell]:
    async with daemon() as d:
        yield Shell(d)


async def test_listing_1_runs_unchanged() -> None:
    async with shell() as dsec:
        client = await dsec.daemon.client()
        source = str(dsec.daemon.root / "rootfs")
        await client.call("layer.import", model.LayerImport(name="base/debian:12", source=source))
        command = [sys.executable, "-m", "libdsec", str(ROOT / "examples/listing1.py")]
        done = await asyncio.to_thread(
            subprocess.run, command, capture_output=True, env=dsec.env, timeout=TIMEOUT_S
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, b"hello world\n", b"")
        assert dsec.daemon.remains() == []


async def test_run_ps_exec_stop() -> None:
    async with shell() as dsec:
        assert await dsec("run", "--rm", IMAGE, "--", "sh", "-c", "echo $((40+2))") == "42\n"
        assert dsec.daemon.remains() == []
        name = (await dsec("run", "-m", "64", "-e", "A=b c", "-l", "job=7", IMAGE)).strip()
        (row,) = await dsec.json("ps")
        assert (row["id"], row["state"], row["labels"]) == (name, "running", {"job": "7"})
        assert await dsec("ps", "-q") == f"{name}\n"
        assert await dsec("exec", name, "sh", "-c", "echo $A; exit 0") == "b c\n"
        await dsec("exec", name, "sh", "-c", "exit 7", code=7)
        assert await dsec("exec", "-i", name, "cat", stdin=b"\0\xff"[:1]) == "\0"
        result = await dsec.json("exec", name, "sh", "-c", "echo out; echo err >&2")
        assert (result["exit_code"], result["stdout"], result["stderr"]) == (0, "out\n", "err\n")
        await dsec("stop", name)
        assert await dsec.json("ps") == []
        assert (await dsec.json("ps", "-a"))[0]["state"] == "stopped"
        await dsec("exec", name, "true", code=1)


async def test_cp_both_ways(tmp_path: Path) -> None:
    async with shell() as dsec:
        name = (await dsec("run", IMAGE)).strip()
        tree = tmp_path / "tree"
        (tree / "deep").mkdir(parents=True)
        (tree / "deep/binary").write_bytes(os.urandom(3_000_000))
        (tree / "with space").write_text("x")
        await dsec("cp", str(tree), f"{name}:/tmp")
        await dsec("cp", f"{name}:/tmp/tree", str(tmp_path / "back"))
        for path in ("deep/binary", "with space"):
            assert (tmp_path / "back" / path).read_bytes() == (tree / path).read_bytes()
        await dsec("cp", str(tree / "deep/binary"), f"{name}:/one")
        await dsec("cp", f"{name}:/one", str(tmp_path / "one"))
        assert (tmp_path / "one").read_bytes() == (tree / "deep/binary").read_bytes()
        await dsec("cp", f"{name}:/absent", str(tmp_path / "none"), code=1)


async def test_logs_stats_and_events() -> None:
    async with shell() as dsec:
        watcher = dsec.start("events", "--json", stdout=subprocess.PIPE)
        try:
            assert watcher.stdout is not None
            os.set_blocking(watcher.stdout.fileno(), False)
            seen, names = b"", []
            for _ in range(100):  # until it listens
                names.append((await dsec("run", IMAGE)).strip())
                seen += watcher.stdout.read() or b""
                if seen:
                    break
            name = names[-1]
            cid = (await dsec("exec", "-d", name, "sh", "-c", "seq 1 3; echo e >&2")).strip()
            assert await dsec("logs", "-f", name, cid) == "1\n2\n3\n"
            assert [one["cid"] for one in await dsec.json("logs", name)] == [cid]
            stats = await dsec.json("stats")
            assert name in json.dumps(stats)
            assert (await dsec("stats", "--once")) != ""
            await dsec("stop", *names)
            deadline = time.monotonic() + 20
            while seen.count(b'"stopped"') < len(names) and time.monotonic() < deadline:
                seen += watcher.stdout.read() or b""
                await asyncio.sleep(0.05)
        finally:
            watcher.terminate()
            watcher.wait()
            watcher.stdout.close()
        events = [json.loads(line) for line in seen.splitlines()]
        assert {event["sandbox"] for event in events} <= set(names)
        assert [e["kind"] for e in events if e["sandbox"] == name] == ["created", "stopped"]


async def test_layer_ls_import_rm(tmp_path: Path) -> None:
    async with shell() as dsec:
        make_rootfs(tmp_path / "rootfs")
        await dsec("layer", "import", "base/mine:2", str(tmp_path / "rootfs"))
        rows = await dsec.json("layer", "ls")
        assert {row["name"] for row in rows} == {IMAGE, "base/mine:2"}
        assert "base/mine:2" in await dsec("layer", "ls")
        name = (await dsec("run", "base/mine:2")).strip()
        await dsec("layer", "rm", "base/mine:2")
        assert await dsec("exec", name, "--", "busybox", "echo", "still here") == "still here\n"
        await dsec("run", "base/mine:2", code=1)
        await dsec("layer", "rm", "base/mine:2", code=1)
        (digest,) = [row["digest"] for row in rows if row["name"] == "base/mine:2"]
        shown = {row["name"] for row in await dsec.json("layer", "ls")}
        assert shown == {IMAGE, digest}  # until it is collected
        await dsec("stop", name)
        await dsec("layer", "import", "base/none:1", str(tmp_path / "absent"), code=1)


def _type(leader: int, text: bytes, answer: bytes) -> bytes:
    """Type `text`; return what is shown until `answer` is, and the terminal quiet again."""
    os.write(leader, text)
    seen, deadline = b"", time.monotonic() + 20
    while time.monotonic() < deadline:
        if select.select([leader], [], [], 0.5)[0]:
            seen += os.read(leader, 4096)
        elif answer in seen:
            return seen
    raise AssertionError(f"{answer!r} is not in {seen!r}")


async def test_shell_on_a_terminal() -> None:
    async with shell() as dsec:
        name = (await dsec("run", IMAGE)).strip()
        leader, follower = pty.openpty()
        process = dsec.start("shell", name, stdin=follower, stdout=follower, stderr=follower)
        try:
            os.close(follower)

            def talk() -> int:
                # as a person does: not before the prompt, at which busybox asks for the cursor
                _type(leader, b"echo $((40+2)); tty\n", b"/dev/pts/0\r\n")
                # nor while the shell, which echoes by itself, gives the terminal to cat
                _type(leader, b"echo on; cat\n", b"\non\r\n")
                _type(leader, b"twice\n", b"twice\r\ntwice\r\n")  # the terminal's echo, and cat
                _type(leader, b"\x03", b"# ")  # Ctrl-C ends cat, and only cat
                _type(leader, b"echo after $?\n", b"after 130\r\n")
                os.write(leader, b"exit 5\n")
                while process.poll() is None:
                    with contextlib.suppress(OSError):
                        if select.select([leader], [], [], 0.1)[0]:
                            os.read(leader, 4096)
                return process.wait(20)

            assert await asyncio.to_thread(talk) == 5
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
            os.close(leader)
        await dsec("stop", name)


async def test_top_finds_what_is_at_work() -> None:
    async with shell() as dsec:
        idle = (await dsec("run", IMAGE)).strip()
        busy = (await dsec("run", IMAGE)).strip()
        await dsec("exec", "-d", busy, "sh", "-c", "while :; do :; done")
        await dsec("exec", idle, "sh", "-c", "head -c 3000000 /dev/zero > /file")
        for _ in range(10):  # until it gets some of the host's time between two readings
            made = await dsec.json("top", "--once", "--interval", "2")
            first, last = made["sandboxes"]
            if first["cpu_percent"] > 1 + 5 * last["cpu_percent"]:
                break
        assert (first["id"], first["state"], last["id"]) == (busy, "running", idle)
        # how much a host at work leaves it is not asked, only that it is seen
        assert 110 > first["cpu_percent"] > 1 + 5 * last["cpu_percent"]
        assert last["disk_bytes"] >= 3_000_000
        assert first["memory_bytes"] > 0
        host = made["host"]
        assert host["sandboxes"] == 2
        assert host["cpu_overcommit"] == pytest.approx(2 / host["cpus"])
        assert busy in await dsec("top", "--once", "--interval", "0.1")


async def test_pause_resume_and_class() -> None:
    async with shell() as dsec:
        names = [(await dsec("run", "-l", "job=7", IMAGE)).strip() for _ in range(2)]
        other = (await dsec("run", "--cpu-class", "latency_sensitive", IMAGE)).strip()

        async def seen(field: str) -> dict[str, str]:
            return {row["id"]: row.get(field, "standard") for row in await dsec.json("ps")}

        line = await dsec("pause", "--target", "1", names[0])
        assert line.startswith(f"{names[0]}  ")
        assert "MiB" in line
        assert await seen("state") == {names[0]: "paused", names[1]: "running", other: "running"}
        found = await dsec.json("pause", "-l", "job=7")
        assert sorted(each["id"] for each in found) == sorted(names)
        for each in found:  # the kernel's counters lag by some pages
            assert each["memory_bytes"] <= each["memory_before_bytes"] + (1 << 20)
        assert await seen("state") == {names[0]: "paused", names[1]: "paused", other: "running"}

        # looking at them, and their class, need no resumption
        await dsec("class", "best_effort", "-l", "job=7")
        classes = {names[0]: "best_effort", names[1]: "best_effort", other: "latency_sensitive"}
        assert await seen("cpu_class") == classes
        made = await dsec.json("top", "--once", "--interval", "0.1")
        assert {row["id"]: row["cpu_class"] for row in made["sandboxes"]} == classes
        assert (await seen("state"))[names[0]] == "paused"

        assert await dsec("resume", names[0]) == f"{names[0]}\n"
        assert await dsec("exec", names[1], "echo", "there") == "there\n"
        assert set((await seen("state")).values()) == {"running"}
        assert await dsec("resume", "-l", "job=8") == ""
        # one that is not there keeps the others from nothing
        assert (await dsec("pause", "none", other, code=1)).startswith(other)
        assert (await seen("state"))[other] == "paused"
        await dsec("class", "standard", "none", other, code=1)
        assert (await seen("cpu_class"))[other] == "standard"
        assert (await dsec("resume", "-l", "job=7")).split() == names
        await dsec("pause", code=2)
        await dsec("resume", other, "-l", "job=7", code=2)
        await dsec("class", "urgent", other, code=2)
