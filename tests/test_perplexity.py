"""Perplexity: equal to a longhand loop, whatever the windows, the batch, the padding, and the way a text comes in."""

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fastweight as fw
from fastweight import cli
from fastweight.data import load_tokenizer
from fastweight.data.prepare import PrepareOptions, prepare
from fastweight.evaluation import likelihood, texts
from fastweight.evaluation.checkpoint import LanguageModel, checkpoint_of, load_language_model
from fastweight.evaluation.likelihood import Piece, score
from fastweight.evaluation.perplexity import (
    Document,
    Ending,
    as_document,
    as_ending,
    last_word,
    perplexity,
    rolling,
)
from fastweight.evaluation.perplexity_report import by_context
from tests.texts import END, byte_tokenizer, documents

MIXERS = ("falcon-1", "transformer")


def save_model(checkpoint: Path, mixer: str) -> Path:
    """A tiny model that is far from uniform, so that a token out of place shows, and its tokenizer."""
    torch.manual_seed(3)
    config = fw.FastWeightConfig(
        vocab_size=300,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        mixer=mixer,
        initializer_range=0.2,
        max_position_embeddings=64,
    )
    fw.FastWeightForCausalLM(config).save_pretrained(checkpoint)
    load_tokenizer(byte_tokenizer(checkpoint / "tokenizer.json")).save(checkpoint)
    return checkpoint


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {mixer: save_model(tmp_path_factory.mktemp(mixer), mixer) for mixer in MIXERS}


@pytest.fixture(scope="module", params=MIXERS)
def loaded(request: pytest.FixtureRequest, checkpoints: dict[str, Path]) -> LanguageModel:
    return load_language_model(checkpoints[request.param], dtype="float32")


@pytest.fixture(scope="module")
def one(checkpoints: dict[str, Path]) -> LanguageModel:
    return load_language_model(checkpoints["falcon-1"])


def longhand(loaded: LanguageModel, ids: list[int], length: int, stride: int) -> list[tuple[int, float]]:
    """(tokens in context, loss) of every token: which window scores it follows from its place alone."""
    whole, found = [loaded.tokenizer.end_of_text, *ids], []
    for i in range(len(ids)):
        end = length if i < length else length + math.ceil((i + 1 - length) / stride) * stride
        end = min(end, len(ids))
        begin = max(0, end - length)
        with torch.no_grad():
            logits = loaded.model(torch.tensor([whole[begin : i + 1]])).logits[0, -1]
        found.append((i + 1 - begin, -float(logits.double().log_softmax(-1)[ids[i]])))
    return found


@pytest.mark.parametrize(("length", "stride"), [(64, 64), (16, 5), (1, 1)])
def test_every_token_counts_once_in_its_window(one: LanguageModel, length: int, stride: int) -> None:
    written = [*[text for text in documents(30) if 40 < len(text) < 70][:2], "a"]
    scored = [as_document(one.tokenizer, text) for text in written]
    expected = [pair for document in scored for pair in longhand(one, document.ids, length, stride)]
    found = perplexity(one.model, scored, end_of_text=0, length=length, stride=stride)
    assert found.num_documents == 3
    assert found.num_tokens == len(expected) == sum(found.position_counts)
    assert found.total_loss == pytest.approx(sum(loss for _, loss in expected), rel=1e-5)
    for context in range(1, length + 1):
        of_it = [loss for n, loss in expected if n == context]
        assert found.position_counts[context - 1] == len(of_it)
        assert found.position_losses[context - 1] == pytest.approx(sum(of_it), rel=1e-5, abs=1e-5)
    assert found.num_bytes == sum(len(text.encode()) for text in written)
    assert found.num_words == sum(len(text.split()) for text in written)
    assert found.token_perplexity == pytest.approx(math.exp(found.total_loss / found.num_tokens))
    assert found.word_perplexity == pytest.approx(math.exp(found.total_loss / found.num_words))
    assert found.bits_per_byte == pytest.approx(found.total_loss / math.log(2) / found.num_bytes)
    assert found.byte_perplexity == pytest.approx(2**found.bits_per_byte)


