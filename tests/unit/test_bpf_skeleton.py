"""The kept light skeleton is the one of the sources, and sizes agree on both sides of the maps."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from _fastpath import _core
from dsecd.host import lsmtable, nettable

ROOT = Path(__file__).resolve().parents[2]
SKELETONS = {  # by name: the directory of the sources
    "netpolicy": ROOT / "bpf",
    "lsmpolicy": ROOT / "bpf/lsm",
}
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
LSM_SIZES = {
    "denial": lsmtable.DENIAL_BYTES,
    "node": lsmtable.NODE_BYTES,
    "name_key": lsmtable.NAME_KEY_BYTES,
    "root_key": lsmtable.ROOT_KEY_BYTES,
    "binding": lsmtable.BINDING_BYTES,
    "peer": lsmtable.PEER_BYTES,
    "type_key": lsmtable.TYPE_KEY_BYTES,
    "abstract_key": lsmtable.ABSTRACT_KEY_BYTES,
}


def _digest(directory: Path) -> str:
    files = sorted(path for path in directory.iterdir() if path.suffix in (".c", ".h"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:16]


@pytest.mark.parametrize("name", SKELETONS)
def test_the_skeleton_is_that_of_the_sources(name: str) -> None:
    skeleton = (ROOT / f"src/_fastpath/bpf/{name}.lskel.h").read_text()
    found = re.search(rf"{name.upper()}_VERSION 0x([0-9a-f]{{16}})ULL", skeleton)
    assert found
    assert found[1] == _digest(SKELETONS[name]), "run scripts/dev bpf"
    built = {
        "netpolicy": _core.network_programs_version(),
        "lsmpolicy": _core.file_programs_version(),
    }
    assert f"{built[name]:016x}" == found[1], "build the extension again"


@pytest.mark.parametrize(
    ("name", "sizes", "numbers"),
    [("netpolicy", SIZES, NUMBERS), ("lsmpolicy", LSM_SIZES, {})],
)
def test_structs_and_numbers_are_those_that_python_packs(
    name: str, sizes: dict[str, int], numbers: dict[str, int], tmp_path: Path
) -> None:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("cc: not installed")
    checks = "".join(
        f'_Static_assert(sizeof(struct {name}) == {size}, "{name}");\n'
        for name, size in sizes.items()
    )
    checks += "".join(
        f'_Static_assert({name} == {number}, "{name}");\n' for name, number in numbers.items()
    )
    if numbers:
        checks += '_Static_assert(FIRST_STEP * 2 > LENGTHS6 && LENGTHS6 > LENGTHS4, "search");\n'
    source = tmp_path / "sizes.c"
    source.write_text(f'#include "layout.h"\n{checks}')
    command = [compiler, "-fsyntax-only", f"-I{SKELETONS[name]}", str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
