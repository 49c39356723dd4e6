"""``dsec audit`` of sandboxes and images with everything planted, with nothing, and with malice."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from dsecd.policy.compile import compile_policy
from dsecd.policy.language import from_toml
from libdsec import DSecClient, DSecContainerRunArgs, Sandbox, model
from libdsec.audit import Bounds, Report, Wanted, audit
from tests.system.daemon import IMAGE, Daemon, daemon, make_rootfs
from tests.unit.audit_trees import PLANTED
from tests.unit.test_audit_git import commit, git

pytestmark = pytest.mark.root

ROOT = Path(__file__).parents[2]
TASK = "base/task:1"


def plant(root: Path) -> None:
    """Put each thing of the unit tests' table into a tree, as its owner's."""
    for one in PLANTED:
        path = root / one.path.lstrip("/")
        missing = [above for above in path.parents if not above.exists()]
        path.parent.mkdir(parents=True, exist_ok=True)
        for above in missing:
            place = f"/{above.relative_to(root)}"
            if place.startswith(("/workspace", "/home/agent")):
                os.chown(above, 1000, 1000)
        if one.type == "dir":
            path.mkdir(exist_ok=True)
            (path / "inside").write_text("x")
        elif not path.is_dir():
            path.write_bytes(one.content)
        os.chown(path, one.uid, one.uid)
        path.chmod(one.mode)


def plant_repository(root: Path) -> str:
    """Make a repository at its first commit, the fix on a branch of the remote. Return the fix."""
    top = root / "workspace/project"
    top.mkdir(parents=True)
    git(top, "init", "-qb", "main")
    commit(top, "begin")
    fix = commit(top, "Fix the fault")
    git(top, "update-ref", "refs/remotes/origin/main", fix)
    git(top, "reset", "-q", "--hard", "HEAD~")
    git(top, "gc", "-q")
    return fix


async def run(d: Daemon, *words: str, code: int = 0) -> str:
    env = {**os.environ, "DSEC_ENDPOINT": f"unix:{d.socket}", "PYTHONPATH": f"{ROOT}:{ROOT}/src"}
    command = [sys.executable, "-m", "dsec", *words]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, env=env)
    assert done.returncode == code, (words, done)
    return (done.stdout if code != 2 else done.stderr).decode()


async def import_task(d: Daemon, root: Path) -> None:
    client = await d.client()
    config = model.LayerImport(name=TASK, source=str(root))
    await client.call("layer.import", config)


async def test_an_image_with_everything_planted(tmp_path: Path) -> None:
    root = tmp_path / "root"
    make_rootfs(root)
    plant(root)
    fix = plant_repository(root)
    async with daemon() as d:
        await import_task(d, root)
        words = ("audit", TASK, "--user", "agent", "--fix-commit", fix[:12], "--answers", "*.bin")
        text = await run(d, "--json", *words, "--fail-on", "critical", code=1)
        report: dict[str, Any] = json.loads(text)
        found = {(one["path"], one["kind"]): one["risk"] for one in report["findings"]}
        for one in PLANTED:
            # what depends on the place of work, which this image does not say
            if one.path not in ("/workspace/Makefile",):
                assert found.get((one.path, one.kind)) == one.risk, one
        assert found["/workspace/project/.git", "git"] == "critical"
        assert report["findings"][0]["risk"] == "critical"
        assert report["agent"] == "user 1000"
        assert report["limits"] == []
        compiled = compile_policy(from_toml(report["policy"]))
        assert "/workspace/solution.py" in compiled.files.hidden
        table = await run(d, *words)
        assert table.count("critical") >= 8
        assert "solution\\n.py" in table
        assert "s3cr3t" not in table + text
        assert d.remains() == []


async def test_a_clean_image_passes(tmp_path: Path) -> None:
    async with daemon() as d:
        report = json.loads(await run(d, "--json", "audit", IMAGE, "--fail-on", "medium"))
        assert [one["kind"] for one in report["findings"]] == ["rights"]
        report = json.loads(await run(d, "--json", "audit", IMAGE, "--user", "agent"))
        assert report["findings"] == []
        assert compile_policy(from_toml(report["policy"])).files.hidden == ()
        assert d.remains() == []


async def audited(
    d: Daemon, script: str, wanted: Wanted | None = None, bounds: Bounds | None = None, **args: Any
) -> Report:
    """Audit a sandbox in which root ran `script`."""
    async with DSecClient(f"unix:{d.socket}") as client:
        made = DSecContainerRunArgs(container_image=IMAGE, **args)
        async with await client.run_container(made) as sandbox:
            await prepare(sandbox, script)
            return await audit(sandbox, wanted, bounds=bounds)


async def prepare(sandbox: Sandbox, script: str) -> None:
    await sandbox.run_shell(script, user="root", check=True, timeout=30)


async def test_a_running_sandbox_with_a_service_and_secrets_in_its_environment() -> None:
    script = """
    GH_TOKEN=ghp_aB3aB3aB3aB3aB3aB3aB3aB3aB3aB3aB3aB3 nc -l -p 8080 >/dev/null 2>&1 &
    mkdir -p /tests && echo x >/tests/test_it.py && echo x >/conftest.py
    while ! grep -q 1F90 /proc/net/tcp6; do sleep 0.05; done
    """
    async with daemon() as d:
        report = await audited(
            d, script, Wanted(grader=("/tests",)),
            env={"PATH": "/x:/usr/bin:/bin"}, network_rules={"github": True},
        )  # fmt: skip
    found = {(one.kind, one.path): one.risk for one in report.findings}
    assert found["service", "tcp://[::]:8080"] == "medium"
    assert found["credential", "$GH_TOKEN"] == "high"
    assert found["grader", "/tests"] == "high"
    assert found["hook", "/conftest.py"] == "high"
    assert found["path", "/x"] == "medium"
    assert found["network", "network"] == "high"
    assert report.agent == "root"


async def test_a_hostile_tree_does_not_hold_or_deceive_the_audit() -> None:
    script = r"""
    mkdir /h && cd /h
    mkfifo solution.fifo .env id_rsa.pub && ln -s / root && ln -s loop loop && ln -s /proc self
    mkdir d && ln -s ../d d/d
    dd if=/dev/zero of=huge.json bs=1 count=0 seek=500M 2>/dev/null
    printf x > "$(printf 'solution\033[31m\n')"
    mkdir -p g/.git/objects/pack g/.git/refs
    ln -s /dev/zero g/.git/objects/pack/a.pack; mkfifo g/.git/objects/pack/a.idx
    printf 'ref: HEAD' > g/.git/HEAD
    printf x > g/.git/objects/pack/b.idx; printf x > g/.git/objects/pack/b.pack
    o=g/.git/objects/aa; mkdir $o; printf nonsense > $o/00000000000000000000000000000000000000
    p=/h; i=0; while [ $i -lt 300 ]; do mkdir n && cd n; i=$((i+1)); done; printf x > answer.txt
    """
    async with daemon() as d:
        start = time.monotonic()
        report = await audited(d, script)
        assert time.monotonic() - start < 60
    critical = {one.path for one in report.findings if one.risk == "critical"}
    assert critical == {"/h/solution\x1b[31m", "/h" + "/n" * 300 + "/answer.txt"}
    assert any("packs of git not understood" in limit for limit in report.limits)
    assert any("objects of git not understood" in limit for limit in report.limits)
    compile_policy(from_toml(report.policy))


async def test_bounds_are_kept_and_said() -> None:
    script = "cd /tmp && for i in $(seq 200); do echo token > $i.txt; done"
    async with daemon() as d:
        few = Bounds(entries=50, files=10)
        report = await audited(d, script, bounds=few)
        assert report.entries <= 51
        assert any("more entries than are looked at" in limit for limit in report.limits)
        none = await audited(d, script, bounds=Bounds(seconds=0))
        assert none.entries == 1
        assert none.limits


async def test_wrong_use_is_refused() -> None:
    async with daemon() as d:
        name = (await run(d, "run", IMAGE)).strip()
        assert "are for an IMAGE" in await run(d, "audit", name, "--user", "agent", code=2)
        await run(d, "audit", name, "--grader", "relative", code=1)
        await run(d, "audit", "base/none:1", code=1)
        assert json.loads(await run(d, "--json", "audit", name))["target"] == name
        assert (await run(d, "ps", "-q")).split() == [name]
        await run(d, "stop", name)
        await run(d, "audit", name, code=1)


async def test_what_was_not_looked_at_fails_a_check() -> None:
    async with daemon() as d:
        name = (await run(d, "run", IMAGE)).strip()
        await run(d, "exec", name, "--", "sh", "-c", "mkdir -p /g/.git/refs /g/.git/objects/pack;"
                  "cd /g/.git; echo x > HEAD; echo x > objects/pack/a.pack")  # fmt: skip
        report = json.loads(await run(d, "--json", "audit", name, "--fail-on", "critical", code=1))
        assert report["findings"][0]["risk"] != "critical"
        assert "packs of git not looked at" in report["limits"][0]
