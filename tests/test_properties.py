"""What must be true of the rules whatever the numbers: reductions, descent, scale invariance, and known relatives.

Reductions compare two calls of the package exactly (to the float64 tolerance), gradients included; relatives are other
people's code (transformers' gated delta rule) or the textbook recurrence.
"""

import pytest
import torch
from conftest import assert_close
from inputs import Problem, Result, attend, check, draw, expect, leaves, loss_of, run
from longhand import gated_delta_longhand, linear_attention_longhand
from transformers.models.qwen3_next.modeling_qwen3_next import (
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)

import fastweight as fw

FORMS = [("recurrent", None), ("masked", None), ("chunk", 4)]
R = fw.RULES
EXACT = torch.float64


# Reductions (SPEC section 3)


@pytest.mark.parametrize(("form", "chunk_size"), FORMS)
@pytest.mark.parametrize(("wide", "narrow"), [("falcon-3", "falcon-1"), ("falcon-3a", "falcon-1a")])
@pytest.mark.parametrize("ridge", ["absolute", "scaled"])
def test_window_of_one_is_no_window(wide, narrow, ridge, form, chunk_size):
    problem = draw(R[wide])
    one = run(attend(R[wide].replace(window=1, ridge=ridge), form, chunk_size), problem)
    check(one, run(attend(R[narrow].replace(ridge=ridge), form, chunk_size), problem), EXACT)


@pytest.mark.parametrize(("form", "chunk_size"), FORMS)
@pytest.mark.parametrize(("column", "scalar"), [("falcon-2", "falcon-1"), ("falcon-2a", "falcon-1a")])
def test_equal_columns_are_a_scalar(column, scalar, form, chunk_size):
    problem = draw(R[scalar], V=3)
    columns = problem._replace(beta=problem.beta[..., None].expand(*problem.beta.shape, 3).contiguous())
    result = run(attend(R[column], form, chunk_size), columns)
    result.gradients["beta"] = result.gradients["beta"].sum(-1)
    check(result, run(attend(R[scalar], form, chunk_size), problem), EXACT)


def nlms(x, y, mu, S):
    """Classical normalised least mean squares with step mu, as in any signal-processing text."""
    for x_t, y_t, mu_t in zip(x, y, mu, strict=True):
        error = y_t - S.T @ x_t
        S = S + mu_t * torch.outer(x_t, error) / x_t.dot(x_t)
    return S


def test_no_ridge_and_no_eps_is_nlms():
    rule = R["falcon-1"].replace(eps=0.0)
    problem = draw(rule, B=1, H=1, T=9, drop=("lam",))

    def textbook(q, k, v, beta, lam, S0):
        states = [nlms(k[0, : t - 1, 0], v[0, 1:t, 0], beta[0, 1:t, 0], S0[0, 0]) for t in range(1, 10)]
        o = torch.stack([S.T @ q_t for S, q_t in zip(states, q[0, :, 0], strict=True)])
        return o[None, :, None], states[-1][None, None]

    for form, chunk_size in FORMS:
        check(run(attend(rule, form, chunk_size), problem), run(textbook, problem), EXACT, form)


@pytest.mark.parametrize(("form", "chunk_size"), FORMS)
def test_beta_one_without_ridge_projects(form, chunk_size):
    """The exact step: right after writing (x, y) the memory answers y to x."""
    rule = R["falcon-1"].replace(eps=0.0, pairing="same-step")
    _, k, v, *_ = draw(rule, T=9)
    o, _ = fw.fast_weight_attention(k, k, v, None, None, rule, form=form, chunk_size=chunk_size)
    assert_close(o, v, EXACT)


# Descent


def ridge_loss(S, window, lam):
    """0.5 mean |S^T x - y|^2 + 0.5 lam |S|^2, column by column [V]."""
    errors = sum((S.T @ x - y).square() for x, y in window) / len(window)
    return 0.5 * errors + 0.5 * lam * S.square().sum(0)


