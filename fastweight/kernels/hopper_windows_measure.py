"""Regression over a window on Hopper, what is measured before anything is walked: (q, k, gates) -> what parts need.

As windows_maps.py, but only what pairs and tokens of a part have in common: 16 x 16 numbers a part, in blocks of four
parts. `meet` makes X X^T and Q X^T of a block of one head, `take_facts` the facts of its tokens, a thread a token or
two, since it computes long: together, four warps would hold each token twice.
"""

# pyright: basic, reportGeneralTypeIssues=false, reportArgumentType=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportOperatorIssue=false, reportReturnType=false
# pyright: reportOptionalMemberAccess=false, reportAssignmentType=false, reportPossiblyUnboundVariable=false
# ruff: noqa: RUF005

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_wait

from fastweight.kernels.gates import load_head, step_log_decay, step_sizes
from fastweight.kernels.hopper_parts import HALF, SHARED, WHOLE, arrive, copy_rows, product, rows
from fastweight.kernels.hopper_windows_inside import FOLDS
from fastweight.kernels.tiles import chunk_span
from fastweight.kernels.windows_maps import store_facts, top_eigenvector

LANES = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))


@gluon.jit
def _keep_own(pointer, tile):
    """Writes of [64, 64] each row's 16 columns of its own part."""
    apart = gl.reshape(tile, [64, 4, 16])
    layout: gl.constexpr = apart.type.layout
    row = gl.arange(0, 64, gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None, None]
    part = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :, None]
    own = gl.sum(gl.where(row // 16 == part, apart, 0.0), axis=1)
    r = gl.arange(0, 64, gl.SliceLayout(1, own.type.layout))
    c = gl.arange(0, 16, gl.SliceLayout(0, own.type.layout))
    gl.store(pointer + (r[:, None] * 16 + c[None, :]), own)


@gluon.jit(do_not_specialize=["length", "chunks", "tokens"])
def meet(
    q, k, gram, reads, cu, chunk_seq, chunk_start, length, chunks, tokens,
    H: gl.constexpr, KH: gl.constexpr, D: gl.constexpr, WINDOW: gl.constexpr, PART: gl.constexpr,
    SHIFT: gl.constexpr,
):  # fmt: skip
    """X X^T and Q X^T [16, 16] of the parts of one block of one head."""
    layout: gl.constexpr = HALF if D == 64 else WHOLE
    h = gl.program_id(0) % H
    block = gl.program_id(0) // H
    n, first, low, high = chunk_span(block, cu, chunk_seq, chunk_start, length, chunks, FOLDS * PART)
    if n < 0:
        return
    kh = h // (H // KH)
    s_x = gl.allocate_shared_memory(k.dtype.element_ty, [64, D], SHARED)
    s_q = gl.allocate_shared_memory(k.dtype.element_ty, [64, D], SHARED)
    r = rows(layout)
    t = r // 16 * PART + r % 16
    i = t - (WINDOW - 1)
    copy_rows(s_x, k, first - SHIFT, i, kh, 0, (i >= low + SHIFT) & (i < high), KH, D, layout)
    copy_rows(s_q, q, first, t, kh, 0, (r % 16 < PART) & (t < high), KH, D, layout)
    arrive()
    keys = product(s_x, s_x.permute((1, 0)))
    seen = product(s_q, s_x.permute((1, 0)))
    keys, seen = warpgroup_mma_wait(0, deps=(keys, seen))
    at = (block.to(gl.int64) * H + h) * (FOLDS * 256)
    _keep_own(gram + at, keys)
    _keep_own(reads + at, seen)


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit(do_not_specialize=["length", "chunks", "tokens"])
def take_facts(
    gram, beta, lam, weight, decay, facts, cu, chunk_seq, chunk_start, length, chunks, tokens, eps, floor,
    H: gl.constexpr, WINDOW: gl.constexpr, PART: gl.constexpr, SHIFT: gl.constexpr, SCALED: gl.constexpr,
    DIRECT: gl.constexpr,
):  # fmt: skip
    """Weights, cumulative log-decays and facts of the tokens of one block of one head."""
    TOKENS: gl.constexpr = FOLDS * PART
    h = gl.program_id(0) % H
    block = gl.program_id(0) // H
    n, first, low, high = chunk_span(block, cu, chunk_seq, chunk_start, length, chunks, TOKENS)
    if n < 0:
        return
    t = gl.arange(0, 32 if TOKENS <= 32 else 64, LANES)
    own = (t < TOKENS) & (t < high)
    at = gram + (block.to(gl.int64) * H + h) * (FOLDS * 256) + (t // PART * 256 + t % PART * 17)
    entries = ()
    for a in gl.static_range(WINDOW):
        for b in gl.static_range(a + 1):
            entries = entries + (gl.load(at + (a * 16 + b), mask=own, other=0.0),)
    energy, vector = top_eigenvector(entries, WINDOW)
    count = gl.maximum(gl.minimum(t - low - SHIFT + 1, WINDOW), 1).to(gl.float32)
    energy /= count
    writes = own & (t >= low + SHIFT)
    gain = load_head(beta, first, t, h, H, writes, 1.0)
    ridge = load_head(lam, first, t, h, H, writes, 0.0)
    eta, _r, _d, alpha, carry, _o, writes = step_sizes(energy, gain, ridge, writes, eps, floor, SCALED, DIRECT)
    line = h.to(gl.int64) * tokens + first
    log_decay = gl.where(writes, step_log_decay(alpha, carry, floor), 0.0)
    gl.store(weight + line + t, eta / count, mask=own)
    gl.store(decay + line + t, gl.associative_scan(log_decay, 0, _add), mask=own)
    store_facts(facts, h, tokens, first, t, own, energy, count, gl.where(writes, carry, 1.0), vector, WINDOW)
