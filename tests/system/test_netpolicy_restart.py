"""The network stays closed when the daemon is killed, and through the start of the next one."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsecd import fastpath
from dsecd.host import bpf, syscalls
from dsecd.host.netpolicy import NetworkPolicies, sandbox_level
from tests.system.netpolicy_lab import Cgroups, Lab, access, lab, rule
from tests.system.network_lab import listen
from tests.system.test_netpolicy import LATER_NS, ip, opening

pytestmark = [pytest.mark.root, pytest.mark.needs("bpf_cgroup", "veth")]
DENIED = errno.EPERM
WEB = access(rule("allow", "192.0.2.1/32", 80, kind="tcp"))
GOOD = ("connect", "tcp", "192.0.2.1", 80)
NAMED = ("connect", "tcp", "192.0.2.7", 443)
BAD = ("connect", "tcp", "192.0.2.1", 81)


@pytest.fixture
def pins(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "bpf"
    bpf.ensure_bpf_fs(place)
    bpf.ensure_bpf_fs(place)  # it is there: nothing is mounted on top
    directory = place / "dsec-test"
    directory.mkdir()
    try:
        yield directory
        assert list(directory.iterdir()) == []  # a clean stop leaves no pin
    finally:
        syscalls.umount(str(place))
    assert not bpf.is_bpf_fs(place)


@pytest.fixture
def box(pins: Path) -> Iterator[Lab]:
    with lab(pins=pins) as made:
        made.policies.bind(made.cgroup, WEB)
        made.policies.admit(made.cgroup, ip("192.0.2.7"), opening("a", "tcp", 443, 443, LATER_NS))
        yield made


def again(box: Lab, pins: Path, **options: int) -> None:
    """Let the daemon of `box` go and make the next."""
    box.policies.close()
    level = sandbox_level(box.cgroups.path)
    box.policies = NetworkPolicies(box.cgroups.fd, level=level, pins=pins, **options)  # type: ignore[arg-type]


def test_the_next_daemon_takes_over_what_runs(box: Lab, pins: Path) -> None:
    server = listen(box.wire.world, "192.0.2.7", 443)
    stranger = box.cgroups.make("stranger")
    try:
        box.policies.bind(stranger, access(rule("allow", "10.0.0.0/8")))
        box.policies.bind_link(stranger, 4711)
        assert box.agent.hold("c", "192.0.2.7", 443) == 0
        peer = server.accept()[0]
        again(box, pins)
        assert box.policies.programs.adopted
        assert box.agent.calls([GOOD, NAMED, BAD]) == [0, 0, DENIED]  # before it knows anything
        box.policies.bind(box.cgroup, WEB, box.policies.earlier_openings(box.cgroup))
        box.policies.start()
        assert box.agent.calls([GOOD, NAMED, BAD]) == [0, 0, DENIED]
        peer.sendall(b"y")
        assert box.agent.exchange("c") == "y"
        assert len(box.policies._bindings.all_keys()) == 1  # the stranger was not bound again
        assert len(box.policies._names.all_keys()) == 1
        assert len(box.policies._rules.all_keys()) == len(WEB.table.rows)
        assert box.policies._links.all_keys() == []
        peer.close()
    finally:
        server.close()
        box.agent.drop_all()


def test_other_programs_replace_the_old_without_a_gap(box: Lab, pins: Path) -> None:
    before = {path.name for path in pins.iterdir()}
    again(box, pins, events_per_s=65)  # other constants, as other programs would be
    assert not box.policies.programs.adopted
    assert box.agent.calls([GOOD, BAD]) == [0, DENIED]  # the old ones are attached
    box.policies.bind(box.cgroup, WEB)
    box.policies.start()
    assert box.agent.calls([GOOD, NAMED, BAD]) == [0, DENIED, DENIED]
    after = {path.name for path in pins.iterdir()}
    assert len(before) == len(after) == 1
    assert before != after


def test_a_half_made_directory_of_pins_is_made_again(box: Lab, pins: Path) -> None:
    (made,) = pins.iterdir()
    made.rename(
        made.with_name(f"{made.name}-part")
    )  # as a daemon leaves it that dies while it pins
    again(box, pins)
    assert not box.policies.programs.adopted
    box.policies.bind(box.cgroup, WEB)
    box.policies.start()
    assert box.agent.calls([GOOD, BAD]) == [0, DENIED]
    assert [path.name for path in pins.iterdir()] == [made.name]


def test_pins_of_a_cgroup_that_was_made_anew_are_not_taken_over(box: Lab, pins: Path) -> None:
    box.agent.close()
    box.policies.close()
    (before,) = pins.iterdir()
    fresh = Cgroups()  # another directory, as one of the same name after rmdir(2) would be
    try:
        policies = NetworkPolicies(fresh.fd, level=sandbox_level(fresh.path), pins=pins)
        assert not policies.programs.adopted
        policies.start()
        (after,) = pins.iterdir()
        assert before == after
        link = bpf.open_pin(after / "at_egress")
        assert bpf.linked_cgroup(link) == fresh.path.stat().st_ino
        os.close(link)
    finally:
        box.policies = policies
        fresh.close()


_DAEMON = """
import os, sys, time
from pathlib import Path
from dsecd.host.netpolicy import NetworkPolicies
from tests.system.netpolicy_lab import access, rule
level, pins, parent, cgroup = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
parent_fd = os.open(parent, os.O_RDONLY)
policies = NetworkPolicies(parent_fd, level=level, pins=pins)
policies.bind(cgroup, access(rule("allow", "192.0.2.1/32", 82, kind="tcp")))
policies.start()
print("ready", flush=True)
time.sleep(600)
"""


def test_a_killed_daemon_opens_nothing(box: Lab, pins: Path) -> None:
    box.policies.close(remove=True)
    level = str(sandbox_level(box.cgroups.path))
    words = [level, str(pins), str(box.cgroups.path), str(box.cgroup)]
    other = ("connect", "tcp", "192.0.2.1", 82)
    with subprocess.Popen(
        [sys.executable, "-c", _DAEMON, *words], stdout=subprocess.PIPE, text=True
    ) as daemon:
        assert daemon.stdout is not None
        assert daemon.stdout.readline() == "ready\n"
        assert box.agent.calls([other, GOOD]) == [0, DENIED]
        daemon.send_signal(signal.SIGKILL)
    assert box.agent.calls([other, GOOD]) == [0, DENIED]
    box.policies = NetworkPolicies(box.cgroups.fd, level=int(level), pins=pins)
    assert box.policies.programs.adopted
    box.policies.bind(box.cgroup, WEB)
    box.policies.start()
    assert box.agent.calls([other, GOOD]) == [DENIED, 0]


def test_without_pins_the_programs_end_with_the_daemon() -> None:
    with lab() as box:
        box.policies.bind(box.cgroup, access())
        assert box.agent.calls([GOOD]) == [DENIED]
        box.policies.close()
        assert box.agent.calls([GOOD]) == [0]
        box.policies = NetworkPolicies(box.cgroups.fd, level=2, pins=None)


def test_the_verifier_takes_every_program() -> None:
    """Loaded with each set of constants; the kernel says how much it had to look at."""
    for deny in (True, False):
        maps, programs = fastpath.load_network_programs(2, deny, 64)
        try:
            for fd in programs:
                lines = Path(f"/proc/self/fdinfo/{fd}").read_text().splitlines()
                info = dict(line.split(":\t", 1) for line in lines)
                assert 0 < int(info["verified_insns"]) < 50_000  # of a million
        finally:
            for fd in (*maps, *programs):
                os.close(fd)
