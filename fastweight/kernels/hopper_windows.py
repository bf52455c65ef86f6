"""Regression over a window on Hopper: the walk, part after part, with what windows_parts.py makes of each part.

In bfloat16, with 64 or 128 key columns and as many value columns. One program walks one sequence of one head. A part's
tokens touch at most 16 pairs, and all that they do is linear in W = Y - F and F = X S by maps [16, 16] that every value
column shares. The state lies transposed, a row a value column, in the accumulators of the matrix units; what reads it
takes it from there, and what products make is the operand of the next ones as it lies in registers:

    F^T = S^T X^T    Z^T = W^T D_w^T + F^T D_f^T    O^T = (Q S)^T .* decay + W^T A_w^T + F^T A_f^T
    S^T = carry S^T + Z^T X

A part's tiles are copied while the two before it are worked on. What it leaves goes to shared memory, and from there to
the tensors while the next part is worked on. W is kept by slot, 16 a part, for the gradients of tokens.

Traps: all parts of a sequence's last block are walked, because what is kept of a block is read whole; past the end rows
are zeros, and nothing decays. What a turn leaves in shared memory is taken out in the next one and lies until the one
after that: two turns have room. Reads of shared memory by threads come first in a turn, then what writes to it, or the
compiler would have threads meet more often; at width 128 products begin after that, when few registers are needed.
"""

# pyright: basic, reportGeneralTypeIssues=false, reportArgumentType=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportOperatorIssue=false, reportReturnType=false
# pyright: reportOptionalMemberAccess=false, reportAssignmentType=false, reportPossiblyUnboundVariable=false
# ruff: noqa: SIM102, SIM108

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from fastweight.kernels.hopper_parts import SHARED, nil
from fastweight.kernels.tiles import segment_span

STAGES = gl.constexpr(3)
UNIT = gl.constexpr(512)  # numbers of one map of a part, of W and of F
NARROW = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=32, element_bitwidth=16, rank=2))
MIDDLE = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=16, rank=2))
# Accumulators [D, 64], [D, 32] and [D, 16], their operands, and copies of 64, 128, 32 and 16 columns.
STATE = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16]))
PAIR = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 32, 16]))
ONE = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 16, 16]))
LEFT = gl.constexpr(gl.DotOperandLayout(operand_index=0, parent=PAIR.value, k_width=2))
LEFT_ONE = gl.constexpr(gl.DotOperandLayout(operand_index=0, parent=ONE.value, k_width=2))
COPY_128 = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))
COPY_64 = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
COPY_32 = gl.constexpr(gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0]))
COPY_16 = gl.constexpr(gl.BlockedLayout([1, 8], [16, 2], [4, 1], [1, 0]))


@gluon.jit
def tile_rings(dtype: gl.constexpr, D: gl.constexpr, BACK: gl.constexpr):
    """Room for the tiles of STAGES parts: 64 columns of keys above those of queries, the other 64; values; maps.

    Buffers that are filled in one turn are apart, or the compiler would have threads meet in between.
    """
    keys0 = gl.allocate_shared_memory(dtype, [STAGES * 2, 16, 64], SHARED)
    keys1 = keys0
    if D == 128:
        keys1 = gl.allocate_shared_memory(dtype, [STAGES * 2, 16, 64], SHARED)
    values = gl.allocate_shared_memory(dtype, [STAGES, 16, D], SHARED)
    if BACK:
        maps = gl.allocate_shared_memory(dtype, [STAGES, 32, 32], MIDDLE)
    else:
        maps = gl.allocate_shared_memory(dtype, [STAGES, 64, 16], NARROW)
    return keys0, keys1, values, maps


@gluon.jit
def shelf_of(dtype: gl.constexpr, D: gl.constexpr):
    """Room for a tile that two turns leave."""
    return gl.allocate_shared_memory(dtype, [2, 16, D], SHARED)


@gluon.jit
def state_shelves_of(dtype: gl.constexpr, D: gl.constexpr):
    """Room for a state, 64 key columns after 64."""
    state0 = gl.allocate_shared_memory(dtype, [64, D], SHARED)
    state1 = state0
    if D == 128:
        state1 = gl.allocate_shared_memory(dtype, [64, D], SHARED)
    return state0, state1


