"""The benchmark's honesty: its gate sees wrong values and wrong gradients, and without a green gate there is no time.

No clock is judged here; timing is only checked for order and bookkeeping.
"""

import json
from dataclasses import replace

import pytest
import torch
from rich.console import Console

from benchmarks import cases, gate, scaling, stages, timing
from benchmarks.report import Growth, Report, environment

SMALL = cases.Shape(1, 70, 2, 8)


class _HalfGradient(torch.autograd.Function):
    """The identity with half of its gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, *grads):
        return 0.5 * grads[0]


def square(inputs):
    return {"y": inputs["x"] ** 2}


@pytest.fixture
def quiet():
    return Console(quiet=True)


@pytest.fixture
def inputs():
    return {"x": torch.linspace(-1, 1, 9, dtype=torch.float64)}


def test_gate_is_green_for_equals_and_names_the_worst_otherwise(inputs):
    assert gate.check("same", square, square, inputs, 0.0).green
    verdict = gate.check("off", lambda i: {"y": 1.01 * i["x"] ** 2}, square, inputs, 1e-3)
    assert not verdict.green
    assert verdict.errors["y"] == pytest.approx(0.01)


def test_gate_sees_a_wrong_gradient_behind_right_values(inputs):
    verdict = gate.check("half", lambda i: {"y": _HalfGradient.apply(i["x"]) ** 2}, square, inputs, 1e-3)
    assert verdict.errors["y"] == 0
    assert verdict.worst == "d x"
    assert verdict.errors["d x"] == pytest.approx(0.5)
    assert not verdict.green


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_gate_is_red_for_what_is_not_finite_missing_or_of_another_shape(inputs, bad):
    spoiled = gate.check("nan", lambda i: {"y": i["x"] ** 2 + bad}, square, inputs, 1e9, gradients=False)
    missing = gate.compare("missing", {}, {"y": torch.ones(1)}, 1e9)
    shape = gate.compare("shape", {"y": torch.ones(2)}, {"y": torch.ones(1)}, 1e9)
    assert not any(verdict.green for verdict in (spoiled, missing, shape))


def test_an_input_without_influence_has_gradient_zero(inputs):
    results = gate.values_and_gradients(square, inputs | {"unused": torch.ones(3, dtype=torch.float64)})
    assert torch.equal(results["d unused"], torch.zeros(3, dtype=torch.float64))


@pytest.mark.parametrize("name", sorted(cases.contestants()))
def test_every_contestant_passes_its_gate(quiet, name):
    assert all(verdict.green for verdict in stages.gate_all(quiet, [name], cases.contestants(), SMALL))


def test_a_red_gate_gets_no_time(quiet):
    known = cases.contestants()
    honest = known["falcon-1"]

    def wrong(tensors, final_state):
        o, S = honest.run(tensors, final_state)
        return 1.001 * o, S

    known["falcon-1a"] = replace(honest, run=wrong)
    race = cases.Race("r", SMALL, "falcon-1", ("falcon-1", "falcon-1a"), "cost", {("falcon-1a", "fwd"): 100.0})
    verdicts, rows = stages.run_race(quiet, race, known, list(race.contestants), timing.Plan(repeats=1))
    red = [row for row in rows if row.contestant == "falcon-1a"]
    assert not all(verdict.green for verdict in verdicts)
    assert [row.verdict for row in red] == ["red gate"] * 2
    assert all(row.median_ms is None and row.ratio is None for row in red)
    assert all(row.median_ms is not None for row in rows if row.contestant == "falcon-1")


def test_ratios_and_targets_read_the_right_way_round():
    times = {"base": timing.Timing((4.0, 2.0, 3.0)), "own": timing.Timing((1.0, 1.0, 2.0))}
    speed = cases.Race("r", SMALL, "base", ("base", "own"), "speed-up", {("own", "fwd"): 3.0})
    cost = cases.Race("r", SMALL, "base", ("base", "own"), "cost", {("own", "fwd"): 0.3})
    fast, cheap = (stages.row_of(race, "own", "fwd", times) for race in (speed, cost))
    assert (fast.ratio, fast.ratio_of_minima, fast.verdict) == (3.0, 2.0, "pass")
    assert cheap.ratio == pytest.approx(1 / 3)
    assert cheap.verdict == "miss"
    assert (fast.median_ms, fast.min_ms, fast.max_ms) == (1000, 1000, 2000)


def test_rounds_are_interleaved_and_turn_round():
    order = []
    calls = {name: (lambda name=name: order.append(name)) for name in "ab"}
    times = timing.interleaved(calls, timing.Plan(repeats=3))
    assert "".join(order) == "ab" + "ab" + "ba" + "ab"
    assert all(len(time.seconds) == 3 for time in times.values())


def test_saved_bytes_counts_each_storage_once():
    x = torch.ones(1000, dtype=torch.float64, requires_grad=True)
    assert scaling.saved_bytes(lambda: (x * x).exp()) == 2 * 8000  # x once, and the result of exp
    assert scaling.exponent([1, 2, 4], [3.0, 12.0, 48.0]) == pytest.approx(2)


def test_report_is_written_with_where_it_comes_from(tmp_path):
    race = cases.Race("r", SMALL, "base", ("base", "own"), "speed-up", {("own", "fwd"): 3.0})
    times = {"base": timing.Timing((2.0,)), "own": timing.Timing((1.0,))}
    rows = [stages.row_of(race, name, "fwd", times) for name in race.contestants]
    verdict = gate.Verdict("own", {"o": 1e-7}, 1e-4)
    report = Report(environment("a command"), [verdict], rows, growths=[Growth("own", 1.0, 1.0, 1.0, "pass")])
    report.save(tmp_path)
    saved = json.loads((tmp_path / "benchmark.json").read_text())
    assert saved["environment"]["command"] == "a command"
    assert saved["environment"]["torch"] == torch.__version__
    text = (tmp_path / "benchmark.md").read_text()
    assert "1 of 2 targets met: not own fwd (1, 70, 2, 8) (miss)" in text
    assert (tmp_path / "benchmark.png").read_bytes().startswith(b"\x89PNG")
