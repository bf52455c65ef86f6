"""Sources of text into a directory of token shards: in parallel, in order, killed and continued at will.

One process reads documents in order, workers encode them in batches, and the first process appends the results in
order, so the bytes do not depend on the number of workers. Every few seconds what is written is made durable and
progress.json says how far sources and shards reach; a run that starts again goes on from there. meta.json is written
last and makes the directory ready.

Trap: a document belongs to the validation split by a hash of its text, so that copies of it never lie on both sides.
"""

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fastweight.data.encode import Batch, Encoded, encode_all
from fastweight.data.shards import FORMAT, META, read_meta, token_dtype
from fastweight.data.sources import Source, find_sources
from fastweight.data.tokenizer import Tokenizer, load_tokenizer
from fastweight.data.writer import SHARD_TOKENS, SplitRecord, SplitWriter
from fastweight.files import write_json

PROGRESS, TOKENIZER = "progress.json", "tokenizer"
TRAIN, VALIDATION = "train", "validation"
BATCH_LETTERS, BATCH_DOCUMENTS = 2**20, 1024
COMMIT_SECONDS = 5.0


@dataclass(frozen=True)
class PrepareOptions:
    """What decides the bytes beside sources and tokenizer.

    Fields:
        validation_fraction: of the documents, chosen by a hash of their text.
        validation_documents: the most to keep of those; None for all. The rest goes to neither split.
        max_tokens: stop after the document that brings the training split to as many; None for all.
        text_field: column of JSON lines, parquet and datasets.
        separator: cuts text files into documents; None: a file is a document.
        shard_tokens: of a file, about.
    """

    validation_fraction: float = 0.005
    validation_documents: int | None = None
    max_tokens: int | None = None
    text_field: str = "text"
    separator: str | None = None
    shard_tokens: int = SHARD_TOKENS

    def __post_init__(self) -> None:
        if not 0 <= self.validation_fraction < 1:
            raise ValueError(f"validation_fraction: got {self.validation_fraction}, expected 0 up to below 1")
        for name in ("validation_documents", "max_tokens", "shard_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}: got {value}, expected at least 1")
        if self.separator == "":
            raise ValueError("separator: got '', expected at least one character")


class Status(NamedTuple):
    """How far a run is: training tokens, text bytes, and bytes of the sources read of all (None: unknown)."""

    tokens: int
    text_bytes: int
    read: int
    size: int | None


def prepare(
    specs: Sequence[str],
    out: Path,
    *,
    tokenizer: str = "gpt2",
    options: PrepareOptions | None = None,
    workers: int = 1,
    say: Callable[[str], None] = print,
    progress: Callable[[Status], None] = lambda status: None,
) -> dict[str, Any]:
    """Write `out` (see `fastweight.data.shards`) and return its meta; does nothing when it is there already.

    Args:
        specs: sources, see `fastweight.data.sources`.
        out: a new directory, or one that an earlier run with the same arguments has begun or finished.
        tokenizer: see `load_tokenizer`.
        options: what goes where.
        workers: processes that encode; 1 encodes here.
        say: for messages.
        progress: called after every batch.

    Raises ValueError for unreadable sources, for a directory that holds other data (saying what differs), and when a
    split would be empty.
    """
    options = options or PrepareOptions()
    if workers < 1:
        raise ValueError(f"workers: got {workers}, expected at least 1")
    sources = find_sources(specs, text_field=options.text_field, separator=options.separator)
    loaded = load_tokenizer(tokenizer)
    begun = _begun(out)
    request = _request(sources, loaded, options, begun)
    if begun is not None and "splits" in begun:
        _check_same(out, begun["request"], request)
        if (out / META).is_file():
            say(f"{out} is prepared already, from the same sources with the same options: nothing to do.")
            return read_meta(out)
        say(f"Going on after {begun['splits'][TRAIN]['tokens']:,} training tokens.")
    else:
        out.mkdir(parents=True, exist_ok=True)
        loaded.save(out / TOKENIZER)
        begun = {"request": request}
        write_json(out / PROGRESS, begun)
    run = _Run(out, sources, loaded, options, begun, request)
    with closing(run):
        run.go(workers, progress)
        return run.finish()


