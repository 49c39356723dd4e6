"""The inside of the test daemon's sandboxes: real processes, a real directory, real sockets."""
# Paths are bytes here, as on the wire; pathlib knows only text.
# ruff: noqa: PTH101,PTH103,PTH105,PTH108,PTH110,PTH112,PTH115,PTH116,PTH118,PTH119,PTH120,PTH123,PTH208

from __future__ import annotations

import asyncio
import contextlib
import fnmatch
import io
import os
import shutil
import signal
import stat
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from libdsec import model, wire
from libdsec.errors import (
    AlreadyExists,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    WrongState,
)

KINDS = {
    stat.S_IFREG: "file", stat.S_IFDIR: "dir", stat.S_IFLNK: "symlink", stat.S_IFIFO: "fifo",
    stat.S_IFSOCK: "socket", stat.S_IFCHR: "char", stat.S_IFBLK: "block",
}  # fmt: skip


class Command:
    """A process whose output is kept, so that it can be attached to at any offset."""

    def __init__(self, args: model.ExecArgs) -> None:
        self.args = args
        self.spool = {1: bytearray(), 2: bytearray()}
        self.changed = asyncio.Condition()
        self.process: Any = None
        self.master = -1
        self.timed_out = False
        self.done: asyncio.Event = asyncio.Event()
        self.started_at = time.time()

    async def start(self, cwd: Path, spawn: Callable[[Any], Any]) -> None:
        args = self.args
        argv = args.argv or [b"/bin/sh", b"-c", args.shell or b""]
        env = {**os.environ, **args.env}
        pipe = asyncio.subprocess.PIPE
        streams: dict[str, Any] = {"stdout": pipe, "stderr": pipe}
        streams["stdin"] = pipe if args.stdin or args.input else asyncio.subprocess.DEVNULL
        slave = -1
        if args.pty:
            self.master, slave = os.openpty()
            os.set_blocking(self.master, False)
            streams = dict.fromkeys(("stdin", "stdout", "stderr"), slave)
        where = os.path.join(os.fsencode(cwd), args.cwd or b".")
        self.process = await asyncio.create_subprocess_exec(
            *argv, env=env, cwd=where, start_new_session=True, limit=1 << 16, **streams
        )
        if slave >= 0:
            os.close(slave)
        if args.input:
            self.process.stdin.write(args.input)
            self.process.stdin.close()
        spawn(self.follow())

    async def follow(self) -> None:
        readers = [self.read_pty()] if self.args.pty else [
            self.read(1, self.process.stdout), self.read(2, self.process.stderr),
        ]  # fmt: skip
        try:
            async with asyncio.timeout(self.args.timeout_s):
                await asyncio.gather(*readers)
                await self.process.wait()
        except TimeoutError:
            self.timed_out = True
            self.kill()
            await self.process.wait()
        finally:
            self.kill()
        await self.process.wait()
        if self.master >= 0:
            os.close(self.master)
            self.master = -1
        self.done.set()
        await self.notify()

    async def read(self, number: int, stream: Any) -> None:
        while data := await stream.read(1 << 16):
            self.spool[number] += data
            await self.notify()

    async def read_pty(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            ready = loop.create_future()
            loop.add_reader(self.master, lambda f=ready: f.done() or f.set_result(None))
            try:
                await ready
                data = os.read(self.master, 1 << 16)
            except OSError:
                return
            finally:
                loop.remove_reader(self.master)
            if not data:
                return
            self.spool[1] += data
            await self.notify()

    async def notify(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    def kill(self, number: int = signal.SIGKILL) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def result(self, at: dict[int, int]) -> model.CommandResult:
        code = self.process.returncode
        return model.CommandResult(
            cid=self.args.cid,
            exit_code=code if code >= 0 else None,
            signal=-code if code < 0 else None,
            timed_out=self.timed_out,
            stdout=bytes(self.spool[1][at[1] :]),
            stderr=bytes(self.spool[2][at[2] :]),
            stdout_total=len(self.spool[1]),
            stderr_total=len(self.spool[2]),
            duration_s=time.time() - self.started_at,
        )

    async def stream(self, call: Any, at: dict[int, int], *, eager: bool) -> model.CommandResult:
        """Send output from the offsets `at` on; what is small may ride in the result."""
        while True:
            for number in (1, 2):
                while len(self.spool[number]) - at[number] > (0 if eager else wire.INLINE):
                    data = bytes(self.spool[number][at[number] : at[number] + 65536])
                    await call.send(model.Output(stream=number, offset=at[number], data=data))
                    at[number] += len(data)
            sizes = [len(self.spool[1]), len(self.spool[2])]
            if self.done.is_set() and sum(sizes) - sum(at.values()) <= wire.INLINE:
                return self.result(at)
            async with self.changed:
                if sizes == [len(self.spool[1]), len(self.spool[2])] and not self.done.is_set():
                    await self.changed.wait()


class SandboxWorld:
    """Everything that is addressed to a sandbox."""

    def __init__(self, root: Path, spawn: Callable[[Any], Any]) -> None:
        self.root, self.spawn = root, spawn
        self.commands: dict[str, Command] = {}
        self.sessions: set[str] = set()
        self.resized: list[tuple[int, int]] = []
        self.watch_events: asyncio.Queue[model.WatchEvent] = asyncio.Queue()

    def operations(self) -> dict[str, Any]:
        names = [
            "exec_run", "exec_start", "exec_attach", "exec_list", "exec_stdin", "exec_signal",
            "exec_kill", "exec_forget", "exec_resize", "session_open", "session_close",
            "files_read", "files_write", "files_stat", "files_list", "files_glob", "files_mkdir",
            "files_remove", "files_rename", "files_chmod", "files_upload", "files_download",
            "files_watch", "net_forward",
        ]  # fmt: skip
        return {name.replace("_", ".", 1): getattr(self, name) for name in names}

    async def close(self) -> None:
        for command in self.commands.values():
            if not command.done.is_set():
                command.kill()
                await asyncio.wait_for(command.done.wait(), 5)

    # --- commands

    async def begin(self, call: Any) -> Command:
        args = call.args(model.ExecArgs)
        if args.session and args.session not in self.sessions:
            raise NotFound(f"no session {args.session}")
        command = self.commands.get(args.cid)
        if command is None:
            command = self.commands[args.cid] = Command(args)
            try:
                await command.start(self.root / call.request.target, self.spawn)
            except FileNotFoundError as error:
                del self.commands[args.cid]
                raise NotFound(str(error)) from error
        return command

    async def exec_run(self, call: Any) -> model.CommandResult:
        command = await self.begin(call)
        try:
            return await command.stream(call, {1: 0, 2: 0}, eager=command.args.stream)
        except asyncio.CancelledError:
            if call.cancelled:
                command.kill()
            raise

    async def exec_start(self, call: Any) -> model.CommandInfo:
        return self.info(await self.begin(call))

    def info(self, command: Command) -> model.CommandInfo:
        args = command.args
        return model.CommandInfo(
            cid=args.cid, running=not command.done.is_set(), pid=command.process.pid,
            command=args.shell or b" ".join(args.argv or []), background=args.background,
            started_at=command.started_at,
        )  # fmt: skip

    def find(self, cid: str) -> Command:
        if cid not in self.commands:
            raise NotFound(f"no command {cid}")
        return self.commands[cid]

    async def exec_attach(self, call: Any) -> model.CommandResult:
        args = call.args(model.AttachArgs)
        at = {1: args.stdout_offset, 2: args.stderr_offset}
        return await self.find(args.cid).stream(call, at, eager=True)

    async def exec_list(self, call: Any) -> list[model.CommandInfo]:
        return [self.info(command) for command in self.commands.values()]

    async def exec_stdin(self, call: Any) -> None:
        args = call.args(model.StdinArgs)
        command = self.find(args.cid)
        if command.done.is_set():
            raise WrongState("the command has ended")
        if command.master >= 0:
            os.write(command.master, args.data)
            return
        try:
            command.process.stdin.write(args.data)
            await command.process.stdin.drain()
        except (BrokenPipeError, ConnectionResetError) as error:
            raise WrongState("the command closed its stdin") from error
        if args.eof:
            command.process.stdin.close()

    async def exec_signal(self, call: Any) -> None:
        args = call.args(model.SignalArgs)
        self.find(args.cid).process.send_signal(args.signal)

    async def exec_kill(self, call: Any) -> None:
        self.find(call.args(model.SignalArgs).cid).kill()

    async def exec_forget(self, call: Any) -> None:
        del self.commands[self.find(call.args(model.SignalArgs).cid).args.cid]

    async def exec_resize(self, call: Any) -> None:
        args = call.args(model.ResizeArgs)
        self.find(args.cid)
        self.resized.append((args.rows, args.cols))

    async def session_open(self, call: Any) -> None:
        name = call.args(model.SessionArgs).name
        if name in self.sessions:
            raise AlreadyExists(f"session {name} exists")
        self.sessions.add(name)

    async def session_close(self, call: Any) -> None:
        name = call.args(model.SessionArgs).name
        if name not in self.sessions:
            raise NotFound(f"no session {name}")
        self.sessions.remove(name)

    # --- files

    def path(self, call: Any, raw: bytes) -> bytes:
        return os.path.join(os.fsencode(self.root / call.request.target), raw.lstrip(b"/"))

    async def files_read(self, call: Any) -> model.Transferred:
        args = call.args(model.ReadArgs)
        try:
            with open(self.path(call, args.path), "rb") as file:
                file.seek(args.offset)
                size = os.fstat(file.fileno()).st_size - args.offset
                size = size if args.length is None else min(size, args.length)
                if size <= wire.INLINE:
                    return model.Transferred(size=size, data=file.read(size))
                left = size
                while left and (block := file.read(min(wire.MAX_ITEM, left))):
                    await call.send(block)
                    left -= len(block)
                return model.Transferred(size=size)
        except FileNotFoundError as error:
            raise NotFound(f"{args.path!r} does not exist") from error
        except IsADirectoryError as error:
            raise InvalidArgument("is a directory") from error

    async def files_write(self, call: Any) -> model.Transferred:
        args = call.args(model.WriteArgs)
        path = self.path(call, args.path)
        if args.path.startswith(b"/denied"):
            raise PermissionDenied("not yours")
        os.makedirs(os.path.dirname(path), exist_ok=True)
        part = path + b".part"
        if args.append and os.path.exists(path):
            shutil.copy(path, part)
        size = 0
        try:
            with open(part, "ab" if args.append else "wb") as file:
                if args.data is not None:
                    size = file.write(args.data)
                else:
                    async for block in call.items():
                        size += file.write(block)
            os.replace(part, path)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(part)
        if args.mode is not None:
            os.chmod(path, args.mode)
        return model.Transferred(size=size)

    def stat(self, path: bytes, name: bytes, follow: bool) -> model.FileStat:
        try:
            found = os.stat(path) if follow else os.lstat(path)
        except FileNotFoundError as error:
            raise NotFound(f"{name!r} does not exist") from error
        link = stat.S_ISLNK(found.st_mode)
        return model.FileStat(
            name=name, type=KINDS[stat.S_IFMT(found.st_mode)], size=found.st_size,
            mode=found.st_mode, uid=found.st_uid, gid=found.st_gid, mtime=found.st_mtime,
            target=os.readlink(path) if link else None,
        )  # fmt: skip

    async def files_stat(self, call: Any) -> model.FileStat:
        args = call.args(model.PathArgs)
        return self.stat(self.path(call, args.path), os.path.basename(args.path), args.follow)

    async def files_list(self, call: Any) -> list[model.FileStat]:
        args = call.args(model.PathArgs)
        path = self.path(call, args.path)
        return [self.stat(os.path.join(path, n), n, False) for n in sorted(os.listdir(path))]

    async def files_glob(self, call: Any) -> list[bytes]:
        args = call.args(model.PathArgs)
        directory, pattern = os.path.split(args.path)
        names = os.listdir(self.path(call, directory))
        return [os.path.join(directory, n) for n in names if fnmatch.fnmatch(n, pattern)]

    async def files_mkdir(self, call: Any) -> None:
        os.makedirs(self.path(call, call.args(model.PathArgs).path), exist_ok=True)

    async def files_remove(self, call: Any) -> None:
        args = call.args(model.PathArgs)
        path = self.path(call, args.path)
        self.stat(path, args.path, False)
        if os.path.isdir(path):
            if os.listdir(path) and not args.recursive:
                raise WrongState("directory not empty")
            shutil.rmtree(path)
        else:
            os.unlink(path)

    async def files_rename(self, call: Any) -> None:
        args = call.args(model.RenameArgs)
        os.replace(self.path(call, args.path), self.path(call, args.target))

    async def files_chmod(self, call: Any) -> None:
        args = call.args(model.ChangeArgs)
        os.chmod(self.path(call, args.path), args.mode)

    async def files_upload(self, call: Any) -> model.Transferred:
        args = call.args(model.TarArgs)
        content = b"".join([block async for block in call.items()])
        with tarfile.open(fileobj=io.BytesIO(content)) as tar:
            tar.extractall(os.fsdecode(self.path(call, args.path)))
        return model.Transferred(size=len(content))

    async def files_download(self, call: Any) -> model.Transferred:
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as tar:
            tar.add(os.fsdecode(self.path(call, call.args(model.TarArgs).path)), arcname=".")
        content = buffer.getvalue()
        for start in range(0, len(content), wire.MAX_ITEM):
            await call.send(content[start : start + wire.MAX_ITEM])
        return model.Transferred(size=len(content))

    async def files_watch(self, call: Any) -> None:
        while True:
            await call.send(await self.watch_events.get())

    async def net_forward(self, call: Any) -> None:
        port = call.args(model.ForwardArgs).port
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError as error:
            raise NotFound(f"nothing listens on port {port}") from error

        async def inward() -> None:
            async for data in call.items():
                writer.write(data)
                await writer.drain()
            writer.write_eof()

        inner = asyncio.create_task(inward())
        try:
            while data := await reader.read(wire.MAX_ITEM):
                await call.send(data)
        finally:
            inner.cancel()
            writer.close()  # before anything that a second cancellation would interrupt
            await asyncio.gather(inner, return_exceptions=True)
            with contextlib.suppress(OSError):
                await writer.wait_closed()
