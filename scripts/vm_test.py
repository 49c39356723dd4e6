"""What scripts/vm-test runs: boot a guest, run one command in it, end with its exit status.

Debian's kernel package is fetched once and unpacked into a cache; nothing is installed. Tests of
core scheduling have a guest of their own, with the kernel of microVMs and SMT siblings. The RAM
disk is made here: busybox, the few modules that reach the root, a script. The host's / is shared by
9p; what the guest changes is gone with it. /tmp, /var/tmp and /var/lib/dsec are on a disk of its
own, for EROFS images must lie on a disk file system. The disk starts with a Debian layer, which the
stores of tests link: to copy it from the host takes a minute. Output comes through a console of its
own, so that messages of the kernel do not mix with it; those are shown when the guest dies.
"""

from __future__ import annotations

import argparse
import contextlib
import lzma
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from dsecd.host.probe import REQUIRED
from dsecd.images import cpio

# What this kernel has: a skip for one of them is a failure
PROVIDED = (
    *REQUIRED, "nftables", "veth", "bpf_cgroup", "bpf_fs", "bpf_lsm", "apparmor", "landlock",
)  # fmt: skip
SMT_PROVIDED = (*REQUIRED, "core_scheduling")
META_PACKAGE = "linux-image-6.12-amd64"
CACHE = Path("/var/cache/dsec-vm")
GUEST_KERNEL = "/var/cache/dsec-guest/kernel-for-tests"  # where scripts/test has it built
CHECKOUT = Path(__file__).parents[1]
LAYERS = "/var/tmp/dsec-tests"  # in the guest: DSEC_TEST_CACHE
MODULES = ("9p", "9pnet_virtio", "overlay", "virtio_blk", "crc32c_generic", "ext4", "virtio_rng")
COMMAND_LINE = (
    "console=ttyS0 quiet loglevel=4 panic=-1 no_timer_check random.trust_cpu=on mitigations=off "
    "nokaslr init_on_alloc=0 rcupdate.rcu_expedited=1 swiotlb=noforce "
    "lsm=landlock,yama,apparmor,bpf"
)
# Without cx16 off, kernels from 6.12 on now and then fail to boot under TCG.
# One CPU: with several, one may run code that another has just replaced. The kernel does that when
# a BPF program is attached, and then dies of a breakpoint that it has taken back. That of microVMs
# replaces none.
CPU = ["-cpu", "max,-cx16", "-smp", "1"]
# SMT siblings are seen with an Intel model only; TCG lacks some of it, which `check` would tell
SMT_CPU = ["-cpu", "Skylake-Client-v1,-cx16,check=off", "-smp", "4,sockets=1,cores=2,threads=2"]
EXIT = "vm-test: exit "
NO_TESTS = 5  # pytest's status when none was selected
START = r"""#!/bin/busybox sh
b=/bin/busybox
$b mount -t proc proc /proc
$b mount -t sysfs sysfs /sys
$b mount -t devtmpfs devtmpfs /dev
for module in {modules}; do $b insmod /modules/$module; done
share=trans=virtio,version=9p2000.L,cache=loose,msize=512000,ro
$b mkdir /host /memory /new
$b mount -t 9p -o $share host /host
$b mount -t tmpfs -o size=60% tmpfs /memory
$b mkdir /memory/upper /memory/work
$b mount -t overlay -o lowerdir=/host,upperdir=/memory/upper,workdir=/memory/work overlay /new
$b mkdir -p /new/run /new/lib/modules /new/disk
$b mount -t proc proc /new/proc
$b mount -t sysfs sysfs /new/sys
$b mount -t devtmpfs devtmpfs /new/dev
$b mkdir -p /new/dev/pts /new/dev/shm
$b mount -t devpts devpts /new/dev/pts
$b mount -t tmpfs tmpfs /new/dev/shm
$b mount -t tmpfs tmpfs /new/run
[ ! -e /proc/modules ] || $b mount -t 9p -o $share modules /new/lib/modules
$b mount -t cgroup2 cgroup2 /new/sys/fs/cgroup
$b mount -t bpf bpf /new/sys/fs/bpf
$b mount -t securityfs securityfs /new/sys/kernel/security
$b mount -t ext4 /dev/vda /new/disk
$b ip link set lo up
$b cp /command /new/run/command
exec $b switch_root /new /bin/bash /run/command
"""
COMMAND = r"""
exec </dev/null >/dev/hvc0 2>&1
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8
export DSEC_TEST_CACHE={layers}
mkdir /run/checkout
mount --bind {checkout} /run/checkout  # it may lie in a place that is about to be covered
for place in /tmp /var/tmp /var/lib/dsec; do
  mkdir -p "$place" "/disk$place"
  chmod 1777 "/disk$place"
  mount --bind "/disk$place" "$place"
done
mkdir -p {checkout}
mount --bind /run/checkout {checkout}
[ ! -e /proc/modules ] || modprobe -a erofs loop btrfs zram
cd {checkout}
( {command} )
echo "{exit}$?"
echo o >/proc/sysrq-trigger
sleep 60
"""


