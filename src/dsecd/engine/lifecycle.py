"""States of a sandbox and the only ways between them. Pure.

::

                        paused ─────stop────────┐
                        ▲    │                  ▼
                  pause │    │ resume        stopping ──freed──▶ stopped
                        │    ▼                  ▲
    creating ──ready──▶ running ─────stop───────┘
        │                  │                    ▲
        │ fail             │ fail, paused too   │ stop (a create given up)
        ▼                  ▼                    │
      failed ◀─────────────┘                 creating

`stopped` and `failed` are final. A failed sandbox still gives back what it holds; that is not a
state of its own, because nobody may use it any more and callers want to see *why* it ended, at
once.
"""

from __future__ import annotations

from typing import Literal

from libdsec.errors import Internal, WrongState
from libdsec.model import State

Action = Literal["ready", "pause", "resume", "stop", "freed", "fail"]

TRANSITIONS: dict[tuple[State, Action], State] = {
    ("creating", "ready"): "running",
    ("creating", "fail"): "failed",
    ("creating", "stop"): "stopping",
    ("running", "stop"): "stopping",
    ("running", "fail"): "failed",
    ("running", "pause"): "paused",
    ("paused", "resume"): "running",
    ("paused", "stop"): "stopping",
    ("paused", "fail"): "failed",
    ("stopping", "freed"): "stopped",
    ("stopping", "fail"): "stopping",  # died while being stopped: what was wanted
}

ILLEGAL: dict[tuple[State, Action], str] = {
    ("creating", "freed"): "a sandbox is stopped before it is freed",
    ("creating", "pause"): "the sandbox is still being made",
    ("creating", "resume"): "the sandbox is still being made",
    ("running", "ready"): "the sandbox is already running",
    ("running", "resume"): "the sandbox is not paused",
    ("running", "freed"): "a running sandbox holds its resources",
    ("paused", "ready"): "the sandbox is already running, and paused",
    ("paused", "pause"): "the sandbox is already paused",
    ("paused", "freed"): "a paused sandbox holds its resources",
    ("stopping", "pause"): "the sandbox is being stopped",
    ("stopping", "resume"): "the sandbox is being stopped",
    ("stopping", "ready"): "the sandbox is being stopped; its create was given up",
    ("stopping", "stop"): "the sandbox is already being stopped",
    ("stopped", "ready"): "the sandbox is stopped; create a new one",
    ("stopped", "pause"): "the sandbox is stopped",
    ("stopped", "resume"): "the sandbox is stopped; create a new one",
    ("stopped", "stop"): "the sandbox is already stopped",
    ("stopped", "freed"): "the sandbox is already freed",
    ("stopped", "fail"): "a stopped sandbox cannot fail",
    ("failed", "ready"): "the sandbox has failed; create a new one",
    ("failed", "pause"): "the sandbox has failed",
    ("failed", "resume"): "the sandbox has failed; create a new one",
    ("failed", "stop"): "the sandbox has already failed",
    ("failed", "freed"): "a failed sandbox stays failed",
    ("failed", "fail"): "the sandbox has already failed",
}

FINAL: frozenset[State] = frozenset({"stopped", "failed"})
ALIVE: frozenset[State] = frozenset({"running", "paused"})


def after(state: State, action: Action) -> State:
    """Return the state that follows. Raises `WrongState` with the named reason."""
    follower = TRANSITIONS.get((state, action))
    if follower is not None:
        return follower
    reason = ILLEGAL.get((state, action))
    if reason is None:
        raise Internal(f"no transition {action!r} from {state!r} is known")
    raise WrongState(reason, state=state)
