"""Agents at work, drawn from what the paper tells of its sandboxes: lives, CPU time, waiting. Pure.

Half of the lives end within 17 min and one in a hundred takes more than 3 h; 90% of the sandboxes
use at most 5% of the CPU that they asked for. Both are drawn log-normal through these points. Not
in the paper, and therefore ours: the median share of a CPU, how often a turn comes, and what a
sandbox holds and touches.

What is compressed are the lives: a sandbox has fewer turns, each as long as it would be. If turns
were shortened, too, reclaim would be judged by a wait that is too short and a work that is too
small for what paging costs.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from statistics import NormalDist

MEDIAN_LIFE_S, P99_LIFE_S = 17 * 60.0, 3 * 3600.0
P90_SHARE, MEDIAN_SHARE, MOST_SHARE = 0.05, 0.015, 0.5  # of a CPU
MEDIAN_TURN_S, SPREAD_TURN = 12.0, 0.7  # from one to the next
MEDIAN_HELD_MIB, SPREAD_HELD = 48.0, 0.5  # beside the interpreter's own
LEAST_HELD_MIB, MOST_HELD_MIB = 8, 160
TOUCHED = (0.05, 0.25)  # of what is held, in one turn
SHORTEST_TURN_S = 0.1


def _spread(median: float, other: float, share: float) -> float:
    """Return the sigma of the log-normal that has `other` as its quantile `share`."""
    return math.log(other / median) / NormalDist().inv_cdf(share)


SPREAD_LIFE = _spread(MEDIAN_LIFE_S, P99_LIFE_S, 0.99)
SPREAD_SHARE = _spread(MEDIAN_SHARE, P90_SHARE, 0.90)


@dataclass(frozen=True, slots=True)
class Scale:
    """So many sandboxes begin within `burst_s`; whoever lives at the end of the window ends then.

    Lives are `compression` times shorter than the paper's.
    """

    sandboxes: int
    compression: float
    burst_s: float
    window_s: float


@dataclass(frozen=True, slots=True)
class Turn:
    """Seconds of CPU time of work, and then of waiting for the model.

    The work touches what is held from `begin` to `end`, in shares of it.
    """

    work_s: float
    think_s: float
    begin: float
    end: float


@dataclass(frozen=True, slots=True)
class Life:
    """One sandbox: when it begins, what it holds, and its turns to the end."""

    start_s: float
    share: float
    held_mib: int
    turns: tuple[Turn, ...]

    @property
    def life_s(self) -> float:
        """How long it takes where work takes no longer than its CPU time."""
        return sum(turn.work_s + turn.think_s for turn in self.turns)


def draw(scale: Scale, seed: int) -> list[Life]:
    """Return the same lives for the same seed."""
    rng = random.Random(seed)
    return [_life(rng, scale) for _ in range(scale.sandboxes)]


def _life(rng: random.Random, scale: Scale) -> Life:
    start_s = rng.uniform(0, scale.burst_s)
    life_s = _log_normal(rng, MEDIAN_LIFE_S / scale.compression, SPREAD_LIFE)
    share = min(_log_normal(rng, MEDIAN_SHARE, SPREAD_SHARE), MOST_SHARE)
    held_mib = round(_log_normal(rng, MEDIAN_HELD_MIB, SPREAD_HELD))
    return Life(
        start_s=start_s,
        share=share,
        held_mib=min(max(held_mib, LEAST_HELD_MIB), MOST_HELD_MIB),
        turns=_turns(rng, min(life_s, scale.window_s - start_s), share),
    )


def _turns(rng: random.Random, life_s: float, share: float) -> tuple[Turn, ...]:
    """Fill a life with turns, the last of them cut."""
    turns, left_s = list[Turn](), life_s
    while not turns or left_s > SHORTEST_TURN_S:
        took_s = min(_log_normal(rng, MEDIAN_TURN_S, SPREAD_TURN), left_s)
        touched = rng.uniform(*TOUCHED)
        begin = rng.uniform(0, 1 - touched)
        turns.append(Turn(share * took_s, (1 - share) * took_s, begin, begin + touched))
        left_s -= took_s
    return tuple(turns)


def _log_normal(rng: random.Random, median: float, spread: float) -> float:
    return rng.lognormvariate(math.log(median), spread)
