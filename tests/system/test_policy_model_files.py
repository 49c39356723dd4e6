"""The kernel and the reference model agree on generated file, ioctl and mount rules.

Policies come from a small universe of nested paths. A sandbox is made of each, and one program in
it does some 180 operations; each verdict is compared with that of `dsecd.policy.reference`. Where
mounts and Landlock are stricter than a rule, and `mechanisms` says so to users (HELD, NO_MOUNTS,
ENTRY, GAIN, READ_TOO), `Model` expects exactly that; where Landlock is laxer (RENAMED), too.
"""

from __future__ import annotations

import errno
import posixpath
from collections.abc import AsyncIterator, Iterator
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from dsecd.policy import globs, guards, seccomp
from dsecd.policy.compile import Compiled
from dsecd.policy.reference import decide_file, decide_ioctl, decide_mount, decide_rename
from dsecd.policy.rules import Access, FilePolicy
from libdsec.errors import InvalidArgument
from tests.system.confine_lab import Lab, open_lab, policy

pytestmark = [
    pytest.mark.root,
    pytest.mark.needs("landlock", "user_namespaces"),
    pytest.mark.asyncio(loop_scope="module"),
]
POLICIES, WANTED = 24, 1500  # a run, and operations, at least
FOLDERS = ("/t", "/t/a", "/t/a/x", "/t/a/x/y", "/t/b", "/t/b/x")
FILES = tuple(f"{folder}/f" for folder in FOLDERS)
MISSING = ("/t/a/new", "/t/b/x/new")
RULED = (*FOLDERS, *FILES, *MISSING, "/t/new/new")
# to be removed, and to be renamed and linked to each folder
SPENT = tuple(f"{folder}/{name}" for folder in FOLDERS for name in ("u", "l", *"012345"))
IOCTLS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451, 0x80086601, 0x1234)
NEVER = (0x5412, 0x40086602)  # the platform denies them
ACCESSES: tuple[Access, ...] = ("read", "write", "execute")
REFUSED = {errno.EACCES, errno.EPERM, errno.EROFS, errno.EBUSY, errno.EXDEV, errno.EEXIST}
# it came as far as a file that is none to execute, or a pipe that is no terminal
LET_THROUGH = {0, errno.ENOEXEC, errno.ENOTTY, errno.EINVAL, errno.EFAULT}

ALLOWANCES = st.lists(st.sampled_from(ACCESSES), min_size=1, unique=True)
# a mount takes all or what is in here; the rest is not enforced, and `explain` says so
DENIALS = st.sampled_from((["write"], ["execute"], ["write", "execute"], list(ACCESSES)))
PATHS = st.lists(st.sampled_from(RULED), min_size=1, max_size=2, unique=True)
RULES = st.one_of(
    st.fixed_dictionaries({"paths": PATHS, "allow": ALLOWANCES}),
    st.fixed_dictionaries({"paths": PATHS, "deny": DENIALS}),
)
DEFAULTS = st.sampled_from(("allow", "deny"))
ALLOWED = st.lists(st.sampled_from(IOCTLS), max_size=3, unique=True)
DENIED = st.lists(st.sampled_from((*IOCTLS, *NEVER)), max_size=3, unique=True)
OWN = {"paths": ["/probe"], "allow": ["read", "execute"]}  # the program itself


def _compiled(value: dict[str, Any]) -> Compiled | None:
    value["files"]["rules"].append(OWN)
    try:
        return policy(value)
    except InvalidArgument:  # rules that contradict each other
        return None


COMPILED = (
    st.fixed_dictionaries({
        "files": st.fixed_dictionaries({
            "default": DEFAULTS,
            "rules": st.lists(RULES, max_size=5),
            "hide": st.lists(st.sampled_from(RULED), max_size=1),
        }),
        "ioctls": st.fixed_dictionaries({"default": DEFAULTS, "allow": ALLOWED, "deny": DENIED}),
        "mounts": st.fixed_dictionaries({"default": DEFAULTS}),
    })
    .map(_compiled)
    .filter(lambda made: made is not None)
)  # fmt: skip


