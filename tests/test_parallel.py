"""Context parallelism on two and three gloo processes equals one process: the op, models, training, kernels.

The comparisons are in parallel_runs.py, where every rank makes its own; here they are started, and what needs no second
process is checked.
"""

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

import fastweight as fw
from benchmarks.host import no_launches
from benchmarks.parallel_host import pretended, step
from fastweight.kernels import dispatch
from fastweight.memory import borders
from fastweight.memory.inputs import Around, Inputs
from fastweight.parallel import Place, Traffic, context_parallel, entered
from fastweight.parallel.layout import Layout, last_real
from fastweight.training.context import Repeated, groups_of, part_of
from tests.lm_runs import run_of

ROOT = Path(__file__).parent.parent


def run(*words: str, **environment: str) -> None:
    """parallel_runs in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.parallel_runs", *words],
        cwd=ROOT, capture_output=True, text=True, timeout=500,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


@pytest.mark.slow
@pytest.mark.parametrize(("parts", "size"), [("op,model", "2"), ("op", "3")])
def test_the_op_and_models_over_ranks(parts, size):
    run(parts, size)


@pytest.mark.slow
@pytest.mark.parametrize("size", ["2", "3"])
def test_the_exchange_inside_the_kernels(size):
    run("kernels", size, TRITON_INTERPRET="1")


@pytest.mark.slow
def test_training_with_shared_sequences(tmp_path, assert_close):
    """Two processes with half a sequence each: the losses, gradient norms and validation of one process."""
    run("training", str(tmp_path))
    for packing in ("contiguous", "documents"):
        one, two = (
            [json.loads(line) for line in (tmp_path / f"{packing}-{ranks}" / "metrics.jsonl").read_text().splitlines()]
            for ranks in (1, 2)
        )
        assert len(one) == len(two) == 3
        for alone, shared in zip(one, two, strict=True):
            assert shared.keys() == alone.keys()
            for name in {"loss", "grad_norm", "validation"} & alone.keys():
                assert shared[name] == pytest.approx(alone[name], rel=1e-5)
        expected, found = (
            load_file(tmp_path / f"{packing}-{ranks}" / "checkpoint-2" / "model.safetensors") for ranks in (1, 2)
        )
        for name, value in found.items():
            assert_close(value, expected[name], torch.float32, "gradient", name)


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("inner", [(), (7, 7, 30), (15,), (1, 2, 3, 28, 29), (0, 0, 30, 30)])
def test_every_token_and_document_has_one_place(size, inner):
    """Ranks together hold each document's tokens once and begin it once; neighbours agree on what goes on."""
    total = 30
    cu = torch.tensor([0, *inner, total])
    layouts = [Layout.of(Place(None, rank, size, Traffic()), len(cu) - 1, total // size, cu) for rank in range(size)]
    lengths = [0] * (len(cu) - 1)
    for layout in layouts:
        if layout.continues is not None:
            lengths[layout.continues] += layout.head
        for row, (a, b) in zip(layout.documents, pairwise(layout.bounds), strict=True):
            lengths[row] += b - a
    assert lengths == cu.diff().tolist()
    assert sorted(row for layout in layouts for row in layout.documents) == list(range(len(cu) - 1))
    for before, after in pairwise(layouts):
        assert before.goes_on == (after.continues is not None)
    assert not layouts[-1].goes_on


def test_the_last_real_tokens():
    x = torch.arange(12.0).reshape(2, 6, 1)
    mask = torch.tensor([[1, 0, 1, 1, 0, 0], [0, 0, 0, 0, 0, 1]], dtype=torch.bool)
    (found,), real = last_real([x], mask, opened=0, number=2)
    assert found[..., 0].tolist() == [[2, 3], [0, 11]]
    assert real.tolist() == [[True, True], [False, True]]
    (found,), real = last_real([x], None, opened=5, number=2)
    assert found[..., 0].tolist() == [[0, 5], [0, 11]]
    assert real.tolist() == [[False, True]] * 2


def test_parts_of_a_batch_keep_the_label_that_follows():
    labels = torch.arange(16).reshape(2, 8)
    parts = [part_of({"input_ids": labels, "labels": labels}, rank, 2) for rank in (0, 1)]
    together = torch.cat([part["shift_labels"] for part in parts], dim=1)
    assert together.tolist() == [[*range(1, 8), -100], [*range(9, 16), -100]]
    # Four processes, two sequences a micro-batch: each group of two sees the same ones.
    repeated = Repeated(list(range(8)), 2, 2)
    seen = [[repeated[batch * 2 + i] for i in (0, 1)] for batch in range(8)]
    assert seen == [[0, 1], [0, 1], [2, 3], [2, 3], [4, 5], [4, 5], [6, 7], [6, 7]]


@pytest.mark.parametrize(
    ("changes", "processes", "message"),
    [
        ({"engine": {"context_parallel": 2}}, 3, "got 2 with 3 processes"),
        ({"engine": {"context_parallel": 3}}, 3, "divisor of task.sequence_length 16"),
        ({"engine": {"context_parallel": 2, "compile": True}}, 2, "exchanges are not compiled"),
        ({"engine": {"context_parallel": 2}, "model": {"mixer": "transformer"}}, 2, "got 2 with mixer 'transformer'"),
    ],
)
def test_settings_that_exclude_each_other(changes, processes, message):
    with pytest.raises(ValueError, match=f"engine.context_parallel: .*{message}"):
        groups_of(run_of(Path("nowhere"), **changes), processes)


@pytest.mark.parametrize(
    "name", ["falcon-1", "gated delta rule", "falcon-1a", "linear attention", "falcon-3a", "falcon-2a"]
)
def test_a_rank_calls_little_more_than_one_process(name):
    """Of the host: a message each way, up to five launches more, operators for allocations and views alone."""
    with no_launches(), pretended():
        alone, shared = step(name, False, calls=1), step(name, True, calls=1)
    assert shared.messages == 2
    assert shared.launches <= alone.launches + 5
    assert shared.operators < 60


@pytest.mark.parametrize(
    ("rule", "changes", "expected"),
    [
        ("falcon-1", {}, True),
        ("falcon-3a", {}, True),
        ("falcon-1a", {}, True),
        ("falcon-2a", {}, True),
        ("falcon-2", {}, False),
        ("falcon-3", {}, False),
        ("falcon-3a", {"window": 5}, False),
        ("falcon-1a", {"timing": "read-before-write"}, False),
        ("falcon-1a", {"read": "normalized"}, False),
    ],
)
def test_which_calls_a_device_sends_in_one_message(monkeypatch, rule, changes, expected):
    monkeypatch.setattr(dispatch, "machine_reason", lambda device: None)
    rule = fw.RULES[rule].replace(**changes)
    x = torch.empty(1, 64, 1, 64, dtype=torch.bfloat16)
    gain = torch.empty(1, 64, 1, 64) if rule.gain == "column" else torch.empty(1, 64, 1)
    inputs = Inputs(x, x, OnDevice(x), gain, None, None)
    call = SimpleNamespace(rule=rule, form="auto", backend="auto", chunk_size=None)
    assert borders.fits(inputs, call, Around(None, None, None)) == expected


class OnDevice:
    """A tensor that says that it lies on a device."""

    is_cuda = True

    def __init__(self, tensor: torch.Tensor):
        self.tensor = tensor

    def __getattr__(self, name: str):
        return getattr(self.tensor, name)


def test_what_is_refused():
    with pytest.raises(ValueError, match="group: got no initialised"), context_parallel():
        pass
    x, z = torch.zeros(1, 1, 2), torch.zeros(1, 3, 1, 2)
    with entered(Place(None, 0, 2, Traffic())), pytest.raises(ValueError, match="step: got a call inside"):
        fw.step(x, x, x, None, None, None, "falcon-1")
    with entered(Place(None, 0, 2, Traffic())), pytest.raises(ValueError, match="rising from 0 to 6"):
        fw.fast_weight_attention(z, z, z, None, None, "falcon-1", cu_seqlens=torch.tensor([0, 3]))