@pytest.mark.parametrize("count", [0, 1, 15, 16, 17, 32, 33, 50])
@pytest.mark.parametrize("stride", [1, 5, 16])
def test_windows_score_each_token_once_with_enough_before_it(count: int, stride: int) -> None:
    ids, done = list(range(1, count + 1)), 0
    for piece in rolling(ids, 0, 16, stride):
        targets = piece.ids[len(piece.ids) - piece.num_scored :]
        assert targets == ids[done : done + len(targets)]
        assert 2 <= len(piece.ids) <= 17
        assert piece.num_scored == len(piece.ids) - 1 or len(piece.ids) == 17
        assert len(piece.ids) - piece.num_scored >= min(done + 1, 17 - stride)
        done += len(targets)
    assert done == count


@pytest.mark.parametrize("batch_size", [1, 3, 64])
def test_the_batch_changes_nothing(loaded: LanguageModel, batch_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(likelihood, "BUFFERED", 2)
    scored = [as_document(loaded.tokenizer, text) for text in documents(12)]
    options: dict[str, Any] = {"end_of_text": 0, "length": 20, "stride": 11}
    told: list[tuple[int, int]] = []
    alone = perplexity(loaded.model, scored, batch_size=2, **options)
    together = perplexity(
        loaded.model, scored, batch_size=batch_size, progress=lambda *status: told.append(status), **options
    )
    assert together.total_loss == pytest.approx(alone.total_loss, rel=2e-6)
    assert np.array_equal(together.position_counts, alone.position_counts)
    assert np.allclose(together.position_losses, alone.position_losses, rtol=1e-5)
    assert told[-1] == (alone.num_tokens, alone.num_tokens)
    assert [done for done, _ in told] == sorted(done for done, _ in told)


def test_padding_is_never_seen(loaded: LanguageModel) -> None:
    """Rows beside a much longer one are as when alone, token by token, and what pads them does not matter."""
    ids = loaded.tokenizer.encode(documents(3)[2])
    pieces = [Piece(ids[:n], n - 1) for n in (2, 5, 9, len(ids))]
    together = {len(s.piece.ids): s for s in score(loaded.model, pieces, batch_size=4)}
    for piece in pieces:
        (alone,) = score(loaded.model, [piece], batch_size=1)
        assert np.allclose(together[len(piece.ids)].losses, alone.losses, rtol=1e-5, atol=1e-5)
        assert np.array_equal(together[len(piece.ids)].likeliest, alone.likeliest)
    assert np.allclose(together[9].losses, together[len(ids)].losses[:8], rtol=1e-5, atol=1e-5)


def test_last_words_are_those_that_greedy_decoding_finds(loaded: LanguageModel) -> None:
    tokenizer, contexts = loaded.tokenizer, [text.strip() for text in documents(8)]
    endings, losses = [], []
    for i, context in enumerate(contexts):
        ids = tokenizer.encode(context)
        with torch.no_grad():
            best = int(loaded.model(torch.tensor([ids])).logits[0, -1].argmax())
        target = best if i % 2 else (best + 1) % 300
        endings.append(Ending([*ids, target], 1))
        with torch.no_grad():
            logits = loaded.model(torch.tensor([ids])).logits[0, -1]
        losses.append(-float(logits.double().log_softmax(-1)[target]))
    found = last_word(loaded.model, endings, length=999, batch_size=3)
    assert (found.num_texts, found.accuracy) == (8, 0.5)
    assert found.accuracy_error == pytest.approx(math.sqrt(0.25 / 7))
    assert found.perplexity == pytest.approx(math.exp(sum(losses) / 8), rel=1e-5)
    long = Ending([*endings[1].ids[:-1], *tokenizer.encode(" the bird")], 2)
    cut = Ending(long.ids[-9:], 2)
    assert last_word(loaded.model, [long], length=8).perplexity == last_word(loaded.model, [cut], length=99).perplexity


def test_a_last_word_takes_the_white_space_before_it(one: LanguageModel) -> None:
    tokenizer = one.tokenizer
    for context, word in (("the old ", "stone"), ("the old", " stone")):
        ending = as_ending(tokenizer, context, word)
        assert ending.ids == tokenizer.encode("the old stone")
        assert tokenizer.decode(ending.ids[-ending.num_scored :]) == " stone"
    with pytest.raises(ValueError, match="expected a token of its own"):
        as_ending(tokenizer, "the old", "")


def test_the_same_text_by_every_way_is_the_same_documents(one: LanguageModel, tmp_path: Path) -> None:
    tokenizer, written = one.tokenizer, [text.strip() for text in documents(9)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in [*written, " "]))
    (tmp_path / "a.txt").write_bytes("\n\n".join(written).encode())
    expected = [as_document(tokenizer, text) for text in written]
    assert texts.documents_of_texts([str(tmp_path / "a.jsonl")], tokenizer) == expected
    assert texts.documents_of_texts([str(tmp_path / "a.txt")], tokenizer, separator="\n\n") == expected
    assert texts.documents_of_texts([str(tmp_path / "a.jsonl")], tokenizer, limit=4) == expected[:4]
    saved = str(tmp_path / "tokenizer")
    tokenizer.save(saved)
    prepare([str(tmp_path / "a.jsonl")], tmp_path / "data", tokenizer=saved, options=PrepareOptions(0.0))
    for limit, count in ((None, 9), (4, 4), (99, 9)):
        stream = Document(
            [i for document in expected[:count] for i in (*document.ids, tokenizer.end_of_text)],
            sum(document.num_bytes for document in expected[:count]),
            sum(document.num_words for document in expected[:count]),
        )
        assert texts.documents_of_data(tmp_path / "data", "train", tokenizer, limit) == [stream]
    other = load_tokenizer(byte_tokenizer(tmp_path / "other.json", vocab_size=290))
    with pytest.raises(ValueError, match=r"was prepared with .*, expected the model's tokenizer"):
        texts.documents_of_data(tmp_path / "data", "train", other)


