"""The platform's own shell: a static bash of the host, run in sandboxes by descriptor.

No path inside leads to it, so nothing inside can replace it, and it needs no loader. It is a sealed
copy in memory: /proc/self/exe of the shell leads to the copy, which nobody can write to, and never
to a file of the host.

Static glibc loads code all the same, of the sandbox: modules that nsswitch.conf(5) names, when it
looks up a user (``~name``) or host, and of gconv, for a charset that a locale asks for. In the copy
both lead nowhere, so users come from /etc/passwd, and UTF-8 is what the C library has built in.
"""

from __future__ import annotations

import fcntl
import os
import re
import struct
from pathlib import Path

from libdsec.errors import Unsupported

DEFAULT = "/bin/bash-static"
_MFD_EXEC = 0x10  # Linux 6.3; older kernels refuse the flag and make every memfd executable
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
_PT_INTERP = 3
_MODULES = re.compile(rb"/etc/nsswitch\.conf|/usr/lib/[a-z0-9_-]+/gconv")


def open_shell(path: str) -> int:
    """Return a descriptor of a sealed copy of the program `path`. Raises `Unsupported`."""
    try:
        program = Path(path).read_bytes()
        if _interpreted(program):
            raise Unsupported(f"{path} is not statically linked", reason="it needs a loader")
        copy = _memfd()
        try:
            with os.fdopen(os.dup(copy), "wb") as target:
                target.write(_MODULES.sub(_nowhere, program))
            os.fchmod(copy, 0o555)
            fcntl.fcntl(copy, fcntl.F_ADD_SEALS, _SEALS)
        except BaseException:
            os.close(copy)
            raise
        return copy
    except OSError as error:
        reason = error.strerror or str(error)
        raise Unsupported(f"{path} cannot be used as shell: {reason}", reason=reason) from error


def _nowhere(path: re.Match[bytes]) -> bytes:
    """Return a path as long that cannot exist: the program's strings stay where they are."""
    return b"/dev/null/".ljust(len(path[0]), b"-")


def _memfd() -> int:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return os.memfd_create("dsec-shell", flags | _MFD_EXEC)
    except OSError:
        return os.memfd_create("dsec-shell", flags)


def _interpreted(program: bytes) -> bool:
    """Return whether a 64-bit ELF file (elf(5)) names a loader; other files do, too, in a way."""
    if program[:5] != b"\x7fELF\x02":
        return True
    offset, size, count = (
        struct.unpack_from(form, program, at)[0]
        for form, at in (("<Q", 32), ("<H", 54), ("<H", 56))
    )
    last = min(offset + size * count, len(program) - 3)
    kinds = (struct.unpack_from("<I", program, at)[0] for at in range(offset, last, size or 1))
    return _PT_INTERP in kinds
