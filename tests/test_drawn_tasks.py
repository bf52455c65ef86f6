"""Associative recall and state tracking: problems against loops in Python, purity of seeds, settings, one small run."""

import itertools

import pytest
import torch
from torch import nn

from fastweight.layers.attention import FastWeightAttention
from fastweight.layers.delta import DeltaAttention
from fastweight.recipes import DrawnTask, RecallTask, TrackingTask, load_recipe
from fastweight.tasks import mqar, tracking
from fastweight.tasks.problems import IGNORE, DrawnBatches, Problems
from fastweight.training.material import material_of
from fastweight.training.model import config_of

RECALL = RecallTask(length=48, num_keys=20, num_values=9, train_sizes=(1, 8), test_sizes=(2, 12))
FIRST_KEY, FIRST_VALUE = mqar.NUM_FILLERS, mqar.NUM_FILLERS + 20


def check_recall(ids: list[int], labels: list[int], size: int, most: int) -> None:
    """One row, by reading it from left to right."""
    told = {ids[2 * i]: ids[2 * i + 1] for i in range(size)}
    assert len(told) == size, "keys are different"
    assert all(FIRST_KEY <= key < FIRST_VALUE <= value for key, value in told.items())
    asked = [t for t in range(2 * most, len(ids)) if ids[t] >= FIRST_KEY]
    assert sorted(ids[t] for t in asked) == sorted(told), "each key is asked for once, and nothing else"
    assert all(t % 2 == 0 for t in asked)
    assert {t + 1 for t in asked} == {t for t, label in enumerate(labels) if label != IGNORE}
    assert all(labels[t + 1] == told[ids[t]] for t in asked)
    assert all(ids[t] < FIRST_KEY for t in range(2 * size, 2 * most))


def test_every_question_of_recall_has_the_value_of_its_key():
    sizes = torch.tensor([1, 3, 12, 12, 7] * 20)
    problems = RECALL.draw(sizes, torch.Generator().manual_seed(0))
    assert problems.input_ids.shape == (100, 48)
    for row in range(100):
        check_recall(problems.input_ids[row].tolist(), problems.labels[row].tolist(), int(sizes[row]), 12)
    assert int(problems.input_ids.max()) < RECALL.vocab_size


def test_questions_come_early_more_often_than_late_and_in_random_order():
    problems = mqar.draw(torch.full((4000,), 2), torch.Generator().manual_seed(1), length=68, num_keys=8, num_values=4)
    at = (problems.labels != IGNORE).double().mean(dim=0)[5::2]
    assert at[0] > 3 * at[8] > 0
    first = (problems.input_ids[:, 4:] >= FIRST_KEY).double().argmax(dim=1) + 4
    asked = problems.input_ids.gather(1, first[:, None])[:, 0]
    assert abs(float((asked == problems.input_ids[:, 0]).double().mean()) - 0.5) < 0.05


@pytest.mark.parametrize("group", ["parity", "s3", "s5"])
def test_labels_of_tracking_are_the_products_so_far(group):
    known = tracking.elements(group)
    problems = tracking.draw(torch.tensor([5, 1, 9, 9]), torch.Generator().manual_seed(2), group=group)
    assert problems.input_ids.shape == (4, 10)
    for ids, labels, size in zip(problems.input_ids.tolist(), problems.labels.tolist(), [5, 1, 9, 9], strict=True):
        things = list(range(len(known[0])))  # where each thing is now
        for t in range(size):
            things = [known[ids[t]][place] for place in things]
            assert labels[t + 1] == known.index(tuple(things))
        assert ids[size:] == [len(known)] * (10 - size)
        assert {labels[0], *labels[size + 1 :]} == {IGNORE}


def test_batches_of_tracking_have_one_length_and_the_same_problems():
    task = TrackingTask(group="s3", train_sizes=(2, 9))
    sizes = torch.tensor([2, 5, 4])
    short, long = (draw(sizes, torch.Generator().manual_seed(0)) for draw in (task.draw, task.padded_draw))
    assert short.input_ids.shape == (3, 6)
    assert long.input_ids.shape == (3, task.longest)
    assert torch.equal(long.input_ids[:, :6], short.input_ids)
    assert torch.equal(long.labels[:, :6], short.labels)
    assert (long.labels[:, 6:] == IGNORE).all()
    items = load_recipe("s3-tiny", ["training.batch_size=2", "training.steps=40", "task.train_sizes=[2,9]"])
    data = material_of(items).train
    assert {data[i]["input_ids"].shape for i in range(40)} == {(2, 10)}


@pytest.mark.parametrize("group", ["parity", "s3"])
def test_products_are_those_of_a_group(group):
    table = tracking.products(group)
    elements = range(len(table))
    for a, b, c in itertools.product(elements, repeat=3):
        assert table[table[a, b], c] == table[a, table[b, c]]
    assert table[0].tolist() == table[:, 0].tolist() == list(elements)
    if group == "parity":
        assert table.tolist() == [[0, 1], [1, 0]]
    else:
        assert not torch.equal(table, table.T)


