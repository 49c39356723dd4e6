"""What an audit judges, from trees that are data: no sandbox, no root."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Mapping

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsecd.policy.compile import compile_policy
from dsecd.policy.globs import covers
from dsecd.policy.language import from_toml
from libdsec.audit import auditing, hooks, proposal, running
from libdsec.audit.patterns import Pattern
from libdsec.audit.places import Places
from libdsec.audit.report import MAX_OF_KIND, Finding, Wanted, ranked, shortened, shown
from libdsec.audit.tree import Agent, Entry, Tree
from libdsec.errors import InvalidArgument
from libdsec.model import PolicyRow, SandboxPolicy
from tests.unit.audit_trees import CLEAN, PLANTED, ROOT, USER, WORKDIR, Planted, tree


def judge(
    made: Tree,
    contents: Mapping[str, bytes] | None = None,
    env: Mapping[str, str] | None = None,
    wanted: Wanted | None = None,
) -> list[Finding]:
    places = Places(WORKDIR)
    return ranked(auditing.judged(made, places, wanted or Wanted(), contents or {}, env or {}))


def judge_planted(*planted: Planted, **more: object) -> list[Finding]:
    extra = [Entry(f"{one.path}/inside", "file", 1) for one in planted if one.type == "dir"]
    made = tree(*CLEAN, *(one.entry for one in planted), *extra)
    read = {path for path, _ in auditing._telling(made, Places(WORKDIR))}
    contents = {one.path: one.content for one in planted if one.path in read}
    return judge(made, contents, **more)  # type: ignore[arg-type]


# --- what it must find, and must not


@pytest.mark.parametrize("one", PLANTED, ids=lambda one: one.path.replace("\n", "|"))
def test_each_planted_thing_is_found(one: Planted) -> None:
    found = [each for each in judge_planted(one) if each.path == one.path]
    assert (one.risk, one.kind) in [(each.risk, each.kind) for each in found], found


@pytest.mark.parametrize("agent", [ROOT, USER], ids=["root", "user"])
def test_a_clean_tree_gives_nothing_of_weight(agent: Agent) -> None:
    made = tree(*CLEAN, agent=agent)
    contents = {
        "/usr/lib/python3/dist-packages/distutils-precedence.pth": b"import os; enabled = 1\n",
        "/usr/lib/python3/dist-packages/google/auth/service_account.json": b'{"type": "x"}',
    }
    found = judge(made, contents, {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8"})
    assert [each for each in found if each.risk != "low"] == []
    assert {each.path for each in found} <= {
        "/", "/var/log/dpkg.log", "/root/.bashrc", "/root/.profile", "/home/agent/.bashrc",
        "/etc/python3.11/sitecustomize.py",
    }  # fmt: skip


@pytest.mark.parametrize(("name", "mode", "found"), [
    ("post-checkout", 0o755, True), ("post-checkout", 0o644, False), ("x.sample", 0o755, False),
])  # fmt: skip
def test_hooks_of_git_are_those_it_would_run(name: str, mode: int, found: bool) -> None:
    base = "/workspace/.git"
    made = tree(
        Entry(f"{base}/HEAD", "file", 20), Entry(f"{base}/objects/pack", "dir", 0, 0o755),
        Entry(f"{base}/refs/heads", "dir", 0, 0o755),
        Entry(f"{base}/hooks/{name}", "file", 9, mode, 1000),
    )  # fmt: skip
    assert [each.risk for each in judge(made)] == (["high"] if found else [])


def test_what_the_agent_cannot_read_is_no_answer() -> None:
    locked = Entry("/opt/task", "dir", 0, 0o700)
    answer = Entry("/opt/task/solution.py", "file", 10, 0o644)
    assert judge(tree(locked, answer)) == []
    assert [each.path for each in judge(tree(locked, answer, agent=ROOT))] == [answer.path, "/"]


def test_nothing_is_reported_beneath_what_is_reported() -> None:
    below = [Entry(f"/workspace/solution/{name}", "file", 1) for name in ("answer.py", "gold.txt")]
    found = judge(tree(Entry("/workspace/solution", "dir", 0, 0o755), *below))
    assert [each.path for each in found] == ["/workspace/solution"]


def test_a_grader_that_can_be_changed_or_planted_outranks_other_hooks() -> None:
    wanted = Wanted(grader=("/workspace/tests", "/workspace/absent.py", "/opt/grade"))
    found = judge_planted(
        Planted("/workspace/tests/test_it.py", "", ""),
        Planted("/workspace/conftest.py", "", ""),
        Planted("/workspace/tox.ini", "", ""),
        Planted("/opt/grade/run.py", "", "", uid=0),
        wanted=wanted,
    )
    by_path = {each.path: (each.risk, each.kind, each.remedy) for each in found}
    assert by_path["/workspace/tests"] == ("high", "grader", "read-only")
    assert by_path["/workspace/absent.py"] == ("high", "grader", "read-only")
    assert by_path["/opt/grade"] == ("medium", "grader", "hide")
    assert by_path["/workspace/conftest.py"] == ("high", "hook", "read-only")
    assert by_path["/workspace/tox.ini"] == ("medium", "hook", "read-only")
    assert found[0].kind == "grader"


def test_answers_of_the_caller_are_critical_wherever_they_lie() -> None:
    hidden = Entry("/usr/lib/task/key.bin", "file", 3)
    for text in ("key.*", "/usr/lib/**/key.bin", "/usr/**"):
        found = judge(tree(hidden), wanted=Wanted(answers=(text,)))
        assert found[0].risk == "critical"
        assert found[0].path in hidden.path


@pytest.mark.parametrize(
    ("path", "agent", "expected"),
    [
        (":/usr/bin", USER, "$PATH[0]"),
        ("/usr/local/bin:bin:/usr/bin", USER, "$PATH[1]"),
        ("/home/agent/bin:/usr/bin", USER, "/home/agent/bin"),
        ("/workspace/.venv/bin:/usr/bin", ROOT, "/workspace/.venv/bin"),
        ("/usr/bin:/home/agent/bin", USER, None),
        ("/usr/local/bin:/opt/tool/bin:/usr/bin", ROOT, None),
        ("/none/bin:/usr/bin", USER, None),
    ],
)
def test_entries_of_path_before_the_systems(path: str, agent: Agent, expected: str | None) -> None:
    found = [each.path for each in judge(tree(*CLEAN, agent=agent), env={"PATH": path})
             if each.kind == "path"]  # fmt: skip
    assert found == ([expected] if expected else [])


def test_the_environment_is_looked_at_and_not_shown() -> None:
    token = "hf_" + "aB3dE" * 7
    found = judge(tree(), env={"HF_TOKEN": token, "PYTHONSTARTUP": "/tmp/x.py", "HOME": "/root"})
    assert [(each.kind, each.path) for each in found] == [
        ("credential", "$HF_TOKEN"), ("hook", "$PYTHONSTARTUP"),
    ]  # fmt: skip
    assert token not in repr(found)


def test_secrets_are_never_in_the_report() -> None:
    planted = [one for one in PLANTED if one.kind == "credential"]
    said = repr(judge_planted(*planted))
    for word in (
        "b3BlbnNzaC1rZXkt",
        "AKIA2E4T",
        "hunter22",
        "0123456789abcdef",
        "s3cr3t",
        "aB3aB3",
    ):
        assert word not in said


@pytest.mark.parametrize(
    "line",
    [
        b"API_TOKEN=your-token-here", b"PASSWORD=$DB_PASSWORD", b"SECRET_KEY=changeme",
        b"aws_access_key_id=AKIAIOSFODNN7EXAMPLE", b"# token: see the wiki", b"TOKEN=",
        b"url = https://user:password@host.test/", b"url = https://git.test/x.git",
    ],
)  # fmt: skip
def test_placeholders_are_no_credentials(line: bytes) -> None:
    found = judge_planted(Planted("/workspace/.env", "", "", line))
    assert [each for each in found if each.kind == "credential"] == []


# --- rights


def test_rights_follow_the_mode_bits_and_the_directories_above() -> None:
    made = tree(
        Entry("/shut", "dir", 0, 0o700), Entry("/shut/open", "file", 1, 0o666),
        Entry("/drop", "dir", 0, 0o1777), Entry("/drop/mine", "file", 1, 0o400, 1000),
        Entry("/drop/others", "file", 1, 0o644), Entry("/all", "dir", 0, 0o777),
        Entry("/all/others", "file", 1, 0o600), Entry("/team", "file", 1, 0o060, 0, 1000),
        Entry("/odd", "file", 1, 0o077, 1000, 1000),
    )  # fmt: skip
    rights = {
        entry.path: ("r" if made.readable(entry) else "-") + ("w" if made.writable(entry) else "-")
        for entry in made
        if entry.type == "file"
    }
    assert rights == {
        "/shut/open": "--", "/drop/mine": "rw", "/drop/others": "r-", "/all/others": "-w",
        "/team": "rw", "/odd": "--",
    }  # fmt: skip


def test_links_are_resolved_inside_and_loops_end() -> None:
    made = tree(
        Entry("/bin", "symlink", target="usr/bin"), Entry("/usr/bin/sh", "file", 1),
        Entry("/up", "symlink", target="../../../usr"), Entry("/a", "symlink", target="b"),
        Entry("/b", "symlink", target="/a"), Entry("/self", "symlink", target="/self/x"),
    )  # fmt: skip
    assert getattr(made.resolve("/bin/sh"), "path", None) == "/usr/bin/sh"
    assert getattr(made.resolve("/up/bin/../bin/sh"), "path", None) == "/usr/bin/sh"
    assert made.resolve("/a") is made.resolve("/self") is made.resolve("/none") is None


def test_a_tree_of_great_depth_is_judged_without_recursion() -> None:
    path, deep = "", []
    for _ in range(2000):
        path += "/a"
        deep.append(Entry(path, "dir", 0, 0o755))
    deep.append(Entry(f"{path}/solution", "file", 1))
    assert [each.risk for each in judge(Tree(deep, USER))] == ["critical"]


# --- patterns, output, bounds


@given(st.text("ab/*?", min_size=1, max_size=12), st.text("ab/", max_size=10))
def test_patterns_agree_with_those_of_policies(text: str, path: str) -> None:
    text, path = f"/{text.strip('/')}", f"/{path.strip('/')}"
    if text == "/" or "//" in text or "//" in path:
        return
    try:
        pattern = Pattern(text)
    except InvalidArgument:
        return
    assert pattern.covers(path) == covers(text, path)


@pytest.mark.parametrize("text", ["/a**b", "/a//b", "/a/", "", "a*b*c*d*e"])
def test_patterns_that_are_not_understood_are_refused(text: str) -> None:
    with pytest.raises(InvalidArgument):
        Pattern(text)


@pytest.mark.parametrize(
    "wanted",
    [
        Wanted(grader=("tests",)), Wanted(grader=("/a/../b",)), Wanted(answers=("",)),
        Wanted(fix_commit="abc"), Wanted(fix_commit="not-a-commit"),
    ],
)  # fmt: skip
def test_a_question_without_sense_is_refused(wanted: Wanted) -> None:
    with pytest.raises(InvalidArgument):
        auditing._check(wanted)


def test_hostile_names_are_shown_escaped() -> None:
    name = "/tmp/\x1b[31m\n\u202e\udcff\\é"
    assert shown(name) == "/tmp/\\x1b[31m\\n\\u202e\\xff\\\\é"


def test_many_findings_of_a_kind_are_cut_with_a_sentence() -> None:
    many = [Finding(risk="low", kind="cache", path=f"/{n}", reason="r") for n in range(60)]
    kept, cut = shortened(many)
    assert len(kept) == MAX_OF_KIND
    assert cut == ("10 more findings of kind cache and risk low are not shown",)


def test_hostile_content_takes_linear_time() -> None:
    size = 256 << 10
    texts = [b"\n" * size, b"a" * size, b"secret" * (size // 6), b"password " * (size // 9),
             b"-----BEGIN A " * (size // 13), b"sk-" * (size // 3), b"a://" * (size // 4),
             b" " * size, b"token:" * (size // 6)]  # fmt: skip
    start = time.process_time()
    for text in texts:
        judge_planted(Planted("/workspace/.env", "", "", text))
        judge_planted(Planted("/home/agent/.gitconfig", "", "", text))
    assert time.process_time() - start < 10


# --- the proposed policy


def _policy(findings: Iterable[Finding]) -> str:
    return proposal.policy("base/x:1", findings)


def test_the_proposed_policy_compiles_and_closes_what_it_is_for() -> None:
    planted = [dataclasses.replace(one) for one in PLANTED]
    before = judge_planted(*planted)
    text = _policy(before)
    compiled = compile_policy(from_toml(text))
    assert compiled.net.default == "deny"
    assert compiled.net.rules == ()
    written = [rule for rule in compiled.files.rules if rule.verdict == "deny"]
    for found in before:
        if found.remedy and found.risk != "low":
            hidden = any(covers(pattern, found.path) for pattern in compiled.files.hidden)
            denied = any(covers(rule.pattern, found.path) for rule in written)
            assert hidden or (found.remedy == "read-only" and denied), found


def test_a_sandbox_under_the_proposed_policy_has_what_no_policy_mends() -> None:
    entries = [one.entry for one in PLANTED]
    before = judge(tree(*CLEAN, *entries))
    policy = from_toml(_policy(before))
    hidden, fixed = auditing._protected(
        SandboxPolicy(network="none", policy=msgspec.to_builtins(policy))
    )
    after = judge(Tree(list(tree(*CLEAN, *entries)), USER, hidden, fixed))
    assert [each for each in after if each.remedy and each.risk != "low"] == []


@given(st.lists(st.text(st.characters(exclude_characters="/\0"), min_size=1, max_size=20)))
def test_a_policy_for_any_names_compiles(names: list[str]) -> None:
    kinds = ("hide", "read-only")
    findings = [
        Finding(risk="high", kind="answer", path=f"/d/{name}", reason=name, remedy=kinds[at % 2])
        for at, name in enumerate(names)
        if name not in (".", "..")
    ]  # fmt: skip
    compile_policy(from_toml(_policy(findings)))


def test_hooks_above_the_grader_are_guarded_before_they_are_there() -> None:
    wanted = Wanted(grader=("/workspace/pkg/tests",))
    text = proposal.policy("x", [], hooks.guarded(Places(WORKDIR), wanted))
    (rule,) = from_toml(text).files.rules
    assert rule.paths == ["/workspace/pkg/conftest.py", "/workspace/conftest.py"]
    assert rule.deny == ["write"]


def test_a_policy_of_many_findings_is_bounded() -> None:
    many = [
        Finding(risk="high", kind="answer", path=f"/d/{n}", reason="", remedy="hide")
        for n in range(5000)
    ]
    assert len(compile_policy(from_toml(_policy(many))).files.hidden) == proposal.MAX_PATHS


# --- a sandbox that runs


def test_listening_sockets_are_services() -> None:
    head = "  sl  local_address rem_address   st\n"
    tcp = head + "   0: 0100007F:1F90 00000000:0000 0A 0\n   1: 0100007F:0050 0100007F:1234 01 0\n"
    tcp6 = head + "   0: 00000000000000000000000001000000:0016 0:0 0A 0\n"
    unix = "Num RefCount Protocol Flags Type St Inode Path\n"
    unix += "0: 2 0 00010000 0001 01 1 /run/x.sock\n0: 2 0 00010000 0001 01 1 @abstract\n"
    unix += "0: 3 0 00000000 0001 03 2\n"
    engine = Entry("/var/run/docker.sock", "socket", 0, 0o666)
    found = list(running.sockets((tcp, tcp6), unix, tree(engine)))
    assert [(each.risk, each.path) for each in found] == [
        ("medium", "tcp://127.0.0.1:8080"), ("medium", "tcp://[::1]:22"), ("low", "/run/x.sock"),
        ("low", "@abstract"), ("critical", "/var/run/docker.sock"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("policy", "risks"),
    [
        (None, ["high"]),
        ({"network": {"services": {"pypi": True, "npm": False}}}, ["medium"]),
        ({"network": {"services": {"github": True}}}, ["high"]),
        ({"extends": "sealed"}, []),
        ({"extends": "open"}, ["high"]),
        ({"extends": "swe", "network": {"services": {"x": True}}}, ["high", "medium"]),
        ({"network": {"rules": [{"allow": "*"}, {"deny": "x.test"}]}}, ["high"]),
        ({"network": {"default": "allow"}}, ["high"]),
    ],
)
def test_what_the_policy_leaves_open(policy: dict[str, object] | None, risks: list[str]) -> None:
    for mode, expected in (("nat", risks), ("none", [])):
        found = running.network("s", SandboxPolicy(network=mode, policy=policy))  # type: ignore[arg-type]
        assert [each.risk for each in found] == expected


def test_a_network_that_is_closed_for_want_of_rules_opens_nothing() -> None:
    row = PolicyRow(place="network.default", verdict="deny", text="all else", state="closed")
    in_force = SandboxPolicy(network="nat", policy={"extends": "open"}, rows=[row])
    assert list(running.network("s", in_force)) == []


def test_what_is_not_enforced_is_a_finding_and_protects_nothing() -> None:
    policy = {
        "files": {"hide": ["/a", "/b"], "rules": [{"paths": ["/c"], "deny": ["write"]}]},
    }
    rows = [
        PolicyRow(place=place, verdict="deny", text="t", state=state, reasons=["why"])
        for place, state in (
            ("files.hide[0]", "enforced"), ("files.hide[1]", "not enforced"),
            ("files.rules[0]", "partly"),
        )
    ]  # fmt: skip
    in_force = SandboxPolicy(network="none", policy=policy, rows=rows)
    hidden, fixed = auditing._protected(in_force)
    assert ([pattern.covers("/a/x") for pattern in hidden], fixed) == ([True], [])
    said = [(each.kind, each.risk, each.evidence) for each in running.network("s", in_force)]
    assert said == [
        ("unenforced", "medium", "files.hide[1]: deny t is not enforced: why"),
        ("unenforced", "medium", "files.rules[0]: deny t is partly: why"),
    ]
