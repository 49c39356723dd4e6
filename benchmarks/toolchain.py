"""Compiles the C parts of the benchmarks at run time, once per source text.

They are measuring instruments, not part of the product, and are built on the machine they
measure. The binary lies in the user's cache directory under the hash of source and flags.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path


class ToolchainError(Exception):
    """No compiler, no source, or the source does not compile; the message says which."""


def _cache() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or str(Path("~/.cache").expanduser())
    return Path(root) / "dsec-bench"


def compile_c(name: str, *flags: str) -> Path:
    """Return the path of the program built from ``name`` (a .c file beside this module)."""
    source = Path(__file__).with_name(name)
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if not source.exists():
        raise ToolchainError(f"{name} is missing")
    if compiler is None:
        raise ToolchainError("no C compiler: install gcc, or set CC")
    options = ["-O2", "-std=gnu11", "-D_GNU_SOURCE", *flags]
    text = source.read_bytes() + "\0".join([compiler, *options]).encode()
    target = _cache() / f"{source.stem}-{hashlib.sha256(text).hexdigest()[:16]}"
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_suffix(f".{os.getpid()}")
    done = subprocess.run(
        [compiler, *options, "-o", str(part), str(source)], capture_output=True, text=True
    )
    if done.returncode != 0:
        raise ToolchainError(f"{name} does not compile: {done.stderr.strip()[-400:]}")
    part.rename(target)  # two benches may build at the same time
    return target
