"""Variable-digit addition: seeds into problems as character tokens (paper, section 5.2).

One problem of width n is the sequence

    digits(a)  "+"  digits(b)  "="  reversed digits(a + b)        n + 1 + n + 1 + (n + 1) = 3 n + 3 tokens

a and b are written most significant digit first, the sum least significant digit first, so that a carry runs in the
direction of reading. With `least_first` a and b are turned around as well (not in the paper): the digits that a digit
of the sum needs are then as far behind it as all others of its width, n + 1 and 2 n + 2 tokens, and not 2 i further
with every step i. Choices where the paper is silent: a and b are padded with zeros to exactly n digits and the sum
to exactly n + 1 (every digit of a and b is uniform and independent, so a problem of width n is uniform over 10^(2n));
there is no begin or end token (the length of the answer follows from the prompt). Loss counts on the answer only.

Traps: token ids of the digits are the digits themselves, so PAD is 12 and not 0. Widths may be mixed in a batch:
shorter problems are padded on the right, which needs no attention mask because every mixer is causal and padded labels
are IGNORE. There are only 100 problems of width 1, so "held out" there means a different draw, not unseen pairs.
"""

from functools import partial
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Bool, Int
from torch import Tensor

from fastweight.tasks.problems import IGNORE, DrawnBatches, generator_for

CHARACTERS = "0123456789+="
PLUS, EQUALS, PAD = 10, 11, 12
VOCAB_SIZE = 13

Layout = Literal["mixed", "single"]


class AdditionBatch(NamedTuple):
    """Problems as tokens, padded on the right to one length T = 3 max(widths) + 3.

    Fields:
        input_ids: prompt and answer, [B, T]; PAD after the end.
        labels: the answer where it stands in input_ids, IGNORE elsewhere, [B, T]; unshifted, as causal LMs expect.
        widths: digits per summand, [B].
    """

    input_ids: Int[Tensor, "B T"]
    labels: Int[Tensor, "B T"]
    widths: Int[Tensor, "B"]


def encode(text: str) -> Int[Tensor, "T"]:
    """Token ids of a text of digits, "+" and "="; ValueError on any other character."""
    unknown = sorted(set(text) - set(CHARACTERS))
    if unknown:
        raise ValueError(f"text: got {''.join(unknown)!r} in {text!r}, expected only the characters {CHARACTERS}")
    return torch.tensor([CHARACTERS.index(character) for character in text], dtype=torch.long)


def decode(ids: Int[Tensor, "T"]) -> str:
    """The text of token ids; PAD and ids outside the vocabulary become "_"."""
    return "".join(CHARACTERS[i] if 0 <= i < len(CHARACTERS) else "_" for i in ids.tolist())


def add_digits(a: Int[Tensor, "B N"], b: Int[Tensor, "B N"]) -> Int[Tensor, "B N+1"]:
    """Digits of a + b, least significant first, from the digits of a and b, most significant first.

    A carry leaves place i exactly when the nearest place at or below i whose digit sum is not 9 has a sum above 9, so
    one running maximum finds all carries at once.
    """
    total = torch.flip(a + b, dims=[-1])  # [B, N], least significant first
    place = torch.arange(total.shape[-1], device=total.device)
    decided = torch.where(total == 9, -1, place).cummax(dim=-1).values  # the place that decides the carry out of i
    carry_out = torch.where(decided < 0, 0, (total > 9).long().gather(-1, decided.clamp(min=0)))
    carry_in = F.pad(carry_out, (1, 0))  # [B, N + 1]
    return (F.pad(total, (0, 1)) + carry_in) % 10


