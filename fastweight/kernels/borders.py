"""One sequence over several devices: what lies at a border between two of them, forward and in reverse.

A rank's tokens do S -> M S + b to any state. Its first E tokens are the edge: what they write needs pairs of the rank
before, so the walks of a rank do not see them write (they have no pair there, or a gain of 0), and here they are taken
one by one, in float32, between the state that comes in and the one that the walk begins with:

    S before rank r --edge of r--> --M_r S + b_r--> S before rank r + 1      E = WINDOW - 1 + SHIFT

so a message holds b, M (a matrix, or log2 of a decay per head or per column), and of the edges on both sides the pairs
and gates. With these everybody computes every state it needs, and in reverse the gradients of both of its borders: the
last pairs of a rank are of its own tokens, those that write them are of the next one's.

    leave    pieces of this rank joined to one map, into its message     return_  the same for gradients, in reverse
    arrive   all messages -> the state at the start of every piece       recede   the gradient at the end of every piece

edges.py has what an edge does, edges_gradient.py its gradients.

Traps: with a window the walk lets all edge tokens read the state behind the edge, which is right for the last of them
only. `arrive` makes the reads of the others, and in reverse their share is taken out before the edge and put in again
where it belongs. A message is written in float32 whatever the inputs are. Matrices act through memory, a few rows at a
time, as in solve.py's `compose`: barriers stand before and behind, because one place is used again and again.
"""

# pyright: basic, reportGeneralTypeIssues=false, reportArgumentType=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportOperatorIssue=false, reportReturnType=false
# pyright: reportOptionalMemberAccess=false, reportPossiblyUnboundVariable=false
# ruff: noqa: SIM108

import triton
import triton.language as tl

from fastweight.kernels.additive import piece_decays
from fastweight.kernels.edges import edge_back, edge_forth, load_columns, store_columns, without_reads
from fastweight.kernels.tiles import state_tile


@triton.jit
def through(maps, S, place, ck, cv, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
            REVERSE: tl.constexpr):  # fmt: skip
    """M S, or with REVERSE M^T S, for columns cv of S [BK, BV]; `place` [K, V] is overwritten with S."""
    at, inside = state_tile(ck, cv, K, V, BK, BV)
    tl.debug_barrier()
    tl.store(place + at, S, mask=inside)
    tl.debug_barrier()
    S = tl.zeros_like(S)
    for start in range(0, K, 32):
        row = start + tl.arange(0, 32)
        part_at, in_part = state_tile(row, cv, K, V, 32, BV)
        part = tl.load(place + part_at, mask=in_part & (row < K)[:, None], other=0.0)
        if REVERSE:
            m_at = row[None, :] * K + ck[:, None]
        else:
            m_at = ck[:, None] * K + row[None, :]
        m = tl.load(maps + m_at, mask=(ck < K)[:, None] & (row < K)[None, :], other=0.0)
        S = tl.dot(m, part, acc=S, input_precision="tf32x3")
    tl.debug_barrier()
    return S


@triton.jit
def moved(maps, S, place, ck, cv, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
          MATRIX: tl.constexpr, COLUMN: tl.constexpr, REVERSE: tl.constexpr):  # fmt: skip
    """What a map without its b makes of a state, or with REVERSE of a gradient."""
    if MATRIX:
        return through(maps, S, place, ck, cv, K, V, BK, BV, REVERSE)
    elif COLUMN:
        return S * tl.exp2(tl.load(maps + cv, mask=cv < V, other=0.0))[None, :]
    else:
        return S * tl.exp2(tl.load(maps))


@triton.jit
def _copy_row(source, at, col, target, W: tl.constexpr):
    tl.store(target + col, tl.load(source + at + col, mask=col < W, other=0.0).to(tl.float32), mask=col < W)


@triton.jit
def _number(source, at):
    return tl.load(source + at).to(tl.float32)


