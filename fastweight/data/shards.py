"""A directory of token shards into one long sequence of tokens with its documents' borders.

    DIR/meta.json            written last: without it the directory is not ready
    DIR/tokenizer/           the tokenizer, as Hugging Face files
    DIR/train-00000.bin      tokens, little-endian uint16 (vocabularies up to 65,536) or uint32, no header
    DIR/train-00000.idx      int64 [documents + 1]: where each document starts in this shard, and its end

Every document ends with the end-of-text token and lies in one shard, so a shard begins with a document. Traps: file
handles do not pickle, so maps open on first use in each process; a long list of shards must not keep a handle each.
"""

import hashlib
import json
from bisect import bisect_right
from collections import OrderedDict
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64

META, FORMAT, OFFSETS = "meta.json", 1, np.dtype("<i8")
OPEN_MAPS = 128  # per process; opening one again costs some ten microseconds


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """What a token of this vocabulary is stored as."""
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


class Shards:
    """The tokens of one split, as if in one array, read from disk where they are asked for.

    Attributes:
        directory: that was opened.
        split: name of the split.
        meta: of the whole directory: tokenizer, sources, counts.
        num_tokens: end-of-text tokens included.
        num_documents: one end-of-text each.
    """

    def __init__(self, directory: Path, split: str, meta: dict[str, Any]) -> None:
        self.directory, self.split, self.meta = directory, split, meta
        record = meta["splits"][split]
        self.num_tokens: int = record["tokens"]
        self.num_documents: int = record["documents"]
        self._dtype = token_dtype(meta["tokenizer"]["vocab_size"])
        self._names: list[str] = [shard["name"] for shard in record["shards"]]
        self._token_ends = list(accumulate(shard["tokens"] for shard in record["shards"]))
        self._document_ends = list(accumulate(shard["documents"] for shard in record["shards"]))
        self._maps: OrderedDict[str, np.ndarray] = OrderedDict()
        for shard in record["shards"]:
            self._check(shard)

    @property
    def fingerprint(self) -> str:
        """Of the tokens of the split in their order, and of the tokenizer that made them."""
        told = json.dumps([self.meta["splits"][self.split], self.meta["tokenizer"]["fingerprint"]], sort_keys=True)
        return hashlib.sha256(told.encode()).hexdigest()[:32]

    def tokens(self, start: int, stop: int) -> Int64[np.ndarray, "tokens"]:
        """Tokens [start, stop) of the split; ValueError beyond its ends."""
        if not 0 <= start <= stop <= self.num_tokens:
            raise ValueError(f"tokens: got {start} to {stop}, expected a range within 0 to {self.num_tokens}")
        parts = [
            self._map(f"{self._names[i]}.bin", self._dtype)[start - base if start > base else 0 : stop - base]
            for i, base in self._shards_of(start, stop)
        ]
        return np.concatenate([np.empty(0, np.int64), *parts]).astype(np.int64)

    def document_starts(self, start: int, stop: int) -> Int64[np.ndarray, "documents"]:
        """Positions in [start, stop) at which a document begins, counted from the beginning of the split."""
        found = [np.empty(0, np.int64)]
        for i, base in self._shards_of(start, stop):
            offsets = self._map(f"{self._names[i]}.idx", OFFSETS)[:-1]
            low, high = np.searchsorted(offsets, [start - base, stop - base])
            found.append(offsets[low:high] + base)
        return np.concatenate(found)

    def document(self, index: int) -> Int64[np.ndarray, "tokens"]:
        """The tokens of one document, end-of-text last; ValueError when there is no such document."""
        if not 0 <= index < self.num_documents:
            raise ValueError(f"document: got {index}, expected 0 to {self.num_documents - 1}")
        i = bisect_right(self._document_ends, index)
        offsets = self._map(f"{self._names[i]}.idx", OFFSETS)
        at = index - (self._document_ends[i - 1] if i else 0)
        return self._map(f"{self._names[i]}.bin", self._dtype)[offsets[at] : offsets[at + 1]].astype(np.int64)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_maps": OrderedDict()}

    def _shards_of(self, start: int, stop: int) -> list[tuple[int, int]]:
        """(shard, its first token's position) for shards that hold some of [start, stop)."""
        first, chosen = bisect_right(self._token_ends, start), []
        for i in range(first, len(self._names)):
            base = self._token_ends[i - 1] if i else 0
            if base >= stop:
                break
            chosen.append((i, base))
        return chosen

    def _map(self, name: str, dtype: np.dtype[Any]) -> np.ndarray:
        if name in self._maps:
            self._maps.move_to_end(name)
        else:
            self._maps[name] = np.memmap(self.directory / name, dtype, mode="r")
            if len(self._maps) > OPEN_MAPS:
                self._maps.popitem(last=False)
        return self._maps[name]

    def _check(self, shard: dict[str, Any]) -> None:
        """Both files have the size that the record says."""
        sizes = {"bin": shard["tokens"] * self._dtype.itemsize, "idx": (shard["documents"] + 1) * OFFSETS.itemsize}
        for suffix, size in sizes.items():
            file = self.directory / f"{shard['name']}.{suffix}"
            found = file.stat().st_size if file.is_file() else None
            if found != size:
                raise ValueError(f"data: {file} has {found} bytes, expected {size}: prepare it again")


def read_meta(directory: str | Path) -> dict[str, Any]:
    """meta.json of prepared data; ValueError when it is absent or of another format."""
    path = Path(directory) / META
    if not path.is_file():
        raise ValueError(f"data: got {directory}, expected a directory finished by `fastweight prepare` (no {META})")
    meta = json.loads(path.read_text(encoding="utf-8"))
    if meta.get("format") != FORMAT:
        raise ValueError(f"data: {path} has format {meta.get('format')}, expected {FORMAT}")
    return meta


def open_shards(directory: str | Path, split: str) -> Shards:
    """One split ("train" or "validation") of a directory that `fastweight prepare` has finished.

    Raises ValueError when the directory is not ready, has no such split, or a file has another size than recorded.
    """
    meta = read_meta(directory)
    if split not in meta["splits"]:
        raise ValueError(f"split: got {split!r}, expected one of {', '.join(meta['splits'])} in {directory}")
    return Shards(Path(directory), split, meta)