def test_drawn_batches_are_a_pure_function_of_seed_and_index():
    one, two = (DrawnBatches(RECALL.draw, (1, 8), 4, count, seed=5) for count in (10, 100))
    later = two[7]["input_ids"]
    assert torch.equal(one[3]["input_ids"], two[3]["input_ids"])
    assert torch.equal(two[7]["input_ids"], later)
    assert not torch.equal(one[3]["input_ids"], one[4]["input_ids"])
    assert not torch.equal(one[3]["input_ids"], DrawnBatches(RECALL.draw, (1, 8), 4, 10, seed=6)[3]["input_ids"])
    assert torch.equal(RECALL.held_out(4, 3).labels, RECALL.held_out(4, 3).labels)
    assert not torch.equal(RECALL.held_out(4, 3).labels, RECALL.held_out(4, 3, "validation").labels)
    with pytest.raises(IndexError):
        one[10]


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: RecallTask(length=63, test_sizes=(1, 16)), "task.length"),
        (lambda: RecallTask(num_keys=8), "task.num_keys"),
        (lambda: TrackingTask(train_sizes=(3, 2)), "task.train_sizes"),
        (lambda: TrackingTask(test_problems=0), "task.test_problems"),
        (lambda: RECALL.draw(torch.tensor([13]), torch.Generator()), "sizes"),
        (lambda: TrackingTask().draw(torch.tensor([0]), torch.Generator()), "sizes"),
        (lambda: load_recipe("parity-tiny", ["task.group=s4"]), "task.group"),
    ],
)
def test_wrong_settings_are_named(make, named):
    with pytest.raises(ValueError, match=named):
        make()


def test_tested_sizes_double():
    assert RecallTask(test_sizes=(4, 64)).tested == [4, 8, 16, 32, 64]
    assert TrackingTask(test_sizes=(3, 20)).tested == [3, 6, 12, 20]
    assert TrackingTask(test_sizes=(5, 5)).tested == [5]


class Oracle(nn.Module):
    """Answers every labelled token rightly (or always with token 0), by knowing the problems."""

    def __init__(self, known: list[Problems], right: bool, vocab_size: int) -> None:
        super().__init__()
        self.weight, self.right, self.vocab_size = nn.Parameter(torch.zeros(())), right, vocab_size
        self.answers = {tuple(i.tolist()): y for p in known for i, y in zip(p.input_ids, p.labels, strict=True)}

    def forward(self, input_ids, use_cache=False):
        from types import SimpleNamespace

        labels = torch.stack([self.answers[tuple(row.tolist())] for row in input_ids]).clamp(min=0)
        wanted = torch.roll(labels, -1, dims=-1) if self.right else torch.zeros_like(labels)
        return SimpleNamespace(logits=torch.nn.functional.one_hot(wanted, self.vocab_size).double())


@pytest.mark.parametrize("name", ["mqar-tiny", "s3-tiny"])
def test_validation_of_a_perfect_and_of_an_ignorant_model(name):
    run = load_recipe(name, ["task.validation_problems=200"])
    task = run.task
    assert isinstance(task, DrawnTask)
    low, high = task.train_sizes
    known = [task.held_out(size, 200, "validation") for size in (low, (low + high) // 2, high)]
    perfect = material_of(run).validate(Oracle(known, True, task.vocab_size))
    assert set(perfect.values()) == {1.0}
    ignorant = material_of(run).validate(Oracle(known, False, task.vocab_size))["token"]
    assert ignorant == 0 if name == "mqar-tiny" else abs(ignorant - task.chance) < 0.05


@pytest.mark.parametrize("step", ["normalized", "direct"])
@pytest.mark.parametrize("cap", [None, 1.0, 2.0])
@torch.no_grad()
def test_gains_stay_below_their_cap_and_the_first_carries_do_not_depend_on_it(step, cap):
    def layer(cap):
        made = FastWeightAttention(16, 4, rule="falcon-1", qk_norm="l2", max_gain=cap)
        return FastWeightAttention(16, 4, rule=made.rule.replace(step=step, ridge="scaled"), qk_norm="l2", max_gain=cap)

    gain, ridge = layer(cap)._gates(1e4 * torch.randn(1, 500, 16, generator=torch.Generator().manual_seed(0)))
    reached = gain * (1 + ridge.max()) if step == "direct" else gain
    assert 0.95 * (cap or 2.0) < float(reached.max()) <= (cap or 2.0) + 1e-5
    start_gain, start_ridge = layer(cap)._gates(torch.zeros(1, 1, 16))
    eta = start_gain if step == "direct" else start_gain / (1 + start_ridge)
    want = 1 - 1 / torch.logspace(4, 10, 4, base=2)
    torch.testing.assert_close(1 - (eta * start_ridge)[0, 0], want, rtol=1e-4, atol=1e-4)


def test_the_cap_reaches_every_mixer_that_has_a_gain():
    for mixer in ("falcon-1", "falcon-2a", "deltanet", "gated-deltanet"):
        assert config_of(load_recipe("parity-tiny", [f"model.mixer={mixer}"])).max_gain == 2
    assert DeltaAttention(16, 2, decay=False).max_gain == 1
    for wrong in (0.0, 2.5, -1.0):
        with pytest.raises(ValueError, match="max_gain"):
            DeltaAttention(16, 2, decay=False, max_gain=wrong)
