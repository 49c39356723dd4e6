"""Attempts of root inside on files that a policy closes, on a host without a security module.

Each attempt runs in a sandbox under the policy, where it must change nothing and see nothing, and
in one without, where it must get through: else it would prove nothing. A few are refused in any
sandbox; they say why. What guards alone do not stop is shown with the filter's part taken away.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from dsecd.images.library import Named
from dsecd.policy import seccomp
from libdsec.model import LayerImport
from tests.system.compat.debian import IMAGE, build, lend
from tests.system.confine_lab import Box, Lab, open_lab, policy

pytestmark = [pytest.mark.root, pytest.mark.asyncio(loop_scope="module")]
KIT = Path(__file__).with_name("kit.py")
TOOLKIT = "toolkit/guarded:1"
POLICY: dict[str, Any] = {
    "files": {
        "hide": ["/data/secret", "/data/vault"],
        "rules": [
            {"paths": ["/a/b/c", "/a/b/one", "/a/b/later", "/a/link"], "deny": ["write"]},
            {"paths": ["/a/b/run"], "deny": ["execute"]},
        ],
    }
}

# Everything of kit.py is there, too. `put` is what most attempts come to in the end.
PRELUDE = """
import os, subprocess, sys
sys.path.insert(0, '/attack')
from kit import *

def put(at='/a/b/c', name='f'):
    print(tried(lambda: open(f'{at}/{name}', 'w').write('changed')))

def see(path):
    print(peek(path))

def made(path):
    os.makedirs(path, exist_ok=True)
    return path

def another(root='/a'):
    # the same tree with other content
    for name in ('b/c/f', 'b/one', 'b/run', 'b/later'):
        made(os.path.dirname(f'{root}/{name}'))
        print(tried(lambda: open(f'{root}/{name}', 'w').write('changed')))

def swap(path, to):
    print(path, tried(lambda: os.rename(path, to)))
"""

# The old root is detached, and a descriptor of it is left
GONE = """
def gone():
    call('unshare', NEWNS)
    root = os.open('/', os.O_PATH)
    mount('none', '/tmp/p', 'tmpfs')
    made('/tmp/p/old')
    print(trying('pivot_root', b'/tmp/p', b'/tmp/p/old'))
    print(umount('/old', DETACH))
