"""``sandbox.files``: the sandbox's file system. Names as in E2B's SDK.

Paths are ``str`` (``surrogateescape`` keeps bytes that are no UTF-8), ``bytes`` or path objects;
relative ones start at the sandbox's working directory. Every operation acts with the rights of
`user` (default: the sandbox's ``init_user``). Content is bytes of any size.
"""

from __future__ import annotations

import asyncio
import os
import posixpath
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypeAlias, overload

from libdsec import model, transfer, wire
from libdsec.errors import AlreadyExists, NotFound, WrongState
from libdsec.execution import quietly
from libdsec.link import Link, pack
from libdsec.transfer import Progress
from libdsec.watch import EventCallback, WatchHandle

AnyPath: TypeAlias = str | bytes | os.PathLike[str] | os.PathLike[bytes]
Content: TypeAlias = (
    str | bytes | bytearray | memoryview | BinaryIO | Iterable[bytes] | AsyncIterator[bytes]
)


@dataclass(frozen=True, slots=True)
class EntryInfo:
    """A file as `stat` sees it. `size` in bytes, `modified_at` in seconds since the epoch."""

    name: str
    path: str
    type: model.FileType
    size: int
    mode: int
    uid: int
    gid: int
    modified_at: float
    symlink_target: str | None = None


@dataclass(frozen=True, slots=True)
class WriteInfo:
    """What was written: `path` and `size` in bytes."""

    path: str
    size: int


@dataclass(frozen=True, slots=True)
class WriteEntry:
    """One file for `Files.write_files`."""

    path: AnyPath
    data: Content
    mode: int | None = None


Entries: TypeAlias = list[EntryInfo]
Paths: TypeAlias = list[str]
Written: TypeAlias = list[WriteInfo]


