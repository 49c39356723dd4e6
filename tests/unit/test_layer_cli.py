"""``dsec layer``, ``dsec pack`` and ``dsec run --workspace`` through click's runner."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from dsec import output
from dsec.layer import absolute
from dsec.main import cli
from libdsec import model
from libdsec.errors import NotFound
from tests.unit.wire_server import ServerCall, WireServer, in_thread


class Daemon(WireServer):
    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.imports: list[model.LayerImport] = []
        self.packs: list[model.PackArgs] = []
        self.collapses: list[model.LayerCollapse] = []
        self.collections: list[model.CollectArgs] = []
        self.on |= {
            "layer.import": self.note_import, "layer.get": self.layer_get,
            "sandbox.pack_diff": self.pack_diff, "layer.collect": self.collect,
            "layer.collapse": self.collapse,
        }  # fmt: skip

    async def note_import(self, call: ServerCall) -> model.LayerInfo:
        args = call.args(model.LayerImport)
        self.imports.append(args)
        await call.send(model.ImportProgress(stage="reading", done=1, total=2))
        return await self.layer_import(call)

    async def collapse(self, call: ServerCall) -> model.LayerInfo:
        args = call.args(model.LayerCollapse)
        self.collapses.append(args)
        await call.send(model.ImportProgress(stage="reading", done=1, total=2))
        return model.LayerInfo(name=args.to, digest="ab", size_bytes=1024, created_at=1.0)

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
        "docker://reg.example/x:1", "oci:/srv/layout:tag", "oci-archive:/x.tar",
        "docker-archive:/x.tar:name:tag", "git:https://host/x.git#v1", "git:/srv/x",
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


def test_paths_of_a_remote_daemon_are_left_to_it() -> None:
    """Relative paths used to mean the daemon's working directory, whoever asked."""
    here = str(Path.cwd())
    assert absolute("oci:dir:tag") == f"oci:{here}/dir:tag"
    assert absolute("oci-archive:../x.tar") == f"oci-archive:{here}/../x.tar"
    assert absolute("docker-archive:x.tar:a/b:1") == f"docker-archive:{here}/x.tar:a/b:1"
    assert absolute("git:../x#main") == f"git:{here}/../x#main"
    assert absolute("git:ssh://x/y") == "git:ssh://x/y"
    assert absolute("git:host:y") == "git:host:y"  # what git itself calls a URL


def test_collapse_names_the_result(server: Daemon, dsec: Dsec) -> None:
    made = dsec("layer", "collapse", "snapshot/x", "--to", "base/y:1", "--replace")
    assert server.collapses == [
        model.LayerCollapse(name="snapshot/x", to="base/y:1", replace=True, progress=True)
    ]
    assert made.stdout == "base/y:1 ab 1.0 KiB\n"
    dsec("layer", "collapse", "snapshot/x", code=2)  # without a name it would be garbage


def test_run_with_workspace_and_toolkits(server: Daemon, dsec: Dsec) -> None:
    name = dsec(
        "run", "--workspace", "workspace/w", "--toolkit", "toolkit/a", "--toolkit", "toolkit/b", "b"
    ).stdout.strip()
    args = server.sandboxes[name].args
    assert args is not None
    assert (args.workspace, args.toolkits) == ("workspace/w", ["toolkit/a", "toolkit/b"])


def test_run_shows_the_pull_of_an_image_and_waits_for_it(
    server: Daemon, dsec: Dsec, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[str] = []

    @contextlib.contextmanager
    def stages(label: str, *, silent: bool) -> Iterator[Callable[[str, int, int], None]]:
        yield lambda stage, done, total: shown.append(f"{label}: {stage} {done}/{total}")

    async def create(call: ServerCall) -> model.SandboxInfo:
        args = call.args(model.CreateArgs)
        assert (args.progress, args.timeout_s) == (True, None)
        for done in range(20):  # more than are sent without credit
            await call.send(model.ImportProgress(stage="fetching", done=done))
        return server.make(args.key, args.args)

    server.on["sandbox.create"] = create
    monkeypatch.setattr(output, "stages", stages)
    assert dsec("run", "reg.example/x:1").stdout.strip() in server.sandboxes
    assert shown == [f"pulling reg.example/x:1: fetching {done}/0" for done in range(20)]


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
