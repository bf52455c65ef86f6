"""The processes that share a sequence, and the exchanges between them, which autograd goes back through.

`gather` sends a few tensors of equal shapes to everybody, as one message of bytes; its backward pass sends every
gradient home, where they are added in the order of ranks. `send` and `receive` hand tensors to the next rank.

Traps: what was sent must be asked back by everybody, in one order, or processes wait for each other for ever: so an
output passes through `tie` together with all that was received for it, and gets zeros where nothing else asks. The
setting is global, not one of a thread, because autograd computes checkpointed forward passes again on its own threads.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

ALIGNMENT = 16  # bytes: where each tensor of a message begins


class Traffic:
    """What this process has sent: messages, and bytes in all (each receiver counts)."""

    def __init__(self) -> None:
        self.messages, self.bytes = 0, 0

    def add(self, num_bytes: int) -> None:
        self.messages, self.bytes = self.messages + 1, self.bytes + num_bytes


class Place(NamedTuple):
    """Where this process stands: rank r of `size` holds the r-th part of every sequence."""

    group: Any
    rank: int
    size: int
    traffic: Traffic


_place: Place | None = None


def current() -> Place | None:
    """The place inside `context_parallel`; None outside, and for a group of one."""
    return _place


@contextmanager
def context_parallel(group: Any = None) -> Iterator[Traffic]:
    """Inside, sequences are spread over the ranks of a group: rank r holds the tokens after those of rank r - 1.

    Args:
        group: a process group or a DeviceMesh of one dimension; None means all processes.

    What one process would get, every rank gets its part of: outputs, losses (their sum over ranks is the loss), and
    gradients (their sum over ranks is the gradient of a parameter). `cu_seqlens` speaks of whole sequences and then
    every rank holds equally many tokens. An `initial_state` is the same on all ranks; the final state is that of whole
    sequences, on all ranks. All ranks make the same calls, and go backward through all of them. Run backward inside
    too where activations are checkpointed outside of the models, whose own checkpoints remember the group.

    Yields the `Traffic` of this process. Raises ValueError where torch.distributed is not initialised.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError("group: got no initialised torch.distributed, expected init_process_group to come first")
    if hasattr(group, "get_group"):
        if group.ndim != 1:
            raise ValueError(f"group: got a mesh of {group.ndim} dimensions, expected one, as mesh['context']")
        group = group.get_group()
    group = dist.group.WORLD if group is None else group
    if dist.get_rank(group) < 0:
        raise ValueError("group: got one that this process is not in, expected its own group")
    place = Place(group, dist.get_rank(group), dist.get_world_size(group), Traffic())
    with entered(place if place.size > 1 else None):
        yield place.traffic


@contextmanager
def entered(place: Place | None) -> Iterator[None]:
    """Inside, `place` is the current one."""
    global _place
    before, _place = _place, place
    try:
        yield
    finally:
        _place = before


