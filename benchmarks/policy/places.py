"""Where the instrument measures: under no policy, under ours, behind a table of nftables."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dsec_bench.policy import rules
from dsec_bench.policy.world import Cgroups, Wire, WorldError, command
from dsec_bench.toolchain import compile_c

from dsecd.host.netpolicy import NetworkPolicies, sandbox_level

COUNTS = (1, 1000, 10_000)
NO_POLICY, OURS, NFT = "no policy", "dsec", "nftables"
_FIRST_ID = 10**12  # of cgroups that are not there


@dataclass(frozen=True, slots=True)
class Place:
    """A cgroup and a pair of namespaces; `policies` is how many are in force beside its own."""

    kind: str
    policies: int
    procs: Path
    wire: Wire

    @property
    def name(self) -> str:
        return f"{self.kind}, {self.policies:,}" if self.policies else self.kind


class Instrument:
    """benchmarks/calls.c as a process, which goes from place to place."""

    def __init__(self, outside: Path, wires: list[Wire]) -> None:
        self._process = subprocess.Popen(
            [compile_c("calls.c", "-pthread"), str(outside)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=[fd for wire in wires for fd in (wire.box, wire.world)],
        )

    def ask(self, *words: object) -> float:
        """Return the answer to a command, nanoseconds. Raises WorldError."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(" ".join(map(str, words)) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise WorldError(f"calls ended with {self._process.wait()} at {words[0]}")
        return float(answer)

    def enter(self, place: Place) -> None:
        self.ask("enter", place.procs, place.wire.box, place.wire.world)

    def close(self) -> None:
        self._process.communicate()


def filled(groups: Cgroups, count: int) -> NetworkPolicies:
    """Return what enforces `count` different policies below `groups`, those of others included."""
    policies = NetworkPolicies(groups.fd, level=sandbox_level(groups.path), pins=None)
    policies.start()
    for number in range(count - 1):
        policies.bind(_FIRST_ID + number, rules.access(number))
    return policies


@contextlib.contextmanager
def outside() -> Iterator[Cgroups]:
    """Yield a cgroup "free" for which no program runs."""
    with contextlib.closing(Cgroups()) as groups:
        groups.make("free")
        yield groups


@contextlib.contextmanager
def ours(count: int) -> Iterator[Place]:
    """Yield a sandbox among `count`, judged by the programs of its cgroup and of its link."""
    with contextlib.ExitStack() as undo:
        groups = undo.enter_context(contextlib.closing(Cgroups()))
        wire = undo.enter_context(contextlib.closing(Wire()))
        box = groups.make("box")
        policies = filled(groups, count)
        undo.callback(policies.close)
        policies.bind(box, rules.access(count - 1))
        policies.bind_link(box, wire.index)
        wire.filter(policies.link_program)
        yield Place(OURS, count, groups.procs("box"), wire)


@contextlib.contextmanager
def nftables(count: int, free: Cgroups) -> Iterator[Place]:
    """Yield a sandbox whose interface is one of `count` in the table of the other end."""
    with contextlib.closing(Wire()) as wire:
        names = [*(f"ds{number}" for number in range(count - 1)), "w0"]
        command(wire.world, "nft", "-f", "-", text=rules.ruleset(names))
        yield Place(NFT, count, free.procs("free"), wire)


@contextlib.contextmanager
def bare(free: Cgroups) -> Iterator[Place]:
    """Yield a sandbox without policy."""
    with contextlib.closing(Wire()) as wire:
        yield Place(NO_POLICY, 0, free.procs("free"), wire)
