"""lm-evaluation-harness: our model under its name, made-up tasks offline, and figures that agree with our own."""

import json
import multiprocessing
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fastweight as fw
from fastweight.data import load_tokenizer
from fastweight.evaluation import harness
from fastweight.evaluation.checkpoint import LanguageModel, load_language_model
from fastweight.evaluation.harness import TaskScore
from fastweight.evaluation.perplexity import as_document, as_ending, last_word, perplexity
from tests.texts import END, byte_tokenizer, documents

pytest.importorskip("lm_eval")
EXAMPLES = Path(__file__).parents[1] / "examples" / "harness"
LENGTH, LONGER = 24, 48  # shorter than most texts, but not than an answer


@pytest.fixture(scope="module", autouse=True)
def offline() -> Any:
    """No test asks the network, and no file lands in the home of the user."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("HF_DATASETS_OFFLINE", "1")
        yield


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    """A tiny model far from uniform, with its tokenizer."""
    checkpoint = tmp_path_factory.mktemp("checkpoint")
    torch.manual_seed(3)
    config = fw.FastWeightConfig(
        vocab_size=300,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        mixer="falcon-1",
        initializer_range=0.2,
        max_position_embeddings=LENGTH,
    )
    fw.FastWeightForCausalLM(config).save_pretrained(checkpoint)
    load_tokenizer(byte_tokenizer(checkpoint / "tokenizer.json")).save(checkpoint)
    return load_language_model(checkpoint)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files in the forms of the published ones, made up; answers differ in length."""
    place, texts = tmp_path_factory.mktemp("data"), [text.strip() for text in documents(40)]
    questions = [
        {"query": f"Question: {texts[i]}", "choices": [texts[i + 1][:9], texts[i + 2][:30]], "gold": i % 2}
        for i in range(10)
    ]
    for name in ("piqa", "arc_easy", "arc_challenge", "openbook_qa", "siqa"):
        _write_rows(place / f"{name}.jsonl", questions)
    beginnings = [{"context_options": texts[i : i + 2], "continuation": "sings over.", "gold": 1} for i in range(10)]
    _write_rows(place / "winogrande.jsonl", beginnings)
    endings = [{"context": f"{texts[i]} the quick {END}", "continuation": "bird"} for i in range(10)]
    _write_rows(place / "lambada_openai.jsonl", endings)
    pages = "".join(f" = Title {i} = \n {texts[i]}\n = = Part = = \n {texts[i + 20]}\n" for i in range(5))
    (place / "wikitext2_test.txt").write_text(pages, encoding="utf-8")
    return place


def _write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def run(loaded: LanguageModel, data: Path, tasks: list[str], **options: Any) -> dict[str, TaskScore]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FASTWEIGHT_EVAL_DATA", str(data))
        scores = harness.evaluate(loaded, tasks, include=EXAMPLES, say=lambda text: None, **options)
    return {score.task: score for score in scores}


def loss_of(loaded: LanguageModel, context: str, answer: str) -> float:
    """Negative log-likelihood of an answer, longhand: one forward pass, one token after another."""
    before, ids = (loaded.tokenizer.encode(text) for text in (context, context + answer))
    kept = ids[-(LONGER + 1) :]
    logits = loaded.model(torch.tensor([kept[:-1]])).logits[0].detach().double().log_softmax(-1)
    scored = range(len(kept) - (len(ids) - len(before)), len(kept))
    return -sum(float(logits[t - 1, kept[t]]) for t in scored)


def test_our_model_is_known_by_its_name() -> None:
    from lm_eval.api.registry import get_model

    import fastweight.evaluation.harness_model as ours

    assert get_model("fastweight") is ours.FastWeightLM


def test_multiple_choice_is_what_the_losses_say(loaded: LanguageModel, data: Path) -> None:
    names = ["local_arc_challenge", "local_winogrande"]
    scores = run(loaded, data, names, length=LONGER)
    right: dict[str, list[bool]] = {"acc": [], "acc_norm": [], "winogrande": []}
    for line in (data / "arc_challenge.jsonl").read_text().splitlines():
        row = json.loads(line)
        losses = np.array([loss_of(loaded, row["query"] + "\nAnswer:", f" {choice}") for choice in row["choices"]])
        right["acc"].append(losses.argmin() == row["gold"])
        right["acc_norm"].append((losses / [len(choice) for choice in row["choices"]]).argmin() == row["gold"])
    for line in (data / "winogrande.jsonl").read_text().splitlines():
        row = json.loads(line)
        losses = [loss_of(loaded, context, f" {row['continuation']}") for context in row["context_options"]]
        right["winogrande"].append(np.argmin(losses) == row["gold"])
    arc, winogrande = (scores[name] for name in names)
    assert (arc.measure, winogrande.measure) == ("acc_norm", "acc")
    assert arc.value == arc.measures["acc_norm"] == pytest.approx(np.mean(right["acc_norm"]))
    assert arc.measures["acc"] == pytest.approx(np.mean(right["acc"]))
    assert winogrande.value == pytest.approx(np.mean(right["winogrande"]))
    assert (arc.num_samples, arc.num_fewshot) == (10, 0)


