"""Repositories of a sandbox, read as far as the audit needs them: references and commits."""

from __future__ import annotations

import asyncio
import mmap
import posixpath
import re
from collections.abc import Iterator
from typing import IO

from libdsec.audit import gitobjects
from libdsec.audit.githistory import Repository
from libdsec.audit.gitobjects import Malformed, Objects
from libdsec.audit.hooks import is_repository
from libdsec.audit.source import Source
from libdsec.audit.tree import Entry, Tree

MAX_REPOSITORIES = 50
_MAX_LOOSE = 20_000
_MAX_TEXT = 4 << 20  # bytes of packed-refs and of each reflog
_LOOSE_BYTES = 4096  # of a loose object: a commit's head fits
_TEXTS = ("HEAD", "packed-refs", "FETCH_HEAD", "ORIG_HEAD", "MERGE_HEAD")
_FANOUT = re.compile(r"/([0-9a-f]{2})/([0-9a-f]{38}(?:[0-9a-f]{24})?)")


async def repositories(tree: Tree, source: Source) -> list[Repository]:
    """Return the repositories whose objects the agent can read."""
    found: list[Repository] = []
    heads = [entry.path for entry in tree if entry.type == "file" and entry.name == "HEAD"]
    for path in map(posixpath.dirname, heads):
        store = tree.resolve(posixpath.join(path, "objects"))
        if not is_repository(tree, path) or store is None or not tree.readable(store):
            continue
        if len(found) == MAX_REPOSITORIES:
            source.miss("git repositories not looked at", path)
            continue
        found.append(await _repository(path, store.path, tree, source))
    return found


async def _repository(path: str, store: str, tree: Tree, source: Source) -> Repository:
    wanted = [(entry.path, min(entry.size, _MAX_TEXT)) for entry in _texts(path, tree)]
    texts = await source.read_all(wanted)
    start = len(path.rstrip("/")) + 1
    repository = Repository(path, {name[start:]: text for name, text in texts.items()})
    for directory in await _stores(store, tree, source):
        await _loose(directory, tree, source, repository.objects)
        await _packs(directory, tree, source, repository.objects)
    return repository


def _texts(path: str, tree: Tree) -> Iterator[Entry]:
    for name in _TEXTS:
        entry = tree.get(posixpath.join(path, name))
        if entry is not None and entry.type == "file":
            yield entry
    for name in ("refs", "logs"):
        for entry in tree.below(posixpath.join(path, name)):
            if entry.type == "file":
                yield entry
    for worktree in tree.children(posixpath.join(path, "worktrees")):
        entry = tree.get(posixpath.join(worktree.path, "HEAD"))
        if entry is not None and entry.type == "file":
            yield entry


async def _stores(store: str, tree: Tree, source: Source) -> list[str]:
    """Return the object directory and its alternates: gitrepository-layout(5)."""
    found = [store]
    for directory in found:
        content = await source.read_all(
            (entry.path, _MAX_TEXT) for entry in _one(tree, directory, "info/alternates")
        )
        for line in b"".join(content.values()).decode(errors="surrogateescape").splitlines():
            other = tree.resolve(posixpath.join(directory, line))
            if other is not None and other.path not in found and len(found) < MAX_REPOSITORIES:
                found.append(other.path)
    return found


def _one(tree: Tree, directory: str, name: str) -> list[Entry]:
    entry = tree.get(posixpath.join(directory, name))
    return [entry] if entry is not None and entry.type == "file" else []


async def _loose(store: str, tree: Tree, source: Source, objects: Objects) -> None:
    names: dict[str, str] = {}
    for entry in tree.below(store):
        match = _FANOUT.fullmatch(entry.path[len(store) :])
        if match is not None and entry.type == "file":
            if len(names) == _MAX_LOOSE:
                source.miss("loose objects of git not looked at", entry.path)
                break
            names[entry.path] = match[1] + match[2]
    for path, data in (await source.read_all((path, _LOOSE_BYTES) for path in names)).items():
        try:
            gitobjects.add_loose(objects, names[path], data)
        except Malformed as error:
            source.miss("objects of git not understood", f"{path} ({error})")


async def _packs(store: str, tree: Tree, source: Source, objects: Objects) -> None:
    for pack in tree.children(posixpath.join(store, "pack")):
        if pack.type != "file" or not pack.name.endswith(".pack"):
            continue
        index = tree.get(pack.path.removesuffix("pack") + "idx")
        size = pack.size + (index.size if index else 0)
        if index is None or index.type != "file" or size > source.bounds.pack_bytes:
            why = f"{size} bytes" if index else "no index"
            source.miss("packs of git not looked at", f"{pack.path} ({why})")
            continue
        async with (
            source.copy(index.path, index.size) as names,
            source.copy(pack.path, pack.size) as data,
        ):
            if names is None or data is None:
                continue
            try:
                await asyncio.to_thread(_add_pack, objects, names, data)
            except Malformed as error:
                source.miss("packs of git not understood", f"{pack.path} ({error})")


def _add_pack(objects: Objects, names: IO[bytes], data: IO[bytes]) -> None:
    names.seek(0)
    if not data.seek(0, 2):
        raise Malformed("an empty pack")
    with (
        mmap.mmap(data.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
        memoryview(mapped) as content,
    ):
        gitobjects.add_pack(objects, names.read(), content)
