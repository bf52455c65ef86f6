"""Host side of the decoding kernel: (tokens, state tensors) -> one launch, into new tensors or into the same.

Two registered operators: `step` leaves what it is given alone, `step_in_place` overwrites the state, so that a captured
CUDA graph finds it at the same addresses token after token. Both see tensors and plain numbers only. `move` and
`move_in_place` call them, or in eager mode the same functions without the dispatcher.

Traps: a state's parts must be contiguous to be overwritten; rows of q, k and v may lie apart (views into a projection),
but one row must be dense, or it is copied.
"""

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from fastweight.kernels import decode
from fastweight.kernels.eager import nobody_listens
from fastweight.kernels.launch import device_of, start

ELEMENTS = 4096  # of a state held by one program
REGISTERS = 80  # of a thread, for six programs of a window a multiprocessor


class Parts(NamedTuple):
    """Tensors of a state: fast weights, last key and its flag, and the window's last pairs, oldest first."""

    S: Tensor  # [N, H, K, V]
    key: Tensor  # [N, Hk, K]
    has_key: Tensor  # [N] bool
    tail_x: Tensor  # [N, R-1, Hk, K]
    tail_y: Tensor  # [N, R-1, H, V]
    tail_count: Tensor  # [N] int64

    def pointers(self) -> tuple[Tensor, ...]:
        return self._replace(has_key=self.has_key.view(torch.uint8))


def _step(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, lam: Tensor | None, mask: Tensor | None,
    S: Tensor, key: Tensor, has_key: Tensor, tail_x: Tensor, tail_y: Tensor, tail_count: Tensor,
    eps: float, floor: float, shift: bool, raw: bool, scaled: bool, direct: bool, regression: bool, before: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """o and the parts of the next state."""
    old = Parts(*(part.contiguous() for part in (S, key, has_key, tail_x, tail_y, tail_count)))
    new = Parts(*(torch.empty_like(part) for part in old))
    flags = (eps, floor, shift, raw, scaled, direct, regression, before)
    o = _launch((q, k, v, beta, lam, mask), old, new, None, flags)
    return o, new.S, new.key, new.has_key, new.tail_x, new.tail_y, new.tail_count


step = torch.library.custom_op("fastweight::step", _step, mutates_args=())


@step.register_fake
def _(q, k, v, beta, lam, mask, S, key, has_key, tail_x, tail_y, tail_count, *flags):
    parts = (S, key, has_key, tail_x, tail_y, tail_count)
    return v.new_empty(v.shape), *(part.new_empty(part.shape) for part in parts)


def _step_in_place(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, lam: Tensor | None, mask: Tensor | None,
    S: Tensor, key: Tensor, has_key: Tensor, tail_x: Tensor, tail_y: Tensor, tail_count: Tensor, tickets: Tensor,
    eps: float, floor: float, shift: bool, raw: bool, scaled: bool, direct: bool, regression: bool, before: bool,
) -> Tensor:  # fmt: skip
    """o; the state becomes the next one. tickets: int32 zeros [N], zeros again afterwards."""
    parts = Parts(S, key, has_key, tail_x, tail_y, tail_count)
    flags = (eps, floor, shift, raw, scaled, direct, regression, before)
    return _launch((q, k, v, beta, lam, mask), parts, parts, tickets, flags)


step_in_place = torch.library.custom_op(
    "fastweight::step_in_place",
    _step_in_place,
    mutates_args=("S", "key", "has_key", "tail_x", "tail_y", "tail_count", "tickets"),
)


@step_in_place.register_fake
def _(q, k, v, *rest):
    return v.new_empty(v.shape)


def move(*given) -> tuple[Tensor, ...]:
    """o and the parts of the next state; takes what `step` takes."""
    return _step(*given) if nobody_listens() else step(*given)


def move_in_place(*given) -> Tensor:
    """o, with the state overwritten; takes what `step_in_place` takes."""
    if not nobody_listens():
        return step_in_place(*given)
    # What an earlier call saved for its backward must not be changed unnoticed.
    torch.autograd.graph.increment_version([part for part in given[6:12] if not part.is_inference()])
    return _step_in_place(*given)


def _launch(given: tuple, old: Parts, new: Parts, tickets: Tensor | None, flags: tuple) -> Tensor:
    q, k, v, beta, lam, mask = given
    (B, H, V), (KH, K) = v.shape, q.shape[1:]
    o = torch.empty(B, H, V, dtype=v.dtype, device=v.device)
    tile = tile_of(K, V, old.tail_x.shape[1] + 1)
    grid = B * H * triton.cdiv(V, tile["BV"])
    rows = [_dense_rows(tensor) for tensor in (q, k, v)]
    gates = [None if gate is None else gate.contiguous() for gate in (beta, lam)]
    unmasked = None if mask is None else mask.contiguous().view(torch.uint8)
    eps, floor, shift, raw, scaled, direct, regression, before = flags
    window = old.tail_x.shape[1] + 1
    if grid:
        with device_of(v):
            energies = None
            if regression and window > 1:
                energies = torch.empty(B, KH, dtype=torch.float32, device=v.device)
                start(
                    decode.window_energies, (B * KH,),
                    rows[1], unmasked, *old.pointers()[1:4], old.tail_count, energies, rows[1].stride(0),
                    KH=KH, K=K, WINDOW=window, SHIFT=int(shift), num_warps=1,
                )  # fmt: skip
            start(
                decode.step, (grid,),
                *rows, *gates, unmasked, energies, *old.pointers(), o, *new.pointers(), tickets,
                *(row.stride(0) for row in rows), eps, floor, H=H, KH=KH, K=K, V=V,
                WINDOW=window, SHIFT=int(shift), RAW=raw, SCALED=scaled, DIRECT=direct,
                COLUMN=beta is not None and beta.ndim == 3, REGRESSION=regression, BEFORE=before, **tile,
            )  # fmt: skip
    return o


def tile_of(K: int, V: int, window: int) -> dict[str, Any]:
    """All of K, and as many value columns as make one program's share; from widths and window only.

    With a window a program waits longer between its loads and its stores: what hides that are more programs at once.
    """
    BK = triton.next_power_of_2(K)
    BV = min(triton.next_power_of_2(V), max(8, ELEMENTS // BK))
    return {"BK": BK, "BV": BV, "num_warps": 4, "maxnreg": REGISTERS if 1 < window <= 4 else None}


def _dense_rows(tensor: Tensor) -> Tensor:
    """[B, heads, width] with each row of the batch dense."""
    heads, width = tensor.shape[1:]
    dense = (tensor.stride(2) == 1 or width == 1) and (tensor.stride(1) == width or heads == 1)
    return tensor if dense else tensor.contiguous()
