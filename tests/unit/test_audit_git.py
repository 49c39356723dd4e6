"""What an audit reads from git's files: written by git, and by nobody in his senses."""

from __future__ import annotations

import contextlib
import os
import subprocess
import zlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libdsec.audit import githistory, gitobjects
from libdsec.audit.githistory import Repository
from libdsec.audit.gitobjects import Malformed, Objects
from libdsec.audit.report import Finding

_DAYS = iter(range(1, 10_000))


def git(top: Path, *words: str) -> str:
    """Run git with nothing of this user's settings; every commit is a day later."""
    date = f"{1_600_000_000 + next(_DAYS) * 86_400} +0000"
    env = {
        "PATH": os.environ["PATH"], "HOME": str(top), "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_AUTHOR_NAME": "A", "GIT_AUTHOR_EMAIL": "a@x.test", "GIT_AUTHOR_DATE": date,
        "GIT_COMMITTER_NAME": "A", "GIT_COMMITTER_EMAIL": "a@x.test", "GIT_COMMITTER_DATE": date,
    }  # fmt: skip
    done = subprocess.run(["git", "-C", str(top), *words], env=env, capture_output=True, check=True)
    return done.stdout.decode().strip()


def commit(top: Path, subject: str) -> str:
    (top / "file").write_text(f"{subject}\n" * 50)
    git(top, "add", "file")
    git(top, "commit", "-qm", subject)
    return git(top, "rev-parse", "HEAD")


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """A repository of two commits, at the first of which the task begins."""
    git(tmp_path, "init", "-qb", "main")
    commit(tmp_path, "begin")
    commit(tmp_path, "the task")
    return tmp_path


def load(top: Path) -> Repository:
    """Read a repository from this host's disk as the audit does from a sandbox's."""
    base, objects = top / ".git", Objects()
    names = [base / "HEAD", base / "packed-refs", base / "FETCH_HEAD"]
    names += [*base.glob("refs/**/*"), *base.glob("logs/**/*")]
    refs = {str(p.relative_to(base)): p.read_bytes() for p in names if p.is_file()}
    for path in base.glob("objects/[0-9a-f][0-9a-f]/*"):
        data = path.read_bytes()[:4096]
        gitobjects.add_loose(objects, path.parent.name + path.name, data)
    for path in base.glob("objects/pack/*.pack"):
        index = path.with_suffix(".idx").read_bytes()
        gitobjects.add_pack(objects, index, memoryview(path.read_bytes()))
    return Repository("/w/.git", refs, objects)


def judge(top: Path, fix: str = "") -> list[Finding]:
    return list(githistory.find(load(top), fix))


def forget(top: Path) -> None:
    git(top, "reflog", "expire", "--expire=now", "--all")


def test_a_clone_without_a_future_is_clean(work: Path) -> None:
    assert judge(work) == []
    git(work, "gc", "-q")
    assert judge(work) == []
    git(work, "checkout", "-q", "--detach")
    assert judge(work) == []


@pytest.mark.parametrize("packed", [False, True], ids=["loose", "packed"])
@pytest.mark.parametrize(
    ("where", "said"),
    [
        (("branch", "fix"), "by branches"),
        (("update-ref", "refs/remotes/origin/main"), "by branches of remotes"),
        (("tag", "-am", "x", "v2"), "by tags"),
        (("update-ref", "refs/stash"), "by the stash"),
        (("update-ref", "refs/pull/7/head"), "by other references"),
        ((), "by the reflog"),
    ],
)
def test_commits_on_top_of_head_are_critical(
    work: Path, where: tuple[str, ...], said: str, packed: bool
) -> None:
    fix = commit(work, "Fix the fault")
    if where:
        git(work, *where, *([] if where[0] == "tag" else [fix] if where[0] != "branch" else []))
    git(work, "reset", "-q", "--hard", "HEAD~")
    if where:
        forget(work)
    if packed:
        kept = ("-c", "gc.reflogExpire=never", "-c", "gc.reflogExpireUnreachable=never")
        git(work, *kept, "gc", "-q")
    (found,) = judge(work)
    assert found.risk == "critical"
    assert said in found.reason
    assert f"{fix[:12]} Fix the fault" in found.evidence


def test_an_unreachable_commit_is_found(work: Path) -> None:
    fix = commit(work, "Fix the fault")
    git(work, "reset", "-q", "--hard", "HEAD~")
    forget(work)
    (found,) = judge(work)
    assert "no reference" in found.reason
    assert judge(work, fix[:10])[0].reason.startswith("the commit of the fix")
    git(work, "gc", "-q", "--prune=now")
    assert judge(work, fix) == []


