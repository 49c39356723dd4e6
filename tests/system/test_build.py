"""Layers built from Dockerfiles by a real daemon, and the defaults they carry."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from libdsec import (
    DSecClient,
    DSecContainerRunArgs,
    ImageConfig,
    ImportProgress,
)
from libdsec.errors import AlreadyExists, CommandFailed, InvalidArgument, NotFound
from tests.system.daemon import IMAGE, Daemon, until
from tests.system.user_view import shell

pytestmark = pytest.mark.root
ROOT = Path(__file__).parents[2]
LIMITS: dict[str, Any] = {
    "memory_limit_mb": 256, "cpu_cores_limit": 1.0, "disk_limit_mb": 256, "network": "none",
}  # fmt: skip


def context(parent: Path, dockerfile: str, **files: str) -> Path:
    root = parent / "context"
    root.mkdir(exist_ok=True)
    (root / "Dockerfile").write_text(f"FROM {IMAGE}\n{dockerfile}")
    for name, text in files.items():
        target = root / name.replace("__", "/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    return root


async def names(client: DSecClient) -> set[str]:
    return {info.name for info in await client.layers.list()}


async def test_a_whole_dockerfile(client: DSecClient, tmp_path: Path) -> None:
    root = context(
        tmp_path,
        "ARG WHO=nobody\n"
        "ENV GREETING='hello you' PATH=/opt/bin:$PATH\n"
        "COPY --chown=agent:agent --chmod=750 tools/ /opt/bin\n"
        "COPY --chown=1234 *.txt /srv/data/\n"
        "COPY a.txt /srv/renamed\n"
        "WORKDIR /srv/app\n"
        "COPY . .\n"
        "RUN pwd > where && id -u > who && echo $GREETING $WHO >> who && { sleep 1000 & }\n"
        "USER agent\n"
        "WORKDIR mine\n"
        'RUN ["sh", "-c", "tool > out; id -un >> out; echo $HOME >> out"]\n'
        "CMD serve\n",
        tools__tool="#!/bin/sh\necho tool\n", a__txt="x", b__dir__c="c", skipped="s",
    )  # fmt: skip
    (root / "a").rename(root / "a.d")
    (root / "a.txt").write_text("a")
    (root / "b.txt").write_text("b")
    (root / "b/link").symlink_to("dir/c")
    (root / ".dockerignore").write_text("skipped\nDockerfile\n.dockerignore\na.d\n")
    made = await client.layers.build("base/app:1", root, arguments={"WHO": "me"}, **LIMITS)
    assert await client.list_sandboxes() == []
    info = await client.layers.get("base/app:1")
    assert (info.digest, info.name) == (made.digest, "base/app:1")
    assert info.config is not None
    assert info.config.env["GREETING"] == "hello you"
    assert "WHO" not in info.config.env
    assert (info.config.user, info.config.workdir) == ("agent", "/srv/app/mine")
    assert info.config.cmd == ["/bin/sh", "-c", "serve"]
    args = DSecContainerRunArgs(container_image="base/app:1")
    async with await client.run_container(args) as box:
        assert await shell(box, "pwd; id -un; echo $GREETING") == (
            "/srv/app/mine\nagent\nhello you\n"
        )
        assert await shell(box, "cat out; tool") == "tool\nagent\n/home/agent\ntool\n"
        assert await shell(box, "cat ../who ../where") == "0\nhello you me\n/srv/app\n"
        assert await shell(box, "cd ..; find . -type f | sort") == (
            "./a.txt\n./b.txt\n./b/dir/c\n./mine/out\n./tools/tool\n./where\n./who\n"
        )
        assert await shell(box, "cat ../b/link /srv/renamed /srv/data/b.txt") == "cab"
        owners = "/opt/bin/tool /opt/bin /srv/data /srv/data/a.txt /srv/app /srv/app/mine /usr/bin"
        assert await shell(box, f"stat -c '%U:%g %a' {owners}") == (
            "agent:1000 750\nagent:1000 755\nUNKNOWN:1234 755\nUNKNOWN:1234 644\nroot:0 755\n"
            "agent:1000 755\nroot:0 755\n"
        )


async def test_copy_leaves_what_is_there(client: DSecClient, tmp_path: Path) -> None:
    """A directory that exists keeps owner and permissions; files in it are replaced or added."""
    root = context(
        tmp_path,
        "RUN mkdir -p /d/sub && echo old > /d/sub/f && echo stays > /d/g && chmod 711 /d/sub"
        " && chown 7:8 /d/sub && ln -s d /l\n"
        "COPY --chown=5:6 tree /d\n"
        "COPY single /d/sub\n"
        "COPY single /l/\n"
        "COPY single /\n"
        "COPY single new\n",
        tree__sub__f="new", tree__fresh__x="x", single="1",
    )  # fmt: skip
    (root / "tree/fresh").chmod(0o700)
    os.utime(root / "single", (1_000_000_000, 1_000_000_000))
    await client.layers.build("base/copied", root, **LIMITS)
    async with await client.run_container(
        DSecContainerRunArgs(container_image="base/copied")
    ) as box:
        assert await shell(box, "cat /d/sub/f /d/g /d/sub/single /d/single /single /new") == (
            "newstays\n1111"
        )
        assert await shell(box, "stat -c '%u:%g %a' /d/sub /d/sub/f /d/fresh /d/fresh/x /d") == (
            "7:8 711\n5:6 644\n5:6 700\n5:6 644\n0:0 755\n"
        )
        assert await shell(box, "stat -c %Y /single; readlink /l") == "1000000000\nd\n"


async def test_a_failure_in_the_middle_leaves_nothing(
    client: DSecClient, host: Daemon, tmp_path: Path
) -> None:
    root = context(tmp_path, "RUN echo one > /one\nRUN echo noise; ls /none\nRUN true\n")
    output: list[str] = []
    with pytest.raises(CommandFailed, match=r"line 3: RUN echo noise; ls /none: .*code 1") as error:
        await client.layers.build("base/app:1", root, on_output=output.append, **LIMITS)
    assert "ls: /none: No such file" in error.value.message
    assert "".join(output).startswith("noise\nls: ")
    assert await names(client) == {IMAGE}
    assert await client.list_sandboxes() == []
    assert host.remains() == []


async def test_a_cancelled_build_leaves_nothing(
    client: DSecClient, host: Daemon, tmp_path: Path
) -> None:
    root = context(tmp_path, "RUN echo begun; sleep 1000\n")
    begun = asyncio.Event()
    build = asyncio.create_task(
        client.layers.build("base/app:1", root, on_output=lambda text: begun.set(), **LIMITS)
    )
    await asyncio.wait_for(begun.wait(), 20)
    build.cancel()
    with pytest.raises(asyncio.CancelledError):
        await build
    await until(lambda: host.remains() == [])
    assert await client.list_sandboxes() == []
    assert await names(client) == {IMAGE}


async def test_builds_on_builds(client: DSecClient, tmp_path: Path) -> None:
    """The base's ENV, USER and WORKDIR hold in the next build; a new ENTRYPOINT resets CMD."""
    first = "ENV A=1 PATH=/x:$PATH\nWORKDIR /w\nRUN chown agent /w\nUSER agent\nCMD c"
    await client.layers.build("base/one", context(tmp_path, first), **LIMITS)
    root = context(tmp_path, "ENV B=${A}2\nRUN echo $A$B$PATH > f\nCOPY g g\nENTRYPOINT e", g="g")
    text = (root / "Dockerfile").read_text().replace(IMAGE, "base/one")
    (root / "Dockerfile").write_text(text)
    await client.layers.build("base/two", root, **LIMITS)
    info = await client.layers.get("base/two")
    assert info.config is not None
    path = "/x:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    assert info.config == ImageConfig(
        env={"A": "1", "B": "12", "PATH": path}, user="agent", workdir="/w",
        entrypoint=["/bin/sh", "-c", "e"],
    )  # fmt: skip
    async with await client.run_container(DSecContainerRunArgs(container_image="base/two")) as box:
        assert await shell(box, "cat f; stat -c %U f g") == f"112{path}\nagent\nroot\n"


