"""What the user names into documents of text, in an order that never changes, from any document on.

    notes.txt, corpus/, "books/*.jsonl.gz"      files, directories (searched), patterns
    hf:HuggingFaceFW/fineweb-edu:sample-100BT   a dataset of the hub, streamed: hf:NAME[:CONFIG[:SPLIT]][@REVISION]

A text file is one document unless a separator cuts it; JSON lines and parquet have one in each row. Traps: text is
decoded as it is (no newline is translated); a stream of the hub goes on by its own state, since skipping would download
everything again; a file is known by its name and content, so that a copy of the data is the same data.
"""

import bz2
import glob
import gzip
import hashlib
import importlib
import json
import lzma
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any, Protocol

OPENERS: dict[str, Any] = {"": open, ".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
TEXT, LINES, PARQUET = (".txt", ".md"), (".jsonl", ".ndjson", ".json"), ".parquet"
HUB = "hf:"
BYTE_ORDER_MARK = "\ufeff"  # some editors begin a file with one, and JSON must not


class Source(Protocol):
    """Documents in a fixed order."""

    @property
    def name(self) -> str:
        """What it is known by."""
        ...

    @property
    def size(self) -> int | None:
        """Bytes on disk; None when they cannot be known."""
        ...

    def identity(self, known: dict[str, Any] | None = None) -> dict[str, Any]:
        """What makes it the same source another time; `known` is an earlier answer, which spares reading the file."""
        ...

    def read(self, cursor: Any = None) -> Iterator[tuple[str, int]]:
        """Documents from a cursor on, each with the bytes on disk read so far."""
        ...

    def cursor(self) -> Any:
        """JSON from which `read` goes on after the document that it gave last."""
        ...


@dataclass
class TextFile:
    """Documents of one local file."""

    path: Path
    name: str
    text_field: str = "text"
    separator: str | None = None
    _count: int = 0

    @property
    def size(self) -> int:
        return self.path.stat().st_size

    def identity(self, known: dict[str, Any] | None = None) -> dict[str, Any]:
        found = {"name": self.name, "bytes": self.size, "modified_ns": self.path.stat().st_mtime_ns}
        if known is not None and all(known.get(key) == value for key, value in found.items()):
            return known
        with self.path.open("rb") as file:
            return found | {"blake2b": hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()}

    def read(self, cursor: Any = None) -> Iterator[tuple[str, int]]:
        start = self._count = cursor or 0
        try:
            for text, position in self._parquet(start) if self.path.suffix == PARQUET else self._rows(start):
                self._count += 1
                yield text, position
        except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:  # damaged archives raise any of these
            raise ValueError(f"source: {self.path} cannot be read ({error})") from None

    def cursor(self) -> Any:
        return self._count

    def _rows(self, start: int) -> Iterator[tuple[str, int]]:
        packed = self.path.suffix if self.path.suffix in OPENERS else ""
        with self.path.open("rb") as raw, OPENERS[packed](raw, "rb") if packed else raw as file:
            if Path(self.path.name.removesuffix(packed)).suffix in LINES:
                rows = ((i, line) for i, line in enumerate(file, 1) if line.strip())
                for i, line in islice(rows, start, None):
                    yield self._field(line, i), raw.tell()
            else:
                for text in islice(self._cut(file), start, None):
                    yield text, raw.tell()

    def _cut(self, file: IO[bytes]) -> Iterator[str]:
        text = self._decode(file.read(), "")
        return iter([text] if self.separator is None else text.split(self.separator))

    def _field(self, line: bytes, number: int) -> str:
        where = f" line {number}"
        try:
            row = json.loads(self._decode(line, where).removeprefix(BYTE_ORDER_MARK))
        except json.JSONDecodeError as error:
            raise ValueError(f"source: {self.path}{where} is no JSON ({error})") from None
        text = row.get(self.text_field) if isinstance(row, dict) else None
        if not isinstance(text, str):
            found = ", ".join(row) if isinstance(row, dict) else type(row).__name__
            found += f" ({self.text_field!r} is {type(text).__name__})" if text is not None else ""
            raise ValueError(f"source: {self.path}{where} has {found}, expected text in {self.text_field!r}")
        return text

    def _decode(self, data: bytes, where: str) -> str:
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"source: {self.path}{where} is not UTF-8 ({error.reason} at {error.start})") from None

    def _parquet(self, start: int) -> Iterator[tuple[str, int]]:
        parquet = extra("pyarrow.parquet", "reading parquet")
        try:
            file = parquet.ParquetFile(self.path)
        except ValueError as error:  # pyarrow's own kind of it does not name the file
            raise ValueError(f"source: {self.path} is no parquet ({error})") from None
        if self.text_field not in file.schema_arrow.names:
            found = ", ".join(file.schema_arrow.names)
            raise ValueError(f"source: {self.path} has {found}, expected text in {self.text_field!r}")
        row, total = 0, max(file.metadata.num_rows, 1)
        for batch in file.iter_batches(batch_size=1024, columns=[self.text_field]):
            if row + len(batch) > start:
                for text in batch.column(0).slice(max(start - row, 0)).to_pylist():
                    if not isinstance(text, str | None):
                        found = f"{type(text).__name__} in {self.text_field!r}"
                        raise ValueError(f"source: {self.path} has {found}, expected text")
                    yield text or "", self.size * row // total
            row += len(batch)


