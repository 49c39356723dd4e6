"""What the tests of the security module try in a sandbox, and what the reference says of it."""

from __future__ import annotations

import random
import shutil
import subprocess
from pathlib import Path
from typing import Any

import msgspec

from dsecd.policy import globs, language, reference
from dsecd.policy.compile import Compiled, compile_policy
from dsecd.policy.rules import Access, FilePolicy
from libdsec import Sandbox
from libdsec.errors import InvalidArgument
from tests.system.daemon import make_rootfs

HERE = Path(__file__).parent
PROBE = "/bin/probe"
DIRECTORIES = ("/t/a", "/t/a/d", "/t/b", "/t/b/e", "/t/c")
FILES = ("f", "k.key", "rn", "rs", "ul", "ln", "xa", "xb")
FOLDERS = ("rd", "rnd", "mp")
TREE = [
    "/t", *DIRECTORIES, *(f"{at}/{name}" for at in DIRECTORIES for name in (*FILES, *FOLDERS)),
    *(f"{at}/rnd/f" for at in DIRECTORIES),
]  # fmt: skip
PATTERNS = (
    "/t", "/t/**", "/t/a", "/t/a/f", "/t/a/d", "/t/a/d/k.key", "/t/b", "/t/b/**", "/t/b/e",
    "/t/b/e/**", "/t/b/none", "/t/c", "/t/c/rnd/f", "/t/c/missing/x", "/t/*/f", "/t/?/rnd",
    "/t/**/*.key", "/t/**/mp", "/l/f",
)  # fmt: skip
EVERY: tuple[Access, ...] = ("read", "write", "execute")
EACCES, SETUP = 13, 200  # as the probe adds it for what had to succeed before
Attempt = tuple[str, str, str]
# exit(0): a program that needs no other file
_TINY = 'void _start(void) { __asm__ volatile("syscall" :: "a"(231), "D"(0)); }'
_OF_FILES = (
    "read", "stat", "read_reopened", "read_proc_root", "read_symlink", "read_chroot", "read_bind",
    "read_overlay", "map_exec", "execute", "write", "write_reopened", "truncate", "fallocate",
    "chmod", "chmod_reopened", "chown", "utime", "setxattr", "acl",
)  # fmt: skip


def make_tree(root: Path) -> None:
    """Make the tree of a layer: busybox, the probe, and what is tried."""
    make_rootfs(root)
    compiler = ["cc", "-static", "-O1", "-Wall", "-o"]
    probe = [*compiler, str(root / "bin/probe"), str(HERE / "lsm_probe.c")]
    subprocess.run(probe, check=True, timeout=300)
    source = root / "tiny.c"
    source.write_text(_TINY)
    tiny = [*compiler, str(root / "bin/tiny"), "-nostdlib", "-s", str(source)]
    subprocess.run(tiny, check=True, timeout=300)
    for name in ("mnt", "srv"):
        (root / name).mkdir(exist_ok=True)
    for at in DIRECTORIES:
        for name in FOLDERS:
            (root / at[1:] / name).mkdir(parents=True)
        for name in (*FILES, "rnd/f"):
            shutil.copy(root / "bin/tiny", root / at[1:] / name)
    (root / "l").symlink_to("t/c")


def attempts() -> list[Attempt]:
    """Return operations and their arguments, each on files that no other one changes."""
    found: list[Attempt] = []
    for number, at in enumerate(DIRECTORIES):
        found += [(op, f"{at}/{name}", "") for name in ("f", "k.key") for op in _OF_FILES]
        found += [
            ("read", at, ""), ("tmpfile", at, ""), ("create", f"{at}/n1", ""),
            ("mkdir", f"{at}/n2", ""), ("symlink", f"{at}/n3", ""), ("mknod", f"{at}/n4", ""),
            ("mount", f"{at}/mp", "tmpfs"), ("mount", at, "ramfs"), ("bind", f"{at}/mp", "/srv"),
            ("bind", f"{at}/f", "/bin/busybox"), ("new_mount", f"{at}/mp", "tmpfs"),
            ("new_bind", f"{at}/mp", "/srv"), ("connect", f"{at}/s1", ""),
            ("send", f"{at}/s2", ""), ("link", f"{at}/ln", f"{at}/n5"),
            ("link", f"{at}/ln", f"/srv/ln{number}"), ("exchange", f"{at}/xa", f"{at}/xb"),
            ("unlink", f"{at}/ul", ""), ("rmdir", f"{at}/rd", ""),
            ("rename", f"{at}/rn", f"{at}/n6"), ("rename", f"{at}/rs", f"/srv/rs{number}"),
            ("rename", f"{at}/rnd", f"{at}/n7"),
        ]  # fmt: skip
    found += [("connect", "@one", ""), ("send", "@two", ""), ("connect", "@three", "")]
    found += [("pivot", "", ""), ("mount", "/t", "tmpfs"), ("create", "/t/b/none", "")]
    # last, for they move what the others use
    return [
        *found, ("rename", "/t/b/e", "/srv/e"), ("rename", "/t/b", "/srv/b"),
        ("rename", "/t", "/srv/t"),
    ]  # fmt: skip


