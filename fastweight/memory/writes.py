"""(k, v, beta, lam) -> Writes: pairing, window, statistic, step size and decay, for every rule (SPEC sections 2 to 4).

The one table of shape letters of the project:

    B  batch (rows)            N  sequences (N = B unless packed)     T  tokens           C  tokens of a chunk
    H  heads of v and S        Hk heads of q and k, H % Hk == 0       R  pairs per step (the rule's window)
    K  width of q, k           V  width of v, o                       P  pairs held for T tokens: T, or R-1+T

What comes out is the only thing that forms and kernels see:

    S_t = exp(log_decay_t) S_{t-1} + sum_r x_r ( gain_t .* ( y_r - [regression] S_{t-1}^T x_r ) )^T

where r runs over the live pairs of token t. For a window the pairs lie in one stream, so that the window of a token is
a run of neighbours and nothing is copied R times. Everything here is float32 or better, and autograd differentiates it.
Traps: a token without a pair (the first of a sequence, a masked one) has gain 0 and log_decay 0 exactly; where the
denominator of a step is 0 the step is 0, and its gradient too.
"""

from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from fastweight.memory.eigen import top_eigenvalue, triangle
from fastweight.memory.modes import doubled
from fastweight.memory.rules import Rule
from fastweight.memory.state import State

Residual = Literal["none", "before-decay", "after-decay"]


class Pairs(NamedTuple):
    """The stream of (write feature, target) pairs and where each token's window lies in it.

    x, y: the stream; with a window its first R-1 entries are the tail of the state. slot: index of each token's newest
    pair (None: token t has its own at R-1+t). live: pairs of each token's window, newest first (None at window 1).
    valid: whether the token writes (None: all do).
    """

    x: Float[Tensor, "B P Hk K"]
    y: Float[Tensor, "B P H V"]
    slot: Int[Tensor, "B T"] | None
    live: Int[Tensor, "B T"] | None
    valid: Bool[Tensor, "B T"] | None


class Writes(NamedTuple):
    """What the memory does at each token, rule names gone.

    gain is the weight of each live pair (eta_t / B_t), log_decay the log carry; one per head, or one per value column.
    residual: "none" writes y; "before-decay" writes y - S^T x on S_{t-1}, "after-decay" on exp(log_decay_t) S_{t-1}.
    """

    x: Float[Tensor, "B P Hk K"]
    y: Float[Tensor, "B P H V"]
    gain: Float[Tensor, "B T H"] | Float[Tensor, "B T H V"]
    log_decay: Float[Tensor, "B T H"] | Float[Tensor, "B T H V"]
    residual: Residual
    window: int
    slot: Int[Tensor, "B T"] | None
    live: Int[Tensor, "B T"] | None


def make_writes(
    k: Float[Tensor, "B T Hk K"],
    v: Float[Tensor, "B T H V"],
    beta: Tensor | None,
    lam: Float[Tensor, "B T H"] | None,
    rule: Rule,
    state: State,
    mask: Bool[Tensor, "B T"] | None,
    log_decay: Float[Tensor, "B T H"] | None = None,
) -> tuple[Writes, State]:
    """The writes of T tokens after `state`, and the boundary part of the next state (its S and z are still the old).

    log_decay: given by the baselines that emit their own gates; beta is then the gain itself.
    """
    pairs, boundary = pair(k, v, rule, state, mask)
    if log_decay is None:
        gain, log_decay = step_and_decay(pairs, beta, lam, rule, v.shape)
        residual: Residual = "before-decay" if rule.objective == "regression" else "none"
    else:
        gain = only_valid(v.new_ones(v.shape[:3]) if beta is None else beta, pairs.valid)
        log_decay = only_valid(log_decay, pairs.valid)
        residual = "after-decay" if rule.objective == "regression" else "none"
    if pairs.live is not None:
        gain = gain / pairs.live.clamp(min=1)[..., None]
    writes = Writes(pairs.x, pairs.y, gain, log_decay, residual, rule.window, pairs.slot, pairs.live)
    return writes, boundary


