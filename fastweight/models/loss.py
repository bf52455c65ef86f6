"""Hidden states, the output matrix and labels into the mean cross-entropy, without all logits at once.

    loss = sum_i [labels_i != ignored] (logsumexp(W h_i) - (W h_i)[labels_i]) / num_items

Tokens go through in chunks: a chunk's logits are made, turned into losses and into their own gradient, and used up for
the gradients of h and W before the next chunk is made. So backward only scales what forward has left, and the largest
thing in memory is one chunk of logits. Sums over tokens, the gradient of W among them, are in float32 or better.

Traps: logits are rounded to the dtype of the product, as a plain output matrix rounds them; their softmax is taken in
float32. A vocabulary that is no multiple of 64 (GPT-2's 50,257) makes tensor cores three times slower, so W is padded
on the way into the product. Gradients are those of one backward pass; a second derivative raises.
"""

import importlib
import importlib.util
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers.loss.loss_utils import ForCausalLMLoss

from fastweight.layers.parts import at_least_float32
from fastweight.memory.modes import autocasts, without_autocast

IGNORED = -100
KEYWORDS = ("num_items_in_batch", "ignore_index", "shift_labels")  # that a loss may be given through `forward`
SHARDING = "torch.distributed.fsdp"  # whose classes and hooks gather a weight
ALIGNMENT = 64  # columns of a chunk of logits on a GPU are a multiple of this
CHUNK_ENTRIES = {"cuda": 2**28, "cpu": 2**24}  # logits in a chunk: 512 MiB in bfloat16, 64 MiB in float32


def wants_logits(labels: Tensor | None, output_logits: bool | None, training: bool) -> bool:
    """Whether `forward` makes logits; ValueError when there would be neither logits nor a loss."""
    if labels is None and output_logits is False:
        raise ValueError("output_logits: got False without labels, expected labels, or logits to be wanted")
    return labels is None or (not training if output_logits is None else output_logits)


def loss_of(model: Any, hidden_states: Tensor, logits: Tensor | None, labels: Tensor, **kwargs: Any) -> Tensor:
    """The model's loss: of its logits when there are any, else of hidden states, chunk by chunk.

    Where something has changed the output matrix (adapters, quantisation, hooks) or the loss, logits are made after
    all, so that it is not passed by.
    """
    head, how = model.lm_head, model.config.fused_loss
    if logits is None and how != "none" and model.loss_function is ForCausalLMLoss and _unchanged(head):
        known = {name: kwargs[name] for name in KEYWORDS if name in kwargs}
        # Resizing the vocabulary leaves a plain nn.Linear, whose weight nobody needs to gather.
        measure = head if isinstance(head, OutputMatrix) else partial(OutputMatrix.forward, head)
        return measure(hidden_states, labels=labels, how=how, **known)
    logits = head(hidden_states) if logits is None else logits
    return model.loss_function(logits, labels, model.vocab_size, **kwargs)


class OutputMatrix(nn.Linear):
    """The output matrix: hidden states to logits, or with labels to their loss, in which logits never are all there.

    The loss is found inside a call of the module, so that what gathers a sharded weight for that time sees one.
    """

    def forward(self, input: Tensor, labels: Tensor | None = None, **how: Any) -> Tensor:
        """Logits [..., V] of hidden states [..., D]; with labels, `causal_loss` with the keywords `how`."""
        return super().forward(input) if labels is None else causal_loss(input, self.weight, labels, **how)


def _unchanged(head: Any) -> bool:
    """Whether the output matrix is what the model was built with; to be sharded (FSDP2) does not change it."""
    if type(head) in (OutputMatrix, nn.Linear) and not (head._forward_hooks or head._forward_pre_hooks):
        return True
    parts = [*type(head).__mro__, *head._forward_hooks.values(), *head._forward_pre_hooks.values()]
    others = [part for part in parts if not str(getattr(part, "__module__", "")).startswith(SHARDING)]
    return others == list(OutputMatrix.__mro__)


