"""The op over ranks on kernels for the price of one pass: all rules but regression by column or over windows.

Everything that ranks have to tell each other goes in one message each way (kernels/launch_borders.py), and the whole
call is one autograd function, so that the host makes few calls more than one process does. Served are dense rows,
read after they are written: regression with a gain per head, the inner product also with a window or by column.

Trap: all ranks must go backward through every call; the final state is computed on all of them, from messages alone.
"""

from typing import Any

import torch
from torch import Tensor

from fastweight.memory import fused
from fastweight.memory.backward import exact_backward
from fastweight.memory.inputs import Around, Inputs
from fastweight.memory.rules import Rule
from fastweight.memory.state import State
from fastweight.parallel.group import Place, share

LONGEST = 4  # window whose edge is taken token by token
WIDEST = 128


def fits(inputs: Inputs, call: Any, around: Around) -> bool:
    """Whether kernels would compute this call on one device, and this module can on many."""
    from fastweight.kernels import states_are_rebuilt

    rule, v = call.rule, inputs.v
    dense = around.mask is None and around.cu_seqlens is None and v.shape[1] >= max(2 * rule.window, 2)
    known = rule.objective == "inner-product" or not _by_column(inputs)
    window = rule.window <= (LONGEST if rule.objective == "inner-product" else 1)
    narrow = max(inputs.k.shape[-1], v.shape[-1]) <= WIDEST
    usual = rule.read == "plain" and rule.timing == "read-after-write" and not states_are_rebuilt()
    paired = inputs.log_decay is None or _edge(rule) == 0
    held = around.initial_state
    single = held is None or (held.S if isinstance(held, State) else held).dtype == torch.float32
    if not (dense and known and window and narrow and usual and paired and single):
        return False
    wanted = call.backend == "triton" or (call.backend == "auto" and v.is_cuda)
    plain = call.form in ("auto", "chunk") and call.chunk_size is None
    return wanted and plain and fused.no_kernel(inputs, rule, Around(None, None, None)) is None


