"""AppArmor profiles in the kernel: compiled once, loaded while sandboxes use them, then removed.

A profile belongs to a policy, not to a sandbox, and its name is that of its content. It outlives
the daemon. Removing one frees the processes in it, so that is done only when nobody can be: a
profile without users first waits among the `IDLE` last ones, and what an earlier daemon left is
removed only after living sandboxes were adopted. What the parser makes of a text is kept on disk by
parser and kernel, for both have a say in it.

Sources: apparmor_parser(8); in the kernel security/apparmor/apparmorfs.c.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import re
import resource
import shutil
import subprocess
from pathlib import Path

from libdsec.errors import InvalidArgument, Unavailable, Unsupported

logger = logging.getLogger("dsecd.apparmor")
INTERFACE = Path("/sys/kernel/security/apparmor")
PARSER, PATH = "apparmor_parser", "/usr/sbin:/sbin:/usr/bin:/bin"
IDLE = 32  # profiles kept in the kernel without users
CACHED = 512  # compiled ones kept on disk
COMPILE_S = 60.0
COMPILE_BYTES = 2 << 30  # of memory: wildcards can multiply
_DIGEST = r"-[0-9a-f]{32}"


def compile_text(text: str) -> bytes:
    """Return what the kernel loads for a profile. Raises `InvalidArgument`, `Unsupported`."""
    parser = shutil.which(PARSER, path=PATH)
    if parser is None:
        raise Unsupported(f"{PARSER} is missing: install apparmor", reason=f"no {PARSER}")
    # one process, which can be limited and killed
    command = [parser, "--jobs=0", "--skip-kernel-load", "--stdout", "--skip-cache", "--quiet"]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    with process:
        resource.prlimit(process.pid, resource.RLIMIT_AS, (COMPILE_BYTES, COMPILE_BYTES))
        try:
            done, said = process.communicate(text.encode(), COMPILE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            done, said = process.communicate()
    if process.returncode < 0:
        raise InvalidArgument(
            "policy: AppArmor takes too long to compile its paths; use fewer or plainer patterns",
            field="policy",
        )
    if process.returncode or not done:
        last = said.decode("utf-8", "replace").strip().rpartition("\n")[2]
        raise Unsupported(f"{PARSER} refused a profile: {last}", reason=last)
    return done


def load(binary: bytes) -> None:
    """Load a compiled profile, or replace the one of its name. Raises `OSError`."""
    _order("replace", binary)


def remove(name: str) -> None:
    """Remove a profile; one that is not there is success. Its processes are free afterwards."""
    with contextlib.suppress(FileNotFoundError):
        _order("remove", name.encode())


def _order(file: str, content: bytes) -> None:
    fd = os.open(INTERFACE / f".{file}", os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, content)  # the kernel takes it whole or not at all
    finally:
        os.close(fd)


def loaded() -> set[str]:
    """Return the names of all profiles in the kernel."""
    lines = (INTERFACE / "profiles").read_text().splitlines()
    return {line.rpartition(" (")[0] for line in lines}


class Profiles:
    """The profiles of one daemon, whose names begin with `prefix`; used from one event loop."""

    def __init__(self, prefix: str, cache: Path) -> None:
        self._own = re.compile(re.escape(prefix) + _DIGEST)
        self._root, self._cache = cache, cache
        self._users: dict[str, set[str]] = {}
        self._present: set[str] = set()  # in the kernel
        self._idle: dict[str, None] = {}  # those without users, the longest unused first
        self._loading: dict[str, asyncio.Task[None]] = {}

    def start(self) -> None:
        """Make room for compiled profiles; those of another kernel or parser go."""
        self._cache = self._root / _toolchain()
        self._cache.mkdir(parents=True, exist_ok=True)
        for other in self._root.iterdir():
            if other != self._cache:
                shutil.rmtree(other, ignore_errors=True)
        files = sorted(self._cache.iterdir(), key=lambda file: file.stat().st_mtime)
        for file in files[:-CACHED]:
            file.unlink()

    # --- users ----------------------------------------------------------------------------------

    async def acquire(self, sandbox: str, name: str, text: str) -> None:
        """Have a profile in the kernel until `release`; its text is compiled if need be.

        Raises `InvalidArgument`, `Unsupported`, `Unavailable`.
        """
        self._use(sandbox, name)
        if name in self._present:
            return
        if name not in self._loading:
            task = asyncio.create_task(asyncio.to_thread(self._load, name, text))
            self._loading[name] = task
            task.add_done_callback(lambda done: self._is_loaded(name, done))
        try:
            await asyncio.shield(self._loading[name])
        except BaseException:
            self.release(sandbox, name)
            raise

    def _is_loaded(self, name: str, done: asyncio.Task[None]) -> None:
        del self._loading[name]
        if done.cancelled() or done.exception() is not None:
            return
        self._present.add(name)
        if name not in self._users:  # all who wanted it have gone
            self._idle[name] = None
            self._shrink(IDLE)

    def _use(self, sandbox: str, name: str) -> None:
        self._idle.pop(name, None)
        self._users.setdefault(name, set()).add(sandbox)

    def release(self, sandbox: str, name: str) -> None:
        """Undo `acquire` or `adopt`; harmless when there was none."""
        users = self._users.get(name)
        if users is None or sandbox not in users:
            return
        users.remove(sandbox)
        if users:
            return
        del self._users[name]
        if name in self._present:
            self._idle[name] = None
            self._shrink(IDLE)

    def adopt(self, sandbox: str, name: str) -> bool:
        """Note that a living sandbox uses a profile; False: it is gone and confines nobody."""
        if name not in self._present:
            if name not in loaded():
                return False
            self._present.add(name)
        self._use(sandbox, name)
        return True

    # --- start and end --------------------------------------------------------------------------

    def sweep(self) -> list[str]:
        """Remove what an earlier daemon left and no adopted sandbox uses; return the names."""
        known = {*self._present, *self._loading}
        left = [name for name in loaded() if self._own.fullmatch(name) and name not in known]
        return [name for name in sorted(left) if self._remove(name)]

    async def close(self) -> None:
        """Remove what no sandbox uses."""
        await asyncio.gather(*self._loading.values(), return_exceptions=True)
        self._shrink(0)

    def _shrink(self, limit: int) -> None:
        while len(self._idle) > limit:
            name = next(iter(self._idle))
            del self._idle[name]
            self._present.discard(name)
            self._remove(name)

    def _remove(self, name: str) -> bool:
        try:
            remove(name)
        except OSError as error:
            logger.warning("cannot remove AppArmor profile %s: %s", name, error)
            return False
        return True

    # --- compiling; in a thread -----------------------------------------------------------------

    def _load(self, name: str, text: str) -> None:
        file = self._cache / name
        try:
            load(file.read_bytes())
            os.utime(file)
            return
        except OSError as error:  # not there, or damaged
            logger.debug("AppArmor profile %s is compiled: %s", name, error)
        binary = compile_text(text)
        try:
            load(binary)
        except OSError as error:
            raise Unavailable(f"the kernel refused AppArmor profile {name}: {error}") from error
        try:
            part = file.with_suffix(".part")
            part.write_bytes(binary)
            part.replace(file)
        except OSError as error:
            logger.warning("cannot keep compiled AppArmor profile %s: %s", name, error)


def _toolchain() -> str:
    """Return a digest of what decides, with the text, about a compiled profile."""
    digest = hashlib.blake2b(digest_size=16)
    for path in (
        shutil.which(PARSER, path=PATH),
        "/etc/apparmor.d/abi/3.0",
        "/etc/apparmor/parser.conf",
    ):
        with contextlib.suppress(OSError):
            found = Path(path or "").stat()
            digest.update(f"{path} {found.st_size} {found.st_mtime_ns}\n".encode())
    for file in sorted((INTERFACE / "features").rglob("*")):
        if file.is_file():
            digest.update(f"{file} {file.read_text()}\n".encode())
    return digest.hexdigest()