class Failed(Exception):
    """The guest cannot be made or did not answer; the message says why."""


@dataclass(frozen=True)
class Kernel:
    """What a guest boots, and on which CPUs; without `modules` all of it is built in."""

    release: str
    image: Path
    modules: Path | None
    cpu: list[str]

    @classmethod
    def unpacked(cls, tree: Path) -> Kernel:
        """Return that of a package."""
        modules = tree / "lib/modules"
        release = next(modules.iterdir()).name
        return cls(release, tree / f"boot/vmlinuz-{release}", modules, CPU)

    def loading_order(self, names: Sequence[str]) -> list[Path]:
        """Return the files of `names` and of what they need, each after what it needs."""
        if self.modules is None:
            return []
        folder = self.modules / self.release
        needs: dict[str, list[str]] = {}
        for line in (folder / "modules.dep").read_text().splitlines():
            file, _, others = line.partition(":")
            needs[Path(file).name.partition(".")[0]] = [*reversed(others.split()), file]
        found: dict[str, None] = {}
        for name in names:
            found.update(dict.fromkeys(needs.get(name, ())))  # absent: built in
        return [folder / file for file in found]


def fetch_kernel() -> Kernel:
    """Return the kernel of the newest package that apt knows, from the cache if it is there."""
    shown = _output("apt-cache", "depends", META_PACKAGE)
    names = [line.split()[-1] for line in shown.splitlines() if "Depends: linux-image-" in line]
    if not names:
        raise Failed(f"apt knows no {META_PACKAGE}; run apt-get update")
    tree = CACHE / names[0]
    if not tree.exists():
        print(f"vm-test: fetching {names[0]}", flush=True)
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
            _output("apt-get", "download", "-qq", names[0], cwd=scratch)
            package = next(Path(scratch).glob("*.deb"))
            _output("dpkg-deb", "-x", str(package), f"{scratch}/tree")
            _output("depmod", "-b", f"{scratch}/tree", names[0].removeprefix("linux-image-"))
            with contextlib.suppress(OSError):  # another run was faster
                (Path(scratch) / "tree").rename(tree)
    return Kernel.unpacked(tree)


def microvm_kernel() -> Kernel:
    """Return that of microVMs, which schedules by cores; Debian's are built without."""
    image = Path(os.environ.get("DSEC_GUEST_KERNEL", GUEST_KERNEL))
    if not image.is_file():
        raise Failed(f"no {image}: scripts/build-guest --output {image} makes it")
    return Kernel(str(image), image, None, SMT_CPU)


def _output(*command: str, cwd: str | None = None) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Failed(f"{shlex.join(command)} failed: {done.stderr.strip()[-500:]}")
    return done.stdout


def ram_disk(kernel: Kernel, command: str) -> bytes:
    """Return the archive that the guest starts from."""
    modules = kernel.loading_order(MODULES)
    start = START.replace("{modules}", " ".join(path.name.removesuffix(".xz") for path in modules))
    script = COMMAND.replace("{command}", command).replace("{exit}", EXIT)
    script = script.replace("{checkout}", shlex.quote(str(CHECKOUT)))
    script = script.replace("{layers}", LAYERS)
    entries = [cpio.directory(name) for name in ("bin", "dev", "modules", "proc", "sys")]
    entries.append(cpio.file("bin/busybox", Path("/bin/busybox").read_bytes(), 0o755))
    entries += [cpio.file("init", start.encode(), 0o755), cpio.file("command", script.encode())]
    for path in modules:
        data = path.read_bytes()
        if path.suffix == ".xz":
            data = lzma.decompress(data)
        entries.append(cpio.file(f"modules/{path.name.removesuffix('.xz')}", data))
    return cpio.archive(entries)


def qemu(kernel: Kernel, scratch: Path, memory_mb: int) -> list[str]:
    """Return the command; files of the guest are in `scratch`."""
    argv = ["qemu-system-x86_64", "-accel", "tcg,thread=multi", "-machine", "q35"]
    argv += ["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"]
    argv += [*kernel.cpu, "-m", str(memory_mb)]
    argv += ["-kernel", str(kernel.image), "-initrd", str(scratch / "initrd")]
    argv += ["-append", COMMAND_LINE, "-serial", f"file:{scratch / 'console'}"]
    argv += ["-device", "virtio-serial-pci", "-chardev", "stdio,id=out"]
    argv += ["-device", "virtconsole,chardev=out", "-device", "virtio-rng-pci"]
    shares = {"host": "/"}
    if kernel.modules is not None:
        shares["modules"] = str(kernel.modules)
    for tag, path in shares.items():
        shared = f"local,id={tag},path={path},security_model=none,readonly=on,multidevs=remap"
        argv += ["-fsdev", shared, "-device", f"virtio-9p-pci,fsdev={tag},mount_tag={tag}"]
    drive = f"file={scratch / 'disk'},if=none,id=disk,format=raw,cache=unsafe"
    return [*argv, "-drive", drive, "-device", "virtio-blk-pci,drive=disk"]


