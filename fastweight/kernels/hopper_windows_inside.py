"""Regression over a window on Hopper: what `inside` of windows_gradient.py computes, by products alone.

For blocks of four parts. A program takes one part of a block of one head. Row (t, a) is pair t + a in the
window of token t, 64 of them; sums over rows are products: of what is by row with a matrix that says which pair, which
token or which later tokens a row counts for. With L = H M by row,

    h r^T = L B^T    [dO r^T; dz r^T]^T = B M^T    dG_t,s = -decay w_t w_s h_t . r_s    dP_t,s = decay w_s dO_t . r_s

Of log-decays' gradients there is a table [row s, token u]: what s gave and u's decay faded; its columns are added up.

Traps: M is multiplied in two pieces of 8 bits. Rows of no token have no numbers in memory, and are zeros here. Places
are made anew where they are used: what is held for later costs more than it does to make.
"""

# pyright: basic, reportGeneralTypeIssues=false, reportArgumentType=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportOperatorIssue=false, reportReturnType=false
# pyright: reportOptionalMemberAccess=false, reportAssignmentType=false, reportPossiblyUnboundVariable=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mma_v2,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from fastweight.kernels.gates import load_head, step_gradient, store_head
from fastweight.kernels.hopper_parts import ACC, FLAT, LEFT, SHARED, arrive, nil
from fastweight.kernels.hopper_windows import COPY_16, COPY_32, LEFT_ONE, MIDDLE, NARROW, ONE, PAIR, halves
from fastweight.kernels.tiles import chunk_span, fade
from fastweight.kernels.windows_maps import COUNT, ENERGY, VECTOR

FOLDS = gl.constexpr(4)  # parts of a block
FEW = gl.constexpr(gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[1, 4], instr_shape=[16, 8]))
FEW_LEFT = gl.constexpr(gl.DotOperandLayout(operand_index=0, parent=FEW.value, k_width=2))
FEW_RIGHT = gl.constexpr(gl.DotOperandLayout(operand_index=1, parent=FEW.value, k_width=2))


@gluon.jit
def _fresh(a, b, N: gl.constexpr, L: gl.constexpr):
    """Begins a b, [64, N]."""
    return warpgroup_mma(a, b, gl.zeros([64, N], gl.float32, L), use_acc=False, is_async=True)


@gluon.jit
def _shown():
    """What threads wrote to shared memory, to the products of all warps."""
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def _places(WINDOW: gl.constexpr):
    """Token and pair of each row, made anew where they are used; 0 .. 15 along what lies across."""
    r = gl.arange(0, 64, gl.SliceLayout(1, ONE)) + nil()
    return r // WINDOW, r // WINDOW + r % WINDOW, gl.arange(0, 16, gl.SliceLayout(0, ONE)) + nil()


@gluon.jit
def _at(decay, t, later):
    """log2 decays of a part's tokens, counted from its first; before that those of the part before, if there is one."""
    return gl.load(decay + t, mask=(t >= 0) | later, other=0.0)


