"""The public op: checks, packing, choice of form and backend. The mathematics is in writes, recurrent and block.

`fast_weight_attention` serves the six rules; `delta_rule` and `linear_attention` reach the same engines with gates of
their own (DeltaNet, Gated DeltaNet; RetNet, Lightning, SSD). Traps: the op scales nothing (no 1/sqrt(K)) and normalises
nothing: with unnormalised keys and a direct step, eta |x|^2 must stay below 2 for a regression rule to be stable, which
is the caller's business (the layer normalises q and k). Keys come unshifted: the op pairs.
"""

from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from fastweight.memory import checks, fused, packing
from fastweight.memory.block import block
from fastweight.memory.inputs import Around, Inputs, working_dtype
from fastweight.memory.modes import transformed, without_autocast
from fastweight.memory.recurrent import recurrent
from fastweight.memory.rules import Rule, rule_of
from fastweight.memory.state import State
from fastweight.memory.writes import make_writes, only_valid
from fastweight.parallel.group import current

DELTA_RULE = Rule("delta-rule", "regression", pairing="same-step", step="direct")
LINEAR_ATTENTION = Rule("linear-attention", "inner-product", pairing="same-step", step="direct")


class _Call(NamedTuple):
    """How the op is to be computed."""

    rule: Rule
    form: str
    backend: str
    chunk_size: int | None


def fast_weight_attention(
    q: Float[Tensor, "B T Hk K"],
    k: Float[Tensor, "B T Hk K"],
    v: Float[Tensor, "B T H V"],
    beta: Float[Tensor, "B T H"] | Float[Tensor, "B T H V"] | None,
    lam: Float[Tensor, "B T H"] | None,
    rule: str | Rule,
    *,
    form: str = "auto",
    backend: str = "auto",
    chunk_size: int | None = None,
    initial_state: State | Float[Tensor, "N H K V"] | None = None,
    output_final_state: bool = False,
    cu_seqlens: Int[Tensor, " N+1"] | None = None,
    mask: Bool[Tensor, "B T"] | None = None,
) -> tuple[Float[Tensor, "B T H V"], State | None]:
    """Writes T pairs into a fast-weight memory and reads it at every token (SPEC sections 2 to 6).

    Args:
        q, k: read and write features, already featured and normalised, k unshifted; head h of v uses group h // (H/Hk).
        v: values.
        beta: dimensionless gain in (0, 2), or the step eta itself when rule.step is "direct"; per head, or per value
            column for a column rule; None means ones.
        lam: shrinkage >= 0 (lambda, or lambda-bar when rule.ridge is "scaled"); None means no decay.
        rule: a name of RULES or a Rule.
        form: "recurrent" (token by token), "masked" (one block of T), "chunk"; all are exact. "auto" chooses.
        backend: "torch", "triton", or "auto". An explicit form or backend is obeyed or raises.
        chunk_size: tokens a chunk of the chunk form; None takes a size that suits the rule.
        initial_state: a State continues exactly; a bare S starts a fresh segment (no write at its first token).
        output_final_state: whether to return the State after the last token.
        cu_seqlens: bounds of N sequences packed in one row (batch 1); N states in and out.
        mask: False marks identity steps: no write, no decay, not a previous key, in no window.

    Returns:
        o in v's dtype, and the final State (float32, or float64 for float64 inputs), or None.

    Raises:
        ValueError: for anything inconsistent, naming the argument, what was got and what was expected.
    """
    rule = rule_of(rule)
    checks.check_qkv(q, k, v)
    checks.check_gate("beta", beta, v, column=rule.gain == "column")
    checks.check_gate("lam", lam, v)
    call = _Call(rule, form, backend, chunk_size)
    around = Around(initial_state, mask, cu_seqlens)
    return _attend(Inputs(q, k, v, beta, lam, None), call, around, output_final_state)


def delta_rule(
    q: Float[Tensor, "B T Hk K"],
    k: Float[Tensor, "B T Hk K"],
    v: Float[Tensor, "B T H V"],
    beta: Float[Tensor, "B T H"] | None,
    log_decay: Float[Tensor, "B T H"] | None = None,
    *,
    form: str = "auto",
    backend: str = "auto",
    chunk_size: int | None = None,
    initial_state: State | Float[Tensor, "N H K V"] | None = None,
    output_final_state: bool = False,
    cu_seqlens: Int[Tensor, " N+1"] | None = None,
    mask: Bool[Tensor, "B T"] | None = None,
) -> tuple[Float[Tensor, "B T H V"], State | None]:
    """DeltaNet, and Gated DeltaNet when log_decay (<= 0, natural log, per head) is given; the scale of q is 1.

        S_t = exp(log_decay_t) S_{t-1};   S_t += x_t beta_t (v_t - S_t^T x_t)^T   with x_t = k_t

    Keywords, State and errors as in `fast_weight_attention`.
    """
    checks.check_qkv(q, k, v)
    checks.check_gate("beta", beta, v)
    checks.check_gate("log_decay", log_decay, v)
    call = _Call(DELTA_RULE, form, backend, chunk_size)
    around = Around(initial_state, mask, cu_seqlens)
    decay = torch.zeros_like(v[..., 0]) if log_decay is None else log_decay
    return _attend(Inputs(q, k, v, beta, None, decay), call, around, output_final_state)