@pytest.mark.parametrize("name", ["falcon-1", "falcon-2", "falcon-3"])
@pytest.mark.parametrize("ridge", ["absolute", "scaled"])
@pytest.mark.parametrize("most", [1.0, 1.999])
def test_every_step_of_a_regression_rule_descends(name, ridge, most):
    """By at least eta (2 - eta L) / 2 |grad|^2 with L = E + lambda, column by column for the column gain."""
    rule = R[name].replace(pairing="same-step", ridge=ridge)
    q, k, v, beta, lam, S, *_ = draw(rule, B=1, H=1, T=30, K=3, V=4)
    beta = (beta * most / 1.9).clamp(max=most)
    state = fw.State.fresh(S, rule)
    for t in range(30):
        window = [(k[0, j, 0], v[0, j, 0]) for j in range(max(0, t - rule.window + 1), t + 1)]
        covariance = sum(torch.outer(x, x) for x, _ in window) / len(window)
        E = torch.linalg.eigvalsh(covariance)[-1]
        ridge_t = lam[0, t, 0] * (E if ridge == "scaled" else 1)
        eta = beta[0, t, 0] / (E + ridge_t + rule.eps)
        if bool((eta * ridge_t > 1 - rule.decay_floor).any()):
            continue
        before = state.S[0, 0]
        _, state = fw.step(q[:, t], k[:, t], v[:, t], beta[:, t], lam[:, t], state, rule)
        after = state.S[0, 0]
        gradient = sum(torch.outer(x, before.T @ x - y) for x, y in window) / len(window) + ridge_t * before
        promised = eta * (2 - eta * (E + ridge_t)) / 2 * gradient.square().sum(0)
        drop = ridge_loss(before, window, ridge_t) - ridge_loss(after, window, ridge_t)
        if rule.gain == "scalar":
            drop, promised = drop.sum(), promised.sum()
        assert bool((promised > 0).all())
        assert bool((drop >= promised - 1e-12).all()), f"token {t}: dropped {drop}, promised {promised}"


@pytest.mark.parametrize("name", ["falcon-1a", "falcon-2a", "falcon-3a"])
def test_every_step_of_an_inner_product_rule_descends(name):
    """The loss -mean <S^T x, y> + 0.5 lam |S|^2 is lam-smooth; energy in the denominator keeps eta below 2 / lam."""
    rule = R[name].replace(pairing="same-step")
    q, k, v, beta, lam, S, *_ = draw(rule, B=1, H=1, T=30, K=3, V=4, lam_scale=5.0)
    state = fw.State.fresh(S, rule)

    def loss(S, window, lam):
        return -sum((S.T @ x) * y for x, y in window) / len(window) + 0.5 * lam * S.square().sum(0)

    for t in range(30):
        window = [(k[0, j, 0], v[0, j, 0]) for j in range(max(0, t - rule.window + 1), t + 1)]
        energy = sum(x @ x for x, _ in window) / len(window)
        lam_t = lam[0, t, 0]
        eta = beta[0, t, 0] / (energy + lam_t + rule.eps)
        before = state.S[0, 0]
        _, state = fw.step(q[:, t], k[:, t], v[:, t], beta[:, t], lam[:, t], state, rule)
        if bool((eta * lam_t > 1 - rule.decay_floor).any()):
            continue
        drop = loss(before, window, lam_t) - loss(state.S[0, 0], window, lam_t)
        gradient = -sum(torch.outer(x, y) for x, y in window) / len(window) + lam_t * before
        promised = eta * (2 - eta * lam_t) / 2 * gradient.square().sum(0)
        if rule.gain == "scalar":
            drop, promised = drop.sum(), promised.sum()
        assert bool((drop >= promised - 1e-12).all()), f"token {t}: dropped {drop}, promised {promised}"


# Scale invariance


