"""Runs tests in a process of their own under Triton's interpreter, which must be chosen before Triton is imported."""

import os
import subprocess
import sys

import pytest


def run_interpreted(path: str, select: str, timeout: float = 900) -> str:
    """What pytest said of the tests of `path` that `select` (as -k) names; fails unless all of them passed."""
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", path, "-k", select]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout, check=False)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
    return run.stdout
