"""Faults that users of such libraries report, each as a test of its whole kind, against the float64 longhand.

Numbers in the section titles are those of the requirements list: 1 to 5 here, 6 and 7 in test_arguments, 8 and 11 in
test_gradients, 10 in test_forms, 12 and 13 in test_continuation, 23 in test_environment. Traps: float32 answers are
held to a float64 longhand of the same float32 inputs; a chunk form may not fail before the loop does.
"""

from functools import lru_cache

import pytest
import torch
from conftest import assert_close, tolerance
from inputs import Problem, attend, check, draw, expect, leaves, run
from longhand import gated_delta_longhand, linear_attention_longhand

import fastweight as fw

FORMS = [("recurrent", None), ("masked", None), ("chunk", 16), ("chunk", 64), ("chunk", None)]
RULES = sorted(fw.RULES)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
R = fw.RULES


def test_allocations_are_poisoned():
    """The other tests rely on it: memory nobody wrote is NaN."""
    assert bool(torch.isnan(torch.empty(5)).all())
    assert bool(torch.isnan(torch.zeros(3).new_empty(5)).all())


# 1. Strong decay


def strong(rule, where, dtype, T=130) -> Problem:
    """Keys of norm 1 and a direct step; the decay sits on decay_floor at `where`, and is mild elsewhere."""
    problem = draw(rule, B=1, T=T, H=1, K=4, V=3, seed=3)
    k = torch.nn.functional.normalize(problem.k, dim=-1)
    beta = 0.5 + 0.4 * problem.beta / 1.9
    generator = torch.Generator().manual_seed(5)
    lam = {
        "everywhere": torch.ones(T),
        "borders": torch.tensor([float(t in (0, 1, 15, 16, 63, 64, 65, 127, 128, T - 1)) for t in range(T)]),
        "random": (torch.rand(T, generator=generator) < 0.3).float(),
    }[where]
    lam = (0.05 + 50 * lam.double())[None, :, None]
    values = {"q": problem.q, "k": k, "v": problem.v, "beta": beta, "lam": lam}
    w_o, w_S = problem.w_o.to(dtype).double(), problem.w_S.float().double()
    return problem._replace(**{n: u.to(dtype) for n, u in values.items()}, S0=problem.S0.float(), w_o=w_o, w_S=w_S)


@lru_cache(maxsize=128)
def strong_case(rule, where, dtype):
    problem = strong(rule, where, dtype)
    return problem, expect(problem, rule)


@pytest.mark.parametrize(
    ("dtype", "pairing"),
    [(torch.float32, "next-latent"), *((dtype, "same-step") for dtype in DTYPES)],
    ids=str,
)
@pytest.mark.parametrize("where", ["everywhere", "borders", "random"])
@pytest.mark.parametrize("name", RULES)
def test_strong_decay(name, where, dtype, pairing):
    """With same-step pairing the first token decays too, so that everything that S0 leaves has crossed the floor."""
    rule = R[name].replace(step="direct", window=min(R[name].window, 3), pairing=pairing)
    problem, expected = strong_case(rule, where, dtype)
    for form, chunk_size in FORMS:
        check(run(attend(rule, form, chunk_size), problem), expected, dtype, f"{form} {chunk_size} {where}")


@pytest.mark.parametrize("floor", [1e-6, 1e-4, 0.2])
@pytest.mark.parametrize("name", RULES)
def test_strong_decay_for_any_floor(name, floor):
    rule = R[name].replace(step="direct", decay_floor=floor, pairing="same-step")
    problem = strong(rule, "random", torch.float32, T=70)
    expected = expect(problem, rule)
    for form, chunk_size in FORMS:
        check(run(attend(rule, form, chunk_size), problem), expected, torch.float32, f"{form} {chunk_size}")


@pytest.mark.parametrize("form", ["recurrent", "masked", "chunk", "auto"])
@pytest.mark.parametrize("depth", [-1.0, -20.0, -200.0, -1e4])
def test_log_decay_of_any_depth(form, depth):
    """delta_rule and linear_attention take log_decay as given: a gate may close completely."""
    problem = draw(R["falcon-1"], B=1, T=70, H=2, K=4, V=3, dtype=torch.float32)
    k = torch.nn.functional.normalize(problem.k, dim=-1)
    chance = torch.rand(1, 70, 2, generator=torch.Generator().manual_seed(0))
    # Mild decay between the deep ones: sums of hundreds must not swallow its digits.
    log_decay = torch.where(chance < 0.4, depth, -0.3 * chance)
    problem = problem._replace(k=k, beta=problem.beta / 2, lam=log_decay)

    def delta(q, k, v, beta, lam, S0):
        o, state = fw.delta_rule(q, k, v, beta, lam, form=form, initial_state=S0, output_final_state=True)
        return o, state.S

    def linear(q, k, v, beta, lam, S0):
        o, state = fw.linear_attention(q, k, v, lam, form=form, initial_state=S0, output_final_state=True)
        return o, state.S

    def delta_longhand(q, k, v, beta, lam, S0):
        return gated_delta_longhand(q, k, v, beta, lam, S0)

    def linear_longhand(q, k, v, beta, lam, S0):
        return linear_attention_longhand(q, k, v, lam, S0)

    doubled = Problem(*(u.double() for u in problem))
    check(run(delta, problem), run(delta_longhand, doubled), torch.float32, f"delta {form}")
    without = problem._replace(beta=None)
    doubled = doubled._replace(beta=None)
    check(run(linear, without), run(linear_longhand, doubled), torch.float32, f"linear {form}")


