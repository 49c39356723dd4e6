"""Workspaces from git repositories: what is cloned and refused, and what `git status` costs."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from libdsec import DSecClient, DSecContainerRunArgs, ImportProgress, Sandbox
from libdsec.errors import DSecError, InvalidArgument, NotFound, Unavailable
from tests.system.daemon import IMAGE, Daemon, until
from tests.system.user_view import shell

pytestmark = pytest.mark.root
FILES, SIZE = 300, 8192  # small files are read, not mapped, so that /proc/PID/io counts them
WORKSPACE = "/workspace"


def git(repository: Path, *words: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    env = {**os.environ, "GIT_CONFIG_GLOBAL": "/dev/null"}
    command = ["git", "-C", str(repository), *identity, *words]
    return subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def repository() -> Iterator[Path]:
    """Two commits on main, a branch, a tag; at a place that other users can reach."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as directory:
        root = Path(directory)
        root.chmod(0o755)
        git(root, "init", "-q", "-b", "main")
        for number in range(FILES):
            place = root / f"d{number % 10}"
            place.mkdir(exist_ok=True)
            (place / f"f{number}").write_bytes(os.urandom(SIZE))
        (root / "tool").write_text("#!/bin/sh\n")
        (root / "tool").chmod(0o755)
        (root / "link").symlink_to("tool")
        git(root, "add", ".")
        git(root, "commit", "-q", "-m", "one")
        git(root, "tag", "-a", "v1", "-m", "v1")
        git(root, "branch", "topic/x")
        (root / "second").write_text("2\n")
        git(root, "add", ".")
        git(root, "commit", "-q", "-m", "two")
        yield root


