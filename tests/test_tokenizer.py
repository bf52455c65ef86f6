"""Tokenizers: text round trips, special tokens stay text, and equal tokenizers are known as equal."""

import json
from pathlib import Path

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers
from transformers import AutoTokenizer

from fastweight.data import Tokenizer, load_tokenizer
from tests.texts import END, byte_tokenizer, documents

TEXTS = ["", " ", f"a {END} b{END}", "naïve  don't\n\n\t x=1 中文 🙂 e\u0301\u00a0", "\r\n </s> ", *documents(5)]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_tokenizer(tmp_path_factory.mktemp("tokenizer") / "tokenizer.json")


def test_text_comes_back_and_special_tokens_in_it_stay_text(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fast = load_tokenizer(path)
    monkeypatch.setattr("fastweight.data.tokenizer._tiktoken", lambda backend: None)
    plain = load_tokenizer(path)
    assert (fast.fast, plain.fast) == (True, False)
    for tokenizer in (fast, plain):
        batch = tokenizer.encode_batch(TEXTS)
        assert batch == [tokenizer.encode(text) for text in TEXTS]
        assert [tokenizer.decode(ids) for ids in batch] == TEXTS
        assert not any(tokenizer.end_of_text in ids for ids in batch)
        assert (tokenizer.vocab_size, tokenizer.end_of_text) == (300, 0)
    assert fast.encode_batch(TEXTS) == plain.encode_batch(TEXTS)
    assert fast.fingerprint == plain.fingerprint
    assert fast.decode([0]) == END


def test_every_way_to_the_same_tokenizer_has_the_same_fingerprint(path: Path, tmp_path: Path) -> None:
    original = load_tokenizer(path)
    original.save(tmp_path / "saved")
    model = json.loads(path.read_text())["model"]
    gpt2 = tmp_path / "gpt2"
    gpt2.mkdir()
    (gpt2 / "encoder.json").write_text(json.dumps(model["vocab"]))
    merges = "\n".join(" ".join(pair) for pair in model["merges"])
    (gpt2 / "vocab.bpe").write_text(f"#version: 0.2\n{merges}\n", encoding="utf-8")
    for again in (load_tokenizer(tmp_path / "saved"), load_tokenizer(gpt2), load_tokenizer(path.parent)):
        assert again.fingerprint == original.fingerprint
        assert again.encode_batch(TEXTS) == original.encode_batch(TEXTS)
    other = byte_tokenizer(tmp_path / "other.json", vocab_size=290)
    assert load_tokenizer(other).fingerprint != original.fingerprint


def test_transformers_reads_what_is_saved(path: Path, tmp_path: Path) -> None:
    original = load_tokenizer(path)
    original.save(tmp_path / "saved")
    auto = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert (auto.eos_token, auto.eos_token_id, auto.bos_token_id) == (END, 0, 0)
    for text in documents(5):
        assert auto(text).input_ids == original.encode(text)  # nothing is added in front


def test_tiktoken_is_used_only_where_it_gives_the_same(tmp_path: Path) -> None:
    words = tokenizers.Tokenizer(models.WordLevel({END: 0, "a": 1, "[UNK]": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    assert not Tokenizer("words", words, END).fast
    told = json.loads(byte_tokenizer(tmp_path / "bpe.json").read_text())
    told["pre_tokenizer"]["add_prefix_space"] = True
    (tmp_path / "bpe.json").write_text(json.dumps(told))
    prefixed = load_tokenizer(tmp_path / "bpe.json")
    assert not prefixed.fast
    assert prefixed.decode(prefixed.encode("bird")) == " bird"


def test_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer: .* cannot be read"):
        load_tokenizer(tmp_path)
    with pytest.raises(ValueError, match=r"expected a tokenizer\.json, a directory with one"):
        load_tokenizer(tmp_path / "missing")
    byte_tokenizer(tmp_path / "odd.json", special="[STOP]")
    with pytest.raises(ValueError, match="has no end-of-text token"):
        load_tokenizer(tmp_path / "odd.json")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "[STOP]"}}))
    assert load_tokenizer(tmp_path / "odd.json").end == "[STOP]"
