"""Token shards and sequences: every token in its place, each epoch a new order, and nothing that depends on luck."""

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from fastweight.data import Shards, Windows, open_shards
from fastweight.data.windows import _keys, permuted
from fastweight.data.writer import SplitWriter

DOCUMENTS = [[1, 2, 3, 0], [4, 0], [5, 6, 7, 8, 9, 0], [0], [10, 11, 0], [12, 13, 14, 15, 0]]
STREAM = [token for document in DOCUMENTS for token in document]


def write(directory: Path, documents: list[list[int]], vocab_size: int = 100, shard_tokens: int = 5) -> Shards:
    """A split "train" with these documents, several shards of it."""
    directory.mkdir(exist_ok=True)
    dtype = np.dtype("<u2" if vocab_size <= 2**16 else "<u4")
    writer = SplitWriter(directory, "train", dtype, shard_tokens=shard_tokens)
    for document in documents:
        writer.append(np.array(document), num_bytes=0, num_words=0)
    record = writer.close()
    meta = {"format": 1, "tokenizer": {"vocab_size": vocab_size}, "splits": {"train": vars(record)}}
    (directory / "meta.json").write_text(json.dumps(meta))
    return open_shards(directory, "train")


@pytest.fixture
def shards(tmp_path: Path) -> Shards:
    return write(tmp_path / "data", DOCUMENTS)


def test_shards_are_one_array_with_documents(shards: Shards) -> None:
    assert len(list(shards.directory.glob("*.bin"))) == 3
    assert (shards.num_tokens, shards.num_documents) == (len(STREAM), len(DOCUMENTS))
    starts = np.cumsum([0, *map(len, DOCUMENTS)])[:-1]
    for start in range(len(STREAM) + 1):
        for stop in range(start, len(STREAM) + 1):
            assert shards.tokens(start, stop).tolist() == STREAM[start:stop]
            inside = starts[(starts >= start) & (starts < stop)]
            assert shards.document_starts(start, stop).tolist() == inside.tolist()
    assert [shards.document(i).tolist() for i in range(len(DOCUMENTS))] == DOCUMENTS
    for call in (lambda: shards.tokens(3, 99), lambda: shards.tokens(-1, 3), lambda: shards.document(6)):
        with pytest.raises(ValueError, match="expected"):
            call()


def test_large_vocabularies_keep_their_ids(tmp_path: Path) -> None:
    assert write(tmp_path / "wide", [[70_000, 2**20, 0]], vocab_size=2**20 + 1).tokens(0, 2).tolist() == [70_000, 2**20]
    assert write(tmp_path / "edge", [[2**16 - 1, 0]], vocab_size=2**16).tokens(0, 1).tolist() == [2**16 - 1]


def test_unfinished_and_damaged_directories_are_refused(shards: Shards, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="split: got 'valid', expected one of train"):
        open_shards(shards.directory, "valid")
    file = shards.directory / "train-00001.bin"
    file.write_bytes(file.read_bytes()[:-2])
    with pytest.raises(ValueError, match=r"train-00001.bin has 10 bytes, expected 12"):
        open_shards(shards.directory, "train")
    (shards.directory / "meta.json").unlink()
    with pytest.raises(ValueError, match="expected a directory finished by"):
        open_shards(shards.directory, "train")


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 65, 1000])
def test_every_epoch_is_another_order_of_everything(size: int) -> None:
    orders = [[permuted(i, size, _keys(seed, epoch)) for i in range(size)] for seed, epoch in ((0, 0), (0, 1), (1, 0))]
    assert all(sorted(order) == list(range(size)) for order in orders)
    if size >= 64:
        assert orders[0] != orders[1] != orders[2] != orders[0]


def test_the_order_looks_random() -> None:
    size = 4096
    order = np.array([permuted(i, size, _keys(3, 5)) for i in range(size)])
    bound = 5 / size**0.5  # five standard errors
    for lag in (1, 2, 3, 64):
        assert abs(np.corrcoef(order, np.arange(size))[0, 1]) < bound
        assert abs(np.corrcoef(order[lag:], order[:-lag])[0, 1]) < bound
        assert abs(np.corrcoef(order[lag:] % 64, order[:-lag] % 64)[0, 1]) < bound


def test_items_are_a_pure_function_of_seed_epoch_and_index(shards: Shards) -> None:
    windows, again = Windows(shards, 4, seed=7, epochs=3), Windows(open_shards(shards.directory, "train"), 4, seed=7)
    assert (windows.per_epoch, len(windows), len(again)) == (5, 15, 5)
    seen = [windows[i]["input_ids"].tolist() for i in reversed(range(15))][::-1]
    assert seen[:5] == [again[i]["input_ids"].tolist() for i in range(5)]
    pieces = [STREAM[4 * i : 4 * i + 4] for i in range(5)]
    for epoch in range(3):
        assert sorted(seen[5 * epoch : 5 * epoch + 5]) == sorted(pieces)
    item = windows[3]
    assert set(item) == {"input_ids", "labels"}
    assert item["input_ids"].dtype == item["labels"].dtype == torch.int64
    assert torch.equal(item["input_ids"], item["labels"])
    assert item["input_ids"].data_ptr() != item["labels"].data_ptr()
    assert [w["input_ids"].tolist() for w in Windows(shards, 4, shuffle=False)] == pieces  # iteration ends, too


@pytest.mark.parametrize("length", [2, 3, 4, 7, 21])
def test_packed_documents_count_their_own_positions(shards: Shards, length: int) -> None:
    longhand: list[dict[str, list[int]]] = []
    within = [i for document in DOCUMENTS for i in range(len(document))]
    for start in range(0, len(STREAM) - length + 1, length):
        positions, at = [], 0
        for j in range(start, start + length):
            at = 0 if j == start or within[j] == 0 else at + 1
            positions.append(at)
        ids = STREAM[start : start + length]
        labels = [-100 if within[start + j] == 0 else ids[j] for j in range(length)]
        longhand.append({"input_ids": ids, "labels": labels, "position_ids": positions})
    windows = Windows(shards, length, packing="documents", shuffle=False)
    assert [{key: value.tolist() for key, value in item.items()} for item in windows] == longhand


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": 1}, "length: got 1"),
        ({"length": 22}, "length: got 22, expected at most the 21 tokens of train"),
        ({"length": 4, "packing": "tight"}, "packing: got 'tight'"),
        ({"length": 4, "epochs": 0}, "epochs: got 0"),
    ],
)
def test_bad_settings_are_refused(shards: Shards, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Windows(shards, **options)


def test_workers_give_the_same_items_in_the_same_order(shards: Shards) -> None:
    windows = Windows(shards, 4, epochs=2)
    here = torch.cat([item["input_ids"] for item in windows])
    assert torch.equal(here, torch.cat([item["input_ids"] for item in pickle.loads(pickle.dumps(windows))]))
    loader = DataLoader(windows, batch_size=2, num_workers=2, multiprocessing_context="spawn")
    assert torch.equal(here, torch.cat([batch["input_ids"].flatten() for batch in loader]))
