"""The equation one token at a time, literally: the judge of every other form.

    residual_r = y_r - S^T x_r      S is S_{t-1} ("before-decay") or gamma_t S_{t-1} ("after-decay"); y_r for "none"
    S_t        = gamma_t S_{t-1} + sum_r x_r (gain_t .* residual_r)^T
    o_t        = S_t^T q_t          or S_{t-1}^T q_t when reading before the write

Autograd keeps every S_t: O(T K V) memory, right for tests and single tokens, not for training.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from fastweight.memory.rules import Timing
from fastweight.memory.writes import Writes, recent_pair


def recurrent(
    q: Float[Tensor, "B T Hk K"], writes: Writes, S: Float[Tensor, "B H K V"], timing: Timing
) -> tuple[Float[Tensor, "B T H V"], Float[Tensor, "B H K V"]]:
    """Outputs and last state of T tokens after S (SPEC section 3)."""
    groups = S.shape[1] // q.shape[2]
    q = q.repeat_interleave(groups, dim=2)  # [B, T, H, K]
    window = [recent_pair(writes.x, writes.slot, writes.window, r) for r in range(writes.window)]
    features = [x.repeat_interleave(groups, dim=2) for x in window]  # R times [B, T, H, K]
    targets = [recent_pair(writes.y, writes.slot, writes.window, r) for r in range(writes.window)]
    column = writes.gain.ndim == 4
    gain = writes.gain if column else writes.gain[..., None]  # [B, T, H, V or 1]
    carry = (writes.log_decay if column else writes.log_decay[..., None]).exp()
    outputs = []
    for t in range(q.shape[1]):
        if timing == "read-before-write":
            outputs.append(read(S, q[:, t]))
        kept = carry[:, t, :, None] * S  # [B, H, K, V]
        new = kept
        for r in range(writes.window):
            x, y = features[r][:, t], targets[r][:, t]
            if writes.residual != "none":
                y = y - read(S if writes.residual == "before-decay" else kept, x)
            weight = gain[:, t] if writes.live is None else gain[:, t] * (r < writes.live[:, t])[:, None, None]
            new = new + x[..., None] * (weight * y)[..., None, :]
        S = new
        if timing == "read-after-write":
            outputs.append(read(S, q[:, t]))
    o = torch.stack(outputs, dim=1) if outputs else q.new_zeros(*q.shape[:3], S.shape[-1])
    return o, S


def read(S: Float[Tensor, "B H K V"], q: Float[Tensor, "B H K"]) -> Float[Tensor, "B H V"]:
    """S^T q per head; no matrix product, so that neither autocast nor tf32 can touch the judge."""
    return (S * q[..., None]).sum(dim=-2)
