"""One token at a time through the decoding kernel, against the float64 recurrence over the whole sequence.

As in test_kernels.py the same cases run in Triton's interpreter, in a process of its own, and on a CUDA device.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import assert_close

import fastweight as fw
from fastweight.kernels import dispatch
from fastweight.memory.attention import DELTA_RULE, LINEAR_ATTENTION, step_in_place
from tests.kernel_harness import INTERPRETED, gpu, interpreted

RULES = {
    **fw.RULES,
    "read first": fw.RULES["falcon-2"].replace(timing="read-before-write", ridge="scaled"),
    "own key": fw.RULES["falcon-1"].replace(pairing="same-step", step="direct", ridge="scaled"),
    "long window": fw.RULES["falcon-3"].replace(window=7, ridge="scaled"),
    "window, own key": fw.RULES["falcon-3a"].replace(window=2, pairing="same-step"),
    "delta rule": DELTA_RULE,
    "linear attention": LINEAR_ATTENTION,
}
BASELINES = ("delta rule", "linear attention")


def draw(rule: fw.Rule, dtype: torch.dtype, device: str, shape=(2, 4, 1, 2, 12, 12), masked=True) -> dict:
    """Random tokens, some masked and full of NaN but for q, and a state that some of the sequences go on from."""
    B, T, Hk, H, K, V = shape
    rng = torch.Generator().manual_seed(11)
    small = K**-0.5 if rule.step == "direct" else 1.0
    given = {
        "q": torch.randn(B, T, Hk, K, generator=rng).to(dtype),
        "k": (small * torch.randn(B, T, Hk, K, generator=rng)).to(dtype),
        "v": torch.randn(B, T, H, V, generator=rng).to(dtype),
        "beta": torch.rand(*(B, T, H, V)[: 4 if rule.gain == "column" else 3], generator=rng),
        "gate": torch.rand(B, T, H, generator=rng),
        "mask": torch.rand(B, T, generator=rng) > (0.3 if masked else -1),
    }
    state = fw.State.zeros(rule, B, H, K, V, num_key_heads=Hk)
    R = rule.window
    count = torch.tensor([1 % R, R - 1])[torch.arange(B) % 2]
    state = state._replace(
        S=torch.randn(B, H, K, V, generator=rng), has_key=torch.arange(B) % 2 == 0, tail_count=count,
        key=small * torch.randn(B, Hk, K, generator=rng), tail_x=torch.randn(B, R - 1, Hk, K, generator=rng),
        tail_y=torch.randn(B, R - 1, H, V, generator=rng),
    )  # fmt: skip
    given = {name: value.to(device) for name, value in given.items()}
    return given | {"state": state.to(device)}


def recurrence(name: str, rule: fw.Rule, given: dict) -> tuple[torch.Tensor, fw.State]:
    """Everything at once, in float64."""
    q, k, v, beta, gate = (given[part].double() for part in ("q", "k", "v", "beta", "gate"))
    common = {"form": "recurrent", "backend": "torch", "output_final_state": True, "mask": given["mask"]}
    common["initial_state"] = given["state"].to(torch.float64)
    if name == "delta rule":
        return fw.delta_rule(q, k, v, beta, -gate, **common)
    if name == "linear attention":
        return fw.linear_attention(q, k, v, -gate, **common)
    return fw.fast_weight_attention(q, k, v, beta, gate, rule, **common)


def token_by_token(name: str, rule: fw.Rule, given: dict, in_place: bool) -> tuple[torch.Tensor, fw.State]:
    """The kernel's way, masked tokens full of NaN; checks that what must not change does not."""
    state = fw.State(*(part.clone() for part in given["state"]))
    parts, outputs = (state.S, *state[2:]), []
    for t in range(given["v"].shape[1]):
        q, k, v, beta, gate, mask = (given[n][:, t].clone() for n in ("q", "k", "v", "beta", "gate", "mask"))
        for tensor in (k, v, beta, gate):
            tensor[~mask] = float("nan")
        gates = (None, -gate) if name in BASELINES else (gate, None)
        beta = None if name == "linear attention" else beta
        tickets = torch.zeros(len(v), dtype=torch.int32, device=v.device) if in_place else None
        before = [part.clone() for part in parts]
        o, new = dispatch.step(q, k, v, beta, gates[0], rule, parts, log_decay=gates[1], mask=mask, tickets=tickets)
        outputs.append(o)
        if tickets is None:
            assert all(torch.equal(part, old) for part, old in zip(parts, before, strict=True)), "changed in place"
        else:
            assert [part.data_ptr() for part in new] == [part.data_ptr() for part in parts]
            assert not tickets.any(), "tickets must come back as zeros"
        parts = new
    return torch.stack(outputs, dim=1), fw.State(parts[0], state.z, *parts[1:])


def check(name: str, dtype: torch.dtype, device: str, in_place: bool, **shape) -> None:
    rule = RULES[name]
    given = draw(rule, dtype, device, **shape)
    o, state = recurrence(name, rule, given)
    with torch.no_grad():
        got, last = token_by_token(name, rule, given, in_place)
    assert got.dtype == dtype
    assert_close(got, o, dtype, "forward", "o")
    for field, value, expected in zip(state._fields, last, state, strict=True):
        assert_close(value.double(), expected.double(), torch.float32, "state", field)


