"""Regression over a window on Hopper: what a part gives itself, by products alone, for hopper_windows_tokens.py.

For blocks of four parts. A program takes one part of a block of one head, and of what the walks gave its pairs and
tokens Z = D [W; F] and M = [dO; dZ] [W; F]^T. Row (t, a) is pair t + a in the window of token t, 64 of them; sums over
rows are products: of what is by row with a matrix that says which pair, which token or which later tokens a row counts
for. With L = H M by row,

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

from fastweight.kernels.hopper_parts import ACC, LEFT, SHARED, arrive, copy_rows, nil
from fastweight.kernels.hopper_windows import (
    COPY_16,
    COPY_32,
    COPY_64,
    COPY_128,
    LEFT_ONE,
    MIDDLE,
    NARROW,
    ONE,
    PAIR,
    halves,
)
from fastweight.kernels.tiles import chunk_span, fade

FOLDS = gl.constexpr(4)  # parts of a block
FEW = gl.constexpr(gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[1, 4], instr_shape=[16, 8]))
FEW_LEFT = gl.constexpr(gl.DotOperandLayout(operand_index=0, parent=FEW.value, k_width=2))
FEW_RIGHT = gl.constexpr(gl.DotOperandLayout(operand_index=1, parent=FEW.value, k_width=2))
MANY = gl.constexpr(gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[2, 2], instr_shape=[16, 8]))
MANY_LEFT = gl.constexpr(gl.DotOperandLayout(operand_index=0, parent=MANY.value, k_width=2))
MANY_RIGHT = gl.constexpr(gl.DotOperandLayout(operand_index=1, parent=MANY.value, k_width=2))


@gluon.jit
def copy_lines(shared, pointer, row, keep, W: gl.constexpr, L: gl.constexpr):
    """Begins to copy rows of W numbers, or zeros."""
    at = row[:, None] * W + gl.arange(0, shared.shape[1], gl.SliceLayout(0, L))[None, :]
    async_copy.async_copy_global_to_shared(shared, pointer + at, mask=keep[:, None] & (at >= 0))


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
def _add_both(a0, a1, b0, b1):
    return a0 + b0, a1 + b1


@gluon.jit
def _at(decay, t, later):
    """log2 decays of a part's tokens, counted from its first; before that those of the part before, if there is one."""
    return gl.load(decay + t, mask=(t >= 0) | later, other=0.0)