def linear_attention(
    q: Float[Tensor, "B T Hk K"],
    k: Float[Tensor, "B T Hk K"],
    v: Float[Tensor, "B T H V"],
    log_decay: Float[Tensor, "B T H"] | None = None,
    *,
    form: str = "auto",
    backend: str = "auto",
    chunk_size: int | None = None,
    initial_state: State | Float[Tensor, "N H K V"] | None = None,
    output_final_state: bool = False,
    cu_seqlens: Int[Tensor, " N+1"] | None = None,
    mask: Bool[Tensor, "B T"] | None = None,
) -> tuple[Float[Tensor, "B T H V"], State | None]:
    """Unnormalised linear attention; with log_decay (<= 0, natural log, per head) RetNet, Lightning attention, SSD.

        S_t = exp(log_decay_t) S_{t-1} + k_t v_t^T,   o_t = S_t^T q_t

    Keywords, State and errors as in `fast_weight_attention`.
    """
    checks.check_qkv(q, k, v)
    checks.check_gate("log_decay", log_decay, v)
    call = _Call(LINEAR_ATTENTION, form, backend, chunk_size)
    around = Around(initial_state, mask, cu_seqlens)
    decay = torch.zeros_like(v[..., 0]) if log_decay is None else log_decay
    return _attend(Inputs(q, k, v, None, None, decay), call, around, output_final_state)


def step(
    q_t: Float[Tensor, "B Hk K"],
    k_t: Float[Tensor, "B Hk K"],
    v_t: Float[Tensor, "B H V"],
    beta_t: Float[Tensor, "B H"] | Float[Tensor, "B H V"] | None,
    lam_t: Float[Tensor, "B H"] | None,
    state: State | Float[Tensor, "B H K V"] | None,
    rule: str | Rule,
    *,
    mask_t: Bool[Tensor, " B"] | None = None,
) -> tuple[Float[Tensor, "B H V"], State]:
    """One token of `fast_weight_attention`: o_t and the next State, the old one untouched (SPEC section 6)."""
    rule = rule_of(rule)
    inputs = _one_token(q_t, k_t, v_t, beta_t, lam_t, rule)
    mask = None if mask_t is None else mask_t[:, None]
    o, new = _attend(inputs, _Call(rule, "recurrent", "auto", None), Around(state, mask, None), True)
    assert new is not None, "the state was asked for"
    return o[:, 0], new


def step_in_place(
    q_t: Float[Tensor, "B Hk K"],
    k_t: Float[Tensor, "B Hk K"],
    v_t: Float[Tensor, "B H V"],
    beta_t: Float[Tensor, "B H"] | Float[Tensor, "B H V"] | None,
    lam_t: Float[Tensor, "B H"] | None,
    state: State,
    rule: str | Rule,
    *,
    log_decay_t: Float[Tensor, "B H"] | None = None,
    mask_t: Bool[Tensor, " B"] | None = None,
    tickets: Int[Tensor, " B"] | None = None,
) -> Float[Tensor, "B H V"]:
    """`step` for caches and captured CUDA graphs: `state` becomes the next one, its tensors stay where they are.

    Args:
        log_decay_t: for the classes DELTA_RULE and LINEAR_ATTENTION as rules, in the place of lam_t: see `delta_rule`
            and `linear_attention`; they need one (zeros for no decay), and no other rule may have it.
        tickets: int32 zeros [B] for the decoding kernel, zeros again afterwards; None makes new ones in every call.
        the rest: as in `step`.

    Raises:
        ValueError: as `step`, and when anything asks for gradients: what backward needs would be overwritten.
    """
    rule = rule_of(rule)
    inputs = _one_token(q_t, k_t, v_t, beta_t, lam_t, rule)
    if (rule in (DELTA_RULE, LINEAR_ATTENTION)) == (log_decay_t is None) or None not in (lam_t, log_decay_t):
        got = f"lam_t {type(lam_t).__name__}, log_decay_t {type(log_decay_t).__name__}"
        checks.fail("log_decay_t", f"{got} for the rule {rule.name!r}", "it, alone, for the baselines' rules only")
    if log_decay_t is not None:
        inputs = inputs._replace(log_decay=log_decay_t[:, None])
        checks.check_gate("log_decay_t", inputs.log_decay, inputs.v)
    if not isinstance(state, State):
        checks.fail("state", type(state).__name__, "a State to overwrite")
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (*inputs, *state)):
        checks.fail("state", "tensors that require gradients", "torch.no_grad(), or step, which overwrites nothing")
    mask = None if mask_t is None else mask_t[:, None]
    checks.check_mask(mask, inputs.v)
    checks.check_state(state, inputs.k, inputs.v, rule, len(inputs.v))
    dense = all(part.is_contiguous() for part in state)
    if inputs.v.is_cuda and dense and fused.no_step(inputs, rule, state) is None:
        tickets = torch.zeros(len(inputs.v), dtype=torch.int32, device=inputs.v.device) if tickets is None else tickets
        return fused.step(inputs, rule, state, mask, tickets)[0][:, 0]
    o, new = _attend(inputs, _Call(rule, "recurrent", "auto", None), Around(state, mask, None), True)
    assert new is not None, "the state was asked for"
    for old, part in zip(state, new, strict=True):
        old.copy_(part)
    return o[:, 0]


