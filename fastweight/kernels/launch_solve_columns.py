"""Host side of the regression class with a gain per value column: allocates, and launches solve_columns*.py.

Saved for the backward pass: 4 bytes of key energy per token and key head, V elements of residual and K V / 64 of chunk
states per token and value head. Couplings of neighbouring tokens (128 bytes a token and key head) are made twice.
"""

from typing import Any

import torch
import triton
from torch import Tensor

from fastweight.kernels import launch_hopper_gradient, solve_columns, solve_columns_gradient, unproven
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
from fastweight.kernels.launch_hopper import WIDTHS, descriptor, tiles

STAGES = 3  # blocks of 16 tokens in shared memory, which leaves room for a second program
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


def walks_fast(given: Inputs, where: Geometry) -> bool:
    """Whether the walks on Hopper compute this call: dense, 16 bits, as many key as value columns, no carried key."""
    dense = where.cu is None and given.unmasked is None and given.key0 is None
    square = given.q.shape[3] == given.v.shape[3] and given.v.shape[3] in WIDTHS
    small = given.v.dtype != torch.float32 and 0 < where.tokens * given.v.shape[2] < 2**29
    if not (unproven.asked_for() and dense and square and small):
        return False
    assert given.beta is not None, "every call here has a gain per value column"
    aligned = all(tensor.data_ptr() % 16 == 0 for tensor in (given.q, given.k, given.v, given.beta))
    return aligned and launch_hopper_gradient.available(given.v.device)


def _walk(
    kernel: Any, plan: Plan, given: Inputs, where: Geometry, values: Tensor, couplings, energies, *results
) -> None:
    """Starts one of the walks on Hopper; values: of the tokens, or the gradients of what they read."""
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    B, T, H, D = given.v.shape
    beta: Any = given.beta
    row = H * D
    layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8 * beta.itemsize, rank=3)
    start(
        kernel, (B * H,),
        tiles(given.k, 64, 16), tiles(given.q, 64, 16), tiles(values, D, 16),
        TensorDescriptor(beta, [B, T, row], [T * row, row, 1], [1, 16, D], layout), couplings, energies, given.lam,
        *results, where.length, where.chunks, where.tokens, float(plan.eps), float(plan.floor), H=H,
        KH=given.q.shape[2], D=D, SHIFT=int(plan.shift), SCALED=plan.scaled, DIRECT=plan.direct, BEFORE=plan.before,
        STAGES=STAGES, num_warps=4,
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
    couplings = couple(plan, given, cu_seqlens, energies, back=False)
    named = settings(plan, given)
    grid = where.sequences * H * triton.cdiv(V, named["BV"])
    start0 = None if state0 is None else state0.contiguous()
    kept = residual if save else None, states if save else None
    if walks_fast(given, where):
        from fastweight.kernels import hopper_solve_columns

        _walk(
            hopper_solve_columns.forward, plan, given, where, given.v, couplings, energies, start0, o, *kept, state1
        )  # fmt: skip
    elif grid:
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
    couplings = couple(plan, given, cu_seqlens, None, back=True)
    named = settings(plan, given)
    steps = float(plan.eps), float(plan.floor), UNKNOWN_ONE
    common = (given.q, given.k, d_o, given.beta, given.lam, *given[5:], couplings, energies)
    blocks = -(-V // named["BV"])
    fast = unproven.asked_for() and given.q.shape[3] == V and launch_hopper_gradient.fits(given, d_o, states)
    seen = (out.v, *_room_for_decays(where, given)) if fast else (None, None, None)
    d_end = None if d_state1 is None else d_state1.contiguous()
    if fast and walks_fast(given, where):
        from fastweight.kernels import hopper_solve_columns

        _walk(
            hopper_solve_columns.backward_state, plan, given, where, d_o, couplings, energies, d_end, out.v, out.states,
            out.state0, *seen[1:],
        )  # fmt: skip
    elif where.sequences and H:
        start(
            solve_columns_gradient.backward_state, (where.sequences * H * blocks,),
            *common, d_end, out.states, out.state0, *seen, *Walk(where, 1, 2**30).arguments,
            *steps, **named,
        )  # fmt: skip
    if where.slots and H:
        if fast:
            _backward_mild(plan, where, given, d_o, saved, seen[1:], out)
        _backward_chunk(where, given, common, (residual, states), out, seen[2], blocks, steps, named)
    return out.result()


def state_rows(states: Tensor) -> Any:
    """Descriptor of 64 key rows of chunk states [chunks, H, K, V]."""
    V = states.shape[-1]
    return descriptor(states, [states.numel() // V, V], [V, 1], [64, V])


def _room_for_decays(where: Geometry, given: Inputs) -> tuple[Tensor, Tensor]:
    """For the products of every chunk's carries, and a byte that says whether it forgets much."""
    H, V = given.v.shape[2:]
    kept = torch.empty(where.slots, H, V, dtype=torch.float32, device=given.v.device)
    return kept, torch.empty(where.slots, H, dtype=torch.int8, device=given.v.device)


def _backward_mild(plan, where, given, d_o, saved, seen, out: Gradients) -> None:
    """Everything that is parallel over chunks, on Hopper, of those that do not forget much."""
    from fastweight.kernels import hopper_solve_columns_gradient

    energies, residual, states = saved
    D = given.v.shape[3]
    start(
        hopper_solve_columns_gradient.backward_token, (where.slots * given.v.shape[2],),
        given.q, given.k, d_o, given.beta, given.lam, *given[5:], energies, residual, state_rows(states),
        state_rows(out.states), *seen, out.q, out.k, out.v, out.beta, out.lam, out.key0, *tables(where),
        float(plan.eps), float(plan.floor), H=given.v.shape[2], KH=given.q.shape[2], D=D, SHIFT=int(plan.shift),
        SCALED=plan.scaled, DIRECT=plan.direct, BEFORE=plan.before, num_warps=D // 16,
    )  # fmt: skip


def _backward_chunk(where, given, common, saved, out: Gradients, wild, blocks: int, steps, named) -> None:
    """The same for all chunks, or those of `wild`; what each block of columns gives is summed here."""
    tasks = where.slots * given.v.shape[2] * blocks
    programs = min(tasks, FEW_PROGRAMS * 256 // named["BV"])
    aside = given.v.new_empty(programs, 4, named["BV"], named["BK"])
    shared = out.q, out.k, out.lam, out.key0
    d_q, d_k, d_lam, d_key0 = (_one_per(blocks, tensor) for tensor in shared)
    start(
        solve_columns_gradient.backward_chunk, (programs,),
        *common, *saved, out.states, aside, d_q, d_k, out.v, out.beta, d_lam, d_key0, wild,
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
