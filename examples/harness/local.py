"""Benchmark files on disk into what tasks of lm-evaluation-harness read; the files beside this one name the tasks.

The directory of the files is in the environment variable FASTWEIGHT_EVAL_DATA. They are JSON lines, one question in
each: "query", "choices" and "gold", or as the functions say.
"""

import bz2
import json
import os
import re
from itertools import islice
from pathlib import Path
from typing import Any

from datasets import Dataset

PLACE = "FASTWEIGHT_EVAL_DATA"


def rows(file: str, **settings: Any) -> dict[str, Dataset]:
    """One row for each line of a file of JSON lines."""
    lines = _path(file).read_text(encoding="utf-8").splitlines()
    return {"test": Dataset.from_list([json.loads(line) for line in lines])}


def hellaswag(file: str, **settings: Any) -> dict[str, Dataset]:
    """Six lines for each question: context, number of the right ending, four endings."""
    lines = iter(bz2.decompress(_path(file).read_bytes()).decode("utf-8").splitlines())
    found = []
    while question := list(islice(lines, 6)):
        found.append({"query": question[0], "gold": int(question[1]), "choices": question[2:]})
    return {"test": Dataset.from_list(found)}


def articles(file: str, **settings: Any) -> dict[str, Dataset]:
    """WikiText's articles: each begins with a line such as " = Title = "."""
    text = _path(file).read_text(encoding="utf-8")
    starts = [match.start() for match in re.finditer(r"(?m)^ = [^=\n]+ = $", text)]
    pages = [text[a:b] for a, b in zip(starts, [*starts[1:], len(text)], strict=True)]
    return {"test": Dataset.from_list([{"page": page} for page in pages])}


def rolling_measures(doc: dict[str, str], results: list[float]) -> dict[str, tuple[float, int]]:
    """Log-likelihood of a page against its words and its bytes."""
    words, size = len(doc["page"].split()), len(doc["page"].encode("utf-8"))
    return {
        name: (results[0], n)
        for name, n in (("word_perplexity", words), ("byte_perplexity", size), ("bits_per_byte", size))
    }


def _path(file: str) -> Path:
    if PLACE not in os.environ:
        raise ValueError(f"{PLACE}: got nothing, expected the directory that holds {file}")
    return Path(os.environ[PLACE]) / file
