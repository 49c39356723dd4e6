"""The direction of imports and who may touch the kernel, read from the syntax trees."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DAEMON = ROOT / "src/dsecd"
PACKAGES = (DAEMON, ROOT / "libdsec", ROOT / "src/dsec")
MAX_LINES = 500

# A module imports from its own level or below.
LEVELS = {
    "__main__": 8, "service": 8, "gateways": 7, "coordinator": 7, "rl": 6, "api": 6, "engine": 5,
    "backends": 4, "images": 4, "policy": 4, "resolver": 4, "secrets": 4, "resources": 4,
    "doors": 4, "relay": 4,
    "host": 3, "fastpath": 2, "log": 1, "metrics": 1,
    "errors": 0, "model": 0, "config": 0,
}  # fmt: skip
LEAVES = ("errors", "model", "config")
BACKENDS = ("container", "fake", "fncall", "fullvm", "microvm")
KERNEL_PATHS = ("/proc/", "/sys/", "/dev/")
READERS = {
    "Path", "chmod", "chown", "exists", "listdir", "mknod", "open", "open_tree", "readlink",
    "scandir", "setxattr", "stat", "statvfs", "umount",
}  # fmt: skip


def modules() -> list[Path]:
    return sorted(path for package in PACKAGES for path in package.rglob("*.py"))


@functools.cache
def nodes(path: Path) -> list[ast.AST]:
    """Return all nodes of the syntax tree of `path`."""
    return list(ast.walk(ast.parse(path.read_text(), str(path))))


def teardown_module() -> None:
    nodes.cache_clear()  # the collector would go through all trees in every test that comes after


def imported(path: Path) -> Iterator[str]:
    """Yield the dotted names that `path` imports, at any depth, relative ones resolved."""
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = path.relative_to(ROOT / "src" if DAEMON in path.parents else ROOT).parts
                base = ".".join((*parts[: -node.level], base)).rstrip(".")
            # `from dsecd.host import plan` names a module as often as an attribute
            yield from (f"{base}.{alias.name}" for alias in node.names)


def part_of_daemon(dotted: str) -> str | None:
    """Return the part of dsecd that `dotted` belongs to, None when it is not dsecd's."""
    names = dotted.split(".")
    return names[1] if names[0] == "dsecd" and len(names) > 1 else None


def part(path: Path) -> str:
    return path.relative_to(DAEMON).parts[0].removesuffix(".py")


def test_daemon_imports_go_down() -> None:
    breaches = []
    for path in sorted(DAEMON.rglob("*.py")):
        own = part(path)
        if own == "__init__":
            continue
        assert own in LEVELS, f"{path}: give {own} a level in this test"
        for dotted in imported(path):
            other = part_of_daemon(dotted)
            if other not in LEVELS:
                continue  # an attribute of the package, as __version__
            if LEVELS[other] > LEVELS[own] or (own in LEAVES and other != own):
                breaches.append(f"{path.relative_to(ROOT)} imports {dotted}")
    assert not breaches, "\n".join(breaches)


def test_backends_do_not_know_each_other() -> None:
    breaches = []
    for path in sorted((DAEMON / "backends").rglob("*.py")):
        own = path.relative_to(DAEMON / "backends").parts[0].removesuffix(".py")
        for dotted in imported(path):
            names = dotted.split(".")
            if names[:2] != ["dsecd", "backends"] or len(names) < 3 or own not in BACKENDS:
                continue
            if names[2] in BACKENDS and names[2] != own:
                breaches.append(f"{path.relative_to(ROOT)} imports {dotted}")
    assert not breaches, "\n".join(breaches)


def test_engine_asks_capabilities_not_names() -> None:
    breaches = []
    for path in sorted((DAEMON / "engine").rglob("*.py")):
        for node in nodes(path):
            if not isinstance(node, ast.Compare):
                continue
            values = [node.left, *node.comparators]
            literals = {v.value for v in values if isinstance(v, ast.Constant)}
            if literals & set(BACKENDS):
                breaches.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not breaches, "\n".join(breaches)


def test_one_module_imports_the_native_core() -> None:
    breaches = [
        f"{path.relative_to(ROOT)} imports {dotted}"
        for path in modules()
        if path != DAEMON / "fastpath.py"
        for dotted in imported(path)
        if dotted.split(".")[0] == "_fastpath"
    ]
    assert not breaches, "\n".join(breaches)


def test_client_does_not_import_the_daemon() -> None:
    breaches = [
        f"{path.relative_to(ROOT)} imports {dotted}"
        for path in sorted((ROOT / "libdsec").rglob("*.py"))
        for dotted in imported(path)
        if dotted.split(".")[0] in ("dsecd", "dsec")
    ]
    assert not breaches, "\n".join(breaches)


def _literal_start(node: ast.expr) -> str:
    if isinstance(node, ast.JoinedStr) and node.values:
        node = node.values[0]
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    return ""


def test_only_host_touches_the_kernel() -> None:
    """Outside `host/`: no system calls through ctypes, no opening of /proc, /sys or devices.

    Naming such a path is fine (masks and binds are data); reading it is not.
    """
    breaches = []
    for path in sorted(DAEMON.rglob("*.py")):
        if part(path) in ("host", "fastpath"):
            continue
        if any(dotted.split(".")[0] in ("ctypes", "cffi") for dotted in imported(path)):
            breaches.append(f"{path.relative_to(ROOT)} makes system calls of its own")
        for node in nodes(path):
            if not isinstance(node, ast.Call):
                continue
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            starts = [_literal_start(argument) for argument in node.args]
            if name in READERS and any(start.startswith(KERNEL_PATHS) for start in starts):
                breaches.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not breaches, "\n".join(breaches)


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_modules_stay_small(path: Path) -> None:
    lines = len(path.read_text().splitlines())
    assert lines < MAX_LINES, f"{lines} lines: split it"


def test_no_vague_modules() -> None:
    vague = {"utils", "util", "helpers", "helper", "common", "base", "misc"}
    found = [str(path.relative_to(ROOT)) for path in modules() if path.stem in vague]
    assert not found


def test_no_print_outside_the_command_line() -> None:
    breaches = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in modules()
        if ROOT / "src/dsec" not in path.parents
        for node in nodes(path)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "print"
    ]
    assert not breaches, "\n".join(breaches)
