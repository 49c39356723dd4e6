"""dsecd with faults: ``STEP[:N]`` kills it with SIGKILL at the Nth time a step of the engine is
reached; ``fail-each-step`` makes each step of the spawner fail once, in turn.

The product has no such switches: this file calls the same `run` with hooks of its own.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import msgspec

from dsecd import __main__ as entry
from dsecd import config as configuration
from dsecd import log
from dsecd.backends import container
from dsecd.host.plan import STEPS, ContainerPlan


def fail_each_step() -> None:
    """The next plans carry the name of the step that is to fail."""
    left, compile_plan = list(STEPS), container.compile_plan

    def compile_failing(*args: object) -> ContainerPlan:
        plan = compile_plan(*args)  # type: ignore[arg-type]
        return msgspec.structs.replace(plan, fail_step=left.pop(0)) if left else plan

    container.compile_plan = compile_failing  # type: ignore[assignment]


def main() -> int:
    """``crashing_dsecd.py STEP[:N]|fail-each-step --config FILE``"""
    name, _, nth = sys.argv[1].partition(":")
    left = int(nth or 1)

    def step(reached: str) -> None:
        nonlocal left
        if reached == name:
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    if name == "fail-each-step":
        fail_each_step()
    config = configuration.load(Path(sys.argv[3]))
    log.configure(config.log)
    return entry.run(config, keep=False, step=step)


if __name__ == "__main__":
    sys.exit(main())