@pytest.mark.parametrize("pairing", ["next-latent", "same-step"])
@pytest.mark.parametrize("name", ["falcon-1", "falcon-2", "falcon-1a", "falcon-2a", "falcon-3", "falcon-3a"])
@pytest.mark.parametrize("scale", [1e-3, 100.0])
def test_scaled_ridge_forgets_the_scale_of_keys(name, pairing, scale):
    """k -> c k, q -> c q, S0 -> S0 / c leave o unchanged and turn S into S / c: alpha and eta |x|^2 do not move."""
    tiny = 0.0 if R[name].window == 1 else 1e-30  # a window rule wants eps > 0; this one is lost in the sum
    rule = R[name].replace(ridge="scaled", eps=tiny, pairing=pairing)
    problem = draw(rule)
    moved = problem._replace(q=problem.q * scale, k=problem.k * scale, S0=problem.S0 / scale)
    o, S = attend(rule, "chunk", 4)(*problem[:6])
    o_moved, S_moved = attend(rule, "chunk", 4)(*moved[:6])
    assert_close(o_moved, o, EXACT, "forward", "o")
    assert_close(S_moved * scale, S, EXACT, "state", "S")


@pytest.mark.parametrize("name", sorted(R))
def test_outputs_are_linear_in_values_and_state(name):
    """With steps fixed by the keys, (v, S0) -> o is linear."""
    rule = R[name]
    a, b = draw(rule, seed=1), draw(rule, seed=2)
    b = b._replace(q=a.q, k=a.k, beta=a.beta, lam=a.lam)
    mixed = a._replace(v=2 * a.v - 3 * b.v, S0=2 * a.S0 - 3 * b.S0)
    (o_a, S_a), (o_b, S_b), (o, S) = (attend(rule, "chunk", 4)(*p[:6]) for p in (a, b, mixed))
    assert_close(o, 2 * o_a - 3 * o_b, EXACT)
    assert_close(S, 2 * S_a - 3 * S_b, EXACT, "state")


@pytest.mark.parametrize("name", sorted(R))
@pytest.mark.parametrize("timing", ["read-after-write", "read-before-write"])
def test_the_future_does_not_reach_the_past(name, timing):
    """Changing token t leaves every earlier output alone, and the key of token t too under next-latent pairing."""
    rule = R[name].replace(timing=timing, pairing="next-latent")
    problem = draw(rule, B=1, T=9)
    o, _ = attend(rule, "chunk", 4)(*problem[:6])
    for t in (1, 4, 8):
        other = {n: getattr(problem, n).clone() for n in ("q", "k", "v", "beta", "lam")}
        for value in other.values():
            value[:, t:] = value[:, t:].flip(1) * 0.7 + 0.1
        changed, _ = attend(rule, "chunk", 4)(**other, S0=problem.S0)
        assert_close(changed[:, :t], o[:, :t], EXACT, "forward", f"before {t}")
        assert (changed[:, t] - o[:, t]).abs().max() > 1e-3
    other = problem.k.clone()
    other[:, 8] += 1
    changed, _ = attend(rule, "chunk", 4)(problem.q, other, *problem[2:6])
    assert_close(changed, o, EXACT, "forward", "the last key is written nowhere yet")


# Relatives


def delta_result(function, problem: Problem, log_decay) -> Result:
    """Values and gradients of (q, k, v, beta, log_decay, S0) -> (o, S)."""
    inputs = leaves(problem._replace(lam=log_decay))
    o, S = function(inputs["q"], inputs["k"], inputs["v"], inputs["beta"], inputs["lam"], inputs["S0"])
    wanted = {name: u for name, u in inputs.items() if u is not None}
    found = torch.autograd.grad(loss_of(o, S, problem), list(wanted.values()), allow_unused=True)
    return Result(o.detach(), S.detach(), dict(zip(wanted, found, strict=True)))


def delta(form, chunk_size=None, **keywords):
    def function(q, k, v, beta, log_decay, S0):
        o, state = fw.delta_rule(
            q, k, v, beta, log_decay, form=form, chunk_size=chunk_size, initial_state=S0, output_final_state=True,
            **keywords,
        )  # fmt: skip
        return o, state.S

    return function


def delta_problem(dtype=EXACT, T=13, strong=False):
    """Keys of norm 1, beta in (0.1, 1.9) / 2, log decay down to -0.5 or, strong, to -9."""
    problem = draw(R["falcon-1"], T=T, H=4, Hk=2, K=5, V=3, dtype=EXACT)
    k = torch.nn.functional.normalize(problem.k, dim=-1)
    log_decay = -problem.lam * (18 if strong else 1)
    problem = problem._replace(k=k, beta=problem.beta / 2, lam=log_decay)
    cast = {n: getattr(problem, n).to(dtype) for n in ("q", "k", "v", "beta", "lam", "S0")}
    problem = problem._replace(**cast)
    return problem, problem.lam


