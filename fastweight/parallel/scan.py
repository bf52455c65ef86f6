"""The op over ranks on kernels, for the price of one pass: a gain per head, no window, dense, read after write.

The exchange of maps happens in the middle of the kernels' own work (kernels/launch_relay.py). The first token here,
whose key is on the rank before, is no business of the kernels: it has no pair for them and writes nothing, and is part
of how the state comes in instead,

    S_1 = P S_in + p      P = gamma_1 I - eta_1 x x^T,   p = eta_1 x y_1^T,   x the key from the rank before
                          P = gamma_1 where nothing is subtracted

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
from fastweight.memory.writes import Pairs, only_valid, step_and_decay
from fastweight.parallel.group import Place, gather, gather_now, tie


def fits(inputs: Inputs, call: Any, around: Around) -> bool:
    """Whether kernels would compute this call on one device, and this module can on many."""
    from fastweight.kernels import states_are_rebuilt

    rule, v = call.rule, inputs.v
    kind = rule.window == 1 and rule.read == "plain" and (inputs.beta is None or inputs.beta.ndim == 3)
    dense = around.mask is None and around.cu_seqlens is None and v.shape[1] > 1
    if not (kind and dense and rule.timing == "read-after-write" and not states_are_rebuilt()):
        return False
    wanted = call.backend == "triton" or (call.backend == "auto" and v.is_cuda)
    plain = call.form in ("auto", "chunk") and call.chunk_size is None
    return wanted and plain and fused.no_kernel(inputs, rule, Around(None, None, None)) is None


def scan(
    inputs: Inputs, rule: Rule, given: State | Tensor | None, place: Place, final: bool
) -> tuple[Tensor, State | None]:
    """o, and if wanted the State of whole sequences. given: the initial state, the same on all ranks."""
    q, k, v, beta, lam, log_decay = inputs
    anchor = next((t for t in (*inputs, *_parts(given)) if t is not None and t.requires_grad), None)
    begun = given if isinstance(given, State) or given is None else State.fresh(given, rule, num_key_heads=k.shape[2])
    k, v, k_last, v_first = _Ends.apply(k, v)  # type: ignore[misc]
    received: tuple[Tensor, ...] = ()
    P = p = None
    if rule.pairing == "next-latent":
        received = gather(place, anchor, k_last)
        if place.rank:
            P, p = _first_write(received[0][place.rank - 1], None, (v_first, beta, lam, log_decay), rule)
        elif begun is not None:
            P, p = _first_write(begun.key, begun.has_key, (v_first, beta, lam, log_decay), rule)
    gate = lam if log_decay is None else log_decay
    flags = rule, log_decay is not None, place
    o, S = _Scan.apply(flags, q, k, v, beta, gate, None if begun is None else begun.S, P, p)  # type: ignore[misc]
    if not final:
        return tie((o,), received)[0], None
    ended = gather(place, anchor, S, k_last)
    o, S, key = tie((o, ended[0][-1], ended[1][-1]), (*received, *ended))
    state = State.fresh(S, rule, num_key_heads=k.shape[2])
    return o, state._replace(key=key.to(S.dtype), has_key=torch.ones_like(state.has_key))


def _parts(given: State | Tensor | None) -> tuple[Tensor, ...]:
    return () if given is None else tuple(given) if isinstance(given, State) else (given,)


def _first_write(
    key: Tensor, has_key: Tensor | None, first: tuple[Tensor | None, ...], rule: Rule
) -> tuple[Tensor, Tensor]:
    """P [B, H, K, K] or [B, H, 1, 1] and p [B, H, K, V], float32, of the first token.

    key: [B, Hk, K], its own from the token before, where has_key. first: its value and the gates of all tokens.
    """
    key, (y, beta, lam, log_decay) = key.float(), (None if t is None else t.float() for t in _cut(first))
    assert y is not None, "there are values"
    valid = None if has_key is None else has_key[:, None]
    key = key if valid is None else key.masked_fill(~valid[..., None], 0)
    if log_decay is None:
        pairs = Pairs(key[:, None], y[:, None], None, None, valid)
        gain, log_decay = step_and_decay(pairs, beta, lam, rule, torch.Size((len(y), 1, *y.shape[1:])))
    else:
        gain = only_valid(torch.ones_like(log_decay) if beta is None else beta, valid)
        log_decay = only_valid(log_decay, valid)
    carry, gain = log_decay[:, 0, :, None, None].exp(), gain[:, 0, :, None]
    x = key.repeat_interleave(y.shape[1] // key.shape[1], dim=1)[..., None]  # [B, H, K, 1]
    written = x * gain[..., None]
    if rule.objective != "regression":
        return carry, written * y[:, :, None]
    eye = torch.eye(x.shape[2], device=x.device)
    return carry * eye - written * x.mT, written * y[:, :, None]


def _cut(first: tuple[Tensor | None, ...]) -> list[Tensor | None]:
    """The value as it is, the gates of the first token."""
    return [first[0], *(None if t is None else t[:, :1] for t in first[1:])]


def _through(M: Tensor, S: Tensor) -> Tensor:
    """A map's linear part, a matrix or a decay, on a state or another map."""
    return M * S if M.shape[-1] == 1 else M @ S


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


