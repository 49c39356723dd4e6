"""The container's plan: pure, complete, and different for each sandbox where it must be."""

from __future__ import annotations

import msgspec
import pytest

from dsecd.backends.container_confine import Confinement
from dsecd.backends.container_plan import (
    CpuLoad,
    Resources,
    Template,
    compile_plan,
    memory_upper_bytes,
    on_disk,
)
from dsecd.backends.inside import machine_id
from dsecd.backends.spec import Spec
from dsecd.engine.request import compile_spec
from dsecd.host.network import Attachment
from dsecd.host.plan import FileWrite, Guard
from dsecd.host.upper import Upper
from dsecd.policy.landlock import Ruleset
from libdsec.model import DSecContainerRunArgs

TEMPLATE = Template(
    runtime="/run/x/sb", spool="/var/x/spool", dev_tree="/run/x/tree/dev", caps=7,
)  # fmt: skip
CONFINEMENT = Confinement(
    masked=("/proc/keys",), read_only=("/proc/sys",), guards=(Guard("/a"), Guard("/a/b", 1)),
    seccomp=b"\1" * 8,
)  # fmt: skip
ATTACHMENT = Attachment(
    sandbox="s0-n0-1-1", slot=3, index=9, ifname="ds3", address="10.0.0.3", address6="fd00::3",
    gateway="10.0.0.1", gateway6="fd00::1", resolv_conf="nameserver 192.0.2.1\n",
)  # fmt: skip


def spec(**fields: object) -> Spec:
    return compile_spec("s0-n0-1-1", DSecContainerRunArgs(container_image="base/x", **fields))


def resources(**fields: object) -> Resources:
    given = {
        "sandbox": "s0-n0-1-1",
        "uid_base": 1 << 28,
        "owner_uid": (1 << 28) + 65535,
        "cgroup": "/sys/fs/cgroup/dsec/s0-n0-1-1",
        "confinement": CONFINEMENT,
        "lowers": 1,
    }
    return Resources(**(given | fields))


def test_everything_asked_for_is_in_the_plan() -> None:
    asked = spec(env={"A": "b", "PATH": "/x"}, init_user="agent", workdir="/w", hostname="h",
                 no_new_privileges=True, output_limit_mb=2, spool_limit_mb=3)  # fmt: skip
    plan = compile_plan(TEMPLATE, asked, resources(writes=(FileWrite("/a", "1"),), cpus=(1,)))
    assert (plan.runtime_dir, plan.spool_dir) == ("/run/x/sb/s0-n0-1-1", "/var/x/spool")
    assert (plan.hostname, plan.cpus, plan.writes) == ("h", (1,), (FileWrite("/a", "1"),))
    config = msgspec.msgpack.decode(plan.init_config)
    assert config["env"] == {"PATH": "/x", "LANG": "C.UTF-8", "A": "b"}
    assert (config["user"], config["workdir"], config["no_new_privs"]) == ("agent", "/w", True)
    assert (config["output_limit"], config["spool_limit"]) == (2 << 20, 3 << 20)
    assert (config["caps"], config["seccomp"], config["apparmor"]) == (7, b"\1" * 8, "")


def test_what_confines_it_is_split_between_the_spawner_and_init() -> None:
    plan = compile_plan(TEMPLATE, spec(), resources())
    assert (plan.masked, plan.read_only) == (("/proc/keys",), ("/proc/sys",))
    assert plan.guards == CONFINEMENT.guards
    assert "landlock" not in msgspec.msgpack.decode(plan.init_config)
    closed = msgspec.structs.replace(CONFINEMENT, landlock=Ruleset(15, (("/a", 4),)))
    plan = compile_plan(TEMPLATE, spec(), resources(confinement=closed))
    assert msgspec.msgpack.decode(plan.init_config)["landlock"] == [15, [["/a", 4]]]


def test_generated_files_follow_the_network() -> None:
    sealed = compile_plan(TEMPLATE, spec(hostname="h"), resources())
    files = {file.target: file.content for file in sealed.files}
    assert b"nameserver" not in files["etc/resolv.conf"]
    assert files["etc/hostname"] == b"h\n"
    natted = compile_plan(TEMPLATE, spec(hostname="h"), resources(attachment=ATTACHMENT))
    files = {file.target: file.content for file in natted.files}
    assert files["etc/resolv.conf"] == b"nameserver 192.0.2.1\n"
    assert b"10.0.0.3\th\n" in files["etc/hosts"]
    assert b"fd00::3\th\n" in files["etc/hosts"]


def test_machine_ids_are_stable_and_differ() -> None:
    assert machine_id("a") == machine_id("a") != machine_id("b")
    assert len(machine_id("a")) == 32


@pytest.mark.parametrize(
    ("fields", "disk", "expected"),
    [
        ({}, True, False),
        ({"disk_limit_mb": 4096, "memory_limit_mb": 1024}, True, True),
        ({"disk_limit_mb": 4096, "memory_limit_mb": 1024}, False, False),
        ({"upper": "disk"}, False, True),
        ({"upper": "memory", "disk_limit_mb": 9999}, True, False),
    ],
)
def test_where_the_upper_goes(fields: dict[str, object], disk: bool, expected: bool) -> None:
    assert on_disk(spec(**fields), disk) is expected


def test_a_full_memory_upper_is_no_oom() -> None:
    asked = spec(memory_limit_mb=100, disk_limit_mb=1024)
    assert memory_upper_bytes(asked) == 75 << 20
    assert memory_upper_bytes(spec(memory_limit_mb=1024, disk_limit_mb=16)) == 16 << 20
    upper = Upper("/u/1", 5, 1 << 30)
    plan = compile_plan(TEMPLATE, asked, resources(upper=upper))
    assert (plan.upper_dir, plan.upper_bytes, plan.upper_project) == ("/u/1", 0, 5)


def test_cpus_are_the_least_loaded_ones() -> None:
    load = CpuLoad((0, 1, 2, 3))
    assert load.choose(2) == (0, 1)
    assert load.choose(1) == (2,)
    assert load.choose(2) == (0, 3)
    load.free((0, 1))
    assert load.choose(1) == (1,)
    assert load.choose(4) == ()
