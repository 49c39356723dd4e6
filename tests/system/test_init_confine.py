"""What dsec-init confines its commands by before they run, straight from its configuration."""

from __future__ import annotations

import subprocess
import tempfile
from typing import Any

import msgspec
import pytest

from dsecd.policy import landlock
from dsecd.policy.rules import Access, FilePolicy, FileRule
from libdsec.errors import Internal, PermissionDenied
from tests.system.init_harness import BINARY, running

pytestmark = [pytest.mark.root, pytest.mark.needs("landlock")]


def ruleset(**opened: list[Access]) -> list[Any]:
    """Return a configuration's `landlock`; keywords are paths, with ``_`` for the slash."""
    rules = tuple(
        FileRule(verdict="allow", pattern=name.replace("_", "/"), access=frozenset(access))
        for name, access in opened.items()
    )
    made = landlock.for_policy(FilePolicy(rules=rules, default="deny"))
    assert made is not None
    return [made.handled, [list(rule) for rule in made.rules]]


SYSTEM: dict[str, list[Access]] = {
    "_usr": ["read", "execute"], "_bin": ["read", "execute"], "_lib": ["read", "execute"],
    "_lib64": ["read", "execute"], "_dev_null": ["read", "write"],
}  # fmt: skip


def test_commands_open_what_is_opened() -> None:
    with running(landlock=ruleset(**SYSTEM, _not_there=["read"])) as init:
        assert init.client.run("cat /dev/null; ls /usr")["exit_code"] == 0
        for shell in ("cat /etc/passwd", "ls /", "echo > /dev/zero", "cat /usr/../etc/hostname"):
            done = init.client.run(shell)
            assert done["exit_code"] != 0, shell
            assert b"Permission denied" in done["stderr"]
        init.client.call("files.read", path=b"/etc/passwd")  # the client's own
        done = init.client.run("cat /etc/passwd", pty={"rows": 2, "cols": 80})
        assert b"Permission denied" in done["stdout"]


def test_a_program_that_may_not_run_is_reported_as_such() -> None:
    opened = {path: ["read"] for path in SYSTEM}
    with (
        running(landlock=ruleset(**opened)) as init,
        pytest.raises(PermissionDenied, match="not executable"),
    ):
        init.client.run(argv=[b"/usr/bin/true"])


@pytest.mark.parametrize("wrong", [
    [1], [1, 2, 3], ["x", []], [1, [["/a"]]], [1, [["a", 1]]], [1, [["/a\0b", 1]]],
    [1, [["", 1]]], [1, [["/" + "x" * 4096, 1]]], [1, [["/a", "b"]]], {"a": 1},
])  # fmt: skip
def test_a_malformed_ruleset_ends_it_at_start(wrong: Any) -> None:
    with tempfile.TemporaryFile() as config:
        config.write(msgspec.msgpack.encode({"landlock": wrong}))
        config.seek(0)
        command = ["sh", "-c", f"exec 4<&0; exec {BINARY}"]
        done = subprocess.run(command, stdin=config, capture_output=True, check=False)
    assert done.returncode == 64
    assert b"malformed key in the configuration" in done.stderr


def test_a_ruleset_that_the_kernel_does_not_know_fails_the_command() -> None:
    with running(landlock=[1 << 60, []]) as init:
        with pytest.raises(Internal, match="Landlock ruleset"):
            init.client.run("true")
        init.client.call("sys.ping")
