"""The kept light skeleton is the one of the sources, and sizes agree on both sides of the maps."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from _fastpath import _core
from dsecd.host import nettable

ROOT = Path(__file__).resolve().parents[2]
SKELETON = ROOT / "src/_fastpath/bpf/netpolicy.lskel.h"
SIZES = {
    "rule_key": nettable.RULE_KEY_BYTES,
    "ports": nettable.PORTS_BYTES,
    "name_key": nettable.NAME_KEY_BYTES,
    "name_ports": nettable.NAME_BYTES,
    "binding": nettable.BINDING_BYTES,
    "link_value": nettable.LINK_BYTES,
    "counters": nettable.COUNTERS_BYTES,
    "event": nettable.EVENT_BYTES,
}
NUMBERS = {
    "RANGES": nettable.RANGES,
    "PARTS": nettable.PARTS,
    "PART_BITS": nettable.PART_BITS,
    "LENGTHS4": nettable.LENGTHS4,
    "LENGTHS6": nettable.LENGTHS6,
    "FIRST_STEP": nettable.FIRST_STEP,
}


def _digest() -> str:
    files = sorted(path for path in (ROOT / "bpf").iterdir() if path.suffix in (".c", ".h"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:16]


def test_the_skeleton_is_that_of_the_sources() -> None:
    found = re.search(r"NETPOLICY_VERSION 0x([0-9a-f]{16})ULL", SKELETON.read_text())
    assert found
    assert found[1] == _digest(), "run scripts/dev bpf"
    assert f"{_core.network_programs_version():016x}" == found[1], "build the extension again"


def test_structs_and_numbers_are_those_that_python_packs(tmp_path: Path) -> None:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("cc: not installed")
    checks = "".join(
        f'_Static_assert(sizeof(struct {name}) == {size}, "{name}");\n'
        for name, size in SIZES.items()
    )
    checks += "".join(
        f'_Static_assert({name} == {number}, "{name}");\n' for name, number in NUMBERS.items()
    )
    checks += '_Static_assert(FIRST_STEP * 2 > LENGTHS6 && LENGTHS6 > LENGTHS4, "search");\n'
    source = tmp_path / "sizes.c"
    source.write_text(f'#include "layout.h"\n{checks}')
    command = [compiler, "-fsyntax-only", f"-I{ROOT / 'bpf'}", str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
