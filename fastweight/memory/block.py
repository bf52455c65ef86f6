"""Masked and chunk forms: cuts the tokens into chunks and hands them to the engine of the algebraic class.

The masked form is one chunk of T tokens, the chunk form chunks of C with the state carried between; nothing else
differs. Layout inside: [n, N, C, D] with n chunks first, N = B H sequences of one head. Chunk sizes were chosen by
measurement on two CPU cores; a window rule takes short chunks because its system has C R rows.
"""

import torch
from einops import rearrange, repeat
from jaxtyping import Float
from torch import Tensor

from fastweight.memory.additive import Additive
from fastweight.memory.column import SUB, column_block
from fastweight.memory.rules import Timing
from fastweight.memory.sliding import Sliding
from fastweight.memory.solve import Solve
from fastweight.memory.window import Band, Selected
from fastweight.memory.writes import Writes

_SMALLEST_LOG = -1e4  # exp of it is 0 in every dtype, and differences of it stay finite where -inf would not


def block(
    q: Float[Tensor, "B T Hk K"],
    writes: Writes,
    S: Float[Tensor, "B H K V"],
    timing: Timing,
    chunk_size: int | None = None,
) -> tuple[Float[Tensor, "B T H V"], Float[Tensor, "B H K V"]]:
    """Outputs and last state of T >= 1 tokens after S; chunk_size None takes the default of the class."""
    B, T = q.shape[:2]
    H = S.shape[1]
    C = min(chunk_size or default_chunk(writes), T)
    read_before = timing == "read-before-write"
    x, y, gain, log_decay, window = chunked(writes, C, H)
    inputs = (_chunks(_per_head(q, H), C), x, y, gain, log_decay, S.flatten(0, 1))
    if writes.gain.ndim == 4:
        o, last = column_block(*inputs, read_before, writes.residual)
    elif writes.residual == "none":
        o, last = Additive.apply(*inputs, window, read_before)  # type: ignore[misc]
    elif window is None:
        o, last = Solve.apply(*inputs, read_before, writes.residual == "before-decay")  # type: ignore[misc]
    else:
        o, last = Sliding.apply(*inputs, window, read_before, writes.residual == "before-decay")  # type: ignore[misc]
    o = rearrange(o, "n (b h) c v -> b (n c) h v", b=B)[:, :T]
    return o, last.unflatten(0, (B, H))


def chunked(writes: Writes, C: int, H: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Band | None]:
    """x, y, gain and log_decay in chunk layout, and where the windows lie in them."""
    (x, y), window = _pairs(writes, C, H)
    return x, y, _chunks(writes.gain, C), _chunks(writes.log_decay.clamp(min=_SMALLEST_LOG), C), window


def default_chunk(writes: Writes) -> int:
    """Tokens a chunk: 64 for scalar gain, fewer where a window or a gain per column makes the system larger."""
    if writes.gain.ndim == 4:
        return SUB
    if writes.window > 1 and writes.residual != "none":
        return max(8, 48 // writes.window)
    return 64


def _per_head(z: Float[Tensor, "B T Hk D"], H: int) -> Float[Tensor, "B T H D"]:
    groups = H // z.shape[2]
    return z if groups == 1 else repeat(z, "b t h d -> b t (h g) d", g=groups)


def _chunks(z: Tensor, C: int) -> Tensor:
    """[B, T, H, ...] -> contiguous [n, B H, C, ...]; the last chunk is padded with 0 (no write, carry 1)."""
    short = -z.shape[1] % C
    if short:
        z = torch.cat((z, z.new_zeros(z.shape[0], short, *z.shape[2:])), dim=1)
    return rearrange(z, "b (n c) h ... -> n (b h) c ...", c=C).contiguous()


def _pairs(writes: Writes, C: int, H: int) -> tuple[tuple[Tensor, Tensor], Band | None]:
    """Write features and targets per chunk, with the R - 1 pairs before it, and where the windows lie in them."""
    x, y, R = _per_head(writes.x, H), writes.y, writes.window
    if R == 1:
        return (_chunks(x, C), _chunks(y, C)), None
    B, T = writes.gain.shape[:2]
    n, J = -(-T // C), C + R - 1
    if writes.slot is None:
        window = Band.of(R, C, x)
        if R - 1 <= C:
            return (_overlapping(x, n, C, R), _overlapping(y, n, C, R)), window
        start = C * torch.arange(n, device=x.device).expand(B, n)
    else:
        slot = torch.cat((writes.slot, writes.slot[:, -1:].expand(B, n * C - T)), dim=1).view(B, n, C)
        # The window before a chunk ends where the one of its first token ends, or one pair earlier.
        start = torch.cat((slot.new_full((B, 1), R - 2), slot[:, :-1, -1]), dim=1) - (R - 2)
        # A masked token has gain 0: that its oldest pair may lie before the chunk does not matter.
        oldest_first = torch.arange(1 - R, 1, device=x.device)
        local = ((slot - start[..., None])[..., None] + oldest_first).clamp(min=0)
        select = torch.nn.functional.one_hot(local.flatten(2), J).to(x.dtype)
        window = Selected(R, repeat(select, "b n r j -> (n b h) r j", h=H))
    index = (start[..., None] + torch.arange(J, device=x.device)).clamp(max=x.shape[1] - 1)
    return (_windows(x, index), _windows(y, index)), window


def _overlapping(z: Float[Tensor, "B P H D"], n: int, C: int, R: int) -> Float[Tensor, "n BH J D"]:
    """Chunks of C pairs, each followed by the first R - 1 of the next: `_windows` in order, by copies of blocks."""
    short = n * C + R - 1 - z.shape[1]
    if short:
        z = torch.cat((z, z.new_zeros(z.shape[0], short, *z.shape[2:])), dim=1)
    own, last = _chunks(z[:, : n * C], C), rearrange(z[:, n * C :], "b j h d -> 1 (b h) j d")
    return torch.cat((own, torch.cat((own[1:, :, : R - 1], last))), dim=2)


def _windows(z: Float[Tensor, "B P H D"], index: Tensor) -> Float[Tensor, "n BH J D"]:
    """The pairs `index` [B, n, J] of every chunk."""
    rows = torch.arange(len(z), device=z.device)[:, None, None]
    return rearrange(z[rows, index], "b n j h d -> n (b h) j d").contiguous()
