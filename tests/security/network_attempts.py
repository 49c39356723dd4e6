"""Attempts to reach an address that the policy does not open, as root inside a sandbox.

Runs under the sandbox's own Python, beside the modules it imports: the attempts that are named, or
all of them. Every attempt has addresses of its own, so that what arrives in the world tells which
one got through. Whatever it raises is its outcome.
"""

# ruff: noqa: F403, F405 - what is imported is beside this file inside the sandbox

from __future__ import annotations

import sys

import network_frames  # type: ignore[import-not-found]  # noqa: F401 - registers
import network_packets  # type: ignore[import-not-found]  # noqa: F401 - registers
from network_detours import *  # type: ignore[import-not-found]


def main(chosen: list[str]) -> None:
    ask("good.example")
    ask("good.example", 28)
    found = {}
    for number, (name, work) in enumerate(sorted(ATTEMPTS.items())):
        if chosen and name not in chosen:
            continue
        v4, v6 = f"203.0.113.{100 + number}", f"2600:db8::{100 + number:x}"
        try:
            outcome = work(v4, v6)
        except OSError as error:
            outcome = errno.errorcode.get(error.errno or 0, str(error))
        except Exception as error:
            outcome = repr(error)
        found[name] = outcome if isinstance(outcome, str) else "ok"
    report(**found)


if __name__ == "__main__":
    main(sys.argv[1:])
