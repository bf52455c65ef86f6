"""The addition task: problems against Python's integers, purity of the seeds, layout, scorers on made-up answers."""

import random
from types import SimpleNamespace

import pytest
import tiny
import torch
from torch import nn

from fastweight.tasks import addition, scoring
from fastweight.tasks.addition import IGNORE, PAD, AdditionBatches, held_out


def longhand(a: str, b: str) -> str:
    """The sequence for two digit strings of one length, by Python's integers."""
    answer = str(int(a) + int(b)).zfill(len(a) + 1)
    return f"{a}+{b}={answer[::-1]}"


@pytest.mark.parametrize("width", [1, 2, 7, 32, 48, 100])
def test_problems_equal_python_integers(width: int) -> None:
    batch = held_out(width, 50, seed=3)
    for row, labels in zip(batch.input_ids, batch.labels, strict=True):
        text = addition.decode(row)
        a, b = text[:width], text[width + 1 : 2 * width + 1]
        assert text == longhand(a, b)
        assert (labels[: 2 * width + 2] == IGNORE).all()
        assert labels[2 * width + 2 :].tolist() == row[2 * width + 2 :].tolist()


def test_summands_turned_around_are_the_same_sums() -> None:
    widths = torch.tensor([1, 5, 2, 3, 5])
    there, back = (addition.draw(widths, torch.Generator().manual_seed(1), 6, turned) for turned in (False, True))
    assert torch.equal(there.labels, back.labels)
    for n, plain, turned in zip(widths.tolist(), there.input_ids, back.input_ids, strict=True):
        plain, turned = addition.decode(plain), addition.decode(turned)
        assert turned[:n] == plain[:n][::-1]
        assert turned[n + 1 : 2 * n + 1] == plain[n + 1 : 2 * n + 1][::-1]
        assert turned[n] + turned[2 * n + 1 :] == plain[n] + plain[2 * n + 1 :]
    held = [held_out(7, 20, seed=3, least_first=turned).input_ids[:, :7] for turned in (False, True)]
    assert torch.equal(held[0].flip(-1), held[1])


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("9", "9"),
        ("999999", "000001"),  # one carry through every place
        ("099999", "000001"),
        ("555555", "444445"),
        ("989898", "010101"),
        ("909090", "909090"),  # carries that do not run on
        ("000000", "000000"),
        ("999999", "999999"),
        ("199990", "000010"),
    ],
)
def test_carry_chains(a: str, b: str) -> None:
    batch = addition.problems(addition.encode(a)[None], addition.encode(b)[None], torch.tensor([len(a)]))
    assert addition.decode(batch.input_ids[0]) == longhand(a, b)


def test_long_carry_chains_equal_python_integers() -> None:
    """Digits that add up to 8, 9 or 10 nearly everywhere, so that chains of every length occur."""
    rng = random.Random(0)
    for _ in range(200):
        a = "".join(rng.choice("0123456789") for _ in range(24))
        b = "".join(str(min(9, max(0, 9 - int(digit) + rng.choice([-1, 0, 0, 0, 1])))) for digit in a)
        got = addition.add_digits(addition.encode(a)[None], addition.encode(b)[None])[0]
        assert addition.decode(got)[::-1] == str(int(a) + int(b)).zfill(25)


def test_mixed_widths_are_each_right_and_padded_on_the_right() -> None:
    widths = torch.tensor([3, 1, 5, 2, 5])
    batch = addition.draw(widths, torch.Generator().manual_seed(1))
    assert batch.input_ids.shape == batch.labels.shape == (5, 18)
    for row, labels, width in zip(batch.input_ids, batch.labels, widths.tolist(), strict=True):
        end = 3 * width + 3
        text = addition.decode(row[:end])
        assert text == longhand(text[:width], text[width + 1 : 2 * width + 1])
        assert (row[end:] == PAD).all()
        assert (labels != IGNORE).nonzero().flatten().tolist() == list(range(2 * width + 2, end))