def git_toolkit(root: Path) -> str:
    """The host's own git and the libraries it is linked to, as a tree."""
    program = shutil.which("git")
    assert program is not None
    (root / "usr/bin").mkdir(parents=True)
    shutil.copy(program, root / "usr/bin/git")
    listed = subprocess.run(["ldd", program], check=True, capture_output=True, text=True).stdout
    for word in listed.split():
        if word.startswith("/"):
            target = root / word.lstrip("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(word, target)
    return str(root)


def arguments(*toolkits: str, workspace: str = "workspace/w:1") -> DSecContainerRunArgs:
    return DSecContainerRunArgs(container_image=IMAGE, workspace=workspace, toolkits=list(toolkits))


async def bytes_read(sandbox: Sandbox, command: str) -> int:
    """Return what `command` and its children read, in bytes."""
    ended = f"{command}; while read name value; do echo $name $value; done < /proc/$$/io"
    lines = (await shell(sandbox, f"cd {WORKSPACE}; {ended}")).splitlines()
    assert lines[0].startswith("rchar:"), lines  # the command had nothing to say
    return int(lines[0].split()[1])


async def test_git_status_is_clean_and_reads_no_file(
    client: DSecClient, repository: Path, tmp_path: Path
) -> None:
    await client.layers.import_("toolkit/git:1", git_toolkit(tmp_path / "git"))
    await client.layers.import_("workspace/w:1", f"git:{repository}")
    async with await client.run_container(arguments("toolkit/git:1")) as box:
        assert await shell(box, f"cd {WORKSPACE} && git log --format=%s") == "two\none\n"
        quiet = "git status --porcelain"
        assert await bytes_read(box, quiet) < FILES * SIZE // 4
        assert await bytes_read(box, quiet) < FILES * SIZE // 4  # and the index stays so
        # the measure sees a status that does read: every time of modification is another now
        await shell(box, f"find {WORKSPACE}/d* -type f -exec touch -d '2020-01-01 00:00' {{}} +")
        assert await bytes_read(box, quiet) > FILES * SIZE
        assert await bytes_read(box, quiet) < FILES * SIZE // 4
        await shell(box, f"echo changed > {WORKSPACE}/d0/f0; touch {WORKSPACE}/new")
        assert await shell(box, f"cd {WORKSPACE}; git status --porcelain") == " M d0/f0\n?? new\n"


async def test_what_a_workspace_holds(client: DSecClient, repository: Path) -> None:
    for hook in ("post-checkout", "post-merge"):
        (repository / f".git/hooks/{hook}").write_text("#!/bin/sh\ntouch /var/tmp/hooked\n")
        (repository / f".git/hooks/{hook}").chmod(0o755)
    seen: list[ImportProgress] = []
    info = await client.layers.import_(
        "workspace/w:1", f"git:{repository}", on_progress=seen.append
    )
    assert info.size_bytes > FILES * SIZE
    async with await client.run_container(arguments()) as box:
        listing = await shell(box, f"cd {WORKSPACE}; ls -A; ls .git")
        assert {"d0", "link", "second", "tool", ".git", "index"} <= set(listing.split())
        assert not {"hooks", "FETCH_HEAD", "logs"} & set(listing.split())
        stat = f"cd {WORKSPACE}; stat -c '%u:%g %a' . tool second .git; readlink link"
        assert await shell(box, stat) == ("0:0 755\n0:0 755\n0:0 644\n0:0 755\ntool\n")
        config = await shell(box, f"cat {WORKSPACE}/.git/config")
        assert {"checkstat = minimal", "trustctime = false"} <= {
            line.strip() for line in config.splitlines()
        }
        # objects are compressed: a short name is in them by chance
        kept = f"find {WORKSPACE}/.git -path '*/objects' -prune -o -type f -print"
        names = f"-e {repository} -e @{os.uname().nodename}"
        assert await shell(box, f"{kept} | xargs grep -F -l {names} || true") == ""
        assert "config" in await shell(box, f"{kept} | xargs grep -F -l -e checkstat")
    assert not Path("/var/tmp/hooked").exists()


async def test_refs(client: DSecClient, repository: Path) -> None:
    head = git(repository, "rev-parse", "main~1").strip()
    git(repository, "update-ref", "refs/pull/7/head", head)
    for number, ref in enumerate(("v1", "topic/x", head[:12], "refs/pull/7/head")):
        workspace = f"workspace/w{number}:1"
        await client.layers.import_(workspace, f"git:{repository}#{ref}")
        async with await client.run_container(arguments(workspace=workspace)) as box:
            found = await shell(box, f"cd {WORKSPACE}; ls; cat .git/HEAD .git/refs/heads/* || true")
        assert "second" not in found.split(), ref
        assert ("ref: refs/heads/topic/x" if ref == "topic/x" else head) in found


async def test_where_it_is_put(client: DSecClient, repository: Path) -> None:
    await client.layers.import_("workspace/w:1", f"git:{repository}", at="/src/app")
    await client.layers.import_("toolkit/t:1", f"git:{repository}")
    async with await client.run_container(arguments("toolkit/t:1")) as box:
        assert await shell(box, "cat /src/app/second /second") == "2\n2\n"


async def test_a_repository_of_another_user(client: DSecClient, repository: Path) -> None:
    """It is served with that user's rights: its configuration must not become root's commands."""
    git(repository, "config", "core.fsmonitor", "touch /var/tmp/owned; false")
    git(repository, "config", "uploadpack.packObjectsHook", "touch /var/tmp/owned; false")
    for path in (repository, *repository.rglob("*")):
        os.chown(path, 1234, 1234, follow_symlinks=False)
    await client.layers.import_("workspace/w:1", f"git:{repository}")
    async with await client.run_container(arguments()) as box:
        assert await shell(box, f"stat -c %u {WORKSPACE}/second") == "0\n"
    assert not Path("/var/tmp/owned").exists()
    (repository / ".git/objects").chmod(0)
    os.chown(repository / ".git/objects", 0, 0)
    with pytest.raises(Unavailable, match="cannot be cloned"):  # root could read it, its owner not
        await client.layers.import_("workspace/w:2", f"git:{repository}")


REFUSED: tuple[tuple[str, type[DSecError], str], ...] = (
    ("{}#none", NotFound, "has no branch, tag or commit none"),
    ("{}#-x", InvalidArgument, "is not a branch, tag or commit"),
    ("/nowhere", InvalidArgument, "/nowhere does not exist on the daemon's host"),
    ("/etc", InvalidArgument, "/etc is not a git repository"),
    ("http://127.0.0.1:9/x.git", Unavailable, "cannot be cloned: fatal: unable to access"),
    ("relative/path", InvalidArgument, "neither an absolute path nor a URL"),
    ("ext::sh -c 'touch /var/tmp/ran'", InvalidArgument, "neither an absolute path"),
    ("https://ext::x/y", InvalidArgument, "neither an absolute path"),
    ("ssh://git@host/x.git", InvalidArgument, "clone other repositories yourself"),
    ("git@host:x.git", InvalidArgument, "clone other repositories yourself"),
    ("--upload-pack=x", InvalidArgument, "neither an absolute path"),
    ("https://me:secret@host/x.git", InvalidArgument, "would leave it in the layer"),
)


async def test_what_is_refused(client: DSecClient, repository: Path) -> None:
    for source, kind, message in REFUSED:
        with pytest.raises(kind, match=message):
            await client.layers.import_("workspace/w:1", "git:" + source.format(repository))
        assert [info.name for info in await client.layers.list()] == [IMAGE], source


async def test_a_repository_without_commits(client: DSecClient, tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    with pytest.raises(InvalidArgument, match="has no commits"):
        await client.layers.import_("workspace/w:1", f"git:{tmp_path}")


async def test_a_cancelled_clone_leaves_nothing(
    client: DSecClient, host: Daemon, tmp_path: Path
) -> None:
    """The other side accepts and says nothing: git waits until it is killed."""
    connected = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connected.set()
        await reader.read()
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        source = f"git:git://127.0.0.1:{port}/x.git"
        task = asyncio.create_task(client.layers.import_("workspace/w:1", source))
        await asyncio.wait_for(connected.wait(), 20)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await until(lambda: not any((host.state / "builds").iterdir()))
    assert [info.name for info in await client.layers.list()] == [IMAGE]
