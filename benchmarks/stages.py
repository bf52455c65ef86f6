"""Races and lengths as data -> gates, then rows of results: everything between `cases` and `report`.

Traps: leaves are made outside the clock and their gradients are returned, not accumulated, so that no round pays for
the one before; the forward mode records nothing for a backward.
"""

from collections.abc import Callable, Iterable

import torch
from rich.console import Console
from torch import Tensor

from benchmarks import cases, gate, scaling, timing
from benchmarks.cases import Contestant, Mode, Race, Shape
from benchmarks.report import Growth, Row, ScalingRow


def as_op(contestant: Contestant) -> gate.Op:
    """Contestant -> inputs to named outputs, preparation included, as the gate wants it."""

    def op(inputs: gate.Tensors) -> dict[str, Tensor]:
        o, S = contestant.run(contestant.prepare(inputs), True)
        assert S is not None, "a contestant must return its final state when asked"
        return {"o": o, "S": S}

    return op


def gate_contestant(name: str, contestant: Contestant, shape: Shape, ours: Contestant | None) -> list[gate.Verdict]:
    """Values and gradients over a few ragged chunks, then at the timed shape (against ours if it is a peer)."""
    rule, op = contestant.rule, as_op(contestant)
    short = Shape(1, min(cases.GATE_TOKENS, shape.T), min(shape.H, 2), shape.D)
    reference = cases.recurrence(rule) if contestant.judge is None else Contestant(rule, contestant.judge)
    judge, wide, limit = as_op(reference), torch.float64, cases.TOLERANCE
    few, full = cases.make_inputs(short, rule), cases.make_inputs(shape, rule)
    title = f"{name} {short} in float64"
    first = gate.check(title, op, judge, few, limit, judge_dtype=wide)
    if ours is not None:
        return [first, gate.check(f"{name} {shape} against {ours.rule}", op, as_op(ours), full, limit)]
    title = f"{name} {shape} in float64, values"
    return [first, gate.check(title, op, judge, full, limit, judge_dtype=wide, gradients=False)]


def gate_all(console: Console, names: Iterable[str], known: dict[str, Contestant], shape: Shape) -> list[gate.Verdict]:
    """Verdicts of everyone in a race, printed as they come."""
    verdicts = []
    for name in names:
        ours = known["falcon-1"] if name == "transformers" else None
        for verdict in gate_contestant(name, known[name], shape, ours):
            console.print(
                f"  gate {'[green]ok [/]' if verdict.green else '[red]RED[/]'} {verdict}",
                highlight=False,
                soft_wrap=True,
            )
            verdicts.append(verdict)
    return verdicts


def call_of(contestant: Contestant, shape: Shape, mode: Mode) -> Callable[[], object]:
    """What the clock sees: the op alone, or the op and the gradients of all its tensors."""
    prepared = contestant.prepare(cases.make_inputs(shape, contestant.rule))
    recorded = mode == "fwd+bwd"
    inputs = {name: value.detach().contiguous().requires_grad_(recorded) for name, value in prepared.items()}
    cotangent = torch.randn(inputs["v"].shape, generator=torch.Generator().manual_seed(1))

    def forward() -> object:
        with torch.no_grad():
            return contestant.run(inputs, False)

    def train() -> object:
        o, _ = contestant.run(inputs, False)
        return torch.autograd.grad(o, list(inputs.values()), cotangent)

    return train if recorded else forward


def row_of(race: Race, name: str, mode: Mode, times: dict[str, timing.Timing]) -> Row:
    """One line of the table; a contestant without a time has a red gate."""
    target, own, base = race.target(name, mode), times.get(name), times.get(race.baseline)
    bound = "" if target is None else str(target)
    if own is None:
        return Row(race.title, str(race.shape), name, mode, race.kind, bound, "red gate")
    ratio = minima = None
    if base is not None:
        ratio, minima = own.median / base.median, own.best / base.best
        if race.kind == "speed-up":
            ratio, minima = 1 / ratio, 1 / minima
    verdict = ""
    if target is not None and ratio is not None:
        verdict = "pass" if target.met(ratio) else "miss"
    median, best, worst = (1e3 * seconds for seconds in (own.median, own.best, own.worst))
    return Row(race.title, str(race.shape), name, mode, race.kind, bound, verdict, median, best, worst, ratio, minima)


