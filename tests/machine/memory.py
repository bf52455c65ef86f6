"""Shared memory of one program as a Hopper kernel sees it: bytes, and what may touch them when.

What a GPU does at the same time happens here one after the other, each thing as late as it may: a copy lands, and a
product reads its operands, when somebody waits for it. Until then its bytes are NaN, or nobody's to write, and `Hazard`
is raised where threads, matrix units and copies would race:

* threads and products touch no bytes whose copy has not been waited for;
* what threads wrote is seen by products and outgoing copies after a fence and then a barrier;
* what products or outgoing copies read may be written after a wait and then a barrier, what threads touched after a
  barrier (threads among themselves are kept apart by barriers that the compiler adds);
* bytes are read in the arrangement that they were written in.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

NAN = 0xFF  # four or two bytes of it are NaN in every float type


class Hazard(AssertionError):
    """What the kernel does has no defined result on a device."""


@dataclass
class Span:
    """Bytes of a block: in `block` from `low` to `high`."""

    block: int
    low: int
    high: int

    def meets(self, other: "Span") -> bool:
        return self.block == other.block and self.low < other.high and other.low < self.high


@dataclass
class Use:
    """Bytes that something reads: still going on (`done` is None), or waited for in that epoch."""

    span: Span
    what: str
    done: int | None = None


@dataclass
class Written:
    """Bytes that threads wrote, since when products and copies may not see them."""

    span: Span
    fenced: int | None = None  # the epoch of the fence


@dataclass
class Arrival:
    """A copy on its way in."""

    span: Span
    barrier: "Barrier"
    land: Callable[[], None]


@dataclass
class Barrier:
    """Counts bytes: a phase is over when all that were announced have come."""

    over: int = 0
    armed: bool = False


@dataclass
class Memory:
    """All blocks of a program, and what goes on in them. An epoch ends with each barrier of all threads."""

    epoch: int = 0
    blocks: list[torch.Tensor] = field(default_factory=list)
    uses: list[Use] = field(default_factory=list)
    written: list[Written] = field(default_factory=list)
    touched: list[Span] = field(default_factory=list)  # by threads, in this epoch
    arrivals: list[Arrival] = field(default_factory=list)
    arranged: list[tuple[Span, Any]] = field(default_factory=list)

    def allocate(self, size: int) -> tuple[int, torch.Tensor]:
        self.blocks.append(torch.full((size,), NAN, dtype=torch.uint8))
        return len(self.blocks) - 1, self.blocks[-1]

    def barrier(self) -> None:
        """All threads are here."""
        self.epoch += 1
        self.touched.clear()
        self.uses = [use for use in self.uses if use.done is None or use.done >= self.epoch]
        self.written = [w for w in self.written if w.fenced is None or w.fenced >= self.epoch]

    def fence(self) -> None:
        for written in self.written:
            if written.fenced is None:
                written.fenced = self.epoch

    def by_threads(self, span: Span, writes: bool) -> None:
        """Threads are about to read or write."""
        self._not_arriving(span)
        if writes:
            self._not_used(span)
            self.written.append(Written(span))
        self.touched.append(span)

    def by_unit(self, span: Span, what: str) -> Use:
        """A product or an outgoing copy begins to read."""
        self._not_arriving(span)
        for written in self.written:
            if written.span.meets(span):
                why = "no fence" if written.fenced is None else "no barrier after the fence"
                raise Hazard(f"{what} reads what threads wrote: {why}")
        use = Use(span, what)
        self.uses.append(use)
        return use

    def by_copy(self, span: Span, barrier: Barrier, land: Callable[[], None]) -> None:
        """A copy begins to come in."""
        self._not_arriving(span)
        self._not_used(span)
        if any(touched.meets(span) for touched in self.touched):
            raise Hazard("a copy comes in over what threads touched: no barrier since")
        if any(written.span.meets(span) for written in self.written):
            raise Hazard("a copy comes in over what threads wrote: no fence since")
        self.blocks[span.block][span.low : span.high] = NAN
        self.arrivals.append(Arrival(span, barrier, land))

    def wait(self, barrier: Barrier, parity: int) -> None:
        """Until the phase of that parity is over; everything announced comes."""
        mine = [arrival for arrival in self.arrivals if arrival.barrier is barrier]
        if mine:
            self.arrivals = [arrival for arrival in self.arrivals if arrival.barrier is not barrier]
            for arrival in mine:
                arrival.land()
            barrier.over += 1
            barrier.armed = False
        if barrier.over % 2 == parity:
            raise Hazard(f"waits for ever: {barrier.over} phases are over, waited for one of parity {parity}")

    def arrange(self, span: Span, how: Any) -> None:
        """What is written to the span is arranged like `how` from now on."""
        kept: list[tuple[Span, Any]] = []
        for old, its in self.arranged:
            if not old.meets(span):
                kept.append((old, its))
                continue
            ends = (Span(old.block, old.low, span.low), Span(old.block, span.high, old.high))
            kept += [(end, its) for end in ends if end.low < end.high]
        self.arranged = [*kept, (span, how)]

    def check_arranged(self, span: Span, how: Any) -> None:
        for old, its in self.arranged:
            if old.meets(span) and its != how:
                raise Hazard(f"reads as {how} what was written as {its}")

    def end(self) -> None:
        """The program is over."""
        if self.arrivals:
            raise Hazard("ends with a copy on its way in")
        if any(use.done is None for use in self.uses):
            raise Hazard("ends with a product or an outgoing copy not waited for")

    def _not_arriving(self, span: Span) -> None:
        if any(arrival.span.meets(span) for arrival in self.arrivals):
            raise Hazard("touches what a copy that was not waited for brings")

    def _not_used(self, span: Span) -> None:
        for use in self.uses:
            if use.span.meets(span):
                why = "not waited for" if use.done is None else "no barrier since the wait"
                raise Hazard(f"writes over what {use.what} reads: {why}")
