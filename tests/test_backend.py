"""backend="triton" through the public op equals backend="torch": values, gradients, and the whole next State.

On the CPU this runs in Triton's interpreter, in a process of its own (see test_kernels.py); on a CUDA device as it is.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import assert_close

import fastweight as fw
from tests.kernel_harness import INTERPRETED, gpu, interpreted

CALLS = {
    "falcon-1": lambda q, k, v, b, g, **more: fw.fast_weight_attention(q, k, v, 1.8 * b, 3 * g, "falcon-1", **more),
    "falcon-1a": lambda q, k, v, b, g, **more: fw.fast_weight_attention(q, k, v, b, g, "falcon-1a", **more),
    "delta_rule": lambda q, k, v, b, g, **more: fw.delta_rule(q, k, v, b, -g, **more),
    "linear_attention": lambda q, k, v, b, g, **more: fw.linear_attention(q, k, v, -g, **more),
}
WINDOW = {"falcon-3a": lambda q, k, v, b, g, **more: fw.fast_weight_attention(q, k, v, b, g, "falcon-3a", **more)}


def draw(B: int, T: int, device: str) -> list[torch.Tensor]:
    rng = torch.Generator().manual_seed(T)
    q, k = torch.randn(2, B, T, 1, 16, generator=rng) / 3
    v = torch.randn(B, T, 2, 8, generator=rng)
    beta, gate = torch.rand(2, B, T, 2, generator=rng)
    return [t.to(device).requires_grad_() for t in (q, k, v, beta, gate)]


def compare(call, leaves: list[torch.Tensor], **more) -> fw.State:
    """Both backends on the same inputs; returns the next State."""
    found = {}
    for backend in ("torch", "triton"):
        o, state = call(*leaves, backend=backend, output_final_state=True, **more)
        grads = torch.autograd.grad(o.square().sum() + state.S.sin().sum(), leaves, allow_unused=True)
        found[backend] = (o, state, grads)
    (o, state, grads), (o2, state2, grads2) = found["torch"], found["triton"]
    assert_close(o2, o, torch.float32, "forward", "o")
    for name, got, want in zip(state._fields, state2, state, strict=True):
        assert got.dtype == want.dtype, f"{name}: {got.dtype}, expected {want.dtype}"
        assert_close(got, want, torch.float32, "state", name)
    for name, got, want in zip(("q", "k", "v", "beta", "gate"), grads2, grads, strict=True):
        if want is None:
            assert got is None or not got.any(), f"{name}: a gradient where there is none"
            continue
        assert_close(got, want, torch.float32, "gradient", name)
    return state2.detach()


def run_case(name: str, device: str) -> None:
    call = {**CALLS, **WINDOW}[name]
    state = compare(call, draw(2, 37, device))
    compare(call, draw(1, 30, device), cu_seqlens=torch.tensor([0, 9, 9, 10, 30], device=device))
    if name in CALLS:
        compare(call, draw(2, 5, device), initial_state=state)
        mask = torch.rand(2, 37, generator=torch.Generator().manual_seed(0)).to(device) > 0.3
        compare(call, draw(2, 37, device), mask=mask)


@interpreted
@pytest.mark.parametrize("name", [*CALLS, *WINDOW])
def test_triton_equals_torch_interpreted(name):
    run_case(name, "cpu")


@pytest.mark.gpu
@gpu[1]
@pytest.mark.parametrize("name", [*CALLS, *WINDOW])
def test_triton_equals_torch(name):
    run_case(name, "cuda")


@pytest.mark.skipif(INTERPRETED, reason="is the process that starts the others")
def test_in_a_process_of_its_own():
    pytest.importorskip("triton")
    finished = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", __file__, "-k", "interpreted"],
        env={**os.environ, "TRITON_INTERPRET": "1"}, cwd=Path(__file__).parent.parent, capture_output=True, text=True,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stdout[-3000:]
    assert f"{len(CALLS) + len(WINDOW)} passed" in finished.stdout


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"form": "masked"}, "chunk form"),
        ({"form": "recurrent"}, "chunk form"),
        ({"chunk_size": 16}, "chunks of their own size"),
    ],
)
def test_what_kernels_cannot_do_is_refused(more, reason):
    q, k, v, beta, gate = draw(1, 9, "cpu")
    with pytest.raises(ValueError, match=rf"backend: got 'triton'.*{reason}"):
        fw.fast_weight_attention(q, k, v, beta, gate, "falcon-1", backend="triton", **more)
    with pytest.raises(ValueError, match="backend: got 'triton'"):
        fw.fast_weight_attention(q.double(), k.double(), v.double(), beta, gate, "falcon-1", backend="triton")