def test_closed_gate_forgets_everything():
    """log_decay = -inf is a reset: finite, and equal to a fresh start at that token."""
    q, k, v, beta, *_ = draw(R["falcon-1"], B=1, T=20, dtype=torch.float32)
    k = torch.nn.functional.normalize(k, dim=-1)
    log_decay = torch.zeros(1, 20, 2)
    log_decay[:, 7] = -torch.inf
    for form, chunk_size in FORMS:
        o, _ = fw.delta_rule(q, k, v, beta / 2, log_decay, form=form, chunk_size=chunk_size)
        fresh, _ = fw.delta_rule(q[:, 7:], k[:, 7:], v[:, 7:], beta[:, 7:] / 2, form=form, chunk_size=chunk_size)
        assert_close(o[:, 7:], fresh, torch.float32, "forward", f"{form} {chunk_size}")


# 2. Precision of the state


@pytest.mark.parametrize("dtype", [torch.float64, *DTYPES], ids=str)
@pytest.mark.parametrize("name", RULES)
def test_state_keeps_its_precision(name, dtype):
    """float32 whatever the inputs (float64 for float64), in every floating part; o in v's dtype."""
    q, k, v, beta, lam, *_ = draw(R[name], T=5, dtype=dtype)
    kept = torch.float64 if dtype == torch.float64 else torch.float32
    for form in ("recurrent", "masked", "chunk"):
        o, state = fw.fast_weight_attention(q, k, v, beta, lam, name, form=form, output_final_state=True)
        assert o.dtype == dtype
        assert all(part.dtype == kept for part in state if part.is_floating_point())
        o_t, state = fw.step(q[:, 0], k[:, 0], v[:, 0], beta[:, 0], lam[:, 0], state, name)
        assert o_t.dtype == dtype
        assert all(part.dtype == kept for part in state if part.is_floating_point())


@pytest.mark.parametrize("name", RULES)
def test_energy_beyond_float16(name):
    """float16 keys of size 300: |x|^2 is past 65,504, the sums are taken in float32."""
    rule = R[name].replace(ridge="scaled")
    problem = draw(rule, B=1, T=17, dtype=torch.float16)
    # Gradients of such keys are tiny: scale the loss, as anyone must who trains in float16.
    problem = problem._replace(k=problem.k * 300, S0=problem.S0 / 300, w_o=problem.w_o * 512, w_S=problem.w_S * 512)
    assert problem.k.float().square().sum(-1).max() > 65504
    expected = expect(problem, rule)
    for form, chunk_size in FORMS[:3]:
        check(run(attend(rule, form, chunk_size), problem), expected, torch.float16, f"{form} {chunk_size}")


@pytest.mark.parametrize("name", RULES)
def test_error_does_not_grow_with_length(name):
    """Carry 0.999, float32, against our own float64: 4,096 tokens err no more than twice what 512 do."""
    rule = R[name].replace(step="direct")
    T = 4096
    problem = draw(rule, B=1, T=T, H=1, K=8, V=8, drop=("S0",))
    k = torch.nn.functional.normalize(problem.k, dim=-1)
    beta = torch.full_like(problem.beta, 0.5)
    lam = torch.full_like(problem.lam, 0.002)
    inputs = [u.float() for u in (problem.q, k, problem.v, beta, lam)]
    single, _ = fw.fast_weight_attention(*inputs, rule, form="chunk")
    double, _ = fw.fast_weight_attention(*(u.double() for u in inputs), rule, form="chunk")
    error = (single.double() - double).abs().amax((0, 2, 3)) / double.abs().max()
    assert error.max() <= tolerance(torch.float32, "forward")
    assert error[-512:].max() <= 2 * error[:512].max() + 1e-6


# 3. Unnormalised keys, steps at the edge of stability


