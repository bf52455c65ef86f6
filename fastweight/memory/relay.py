"""The op over ranks on kernels, for the price of one pass: regression with a gain per head, dense, read after write.

The exchange of maps happens in the middle of the kernels' own work (kernels/launch_relay.py). The first token here,
whose key is on the rank before, is no business of the kernels: it has no pair for them and writes nothing, and is part
of how the state comes in instead,

    S_1 = P S_in + p      P = gamma_1 I - eta_1 x x^T,   p = eta_1 x y_1^T,   x the key from the rank before

which is right because the first read comes after the first write. Sent are M P, M p + b: two matrices a head.

Trap: gradients of the key that was sent and of the first target are added into gradients of k and v in place, because
these tensors are as large as a rank's memory allows; nobody else holds them at that moment.
"""

from typing import Any

import torch
from torch import Tensor

from fastweight.memory import fused
from fastweight.memory.inputs import Around, Inputs
from fastweight.memory.rules import Rule
from fastweight.memory.state import State
from fastweight.memory.writes import make_writes
from fastweight.parallel.group import Place, gather, gather_now


def fits(inputs: Inputs, call: Any, around: Around) -> bool:
    """Whether kernels would compute this call on one device, and this module can on many."""
    from fastweight.kernels import states_are_rebuilt

    rule, v = call.rule, inputs.v
    kind = rule.objective == "regression" and rule.window == 1 and (inputs.beta is None or inputs.beta.ndim == 3)
    dense = around.mask is None and around.cu_seqlens is None and v.shape[1] > 1
    if not (kind and dense and rule.timing == "read-after-write" and not states_are_rebuilt()):
        return False
    wanted = call.backend == "triton" or (call.backend == "auto" and v.is_cuda)
    plain = call.form in ("auto", "chunk") and call.chunk_size is None
    return wanted and plain and fused.no_kernel(inputs, rule, Around(None, None, None)) is None


def scan(
    inputs: Inputs, rule: Rule, begun: State, place: Place, anchor: Tensor | None
) -> tuple[Tensor, State, tuple[Tensor, ...]]:
    """o, the State after this rank's tokens, and what was received. begun: of whole sequences, before all ranks."""
    q, k, v, beta, lam, log_decay = inputs
    k, v, k_last, v_first = _Ends.apply(k, v)  # type: ignore[misc]
    received: tuple[Tensor, ...] = ()
    P = p = None
    if rule.pairing == "next-latent":
        received = gather(place, anchor, k_last)
        edge = begun
        if place.rank:
            key = received[0][place.rank - 1].to(begun.key.dtype)
            edge = begun._replace(key=key, has_key=torch.ones_like(begun.has_key))
        P, p = _first_write(Inputs(q, k_last, v_first, beta, lam, log_decay), rule, edge)
    gate = lam if log_decay is None else log_decay
    flags = rule, log_decay is not None, place
    o, S = _Scan.apply(flags, q, k, v, beta, gate, begun.S, P, p)  # type: ignore[misc]
    state = begun._replace(S=S, key=k_last.to(begun.key.dtype), has_key=torch.ones_like(begun.has_key))
    return o, state, received


def _first_write(first: Inputs, rule: Rule, edge: State) -> tuple[Tensor, Tensor]:
    """P [B, H, K, K] and p [B, H, K, V] of the first token, after the key in `edge`. first: k is of no matter."""
    wide = edge.S.dtype
    beta, lam, log_decay = (None if t is None else t[:, :1].to(wide) for t in (first.beta, first.lam, first.log_decay))
    k, v = first.k[:, None].to(wide), first.v[:, None].to(wide)
    writes, _ = make_writes(k, v, beta, lam, rule, edge, None, log_decay)
    x = writes.x[:, 0].repeat_interleave(v.shape[2] // k.shape[2], dim=1)  # [B, H, K]
    carry, gain = writes.log_decay[:, 0, :, None, None].exp(), writes.gain[:, 0, :, None, None]
    move = x[..., :, None] * x[..., None, :]
    if writes.residual == "after-decay":
        move = carry * move
    return carry * torch.eye(x.shape[-1], dtype=wide, device=x.device) - gain * move, gain * (
        x[..., :, None] * v[:, 0, :, None, :]
    )


class _Ends(torch.autograd.Function):
    """k, v, the last key and the first value; their gradients go into those of k and v."""

    @staticmethod
    def forward(ctx, k, v):
        return k.view_as(k), v.view_as(v), k[:, -1].clone(), v[:, 0].clone()

    @staticmethod
    def backward(ctx, d_k, d_v, d_last, d_first):  # type: ignore[override]
        d_k[:, -1] += d_last
        d_v[:, 0] += d_first
        return d_k, d_v


class _Scan(torch.autograd.Function):
    """Kernels with the exchange: o, and the state after this rank's tokens."""

    @staticmethod
    def forward(ctx, flags, q, k, v, beta, gate, S, P, p):
        from fastweight.kernels import launch_relay
        from fastweight.kernels.launch import Plan

        rule, raw, place = flags
        plan = Plan(
            float(rule.eps), float(rule.decay_floor), rule.pairing == "next-latent", raw, rule.ridge == "scaled",
            rule.step == "direct", raw, False,
        )  # fmt: skip

        def exchange(M: Tensor, b: Tensor) -> Tensor:
            M, b = M.double(), b.double()
            if P is not None:
                M, b = M @ P.double(), M @ p.double() + b
            ctx.maps, adds = gather_now(place, M.float(), b.float())
            state = S.double()
            for rank in range(place.rank):
                state = ctx.maps[rank].double() @ state + adds[rank]
            ctx.begun = state
            return state if P is None else P.double() @ state + p

        save = any(ctx.needs_input_grad)
        o, ended, kept = launch_relay.forward(plan, q, k, v, beta, gate, exchange, save)
        if save:
            ctx.plan, ctx.place, ctx.kept, ctx.P, ctx.kind = plan, place, kept, P, S.dtype
            ctx.optional = beta is not None, gate is not None
        return o, ended.to(S.dtype)

    @staticmethod
    def backward(ctx, d_o, d_ended):  # type: ignore[override]
        from fastweight.kernels import launch_relay

        place, P = ctx.place, None if ctx.P is None else ctx.P.double()

        def exchange(d_begun: Tensor) -> Tensor:
            d_begun = d_begun.double() if P is None else P.mT @ d_begun.double()
            (parts,) = gather_now(place, d_begun.float())
            behind = torch.zeros_like(d_begun)
            for rank in range(place.size - 1, place.rank, -1):
                behind = ctx.maps[rank].double().mT @ behind + parts[rank]
            return behind

        d_q, d_k, d_v, d_beta, d_gate, d_S = launch_relay.backward(ctx.plan, ctx.kept, d_o, d_ended, exchange)
        wide = d_S.double()
        d_P = None if P is None else (wide @ ctx.begun.mT).to(ctx.kind)
        d_begun = wide if P is None else P.mT @ wide
        d_begun = d_begun if place.rank == 0 else torch.zeros_like(d_begun)
        has_beta, has_gate = ctx.optional
        return (
            None, d_q, d_k, d_v, d_beta if has_beta else None, d_gate if has_gate else None,
            d_begun.to(ctx.kind), d_P, None if P is None else d_S.to(ctx.kind),
        )  # fmt: skip
