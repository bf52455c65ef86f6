"""Decoding steps on the GPU: (batch, op) -> microseconds a token inside a CUDA graph, beside FLA's recurrent kernel.

A graph holds several tokens of one layer, each going on from the state that the one before left, and is replayed; what
is reported is one token. The floor is the state read and written once. Traps: at batch 1 a megabyte of state stays in
the cache, so only launches are measured there; FLA returns a new state each time, ours overwrites one.
"""

from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor

import fastweight as fw
from fastweight.memory.attention import DELTA_RULE, step_in_place
from fastweight.memory.rules import Rule

BATCHES = (1, 64, 256)
HEADS, WIDTH = 16, 128
TOKENS = 16  # in one graph
REPLAYS = 15
Step = Callable[[dict[str, Any]], Tensor]


def rules() -> dict[str, Rule]:
    """Every rule by name, and the delta rule's own class."""
    return {**fw.RULES, "gated delta rule": DELTA_RULE}


def token(rule: Rule, batch: int, heads: int = HEADS, width: int = WIDTH) -> dict[str, Any]:
    """One bfloat16 token with unit keys, float32 gates, and a state in the middle of a sequence."""
    random = torch.Generator("cuda").manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, device="cuda")

    def unit(x: Tensor) -> Tensor:
        return torch.nn.functional.normalize(x, dim=-1)

    columns = (width,) if rule.gain == "column" else ()
    state = fw.State.zeros(rule, batch, heads, width, width, device="cuda")
    state = state._replace(
        S=0.1 * draw(*state.S.shape), key=unit(draw(*state.key.shape)), has_key=torch.ones_like(state.has_key),
        tail_x=unit(draw(*state.tail_x.shape)), tail_y=draw(*state.tail_y.shape),
        tail_count=torch.full_like(state.tail_count, rule.window - 1),
    )  # fmt: skip
    return {
        "q": unit(draw(batch, heads, width)).bfloat16(),
        "k": unit(draw(batch, heads, width)).bfloat16(),
        "v": draw(batch, heads, width).bfloat16(),
        "beta": torch.sigmoid(draw(batch, heads, *columns)),
        "lam": 0.1 * torch.sigmoid(draw(batch, heads)),
        "state": state,
        "tickets": torch.zeros(batch, dtype=torch.int32, device="cuda"),
    }


def ours(rule: Rule) -> Step:
    """One token of a rule, the state overwritten."""
    if rule is DELTA_RULE:
        from fastweight.kernels import dispatch

        def delta(given: dict[str, Any]) -> Tensor:
            q, k, v, beta, lam, state, tickets = given.values()
            parts = (state.S, *state[2:])
            return dispatch.step(q, k, v, beta, None, rule, parts, log_decay=-lam, tickets=tickets)[0]

        return delta

    def call(given: dict[str, Any]) -> Tensor:
        q, k, v, beta, lam, state, tickets = given.values()
        return step_in_place(q, k, v, beta, lam, state, rule, tickets=tickets)

    return call


def fla() -> Step:
    """FLA's recurrent gated delta rule, which goes on from the state that it returned."""
    from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule  # pyright: ignore[reportMissingImports]

    def call(given: dict[str, Any]) -> Tensor:
        q, k, v, beta, gate = (given[name][:, None] for name in ("q", "k", "v", "beta", "lam"))
        o, S = fused_recurrent_gated_delta_rule(
            q, k, v, g=-gate, beta=beta, scale=1.0, initial_state=given["state"].S, output_final_state=True
        )
        given["state"] = given["state"]._replace(S=S)
        return o[:, 0]

    return call


def expected(rule: Rule, given: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """o and the next S in float64, by the library's recurrence."""
    wide = {name: given[name].double()[:, None] for name in ("q", "k", "v", "beta", "lam")}
    how: dict[str, Any] = {"form": "recurrent", "backend": "torch", "output_final_state": True}
    how["initial_state"] = given["state"].to(torch.float64)
    q, k, v, beta, lam = wide.values()
    if rule is DELTA_RULE:
        o, state = fw.delta_rule(q, k, v, beta, -lam, **how)
    else:
        o, state = fw.fast_weight_attention(q, k, v, beta, lam, rule, **how)
    assert state is not None, "the state was asked for"
    return o[:, 0], state.S


def error(rule: Rule, call: Step) -> float:
    """Largest relative RMS error of o and the next S of one token at batch 3."""
    given = token(rule, 3)
    o, S = expected(rule, given)
    got = call(given)
    pairs = ((got, o), (given["state"].S, S))
    return max(float((a.double() - b).norm() / b.norm()) for a, b in pairs)


def microseconds(call: Step, given: dict[str, Any]) -> tuple[float, float]:
    """Of one token inside a graph, and of one call on the host outside of it."""
    call(given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(TOKENS):
            call(given)
    graph.replay()
    times = []
    for _ in range(REPLAYS):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(1e3 * start.elapsed_time(stop) / TOKENS)
    return median(times), _host(call, given)


def _host(call: Step, given: dict[str, Any], calls: int = 50) -> float:
    import time

    call(given)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        call(given)
    seconds = time.perf_counter() - start
    torch.cuda.synchronize()
    return 1e6 * seconds / calls


def floor(batch: int, copy_rate: float, heads: int = HEADS, width: int = WIDTH) -> float:
    """Microseconds that the state's bytes need, read and written at the measured copy rate."""
    return 1e6 * 2 * batch * heads * width * width * 4 / copy_rate
