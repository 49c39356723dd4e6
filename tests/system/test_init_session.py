"""Sessions of dsec-init: a shell whose state persists, one command at a time."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator

import pytest

from libdsec import wire
from libdsec.errors import AlreadyExists, InvalidArgument, NotFound, WrongState
from tests.system.init_harness import Init, init, wait_until

__all__ = ["init"]

pytestmark = [
    pytest.mark.root,
    pytest.mark.leaky(
        "one init serves many tests and pools cgroup directories until it is stopped"
    ),
]
_names = itertools.count()


@pytest.fixture(params=["/bin/bash", "/bin/sh"])
def session(init: Init, request: pytest.FixtureRequest) -> Iterator[str]:
    name = f"s{next(_names)}"
    init.client.call("session.open", name=name, shell=request.param, env={"GREETING": "hi"})
    yield name
    if name in init.client.call("session.list"):
        init.client.call("session.close", name=name)


def test_directory_variables_and_functions_persist(init: Init, session: str) -> None:
    run = init.client.run
    assert (
        run('cd /usr; x="a  b"; f() { echo "[$1] $x $GREETING"; }', session=session)["exit_code"]
        == 0
    )
    result = run("f 1; pwd; echo oops >&2; false", session=session)
    assert (result["stdout"], result["stderr"]) == (b"[1] a  b hi\n/usr\n", b"oops\n")
    assert result["exit_code"] == 1
    assert not result.get("session_ended")


@pytest.mark.parametrize(
    ("text", "output"),
    [
        (b"printf '%s' 'a\\nb'", b"a\\nb"),
        (b"cat <<'EOF'\n  back\\slash \\c $x `y`\nEOF", b"  back\\slash \\c $x `y`\n"),
        (b"echo one\n\n\necho two\n", b"one\ntwo\n"),
        (b"if true; then\n\techo 'tab\tin'\nfi", b"tab\tin\n"),
        ("echo 'grün \\0101'".encode() + b" | cat", None),
        (b"", b""),
        (b"printf '\\377\\000x'", b"\xff\x00x"),
    ],
)
def test_text_arrives_as_it_was_sent(
    init: Init, session: str, text: bytes, output: bytes | None
) -> None:
    result = init.client.run(text, session=session)
    assert result["exit_code"] == 0
    assert output is None or result["stdout"] == output


def test_a_syntax_error_does_not_end_the_session(init: Init, session: str) -> None:
    assert init.client.run("if", session=session)["exit_code"] != 0
    assert init.client.run("echo on", session=session)["stdout"] == b"on\n"


def test_exit_ends_the_session_with_its_code(init: Init, session: str) -> None:
    result = init.client.run("exit 3", session=session)
    assert result["exit_code"] == 3
    assert result["session_ended"]
    wait_until(lambda: session not in init.client.call("session.list"))
    with pytest.raises(NotFound):
        init.client.run("true", session=session)


def test_large_text_does_not_deadlock(init: Init, session: str) -> None:
    big = b"x='" + b"y" * 300_000 + b"'\necho ${#x}"
    assert init.client.run(big, session=session)["stdout"] == b"300000\n"


def test_commands_of_a_session_run_in_order(init: Init, session: str) -> None:
    scripts = [f"sleep 0.0{9 - n}; echo {n} >> {session}.o; cat {session}.o" for n in range(5)]
    calls = [
        init.client.open("exec.run", cid=f"{session}-{n}", session=session, shell=script.encode())
        for n, script in enumerate(scripts)
    ]
    outputs = [init.client.finish(call)[0]["stdout"] for call in calls]
    assert outputs[-1] == b"0\n1\n2\n3\n4\n"
    assert outputs[0] == b"0\n"


def test_timeout_spares_the_shell_when_it_comes_back(
    init: Init, session: str, request: pytest.FixtureRequest
) -> None:
    """It comes back in 0.2 s, or is ended: one that stands still for longer has another try."""
    shell = request.node.callspec.params["session"]
    for _ in range(20):
        init.client.run("kept=1", session=session)
        result = init.client.run("echo before; sleep 1000", session=session, timeout_s=0.2)
        assert result["timed_out"]
        assert result["signal"] == 9
        if result.get("session_ended"):
            init.client.call("session.open", name=session, shell=shell)
        elif result["stdout"]:
            break
    assert result["stdout"] == b"before\n"
    assert not result.get("session_ended")
    assert init.client.run("echo $kept", session=session)["stdout"] == b"1\n"


def test_timeout_ends_a_shell_that_does_not_come_back(init: Init, session: str) -> None:
    result = init.client.run("while :; do :; done", session=session, timeout_s=0.2)
    assert result["timed_out"]
    assert result["session_ended"]


def test_cancel_of_a_queued_command_leaves_the_running_one(init: Init, session: str) -> None:
    script = f"until [ -e {session}.go ]; do sleep 0.05; done; echo ran"
    first = init.client.open("exec.run", cid=f"{session}a", session=session, shell=script.encode())
    second = init.client.open("exec.run", cid=f"{session}b", session=session, shell=b"echo never")
    init.client.send(wire.Cancel(second))
    assert init.client.finish(second)[0]["signal"] == 9
    init.client.call("files.write", path=f"{session}.go".encode(), data=b"")
    assert init.client.finish(first)[0]["stdout"] == b"ran\n"


def test_close_kills_everything_the_session_started(init: Init, session: str) -> None:
    before = init.processes()
    init.client.run("setsid sleep 1000 & (setsid sleep 1000 &)", session=session)
    assert len(init.processes() - before) >= 2
    call = init.client.open("exec.run", cid=f"{session}w", session=session, shell=b"sleep 100")
    time.sleep(0.1)
    init.client.call("session.close", name=session)
    result, _ = init.client.finish(call)
    assert result["session_ended"]
    wait_until(lambda: len(init.processes()) < len(before))


def test_output_of_a_session_is_bounded_like_any_other(init: Init, session: str) -> None:
    result = init.client.run("seq 1 100000", session=session, output_limit_bytes=1000)
    assert result["output_truncated"]
    assert len(result["stdout"]) == 1000
    assert result["stdout_total"] == 588895
    assert init.client.run("seq 1 200000", session=session)["stdout"].endswith(b"200000\n")


def test_what_a_session_does_not_take(init: Init, session: str) -> None:
    with pytest.raises(AlreadyExists):
        init.client.call("session.open", name=session)
    with pytest.raises(InvalidArgument):
        init.client.run("true", session=session, cwd=b"/")
    with pytest.raises(NotFound):
        init.client.call("session.open", name="other", shell="/bin/no-shell")
    with pytest.raises(NotFound):
        init.client.call("session.close", name="absent")
    assert init.client.run("cat; echo end", session=session)["stdout"] == b"end\n"


def test_exec_in_a_session_ends_it(init: Init, session: str) -> None:
    result = init.client.run("exec sh -c 'echo replaced; exit 9'", session=session)
    assert (result["exit_code"], result["stdout"]) == (9, b"replaced\n")
    assert result["session_ended"]


def test_queue_of_an_ended_session_fails(init: Init, session: str) -> None:
    script = f"until [ -e {session}.go ]; do sleep 0.05; done; exit 1"
    first = init.client.open("exec.run", cid=f"{session}x", session=session, shell=script.encode())
    second = init.client.open("exec.run", cid=f"{session}y", session=session, shell=b"echo never")
    # read after both, so the second waits already
    init.client.call("files.write", path=f"{session}.go".encode(), data=b"")
    assert init.client.finish(first)[0]["session_ended"]
    with pytest.raises(WrongState):
        init.client.finish(second)