def attend(
    inputs: Inputs, rule: Rule, held: State | Tensor | None, final: bool, place: Place
) -> tuple[Tensor, State | None]:
    """o of this rank's tokens, and if `final` the State behind all ranks. held: before all ranks, the same on each."""
    from fastweight.kernels.launch import device_of

    q, k, v, beta, lam, log_decay = inputs
    S, tail = (held, None) if not isinstance(held, State) else (held.S, _tail(held, rule, v.shape[2] // k.shape[2]))
    tensors = q, k, v, beta, lam if log_decay is None else log_decay, S, tail
    save = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    call = _call(inputs, rule, place)
    with device_of(v):
        if save:
            o, *rest = _Attend.apply((call, place, final), *tensors)  # type: ignore[misc]
        else:
            o, *rest = _run(call, place, final, tensors, False)[0]
    return o, _state(rule, k.shape[2], *rest) if final else None


def _by_column(inputs: Inputs) -> bool:
    return inputs.beta is not None and inputs.beta.ndim == 4


def _edge(rule: Rule) -> int:
    return rule.window - 1 + (rule.pairing == "next-latent")


def _call(inputs: Inputs, rule: Rule, place: Place) -> Any:
    from fastweight.kernels import launch, launch_borders

    regression, raw = rule.objective == "regression", inputs.log_decay is not None
    shift = rule.pairing == "next-latent"
    plan = launch.Plan(
        float(rule.eps), float(rule.decay_floor), shift, raw, rule.ridge == "scaled", rule.step == "direct",
        raw and regression, False, rule.window,
    )  # fmt: skip
    widths = inputs.k.shape[3], inputs.v.shape[3]
    column = _by_column(inputs)
    message = launch_borders.Message(*widths, rule.window, int(shift), regression, column)
    inner = launch_borders.COLUMNS if column else launch_borders.ADDITIVE
    kind = launch_borders.SOLVE if regression else inner
    return launch_borders.Call(plan, kind, message, place.rank, place.size)


def _tail(state: State, rule: Rule, groups: int) -> Tensor:
    """What lies before all ranks as the tail of a message: keys, targets, their number, whether there is a last key."""
    places = rule.window - 1
    missing = torch.arange(places, 0, -1, device=state.S.device) > state.tail_count[:, None]  # newest last
    x, y = (t.masked_fill(missing[..., None, None], 0) for t in (state.tail_x, state.tail_y))
    key = state.key.masked_fill(~state.has_key[:, None, None], 0)[:, None]
    keys = torch.cat((x, key) if rule.pairing == "next-latent" else (key, x), dim=1)
    keys, y = keys.repeat_interleave(groups, dim=2).movedim(2, 1).flatten(2), y.movedim(2, 1).flatten(2)
    flags = torch.stack((state.tail_count, state.has_key), dim=-1).to(keys.dtype)
    return torch.cat((keys, y, flags[:, None].expand(-1, keys.shape[1], -1)), dim=2)


def _state(rule: Rule, num_key_heads: int, S: Tensor, ends: Tensor) -> State:
    """The State that a message's tail stands for; every rank has as many tokens as its window holds."""
    (_, H, K, V), R = S.shape, rule.window
    keys = ends[:, :: H // num_key_heads, : R * K].unflatten(2, (R, K)).transpose(1, 2)
    targets = ends[:, :, R * K :].unflatten(2, (R - 1, V)).transpose(1, 2) if R > 1 else ends.new_zeros(len(S), 0, H, V)
    x = keys[:, :-1] if rule.pairing == "next-latent" else keys[:, 1:]
    state = State.fresh(S, rule, num_key_heads=num_key_heads)
    count = torch.full_like(state.tail_count, R - 1)
    has_key = torch.ones_like(state.has_key)
    return state._replace(key=keys[:, -1], has_key=has_key, tail_x=x, tail_y=targets, tail_count=count)


def _run(call: Any, place: Place, final: bool, tensors: tuple, save: bool) -> tuple[tuple[Tensor, ...], Any, Any]:
    """o, and if `final` the state and the last pairs behind all ranks; how chunks were walked; what to keep."""
    from fastweight.kernels import launch, launch_borders

    q, k, v, beta, gate, S, tail = tensors
    given = launch.Inputs.of(call.plan, q, k, v, beta, gate, None, None, None)
    S = None if S is None else S.contiguous()
    o, last, walk, kept = launch_borders.forward(
        call, given, S, tail, lambda mine, every: share(place, mine, every), save, final
    )
    if last is None:
        return (o,), walk, kept
    message = call.message
    return (o, last, kept.messages[-1, :, :, message.tail : message.head - 2].clone()), walk, kept


class _Attend(torch.autograd.Function):
    """`_run`, with one exchange in its backward pass."""

    @staticmethod
    def forward(ctx, how, *tensors):
        call, place, final = how
        results, walk, kept = _run(call, place, final, tensors, True)
        ctx.how, ctx.walk, ctx.rates, ctx.has_beta = how, walk, len(kept.rates), tensors[3] is not None
        ctx.has_lam = tensors[4] is not None
        ctx.save_for_backward(*kept.flat())
        return results

    @staticmethod
    @exact_backward
    def backward(ctx, d_o, *d_last):  # type: ignore[override]
        from fastweight.kernels import launch, launch_borders

        call, place, _final = ctx.how
        kept = launch_borders.Kept.of(ctx.saved_tensors, ctx.rates)
        with launch.device_of(d_o):
            out, d_S, d_tail = launch_borders.backward(
                call, ctx.walk, kept, d_o, d_last or None, lambda mine, every: share(place, mine, every),
                tuple(ctx.needs_input_grad[6:8]),
            )  # fmt: skip
        d_q, d_k, d_v, d_beta, d_lam, *_ = out.result()
        return None, d_q, d_k, d_v, d_beta if ctx.has_beta else None, d_lam if ctx.has_lam else None, d_S, d_tail