async def outcomes(sandbox: Sandbox, tries: list[Attempt]) -> list[int]:
    """Return the errno of each attempt, 0 for success."""
    data = "".join(f"{word}\0" for attempt in tries for word in attempt).encode()
    done = await sandbox.run(PROBE, input=data, timeout=600)
    assert done.ok, done.stderr
    found = [int(line) for line in str(done.stdout).split()]
    assert len(found) == len(tries)
    return found


def is_denied(code: int) -> bool:
    """Say whether an attempt ended as a denied one does; any other failure is a fault."""
    assert code in (0, EACCES, SETUP + EACCES), code
    return code != 0


class Model:
    """The reference's verdicts on attempts, and the stricter ones of the programs.

    Stricter: what cannot be connected to is not renamed; what a rule that denies is about keeps its
    place, with what is above it: not removed, not mounted on, not the end of a rename.
    """

    def __init__(self, policy: Compiled) -> None:
        self.files, self.system = _behind_link(policy.files), policy.system
        denying = [*self.files.hidden]
        denying += [rule.pattern for rule in self.files.rules if rule.verdict == "deny"]
        unix = [rule.pattern for rule in self.system.unix if rule.verdict == "deny"]
        denying += [pattern for pattern in unix if not pattern.startswith("@")]
        self._anchors = {globs.head(pattern) for pattern in denying}
        self._anchors |= {path for path in TREE for p in denying if globs.matches(p, path)}

    def allows(self, op: str, a: str, b: str) -> bool:
        return all(_CONDITIONS[op](self, a, b))

    def may(self, access: Access, path: str) -> bool:
        return reference.decide_file(self.files, access, path) == "allow"

    def sees(self, path: str) -> bool:
        return not any(globs.covers(pattern, path) for pattern in self.files.hidden)

    def free(self, path: str) -> bool:
        beneath = path.rstrip("/") + "/"
        return not any(one == path or one.startswith(beneath) for one in self._anchors)

    def connects(self, name: str) -> bool:
        return reference.decide_unix(self.system, name) == "allow" and self.sees(name)

    def mounts(self, kind: str, path: str) -> bool:
        allowed = reference.decide_mount(self.system, kind, path) == "allow"
        return allowed and self.may("write", path) and self.free(path)

    def renames(self, a: str, b: str) -> bool:
        allowed = reference.decide_rename(self.files, a, b) == "allow"
        return allowed and self.connects(a) and self.free(a)

    def links(self, a: str, b: str) -> bool:
        allowed = reference.decide_link(self.files, a, b) == "allow"
        same = (self.sees(a) or not self.sees(b)) and (self.connects(a) or not self.connects(b))
        return allowed and same

    def own_is_open(self) -> bool:
        return self.files.default == "allow"

    def holds(self) -> bool:
        return bool(self._anchors) or self.files.default == "deny"


def _behind_link(files: FilePolicy) -> FilePolicy:
    """A rule on a path with a symbolic link in it holds for what is behind the link, too."""
    replace = msgspec.structs.replace
    return replace(
        files,
        hidden=(*files.hidden, *("/t/c/f" for pattern in files.hidden if pattern == "/l/f")),
        rules=(
            *files.rules,
            *(replace(rule, pattern="/t/c/f") for rule in files.rules if rule.pattern == "/l/f"),
        ),
    )