def pair(k: Tensor, v: Tensor, rule: Rule, state: State, mask: Tensor | None) -> tuple[Pairs, State]:
    """Pairs each target with its write feature (section 2) and moves the boundary of the state past the last token."""
    T = k.shape[1]
    # What the state does not really hold must be 0 and get no gradient.
    held = state.key.masked_fill(~state.has_key[:, None, None], 0)
    keys = torch.cat((held[:, None].to(k.dtype), k), dim=1)  # [B, 1+T, Hk, K]
    previous = None
    if mask is None:
        last, has_key = keys[:, -1], state.has_key | (T > 0)
    else:
        # previous[t]: 1 + position of the last unmasked token up to t, 0 where there is none (then the carried key).
        previous = torch.where(mask, torch.arange(1, T + 1, device=k.device), 0).cummax(dim=1).values
        last, has_key = _take(keys, previous[:, -1:]).squeeze(1), state.has_key | mask.any(dim=1)
    if rule.pairing == "same-step":
        x, valid = k, mask
    elif previous is None or mask is None:
        x = keys[:, :-1]
        valid = torch.cat((state.has_key[:, None], state.has_key.new_ones(()).expand(len(k), T - 1)), dim=1)
    else:
        before = torch.cat((previous.new_zeros(len(k), 1), previous[:, :-1]), dim=1)
        x, valid = _take(keys, before), mask & ((before > 0) | state.has_key[:, None])
    boundary = state._replace(key=last.to(state.key.dtype), has_key=has_key)
    if rule.window == 1:
        return Pairs(x, v, None, None, valid), boundary
    return _windowed(x, v, rule.window, boundary, mask, valid)


def _windowed(
    x: Tensor, y: Tensor, R: int, state: State, mask: Tensor | None, valid: Tensor | None
) -> tuple[Pairs, State]:
    """Puts the tail of the state in front of the pairs, finds each token's live ones, and cuts the next tail."""
    B, T = x.shape[:2]
    live = torch.ones(B, T, dtype=torch.bool, device=x.device) if valid is None else valid
    rank = live.cumsum(dim=1)
    count = (state.tail_count[:, None] + rank).clamp(max=R)
    slot = None
    if mask is not None:
        # Masked tokens may lie between the pairs of one window: bring the real pairs together, oldest first.
        order = torch.argsort(live.logical_not().to(torch.uint8), dim=1, stable=True)
        x, y = _take(x, order), _take(y, order)
        slot = rank + R - 2
    held = _real_tail(state)
    x = torch.cat((held.tail_x.to(x.dtype), x), dim=1)
    y = torch.cat((held.tail_y.to(y.dtype), y), dim=1)
    newest = (
        torch.where(live, torch.arange(R - 1, R - 1 + T, device=x.device), R - 2).amax(dim=1)
        if slot is None
        else slot[:, -1]
    )
    tail = newest[:, None] + torch.arange(2 - R, 1, device=x.device)
    state = state._replace(
        tail_x=_take(x, tail).to(state.tail_x.dtype),
        tail_y=_take(y, tail).to(state.tail_y.dtype),
        tail_count=(state.tail_count + rank[:, -1]).clamp(max=R - 1),
    )
    return Pairs(x, y, slot, count, valid), _real_tail(state)


def _real_tail(state: State) -> State:
    """The state with 0 in the places of its tail that hold no pair: forms rely on x = 0 there."""
    places = state.tail_x.shape[1]
    missing = torch.arange(places, 0, -1, device=state.S.device) > state.tail_count[:, None]  # newest last
    missing = missing[..., None, None]
    return state._replace(tail_x=state.tail_x.masked_fill(missing, 0), tail_y=state.tail_y.masked_fill(missing, 0))