def _engine(rule: Rule) -> Any:
    from fastweight.kernels import launch_relay, launch_relay_additive

    return launch_relay if rule.objective == "regression" else launch_relay_additive


class _Scan(torch.autograd.Function):
    """Kernels with the exchange: o, and the state after this rank's tokens."""

    @staticmethod
    def forward(ctx, flags, q, k, v, beta, gate, S, P, p):
        from fastweight.kernels.launch import Plan

        rule, raw, place = flags
        engine = _engine(rule)
        plan = Plan(
            float(rule.eps), float(rule.decay_floor), rule.pairing == "next-latent", raw, rule.ridge == "scaled",
            rule.step == "direct", raw and rule.objective == "regression", False,
        )  # fmt: skip

        def exchange(M: Tensor, b: Tensor) -> Tensor:
            if P is not None:
                M, b = _through(M, P.double()), _through(M, p.double()) + b
            maps, adds = gather_now(place, M.float(), b.float())
            ctx.maps = maps.double()
            state = torch.zeros_like(b) if S is None else S.double()
            for rank in range(place.rank):
                state = _through(ctx.maps[rank], state) + adds[rank]
            ctx.begun = state
            return state if P is None else _through(P.double(), state) + p

        save = any(ctx.needs_input_grad)
        o, ended, kept = engine.forward(plan, q, k, v, beta, gate, exchange, save)
        if save:
            ctx.plan, ctx.place, ctx.kept, ctx.P, ctx.engine, ctx.has_state = (
                plan,
                place,
                kept,
                P,
                engine,
                S is not None,
            )
            ctx.optional = beta is not None, gate is not None
        ctx.set_materialize_grads(False)
        return o, ended

    @staticmethod
    def backward(ctx, d_o, d_ended):  # type: ignore[override]
        place, P = ctx.place, None if ctx.P is None else ctx.P.double()
        assert d_o is not None, "`tie` asks for it"

        def exchange(d_begun: Tensor) -> Tensor:
            d_begun = d_begun if P is None else _through(P.mT, d_begun)
            (parts,) = gather_now(place, d_begun.float())
            behind = torch.zeros_like(d_begun)
            for rank in range(place.size - 1, place.rank, -1):
                behind = _through(ctx.maps[rank].mT, behind) + parts[rank]
            return behind

        d_q, d_k, d_v, d_beta, d_gate, d_S = ctx.engine.backward(ctx.plan, ctx.kept, d_o, d_ended, exchange)
        d_begun = d_P = d_p = None
        if P is not None:
            d_P = d_S @ ctx.begun.mT if P.shape[-1] > 1 else (d_S * ctx.begun).sum((-2, -1), keepdim=True)
            d_P, d_p = d_P.float(), d_S.float()
        if ctx.has_state:
            d_begun = (d_S if P is None else _through(P.mT, d_S)).float() * (place.rank == 0)
        has_beta, has_gate = ctx.optional
        return (
            None, d_q, d_k, d_v, d_beta if has_beta else None, d_gate if has_gate else None,
            d_begun, d_P, d_p,
        )  # fmt: skip
