"""The native core of dsecd. Only `dsecd.fastpath` imports this package.

`_core` is C behind Cython; `twin` does the same through cffi in ABI mode, to be read, and to serve
hosts without the extension. Both export the same functions and raise `StepError`.
"""

from __future__ import annotations

import os


class StepError(OSError):
    """A system call failed; `step` names which of the function's steps it was."""

    def __init__(self, code: int, step: str) -> None:
        super().__init__(code, f"{step}: {os.strerror(code)}")
        self.step = step
