"""What every test shares: the one table of tolerances, the comparison that uses it, and NaN-poisoned allocations.

`assert_close` compares the largest difference with the largest expected magnitude, so a tolerance reads the same for
values and for gradients, and where zero is expected zero is required. The table is never loosened to let a test pass.
Traps: `torch.empty` is filled with NaN during every test (through PyTorch's deterministic mode), so whatever reads
memory that was never written fails here; on a CUDA device some operations have no deterministic version, so the mode
only warns there.
"""

import os

# cuBLAS reads this once, when the first handle is made; deterministic mode refuses to run without it.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import pytest
import torch

# Largest error over largest expected magnitude. "forward": outputs in the input's dtype. "gradient": of inputs, in the
# input's dtype. "state": what is kept in float32 or better whatever the inputs are. The 16-bit rows allow one rounding
# of the result (2^-9 in bfloat16, 2^-11 in float16) and as much again.
TOLERANCES: dict[tuple[torch.dtype, str], float] = {
    (torch.float64, "forward"): 1e-9,
    (torch.float64, "gradient"): 1e-9,
    (torch.float64, "state"): 1e-9,
    (torch.float32, "forward"): 1e-4,
    (torch.float32, "gradient"): 1e-4,
    (torch.float32, "state"): 1e-4,
    (torch.bfloat16, "forward"): 2**-8,
    (torch.bfloat16, "gradient"): 2**-8,
    (torch.bfloat16, "state"): 1e-4,
    (torch.float16, "forward"): 2**-10,
    (torch.float16, "gradient"): 2**-10,
    (torch.float16, "state"): 1e-4,
}


def tolerance(dtype: torch.dtype, kind: str) -> float:
    """The one tolerance of a dtype and a class of operation ("forward", "gradient" or "state")."""
    return TOLERANCES[dtype, kind]


def assert_close(actual, expected, dtype: torch.dtype, kind: str = "forward", name: str = "value") -> None:
    """Fails with the name, the error and the tolerance unless |actual - expected| <= tolerance * max |expected|."""
    assert actual is not None, f"{name}: missing, expected a tensor of shape {tuple(expected.shape)}"
    assert actual.shape == expected.shape, f"{name}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    if expected.numel() == 0:
        return
    actual, expected = actual.detach().cpu().double(), expected.detach().cpu().double()
    assert torch.isfinite(expected).all(), f"{name}: the reference itself is not finite"
    assert torch.isfinite(actual).all(), f"{name}: {int((~torch.isfinite(actual)).sum())} entries are not finite"
    error, scale = (actual - expected).abs().max().item(), expected.abs().max().item()
    allowed = tolerance(dtype, kind) * scale
    assert error <= allowed, (
        f"{name}: largest error {error:.3g} at magnitude {scale:.3g}, allowed {allowed:.3g} ({dtype}, {kind})"
    )


@pytest.fixture(scope="session", name="assert_close")
def assert_close_fixture():
    return assert_close


@pytest.fixture(scope="session", name="tolerance")
def tolerance_fixture():
    return tolerance


@pytest.fixture(autouse=True)
def poison_empty_allocations(request):
    """Fills fresh memory with NaN (the largest number for integers), so that reading it shows."""
    on_gpu = request.node.get_closest_marker("gpu") is not None
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=on_gpu)
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])
    torch.utils.deterministic.fill_uninitialized_memory = filled


def pytest_collection_modifyitems(items):
    """Skips what needs a GPU on a machine without one, and lets non-deterministic CUDA operations warn there."""
    has_gpu = torch.cuda.is_available()
    for item in items:
        if item.get_closest_marker("gpu") is None:
            continue
        item.add_marker(pytest.mark.filterwarnings("ignore:.*deterministic.*:UserWarning"))
        if not has_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
