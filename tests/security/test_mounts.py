"""Mounts, roots and namespaces: masks stay, nothing of the host can be brought in."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import pytest

from dsecd.images.builder import Recipe
from dsecd.images.library import open_library
from dsecd.images.model import Node
from dsecd.images.sources.directory import read_directory
from dsecd.images.sources.sink import Sink
from libdsec import DSecContainerRunArgs, Sandbox
from libdsec.errors import DSecError
from tests.security.conftest import USER, Target, attack

pytestmark = [pytest.mark.root, pytest.mark.asyncio(loop_scope="module")]
BOTH = pytest.mark.parametrize("user", ["root", USER])
LOCKED = (
    "/proc",
    "/proc/sys",
    "/proc/keys",
    "/proc/bus",
    "/proc/kallsyms",
    "/dev",
    "/dev/pts",
    "/sys",
)


@BOTH
async def test_mounts_of_the_sandbox_are_locked(box: Sandbox, user: str) -> None:
    found = await attack(
        box,
        f"""
before = peek("/proc/self/mountinfo")
def probe(path):
    return {{
        "umount": umount(path), "detach": umount(path, DETACH),
        "move": mount(path, "/mnt", "", MOVE),
        "writable": mount("none", path, "", REMOUNT | BIND),
        "devices": mount("none", path, "", REMOUNT | BIND | RDONLY),
        "superblock": mount("none", path, "", REMOUNT),
        "setattr": trying("mount_setattr", AT_FDCWD, path.encode(), 0,
                          b"\\0" * 8 + (1 | 2 | 4 | 8).to_bytes(8, "little") + b"\\0" * 16, 32),
    }}
outcomes = {{path: apart(lambda: probe(path)) for path in {LOCKED}}}
own = apart(lambda: [call("unshare", NEWNS), mount("none", "/mnt", "tmpfs"),
                     mount("none", "/mnt", "", REMOUNT | BIND | RDONLY), umount("/mnt")][1:])
report(outcomes=outcomes, own=own, same=before == peek("/proc/self/mountinfo"))
""",
        user,
    )
    assert found["same"]
    for path, outcomes in found["outcomes"].items():
        refusal = {"EINVAL", "EPERM"} if user == "root" else {"EPERM"}
        assert set(outcomes.values()) <= refusal, path
    assert found["own"] == (["ok", "ok", "ok"] if user == "root" else "EPERM")  # control


async def test_copies_of_mounts_do_not_lose_their_masks(box: Sandbox) -> None:
    found = await attack(
        box,
        """
CLONE, RECURSIVE = 1, 0x8000
def copied():
    tree = call("open_tree", AT_FDCWD, b"/proc", CLONE | RECURSIVE)
    inner = {name: umount(f"/proc/self/fd/{tree}/{name}", DETACH) for name in ("keys", "sys")}
    attached = trying("move_mount", tree, b"", AT_FDCWD, b"/mnt", 4)
    return {
        "inner": inner, "attached": attached, "keys": peek("/mnt/keys"),
        "umount": [umount("/mnt/keys"), umount("/mnt/keys", DETACH), umount("/mnt/sys", DETACH)],
        "remount": mount("none", "/mnt/sys", "", REMOUNT | BIND),
        "write": writable("/mnt/sys/kernel/core_pattern"),
    }
report(
    alone=trying("open_tree", AT_FDCWD, b"/proc", CLONE),
    bind=[mount("/proc", "/mnt", "", BIND), mount("/dev", "/mnt", "", BIND)],
    copied=apart(lambda: [call("unshare", NEWNS), copied()][1]),
    inside=apart(lambda: [call("unshare", NEWNS), umount("/proc/keys"), umount("/proc/sys", DETACH),
                          mount("none", "/proc/sys", "", REMOUNT | BIND)][1:]),
)
""",
    )
    assert found["alone"] == "EINVAL"
    assert found["bind"] == ["EINVAL", "EINVAL"]
    copied = found["copied"]
    assert set(copied["inner"].values()) <= {"EINVAL", "EPERM"}
    assert copied["attached"] == "ok"  # control: the whole may be shown elsewhere, with its masks
    assert copied["keys"] == ""
    assert copied["umount"] == ["EINVAL"] * 3
    assert copied["remount"] == "EPERM"
    assert copied["write"] in ("EACCES", "EROFS")
    assert found["inside"] == ["EINVAL", "EINVAL", "EPERM"]


async def test_file_systems_that_can_be_mounted(box: Sandbox) -> None:
    kinds = (
        "proc sysfs devtmpfs debugfs tracefs securityfs bpf configfs pstore ext4 xfs btrfs erofs "
    )
    kinds += "squashfs vfat iso9660 fuse 9p nfs autofs tmpfs mqueue devpts"
    found = await attack(
        box,
        f"""