def test_lambada_is_read_from_lines(one: LanguageModel, tmp_path: Path) -> None:
    lines = [{"context": "the old", "continuation": "stone"}, {"text": f"a {END} the bird"}]
    (tmp_path / "l.jsonl").write_text("".join(json.dumps(line) + "\n\n" for line in lines))
    endings = texts.documents_of_dataset(f"lambada={tmp_path / 'l.jsonl'}", one.tokenizer)
    assert [one.tokenizer.decode(ending.ids) for ending in endings] == ["the old stone", f"a {END} the bird"]
    assert all(isinstance(ending, Ending) for ending in endings)
    raw = json.dumps({"context": "the\u2028old", "continuation": "stone"}, ensure_ascii=False)
    (tmp_path / "l.jsonl").write_text(raw, encoding="utf-8")
    (ending,) = texts.documents_of_dataset(f"lambada={tmp_path / 'l.jsonl'}", one.tokenizer)
    assert one.tokenizer.decode(ending.ids) == "the\u2028old stone"
    for content, message in (("[1]", "line 1 is list, expected an object"), ("\n{x", "line 2 is no JSON")):
        (tmp_path / "l.jsonl").write_text(content)
        with pytest.raises(ValueError, match=message):
            texts.documents_of_dataset(f"lambada={tmp_path / 'l.jsonl'}", one.tokenizer)
    with pytest.raises(ValueError, match="dataset: got 'piqa', expected one of wikitext"):
        texts.documents_of_dataset("piqa", one.tokenizer)