_CONDITIONS: dict[str, Any] = {
    "read": lambda m, a, b: [m.may("read", a)],
    "stat": lambda m, a, b: [m.sees(a)],
    "read_reopened": lambda m, a, b: [m.may("read", a)],
    "read_proc_root": lambda m, a, b: [m.may("read", a)],
    "read_symlink": lambda m, a, b: [m.may("read", a), m.may("write", "/tmp/link")],
    "read_chroot": lambda m, a, b: [m.may("read", a)],
    "read_bind": lambda m, a, b: [m.may("read", a), m.mounts("bind", "/mnt")],
    "read_overlay": lambda m, a, b: [
        m.may("read", a), m.mounts("overlay", "/srv"), m.own_is_open(),
    ],
    "map_exec": lambda m, a, b: [m.may("read", a), m.may("execute", a)],
    "execute": lambda m, a, b: [m.may("execute", a)],
    "write_reopened": lambda m, a, b: [m.may("read", a), m.may("write", a)],
    "fallocate": lambda m, a, b: [m.may("read", a), m.may("write", a)],
    "tmpfile": lambda m, a, b: [m.may("write", f"{a}/#1")],
    "rmdir": lambda m, a, b: [m.may("write", a), m.free(a)],
    "unlink": lambda m, a, b: [m.may("write", a), m.free(a)],
    "rename": lambda m, a, b: [m.renames(a, b)],
    "exchange": lambda m, a, b: [m.renames(a, b), m.renames(b, a)],
    "link": lambda m, a, b: [m.links(a, b)],
    "mount": lambda m, a, b: [m.mounts(b, a)],
    "new_mount": lambda m, a, b: [m.mounts(b, a)],
    "bind": lambda m, a, b: [m.mounts("bind", a)],
    "new_bind": lambda m, a, b: [m.mounts("bind", a)],
    "pivot": lambda m, a, b: [m.mounts("tmpfs", "/mnt"), not m.holds()],
    "connect": lambda m, a, b: [m.connects(a), a.startswith("@") or m.may("write", a)],
    "send": lambda m, a, b: [m.connects(a), a.startswith("@") or m.may("write", a)],
} | dict.fromkeys(
    ("write", "create", "mkdir", "symlink", "mknod", "truncate", "chmod", "chmod_reopened", "chown",
     "utime", "setxattr", "acl"),
    lambda m, a, b: [m.may("write", a)],
)  # fmt: skip


def draw(source: random.Random) -> dict[str, Any]:
    """Return a policy that compiles; what the probe itself needs is always open."""
    while True:
        policy = _draw(source)
        try:
            compile_policy(language.from_object(policy))
        except InvalidArgument:
            continue
        return policy


def _draw(source: random.Random) -> dict[str, Any]:
    rules: list[dict[str, Any]] = []
    for _ in range(source.randint(0, 4)):
        access = source.sample(EVERY, source.randint(1, 3))
        verdict = source.choice(("allow", "deny", "deny"))
        rules.append({"paths": source.sample(PATTERNS, source.randint(1, 2)), verdict: access})
    files: dict[str, Any] = {
        "rules": rules,
        "hide": source.sample(PATTERNS, source.choice((0, 1, 2))),
    }
    if source.random() < 0.4:
        files["default"] = "deny"
        rules.append({"paths": ["/bin", "/proc", "/dev", "/etc"], "allow": ["read", "execute"]})
        rules.append({"paths": ["/tmp", "/srv", "/mnt"], "allow": ["read", "write"]})
    policy: dict[str, Any] = {"files": files}
    if source.random() < 0.5:
        places = ("/t/**", "/t/b", "/mnt", "/t/a/mp", "/**")
        kinds = ("tmpfs", "bind", "overlay", "ramfs", "*")
        policy["mounts"] = {
            "rules": [
                {
                    source.choice(("allow", "deny")): source.choice(kinds),
                    "at": source.choice(places),
                }
                for _ in range(source.randint(1, 3))
            ],
            "default": source.choice(("allow", "deny")),
        }
    if source.random() < 0.5:
        names = ("@one", "@two", "@three", "/t/a/s1", "/t/b", "/t/c/s2", "@**")
        policy["unix"] = {
            "allow": source.sample(names, source.randint(0, 2)),
            "deny": source.sample(names, source.randint(0, 2)),
            "default": source.choice(("allow", "deny")),
        }
    return policy
