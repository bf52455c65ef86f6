"""Rows of logits into cross-entropies, and the logits themselves into their gradient, in one launch.

    loss = log sum_v exp(l_v) - l_label        l_v <- softmax(l)_v - [v = label]       0 for an ignored label

Traps: the logits are overwritten, pad columns beyond `vocab` with zero. A label outside the vocabulary gives NaN (a
kernel cannot raise), so that it does not pass for training.
"""

# pyright: basic, reportGeneralTypeIssues=false, reportArgumentType=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportOperatorIssue=false, reportReturnType=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastweight.kernels.launch import device_of

BLOCK, WARPS = 4096, 8


@triton.jit
def _rows(
    logits, labels, losses, ignore, width: tl.constexpr, vocab: tl.constexpr, WRITE: tl.constexpr, BLOCK: tl.constexpr
):
    """One row a program: a pass for the running maximum and sum, and one, if asked, that writes the gradient."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * width
    label = tl.load(labels + row)
    column = tl.arange(0, BLOCK)
    counts = label != ignore
    most, total = float("-inf"), 0.0
    for start in range(0, vocab, BLOCK):
        x = tl.load(logits + start + column, mask=start + column < vocab, other=float("-inf")).to(tl.float32)
        new = tl.maximum(most, tl.max(x, axis=0))
        total = total * tl.exp(most - new) + tl.sum(tl.exp(x - new), axis=0)
        most = new
    log_sum = most + tl.log(total)
    known = (label >= 0) & (label < vocab)
    chosen = tl.load(logits + label, mask=known, other=float("nan")).to(tl.float32)
    tl.store(losses + row, tl.where(counts, log_sum - chosen, 0.0))
    if WRITE:
        tl.debug_barrier()  # no warp may write over the label's logit before every warp has read it
        for start in range(0, width, BLOCK):
            at = start + column
            x = tl.load(logits + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
            gradient = tl.exp(x - log_sum) - tl.where(at == label, 1.0, 0.0)
            gradient = tl.where(counts, gradient, 0.0).to(logits.dtype.element_ty)
            tl.store(logits + at, gradient, mask=at < width)


def cross_entropy_rows(logits: Tensor, labels: Tensor, vocab: int, ignore_index: int, write: bool) -> Tensor:
    """Cross-entropy of each row in float32; with `write` the logits become their gradient.

    Args:
        logits: [rows, width], contiguous; columns from `vocab` on are padding.
        labels: [rows], contiguous.
    """
    losses = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    with device_of(logits):
        _rows[(len(logits),)](
            logits, labels, losses, ignore_index, logits.shape[1], vocab, write, BLOCK, num_warps=WARPS
        )
    return losses
