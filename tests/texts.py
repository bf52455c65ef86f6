"""A tiny tokenizer and made-up documents, for tests of data and evaluation."""

import random
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

END = "<|endoftext|>"
TEXT = "the a river stone bird sings under over old new house walks sees finds quick brown naïve 12 345 don't"


def documents(count: int, seed: int = 0) -> list[str]:
    """Sentences of a few known words, in documents of several lengths."""
    draw, words = random.Random(seed), TEXT.split(" ")
    return [
        f"{i}: " + " ".join(draw.choice(words) for _ in range(draw.randrange(3, 40))) + draw.choice([".", "!\n", " "])
        for i in range(count)
    ]


def byte_tokenizer(path: Path, vocab_size: int = 300, special: str = END) -> Path:
    """A byte-level BPE in a tokenizer.json, the end of text its first id."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[special],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(documents(50), trainer)
    backend.save(str(path))
    return path
