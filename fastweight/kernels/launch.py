"""Host side of the kernels: allocates outputs, picks tile sizes from widths and dtype (never from T), launches.

Traps: tensors are made contiguous here, so views give the same result. Gradients of grouped queries and keys come out
of the kernels one per value head and are summed here. A launch on an empty grid is skipped.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from einops import reduce
from torch import Tensor

from fastweight.kernels import additive, gates, solve
from fastweight.kernels.geometry import Geometry, previous_unmasked

INVERT_WARPS = 1


@dataclass(frozen=True)
class Plan:
    """What a call computes, as the numbers and flags that the kernels take."""

    eps: float
    floor: float
    shift: bool  # the key of the token before, else this token's own
    raw: bool  # beta is eta and lam is the natural log-decay
    scaled: bool
    direct: bool
    decayed: bool  # residual on the decayed state
    before: bool  # read before write
    window: int = 1

    @property
    def gates(self) -> dict:
        return dict(SHIFT=int(self.shift), RAW=self.raw, SCALED=self.scaled, DIRECT=self.direct)


def _widths(q: Tensor, v: Tensor) -> dict:
    return dict(H=v.shape[2], KH=q.shape[2], K=q.shape[3])


def _tile(width: int) -> int:
    return max(16, triton.next_power_of_2(width))


def _precision(dtype: torch.dtype) -> str:
    return "tf32x3" if dtype == torch.float32 else "tf32"


def _sums(dtype: torch.dtype) -> tl.dtype:
    """Operand type of the sums over pairs in gate gradients: the range of float32 matters there, not its digits."""
    return tl.float32 if dtype == torch.float32 else tl.bfloat16


def _dense(*tensors: Tensor | None) -> list[Tensor | None]:
    return [None if tensor is None else tensor.contiguous() for tensor in tensors]


def _serial_tiles(K: int, V: int, dtype: torch.dtype) -> tuple[int, int, int]:
    """Value columns, warps and stages of a kernel that walks the chunks."""
    BK = _tile(K)
    if dtype == torch.float32:
        return (16 if BK > 128 else 32), 4, 1
    if BK > 128:
        return 32, 4, 1
    return min(64, _tile(V)), 4, 2


def _token_tiles(K: int, V: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
    """Key and value columns at a time, warps and stages of a kernel with one program a chunk."""
    if dtype == torch.float32:
        return min(32, _tile(K)), min(32, _tile(V)), 4, 1
    return min(64, _tile(K)), min(64, _tile(V)), 4, 1


def _pairing(plan: Plan, mask: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    if mask is None:
        return None, None
    mask = mask.contiguous()
    return mask.view(torch.uint8), previous_unmasked(mask) if plan.shift else None


def forward_solve(plan, q, k, v, beta, lam, state0, key0, has_key, mask, cu_seqlens, save):
    """o, final S, eta, log-decay, inverse, residual and chunk states of the regression class."""
    q, k, v, beta, lam, state0, key0, has_key = _dense(q, k, v, beta, lam, state0, key0, has_key)
    B, T, H, V = v.shape
    K = q.shape[3]
    where = Geometry.of(B, T, cu_seqlens)
    wide = dict(dtype=torch.float32, device=v.device)
    o = torch.empty_like(v)
    state1 = torch.empty(where.sequences, H, K, V, **wide)
    eta, decay = torch.empty(H, where.tokens, **wide), torch.empty(H, where.tokens, **wide)
    inverse = v.new_empty(where.slots, H, 64, 64)
    residual = v.new_empty(where.tokens if save else 0, H, V)
    states = v.new_empty(where.slots if save else 0, H, K, V)
    flag = None if has_key is None else has_key.view(torch.uint8)
    unmasked, previous = _pairing(plan, mask)
    names = _widths(q, v)
    dot = _precision(v.dtype)
    if where.slots and H:
        gates.steps[(where.slots, H)](
            k, beta, lam, key0, flag, unmasked, previous, eta, decay,
            where.cu, where.chunk_seq, where.chunk_start, where.length, where.chunks, where.tokens,
            float(plan.eps), float(plan.floor), BK=_tile(K), WINDOW=1, NONZERO=True, **names, **plan.gates,
            num_warps=4, num_stages=1,
        )  # fmt: skip
        solve.invert[(where.slots, H)](
            k, key0, previous, eta, decay, inverse,
            where.cu, where.chunk_seq, where.chunk_start, where.length, where.chunks, where.tokens,
            BK=min(64, _tile(K)), SHIFT=int(plan.shift), DECAYED=plan.decayed, DOT=dot,
            MERGE="tf32" if v.dtype == torch.bfloat16 else "tf32x3", **names, num_warps=INVERT_WARPS, num_stages=1,
        )  # fmt: skip
    BV, warps, stages = _serial_tiles(K, V, v.dtype)
    grid = where.sequences * H * triton.cdiv(V, BV)
    if grid:
        solve.forward[(grid,)](
            q, k, v, key0, previous, eta, decay, inverse, state0, o, residual, states, state1,
            where.cu, where.chunk_start, where.length, where.chunks, where.tokens, 1, 2**30,
            V=V, BK=_tile(K), BV=BV, SHIFT=int(plan.shift), DECAYED=plan.decayed, BEFORE=plan.before, SAVE=save,
            DOT=dot, **names, num_warps=warps, num_stages=stages,
        )  # fmt: skip
    return o, state1, eta, decay, inverse, residual, states


def backward_solve(plan, d_o, d_state1, q, k, v, beta, lam, key0, has_key, mask, cu_seqlens, saved, want_state):
    """Gradients of q, k, v, beta, lam, the initial S and the initial key."""
    eta, decay, inverse, residual, states = saved
    d_o, d_state1, q, k, v, beta, lam, key0, has_key = _dense(d_o, d_state1, q, k, v, beta, lam, key0, has_key)
    B, T, H, V = v.shape
    K, KH = q.shape[3], q.shape[2]
    where = Geometry.of(B, T, cu_seqlens)
    wide = dict(dtype=torch.float32, device=v.device)
    d_v = torch.empty_like(v)
    d_states = v.new_empty(where.slots, H, K, V)
    d_state0 = torch.empty(where.sequences if want_state else 0, H, K, V, **wide)
    # One gradient per value head; masked rows are read by nobody and stay zero.
    d_q = q.new_empty(B, T, H, K)
    d_k = q.new_empty(B, T, H, K) if mask is None else q.new_zeros(B, T, H, K)
    d_beta = torch.empty(0, **wide) if beta is None else torch.empty_like(beta)
    d_lam = torch.empty(0, **wide) if lam is None else torch.empty_like(lam)
    d_key0 = torch.zeros(0 if key0 is None else where.sequences, H, K, **wide)
    flag = None if has_key is None else has_key.view(torch.uint8)
    unmasked, previous = _pairing(plan, mask)
    names = dict(_widths(q, v), V=V)
    dot = _precision(v.dtype)
    BV, warps, stages = _serial_tiles(K, V, v.dtype)
    grid = where.sequences * H * triton.cdiv(V, BV)
    if grid:
        solve.backward_state[(grid,)](
            q, k, d_o, key0, previous, eta, decay, inverse, d_state1, d_v, d_states, d_state0 if want_state else None,
            where.cu, where.chunk_start, where.length, where.chunks, where.tokens, 1, 2**30,
            BK=_tile(K), BV=BV, SHIFT=int(plan.shift), DECAYED=plan.decayed, BEFORE=plan.before, DOT=dot, **names,
            num_warps=warps, num_stages=stages,
        )  # fmt: skip
    if where.slots and H:
        BK, BV, warps, stages = _token_tiles(K, V, v.dtype)
        solve.backward_token[(where.slots, H)](
            q, k, d_o, beta, lam, key0, flag, unmasked, previous, eta, decay, residual, states, d_v, d_states,
            torch.empty_like(decay), d_q, d_k, None if beta is None else d_beta, None if lam is None else d_lam,
            None if key0 is None else d_key0,
            where.cu, where.chunk_seq, where.chunk_start, where.length, where.chunks, where.tokens,
            float(plan.eps), float(plan.floor), BK=BK, BV=BV, DECAYED=plan.decayed,
            BEFORE=plan.before, DOT=dot, SUM=_sums(v.dtype), **names, **plan.gates, num_warps=warps, num_stages=stages,
        )  # fmt: skip
    return (*_ungroup(d_q, d_k, KH), d_v, d_beta, d_lam, d_state0, _ungroup_key(d_key0, key0, KH))


def forward_additive(plan, q, k, v, beta, lam, state0, key0, has_key, mask, cu_seqlens, save):
    """o, final S, weights, log-decay and chunk states of the inner-product class."""
    q, k, v, beta, lam, state0, key0, has_key = _dense(q, k, v, beta, lam, state0, key0, has_key)
    B, T, H, V = v.shape
    K = q.shape[3]
    where = Geometry.of(B, T, cu_seqlens, 65 - plan.window)
    wide = dict(dtype=torch.float32, device=v.device)
    o = torch.empty_like(v)
    state1 = torch.empty(where.sequences, H, K, V, **wide)
    weight, decay = torch.empty(H, where.tokens, **wide), torch.empty(H, where.tokens, **wide)
    states = v.new_empty(where.slots if save else 0, H, K, V)
    flag = None if has_key is None else has_key.view(torch.uint8)
    unmasked, previous = _pairing(plan, mask)
    names = dict(_widths(q, v), BK=_tile(K), WINDOW=plan.window)
    dot = _precision(v.dtype)
    if where.slots and H:
        gates.steps[(where.slots, H)](
            k, beta, lam, key0, flag, unmasked, previous, weight, decay,
            where.cu, where.chunk_seq, where.chunk_start, where.length, where.chunks, where.tokens,
            float(plan.eps), float(plan.floor), NONZERO=False, **names, **plan.gates, num_warps=4, num_stages=1,
        )  # fmt: skip
    BV, warps, stages = _serial_tiles(K, V, v.dtype)
    grid = where.sequences * H * triton.cdiv(V, BV)
    if grid:
        additive.forward[(grid,)](
            q, k, v, key0, previous, weight, decay, state0, o, states, state1,
            where.cu, where.chunk_start, where.length, where.chunks, where.tokens, 1, 2**30,
            V=V, BV=BV, SHIFT=int(plan.shift), BEFORE=plan.before, SAVE=save, DOT=dot, **names,
            num_warps=warps, num_stages=stages,
        )  # fmt: skip
    return o, state1, weight, decay, states


def backward_additive(plan, d_o, d_state1, q, k, v, beta, lam, key0, has_key, mask, cu_seqlens, saved, want_state):
    """Gradients of q, k, v, beta, lam, the initial S and the initial key."""
    weight, decay, states = saved
    d_o, d_state1, q, k, v, beta, lam, key0, has_key = _dense(d_o, d_state1, q, k, v, beta, lam, key0, has_key)
    B, T, H, V = v.shape
    K, KH = q.shape[3], q.shape[2]
    where = Geometry.of(B, T, cu_seqlens, 65 - plan.window)
    wide = dict(dtype=torch.float32, device=v.device)
    d_v = torch.empty_like(v)
    d_states = v.new_empty(where.slots, H, K, V)
    d_state0 = torch.empty(where.sequences if want_state else 0, H, K, V, **wide)
    d_q = q.new_empty(B, T, H, K)
    d_k = q.new_empty(B, T, H, K) if mask is None else q.new_zeros(B, T, H, K)
    d_beta = torch.empty(0, **wide) if beta is None else torch.empty_like(beta)
    d_lam = torch.empty(0, **wide) if lam is None else torch.empty_like(lam)
    d_key0 = torch.zeros(0 if key0 is None else where.sequences, H, K, **wide)
    shared = where.slots if plan.window > 1 else 0
    halo_k, halo_v = torch.empty(shared * 16, H, K, **wide), torch.empty(shared * 16, H, V, **wide)
    flag = None if has_key is None else has_key.view(torch.uint8)
    unmasked, previous = _pairing(plan, mask)
    names = dict(_widths(q, v), V=V, WINDOW=plan.window)
    dot = _precision(v.dtype)
    BV, warps, stages = _serial_tiles(K, V, v.dtype)
    grid = where.sequences * H * triton.cdiv(V, BV)
    if grid:
        additive.backward_state[(grid,)](
            q, d_o, decay, d_state1, d_states, d_state0 if want_state else None,
            where.cu, where.chunk_start, where.length, where.chunks, where.tokens, 1, 2**30,
            BK=_tile(K), BV=BV, BEFORE=plan.before, DOT=dot, **names, num_warps=warps, num_stages=stages,
        )  # fmt: skip
    if where.slots and H:
        BK, BV, warps, stages = _token_tiles(K, V, v.dtype)
        additive.backward_token[(where.slots, H)](
            q, k, v, d_o, beta, lam, key0, flag, unmasked, previous, weight, decay, states, d_states,
            torch.empty(2 * H, where.tokens, **wide), d_q, d_k, d_v, None if beta is None else d_beta, None if lam is None else d_lam,
            None if key0 is None else d_key0, halo_k, halo_v,
            where.cu, where.chunk_seq, where.chunk_start, where.length, where.chunks, where.tokens,
            float(plan.eps), float(plan.floor), BK=BK, BV=BV, BEFORE=plan.before, DOT=dot, SUM=_sums(v.dtype),
            **names, **plan.gates,
            num_warps=warps, num_stages=stages,
        )  # fmt: skip
    if shared and H:
        additive.backward_halo[(where.slots, H)](
            halo_k, halo_v, d_k, d_v, where.cu, where.chunk_seq, where.chunk_start, where.length, where.chunks,
            H=H, K=K, V=V, BK=_tile(K), BV=_tile(V), WINDOW=plan.window, SHIFT=int(plan.shift), num_warps=4,
        )  # fmt: skip
    return (*_ungroup(d_q, d_k, KH), d_v, d_beta, d_lam, d_state0, _ungroup_key(d_key0, key0, KH))


def _ungroup(d_q: Tensor, d_k: Tensor, KH: int) -> tuple[Tensor, Tensor]:
    if d_q.shape[2] == KH:
        return d_q, d_k
    return reduce(d_q, "b t (h g) k -> b t h k", "sum", h=KH), reduce(d_k, "b t (h g) k -> b t h k", "sum", h=KH)


def _ungroup_key(d_key0: Tensor, key0: Tensor | None, KH: int) -> Tensor:
    if key0 is None:
        return d_key0.new_empty(0)
    return reduce(d_key0, "n (h g) k -> n h k", "sum", h=KH).to(key0.dtype)
