"""Regression over a window on Hopper: the walk of hopper_windows.py in reverse.

With dZ and dF the gradients of Z and F, dW that of Y through this part, and all of them transposed,

    dZ^T = dS^T X^T    dW^T = dO^T A_w + dZ^T D_w    dF^T = dO^T A_f + dZ^T D_f - dW^T
    dS^T = carry dS^T + dF^T X + (dO .* decay)^T Q

dZ and dF are kept by slot.

Traps: as there. Neighbouring parts share WINDOW - 1 pairs, whose dW is handed down by a product with ones, in 16 bits.
No accumulator may be made by threads while other products go on, or the assembler has all of them wait.
"""

# pyright: basic, reportGeneralTypeIssues=false, reportArgumentType=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportOperatorIssue=false, reportReturnType=false
# pyright: reportOptionalMemberAccess=false, reportAssignmentType=false, reportPossiblyUnboundVariable=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from fastweight.kernels.hopper_parts import nil
from fastweight.kernels.hopper_windows import (
    COPY_16,
    LEFT_ONE,
    MIDDLE,
    NARROW,
    ONE,
    PAIR,
    STAGES,
    copy_part,
    decays_of,
    halves,
    own_place,
    part_number,
    put,
    shelf_of,
    state_offsets,
    state_shelves_of,
    tile_rings,
    whole_state,
    write_lines,
    write_rows,
)
from fastweight.kernels.tiles import segment_span


@gluon.jit
def _places(D: gl.constexpr):
    """Of dW of 16 pairs, row after row, which lies transposed."""
    row = gl.arange(0, 16, gl.SliceLayout(0, ONE)) + nil()
    return own_place(16 * D) + (row[None, :] * D + gl.arange(0, D, gl.SliceLayout(1, ONE))[:, None])