@gluon.jit
def copy_part(
    rings, turn, part, parts, q, k, values, maps, plane, lead, begin, size, h, kh,
    H: gl.constexpr, KH: gl.constexpr, D: gl.constexpr, WINDOW: gl.constexpr, PART: gl.constexpr,
    PARTS: gl.constexpr, SHIFT: gl.constexpr, BACK: gl.constexpr,
):  # fmt: skip
    """Begins to copy the tiles of a part, which comes in its turn; zeros where there is no token, or no pair.

    values: of the pairs, or with BACK gradients of what tokens read. Rows of maps: W before F and writes before reads,
    or with BACK writes before reads.
    """
    keys0, keys1, s_values, s_maps = rings
    of_values: gl.constexpr = COPY_64 if D == 64 else COPY_128
    of_maps: gl.constexpr = COPY_32 if BACK else COPY_16
    stage = turn % STAGES
    first = begin + part * PART
    low = -part * PART
    high = size + low
    i = gl.arange(0, 16, gl.SliceLayout(1, COPY_64)) + nil()
    c = gl.arange(0, 64, gl.SliceLayout(0, COPY_64))
    j = i - (WINDOW - 1)
    keep = ((j < PART) & (j >= low + SHIFT) & (j < high))[:, None] & (c >= 0)[None, :]
    at = k + ((first - SHIFT) * KH + kh) * D + ((j * (KH * D))[:, None] + c[None, :])
    async_copy.async_copy_global_to_shared(keys0.index(stage * 2), at, mask=keep)
    if D == 128:
        async_copy.async_copy_global_to_shared(keys1.index(stage * 2), at + 64, mask=keep)
    i = gl.arange(0, 16, gl.SliceLayout(1, of_values)) + nil()
    c = gl.arange(0, D, gl.SliceLayout(0, of_values))
    if BACK:
        keep = (i < PART) & (i >= low) & (i < high)
    else:
        i -= WINDOW - 1
        keep = (i < PART) & (i >= low + SHIFT) & (i < high)
    at = values + (first * H + h) * D + ((i * (H * D))[:, None] + c[None, :])
    async_copy.async_copy_global_to_shared(s_values.index(stage), at, mask=keep[:, None] & (c >= 0)[None, :])
    r = gl.arange(0, 32 if BACK else 64, gl.SliceLayout(1, of_maps)) + nil()
    c = gl.arange(0, 32 if BACK else 16, gl.SliceLayout(0, of_maps))
    if BACK:
        at = r // 16 * (plane * UNIT)
    else:
        at = r % 32 // 16 * (plane * UNIT) + r // 32 * 16
    at += r % 16 * 32
    here = (part >= 0) & (part < parts)
    at = maps + part_number(lead, part, h, H, PARTS) * UNIT + (at[:, None] + c[None, :])
    async_copy.async_copy_global_to_shared(s_maps.index(stage), at, mask=((r >= 0) & here)[:, None] & (c >= 0)[None, :])
    i = gl.arange(0, 16, gl.SliceLayout(1, COPY_64)) + nil()
    c = gl.arange(0, 64, gl.SliceLayout(0, COPY_64))
    keep = ((i < PART) & (i >= low) & (i < high))[:, None] & (c >= 0)[None, :]
    at = q + (first * KH + kh) * D + ((i * (KH * D))[:, None] + c[None, :])
    async_copy.async_copy_global_to_shared(keys0.index(stage * 2 + 1), at, mask=keep)
    if D == 128:
        async_copy.async_copy_global_to_shared(keys1.index(stage * 2 + 1), at + 64, mask=keep)
    async_copy.commit_group()