class Model:
    """What each operation must come to under one policy."""

    def __init__(self, rules: Compiled) -> None:
        self.files, self.system = rules.files, rules.system
        self.guards = {guard.path for guard in guards.for_policy(rules.files, rules.system)}
        self.landlocked = rules.files.default == "deny"
        self._renamed = _readable(rules.files) if self.landlocked else rules.files

    def content(self, access: Access, path: str) -> bool:
        return decide_file(self.files, access, path) == "allow"

    def execute(self, path: str) -> bool:
        read_too = not self.landlocked or self.content("read", path)
        return self.content("execute", path) and read_too

    def entry(self, path: str) -> bool:
        """Making, removing: a write of the path, and for Landlock of what holds it."""
        if path in self.guards:
            return False
        held = not self.landlocked or self._opened("write", posixpath.dirname(path))
        return self.content("write", path) and held

    def make(self, path: str) -> bool:
        """O_CREAT without O_EXCL: what is guarded is there."""
        return self.content("write", path) if path in self.guards else self.entry(path)

    def link(self, source: str, target: str) -> bool:
        here, there = posixpath.dirname(source), posixpath.dirname(target)
        if source in self.guards or self._mount(here) != self._mount(there):
            return False
        gains = self.landlocked and here != there and any(
            self._opened(access, there) and not self._opened(access, source) for access in ACCESSES
        )  # fmt: skip
        refers = not self.landlocked or here == there or self._opened("write", here)
        return self.entry(target) and refers and not gains

    def rename(self, source: str, target: str) -> bool:
        allowed = decide_rename(self._renamed, source, target) == "allow"
        return allowed and self.entry(source) and self.link(source, target)

    def ioctl(self, request: int) -> bool:
        return decide_ioctl(self.system, request) == "allow" and not seccomp.denies_ioctl(request)

    def mount(self, path: str) -> bool:
        closed = bool(self.guards) or self.landlocked
        return not closed and decide_mount(self.system, "tmpfs", path) == "allow"

    def _opened(self, access: Access, path: str) -> bool:
        """Say what the rules that allow say, for they are all that Landlock knows."""
        return any(
            rule.verdict == "allow" and access in rule.access and globs.covers(rule.pattern, path)
            for rule in self.files.rules
        )

    def _mount(self, path: str) -> str:
        """Return the guard that `path` lies in; those above others are longer."""
        return max((each for each in self.guards if globs.covers(each, path)), key=len, default="")


def _readable(files: FilePolicy) -> FilePolicy:
    """Return the rules with everything readable that may be written: Landlock renames that."""
    replace = msgspec.structs.replace
    opened = (
        replace(rule, access=rule.access | {"read"})
        if rule.verdict == "allow" and "write" in rule.access
        else rule
        for rule in files.rules
    )
    return replace(files, rules=tuple(opened))


def operations(model: Model) -> Iterator[tuple[str, bool]]:
    """Yield what the program is told, and whether it must be allowed; what spoils is last."""
    for path in FILES:
        yield f"r\t{path}", model.content("read", path)
        yield f"x\t{path}", model.execute(path)
        yield f"w\t{path}", model.content("write", path)
        yield f"a\t{path}", model.content("write", path)
        yield f"t\t{path}", model.content("write", path)
    for path in FOLDERS:
        yield f"l\t{path}", model.content("read", path)
        for letter in "cdfs":
            yield f"{letter}\t{path}/made-{letter}", model.entry(f"{path}/made-{letter}")
        yield f"u\t{path}/u", model.entry(f"{path}/u")
    for path in MISSING:
        yield f"c\t{path}", model.make(path)
    for request in (*IOCTLS, *NEVER):
        yield f"i\t0\t{request | 5 << 32:#x}", model.ioctl(request)
    yield from _between(model)
    for path in ("/t/b", "/t"):
        yield f"M\t{path}", model.mount(path)
        if model.mount(path):
            yield f"U\t{path}", True
    for path in FILES + FOLDERS[:0:-1]:  # the deepest folder first
        yield f"m\t{path}\t{path}.moved", model.rename(path, f"{path}.moved")


def _between(model: Model) -> Iterator[tuple[str, bool]]:
    for number, here in enumerate(FOLDERS):
        for other, there in enumerate(FOLDERS):
            source, target = f"{here}/l", f"{there}/link{number}"
            yield f"L\t{source}\t{target}", model.link(source, target)
            source, target = f"{here}/{other}", f"{there}/from{number}"
            yield f"m\t{source}\t{target}", model.rename(source, target)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def lab() -> AsyncIterator[Lab]:
    async with open_lab(probes=[path[1:] for path in (*FILES, *SPENT)]) as made:
        yield made


@pytest.fixture(autouse=True)
def nothing_left_behind() -> None:
    """The module's lab looks after itself."""


def mixed(done: int, allowed: int) -> bool:
    """Whether neither verdict is the rule."""
    return done // 5 < allowed < done - done // 5


def policies() -> list[Compiled]:
    """Return what is tried in a run: more where the first are too much alike, 1 time in 20."""
    found: list[Compiled] = []
    verdicts: list[bool] = []

    @settings(
        max_examples=POLICIES, database=None, phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(COMPILED)
    def gather(made: Compiled) -> None:
        found.append(made)
        verdicts.extend(expected for _, expected in operations(Model(made)))

    while not mixed(len(verdicts), sum(verdicts)):
        gather()
    return found


async def test_the_kernel_decides_as_the_model_does(lab: Lab) -> None:
    done, allowed = 0, 0
    loop_policies = policies()
    for made in loop_policies:
        asked = list(operations(Model(made)))
        async with lab.box(made) as box:
            told = "".join(f"{text}\n" for text, _ in asked).encode()
            code, said = box.run(argv=["/probe"], input=told)
            assert code == 0, said
            answers = [int(line) for line in said.split()]
        assert len(answers) == len(asked), said
        for (text, expected), answer in zip(asked, answers, strict=True):
            name = errno.errorcode.get(answer, str(answer))
            assert answer in REFUSED | LET_THROUGH, (text, name, made.files, made.system)
            assert (answer in LET_THROUGH) == expected, (text, name, made.files, made.system)
            allowed += expected
        done += len(asked)
    assert done >= WANTED
    assert mixed(done, allowed)
    print(f"{done} operations under {len(loop_policies)} policies, {allowed} of them allowed")