def test_an_answer_longer_than_the_context_is_refused(loaded: LanguageModel, data: Path) -> None:
    with pytest.raises(ValueError, match=r"max_length \(--length\): got 2 tokens, expected at least \d+"):
        run(loaded, data, ["local_arc_challenge"], length=2)


def test_perplexities_agree_with_our_own(loaded: LanguageModel, data: Path) -> None:
    scores = run(loaded, data, ["local_wikitext", "local_lambada"], length=LENGTH)
    text = (data / "wikitext2_test.txt").read_text()
    pages = [f" = Title {page}" for page in text.split(" = Title ")[1:]]
    tokenizer = loaded.tokenizer
    ours = perplexity(
        loaded.model,
        [as_document(tokenizer, page) for page in pages],
        end_of_text=tokenizer.end_of_text,
        length=LENGTH,
    )
    assert ours.num_tokens > 5 * LENGTH  # several windows a page
    wikitext = scores["local_wikitext"]
    for name in ("word_perplexity", "byte_perplexity", "bits_per_byte"):
        assert wikitext.measures[name] == pytest.approx(getattr(ours, name), rel=1e-5)
    assert wikitext.measure == "word_perplexity"
    rows = [json.loads(line) for line in (data / "lambada_openai.jsonl").read_text().splitlines()]
    endings = [as_ending(tokenizer, f"{row['context']} ", row["continuation"]) for row in rows]
    words = last_word(loaded.model, endings, length=LENGTH)
    lambada = scores["local_lambada"]
    assert lambada.measures["perplexity"] == pytest.approx(words.perplexity, rel=1e-5)
    assert lambada.measures["acc"] == words.accuracy


def test_nothing_is_forked(
    loaded: LanguageModel, data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The harness draws standard errors of perplexities in forks, and a fork of a process with threads can hang."""

    def refused(*args: Any, **options: Any) -> None:
        raise AssertionError("a fork")

    monkeypatch.setattr(multiprocessing, "Pool", refused)
    monkeypatch.delenv("DISABLE_MULTIPROC", raising=False)
    run(loaded, data, ["local_lambada"], length=LENGTH)
    assert "bootstrapping for stddev: perplexity" in capsys.readouterr().out
    assert "DISABLE_MULTIPROC" not in os.environ


def test_shots_and_limits_are_obeyed(loaded: LanguageModel, data: Path) -> None:
    names = ["local_piqa", "local_arc_easy", "local_openbookqa", "local_social_iqa_letters"]
    scores = run(loaded, data, names, num_fewshot=1, limit=4, length=100)
    assert {(score.num_fewshot, score.num_samples) for score in scores.values()} == {(1, 4)}
    name, value = harness.average(list(scores.values())) or ("", 0.0)
    assert name == "average of 3 of the paper's eight"
    assert value == pytest.approx(np.mean([scores[task].value for task in names[:3]]))


def test_the_papers_average_is_over_its_eight_with_its_measures() -> None:
    measures = {"acc": 0.25, "acc_norm": 0.75}
    scores = [TaskScore(task, 0, 1, m, measures[m], None, measures) for task, m in harness.PAPER.items()]
    assert harness.average(scores) == ("average of the paper's eight", (5 * 0.25 + 3 * 0.75) / 8)
    extra = TaskScore("lambada_openai", 0, 1, "acc", 0.0, None, {"acc": 0.0})
    assert harness.average([*scores, extra]) == harness.average(scores)
    assert harness.average([extra]) is None


def test_unknown_tasks_and_missing_packages_are_named(
    loaded: LanguageModel, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=r"include: got .*nowhere"):
        harness.evaluate(loaded, ["local_piqa"], include=data / "nowhere")
    monkeypatch.delenv("FASTWEIGHT_EVAL_DATA", raising=False)
    with pytest.raises(ValueError, match="FASTWEIGHT_EVAL_DATA: got nothing, expected the directory"):
        harness.evaluate(loaded, ["local_piqa"], include=EXAMPLES, say=lambda text: None)
    monkeypatch.setitem(__import__("sys").modules, "lm_eval", None)
    with pytest.raises(ValueError, match=r'needs lm-eval, which is not installed: pip install "fastweight\[eval\]"'):
        harness.evaluate(loaded, ["local_piqa"])
