"""A real dsecd under a prefix of its own: process, paths, cgroup name, uid range, addresses, layer.

`daemon()` is a context manager for one test. The base layer is busybox (static) and a few files, so
that a test needs no network and an import takes milliseconds; tests of real software use a Debian
layer of their own.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psutil

from libdsec import model
from libdsec.errors import Unavailable
from tests.system import known_dsecd
from tests.waiting import until as until
from tests.wire_client import WireClient

IMAGE = "base/busybox:1"
START_TIMEOUT_S = 20.0 * float(os.environ.get("DSEC_TEST_PATIENCE", "1"))  # slow guests
_REPOSITORY = Path(__file__).parents[2]
_numbers = itertools.count()


def make_rootfs(root: Path) -> None:
    """Make a tree with busybox as every command, root and one user."""
    for name in (
        "bin",
        "etc",
        "proc",
        "sys",
        "dev",
        "tmp",
        "root",
        "home/agent",
        "var/tmp",
        "usr/bin",
    ):
        (root / name).mkdir(parents=True)
    for name in ("tmp", "var/tmp"):
        (root / name).chmod(0o1777)
    shutil.copy("/bin/busybox", root / "bin/busybox")
    listed = subprocess.run(["/bin/busybox", "--list"], capture_output=True, text=True, check=True)
    for applet in listed.stdout.split():
        if applet != "busybox":
            (root / "bin" / applet).symlink_to("busybox")
    passwd = "root:x:0:0:root:/root:/bin/sh\nagent:x:1000:1000::/home/agent:/bin/sh\n"
    (root / "etc/passwd").write_text(passwd)
    (root / "etc/group").write_text("root:x:0:\nagent:x:1000:\n")
    os.chown(root / "home/agent", 1000, 1000)


class Daemon:
    """One prefix; any number of daemon lives in it, one at a time."""

    def __init__(self, overrides: dict[str, dict[str, object]] | None = None) -> None:
        number = next(_numbers)
        self.name = f"dsec-test-{os.getpid()}-{number}"
        self.root = Path("/var/tmp") / self.name
        self.process: subprocess.Popen[bytes] | None = None
        self.netns: int | None = None  # to start it in, for one that shall not see the host's
        self.config_file = self.root / "dsecd.toml"
        self.runtime, self.state = self.root / "run", self.root / "lib"
        self.socket = self.runtime / "dsecd.sock"
        self.log_file = self.root / "log"
        self.clients: list[WireClient] = []
        self._write_config(number, overrides or {})
        self._environment = known_dsecd.tell(self.root / "probe.json")

    def _write_config(self, number: int, overrides: dict[str, dict[str, object]]) -> None:
        self.root.mkdir(mode=0o755)
        lane = (os.getpid() * 4 + number) % 12
        sections: dict[str, dict[str, object]] = {
            "paths": {"runtime": str(self.runtime), "state": str(self.state)},
            "cgroup": {"name": self.name},
            "log": {"format": "json", "level": "info"},
            "pools": {
                "spawners": 2, "netns": 4, "slots": 4, "ranges": 4,
                # below 2^31, the end of ping_group_range
                "uid_range_start": 0x20000000 + lane * 0x08000000, "uid_range_count": 2048,
            },
            "network": {
                "pool4": f"10.{100 + lane}.0.0/20", "pool6": f"fd5d:ec:{lane + 1:x}::/64",
                "resolvers": ["192.0.2.53"],
            },
            "limits": {"disk_headroom_mb": 64, "unclaimed_grace_s": 1.0},
            # swap belongs to the whole host: only tests of it make any
            "reclaim": {"swap": "off"},
        }  # fmt: skip
        binaries = os.environ.get("DSEC_TEST_BINARIES")  # a directory, e.g. of sanitised builds
        for program in ("spawner", "init") if binaries else ():
            sections["paths"][program] = f"{binaries}/dsec-{program}"
        for section, values in overrides.items():
            sections.setdefault(section, {}).update(values)
        lines = ['node = "t0"']
        for section, values in sections.items():
            lines.append(f"[{section}]")
            lines += [f"{key} = {_toml(value)}" for key, value in values.items()]
        self.config_file.write_text("\n".join(lines) + "\n")

    # --- life

    async def start(self, crash_at: str = "", keep: bool = False) -> None:
        """Start dsecd and wait until it answers. `crash_at`: kill -9 itself at that step."""
        self._launch(crash_at, keep)
        assert self.process is not None
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            with contextlib.suppress(OSError, Unavailable):
                client = await WireClient.connect(self.socket)
                await client.close()
                return
            if self.process.poll() is not None:
                raise AssertionError(f"dsecd ended at start:\n{self.log()}")
            assert time.monotonic() < deadline, f"dsecd does not answer:\n{self.log()}"
            await asyncio.sleep(0.005)

    def _launch(self, crash_at: str, keep: bool) -> None:
        program = ["known_dsecd"] if not crash_at else ["crashing_dsecd", crash_at]
        program[0] = f"tests.system.{program[0]}"
        arguments = [sys.executable, "-m", *program, "--config", str(self.config_file)]
        passed: tuple[int, ...] = ()
        if self.netns is not None:
            arguments = ["nsenter", f"--net=/proc/self/fd/{self.netns}", *arguments]
            passed = (self.netns,)
        with self.log_file.open("ab") as log:
            self.process = subprocess.Popen(
                [*arguments, *(["--keep"] if keep else [])],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=_REPOSITORY,
                start_new_session=True, pass_fds=passed, env=self._environment,
            )  # fmt: skip

    async def import_base(self) -> None:
        """Make the base layer, once per prefix."""
        rootfs = self.root / "rootfs"
        make_rootfs(rootfs)
        client = await self.client()
        await client.call("layer.import", model.LayerImport(name=IMAGE, source=str(rootfs)))

    async def client(self) -> WireClient:
        client = await WireClient.connect(self.socket)
        self.clients.append(client)
        return client

    def kill(self) -> None:
        """kill -9, as the kernel or an operator would."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    async def end(self, number: int = signal.SIGTERM, timeout_s: float = 60.0) -> int:
        """Send a signal and wait for the end; returns the exit code."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(number)
        return await asyncio.to_thread(self.process.wait, timeout_s)

    async def restart(self) -> None:
        self.kill()
        await self.start()

    async def close(self) -> None:
        """End everything and remove the prefix."""
        for client in self.clients:
            await client.close()
        if self.process is not None and self.process.poll() is not None:
            # the last test step killed it: its left-overs are the next daemon's to clean
            await self.start()
        if self.process is not None:
            code = await self.end()
            assert code == 0, f"dsecd ended with {code}:\n{self.log()}"
        shutil.rmtree(self.root)

    # --- looks

    def log(self) -> str:
        return self.log_file.read_text(errors="replace") if self.log_file.exists() else ""

    def memory_bytes(self) -> int:
        """Resident memory of the daemon itself."""
        assert self.process is not None
        return int(psutil.Process(self.process.pid).memory_info().rss)

    def open_files(self) -> int:
        assert self.process is not None
        return len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))

    def cgroups(self) -> list[str]:
        """Sandbox directories in the v2 tree."""
        for base in ("/sys/fs/cgroup/unified", "/sys/fs/cgroup"):
            parent = Path(base) / self.name
            if parent.is_dir() and Path(base, "cgroup.controllers").exists():
                return sorted(entry.name for entry in parent.iterdir() if entry.is_dir())
        return []

    def pids_of(self, sandbox: str) -> list[int]:
        for base in ("/sys/fs/cgroup/unified", "/sys/fs/cgroup"):
            found = Path(base) / self.name / sandbox
            if found.is_dir():
                return list(_pids_below(found))
        return []

    def remains(self) -> list[str]:
        """What sandboxes left in places that only sandboxes use."""
        found = [f"cgroup {name}" for name in self.cgroups()]
        if (self.runtime / "sb").is_dir():
            found += [str(entry) for entry in (self.runtime / "sb").iterdir()]
        return found


def _pids_below(group: Path) -> Iterator[int]:
    with contextlib.suppress(OSError):  # ENOENT, ENODEV: that of a command which has just ended
        yield from map(int, (group / "cgroup.procs").read_text().split())
        for entry in os.scandir(group):
            if entry.is_dir():
                yield from _pids_below(Path(entry))


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_toml(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return f'"{value}"' if isinstance(value, str) else str(value)


@contextlib.asynccontextmanager
async def daemon(
    base: bool = True, netns: int | None = None, **overrides: dict[str, object]
) -> AsyncIterator[Daemon]:
    """A running daemon with the base layer; sections of the configuration as keywords."""
    made = Daemon(overrides)
    made.netns = netns
    try:
        await made.start()
        if base:
            await made.import_base()
        yield made
    except BaseException:
        sys.stderr.write(made.log()[-6000:])
        raise
    finally:
        await made.close()