def gather(place: Place, anchor: Tensor | None, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Every tensor of all ranks, [size, ...]; shapes are the same on all of them.

    anchor: something that requires gradients if this call shall have them, whatever `tensors` do on this rank.
    """
    return _Gather.apply(place, anchor, *tensors)  # type: ignore[return-value]


def gather_now(place: Place, *tensors: Tensor) -> tuple[Tensor, ...]:
    """`gather` without gradients."""
    message = _bytes(tensors)
    place.traffic.add((place.size - 1) * message.numel())
    parts = [torch.empty_like(message) for _ in range(place.size)]
    dist.all_gather(parts, message, group=place.group)
    by_rank = [_tensors(part, tensors) for part in parts]
    return tuple(torch.stack(same) for same in zip(*by_rank, strict=True))


def share(place: Place, message: Tensor, everybody: Tensor) -> None:
    """Puts the message of every rank into everybody's [size, ...], without gradients; both are contiguous."""
    place.traffic.add((place.size - 1) * message.numel() * message.element_size())
    # torch renamed it after 2.11.
    collect = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    collect(everybody.view(-1), message.view(-1), group=place.group)


def send(place: Place, tensor: Tensor, output: Tensor) -> Tensor:
    """Hands `tensor` to the next rank. Its gradient is awaited when that of `output`, which comes back, goes on."""
    return _Send.apply(place, tensor, output)  # type: ignore[return-value]


def receive(place: Place, like: Tensor, anchor: Tensor | None) -> Tensor:
    """What the rank before sends, a tensor as `like`. anchor: as in `gather`."""
    return _Receive.apply(place, like.detach(), anchor)  # type: ignore[return-value]


def tie(outputs: tuple[Tensor, ...], received: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The outputs; going back through any of them goes back through all that was received, at least with zeros."""
    return _Tie.apply(len(outputs), *outputs, *received)  # type: ignore[return-value]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, place, anchor, *tensors):
        ctx.place, ctx.likes = place, [(t.shape, t.dtype, t.device) for t in tensors]
        gathered = gather_now(place, *tensors)
        ctx.mark_non_differentiable(*(t for t in gathered if not t.is_floating_point()))
        return gathered

    @staticmethod
    def backward(ctx, *d_gathered):  # type: ignore[override]
        place = ctx.place
        floats = [(i, d) for i, d in enumerate(d_gathered) if ctx.likes[i][1].is_floating_point]
        likes = [d[0] for _, d in floats]
        message = torch.cat([_bytes([d[rank] for _, d in floats]) for rank in range(place.size)])
        place.traffic.add(message.numel() // place.size * (place.size - 1))
        back = torch.empty_like(message)
        dist.all_to_all_single(back, message, group=place.group)
        by_rank = [_tensors(part, likes) for part in back.chunk(place.size)]
        grads: list[Tensor | None] = [None] * len(d_gathered)
        for (i, _), same in zip(floats, zip(*by_rank, strict=True), strict=True):
            grads[i] = (
                torch.stack(same).sum(0, dtype=torch.promote_types(same[0].dtype, torch.float32)).to(same[0].dtype)
            )
        return None, None, *grads


class _Tie(torch.autograd.Function):
    @staticmethod
    def forward(ctx, number, *tensors):
        ctx.likes = [(t.shape, t.dtype, t.device) if t.is_floating_point() else None for t in tensors[number:]]
        outputs = tuple(t.view_as(t) for t in tensors[:number])
        ctx.mark_non_differentiable(*(t for t in outputs if not t.is_floating_point()))
        return outputs

    @staticmethod
    def backward(ctx, *d_outputs):  # type: ignore[override]
        zeros = (None if like is None else torch.zeros(like[0], dtype=like[1], device=like[2]) for like in ctx.likes)
        return None, *d_outputs, *zeros


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(ctx, place, tensor, output):
        ctx.place, ctx.like = place, torch.empty_like(tensor, device="meta")
        ctx.device = tensor.device
        _to(place, tensor, place.rank + 1)
        return output.view_as(output)

    @staticmethod
    def backward(ctx, d_output):  # type: ignore[override]
        return None, _from(ctx.place, ctx.like, ctx.place.rank + 1, ctx.device), d_output


class _Receive(torch.autograd.Function):
    @staticmethod
    def forward(ctx, place, like, anchor):
        ctx.place = place
        return _from(place, like, place.rank - 1, like.device)

    @staticmethod
    def backward(ctx, d_tensor):  # type: ignore[override]
        _to(ctx.place, d_tensor, ctx.place.rank - 1)
        return None, None, None


def _to(place: Place, tensor: Tensor, rank: int) -> None:
    message = _bytes([tensor])
    place.traffic.add(message.numel())
    dist.send(message, dist.get_global_rank(place.group, rank), group=place.group)


def _from(place: Place, like: Tensor, rank: int, device: Any) -> Tensor:
    message = torch.empty(_size(like), dtype=torch.uint8, device=device)
    dist.recv(message, dist.get_global_rank(place.group, rank), group=place.group)
    return _tensors(message, [like])[0]


def _size(tensor: Tensor) -> int:
    return -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT


def _bytes(tensors: Any) -> Tensor:
    """Tensors end to end as bytes: every dtype travels on every backend."""
    parts = []
    for tensor in tensors:
        flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
        parts.append(torch.nn.functional.pad(flat, (0, _size(tensor) - flat.numel())))
    return torch.cat(parts)


def _tensors(message: Tensor, likes: Any) -> list[Tensor]:
    """The inverse of `_bytes`, for tensors of these shapes and dtypes."""
    found, start = [], 0
    for like in likes:
        num_bytes = math.prod(like.shape) * like.element_size()
        found.append(message[start : start + num_bytes].view(like.dtype).view(like.shape))
        start += _size(like)
    return found