@gluon.jit(do_not_specialize=["base", "per", "length", "chunks", "tokens"])
def inside(
    v, d_o, missed, lead, maps, gram, reads, weight, decay, rows, rows_back,
    wrote, own_gram, own_reads, own_log, own_weight,
    base, per, cu, chunk_seq, chunk_start, length, chunks, tokens,
    H: gl.constexpr, D: gl.constexpr, WINDOW: gl.constexpr, PART: gl.constexpr, SHIFT: gl.constexpr,
    BEFORE: gl.constexpr,
):  # fmt: skip
    """One part of a block of one head: Z; its own share of dG and d(Q X^T) [16, 16], and of what weights and log-decays
    get, by token. maps: those of writes."""
    WIDE: gl.constexpr = COPY_64 if D == 64 else COPY_128
    part = gl.program_id(0) % FOLDS
    h = gl.program_id(0) // FOLDS % H
    here = gl.program_id(0) // FOLDS // H + gl.program_id(2) * per
    block = here + base + gl.program_id(2) * (chunks - per)
    n, first, low, high = chunk_span(block, cu, chunk_seq, chunk_start, length, chunks, FOLDS * PART)
    start = part * PART
    left = gl.minimum(high - start, PART)
    if n < 0:
        return
    if left <= 0:
        return
    number = here.to(gl.int64) * H + h
    kept = (block.to(gl.int64) * H + h) * FOLDS + part
    dtype: gl.constexpr = rows.dtype.element_ty
    s_pulls = gl.allocate_shared_memory(dtype, [32, D], SHARED)
    s_w = gl.allocate_shared_memory(dtype, [16, D], SHARED)
    s_y = gl.allocate_shared_memory(dtype, [16, D], SHARED)
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
    r = gl.arange(0, 16, gl.SliceLayout(1, WIDE)) + nil()
    shelf = (number * FOLDS + part) * (16 * D)
    copy_rows(s_pulls.slice(0, 16), d_o, first + start, r, h, 0, r < left, H, D, WIDE)
    copy_lines(s_pulls.slice(16, 16), lead + shelf, r, r >= 0, D, WIDE)
    copy_lines(s_w, missed + kept * (16 * D), r, r >= 0, D, WIDE)
    i = r - (WINDOW - 1)
    keep = (i + start >= low + SHIFT) & (i < high - start)
    copy_rows(s_y, v, first + start, i, h, 0, keep, H, D, WIDE)
    own_number = number * FOLDS + part
    line = h.to(gl.int64) * tokens + first + start
    r = gl.arange(0, 64, gl.SliceLayout(1, COPY_32)) + nil()
    c = gl.arange(0, 32, gl.SliceLayout(0, COPY_32))
    at = own_number * (64 * 32) + (r[:, None] * 32 + c[None, :])
    real = (r // WINDOW < left)[:, None] & (c >= 0)[None, :]
    async_copy.async_copy_global_to_shared(s_b, rows + at, mask=real)
    async_copy.async_copy_global_to_shared(s_h, rows_back + at, mask=real)
    i = gl.arange(0, 64, gl.SliceLayout(1, COPY_16))[:, None]
    j = gl.arange(0, 16, gl.SliceLayout(0, COPY_16))[None, :]
    s_pair.store(gl.where(j == i // WINDOW + i % WINDOW, 1.0, 0.0).to(dtype))
    s_token.store(gl.where(j == i // WINDOW, 1.0, 0.0).to(dtype))
    s_behind.store(gl.where(j < i // WINDOW, 1.0, 0.0).to(dtype))
    i = gl.arange(0, 16, gl.SliceLayout(1, COPY_16))[:, None]
    s_since.store(gl.where(j < i if BEFORE else j <= i, 1.0, 0.0).to(dtype))
    # By row, and by token.
    tok, place, u = _places(WINDOW)
    last = gl.minimum(tok, left - 1)
    fading = decay + line
    w = gl.load(weight + line + last, mask=tok < left, other=0.0)
    g_row = _at(fading, last, part > 0)
    g_miss = _at(fading, last - 1, part > 0)
    g_begin = gl.load(fading - 1, mask=part > 0, other=0.0)
    g_end = gl.load(fading + left - 1)
    corner = own_number * 256
    # Rows of no token have any numbers, which nothing counts.
    held = gl.minimum(place, 15)[:, None]
    near = gl.arange(0, 16, gl.SliceLayout(0, ONE))[None, :]
    meets = gl.load(gram + kept * 256 + (held * 16 + near))
    sees = gl.load(reads + kept * 256 + (near * 16 + held))
    meets = gl.convert_layout(meets.to(dtype), LEFT_ONE)
    r = gl.arange(0, 16, gl.SliceLayout(1, FEW_LEFT))[:, None]
    c = gl.arange(0, 16, gl.SliceLayout(0, FEW_LEFT))[None, :]
    by_w = gl.load(maps + kept * 512 + (r * 32 + c))
    by_f = gl.load(maps + kept * 512 + 16 + (r * 32 + c))
    gl.thread_barrier()  # or the assembler would ask for these once the copies are there
    arrive()
    # M, whose F is what Y does not miss.
    pulls = s_pulls.load(MANY_LEFT)
    with_w = mma_v2(pulls, s_w.permute((1, 0)).load(MANY_RIGHT), gl.zeros([32, 16], gl.float32, MANY))
    with_y = mma_v2(pulls, s_y.permute((1, 0)).load(MANY_RIGHT), gl.zeros([32, 16], gl.float32, MANY))
    pieces = gl.reshape(gl.permute(gl.join(with_w, with_y - with_w), (0, 2, 1)), [32, 32])
    most = pieces.to(dtype)
    s_most.store(most)
    s_rest.store((pieces - most.to(gl.float32)).to(dtype))
    missing = s_w.load(FEW_RIGHT)
    found = (s_y.load(FEW_RIGHT).to(gl.float32) - missing.to(gl.float32)).to(dtype)
    z = mma_v2(by_f, found, mma_v2(by_w, missing, gl.zeros([16, D], gl.float32, FEW)))
    _shown()
    s_w.store(z.to(dtype))
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
    hr, felt_by = warpgroup_mma_wait(0, deps=(hr, felt_by))
    hr *= felt_by
    pairs = _fresh(meets, s_pair.permute((1, 0)), 64, ACC)
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
    felt = gl.where(tok[:, None] < u[None, :], felt + written[:, None], 0.0)
    felt -= gl.where(tok[:, None] > u[None, :], missed[:, None], 0.0)
    d_w = gl.where(tok[:, None] == u[None, :], d_w[:, None], 0.0)
    d_log, d_w = gl.reduce((felt, d_w), 0, _add_both)
    # Rows of one pair added up: by pairs of earlier rows, by tokens that read.
    gl.thread_barrier()
    r = gl.arange(0, 16, gl.SliceLayout(1, FEW))[:, None]
    c = gl.arange(0, 16, gl.SliceLayout(0, FEW))[None, :]
    nothing = gl.zeros([16, 16], gl.float32, FEW)
    d_read = mma_v2(s_reads.permute((1, 0)).load(FEW_LEFT), s_pair.load(FEW_RIGHT), nothing)
    d_pairs = mma_v2(s_pair.permute((1, 0)).load(FEW_LEFT), s_pairs.load(FEW_RIGHT), nothing)
    gl.store(own_reads + corner + (r * 16 + c), d_read.to(dtype))
    gl.store(own_gram + corner + (r * 16 + c), d_pairs.to(dtype))
    gl.store(own_log + line + u, d_log, mask=u < left)
    gl.store(own_weight + line + u, d_w, mask=u < left)
    at = gl.arange(0, 16, gl.SliceLayout(1, WIDE))[:, None] * D + gl.arange(0, D, gl.SliceLayout(0, WIDE))[None, :]
    gl.store(wrote + shelf + at, s_w.load(WIDE))
