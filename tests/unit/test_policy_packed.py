"""Network policies in the journal."""

from __future__ import annotations

import random

import msgspec
import pytest

from dsecd.policy.compile import compile_policy
from dsecd.policy.language import from_object
from dsecd.policy.packed import pack, unpack
from tests import net_cases


def test_what_is_unpacked_is_what_was_packed() -> None:
    rng = random.Random(1)
    for _ in range(200):
        policy = net_cases.policy(rng)
        assert unpack(pack(policy)) == policy


def test_prefixes_that_earlier_versions_wrote_as_text_are_read() -> None:
    rng = random.Random(2)
    for _ in range(50):
        policy = net_cases.policy(rng)
        assert unpack(msgspec.msgpack.encode(policy, enc_hook=str)) == policy


def test_names_and_presets_survive() -> None:
    rules = [{"allow": "*.example.com", "ports": [443]}, {"deny": "10.0.0.0/8"}]
    policy = compile_policy(from_object({"extends": "swe", "network": {"rules": rules}})).net
    assert unpack(pack(policy)) == policy


def test_whether_names_are_checked_survives_and_is_off_in_what_does_not_say() -> None:
    checked = compile_policy(from_object({"network": {"check_names": True}})).net
    assert unpack(pack(checked)) == checked
    assert checked.check_names
    earlier = msgspec.msgpack.encode({"rules": [], "names": [], "default": "deny"})
    assert not unpack(earlier).check_names


def test_anything_else_is_refused() -> None:
    for data in (b"", b"\x80", b"\xc1"):
        with pytest.raises((ValueError, KeyError)):
            unpack(data)
