"""What tests of AppArmor share: a sandbox with a probe inside, a tree to try on, random policies.

The probe (policy_probe.c) is also the content of every file of the tree, so that each can be
executed. `expected` is the reference model, with what `dsecd.policy.apparmor` says about itself.
"""

from __future__ import annotations

import contextlib
import errno
import random
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from dsecd.policy import globs, reference
from dsecd.policy.rules import EVERY_ACCESS, Access, FilePolicy, SystemPolicy
from libdsec import model
from tests.system.daemon import Daemon, make_rootfs
from tests.wire_client import WireClient

IMAGE = "base/probe:1"
DIRECTORIES = (
    "/t", "/t/a", "/t/a/b", "/t/a/b/d", "/t/ab", "/t/a/[b]", "/t/x", "/t/x/a", "/t/x/a/b",
    "/t/free",
)  # fmt: skip
FILES = (
    "/t/f", "/t/a/f", "/t/a/b/f", "/t/a/b/c", "/t/a/b/d/f", "/t/a/b/d/c", "/t/ab/f", "/t/a/[b]/f",
    "/t/x/f", "/t/x/c", "/t/x/a/f", "/t/x/a/b/c", "/t/a/é", "/t/a/q", "/t/a/b c", "/t/a/$*\\",
    '/t/a/"{x,y}^', "/t/free/f",
)  # fmt: skip
PATTERNS = (
    "/t", "/t/a", "/t/a/b", "/t/a/b/d", "/t/a/b/f", "/t/a/b/d/c", "/t/a/*", "/t/a/**", "/t/**/c",
    "/**/f", "/t/**", "/t/a/b*", "/t/?", "/t/a/?", "/t/*/b", "/t/*/b/*", "/t/a/[b]", "/t/x/**/f",
    "/t/**/b/**/c", "/t/a?", "/t/**b", "/t/**/a/b", "/t/a/b c", "/t/a/$*\\", '/t/a/"{x,y}^',
    "/t/x/c",
)  # fmt: skip
TREE = frozenset((*DIRECTORIES, *FILES))
MOUNT_PLACES = ("/m/a", "/m/a/b", "/m/c", "/m/c/b")
MOUNT_PATTERNS = ("/m/a", "/m/a/b", "/m/c", "/m/*", "/m/**", "/m/*/b", "/**/b", "/**")
FSTYPES = ("tmpfs", "ramfs", "bind", "overlay", "*")

Operation = tuple[str, str, str]


def build_probe(folder: Path) -> Path:
    """Compile the probe, statically; musl's is a tenth of the size."""
    made, source = folder / "probe", Path(__file__).with_name("policy_probe.c")
    headers = ["-idirafter", "/usr/include", "-idirafter", "/usr/include/x86_64-linux-gnu"]
    command = ["musl-gcc", "-O1", "-static", str(source), "-o", str(made), *headers]
    subprocess.run(command, check=True)
    return made


class AppArmorAlone(Daemon):
    """A daemon whose sandboxes have no other mechanism for files."""

    async def start(self, crash_at: str = "only-apparmor", keep: bool = False) -> None:
        await super().start(crash_at, keep)


@contextlib.asynccontextmanager
async def probed(probe: Path, alone: bool = True) -> AsyncIterator[Daemon]:
    """A running daemon with an image that holds the probe and the tree."""
    made = AppArmorAlone() if alone else Daemon()
    try:
        await made.start()
        await _import(made, probe)
        yield made
    except BaseException:
        sys.stderr.write(made.log()[-6000:])
        raise
    finally:
        await made.close()


async def _import(d: Daemon, probe: Path) -> None:
    root, program = d.root / "rootfs", probe.read_bytes()
    make_rootfs(root)
    for path in (*DIRECTORIES, *MOUNT_PLACES, "/m/source"):
        (root / path[1:]).mkdir(parents=True, exist_ok=True)
    for path in (*FILES, "/probe", "/m/source/f"):
        (root / path[1:]).write_bytes(program)
        (root / path[1:]).chmod(0o755)
    client = await d.client()
    await client.call("layer.import", model.LayerImport(name=IMAGE, source=str(root)))


async def attempt(client: WireClient, sandbox: str, operations: Sequence[Operation]) -> list[str]:
    """Return how each operation ended: "ok", or the name of an errno."""
    given = "".join(f"{field}\0" for operation in operations for field in operation)
    done = await client.run(sandbox, "/probe", input=given.encode(), cwd=b"/")
    assert done.exit_code == 0, done
    found = [int(line) for line in done.stdout.split()]
    assert len(found) == len(operations), done
    return [errno.errorcode[number] if number else "ok" for number in found]


# --- random policies ------------------------------------------------------------------------------