@gluon.jit
def _leave(
    shelves, d_v, lead_in, df, d_states, part, parts, begin, size, lead, h,
    H: gl.constexpr, D: gl.constexpr, WINDOW: gl.constexpr, PART: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    """Writes what the turn of `part`, if there was one, left in shared memory."""
    s_y, s_z, s_f, s_state0, s_state1 = shelves
    if part < parts:
        slot = part % 2
        number = part_number(lead, part, h, H, PARTS)
        last = gl.minimum(PART, size - part * PART)
        write_rows(s_y.index(slot), d_v, begin + part * PART, WINDOW - 1, 0, last, h, H, D)
        write_lines(s_z.index(slot), lead_in, number * (16 * D), D, D)
        write_lines(s_f.index(slot), df, number * (16 * D), D, D)
        if part % PARTS == PARTS - 1:
            write_lines(s_state0, d_states, number // PARTS * (D * D), D, D)
            if D == 128:
                write_lines(s_state1, d_states, number // PARTS * (D * D) + 64 * D, D, D)


@gluon.jit(do_not_specialize=["base", "per", "length", "chunks", "tokens"])
def backward_state(
    q, k, d_o, decay, maps, plane, d_state1, handed_in, d_v, lead_in, df, d_states, d_state0, handed_out, base, per,
    cu, chunk_start, length, chunks, tokens,
    H: gl.constexpr, KH: gl.constexpr, D: gl.constexpr, WINDOW: gl.constexpr, PART: gl.constexpr, PARTS: gl.constexpr,
    SHIFT: gl.constexpr, BEFORE: gl.constexpr,
):  # fmt: skip
    """Some blocks of one sequence of one head in reverse, `per` from block `base` on: dV, dZ (`lead_in`) and dF by
    slot, the blocks' state gradients, and dS at the beginning if asked. handed_in, handed_out: dW of the pairs that
    these blocks share with those behind and before them, if there are any."""
    dtype: gl.constexpr = q.dtype.element_ty
    h = gl.program_id(0) % H
    n, lead, start, stop, begin, size = segment_span(
        gl.program_id(0) // H, cu, chunk_start, length, chunks, 1, 2**30, PART * PARTS
    )
    kh = h // (H // KH)
    decay += h.to(gl.int64) * tokens + begin
    # Parts low to before `parts`. What is made is numbered by these blocks.
    low = (start + base) * PARTS
    parts = gl.minimum(stop, base + per) * PARTS
    begun = lead
    if cu is None:
        begun = n * gl.minimum(per, chunks) - base
    rings = tile_rings(dtype, D, True)
    keys0, keys1, values, s_maps = rings
    tiles = s_maps._reinterpret(dtype, [STAGES * 2, 16, 32], MIDDLE)
    s_y, s_z, s_f = shelf_of(dtype, D), shelf_of(dtype, D), shelf_of(dtype, D)
    s_state0, s_state1 = state_shelves_of(dtype, D)
    shelves = s_y, s_z, s_f, s_state0, s_state1
    # Takes a part's first pairs to the places that they have in the part before it.
    s_shift = gl.allocate_shared_memory(dtype, [16, 16], NARROW)
    r = gl.arange(0, 16, gl.SliceLayout(1, COPY_16))[:, None]
    c = gl.arange(0, 16, gl.SliceLayout(0, COPY_16))[None, :]
    s_shift.store(gl.where(c == r + PART, 1.0, 0.0).to(dtype))
    for turn in gl.static_range(2):
        copy_part(rings, turn, parts - 1 - turn, parts, q, k, d_o, maps, plane, lead, begin, size, h, kh,
              H, KH, D, WINDOW, PART, PARTS, SHIFT, True)  # fmt: skip
    S0 = whole_state(d_state1, 0, D)
    S1 = S0
    if D == 128:
        S1 = whole_state(d_state1, 1, D)
    if handed_in is None:
        handed = gl.zeros([D, 16], dtype, LEFT_ONE)
    else:
        handed = gl.convert_layout(gl.load(handed_in + _places(D)), LEFT_ONE)
    p = gl.arange(0, 16, gl.SliceLayout(0, LEFT_ONE))
    soon = decays_of(decay, p, parts - 1, size, PART, PARTS, BEFORE)
    for turn in range(0, parts - low):
        part = parts - 1 - turn
        stage = turn % STAGES
        power, before, after = soon
        soon = decays_of(decay, p, part - 1, size, PART, PARTS, BEFORE)
        # Behind this barrier: as in `forward`.
        async_copy.wait_group(1)
        fence_async_shared()
        gl.thread_barrier()
        pulled = values.index(stage).permute((1, 0)).load(LEFT_ONE)
        _leave(shelves, d_v, lead_in, df, d_states, part + 1, parts, begin, size, begun, h, H, D, WINDOW, PART, PARTS)
        copy_part(rings, turn + 2, part - 2, parts, q, k, d_o, maps, plane, lead, begin, size, h, kh,
              H, KH, D, WINDOW, PART, PARTS, SHIFT, True)  # fmt: skip
        low0 = S0.to(dtype)
        low1 = S1.to(dtype)
        dz = warpgroup_mma(
            gl.convert_layout(low0, LEFT_ONE), keys0.index(stage * 2).permute((1, 0)),
            gl.zeros([D, 16], gl.float32, ONE), use_acc=False, is_async=True,
        )  # fmt: skip
        if D == 128:
            dz = warpgroup_mma(
                gl.convert_layout(low1, LEFT_ONE), keys1.index(stage * 2).permute((1, 0)), dz, is_async=True
            )
        if part % PARTS == PARTS - 1:
            put(s_state0, low0)
            if D == 128:
                put(s_state1, low1)
        dz = warpgroup_mma_wait(0, deps=(dz,)).to(dtype)
        # dW, and beside it dF + dW.
        both = warpgroup_mma(pulled, tiles.index(stage * 2 + 1), gl.zeros([D, 32], gl.float32, PAIR), use_acc=False,
                             is_async=True)  # fmt: skip
        both = warpgroup_mma(gl.convert_layout(dz, LEFT_ONE), tiles.index(stage * 2), both, is_async=True)
        # What the part behind this one gave the pairs that both hold.
        later = warpgroup_mma(handed, s_shift, gl.zeros([D, 16], gl.float32, ONE), use_acc=False, is_async=True)
        pulled = (pulled.to(gl.float32) * gl.exp2(power - before)[None, :]).to(dtype)
        both, later = warpgroup_mma_wait(0, deps=(both, later))
        dw, d_f = halves(both, D)
        d_f = (d_f - dw).to(dtype)
        handed = gl.convert_layout(dw.to(dtype), LEFT_ONE)
        carry = gl.exp2(after - before)
        low_f = gl.convert_layout(d_f, LEFT_ONE)
        S0 = warpgroup_mma(low_f, keys0.index(stage * 2), S0 * carry, is_async=True)
        S0 = warpgroup_mma(pulled, keys0.index(stage * 2 + 1), S0, is_async=True)
        if D == 128:
            S1 = warpgroup_mma(low_f, keys1.index(stage * 2), S1 * carry, is_async=True)
            S1 = warpgroup_mma(pulled, keys1.index(stage * 2 + 1), S1, is_async=True)
        put(s_z.index(part % 2), dz)
        put(s_f.index(part % 2), d_f)
        put(s_y.index(part % 2), (dw + later).to(dtype))
        if D == 128:
            S0, S1 = warpgroup_mma_wait(0, deps=(S0, S1))
        else:
            S0 = warpgroup_mma_wait(0, deps=(S0,))
    async_copy.wait_group(0)
    gl.thread_barrier()
    _leave(shelves, d_v, lead_in, df, d_states, low, parts, begin, size, begun, h, H, D, WINDOW, PART, PARTS)
    if d_state0 is not None:
        gl.store(d_state0 + state_offsets(0, D), S0)
        if D == 128:
            gl.store(d_state0 + state_offsets(1, D), S1)
    if handed_out is not None:
        gl.store(handed_out + _places(D), gl.convert_layout(handed, ONE))
