"""The check that a kernel has what its configuration asks for."""

from __future__ import annotations

import re

from scripts.build_guest import FRAGMENT, settings, unmet

CONFIG = """
#
# Automatically generated file; DO NOT EDIT.
#
CONFIG_SMP=y
CONFIG_NR_CPUS=64
CONFIG_LSM="landlock,yama"
# CONFIG_JUMP_LABEL is not set
"""


def test_what_holds_is_not_reported() -> None:
    fragment = CONFIG + "# CONFIG_UNHEARD_OF is not set\n# Time: CONFIG_SMP=n\n"
    assert unmet(fragment, CONFIG) == []


def test_every_line_that_does_not_hold_is_named() -> None:
    fragment = """
CONFIG_SMP=y
CONFIG_NR_CPUS=32
CONFIG_LSM="landlock"
CONFIG_JUMP_LABEL=y
CONFIG_UNHEARD_OF=y
# CONFIG_SMP is not set
"""
    assert unmet(fragment, CONFIG) == [
        "CONFIG_NR_CPUS=32",
        'CONFIG_LSM="landlock"',
        "CONFIG_JUMP_LABEL=y",
        "CONFIG_UNHEARD_OF=y",
        "CONFIG_SMP=n",
    ]


def test_the_fragment_names_each_option_once_and_builds_no_modules() -> None:
    text = FRAGMENT.read_text()
    names = [name for name, _ in settings(text)]
    assert len(names) > 200
    assert sorted(names) == sorted(set(names))
    assert not [line for line in text.splitlines() if re.fullmatch(r"CONFIG_\w+=m", line)]
    assert "CONFIG_MODULES" not in names
    # a line that is neither option nor comment would be passed over in silence
    strange = [
        line
        for line in text.splitlines()
        if line and not line.startswith("# ") and line != "#" and not list(settings(line))
    ]
    assert strange == []
