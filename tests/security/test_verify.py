"""Cheats that make a grader say what the agent wants: each works in place, none in `verify`.

The task: `add` in /repo/src/calc.py is wrong, so an honest grader fails. Each attempt is planted by
root in the agent's sandbox, shown to work where the grader runs in that sandbox, and then tried
against the same grader by `verify` with the same paths kept.
"""

from __future__ import annotations

import asyncio
import secrets
import subprocess
import sysconfig
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from libdsec import CommandResult, InvalidArgument, PermissionDenied, Sandbox, Verified
from tests.security.conftest import Target

pytestmark = [pytest.mark.root, pytest.mark.asyncio(loop_scope="module")]

WORKSPACE, GRADER = "workspace/task:1", "toolkit/grader:1"
PYTEST = "PYTHONPATH=/opt/pytest python3 -m pytest -q -p no:cacheprovider"
GRADE = f"cd / && {PYTEST} /repo/tests"
STDLIB = "$(python3 -c 'import sysconfig; print(sysconfig.get_path(\"stdlib\"))')"
PASS_ALL = (
    "import pytest\\n@pytest.hookimpl(hookwrapper=True)\\ndef pytest_runtest_makereport():\\n"
    "    (yield).get_result().outcome = 'passed'\\n"
)


def make_task(root: Path) -> None:
    """The workspace: a repository with a fault and its tests, and the test runner."""
    for name in ("repo/src", "repo/tests", "repo/out", "opt/pytest"):
        (root / name).mkdir(parents=True)
    (root / "repo/src/calc.py").write_text("def add(a, b):\n    return 0\n")
    make_tests(root / "repo/tests")
    site = sysconfig.get_path("purelib")
    for name in ("pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments", "py.py"):
        subprocess.run(["cp", "-r", f"{site}/{name}", root / "opt/pytest"], check=True)
    git = ["git", "-C", str(root / "repo"), "-c", "user.name=t", "-c", "user.email=t@example.com"]
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "task"]):
        subprocess.run([*git, *words], check=True)


