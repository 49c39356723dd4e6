"""`verify` on a real daemon: the record, and that nothing stays behind whatever fails."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from dsec.main import cli
from dsecd.host.plan import STEPS
from libdsec import (
    DSecClient,
    DSecContainerRunArgs,
    DSecError,
    NotFound,
    Sandbox,
    Timeout,
    Unsupported,
    WrongState,
    check_record,
)
from libdsec.sync import DSecClientSync
from tests.system.daemon import IMAGE, Daemon, daemon

pytestmark = pytest.mark.root
RUN = DSecContainerRunArgs(container_image=IMAGE, memory_limit_mb=128, disk_limit_mb=64)
PLANT = "mkdir -p /app/src; echo mine > /app/src/a; touch /app/other; rm /bin/true"


@pytest.fixture
async def agent(host: Daemon) -> AsyncIterator[Sandbox]:
    async with DSecClient(f"unix:{host.socket}") as client:
        yield await planted(client)


async def planted(client: DSecClient) -> Sandbox:
    sandbox = await client.run_container(RUN)
    await sandbox.run_shell(PLANT, check=True)
    return sandbox


async def only(host: Daemon, sandbox: Sandbox) -> None:
    """The agent's sandbox runs, is not frozen, and no other is there."""
    client = await host.client()
    async with asyncio.timeout(10):
        while True:
            live = [info["id"] for info in await client.call("sandbox.list", {})]
            if live == [sandbox.id]:
                break
            await asyncio.sleep(0.02)
    done = await sandbox.run_shell("cat /app/src/a", timeout=10)
    assert (done.exit_code, done.stdout) == (0, "mine\n")


async def test_the_record_says_what_was_graded(host: Daemon, agent: Sandbox) -> None:
    seen: list[str] = []
    verified = await agent.verify(
        "cat a; echo err >&2; echo $ASKED; [ -e /app/other ] || true; exit 3",
        ["/app/src", "/app/src/a", "/none"],
        timeout_s=10,
        env={"ASKED": "yes"},
        cwd="/app/src",
        on_stdout=seen.append,
    )
    result, record = verified.result, verified.record
    assert (result.exit_code, result.stdout, result.stderr) == (3, "mine\nyes\n", "err\n")
    assert "".join(seen) == result.stdout
    assert (record.sandbox, record.image, record.exit_code) == (agent.id, IMAGE, 3)
    assert record.grader != agent.id
    assert record.stdout_sha256 == hashlib.sha256(b"mine\nyes\n").hexdigest()
    assert (record.stdout_bytes, record.stderr_bytes, record.env["ASKED"]) == (9, 4, "yes")
    kept = {path.path: (path.kind, path.size_bytes, path.entries) for path in record.paths}
    assert kept == {"/app/src": ("directory", 5, 1), "/none": ("absent", 0, 0)}
    assert record.limits["memory_mb"] == 128
    async with DSecClient(f"unix:{host.socket}") as client:
        key = await client.verify_key()
        layer = await client.layers.get(record.kept)
        assert [info.digest for info in await client.layers.list()].count(record.layers[0]) == 1
    assert layer.size_bytes == 5
    assert check_record(verified.signed.to_json(), key) == record
    assert (host.state / "verify.key").stat().st_mode & 0o777 == 0o600
    file = (await agent.verify(["/bin/cat", "/f"], ["/f"])).record.paths
    assert [(one.path, one.kind) for one in file] == [("/f", "absent")]
    await agent.files.write("/f", "content")
    (path,) = (await agent.verify(["/bin/cat", "/f"], ["/f"])).record.paths
    assert (path.kind, path.sha256) == ("file", hashlib.sha256(b"content").hexdigest())
    await only(host, agent)


async def test_the_key_outlives_the_daemon(host: Daemon) -> None:
    async with DSecClient(f"unix:{host.socket}") as client:
        key = await client.verify_key()
        await host.restart()
        assert await client.verify_key() == key


async def test_nothing_of_the_sandbox_reaches_the_grader(host: Daemon) -> None:
    args = DSecContainerRunArgs(
        container_image=IMAGE, env={"PATH": "/evil:/bin", "PYTHONPATH": "/evil"}, network="nat"
    )
    async with DSecClient(f"unix:{host.socket}") as client:
        agent = await client.run_container(args)
        await agent.run_shell("mkdir /app; mount -t tmpfs none /mnt; sleep 100 &", check=False)
        verified = await agent.verify("env; ls /app /proc /sys/class/net; cat /etc/hosts", ["/w"])
        lines = verified.result.stdout.splitlines()
        assert "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin" in lines
        assert not any("evil" in line or "sleep" in line for line in lines)
        assert "ls: /app: No such file or directory" in verified.result.stderr
        net = (await agent.verify("cat /proc/net/dev | grep -c :", ["/w"])).result
        assert net.stdout == "1\n", "loopback only"


