"""Several calls -> their times, measured side by side.

Rounds of A B C, C B A, A B C, ...: a machine that slows down or speeds up does so for everyone alike, so ratios are
steadier than times. Medians, with the fastest and the slowest round beside them so that noise can be seen.

Traps: garbage collection is off inside a round (a collection would land on whoever comes next); one unmeasured call
each warms caches and lazy initialisation; the wall clock is what a user sees, but on a busy machine it mostly measures
the neighbours: there, one thread and the "cpu" clock still give a fair ratio (with more threads, idle ones burn it).
"""

import gc
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median

Call = Callable[[], object]
Clock = Callable[[], float]
CLOCKS: dict[str, Clock] = {"wall": time.perf_counter, "cpu": time.process_time}
FEWEST_ROUNDS = 3


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


@dataclass(frozen=True)
class Plan:
    """How long to look: `repeats` rounds, or fewer (at least 3) once `budget` seconds are spent on one comparison."""

    repeats: int = 15
    clock: str = "wall"
    budget: float = 60.0


def time_once(call: Call, clock: Clock) -> float:
    """Seconds of one call; its result is freed outside the clock."""
    start = clock()
    result = call()
    seconds = clock() - start
    del result
    return seconds


def interleaved(
    calls: Mapping[str, Call], plan: Plan, *, tick: Callable[[int], object] | None = None
) -> dict[str, Timing]:
    """Times of every call over the rounds of `plan`; `tick` gets the number of rounds done after each."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    clock, start, names = CLOCKS[plan.clock], time.perf_counter(), list(calls)
    for call in calls.values():
        time_once(call, clock)
    enabled = gc.isenabled()
    try:
        for done in range(1, plan.repeats + 1):
            gc.collect()
            gc.disable()
            for name in names:
                samples[name].append(time_once(calls[name], clock))
            names.reverse()
            if tick is not None:
                tick(done)
            if done >= FEWEST_ROUNDS and time.perf_counter() - start > plan.budget:
                break
    finally:
        if enabled:
            gc.enable()
    return {name: Timing(tuple(values)) for name, values in samples.items()}
