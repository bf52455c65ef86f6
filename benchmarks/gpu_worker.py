"""One case of the GPU benchmark in a process of its own: `python -m benchmarks.gpu_worker LABEL SHAPE_NUMBERS`.

It imports, compiles, and compares with the float64 recurrence at once, then waits for a line on its input before each
measurement, so that only one process at a time uses the device for anything that is timed. What it finds it prints as
lines of JSON after an @. The parent (benchmarks.gpu) kills it when it takes too long, so a hanging kernel costs one
case, not the run.

Traps: errors are those of a slice that takes the same way through the code; a case that fails there is not timed. The
first call is timed with everybody else compiling on the same processors.
"""

import contextlib
import json
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks import gpu_decode
from benchmarks.gpu_cases import ALLOWED, CASES, OPS, REGIMES, SHAPES, Case, Given, Shape, inputs, judge, slice_of

DECODE = "decode"
CYCLES_PER_S = 2e9  # of the device's clock, or fewer
LONG = 0.2  # seconds of a call on the host, from which few calls say enough
Call = Callable[[Given], Tensor]


def say(kind: str, **what: Any) -> None:
    print("@" + json.dumps({"kind": kind} | what), flush=True)


def wait() -> bool:
    """Until the parent says so; False when it wants no more."""
    return sys.stdin.readline().strip() == "go"


def train(call: Call, given: Given, pull: Tensor | None = None) -> Tensor:
    for tensor in given.values():
        if tensor is not None:
            tensor.grad = None
    o = call(given)
    o.backward(torch.ones_like(o) if pull is None else pull)
    return o


def errors(case: Case, call: Call, shape: Shape, regime: str) -> dict[str, float]:
    """Relative RMS error of o and of every gradient against the float64 recurrence on the same numbers."""
    op = OPS[case.op]
    given = inputs(op, slice_of(shape), regime, seed=1)
    wide = {n: None if t is None else t.detach().double().requires_grad_() for n, t in given.items()}
    exact = judge(op, wide)
    pull = torch.randn(exact.shape, device=exact.device, generator=torch.Generator(exact.device).manual_seed(2))
    if not case.trains:
        pairs = {"o": (call(given).detach(), exact.detach())}
    else:
        pairs = {"o": (train(call, given, pull.bfloat16()).detach(), exact.detach())}
        exact.backward(pull.bfloat16().double())
        pairs |= {n: (t.grad, wide[n].grad) for n, t in given.items() if t is not None}  # type: ignore[union-attr]
    return {n: float((a.double() - b.double()).norm() / b.double().norm()) for n, (a, b) in pairs.items()}


def whole(case: Case, call: Call, shape: Shape) -> dict[str, float]:
    """What the slices cannot show: the last rows of the timed batch against the same rows alone, by relative RMS error.

    A full device runs programs side by side that a slice never does, so races and offsets show here. A batch of one is
    compared with a second run. Whatever is not finite is infinitely wrong.
    """
    op = OPS[case.op]
    given = inputs(op, shape)
    rows = slice(-min(2, shape[0]), None)
    part = {n: None if t is None else t.detach()[rows].clone().requires_grad_() for n, t in given.items()}
    found = {}
    pull = torch.randn_like(given["q"])  # as o, values being as wide as keys
    if case.trains:
        found["o"] = (train(call, given, pull).detach()[rows], train(call, part, pull[rows]).detach())
        found |= {n: (t.grad[rows], part[n].grad) for n, t in given.items() if t is not None}  # type: ignore[union-attr]
    else:
        found["o"] = (call(given).detach()[rows], call(part).detach())
    sizes = {n: float((a.double() - b.double()).norm() / b.double().norm()) for n, (a, b) in found.items()}
    return {n: size if size == size else float("inf") for n, size in sizes.items()}


def milliseconds(run: Callable[[], Any], repeats: int = 15) -> float:
    """Median of the device's time, its cache flushed before each call, the host so far ahead that it never waits."""
    host = host_seconds(run)
    repeats = repeats if host < LONG else 3
    cache = torch.empty(2**28, dtype=torch.int8, device="cuda")
    found = []
    for _ in range(repeats):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        cache.zero_()
        torch.cuda._sleep(int((2 * host + 1e-3) * CYCLES_PER_S))
        start.record()
        run()
        stop.record()
        stop.synchronize()
        found.append(start.elapsed_time(stop))
    return median(found)


def host_seconds(run: Callable[[], Any], repeats: int = 5) -> float:
    """Median of what one call takes on the host when the device has nothing to do."""
    run()
    found = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        found.append(time.perf_counter() - start)
        if sum(found) > 5 * LONG:
            break
    torch.cuda.synchronize()
    return median(found)


def times(case: Case, call: Call, shape: Shape) -> dict[str, float]:
    """Milliseconds of a forward without gradients and of forward + backward, and the peak MiB that the latter adds."""
    given = inputs(OPS[case.op], shape)
    pull = torch.randn_like(given["q"])  # as o, values being as wide as keys

    def forward() -> None:
        with torch.no_grad():
            call(given)

    found = {"forward_ms": milliseconds(forward), "host_us": 1e6 * host_seconds(forward)}
    if not case.trains:
        return found
    train(call, given, pull)
    for tensor in given.values():
        if tensor is not None:
            tensor.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    train(call, given, pull)
    found["peak_mib"] = (torch.cuda.max_memory_allocated() - before) / 2**20
    found["train_ms"] = milliseconds(lambda: train(call, given, pull))
    found["train_host_us"] = 1e6 * host_seconds(lambda: train(call, given, pull))
    return found