@contextlib.contextmanager
def prepared(kernel: Kernel, command: str) -> Iterator[Path]:
    """Yield a directory with the guest's RAM disk, and its disk with the small Debian layer."""
    with tempfile.TemporaryDirectory(prefix="vm-test-", dir="/var/tmp") as name:
        scratch = Path(name)
        (scratch / "initrd").write_bytes(ram_disk(kernel, command))
        tree, disk = scratch / "tree", scratch / "disk"
        lend = ("-m", "tests.system.compat.debian", f"{tree}{LAYERS}")
        _output(sys.executable, *lend, cwd=str(CHECKOUT))
        disk.touch()
        os.truncate(disk, 8 << 30)
        _output("mkfs.ext4", "-q", "-O", "^has_journal", "-d", str(tree), str(disk))
        yield scratch


def run(kernel: Kernel, command: str, memory_mb: int, timeout_s: float) -> int:
    """Run `command` in a guest; return its exit status. Raises `Failed`."""
    print(f"vm-test: booting {kernel.release}", flush=True)
    with prepared(kernel, command) as scratch:
        guest = subprocess.Popen(
            qemu(kernel, scratch, memory_mb),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        timer = threading.Timer(timeout_s, guest.kill)
        timer.start()
        try:
            status = _follow(guest)
        finally:
            timer.cancel()
            guest.kill()
            guest.wait()
        if status is None:
            console = (scratch / "console").read_text(errors="replace")
            raise Failed(f"the guest ended, or took over {timeout_s:.0f} s\n{console[-4000:]}")
        return status


def _follow(guest: subprocess.Popen[str]) -> int | None:
    """Pass on what the guest prints; return the status that it prints last."""
    assert guest.stdout is not None
    for line in guest.stdout:
        if line.startswith(EXIT):
            return int(line.removeprefix(EXIT))
        print(line.rstrip("\r\n"), flush=True)
    return None


def _bytecode(tests: Sequence[str]) -> str:
    """Return the setting with which the guest finds the host's bytecode, brought up to date here.

    To compile it there takes minutes, most of them for the assertions that pytest rewrites. What is
    wrong with a test, the guest says.
    """
    place = os.environ.get("PYTHONPYCACHEPREFIX")
    if place is None:
        return ""
    collect = (sys.executable, "-m", "pytest", *tests, "--collect-only", "--quiet")
    subprocess.run(collect, cwd=CHECKOUT, stdout=subprocess.DEVNULL, check=False)
    return f"PYTHONPYCACHEPREFIX={shlex.quote(place)} "


@dataclass(frozen=True)
class Suite:
    """Tests with a mark, what their guest boots, and which features it must have."""

    mark: str
    kernel: Callable[[], Kernel]
    provided: tuple[str, ...]

    def files(self) -> list[str]:
        """Return those with such tests: collecting all of them in a guest takes minutes."""
        files = sorted((CHECKOUT / "tests").rglob("test_*.py"))
        marked = [file for file in files if re.search(rf"mark\.{self.mark}\b", file.read_text())]
        return [str(file.relative_to(CHECKOUT)) for file in marked]

    def command(self, arguments: Sequence[str]) -> str:
        """Return what runs them; a later -m takes the place of the mark."""
        tests = ["-m", self.mark, "-p", "no:cacheprovider", "-o", "timeout=600", *arguments]
        environment = f"DSEC_MUST_RUN={','.join(self.provided)} DSEC_TEST_GUEST=1"
        environment += " DSEC_TEST_PATIENCE=15"
        return f"{environment} {_bytecode(tests)}.venv/bin/python -m pytest {shlex.join(tests)}"


DEBIAN = Suite("vm", fetch_kernel, PROVIDED)
SMT = Suite("smt", microvm_kernel, SMT_PROVIDED)


def main() -> int:
    parser = argparse.ArgumentParser(prog="vm-test")
    parser.add_argument("--run", metavar="COMMAND")
    parser.add_argument("--smt", action="store_true")
    parser.add_argument("--memory-mb", type=int, default=4096)
    parser.add_argument("--timeout-s", type=float, default=4500.0)
    options, rest = parser.parse_known_args()
    if os.geteuid() != 0:
        parser.error("needs root: it shares this host's / with the guest")
    if shutil.which("qemu-system-x86_64") is None:
        parser.error("qemu-system-x86 is missing")
    named = any(word.startswith("tests") for word in rest)
    suites = [SMT] if options.smt else [DEBIAN] if options.run or named else [DEBIAN, SMT]
    # ended from outside, it takes the guest and its files along
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    statuses = set()
    try:
        for suite in suites:
            command = options.run or suite.command(rest if named else [*rest, *suite.files()])
            statuses.add(run(suite.kernel(), command, options.memory_mb, options.timeout_s))
    except Failed as error:
        print(f"vm-test: {error}", file=sys.stderr)
        return 1
    return max(statuses - {NO_TESTS}, default=NO_TESTS)


if __name__ == "__main__":
    sys.exit(main())
