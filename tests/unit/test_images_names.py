"""Names and digests of layers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsecd.images import names
from libdsec.errors import InvalidArgument


@pytest.mark.parametrize(
    ("given_name", "full"),
    [
        ("base/debian:12", "base/debian:12"),
        ("base/debian", "base/debian:latest"),
        ("registry.example/sphinx-9658:official", "registry.example/sphinx-9658:official"),
        ("registry.../sphinx-9658:official", "registry.../sphinx-9658:official"),
        ("registry.example:5000/team/img:v1.2_3", "registry.example:5000/team/img:v1.2_3"),
        ("localhost:5000/img", "localhost:5000/img:latest"),
        ("deadbeef", "deadbeef:latest"),
    ],
)
def test_a_name_gets_its_tag(given_name: str, full: str) -> None:
    assert names.normalise(given_name) == full
    assert names.from_file(names.to_file(full)) == full
    assert "/" not in names.to_file(full)


@pytest.mark.parametrize(
    "bad",
    [
        "",
        "/x",
        "x/",
        "a//b",
        "../x",
        "a/../b",
        ".",
        ":tag",
        "a:",
        "a b",
        "a\n",
        "a:b:c",
        "é",
        "x" * 201,
    ],
)
def test_bad_names_are_refused_with_an_example(bad: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        names.normalise(bad)
    assert caught.value.detail["field"] == "name"


@given(st.text(max_size=60))
def test_whatever_is_accepted_is_one_harmless_file_name(text: str) -> None:
    try:
        full = names.normalise(text)
    except InvalidArgument:
        return
    file = names.to_file(full)
    assert "/" not in file
    assert file not in (".", "..")
    assert len(file.encode()) < 256
    assert names.normalise(full) == full


def test_digests_and_their_abbreviations() -> None:
    digest = "0123456789abcdef" * 4
    assert names.digest_prefix(digest) == digest
    assert names.digest_prefix(f"sha256:{digest}") == digest
    assert names.digest_prefix("012345") == "012345"
    assert names.digest_prefix("01234") is None  # too short to be meant
    assert names.digest_prefix("base/debian:12") is None
    assert names.is_digest(digest)
    assert not names.is_digest(digest[:-1])
