"""The reference solvers against what they claim: the closed ridge solution, and the literal step of Algorithm 5.

The closed form is solved anew at every token (torch.linalg.solve on lambda I + X^T X), so nothing recursive is shared.
Gradients, cuts, packing, masks and layouts are held to the same standard as the rules.
"""

import pytest
import torch
from conftest import assert_close
from hypothesis import given, settings
from hypothesis import strategies as st
from inputs import Problem, check, draw, expect, run

import fastweight as fw
from fastweight.memory.online import OnlineState, online_ridge, recursive_least_squares

FALCON_1 = fw.RULES["falcon-1"]
PAIRINGS = ("next-latent", "same-step")
TIMINGS = ("read-after-write", "read-before-write")
few = settings(max_examples=15, deadline=None, derandomize=True)


def closed_form(problem_inputs, ridge, pairing, timing, keep=None):
    """o and S of min sum |S^T x - y|^2 + ridge |S - S0|^2, solved from scratch after every token of every head."""
    q, k, v, S0 = problem_inputs
    B, T, H, V = v.shape
    per_group, K = H // k.shape[2], k.shape[3]
    outputs, states = [], []
    for b in range(B):
        for h in range(H):
            g = h // per_group
            lam = ridge if isinstance(ridge, float) else ridge[g]
            start = v.new_zeros(K, V) if S0 is None else S0[b, h]
            S, X, Y, previous = start, [], [], None
            for t in range(T):
                before = S
                if keep is None or keep[b][t]:
                    x = k[b, t, g] if pairing == "same-step" else previous
                    previous = k[b, t, g]
                    if x is not None:
                        X, Y = [*X, x], [*Y, v[b, t, h]]
                        Xs, Ys = torch.stack(X), torch.stack(Y)
                        gram = lam * torch.eye(K, dtype=v.dtype) + Xs.T @ Xs
                        S = start + torch.linalg.solve(gram, Xs.T @ (Ys - Xs @ start))
                outputs.append((before if timing == "read-before-write" else S).T @ q[b, t, g])
            states.append(S)
    o = torch.stack(outputs).reshape(B, H, T, V).transpose(1, 2)
    return o, torch.stack(states).reshape(B, H, K, V)


def least_squares(ridge, pairing="next-latent", timing="read-after-write", **keywords):
    """The solver as a function of leaf inputs (see inputs.run); S0 enters through an OnlineState."""

    def function(q, k, v, beta, lam, S0):
        state = None
        if S0 is not None:
            Hk, K = k.shape[2:]
            P = (torch.eye(K, dtype=S0.dtype) / ridge).expand(len(S0), Hk, K, K)
            state = OnlineState(fw.State.fresh(S0, FALCON_1, num_key_heads=Hk), P)
        o, state = recursive_least_squares(
            q,
            k,
            v,
            None,
            ridge,
            pairing=pairing,
            timing=timing,
            initial_state=state,
            output_final_state=True,
            **keywords,
        )
        return o, state.S

    return function


def problem_of(**shape) -> Problem:
    drop = ("beta", "lam", *(() if shape.pop("with_state", False) else ("S0",)))
    return draw(FALCON_1, drop=drop, **shape)


@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("timing", TIMINGS)
@pytest.mark.parametrize("pairing", PAIRINGS)
def test_least_squares_is_the_ridge_solution(pairing, timing, with_state):
    """After every token, the exact minimiser; gradients for q, k, v and the initial state are those of the solution."""
    problem = problem_of(T=9, H=4, Hk=2, K=3, V=2, with_state=with_state)

    def closed(q, k, v, beta, lam, S0):
        return closed_form((q, k, v, S0), 0.7, pairing, timing)

    check(run(least_squares(0.7, pairing, timing), problem), run(closed, problem), torch.float64, f"{pairing} {timing}")


def test_least_squares_with_a_ridge_per_key_head():
    problem = problem_of(T=6, H=4, Hk=2, K=3, V=2)
    ridge = torch.tensor([0.1, 3.0], dtype=torch.float64)
    o, state = recursive_least_squares(problem.q, problem.k, problem.v, None, ridge, output_final_state=True)
    expected, S = closed_form((problem.q, problem.k, problem.v, None), ridge, *("next-latent", "read-after-write"))
    assert_close(o, expected, torch.float64)
    assert_close(state.S, S, torch.float64, "state")


def test_least_squares_by_hand():
    """Same step, lambda 1, x = 1 then 2, y = 4 then 3: S = 4/2 = 2, then (4 + 6)/(1 + 1 + 4) = 5/3."""
    x = torch.tensor([1.0, 2.0]).double().reshape(1, 2, 1, 1)
    y = torch.tensor([4.0, 3.0]).double().reshape(1, 2, 1, 1)
    o, state = recursive_least_squares(x, x, y, None, 1.0, pairing="same-step", output_final_state=True)
    assert_close(o.flatten(), torch.tensor([2.0, 10 / 3], dtype=torch.float64), torch.float64)
    assert_close(state.P.flatten(), torch.tensor([1 / 6], dtype=torch.float64), torch.float64, "state")