"""
CHANGES = {
    "write": "put()",
    "append": "print(tried(lambda: open('/a/b/c/f', 'a').write('more')))",
    "truncate": "print(tried(lambda: os.truncate('/a/b/c/f', 1)))",
    "add a file": "put(name='new')",
    "add a directory": "print(tried(lambda: os.mkdir('/a/b/c/new')))",
    "remove": "print(tried(lambda: os.unlink('/a/b/c/f')))",
    "change the mode": "print(tried(lambda: os.chmod('/a/b/c/f', 0o777)))",
    "change the owner": "print(tried(lambda: os.chown('/a/b/one', 5, 5)))",
    "set an attribute": "print(tried(lambda: os.setxattr('/a/b/one', 'user.x', b'1')))",
    "set the times": "print(tried(lambda: os.utime('/a/b/one', (1, 1))))",
    "map and write": (
        "import mmap\nfd = os.open('/a/b/c/f', os.O_RDWR)\nmmap.mmap(fd, 0)[:4] = b'xxxx'"
    ),
    "link a file of no name": (
        "fd = os.open('/tmp', os.O_TMPFILE | os.O_WRONLY)\nos.write(fd, b'changed')\n"
        "print(tried(lambda: os.unlink('/a/b/one')))\n"
        "os.link(f'/proc/self/fd/{fd}', '/a/b/one', follow_symlinks=True)"
    ),
    "replace the file": "open('/a/b/x', 'w').write('changed'); swap('/a/b/x', '/a/b/one')",
    "remove and make the file": ("print(tried(lambda: os.unlink('/a/b/one'))); put('/a/b', 'one')"),
    "make what is missing": "put('/a/b', 'later')",
    "make a directory of what is missing": (
        "print(tried(lambda: os.unlink('/a/b/later'))); os.mkdir('/a/b/later')"
    ),
    "move something to what is missing": (
        "open('/a/x', 'w').write('changed'); swap('/a/x', '/a/b/later')"
    ),
    "link something to what is missing": (
        "open('/a/b/x', 'w').write('changed'); print(tried(lambda: os.unlink('/a/b/later')))\n"
        "os.link('/a/b/x', '/a/b/later')"
    ),
    "rename the directory": "swap('/a/b/c', '/a/b/c2'); made('/a/b/c'); put()",
    "rename its parent": "swap('/a/b', '/a/b2'); another()",
    "rename its grandparent": "swap('/a', '/a2'); another()",
    "exchange its parent": (
        "another('/tmp/a')\nprint(trying('renameat2', AT_FDCWD, b'/a', AT_FDCWD, b'/tmp/a', 2))"
    ),
    "rename by another name of the root": (
        "swap('/proc/self/root/a', '/proc/self/root/a2'); another()"
    ),
    "rename from a chroot": (
        "def inside():\n    os.chroot('/proc/1/root' if os.access('/proc/1/root', 1) else '/')\n"
        "    swap('/a', '/a2'); another()\napart(inside)"
    ),
    "remove the link": (
        "print(tried(lambda: os.unlink('/a/link'))); os.symlink('/tmp', '/a/link')"
    ),
    "rename the link": "swap('/a/link', '/a/l2'); os.symlink('/tmp', '/a/link')",
    "write by a hard link": (
        "print(tried(lambda: os.link('/a/b/one', '/a/b/x')))\nopen('/a/b/x', 'w').write('changed')"
    ),
    "write by the descriptor of a path": (
        "fd = os.open('/a/b/one', os.O_PATH)\nopen(f'/proc/self/fd/{fd}', 'w').write('changed')"
    ),
    "write in a namespace of its own": "call('unshare', NEWNS)\nput()",
    "bind over it": "another('/tmp/a')\nprint(mount('/tmp/a', '/a', flags=BIND))",
    "mount over it": "print(mount('none', '/a/b', 'tmpfs')); another()",
    "unmount": "print(umount('/a/b/c')); put()",
    "unmount lazily": "print(umount('/a/b/c', DETACH)); put()",
    "unmount what holds it": "print(umount('/a', DETACH)); swap('/a', '/a2'); another()",
    "unmount in a namespace": "call('unshare', NEWNS)\nprint(umount('/a/b/c', DETACH)); put()",
    "remount": "print(mount('none', '/a/b/c', flags=REMOUNT | BIND)); put()",
    "clear the attribute": (
        "import struct\nprint(trying('mount_setattr', AT_FDCWD, b'/a/b/c', 0, "
        "struct.pack('=4Q', 0, 1, 0, 0), 32)); put()"
    ),
    "move the mount": "made('/tmp/m'); print(mount('/a/b/c', '/tmp/m', flags=MOVE)); put()",
    "write to a copy of the tree": (
        "fd = call('open_tree', AT_FDCWD, b'/a', 1)\n"
        "open(f'/proc/self/fd/{fd}/b/c/f', 'w').write('x')"
    ),
    "write below a bind of the parent": (
        "made('/tmp/m'); print(mount('/a/b', '/tmp/m', flags=BIND)); put('/tmp/m/c')"
    ),
    "write below a bind of all": (
        "made('/tmp/m'); print(mount('/', '/tmp/m', flags=BIND | REC)); "
        "print(umount('/tmp/m/a/b/c', DETACH)); put('/tmp/m/a/b/c')"
    ),
    "rename where the old root is gone": GONE
    + """    os.rename('a', 'a2', src_dir_fd=root, dst_dir_fd=root)
print(apart(gone)); another()
""",
    "remove where the old root is gone": GONE
    + """    os.unlink('a/b/one', dir_fd=root)
print(apart(gone)); put('/a/b', 'one')
""",
    "write by a file handle": """
