"""Policies of requests against a real daemon: what is promised is what this host enforces."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from libdsec import DSecClient, DSecContainerRunArgs, Sandbox, Unsupported, WrongState
from libdsec.model import SandboxPolicy
from tests.system.daemon import IMAGE, Daemon, daemon

pytestmark = [pytest.mark.root, pytest.mark.asyncio]
ROOT = Path(__file__).parents[2]

# Something for every mechanism; which of it is enforced is the host's to say
WIDE: dict[str, Any] = {
    "network": {"services": {"pypi": True, "192.0.2.0/24": True, "npm": False}},
    "files": {"hide": ["/answers"], "rules": [{"paths": ["/etc"], "deny": ["write"]}]},
    "ioctls": {"deny": ["TIOCSTI"]},
    "mounts": {"default": "deny"},
    "unix": {"deny": ["@secret"]},
}


async def make(client: DSecClient, **fields: Any) -> Sandbox:
    args = DSecContainerRunArgs(container_image=IMAGE, memory_limit_mb=64, **fields)
    return await client.run_container(args, timeout=60)


@pytest.mark.vm
async def test_the_reply_says_what_explain_says_and_strict_goes_by_it(client: DSecClient) -> None:
    for policy in ("sealed", "grader", "swe", "open", WIDE):
        rows = await client.explain_policy(policy)
        short = [row.place for row in rows if row.state != "enforced"]
        sandbox = await make(client, policy=policy)
        said = (" is not enforced", " is partly", " is closed")
        notes = [note for note in sandbox.info.notes if any(word in note for word in said)]
        assert len(notes) == len(short), (policy, notes)
        assert (await sandbox.policy()).rows == rows
        before = len(await client.list_sandboxes())
        if short:
            with pytest.raises(Unsupported) as caught:
                await make(client, policy=policy, strict=True)
            assert caught.value.detail["rules"] == short
            assert len(await client.list_sandboxes()) == before
        else:
            await make(client, policy=policy, strict=True)


@pytest.mark.vm
async def test_what_opens_nothing_has_no_network(client: DSecClient) -> None:
    sandbox = await make(client, network_rules={"npm": False})
    assert sandbox.info.address == ""
    with pytest.raises(WrongState, match="without a network"):
        await sandbox.update_network({"pypi": True})
    assert (await sandbox.policy()).network == "none"


@pytest.mark.vm
@pytest.mark.needs("bpf_cgroup", "bpf_fs", "veth", "nftables")
async def test_a_killed_daemon_knows_the_policy_in_force(client: DSecClient, host: Daemon) -> None:
    created = await make(client, policy=WIDE)
    updated = await make(client, policy=WIDE)
    await updated.update_network({"pypi": False, "github": True})
    before = [await sandbox.policy() for sandbox in (created, updated)]
    await host.restart()
    assert [await sandbox.policy() for sandbox in (created, updated)] == before
    assert (await updated.get_info()).notes == updated.info.notes
    assert _services(before[1]) == {"pypi": False, "github": True}
    (branch,) = await updated.branch()
    assert _services(await branch.policy()) == {"pypi": False, "github": True}


def _services(found: SandboxPolicy) -> dict[str, bool]:
    assert found.policy is not None
    services: dict[str, bool] = found.policy["network"]["services"]
    return services


@pytest.mark.needs("bpf_cgroup", "bpf_fs", "veth", "nftables")
async def test_the_command_line(host: Daemon, tmp_path: Path) -> None:
    file = tmp_path / "policy.toml"
    file.write_text("[network.services]\npypi = true\n")
    name = (await dsec(host, "run", "--policy", str(file), IMAGE)).strip()
    assert "resolver" in await dsec(host, "policy", "explain", name)
    assert (await dsec(host, "policy", "set", name, "--allow", "npm")).strip() == name
    rows = json.loads(await dsec(host, "--json", "policy", "explain", name))
    assert "network.services.npm" in [row["place"] for row in rows]
    assert "good" in await dsec(host, "policy", "check", str(file))
    assert "allow" in await dsec(host, "policy", "test", str(file), "name", "pypi.org")


async def dsec(host: Daemon, *words: str) -> str:
    environment = {
        **os.environ,
        "DSEC_ENDPOINT": f"unix:{host.socket}",
        "PYTHONPATH": f"{ROOT}:{ROOT}/src",
    }
    done = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-m", "dsec", *words],
        capture_output=True, text=True, env=environment, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done
    return done.stdout


async def test_the_operators_files(tmp_path: Path) -> None:
    catalogue = tmp_path / "services.toml"
    catalogue.write_text('[inside]\nhosts = ["git.corp.example"]\nprivate = true\n')
    default = tmp_path / "default.toml"
    default.write_text("[network.services]\ninside = false\n")
    async with daemon(policy={"catalogue": str(catalogue), "default": str(default)}) as made:
        async with DSecClient(f"unix:{made.socket}") as client:
            sandbox = await make(client)
            assert _services(await sandbox.policy()) == {"inside": False}
            (answer,) = await client.test_policy(
                ["name git.corp.example"], network_rules={"inside": True}
            )
            assert answer.verdict == "allow"
        catalogue.write_text("[inside\n")
        config = str(made.config_file)
        check = await asyncio.to_thread(
            subprocess.run, [sys.executable, "-m", "dsecd", "--check", "--config", config],
            capture_output=True, text=True, cwd=ROOT, timeout=60, check=False,
        )  # fmt: skip
        assert check.returncode == 1
        assert str(catalogue) in check.stderr
        catalogue.write_text("")
        default.write_text("")