@gluon.jit
def part_number(lead, part, h, H: gl.constexpr, PARTS: gl.constexpr):
    """Of a part among those of all heads; lead: number of the sequence's first block."""
    return ((lead + part // PARTS).to(gl.int64) * H + h) * PARTS + part % PARTS


@gluon.jit
def decays_of(decay, p, part, size, PART: gl.constexpr, PARTS: gl.constexpr, BEFORE: gl.constexpr):
    """log2 decays in a block: up to each read of a part, up to its first token, up to and with its last."""
    part = gl.maximum(part, 0)
    start = part * PART
    read = start + gl.minimum(p, PART - 1) - (1 if BEFORE else 0)
    here = (read >= part // PARTS * (PART * PARTS)) & (size > 0)
    power = gl.load(decay + gl.minimum(read, size - 1), mask=here, other=0.0)
    before = gl.load(decay + gl.minimum(start, size) - 1, mask=(part % PARTS > 0) & (size > 0), other=0.0)
    return power, before, gl.load(decay + gl.minimum(start + PART, size) - 1, mask=size > 0, other=0.0)


@gluon.jit
def own_place(size: gl.constexpr):
    """Where what a program has of its own begins, `size` numbers; made anew where it is used, not held for so long."""
    return (gl.program_id(0) + nil()).to(gl.int64) * size


@gluon.jit
def whole_state(pointer, half: gl.constexpr, D: gl.constexpr):
    """64 key columns of the program's state, transposed; zeros if there is none."""
    if pointer is None:
        return gl.zeros([D, 64], gl.float32, STATE)
    else:
        return gl.load(pointer + state_offsets(half, D)).to(gl.float32)


@gluon.jit
def state_offsets(half: gl.constexpr, D: gl.constexpr):
    """Of 64 key columns of a program's state, in 64 bits, which leaves one address to compute."""
    ck = (gl.arange(0, 64, gl.SliceLayout(0, STATE)) + nil()).to(gl.int64) + half * 64
    cv = (gl.arange(0, D, gl.SliceLayout(1, STATE)) + nil()).to(gl.int64)
    return own_place(D * D) + (ck[None, :] * D + cv[:, None])


@gluon.jit
def write_lines(stage, pointer, at, STRIDE: gl.constexpr, D: gl.constexpr):
    """Writes rows of D numbers, one after another or further apart, from number `at` on."""
    layout: gl.constexpr = COPY_64 if D == 64 else COPY_128
    row = (gl.arange(0, stage.shape[0], gl.SliceLayout(1, layout)) + nil())[:, None] * STRIDE
    gl.store(pointer + at + (row + gl.arange(0, D, gl.SliceLayout(0, layout))[None, :]), stage.load(layout))


@gluon.jit
def write_rows(stage, pointer, first, BEHIND: gl.constexpr, low, high, h, H: gl.constexpr, D: gl.constexpr):
    """Writes a tile [16, D] to rows of tokens, those from `low` to before `high`; row BEHIND is the token `first`."""
    layout: gl.constexpr = COPY_64 if D == 64 else COPY_128
    i = gl.arange(0, 16, gl.SliceLayout(1, layout)) + nil() - BEHIND
    at = (i * (H * D))[:, None] + gl.arange(0, D, gl.SliceLayout(0, layout))[None, :]
    gl.store(pointer + (first * H + h) * D + at, stage.load(layout), mask=((i >= low) & (i < high))[:, None])


@gluon.jit
def put(stage, tile):
    """What lies transposed in registers, to shared memory."""
    stage.permute((1, 0)).store(tile)


@gluon.jit
def halves(both, D: gl.constexpr):
    """The first and the last 16 columns of an accumulator [D, 32]."""
    first, last = gl.split(gl.permute(gl.reshape(both, [D, 2, 16]), (0, 2, 1)))
    return gl.convert_layout(first, ONE), gl.convert_layout(last, ONE)


@gluon.jit
def _leave(
    shelves, o, missed, states, part, begin, size, lead, h,
    H: gl.constexpr, D: gl.constexpr, PART: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    """Writes what the turn of `part`, if there was one, left in shared memory."""
    s_o, s_w, s_state0, s_state1 = shelves
    if part >= 0:
        slot = part % 2
        number = part_number(lead, part, h, H, PARTS)
        write_rows(s_o.index(slot), o, begin + part * PART, 0, 0, gl.minimum(PART, size - part * PART), h, H, D)
        if missed is not None:
            write_lines(s_w.index(slot), missed, number * (16 * D), D, D)
        if states is not None:
            if part % PARTS == 0:
                write_lines(s_state0, states, number // PARTS * (D * D), D, D)
                if D == 128:
                    write_lines(s_state1, states, number // PARTS * (D * D) + 64 * D, D, D)


@gluon.jit(do_not_specialize=["length", "chunks", "tokens"])
def forward(
    q, k, v, decay, maps, plane, state0, o, missed, states, state1,
    cu, chunk_start, length, chunks, tokens,
    H: gl.constexpr, KH: gl.constexpr, D: gl.constexpr, WINDOW: gl.constexpr, PART: gl.constexpr, PARTS: gl.constexpr,
    SHIFT: gl.constexpr, BEFORE: gl.constexpr,
):  # fmt: skip
    """One sequence of one head: o, the final state, and where given W by slot and the blocks' first states.

    maps: D of all parts, and `plane` maps further on A.
    """
    dtype: gl.constexpr = q.dtype.element_ty
    h = gl.program_id(0) % H
    _n, lead, start, stop, begin, size = segment_span(
        gl.program_id(0) // H, cu, chunk_start, length, chunks, 1, 2**30, PART * PARTS
    )
    kh = h // (H // KH)
    decay += h.to(gl.int64) * tokens + begin
    parts = (stop - start) * PARTS
    rings = tile_rings(dtype, D, False)
    keys0, keys1, values, s_maps = rings
    pairs0 = keys0._reinterpret(dtype, [STAGES, 32, 64], SHARED)
    pairs1 = keys1._reinterpret(dtype, [STAGES, 32, 64], SHARED)
    tiles = s_maps._reinterpret(dtype, [STAGES * 2, 32, 16], NARROW)
    s_o, s_w = shelf_of(dtype, D), shelf_of(dtype, D)
    s_state0, s_state1 = state_shelves_of(dtype, D)
    shelves = s_o, s_w, s_state0, s_state1
    for part in gl.static_range(2):
        copy_part(rings, part, part, parts, q, k, v, maps, plane, lead, begin, size, h, kh,
              H, KH, D, WINDOW, PART, PARTS, SHIFT, False)  # fmt: skip
    S0 = whole_state(state0, 0, D)
    S1 = S0
    if D == 128:
        S1 = whole_state(state0, 1, D)
    p = gl.arange(0, 32, gl.SliceLayout(0, PAIR)) - 16
    soon = decays_of(decay, p, 0, size, PART, PARTS, BEFORE)
    for part in range(0, parts):
        stage = part % STAGES
        power, before, after = soon
        soon = decays_of(decay, p, gl.minimum(part + 1, parts - 1), size, PART, PARTS, BEFORE)
        # Behind this barrier this part's tiles are there, what the last turn left is seen, and nobody needs what
        # it read, nor what the turn before it left.
        async_copy.wait_group(1)
        fence_async_shared()
        gl.thread_barrier()
        y = values.index(stage).permute((1, 0)).load(ONE).to(gl.float32)
        _leave(shelves, o, missed, states, part - 1, begin, size, lead, h, H, D, PART, PARTS)
        copy_part(rings, part + 2, part + 2, parts, q, k, v, maps, plane, lead, begin, size, h, kh,
              H, KH, D, WINDOW, PART, PARTS, SHIFT, False)  # fmt: skip
        low0 = S0.to(dtype)
        low1 = S1.to(dtype)
        # F, and beside it Q S.
        both = warpgroup_mma(
            gl.convert_layout(low0, LEFT), pairs0.index(stage).permute((1, 0)), gl.zeros([D, 32], gl.float32, PAIR),
            use_acc=False, is_async=True,
        )  # fmt: skip
        if D == 128:
            both = warpgroup_mma(
                gl.convert_layout(low1, LEFT), pairs1.index(stage).permute((1, 0)), both, is_async=True
            )
        if states is not None:
            if part % PARTS == 0:
                put(s_state0, low0)
                if D == 128:
                    put(s_state1, low1)
        both = warpgroup_mma_wait(0, deps=(both,))
        f, _read = halves(both, D)
        left = (y - f).to(dtype)
        # Z, and beside it O.
        both *= gl.where(p < 0, 0.0, gl.exp2(power - before))[None, :]
        both = warpgroup_mma(
            gl.convert_layout(left, LEFT_ONE), tiles.index(stage * 2).permute((1, 0)), both, is_async=True
        )
        both = warpgroup_mma(
            gl.convert_layout(f.to(dtype), LEFT_ONE), tiles.index(stage * 2 + 1).permute((1, 0)), both, is_async=True
        )
        both = warpgroup_mma_wait(0, deps=(both,))
        z, out = halves(both, D)
        z = z.to(dtype)
        carry = gl.exp2(after - before)
        S0 = warpgroup_mma(gl.convert_layout(z, LEFT_ONE), keys0.index(stage * 2), S0 * carry, is_async=True)
        if D == 128:
            S1 = warpgroup_mma(gl.convert_layout(z, LEFT_ONE), keys1.index(stage * 2), S1 * carry, is_async=True)
        put(s_o.index(part % 2), out.to(dtype))
        if missed is not None:
            put(s_w.index(part % 2), left)
        if D == 128:
            S0, S1 = warpgroup_mma_wait(0, deps=(S0, S1))
        else:
            S0 = warpgroup_mma_wait(0, deps=(S0,))
    async_copy.wait_group(0)
    gl.thread_barrier()
    _leave(shelves, o, missed, states, parts - 1, begin, size, lead, h, H, D, PART, PARTS)
    if state1 is not None:
        gl.store(state1 + state_offsets(0, D), S0)
        if D == 128:
            gl.store(state1 + state_offsets(1, D), S1)
