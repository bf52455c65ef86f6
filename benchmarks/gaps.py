"""A profile of training steps into where the device stood still, and what the host did meanwhile.

    wall = computing + exchange that nothing covers + idle

Kernels of NCCL count as exchange, all others and copies as computing; what overlaps counts once. Idle time is given to
the phase of the step that the host was in when the device stopped: phases are `record_function` ranges whose name
begins with MARK, set around methods by `marked`. Traps: the profiler slows the host down, so idle time here is an upper
bound and its distribution is the result; times are nanoseconds of one clock.
"""

from collections import defaultdict
from collections.abc import Iterable
from functools import wraps
from itertools import pairwise
from typing import Any, NamedTuple

import torch

MARK = "step: "
METHODS = ("get_batch_samples", "training_step", "_clip_grad_norm", "log")
WAITS = ("Synchronize", "cudaMemcpyAsync", "cudaEventQuery", "cudaMalloc", "cudaFree")
SHOWN = 8


class Span(NamedTuple):
    """Something with a beginning and an end."""

    name: str
    start: int
    end: int


def marked(trainer: Any, names: Iterable[str] = METHODS) -> None:
    """Calls of these methods of `trainer` become phases."""
    for name in names:
        setattr(trainer, name, _within(MARK + name.strip("_"), getattr(trainer, name)))


def _within(label: str, method: Any) -> Any:
    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        with torch.profiler.record_function(label):
            return method(*args, **kwargs)

    return call


def union(spans: Iterable[Span]) -> list[Span]:
    """Times covered by at least one span, in order, apart from one another."""
    merged: list[Span] = []
    for _, start, end in sorted(spans, key=lambda span: span.start):
        if merged and start <= merged[-1].end:
            merged[-1] = merged[-1]._replace(end=max(end, merged[-1].end))
        else:
            merged.append(Span("", start, end))
    return merged


def total(spans: Iterable[Span]) -> int:
    return sum(span.end - span.start for span in spans)


def split(events: Iterable[Any]) -> tuple[list[Span], list[Span]]:
    """Events of a profile (its kineto results) as spans of the device and of the host; ranges that the host has named,
    which are shown on the device as well, are the host's."""
    device: list[Span] = []
    host: list[Span] = []
    for event in events:
        on_host = str(event.device_type()).endswith("CPU")
        (host if on_host else device).append(
            Span(event.name(), event.start_ns(), event.start_ns() + event.duration_ns())
        )
    named = {span.name for span in host}
    return [span for span in device if span.name not in named], host


def report(device: list[Span], host: list[Span], steps: int) -> list[str]:
    """Lines: the sum of a step, idle time by phase, the longest gaps with what the host waited in."""
    if not device:
        return ["no events of a device"]
    busy, computing = union(device), union(span for span in device if "nccl" not in span.name.lower())
    wall = busy[-1].end - busy[0].start
    gaps = [Span("", before.end, after.start) for before, after in pairwise(busy)]
    phases = [span for span in host if span.name.startswith(MARK)]
    calls = [span for span in host if any(word in span.name for word in WAITS)]
    idle: dict[str, int] = defaultdict(int)
    for gap in gaps:
        idle[_phase(gap, phases)] += gap.end - gap.start
    each = 1e-6 / steps
    alone = total(busy) - total(computing)
    parts = (
        f"computing {total(computing) * each:.2f} + exchange alone {alone * each:.2f} + idle {total(gaps) * each:.2f}"
    )
    lines = [f"a step: {wall * each:.2f} ms = {parts}; {len(device) // steps} launches"]
    for name, spent in sorted(idle.items(), key=lambda item: -item[1]):
        lines.append(f"  idle {spent * each:8.3f} ms a step in {name}")
    for gap in sorted(gaps, key=lambda gap: gap.start - gap.end)[:SHOWN]:
        at = (gap.start - busy[0].start) * 1e-6
        lines.append(
            f"  gap {(gap.end - gap.start) * 1e-6:8.3f} ms at {at:8.2f} in {_phase(gap, phases)}: {_call(gap, calls)}"
        )
    return lines


def _phase(gap: Span, phases: list[Span]) -> str:
    around = [span for span in phases if span.start <= gap.start < span.end]
    return min(around, key=lambda span: span.end - span.start).name.removeprefix(MARK) if around else "between"


def _call(gap: Span, calls: list[Span]) -> str:
    """The call that waits or copies and covers most of a gap, counted from where the host was when it began."""
    found = [(min(span.end, gap.end) - max(span.start, gap.start), span.name) for span in calls]
    longest = max(found, default=(0, ""))
    return f"{longest[1]} {longest[0] * 1e-6:.3f} ms" if longest[0] > 0 else "no call that waits"
