"""Host side of hopper_additive.py and hopper_additive_backward.py: pieces, tensor descriptors, launches.

launch_hopper says which calls they take, `takes_backward` which of these the second.
"""

from typing import Any

from torch import Tensor

from fastweight.kernels.geometry import Geometry
from fastweight.kernels.launch import FEW_PROGRAMS, LEAST_CHUNKS, Gradients, Inputs, Plan, Walk, gate_flags, start
from fastweight.kernels.launch_hopper import STAGES, WALKING, blocks, descriptor, tiles

LONGEST = 5  # window of a backward pass in one walk: hopper_additive_windows.py tells four diagonals apart
REVERSE_STAGES = 3  # chunks in shared memory; the walk in reverse holds less of each


def walk_of(where: Geometry, given: Inputs) -> Walk:
    """One piece a sequence where programs fill the device, else as many as it holds at once; few are not worth it."""
    programs = _programs(given, where.sequences)
    if programs >= FEW_PROGRAMS or where.chunks < LEAST_CHUNKS:
        return Walk(where, 1, 2**30)
    length = -(-where.chunks // min(WALKING // programs, where.chunks // 4))
    return Walk(where, -(-where.chunks // length), length)


def _programs(given: Inputs, pieces: int) -> int:
    return pieces * given.v.shape[2] * (given.v.shape[3] // 64)


def _pieces(walk: Walk, whole: bool) -> int:
    """Of all sequences; those that nothing follows are left out where only what is handed on is wanted."""
    return walk.where.sequences * (walk.segments if whole else walk.segments - 1)


def _options(plan: Plan, given: Inputs) -> dict[str, Any]:
    common = {"V": given.v.shape[3], "WINDOW": plan.window, "BEFORE": plan.before, "num_warps": 4}
    return {**common, **given.widths}


def forward(
    plan: Plan, given: Inputs, walk: Walk, steps: tuple[Tensor, Tensor, Tensor], state0: Tensor | None,
    o: Tensor | None, state1: Tensor, states: Tensor | None,
) -> None:  # fmt: skip
    """Fills state1 [pieces, H, K, V], o and chunk states if given; without o, state1 of all pieces but the last.

    steps: weights and log-decays [H, tokens], and the sums of windows.
    """
    from fastweight.kernels import hopper_additive

    K = given.q.shape[3]
    weight, decay, sums = steps
    out = o
    if o is not None and plan.window == 1:
        out = tiles(o, 64)
    start(
        hopper_additive.forward, (_programs(given, _pieces(walk, o is not None)),),
        tiles(given.k, K), tiles(given.q, K), tiles(given.v, 64), out, None if states is None else blocks(states, K),
        weight, decay, sums if plan.window > 1 else None, None if state0 is None else state0.contiguous(), state1,
        *walk.arguments[2:], SHIFT=int(plan.shift), STAGES=STAGES, **_options(plan, given),
    )  # fmt: skip


def backward_state(
    plan: Plan, given: Inputs, walk: Walk, decay: Tensor, d_o: Tensor, d_end: Tensor | None, d_start: Tensor | None,
    d_states: Tensor | None, skip: bool = True,
) -> None:  # fmt: skip
    """Fills d_start and the chunks' state gradients if given; without the latter `skip` leaves out first pieces."""
    from fastweight.kernels import hopper_additive

    K = given.q.shape[3]
    start(
        hopper_additive.backward_state, (_programs(given, _pieces(walk, d_states is not None or not skip)),),
        tiles(given.q, K), tiles(d_o, 64), None if d_states is None else blocks(d_states, K), decay,
        None if d_end is None else d_end.contiguous(), d_start, *walk.arguments[2:], STAGES=REVERSE_STAGES,
        SKIP=skip, **_options(plan, given),
    )  # fmt: skip


def takes_backward(plan: Plan, given: Inputs) -> bool:
    """Whether the whole backward pass is one walk: states as wide as high; at width 128 windows are faster in two."""
    K, V = given.q.shape[3], given.v.shape[3]
    return K == V and (plan.window == 1 or (K == 64 and plan.window <= LONGEST))


def backward(
    plan: Plan, given: Inputs, walk: Walk, steps: tuple[Tensor, Tensor, Tensor | None], states: Tensor, d_o: Tensor,
    d_end: Tensor | None, d_start: Tensor | None, out: Gradients,
) -> None:  # fmt: skip
    """Fills all gradients of tokens, and d_start if given; steps as in `forward`, states of chunks."""
    from fastweight.kernels import hopper_additive_backward, hopper_additive_windows

    weight, decay, sums = steps
    H, K, pieces = given.v.shape[2], given.q.shape[3], _pieces(walk, True)
    ahead = plan.window > 1 or K == 128  # at width 64 there are two programs at once
    halo, by_hand = (None, None), (None, None, None)  # no pair is in two chunks, and gradients go out by descriptors
    if plan.window > 1:
        shared = pieces if walk.segments > 1 else 0
        halo = tuple(given.v.new_empty(shared, hopper_additive_windows.SHARED_ROWS.value, H, K) for _ in range(2))
        by_hand = out.q, out.v, sums
    rows = descriptor(states, [states.numel() // K, K], [K, 1], [K, K])
    start(
        hopper_additive_backward.backward, (pieces * H,),
        *(tiles(tensor, K) for tensor in (given.q, given.k, given.v, d_o)), rows,
        *(tiles(tensor, K) for tensor in (out.q, out.k, out.v)), by_hand[0], out.k, by_hand[1], *halo,
        given.beta, given.lam, out.beta, out.lam, weight, decay, by_hand[2],
        None if d_end is None else d_end.contiguous(), d_start, *walk.arguments[2:], float(plan.eps),
        float(plan.floor), V=K, WINDOW=plan.window, BEFORE=plan.before, AHEAD=ahead, **given.widths,
        **gate_flags(plan), num_warps=K // 16,
    )  # fmt: skip
    if plan.window > 1 and walk.segments > 1:
        start(
            hopper_additive_windows.add_borders, (pieces - walk.where.sequences, H),
            *halo, out.k, out.v, walk.where.length, walk.segments, walk.length, H=H, K=K, V=K, BK=K, BV=K,
            WINDOW=plan.window, SHIFT=int(plan.shift), num_warps=4,
        )  # fmt: skip
