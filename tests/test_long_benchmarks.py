"""The long-context benchmarks at small sizes: questions have answers, positions have losses, plans have bytes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import long_context, long_train, needle, scaling
from fastweight.models import FastWeightConfig, FastWeightForCausalLM


def test_every_question_has_its_pair_at_the_distance_that_is_said() -> None:
    for tokens in (64, 512):
        rows = needle.draw(50, tokens, torch.Generator().manual_seed(3))
        for ids, answers, distances in zip(*rows, strict=True):
            questions = ids[-2 * needle.PAIRS :: 2]
            assert len(set(questions.tolist())) == needle.PAIRS
            for i, key in enumerate(questions):
                (place,) = (ids[: -2 * needle.PAIRS] == key).nonzero()[:, 0]
                assert ids[place + 1] == answers[i]
                assert distances[i] == tokens - 2 * needle.PAIRS + 2 * i - place
            behind = ids[-2 * needle.PAIRS + 1 :: 2]
            assert bool((behind < needle.FILLERS).all())  # the answer is not shown
    assert int(rows.distances.max()) > 300
    assert (rows.distances < 30).double().mean() > 0.3  # evenly over logarithms


def test_recall_counts_right_answers_by_distance(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader of the row that looks 60 tokens back is right below that distance and nowhere else."""

    def look(model: object, ids: torch.Tensor) -> torch.Tensor:
        logits = torch.zeros(len(ids), needle.PAIRS, needle.VOCAB)
        start = ids.shape[1] - 2 * needle.PAIRS
        for row, i in torch.cartesian_prod(torch.arange(len(ids)), torch.arange(needle.PAIRS)).tolist():
            at = start + 2 * i
            found = (ids[row, max(at - 63, 0) : start] == ids[row, at]).nonzero()
            if len(found):
                logits[row, i, ids[row, max(at - 63, 0) + found[0, 0] + 1]] = 1
        return logits

    monkeypatch.setattr(needle, "answered", look)
    curve = needle.recall(torch.nn.Linear(1, 1), 256, problems=40, rows=20)
    assert sum(point["asked"] for point in curve) == 40 * needle.PAIRS
    for point in curve:
        assert point["right"] == (1.0 if point["distance"] < 64 else 0.0)


def test_models_whose_ending_is_unknown_are_refused() -> None:
    with pytest.raises(ValueError, match=r"models: got falcon-1a\.1, expected a mixer"):
        needle.model_of("falcon-1a.1", 16, 1)


def test_a_model_is_trained_asked_and_drawn(tmp_path: Path) -> None:
    words = ["--models", "falcon-1a.3", "--tokens", "64", "--lengths", "64,128", "--rows", "2", "--steps", "2"]
    needle.main(
        [*words, "--width", "16", "--layers", "1", "--problems", "2", "--test-rows", "2", "--out", str(tmp_path)]
    )
    told = json.loads((tmp_path / "needle.json").read_text())
    assert told["made"]["command"].startswith("python -m benchmarks.needle --models falcon-1a.3 ")
    (result,) = told["results"]
    assert result["steps"] == 2
    assert [one["tokens"] for one in result["curves"]] == [64, 128]
    (tmp_path / "needle.png").unlink()
    needle.main(["--draw-only", "--out", str(tmp_path)])
    assert (tmp_path / "needle.png").read_bytes().startswith(b"\x89PNG")
    needle.main(["--merge", *[str(tmp_path / "needle.json")] * 2, "--out", str(tmp_path / "merged")])
    merged = json.loads((tmp_path / "merged" / "needle.json").read_text())
    assert merged["results"] == [result, result]
    assert merged["made"]["command"] == "; ".join([told["made"]["command"]] * 2)


@pytest.fixture
def model() -> FastWeightForCausalLM:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 16,
    }
    return FastWeightForCausalLM(FastWeightConfig(mixer="falcon-1", vocab_size=40, initializer_range=0.2, **sizes))


def test_losses_of_tokens_are_those_of_the_model_in_any_segments(model: FastWeightForCausalLM, assert_close) -> None:
    ids = torch.randint(40, (2, 50), generator=torch.Generator().manual_seed(1))
    expected = model.eval()(input_ids=ids, labels=ids).loss.detach()
    for segment in (50, 17, 7):
        found = long_train.losses(model, ids, segment)
        assert found.shape == (2, 49)
        assert_close(found.mean(), expected, torch.float32)
    row = long_train.read(model, ids.flatten(), 50, 7, short=10)
    assert (row["rows"], row["agrees"]) == (2, True)
    afresh = [model(input_ids=part, labels=part).loss.item() for part in ids.view(-1, 1, 10)]
    assert row["fresh"] == pytest.approx(sum(afresh) / len(afresh), abs=1e-4)
    spans = [(p["from"], p["to"]) for p in long_train.by_position(torch.zeros(1, 200), torch.zeros(1, 200))]
    assert spans == [(0, 64), (64, 128), (128, 200)]
    mean = sum((p["to"] - p["from"]) * p["loss"] for p in row["curve"]) / 49
    assert mean == pytest.approx(float(expected), rel=1e-5)


