"""Empty ext4 file systems for virtual machines: the disk that a guest's upper is on.

Made once per size; each machine gets a copy of a few hundred KiB (`sparse.copy_sparse`). There is
no journal: such a disk is never used again after its machine died. Nothing is left to initialise in
the guest, whose kernel would write every inode table in the background, and so make a sparse file
large, for as long as the superblock says that they are not zeros.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from libdsec.errors import InvalidArgument, Unsupported

BLOCK = 4096
MIN_BYTES = 16 << 20
MAX_BYTES = 16 << 40
_NUMBER = "5a0d4a0c-0a2e-4dbb-9c8e-6a1f9c6f8d11"  # the same bytes every time
_FORMAT = (
    "mkfs.ext4", "-q", "-F",
    # named one by one, for mke2fs.conf differs between hosts; uninit_bg is metadata_csum's way to
    # leave bitmaps and inode tables unwritten without its checksum over every block
    "-O", "none,dir_index,dir_nlink,ext_attr,extent,extra_isize,filetype,flex_bg,huge_file,"
    "large_file,sparse_super2,uninit_bg,64bit",
    "-b", str(BLOCK), "-I", "256", "-i", "8192", "-m", "0", "-U", _NUMBER,
    # prezeroed: to leave the inode tables as holes and yet call them zeros (e2fsprogs 1.47)
    "-E", f"assume_storage_prezeroed=1,hash_seed={_NUMBER},lazy_itable_init=1,nodiscard,"
    "num_backup_sb=0,root_owner=0:0",
)  # fmt: skip
_TREE = """\
rmdir lost+found
mkdir u
mkdir w
mkdir spool
set_inode_field u mode 040755
set_inode_field w mode 040755
set_inode_field spool mode 040700
set_inode_field / mode 040700
"""


def blank_ext4(directory: Path, size_bytes: int) -> Path:
    """Return the ext4 of this size in `directory`, a sparse file; it is made when it is not there.

    It has the directories `u`, `w` (0755) and `spool` (0700) for an overlay's upper, its work and
    the output of commands; its root is 0700. The same size gives the same bytes. Blocks for some
    tens of milliseconds the first time. Raises `InvalidArgument` for a size that cannot be,
    `Unsupported` without e2fsprogs 1.47, `OSError` when the disk is full.
    """
    if size_bytes % BLOCK or not MIN_BYTES <= size_bytes <= MAX_BYTES:
        raise InvalidArgument(
            f"a disk of {size_bytes} bytes: it must be a multiple of {BLOCK}, from "
            f"{MIN_BYTES >> 20} MiB to {MAX_BYTES >> 40} TiB",
            field="size_bytes",
        )
    path = directory / f"{size_bytes}.ext4"
    if path.exists():
        return path
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    # without a name until it is whole: a crash leaves nothing
    fd = os.open(directory, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(fd, size_bytes)
        _run(fd, _FORMAT)
        _run(fd, ("debugfs", "-w", "-f", "-"), _TREE)
        os.fsync(fd)
        _link(fd, directory, path.name)
    finally:
        os.close(fd)
    return path


def _link(fd: int, directory: Path, name: str) -> None:
    place = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.link(f"/proc/self/fd/{fd}", name, dst_dir_fd=place, follow_symlinks=True)
    except FileExistsError:  # another thread made it meanwhile, the same bytes
        pass
    finally:
        os.close(place)


def _run(fd: int, command: Sequence[str], script: str = "") -> None:
    """Run a tool of e2fsprogs on the open file. debugfs tells failures on stderr only."""
    try:
        done = subprocess.run(
            [*command, f"/proc/self/fd/{fd}"],
            input=script,
            capture_output=True,
            text=True,
            pass_fds=(fd,),
            # what they take for now: the time is in the superblock and in every inode
            env={**os.environ, "E2FSPROGS_FAKE_TIME": "1", "LC_ALL": "C"},
        )
    except FileNotFoundError as error:
        reason = f"{command[0]} is not installed (package e2fsprogs)"
        raise Unsupported(f"no disk for virtual machines: {reason}", reason=reason) from error
    said = [line for line in done.stderr.splitlines() if not line.startswith("debugfs 1.")]
    if done.returncode or (script and said):
        reason = f"{command[0]} failed: {' '.join(said)}"
        raise Unsupported(
            f"no disk for virtual machines: {reason}; it needs e2fsprogs 1.47 or later",
            reason=reason,
        )