import ctypes, struct
handle = ctypes.create_string_buffer(struct.pack('=Ii', 128, 0) + bytes(128))
mnt = ctypes.create_string_buffer(8)
print(trying('name_to_handle_at', AT_FDCWD, b'/a/b/one', handle, mnt, 0))
fd = call('open_by_handle_at', os.open('/tmp', os.O_RDONLY), handle, os.O_WRONLY)
os.write(fd, b'changed')
""",
    "enter the mount namespace of init": (
        "fd = os.open('/proc/1/ns/mnt', os.O_RDONLY)\ncall('setns', fd, NEWNS)\nput()"
    ),
    "a user namespace": "call('unshare', NEWUSER | NEWNS)\nprint(umount('/a/b/c')); put()",
}
REVEALS = {
    "read": "see('/data/secret')",
    "read in the directory": "print(os.listdir('/data/vault')); see('/data/vault/x')",
    "read by another name": "see('/proc/self/root/data/secret')",
    "read by the working directory": (
        "os.chdir('/data'); see('secret'); see('/proc/self/cwd/secret')"
    ),
    "read from a chroot": "apart(lambda: (os.chroot('/data'), print(peek('/secret'), flush=True)))",
    "read after a rename": "swap('/data', '/d2'); see('/d2/secret'); see('/d2/vault/x')",
    "read by a hard link": "print(tried(lambda: os.link('/data/secret', '/x'))); see('/x')",
    "unmount and read": "print(umount('/data/secret', DETACH)); see('/data/secret')",
    "unmount in a namespace and read": (
        "call('unshare', NEWNS)\nprint(umount('/data/vault', DETACH)); see('/data/vault/x')"
    ),
    "read below a bind": (
        "made('/m'); print(mount('/data', '/m', flags=BIND))\nsee('/m/secret'); see('/data/secret')"
    ),
    "read below a bind of all": (
        "made('/m'); print(mount('/', '/m', flags=BIND | REC)); print(umount('/m/data/secret'))\n"
        "see('/m/data/secret'); see('/data/secret')"
    ),
    "read from a copy of the tree": (
        "fd = call('open_tree', AT_FDCWD, b'/data', 1)\nsee(f'/proc/self/fd/{fd}/secret')"
    ),
    "read below an overlay": (
        "for n in ('u', 'w', 'm'): made(f'/dev/shm/{n}')\n"
        "print(mount('o', '/dev/shm/m', 'overlay', 0, "
        "'lowerdir=/data,upperdir=/dev/shm/u,workdir=/dev/shm/w,userxattr'))\n"
        "see('/dev/shm/m/secret'); see('/data/secret')"
    ),
    "read where the old root is gone": GONE
    + """    print(tried(lambda: os.rename('data', 'd3', src_dir_fd=root, dst_dir_fd=root)))
    for name in ('d3/secret', 'data/secret'):
        print(tried(lambda: print(os.read(os.open(name, 0, dir_fd=root), 99))), flush=True)
print(apart(gone)); see('/data/secret')
""",
    "run": "print(tried(lambda: subprocess.run(['/a/b/run'])))",
    "run in place of the command": "os.execv('/a/b/run', ['run'])",
    "run from a descriptor": (
        "fd = os.open('/a/b/run', os.O_RDONLY)\nos.set_inheritable(fd, True)\n"
        "os.execve(fd, ['run'], {})"
    ),
    "run by a hard link": (
        "print(tried(lambda: os.link('/a/b/run', '/a/b/r2'))); subprocess.run(['/a/b/r2'])"
    ),
}
# no policy needed: the platform, or the kernel, refuses these in every sandbox
REFUSED_ANYWAY = {
    "write by a file handle": "open_by_handle_at is not there",
    "enter the mount namespace of init": "it belongs to another user namespace",
    "a user namespace": "not without being asked for",
}

# An attempt in a process of its own; what the protected paths are to another before and after it
AROUND = """
import os, sys

def one(path):
    try:
        st = os.lstat(path)
        if os.path.islink(path): return [st.st_mode, os.readlink(path)]
        if os.path.isdir(path): return [st.st_mode, sorted(os.listdir(path))]
        return [st.st_mode, st.st_uid, int(st.st_mtime), os.listxattr(path), open(path).read()]
    except OSError as error:
        return error.errno

def look():
    return [one(path) for path in
        ('/a/b/c', '/a/b/c/f', '/a/b/one', '/a/b/later', '/a/link', '/a/link/f')]

before = look()
if os.fork() == 0:
    exec(sys.argv[1], {})
    sys.exit()
