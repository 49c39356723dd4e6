"""``dsec layer``, ``dsec pack`` and ``dsec run --workspace`` through click's runner."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from dsec.main import cli
from libdsec import model
from libdsec.errors import NotFound
from tests.unit.wire_server import ServerCall, WireServer, in_thread


class Daemon(WireServer):
    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.imports: list[model.LayerImport] = []
        self.packs: list[model.PackArgs] = []
        self.collections: list[model.CollectArgs] = []
        self.on |= {
            "layer.import": self.note_import, "layer.get": self.layer_get,
            "sandbox.pack_diff": self.pack_diff, "layer.collect": self.collect,
        }  # fmt: skip

    async def note_import(self, call: ServerCall) -> model.LayerInfo:
        args = call.args(model.LayerImport)
        self.imports.append(args)
        await call.send(model.ImportProgress(stage="reading", done=1, total=2))
        return await self.layer_import(call)

    async def layer_get(self, call: ServerCall) -> model.LayerInfo:
        name = call.args(model.LayerRef).name
        if name != "base/x:1":
            raise NotFound(f"no layer {name}")
        return model.LayerInfo(name=name, digest="ab", size_bytes=1, created_at=1.0)

    async def pack_diff(self, call: ServerCall) -> model.Packed:
        args = call.args(model.PackArgs)
        self.packs.append(args)
        return model.Packed(
            name=args.name, digest="cd", size_bytes=2048, entries=3, frozen_ms=1.0, notes=["swept"]
        )

    async def collect(self, call: ServerCall) -> model.Collected:
        self.collections.append(call.args(model.CollectArgs))
        return model.Collected(marked=1, deleted=2, freed_bytes=3 << 20)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Daemon]:
    (tmp_path / "peer").mkdir()
    server = Daemon(tmp_path / "peer")
    with in_thread(server):
        yield server


Dsec = Callable[..., Result]


@pytest.fixture
def dsec(server: Daemon, monkeypatch: pytest.MonkeyPatch) -> Dsec:
    monkeypatch.setenv("DSEC_ENDPOINT", server.socket)

    def invoke(*args: str, code: int = 0) -> Result:
        result = CliRunner().invoke(cli, list(args))
        assert result.exit_code == code, (result.output, result.exception)
        return result

    return invoke


@pytest.mark.parametrize(
    "source",
    [
        "docker://reg.example/x:1", "oci:/srv/layout:tag", "oci-archive:x.tar",
        "docker-archive:x.tar", "git:https://host/x.git#v1", "git:/srv/x",
    ],
)  # fmt: skip
def test_sources_with_a_scheme_pass_untouched(server: Daemon, dsec: Dsec, source: str) -> None:
    dsec("layer", "import", "base/y:1", source)
    assert server.imports[0].source == source


def test_paths_are_made_absolute(server: Daemon, dsec: Dsec) -> None:
    dsec("layer", "import", "--at", "/opt", "base/y:1", "x/y.tar")
    dsec("layer", "import", "--replace", "base/y:1", "./oci:x")
    assert [args.source for args in server.imports] == [
        str(Path.cwd() / "x/y.tar"), str(Path.cwd() / "oci:x"),
    ]  # fmt: skip
    assert [(args.at, args.replace) for args in server.imports] == [("/opt", False), ("", True)]


def test_run_with_workspace_and_toolkits(server: Daemon, dsec: Dsec) -> None:
    name = dsec(
        "run", "--workspace", "workspace/w", "--toolkit", "toolkit/a", "--toolkit", "toolkit/b", "b"
    ).stdout.strip()
    args = server.sandboxes[name].args
    assert args is not None
    assert (args.workspace, args.toolkits) == ("workspace/w", ["toolkit/a", "toolkit/b"])


def test_pack(server: Daemon, dsec: Dsec) -> None:
    name = dsec("run", "b").stdout.strip()
    made = dsec(
        "pack", name, "snapshot/s", "--replace", "--no-clean", "--omit", "a/*", "--omit", "b",
        "-e", "A=b", "-w", "/w",
    )  # fmt: skip
    assert made.stdout == "snapshot/s cd 2.0 KiB\n"
    assert made.stderr == "note: swept\n"
    (args,) = server.packs
    assert (args.replace, args.clean, args.omit) == (True, False, ["a/*", "b"])
    assert args.config == model.ImageConfig(env={"A": "b"}, workdir="/w")
    printed = json.loads(dsec("pack", "--json", name, "snapshot/s").stdout)
    assert (printed["digest"], printed["notes"]) == ("cd", ["swept"])


def test_gc(server: Daemon, dsec: Dsec) -> None:
    assert dsec("layer", "gc").stdout == "1 marked, 2 deleted, 3.0 MiB\n"
    assert json.loads(dsec("layer", "gc", "--json", "--grace", "5").stdout)["deleted"] == 2
    assert server.collections == [model.CollectArgs(), model.CollectArgs(grace_s=5)]


@pytest.fixture
def context(tmp_path: Path) -> Path:
    root = tmp_path / "context"
    root.mkdir()
    (root / "Dockerfile").write_text("FROM base/x:1\nARG W\nRUN printf $W\nRUN echo done\n")
    return root


def test_build_prints_steps_and_output(
    server: Daemon, dsec: Dsec, context: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = dsec("layer", "build", "toolkit/t", str(context), "--build-arg", "W=hi")
    assert made.stdout == "toolkit/t cd 2.0 KiB\n"
    lines = made.stderr.splitlines()
    assert lines[:2] == ["[1/2] RUN printf $W", "hi"]
    assert lines[3:5] == ["[2/2] RUN echo done", "done"]
    assert {line.strip().split()[1] for line in (lines[2], lines[5])} == {"s"}
    monkeypatch.setenv("W", "there")
    monkeypatch.chdir(context)
    made = dsec("layer", "build", "--json", "toolkit/t", "--build-arg", "W")
    assert (json.loads(made.stdout)["name"], made.stderr) == ("toolkit/t", "")
    assert "neither" in dsec("layer", "build", "t", "--build-arg", "NONE", code=2).stderr


def test_build_takes_a_file_relative_to_where_we_are(
    server: Daemon, dsec: Dsec, context: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(context.parent)
    Path("other").write_text("FROM base/x:1\nRUN echo other\n")
    assert "other\n" in dsec("layer", "build", "t", "context", "-f", "other").stderr
    assert "no Dockerfile" in dsec("layer", "build", "t", "context", "-f", "none", code=1).stderr


def test_a_failed_command_is_shown_once(dsec: Dsec, context: Path) -> None:
    (context / "Dockerfile").write_text("FROM base/x:1\nRUN echo why; exit 3\n")
    failed = dsec("layer", "build", "t", str(context), code=1)
    assert failed.stderr.count("\nwhy\n") == 1
    assert failed.stderr.splitlines()[-1] == (
        "dsec: Dockerfile line 2: RUN echo why; exit 3: command exited with code 3"
    )
    body = json.loads(dsec("layer", "build", "--json", "t", str(context), code=1).stderr)
    assert body["error"]["code"] == "command_failed"
    assert body["error"]["message"].endswith("why")


def test_layers_are_completed(server: Daemon, dsec: Dsec) -> None:
    dsec("layer", "import", "toolkit/y:1", "/srv/y")
    environment = {
        "_DSEC_COMPLETE": "bash_complete", "COMP_CWORD": "3",
        "COMP_WORDS": "dsec run --toolkit toolkit/",
    }  # fmt: skip
    result = CliRunner().invoke(cli, [], prog_name="dsec", env={**os.environ, **environment})
    assert "toolkit/y:1" in result.stdout