def test_items_have_one_shape_and_hold_what_is_drawn() -> None:
    """Whatever the widths of an item, which without padding decide its length."""
    items = AdditionBatches((1, 6), 2, 30, seed=0)
    shapes = {items[i]["input_ids"].shape for i in range(30)}
    assert shapes == {(2, 21)}
    widths = torch.tensor([3, 1])
    bare, padded = (addition.draw(widths, torch.Generator().manual_seed(1), longest=n) for n in (0, 6))
    assert torch.equal(padded.input_ids[:, :12], bare.input_ids)
    assert torch.equal(padded.labels[:, :12], bare.labels)
    assert (padded.input_ids[:, 12:] == PAD).all()
    assert (padded.labels[:, 12:] == IGNORE).all()


def test_digits_are_uniform() -> None:
    """Every digit of both summands, the leading one included: chi-square over 20,000 draws, 9 degrees of freedom."""
    batch = held_out(4, 20_000, seed=0)
    for place in (0, 3, 5, 8):
        counts = torch.bincount(batch.input_ids[:, place], minlength=10).double()
        assert ((counts - 2000) ** 2 / 2000).sum() < 40  # p < 1e-5


def test_items_are_a_pure_function_of_seed_and_index() -> None:
    one, two = AdditionBatches((1, 6), 16, 100, seed=5), AdditionBatches((1, 6), 16, 1000, seed=5)
    later = two[70]
    for index in (0, 3, 70):
        torch.testing.assert_close(one[index], two[index], rtol=0, atol=0)
    assert torch.equal(two[70]["input_ids"], later["input_ids"])
    other_seed = AdditionBatches((6, 6), 16, 100, seed=6)[3]["input_ids"]
    fixed = AdditionBatches((6, 6), 16, 100, seed=5)
    assert not torch.equal(fixed[3]["input_ids"], other_seed)
    assert not torch.equal(fixed[3]["input_ids"], fixed[4]["input_ids"])
    assert not torch.equal(held_out(6, 16, seed=5).input_ids, fixed[6]["input_ids"])


def test_drawing_does_not_touch_the_global_generator() -> None:
    before = torch.get_rng_state()
    AdditionBatches((1, 6), 16, 100, seed=5)[3]
    held_out(4, 8, seed=1)
    assert torch.equal(before, torch.get_rng_state())


