"""What the tasks share: the shape of a batch of problems, and generators that are pure functions of a seed."""

import hashlib
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from jaxtyping import Int
from torch import Tensor
from torch.utils.data import Dataset

IGNORE = -100


class Problems(NamedTuple):
    """Problems as tokens.

    Fields:
        input_ids: [B, T].
        labels: what is scored, IGNORE elsewhere, [B, T]; unshifted: the tokens before t predict the label at t.
        sizes: how hard each problem is, in the task's own unit, [B].
    """

    input_ids: Int[Tensor, "B T"]
    labels: Int[Tensor, "B T"]
    sizes: Int[Tensor, "B"]


class Tokens(Protocol):
    """What training reads of problems."""

    @property
    def input_ids(self) -> Int[Tensor, "B T"]: ...

    @property
    def labels(self) -> Int[Tensor, "B T"]: ...


# (sizes [B], generator) -> B problems
Draw = Callable[[Int[Tensor, "B"], torch.Generator], Problems]


def generator_for(seed: int, stream: str, index: int) -> torch.Generator:
    """A fresh generator that is a pure function of (seed, stream, index); a stream is one purpose, as "test"."""
    key = hashlib.blake2b(f"{seed}/{stream}/{index}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(key, "big") >> 1)


class DrawnBatches(Dataset[dict[str, Tensor]]):
    """Map-style training data whose item i is the i-th whole micro-batch, a pure function of (seed, i).

    Whole batches as items keep generation vectorised, and a run resumed at micro-batch i sees exactly what an
    uninterrupted one sees, whatever the number of processes.

    Args:
        draw: of the task.
        sizes: smallest and largest size, both included; drawn uniformly for each problem.
        batch_size: problems in one item.
        num_batches: number of items.
        seed: of the whole run's data.
    """

    one_size = False  # an item's problems are all of the one size that is drawn for it

    def __init__(
        self,
        draw: Callable[[Int[Tensor, "B"], torch.Generator], Tokens],
        sizes: tuple[int, int],
        batch_size: int,
        num_batches: int,
        seed: int,
    ) -> None:
        self.draw, self.sizes, self.batch_size = draw, sizes, batch_size
        self.num_batches, self.seed = num_batches, seed

    def __len__(self) -> int:
        return self.num_batches

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Item `index`: {"input_ids", "labels"}, each [batch_size, T]; IndexError past the end."""
        if not 0 <= index < self.num_batches:
            raise IndexError(f"index: got {index}, expected 0 to {self.num_batches - 1}")
        generator = generator_for(self.seed, "train", index)
        drawn = 1 if self.one_size else self.batch_size
        sizes = torch.randint(self.sizes[0], self.sizes[1] + 1, (drawn,), generator=generator)
        problems = self.draw(sizes.expand(self.batch_size), generator)
        return {"input_ids": problems.input_ids, "labels": problems.labels}


def permutations(rows: int, count: int, taken: int, generator: torch.Generator) -> Int[Tensor, "B N"]:
    """For each row, `taken` different numbers below `count` in random order."""
    return torch.rand(rows, count, generator=generator).argsort(dim=-1)[:, :taken]