def first_call(case: Case) -> Call:
    """The case's call; says how long its first use took, import of its own library left out.

    What tunes itself does so at the timed shapes (`tune`), not on the few tokens of a first call.
    """
    call = case.make()
    if case.tunes:
        return call
    given = inputs(OPS[case.op], (1, 130, CASES[case.label].shapes()[0][2], case.widths[-1]))
    torch.cuda.synchronize()
    start = time.perf_counter()
    call(given) if not case.trains else train(call, given)
    torch.cuda.synchronize()
    say("first", label=case.label, seconds=time.perf_counter() - start)
    return call


def warm(case: Case, call: Call, shapes: list[Shape]) -> None:
    """Compiles what the timed shapes need."""
    for shape in shapes:
        given = inputs(OPS[case.op], (*slice_of(shape)[:2], *shape[2:]))
        call(given) if not case.trains else train(call, given)
    torch.cuda.synchronize()


def tune(case: Case, call: Call, shapes: list[Shape]) -> None:
    """Lets a library that tunes itself do so, at the very shapes that are timed; says how long that took."""
    for shape in shapes if case.tunes else ():
        start = time.perf_counter()
        given = inputs(OPS[case.op], shape)
        call(given) if not case.trains else train(call, given)
        torch.cuda.synchronize()
        say("first", label=f"{case.label}, {'x'.join(map(str, shape))}", seconds=time.perf_counter() - start)
        del given
        torch.cuda.empty_cache()


def check(case: Case, call: Call, shape: Shape) -> dict[str, Any]:
    """Errors in all regimes at the case's first shape, in the usual one at the others, and of the whole batch.

    `wrong` says whether any is too large. A peer is held to the usual regime only; the others are shown beside ours.
    """
    if not case.judged:
        return {}
    regimes = REGIMES if shape == case.shapes()[0] else {"usual": {}}
    found = {regime: errors(case, call, shape, regime) for regime in regimes}
    found["whole batch"] = whole(case, call, shape)
    strict = {"usual": found["usual"]} if case.peer else found
    torch.cuda.empty_cache()
    return {"errors": found, "wrong": not all(e <= ALLOWED for one in strict.values() for e in one.values())}


def guarded(run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return run()
    except Exception as problem:
        return {"failed": f"{type(problem).__name__}: {str(problem)[:300]}"}


def serve(label: str, shapes: list[Shape]) -> None:
    """Warm up, compare, then one measurement for every line of input, over the shapes again and again."""
    case = CASES[label]
    call = first_call(case)
    tune(case, call, shapes)
    warm(case, call, shapes)
    bad = set()
    for shape in shapes:
        row = guarded(lambda shape=shape: check(case, call, shape))
        if row.get("wrong") or "failed" in row:
            bad.add(shape)
        say("checked", label=label, shape=shape, **row)
    say("warm", label=label)
    while True:
        for shape in shapes:
            if not wait():
                return
            say(
                "row",
                label=label,
                shape=shape,
                **({} if shape in bad else guarded(lambda s=shape: times(case, call, s))),
            )
            torch.cuda.empty_cache()


def decode() -> None:
    """The decoding steps of every rule, then FLA's."""
    torch.set_grad_enabled(False)
    rules = gpu_decode.rules()
    calls: dict[str, tuple[str, gpu_decode.Step]] = {
        name: (name, gpu_decode.ours(rule)) for name, rule in rules.items()
    }
    with contextlib.suppress(ImportError):
        calls["FLA recurrent gated delta rule"] = ("gated delta rule", gpu_decode.fla())
    found = {
        label: guarded(lambda n=n, c=c: {"error": gpu_decode.error(rules[n], c)}) for label, (n, c) in calls.items()
    }
    say("warm", label=DECODE)
    if not wait():
        return
    for batch in gpu_decode.BATCHES:
        for label, (name, call) in calls.items():
            row = dict(found[label])
            if row.get("error", 1.0) <= ALLOWED:
                runs = [gpu_decode.microseconds(call, gpu_decode.token(rules[name], batch)) for _ in range(2)]
                row |= {"us": median(r[0] for r in runs), "host_us": median(r[1] for r in runs)}
            say("decode", label=label, batch=batch, **row)
            torch.cuda.empty_cache()
    say("row", label=DECODE)


def main() -> None:
    """[first | tune | later] LABEL NUMBERS: only a first call; only tune a case at these shapes; or serve it, at once
    or after a first line."""
    words = sys.argv[1:]
    when = words.pop(0) if words[0] in ("first", "tune", "later") else ""
    label, *numbers = words
    shapes = [SHAPES[int(number)] for number in numbers]
    if label == DECODE:
        decode()
    elif when == "first":
        first_call(CASES[label])
    elif when == "tune":
        tune(CASES[label], CASES[label].make(), shapes)
    elif not when or wait():
        serve(label, shapes)


if __name__ == "__main__":
    main()
