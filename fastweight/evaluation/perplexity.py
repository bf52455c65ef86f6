"""Documents into perplexity by token, word and byte, and last words into accuracy, as lm-evaluation-harness counts.

Every token of a document is scored once; the first follows an end-of-text token. Windows hold `length` tokens of
context and advance by `stride`: with stride = length they are disjoint, with less each token but the first ones sees at
least length - stride tokens before it. The last window reaches back to be full. Traps: perplexities by token compare
models of one tokenizer only; words are those between white space; averages are over tokens, not over documents.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import exp, log, sqrt
from typing import Any, NamedTuple

import numpy as np

from fastweight.data import Tokenizer
from fastweight.evaluation.likelihood import Piece, score

Progress = Callable[[int, int], None]


class Document(NamedTuple):
    """Tokens of a text, and how long the text is."""

    ids: list[int]
    num_bytes: int
    num_words: int


class Ending(NamedTuple):
    """Tokens of a text whose last `num_scored` are to be guessed."""

    ids: list[int]
    num_scored: int


@dataclass(frozen=True)
class Perplexity:
    """What a model makes of documents.

    Fields:
        num_documents, num_tokens, num_bytes, num_words: scored.
        total_loss: negative log-likelihood of all of it, in nats.
        position_losses, position_counts: sum of losses, and tokens, by the number of tokens in context (from 1).
    """

    num_documents: int
    num_tokens: int
    num_bytes: int
    num_words: int
    total_loss: float
    position_losses: np.ndarray
    position_counts: np.ndarray

    @property
    def loss(self) -> float:
        """Nats a token."""
        return self.total_loss / self.num_tokens

    @property
    def token_perplexity(self) -> float:
        return _exp(self.loss)

    @property
    def word_perplexity(self) -> float:
        return _exp(self.total_loss / self.num_words)

    @property
    def byte_perplexity(self) -> float:
        return _exp(self.total_loss / self.num_bytes)

    @property
    def bits_per_byte(self) -> float:
        return self.total_loss / self.num_bytes / log(2)


@dataclass(frozen=True)
class LastWord:
    """How often a model finds the last words of texts.

    Fields:
        num_texts: scored.
        accuracy: of the likeliest tokens, all of a word's tokens being right.
        accuracy_error: its standard error.
        perplexity: exp of the mean negative log-likelihood of a whole last word.
    """

    num_texts: int
    accuracy: float
    accuracy_error: float
    perplexity: float


def rolling(ids: Sequence[int], end_of_text: int, length: int, stride: int) -> Iterator[Piece]:
    """Windows that together score every token of a document once."""
    whole = [end_of_text, *ids]
    done, end = 0, min(length, len(ids))
    while done < len(ids):
        yield Piece(whole[max(0, end - length) : end + 1], end - done)
        done, end = end, min(end + stride, len(ids))


def perplexity(
    model: Any,
    documents: Sequence[Document],
    *,
    end_of_text: int,
    length: int,
    stride: int | None = None,
    batch_size: int = 8,
    progress: Progress = lambda done, total: None,
) -> Perplexity:
    """Score documents with a causal language model.

    Args:
        model: maps input_ids to logits.
        documents: at least one with a token in it.
        end_of_text: the token before the first.
        length: tokens of context in a window, at least 1.
        stride: tokens that a window advances by, 1 to length; None: disjoint windows.
        batch_size: windows at a time; figures do not depend on it.
        progress: called with (tokens scored, tokens in all).
    """
    stride = length if stride is None else stride
    if length < 1:
        raise ValueError(f"length: got {length}, expected at least 1")
    if not 1 <= stride <= length:
        raise ValueError(f"stride: got {stride}, expected 1 to the length {length}")
    total = sum(len(document.ids) for document in documents)
    if total == 0:
        raise ValueError(f"documents: got {len(documents)} without a token, expected text")
    count = _counting(progress, total)
    pieces = (piece for d in documents for piece in rolling(d.ids, end_of_text, length, stride))
    losses, counts = np.zeros(length), np.zeros(length, np.int64)
    for piece, piece_losses, _ in score(model, pieces, batch_size=batch_size, progress=count):
        at = slice(len(piece.ids) - 1 - piece.num_scored, len(piece.ids) - 1)
        losses[at] += piece_losses
        counts[at] += 1
    num_bytes, num_words = (sum(getattr(d, field) for d in documents) for field in ("num_bytes", "num_words"))
    return Perplexity(len(documents), total, num_bytes, num_words, float(losses.sum()), losses, counts)


def last_word(
    model: Any,
    endings: Sequence[Ending],
    *,
    length: int,
    batch_size: int = 8,
    progress: Progress = lambda done, total: None,
) -> LastWord:
    """Score the last words of texts; longer contexts lose their beginning. Arguments as in `perplexity`."""
    if not endings:
        raise ValueError("endings: got none, expected at least one text")
    pieces = [Piece(ending.ids[-(length + 1) :], ending.num_scored) for ending in endings]
    count = _counting(progress, sum(piece.num_scored for piece in pieces))
    scored = list(score(model, pieces, batch_size=batch_size, progress=count))
    accuracy = sum(bool(s.likeliest.all()) for s in scored) / len(scored)
    error = sqrt(accuracy * (1 - accuracy) / max(len(scored) - 1, 1))
    return LastWord(len(scored), accuracy, error, _exp(sum(s.losses.sum() for s in scored) / len(scored)))


def _counting(progress: Progress, total: int) -> Callable[[int], None]:
    """From tokens of a batch to calls of `progress` with all of them so far."""
    done = 0

    def count(tokens: int) -> None:
        nonlocal done
        done += tokens
        progress(done, total)

    return count


def as_document(tokenizer: Tokenizer, text: str) -> Document:
    """A text, tokenised and measured."""
    return Document(tokenizer.encode(text), len(text.encode("utf-8", "replace")), len(text.split()))


def as_ending(tokenizer: Tokenizer, context: str, word: str) -> Ending:
    """A context and the word after it, which are tokenised together; white space between them goes with the word."""
    bare = context.rstrip()
    word = context[len(bare) :] + word
    ids, before = tokenizer.encode_batch([bare + word, bare])
    if len(ids) <= len(before):
        raise ValueError(f"word: got {word!r} after {bare[-20:]!r}, expected a token of its own")
    return Ending(ids, len(ids) - len(before))


def _exp(value: float) -> float:
    """exp, infinite where it is too large for a float."""
    return exp(value) if value < 700 else float("inf")