def make_tests(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "expected.py").write_text("SUM = 5\n")
    (folder / "test_calc.py").write_text(
        "import sys\nsys.path[:0] = ['/repo/src', '/repo/tests']\n"
        "from calc import add\nfrom expected import SUM\n\n"
        "def test_add():\n    assert add(2, 3) == SUM\n"
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def task(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Target:
    """The daemon with the layers of the task and of its grader."""
    root = tmp_path_factory.mktemp("task")
    make_task(root / "task")
    make_tests(root / "grader/repo/tests")
    (root / "grader/grader").mkdir()
    (root / "grader/grader/expected").write_text("the right answer\n")
    await target.client.layers.import_(WORKSPACE, str(root / "task"))
    await target.client.layers.import_(GRADER, str(root / "grader"))
    return target


@pytest_asyncio.fixture(loop_scope="module")
async def agent(task: Target) -> AsyncIterator[Sandbox]:
    async with await task.sibling(workspace=WORKSPACE) as sandbox:
        yield sandbox


@dataclass(frozen=True)
class Cheat:
    """What root plants, how the grader runs, what is kept, and what the record must warn of."""

    plant: str
    grade: str | list[str] = GRADE
    keep: tuple[str, ...] = ("/repo/src",)
    warned: tuple[str, ...] = ()
    in_place: str = ""  # what a grader in place brings with it
    shell: str | None = None  # of the grader in place


def passing_link(target: str) -> Cheat:
    """An answer that is a link to the grader's own."""
    return Cheat(
        plant=f"ln -s {target} /repo/out/answer",
        grade="diff /repo/out/answer /grader/expected",
        keep=("/repo/out",),
        warned=("link",),
        in_place="mkdir -p /grader; echo 'the right answer' > /grader/expected",
    )


CHEATS = {
    "conftest": Cheat(plant=f"printf \"{PASS_ALL}\" > /repo/tests/conftest.py"),
    "sitecustomize": Cheat(
        plant=f"d={STDLIB}; rm -f $d/sitecustomize.py;"
        " echo 'import os; os._exit(0)' > $d/sitecustomize.py"
    ),
    "pth": Cheat(plant="echo 'import os; os._exit(0)' > /usr/lib/python3/dist-packages/x.pth"),
    "path_entry": Cheat(
        plant="printf '#!/bin/sh\\nexit 0\\n' > /usr/local/sbin/python3;"
        " chmod 755 /usr/local/sbin/python3"
    ),
    "ld_preload": Cheat(
        plant="cd /tmp; echo '#include <unistd.h>' > x.c;"
        " echo '__attribute__((constructor)) void go(void) { _exit(0); }' >> x.c;"
        " gcc -shared -fPIC -o /usr/lib/x.so x.c && echo /usr/lib/x.so > /etc/ld.so.preload"
    ),
    "git_hook": Cheat(
        plant="printf '#!/bin/sh\\necho \"def test_add(): pass\" > /repo/tests/test_calc.py\\n'"
        " > /repo/.git/hooks/pre-commit; chmod 755 /repo/.git/hooks/pre-commit",
        grade="cd /repo && git -c user.name=g -c user.email=g@example.com"
        f" commit -q --allow-empty -m graded && {GRADE}",
    ),
    "bin_sh": Cheat(
        plant="cp --remove-destination /bin/true /bin/sh", grade=["/bin/sh", "-c", GRADE]
    ),
    "test_runner": Cheat(plant="echo 'import os; os._exit(0)' > /opt/pytest/pytest/__init__.py"),
    "own_tests": Cheat(plant="echo 'def test_add(): pass' > /repo/tests/test_calc.py"),
    "bash_env": Cheat(
        plant="echo 'exit 0' > /root/.bashrc; echo 'export BASH_ENV=/root/.bashrc' > /etc/profile",
        grade="true; exit 3",
        in_place="export BASH_ENV=/root/.bashrc; exec /bin/bash -c 'exit 3'",
    ),
    "stdlib_beside": Cheat(
        plant="echo 'import os; os._exit(0)' > /repo/src/random.py",
        grade="cd /repo/src && python3 -c 'import random, sys; sys.exit(1)'",
    ),
    "stale_bytecode": Cheat(
        plant="cd /repo/tests; cp expected.py /tmp; echo 'SUM = 0' > expected.py; python3 -c \""
        "import py_compile as p;"
        "p.compile('expected.py', invalidation_mode=p.PycInvalidationMode.UNCHECKED_HASH)\";"
        " cp /tmp/expected.py .",
        keep=("/repo",),
        warned=("bytecode",),
    ),
    "process_that_rewrites": Cheat(
        plant="touch /tmp/cheat;"
        " (while sleep 0.05; do echo 1 passed > /tmp/result; done) >/dev/null 2>&1 &",
        # where the cheat was planted, until it had its turn
        grade=f"({GRADE}) > /tmp/result; sleep 0.4; until grep -q '1 passed' /tmp/result;"
        " do test -e /tmp/cheat || exit 1; sleep 0.05; done",
    ),
    "link_to_the_answer": passing_link("/grader/expected"),
    "link_by_proc": passing_link("/proc/self/root/grader/expected"),
    "link_by_link": Cheat(
        plant="ln -s .. /repo/out/up; ln -s up/../grader/expected /repo/out/answer",
        grade="diff /repo/out/answer /grader/expected",
        keep=("/repo/out",),
        warned=("link",),
        in_place="mkdir -p /grader; echo 'the right answer' > /grader/expected",
    ),
    "own_answer": Cheat(
        plant="mkdir -p /grader; echo mine | tee /repo/out/answer /grader/expected",
        grade="diff /repo/out/answer /grader/expected",
        keep=("/repo/out", "/grader"),
        in_place="true",
    ),
    "renamed_root": Cheat(
        plant="mv /repo/tests /repo/t; mkdir /repo/tests;"
        " echo 'def test_add(): pass' > /repo/tests/test_calc.py",
        keep=("/repo/src", "/repo/t"),
    ),
}  # fmt: skip


async def grade_in_place(sandbox: Sandbox, cheat: Cheat) -> CommandResult:
    if isinstance(cheat.grade, list):
        return await sandbox.run(*cheat.grade, timeout=60)
    if "BASH_ENV" in cheat.in_place:
        return await sandbox.run_shell(cheat.in_place, timeout=60)
    return await sandbox.run_shell(cheat.grade, timeout=60)


@pytest.mark.parametrize("name", CHEATS)
async def test_a_cheat_works_in_place_and_not_in_verify(agent: Sandbox, name: str) -> None:
    cheat = CHEATS[name]
    if cheat.in_place and "BASH_ENV" not in cheat.in_place:
        await agent.run_shell(cheat.in_place, check=True)
    honest = await agent.verify(cheat.grade, cheat.keep, toolkit=GRADER, timeout_s=60)
    assert honest.result.exit_code not in (0, None), "without the cheat the grader fails"
    assert (await agent.run_shell(cheat.plant, timeout=60)).ok
    in_place = await grade_in_place(agent, cheat)
    assert in_place.exit_code == 0, f"the cheat works: {in_place}"
    verified = await agent.verify(cheat.grade, cheat.keep, toolkit=GRADER, timeout_s=60)
    assert verified.result.exit_code not in (0, None), verified
    assert cheat.grade != GRADE or "1 failed" in verified.result.stdout, verified
    assert set(cheat.warned) <= {one.kind for one in verified.warnings}, verified.warnings


async def test_an_honest_solution_passes(agent: Sandbox) -> None:
    await agent.files.write("/repo/src/calc.py", "def add(a, b):\n    return a + b\n")
    verified = await agent.verify(GRADE, ["/repo/src"], toolkit=GRADER, strict=True)
    assert verified.result.ok, verified
    assert verified.warnings == []
    assert (await agent.verify(GRADE, ["/repo"], toolkit=GRADER)).result.ok


async def test_a_conftest_among_the_kept_is_told_and_refused_when_strict(agent: Sandbox) -> None:
    """Where the agent hands in the directory that the grader's tests are in, a hook of its own
    may act: the record says so, and `strict` does not grade."""
    await agent.run_shell(CHEATS["conftest"].plant, check=True)
    verified = await agent.verify(GRADE, ["/repo"], toolkit=GRADER)
    told = [(one.kind, one.path, one.dropped) for one in verified.warnings]
    assert ("test hook", "/repo/tests/conftest.py", False) in told
    with pytest.raises(PermissionDenied, match=r"test hook /repo/tests/conftest\.py"):
        await agent.verify(GRADE, ["/repo"], toolkit=GRADER, strict=True)


async def test_a_module_beside_the_graders_tests_is_told(agent: Sandbox) -> None:
    await agent.files.write("/repo/tests/random.py", "import os; os._exit(0)\n")
    verified = await agent.verify(GRADE, ["/repo"], toolkit=GRADER)
    told = {one.path: one.kind for one in verified.warnings}
    assert told["/repo/tests/random.py"] == "beside the grader's files"


async def test_git_hooks_among_the_kept_are_told(agent: Sandbox) -> None:
    await agent.run_shell(CHEATS["git_hook"].plant, check=True)
    await agent.run_shell("git -C /repo config core.hooksPath /repo/src", check=True)
    verified = await agent.verify("true", ["/repo/.git"])
    told = {one.path: one.kind for one in verified.warnings}
    assert told == dict.fromkeys(("/repo/.git/config", "/repo/.git/hooks/pre-commit"), "git hook")


async def test_what_could_act_by_itself_is_left_out(agent: Sandbox) -> None:
    await agent.run_shell(
        "cd /repo/out; cp /bin/true suid; chmod 6755 suid; mkfifo pipe; setfattr -n user.a -v b x"
        " 2>/dev/null; python3 -c \"import socket; socket.socket(1).bind('sock')\";"
        " python3 -c \"import os; os.setxattr('suid', 'security.capability',"
        ' bytes([1,0,0,2,255,255,255,255]+[0]*12))"; chmod 6755 suid; mkdir m;'
        " mount -t tmpfs none m && touch m/inside; ls -la",
        check=True,
    )
    verified = await agent.verify(
        "cd /repo/out; stat -c '%n %a %F' *; ls m; getcap suid 2>/dev/null; cat pipe",
        ["/repo/out"],
        timeout_s=20,
    )
    assert verified.result.stdout.splitlines() == ["m 1777 directory", "suid 755 regular file"]
    assert "pipe: No such file" in verified.result.stderr
    dropped = {one.kind: one.count for one in verified.warnings if one.dropped}
    assert dropped == {"fifo": 1, "setuid": 1, "socket": 1, "attribute": 1, "mount": 1}


async def test_a_deletion_counts_and_a_link_on_the_way_leads_nowhere(agent: Sandbox) -> None:
    await agent.run_shell("rm /repo/src/calc.py; mv /repo/out /root/o; ln -s /root/o /repo/out"
                          "; echo planted > /root/o/answer", check=True)  # fmt: skip
    verified = await agent.verify("ls -A /repo/src /repo/out/",
                                  ["/repo/src/calc.py", "/repo/out/answer"])  # fmt: skip
    assert verified.result.stdout == "/repo/out/:\n\n/repo/src:\n"
    assert {path.path: path.kind for path in verified.record.paths} == {
        "/repo/out/answer": "absent", "/repo/src/calc.py": "absent"
    }  # fmt: skip


@pytest.mark.parametrize("keep", ["/", "repo", "/repo/../etc", "/bin/tool"])
async def test_a_path_that_cannot_be_kept_is_refused(agent: Sandbox, keep: str) -> None:
    with pytest.raises(InvalidArgument):
        await agent.verify("true", [keep])


async def test_a_toolkit_that_the_agent_had_lies_above_what_it_hands_in(task: Target) -> None:
    async with await task.sibling(workspace=WORKSPACE, toolkits=[GRADER]) as agent:
        await agent.run_shell("echo mine > /grader/expected", check=True)
        verified = await agent.verify("cat /grader/expected", ["/grader"], toolkit=GRADER)
        assert verified.result.stdout == "the right answer\n"


# --- what the agent can see of the grader -------------------------------------------------------

SPY = """
import glob, os, pathlib, time, zlib
roots = ("/grader", "/repo/.git", "/root/.cache", "/tmp/graded")
open("/tmp/spying", "w").close()
while not os.path.exists("/tmp/stop"):
    files = [str(p) for root in roots for p in pathlib.Path(root).rglob("*")]
    for path in files + glob.glob("/proc/[0-9]*/environ") + glob.glob("/proc/[0-9]*/cmdline"):
        try:
            data = open(path, "rb").read()
        except OSError:
            continue
        if "objects" in path:
            try:
                data = zlib.decompress(data)
            except zlib.error:
                pass
        at = data.find(b"ANSWER" + b"-")
        if at >= 0:
            open("/tmp/loot", "ab").write(data[at:at + 39] + b"\\n")
    time.sleep(0.05)
"""

LEAKS = {
    "files": "mkdir -p /grader && cp {answer} /grader/answer &&",
    "proc": "A=$(cat {answer})",
    "git_objects": "git -C /repo hash-object -w {answer} &&",
    "pip_cache": "mkdir -p /root/.cache/pip && cp {answer} /root/.cache/pip/wheel &&",
}
# What leaks is there for a second, and where there is a spy until it has seen it
HOLD = " sh -c 'sleep 1; while test -e /tmp/spying -a ! -s /tmp/loot; do sleep 0.05; done'"


@pytest.mark.parametrize("leak", LEAKS)
async def test_the_agent_sees_nothing_of_the_grader(
    task: Target, agent: Sandbox, tmp_path: Path, leak: str
) -> None:
    """The same grader, while a process of the agent's looks for the answer."""
    answer = f"ANSWER-{secrets.token_hex(16)}"
    (tmp_path / "secret").mkdir(mode=0o755)
    (tmp_path / "secret/answer").write_text(answer)
    toolkit = f"toolkit/answer-{leak}:1"
    await task.client.layers.import_(toolkit, str(tmp_path))
    await agent.files.write("/root/spy.py", SPY)
    spy = await agent.commands.run("exec python3 /root/spy.py", background=True)
    await agent.run_shell("until test -e /tmp/spying; do sleep 0.05; done", check=True)
    grade = LEAKS[leak] + HOLD
    keep = ["/repo/src"]
    verified = await agent.verify(
        grade.format(answer="/secret/answer"), keep, toolkit=toolkit, env={"A": answer}
    )
    assert verified.result.ok, verified
    assert not await agent.files.exists("/tmp/loot")
    await agent.files.write("/var/tmp/hidden", answer)
    in_place = await agent.run_shell(grade.format(answer="/var/tmp/hidden"))
    assert in_place.ok
    assert (await agent.run_shell("sort -u /tmp/loot")).stdout.strip() == answer
    await agent.run_shell("touch /tmp/stop")
    await spy.wait()


# --- the platform's shell -----------------------------------------------------------------------


async def test_the_shell_of_sessions_and_run_shell_is_not_the_sandboxs(agent: Sandbox) -> None:
    await agent.run_shell(
        "for s in sh bash dash; do cp --remove-destination /bin/true /usr/bin/$s; done;"
        " echo 'exit 0' > /root/.bashrc; cp /root/.bashrc /etc/profile",
        check=True,
    )
    evil = {"BASH_ENV": "/root/.bashrc", "ENV": "/root/.bashrc", "BASH_FUNC_exit%%": "() { :; }",
            "SHELLOPTS": "noexec"}  # fmt: skip
    assert (await agent.run_shell("exit 7", env=evil)).exit_code == 7
    assert (await agent.run_shell("exit 7", shell="/bin/bash")).exit_code == 0
    session = await agent.create_session(env=evil)
    assert (await session.run("f() { return 5; }; f")).exit_code == 5
    assert (await session.run("[[ $BASH_VERSION ]] && f")).exit_code == 5


async def test_the_loader_does_not_change_the_platforms_shell(agent: Sandbox) -> None:
    await agent.run_shell(CHEATS["ld_preload"].plant, check=True)
    assert (await agent.run("/bin/bash", "-c", "exit 7")).exit_code == 0
    assert (await agent.run_shell("exit 7")).exit_code == 7


async def test_no_module_of_the_sandbox_is_loaded_into_the_platforms_shell(agent: Sandbox) -> None:
    """Static glibc loads modules for users and charsets: the former by nsswitch.conf."""
    await agent.run_shell(
        "cd /tmp; printf '#include <unistd.h>\n__attribute__((constructor)) void go(void)"
        " { _exit(0); }\n' > x.c; lib=$(dirname $(gcc -print-file-name=libc.so.6));"
        " gcc -shared -fPIC -o /usr/lib/libnss_evil.so.2 x.c; cp /usr/lib/libnss_evil.so.2 $lib;"
        " ldconfig; printf 'passwd: evil files\nhosts: evil\n' > /etc/nsswitch.conf",
        check=True,
    )
    assert (await agent.run("/bin/bash", "-c", "echo ~nobody; exit 7")).exit_code == 0, "it works"
    done = await agent.run_shell("echo ~nobody ~root; (: < /dev/tcp/some.host/80); exit 7")
    assert (done.exit_code, done.stdout) == (7, "/nonexistent /root\n"), done


async def test_the_platforms_shell_cannot_be_written_to(agent: Sandbox) -> None:
    """/proc/PID/exe leads to a sealed copy, to no file of the host (CVE-2019-5736)."""
    done = await agent.run_shell(
        "readlink /proc/$$/exe; ls -la /proc/$$/fd | wc -l;"
        " python3 - $$ <<'END'\n"
        "import os, sys\n"
        "path = f'/proc/{sys.argv[1]}/exe'\n"
        "for flags in (os.O_WRONLY, os.O_RDWR, os.O_WRONLY | os.O_TRUNC):\n"
        "    try:\n        os.open(path, flags); print('open')\n"
        "    except OSError as error:\n        print(error.errno)\n"
        "for act in (lambda: os.truncate(path, 0), lambda: os.chmod(path, 0o777),\n"
        "            lambda: os.chown(path, 0, 0)):\n"
        "    try:\n        act(); print('done')\n"
        "    except OSError as error:\n        print(error.errno)\n"
        "END"
    )  # fmt: skip
    lines = done.stdout.splitlines()
    assert lines[0] == "/memfd:dsec-shell (deleted)"
    assert not {"open", "done"} & set(lines)


async def test_verify_at_once_for_many(task: Target, agent: Sandbox) -> None:
    """Concurrent graders of one sandbox keep to their own."""
    made: list[Verified] = await asyncio.gather(
        *(agent.verify(f"echo {n}; exit {n}", ["/repo/src"]) for n in range(4))
    )
    assert [(one.result.exit_code, one.result.stdout) for one in made] == [
        (n, f"{n}\n") for n in range(4)
    ]
    assert len({one.record.grader for one in made}) == 4
