"""The tree of QEMU's jail: what is in it, and that its name changes with it."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from dsecd.host import vmm_tree
from dsecd.host.vmm_tree import PROGRAM, Part, Tree, assemble, survey
from dsecd.images import names
from libdsec.errors import Unsupported

needed = pytest.mark.skipif(
    not PROGRAM.exists(), reason=f"{PROGRAM} is missing: install {vmm_tree.PACKAGE}"
)


def test_a_missing_qemu_says_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="install qemu-system-x86"):
        survey(tmp_path / "qemu")


def test_what_is_no_qemu_is_refused() -> None:
    with pytest.raises(Unsupported, match="no QEMU"):
        vmm_tree.version(Path("/bin/true"))


@needed
def test_the_tree_holds_all_that_is_loaded_and_little_else() -> None:
    tree = survey()
    targets = [part.target for part in tree.parts]
    assert len(targets) == len(set(targets))
    assert not [target for target in targets if target.startswith(("/", "lib", "bin/"))]
    found = {Path(target).name for target in targets}
    assert {
        PROGRAM.name, "libc.so.6", "libglib-2.0.so.0", "bios-256k.bin", "qboot.rom",
    } <= found  # fmt: skip
    for part in tree.parts:
        assert part.source.is_file()
        assert not part.source.is_symlink()
    assert sum(part.source.stat().st_size for part in tree.parts) < 128 << 20
    assert names.normalise(tree.name) == tree.name
    assert names.kind(tree.name) == "base"
    assert survey() == tree


def part(path: Path, content: bytes, mode: int = 0o644) -> Part:
    path.write_bytes(content)
    path.chmod(mode)
    return Part(f"usr/lib/{path.name}", path)


def test_the_name_changes_with_any_byte(tmp_path: Path) -> None:
    one = part(tmp_path / "a.so", b"1")
    before = vmm_tree._digest((one,))
    assert vmm_tree._digest((Part("usr/lib/b.so", one.source),)) != before
    part(tmp_path / "a.so", b"2")
    assert vmm_tree._digest((one,)) != before
    part(tmp_path / "a.so", b"1")
    assert vmm_tree._digest((one,)) == before


def test_it_is_assembled_the_same_whatever_the_umask(tmp_path: Path) -> None:
    parts = (part(tmp_path / "a.so", b"library"), part(tmp_path / "loader", b"loader", 0o700))
    root = tmp_path / "root"
    root.mkdir()
    before = os.umask(0o077)
    try:
        assemble(Tree("base/x:1", parts), root)
    finally:
        os.umask(before)
    modes = {
        str(path.relative_to(root)): stat.S_IMODE(path.lstat().st_mode)
        for path in root.rglob("*")
        if not path.is_symlink()
    }
    assert modes["usr/lib/a.so"] == modes["etc/passwd"] == 0o644
    assert modes["usr/lib/loader"] == modes["vm"] == modes["usr"] == 0o755
    assert modes["tmp"] == 0o1777
    assert {path.lstat().st_mtime for path in (root, *root.rglob("*"))} == {0}
    assert (root / "lib64").readlink() == Path("usr/lib64")
    users = (root / "etc/passwd").read_text()
    assert "\nvmm:x:1000:1000:" in users
    assert users.startswith("root:x:0:0:")
    assert not list((root / "vm").iterdir())
