"""Writes `sync.pyi`, the types of the synchronous twin, from the asynchronous source.

``python -m libdsec.stubs`` rewrites the file; a unit test fails when it is out of date.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from libdsec.client import DSecClient
from libdsec.commands import CommandHandle, Commands
from libdsec.display import Display
from libdsec.files import Files
from libdsec.forward import ForwardServer
from libdsec.layers import Layers
from libdsec.pty import Pty
from libdsec.sandbox import Sandbox
from libdsec.session import Session
from libdsec.watch import WatchHandle

STUB = Path(__file__).with_name("sync.pyi")
MIRRORED = (
    CommandHandle, Commands, Display, Files, ForwardServer, Layers, Pty, Session, WatchHandle,
    Sandbox, DSecClient,
)  # fmt: skip

_HEADER = '''\
"""Types of the synchronous twin. Made by ``python -m libdsec.stubs``: do not edit."""
# ruff: noqa: E501

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, overload

from libdsec import model
from libdsec.build import StepCallback
from libdsec.commands import CommandInfos, Word
from libdsec.errors import DSecError
from libdsec.execution import DataCallback, TextCallback
from libdsec.files import (
    AnyPath,
    Content,
    Entries,
    EntryInfo,
    Paths,
    WriteEntry,
    WriteInfo,
    Written,
)
from libdsec.layers import LayerInfos
from libdsec.progress import ImportCallback
from libdsec.record import Verified
from libdsec.result import CommandResult
from libdsec.sandbox import Checkpoints
from libdsec.transfer import Progress
from libdsec.watch import EventCallback, FileEvent

class StreamReaderSync:
    def read(self, n: int = -1) -> bytes: ...
    def readline(self) -> bytes: ...
    def readexactly(self, n: int) -> bytes: ...
    def readuntil(self, separator: bytes = b"\\n") -> bytes: ...
    def at_eof(self) -> bool: ...

class StreamWriterSync:
    def write(self, data: bytes) -> None: ...
    def writelines(self, data: Iterable[bytes]) -> None: ...
    def write_eof(self) -> None: ...
    def can_write_eof(self) -> bool: ...
    def drain(self) -> None: ...
    def close(self) -> None: ...
    def is_closing(self) -> bool: ...
    def wait_closed(self) -> None: ...
    def get_extra_info(self, name: str, default: Any = None) -> Any: ...
'''
_RENAMED = {"__aenter__": "__enter__", "__aexit__": "__exit__", "__aiter__": "__iter__",
            "__anext__": "__next__"}  # fmt: skip
_NAMES = re.compile(
    r"(?<![\w.])(?:asyncio\.)?(" + "|".join([*(c.__name__ for c in MIRRORED), "StreamReader",
                                             "StreamWriter"]) + r")(?!\w)"
)  # fmt: skip


def render() -> str:
    """Return the text of the stub."""
    parts = [_HEADER]
    for original in MIRRORED:
        lines = "\n".join(_class(original))
        parts.append(f"class {original.__name__}Sync:\n{textwrap.indent(lines, '    ')}\n")
    return "\n".join(parts)


def _class(original: type[Any]) -> Iterator[str]:
    tree = ast.parse(textwrap.dedent(inspect.getsource(original))).body[0]
    assert isinstance(tree, ast.ClassDef)
    for node in tree.body:
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        wanted = node.name in _RENAMED or not node.name.startswith("_")
        if node.name == "__init__" and original is DSecClient:
            wanted = True
        if wanted and not _overloaded(tree, node):
            yield from _function(node)


def _overloaded(tree: ast.ClassDef, node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether `node` is the implementation behind overloads, which the stub leaves out."""
    return not node.decorator_list and any(
        isinstance(other, ast.AsyncFunctionDef) and other.name == node.name
        and other.decorator_list for other in tree.body
    )  # fmt: skip


def _function(node: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    for decorator in node.decorator_list:
        yield f"@{ast.unparse(decorator)}"
    returns = _translate(ast.unparse(node.returns) if node.returns else "None", result=True)
    arguments = _translate(ast.unparse(node.args), result=False)
    yield f"def {_RENAMED.get(node.name, node.name)}({arguments}) -> {returns}: ..."


def _translate(text: str, *, result: bool) -> str:
    text = _NAMES.sub(lambda match: f"{match.group(1)}Sync", text)
    return text.replace("AsyncIterator[", "Iterator[") if result else text


if __name__ == "__main__":
    STUB.write_text(render())
