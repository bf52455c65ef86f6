"""A language model of a run into its outcome: loss on held-out text, by position in context too, and last words.

Text is scored in float32 in disjoint windows of the training length. Traps: perplexities by token compare models of one
tokenizer only; a position has only what came before it in its window, so losses fall along it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from math import exp
from pathlib import Path

from fastweight.data import open_shards
from fastweight.evaluation import texts as sources
from fastweight.evaluation.checkpoint import LanguageModel, load_language_model
from fastweight.evaluation.course import course_of
from fastweight.evaluation.perplexity import Document, Ending, Perplexity, last_word, perplexity
from fastweight.evaluation.perplexity_report import by_context
from fastweight.recipes import Run, TextTask

TRAIN, VALIDATION, LAST_WORDS = "train", "validation", "lambada"
BATCH = 16


@dataclass(frozen=True)
class TextOutcome:
    """One trained language model.

    Fields:
        arm, seed: which one of a study.
        mixer, num_parameters: of the model.
        tokens: seen in training, repeated ones again.
        scores: text -> figure -> value; "validation" is always there. Of texts: loss (nats a token), perplexity (by
            token), word_perplexity and bits_per_byte; of last words: accuracy and perplexity.
        positions: of the validation text, pairs [tokens in context, loss], see `by_context`.
        curve, cost: see `course_of`.
        corpus: see `corpus_of`; outcomes are comparable where it has the same under the same name.
        corpus_tokens: of the training split; 0: not told.
    """

    arm: str
    seed: int
    mixer: str
    num_parameters: int
    tokens: int
    scores: dict[str, dict[str, float]]
    positions: list[list[float]]
    curve: list[list[float]] = field(default_factory=list)
    cost: dict[str, float] = field(default_factory=dict)
    corpus: dict[str, str] = field(default_factory=dict)
    corpus_tokens: int = 0

    def in_words(self) -> str:
        """A line for people who wait."""
        rate = self.cost.get("tokens_per_second")
        told = f"validation loss {self.scores[VALIDATION]['loss']:.3f}"
        return told if rate is None else f"{told}, {rate:,.0f} tokens/s"


def corpus_of(data: str | Path | None, files: Mapping[str, str]) -> dict[str, str]:
    """Fingerprints of what a model is trained on ("train") and scored on (by the names of scores).

    Args:
        data: directory of token shards; None leaves out what is in it.
        files: texts by name.
    """
    splits = () if data is None else (TRAIN, VALIDATION)
    shards = {split: open_shards(data, split).fingerprint for split in splits if data is not None}
    return shards | {name: sha256(Path(file).read_bytes()).hexdigest()[:32] for name, file in files.items()}


def check_one_corpus(outcomes: Iterable[TextOutcome], known: Mapping[str, str]) -> None:
    """ValueError where outcomes were trained or scored on other text than each other or than `known`, or do not say."""
    seen = dict(known)
    for outcome in outcomes:
        who = f"outcome of {outcome.arm}, seed {outcome.seed}"
        silent = [name for name in (TRAIN, *outcome.scores) if name not in outcome.corpus]
        if silent:
            raise ValueError(f"{who}: it does not say what it has as {', '.join(silent)}, expected a fingerprint each")
        for name, text in outcome.corpus.items():
            if seen.setdefault(name, text) != text:
                raise ValueError(f"{who}: got {text} as {name}, expected the text that the others have, {seen[name]}")


def text_outcome_of(run_dir: Path, run: Run, arm: str, seed: int, files: Mapping[str, str]) -> TextOutcome:
    """The outcome of the newest complete checkpoint, on the validation split and on further `files` by name."""
    task = run.task
    assert isinstance(task, TextTask), "the caller looks at the task"
    assert task.data is not None, "it was trained"
    loaded = load_language_model(run_dir, say=lambda text: None)
    validation = _score(loaded, sources.documents_of_data(Path(task.data), "validation", loaded.tokenizer, None))
    scores = {VALIDATION: _figures(validation)}
    for name, file in files.items():
        if name == LAST_WORDS:
            endings = sources.documents_of_dataset(f"{LAST_WORDS}={file}", loaded.tokenizer)
            found = last_word(loaded.model, _endings(endings), length=loaded.length, batch_size=BATCH)
            scores[name] = {"accuracy": found.accuracy, "perplexity": found.perplexity}
        else:
            scores[name] = _figures(_score(loaded, sources.documents_of_texts([file], loaded.tokenizer)))
    count = sum(p.numel() for p in loaded.model.parameters())
    tokens = run.training.steps * run.training.batch_size * task.sequence_length
    mixer, positions = str(run.model.get("mixer", "")), [list(point) for point in by_context(validation)]
    corpus, size = corpus_of(task.data, files), open_shards(task.data, TRAIN).num_tokens
    return TextOutcome(arm, seed, mixer, count, tokens, scores, positions, *course_of(run_dir), corpus, size)


def _score(loaded: LanguageModel, documents: list[Document]) -> Perplexity:
    end = loaded.tokenizer.end_of_text
    return perplexity(loaded.model, documents, end_of_text=end, length=loaded.length, batch_size=BATCH)


def _figures(found: Perplexity) -> dict[str, float]:
    return {
        "loss": found.loss,
        "perplexity": exp(found.loss),
        "word_perplexity": found.word_perplexity,
        "bits_per_byte": found.bits_per_byte,
    }


def _endings(found: list[Document] | list[Ending]) -> list[Ending]:
    return [one for one in found if isinstance(one, Ending)]