def test_layouts_cover_the_range_of_widths() -> None:
    def widths_of(item: dict[str, torch.Tensor]) -> list[int]:
        return ((item["labels"] != IGNORE).sum(dim=-1) - 1).tolist()

    single = AdditionBatches((2, 5), 8, 60, seed=0, layout="single")
    seen = [set(widths_of(single[i])) for i in range(60)]
    assert all(len(widths) == 1 for widths in seen)
    assert set.union(*seen) == {2, 3, 4, 5}
    assert set(widths_of(AdditionBatches((2, 5), 200, 1, seed=0)[0])) == {2, 3, 4, 5}


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: AdditionBatches((0, 4), 8, 1, seed=0), "widths"),
        (lambda: AdditionBatches((5, 4), 8, 1, seed=0), "widths"),
        (lambda: AdditionBatches((1, 4), 0, 1, seed=0), "batch_size"),
        (lambda: AdditionBatches((1, 4), 8, 1, seed=0, layout="rows"), "layout"),  # type: ignore[arg-type]
        (lambda: addition.draw(torch.tensor([2, 0]), torch.Generator()), "widths"),
        (lambda: addition.encode("12 + 3"), "text"),
    ],
)
def test_bad_arguments_are_named(call, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        call()


def one_hot_logits(predicted: torch.Tensor) -> torch.Tensor:
    """Logits [B, T, V] whose argmax at position t is predicted[t + 1]."""
    shifted = torch.roll(predicted, -1, dims=-1)
    return torch.nn.functional.one_hot(shifted, addition.VOCAB_SIZE).double()


def test_token_hits_on_hand_made_predictions() -> None:
    batch = addition.problems(
        addition.encode("1285")[:, None].reshape(2, 2), torch.tensor([[3, 4], [1, 5]]), torch.tensor([2, 2])
    )
    # 12 + 34 = 46 -> "640"; 85 + 15 = 100 -> "001".
    assert [addition.decode(row) for row in batch.input_ids] == ["12+34=640", "85+15=001"]
    guess = batch.input_ids.clone()
    guess[1, -2] = 7  # one wrong digit in the second answer
    guess[0, :6] = 9  # anything in the prompt does not count
    hits = scoring.token_hits(one_hot_logits(guess), batch.labels)
    assert hits.tolist() == [[True, True, True], [True, False, True]]


class Adder(nn.Module):
    """A stand-in causal LM that adds exactly, except that it loses the carry into place `broken` (None: never)."""

    def __init__(self, broken: int | None = None) -> None:
        super().__init__()
        self.weight, self.broken = nn.Parameter(torch.zeros(())), broken

    def answer(self, text: str) -> int:
        """The next answer digit after "a+b=answer so far", with the carry read off the answer so far."""
        summands, _, answer = text.partition("=")
        a, b = summands.split("+")
        place = len(answer)
        digits = [int(x[::-1][place - 1]) for x in (a, b)] if place else [0, 0]
        carry = 0 if not place else int(sum(digits) - int(answer[-1]) not in (0, -1))
        here = [int(x[::-1][place]) if place < len(a) else 0 for x in (a, b)]
        return (sum(here) + (0 if place == self.broken else carry)) % 10

    def forward(self, input_ids: torch.Tensor, use_cache: bool = False) -> SimpleNamespace:
        logits = torch.zeros(*input_ids.shape, addition.VOCAB_SIZE)
        for row, ids in enumerate(input_ids):
            text = addition.decode(ids)
            for at in range(text.index("="), len(text)):
                if at + 1 - text.index("=") <= text.index("+") + 1:
                    logits[row, at, self.answer(text[: at + 1])] = 1
        return SimpleNamespace(logits=logits)

    def generate(self, input_ids: torch.Tensor, max_new_tokens: int, **kwargs: object) -> torch.Tensor:
        for _ in range(max_new_tokens):
            logits = self(input_ids).logits[:, -1:]
            input_ids = torch.cat([input_ids, logits.argmax(dim=-1)], dim=-1)
        return input_ids


def test_scores_of_a_perfect_and_of_a_broken_adder() -> None:
    batch = held_out(5, 64, seed=2)
    perfect = scoring.score(Adder(), batch, chunk=50)
    assert perfect == scoring.Score(5, 64, 1.0, 1.0, 1.0, 1.0)
    broken = scoring.score(Adder(broken=2), batch, chunk=50)
    texts = [addition.decode(row) for row in batch.input_ids]
    lost = [int(text[3:5]) + int(text[9:11]) >= 100 for text in texts]  # a carry comes into place 2
    assert 0 < sum(lost) < 64
    assert broken.exact == broken.generated == 1 - sum(lost) / 64
    assert broken.token == pytest.approx(1 - sum(lost) / (64 * 6))
    assert broken.generated_token is not None
    assert broken.generated_token < broken.token  # the wrong digit misleads the next one


@pytest.mark.parametrize("mixer", ["falcon-3a", "transformer"])
def test_widths_that_are_generated_together_are_those_generated_apart(mixer: str) -> None:
    model, batches = tiny.build(mixer), []
    for width in (1, 3, 4):
        prompts, answers = scoring.split(held_out(width, 5, seed=0))
        own = scoring.generate_answers(model, prompts, answers.shape[1]).clone()
        own[2, width] += 1  # a digit that the model does not say
        batches.append(addition.AdditionBatch(torch.cat((prompts, own), dim=1), own, torch.full((5,), width)))
    for hits, width in zip(scoring.generated_hits(model, batches, chunk=7), (1, 3, 4), strict=True):
        wanted = torch.ones(5, width + 1, dtype=torch.bool)
        wanted[2, width] = False
        assert torch.equal(hits, wanted)


def test_scores_leave_the_mode_and_refuse_mixed_widths() -> None:
    model = Adder()
    model.train()
    scoring.score(model, held_out(2, 4, seed=0), generate=False)
    assert model.training
    mixed = addition.draw(torch.tensor([1, 2]), torch.Generator())
    with pytest.raises(ValueError, match="widths"):
        scoring.score(model, mixed)
    with pytest.raises(ValueError, match="labels"):
        scoring.token_hits(one_hot_logits(mixed.input_ids), mixed.labels)
