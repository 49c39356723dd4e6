"""Paging out another process's memory by process_madvise(2), for hosts without `memory.reclaim`.

Private mappings only: what several processes map is not the sandbox's to give, and the kernel would
skip it anyway (mm/madvise.c, madvise_cold_or_pageout_pte_range).
"""

from __future__ import annotations

import os
import re
import struct
from pathlib import Path

from dsecd.host import syscalls

_WILLNEED, _PAGEOUT = 3, 21  # MADV_*
_STEP_BYTES = 8 << 20  # how far one call goes, so that little more than wanted is taken
_PREFETCH_BYTES = 64 << 20  # of mappings: more would take longer than the faults it saves
_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (....) \S+ \S+ (\d+)\s*(.*)")


def mappings(text: str) -> list[tuple[int, int]]:
    """Return start and end of each private mapping of a maps file, anonymous ones first."""
    anonymous, files = _private(text)
    return anonymous + files


def _private(text: str) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    anonymous: list[tuple[int, int]] = []
    files: list[tuple[int, int]] = []
    for line in text.splitlines():
        found = _MAPPING.match(line)
        if found is None or found[3][3] != "p" or found[5] in ("[vvar]", "[vdso]", "[vsyscall]"):
            continue
        place = anonymous if found[4] == "0" else files
        place.append((int(found[1], 16), int(found[2], 16)))
    return anonymous, files


def resident_bytes(pid: int) -> int:
    """Return what of a process is in memory; 0 when it is gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


def pageout(pid: int, want_bytes: int) -> int:
    """Page out a process until `want_bytes` have left memory; returns how many did."""
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return 0  # it ended
    try:
        before = resident_bytes(pid)
        for start, end in mappings(Path(f"/proc/{pid}/maps").read_text()):
            for at in range(start, end, _STEP_BYTES):
                _advise(pidfd, at, min(_STEP_BYTES, end - at), _PAGEOUT)
                if before - resident_bytes(pid) >= want_bytes:
                    return before - resident_bytes(pid)
        return max(0, before - resident_bytes(pid))
    except OSError:
        return 0  # it ended meanwhile
    finally:
        os.close(pidfd)


def prefetch(pids: tuple[int, ...]) -> None:
    """Begin to read back what of the anonymous memory of `pids` is in swap."""
    left = _PREFETCH_BYTES
    for pid in pids:
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            continue  # it ended
        try:
            for start, end in _private(Path(f"/proc/{pid}/maps").read_text())[0]:
                if left <= 0:
                    return
                _advise(pidfd, start, min(end - start, left), _WILLNEED)
                left -= end - start
        except OSError:
            continue
        finally:
            os.close(pidfd)


def _advise(pidfd: int, start: int, size: int, advice: int) -> None:
    try:
        syscalls.call("process_madvise", pidfd, struct.pack("=QQ", start, size), 1, advice, 0)
    except (OSError, ValueError):
        return  # locked, of a device, or unmapped meanwhile


def shared_bytes(pids: tuple[int, ...]) -> int:
    """Return the share of `pids` in pages that several processes map: Pss without what is private
    (proc_pid_smaps(5)), so that the shares of all add up to the pages there are."""
    total = 0
    for pid in pids:
        try:
            text = Path(f"/proc/{pid}/smaps_rollup").read_text()
        except OSError:
            continue  # it ended
        rows = {
            name: int(value.split()[0])
            for name, _, value in (line.partition(":") for line in text.splitlines()[1:])
        }
        private = rows.get("Private_Clean", 0) + rows.get("Private_Dirty", 0)
        total += max(0, rows.get("Pss", 0) - private) * 1024
    return total