async def test_how_a_grader_ends_is_in_the_result(host: Daemon, agent: Sandbox) -> None:
    slow = await agent.verify("echo begun; sleep 60", ["/app/src"], timeout_s=0.5)
    while not slow.result.stdout:  # the machine stood still: it had no time to begin
        assert slow.result.timed_out
        slow = await agent.verify("echo begun; sleep 60", ["/app/src"], timeout_s=0.5)
    assert (slow.result.timed_out, slow.record.timed_out, slow.result.stdout) == (
        True, True, "begun\n",
    )  # fmt: skip
    killed = await agent.verify("kill -9 $$", ["/app/src"])
    assert (killed.result.signal, killed.record.signal, killed.record.exit_code) == (9, 9, None)
    hungry = await agent.verify("tail /dev/zero", ["/app/src"], timeout_s=30)
    assert (hungry.result.oom_killed, hungry.record.oom_killed) == (True, True)
    much = await agent.verify("yes | head -c 3000000", ["/app/src"])
    assert len(much.result.stdout_bytes) == much.record.stdout_bytes == 3_000_000
    digest = hashlib.sha256(much.result.stdout_bytes).hexdigest()
    assert digest == much.record.stdout_sha256
    await only(host, agent)


async def test_what_a_checkpoint_saved_is_graded_too(host: Daemon, agent: Sandbox) -> None:
    """After a swap of the root the kept paths lie in several uppers."""
    checkpoint = await agent.checkpoint()
    assert checkpoint.method == "swap"
    await agent.run_shell("mv /app/src /app/s; mkdir /app/src; cp /app/s/a /app/src/b; "
                          "rm -rf /app/s", check=True)  # fmt: skip
    await agent.checkpoint()
    await agent.run_shell("echo more >> /app/src/b", check=True)
    verified = await agent.verify("cd /app/src; for f in *; do echo $f; cat $f; done",
                                  ["/app/src"])  # fmt: skip
    assert verified.result.stdout == "b\nmine\nmore\n"


async def test_a_refused_request_leaves_nothing(host: Daemon, agent: Sandbox) -> None:
    for kind, words in (
        (NotFound, {"command": "true", "toolkit": "toolkit/absent:1"}),
        (NotFound, {"command": ["/bin/absent"]}),
        (NotFound, {"command": "true", "user": "nobody-here"}),
        (NotFound, {"command": "true", "cwd": "/absent"}),
        (DSecError, {"command": "true", "timeout_s": -1.0}),
        (DSecError, {"command": []}),
    ):
        with pytest.raises(kind):
            await agent.verify(keep=["/app/src"], **words)  # type: ignore[arg-type]
        await only(host, agent)
    await agent.stop()
    with pytest.raises((WrongState, NotFound)):
        await agent.verify("true", ["/app/src"])


async def test_a_cancelled_grader_leaves_nothing(host: Daemon, agent: Sandbox) -> None:
    for delay in (0.0, 0.01, 0.03, 0.06, 0.5):
        task = asyncio.create_task(agent.verify("sleep 60", ["/app/src"]))
        await asyncio.sleep(delay)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await only(host, agent)


async def test_a_lost_client_leaves_nothing(host: Daemon, agent: Sandbox) -> None:
    other = DSecClient(f"unix:{host.socket}")
    await other.open()
    theirs = await other.connect(agent.id)
    task = asyncio.create_task(theirs.verify("sleep 60", ["/app/src"]))
    await asyncio.sleep(0.3)
    await other.close()
    await asyncio.gather(task, return_exceptions=True)
    await only(host, agent)


async def test_every_step_of_the_graders_creation_may_fail(tmp_path: Path) -> None:
    """The spawner fails each step once, in turn; the agent's sandbox is made before."""
    async with daemon() as host, DSecClient(f"unix:{host.socket}") as client:
        agent = await planted(client)
        host.kill()
        await host.start(crash_at="fail-each-step")
        for step in STEPS:
            with pytest.raises(DSecError, match=f"step '{step}' failed"):
                await agent.verify("cat /app/src/a", ["/app/src"])
            await only(host, agent)
        assert (await agent.verify("cat /app/src/a", ["/app/src"])).result.stdout == "mine\n"
        await only(host, agent)