def _one_token(q_t, k_t, v_t, beta_t, lam_t, rule: Rule) -> Inputs:
    """What `step` is given, checked, as a call of one token."""
    if current() is not None:
        checks.fail("step", "a call inside context_parallel", "one outside: a single token has no ranks to lie on")
    for name, value in (("q_t", q_t), ("k_t", k_t), ("v_t", v_t)):
        if not isinstance(value, Tensor) or value.ndim != 3:
            got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            checks.fail(name, got, "a tensor of 3 axes [batch, heads, width]")
    inputs = Inputs(q_t, k_t, v_t, beta_t, lam_t, None).map(lambda t: t[:, None])
    checks.check_qkv(inputs.q, inputs.k, inputs.v)
    checks.check_gate("beta_t", inputs.beta, inputs.v, column=rule.gain == "column")
    checks.check_gate("lam_t", inputs.lam, inputs.v)
    return inputs


def _attend(inputs: Inputs, call: _Call, around: Around, output_final_state: bool) -> tuple[Tensor, State | None]:
    """The op after its gates are checked: on this process, or inside `context_parallel` on all of them."""
    v, (initial_state, mask, cu_seqlens) = inputs.v, around
    checks.check_choice("form", call.form, checks.FORMS)
    checks.check_choice("backend", call.backend, checks.BACKENDS)
    checks.check_chunk_size(call.chunk_size)
    checks.check_mask(mask, v)
    checks.check_cu_seqlens(cu_seqlens, v)
    N = len(v) if cu_seqlens is None else len(cu_seqlens) - 1
    checks.check_state(initial_state, inputs.k, v, call.rule, N)
    place = current()
    if place is None:
        return _attend_here(inputs, call, around, output_final_state)
    from fastweight.memory.across import attend

    return attend(inputs, call, around, output_final_state, place, _attend_here)


def _attend_here(inputs: Inputs, call: _Call, around: Around, output_final_state: bool) -> tuple[Tensor, State | None]:
    """The op of one process: packing around `_dense`, dtypes in and out."""
    v, (initial_state, mask, cu_seqlens) = inputs.v, around
    N = len(v) if cu_seqlens is None else len(cu_seqlens) - 1
    dtype = working_dtype(*inputs)
    call = _transformable(call, inputs) if transformed() else call
    # Zeros that nobody reads cost more than some kernels: without anything carried only single tokens need a state.
    fresh = initial_state is None and v.shape[1] != 1
    state = None if fresh else _start(initial_state, call.rule, N, inputs.k, v, dtype)
    kernels = _use_kernels(inputs, call, around, state)
    with without_autocast(v.device.type):
        if kernels == "step" and state is not None:
            o, new = fused.step(inputs, call.rule, state, mask)
            return o, new if output_final_state else None
        if kernels == "scan":
            carried = None if initial_state is None else state
            return fused.attend(inputs, call.rule, around, carried, output_final_state)
        state = _start(None, call.rule, N, inputs.k, v, dtype) if state is None else state
        inputs = inputs.map(lambda t: t.to(dtype))
        if cu_seqlens is None:
            o, state = _dense(inputs, call, state, mask)
        else:
            o, state = _packed(inputs, call, state, mask, cu_seqlens)
    return o.to(v.dtype), state if output_final_state else None


