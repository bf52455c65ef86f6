"""`fastweight generate` for text: what streams out is what the model said, in whole letters, the same for a seed."""

import re

import pytest
import torch
from test_cli import run_main
from texts import byte_tokenizer
from tiny import SIZES

from fastweight.data import load_tokenizer
from fastweight.evaluation.checkpoint import load_language_model
from fastweight.evaluation.sampling import Sampling, TextStream, continue_text
from fastweight.models import FastWeightConfig, FastWeightForCausalLM


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A random model of more ids than its tokenizer has, saved beside it."""
    directory = tmp_path_factory.mktemp("model")
    tokenizer = load_tokenizer(byte_tokenizer(directory / "tokenizer.json"))
    torch.manual_seed(0)
    model = FastWeightForCausalLM(FastWeightConfig(**(SIZES | {"vocab_size": tokenizer.vocab_size + 20})))
    with torch.no_grad():
        model.lm_head.weight.mul_(20)
    model.save_pretrained(directory)
    tokenizer.save(directory)
    return directory


def said_by(loaded, prompt, **how):
    pieces = []
    pace = continue_text(loaded, prompt, Sampling(**how), pieces.append)
    return "".join(pieces), pace


def test_what_streams_is_what_was_generated(checkpoint):
    loaded = load_language_model(checkpoint)
    ids = torch.tensor([loaded.tokenizer.encode("the river")])
    text, pace = said_by(loaded, "the river", max_new_tokens=30, temperature=0)
    size = loaded.tokenizer.vocab_size
    with torch.no_grad():
        for _ in range(pace.new_tokens):
            choice = loaded.model(ids).logits[:, -1:, :size].argmax(-1)
            ids = torch.cat([ids, choice], dim=1)
    new = [i for i in ids[0, pace.prompt_tokens :].tolist() if i != loaded.tokenizer.end_of_text]
    assert text == loaded.tokenizer.decode(new)
    assert pace.new_tokens == 30 or ids[0, -1] == loaded.tokenizer.end_of_text
    assert pace.state_bytes > 0
    assert min(pace.seconds, pace.prompt_seconds) > 0


def test_draws_follow_the_seed_and_leave_the_global_generator_alone(checkpoint):
    loaded = load_language_model(checkpoint)
    before = torch.get_rng_state()
    texts = [said_by(loaded, "", max_new_tokens=20, seed=seed, top_p=0.9)[0] for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    assert torch.equal(torch.get_rng_state(), before)


def test_half_letters_wait(checkpoint):
    tokenizer, pieces = load_tokenizer(checkpoint), []
    stream = TextStream(tokenizer, pieces.append)
    text = "naïve 中文 🙂 end"
    ids = [i for letter in text.encode() for i in [tokenizer.backend.token_to_id(_letter(letter))]]
    stream.put(torch.tensor([[0]]))  # the prompt
    for i in ids:
        stream.put(torch.tensor([i]))
    stream.end()
    assert "".join(pieces) == text
    assert "\ufffd" not in "".join(pieces)
    assert len([piece for piece in pieces if piece]) == len(text)


def _letter(byte):
    from fastweight.data.tokenizer import _bytes_of_letters

    return next(letter for letter, value in _bytes_of_letters().items() if value == byte)


def test_the_command(checkpoint, monkeypatch, capsys):
    words = ["generate", str(checkpoint), "the river", "a stone", "--max-new-tokens", "8", "--temperature", "0"]
    assert run_main(monkeypatch, *words, "--device", "cpu") == 0
    said = capsys.readouterr()
    text = said_by(load_language_model(checkpoint), "the river", max_new_tokens=8, temperature=0)[0]
    assert said.out.startswith(f"the river{text}\na stone")
    paces = re.findall(r"\d+ tokens, [\d.]+ tokens/s after [\d.]+ s for \d+ of prompt, state [\d,]+ bytes", said.err)
    assert len(paces) == 2, said.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--temperature=-1"], "temperature: got -1.0, expected 0"),
        (["--top-p", "0"], "top_p: got 0.0, expected a share above 0"),
        (["--device", "cuda:99"], "--device: got cuda:99, expected one of this machine"),
        (["--tokenizer", "./nowhere"], "tokenizer: got ./nowhere"),
    ],
)
def test_mistakes_are_named(checkpoint, options, message, monkeypatch, capsys):
    assert run_main(monkeypatch, "generate", str(checkpoint), "x", *options) == 2
    assert message in " ".join(capsys.readouterr().err.split())
