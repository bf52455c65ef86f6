"""Gradients and memory layout: views, subsets that require grad, nothing written in place, autocast, mixed dtypes.

What is compared is the package with itself on contiguous copies, or with the recurrent form (which test_forms judges).
"""

import pytest
import torch
from conftest import assert_close
from inputs import attend, check, draw, expect, leaves, run
from longhand import longhand

import fastweight as fw

FORMS = [("recurrent", None), ("masked", None), ("chunk", 4)]
R = fw.RULES
RULES = sorted(R)


@pytest.mark.parametrize("name", RULES)
def test_views_are_as_good_as_copies(name):
    """unbind of one projection, heads-first storage, strided slices, expanded heads: same values and gradients."""
    rule = R[name]
    problem = draw(rule, B=2, T=7, H=2, K=3, V=3)
    generator = torch.Generator().manual_seed(1)
    packed = torch.randn(2, 7, 3, 2, 3, generator=generator, dtype=torch.float64)
    storage = {
        "unbind": (packed, lambda u: u.unbind(2)),
        "heads first": (packed.permute(2, 0, 3, 1, 4).contiguous(), lambda u: u.transpose(2, 3).unbind(0)),
        "width first": (packed.permute(4, 2, 0, 1, 3).contiguous(), lambda u: u.permute(1, 2, 3, 4, 0).unbind(0)),
        "every other": (packed.repeat_interleave(2, 1), lambda u: u[:, ::2].unbind(2)),
        "expanded": (packed[:, :, :, :1].clone(), lambda u: u.expand(2, 7, 3, 2, 3).unbind(2)),
    }
    for label, (source, split) in storage.items():
        for form, chunk_size in FORMS:
            results = []
            for copy in (False, True):
                leaf = source.clone().requires_grad_()
                q, k, v = (u.contiguous() if copy else u for u in split(leaf))
                o, S = attend(rule, form, chunk_size)(q, k, v, problem.beta, problem.lam, None)
                (o * problem.w_o).sum().backward()
                results.append((o, S, leaf.grad))
            for part, viewed, copied in zip(("o", "S", "gradient"), *results, strict=True):
                assert_close(viewed, copied, torch.float64, "forward", f"{label} {form} {part}")
    gates = {n: getattr(problem, n).transpose(1, 2).contiguous().transpose(1, 2) for n in ("beta", "lam")}
    moved = problem._replace(**gates, S0=problem.S0.transpose(2, 3).contiguous().transpose(2, 3))
    check(run(attend(rule), moved), run(attend(rule), problem), torch.float64, "strided gates and state")


@pytest.mark.parametrize("names", [("S0",), ("v",), ("k",), ("beta",), ("lam",), ("q",), ("k", "S0")], ids=" ".join)
@pytest.mark.parametrize("name", RULES)
def test_some_inputs_need_no_gradient(name, names):
    """Whatever subset requires grad gets the gradient it gets when all do."""
    rule = R[name]
    problem = draw(rule, B=1, T=7)
    full = run(attend(rule, "recurrent"), problem)
    for form, chunk_size in FORMS:
        inputs = {n: u.detach() for n, u in leaves(problem).items()}
        for n in names:
            inputs[n].requires_grad_()
        o, S = attend(rule, form, chunk_size)(**inputs)
        ((o * problem.w_o).sum() + (S * problem.w_S).sum()).backward()
        for n in names:
            assert_close(inputs[n].grad, full.gradients[n], torch.float64, "gradient", f"{form} d{n}")


@pytest.mark.parametrize("name", RULES)
def test_no_gradient_wanted(name):
    """Under no_grad, and with inputs that need none, outputs need none."""
    problem = draw(R[name], T=5)
    for form, chunk_size in FORMS:
        o, S = attend(R[name], form, chunk_size)(*problem[:6])
        assert not o.requires_grad
        assert not S.requires_grad
        with torch.no_grad():
            again, _ = attend(R[name], form, chunk_size)(**leaves(problem))
        assert_close(again, o, torch.float64)
        assert not again.requires_grad