def time_race(
    console: Console, race: Race, names: list[str], green: list[str], known: dict[str, Contestant], plan: timing.Plan
) -> list[Row]:
    """Rows of every name in every mode; only those with a green gate are run."""
    rows = []
    for mode in race.modes:
        calls = {name: call_of(known[name], race.shape, mode) for name in green}
        with console.status(f"timing {mode}: warming up") as status:

            def tick(done: int, status=status, mode=mode) -> None:
                status.update(f"timing {mode}: {done} of {plan.repeats} rounds done")

            times = timing.interleaved(calls, plan, tick=tick)
        summary = ", ".join(f"{name} {1e3 * time.median:.1f} ms" for name, time in times.items())
        console.print(f"  {mode}: {summary}", highlight=False, soft_wrap=True)
        rows += [row_of(race, name, mode, times) for name in names]
    return rows


def run_race(
    console: Console, race: Race, known: dict[str, Contestant], names: list[str], plan: timing.Plan
) -> tuple[list[gate.Verdict], list[Row]]:
    """Gate everyone, then time those whose gate is green."""
    console.print(f"[bold]{race.title}[/], (B, T, H, D) = {race.shape}", highlight=False, soft_wrap=True)
    verdicts, green = [], []
    for name in names:
        mine = gate_all(console, [name], known, race.shape)
        verdicts += mine
        if all(verdict.green for verdict in mine):
            green.append(name)
    return verdicts, time_race(console, race, names, green, known, plan)


def scaling_row(contestant: Contestant, tokens: int, plan: timing.Plan) -> ScalingRow:
    """Time, bytes kept and peak memory of forward + backward at one length, per token and head."""
    shape = Shape(cases.SCALING_SHAPE.B, tokens, cases.SCALING_SHAPE.H, cases.SCALING_SHAPE.D)
    train = call_of(contestant, shape, "fwd+bwd")
    inputs = {name: value.requires_grad_() for name, value in cases.make_inputs(shape, contestant.rule).items()}
    seconds = timing.interleaved({"": train}, plan)[""].best
    saved = scaling.saved_bytes(lambda: contestant.run(inputs, False)[0])
    units = shape.B * tokens * shape.H
    return ScalingRow(contestant.rule, tokens, 1e6 * seconds / units, saved / units, scaling.peak_bytes(train) / units)


def growth_of(rule: str, rows: list[ScalingRow]) -> Growth:
    """Exponents of the totals; peak memory is shown but not judged (the allocator has a mind of its own)."""
    lengths = [row.tokens for row in rows]
    time, saved, peak = (
        scaling.exponent(lengths, [getattr(row, field) * row.tokens for row in rows])
        for field in ("time_us", "saved_bytes", "peak_bytes")
    )
    linear = time <= cases.MAX_TIME_EXPONENT and saved <= cases.MAX_MEMORY_EXPONENT
    return Growth(rule, time, saved, peak, "pass" if linear else "miss")


def run_scaling(
    console: Console, rules: list[str], known: dict[str, Contestant], plan: timing.Plan
) -> tuple[list[ScalingRow], list[Growth]]:
    """Every rule at every length of SCALING_TOKENS."""
    rows, growths = [], []
    console.print("[bold]Growth with T[/], forward + backward")
    for rule in rules:
        mine = []
        for tokens in cases.SCALING_TOKENS:
            with console.status(f"{rule}, T = {tokens}"):
                mine.append(scaling_row(known[rule], tokens, plan))
        rows += mine
        growths.append(growth_of(rule, mine))
        console.print(
            f"  {rule}: " + ", ".join(f"T={row.tokens} {row.time_us:.2f} us" for row in mine), highlight=False
        )
    return rows, growths