class _Run:
    """One run's open files and counters."""

    def __init__(
        self,
        out: Path,
        sources: list[Source],
        tokenizer: Tokenizer,
        options: PrepareOptions,
        begun: dict[str, Any],
        request: dict[str, Any],
    ) -> None:
        self.out, self.sources, self.tokenizer, self.options, self.request = out, sources, tokenizer, options, request
        self.cursor: dict[str, Any] = begun.get("cursor", {"source": 0, "at": None})
        self.left_out: dict[str, int] = begun.get("left_out", {"empty": 0, "validation": 0})
        records = begun.get("splits", {})
        self.writers = {
            split: SplitWriter(
                out,
                split,
                token_dtype(tokenizer.vocab_size),
                shard_tokens=options.shard_tokens,
                record=SplitRecord(**records[split]) if split in records else None,
            )
            for split in (TRAIN, VALIDATION)
        }

    def go(self, workers: int, progress: Callable[[Status], None]) -> None:
        """Read, encode and append until the sources end or there are tokens enough."""
        sizes = [source.size for source in self.sources]
        size = None if None in sizes else sum(filter(None, sizes))
        committed = time.monotonic()
        progress(self._status(0, size))
        with closing(encode_all(self._batches(), self.tokenizer, self.out / TOKENIZER, workers)) as results:
            for batch, encoded in () if self._enough() else results:
                if not self._append(encoded):
                    break
                self.cursor = batch.cursor
                progress(self._status(batch.read, size))
                if time.monotonic() - committed > COMMIT_SECONDS:
                    self._commit()
                    committed = time.monotonic()

    def finish(self) -> dict[str, Any]:
        """Check that no split is empty, write meta.json, and return it."""
        records = {split: writer.close() for split, writer in self.writers.items()}
        wanted = [TRAIN, *([VALIDATION] if self.options.validation_fraction else [])]
        empty = [split for split in wanted if records[split].documents == 0]
        if empty:
            write_json(self.out / PROGRESS, {"request": self.request})  # another request may begin here
            total = sum(record.documents for record in records.values())
            raise ValueError(
                f"{empty[0]}: got none of {total} documents, expected at least one: another validation fraction, more "
                "documents, or a separator that cuts text files into documents"
            )
        meta = {
            "format": FORMAT,
            "tokenizer": _described(self.tokenizer),
            "splits": {split: asdict(records[split]) for split in wanted},
            "left_out": self.left_out,
            "fingerprint": hashlib.sha256("".join(records[split].digest for split in wanted).encode()).hexdigest()[:32],
            "request": self.request,
        }
        write_json(self.out / META, meta)
        (self.out / PROGRESS).unlink(missing_ok=True)
        return meta

    def close(self) -> None:
        for writer in self.writers.values():
            writer.close()

    def _batches(self) -> Iterator[Batch]:
        first, done = self.cursor["source"], 0
        for i, source in enumerate(self.sources):
            texts, letters = [], 0
            if i >= first:
                for text, position in source.read(self.cursor["at"] if i == first else None):
                    texts.append(text)
                    letters += len(text)
                    if letters >= BATCH_LETTERS or len(texts) == BATCH_DOCUMENTS:
                        yield Batch(texts, {"source": i, "at": source.cursor()}, done + position)
                        texts, letters = [], 0
            done += source.size or 0
            if texts:
                yield Batch(texts, {"source": i + 1, "at": None}, done)

    def _append(self, encoded: Encoded) -> bool:
        """Documents of a batch to their splits; False once there are tokens enough."""
        ends = np.cumsum([0, *encoded.lengths])
        for i, place in enumerate(encoded.places):
            if encoded.lengths[i] == 0:
                self.left_out["empty"] += 1
                continue
            split = VALIDATION if place < self.options.validation_fraction else TRAIN
            if split == VALIDATION and self.writers[split].record.documents == self.options.validation_documents:
                self.left_out["validation"] += 1
                continue
            self.writers[split].append(
                encoded.tokens[ends[i] : ends[i + 1]], num_bytes=encoded.num_bytes[i], num_words=encoded.num_words[i]
            )
            if self._enough():
                return False
        return True

    def _enough(self) -> bool:
        wanted = self.options.max_tokens
        return wanted is not None and self.writers[TRAIN].record.tokens >= wanted

    def _commit(self) -> None:
        splits = {split: asdict(writer.commit()) for split, writer in self.writers.items()}
        told = {"request": self.request, "cursor": self.cursor, "left_out": self.left_out, "splits": splits}
        write_json(self.out / PROGRESS, told)

    def _status(self, read: int, size: int | None) -> Status:
        train = self.writers[TRAIN].record
        return Status(train.tokens, train.bytes + self.writers[VALIDATION].record.bytes, read, size)


def _begun(out: Path) -> dict[str, Any] | None:
    """meta.json or progress.json of an earlier run; None for a new directory."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"out: got {out}, expected a directory")
    for name in (META, PROGRESS):
        if (out / name).is_file():
            return json.loads((out / name).read_text(encoding="utf-8"))
    if out.exists() and any(path.name != TOKENIZER for path in out.iterdir()):
        raise ValueError(f"out: {out} holds other files, expected a new or empty directory")
    return None


def _request(
    sources: list[Source], tokenizer: Tokenizer, options: PrepareOptions, begun: dict[str, Any] | None
) -> dict[str, Any]:
    """Everything that decides the bytes."""
    known = {source["name"]: source for source in begun["request"]["sources"]} if begun else {}
    identities = [source.identity(known.get(source.name)) for source in sources]
    return {"sources": identities, "tokenizer": _described(tokenizer), "options": asdict(options)}


def _described(tokenizer: Tokenizer) -> dict[str, Any]:
    keys = ("name", "fingerprint", "vocab_size", "end_of_text")
    return {key: getattr(tokenizer, key) for key in keys}


def _check_same(out: Path, old: dict[str, Any], new: dict[str, Any]) -> None:
    """ValueError that lists what differs between the request in a directory and this one."""
    changes = [
        f"{key}: {old['options'].get(key, 'unset')!r} -> {value!r}"
        for key, value in new["options"].items()
        if old["options"].get(key, "unset") != value
    ]
    if old["tokenizer"]["fingerprint"] != new["tokenizer"]["fingerprint"]:
        changes.append(f"tokenizer: {old['tokenizer']['name']} -> {new['tokenizer']['name']}")
    before, after = ({_plain(source): source["name"] for source in told["sources"]} for told in (old, new))
    changes += [f"source gone or changed: {name}" for key, name in before.items() if key not in after]
    changes += [f"source new or changed: {name}" for key, name in after.items() if key not in before]
    if not changes and list(before) != list(after):
        changes.append("order of the sources")
    if changes:
        listed = "\n  ".join(changes)
        raise ValueError(
            f"out: {out} holds data made otherwise, expected the same request or a new directory:\n  {listed}"
        )


def _plain(source: dict[str, Any]) -> str:
    """A source's identity without what may change in a copy."""
    return json.dumps({key: value for key, value in source.items() if key != "modified_ns"}, sort_keys=True)