def test_readings_that_differ_do_not_agree(model: FastWeightForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = torch.zeros(64, dtype=torch.long)
    n_losses = {64: (1, 63), 16: (1, 63), 8: (8, 7)}
    for other, agrees in ((3.01, True), (3.1, False), (float("nan"), False)):
        found = {64: 3.0, 16: other, 8: 4.0}
        monkeypatch.setattr(long_train, "losses", lambda model, ids, n, of=found: torch.full(n_losses[n], of[n]))
        row = long_train.read(model, ids, 64, 16, short=8)
        assert (row["agrees"], row["fresh"]) == (agrees, 4.0)


def test_allocations_follow_storages_as_they_come_and_go() -> None:
    x = torch.zeros(1000)
    with scaling.Allocations() as live:
        y = x + 1  # 4,000 bytes
        z = (y * 2).view(10, 100).sum()  # 4,000 more, gone again, and 4
        assert live.live == 4004
        assert live.peak == 8004
        del y
    assert live.live == 4
    assert z == 2000


def test_the_plan_grows_with_the_row_and_falls_with_checkpoints() -> None:
    small = [f"model.{name}=32" for name in ("hidden_size", "intermediate_size", "vocab_size")]
    small += ["model.num_attention_heads=2", "model.num_hidden_layers=3"]
    plans = [long_train.planned("falcon-1.3", T, small) for T in (1024, 4096)]
    assert plans[0]["bytes_per_token"] == pytest.approx(plans[1]["bytes_per_token"], rel=0.05)
    kept = long_train.planned("falcon-1.3", 1024, [*small, "engine.gradient_checkpointing=false"])
    assert kept["bytes_per_token"] > 1.3 * plans[0]["bytes_per_token"]


def test_rows_that_short_ones_do_not_fill_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        long_train.main(["--data", "somewhere", "--tokens", "4096,5000"])
    assert "--tokens: got [4096, 5000], expected multiples of --learn-tokens 2048" in capsys.readouterr().err


def test_a_failed_recipe_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_train.sys, "executable", "/bin/false")
    long_train.main(["--data", str(tmp_path), "--recipes", "falcon-1.3", "--out", str(tmp_path)])
    (row,) = json.loads((tmp_path / "long_train.json").read_text())["rows"]
    assert (row["recipe"], row["part"]) == ("falcon-1.3", "failed")
    assert row["reason"].startswith("exit code 1")


def test_the_picture_of_losses_is_drawn_from_the_file(tmp_path: Path) -> None:
    curve = [{"from": 0, "to": 64, "loss": 4.0, "fresh": 4.0}, {"from": 64, "to": 128, "loss": 3.9, "fresh": 4.1}]
    row = {"recipe": "falcon-1.3", "part": "read", "rows": 2, "length": 128, "short": 64, "curve": curve}
    learned = {"recipe": "falcon-1.3", "part": "learned", "length": 64}
    (tmp_path / "long_train.json").write_text(json.dumps({"rows": [learned, row]}))
    long_train.main(["--draw-only", "--out", str(tmp_path)])
    assert (tmp_path / "long_train.png").read_bytes().startswith(b"\x89PNG")


def test_drift_is_measured_against_a_judge_that_is_the_recurrence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--rules", "falcon-1,falcon-3a", "--tokens", "256", "--segment", "64", "--width", "8"]
    long_context.main([*words, "--out", str(tmp_path)])
    results = json.loads((tmp_path / "drift.json").read_text())["results"]
    (tmp_path / "drift.png").unlink()
    long_context.main(["--draw-only", "--out", str(tmp_path)])
    assert (tmp_path / "drift.png").read_bytes().startswith(b"\x89PNG")
    merged = tmp_path / "merged"
    long_context.main(["--merge", *[str(tmp_path / "drift.json")] * 2, "--out", str(merged)])
    assert json.loads((merged / "drift.json").read_text())["results"] == 2 * results
    assert (merged / "drift.png").read_bytes().startswith(b"\x89PNG")
    for result in results:
        assert result["judge"] < 1e-12
        assert result["position"] == [64, 128, 192, 256]
        assert max(result["o"]) < 5e-3  # bfloat16 outputs
        assert max(result["S"]) < 1e-5
    whole = long_context.fw.fast_weight_attention

    def wrong(*given: Any, form: str = "auto", **how: Any) -> Any:
        o, state = whole(*given, form=form, **how)
        return (o * (1 + 1e-9) if form == "chunk" else o), state

    monkeypatch.setattr(long_context.fw, "fast_weight_attention", wrong)
    with pytest.raises(RuntimeError, match="falcon-1: the chunk form"):
        long_context.main([*words, "--out", str(tmp_path)])
