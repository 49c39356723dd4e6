"""The plan: what Python writes is what the C reads."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from dsecd.host import plan
from dsecd.host.plan import ContainerPlan, DestroyPlan, FileWrite, NewFile, RerootPlan, SpawnReply

SOURCES = Path(__file__).parents[2] / "src/_fastpath/spawner"


def _minimal() -> ContainerPlan:
    return ContainerPlan(
        sandbox="a", lowers=1, uid_base=1 << 28, owner_uid=(1 << 28) + 65535,
        runtime_dir="/run/a", spool_dir="/spool/a", hostname="a", init_config=b"",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "reader"),
    [
        (ContainerPlan, "read_container_plan"),
        (DestroyPlan, "read_destroy_plan"),
        (RerootPlan, "read_reroot_plan"),
    ],
)
def test_the_spawner_knows_every_field_and_no_other(kind: type, reader: str) -> None:
    def body(function: str) -> str:
        return (SOURCES / "plan.c").read_text().split(f" {function}(")[1].split("\n}\n")[0]

    text = body(reader)
    if "read_root_key(" in text:  # what a creation and a re-rooting share
        text += body("bool read_root_key")
    known = re.findall(r'mp_equal\(key, "(\w+)"\)', text)
    assert sorted(known) == sorted(field.name for field in msgspec.structs.fields(kind))


def test_the_steps_are_those_of_the_spawner_in_order() -> None:
    found = []
    for name in ("create.c", "child.c"):
        found += re.findall(r'STEP\(s, "(\w+)"', (SOURCES / name).read_text())
    helper = found.index("userns")
    inner, rest = found[helper : helper + 4], found[:helper] + found[helper + 4 :]
    rest[rest.index("helper") + 1 : rest.index("helper") + 1] = inner
    assert tuple(rest) == plan.STEPS


def test_the_steps_of_a_re_rooting_are_those_of_the_spawner_in_order() -> None:
    found = re.findall(r'STEP\(s, "(\w+)"', (SOURCES / "reroot.c").read_text())
    first = found.index("carry_over")  # the parent's stand below the child's
    assert (*found[first:], *found[:first]) == plan.REROOT_STEPS


def test_limits_of_lists_and_operations_agree_with_the_spawner() -> None:
    header = (SOURCES / "plan.h").read_text()
    assert f"#define LIST_MAX {plan.LIST_MAX} " in header
    assert plan.PLAN_MAX < 256 << 10
    operations = "enum op { OP_CREATE, OP_DESTROY, OP_STAGE, OP_REROOT };"
    assert operations in (SOURCES / "main.c").read_text()
    assert (plan.OP_CREATE, plan.OP_DESTROY, plan.OP_STAGE, plan.OP_REROOT) == (0, 1, 2, 3)


def test_plans_survive_the_wire() -> None:
    full = msgspec.structs.replace(
        _minimal(),
        writes=(FileWrite("/x", "1"),),
        files=(NewFile("etc/hosts", b"\xff"),),
        cpus=(0, 3),
    )
    data = msgspec.msgpack.encode(full)
    assert msgspec.msgpack.decode(data, type=ContainerPlan) == full


def test_plans_do_not_change() -> None:
    with pytest.raises(AttributeError):
        _minimal().hostname = "b"  # type: ignore[misc]


def test_a_destroy_plan_says_only_what_is_set() -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(DestroyPlan(sandbox="a"))) == {
        "sandbox": "a"
    }


def test_a_reroot_plan_says_only_what_is_set() -> None:
    given = RerootPlan(sandbox="a", lowers=1, uid_base=1 << 28)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(given)) == {
        "sandbox": "a", "lowers": 1, "uid_base": 1 << 28,
    }  # fmt: skip


def test_a_reply_without_times_is_complete() -> None:
    data = msgspec.msgpack.encode({"pid": 5, "error": 0, "step": ""})
    assert msgspec.msgpack.decode(data, type=SpawnReply) == SpawnReply(pid=5)
