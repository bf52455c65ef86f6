"""A language model goes on from a prompt, and every piece of text comes out as soon as it is whole.

Traps: a letter may need several tokens and a token may hold half a letter, so text waits until it decodes; tokenizers
that strip spaces decode a token differently at the start of a text, so each piece is decoded behind the one before. The
sampling of transformers draws from torch's global generators, which are put back afterwards.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from transformers.generation.streamers import BaseStreamer

from fastweight.data import Tokenizer
from fastweight.evaluation.checkpoint import LanguageModel
from fastweight.models import FastWeightCache


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen.

    Fields:
        max_new_tokens: stop here, if the text has no end before.
        temperature: 0 takes the likeliest token.
        top_p: draw from the likeliest tokens of this share; 1 from all.
        seed: of the draws.
    """

    max_new_tokens: int = 128
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise ValueError(f"temperature: got {self.temperature}, expected 0 (the likeliest token) or more")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p: got {self.top_p}, expected a share above 0, at most 1")


class Pace(NamedTuple):
    """What a continuation took. state_bytes: of one sequence at the end; None when the model's cache is not ours."""

    prompt_tokens: int
    prompt_seconds: float
    new_tokens: int
    seconds: float
    state_bytes: int | None


class TextStream(BaseStreamer):
    """Takes token ids from `generate` and hands whole letters to `write`."""

    def __init__(self, tokenizer: Tokenizer, write: Callable[[str], None]):
        self.tokenizer, self.write = tokenizer, write
        self.ids: list[int] = []
        self.start = self.told = 0  # ids[start:told] are written and give what follows its context
        self.times: list[float] = []
        self.prompt = True

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())
        if self.prompt:  # generate begins with the prompt
            self.prompt = False
            return
        self.ids += [i for i in value.flatten().tolist() if i != self.tokenizer.end_of_text]
        self._tell(final=False)

    def end(self) -> None:
        self._tell(final=True)

    def _tell(self, final: bool) -> None:
        before = self.tokenizer.decode(self.ids[self.start : self.told])
        now = self.tokenizer.decode(self.ids[self.start :])
        if final or not now.endswith("\ufffd"):
            self.write(now[len(before) :])
            self.start, self.told = self.told, len(self.ids)


def continue_text(loaded: LanguageModel, prompt: str, how: Sampling, write: Callable[[str], None]) -> Pace:
    """Writes what the model says after `prompt`; an empty prompt starts a text."""
    model, tokenizer = loaded.model, loaded.tokenizer
    ids = torch.tensor([tokenizer.encode(prompt) or [tokenizer.end_of_text]], device=model.device)
    stream = TextStream(tokenizer, write)
    devices = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(how.seed)
        start = time.perf_counter()
        output = model.generate(ids, streamer=stream, **_options(loaded, how))
    first, last = stream.times[1], stream.times[-1]
    cache = getattr(output, "cache", None) or getattr(output, "past_key_values", None)
    state_bytes = cache.nbytes if isinstance(cache, FastWeightCache) else None
    return Pace(ids.shape[1], first - start, output.sequences.shape[1] - ids.shape[1], last - first, state_bytes)


def _options(loaded: LanguageModel, how: Sampling) -> dict[str, Any]:
    """Keywords of transformers' generate."""
    model, tokenizer = loaded.model, loaded.tokenizer
    options: dict[str, Any] = {
        "max_new_tokens": how.max_new_tokens,
        "eos_token_id": tokenizer.end_of_text,
        "pad_token_id": tokenizer.end_of_text,
        "return_dict_in_generate": True,
        "do_sample": how.temperature > 0,
    }
    if how.temperature > 0:
        options |= {"temperature": how.temperature, "top_p": how.top_p, "top_k": 0}
    if tokenizer.vocab_size < model.config.vocab_size:  # rows that pad the vocabulary stand for nothing
        options["suppress_tokens"] = list(range(tokenizer.vocab_size, model.config.vocab_size))
    ours = model.config.model_type == "fastweight"
    if ours and model.device.type == "cuda" and "full_attention" not in model.config.layer_types:
        options["cache_implementation"] = "static"  # decodes through a CUDA graph
    return options
