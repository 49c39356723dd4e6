"""``dsec policy`` and the options of ``dsec run``, against a daemon with the fake backend."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from dsec import host, policy
from dsec.main import cli
from libdsec import DSecClient
from libdsec.errors import InvalidArgument, Unsupported
from libdsec.model import Event
from libdsec.sync import DSecClientSync
from tests.unit.engine_fixtures import Bench, bench
from tests.unit.policy_backend import PolicyBackend

ROOT = Path(__file__).parents[2]
Dsec = Callable[..., Result]


@pytest.fixture
def daemon() -> Iterator[Bench]:
    """A daemon in a thread of its own, on a host without security modules."""
    loop = asyncio.new_event_loop()
    began: list[Bench] = []
    ready, end = threading.Event(), asyncio.Event()

    async def serve() -> None:
        async with bench(backend=PolicyBackend(missing=["apparmor", "bpf_lsm"])) as b:
            began.append(b)
            ready.set()
            await end.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert ready.wait(10)
    yield began[0]
    loop.call_soon_threadsafe(end.set)
    thread.join(10)
    loop.close()


@pytest.fixture
def dsec(daemon: Bench, monkeypatch: pytest.MonkeyPatch) -> Dsec:
    monkeypatch.setenv("DSEC_ENDPOINT", f"unix:{daemon.config.socket}")

    def invoke(*args: str, code: int = 0, stdin: str | None = None) -> Result:
        result = CliRunner().invoke(cli, list(args), input=stdin)
        assert result.exit_code == code, (result.output, result.exception)
        return result

    return invoke


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


HIDING = '[network.services]\npypi = true\n[files]\nhide = ["/answers", "/**/*.key"]\n'


def test_check(dsec: Dsec, tmp_path: Path) -> None:
    file = write(tmp_path / "p.toml", HIDING)
    assert dsec("policy", "check", file).stdout == (
        f"{file}: good; 3 entries; rules: 5 for names, 2 for files\n"
    )
    assert json.loads(dsec("policy", "check", "sealed", "--json").stdout)["network"] == "none"
    bad = write(tmp_path / "bad.json", '{"network": {"services": {"pipy": true}}}')
    error = dsec("policy", "check", bad, code=1).stderr
    assert error.startswith(f"dsec: {bad}: network.services.pipy: unknown service 'pipy'")
    broken = write(tmp_path / "broken.toml", "[network")
    assert f"dsec: {broken}: " in dsec("policy", "check", broken, code=1).stderr
    assert "none of the presets" in dsec("policy", "check", "swee", code=1).stderr
    assert "No such file" in dsec("policy", "check", "./none", code=1).stderr
    assert "good" in dsec("policy", "check", "-", stdin=HIDING).stdout


def test_explain_says_what_enforces_each_rule(dsec: Dsec, tmp_path: Path) -> None:
    file = write(tmp_path / "p.toml", HIDING)
    lines = dsec("policy", "explain", file).stdout.splitlines()
    assert lines[0].split() == ["RULE", "WHAT", "BY", "REMARKS"]
    said = {line.split()[0]: line for line in lines[1:]}
    assert set(said) == {
        "network.services.pypi", "files.hide[0]", "files.hide[1]", "network.default",
        "vsock.default",
    }  # fmt: skip
    assert "allow pypi" in said["network.services.pypi"]
    assert "enforced  resolver" in " ".join(said["network.services.pypi"].split("   "))
    assert "not enforced" in said["files.hide[1]"]
    assert "apparmor: refused here" in said["files.hide[1]"]
    rows = json.loads(dsec("policy", "explain", file, "--json").stdout)
    assert [row["state"] for row in rows].count("not enforced") == 1
    strict = dsec("policy", "explain", file, "--strict", code=1)
    assert "1 of 5 entries are not fully enforced here" in strict.stderr
    dsec("policy", "explain", "swe", "--strict")
    assert "netns" in dsec("policy", "explain", "sealed").stdout
    assert "bpf_cgroup" in dsec("policy", "explain", "sealed", "--network", "nat").stdout


def test_test_asks_one_or_several(dsec: Dsec) -> None:
    assert dsec("policy", "test", "swe", "name", "pypi.org").stdout == (
        "name pypi.org: allow by swe: network.services.pypi (allow pypi)\n"
    )
    found = dsec("policy", "test", "swe", "tcp 192.0.2.1 443", "read /etc/passwd").stdout
    assert found.splitlines() == [
        "tcp 192.0.2.1 443: deny by network.default", "read /etc/passwd: allow by files.default",
    ]  # fmt: skip
    dsec("policy", "test", "swe", "name", "pypi.org", "--expect", "allow")
    dsec("policy", "test", "swe", "name", "pypi.org", "--expect", "deny", code=1)
    assert "none of tcp|udp" in dsec("policy", "test", "swe", "sing", code=1).stderr
    answer = json.loads(dsec("policy", "test", "swe", "name", "pypi.org", "--json").stdout)
    assert answer[0]["verdict"] == "allow"


def test_schema_is_the_published_one(dsec: Dsec) -> None:
    printed = json.loads(dsec("policy", "schema").stdout)
    assert printed == json.loads((ROOT / "docs/policy.schema.json").read_text())


def test_run_set_and_explain_a_sandbox(dsec: Dsec, daemon: Bench, tmp_path: Path) -> None:
    file = write(tmp_path / "p.toml", HIDING)
    refused = dsec("run", "--policy", file, "--strict", "base/x:1", code=1).stderr
    assert "strict: this host cannot enforce the whole policy (files.hide[1]" in refused
    assert daemon.backend.sandboxes == {}
    made = dsec("run", "--policy", file, "base/x:1")
    assert "note: files.hide[1]: deny" in made.stderr
    name = made.stdout.strip()
    assert "network.services.pypi" in dsec("policy", "explain", name).stdout
    changed = dsec("policy", "set", name, "--allow", "npm", "--deny", "github")
    assert changed.stdout.strip() == name
    assert "note: files.hide[1]" in changed.stderr
    shown = dsec("policy", "explain", name).stdout
    assert "network.services.npm" in shown
    assert "network.services.pypi" not in shown
    dsec("policy", "explain", name, "--strict", code=1)
    assert (
        "files: only the network"
        in dsec(
            "policy", "set", name, write(tmp_path / "q.toml", '[files]\nhide = ["/x"]'), code=1
        ).stderr
    )
    dsec("policy", "set", name, code=2)
    dsec("run", "--policy", "./none", "base/x:1", code=2)
    assert dsec("run", "--policy", "grader", "--strict", "base/x:1").stderr == ""
    assert "no sandbox" in dsec("policy", "explain", "s0-n0-1-0abcd", code=1).stderr


def test_the_synchronous_client(daemon: Bench) -> None:
    with DSecClientSync(f"unix:{daemon.config.socket}") as client:
        assert client.check_policy("swe").network == "nat"
        rows = client.explain_policy(network_rules={"pypi": True})
        assert rows[0].by == ["resolver"]
        (answer,) = client.test_policy(["name pypi.org"], network_rules={"pypi": True})
        assert answer.verdict == "allow"


def test_events_are_readable(dsec: Dsec, daemon: Bench) -> None:
    name = dsec("run", "--policy", "swe", "base/x:1").stdout.strip()
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT}/src"}
    command = [sys.executable, "-m", "dsec", "events", "--sandbox", name]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as events:
        manager = daemon.service.manager
        deadline = time.monotonic() + 20
        while not manager.events._subscriptions:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        dsec("policy", "set", name, "sealed")
        assert events.stdout is not None
        assert events.stdout.readline().split(maxsplit=1)[1] == f"{name} policy unenforced=0\n"
        events.terminate()


@pytest.mark.parametrize(
    ("detail", "text"),
    [
        (
            {"where": "connect", "protocol": "tcp", "address": "192.0.2.1", "port": "443"},
            "tcp 192.0.2.1 443 (where=connect)",
        ),
        ({"name": "evil.example"}, "evil.example"),
        ({"count": "7"}, "count=7"),
    ],
)
def test_denied_attempts_read_like_questions(detail: dict[str, str], text: str) -> None:
    assert host._detail(Event(time=0, sandbox="s", kind="denied", detail=detail)) == text


@pytest.mark.parametrize("text", ["[1]", '"x"', "{", "[" * 100_000])
def test_files_that_hold_no_policy(tmp_path: Path, text: str) -> None:
    with pytest.raises(InvalidArgument, match=r"p\.json: "):
        policy.read(write(tmp_path / "p.json", text))


async def test_without_a_daemon_the_answer_is_the_same(
    daemon: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DSEC_CONFIG", write(tmp_path / "dsecd.toml", 'backend = "fake"\n'))
    here: Any = policy._Here()
    async with DSecClient(f"unix:{daemon.config.socket}") as client:
        assert await here.check_policy("swe") == await client.check_policy("swe")
        asked = ["name pypi.org", "tcp 192.0.2.1 443"]
        assert await here.test_policy(asked, "swe") == await client.test_policy(asked, "swe")
    assert [row.state for row in await here.explain_policy("sealed")] == ["not enforced"] * 2
    with pytest.raises(Unsupported, match="no microvm backend"):
        await here.explain_policy("sealed", backend="microvm")