@triton.jit
def write_edges(
    message, before, k, v, beta, lam, n, h, length, ck, cw, H: tl.constexpr, KH: tl.constexpr, K: tl.constexpr,
    V: tl.constexpr, WINDOW: tl.constexpr, SHIFT: tl.constexpr, COLUMN: tl.constexpr,
):  # fmt: skip
    """The pairs and gates on both sides of a rank's tokens; `before`, where given, becomes a tail of no pairs."""
    EDGE: tl.constexpr = WINDOW - 1 + SHIFT
    kh = h // (H // KH)
    first = n.to(tl.int64) * length
    for i in tl.static_range(WINDOW):
        _copy_row(k, ((first + length - WINDOW + i) * KH + kh) * K, ck, message + i * K, K)
    message += WINDOW * K
    for i in tl.static_range(WINDOW - 1):
        _copy_row(v, ((first + length - WINDOW + 1 + i) * H + h) * V, cw, message + i * V, V)
    message += (WINDOW - 1) * V
    tl.store(message, WINDOW - 1.0)
    tl.store(message + 1, 1.0)
    message += 2
    for i in tl.static_range(WINDOW - 1):
        _copy_row(k, ((first + i) * KH + kh) * K, ck, message + i * K, K)
    message += (WINDOW - 1) * K
    for i in tl.static_range(EDGE):
        _copy_row(v, ((first + i) * H + h) * V, cw, message + i * V, V)
    message += EDGE * V
    for i in tl.static_range(EDGE):
        token = (first + i) * H + h
        if COLUMN:
            _copy_row(beta, token * V, cw, message + i * V, V)
        else:
            tl.store(message + i, 1.0 if beta is None else _number(beta, token))
    message += EDGE * V if COLUMN else EDGE
    for i in tl.static_range(EDGE):
        tl.store(message + i, 0.0 if lam is None else _number(lam, (first + i) * H + h))
    if before is not None:
        for i in tl.static_range(WINDOW):
            tl.store(before + i * K + ck, ck * 0.0, mask=ck < K)
        for i in tl.static_range(WINDOW - 1):
            tl.store(before + WINDOW * K + i * V + cw, cw * 0.0, mask=cw < V)
        before += WINDOW * K + (WINDOW - 1) * V
        tl.store(before, 0.0)
        tl.store(before + 1, 0.0)


