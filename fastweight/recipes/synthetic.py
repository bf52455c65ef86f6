"""Tasks that are drawn, not read: associative recall and state tracking as settings of a recipe.

Both answer the same questions, so that training and evaluation need not know which one it is: the vocabulary, a draw of
problems of given sizes, the sizes to train on and those to test. A size is a number of pairs (recall) or of group
elements (tracking).
"""

from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch

from fastweight.tasks import mqar, tracking
from fastweight.tasks.problems import Draw, Problems, generator_for


@dataclass(frozen=True)
class DrawnTask:
    """What the drawn tasks have in common.

    Fields:
        train_sizes: smallest and largest size in training, drawn uniformly for each problem.
        test_sizes: smallest and largest size in the test; sizes between them double from the smallest.
        test_problems, validation_problems: of each size.
        test_seed: of the held-out problems, the same for every model.
    """

    train_sizes: tuple[int, int] = (1, 16)
    test_sizes: tuple[int, int] = (4, 64)
    test_problems: int = 256
    validation_problems: int = 128
    test_seed: int = 0

    def __post_init__(self) -> None:
        for name in ("train_sizes", "test_sizes"):
            low, high = getattr(self, name)
            if not 1 <= low <= high:
                raise ValueError(f"task.{name}: got {(low, high)}, expected [smallest, largest], from 1 up")
        for name in ("test_problems", "validation_problems"):
            if getattr(self, name) < 1:
                raise ValueError(f"task.{name}: got {getattr(self, name)}, expected at least 1 problem")

    @property
    def tested(self) -> list[int]:
        """The sizes of the test."""
        low, high = self.test_sizes
        sizes = []
        while low < high:
            sizes.append(low)
            low *= 2
        return [*sizes, high]

    @property
    def vocab_size(self) -> int:
        raise NotImplementedError

    @property
    def draw(self) -> Draw:
        raise NotImplementedError

    @property
    def padded_draw(self) -> Draw:
        """The same problems of training sizes, all batches of one length: that of the longest."""
        return self.draw

    @property
    def longest(self) -> int:
        """Tokens of the longest training sequence."""
        raise NotImplementedError

    @property
    def chance(self) -> float:
        """Share of right tokens by guessing."""
        raise NotImplementedError

    def held_out(self, size: int, count: int, stream: str = "test") -> Problems:
        """`count` problems of one size: the same for every model that is scored with this seed and stream."""
        return self.draw(torch.full((count,), size), generator_for(self.test_seed, stream, size))


@dataclass(frozen=True)
class RecallTask(DrawnTask):
    """Multi-query associative recall (`tasks/mqar.py`); a size is a number of pairs.

    Fields:
        kind: "mqar".
        length: tokens of every sequence; at least four for each pair.
        num_keys, num_values: tokens that can be keys, and values.
    """

    kind: Literal["mqar"] = "mqar"
    length: int = 256
    num_keys: int = 256
    num_values: int = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        most = max(self.train_sizes[1], self.test_sizes[1])
        if 4 * most > self.length or most > self.num_keys:
            raise ValueError(
                f"task.length, task.num_keys: got {self.length}, {self.num_keys}, expected at least {4 * most} tokens "
                f"and {most} keys for {most} pairs"
            )

    @property
    def vocab_size(self) -> int:
        return mqar.vocab_size(self.num_keys, self.num_values)

    @property
    def draw(self) -> Draw:
        return partial(mqar.draw, length=self.length, num_keys=self.num_keys, num_values=self.num_values)

    @property
    def longest(self) -> int:
        return self.length

    @property
    def chance(self) -> float:
        return 1 / self.num_values


@dataclass(frozen=True)
class TrackingTask(DrawnTask):
    """Products of group elements (`tasks/tracking.py`); a size is a number of elements.

    Fields:
        kind: "tracking".
        group: "parity", "s3" or "s5".
    """

    kind: Literal["tracking"] = "tracking"
    group: tracking.Group = "parity"

    @property
    def vocab_size(self) -> int:
        return len(tracking.elements(self.group)) + 1

    @property
    def draw(self) -> Draw:
        return partial(tracking.draw, group=self.group)

    @property
    def padded_draw(self) -> Draw:
        return partial(tracking.draw, group=self.group, longest=self.train_sizes[1])

    @property
    def longest(self) -> int:
        return self.train_sizes[1] + 1

    @property
    def chance(self) -> float:
        return 1 / len(tracking.elements(self.group))
