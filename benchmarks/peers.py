"""The cores of the baseline mixers beside FLA's kernels on a GPU: the same numbers, values, states and gradients.

    PYTHONPATH=WHERE_FLA_IS python -m benchmarks.peers

Both are judged by the float64 recurrence: ours must stay within bfloat16's rounding, FLA's within AGREES, which tells
that both mean the same op (order of decay and residual, scale, layout), not who rounds better. Traps: FLA's chunk
kernels tune for minutes, so its recurrent ones answer here, each in the first of its configurations (the gated one has
no backward; the GPU benchmark compares its chunk kernel). The Mamba-2 row is FLA's simple GLA fed as SSD is.
"""

import importlib
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

import fastweight as fw
from benchmarks.gate import Tensors, compare, values_and_gradients
from fastweight.layers.retention import Retention

SHAPE = (2, 200, 4, 64)  # B T H D
OURS, AGREES = 2**-7, 3e-2


def inputs(device: str) -> dict[str, Tensor]:
    """bfloat16 tokens with keys of length 1, float32 gates and state."""
    B, T, H, D = SHAPE
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(B, T, H, D, generator=generator) for _ in range(3))
    gates = {
        "beta": torch.rand(B, T, H, generator=generator),
        "log_decay": -torch.rand(B, T, H, generator=generator).square(),
        "S": torch.randn(B, H, D, D, generator=generator),
    }
    q, k = q / q.norm(dim=-1, keepdim=True), k / k.norm(dim=-1, keepdim=True)
    tokens = {name: value.bfloat16() for name, value in (("q", q), ("k", k), ("v", v))}
    return {name: value.to(device) for name, value in (tokens | gates).items()}


def _result(pair: tuple[Tensor, Any]) -> dict[str, Tensor]:
    o, state = pair
    return {"o": o, "S": state.S if isinstance(state, fw.State) else state}


def delta(given: Tensors, decay: bool, **how: Any) -> Tensors:
    """DeltaNet, or Gated DeltaNet."""
    log_decay = given["log_decay"] if decay else None
    around = {"initial_state": given["S"], "output_final_state": True} | how
    return _result(fw.delta_rule(given["q"], given["k"], given["v"], given["beta"], log_decay, **around))


def linear(given: Tensors, retention: bool, **how: Any) -> Tensors:
    """RetNet, or the scan of Mamba-2."""
    log_decay = given["log_decay"]
    if retention:
        heads = log_decay.shape[-1]
        log_decay = Retention(2 * heads, heads).log_decay(log_decay).expand_as(log_decay)
    around = {"initial_state": given["S"], "output_final_state": True} | how
    return _result(fw.linear_attention(given["q"], given["k"], given["v"], log_decay, **around))


def peer(module: str, name: str, **renamed: str) -> Callable[[Tensors], Tensors]:
    """An op of FLA at scale 1 as a function of our inputs; renamed: its keyword -> our name."""
    op = getattr(importlib.import_module(module), name)

    def call(given: Tensors) -> Tensors:
        extra = {theirs: given[ours] for theirs, ours in renamed.items()}
        tokens = (given["q"], given["k"], given["v"])
        return _result(op(*tokens, scale=1.0, initial_state=given["S"], output_final_state=True, **extra))

    return call


class Case(NamedTuple):
    """ours: inputs -> o and S. op: FLA's module and name. renamed: its keyword -> our name. trains: has a backward."""

    ours: Callable[..., Tensors]
    op: tuple[str, str]
    renamed: dict[str, str]
    trains: bool = True


CASES = {
    "delta rule": Case(
        partial(delta, decay=False), ("fla.ops.delta_rule", "fused_recurrent_delta_rule"), {"beta": "beta"}
    ),
    "gated delta rule": Case(
        partial(delta, decay=True),
        ("fla.ops.gated_delta_rule", "fused_recurrent_gated_delta_rule"),
        {"g": "log_decay", "beta": "beta"},
        trains=False,
    ),
    "retention": Case(partial(linear, retention=True), ("fla.ops.retention", "fused_recurrent_retention"), {}),
    "SSD": Case(
        partial(linear, retention=False), ("fla.ops.simple_gla", "fused_recurrent_simple_gla"), {"g": "log_decay"}
    ),
}


def few_configurations(most: int) -> None:
    """Makes every kernel that is decorated from now on tune among at most so many of its configurations, evenly spread,
    the first one among them; on the class, because FLA has a decorator of its own."""
    tuner: Any = importlib.import_module("triton.runtime.autotuner").Autotuner
    whole = tuner.__init__

    def with_few(self: Any, fn: Any, arg_names: Any, configs: list[Any], *args: Any, **kwargs: Any) -> None:
        whole(self, fn, arg_names, configs[:: -(-len(configs) // most) or 1], *args, **kwargs)

    tuner.__init__ = with_few


def evaluated(op: Callable[[Tensors], Tensors], given: Tensors, gradients: bool) -> Tensors:
    if gradients:
        return values_and_gradients(op, given)
    with torch.no_grad():
        return op(given)


def main() -> int:
    """Prints two lines for each op; 1 when ours is wrong or means something else than FLA's."""
    os.environ["FLA_DISABLE_BACKEND_DISPATCH"] = "1"
    given, verdicts = inputs("cuda"), []
    double = {name: value.double() for name, value in given.items()}
    judged = {}
    for name, case in CASES.items():
        judged[name] = values_and_gradients(partial(case.ours, form="recurrent", backend="torch"), double)
        own = values_and_gradients(partial(case.ours, backend="triton"), given)
        verdicts.append(compare(f"{name}: fastweight", own, judged[name], OURS))
        print(verdicts[-1], flush=True)
    few_configurations(1)
    for name, case in CASES.items():
        start = time.monotonic()
        theirs = evaluated(peer(*case.op, **case.renamed), given, case.trains)
        expected = judged[name] if case.trains else {part: judged[name][part] for part in ("o", "S")}
        verdicts.append(compare(f"{name}: {case.op[1]}", theirs, expected, AGREES))
        print(f"{verdicts[-1]}  ({time.monotonic() - start:.0f} s)", flush=True)
    return int(not all(verdict.green for verdict in verdicts))


if __name__ == "__main__":
    sys.exit(main())
