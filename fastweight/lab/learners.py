"""A stream of pairs through a memory: what it predicted before each pair, and the memory at the end.

Learners are the six rules (normalised step, ridge scaled by the energy of the keys, so that a gain and a ridge mean the
same to all), recursive least squares, the yardstick, and online ridge, which is falcon-1 as appendix A writes it. All
see the same pairs (same-step pairing) and none is trained. A column rule with equal gains is the scalar rule, so its
columns take gains in equal steps from a quarter of the gain to the gain. Traps: recursive least squares has neither
gain nor decay, and its ridge is the constant RLS_RIDGE; "direct" learners keep the step that is right for keys of
length 1 whatever comes, which is what the normalised step is for.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from fastweight.lab.streams import Stream
from fastweight.memory.attention import fast_weight_attention
from fastweight.memory.online import online_ridge, recursive_least_squares
from fastweight.memory.rules import RULES, Rule

RLS_RIDGE = 0.01
SMALLEST_SHARE = 0.25  # of the gain: the first column's, for the column rules


class Learned(NamedTuple):
    """before: what the memory answered to each key just before its pair came. S: the memory at the end."""

    before: Float[Tensor, "B T V"]
    S: Float[Tensor, "B K V"]


# (stream, gain, ridge) -> Learned
Learner = Callable[[Stream, float, float], Learned]


def _tokens(stream: Stream) -> tuple[Tensor, Tensor]:
    return stream.x[:, :, None], stream.y[:, :, None]


def _gates(stream: Stream, gain: float, ridge: float) -> tuple[Tensor, Tensor]:
    like = stream.y.new_ones(*stream.y.shape[:2], 1)
    return gain * like, ridge * like


def by_rule(stream: Stream, gain: float, ridge: float, rule: Rule) -> Learned:
    """One of the rules; pairing, timing and the kind of ridge are set here."""
    rule = rule.replace(pairing="same-step", timing="read-before-write", ridge="scaled")
    k, v = _tokens(stream)
    beta, lam = _gates(stream, gain, ridge)
    if rule.gain == "column":
        shares = torch.linspace(SMALLEST_SHARE, 1, v.shape[-1], dtype=v.dtype)
        beta = beta[..., None] * shares
    before, state = fast_weight_attention(k, k, v, beta, lam, rule, output_final_state=True)
    assert state is not None, "asked for"
    return Learned(before[:, :, 0], state.S[:, 0])


def by_least_squares(stream: Stream, gain: float, ridge: float) -> Learned:
    """The exact minimiser over all pairs so far; gain and ridge are not its settings."""
    k, v = _tokens(stream)
    how = {"pairing": "same-step", "timing": "read-before-write", "output_final_state": True}
    before, state = recursive_least_squares(k, k, v, None, RLS_RIDGE, **how)
    assert state is not None, "asked for"
    return Learned(before[:, :, 0], state.S[:, 0])


def by_online_ridge(stream: Stream, gain: float, ridge: float) -> Learned:
    """Algorithm 5, its ridge scaled by each key's energy as that of the rules is."""
    k, v = _tokens(stream)
    beta, lam = _gates(stream, gain, ridge)
    lam = lam * k.square().sum(-1)
    how = {"pairing": "same-step", "timing": "read-before-write", "output_final_state": True}
    before, state = online_ridge(k, k, v, beta, lam, **how)
    assert state is not None, "asked for"
    return Learned(before[:, :, 0], state.S[:, 0])


LEARNERS: Mapping[str, Learner] = {
    **{name: partial(by_rule, rule=rule) for name, rule in RULES.items()},
    "least squares": by_least_squares,
    "online ridge": by_online_ridge,
}

# Steps that do not look at the keys: linear attention and the delta rule without normalisation.
UNNORMALISED: Mapping[str, Learner] = {
    f"{name}, direct": partial(by_rule, rule=RULES[name].replace(step="direct")) for name in ("falcon-1", "falcon-1a")
}


def recall(S: Float[Tensor, "B K V"], stream: Stream) -> Float[Tensor, "B T"]:
    """Cosine of the memory's answer to each key with its target: 1 right, 0 unrelated, whatever the scale."""
    return cosine(torch.einsum("bkv,btk->btv", S, stream.x), stream.y)


def cosine(answer: Float[Tensor, "... V"], target: Float[Tensor, "... V"]) -> Float[Tensor, "..."]:
    """Cosine over the last axis; an answer that is zero or no longer finite counts 0."""
    length = torch.linalg.vector_norm(answer, dim=-1) * torch.linalg.vector_norm(target, dim=-1)
    value = torch.linalg.vecdot(answer, target) / torch.where(length > 0, length, 1)
    return torch.where(torch.isfinite(value) & (length > 0), value, 0)


def identified(S: Float[Tensor, "B K V"], stream: Stream) -> Float[Tensor, "B T"]:
    """1 where the answer to a key is closest in direction to its own target among all targets of the trial, else 0."""
    answers = torch.einsum("bkv,btk->btv", S, stream.x)
    directions = torch.nn.functional.normalize(stream.y, dim=-1)
    nearest = torch.einsum("btv,bsv->bts", answers, directions).argmax(dim=-1)
    return (nearest == torch.arange(stream.x.shape[1])).to(stream.x.dtype)