def new(kind):
    call("unshare", NEWNS)
    return mount("/etc/hostname", "/mnt/" + kind, kind)
def in_a_new_pid_namespace():
    call("unshare", NEWPID)
    return apart(lambda: mount("none", "/mnt/p", "proc"))
def by_the_new_api():
    fs = call("fsopen", b"proc", 0)
    return trying("fsconfig", fs, 6, 0, 0, 0)
report(kinds={{kind: apart(lambda: new(kind)) for kind in {kinds.split()}}},
       proc=[apart(in_a_new_pid_namespace), apart(by_the_new_api)])
""",
    )
    allowed = {kind for kind, outcome in found["kinds"].items() if outcome == "ok"}
    assert allowed == {"tmpfs", "mqueue", "devpts"}  # each new and empty
    assert set(found["kinds"].values()) <= {"ok", "EPERM", "ENODEV", "EINVAL"}
    assert found["proc"] == ["EPERM", "EPERM"]  # the present proc has masks: none without


async def test_overlays_see_no_lower_of_the_host(box: Sandbox) -> None:
    found = await attack(
        box,
        """
def stacked():
    call("unshare", NEWNS)
    mount("none", "/mnt/s", "tmpfs")
    for name in "uwm":
        os.mkdir("/mnt/s/" + name)
    done = mount("none", "/mnt/s/m", "overlay",
                 data="lowerdir=/etc,upperdir=/mnt/s/u,workdir=/mnt/s/w,userxattr")
    shown = sorted(os.listdir("/mnt/s/m")) == sorted(os.listdir("/etc"))
    return [done, shown, tried(os.mknod, "/mnt/s/m/x", 0o60666, os.makedev(8, 0))]
report(stacked=apart(stacked))
""",
    )
    assert found["stacked"] in (["ok", True, "EPERM"], ["EINVAL", False, "EPERM"])


async def test_roots_cannot_be_left(box: Sandbox) -> None:
    found = await attack(
        box,
        """
def names():
    here = os.stat(".")
    return [here.st_dev, here.st_ino]
def climb():
    os.makedirs("/mnt/jail", exist_ok=True)
    outside = os.open("/", os.O_RDONLY)
    os.chroot("/mnt/jail")
    os.fchdir(outside)
    for _ in range(64):
        os.chdir("..")
    os.chroot(".")
    return names()
def through_a_namespace():
    call("unshare", NEWNS)
    call("setns", os.open("/proc/self/ns/mnt", os.O_RDONLY), NEWNS)
    os.chdir("/..")
    return names()
def pivoted():
    call("unshare", NEWNS)
    mount("none", "/mnt/new", "tmpfs")
    os.mkdir("/mnt/new/old")
    call("pivot_root", b"/mnt/new", b"/mnt/new/old")
    masks = [umount("/old/proc/keys"), umount("/old/proc", DETACH), umount("/", DETACH)]
    os.chdir("/old")
    gone = umount("/old", DETACH)
    os.chdir("/")
    for _ in range(64):
        os.chdir("..")
    return [masks, gone, os.listdir("/") == os.listdir(".") == ["old"]]
os.chdir("/")
report(root=names(), climb=apart(climb), again=apart(through_a_namespace), pivot=apart(pivoted),
       shell=sorted(os.listdir("/")))
""",
    )
    assert found["climb"] == found["root"]
    assert found["again"] == found["root"]
    # a new root is one's own: the locks stay, and nothing lies beneath it
    assert found["pivot"] == [["EINVAL", "EINVAL", "EINVAL"], "ok", True]
    assert "attack" in found["shell"]


@BOTH
async def test_namespaces(box: Sandbox, user: str) -> None:
    found = await attack(
        box,
        """