def test_no_rule_beats_least_squares_at_its_own_loss():
    """On sum |S^T x - y|^2 + ridge |S|^2 the solver is below the final state of each regression rule."""
    problem = problem_of(B=1, H=1, T=40, K=4, V=3)
    x, y = problem.k[0, :, 0], problem.v[0, :, 0]

    def loss(S):
        return (x @ S - y).square().sum() + 0.5 * S.square().sum()

    _, best = recursive_least_squares(
        problem.q, problem.k, problem.v, None, 0.5, pairing="same-step", output_final_state=True
    )
    for name in ("falcon-1", "falcon-2", "falcon-3"):
        rule = fw.RULES[name].replace(pairing="same-step")
        _, state = fw.fast_weight_attention(problem.q, problem.k, problem.v, None, None, rule, output_final_state=True)
        assert loss(best.S[0, 0]) < loss(state.S[0, 0])


def ridge_solver(pairing="next-latent", timing="read-after-write", eps=0.0, **keywords):
    def function(q, k, v, beta, lam, S0):
        state = None
        if S0 is not None:
            state = OnlineState(fw.State.fresh(S0, FALCON_1, num_key_heads=k.shape[2]), None)
        o, state = online_ridge(
            q, k, v, beta, lam, eps=eps, pairing=pairing, timing=timing, initial_state=state, output_final_state=True,
            **keywords,
        )  # fmt: skip
        return o, state.S

    return function


@pytest.mark.parametrize("timing", TIMINGS)
@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("drop", [(), ("beta",), ("lam",), ("S0",)], ids=str)
def test_online_ridge_is_falcon_1_below_its_clamp(pairing, timing, drop):
    rule = FALCON_1.replace(pairing=pairing, timing=timing, eps=0.1)
    problem = draw(rule, T=9, H=4, Hk=2, drop=drop)
    check(run(ridge_solver(pairing, timing, 0.1), problem), expect(problem, rule), torch.float64, f"{pairing} {timing}")


def test_online_ridge_has_no_clamp():
    """Same step, x = 1, lam = 9, beta = 1.5: eta = .15, carry 1 - 1.35 = -.35; S = -.35*2 + .15*(4 - 2) = -.4."""
    one = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    gate = one[..., 0]
    state = OnlineState(fw.State.fresh(2 * one, FALCON_1), None)
    o, _ = online_ridge(one, one, 4 * one, 1.5 * gate, 9 * gate, pairing="same-step", initial_state=state)
    assert_close(o.flatten(), torch.tensor([-0.4], dtype=torch.float64), torch.float64)


def call(solver, inputs, state, **keywords):
    q, k, v, beta, lam = inputs
    gates = (None, 0.7) if solver is recursive_least_squares else (beta, lam)
    return solver(q, k, v, *gates, initial_state=state, output_final_state=True, **keywords)


def plain(solver, timing, keep=None):
    """The judge: the closed form, or falcon-1's longhand where no carry is clamped."""

    def function(problem):
        if solver is recursive_least_squares:

            def closed(q, k, v, beta, lam, S0):
                keep_lists = None if keep is None else keep.tolist()
                o, S = closed_form((q, k, v, None), 0.7, "next-latent", timing, keep_lists)
                return o, S + 0 * (beta.sum() + lam.sum())

            return run(closed, problem)
        return expect(problem, FALCON_1.replace(eps=0.0, timing=timing), keep)

    return function


SOLVERS = [recursive_least_squares, online_ridge]
solvers = st.sampled_from(SOLVERS)


@few
@given(solver=solvers, timing=st.sampled_from(TIMINGS), T=st.integers(1, 9), cut=st.integers(0, 9), data=st.data())
def test_solvers_continue_under_masks(solver, timing, T, cut, data):
    """Cut anywhere, tokens masked at random: the run without cuts on the tokens that count."""
    rows = data.draw(st.lists(st.lists(st.booleans(), min_size=T, max_size=T), min_size=2, max_size=2))
    mask = torch.tensor(rows)
    problem = draw(FALCON_1, T=T, H=2, Hk=1, K=3, V=2, drop=("S0",))
    first = min(cut, T)

    def pieces(q, k, v, beta, lam, S0):
        state, outputs = None, []
        for part in (slice(0, first), slice(first, T)):
            inputs = [u[:, part] for u in (q, k, v, beta, lam)]
            o, state = call(solver, inputs, state, timing=timing, mask=mask[:, part])
            outputs.append(o)
        return torch.cat(outputs, dim=1), state.S

    label = f"{solver.__name__} cut at {first} {rows}"
    check(run(pieces, problem), plain(solver, timing, mask)(problem), torch.float64, label)


