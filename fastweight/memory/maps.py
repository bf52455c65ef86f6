"""Chunk maps: what a chunk does to whatever state it is given, S' = M S + b, as a value of its own (SPEC section 6).

Maps compose associatively, so chunks can be scanned in a tree, or one long sequence can be spread over devices: each
computes the map of its own tokens, the maps are combined, and nobody waits for a state. M is a K x K matrix for
regression with a scalar gain; for inner-product rules it is only a decay (one number a head, or one per value column).
For regression with a gain per column M differs from column to column, and there is no map of this form.
Plain differentiable torch; traps: pairing and windows reach back before the chunk, so `initial_state` must carry the
boundary (last key, tail) of the tokens before; its S is not used.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from fastweight.memory import checks
from fastweight.memory.block import chunked, default_chunk
from fastweight.memory.decay import decays
from fastweight.memory.inputs import working_dtype
from fastweight.memory.rules import Rule, rule_of
from fastweight.memory.state import State
from fastweight.memory.window import Band
from fastweight.memory.writes import make_writes


class ChunkMap(NamedTuple):
    """S -> M S + b. M is a matrix [..., K, K], or (matrix False) a decay [..., 1, 1 or V] that multiplies."""

    M: Float[Tensor, "... K K"] | Float[Tensor, "... 1 V"]
    b: Float[Tensor, "... K V"]
    matrix: bool

    def __call__(self, S: Float[Tensor, "... K V"]) -> Float[Tensor, "... K V"]:
        """The state after the chunk."""
        return (self.M @ S if self.matrix else self.M * S) + self.b

    def after(self, earlier: "ChunkMap") -> "ChunkMap":
        """This map applied after `earlier`: (M2, b2) o (M1, b1) = (M2 M1, M2 b1 + b2)."""
        M = self.M @ earlier.M if self.matrix else self.M * earlier.M
        return ChunkMap(M, self(earlier.b), self.matrix)

    def chunk(self, i: int) -> "ChunkMap":
        """Map i of a stack along the first axis."""
        return ChunkMap(self.M[i], self.b[i], self.matrix)


def chunk_maps(
    k: Float[Tensor, "B T Hk K"],
    v: Float[Tensor, "B T H V"],
    beta: Tensor | None,
    lam: Float[Tensor, "B T H"] | None,
    rule: str | Rule,
    *,
    chunk_size: int | None = None,
    initial_state: State | None = None,
    mask: Bool[Tensor, "B T"] | None = None,
) -> ChunkMap:
    """The maps of all chunks of T >= 1 tokens, stacked: M [n, B, H, ...], b [n, B, H, K, V], float32 or float64.

    Arguments as in `fast_weight_attention`; chunk_size None takes the default of the rule. Raises ValueError for
    inconsistent inputs and for regression with a gain per column.
    """
    rule = rule_of(rule)
    checks.check_qkv(k, k, v)
    checks.check_gate("beta", beta, v, column=rule.gain == "column")
    checks.check_gate("lam", lam, v)
    checks.check_mask(mask, v)
    checks.check_chunk_size(chunk_size)
    checks.check_state(initial_state, k, v, rule, len(v))
    if rule.gain == "column" and rule.objective == "regression":
        checks.fail("rule", repr(rule.name), "a scalar gain: with a gain per column, M differs from column to column")
    if v.shape[1] == 0:
        checks.fail("v", "0 tokens", "at least one")
    dtype = working_dtype(k, v, beta, lam)
    k, v, beta, lam = (None if t is None else t.to(dtype) for t in (k, v, beta, lam))  # type: ignore[assignment]
    if initial_state is None:
        widths = len(v), v.shape[2], k.shape[3], v.shape[3]
        initial_state = State.zeros(rule, *widths, num_key_heads=k.shape[2], dtype=dtype, device=v.device)
    writes, _ = make_writes(k, v, beta, lam, rule, initial_state.to(dtype), mask)
    x, y, gain, log_decay, window = chunked(writes, min(chunk_size or default_chunk(writes), v.shape[1]), v.shape[2])
    n = len(x)
    X, Y, g, log = (z.flatten(0, 1) for z in (x, y, gain, log_decay))
    if rule.gain == "column":
        u = log.cumsum(1)
        rest = (u[:, -1:] - u).exp()
        M, b, matrix = u[:, -1:].exp(), X.mT @ (rest * g * Y), False
    elif writes.residual == "none":
        decay = decays(log, False, None)
        c = (decay.rest * g)[:, None]
        c = c if window is None else window.spread(c)
        M, b, matrix = decay.total[:, None, None], (X * c.mT).mT @ Y, False
    else:
        M, b = _regression(X, Y, g, log, window)
        matrix = True
    M, b = (z.unflatten(0, (n, len(v), -1)) for z in (M, b))
    return ChunkMap(M, b, matrix)


def _regression(X: Tensor, Y: Tensor, g: Tensor, log: Tensor, window: Band | None) -> tuple[Tensor, Tensor]:
    """M = total - X^T W T residual X and b = X^T W T Y, W = gain rest, over the rows of the windows."""
    decay = decays(log, False, True)
    residual, couples = decay.of_residual()
    factors = [z[..., None] for z in (g, residual, g * decay.rest)]
    rows = X
    if window is not None:
        factors = [z.repeat_interleave(window.size, dim=1) for z in factors]
        couples = couples.repeat_interleave(window.size, 1).repeat_interleave(window.size, 2)
        rows, Y = window.rows(X), window.rows(Y)
    gain, residual, write = factors
    system = torch.eye(rows.shape[1], dtype=X.dtype, device=X.device) + rows @ rows.mT * couples * gain.mT
    both = torch.cat((residual * rows, Y), dim=-1)
    solved = (write * rows).mT @ torch.linalg.solve_triangular(system, both, upper=False, unitriangular=True)
    eye = torch.eye(X.shape[-1], dtype=X.dtype, device=X.device)
    return decay.total[:, None, None] * eye - solved[..., : X.shape[-1]], solved[..., X.shape[-1] :]
