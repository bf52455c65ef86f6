"""Widths of 256 in float32 with all surroundings: what the kernels for every call ask of shared memory is there."""

import importlib
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from fastweight.kernels import dispatch, launch
from tests.compiled import made_of
from tests.kernel_harness import INTERPRETED, case

SHARED_MEMORY = 232_448  # bytes that a program can have on Hopper
FILES = sorted(Path(launch.__file__).parent.glob("launch*.py"))
HOSTS = [importlib.import_module(f"fastweight.kernels.{path.stem}") for path in FILES]


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="the interpreter has no machine code")
@pytest.mark.parametrize("surroundings", [{"mask": True}, {"cuts": (0, 1, 1, 70, 150)}], ids=["mask", "cuts"])
@pytest.mark.parametrize("rule", ["falcon-1", "falcon-1a"])
def test_wide_float32_fits(rule, surroundings, monkeypatch):
    """With a carried key: products hold what is put together of two loads in shared memory, once for each use."""
    monkeypatch.setattr(dispatch, "machine_reason", lambda device: None)
    test = case(rule, shape=(1, 150, 1, 2, 256, 256), state=True, key=True, **surroundings)
    hosts = [host for host in HOSTS if hasattr(host, "start")]
    made = made_of(test, "forward|backward", hosts, monkeypatch, torch.float32)
    assert len(made) > 2
    for name, compiled in made.items():
        assert compiled.metadata.shared <= SHARED_MEMORY, name
