"""Sandboxes without a daemon: cgroups and network namespaces of our own, from which nothing leaves.

    box (eth0, 10.9.0.2, fd09::2)  <-veth->  world (w0), where every address is local

Both ends have one hardware address and no ARP, so every frame arrives. `Agent` is a process in a
sandbox's cgroup and in `box`.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from dsec_bench import cgroups

from dsecd import fastpath
from dsecd.host import netns, network_tc
from dsecd.host.rtnetlink import Netlink

T = TypeVar("T")
BOX = {4: "10.9.0.2", 6: "fd09::2"}
_MAC = "02:00:00:00:00:09"
_numbers = itertools.count()


class WorldError(Exception):
    """The namespaces or the agent do not work here; the message says why."""


def in_namespace(fd: int, work: Callable[[], T]) -> T:
    """Run `work` in a thread that is in namespace `fd` and ends with it."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            netns.enter(fd)
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return future.result()


def command(fd: int, *words: str, text: str | None = None) -> str:
    """Run a program in namespace `fd` and return its output. Raises WorldError."""
    argv = ["nsenter", f"--net=/proc/self/fd/{fd}", *words]
    done = subprocess.run(
        argv, pass_fds=[fd], capture_output=True, text=True, input=text, check=False
    )
    if done.returncode:
        raise WorldError(f"{' '.join(words)}: {done.stderr.strip()[-400:]}")
    return done.stdout


class Cgroups:
    """A parent that programs are attached to, in the v2 hierarchy, and sandboxes below it."""

    def __init__(self) -> None:
        root = next((path for path in cgroups.hierarchies() if cgroups.is_v2(path)), None)
        if root is None:
            raise WorldError("no cgroup v2 hierarchy is mounted")
        self.path = root / cgroups.own_group() / f"net{next(_numbers)}"
        self.path.mkdir(parents=True)
        self.fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def make(self, name: str) -> int:
        """Make a sandbox's cgroup; its id, which is its inode's number."""
        (self.path / name).mkdir(exist_ok=True)
        return (self.path / name).stat().st_ino

    def procs(self, name: str) -> Path:
        """Return the file that takes the processes of a sandbox."""
        return self.path / name / "cgroup.procs"

    def close(self) -> None:
        os.close(self.fd)
        cgroups.remove(f"{self.path.parent.name}/{self.path.name}")
        with contextlib.suppress(OSError):  # others of this process are there
            self.path.parent.rmdir()


class Wire:
    """The two namespaces and the link between them."""

    def __init__(self) -> None:
        self.box, self.world = fastpath.make_netns(), fastpath.make_netns()
        home = netns.open_current()
        for fd in (self.box, self.world):
            netns.set_sysctls(fd, home)
            command(fd, "ip", "link", "set", "lo", "up")
        os.close(home)
        self._connect()
        self.index = int(command(self.world, "ip", "-o", "link", "show", "w0").split(":")[0])

    def _connect(self) -> None:
        world = f"/proc/{os.getpid()}/fd/{self.world}"
        command(self.box, "ip", "link", "add", "eth0", "address", _MAC, "type", "veth", "peer",
                "name", "w0", "address", _MAC)  # fmt: skip
        move = ["ip", "link", "set", "w0", "netns", world]
        inside = ["nsenter", f"--net=/proc/self/fd/{self.box}", *move]
        subprocess.run(inside, pass_fds=[self.box], check=True)
        for fd, name in ((self.box, "eth0"), (self.world, "w0")):
            command(fd, "ip", "link", "set", name, "arp", "off", "up")
        for version, bits in ((4, 32), (6, 128)):
            own, kind = f"{BOX[version]}/{bits}", f"-{version}"
            command(self.box, "ip", kind, "addr", "add", own, "dev", "eth0",
                    *(["nodad"] if version == 6 else []))  # fmt: skip
            command(self.box, "ip", kind, "route", "add", "default", "dev", "eth0")
            command(self.world, "ip", kind, "route", "add", "local", "default", "dev", "lo")
            command(self.world, "ip", kind, "route", "add", own, "dev", "w0", "table", "local")

    def filter(self, program: int) -> None:
        """Put the program on the world's end."""

        def work() -> None:
            route = Netlink()
            try:
                messages = [network_tc.qdisc(self.index), network_tc.program(self.index, program)]
                first, second = route.request(messages)
            finally:
                route.close()
            if first is not None and first.errno != 17:  # EEXIST: is there from before
                raise first
            if second is not None:
                raise second

        in_namespace(self.world, work)

    def close(self) -> None:
        os.close(self.box)
        os.close(self.world)


class Agent:
    """A process of a sandbox; `agent.NAME(...)` runs that function of its script."""

    def __init__(self, procs: Path, box: int, script: Path) -> None:
        self._process = subprocess.Popen(
            ["nsenter", f"--net=/proc/self/fd/{box}", sys.executable, "-I", str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[box],
            text=True,
        )
        procs.write_text(str(self._process.pid))

    def __getattr__(self, name: str) -> Any:
        def run(*arguments: Any) -> Any:
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            self._process.stdin.write(json.dumps([name, arguments]) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
            if not answer:
                raise WorldError(f"the process in the sandbox ended at {name}")
            return json.loads(answer)

        return run

    def close(self) -> None:
        if self._process.returncode is None:
            self._process.communicate()
        if self._process.returncode:
            raise WorldError(f"the process in the sandbox ended with {self._process.returncode}")