def test_a_later_branch_is_high_and_an_older_one_low(work: Path) -> None:
    git(work, "checkout", "-q", "--orphan", "old")
    commit(work, "elsewhere")
    git(work, "checkout", "-q", "main")
    forget(work)
    assert [found.risk for found in judge(work)] == ["high"]
    commit(work, "much later")
    assert [found.risk for found in judge(work)] == ["low"]


def test_a_head_that_is_not_there_is_said(work: Path) -> None:
    (work / ".git/HEAD").write_text("ref: refs/heads/none\n")
    assert [found.risk for found in judge(work)] == ["high"]
    (work / ".git/HEAD").write_text("ref: HEAD\n")  # a loop
    assert [found.risk for found in judge(work)] == ["high"]


def test_deltified_commits_of_a_large_pack_are_read(work: Path) -> None:
    message = "\n".join(f"a long message, line {line}" for line in range(200))
    for number in range(30):
        commit(work, f"{number}\n\n{message}")
    names = git(work, "rev-list", "--all").split()
    git(work, "repack", "-adfq", "--depth=50", "--window=50")
    kinds = git(work, "verify-pack", "-v", *map(str, work.glob(".git/objects/pack/*.idx")))
    assert any(len(line.split()) == 7 and " commit" in line for line in kinds.splitlines())
    assert set(load(work).objects.commits) == set(names)


def test_a_repository_of_sha256_is_read(tmp_path: Path) -> None:
    git(tmp_path, "init", "-qb", "main", "--object-format=sha256")
    first = commit(tmp_path, "begin")
    fix = commit(tmp_path, "fix")
    git(tmp_path, "reset", "-q", "--hard", first)
    for _ in range(2):
        (found,) = judge(tmp_path)
        assert (found.risk, fix[:12] in found.evidence) == ("critical", True)
        git(tmp_path, "gc", "-q")


# --- what git would never write


@given(st.binary(max_size=2000))
def test_bytes_that_are_no_object_do_no_harm(data: bytes) -> None:
    for content in (data, zlib.compress(data), zlib.compress(b"commit 9\0" + data)):
        objects = Objects()
        try:
            gitobjects.add_loose(objects, "a" * 40, content)
        except Malformed:
            assert not objects.commits


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_deltas_of_any_bytes_end(delta: bytes, base: bytes) -> None:
    with contextlib.suppress(Malformed):
        assert len(gitobjects.applied(delta, base)) <= gitobjects.MAX_COMMIT


def test_a_bomb_is_not_inflated() -> None:
    bomb = zlib.compress(b"commit 99\0" + bytes(64 << 20))
    objects = Objects()
    gitobjects.add_loose(objects, "a" * 40, bomb)
    assert list(objects.commits) == ["a" * 40]


def test_commits_of_a_pack_are_bounded_together(
    pack: tuple[bytes, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gitobjects, "MAX_INFLATED", 100)
    with pytest.raises(Malformed, match="more than 100 bytes"):
        gitobjects.add_pack(Objects(), pack[0], memoryview(pack[1]))


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, bytes]:
    top = tmp_path_factory.mktemp("pack")
    git(top, "init", "-qb", "main")
    for number in range(5):
        commit(top, f"{number}\n\n" + "the same long message\n" * 50)
    git(top, "repack", "-adfq")
    (path,) = top.glob(".git/objects/pack/*.pack")
    return path.with_suffix(".idx").read_bytes(), path.read_bytes()


@given(st.data())
def test_a_pack_with_changed_bytes_does_no_harm(
    pack: tuple[bytes, bytes], data: st.DataObject
) -> None:
    changed = [bytearray(part) for part in pack]
    for part in changed:
        places = st.integers(0, len(part) - 1)
        for place in data.draw(st.lists(places, max_size=5)):
            part[place] = data.draw(st.integers(0, 255))
        del part[data.draw(st.one_of(st.just(len(part)), places)) :]
    with contextlib.suppress(Malformed):
        gitobjects.add_pack(Objects(), bytes(changed[0]), memoryview(bytes(changed[1])))


def test_a_ring_of_deltas_ends(pack: tuple[bytes, bytes]) -> None:
    index, data = pack
    reader = gitobjects._Pack(index, memoryview(data))
    name, offset = next(iter(reader.offsets.items()))
    changed = bytearray(data)
    changed[offset] = 7 << 4 | 1  # a delta whose base is itself
    changed[offset + 1 : offset + 21] = name
    with pytest.raises(Malformed, match="without an end"):
        gitobjects.add_pack(Objects(), index, memoryview(bytes(changed)))


def test_references_in_a_ring_end() -> None:
    objects = Objects(tags={"a" * 40: "b" * 40, "b" * 40: "a" * 40})
    refs = {"HEAD": b"ref: refs/heads/a", "refs/heads/a": b"ref: HEAD", "refs/tags/t": b"a" * 40}
    assert list(githistory.find(Repository("/w", refs, objects))) == []
