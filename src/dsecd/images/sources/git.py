"""A git repository becomes a directory on the host, in which `git status` reads no file.

git runs as root here and must not do what a repository says: it gets no configuration, hooks,
templates, submodules, credentials or prompts, and only plain transports. A repository on this host
is served by a git-upload-pack with the rights of its owner, for its configuration is code.

Linux offers a sandbox other inode numbers, change times and owners than the host has. Git would
take every file for changed and read it, so the repository is told to compare size and time of
modification only, and its index is made younger than the files: git reads again what it cannot
tell from a change within the index's own second (Documentation/technical/racy-git.txt).
"""

from __future__ import annotations

import os
import re
import time
import urllib.parse
from pathlib import Path

import msgspec

from dsecd.images import tool
from libdsec.errors import InvalidArgument, NotFound, Unavailable

_PROTOCOLS = ("file", "git", "http", "https")
_PASSED = re.compile(r"PATH|SSL_CERT_(FILE|DIR)|(https?|all|no)_proxy", re.IGNORECASE)
_NOGROUP = 65534
_OPTIONS = (
    "core.hooksPath=/dev/null",
    "core.logAllRefUpdates=false",  # a log would tell sandboxes the host's name
    "advice.detachedHead=false",
    "gc.auto=0",
    "maintenance.auto=false",
    "http.lowSpeedLimit=1000",
    "http.lowSpeedTime=60",
)
_REF = re.compile(r"[^-\s:?*\[\\\x00-\x1f\x7f][^\s:?*\[\\\x00-\x1f\x7f]*")


class Repository(msgspec.Struct, frozen=True):
    """Where it is, "" as `ref` for what its HEAD says, and who owns it on this host."""

    location: str
    ref: str
    owner: int | None  # uid; None for one that is elsewhere


def parse(text: str) -> Repository:
    """Take ``URL_OR_PATH[#REF]`` apart. Raises `InvalidArgument`."""
    location, hash_, ref = text.rpartition("#")
    if not hash_ or Path(text).exists():
        location, ref, hash_ = text, "", ""
    if ref == "HEAD":
        ref = hash_ = ""
    if hash_ and not _REF.fullmatch(ref):
        raise InvalidArgument(f"{ref!r} is not a branch, tag or commit", field="source")
    if location.startswith("/"):
        return Repository(location, ref, _owner(Path(location)))
    url = urllib.parse.urlsplit(location)
    if url.scheme == "file":
        path = urllib.parse.unquote(url.path)
        return Repository(path, ref, _owner(Path(path)))
    if "::" in location or url.scheme not in _PROTOCOLS or not url.hostname:
        raise InvalidArgument(
            f"git:{location} is neither an absolute path nor a URL of {', '.join(_PROTOCOLS)}; "
            "clone other repositories yourself and import git:/path/to/the/clone",
            field="source",
        )
    if url.username is not None or url.password is not None:
        raise InvalidArgument(
            "a URL with a user or password would leave it in the layer; clone the repository "
            "yourself and import git:/path/to/the/clone",
            field="source",
        )
    return Repository(location, ref, None)


async def clone(repository: Repository, target: Path) -> None:
    """Make `target` a clone with the ref checked out, all of it root's.

    Raises `Unavailable` when the repository cannot be read, `NotFound` without such a ref,
    `InvalidArgument` for one without commits, `Unsupported` without git.
    """
    await _fetch(repository, target)
    await _check_out(repository, target)
    if repository.owner is not None:  # a path of the host says nothing to a sandbox
        await _must(repository, target, "config", "--unset", "remote.origin.url")
    (target / ".git/FETCH_HEAD").unlink(missing_ok=True)
    later = time.time() + 2  # in whole seconds more than any file's
    os.utime(target / ".git/index", (later, later))


def _owner(path: Path) -> int:
    try:
        return path.stat().st_uid
    except OSError as error:
        raise InvalidArgument(
            f"{path} does not exist on the daemon's host: {error.strerror}", field="source"
        ) from error


async def _fetch(repository: Repository, target: Path) -> None:
    words = [
        "clone", *_serving(repository), "--quiet", "--no-checkout", "--template=",
        "--no-recurse-submodules",
        "--config=core.checkStat=minimal", "--config=core.trustctime=false",
    ]  # fmt: skip
    if repository.owner is not None:
        words.append("--no-local")
    ended = await _git(repository, None, *words, "--", repository.location, str(target))
    if ended.code:
        reason = _reason(ended.errors)
        if repository.owner is not None and reason.endswith("does not exist"):
            raise InvalidArgument(f"{repository.location} is not a git repository", field="source")
        raise Unavailable(f"{repository.location} cannot be cloned: {reason}")


def _serving(repository: Repository) -> list[str]:
    """Return the option that chooses who reads a repository of this host."""
    owner = repository.owner
    if not owner:
        return []
    drop = f"setpriv --reuid={owner} --regid={_NOGROUP} --clear-groups --bounding-set=-all"
    return [f"--upload-pack={drop} --inh-caps=-all --no-new-privs git-upload-pack"]


async def _check_out(repository: Repository, target: Path) -> None:
    ref = repository.ref
    if not ref:
        if not await _knows(repository, target, "HEAD"):
            raise InvalidArgument(f"{repository.location} has no commits", field="source")
        await _must(repository, target, "reset", "--quiet", "--hard")
    elif await _knows(repository, target, f"refs/remotes/origin/{ref}"):
        branch = ("-B", ref, "--track", f"refs/remotes/origin/{ref}")
        await _must(repository, target, "checkout", "--quiet", *branch)
    else:
        commit = ref if await _knows(repository, target, ref) else "FETCH_HEAD"
        if commit != ref:  # no branch or tag leads to it, but the server may have it
            fetch = ("fetch", "--quiet", *_serving(repository), "origin", ref)
            await _git(repository, target, *fetch)
        if not await _knows(repository, target, commit):
            raise NotFound(f"{repository.location} has no branch, tag or commit {ref}", ref=ref)
        await _must(repository, target, "checkout", "--quiet", "--detach", f"{commit}^{{commit}}")


async def _knows(repository: Repository, target: Path, name: str) -> bool:
    words = ("rev-parse", "--quiet", "--verify", "--end-of-options", f"{name}^{{commit}}")
    return (await _git(repository, target, *words)).code == 0


async def _must(repository: Repository, target: Path, *words: str) -> None:
    ended = await _git(repository, target, *words)
    if ended.code:
        raise Unavailable(f"git {words[0]} of {repository.location}: {_reason(ended.errors)}")


async def _git(repository: Repository, target: Path | None, *words: str) -> tool.Ended:
    place = () if target is None else ("-C", str(target))
    options = [word for option in _OPTIONS for word in ("-c", option)]
    protocols = "file" if repository.owner is not None else ":".join(_PROTOCOLS[1:])
    env = {
        name: value for name, value in os.environ.items() if _PASSED.fullmatch(name)
    } | {
        "GIT_ALLOW_PROTOCOL": protocols,
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": "/dev/null",
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_ASKPASS": "/bin/false",
        "HOME": "/nonexistent",
        "LC_ALL": "C.UTF-8",
    }  # fmt: skip
    return await tool.run(["git", *place, *options, *words], env)


def _reason(errors: str) -> str:
    """Return the line that says why; git explains itself in the lines after it."""
    lines = [line for line in errors.splitlines() if line.startswith(("fatal: ", "error: "))]
    return (lines or errors.splitlines() or ["git gave no reason"])[0]
