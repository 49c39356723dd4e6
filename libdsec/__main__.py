"""``python -m libdsec FILE [ARG…]``: run a script that uses ``await`` at its top level."""

from __future__ import annotations

import ast
import asyncio
import inspect
import sys
import types
from pathlib import Path

from libdsec.errors import Unavailable


async def run(path: Path, arguments: list[str]) -> None:
    """Run `path` as ``__main__`` with `arguments`, in this event loop."""
    module = types.ModuleType("__main__")
    module.__file__ = str(path)
    code = compile(
        path.read_bytes(), str(path), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT,
        dont_inherit=True,
    )  # fmt: skip
    sys.modules["__main__"] = module
    sys.argv = [str(path), *arguments]
    sys.path.insert(0, str(path.resolve().parent))
    answer = eval(code, module.__dict__)
    if inspect.isawaitable(answer):
        await answer


def main() -> int:
    """Entry of ``python -m libdsec``."""
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        sys.stderr.write("usage: python -m libdsec FILE [ARG...]\n")
        return 2
    path = Path(sys.argv[1])
    if not path.is_file():
        sys.stderr.write(f"python -m libdsec: {path} is not a file\n")
        return 2
    try:
        asyncio.run(run(path, sys.argv[2:]))
    except Unavailable as error:
        sys.stderr.write(f"{path.name}: {error.message}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
