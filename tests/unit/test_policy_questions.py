"""Questions in plain words: the model's verdict, with the entries that decided."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsecd.policy import language
from dsecd.policy.compile import Compiled, compile_policy
from dsecd.policy.questions import ask
from libdsec.errors import InvalidArgument
from tests.unit import policy_cases as cases

POLICY = """
extends = "swe"
[network]
services = { npm = false, "192.0.2.0/24" = true }
[[network.rules]]
deny = "192.0.2.128/25"
[files]
hide = ["/answers"]
[[files.rules]]
paths = ["/w/tests"]
deny = ["write"]
[mounts]
default = "deny"
[[mounts.rules]]
allow = "tmpfs"
at = "/mnt"
[ioctls]
deny = ["TIOCGWINSZ"]
[unix]
deny = ["@x*"]
[vsock]
allow = ["2:1024"]
"""


@pytest.fixture(scope="module")
def policy() -> Compiled:
    return compile_policy(language.from_toml(POLICY))


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("tcp 192.0.2.1 443", "allow: network.services.192.0.2.0/24 (allow 192.0.2.0/24)"),
        ("udp ::ffff:192.0.2.1 1", "allow: network.services.192.0.2.0/24 (allow 192.0.2.0/24)"),
        ("tcp 192.0.2.129 443", "deny: network.rules[0] (deny 192.0.2.128/25)"),
        ("icmp 198.51.100.7", "deny: network.default"),
        ("name PyPI.org.", "allow: swe: network.services.pypi (allow pypi)"),
        ("name registry.yarnpkg.com", "deny: network.services.npm (deny npm)"),
        ("name example.net", "deny: network.default"),
        ("tcp pypi.org 443", "allow: swe: network.services.pypi (allow pypi)"),
        ("tcp pypi.org 80", "deny: network.default"),
        ("read /answers/1", "deny: files.hide[0] (deny /answers)"),
        ("write /w//tests/x", "deny: files.rules[0] (deny write of /w/tests)"),
        ("read /w/tests/x", "allow: files.default"),
        ("rename /w /v", "deny: files.rules[0] (deny write of /w/tests)"),
        ("mount tmpfs /mnt/a", "allow: mounts.rules[0] (allow tmpfs at /mnt)"),
        ("mount bind /mnt/a", "deny: mounts.default"),
        ("ioctl 0x5413", "deny: ioctls.deny[0] (deny TIOCGWINSZ)"),
        ("unix @xy", "deny: unix.deny[0] (deny @x*)"),
        ("unix /run/x", "allow: unix.default"),
        ("vsock 2 1024", "allow: vsock.allow[0] (allow 2:1024)"),
        ("vsock 2 1025", "deny: vsock.default"),
    ],
)
def test_answers_name_what_decided(policy: Compiled, question: str, answer: str) -> None:
    assert str(ask(policy, question.split())) == answer


@pytest.mark.parametrize(
    "question",
    ["", "tcp 1.2.3.4", "tcp 1.2.3.4 x", "tcp 1.2.3.4 1-2", "tcp 1.2.3.0/24 80", "name *.a.b",
     "read etc", "sctp 1.2.3.4 5", "ioctl WHAT", "vsock a b", "name localhost"],
)  # fmt: skip
def test_a_malformed_question_says_what_is_wrong(policy: Compiled, question: str) -> None:
    with pytest.raises(InvalidArgument, match=r"^question: "):
        ask(policy, question.split())


_WORDS = ("tcp", "udp", "icmp", "name", "read", "rename", "mount", "ioctl", "unix", "vsock")


@given(
    st.sampled_from(_WORDS),
    st.lists(st.text(max_size=6) | st.sampled_from([*cases.PATHS, *cases.ADDRESSES]), max_size=2),
)
def test_any_question_is_answered_or_refused(word: str, words: list[str]) -> None:
    try:
        ask(compile_policy(language.Policy()), [word, *words])
    except InvalidArgument:
        return