@pytest.mark.parametrize(
    "point", ["in-a-keep", "prepared", "intent", "created", "running", "destroyed"]
)
async def test_a_killed_daemon_leaves_no_grader_and_no_frozen_agent(point: str) -> None:
    async with daemon() as host, DSecClient(f"unix:{host.socket}") as client:
        agent = await planted(client)
        host.kill()
        await host.start(crash_at=point)
        with pytest.raises(DSecError):
            await agent.verify("cat /app/src/a", ["/app/src"])
        assert host.process is not None
        assert await asyncio.to_thread(host.process.wait, 20) == -9
        await host.start()
        await only(host, agent)
        assert (await agent.verify("cat /app/src/a", ["/app/src"])).result.ok


async def test_a_daemon_killed_while_the_grader_runs_ends_it(host: Daemon) -> None:
    async with DSecClient(f"unix:{host.socket}", reconnect_timeout=60) as client:
        agent = await planted(client)
        task = asyncio.create_task(agent.verify("sleep 60", ["/app/src"]))
        await asyncio.sleep(0.7)
        await host.restart()
        with pytest.raises(DSecError):
            await task
        await only(host, agent)  # the grader's after the grace of unclaimed sandboxes


async def test_the_layer_of_what_was_kept_is_garbage(host: Daemon, agent: Sandbox) -> None:
    async with DSecClient(f"unix:{host.socket}") as client:
        before = {info.digest for info in await client.layers.list()}
        kept = (await agent.verify("true", ["/app/src"])).record.kept
        assert {info.digest for info in await client.layers.list()} - before == {kept}
        await agent.stop()
    await host.end()  # with it go the mounts that are kept for a while
    await host.start()
    async with DSecClient(f"unix:{host.socket}") as client:
        for _ in range(2):  # the first look marks, the next deletes
            await client.layers.collect(grace_s=0, wait_s=0)
        assert {info.digest for info in await client.layers.list()} == before


async def test_without_a_shell_of_the_platforms(tmp_path: Path) -> None:
    """The sandbox's own shell runs, and says so; shell text is not graded by it."""
    async with (
        daemon(paths={"shell": str(tmp_path / "absent")}) as host,
        DSecClient(f"unix:{host.socket}") as client,
    ):
        agent = await planted(client)
        assert any("use its own shell" in note for note in agent.info.notes)
        feature = {row.name: row for row in await client.check()}["platform_shell"]
        assert (feature.available, "absent" in feature.reason) == (False, True)
        assert (await agent.run_shell("readlink /proc/$$/exe")).stdout == "/bin/busybox\n"
        with pytest.raises(Unsupported, match="bash-static"):
            await agent.verify("true", ["/app/src"])
        assert (await agent.verify(["/bin/cat", "/app/src/a"], ["/app/src"])).result.ok


async def test_a_shell_that_needs_a_loader_is_not_taken() -> None:
    async with (
        daemon(paths={"shell": "/bin/bash"}) as host,
        DSecClient(f"unix:{host.socket}") as client,
    ):
        feature = {row.name: row for row in await client.check()}["platform_shell"]
        assert "not statically linked" in feature.reason


async def test_the_command_line(host: Daemon, agent: Sandbox, tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    endpoint = ["--endpoint", f"unix:{host.socket}"]

    def dsec(*words: str) -> tuple[int, str]:
        done = CliRunner().invoke(cli, [*endpoint, *words])
        return done.exit_code, done.output

    code, output = await asyncio.to_thread(
        dsec, "verify", agent.id, "--keep", "/app/src", "--record", str(record), "--",
        "/bin/cat", "/app/src/a", "/absent",
    )  # fmt: skip
    assert (code, "mine\n" in output) == (1, True)
    code, key = await asyncio.to_thread(dsec, "verify-key")
    code, output = await asyncio.to_thread(dsec, "verify-record", str(record), "--key", key.strip())
    assert (code, f"good signature: sandbox {agent.id}" in output) == (0, True)


async def test_the_synchronous_twin(host: Daemon, agent: Sandbox) -> None:
    def use() -> tuple[str, int | None]:
        with DSecClientSync(f"unix:{host.socket}") as client:
            done = client.connect(agent.id).verify("cat /app/src/a; exit 4", ["/app/src"])
            return done.result.stdout, done.record.exit_code

    assert await asyncio.to_thread(use) == ("mine\n", 4)


async def test_a_timeout_is_the_graders_not_the_calls(host: Daemon) -> None:
    """A grader may take longer than a client waits for an ordinary answer."""
    async with DSecClient(f"unix:{host.socket}", request_timeout=1.0) as client:
        agent = await planted(client)
        try:
            verified = await agent.verify("sleep 1.5; echo done", ["/app/src"])
        except Timeout as error:
            pytest.fail(str(error))
        assert verified.result.stdout == "done\n"
