"""Does the next sandbox cost more when thousands live already, and what does an idle one hold?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dsec_bench.create.daemon import own_resident_bytes
from dsec_bench.create.memory import settled_bytes
from dsec_bench.create.sdk import Sdk
from dsec_bench.stats import Round

CONCURRENCY = 8


@dataclass(slots=True)
class Level:
    """Measured with `live` idle sandboxes on the host. `used_bytes` None: caches stayed."""

    live: int
    rounds: list[Round]
    used_bytes: int | None


def _used() -> int | None:
    """Memory in use, without what the client (this process) holds for its own objects."""
    try:
        return settled_bytes() - own_resident_bytes()
    except OSError:
        return None


def levels(
    sdk: Sdk,
    counts: tuple[int, ...],
    seconds: float,
    rounds: int,
    on_ready: Callable[[], None],
    on_round: Callable[[int], None],
) -> list[Level]:
    """Fill up to each of `counts` in turn and measure there; all are stopped at the end."""
    result: list[Level] = []
    live = 0
    sdk.round(CONCURRENCY, seconds / 2)  # pools and caches of the first creations are no growth
    try:
        for count in counts:
            if count > live:
                sdk.fill(count - live, on_ready)
                live = count
            used = _used()
            measured = []
            for _ in range(rounds):
                measured.append(sdk.round(CONCURRENCY, seconds))
                on_round(count)
            result.append(Level(count, measured, used))
    finally:
        sdk.stop_all()
    return result


def idle_mib(first: Level, last: Level) -> float | None:
    """Return MiB of host memory per sandbox between two levels, or None when unknown."""
    if first.used_bytes is None or last.used_bytes is None or last.live == first.live:
        return None
    return (last.used_bytes - first.used_bytes) / (last.live - first.live) / (1 << 20)
