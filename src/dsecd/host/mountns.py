"""Looking into another mount namespace without becoming part of it."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from dsecd.host import syscalls

_CLONE_FS, _CLONE_NEWNS = 0x200, 0x20000


def open_root(namespace: Path) -> int:
    """Return a descriptor of the root directory of the mount namespace that `namespace` opens.

    Entered by a thread that ends with it: setns(2) takes a mount namespace only where root and
    working directory are shared with nobody. Raises `OSError`.
    """
    found: list[int | OSError] = []

    def look() -> None:
        try:
            fd = os.open(namespace, os.O_RDONLY | os.O_CLOEXEC)
            try:
                syscalls.call("unshare", _CLONE_FS)
                syscalls.call("setns", fd, _CLONE_NEWNS)
            finally:
                os.close(fd)
            found.append(os.open("/", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        except OSError as error:
            found.append(error)

    thread = threading.Thread(target=look, name="mountns")
    thread.start()
    thread.join()
    if isinstance(found[0], OSError):
        raise found[0]
    return found[0]