def causal_loss(
    hidden_states: Float[Tensor, "B T D"],
    weight: Float[Tensor, "V D"],
    labels: Int[Tensor, "B T"],
    *,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = IGNORED,
    shift_labels: Int[Tensor, "B T"] | None = None,
    how: str = "chunked",
) -> Float[Tensor, ""]:
    """Cross-entropy of predicting each next token, as transformers' ForCausalLMLoss of `hidden_states @ weight.T`.

    Args:
        hidden_states: after the final norm.
        weight: of the output matrix.
        labels: ids, not shifted.
        num_items_in_batch: what the sum is divided by; None means the number of labels that count.
        ignore_index: label that does not count.
        shift_labels: labels that are shifted already, instead of `labels`.
        how: "chunked", or "liger" for that library's kernel (CUDA).

    Raises:
        ValueError: for "liger" where it is not installed or not on a GPU, and for shapes that do not fit.
    """
    if shift_labels is None:
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    hidden_states, targets = hidden_states.flatten(0, -2), shift_labels.flatten().to(hidden_states.device)
    if how == "liger":
        total = _liger(hidden_states, weight, targets, ignore_index)
    else:
        total = linear_cross_entropy(hidden_states, weight, targets, ignore_index=ignore_index)
    if num_items_in_batch is None:
        num_items_in_batch = targets.ne(ignore_index).sum()
    elif isinstance(num_items_in_batch, Tensor):
        num_items_in_batch = num_items_in_batch.to(total.device)
    return total / num_items_in_batch


