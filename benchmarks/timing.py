"""Several calls -> their times, measured side by side.

Rounds of A B C, C B A, A B C, ...: a machine that slows down or speeds up does so for everyone alike, so ratios are
steadier than times. Medians, with the fastest and the slowest round beside them so that noise can be seen.

Traps: garbage collection is off inside a round (a collection would land on whoever comes next); one unmeasured call
each warms caches and lazy initialisation; wall clock, not process time, because idle threads burn process time.
"""

import gc
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median

Call = Callable[[], object]


@dataclass(frozen=True)
class Timing:
    """Seconds of each round for one call."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return median(self.seconds)

    @property
    def best(self) -> float:
        return min(self.seconds)

    @property
    def worst(self) -> float:
        return max(self.seconds)


def time_once(call: Call) -> float:
    """Seconds of one call; its result is freed outside the clock."""
    start = time.perf_counter()
    result = call()
    seconds = time.perf_counter() - start
    del result
    return seconds


def interleaved(
    calls: Mapping[str, Call], repeats: int, *, tick: Callable[[], object] | None = None
) -> dict[str, Timing]:
    """Times of every call over `repeats` rounds; `tick` is called after each round."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        time_once(call)
    names = list(calls)
    enabled = gc.isenabled()
    try:
        for _ in range(repeats):
            gc.collect()
            gc.disable()
            for name in names:
                samples[name].append(time_once(calls[name]))
            names.reverse()
            if tick is not None:
                tick()
    finally:
        if enabled:
            gc.enable()
    return {name: Timing(tuple(values)) for name, values in samples.items()}
