"""What the agent may write that others trust: the grader's paths, PATH, set-uid programs. Pure."""

from __future__ import annotations

import posixpath
from collections.abc import Iterator

from libdsec.audit.places import SYSTEM, within
from libdsec.audit.report import Finding, Wanted
from libdsec.audit.tree import SETUID, Entry, Tree

DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_TRUSTED = ("/bin", "/etc", "/lib", "/lib64", "/sbin", "/usr")
# Of Debian, Fedora and Alpine, which check for themselves who calls them
_KNOWN_SETUID = frozenset({
    "at", "bbsuid", "chage", "chfn", "chsh", "crontab", "dbus-daemon-launch-helper", "doas",
    "exim4", "expiry", "fusermount", "fusermount3", "gpasswd", "mount", "mount.cifs", "mount.nfs",
    "newgidmap", "newgrp", "newuidmap", "ntfs-3g", "pam_timestamp_check", "passwd", "ping", "ping6",
    "pkexec", "polkit-agent-helper-1", "pppd", "ssh-keysign", "su", "sudo", "traceroute6", "umount",
    "unix_chkpwd", "userhelper", "Xorg.wrap",
})  # fmt: skip


def find(tree: Tree, wanted: Wanted, path: str) -> Iterator[Finding]:
    """Yield what the agent may change and should not; `path` is its PATH, "" the usual one."""
    for grader in wanted.grader:
        yield from _grader(grader, tree)
    yield from _search_path(path or DEFAULT_PATH, tree)
    if tree.agent.is_root:
        yield Finding(
            risk="low", kind="rights", path="/",
            reason="the agent is root and can replace any program that the grader runs: grade with "
            "verify, or give the sandbox a user of its own (init_user)",
        )  # fmt: skip
        return
    for entry in tree:
        if entry.type == "file" and entry.mode & SETUID and entry.uid != tree.agent.uid:
            yield from _setuid(entry, tree)
        elif entry.type in ("file", "dir") and within(entry.path, _TRUSTED):
            yield from _misplaced(entry, tree)


def _grader(path: str, tree: Tree) -> Iterator[Finding]:
    entry = tree.resolve(path)
    if entry is None:
        parent = tree.resolve(posixpath.dirname(path))
        if parent is None or tree.writable(parent):
            yield _read_only(path, "it is not there yet: the agent can put its own there first")
        return
    changeable = [below for below in (entry, *tree.below(entry.path)) if tree.writable(below)]
    if changeable:
        reason = "the grader uses it and the agent can change it, so that it reports success"
        yield _read_only(entry.path, reason, f"{len(changeable)} files and directories")
    elif tree.readable(entry):
        yield Finding(
            risk="medium", kind="grader", path=entry.path, remedy="hide",
            reason="the agent can read how it is graded, and fit its work to that",
        )  # fmt: skip


def _read_only(path: str, reason: str, evidence: str = "") -> Finding:
    return Finding(
        risk="high", kind="grader", path=path, reason=reason, evidence=evidence, remedy="read-only"
    )


def _search_path(path: str, tree: Tree) -> Iterator[Finding]:
    """Yield the directories of PATH in which the agent can put its own `python` or `git`."""
    parts = path.split(":")
    system = [at for at, part in enumerate(parts) if part in ("/usr/bin", "/bin")]
    for at, part in enumerate(parts[: max(system, default=len(parts))]):
        if not part.startswith("/"):
            yield Finding(
                risk="high", kind="path", path=f"$PATH[{at}]", evidence=part or "(empty)",
                reason="an entry of PATH that is relative to the working directory: "
                "programs there run instead of the system's; take it out",
            )  # fmt: skip
        elif _plantable(part, tree):
            yield Finding(
                risk="medium" if tree.agent.is_root else "high", kind="path", path=part,
                reason="in PATH before the system's programs, and the agent can write there: "
                "its own python, git or sh runs instead of them, for the grader too",
                remedy="read-only",
            )  # fmt: skip


def _plantable(directory: str, tree: Tree) -> bool:
    """Say whether the agent can put a program there; of root's, whether the place is the task's."""
    entry = tree.resolve(directory)
    if tree.agent.is_root:
        return not within(entry.path if entry else directory, (*SYSTEM, "/opt"))
    while entry is None:
        directory = posixpath.dirname(directory)
        entry = tree.resolve(directory)
    return tree.writable(entry)


def _setuid(entry: Entry, tree: Tree) -> Iterator[Finding]:
    if entry.name not in _KNOWN_SETUID and entry.uid == 0 and tree.executable(entry):
        yield Finding(
            risk="high", kind="setuid", path=entry.path, remedy="hide",
            reason="runs as root for whoever starts it, and is none of the usual ones: "
            "with it the agent may become root and rewrite the grader",
        )  # fmt: skip


def _misplaced(entry: Entry, tree: Tree) -> Iterator[Finding]:
    parent = tree.get(entry.parent)
    if tree.writable(entry) and parent is not None and not tree.writable(parent):
        yield Finding(
            risk="high", kind="rights", path=entry.path, remedy="read-only",
            reason="part of the system, and the agent may write it: it can change what others run",
        )  # fmt: skip