@pytest.mark.parametrize("gain", [0.5, 1.9, 1.99, 2.0])
@pytest.mark.parametrize("name", ["falcon-1", "falcon-2", "falcon-3"])
def test_direct_step_at_the_edge_with_unnormalised_keys(name, gain):
    """eta |x|^2 up to 2 with norms from 0.01 to 100: the chunk forms hold where the loop holds, in float32."""
    rule = R[name].replace(step="direct", pairing="same-step", window=min(2, R[name].window))
    problem = draw(rule, B=1, T=70, H=1, K=6, V=3, drop=("lam",))
    norms = 10 ** (4 * torch.rand(1, 70, 1, 1, generator=torch.Generator().manual_seed(2), dtype=torch.float64) - 2)
    k = torch.nn.functional.normalize(problem.k, dim=-1) * norms
    energy = k.square().sum(-1)
    if rule.window > 1:  # the top eigenvalue of a window is at most the mean energy: stay below 2 with it
        energy = (energy + torch.nn.functional.pad(energy, (0, 0, 1, 0))[:, :-1]) / 2
        energy[:, 0] *= 2
    beta = gain / energy
    beta = beta[..., None].expand_as(problem.beta) if rule.gain == "column" else beta
    # The state answers keys of norm 0.01 with values of size 1, so it grows to 100; so may what is compared.
    problem = problem._replace(k=k, beta=beta, q=torch.nn.functional.normalize(problem.q, dim=-1))
    cast = {n: getattr(problem, n).float() for n in ("q", "k", "v", "beta", "S0")}
    problem = problem._replace(**cast, w_o=problem.w_o.float().double(), w_S=problem.w_S.float().double())
    expected = expect(problem, rule)
    for form, chunk_size in FORMS:
        check(run(attend(rule, form, chunk_size), problem), expected, torch.float32, f"{form} {chunk_size} gain {gain}")


@pytest.mark.parametrize("beta_value", [1.0, 1.9, 1.999])
@pytest.mark.parametrize("name", ["falcon-1", "falcon-2", "falcon-3"])
def test_one_key_repeated(name, beta_value):
    """The Gram matrix of a chunk is all ones: the worst case for its triangular system."""
    rule = R[name].replace(pairing="same-step")
    problem = draw(rule, B=1, T=70, H=1, K=4, V=3, drop=("lam",), dtype=torch.float32)
    k = problem.k[:, :1].expand_as(problem.k).contiguous()
    problem = problem._replace(k=k, beta=torch.full_like(problem.beta, beta_value))
    expected = expect(problem, rule)
    for form, chunk_size in FORMS:
        check(run(attend(rule, form, chunk_size), problem), expected, torch.float32, f"{form} {chunk_size}")


@pytest.mark.parametrize("size", [1e-12, 1e-6, 1e6, 1e10])
@pytest.mark.parametrize("name", RULES)
def test_keys_of_any_size(name, size):
    """Scaled ridge, next to no eps: float32 holds for keys from 1e-12 to 1e10 (their squares still fit)."""
    rule = R[name].replace(ridge="scaled", eps=1e-30, pairing="same-step")
    problem = draw(rule, B=1, T=20, H=1, dtype=torch.float32)
    problem = problem._replace(k=problem.k * size, S0=problem.S0 / size)
    expected = expect(problem, rule)
    for form, chunk_size in FORMS[:3]:
        check(run(attend(rule, form, chunk_size), problem), expected, torch.float32, f"{form} {chunk_size}")


# Ties and zeros


@pytest.mark.parametrize("pairing", ["next-latent", "same-step"])
@pytest.mark.parametrize("eps", [0.0, 1e-6])
@pytest.mark.parametrize("name", RULES)
def test_zero_keys(name, eps, pairing):
    """Some or all keys zero, with and without a ridge: values as the longhand, every gradient finite."""
    if R[name].window > 1 and eps == 0:
        eps = 1e-6
    rule = R[name].replace(eps=eps, pairing=pairing)
    for zeros in (slice(2, 3), slice(0, 1), slice(3, 6), slice(0, 8)):
        for drop in ((), ("lam",)):
            problem = draw(rule, B=1, T=8, drop=drop)
            k = problem.k.clone()
            k[:, zeros] = 0
            problem = problem._replace(k=k)
            expected = expect(problem, rule)
            for form, chunk_size in FORMS[:3]:
                result = run(attend(rule, form, chunk_size), problem)
                for label, gradient in result.gradients.items():
                    assert bool(torch.isfinite(gradient).all()), f"d{label} {form}"
                if eps == 0 and not drop and zeros == slice(0, 8):
                    # alpha = beta lam / (0 + lam) does not depend on lam: zero, but for rounding, on both sides
                    assert result.gradients.pop("lam").abs().max() < 1e-14
                    result.gradients["lam"] = expected.gradients["lam"]
                check(result, expected, torch.float64, f"{form} zeros {zeros}")


