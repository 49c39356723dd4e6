"""Mirrors of the host's apt join the catalogue's Debian service."""

from __future__ import annotations

from pathlib import Path

from dsecd.host import apt
from dsecd.policy import catalogue


def test_hosts_of_both_forms_of_sources(tmp_path: Path) -> None:
    (tmp_path / "sources.list").write_text(
        "deb http://one.example/debian stable main\n# deb http://off.example/debian stable main\n"
    )
    (tmp_path / "sources.list.d").mkdir()
    (tmp_path / "sources.list.d/a.sources").write_text(
        "Types: deb\nURIs: https://u:p@Two.example:8443/d http://one.example/x\nSuites: stable\n"
    )
    (tmp_path / "sources.list.d/b.save").write_text("deb http://old.example/debian stable main\n")
    assert apt.hosts(tmp_path) == ["one.example", "two.example"]
    assert apt.hosts(tmp_path / "none") == []


def test_they_join_a_service_without_changing_the_catalogue() -> None:
    before = catalogue.shipped()
    more = catalogue.with_mirrors(before, "debian", ["one.example", "security.debian.org"])
    assert more["debian"].mirrors == [*before["debian"].mirrors, "one.example"]
    assert "one.example" not in before["debian"].mirrors