def step_and_decay(
    pairs: Pairs, beta: Tensor | None, lam: Tensor | None, rule: Rule, value_shape: torch.Size
) -> tuple[Tensor, Tensor]:
    """Realised step eta and log carry of every token, before the division by the window (sections 3 and 4).

        eta = beta / (E + lambda + eps)    alpha = min(eta lambda, 1 - decay_floor)    log_decay = log1p(-alpha)

    In float64 (`doubled`) whatever the inputs: near the floor 1 - alpha keeps few of the digits of a float32 alpha.
    """
    groups, dtype = value_shape[2] // pairs.x.shape[2], pairs.x.dtype
    beta = doubled(pairs.y.new_ones(value_shape[:3]) if beta is None else beta)
    energy = None
    if rule.step == "normalized" or (rule.ridge == "scaled" and lam is not None):
        energy = doubled(statistic(pairs, rule)).repeat_interleave(groups, dim=2)  # [B, T, H]
    if lam is not None:
        lam = doubled(lam)
        if rule.ridge == "scaled" and energy is not None:
            # For a window the ridge follows the statistic without steering it (section 4).
            lam = lam * (energy.detach() if rule.window > 1 else energy)
    if rule.gain == "column":
        energy = None if energy is None else energy[..., None]
        lam = None if lam is None else lam[..., None]
        beta = (beta[..., None] if beta.ndim == 3 else beta).expand(value_shape)
    eta = beta
    if rule.step == "normalized" and energy is not None:
        below = energy + rule.eps if lam is None else energy + lam + rule.eps
        positive = below > 0
        eta = torch.where(positive, beta / torch.where(positive, below, 1), 0)
    eta = only_valid(eta, pairs.valid)
    if lam is None:
        return eta.to(dtype), torch.zeros_like(eta, dtype=dtype)
    alpha, limit = eta * lam, 1 - rule.decay_floor
    # Where the clamp acts, alpha is a constant: no gradient passes (torch.clamp would let it at equality).
    alpha = torch.where(alpha < limit, alpha, limit)
    return eta.to(dtype), torch.log1p(-alpha).to(dtype)


def statistic(pairs: Pairs, rule: Rule) -> Float[Tensor, "B T Hk"]:
    """E_t of section 3: |x|^2; over a window its mean (inner product) or lambda_max(X X^T / B_t) (regression)."""
    x, R = pairs.x, rule.window
    if pairs.live is None:
        return _dot(x, x)
    count = pairs.live[..., None]
    if rule.objective == "inner-product":
        energy = _dot(x, x)
        recent = [torch.where(r < count, recent_pair(energy, pairs.slot, R, r), 0) for r in range(R)]
        return sum(recent[1:], recent[0]) / count.clamp(min=1)
    # dots[d][p] = x_p . x_{p-d}; d pairs of zeros in front keep every stream P long.
    dots = [_dot(x, torch.cat((torch.zeros_like(x[:, :d]), x[:, : x.shape[1] - d]), dim=1)) for d in range(R)]
    upper = [torch.where(j < count, recent_pair(dots[j - i], pairs.slot, R, i), 0) for i, j in triangle(R)]
    return top_eigenvalue(torch.stack(upper), R) / count.clamp(min=1)


def recent_pair(stream: Tensor, slot: Tensor | None, R: int, r: int) -> Tensor:
    """The r-th newest pair of every token's window, [B, P, ...] -> [B, T, ...] (r = 0: the newest)."""
    if slot is None:
        return stream[:, R - 1 - r : stream.shape[1] - r]
    return _take(stream, (slot - r).clamp(min=0))


def _take(stream: Tensor, index: Tensor) -> Tensor:
    """stream [B, P, ...] at index [B, M] along its second axis -> [B, M, ...]."""
    index = index.reshape(*index.shape, *(1,) * (stream.ndim - 2))
    return stream.gather(1, index.expand(*index.shape[:2], *stream.shape[2:]))


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return torch.linalg.vecdot(a, b)


def only_valid(value: Float[Tensor, "B T ..."], valid: Bool[Tensor, "B T"] | None) -> Float[Tensor, "B T ..."]:
    """value where valid, else 0 (whatever stood there, NaN included) with gradient 0."""
    if valid is None:
        return value
    return torch.where(valid.reshape(*valid.shape, *(1,) * (value.ndim - 2)), value, 0)
