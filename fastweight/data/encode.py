"""Batches of documents into tokens, in order, by as many processes as wanted.

Traps: workers are started afresh (spawn), because the threads of tokenizers do not survive a fork; they watch their
parent and end when it is killed; half a surrogate pair, which JSON can hold, is no character and becomes "?".
"""

import hashlib
import multiprocessing
import os
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fastweight.data.shards import token_dtype
from fastweight.data.tokenizer import Tokenizer, load_tokenizer
from fastweight.processes import end_with_parent


class Batch(NamedTuple):
    """Documents on their way to the workers, and where to go on reading after them."""

    texts: list[str]
    cursor: dict[str, Any]
    read: int


class Encoded(NamedTuple):
    """A batch of documents as tokens: all of them joined, and for each its length, bytes, words and place in [0, 1)."""

    tokens: np.ndarray
    lengths: list[int]
    num_bytes: list[int]
    num_words: list[int]
    places: list[float]


def encode(tokenizer: Tokenizer, texts: Sequence[str]) -> Encoded:
    """Tokens of documents, each with its end of text; a document of white space alone has none."""
    data = [text.encode("utf-8", "replace") for text in texts]
    words = [len(text.split()) for text in texts]
    ids = tokenizer.encode_batch([d.decode("utf-8") for d in data])
    documents = [[*i, tokenizer.end_of_text] if w else [] for i, w in zip(ids, words, strict=True)]
    joined = np.fromiter(chain.from_iterable(documents), token_dtype(tokenizer.vocab_size))
    places = [int.from_bytes(hashlib.blake2b(d, digest_size=8).digest(), "big") / 2**64 for d in data]
    return Encoded(joined, list(map(len, documents)), list(map(len, data)), words, places)


def encode_all(
    batches: Iterator[Batch], tokenizer: Tokenizer, saved: Path, workers: int
) -> Generator[tuple[Batch, Encoded]]:
    """Batches with their tokens, in order; at most four for each worker are on their way.

    Args:
        batches: read as they are needed.
        tokenizer: for this process.
        saved: where the same tokenizer is read by workers.
        workers: processes; 1 encodes here.
    """
    if workers == 1:
        yield from ((batch, encode(tokenizer, batch.texts)) for batch in batches)
        return
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _start_worker, (saved,))
    waiting: deque[tuple[Batch, Future[Encoded]]] = deque()
    try:
        for batch in batches:
            waiting.append((batch, pool.submit(_work, batch.texts)))
            if len(waiting) > 4 * workers:
                batch, future = waiting.popleft()
                yield batch, future.result()
        while waiting:
            batch, future = waiting.popleft()
            yield batch, future.result()
    finally:
        pool.shutdown(cancel_futures=True)


_worker_tokenizer: Tokenizer | None = None


def _start_worker(saved: Path) -> None:
    global _worker_tokenizer
    end_with_parent()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    _worker_tokenizer = load_tokenizer(saved)


def _work(texts: list[str]) -> Encoded:
    assert _worker_tokenizer is not None, "the worker was started"
    return encode(_worker_tokenizer, texts)
