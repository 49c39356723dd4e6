"""Sandboxes for the tests of network policy: cgroups and network namespaces of our own.

    box (eth0, 10.9.0.2, fd09::2)  <-veth->  world (w0), where every address is local

Both ends have one hardware address and no ARP, so every frame arrives. `Agent` is a process in a
sandbox's cgroup and in `box`.
"""

from __future__ import annotations

import contextlib
import ipaddress
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dsecd import fastpath
from dsecd.host import netns, network_tc
from dsecd.host.netpolicy import Access, NetworkPolicies, sandbox_level
from dsecd.host.rtnetlink import Netlink
from dsecd.policy.rules import NetPolicy, NetRule, Protocol, Verdict
from dsecd.policy.table import compile_table
from tests.system.network_lab import command, in_namespace

BOX = {4: "10.9.0.2", 6: "fd09::2"}
_numbers = itertools.count()
_MAC = "02:00:00:00:00:09"
_AGENT = Path(__file__).with_name("netpolicy_agent.py")


def rule(
    verdict: Verdict, prefix: str, first: int = 0, last: int | None = None, kind: Protocol = "any"
) -> NetRule:
    """Return a rule; one port when only the first is given."""
    return NetRule(
        verdict=verdict,
        protocol=kind,
        prefix=ipaddress.ip_network(prefix),
        first_port=first,
        last_port=65535 if kind in ("any", "icmp") else first if last is None else last,
    )


def access(*rules: NetRule, default: Verdict = "deny", **more: Any) -> Access:
    return Access(table=compile_table(NetPolicy(rules=rules, default=default)), **more)


def v2_root() -> Path:
    """Return where the v2 hierarchy is mounted."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields = line.split(" ")
        if fields[fields.index("-") + 1] == "cgroup2":
            return Path(fields[4])
    raise AssertionError("no cgroup2 is mounted")


class Cgroups:
    """The parent that the programs are attached to, and directories below it."""

    def __init__(self) -> None:
        self.path = v2_root() / f"dsec-test-net-{os.getpid()}-{next(_numbers)}"
        self.path.mkdir()
        self.fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def make(self, name: str) -> int:
        """Make a sandbox's cgroup; its id, which is its inode's number."""
        (self.path / name).mkdir(exist_ok=True)
        return (self.path / name).stat().st_ino

    def close(self) -> None:
        os.close(self.fd)
        for path in (*self.path.iterdir(), self.path):
            deadline = time.monotonic() + 5
            while path.is_dir():
                try:
                    path.rmdir()
                except OSError:
                    assert time.monotonic() < deadline, f"{path} stays busy"
                    time.sleep(0.01)


class Wire:
    """The two namespaces and the program on the world's end."""

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
                assert first is None or first.errno == 17, first
                assert second is None, second
            finally:
                route.close()

        in_namespace(self.world, work)

    def close(self) -> None:
        os.close(self.box)
        os.close(self.world)


class Agent:
    """A process of a sandbox; `agent.calls(...)` and so on are functions of netpolicy_agent."""

    def __init__(self, cgroup: Path, box: int) -> None:
        self._process = subprocess.Popen(
            ["nsenter", f"--net=/proc/self/fd/{box}", sys.executable, "-I", str(_AGENT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[box],
            text=True,
        )
        (cgroup / "cgroup.procs").write_text(str(self._process.pid))

    def __getattr__(self, name: str) -> Any:
        def run(*arguments: Any) -> Any:
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            self._process.stdin.write(json.dumps([name, arguments]) + "\n")
            self._process.stdin.flush()
            return json.loads(self._process.stdout.readline())

        return run

    def close(self) -> None:
        if self._process.returncode is None:
            self._process.communicate()
        assert self._process.returncode == 0


class Lab:
    """One sandbox that is bound to nothing yet, with its agent."""

    def __init__(self, pins: Path | None = None, **options: Any) -> None:
        with contextlib.ExitStack() as undo:
            self.cgroups = undo.enter_context(contextlib.closing(Cgroups()))
            self.wire = undo.enter_context(contextlib.closing(Wire()))
            level = sandbox_level(self.cgroups.path)
            self.policies = NetworkPolicies(self.cgroups.fd, level=level, pins=pins, **options)
            undo.callback(lambda: self.policies.close(remove=True))
            self.policies.start()
            self.cgroup = self.cgroups.make("box")
            self.agent = undo.enter_context(
                contextlib.closing(Agent(self.cgroups.path / "box", self.wire.box))
            )
            self._undo = undo.pop_all()

    def close(self) -> None:
        self._undo.close()


@contextlib.contextmanager
def lab(**options: Any) -> Iterator[Lab]:
    with contextlib.closing(Lab(**options)) as made:
        yield made
