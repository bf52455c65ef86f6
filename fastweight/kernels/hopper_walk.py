"""What the walks on Hopper share: a program's part of the work, tiles by TMA, and the numbers of every token.

A program takes one segment of one head for 64 columns. Tiles of a chunk come into rings, each with barriers of its own.
The numbers of a token, powers of its decays and steps, are made once a chunk, one thread a token, one chunk ahead of
their use, and read from shared memory as rows and columns.

Traps: a stage is fetched into only behind a thread barrier after the last use of what it held. A rate is kept for two
chunks: written for the next while this one's is read. A load by TMA may begin at a negative row and finds zeros there;
a store that does is an illegal instruction.
"""

# pyright: basic, reportGeneralTypeIssues=false, reportArgumentType=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportOperatorIssue=false, reportReturnType=false
# pyright: reportOptionalMemberAccess=false, reportAssignmentType=false
# ruff: noqa: RUF005

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from fastweight.kernels.hopper_parts import FLAT, LINE
from fastweight.kernels.reach import FADED

# What `rates_of` holds of every token.
FELT = gl.constexpr(0)  # decay up to it, as its residual sees the state
KEPT = gl.constexpr(1)  # its step, as the chunk's end sees it
READ = gl.constexpr(2)  # decay up to it, as its read sees the state
STEP = gl.constexpr(3)
DECAY = gl.constexpr(4)  # log2
READ_DECAY = gl.constexpr(5)


@gluon.jit
def rings_of(descs, STAGES: gl.constexpr):
    """Shared memory for STAGES tiles of each descriptor, and a barrier for each."""
    rings = ()
    bars = ()
    for t in gl.static_range(len(descs)):
        rings = rings + (gl.allocate_shared_memory(descs[t].dtype, [STAGES] + descs[t].block_shape, descs[t].layout),)
        bar = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        for stage in gl.static_range(STAGES):
            mbarrier.init(bar.index(stage), count=1)
        bars = bars + (bar,)
    fence_async_shared()
    return rings, bars


@gluon.jit
def keep_barriers(bars):
    """Last of a kernel: their memory is never lent to data, over which a context switch would put their state back."""
    for t in gl.static_range(len(bars)):
        bars[t]._keep_alive()


@gluon.jit
def fetch(descs, rings, bars, stage, coords, wanted):
    """Starts the copy of one chunk's tiles. Barriers apart, so that only one thread barrier comes between."""
    for t in gl.static_range(len(descs)):
        mbarrier.expect(bars[t].index(stage), descs[t].block_type.nbytes, pred=wanted)
    for t in gl.static_range(len(descs)):
        tma.async_copy_global_to_shared(descs[t], coords[t], bars[t].index(stage), rings[t].index(stage), pred=wanted)


@gluon.jit
def load_rates(eta, decay, line, first, high, i, WHOLE: gl.constexpr):
    """Step, cumulative log2 decay, the same one row before (if not WHOLE), and at the chunk's end."""
    a = gl.load(eta + line + first + i, mask=i < high, other=0.0)
    g = gl.load(decay + line + first + gl.minimum(i, high - 1))
    g_last = gl.load(decay + line + first + gl.minimum(63, high - 1))
    before = g
    if not WHOLE:
        before = gl.load(decay + line + first - 1 + gl.minimum(i, high), mask=i > 0, other=0.0)
    return a, g, before, g_last


@gluon.jit
def rates_of(BEFORE: gl.constexpr):
    """Room for the rates of two chunks; decays are held once where reads see the same."""
    r0 = gl.allocate_shared_memory(gl.float32, [2, 64], LINE)
    r1 = gl.allocate_shared_memory(gl.float32, [2, 64], LINE)
    r2 = gl.allocate_shared_memory(gl.float32, [2, 64], LINE)
    r3 = gl.allocate_shared_memory(gl.float32, [2, 64], LINE)
    r4 = gl.allocate_shared_memory(gl.float32, [2, 64], LINE)
    r5 = r4
    if BEFORE:
        r5 = gl.allocate_shared_memory(gl.float32, [2, 64], LINE)
    return r0, r1, r2, r3, r4, r5


@gluon.jit
def keep_rates(rates, slot, loaded, DECAYED: gl.constexpr, BEFORE: gl.constexpr):
    a, g, before, g_last = loaded
    g_res = g if DECAYED else before
    g_read = before if BEFORE else g
    rates[FELT].index(slot).store(gl.exp2(g_res))
    rates[KEPT].index(slot).store(a * gl.exp2(g_last - g))
    rates[READ].index(slot).store(gl.exp2(g_read))
    rates[STEP].index(slot).store(a)
    rates[DECAY].index(slot).store(g)
    if BEFORE:
        rates[READ_DECAY].index(slot).store(g_read)
    return gl.exp2(g_last)


@gluon.jit
def row(rates, slot, WHICH: gl.constexpr, layout: gl.constexpr):
    return rates[WHICH].index(slot).load(gl.SliceLayout(0, layout))[None, :]


@gluon.jit
def weigh(p, rates, slot, BEFORE: gl.constexpr, layout: gl.constexpr):
    """Q X^T to what each read sees of each step."""
    down: gl.constexpr = gl.SliceLayout(1, layout)
    i = gl.arange(0, 64, layout=down)[:, None]
    j = gl.arange(0, 64, layout=gl.SliceLayout(0, layout))[None, :]
    seen = i > j if BEFORE else i >= j
    power = rates[READ_DECAY].index(slot).load(down)[:, None] - row(rates, slot, DECAY, layout)
    return p * (gl.exp2(gl.where(seen, power, float("-inf"))) * row(rates, slot, STEP, layout))


@gluon.jit
def whose(pid, blocks, H: gl.constexpr):
    """Column block, head and segment of a program."""
    return pid % blocks, (pid // blocks) % H, pid // (blocks * H)


@gluon.jit
def span(seg, chunks, segments, per_segment):
    """Sequence and first chunk of a segment, and how many chunks it has."""
    n = seg // segments
    start = (seg - n * segments) * per_segment
    return n, start, gl.minimum(start + per_segment, chunks) - start


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def within_reach(left, lead, h, start, count, H: gl.constexpr, BACK: gl.constexpr):
    """How many chunks of a segment matter at its start (its end, if BACK), and log2 of what all of it leaves.

    left: what each chunk leaves, of reach.py; lead: number of the sequence's first chunk.
    """
    lane = gl.arange(0, 128, layout=FLAT)
    needed = count * 0
    total = 0.0
    for at in range(0, count, 128):
        far = at + lane
        c = start + count - 1 - far if BACK else start + far
        here = gl.load(left + (lead + c).to(gl.int64) * H + h, mask=far < count, other=0.0)
        between = total + gl.associative_scan(here, 0, _add) - here
        needed = gl.maximum(needed, gl.max(gl.where((far < count) & (between > FADED), far + 1, 0), axis=0))
        total += gl.sum(here, axis=0)
    return needed, total


@gluon.jit
def state_offsets(seg, h, block, H: gl.constexpr, K: gl.constexpr, V: gl.constexpr, layout: gl.constexpr):
    """Offsets of a program's columns, transposed, in states [segments, H, K, V]."""
    ck = gl.arange(0, K, layout=gl.SliceLayout(0, layout))
    cv = gl.arange(0, 64, layout=gl.SliceLayout(1, layout)) + block * 64
    return (seg.to(gl.int64) * H + h) * (K * V) + (ck[None, :] * V + cv[:, None])