def problems(
    a: Int[Tensor, "B N"], b: Int[Tensor, "B N"], widths: Int[Tensor, "B"], least_first: bool = False
) -> AdditionBatch:
    """Lay out summands as token sequences; a row of width n uses the last n digits of a and b (the rest must be 0)."""
    batch, most = a.shape
    answer = add_digits(a, b)
    pieces = torch.cat(
        [
            a,
            torch.full((batch, 1), PLUS),
            b,
            torch.full((batch, 1), EQUALS),
            answer,
            torch.full((batch, 1), PAD),
        ],
        dim=-1,
    )  # [B, 3 N + 4]: where every token of every row can be fetched from
    n = rearrange(widths, "b -> b 1")
    at = torch.arange(3 * int(widths.max()) + 3)  # [T], position in the row's own layout
    # Leading digits beyond a row's width are skipped: once before a, once more before b.
    source = at + (most - n) + torch.where(at > n, most - n, 0)
    if least_first:
        source = torch.where(at < n, most - 1 - at, source)
        source = torch.where((at > n) & (at < 2 * n + 1), 2 * most + 1 + n - at, source)
    in_answer = (at >= 2 * n + 2) & (at < 3 * n + 3)
    source = torch.where(at < 3 * n + 3, source, pieces.shape[-1] - 1)
    input_ids = pieces.gather(-1, source)
    return AdditionBatch(input_ids, torch.where(in_answer, input_ids, IGNORE), widths)


def draw(
    widths: Int[Tensor, "B"], generator: torch.Generator, longest: int = 0, least_first: bool = False
) -> AdditionBatch:
    """One random problem for each entry of `widths` (each at least 1), on the CPU; the same sums in either order.

    Rows are padded as if the batch had a problem of width `longest` too, which changes none that are drawn.
    """
    if widths.numel() == 0 or int(widths.min()) < 1:
        raise ValueError(f"widths: got {widths.tolist()}, expected at least one width, each at least 1 digit")
    most = int(widths.max())
    digits = torch.randint(10, (2, widths.shape[0], most), generator=generator)
    used: Bool[Tensor, "B N"] = torch.arange(most) >= most - rearrange(widths, "b -> b 1")
    a, b = digits * used
    ids, labels, _ = problems(a, b, widths, least_first)
    missing = max(3 * (longest - most), 0)
    return AdditionBatch(F.pad(ids, (0, missing), value=PAD), F.pad(labels, (0, missing), value=IGNORE), widths)


def held_out(width: int, count: int, seed: int, stream: str = "test", *, least_first: bool = False) -> AdditionBatch:
    """`count` problems of one width: the same for every model that is scored with this seed and stream."""
    return draw(torch.full((count,), width), generator_for(seed, stream, width), least_first=least_first)


class AdditionBatches(DrawnBatches):
    """Training data of addition: DrawnBatches of sums, whose sizes are their widths.

    Args:
        widths: smallest and largest training width, both included; drawn uniformly.
        batch_size: problems in one item.
        num_batches: number of items.
        seed: of the whole run's data.
        layout: "mixed" draws a width for each problem and pads on the right, all items to one length, so that what is
            compiled for a shape is compiled once; "single" draws one width for each item (no padding, but a noisier
            gradient when a step has few items).
        least_first: a and b with their least significant digit first.
    """

    def __init__(
        self,
        widths: tuple[int, int],
        batch_size: int,
        num_batches: int,
        seed: int,
        layout: Layout = "mixed",
        least_first: bool = False,
    ) -> None:
        if not 1 <= widths[0] <= widths[1]:
            raise ValueError(f"widths: got {widths}, expected a range of digits (smallest, largest) from 1 up")
        if batch_size < 1 or num_batches < 0:
            raise ValueError(f"batch_size, num_batches: got {batch_size}, {num_batches}, expected >= 1 and >= 0")
        if layout not in ("mixed", "single"):
            raise ValueError(f"layout: got {layout!r}, expected 'mixed' or 'single'")
        padded = partial(draw, longest=widths[1] if layout == "mixed" else 0, least_first=least_first)
        super().__init__(padded, widths, batch_size, num_batches, seed)
        self.one_size = layout == "single"