def _transformable(call: _Call, inputs: Inputs) -> _Call:
    """The call inside a transform of torch.func: token by token, in operations that it can see through."""
    rule = call.rule
    measured = rule.step == "normalized" or (rule.ridge == "scaled" and inputs.lam is not None)
    if call.form not in ("auto", "recurrent") or call.backend == "triton":
        got = f"{call.form!r} with backend {call.backend!r} inside a transform of torch.func"
        checks.fail(
            "form", got, "'recurrent' or 'auto' with backend 'torch' or 'auto': other backwards are hand-written"
        )
    if rule.objective == "regression" and rule.window > 1 and measured:
        got = f"{rule.name!r} with a window of {rule.window} inside a transform of torch.func"
        checks.fail("rule", got, "another rule, or torch.autograd: the backward of its top eigenvalue is hand-written")
    return call._replace(form="recurrent", backend="torch")


def _use_kernels(inputs: Inputs, call: _Call, around: Around, state: State | None) -> Literal["", "step", "scan"]:
    """Which Triton kernels serve this call, if any; a backend that was asked for is obeyed or raises."""
    device, T = inputs.v.device.type, inputs.v.shape[1]
    if call.backend == "torch" or (call.backend == "auto" and device != "cuda"):
        return ""
    reason: str | None = "kernels compute the chunk form, in chunks of their own size, and single tokens"
    found: Literal["step", "scan"] = "scan"
    if state is not None and T == 1 and call.form in ("auto", "recurrent") and around.cu_seqlens is None:
        found, reason = "step", fused.no_step(inputs, call.rule, state)
    chosen = call.backend == "triton"
    if reason and call.form in ("auto", "chunk") and call.chunk_size is None and (T > 1 or chosen):
        found, reason = "scan", fused.no_kernel(inputs, call.rule, around)
    if chosen and reason is not None:
        checks.fail("backend", "'triton'", f"'torch' or 'auto' for this call: {reason}")
    if not chosen and not torch.compiler.is_compiling():
        fused.tell("torch" if reason else "triton", device, reason or "")
    return "" if reason else found


def _start(initial: State | Tensor | None, rule: Rule, N: int, k: Tensor, v: Tensor, dtype: torch.dtype) -> State:
    if isinstance(initial, State):
        return initial.to(dtype)
    S = initial if isinstance(initial, Tensor) else v.new_zeros(N, v.shape[2], k.shape[3], v.shape[3], dtype=dtype)
    return State.fresh(S.to(dtype), rule, num_key_heads=k.shape[2])


def _packed(inputs: Inputs, call: _Call, state: State, mask: Tensor | None, cu_seqlens: Tensor) -> tuple[Tensor, State]:
    """Every bucket of sequences as a dense batch; outputs and states back in order."""
    if len(cu_seqlens) == 1:
        return torch.zeros_like(inputs.v), state
    found = packing.buckets(cu_seqlens)
    outputs, states = [], []
    for bucket in found:
        real = bucket.mask
        if mask is not None:
            real = bucket.take(mask) if real is None else bucket.take(mask) & real
        o, new = _dense(inputs.map(bucket.take), call, state.index_select(bucket.rows), real)
        outputs.append(o)
        states.append(new)
    back = torch.cat([bucket.rows for bucket in found]).argsort()
    return packing.merge(outputs, found), State.cat(states).index_select(back)


def _dense(inputs: Inputs, call: _Call, state: State, mask: Tensor | None) -> tuple[Tensor, State]:
    """B rows of T tokens after B states, everything in one float dtype."""
    rule, T = call.rule, inputs.v.shape[1]
    if inputs.v.numel() == 0:
        return torch.zeros_like(inputs.v), state
    # Masked tokens may hold anything, and 0 * NaN must not reach the memory. q only reads.
    inputs = inputs.map(lambda t: only_valid(t, mask))._replace(q=inputs.q)
    writes, boundary = make_writes(*inputs[1:5], rule, state, mask, inputs.log_decay)
    S = state.S
    if rule.read == "normalized":
        # The normaliser z is one more value column whose target is 1 (appendix C.1).
        writes = writes._replace(y=torch.cat((writes.y, torch.ones_like(writes.y[..., :1])), dim=-1))
        S = torch.cat((S, state.z[..., None]), dim=-1)
    form = call.form if call.form != "auto" else "recurrent" if T == 1 else "chunk"
    if form == "recurrent":
        o, S = recurrent(inputs.q, writes, S, rule.timing)
    else:
        o, S = block(inputs.q, writes, S, rule.timing, T if form == "masked" else call.chunk_size)
    if rule.read == "normalized":
        boundary = boundary._replace(z=S[..., -1])
        o, S = _divide(o, rule.read_eps), S[..., :-1]
    return o, boundary._replace(S=S)


def _divide(o: Float[Tensor, "B T H V+1"], eps: float) -> Float[Tensor, "B T H V"]:
    """The normalised read. Sign-stable: the paper's z^T q + eps for nonnegative features, and never within eps of 0."""
    below = o[..., -1:]
    below = torch.where(below >= 0, below + eps, below - eps)
    return o[..., :-1] / torch.where(below == 0, 1, below)