@pytest.mark.parametrize("name", RULES)
def test_inputs_and_states_are_left_alone(name):
    """Nothing that is passed in is written to, forward or backward, by any form, step or pack."""
    rule = R[name]
    problem = draw(rule, B=2, T=8)
    _, state = fw.fast_weight_attention(*problem[:5], rule, output_final_state=True)
    for form in ("recurrent", "masked", "chunk", "step"):
        inputs = leaves(problem)
        inputs.pop("S0")
        held = fw.State(*(part.clone().requires_grad_(part.is_floating_point()) for part in state))
        before = [u.detach().clone() for u in (*inputs.values(), *held)]
        versions = [u._version for u in (*inputs.values(), *held)]
        if form == "step":
            o, after = fw.step(*(u[:, 0] for u in inputs.values()), held, rule)
        else:
            o, after = fw.fast_weight_attention(
                *inputs.values(), rule, form=form, initial_state=held, output_final_state=True
            )
        (o.sum() + after.S.sum()).backward()
        for u, copy, version in zip((*inputs.values(), *held), before, versions, strict=True):
            assert u._version == version, f"{form}: written in place"
            assert torch.equal(u, copy)
        after.S.detach().zero_()
        assert torch.equal(held.S, before[5]), f"{form}: the final State shares memory with the initial one"


@pytest.mark.parametrize("name", RULES)
def test_backward_twice(name):
    """A retained graph gives the same gradients twice."""
    problem = draw(R[name], B=1, T=4, H=1, K=3, V=2)
    for form, chunk_size in FORMS:
        inputs = leaves(problem)
        o, S = attend(R[name], form, chunk_size)(**inputs)
        loss = (o.square() * problem.w_o).sum() + (S * problem.w_S).sum()
        first, second = (torch.autograd.grad(loss, list(inputs.values()), retain_graph=True) for _ in range(2))
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def second_derivative(function, problem):
    """d/dk of the squared gradients for k and v: two passes of autograd."""
    inputs = leaves(problem)
    o, S = function(**inputs)
    loss = (o.square() * problem.w_o).sum() + (S * problem.w_S).sum()
    gradients = torch.autograd.grad(loss, [inputs["k"], inputs["v"]], create_graph=True)
    return torch.autograd.grad(sum(g.square().sum() for g in gradients), inputs["k"])[0]


@pytest.mark.parametrize("name", RULES)
def test_second_derivatives_are_right_or_refused(name):
    """Through every form, the derivative of a gradient is the longhand's, or a RuntimeError: never silently wrong."""
    problem = draw(R[name], B=1, T=5, H=1, K=3, V=2)

    def judge(q, k, v, beta, lam, S0):
        return longhand(q, k, v, beta, lam, R[name], S0)[:2]

    expected = second_derivative(judge, problem)
    for form, chunk_size in FORMS:
        try:
            actual = second_derivative(attend(R[name], form, chunk_size), problem)
        except RuntimeError:
            continue
        assert_close(actual, expected, torch.float64, "gradient", f"{form} second derivative")


@pytest.mark.parametrize("name", RULES)
def test_autocast_changes_nothing(name):
    """Under autocast the op keeps its precision; in the engines' own backward too, if that is called there.

    (The recurrent form leaves its backward to autograd, which PyTorch advises to call outside the context.)
    """
    problem = draw(R[name], B=1, T=20, dtype=torch.float32)
    for form, chunk_size in FORMS:

        def forward_only(q, k, v, beta, lam, S0, form=form, chunk_size=chunk_size):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return attend(R[name], form, chunk_size)(q, k, v, beta, lam, S0)

        plain = run(attend(R[name], form, chunk_size), problem)
        check(run(forward_only, problem), plain, torch.float32, f"{form}, backward outside")
        if form != "recurrent":
            with torch.autocast("cpu", dtype=torch.bfloat16):
                result = run(attend(R[name], form, chunk_size), problem)
            check(result, plain, torch.float32, f"{form}, backward inside")


@pytest.mark.parametrize("name", RULES)
def test_gates_keep_float32_beside_sixteen_bit_features(name):
    """q, k, v in bfloat16 with float32 beta and lam: gates are not rounded, and each gradient has its input's dtype."""
    rule = R[name]
    problem = draw(rule, B=1, T=20, dtype=torch.bfloat16)
    gates = draw(rule, B=1, T=20, dtype=torch.float32, seed=1)
    problem = problem._replace(beta=gates.beta, lam=gates.lam)
    expected = expect(problem, rule)
    for form, chunk_size in FORMS:
        result = run(attend(rule, form, chunk_size), problem)
        assert result.o.dtype == torch.bfloat16
        for label in ("beta", "lam"):
            assert result.gradients[label].dtype == torch.float32
            assert_close(
                result.gradients[label], expected.gradients[label], torch.float32, "gradient", f"d{label} {form}"
            )
        check(result, expected, torch.bfloat16, form)
