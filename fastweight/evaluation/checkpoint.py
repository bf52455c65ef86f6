"""A run directory or a checkpoint into a model in eval mode, its tokenizer, and the length it was trained at.

Any directory that AutoModelForCausalLM reads will do, ours or another's. Trap: of a run directory the newest complete
checkpoint counts, which is not always the one with the highest number.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from fastweight.data import Tokenizer, load_tokenizer
from fastweight.recipes.rundir import RUN_RECORD, newest_complete_checkpoint

DTYPES = {"auto": "auto", "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
LONGEST = 1024  # tokens in a window where neither a run nor the caller says how many


@dataclass(frozen=True)
class LanguageModel:
    """A model that is ready to be evaluated.

    Fields:
        name: for tables and legends.
        checkpoint: directory it was read from.
        model: in eval mode.
        tokenizer: the one it was trained with.
        length: tokens of a training sequence, if known, else of a window that it surely can read.
    """

    name: str
    checkpoint: Path
    model: Any
    tokenizer: Tokenizer
    length: int


def checkpoint_of(path: Path, say: Callable[[str], None] = print) -> Path:
    """The newest complete checkpoint of a run directory, or the checkpoint itself; ValueError when there is neither."""
    if (path / RUN_RECORD).is_file():
        checkpoint = newest_complete_checkpoint(path, say)
        if checkpoint is None:
            raise ValueError(f"run_dir: {path} has no complete checkpoint yet, expected at least one")
        return checkpoint
    if (path / "config.json").is_file():
        return path
    raise ValueError(
        f"checkpoint: got {path}, expected a run directory or a checkpoint (no {RUN_RECORD}, no config.json)"
    )


def load_model(checkpoint: Path, dtype: str = "auto") -> Any:
    """The model of a checkpoint, in eval mode, on the GPU if there is one; "auto" keeps the dtype it was saved in."""
    if dtype not in DTYPES:
        raise ValueError(f"dtype: got {dtype!r}, expected one of {', '.join(DTYPES)}")
    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=DTYPES[dtype])
        return model.to("cuda" if torch.cuda.is_available() else "cpu").eval()
    finally:
        if bars:
            logging.enable_progress_bar()


def load_language_model(
    path: Path,
    *,
    tokenizer: str | None = None,
    dtype: str = "auto",
    name: str | None = None,
    say: Callable[[str], None] = print,
) -> LanguageModel:
    """The model of a run directory or checkpoint, with its tokenizer.

    Args:
        path: see `checkpoint_of`.
        tokenizer: name or path; None: the one saved with the checkpoint.
        dtype: see `load_model`.
        name: for tables; None: the path.
        say: for messages.

    Raises ValueError when there is no model or tokenizer, or the tokenizer has ids that the model does not know.
    """
    checkpoint = checkpoint_of(path, say)
    if tokenizer is None and not (checkpoint / "tokenizer.json").is_file():
        raise ValueError(f"tokenizer: {checkpoint} holds none, expected one to be named (--tokenizer)")
    loaded = load_tokenizer(checkpoint if tokenizer is None else tokenizer)
    model = load_model(checkpoint, dtype)
    size = model.config.vocab_size
    if loaded.vocab_size > size:
        raise ValueError(f"tokenizer: {loaded.name} has {loaded.vocab_size} ids, expected at most the model's {size}")
    length = _trained_length(path) or _trained_length(checkpoint.parent)
    length = length or min(LONGEST, getattr(model.config, "max_position_embeddings", None) or LONGEST)
    return LanguageModel(name or str(path), checkpoint, model, loaded, length)


def _trained_length(run_dir: Path) -> int | None:
    """Sequence length of the run's text task; None when there is no such run."""
    record = run_dir / RUN_RECORD
    if not record.is_file():
        return None
    return json.loads(record.read_text(encoding="utf-8"))["run"]["task"].get("sequence_length")
