"""Windows that go on from an earlier call, on the kernels, against the float64 recurrence from the same State.

Outputs, the whole next State, and the gradients of the tokens and of every part of the State that holds numbers.
Interpreted on the CPU in a process of its own, or, marked gpu, on a CUDA device.
"""

import pytest
import torch
from conftest import assert_close

import fastweight as fw
from tests.interpreter import run_interpreted
from tests.kernel_harness import ALLOWED, INTERPRETED, gpu, interpreted

FLOATS = ("S", "key", "tail_x", "tail_y")
CASES = {
    "fully filled": {},
    "partly filled": {"earlier": 2},
    "fresh": {"earlier": 0},
    "longer than a chunk": {"T": 70, "shape": (1, 1, 2)},
    "reads first": {"options": {"timing": "read-before-write"}, "earlier": 3},
    "own keys": {"options": {"pairing": "same-step", "ridge": "scaled"}, "earlier": 1},
    "given steps": {"options": {"step": "direct", "window": 3}, "earlier": 9},
    "packed": {"cuts": [0, 2, 2, 3, 11], "earlier": 3},
    "packed, own keys": {"cuts": [0, 2, 2, 11], "options": {"pairing": "same-step"}},
    "no gates": {"gates": False},
}


def draw(device, dtype, T=11, shape=(2, 1, 1), width=16, cuts=None, gates=True):
    """q, k, v, beta, lam of T tokens, numbers of the dtype held in float64."""
    random = torch.Generator().manual_seed(T)
    B, Hk, H = shape
    B = B if cuts is None else 1
    q, k = (torch.randn(B, T, Hk, width, generator=random) * 0.3 for _ in range(2))
    v = torch.randn(B, T, H, width, generator=random)
    beta, lam = (torch.rand(B, T, H, generator=random) for _ in range(2)) if gates else (None, None)
    return [None if t is None else t.to(device, dtype).double() for t in (q, k, v, beta, lam)]


def earlier_state(rule, tokens, device, dtype, shape, width, N) -> fw.State:
    """A State after some tokens, of every length up to `tokens` where there are several sequences."""
    random = torch.Generator().manual_seed(1)
    S = torch.randn(N, shape[2], width, width, generator=random).to(device).double()
    state = fw.State.fresh(S, rule, num_key_heads=shape[1])
    if tokens:
        inputs = draw(device, dtype, tokens, (N, *shape[1:]), width)
        mask = torch.arange(tokens, device=device) >= torch.arange(N, device=device)[:, None]
        state = fw.fast_weight_attention(*inputs, rule, initial_state=state, output_final_state=True, mask=mask)[1]
    # What is kept was rounded to the dtype of the tokens, and S to float32.
    keep = {n: getattr(state, n).to(torch.float32 if n == "S" else dtype).double() for n in FLOATS}
    return state._replace(**keep).detach()


def outcome(inputs, state, rule, dtype, cuts, pull, **how):
    leaves = [None if t is None else t.detach().to(dtype).clone().requires_grad_() for t in inputs]
    kept = torch.float64 if dtype == torch.float64 else torch.float32
    parts = {n: getattr(state, n).detach().to(kept).clone().requires_grad_() for n in FLOATS}
    cu = None if cuts is None else torch.tensor(cuts, device=state.S.device)
    o, new = fw.fast_weight_attention(
        *leaves, rule, initial_state=state._replace(**parts), output_final_state=True, cu_seqlens=cu, **how
    )
    loss = (o.double() * pull).sum() + sum(getattr(new, n).double().square().sum() for n in FLOATS)
    loss.backward()
    grads = {n: t.grad for n, t in zip(("q", "k", "v", "beta", "lam"), leaves, strict=True) if t is not None}
    return o, new, grads | {n: t.grad for n, t in parts.items()}


def close(actual, expected, dtype, kind, name):
    """float32 by its largest error; 16 bits, whose products add up roundings, as in test_kernels.py."""
    if dtype == torch.float32 or not expected.is_floating_point():
        return assert_close(actual, expected, torch.float32, kind, name)
    error, scale = (actual.double() - expected.double()).norm(), expected.double().norm()
    assert error <= ALLOWED[dtype] * scale, f"{name}: relative error {float(error / scale):.3g}"


def check(
    device, dtype, *, rule="falcon-3a", T=11, options=None, earlier=6, cuts=None, gates=True, shape=(2, 1, 1), width=16
):
    rule = fw.RULES[rule].replace(**(options or {}))
    N = shape[0] if cuts is None else len(cuts) - 1
    inputs = draw(device, dtype, T, shape, width, cuts, gates)
    state = earlier_state(rule, earlier, device, dtype, shape, width, N)
    pull = torch.randn(inputs[2].shape, generator=torch.Generator().manual_seed(2)).to(device).double()
    o, new, grads = outcome(inputs, state, rule, torch.float64, cuts, pull, form="recurrent", backend="torch")
    o2, new2, grads2 = outcome(inputs, state, rule, dtype, cuts, pull, backend="triton")
    close(o2, o, dtype, "forward", "o")
    for name, want in new._asdict().items():
        close(getattr(new2, name), want, dtype, "state", name)
    for name, want in grads.items():
        close(grads2[name], want, dtype, "gradient", name)


@interpreted
@pytest.mark.parametrize("name", CASES)
def test_interpreted_window_goes_on(name):
    check("cpu", torch.float32, **CASES[name])


@pytest.mark.skipif(INTERPRETED, reason="this is that process")
@pytest.mark.slow
def test_in_a_process_of_its_own():
    said = run_interpreted(__file__, "interpreted", timeout=300)
    assert f"{len(CASES)} passed" in said, said[-500:]


class TestOnDevice:
    pytestmark = gpu

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
    @pytest.mark.parametrize("name", CASES)
    def test_window_goes_on(self, name, dtype):
        check("cuda", dtype, **CASES[name], width=64)