def test_bad_settings_are_named(one: LanguageModel, tmp_path: Path) -> None:
    document = as_document(one.tokenizer, "a bird")
    bad: list[tuple[dict[str, Any], str]] = [
        ({"length": 0}, "length: got 0"),
        ({"length": 8, "stride": 9}, "stride: got 9, expected 1 to the length 8"),
        ({"length": 8, "stride": 0}, "stride: got 0"),
        ({"length": 8, "batch_size": 0}, "batch_size: got 0"),
    ]
    for options, message in bad:
        with pytest.raises(ValueError, match=message):
            perplexity(one.model, [document], end_of_text=0, **options)
    with pytest.raises(ValueError, match="documents: got 0 without a token"):
        perplexity(one.model, [], end_of_text=0, length=8)
    with pytest.raises(ValueError, match="expected a run directory or a checkpoint"):
        checkpoint_of(tmp_path)


def test_tokenizers_that_do_not_fit_are_refused(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    large = byte_tokenizer(tmp_path / "large.json", vocab_size=310)
    with pytest.raises(ValueError, match="has 310 ids, expected at most the model's 300"):
        load_language_model(checkpoints["falcon-1"], tokenizer=str(large))
    with pytest.raises(ValueError, match="dtype: got 'int8'"):
        load_language_model(checkpoints["falcon-1"], dtype="int8")
    for file in checkpoints["transformer"].glob("*"):
        if "tokenizer" not in file.name:
            (tmp_path / file.name).write_bytes(file.read_bytes())
    with pytest.raises(ValueError, match="holds none, expected one to be named"):
        load_language_model(tmp_path)


def test_means_by_context_cover_every_token(one: LanguageModel) -> None:
    scored = [as_document(one.tokenizer, text) for text in documents(4)]
    found = perplexity(one.model, scored, end_of_text=0, length=32)
    points = by_context(found)
    assert points[0] == (1.0, found.position_losses[0] / found.position_counts[0])
    assert 16 < points[-1][0] <= 32
    assert [x for x, _ in points] == sorted(x for x, _ in points)
    flat = perplexity(one.model, scored, end_of_text=0, length=1)
    assert by_context(flat) == [(1.0, pytest.approx(flat.loss))]


def run_main(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr("sys.argv", ["fastweight", *words])
    try:
        cli.main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    file = tmp_path / "a.txt"
    file.write_text("\n\n".join(documents(5)), encoding="utf-8")
    return file


def test_the_command_compares_models(
    checkpoints: dict[str, Path],
    text_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    paths, out = [str(checkpoints[mixer]) for mixer in ("falcon-1", "transformer")], tmp_path / "report"
    words = ["eval", "ppl", *paths, "--text", str(text_file), "--window", "sliding", "--length", "16", "--stride", "4"]
    assert run_main(monkeypatch, *words, "--out", str(out)) == 0
    said = capsys.readouterr().out
    report = json.loads((out / "perplexity.json").read_text())
    assert report["settings"]["stride"] == 4
    for path in paths:
        loaded = load_language_model(Path(path))
        expected = perplexity(
            loaded.model,
            [as_document(loaded.tokenizer, text_file.read_text())],
            end_of_text=0,
            length=16,
            stride=4,
        )
        assert report["models"][Path(path).name]["loss"] == pytest.approx(expected.loss)
        assert re.search(rf"{expected.loss:.3f}", said)
    assert (out / "perplexity.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "--data, --text, --dataset: got none or several"),
        (["--text", "a", "--dataset", "lambada"], "got none or several"),
        (["--text", "a", "--stride", "4"], "--stride: got 4 with disjoint windows"),
        (["--text", "missing.txt"], "source: got missing.txt"),
        (["--data", "missing"], "expected a directory finished by"),
    ],
)
def test_the_command_names_mistakes(
    words: list[str],
    message: str,
    checkpoints: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_main(monkeypatch, "eval", "ppl", str(checkpoints["falcon-1"]), *words) == 2
    assert message in " ".join(capsys.readouterr().err.split())