STEPS = [*((name, False) for name in RULES), ("falcon-2", True), ("falcon-3a", True), ("delta rule", True)]


@interpreted
@pytest.mark.parametrize(("name", "in_place"), STEPS, ids=lambda value: str(value))
def test_interpreted_steps_equal_the_recurrence(name, in_place, monkeypatch):
    """Two programs a head, so that tickets have something to count."""
    from fastweight.kernels import launch_decode

    monkeypatch.setattr(launch_decode, "ELEMENTS", 128)
    check(name, torch.float32, "cpu", in_place)


@interpreted
def test_eigenvalues_that_lie_close_together():
    """Nearly equal, equal and no top eigenvalues: the window's energy is right whatever the gap."""
    rule = fw.RULES["falcon-3"].replace(pairing="same-step")
    for gap in (0.0, 1e-5, 1e-4, 1e-3, 1e-2, 1.0):
        x = torch.diag(torch.tensor([1.0, 1.0 - gap, 1.0 - 2 * gap, 1.0 - gap]).clamp(min=0).sqrt())[None, :, None]
        state = fw.State.zeros(rule, 1, 1, 4, 8)._replace(tail_x=x[:, :3], tail_count=torch.tensor([3]))
        v = torch.ones(1, 1, 8)
        args = (x[:, 3], x[:, 3], v, None, None, rule)
        _, parts = dispatch.step(*args, (state.S, state.key, state.has_key, x[:, :3], v.expand(1, 3, 1, 8), *state[6:]))
        eta = parts[0][0, 0, 3, 0] / x[0, 3, 0, 3] if gap < 1 else parts[0][0, 0, 0, 0] / x[0, 0, 0, 0]
        assert abs(float(eta) * (0.25 + rule.eps) * 4 - 1) < 1e-4, gap


@interpreted
def test_public_op_takes_the_kernel_where_it_is_asked_for():
    rule = fw.RULES["falcon-1"]
    given = draw(rule, torch.float32, "cpu", shape=(2, 1, 1, 2, 16, 16), masked=False)
    q, k, v, beta, gate, mask, state = given.values()
    with torch.no_grad():
        for form in ("auto", "recurrent"):
            o, new = fw.fast_weight_attention(
                q, k, v, beta, gate, rule, form=form, backend="triton", initial_state=state, mask=mask,
                output_final_state=True,
            )  # fmt: skip
            expected, last = fw.step(q[:, 0], k[:, 0], v[:, 0], beta[:, 0], gate[:, 0], state, rule)
            assert_close(o[:, 0], expected, torch.float32)
            for field, value, wanted in zip(state._fields, new, last, strict=True):
                assert_close(value, wanted, torch.float32, "state", field)
    with pytest.raises(ValueError, match="no gradients"):
        fw.fast_weight_attention(q, k, v.requires_grad_(), beta, gate, rule, form="recurrent", backend="triton")


@interpreted
def test_step_operators_obey_the_library_rules():
    from fastweight.kernels import launch_decode

    given = draw(RULES["falcon-3a"], torch.float32, "cpu", shape=(2, 1, 1, 2, 4, 4))
    token = [given[part][:, 0] for part in ("q", "k", "v", "beta", "gate", "mask")]
    state = given["state"]
    parts, flags = (state.S, *state[2:]), (1e-6, 1e-4, True, False, False, False, False, False)
    torch.library.opcheck(launch_decode.step, (*token, *parts, *flags))
    tickets = torch.zeros(2, dtype=torch.int32)
    torch.library.opcheck(launch_decode.step_in_place, (*token, *parts, tickets, *flags))


@pytest.mark.skipif(INTERPRETED, reason="is the process that starts the others")
@pytest.mark.slow
def test_in_a_process_of_its_own():
    pytest.importorskip("triton")
    finished = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", __file__, "-k", "not OnDevice"],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        cwd=Path(__file__).parent.parent, capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stdout[-3000:] + finished.stderr[-1000:]
    assert finished.stdout.count(".") >= len(STEPS) + 3, finished.stdout[-500:]


@pytest.mark.parametrize("name", list(fw.RULES))
def test_in_place_equals_step(name):
    """On any device: the state's tensors stay where they are and hold the next state."""
    rule = RULES[name]
    given = draw(rule, torch.float32, "cpu")
    state = fw.State(*(part.clone() for part in given["state"]))
    places, last = [part.data_ptr() for part in state], given["state"]
    for t in range(3):
        token = [given[part][:, t] for part in ("q", "k", "v", "beta", "gate")]
        o, last = fw.step(*token, last, rule, mask_t=given["mask"][:, t])
        assert torch.equal(step_in_place(*token, state, rule, mask_t=given["mask"][:, t]), o)
    assert [part.data_ptr() for part in state] == places
    for value, expected in zip(state, last, strict=True):
        assert torch.equal(value, expected)