os.wait()
sys.exit(%d if look() == before else %d)
"""
SAME, CHANGED = 10, 11


def attempted(box: Box, script: str) -> tuple[str, bool]:
    """Return what an attempt said, and whether it got anywhere."""
    argv = ["python3", "-c", AROUND % (SAME, CHANGED), PRELUDE + script]
    code, said = box.run(argv=argv)
    assert code in (SAME, CHANGED), (code, said)
    return said, code == CHANGED or "SECRET" in said or "RAN" in said


@pytest.fixture(autouse=True)
def nothing_left_behind() -> None:
    """The module's lab looks after itself."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def lab() -> AsyncIterator[Lab]:
    layer = await build()
    async with open_lab(base=False) as made:
        await furnish(made, layer)
        yield made


async def furnish(made: Lab, layer: Named) -> None:
    """Put the Debian layer into the lab, and one with what is attacked and the kit."""
    await lend(layer, made.place.state)
    root = made.place.root / "guarded"
    for name in ("a/b/c", "data/vault", "attack"):
        (root / name).mkdir(parents=True)
    (root / "attack/kit.py").write_text(KIT.read_text())
    for name in ("a/b/c/f", "a/b/one"):
        (root / name).write_text("original\n")
    for name in ("data/secret", "data/vault/x"):
        (root / name).write_text("SECRET\n")
    (root / "data/open").write_text("open\n")
    (root / "a/b/run").write_text("#!/bin/echo RAN\n")
    (root / "a/b/run").chmod(0o755)
    (root / "a/link").symlink_to("b/c")
    await made.backend.layers().import_(LayerImport(name=TOOLKIT, source=str(root)))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def guarded(lab: Lab) -> AsyncIterator[Box]:
    async with lab.box(POLICY, container_image=IMAGE, toolkits=[TOOLKIT]) as box:
        yield box


@pytest.mark.parametrize("name", [*CHANGES, *REVEALS])
async def test_an_attempt_gets_nowhere(guarded: Box, name: str) -> None:
    said, broken = attempted(guarded, (CHANGES | REVEALS)[name])
    assert not broken, said


@pytest.mark.parametrize("name", [*CHANGES, *REVEALS])
async def test_without_the_policy_it_gets_through(lab: Lab, name: str) -> None:
    async with lab.box(None, container_image=IMAGE, toolkits=[TOOLKIT]) as box:
        said, broken = attempted(box, (CHANGES | REVEALS)[name])
        assert broken != (name in REFUSED_ANYWAY), said


# What the guards do not stop alone: they can be covered, and in a mount namespace that has lost
# them their places are ordinary names. Therefore a sandbox with guards makes no mounts.
BY_THE_FILTER = {
    "bind over it", "mount over it", "rename where the old root is gone",
    "remove where the old root is gone",
}  # fmt: skip


@pytest.mark.parametrize("name", [*CHANGES, *REVEALS])
async def test_guards_alone_stop_all_but_what_takes_mounts(
    lab: Lab, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    confiner = lab.backend._host.confiner
    made = confiner.confine(policy(POLICY))
    alone = msgspec.structs.replace(made, seccomp=seccomp.command_filter())
    monkeypatch.setattr(confiner, "confine", lambda _: alone)
    async with lab.box(POLICY, container_image=IMAGE, toolkits=[TOOLKIT]) as box:
        said, broken = attempted(box, (CHANGES | REVEALS)[name])
        assert broken == (name in BY_THE_FILTER), said


@pytest.mark.parametrize("name", ["rename its parent", "rename its grandparent"])
async def test_what_is_not_held_in_place_goes_along_with_its_parent(
    lab: Lab, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel's behaviour that the mounts on parents are for."""
    confiner = lab.backend._host.confiner
    made = confiner.confine(policy(POLICY))
    loose = msgspec.structs.replace(made, guards=tuple(g for g in made.guards if g.how))
    monkeypatch.setattr(confiner, "confine", lambda _: loose)
    async with lab.box(POLICY, container_image=IMAGE, toolkits=[TOOLKIT]) as box:
        said, broken = attempted(box, CHANGES[name])
        assert broken, said
