"""The package imports and works where there is no GPU and no Triton, and in a process of its own."""

import subprocess
import sys

import pytest

WITHOUT_TRITON = """
import sys
from importlib.machinery import PathFinder

class Without(PathFinder):  # some packages are as if never installed
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.split(".")[0] in {missing} else PathFinder.find_spec(name, path, target)

sys.meta_path = [Without if finder is PathFinder else finder for finder in sys.meta_path]
import torch
import fastweight as fw
q = k = torch.nn.functional.normalize(torch.randn(1, 70, 2, 4), dim=-1).requires_grad_()
v = torch.randn(1, 70, 2, 3)
for rule in fw.RULES:
    for form in ("recurrent", "masked", "chunk", "auto"):
        o, state = fw.fast_weight_attention(q, k, v, None, None, rule, form=form, output_final_state=True)
        (o.sum() + state.S.sum()).backward()
o, _ = fw.step(q[:, 0], k[:, 0], v[:, 0], None, None, state, rule)
print("triton" in sys.modules, "transformers" in sys.modules)
try:
    fw.fast_weight_attention(q, k, v, None, None, "falcon-1", backend="triton")
except (ValueError, ImportError, NotImplementedError) as error:
    print("refused:", error)
"""


@pytest.mark.parametrize("missing", [(), ("triton", "transformers", "matplotlib", "accelerate")], ids=str)
def test_works_without_gpu_and_triton(missing, tmp_path):
    """Import and every form run with no device, nothing extra is loaded, and an explicit "triton" is refused."""
    environment = {"CUDA_VISIBLE_DEVICES": "", "PATH": "", "OMP_NUM_THREADS": "1"}
    finished = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", WITHOUT_TRITON.replace("{missing}", repr(set(missing)))],
        capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=120,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr[-2000:]
    loaded, *rest = finished.stdout.splitlines()
    assert loaded == "False False", f"triton, transformers were imported: {loaded}"
    assert rest, 'backend="triton" was not refused'
    assert rest[0].startswith("refused:")
