"""What callers may hand a model, brought to the two forms that the layers know: a bool mask and document bounds.

attention_mask comes 2-D in any dtype, as None, or as a dictionary by kind of layer. Packed documents come as
`cu_seqlens` or `cu_seq_lens_q`, or as positions that start again at 0. Traps: positions say something about documents
only where nothing is padded and no cache is filled, because the positions of padded tokens are 0 as well. Reading them
breaks the graph of compiled code (and is refused with fullgraph=True), so there a mask that is given counts as padding
and a cache as filled, whatever they hold: that is generation, which is compiled whole. An exported graph never reads
them.
"""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from fastweight.layers.convolution import position_in_document
from fastweight.memory.modes import has_values
from fastweight.parallel.group import current, gather
from fastweight.parallel.layout import whole


def padding_mask(
    attention_mask: Tensor | dict[str, Tensor] | None, hidden_states: Float[Tensor, "B T D"]
) -> Bool[Tensor, "B S"] | None:
    """True for real tokens, cached ones included; None when all are (seen outside compiled code only)."""
    if isinstance(attention_mask, dict):
        attention_mask = attention_mask.get("linear_attention")
    if attention_mask is None:
        return None
    B, T = hidden_states.shape[:2]
    if attention_mask.ndim != 2 or attention_mask.shape[0] != B or attention_mask.shape[1] < T:
        raise ValueError(
            f"attention_mask: got shape {tuple(attention_mask.shape)}, expected [{B}, {T}], "
            "with one more column in front for every cached token"
        )
    mask = attention_mask.bool()
    return None if has_values(mask) and bool(mask.all()) else mask


def one_of(name: str, value: Any, other_name: str, other: Any) -> Any:
    """The one of two names for the same argument that was used; both at once raise ValueError."""
    if value is not None and other is not None and value is not other:
        raise ValueError(f"{name}: got {name} and {other_name}, expected one of them: they mean the same")
    return value if value is not None else other


def document_bounds(
    cu_seqlens: Int[Tensor, " N+1"] | None,
    cu_seq_lens_q: Int[Tensor, " N+1"] | None,
    position_ids: Int[Tensor, "b T"] | None,
    attention_mask: Any,
    cache: Any,
) -> Int[Tensor, " N+1"] | None:
    """cu_seqlens under either name, else read off positions that start again at 0; None for whole rows."""
    bounds = one_of("cu_seqlens", cu_seqlens, "cu_seq_lens_q", cu_seq_lens_q)
    if bounds is not None or position_ids is None or torch.compiler.is_exporting():
        return bounds
    if position_ids.ndim != 2:
        raise ValueError(f"position_ids: got shape {tuple(position_ids.shape)}, expected [1 or batch, tokens]")
    # Not `has_values`: where this frame is not compiled and that one is, it would say no, and documents would mix.
    known = type(position_ids) is Tensor and position_ids.device.type != "meta"
    goes_on = cache is not None and (torch.compiler.is_compiling() or not cache.is_empty)
    if not known or goes_on or _may_be_padded(attention_mask):
        return None
    place = current()
    position_ids = position_ids if place is None else whole(place, position_ids)
    starts = (position_ids[:, 1:] == 0).nonzero()[:, 1] + 1
    if len(starts) == 0:
        return None
    if len(position_ids) != 1:
        raise ValueError(
            f"position_ids: got several documents in a batch of {len(position_ids)}, expected packed documents in one "
            "row (batch 1), or an attention_mask"
        )
    return torch.cat([F.pad(starts, (1, 0)), starts.new_tensor([position_ids.shape[1]])])


def _may_be_padded(attention_mask: Any) -> bool:
    if isinstance(attention_mask, dict):
        attention_mask = attention_mask.get("linear_attention")
    if attention_mask is None:
        return False
    # Only a row alone can be packed; and asking costs a synchronisation.
    return len(attention_mask) != 1 or not has_values(attention_mask) or not bool(attention_mask.all())


def without_document_starts(labels: Int[Tensor, "B T"], cu_seqlens: Int[Tensor, " N+1"] | None) -> Int[Tensor, "B T"]:
    """No document is asked to predict the first token of the next one."""
    if cu_seqlens is None:
        return labels
    T, place = labels.shape[1], current()
    rank, size = (0, 1) if place is None else (place.rank, place.size)
    positions = position_in_document(cu_seqlens.to(labels.device), T * size)[rank * T : (rank + 1) * T]
    return labels.masked_fill(positions == 0, -100)


def labels_of_ranks(labels: Int[Tensor, "B T"], loss: dict[str, Any]) -> dict[str, Any]:
    """Keywords of the loss; inside `context_parallel` the last token's label is the next rank's first one.

    The loss is then this rank's part of the whole: the mean is over the labels of all ranks, and their losses add up.
    """
    place = current()
    if place is None:
        return loss
    ignored, shifted = loss.get("ignore_index", -100), loss.get("shift_labels")
    if shifted is None:
        (firsts,) = gather(place, None, labels[:, :1])
        after = firsts[place.rank + 1] if place.rank + 1 < place.size else torch.full_like(firsts[0], ignored)
        shifted = torch.cat((labels[:, 1:], after), dim=1)
    items = loss.get("num_items_in_batch")
    if items is None:
        (counts,) = gather(place, None, shifted.ne(ignored).sum())
        items = counts.sum()
    return loss | {"shift_labels": shifted, "num_items_in_batch": items}