@pytest.mark.parametrize(("form", "chunk_size"), [*FORMS, ("chunk", 1), ("chunk", 64), ("auto", None)])
@pytest.mark.parametrize("decay", ["none", "mild", "strong"])
def test_delta_rule_is_the_published_recurrence(decay, form, chunk_size):
    problem, log_decay = delta_problem(strong=decay == "strong")
    log_decay = None if decay == "none" else log_decay
    expected = delta_result(gated_delta_longhand, problem, log_decay)
    check(delta_result(delta(form, chunk_size), problem, log_decay), expected, EXACT, f"{decay} {form}")


@pytest.mark.parametrize("theirs", [torch_recurrent_gated_delta_rule, torch_chunk_gated_delta_rule])
@pytest.mark.parametrize(("form", "chunk_size"), FORMS)
def test_delta_rule_is_transformers_gated_delta_rule(theirs, form, chunk_size):
    """Theirs divides q by sqrt(K) and works in float32; ours scales nothing. T is longer than their chunk of 64."""
    problem, log_decay = delta_problem(torch.float32, T=70)

    def reference(q, k, v, beta, log_decay, S0):
        q = q * q.shape[-1] ** 0.5
        return theirs(q, k, v, log_decay, beta, initial_state=S0, output_final_state=True)

    expected = delta_result(reference, problem, log_decay)
    check(delta_result(delta(form, chunk_size), problem, log_decay), expected, torch.float32, form)


@pytest.mark.parametrize(("form", "chunk_size"), FORMS)
def test_falcon_1_same_step_direct_is_deltanet(form, chunk_size):
    """Same-step pairing, no ridge, a given step: DeltaNet, to the last gradient."""
    rule = R["falcon-1"].replace(pairing="same-step", step="direct")
    problem, _ = delta_problem()
    ours = run(attend(rule, form, chunk_size), problem._replace(lam=None))
    check(ours, delta_result(delta(form, chunk_size), problem, None), EXACT)


@pytest.mark.parametrize(("form", "chunk_size"), [*FORMS, ("chunk", 64), ("auto", None)])
@pytest.mark.parametrize("decay", ["none", "mild", "strong"])
def test_linear_attention_is_the_textbook_sum(decay, form, chunk_size):
    problem, log_decay = delta_problem(strong=decay == "strong")
    log_decay = None if decay == "none" else log_decay
    problem = problem._replace(beta=None)

    def ours(q, k, v, beta, log_decay, S0):
        o, state = fw.linear_attention(
            q, k, v, log_decay, form=form, chunk_size=chunk_size, initial_state=S0, output_final_state=True
        )
        return o, state.S

    def theirs(q, k, v, beta, log_decay, S0):
        return linear_attention_longhand(q, k, v, log_decay, S0)

    expected = delta_result(theirs, problem, log_decay)
    check(delta_result(ours, problem, log_decay), expected, EXACT, f"{decay} {form}")


def test_falcon_1a_same_step_unit_step_is_causal_attention_without_softmax():
    """o_t = sum over s <= t of (q_t . k_s) v_s: the masked product, with no recurrence at all."""
    rule = R["falcon-1a"].replace(pairing="same-step", step="direct")
    problem = draw(rule, drop=("beta", "lam", "S0"))

    def product(q, k, v, beta, lam, S0):
        scores = torch.einsum("bthk,bshk->bhts", q, k).tril()
        return torch.einsum("bhts,bshv->bthv", scores, v), torch.einsum("bthk,bthv->bhkv", k, v)

    for form, chunk_size in FORMS:
        check(run(attend(rule, form, chunk_size), problem), run(product, problem), EXACT, form)