def linear_cross_entropy(
    hidden: Float[Tensor, "N D"],
    weight: Float[Tensor, "V D"],
    labels: Int[Tensor, " N"],
    *,
    ignore_index: int = IGNORED,
    chunk_size: int | None = None,
) -> Float[Tensor, ""]:
    """Sum of the cross-entropies of `hidden @ weight.T` against `labels`, float32 or better.

    Args:
        chunk_size: tokens whose logits exist at one time; None takes what fits CHUNK_ENTRIES.

    Raises ValueError for shapes that do not fit, and on a CPU for a label outside the vocabulary (a GPU gives NaN).
    """
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1]:
        got = f"{tuple(hidden.shape)} and {tuple(weight.shape)}"
        raise ValueError(f"hidden, weight: got shapes {got}, expected [N, D] and [V, D]")
    if labels.shape != hidden.shape[:1]:
        raise ValueError(f"labels: got shape {tuple(labels.shape)}, expected [{len(hidden)}]")
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size: got {chunk_size}, expected at least 1 token")
    kind = hidden.device.type
    dtype = torch.get_autocast_dtype(kind) if autocasts(kind) else hidden.dtype
    if chunk_size is None:
        chunk_size = max(1, CHUNK_ENTRIES.get(kind, CHUNK_ENTRIES["cpu"]) // len(weight))
    grad = torch.is_grad_enabled()
    wanted = grad and hidden.requires_grad, grad and weight.requires_grad
    return _chunks(hidden, weight, labels, ignore_index, chunk_size, dtype, *wanted)[0]


@torch.library.custom_op("fastweight::linear_cross_entropy", mutates_args=())
def _chunks(
    hidden: Tensor, weight: Tensor, labels: Tensor, ignore_index: int, chunk_size: int, dtype: torch.dtype,
    want_hidden: bool, want_weight: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The sum of losses and its gradients; an operator, so that a compiler leaves the loop alone."""
    vocab, wide = len(weight), torch.promote_types(dtype, torch.float32)
    with without_autocast(hidden.device.type):
        matrix = _aligned(weight.to(dtype))
        total = torch.zeros((), dtype=wide, device=hidden.device)
        d_hidden = torch.empty_like(hidden) if want_hidden else hidden.new_empty(0)
        d_weight = matrix.new_zeros(matrix.shape if want_weight else 0, dtype=wide)
        for start in range(0, len(hidden), chunk_size):
            rows = slice(start, start + chunk_size)
            part = hidden[rows].to(dtype)
            logits = part @ matrix.T  # [chunk, V]
            total += _rows(logits, labels[rows].contiguous(), vocab, ignore_index, want_hidden or want_weight).sum()
            if want_hidden:
                d_hidden[rows] = logits @ matrix
            if want_weight:
                _add_product(d_weight, logits.T, part)
    return total, d_hidden, d_weight[:vocab].to(weight.dtype) if want_weight else d_weight


@_chunks.register_fake
def _(hidden, weight, labels, ignore_index, chunk_size, dtype, want_hidden, want_weight):
    wide = torch.promote_types(dtype, torch.float32)
    return (
        hidden.new_empty((), dtype=wide),
        torch.empty_like(hidden) if want_hidden else hidden.new_empty(0),
        torch.empty_like(weight) if want_weight else weight.new_empty(0, dtype=wide),
    )


def _keep(ctx, inputs, output) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output[1:])
    ctx.wanted = inputs[-2:]


def _scaled(ctx, d_total, *d_gradients):
    if any(second is not None for second in d_gradients):
        raise RuntimeError("linear_cross_entropy has no second derivative; use output_logits=True and a loss of logits")
    grads = [
        gradient.mul(d_total).to(gradient.dtype) if wanted and d_total is not None else None
        for gradient, wanted in zip(ctx.saved_tensors, ctx.wanted, strict=True)
    ]
    return *grads, *([None] * 6)


_chunks.register_autograd(_scaled, setup_context=_keep)


def _aligned(weight: Tensor) -> Tensor:
    """W with rows of zeros up to a multiple of ALIGNMENT, in the 16-bit products of a GPU."""
    missing = -len(weight) % ALIGNMENT if weight.is_cuda and weight.element_size() == 2 else 0
    return F.pad(weight, (0, 0, 0, missing)) if missing else weight


def _rows(logits: Tensor, labels: Tensor, vocab: int, ignore_index: int, write: bool) -> Tensor:
    """Cross-entropy of each row; with `write` the logits become their own gradient."""
    if logits.is_cuda and logits.dtype != torch.float64 and importlib.util.find_spec("triton") is not None:
        from fastweight.kernels.cross_entropy import cross_entropy_rows

        return cross_entropy_rows(logits, labels, vocab, ignore_index, write)
    wide, counts = at_least_float32(logits[:, :vocab]), labels != ignore_index
    target = torch.where(counts, labels, 0)[:, None]
    if not logits.is_cuda and bool(((target < 0) | (target >= vocab)).any()):
        raise ValueError(f"labels: got {int(target.min())} to {int(target.max())}, expected ids from 0 to {vocab - 1}")
    log_sum = wide.logsumexp(-1, keepdim=True)
    losses = torch.where(counts, (log_sum - wide.gather(-1, target))[:, 0], 0)
    if write:
        gradient = torch.exp(wide - log_sum)
        gradient.scatter_(-1, target, gradient.gather(-1, target) - 1)
        logits.zero_()[:, :vocab] = torch.where(counts[:, None], gradient, 0)
    return losses


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, without rounding the product to 16 bits where the library can leave it in float32."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif a.is_cuda and hasattr(torch.ops.aten.mm, "dtype"):
        total += torch.ops.aten.mm.dtype(a, b, total.dtype)
    else:
        total += a.to(total.dtype) @ b.to(total.dtype)


def _liger(hidden: Tensor, weight: Tensor, labels: Tensor, ignore_index: int) -> Tensor:
    """The same sum through liger-kernel."""
    if importlib.util.find_spec("liger_kernel") is None or not hidden.is_cuda:
        raise ValueError(
            "fused_loss: got 'liger', expected 'chunked' where liger-kernel is not installed or there is no GPU "
            "(pip install liger-kernel)"
        )
    kernels = importlib.import_module("liger_kernel.transformers.functional")
    return kernels.liger_fused_linear_cross_entropy(hidden, weight, labels, ignore_index=ignore_index, reduction="sum")