@dataclass
class HubDataset:
    """Documents of one split of a dataset on the hub, streamed."""

    name: str
    config: str | None
    split: str
    revision: str | None
    text_field: str = "text"
    size: int | None = None
    _dataset: Any = None

    def identity(self, known: dict[str, Any] | None = None) -> dict[str, Any]:
        return {"name": self.name, "config": self.config, "split": self.split, "revision": self.revision}

    def read(self, cursor: Any = None) -> Iterator[tuple[str, int]]:
        load = extra("datasets", "streaming from the hub").load_dataset
        name = self.name.removeprefix(HUB)
        try:
            self._dataset = load(name, self.config, split=self.split, revision=self.revision, streaming=True)
        except (OSError, ValueError) as error:  # not there, not reachable, or no such configuration or split
            raise ValueError(f"source: {self.name} cannot be read ({error})") from None
        if cursor is not None:
            self._dataset.load_state_dict(cursor)
        for row in self._dataset:
            text = row.get(self.text_field)
            if not isinstance(text, str):
                raise ValueError(f"source: {self.name} has {', '.join(row)}, expected text in {self.text_field!r}")
            yield text, 0

    def cursor(self) -> Any:
        return self._dataset.state_dict()


def find_sources(specs: Sequence[str], *, text_field: str = "text", separator: str | None = None) -> list[Source]:
    """The sources that the user names, files of a directory or pattern in the order of their names.

    Raises ValueError for what cannot be found or read, and for a file that is named twice.
    """
    sources: list[Source] = []
    paths: set[Path] = set()
    for spec in specs:
        if spec.startswith(HUB):
            sources.append(_hub(spec, text_field))
            continue
        for path, name in _files(spec):
            if path.resolve() in paths:
                raise ValueError(f"source: got {path} twice, expected every file once")
            paths.add(path.resolve())
            sources.append(TextFile(path, name, text_field, separator))
    if not sources:
        raise ValueError("source: got none, expected files, directories, patterns or hf:NAME")
    return sources


def extra(module: str, what: str) -> Any:
    """A module of the `data` extra; ValueError names the extra when it is missing."""
    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.partition(".")[0]
        raise ValueError(f'{what} needs {package}, which is not installed: pip install "fastweight[data]"') from None


def _hub(spec: str, text_field: str) -> HubDataset:
    name, _, revision = spec.removeprefix(HUB).partition("@")
    name, *rest = name.split(":")
    if not name or len(rest) > 2:
        raise ValueError(f"source: got {spec!r}, expected hf:NAME[:CONFIG[:SPLIT]][@REVISION]")
    config, split = (rest[0] if rest else ""), (rest[1] if len(rest) == 2 else "train")
    return HubDataset(HUB + name, config or None, split, revision or None, text_field)


def _files(spec: str) -> list[tuple[Path, str]]:
    """Files that a path or pattern stands for, each with the name it is known by."""
    path = Path(spec)
    if path.is_dir():
        found = sorted(p for p in path.rglob("*") if _readable(p) and not p.name.startswith("."))
        named = [(p, p.relative_to(path).as_posix()) for p in found]
    else:
        found = [path] if path.is_file() else sorted(Path(p) for p in glob.glob(spec, recursive=True))
        named = [(p, p.name) for p in found if p.is_file()]
    for p, _ in named:
        if not _readable(p):
            raise ValueError(f"source: got {p}, expected one of {', '.join((*TEXT, *LINES, PARQUET))} (packed: .gz)")
    if not named:
        raise ValueError(f"source: got {spec}, expected a file, a directory with text, a pattern or hf:NAME")
    return named


def _readable(path: Path) -> bool:
    packed = path.suffix if path.suffix in OPENERS else ""
    kind = Path(path.name.removesuffix(packed)).suffix
    return path.is_file() and (kind in (*TEXT, *LINES) or path.suffix == PARQUET)