@pytest.mark.parametrize("name", BASELINES)
def test_in_place_equals_the_recurrence_of_a_baseline(name):
    """With a decay of its own in the place of lam; masked tokens change nothing."""
    rule, given = RULES[name], draw(RULES[name], torch.float32, "cpu")
    expected, last = recurrence(name, rule, given)
    state = fw.State(*(part.clone() for part in given["state"]))
    places = [part.data_ptr() for part in state]
    for t in range(given["v"].shape[1]):
        q, k, v, beta, gate, mask = (given[part][:, t] for part in ("q", "k", "v", "beta", "gate", "mask"))
        beta = beta if name == "delta rule" else None
        o = step_in_place(q, k, v, beta, None, state, rule, log_decay_t=-gate, mask_t=mask)
        assert_close(o, expected[:, t], torch.float32, name=f"o at {t}")
    assert [part.data_ptr() for part in state] == places
    for field, value, right in zip(state._fields, state, last, strict=True):
        assert_close(value.double(), right.double(), torch.float32, "state", field)
    for rule_, lam, decay in ((rule, None, None), (rule, gate, -gate), (fw.RULES["falcon-1"], None, -gate)):
        with pytest.raises(ValueError, match="log_decay_t: got"):
            step_in_place(q, k, v, beta, lam, state, rule_, log_decay_t=decay)


def test_what_cannot_be_overwritten_is_refused():
    rule = fw.RULES["falcon-1"]
    given = draw(rule, torch.float32, "cpu")
    q, k, v, beta, gate = (given[part][:, 0] for part in ("q", "k", "v", "beta", "gate"))
    with pytest.raises(ValueError, match=r"state: got Tensor, expected a State"):
        step_in_place(q, k, v, beta, gate, given["state"].S, rule)
    with pytest.raises(ValueError, match=r"state: got tensors that require gradients"):
        step_in_place(q, k, v.requires_grad_(), beta, gate, given["state"], rule)


def test_reasons_name_what_is_missing(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    q = torch.zeros(1, 1, 16)
    ask = dispatch.step_supported
    assert "CUDA" in str(ask(q, q, q, None, None, fw.RULES["falcon-3"]))
    assert "normalised" in str(ask(q, q, q, None, None, fw.RULES["falcon-1a"].replace(read="normalized")))
    assert "windows above" in str(ask(q, q, q, None, None, fw.RULES["falcon-3"].replace(window=9)))
    assert "gradients" in str(ask(q, q, q.clone().requires_grad_(), None, None, fw.RULES["falcon-1"]))
    assert "float64" in str(ask(q.double(), q.double(), q.double(), None, None, fw.RULES["falcon-1"]))
    assert "states in float32" in str(ask(q, q, q, None, None, fw.RULES["falcon-1"], parts=(q.double(),)))
    with pytest.raises(ValueError, match="backend: got 'triton'"):
        dispatch.step(q, q, q, None, None, fw.RULES["falcon-1"], ())


class TestOnDevice:
    pytestmark = gpu

    @pytest.mark.parametrize(
        ("dtype", "in_place"),
        [(torch.bfloat16, False), (torch.bfloat16, True), (torch.float16, True), (torch.float32, True)],
        ids=str,
    )
    @pytest.mark.parametrize("name", RULES)
    def test_steps_equal_the_recurrence(self, name, dtype, in_place):
        check(name, dtype, "cuda", in_place, shape=(40, 9, 8, 16, 128, 128))

    @pytest.mark.parametrize("widths", [(64, 64), (256, 256), (24, 80)], ids=str)
    @pytest.mark.parametrize("name", ["falcon-1", "falcon-2a", "falcon-3", "long window"])
    def test_widths(self, name, widths):
        check(name, torch.float32, "cuda", True, shape=(5, 9, 1, 2, *widths))

    @pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
    def test_on_a_device_that_is_not_the_current_one(self):
        assert torch.cuda.current_device() == 0
        check("falcon-3", torch.bfloat16, "cuda:1", True)

    @pytest.mark.parametrize("name", ["falcon-1", "falcon-3"])
    def test_captured_in_place(self, name):
        """A graph replayed token after token moves the one state that it was captured with."""
        rule = RULES[name]
        given = draw(rule, torch.bfloat16, "cuda", shape=(4, 8, 4, 4, 128, 128), masked=False)
        o, last = recurrence(name, rule, given)
        state = fw.State(*(part.clone() for part in given["state"]))
        token = [given[part][:, 0].clone() for part in ("q", "k", "v", "beta", "gate")]
        tickets = torch.zeros(4, dtype=torch.int32, device="cuda")
        with torch.no_grad():
            step_in_place(*token, fw.State(*(part.clone() for part in state)), rule, tickets=tickets)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = step_in_place(*token, state, rule, tickets=tickets)
            for t in range(8):
                for held, part in zip(token, ("q", "k", "v", "beta", "gate"), strict=True):
                    held.copy_(given[part][:, t])
                graph.replay()
                assert_close(out, o[:, t], torch.bfloat16, "forward", f"o at {t}")
        for field, value, expected in zip(state._fields, state, last, strict=True):
            assert_close(value.double(), expected.double(), torch.float32, "state", field)