def test_falcon_3a_is_its_masked_form():
    """SPEC section 6: M[t, j] = sum over s from j to min(t, j+R-1) of eta_s / B_s prod_{r=s+1..t} gamma_r."""
    rule = R["falcon-3a"].replace(pairing="same-step", step="direct", window=3)
    T, R_pairs = 10, 3
    problem = draw(rule, B=1, H=1, T=T, drop=("S0",))

    def masked(q, k, v, beta, lam, S0):
        eta, gamma = beta[0, :, 0], 1 - beta[0, :, 0] * lam[0, :, 0]
        rows = []
        for t in range(T):
            row = []
            for j in range(T):
                terms = [
                    eta[s] / min(s + 1, R_pairs) * gamma[s + 1 : t + 1].prod()
                    for s in range(j, min(t, j + R_pairs - 1) + 1)
                ]
                row.append(sum(terms) if terms else eta.new_zeros(()))
            rows.append(torch.stack(row))
        M = torch.stack(rows)
        o = ((q[0, :, 0] @ k[0, :, 0].T) * M) @ v[0, :, 0]
        return o[None, :, None], (k[0, :, 0].T @ (M[-1][:, None] * v[0, :, 0]))[None, None]

    for form, chunk_size in FORMS:
        check(run(attend(rule, form, chunk_size), problem), run(masked, problem), EXACT, form)


# The normalised read


@pytest.mark.parametrize("name", ["falcon-1a", "falcon-3a"])
def test_normalised_read_is_an_average(name):
    """With nonnegative features the outputs lie between the smallest and the largest value seen."""
    rule = R[name].replace(read="normalized", read_eps=1e-9)
    problem = draw(rule, B=1, T=20, drop=("S0",))
    q, k = problem.q.exp(), problem.k.exp()
    o, _ = fw.fast_weight_attention(q, k, problem.v, problem.beta, problem.lam, rule)
    seen = problem.v[:, 1:]
    for t in range(1, 20):
        assert bool((o[:, t] <= seen[:, :t].amax(1) + 1e-6).all())
        assert bool((o[:, t] >= seen[:, :t].amin(1) - 1e-6).all())


@pytest.mark.parametrize(("form", "chunk_size"), FORMS)
def test_normalised_read_is_softmax_free_attention(form, chunk_size):
    """Same step, unit gain, no ridge: sum (q.k_s) v_s / (sum q.k_s + eps)."""
    changes = {"pairing": "same-step", "step": "direct", "read": "normalized", "read_eps": 0.1}
    rule = R["falcon-1a"].replace(**changes)
    problem = draw(rule, drop=("beta", "lam", "S0"))
    problem = problem._replace(q=problem.q.exp(), k=problem.k.exp())

    def product(q, k, v, beta, lam, S0):
        scores = torch.einsum("bthk,bshk->bhts", q, k).tril()
        o = torch.einsum("bhts,bshv->bthv", scores / (scores.sum(-1, keepdim=True) + 0.1), v)
        return o, torch.einsum("bthk,bthv->bhkv", k, v)

    check(run(attend(rule, form, chunk_size), problem), run(product, problem), EXACT, form)


@pytest.mark.parametrize(("form", "chunk_size"), FORMS)
def test_normalised_read_survives_a_denominator_that_crosses_zero(form, chunk_size):
    """Signed features, and the exact zero of an empty memory: finite, and equal to the longhand."""
    rule = R["falcon-1a"].replace(read="normalized", read_eps=1e-2)
    problem = draw(rule, B=1, T=12)
    signed = problem._replace(q=problem.q * torch.tensor([1e-3, 1e-2, 1e-1, 1]).double().repeat(3)[None, :, None, None])
    result = run(attend(rule, form, chunk_size), signed)
    check(result, expect(signed, rule), EXACT, form)
    # Keys that cancel: z is exactly zero after two writes of x and -x.
    changes = {"pairing": "same-step", "step": "direct"}
    q = k = torch.tensor([1.0, -1.0]).double().reshape(1, 2, 1, 1)
    o, _ = fw.fast_weight_attention(q, k, q + 1, None, None, rule.replace(**changes), form=form, chunk_size=chunk_size)
    assert bool(torch.isfinite(o).all())
