"""Host side of the regression class with a gain per value column: allocates, launches solve_columns*.py.

Calls that `fits_hopper` knows first take hopper_scaled_columns*.py, which make everything but the gradients in chunks
that forget much; the exact kernel follows for those. The walks of hopper_solve_columns*.py are for float16, and in
bfloat16 for what columns that forget too much have left in vain.

Saved for the backward pass: 4 bytes of key energy per token and key head, V elements of residual and K V / 64 of chunk
states per token and value head. Couplings of neighbouring tokens are made again wherever they are needed.
"""

from typing import Any

import torch
import triton
from torch import Tensor

from fastweight.kernels import launch_hopper, launch_hopper_gradient, solve_columns, solve_columns_gradient
from fastweight.kernels.geometry import Geometry
from fastweight.kernels.launch import (
    FEW_PROGRAMS,
    Gradients,
    Inputs,
    Plan,
    Tile,
    Walk,
    precision,
    start,
    tables,
    wide,
)

UNKNOWN_ONE = 1  # what the kernels must not know to be 1 (solve_columns.py)


def column_tile(K: int, V: int, dtype: torch.dtype) -> Tile:
    """All of K, and a thread for every value column; a state wider than 128 takes the threads of two columns."""
    BV = 32 if dtype == torch.float32 else 64 if V <= 64 or K > 128 else 128
    return Tile(wide(K), BV, BV // (32 if K <= 128 else 16), 1)


def settings(plan: Plan, given: Inputs) -> dict[str, Any]:
    """What the kernels take by name."""
    K, V, dtype = given.q.shape[3], given.v.shape[3], given.v.dtype
    flags = {"SHIFT": int(plan.shift), "SCALED": plan.scaled, "DIRECT": plan.direct, "BEFORE": plan.before}
    return {**flags, **given.widths, "V": V, "DOT": precision(dtype), **column_tile(K, V, dtype)._asdict()}


def couple(plan: Plan, given: Inputs, cu_seqlens: Tensor | None, energies: Tensor | None, back: bool) -> Tensor:
    """Products of keys with keys and with queries [KH, tokens, 2, 16] inside blocks of 16; fills the energies."""
    B, T, KH, K = given.q.shape
    where = Geometry.of(B, T, cu_seqlens, 16)
    couplings = torch.empty(KH, where.tokens, 2, 16, dtype=torch.float32, device=given.v.device)
    if where.slots and KH:
        start(
            solve_columns.couple, (where.slots, KH),
            given.q, given.k, given.key0, given.previous, couplings, energies, *tables(where), KH=KH, K=K,
            BK=min(wide(K), 128), SHIFT=int(plan.shift), BACK=back, DOT=precision(given.v.dtype), num_warps=1,
            num_stages=1,
        )  # fmt: skip
    return couplings


def fits_hopper(given: Inputs, d_o: Tensor, states: Tensor) -> bool:
    """Whether the kernels on Hopper compute this call: of 64 or 128 key and as many value columns."""
    square = given.q.shape[3] == given.v.shape[3]
    assert given.beta is not None, "every call here has a gain per value column"
    return square and given.beta.data_ptr() % 16 == 0 and launch_hopper_gradient.fits(given, d_o, states)


def _walk(kernels: tuple[Any, Any], plan: Plan, given: Inputs, where: Geometry, values: Tensor, *results) -> None:
    """Walks on Hopper by either of two kernels, scaled columns first; values: of the tokens, or the gradients of what
    they read."""
    scaled, exact = kernels
    H, D = given.v.shape[2:]
    programs = where.sequences * H
    vain = None
    if given.v.dtype == torch.bfloat16:
        vain = torch.empty(programs, dtype=torch.int8, device=given.v.device)
    for kernel in (exact,) if vain is None else (scaled, exact):
        start(
            kernel, (programs,),
            given.q, given.k, values, given.beta, given.lam, *given[5:], *results, vain,
            *Walk(where, 1, 2**30).arguments, float(plan.eps), float(plan.floor), H=H, KH=given.q.shape[2], D=D,
            SHIFT=int(plan.shift), SCALED=plan.scaled, DIRECT=plan.direct, BEFORE=plan.before, num_warps=4,
            maxnreg=168 if D == 64 else None,
        )  # fmt: skip


def forward(plan, q, k, v, beta, lam, state0, key0, has_key, mask, cu_seqlens, save):
    """o, final S, key energies, residuals and chunk states."""
    given = Inputs.of(plan, q, k, v, beta, lam, key0, has_key, mask)
    (B, T, H, V), K = v.shape, q.shape[3]
    where = Geometry.of(B, T, cu_seqlens)
    o = torch.empty_like(given.v)
    state1 = torch.empty(where.sequences, H, K, V, dtype=torch.float32, device=v.device)
    energies = state1.new_empty(q.shape[2], where.tokens)
    residual = v.new_empty(where.tokens if save else 0, H, V)
    states = v.new_empty(where.slots if save else 0, H, K, V)
    named = settings(plan, given)
    grid = where.sequences * H * triton.cdiv(V, named["BV"])
    start0 = None if state0 is None else state0.contiguous()
    kept = residual if save else None, states if save else None
    if grid and fits_hopper(given, given.v, states):
        from fastweight.kernels import hopper_scaled_columns, hopper_solve_columns

        kernels = hopper_scaled_columns.forward, hopper_solve_columns.forward
        _walk(kernels, plan, given, where, given.v, energies, start0, o, *kept, state1)
    elif grid:
        couplings = couple(plan, given, cu_seqlens, energies, back=False)
        start(
            solve_columns.forward, (grid,),
            *given, couplings, energies, start0, o, *kept, state1, *Walk(where, 1, 2**30).arguments,
            float(plan.eps), float(plan.floor), UNKNOWN_ONE, **named,
        )  # fmt: skip
    return o, state1, energies if save else energies.new_empty(q.shape[2], 0), residual, states


def backward(plan, d_o, d_state1, q, k, v, beta, lam, key0, has_key, mask, cu_seqlens, saved, want_state):
    """Gradients of q, k, v, beta, lam, the initial S and the initial key."""
    energies, residual, states = saved
    given = Inputs.of(plan, q, k, v, beta, lam, key0, has_key, mask)
    B, T, H, V = v.shape
    where = Geometry.of(B, T, cu_seqlens)
    d_o = d_o.contiguous()
    out = Gradients(given, where, want_state)
    named = settings(plan, given)
    steps = float(plan.eps), float(plan.floor), UNKNOWN_ONE
    blocks = -(-V // named["BV"])
    d_end = None if d_state1 is None else d_state1.contiguous()
    wild = None
    if where.slots and H and fits_hopper(given, d_o, states):
        wild = backward_mild(plan, where, given, d_o, d_end, saved, out)
    common = (given.q, given.k, d_o, given.beta, given.lam, *given[5:])
    if where.sequences and H and wild is None:
        start(
            solve_columns_gradient.backward_state, (where.sequences * H * blocks,),
            *common, couple(plan, given, cu_seqlens, None, back=True), energies, d_end, out.states, out.state0,
            *Walk(where, 1, 2**30).arguments, *steps, **named,
        )  # fmt: skip
    if where.slots and H:
        backward_chunk(where, given, (*common, energies), (residual, states), out, wild, blocks, steps, named)
    return out.result()


def backward_mild(plan, where, given, d_o, d_end, saved, out: Gradients) -> Tensor:
    """On Hopper: the gradients of all states, and all others of the chunks that do not forget much; which ones do."""
    from fastweight.kernels import (
        hopper_scaled_columns_backward,
        hopper_scaled_columns_gradient,
        hopper_solve_columns_backward,
    )

    energies, residual, states = saved
    H, D = given.v.shape[2:]
    kept = torch.empty(where.slots, H, D, dtype=torch.float32, device=given.v.device)
    wild = torch.empty(where.slots, H, dtype=torch.int8, device=given.v.device)
    kernels = hopper_scaled_columns_backward.backward_state, hopper_solve_columns_backward.backward_state
    _walk(kernels, plan, given, where, d_o, energies, d_end, out.states, out.state0, out.v, kept, wild)
    start(
        hopper_scaled_columns_gradient.backward_token, (where.slots * H,),
        given.q, given.k, d_o, given.beta, given.lam, *given[5:], energies, residual,
        launch_hopper.blocks(states, D), launch_hopper.blocks(out.states, D), kept, wild, out.q, out.k, out.v, out.beta,
        out.lam, out.key0, *tables(where),
        float(plan.eps), float(plan.floor), H=H, KH=given.q.shape[2], D=D, SHIFT=int(plan.shift), SCALED=plan.scaled,
        DIRECT=plan.direct, BEFORE=plan.before, num_warps=4,
    )  # fmt: skip
    return wild


def backward_chunk(where, given, common, saved, out: Gradients, wild, blocks: int, steps, named) -> None:
    """The same for all chunks, or those of `wild`; what each block of columns gives is summed here."""
    tasks = where.slots * given.v.shape[2] * blocks
    programs = min(tasks, FEW_PROGRAMS * 256 // named["BV"])
    aside = given.v.new_empty(programs, 4, named["BV"], named["BK"])
    coupled = given.v.new_empty(programs, 64, 2, 16, dtype=torch.float32)
    shared = out.q, out.k, out.lam, out.key0
    d_q, d_k, d_lam, d_key0 = (_one_per(blocks, tensor) for tensor in shared)
    start(
        solve_columns_gradient.backward_chunk, (programs,),
        *common, *saved, out.states, aside, coupled, d_q, d_k, out.v, out.beta, d_lam, d_key0, wild,
        *tables(where), where.slots, where.sequences, *steps, **named,
    )  # fmt: skip
    if blocks > 1:
        for tensor, parts in zip(shared, (d_q, d_k, d_lam, d_key0), strict=True):
            if tensor is not None and parts is not None:
                torch.sum(parts, 0, out=tensor)


def _one_per(blocks: int, tensor: Tensor | None) -> Tensor | None:
    """Room for a tensor from each block of columns; keys of masked rows are written by none."""
    if tensor is None or blocks == 1:
        return tensor
    return torch.zeros(blocks, *tensor.shape, dtype=tensor.dtype, device=tensor.device)
