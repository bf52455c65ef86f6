"""The judge: the six update rules written out in plain loops, float64, one sequence and one head at a time.

(q, k, v, beta, lam, rule, S0, mask) -> every output, the final state and normaliser, and the pairs that were written.
Nothing here is shared with the package: a rule is only read for its fields. Gradients come from autograd through the
loops. Traps: the curvature is the top eigenvalue of the K x K covariance, formed on purpose (the package must not);
with a repeated top eigenvalue its gradient is one of many.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor


class Longhand(NamedTuple):
    """o [B, T, H, V], S [B, H, K, V], z [B, H, K], and pairs[b][h]: the (x, y) written so far, oldest first."""

    o: Tensor
    S: Tensor
    z: Tensor
    pairs: list[list[list[tuple[Tensor, Tensor]]]]


def statistic(window: Sequence[tuple[Tensor, Tensor]], rule) -> Tensor:
    """E_t: top eigenvalue of the mean outer product for regression, mean squared norm for inner product."""
    count = len(window)
    if rule.objective == "regression" and count > 1:
        covariance = sum(torch.outer(x, x) for x, _ in window) / count
        return torch.linalg.eigvalsh(covariance)[-1]
    return sum(x @ x for x, _ in window) / count


def step_and_carry(E: Tensor, beta: Tensor, lam: Tensor, rule) -> tuple[Tensor, Tensor]:
    """eta_t and gamma_t, scalars or one per value column."""
    if rule.ridge == "scaled":
        lam = lam * (E.detach() if rule.window > 1 else E)
    if rule.step == "direct":
        eta = beta
    else:
        denominator = E + lam + rule.eps
        eta = beta / denominator if denominator.item() != 0 else torch.zeros_like(beta)
    alpha = eta * lam
    largest = 1 - rule.decay_floor
    alpha = torch.where(alpha > largest, torch.full_like(alpha, largest), alpha)
    return eta, 1 - alpha


def read(S: Tensor, z: Tensor, q: Tensor, rule) -> Tensor:
    """S^T q, divided by z^T q moved away from zero by read_eps for the normalised read."""
    o = S.T @ q
    if rule.read == "normalized":
        denominator = z @ q
        o = o / (denominator + (rule.read_eps if denominator.item() >= 0 else -rule.read_eps))
    return o


def one_head(q, k, v, beta, lam, rule, S, mask):
    """One sequence of one head: q, k [T, K]; v [T, V]; beta [T] or [T, V]; lam [T]; S [K, V]; mask: T booleans."""
    pairs: list[tuple[Tensor, Tensor]] = []
    outputs = []
    previous_key = None
    z = torch.zeros_like(k[0]) if len(k) else S.new_zeros(S.shape[0])
    for t in range(len(k)):
        S_before, z_before = S, z
        if mask[t]:
            x = k[t] if rule.pairing == "same-step" else previous_key
            previous_key = k[t]
            if x is not None:
                pairs.append((x, v[t]))
                window = pairs[-rule.window :]
                eta, gamma = step_and_carry(statistic(window, rule), beta[t], lam[t], rule)
                S, z = gamma * S, gamma * z if rule.read == "normalized" else z
                for x_j, y_j in window:
                    target = y_j - S_before.T @ x_j if rule.objective == "regression" else y_j
                    S = S + torch.outer(x_j, eta * target) / len(window)
                    if rule.read == "normalized":
                        z = z + eta * x_j / len(window)
        before = rule.timing == "read-before-write"
        outputs.append(read(S_before if before else S, z_before if before else z, q[t], rule))
    o = torch.stack(outputs) if outputs else v.new_zeros(0, S.shape[1])
    return o, S, z, pairs


def longhand(q, k, v, beta, lam, rule, S0=None, mask=None) -> Longhand:
    """All sequences and heads: shapes as in the public operator; S0 [B, H, K, V] or None; mask [B, T] or None."""
    q, k, v = q.double(), k.double(), v.double()
    B, T, H, V = v.shape
    heads_per_group, K = H // k.shape[2], k.shape[3]
    beta = v.new_ones(B, T, H) if beta is None else beta.double()
    lam = v.new_zeros(B, T, H) if lam is None else lam.double()
    if rule.gain == "column" and beta.ndim == 3:
        beta = beta[..., None].expand(B, T, H, V)
    S0 = v.new_zeros(B, H, K, V) if S0 is None else S0.double()
    keep = [[True] * T] * B if mask is None else mask.tolist()
    rows = []
    for b in range(B):
        row = []
        for h in range(H):
            g = h // heads_per_group
            row.append(
                one_head(q[b, :, g], k[b, :, g], v[b, :, h], beta[b, :, h], lam[b, :, h], rule, S0[b, h], keep[b])
            )
        rows.append(row)
    o = torch.stack([torch.stack([head[0] for head in row], dim=1) for row in rows])
    S = torch.stack([torch.stack([head[1] for head in row]) for row in rows])
    z = torch.stack([torch.stack([head[2] for head in row]) for row in rows])
    return Longhand(o, S, z, [[head[3] for head in row] for row in rows])


def longhand_packed(q, k, v, beta, lam, rule, cu_seqlens, S0=None) -> tuple[Tensor, Tensor]:
    """Documents laid end to end in one row: each runs alone; o [1, T, H, V] and S [N, H, K, V]."""
    outputs, states = [], []
    for n, (start, end) in enumerate(pairwise(cu_seqlens)):
        part = [None if u is None else u[:, start:end] for u in (q, k, v, beta, lam)]
        result = longhand(*part, rule, None if S0 is None else S0[n : n + 1])
        outputs.append(result.o)
        states.append(result.S)
    return torch.cat(outputs, dim=1), torch.cat(states)


def gated_delta_longhand(q, k, v, beta, log_decay, S0=None) -> tuple[Tensor, Tensor]:
    """Gated DeltaNet as published: decay first, residual on the decayed state, read after write, scale 1."""
    q, k, v, beta = q.double(), k.double(), v.double(), beta.double()
    B, T, H, V = v.shape
    per_group, K = H // k.shape[2], k.shape[3]
    states, outputs = [], []
    for b in range(B):
        for h in range(H):
            S = v.new_zeros(K, V) if S0 is None else S0[b, h].double()
            for t in range(T):
                x = k[b, t, h // per_group]
                if log_decay is not None:
                    S = torch.exp(log_decay[b, t, h].double()) * S
                S = S + torch.outer(x, beta[b, t, h] * (v[b, t, h] - S.T @ x))
                outputs.append(S.T @ q[b, t, h // per_group])
            states.append(S)
    o = torch.stack(outputs).reshape(B, H, T, V).transpose(1, 2)
    return o, torch.stack(states).reshape(B, H, K, V)


def linear_attention_longhand(q, k, v, log_decay, S0=None) -> tuple[Tensor, Tensor]:
    """Decayed linear attention: S_t = exp(log_decay_t) S_{t-1} + k_t v_t^T, o_t = S_t^T q_t."""
    q, k, v = q.double(), k.double(), v.double()
    B, T, H, V = v.shape
    per_group, K = H // k.shape[2], k.shape[3]
    states, outputs = [], []
    for b in range(B):
        for h in range(H):
            S = v.new_zeros(K, V) if S0 is None else S0[b, h].double()
            for t in range(T):
                if log_decay is not None:
                    S = torch.exp(log_decay[b, t, h].double()) * S
                S = S + torch.outer(k[b, t, h // per_group], v[b, t, h])
                outputs.append(S.T @ q[b, t, h // per_group])
            states.append(S)
    o = torch.stack(outputs).reshape(B, H, T, V).transpose(1, 2)
    return o, torch.stack(states).reshape(B, H, K, V)
