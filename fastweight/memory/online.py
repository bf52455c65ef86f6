"""Reference solvers: recursive least squares and online ridge regression (appendix A), token by token.

The yardsticks of "how well does a rule learn online": the same pairing, timing, masks and layouts as
`fast_weight_attention`, so that the op can be swapped for a solver. Recursive least squares is the exact minimiser of

    sum_{s<=t} |S^T x_s - y_s|^2 + ridge |S - S_0|^2        in O(K^2 + K V) a token

and online ridge (Algorithm 5) its first-order step, falcon-1 without the clamp of the carry. Both are differentiable
loops for studies, not for training; use float64 inputs when P gets ill-conditioned (small ridge, many tokens).
"""

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from fastweight.memory import checks
from fastweight.memory.inputs import working_dtype
from fastweight.memory.recurrent import read
from fastweight.memory.rules import Pairing, Rule, Timing
from fastweight.memory.state import State
from fastweight.memory.writes import only_valid, pair


class OnlineState(NamedTuple):
    """A solver between two calls: the memory, and for recursive least squares P = (ridge I + sum x x^T)^-1."""

    memory: State
    P: Float[Tensor, "N Hk K K"] | None

    @property
    def S(self) -> Float[Tensor, "N H K V"]:
        return self.memory.S


def recursive_least_squares(
    q: Float[Tensor, "B T Hk K"],
    k: Float[Tensor, "B T Hk K"],
    v: Float[Tensor, "B T H V"],
    beta: None = None,
    lam: float | Float[Tensor, " Hk"] = 1.0,
    *,
    pairing: Pairing = "next-latent",
    timing: Timing = "read-after-write",
    initial_state: OnlineState | None = None,
    output_final_state: bool = False,
    cu_seqlens: Int[Tensor, " N+1"] | None = None,
    mask: Bool[Tensor, "B T"] | None = None,
) -> tuple[Float[Tensor, "B T H V"], OnlineState | None]:
    """Exact cumulative ridge regression, one token at a time (equations A.1, A.2).

        g = P x / (1 + x^T P x),   P <- P - g x^T P,   S <- S + g (y - S^T x)^T,   P_0 = I / lam

    Args:
        q, k, v, mask, cu_seqlens, output_final_state: as in `fast_weight_attention`.
        beta: must be None; the solver has no step size.
        lam: the constant ridge, > 0; one number, or one per key head.
        pairing, timing: as in `Rule`.
        initial_state: a state this function returned (it holds P, so lam is then not read again).

    Returns:
        o in v's dtype and the final state (or None).

    Raises:
        ValueError: for inconsistent inputs, for a beta, for lam <= 0.
    """
    checks.check_qkv(q, k, v)
    if beta is not None:
        checks.fail("beta", type(beta).__name__, "None: recursive least squares has no step size")
    ridge = torch.as_tensor(lam, dtype=torch.float64, device=v.device)
    if ridge.numel() not in (1, k.shape[2]) or ridge.ndim > 1 or not bool((ridge > 0).all()):
        got = f"shape {tuple(ridge.shape)}" if ridge.ndim else lam
        checks.fail("lam", got, f"a constant ridge > 0, one number or one per key head [{k.shape[2]}]")
    rule = Rule("recursive-least-squares", "regression", pairing=pairing, timing=timing)

    def start(memory: State) -> Tensor:
        N, Hk, K = memory.key.shape
        eye = torch.eye(K, dtype=memory.S.dtype, device=memory.S.device)
        return (eye / ridge.to(eye).view(-1, 1, 1)).expand(N, Hk, K, K)

    def learn(S: Tensor, P: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        Px = (P * x[..., None, :]).sum(-1)  # [N, Hk, K]
        g = Px / (1 + torch.linalg.vecdot(x, Px))[..., None]
        r = y - read(S, _per_head(x, S))
        return S + _per_head(g, S)[..., None] * r[..., None, :], P - g[..., None] * Px[..., None, :]

    return _solve(_Problem(q, k, v, (), rule, start, learn), initial_state, output_final_state, cu_seqlens, mask)


def online_ridge(
    q: Float[Tensor, "B T Hk K"],
    k: Float[Tensor, "B T Hk K"],
    v: Float[Tensor, "B T H V"],
    beta: Float[Tensor, "B T H"] | None,
    lam: Float[Tensor, "B T H"] | None,
    *,
    eps: float = 0.0,
    pairing: Pairing = "next-latent",
    timing: Timing = "read-after-write",
    initial_state: OnlineState | None = None,
    output_final_state: bool = False,
    cu_seqlens: Int[Tensor, " N+1"] | None = None,
    mask: Bool[Tensor, "B T"] | None = None,
) -> tuple[Float[Tensor, "B T H V"], OnlineState | None]:
    """Online ridge regression by normalised gradient steps (Algorithm 5): falcon-1 with no floor under the carry.

        eta = beta / (|x|^2 + lam + eps), 0 where that is 0;   S <- (1 - eta lam) S + eta x (y - S^T x)^T

    Arguments, results and errors as in `fast_weight_attention`; eps >= 0 as in `Rule`.
    """
    checks.check_qkv(q, k, v)
    checks.check_gate("beta", beta, v)
    checks.check_gate("lam", lam, v)
    rule = Rule("online-ridge", "regression", pairing=pairing, timing=timing, eps=eps)
    gates = (torch.ones_like(v[..., 0]) if beta is None else beta, torch.zeros_like(v[..., 0]) if lam is None else lam)

    def learn(S: Tensor, P: None, x: Tensor, y: Tensor, gain: Tensor, shrink: Tensor) -> tuple[Tensor, None]:
        x = _per_head(x, S)
        below = torch.linalg.vecdot(x, x) + shrink + eps
        eta = torch.where(below > 0, gain / torch.where(below > 0, below, 1), 0)[..., None, None]
        r = y - read(S, x)
        return (1 - eta * shrink[..., None, None]) * S + eta * x[..., None] * r[..., None, :], None

    problem = _Problem(q, k, v, gates, rule, lambda memory: None, learn)
    return _solve(problem, initial_state, output_final_state, cu_seqlens, mask)


class _Problem(NamedTuple):
    """Inputs [B, T, ...], gates [B, T, H], and what a solver does: its first P, and (S, P, x, y, *gates) -> (S, P)."""

    q: Tensor
    k: Tensor
    v: Tensor
    gates: tuple[Tensor, ...]
    rule: Rule
    start: Callable[[State], Tensor | None]
    learn: Callable[..., tuple[Tensor, Tensor | None]]


def _solve(
    problem: _Problem,
    initial_state: OnlineState | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
    mask: Tensor | None,
) -> tuple[Tensor, OnlineState | None]:
    """Checks, dtypes, and packed sequences one after another around `_loop`."""
    q, k, v = problem.q, problem.k, problem.v
    checks.check_qkv(q, k, v)
    checks.check_mask(mask, v)
    checks.check_cu_seqlens(cu_seqlens, v)
    N = len(v) if cu_seqlens is None else len(cu_seqlens) - 1
    if initial_state is not None and not isinstance(initial_state, OnlineState):
        checks.fail("initial_state", type(initial_state).__name__, "an OnlineState that a solver returned, or None")
    dtype = working_dtype(q, k, v, *problem.gates)
    if initial_state is None:
        memory = State.zeros(
            problem.rule, N, v.shape[2], k.shape[3], v.shape[3], num_key_heads=k.shape[2], dtype=dtype, device=v.device
        )
        initial_state = OnlineState(memory, problem.start(memory))
    checks.check_state(initial_state.memory, k, v, problem.rule, N)
    wanted, P = problem.start(initial_state.memory), initial_state.P
    if (P is None) != (wanted is None) or (P is not None and wanted is not None and P.shape != wanted.shape):
        got = "None" if P is None else f"shape {tuple(P.shape)}"
        want = "None" if wanted is None else f"{tuple(wanted.shape)}"
        checks.fail("initial_state.P", got, f"{want}, a state of this very solver")
    if cu_seqlens is None:
        o, state = _loop(problem, initial_state, mask, dtype)
        return o.to(v.dtype), state if output_final_state else None
    outputs, states = [v[:, :0]], []
    for n, (begin, end) in enumerate(pairwise(cu_seqlens.tolist())):
        part = problem._replace(
            q=q[:, begin:end], k=k[:, begin:end], v=v[:, begin:end], gates=tuple(g[:, begin:end] for g in problem.gates)
        )
        row = torch.tensor([n], device=v.device)
        P = initial_state.P
        first = OnlineState(initial_state.memory.index_select(row), None if P is None else P[n : n + 1])
        o, state = _loop(part, first, None if mask is None else mask[:, begin:end], dtype)
        outputs.append(o.to(v.dtype))
        states.append(state)
    if states:
        Ps = [state.P for state in states if state.P is not None]
        initial_state = OnlineState(State.cat([state.memory for state in states]), torch.cat(Ps) if Ps else None)
    return torch.cat(outputs, dim=1), initial_state if output_final_state else None


def _loop(problem: _Problem, state: OnlineState, mask: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, OnlineState]:
    """Token by token; a token without a pair leaves S and P as they are."""
    q, k, v, *gates = (t.to(dtype) for t in (problem.q, problem.k, problem.v, *problem.gates))
    memory, P = state.memory.to(dtype), state.P
    if v.shape[1] == 0:
        return v, state
    k, v, *gates = (only_valid(t, mask) for t in (k, v, *gates))
    pairs, memory = pair(k, v, problem.rule, memory, mask)
    S, outputs = memory.S, []
    for t in range(v.shape[1]):
        if problem.rule.timing == "read-before-write":
            outputs.append(read(S, _per_head(q[:, t], S)))
        S_new, P_new = problem.learn(S, P, pairs.x[:, t], v[:, t], *(gate[:, t] for gate in gates))
        writes = None if pairs.valid is None else pairs.valid[:, t, None, None, None]
        S = S_new if writes is None else torch.where(writes, S_new, S)
        if P is not None and P_new is not None:
            P = P_new if writes is None else torch.where(writes, P_new, P)
        if problem.rule.timing == "read-after-write":
            outputs.append(read(S, _per_head(q[:, t], S)))
    return torch.stack(outputs, dim=1), OnlineState(memory._replace(S=S), P)


def _per_head(x: Float[Tensor, "N Hk K"], S: Float[Tensor, "N H K V"]) -> Float[Tensor, "N H K"]:
    return x.repeat_interleave(S.shape[1] // x.shape[1], dim=1)