class Files:
    """The files of one sandbox."""

    def __init__(self, link: Link, sandbox_id: str) -> None:
        self._link = link
        self._sandbox_id = sandbox_id

    # --- content

    @overload
    async def read(
        self, path: AnyPath, format: Literal["text"] = "text", *, user: str | None = None,
        offset: int = 0, length: int | None = None,
    ) -> str: ...  # fmt: skip

    @overload
    async def read(
        self, path: AnyPath, format: Literal["bytes"], *, user: str | None = None,
        offset: int = 0, length: int | None = None,
    ) -> bytes: ...  # fmt: skip

    @overload
    async def read(
        self, path: AnyPath, format: Literal["stream"], *, user: str | None = None,
        offset: int = 0, length: int | None = None,
    ) -> AsyncIterator[bytes]: ...  # fmt: skip

    async def read(
        self,
        path: AnyPath,
        format: Literal["text", "bytes", "stream"] = "text",
        *,
        user: str | None = None,
        offset: int = 0,
        length: int | None = None,
    ) -> str | bytes | AsyncIterator[bytes]:
        """Return the content of `path`: as text (invalid UTF-8 becomes U+FFFD), bytes, or a stream.

        A stream holds at most a few blocks at a time; close it (``aclose``) when it is not read to
        its end. Raises `NotFound`, `PermissionDenied`, `InvalidArgument` (a directory).
        """
        args = model.ReadArgs(path=os.fsencode(path), user=user, offset=offset, length=length)
        stream = transfer.receive(self._link, self._sandbox_id, "files.read", args)
        if format == "stream":
            return await transfer.primed(stream)
        content = b"".join([block async for block in stream])
        return content.decode(errors="replace") if format == "text" else content

    async def write(
        self, path: AnyPath, data: Content, *, user: str | None = None, mode: int | None = None
    ) -> WriteInfo:
        """Write `data` to `path`, atomically: readers see the old content or all of the new.

        `data` is text, bytes, a binary file, or an iterable of bytes (also asynchronous). Parent
        directories are made. `mode` sets the permissions (default: kept, or 0644).
        """
        return await self._write(path, data, user, mode, append=False)

    async def append(
        self, path: AnyPath, data: Content, *, user: str | None = None, mode: int | None = None
    ) -> WriteInfo:
        """Add `data` to the end of `path`, which is made when it does not exist."""
        return await self._write(path, data, user, mode, append=True)

    async def write_files(
        self, files: Iterable[WriteEntry | tuple[AnyPath, Content]], *, user: str | None = None
    ) -> Written:
        """Write several files; each appears atomically."""
        written: list[WriteInfo] = []
        for entry in files:
            one = entry if isinstance(entry, WriteEntry) else WriteEntry(*entry)
            written.append(await self.write(one.path, one.data, user=user, mode=one.mode))
        return written

    async def _write(
        self, path: AnyPath, data: Content, user: str | None, mode: int | None, *, append: bool
    ) -> WriteInfo:
        args = model.WriteArgs(path=os.fsencode(path), user=user, mode=mode, append=append)
        whole = transfer.whole(data)
        if whole is not None and len(whole) <= wire.INLINE:
            args.data = whole
            done = await self._call("files.write", args, model.Transferred, retry=not append)
        else:
            blocks = transfer.blocks(data if whole is None else whole)
            done = await transfer.deliver(self._link, self._sandbox_id, "files.write", args, blocks)
        return WriteInfo(path=os.fsdecode(args.path), size=done.size)

    # --- the tree

    async def list(
        self, path: AnyPath = ".", depth: int = 1, *, user: str | None = None
    ) -> Entries:
        """Return the entries of directory `path`, `depth` levels deep, parents first."""
        entries: list[EntryInfo] = []
        level = [os.fsencode(path)]
        for _ in range(depth):
            below: list[bytes] = []
            for directory in level:
                args = model.PathArgs(path=directory, user=user)
                for found in await self._call("files.list", args, list[model.FileStat], retry=True):
                    entry = _entry(found, posixpath.join(directory, found.name))
                    entries.append(entry)
                    if entry.type == "dir":
                        below.append(os.fsencode(entry.path))
            level = below
        return entries

    async def glob(self, pattern: AnyPath, *, user: str | None = None) -> Paths:
        """Return the paths that match the shell pattern (``*``, ``?``, ``[…]``), sorted."""
        args = model.PathArgs(path=os.fsencode(pattern), user=user)
        found = await self._call("files.glob", args, list[bytes], retry=True)
        return sorted(os.fsdecode(path) for path in found)

    async def exists(self, path: AnyPath, *, user: str | None = None) -> bool:
        """Return whether `path` exists (a dangling symlink does)."""
        return await quietly(self.get_info(path, user=user, follow=False))

    async def get_info(
        self, path: AnyPath, *, user: str | None = None, follow: bool = True
    ) -> EntryInfo:
        """Return the state of `path`, or with ``follow=False`` of the symlink itself."""
        raw = os.fsencode(path)
        args = model.PathArgs(path=raw, user=user, follow=follow)
        return _entry(await self._call("files.stat", args, model.FileStat, retry=True), raw)

    async def make_dir(
        self, path: AnyPath, *, user: str | None = None, mode: int | None = None
    ) -> bool:
        """Make directory `path` and its parents. False when it was there already."""
        raw = os.fsencode(path)
        try:
            if (await self.get_info(raw, user=user)).type == "dir":
                return False
            raise AlreadyExists(f"{os.fsdecode(raw)} exists and is not a directory")
        except NotFound:
            args = model.PathArgs(path=raw, user=user, mode=mode)
            await self._call("files.mkdir", args, type(None))
            return True

    async def remove(
        self, path: AnyPath, *, recursive: bool = True, user: str | None = None
    ) -> None:
        """Remove a file, or a directory with all below it (without `recursive`: only if empty)."""
        args = model.PathArgs(path=os.fsencode(path), user=user, recursive=recursive)
        await self._call("files.remove", args, type(None))

    async def rename(
        self, old_path: AnyPath, new_path: AnyPath, *, user: str | None = None
    ) -> EntryInfo:
        """Move `old_path` to `new_path`, replacing a file there atomically."""
        target = os.fsencode(new_path)
        args = model.RenameArgs(path=os.fsencode(old_path), target=target, user=user)
        await self._call("files.rename", args, type(None))
        return await self.get_info(target, user=user, follow=False)

    async def chmod(
        self, path: AnyPath, mode: int, *, recursive: bool = False, user: str | None = None
    ) -> None:
        """Set the permission bits of `path`."""
        args = model.ChangeArgs(path=os.fsencode(path), mode=mode, recursive=recursive, user=user)
        await self._call("files.chmod", args, type(None), retry=True)

    async def chown(
        self, path: AnyPath, owner: str, *, recursive: bool = False, user: str | None = None
    ) -> None:
        """Set the owner of `path`: ``user``, ``user:group``, or numbers."""
        args = model.ChangeArgs(path=os.fsencode(path), owner=owner, recursive=recursive, user=user)
        await self._call("files.chown", args, type(None), retry=True)

    # --- watching and copying

    async def watch_dir(
        self,
        path: AnyPath,
        on_event: EventCallback | None = None,
        *,
        recursive: bool = False,
        user: str | None = None,
    ) -> WatchHandle:
        """Watch directory `path`. Events go to `on_event`, or come from iterating the handle."""
        args = model.PathArgs(path=os.fsencode(path), recursive=recursive, user=user)
        call = await self._link.start("files.watch", pack(args), self._sandbox_id)
        return WatchHandle(self._link, call, on_event)

    async def upload(
        self,
        local: str | os.PathLike[str],
        remote: AnyPath,
        *,
        user: str | None = None,
        on_progress: Progress | None = None,
    ) -> int:
        """Copy a local file or directory tree to `remote`, which names the copy itself.

        A tree is merged into an existing directory. Returns the bytes sent; `on_progress` is
        called with the bytes of each block.
        """
        source, target = Path(local), os.fsencode(remote)
        if not await asyncio.to_thread(source.is_dir):
            mode = (await asyncio.to_thread(source.stat)).st_mode & 0o777
            args: Any = model.WriteArgs(path=target, user=user, mode=mode)
            content = transfer.file_blocks(source, on_progress)
            done = await transfer.deliver(
                self._link, self._sandbox_id, "files.write", args, content
            )
            return done.size
        await self.make_dir(target, user=user)
        args = model.TarArgs(path=target, user=user)
        return await transfer.upload_tree(self._link, self._sandbox_id, args, source, on_progress)

    async def download(
        self,
        remote: AnyPath,
        local: str | os.PathLike[str],
        *,
        user: str | None = None,
        on_progress: Progress | None = None,
    ) -> int:
        """Copy a file or directory tree to `local`, which names the copy itself.

        An archive from a sandbox is not trusted: links and names that leave `local` are refused
        with `InvalidArgument`. Returns the bytes of content; `on_progress` gets each block's.
        """
        info = await self.get_info(remote, user=user)
        if info.type == "dir":
            return await transfer.download_tree(
                self._link,
                self._sandbox_id,
                model.TarArgs(path=os.fsencode(remote), user=user),
                Path(local),
                on_progress,
            )
        if info.type != "file":
            raise WrongState(f"{info.path} is a {info.type}, not a file or directory")
        args = model.ReadArgs(path=os.fsencode(remote), user=user)
        stream = transfer.receive(self._link, self._sandbox_id, "files.read", args)
        return await transfer.save(stream, Path(local), info.mode, on_progress)

    async def _call(self, op: str, args: Any, kind: type[Any], *, retry: bool = False) -> Any:
        return await self._link.call(op, args, kind, target=self._sandbox_id, retry=retry)


def _entry(found: model.FileStat, path: bytes) -> EntryInfo:
    return EntryInfo(
        name=os.fsdecode(posixpath.basename(found.name.rstrip(b"/")) or b"/"),
        path=os.fsdecode(path),
        type=found.type,
        size=found.size,
        mode=found.mode & 0o7777,
        uid=found.uid,
        gid=found.gid,
        modified_at=found.mtime,
        symlink_target=None if found.target is None else os.fsdecode(found.target),
    )
