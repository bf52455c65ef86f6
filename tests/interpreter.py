"""Triton's interpreter, for tests: runs files in a process of their own under it, and mends there what it lacks.

Trap: it must be chosen before Triton is imported, hence the process, in which this module is imported too.
"""

import os
import subprocess
import sys

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

if INTERPRETED:
    import triton.language as tl
    from triton.runtime import interpreter

    _patch = interpreter._patch_lang_tensor

    def _patch_and_index(tensor, scope):
        """Triton 3.6 holds a scalar as an array of one element, which NumPy 2.4 no longer turns into an index."""
        _patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = _patch_and_index

    _patch_all = interpreter._patch_lang

    def _patch_where_needed(fn):
        """Triton 3.6 patches its whole language at each call of a device function: once will do."""
        langs = [lang for lang in fn.__globals__.values() if lang is tl or lang is tl.core]
        if langs and all(lang.arange.__name__ == "<lambda>" for lang in langs):
            return interpreter._LangPatchScope()
        return _patch_all(fn)

    interpreter._patch_lang = _patch_where_needed


def run_interpreted(path: str, select: str, timeout: float = 900) -> str:
    """What pytest said of the tests of `path` that `select` (as -k) names; fails unless all of them passed."""
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", path, "-k", select]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout, check=False)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
    return run.stdout
