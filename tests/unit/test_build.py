"""Builds against a peer whose sandboxes are directories; what needs a kernel is a system test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from libdsec import BuildStep, DSecClient, model
from libdsec.errors import AlreadyExists, CommandFailed, InvalidArgument, NotFound
from tests.unit.wire_server import ServerCall, WireServer


class Daemon(WireServer):
    """Knows one base, and notes what is saved."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.packed: list[model.PackArgs] = []
        self.config = model.ImageConfig(env={"BASE": "1", "PATH": "/usr/bin:/bin"})
        self.on |= {"layer.get": self.layer_get, "sandbox.pack_diff": self.pack_diff}

    async def layer_get(self, call: ServerCall) -> model.LayerInfo:
        name = call.args(model.LayerRef).name
        if name not in ("base/x:1", "taken"):
            raise NotFound(f"no layer {name}")
        return model.LayerInfo(
            name="taken:latest" if name == "taken" else name, digest="ab", size_bytes=1,
            created_at=1.0, config=self.config,
        )  # fmt: skip

    async def pack_diff(self, call: ServerCall) -> model.Packed:
        args = call.args(model.PackArgs)
        self.packed.append(args)
        return model.Packed(
            name=args.name, digest="cd", size_bytes=2, entries=3, frozen_ms=1.0, notes=["swept"]
        )


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Daemon]:
    (tmp_path / "peer").mkdir()
    made = Daemon(tmp_path / "peer")
    await made.start()
    yield made
    await made.close()


@pytest.fixture
async def client(server: Daemon) -> AsyncIterator[DSecClient]:
    async with DSecClient(f"unix:{server.socket}") as made:
        yield made


@pytest.fixture
def context(tmp_path: Path) -> Path:
    root = tmp_path / "context"
    (root / "src/sub").mkdir(parents=True)
    (root / "src/sub/f").write_text("f")
    (root / "top").write_text("top")
    return root


def dockerfile(context: Path, text: str) -> None:
    (context / "Dockerfile").write_text(f"FROM base/x:1\n{text}")


def all_stopped(server: Daemon) -> bool:
    return {info.state for info in server.sandboxes.values()} <= {"stopped"}


async def test_a_build(
    server: Daemon, client: DSecClient, context: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy")
    dockerfile(
        context,
        "ARG WHO=nobody\nENV A=$BASE PATH=/opt:$PATH\nCOPY src /app\nCOPY top /app/sub/\n"
        "COPY top /app/renamed\nUSER app\nRUN echo $A $WHO $HTTPS_PROXY $http_proxy $PATH\n"
        "EXPOSE 80\nCMD serve",
    )
    steps: list[BuildStep] = []
    output: list[str] = []
    made = await client.layers.build(
        "toolkit/t:1", context, arguments={"WHO": "me", "http_proxy": "http://other"},
        on_step=steps.append, on_output=output.append, memory_limit_mb=77,
    )  # fmt: skip
    assert (made.name, made.digest) == ("toolkit/t:1", "cd")
    assert made.notes == ["line 9: EXPOSE has no meaning for a sandbox", "swept"]
    (args,) = server.packed
    assert args.config == model.ImageConfig(
        env={"A": "1", "PATH": "/opt:/usr/bin:/bin"}, user="app", cmd=["/bin/sh", "-c", "serve"]
    )
    assert (args.clean, args.replace) == (True, False)
    (info,) = server.sandboxes.values()
    root = server.root / info.id
    files = {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}
    assert files == {"app/sub/f", "app/sub/top", "app/renamed"}
    assert "".join(output) == "1 me http://proxy http://other /opt:/usr/bin:/bin\n"
    assert [(step.number, step.total, step.line) for step in steps] == [
        (1, 4, 4), (2, 4, 5), (3, 4, 6), (4, 4, 8),
    ]  # fmt: skip
    assert steps[0].text == "COPY src /app"
    assert info.args is not None
    assert (info.args.network, info.args.memory_limit_mb) == ("nat", 77)
    assert info.args.labels == {"dsec.build": "toolkit/t:1"}
    assert info.args.ttl_running_stop
    assert info.args.env == {}
    assert all_stopped(server)
    assert not server.world.commands


async def test_a_command_that_fails_ends_the_build(
    server: Daemon, client: DSecClient, context: Path
) -> None:
    dockerfile(context, "RUN true\nRUN echo said; echo why >&2; exit 3\nRUN touch never")
    with pytest.raises(CommandFailed) as caught:
        await client.layers.build("x", context)
    message = caught.value.message
    assert message.startswith("Dockerfile line 3: RUN echo said; echo why >&2; exit 3: command")
    assert "exited with code 3" in message
    assert {"said", "why"} <= set(message.splitlines())
    assert caught.value.detail["line"] == 3
    assert caught.value.result.exit_code == 3
    assert all_stopped(server)
    assert server.packed == []


async def test_only_the_end_of_the_output_is_in_the_error(
    client: DSecClient, context: Path
) -> None:
    dockerfile(context, "RUN i=0; while [ $i -lt 2000 ]; do i=$((i+1)); echo line $i; done; false")
    with pytest.raises(CommandFailed) as caught:
        await client.layers.build("x", context)
    assert caught.value.message.endswith("line 1999\nline 2000")
    assert len(caught.value.message) < 2500


async def test_a_cancelled_build_leaves_nothing(
    server: Daemon, client: DSecClient, context: Path
) -> None:
    dockerfile(context, "RUN echo begun; sleep 100")
    begun = asyncio.Event()

    def hear(text: str) -> None:
        begun.set()

    build = asyncio.create_task(client.layers.build("x", context, on_output=hear))
    await asyncio.wait_for(begun.wait(), 10)
    build.cancel()
    with pytest.raises(asyncio.CancelledError):
        await build
    assert all_stopped(server)
    assert server.packed == []
    (command,) = server.world.commands.values()
    await asyncio.wait_for(command.done.wait(), 10)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("COPY none /x", "Dockerfile line 2: COPY none /x: none is not in the build context"),
        ("COPY s* top /x", "line 2: COPY of several sources"),
        ("RUN --mount=x true", "line 2: RUN --mount is not supported"),
        ("COPY --chown=ghost top /x", "line 2: COPY top /x: 'ghost' is not in /etc/passwd"),
        ("ENV A=${B", "line 2: no closing brace"),
    ],
)
async def test_faults_name_their_line(
    server: Daemon, client: DSecClient, context: Path, text: str, message: str
) -> None:
    dockerfile(context, text)
    with pytest.raises(InvalidArgument, match=message.replace("$", r"\$")):
        await client.layers.build("x", context)
    assert all_stopped(server)
    assert server.packed == []