@triton.jit(do_not_specialize=["length", "chunks", "tokens", "segments", "per_segment"])
def leave(
    maps, local, decay, k, v, beta, lam, message, before, length, chunks, tokens, segments, per_segment,
    H: tl.constexpr, KH: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    BW: tl.constexpr, WINDOW: tl.constexpr, SHIFT: tl.constexpr, MATRIX: tl.constexpr, COLUMN: tl.constexpr,
    MAP: tl.constexpr, UNIT: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """All of a rank's pieces as one map: BV columns of b, or of M, or what else a message holds.

    maps: of every piece, [pieces + 1, H, ...]; where they are decays of heads they are made here, from `decay`.
    """
    nh = tl.program_id(0)
    n = nh // H
    h = nh % H
    block = tl.program_id(1)
    BLOCKS: tl.constexpr = (V + BV - 1) // BV
    ck = tl.arange(0, BK)
    unit = message + nh.to(tl.int64) * UNIT
    if MATRIX:  # noqa: SIM102
        if block >= BLOCKS:
            cv = (block - BLOCKS) * BV + tl.arange(0, BV)
            M = tl.where(ck[:, None] == cv[None, :], 1.0, 0.0)
            for s in range(segments):
                piece = maps + ((n * (segments + 1) + s).to(tl.int64) * H + h) * MAP
                M = through(piece, M, unit + K * V, ck, cv, K, K, BK, BV, False)
            store_columns(unit + K * V, M, ck, cv, K, K, BK, BV)
            return
    cv = block * BV + tl.arange(0, BV)
    S = tl.zeros([BK, BV], tl.float32)
    total = tl.zeros([BV], tl.float64)
    for s in range(segments):
        slot = (n * (segments + 1) + s).to(tl.int64) * H + h
        if not MATRIX:
            if COLUMN:
                span = tl.load(maps + slot * MAP + cv, mask=cv < V, other=0.0)
            else:
                line = h.to(tl.int64) * tokens + n.to(tl.int64) * length
                parts = piece_decays(decay, line, tl.arange(0, 128), s, length, chunks, per_segment, WINDOW)
                span = tl.sum(parts, axis=0).to(tl.float32) + cv * 0.0
                tl.store(maps + slot + cv, span, mask=cv == 0)
            total += span.to(tl.float64)
            S *= tl.exp2(span)[None, :]
        else:
            S = through(maps + slot * MAP, S, unit, ck, cv, K, V, BK, BV, False)
        S += load_columns(local + slot * (K * V), ck, cv, K, V, BK, BV)
    store_columns(unit, S, ck, cv, K, V, BK, BV)
    if COLUMN:
        tl.store(unit + K * V + cv, total.to(tl.float32), mask=cv < V)
    elif not MATRIX:
        tl.store(unit + K * V + cv, total.to(tl.float32), mask=cv == 0)
    if block == 0:
        cw = tl.arange(0, BW)
        if before is not None:
            before += nh.to(tl.int64) * UNIT + TAIL
        write_edges(unit + TAIL, before, k, v, beta, lam, n, h, length, ck, cw, H, KH, K, V, WINDOW, SHIFT, COLUMN)


@triton.jit(do_not_specialize=["units", "rank", "stop", "length", "segments"])
def arrive(
    messages, state0, maps, local, q, begun, begins, early, ended, units, rank, stop, length, segments, eps, floor,
    H: tl.constexpr, KH: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    WINDOW: tl.constexpr, SHIFT: tl.constexpr, MATRIX: tl.constexpr, COLUMN: tl.constexpr, SCALED: tl.constexpr,
    DIRECT: tl.constexpr, MAP: tl.constexpr, UNIT: tl.constexpr, TAIL: tl.constexpr, HEAD: tl.constexpr,
):  # fmt: skip
    """BV columns of the state before the edge of this rank, at the start of every piece, and behind all ranks.

    messages: [ranks + 1, units, UNIT], units of N H; what lies before all tokens has the first place. stop: rank + 1,
    or all ranks where `ended` is wanted. begins: [N, pieces, H, K, V].
    """
    nh = tl.program_id(0)
    n = nh // H
    h = nh % H
    ck = tl.arange(0, BK)
    cv = tl.program_id(1) * BV + tl.arange(0, BV)
    here = nh.to(tl.int64) * (K * V)
    S = tl.zeros([BK, BV], tl.float32)
    if state0 is not None:
        S += load_columns(state0 + here, ck, cv, K, V, BK, BV)
    room = begun + here
    if ended is not None:
        room = ended + here
    for r in range(stop):
        tail = messages + (r * units + nh).to(tl.int64) * UNIT + TAIL
        unit = messages + ((r + 1) * units + nh).to(tl.int64) * UNIT
        if r != rank:
            S = edge_forth(S, tail, unit + HEAD, q, None, 0, n, h, ck, cv, eps, floor, H, KH, K, V, WINDOW, SHIFT,
                           MATRIX, COLUMN, SCALED, DIRECT)  # fmt: skip
            S = moved(unit + K * V, S, room, ck, cv, K, V, BK, BV, MATRIX, COLUMN, False)
            S += load_columns(unit, ck, cv, K, V, BK, BV)
        else:
            tl.debug_barrier()
            store_columns(begun + here, S, ck, cv, K, V, BK, BV)
            first = n.to(tl.int64) * length
            S = edge_forth(S, tail, unit + HEAD, q, early, first, n, h, ck, cv, eps, floor, H, KH, K, V, WINDOW, SHIFT,
                           MATRIX, COLUMN, SCALED, DIRECT)  # fmt: skip
            for s in range(segments):
                slot = (n * (segments + 1) + s).to(tl.int64) * H + h
                place = begins + ((n * segments + s).to(tl.int64) * H + h) * (K * V)
                store_columns(place, S, ck, cv, K, V, BK, BV)
                if (s + 1 < segments) | (rank + 1 < stop) | (ended is not None):
                    S = moved(maps + slot * MAP, S, place, ck, cv, K, V, BK, BV, MATRIX, COLUMN, False)
                    S += load_columns(local + slot * (K * V), ck, cv, K, V, BK, BV)
    if ended is not None:
        store_columns(ended + here, S, ck, cv, K, V, BK, BV)


@triton.jit(do_not_specialize=["length", "segments"])
def return_(
    maps, local, q, d_o, message, length, segments,
    H: tl.constexpr, KH: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    READS: tl.constexpr, MATRIX: tl.constexpr, COLUMN: tl.constexpr, MAP: tl.constexpr,
    UNIT: tl.constexpr,
):  # fmt: skip
    """BV columns of the state gradient behind the edge, as far as this rank's tokens go, into its message in reverse.

    local: [N, pieces, H, K, V], what every piece adds. The early reads of the edge lie behind the gradient.
    """
    nh = tl.program_id(0)
    n = nh // H
    h = nh % H
    ck = tl.arange(0, BK)
    cv = tl.program_id(1) * BV + tl.arange(0, BV)
    unit = message + nh.to(tl.int64) * UNIT
    first = n.to(tl.int64) * length
    G = tl.zeros([BK, BV], tl.float32)
    for back in range(segments):
        s = segments - 1 - back
        slot = (n * (segments + 1) + s).to(tl.int64) * H + h
        G = moved(maps + slot * MAP, G, unit, ck, cv, K, V, BK, BV, MATRIX, COLUMN, True)
        G += load_columns(local + ((n * segments + s).to(tl.int64) * H + h) * (K * V), ck, cv, K, V, BK, BV)
    reads = unit + K * V
    for t in tl.static_range(READS):
        qt = tl.load(q + ((first + t) * KH + h // (H // KH)) * K + ck, mask=ck < K, other=0.0).to(tl.float32)
        d_out = tl.load(d_o + ((first + t) * H + h) * V + cv, mask=cv < V, other=0.0).to(tl.float32)
        G -= qt[:, None] * d_out[None, :]
        tl.store(reads + t * K + ck, qt, mask=(ck < K) & (tl.program_id(1) == 0))
        tl.store(reads + READS * K + t * V + cv, d_out, mask=cv < V)
    store_columns(unit, G, ck, cv, K, V, BK, BV)


@triton.jit(do_not_specialize=["units", "rank", "ranks", "segments"])
def recede(
    messages, returned, maps, local, d_next, ends, d_begun, units, rank, ranks, segments, eps, floor,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, WINDOW: tl.constexpr,
    SHIFT: tl.constexpr, MATRIX: tl.constexpr, COLUMN: tl.constexpr, SCALED: tl.constexpr, DIRECT: tl.constexpr,
    MAP: tl.constexpr, UNIT: tl.constexpr, TAIL: tl.constexpr, HEAD: tl.constexpr, BACK: tl.constexpr,
    FINAL: tl.constexpr,
):  # fmt: skip
    """BV columns of state gradients: behind the edge of the next rank, at the end of every piece, behind this edge.

    returned: messages in reverse [ranks, units, BACK]; from FINAL on (if not 0) shares of that behind all ranks.
    """
    nh = tl.program_id(0)
    n = nh // H
    h = nh % H
    ck = tl.arange(0, BK)
    cv = tl.program_id(1) * BV + tl.arange(0, BV)
    here = nh.to(tl.int64) * (K * V)
    READS: tl.constexpr = WINDOW - 2 + SHIFT
    G = tl.zeros([BK, BV], tl.float32)
    if FINAL > 0:
        for r in range(ranks):
            G += load_columns(returned + (r * units + nh).to(tl.int64) * BACK + FINAL, ck, cv, K, V, BK, BV)
    for back in range(ranks - 1 - rank):
        r = ranks - 1 - back
        tail = messages + (r * units + nh).to(tl.int64) * UNIT + TAIL
        unit = messages + ((r + 1) * units + nh).to(tl.int64) * UNIT
        come = returned + (r * units + nh).to(tl.int64) * BACK
        G = moved(unit + K * V, G, d_next + here, ck, cv, K, V, BK, BV, MATRIX, COLUMN, True)
        G += load_columns(come, ck, cv, K, V, BK, BV)
        if r == rank + 1:
            store_columns(d_next + here, G, ck, cv, K, V, BK, BV)
        G = edge_back(G, tail, unit + HEAD, come + K * V, ck, cv, eps, floor, K, V, WINDOW, SHIFT, MATRIX, COLUMN,
                      SCALED, DIRECT)  # fmt: skip
    for back in range(segments):
        s = segments - 1 - back
        slot = (n * (segments + 1) + s).to(tl.int64) * H + h
        at = ((n * segments + s).to(tl.int64) * H + h) * (K * V)
        store_columns(ends + at, G, ck, cv, K, V, BK, BV)
        G = moved(maps + slot * MAP, G, ends + at, ck, cv, K, V, BK, BV, MATRIX, COLUMN, True)
        G += load_columns(local + at, ck, cv, K, V, BK, BV)
    if READS > 0:
        G = without_reads(G, returned + (rank * units + nh).to(tl.int64) * BACK + K * V, ck, cv, K, V, READS)
    store_columns(d_begun + here, G, ck, cv, K, V, BK, BV)