@gluon.jit(do_not_specialize=["base", "length", "chunks", "tokens"])
def inside(
    beta, lam, gram, reads, weight, decay, facts, rows, rows_back, met, read, through, d_gram, d_reads, d_beta, d_lam,
    base, cu, chunk_seq, chunk_start, length, chunks, tokens, eps, floor,
    H: gl.constexpr, WINDOW: gl.constexpr, PART: gl.constexpr, SHIFT: gl.constexpr, SCALED: gl.constexpr,
    DIRECT: gl.constexpr, BEFORE: gl.constexpr,
):  # fmt: skip
    """One part of a block of one head: its own share of dG and d(Q X^T), and the gradients of beta and lam."""
    part = gl.program_id(0) % FOLDS
    h = gl.program_id(0) // FOLDS % H
    here = gl.program_id(0) // FOLDS // H
    n, first, low, high = chunk_span(here + base, cu, chunk_seq, chunk_start, length, chunks, FOLDS * PART)
    start = part * PART
    left = gl.minimum(high - start, PART)
    if n < 0:
        return
    if left <= 0:
        return
    number = here.to(gl.int64) * H + h
    matrix = number * (64 * 64)
    dtype: gl.constexpr = rows.dtype.element_ty
    s_b = gl.allocate_shared_memory(dtype, [64, 32], MIDDLE)
    s_h = gl.allocate_shared_memory(dtype, [64, 32], MIDDLE)
    s_most = gl.allocate_shared_memory(dtype, [32, 32], MIDDLE)
    s_rest = gl.allocate_shared_memory(dtype, [32, 32], MIDDLE)
    s_gram = gl.allocate_shared_memory(dtype, [64, 64], SHARED)
    s_flow = gl.allocate_shared_memory(dtype, [64, 64], SHARED)
    s_pairs = gl.allocate_shared_memory(dtype, [64, 16], NARROW)
    s_reads = gl.allocate_shared_memory(dtype, [64, 16], NARROW)
    # Which pair a row is, and which token; the tokens before it; the tokens from a token on.
    s_pair = gl.allocate_shared_memory(dtype, [64, 16], NARROW)
    s_token = gl.allocate_shared_memory(dtype, [64, 16], NARROW)
    s_behind = gl.allocate_shared_memory(dtype, [64, 16], NARROW)
    s_since = gl.allocate_shared_memory(dtype, [16, 16], NARROW)
    i = gl.arange(0, 64, gl.SliceLayout(1, COPY_16))[:, None]
    j = gl.arange(0, 16, gl.SliceLayout(0, COPY_16))[None, :]
    s_pair.store(gl.where(j == i // WINDOW + i % WINDOW, 1.0, 0.0).to(dtype))
    s_token.store(gl.where(j == i // WINDOW, 1.0, 0.0).to(dtype))
    s_behind.store(gl.where(j < i // WINDOW, 1.0, 0.0).to(dtype))
    i = gl.arange(0, 16, gl.SliceLayout(1, COPY_16))[:, None]
    s_since.store(gl.where(j < i if BEFORE else j <= i, 1.0, 0.0).to(dtype))
    own_number = number * FOLDS + part
    line = h.to(gl.int64) * tokens + first + start
    r = gl.arange(0, 64, gl.SliceLayout(1, COPY_32)) + nil()
    c = gl.arange(0, 32, gl.SliceLayout(0, COPY_32))
    at = own_number * (64 * 32) + (r[:, None] * 32 + c[None, :])
    real = (r // WINDOW < left)[:, None] & (c >= 0)[None, :]
    async_copy.async_copy_global_to_shared(s_b, rows + at, mask=real)
    async_copy.async_copy_global_to_shared(s_h, rows_back + at, mask=real)
    r = gl.arange(0, 32, gl.SliceLayout(1, COPY_32)) + nil()
    pieces = gl.load(met + own_number * (32 * 32) + (r[:, None] * 32 + c[None, :]))
    most = pieces.to(dtype)
    s_most.store(most)
    s_rest.store((pieces - most.to(gl.float32)).to(dtype))
    # By row, and by token.
    tok, place, u = _places(WINDOW)
    last = gl.minimum(tok, left - 1)
    fading = decay + line
    w = gl.load(weight + line + last, mask=tok < left, other=0.0)
    g_row = _at(fading, last, part > 0)
    g_miss = _at(fading, last - 1, part > 0)
    g_begin = gl.load(fading - 1, mask=part > 0, other=0.0)
    g_end = gl.load(fading + left - 1)
    corner = matrix + start * 65
    arrive()
    lead = _fresh(s_h, s_most, 32, PAIR)
    lead = warpgroup_mma(s_h, s_rest, lead, is_async=True)
    back = _fresh(s_b, s_most.permute((1, 0)), 32, PAIR)
    back = warpgroup_mma(s_b, s_rest.permute((1, 0)), back, is_async=True)
    # How each row is felt by those of later tokens.
    now = gl.minimum(u, left - 1)
    step = gl.load(weight + line + now, mask=u < left, other=0.0)
    felt_by = fade(tok[:, None] > u[None, :], g_miss[:, None] - _at(fading, now, part > 0)[None, :])
    felt_by = gl.convert_layout((felt_by * (-w[:, None] * step[None, :])).to(dtype), LEFT_ONE)
    lead, back = warpgroup_mma_wait(0, deps=(lead, back))
    d_w = gl.convert_layout(gl.sum(lead * s_b.load(PAIR).to(gl.float32), axis=1), gl.SliceLayout(1, ONE))
    _pairs, missed = halves(lead, 64)
    by_read, written = halves(back, 64)
    mine = u[None, :] == place[:, None]
    missed = gl.sum(gl.where(mine, missed, 0.0), axis=1) * (w * gl.exp2(g_miss - g_begin))
    written = gl.sum(gl.where(mine, written, 0.0), axis=1) * (w * gl.exp2(g_end - g_row))
    g_read = _at(fading, now - (1 if BEFORE else 0), part > 0)
    seen = (u[None, :] > tok[:, None] if BEFORE else u[None, :] >= tok[:, None]) & (u < left)[None, :]
    by_read *= fade(seen, g_read[None, :] - g_row[:, None]) * w[:, None]
    s_reads.store(by_read.to(dtype))
    hr = _fresh(gl.convert_layout(lead.to(dtype), LEFT), s_b.permute((1, 0)), 64, ACC)
    felt_by = _fresh(felt_by, s_token.permute((1, 0)), 64, ACC)
    _tok, place, u = _places(WINDOW)
    meets = gl.load(gram + corner + (place[:, None] * 64 + u[None, :]), mask=(place < 16)[:, None], other=0.0)
    meets = gl.convert_layout(meets.to(dtype), LEFT_ONE)
    hr, felt_by = warpgroup_mma_wait(0, deps=(hr, felt_by))
    hr *= felt_by
    pairs = _fresh(meets, s_pair.permute((1, 0)), 64, ACC)
    sees = gl.load(reads + corner + (u[None, :] * 64 + place[:, None]),
                   mask=(place < 16)[:, None] & (u < left)[None, :], other=0.0)  # fmt: skip
    sees = gl.convert_layout((by_read * sees).to(dtype), LEFT_ONE)
    pairs = warpgroup_mma_wait(0, deps=(pairs,))
    s_gram.store(hr.to(dtype))
    s_flow.store((hr * pairs).to(dtype))
    _shown()
    felt = _fresh(sees, s_since, 16, ONE)
    felt = warpgroup_mma(s_flow.permute((1, 0)), s_behind, felt, is_async=True)
    by_pair = _fresh(s_gram.permute((1, 0)), s_pair, 16, ONE)
    felt, by_pair = warpgroup_mma_wait(0, deps=(felt, by_pair))
    s_pairs.store(by_pair.to(dtype))
    tok, _place, u = _places(WINDOW)
    r = gl.arange(0, 64, gl.SliceLayout(1, ONE)) + nil()
    felt = gl.where(tok[:, None] < u[None, :], felt + written[:, None], 0.0)
    felt -= gl.where(tok[:, None] > u[None, :], missed[:, None], 0.0)
    pulls = gl.load(read + line + r, mask=r < left, other=0.0)
    felt += gl.where(r[:, None] > u[None, :] if BEFORE else r[:, None] >= u[None, :], pulls[:, None], 0.0)
    d_log = gl.sum(felt, axis=0) + gl.load(through + number * 16 + part)
    d_w = gl.sum(gl.where(tok[:, None] == u[None, :], d_w[:, None], 0.0), axis=0)
    d_log = gl.convert_layout(d_log, FLAT)
    d_w = gl.convert_layout(d_w, FLAT)
    t = gl.arange(0, 16, FLAT) + nil()
    shelf = facts + h.to(gl.int64) * (tokens * (VECTOR + WINDOW)) + first + start
    live = t < left
    energy = gl.load(shelf + (ENERGY * tokens + t), mask=live, other=0.0)
    count = gl.load(shelf + (COUNT * tokens + t), mask=live, other=1.0)
    writes = live & (t - SHIFT >= low - start)
    gain = load_head(beta, first + start, t, h, H, writes, 1.0)
    ridge = load_head(lam, first + start, t, h, H, writes, 0.0)
    d_gain, d_ridge, d_energy = step_gradient(
        d_w / count, d_log, energy, gain, ridge, writes, eps, floor, SCALED, DIRECT, False
    )
    store_head(d_beta, d_gain, first + start, t, h, H, live)
    store_head(d_lam, d_ridge, first + start, t, h, H, live)
    # Rows of one pair added up: by pairs of earlier rows, by tokens that read.
    _shown()
    p = gl.arange(0, 16, gl.SliceLayout(1, FEW))[:, None] + nil()
    c = gl.arange(0, 16, gl.SliceLayout(0, FEW))[None, :] + nil()
    which = s_pair.permute((1, 0)).load(FEW_LEFT)
    nothing = gl.zeros([16, 16], gl.float32, FEW)
    d_read = mma_v2(which, s_reads.load(FEW_RIGHT), nothing)
    d_pairs = mma_v2(which, s_pairs.load(FEW_RIGHT), nothing)
    if not DIRECT:
        # d mu u u^T of each window.
        vectors = shelf + VECTOR * tokens
        keep = (p >= c) & (p < c + WINDOW) & (c < left)
        by_pair = gl.load(vectors + ((p - c) * tokens + c), mask=keep, other=0.0)
        t = gl.arange(0, 16, gl.SliceLayout(1, FEW_RIGHT))[:, None] + nil()
        q = gl.arange(0, 16, gl.SliceLayout(0, FEW_RIGHT))[None, :] + nil()
        keep = (q >= t) & (q < t + WINDOW) & (t < left)
        by_token = gl.load(vectors + ((q - t) * tokens + t), mask=keep, other=0.0)
        by_token *= gl.convert_layout(d_energy / count, gl.SliceLayout(1, FEW_RIGHT))[:, None]
        d_pairs = mma_v2(gl.convert_layout(by_pair.to(dtype), FEW_LEFT), by_token.to(dtype), d_pairs)
    at = d_reads + matrix + (start * 64 + part * 16) + (c * 64 + p)
    gl.store(at, d_read.to(dtype), mask=(c < PART) & (p >= 0))
    at = d_gram + matrix + part * (16 * 65) + (p * 64 + c)
    gl.store(at, d_pairs.to(dtype))
