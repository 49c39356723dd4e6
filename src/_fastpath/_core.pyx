# cython: language_level=3, embedsignature=True
"""System calls of container creation, without the GIL. See _core.pyi for the contract."""

from libc.stdint cimport int64_t, uint32_t, uint64_t
from posix.types cimport pid_t

import os

from _fastpath import StepError

include "namespaces.pxi"
include "mounts.pxi"
include "volumes.pxi"
include "sched.pxi"
include "erofs.pxi"
include "bpf.pxi"


cdef int checked(int result, const char *step) except -1:
    """Return a result that is no error, else raise: the only place that raises."""
    if result < 0:
        raise StepError(-result, step.decode())
    return result
