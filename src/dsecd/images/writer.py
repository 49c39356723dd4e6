"""A directory becomes an EROFS image, through mkfs.erofs: the same tree gives the same bytes.

The image is uncompressed, so that pages are shared and mapped as they are. SOURCE_DATE_EPOCH fixes
the build time and, being later than any file, leaves the files' own times alone (``-T`` would
overwrite them, and every .pyc in the layer would be stale); the UUID is fixed too.
"""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec

from dsecd.host import erofs
from dsecd.images.tarball import MAX_TIME
from libdsec.errors import Exhausted, Internal, InvalidArgument, Unsupported

_UUID = "00000000-0000-0000-0000-000000000000"
_POLL_S = 0.1
_EXCLUDED_MAX = 1000
_COPY_BYTES = 16 << 20


class Survey(msgspec.Struct):
    """What a source tree holds: enough for a progress bar and for the limit."""

    entries: int = 0
    size_bytes: int = 0
    excluded: list[bytes] = []  # device nodes and sockets, relative to the root


def survey(root: Path) -> Survey:
    """Walk `root` without following links. Raises `InvalidArgument` for what cannot be a layer."""
    found = Survey()
    top = os.fsencode(root)
    pending = [top]
    while pending:
        with os.scandir(pending.pop()) as entries:
            for entry in entries:
                status = entry.stat(follow_symlinks=False)
                found.entries += 1
                if stat.S_ISDIR(status.st_mode):
                    pending.append(entry.path)
                elif stat.S_ISREG(status.st_mode):
                    found.size_bytes += status.st_size
                elif not (stat.S_ISLNK(status.st_mode) or stat.S_ISFIFO(status.st_mode)):
                    found.excluded.append(os.path.relpath(entry.path, top))
    if len(found.excluded) > _EXCLUDED_MAX:
        raise InvalidArgument(
            f"{root} holds {len(found.excluded)} device nodes or sockets; is it a running system?",
            field="source",
        )
    return found


def build(root: Path, image: Path, excluded: list[bytes], check: Callable[[int], None]) -> None:
    """Write the tree at `root` as an EROFS image to the new file `image`, and fsync it.

    `check` is told the bytes written, a few times a second, and raises to give up. Raises
    `Exhausted` when the disk is full, `Unsupported` without mkfs.erofs, `Internal` when it fails.
    """
    command: list[str | bytes] = ["mkfs.erofs", "--quiet", "--preserve-mtime", f"-U{_UUID}"]
    command += [b"--exclude-path=" + path for path in excluded]
    command += [str(image), str(root)]
    environment = {"PATH": os.environ.get("PATH", os.defpath), "SOURCE_DATE_EPOCH": str(MAX_TIME)}
    with tempfile.TemporaryFile() as errors:  # a pipe nobody reads could fill and stop it
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=errors, stderr=errors, env=environment
            )
        except FileNotFoundError as error:
            raise Unsupported(
                "layers need the program mkfs.erofs: install the package erofs-utils",
                reason="mkfs.erofs is not installed",
            ) from error
        try:
            _watch(process, image, check)
        except BaseException:
            process.kill()
            raise
        finally:
            process.wait()
        errors.seek(0)
        if process.returncode != 0:
            raise _failure(image, process.returncode, errors.read().decode("utf-8", "replace"))
    with image.open("rb") as file:
        os.fsync(file.fileno())


def copy(source: Path, image: Path, check: Callable[[int], None]) -> None:
    """Copy an EROFS image that was made elsewhere to the new file `image`; check and fsync it.

    Raises `InvalidArgument` when it is damaged or needs further blobs. fsck.erofs finds damage, not
    malice: the kernel mounts an image, so it must come from a trusted builder; a tar need not.
    """
    with source.open("rb", buffering=0) as reader, image.open("xb", buffering=0) as writer:
        done = 0
        while count := os.copy_file_range(reader.fileno(), writer.fileno(), _COPY_BYTES):
            done += count
            check(done)
        os.fsync(writer.fileno())
    try:
        devices = erofs.inspect(image).devices
    except Internal as error:
        raise InvalidArgument(
            error.message.replace(str(image), str(source)).partition("; ")[0], field="source"
        ) from error
    if devices:
        raise InvalidArgument(f"{source} needs {devices} blobs beside it", field="source")
    try:
        found = subprocess.run(["fsck.erofs", str(image)], capture_output=True, text=True)
    except FileNotFoundError as error:
        raise Unsupported(
            "importing an image needs the program fsck.erofs: install the package erofs-utils",
            reason="fsck.erofs is not installed",
        ) from error
    if found.returncode != 0:
        raise InvalidArgument(
            f"{source} is damaged: {' / '.join((found.stderr + found.stdout).splitlines()[-2:])}",
            field="source",
        )


def is_image(source: Path) -> bool:
    """Whether the file has the magic number of EROFS."""
    with source.open("rb") as file:
        file.seek(erofs.OFFSET)
        return file.read(4) == erofs.MAGIC.to_bytes(4, "little")


def _watch(process: subprocess.Popen[bytes], image: Path, check: Callable[[int], None]) -> None:
    while True:
        try:
            process.wait(_POLL_S)
            return
        except subprocess.TimeoutExpired:
            check(image.stat().st_size if image.exists() else 0)


def _failure(image: Path, code: int, output: str) -> Exception:
    """Return the error for a failed mkfs.erofs; its own message for a full disk is unclear."""
    free = os.statvfs(image.parent)
    if free.f_bavail * free.f_frsize < 1 << 20:
        return Exhausted(f"disk full while writing the image {image}")
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"failed with {code}"
    lines = [line for line in output.splitlines() if line.strip()]
    return Internal(f"mkfs.erofs {how}: {' / '.join(lines[-3:]) or 'no message'}")