def test_everything_zero():
    """Zero q, k, v, gates and state, the padding of a fresh model: zeros out, gradients finite."""
    for name in RULES:
        problem = draw(R[name], B=1, T=6)
        problem = problem._replace(
            **{n: torch.zeros_like(getattr(problem, n)) for n in ("q", "k", "v", "beta", "lam", "S0")}
        )
        for form, chunk_size in FORMS[:3]:
            result = run(attend(R[name], form, chunk_size), problem)
            assert result.o.abs().max() == 0
            assert all(bool(torch.isfinite(g).all()) for g in result.gradients.values())


def tied_windows():
    """Keys whose window has a repeated top eigenvalue, or repeated zero ones: orthonormal, equal, opposite, mixed."""
    e = torch.eye(4, dtype=torch.float64)
    return {
        "orthonormal": e[[0, 1, 2, 3, 0, 1, 2, 3]],
        "two planes": e[[0, 1, 0, 1, 2, 3, 2, 3]],
        "equal": e[:1].expand(8, 4) * 1.5,
        "opposite": torch.stack([e[0] * (-1) ** t for t in range(8)]),
        "near tie": e[[0, 1, 2, 3, 0, 1, 2, 3]] * (1 + 1e-9 * torch.arange(8).double())[:, None],
        "zeros between": e[[0, 1, 2, 3, 0, 1, 2, 3]] * (torch.arange(8) % 3 > 0).double()[:, None],
    }


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("window", [2, 3, 4, 6])
@pytest.mark.parametrize("tie", sorted(tied_windows()))
def test_tied_eigenvalues(tie, window, dtype):
    """The value is exact and the gradient finite; along the keys themselves the derivative exists, and is right."""
    rule = R["falcon-3"].replace(window=window)
    problem = draw(rule, B=1, T=8, H=1, K=4, V=3)
    problem = problem._replace(k=tied_windows()[tie][None, :, None])
    cast = {n: getattr(problem, n).to(dtype) for n in ("q", "k", "v", "beta", "lam", "S0")}
    problem = problem._replace(**cast, w_o=problem.w_o.float().double(), w_S=problem.w_S.float().double())
    expected = expect(problem, rule)
    for form, chunk_size in FORMS[:3]:
        result = run(attend(rule, form, chunk_size), problem)
        assert_close(result.o, expected.o, dtype, "forward", f"{form} o")
        assert_close(result.S, expected.S, dtype, "state", f"{form} S")
        for name in ("q", "v", "beta", "lam", "S0"):
            assert_close(result.gradients[name], expected.gradients[name], dtype, "gradient", f"{form} d{name}")
        along, truth = ((r.gradients["k"].double() * problem.k.double()).sum() for r in (result, expected))
        size = (expected.gradients["k"].abs() * problem.k.double().abs()).sum()
        assert bool(torch.isfinite(result.gradients["k"]).all())
        assert abs(along - truth) <= tolerance(dtype, "gradient") * size, (
            f"{form}: d/ds at s k {along}, expected {truth}"
        )


# 5. Nothing to do


@pytest.mark.parametrize("name", RULES)
def test_no_tokens(name):
    """T = 0: empty o, the State unchanged, also through backward; packed too."""
    rule = R[name]
    _, state = fw.fast_weight_attention(*draw(rule, T=3)[:5], rule, output_final_state=True)
    empty = draw(rule, T=0)
    for form in ("recurrent", "masked", "chunk", "auto"):
        o, after = fw.fast_weight_attention(*empty[:5], rule, form=form, initial_state=state, output_final_state=True)
        assert o.shape == empty.v.shape
        for name_, part, kept in zip(state._fields, after, state, strict=True):
            assert torch.equal(part, kept), f"{form} {name_}"
        inputs = leaves(empty)
        S0 = inputs.pop("S0")
        o, after = fw.fast_weight_attention(
            *inputs.values(), rule, form=form, initial_state=S0, output_final_state=True
        )
        (after.S.sum() + o.sum()).backward()
        assert torch.equal(S0.grad, torch.ones_like(S0))
        _, fresh = fw.fast_weight_attention(*empty[:5], rule, form=form, output_final_state=True)
        assert fresh.S.abs().max() == 0


@pytest.mark.parametrize("name", RULES)
def test_no_sequences(name):
    """N = 0, as an empty batch and as an empty pack."""
    rule = R[name]
    for form in ("recurrent", "masked", "chunk", "auto"):
        none = draw(rule, B=0, T=4)
        o, state = fw.fast_weight_attention(*none[:5], rule, form=form, output_final_state=True)
        assert o.shape == none.v.shape
        assert state.S.shape == (0, 2, 4, 3)
        empty = draw(rule, B=1, T=0)
        o, state = fw.fast_weight_attention(
            *empty[:5], rule, form=form, cu_seqlens=torch.tensor([0]), output_final_state=True
        )
        assert o.shape == empty.v.shape
        assert state.S.shape == (0, 2, 4, 3)