def random_files(draw: random.Random) -> dict[str, Any]:
    """Return a policy on the tree; what the probe itself needs is always allowed."""
    accesses = sorted(EVERY_ACCESS)
    default = draw.choice(["allow", "allow", "deny"])
    rules: list[dict[str, Any]] = [{"paths": ["/probe"], "allow": ["read", "execute"]}]
    for _ in range(draw.randint(1, 5)):
        verdict = draw.choice(["allow", "deny"] if default == "deny" else ["deny"])
        some = draw.sample(accesses, draw.randint(1, 3))
        rules.append({"paths": [draw.choice(PATTERNS)], verdict: some})
    hidden = draw.sample(PATTERNS, draw.choice([0, 0, 1]))
    return {"default": default, "rules": rules, "hide": hidden}


def random_operations(draw: random.Random, policy: FilePolicy, count: int) -> list[Operation]:
    found: dict[Operation, None] = {}
    while len(found) < count:
        file, directory = draw.choice(FILES), draw.choice(DIRECTORIES)
        either = draw.choice((file, directory))
        name = draw.choice(["new", "c", "é", "b", "f", "q q"])
        new = f"{directory}/{name}"
        operation = draw.choice(
            [
                ("read", either, ""), ("write", file, ""), ("create", new, ""), ("mkdir", new, ""),
                ("symlink", new, "/nowhere"), ("mknod", new, ""), ("chmod", either, ""),
                ("chown", either, ""), ("truncate", file, ""), ("execute", file, ""),
                ("map_code", file, ""), ("rename", either, new), ("link", file, new),
                ("unlink", file, ""), ("rmdir", directory, ""),
            ]
        )  # fmt: skip
        if _is_fair(policy, operation):
            found[operation] = None
    return list(found)


def _is_fair(policy: FilePolicy, operation: Operation) -> bool:
    """Say whether an operation has one right answer and leaves the tree as it was."""
    name, path, to = operation
    new = to if name in ("rename", "link") else path
    if name in ("create", "mkdir", "symlink", "mknod", "rename", "link") and new in TREE:
        return False
    if name in ("unlink", "rmdir"):
        return expected(policy, operation) == "deny"
    if name == "map_code":  # the file is opened first
        return reference.decide_file(policy, "read", path) == "allow"
    if name != "rename":
        return True
    if to.startswith(path + "/"):
        return False
    if _only_executed(policy, path):
        return False
    may_return = reference.decide_file(policy, "read", to) == "allow"
    return expected(policy, operation) == "deny" or may_return


def _only_executed(policy: FilePolicy, path: str) -> bool:
    """Say whether a rule on this very file denies its execution and nothing else."""
    denied = {
        access for rule in policy.rules
        if rule.verdict == "deny" and globs.head(rule.pattern) == path
        for access in rule.access
    }  # fmt: skip
    return path in FILES and denied == {"execute"}


def held(policy: FilePolicy) -> set[str]:
    """Return the directories that keep their names, and with them mode and owner."""
    patterns = [*policy.hidden, *(r.pattern for r in policy.rules if r.verdict == "deny")]
    heads = [globs.head(pattern) for pattern in patterns]
    return {path for path in DIRECTORIES for head in heads if (head + "/").startswith(path + "/")}


def expected(policy: FilePolicy, operation: Operation) -> str:
    """Return the verdict on an operation."""
    name, path, to = operation

    def denied(access: Access, target: str) -> bool:
        return reference.decide_file(policy, access, target) == "deny"

    if name == "rename":
        wrong = reference.decide_rename(policy, path, to) == "deny"
    elif name == "link":
        wrong = reference.decide_link(policy, path, to) == "deny"
    elif name == "read":
        wrong = denied("read", path)
    elif name in ("execute", "map_code"):
        wrong = denied("execute", path)
    else:
        wrong = denied("write", path) or path in held(policy)
    return "deny" if wrong else "allow"


def random_mounts(draw: random.Random) -> dict[str, Any]:
    default = draw.choice(["allow", "deny"])
    rules = []
    for _ in range(draw.randint(1, 4)):
        verdict = draw.choice(["allow", "deny"])
        rules.append({verdict: draw.choice(FSTYPES), "at": draw.choice(MOUNT_PATTERNS)})
    return {"default": default, "rules": rules}


def mount_operations() -> list[tuple[Operation, str, str]]:
    """Return each kind of mount at each place, with its type and place."""
    lowers = "/m/source:/t/free"
    return [
        (operation, fstype, place)
        for place in MOUNT_PLACES
        for operation, fstype in (
            (("type_mount", "tmpfs", place), "tmpfs"),
            (("type_mount", "ramfs", place), "ramfs"),
            (("bind", "/m/source", place), "bind"),
            (("overlay_mount", lowers, place), "overlay"),
        )
    ]


def expected_mount(policy: SystemPolicy, fstype: str, place: str) -> str:
    return reference.decide_mount(policy, fstype, place)