kinds = dict(user=NEWUSER, net=NEWNET, mnt=NEWNS, pid=NEWPID, ipc=NEWIPC, uts=NEWUTS)
def cloned(flags):
    pid = call("clone", flags | 17, 0, 0, 0, 0)
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return "ok"
own = {n: os.open("/proc/self/ns/" + n, os.O_RDONLY) for n in ("user", "net", "mnt", "pid")}
report(
    unshare={n: apart(lambda: trying("unshare", f)) for n, f in kinds.items()},
    together=apart(lambda: trying("unshare", NEWUSER | NEWNS)),
    clone={n: apart(lambda: cloned(f)) for n, f in kinds.items()},
    clone3=trying("clone3", bytes(88), 88),
    setns={n: apart(lambda: trying("setns", fd, 0)) for n, fd in own.items()},
    init={n: tried(os.open, "/proc/1/ns/" + n, os.O_RDONLY) for n in own},
)
""",
        user,
    )
    closed = {"user": "EPERM", "net": "EPERM"}
    rest = dict.fromkeys(("mnt", "pid", "ipc", "uts"), "ok" if user == "root" else "EPERM")
    assert found["unshare"] == closed | rest
    assert found["clone"] == closed | rest
    assert found["together"] == "EPERM"
    assert found["clone3"] == "ENOSYS"
    assert set(found["init"].values()) == {"ENOENT"}
    assert found["setns"]["user"] == "EINVAL"  # one's own is refused by the kernel itself
    assert found["setns"]["net"] == found["setns"]["pid"] == "EPERM"  # they belong to the host


@BOTH
async def test_devices(box: Sandbox, user: str) -> None:
    found = await attack(
        box,
        """
import stat
where = os.path.expanduser("~/dev")
os.makedirs(where, exist_ok=True)
nodes = {"null": (0o20666, 1, 3), "mem": (0o20666, 1, 1), "kmsg": (0o20666, 1, 11),
         "disk": (0o60666, 8, 0), "loop": (0o60666, 7, 0), "whiteout": (0o20666, 0, 0)}
made = {n: tried(os.mknod, f"{where}/{n}", m, os.makedev(a, b)) for n, (m, a, b) in nodes.items()}
fifo = tried(os.mknod, where + "/fifo", 0o10666)
os.unlink(where + "/fifo")
present = {}
for folder, _, files in os.walk("/dev"):
    for name in files:
        state = os.lstat(os.path.join(folder, name))
        if stat.S_ISCHR(state.st_mode) or stat.S_ISBLK(state.st_mode):
            present[os.path.join(folder, name)] = stat.S_ISBLK(state.st_mode)
report(made=made, fifo=fifo, present=present, new=tried(os.mknod, "/dev/x", 0o10666),
       null=tried(lambda: open("/dev/null", "w").write("x")))
""",
        user,
    )
    assert set(found["made"].values()) == {"EPERM"}
    assert found["fifo"] == "ok"  # control
    known = {f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom", "tty")}
    assert {name for name in found["present"] if not name.startswith("/dev/pts/")} == known
    assert not any(found["present"].values())
    assert found["new"] in ("EROFS", "EACCES")
    assert found["null"] == "ok"


def _busybox(root: Path) -> None:
    for name in ("bin", "proc", "sys", "dev", "tmp", "etc", "root"):
        (root / name).mkdir(parents=True)
    (root / "bin/busybox").write_bytes(Path("/bin/busybox").read_bytes())
    (root / "bin/busybox").chmod(0o755)
    for name in ("sh", "cat", "ls"):
        (root / "bin" / name).symlink_to("busybox")


def _with_devices(root: Path, sink: Sink) -> list[Node]:
    tree, _ = read_directory(root, sink, devices=True)
    return [tree]


async def test_a_device_node_of_a_layer_cannot_be_opened(target: Target) -> None:
    """The import leaves devices out; a layer from elsewhere may hold /dev/mem of mode 0666."""
    root = target.daemon.root / "evil"
    root.mkdir()
    _busybox(root)
    for name, device in (("null", os.makedev(1, 3)), ("mem", os.makedev(1, 1))):
        os.mknod(root / name, 0o20666, device)
        (root / name).chmod(0o666)
    async with open_library(target.daemon.state) as library:
        read = functools.partial(_with_devices, root)
        await library.make("base/evil:1", read, Recipe(kind="base"))
    run = DSecContainerRunArgs(container_image="base/evil:1")
    async with await target.client.run_container(run, timeout=60) as box:
        for name in ("null", "mem"):
            assert (await box.files.get_info(f"/{name}")).type == "char"  # control: it is there
            done = await box.run("cat", f"/{name}")
            assert done.exit_code == 1
            assert "Permission denied" in done.stderr  # EACCES of a nodev mount
        assert (await box.run("cat", "/dev/null")).ok


async def test_links_in_a_layer_do_not_move_masks_away(target: Target) -> None:
    """An image whose /proc or /dev is a link must not end with an unmasked /proc."""
    for name in ("proc", "dev"):
        root = target.daemon.root / f"links-{name}"
        root.mkdir()
        _busybox(root)
        (root / "p").mkdir()
        (root / name).rmdir()
        (root / name).symlink_to("/p")
        await target.client.layers.import_(f"base/links-{name}:1", str(root))
        run = DSecContainerRunArgs(container_image=f"base/links-{name}:1")
        with pytest.raises(DSecError, match=f"step '{name}'"):
            await target.client.run_container(run, timeout=60)