@few
@given(solver=solvers, lengths=st.lists(st.integers(0, 5), min_size=1, max_size=4))
def test_solvers_take_packed_documents(solver, lengths):
    """Each document as if alone, its own state in and out."""
    T, N = sum(lengths), len(lengths)
    problem = draw(FALCON_1, B=1, T=T, H=1, K=3, V=2)
    inputs = problem[:5]
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    o, state = call(solver, inputs, None, cu_seqlens=bounds)
    assert state.S.shape[0] == N
    again, _ = call(solver, inputs, state, cu_seqlens=bounds)
    for n in range(N):
        part = [u[:, bounds[n] : bounds[n + 1]] for u in inputs]
        alone, last = call(solver, part, None)
        assert_close(o[:, bounds[n] : bounds[n + 1]], alone, torch.float64, "forward", f"document {n}")
        assert_close(state.S[n : n + 1], last.S, torch.float64, "state", f"state {n}")
        twice, _ = call(solver, part, last)
        assert_close(again[:, bounds[n] : bounds[n + 1]], twice, torch.float64, "forward", f"document {n} again")


@pytest.mark.parametrize("solver", SOLVERS)
def test_solvers_on_nothing(solver):
    """T = 0 passes the state through; an empty pack has no states."""
    problem = draw(FALCON_1, T=4)
    _, state = call(solver, problem[:5], None)
    empty = draw(FALCON_1, T=0)
    o, after = call(solver, empty[:5], state)
    assert o.shape == empty.v.shape
    assert torch.equal(after.S, state.S)
    o, after = call(solver, draw(FALCON_1, B=1, T=0)[:5], None, cu_seqlens=torch.tensor([0]))
    assert o.shape == (1, 0, 2, 3)
    assert after.S.shape == (0, 2, 4, 3)
    o, none = solver(*problem[:3], *((None, 0.7) if solver is recursive_least_squares else problem[3:5]))
    assert none is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("solver", SOLVERS)
def test_solvers_in_lower_precision(solver, dtype):
    """float32 inside, o in v's dtype; no input is written to."""
    problem = draw(FALCON_1, T=9, H=2, dtype=dtype, drop=("S0",))
    before = [u.clone() for u in problem[:5]]
    o, state = call(solver, problem[:5], None)
    assert o.dtype == dtype
    assert state.S.dtype == torch.float32
    expected, double = call(solver, [u.double() for u in problem[:5]], None)
    assert_close(o, expected, dtype)
    assert_close(state.S, double.S, dtype, "state")
    assert all(torch.equal(u, copy) for u, copy in zip(problem[:5], before, strict=True))


def test_solvers_name_their_arguments():
    q, k, v, beta, lam, *_ = draw(FALCON_1, T=4)
    wrong = [
        ("beta", lambda: recursive_least_squares(q, k, v, beta, 1.0)),
        ("lam", lambda: recursive_least_squares(q, k, v, None, 0.0)),
        ("lam", lambda: recursive_least_squares(q, k, v, None, -1.0)),
        ("lam", lambda: recursive_least_squares(q, k, v, None, lam)),
        ("lam", lambda: recursive_least_squares(q, k, v, None, torch.ones(3))),
        ("q", lambda: recursive_least_squares(q[:, :2], k, v)),
        ("initial_state", lambda: recursive_least_squares(q, k, v, initial_state=torch.zeros(2, 2, 4, 3))),
        ("mask", lambda: recursive_least_squares(q, k, v, mask=torch.ones(2, 4))),
        ("cu_seqlens", lambda: recursive_least_squares(q, k, v, cu_seqlens=torch.tensor([0, 4]))),
        ("pairing", lambda: recursive_least_squares(q, k, v, pairing="both")),
        ("beta", lambda: online_ridge(q, k, v, beta.transpose(1, 2), lam)),
        ("lam", lambda: online_ridge(q, k, v, beta, lam[..., None])),
        ("eps", lambda: online_ridge(q, k, v, beta, lam, eps=-1.0)),
        ("initial_state", lambda: online_ridge(q, k, v, beta, lam, initial_state=fw.State.zeros(FALCON_1, 2, 2, 4, 3))),
    ]
    for name, attempt in wrong:
        with pytest.raises(ValueError, match=name):
            attempt()


def test_solvers_refuse_each_others_states():
    """Least squares cannot go on without P."""
    q, k, v, beta, lam, *_ = draw(FALCON_1, T=4)
    _, state = online_ridge(q, k, v, beta, lam, output_final_state=True)
    with pytest.raises(ValueError, match="initial_state"):
        recursive_least_squares(q, k, v, initial_state=state)