async def test_proxies_of_the_builder_are_not_saved(
    client: DSecClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("https_proxy", "http://secret@proxy")
    root = context(tmp_path, "RUN echo $https_proxy | cut -c1-7 > /seen\n")
    await client.layers.build("base/app:1", root, **LIMITS)
    info = await client.layers.get("base/app:1")
    assert "secret" not in repr(info)
    async with await client.run_container(
        DSecContainerRunArgs(container_image="base/app:1")
    ) as box:
        assert await shell(box, "cat /seen; echo $https_proxy") == "http://\n\n"


async def test_what_is_wrong_is_told_before_the_work(client: DSecClient, tmp_path: Path) -> None:
    root = context(tmp_path, "RUN touch /x\n")
    with pytest.raises(AlreadyExists, match="use replace"):
        await client.layers.build(IMAGE, root, **LIMITS)
    with pytest.raises(InvalidArgument, match="is not a layer name"):
        await client.layers.build("no name", root, **LIMITS)
    (root / "Dockerfile").write_text("FROM base/none:1\nRUN true")
    with pytest.raises(NotFound, match="no layer 'base/none:1'"):
        await client.layers.build("base/app:1", root, **LIMITS)
    assert await client.list_sandboxes() == []


async def test_import_below_a_directory(client: DSecClient, tmp_path: Path) -> None:
    (tmp_path / "tree/deep").mkdir(parents=True)
    (tmp_path / "tree/deep/f").write_text("f" * 100_000)
    (tmp_path / "tree").chmod(0o700)
    os.chown(tmp_path / "tree", 1000, 1000)
    seen: list[ImportProgress] = []
    await client.layers.import_(
        "toolkit/t:1", str(tmp_path / "tree"), at="/opt/a/b", on_progress=seen.append
    )
    assert all(item.stage in ("fetching", "reading", "waiting", "storing") for item in seen)
    args = DSecContainerRunArgs(container_image=IMAGE, toolkits=["toolkit/t:1"])
    async with await client.run_container(args) as box:
        assert await shell(box, "stat -c '%u %a' /opt /opt/a /opt/a/b /opt/a/b/deep") == (
            "0 755\n0 755\n1000 700\n0 755\n"
        )
        assert await shell(box, "wc -c < /opt/a/b/deep/f") == "100000\n"
    for at in ("relative", "/a/../b"):
        with pytest.raises(InvalidArgument):
            await client.layers.import_("toolkit/t:2", str(tmp_path / "tree"), at=at)


async def test_the_command_line(host: Daemon, tmp_path: Path) -> None:
    root = context(tmp_path, "ARG V=0\nCOPY f /opt/f\nRUN echo v$V >> /opt/f\n", f="file\n")
    env = {
        **os.environ, "DSEC_ENDPOINT": f"unix:{host.socket}", "PYTHONPATH": f"{ROOT}:{ROOT}/src",
    }  # fmt: skip

    async def dsec(*words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        done = await asyncio.to_thread(
            subprocess.run, [sys.executable, "-m", "dsec", *words],
            env=env, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert done.returncode == code, (words, done)
        return done

    small = ("-m", "256", "-c", "1", "--disk", "256", "--network", "none")
    made = await dsec("layer", "build", "toolkit/f:1", str(root), "--build-arg", "V=7", *small)
    assert made.stdout.startswith("toolkit/f:1 ")
    assert "[2/2] RUN echo v$V >> /opt/f\n" in made.stderr
    (tmp_path / "ws").mkdir()
    (tmp_path / "ws/main").write_text("main\n")
    await dsec("layer", "import", "--at", "/app", "workspace/w", str(tmp_path / "ws"))
    stack = ("--workspace", "workspace/w", "--toolkit", "toolkit/f:1", IMAGE)
    failed = await dsec("run", "--rm", *stack, "true", code=1)
    assert "was made on top of other layers" in failed.stderr  # the order decides
    name = (await dsec("run", "--toolkit", "toolkit/f:1", IMAGE)).stdout.strip()
    assert (await dsec("exec", name, "cat", "/opt/f")).stdout == "file\nv7\n"
    await dsec("exec", name, "sh", "-c", "echo x > /root/x; echo y > /root/y")
    packed = json.loads(
        (await dsec("--json", "pack", name, "snapshot/s", "--omit", "root/y")).stdout
    )
    assert packed["name"] == "snapshot/s:latest"
    assert "exists" in (await dsec("pack", name, "snapshot/s", code=1)).stderr
    await dsec("pack", name, "snapshot/s", "--replace", "--omit", "root/y")
    await dsec("stop", name)
    seen = await dsec(
        "run", "--rm", "--workspace", "workspace/w", "snapshot/s", "sh", "-c",
        "cat /app/main /opt/f; ls /root",
    )  # fmt: skip
    assert seen.stdout == "main\nfile\nv7\nx\n"
    await dsec("layer", "rm", "snapshot/s", "toolkit/f:1")
    for _ in range(2):
        collected = json.loads(
            (await dsec("--json", "layer", "gc", "--grace", "0", "--wait", "0")).stdout
        )
    assert set(collected) == {"marked", "deleted", "freed_bytes"}
    rows = json.loads((await dsec("--json", "layer", "ls")).stdout)
    # a layer that is mounted on this host stays, without a name
    left = {row["name"] for row in rows if row["name"] != row["digest"]}
    assert left == {IMAGE, "workspace/w:latest"}
    broken = await dsec("layer", "build", "x", str(tmp_path / "nowhere"), code=1)
    assert "there is no Dockerfile" in broken.stderr