async def test_what_can_be_known_before_is_told_before(
    server: Daemon, client: DSecClient, context: Path
) -> None:
    with pytest.raises(InvalidArgument, match="there is no Dockerfile"):
        await client.layers.build("x", context)
    dockerfile(context, "RUN true")
    with pytest.raises(AlreadyExists, match="taken:latest exists; use replace"):
        await client.layers.build("taken", context)
    with pytest.raises(InvalidArgument, match="NOBODY is not declared"):
        await client.layers.build("x", context, arguments={"NOBODY": "1"})
    with pytest.raises(InvalidArgument, match="top is not a directory"):
        await client.layers.build("x", context / "top", dockerfile=str(context / "Dockerfile"))
    assert server.sandboxes == {}
    made = await client.layers.build("taken", context, replace=True)
    assert made.name == "taken"
    assert server.packed[0].replace


async def test_the_ignore_file_of_the_dockerfile_comes_first(
    server: Daemon, client: DSecClient, context: Path
) -> None:
    (context / "x.docker").write_text("FROM base/x:1\nCOPY . /app/")
    (context / ".dockerignore").write_text("src")
    (context / "x.docker.dockerignore").write_text("top\nx.*\n.dockerignore")
    await client.layers.build("x", context, dockerfile="x.docker")
    (info,) = server.sandboxes.values()
    app = server.root / info.id / "app"
    assert [str(p.relative_to(app)) for p in app.rglob("*") if p.is_file()] == ["src/sub/f"]


async def test_progress_of_an_import(server: Daemon, client: DSecClient) -> None:
    async def importing(call: ServerCall) -> model.LayerInfo:
        args: Any = call.args(model.LayerImport)
        assert args.progress
        assert args.at == "/opt"
        for done in range(40):
            await call.send(model.ImportProgress(stage="reading", done=done, total=40))
        return model.LayerInfo(name=args.name, digest="ab", size_bytes=9, created_at=1.0)

    server.on["layer.import"] = importing
    seen: list[int] = []
    made = await client.layers.import_(
        "base/y:1", "/srv/y", at="/opt", on_progress=lambda item: seen.append(item.done)
    )
    assert (made.digest, seen) == ("ab", list(range(40)))
