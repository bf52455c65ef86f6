"""Pairing x timing: what each of the four cells can answer on a stream of tokens, untrained and without a convolution.

The stream walks through a fixed successor map (each token has one successor) with restarts, so that after a token has
been seen once, the next one is known. Keys and values are the tokens' codes. Three questions at each token:

    next    is the answer the token that comes next, where this token has come before?
    again   is the answer this token's own value, where it has come before?
    first   is the answer this token's own value, at its first coming?

A memory for language modelling wants "next"; "first" is what a read after a same-step write sees of itself.
"""

from dataclasses import dataclass

import torch
from einops import rearrange
from torch import Tensor
from torch.nn.functional import normalize

from fastweight.lab.experiments import Settings
from fastweight.memory.attention import fast_weight_attention
from fastweight.memory.rules import RULES, Pairing, Timing

QUESTIONS = ("next", "again", "first")
CELLS: tuple[tuple[Pairing, Timing], ...] = (
    ("next-latent", "read-after-write"),
    ("next-latent", "read-before-write"),
    ("same-step", "read-after-write"),
    ("same-step", "read-before-write"),
)


@dataclass(frozen=True)
class Cell:
    """Shares of right answers of one rule in one cell, mean over trials; by question."""

    rule: str
    pairing: str
    timing: str
    right: dict[str, float]


def run_cells(settings: Settings) -> list[Cell]:
    """All rules in all cells, on the same streams; half as many tokens as the key is wide, restarts 1 in 8."""
    num_tokens = settings.key_dim // 2
    generator = torch.Generator().manual_seed(settings.seed)
    ids = torch.stack([_walk(num_tokens, settings.tokens, generator) for _ in range(settings.trials)])
    codes = normalize(torch.randn(num_tokens, settings.key_dim, generator=generator, dtype=torch.float64), dim=-1)
    seen = _seen_before(ids)
    found = []
    for name, rule in RULES.items():
        for pairing, timing in CELLS:
            told = rule.replace(pairing=pairing, timing=timing, ridge="scaled")
            k = rearrange(codes[ids], "b t k -> b t 1 k")
            gain, lam = (torch.full_like(k[..., 0], value) for value in (settings.gain, settings.ridge))
            o, _ = fast_weight_attention(k, k, k, gain, lam, told)
            answer = torch.einsum("btk,nk->btn", o[:, :, 0], codes).argmax(dim=-1)
            answer = torch.where(o[:, :, 0].abs().amax(dim=-1) > 0, answer, -1)  # an empty memory answers nothing
            found.append(Cell(name, pairing, timing, _right(answer, ids, seen)))
    return found


def _right(answer: Tensor, ids: Tensor, seen: Tensor) -> dict[str, float]:
    follows = answer[:, :-1] == ids[:, 1:]
    own = answer == ids
    shares = (follows[seen[:, :-1]], own[seen], own[~seen])
    return {question: float(share.double().mean()) for question, share in zip(QUESTIONS, shares, strict=True)}


def _walk(num_tokens: int, length: int, generator: torch.Generator) -> Tensor:
    """Token ids [T]: successors around a random circle, one step in eight elsewhere."""
    circle = torch.randperm(num_tokens, generator=generator)
    at = torch.zeros(length, dtype=torch.long)
    jumps = torch.rand(length, generator=generator) < 0.125
    places = torch.randint(num_tokens, (length,), generator=generator)
    for t in range(1, length):
        at[t] = places[t] if jumps[t] else (at[t - 1] + 1) % num_tokens
    return circle[at]


def _seen_before(ids: Tensor) -> Tensor:
    same = ids[:, :, None] == ids[:, None, :]  # [B, T, T]
    return torch.tril(same, diagonal=-1).any(dim=-1)
