"""Tokenised documents into the shards of one split, appended so that a killed run can go on.

Files only grow; `commit` makes what is written durable and returns a record of how far they reach. Going on from that
record cuts the files back to it, so the bytes do not depend on where, or how often, a run was killed. Shards end after
the document that fills them, never within one.
"""

import hashlib
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from fastweight.data.shards import OFFSETS

SHARD_TOKENS = 2**27  # 256 MB of uint16


@dataclass
class SplitRecord:
    """What has been written of a split.

    Fields:
        shards: name, tokens and documents of each; the last one may still grow.
        tokens: end-of-text tokens included.
        documents, bytes, words: of the text, bytes as UTF-8, words between white space.
        digest: chained over the tokens of the documents in order.
    """

    shards: list[dict[str, Any]] = field(default_factory=list)
    tokens: int = 0
    documents: int = 0
    bytes: int = 0
    words: int = 0
    digest: str = ""

    def copy(self) -> "SplitRecord":
        return SplitRecord(**asdict(self))


class SplitWriter:
    """Appends documents to the shards of a split, from the beginning or from a record of an earlier `commit`."""

    def __init__(
        self,
        directory: Path,
        split: str,
        dtype: np.dtype[Any],
        *,
        shard_tokens: int = SHARD_TOKENS,
        record: SplitRecord | None = None,
    ) -> None:
        self.directory, self.split, self.dtype, self.shard_tokens = directory, split, dtype, shard_tokens
        self.record = SplitRecord() if record is None else record.copy()
        self._files: tuple[BinaryIO, BinaryIO] | None = None
        self._cut_back()

    def append(self, tokens: np.ndarray, *, num_bytes: int, num_words: int) -> None:
        """One document, its end-of-text token last."""
        if not self.record.shards or self.record.shards[-1]["tokens"] >= self.shard_tokens:
            self._next_shard()
        assert self._files is not None, "a shard is open"
        data, shard = np.ascontiguousarray(tokens, self.dtype).tobytes(), self.record.shards[-1]
        shard["tokens"] += len(tokens)
        shard["documents"] += 1
        self._files[0].write(data)
        self._files[1].write(np.array([shard["tokens"]], OFFSETS).tobytes())
        self.record.tokens += len(tokens)
        self.record.documents += 1
        self.record.bytes += num_bytes
        self.record.words += num_words
        self.record.digest = hashlib.blake2b(self.record.digest.encode() + data, digest_size=16).hexdigest()

    def commit(self) -> SplitRecord:
        """Everything appended so far on disk, and the record of it."""
        for file in self._files or ():
            file.flush()
            os.fsync(file.fileno())
        return self.record.copy()

    def close(self) -> SplitRecord:
        record = self.commit()
        for file in self._files or ():
            file.close()
        self._files = None
        return record

    def _next_shard(self) -> None:
        self.close()
        name = f"{self.split}-{len(self.record.shards):05d}"
        self.record.shards.append({"name": name, "tokens": 0, "documents": 0})
        tokens, offsets = (self._path(name, suffix).open("wb") for suffix in ("bin", "idx"))
        offsets.write(np.zeros(1, OFFSETS).tobytes())
        self._files = tokens, offsets

    def _cut_back(self) -> None:
        """Remove what was written after the record, and open its last shard to go on."""
        known = {shard["name"] for shard in self.record.shards}
        for suffix in ("bin", "idx"):
            for path in self.directory.glob(f"{self.split}-*.{suffix}"):
                if path.stem not in known:
                    path.unlink()
        if self.record.shards:
            shard = self.record.shards[-1]
            sizes = (shard["tokens"] * self.dtype.itemsize, (shard["documents"] + 1) * OFFSETS.itemsize)
            tokens, offsets = (self._path(shard["name"], suffix).open("r+b") for suffix in ("bin", "idx"))
            for file, size in zip((tokens, offsets), sizes, strict=True):
                file.truncate(size)
                file.seek(size)
            self._files = tokens, offsets

    def _path(self, name: str, suffix: str) -> Path:
        return self.directory / f"{name}.{suffix}"
