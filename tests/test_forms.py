"""Six rules x forms x options against the longhand: outputs, final state and every gradient.

The longhand of a (rule, problem) is computed once and shared by the forms. Traps: a loss on outputs alone, or on the
final state alone, takes other paths backward than both together, so each is run; float32 is also run with the decay
clamped at many tokens, where log gamma is largest.
"""

from functools import lru_cache
from itertools import product

import pytest
import torch
from conftest import assert_close
from inputs import attend, check, draw, expect, run

import fastweight as fw

# Chunk sizes below, at and above T = 11, dividing it and not; 1 is the recurrence again.
FORMS = [("recurrent", None), ("masked", None), ("chunk", 1), ("chunk", 3), ("chunk", 4), ("chunk", 16), ("auto", None)]
FEW_FORMS = [("recurrent", None), ("masked", None), ("chunk", 4)]
RULES = sorted(fw.RULES)
GRID = list(
    product(
        ("next-latent", "same-step"),
        ("read-after-write", "read-before-write"),
        ("absolute", "scaled"),
        ("normalized", "direct"),
    )
)


@lru_cache(maxsize=512)
def case(rule, use=("o", "S"), **shape):
    """The problem and the longhand's answer for it."""
    problem = draw(rule, **shape)
    return problem, expect(problem, rule, use=use)


def compare(rule, form, chunk_size, use=("o", "S"), dtype=torch.float64, **shape):
    problem, expected = case(rule, use, dtype=dtype, **shape)
    check(run(attend(rule, form, chunk_size), problem, use), expected, dtype, f"{rule.name} {form} {chunk_size}")


@pytest.mark.parametrize(("form", "chunk_size"), FORMS)
@pytest.mark.parametrize("name", RULES)
def test_plain(name, form, chunk_size):
    compare(fw.RULES[name], form, chunk_size)


@pytest.mark.parametrize(("form", "chunk_size"), FEW_FORMS)
@pytest.mark.parametrize("grid", GRID, ids=" ".join)
@pytest.mark.parametrize("name", RULES)
def test_pairing_timing_ridge_step(name, grid, form, chunk_size):
    pairing, timing, ridge, step = grid
    rule = fw.RULES[name].replace(pairing=pairing, timing=timing, ridge=ridge, step=step)
    compare(rule, form, chunk_size, T=9, B=1)


@pytest.mark.parametrize(("form", "chunk_size"), FORMS)
@pytest.mark.parametrize("window", [1, 2, 3, 5, 20])
@pytest.mark.parametrize("name", ["falcon-3", "falcon-3a"])
def test_windows(name, window, form, chunk_size):
    """Windows shorter and longer than the chunk and than the sequence."""
    compare(fw.RULES[name].replace(window=window), form, chunk_size, B=1)


@pytest.mark.parametrize(("form", "chunk_size"), FEW_FORMS)
@pytest.mark.parametrize("pairing", ["next-latent", "same-step"])
@pytest.mark.parametrize("name", RULES)
def test_eps(name, pairing, form, chunk_size):
    compare(fw.RULES[name].replace(eps=0.7, pairing=pairing), form, chunk_size, B=1, T=7)
    if fw.RULES[name].window == 1:
        compare(fw.RULES[name].replace(eps=0.0, pairing=pairing), form, chunk_size, B=1, T=7)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize(("form", "chunk_size"), FORMS)
@pytest.mark.parametrize("name", RULES)
def test_clamped_decay(name, form, chunk_size, dtype):
    """A direct step with a strong ridge: more than half of the tokens sit on a floor of 0.05."""
    rule = fw.RULES[name].replace(step="direct", decay_floor=0.05)
    shape = {"lam_scale": 40.0, "dtype": dtype}
    problem, _ = case(rule, **shape)
    lam = problem.lam if problem.beta.ndim == 3 else problem.lam[..., None]
    assert (problem.beta * lam > 0.95).double().mean() > 0.5
    compare(rule, form, chunk_size, **shape)


@pytest.mark.parametrize(("form", "chunk_size"), FEW_FORMS)
@pytest.mark.parametrize("shape", [(1, 2, 4, 3), (2, 6, 3, 5), (1, 1, 5, 7), (3, 3, 7, 1), (1, 2, 1, 3)], ids=str)
@pytest.mark.parametrize("name", RULES)
def test_grouped_values_and_odd_widths(name, shape, form, chunk_size):
    """(Hk, H, K, V): one key head for several value heads, K != V, widths of one."""
    Hk, H, K, V = shape
    compare(fw.RULES[name], form, chunk_size, B=1, T=7, Hk=Hk, H=H, K=K, V=V)


@pytest.mark.parametrize(("form", "chunk_size"), FEW_FORMS)
@pytest.mark.parametrize("drop", [("beta",), ("lam",), ("S0",), ("beta", "lam", "S0")], ids=" ".join)
@pytest.mark.parametrize("name", RULES)
def test_left_out_inputs(name, drop, form, chunk_size):
    """beta None is all ones, lam None all zeros, no initial state a zero one."""
    compare(fw.RULES[name], form, chunk_size, B=1, T=7, drop=drop)


@pytest.mark.parametrize(("form", "chunk_size"), FEW_FORMS)
@pytest.mark.parametrize("name", ["falcon-2", "falcon-2a"])
def test_one_gain_for_all_columns(name, form, chunk_size):
    """beta [B, T, H] with a column gain is broadcast, and its gradient summed over the columns."""
    rule = fw.RULES[name]
    problem, _ = case(rule, B=1, T=7)
    problem = problem._replace(beta=problem.beta.mean(-1))
    check(run(attend(rule, form, chunk_size), problem), expect(problem, rule), torch.float64, name)


@pytest.mark.parametrize("use", [("o",), ("S",)], ids=["outputs only", "final state only"])
@pytest.mark.parametrize(("form", "chunk_size"), FORMS)
@pytest.mark.parametrize("name", RULES)
def test_partial_losses(name, form, chunk_size, use):
    compare(fw.RULES[name], form, chunk_size, use=use, B=1)


@pytest.mark.parametrize("name", RULES)
def test_loss_without_a_final_state(name):
    """output_final_state=False returns None and the same outputs and gradients."""
    rule = fw.RULES[name]
    problem, expected = case(rule, ("o",), B=1)
    for form, chunk_size in FORMS:

        def function(q, k, v, beta, lam, S0, form=form, chunk_size=chunk_size):
            o, state = fw.fast_weight_attention(
                q, k, v, beta, lam, rule, form=form, chunk_size=chunk_size, initial_state=S0
            )
            assert state is None
            return o, None

        check(run(function, problem, ("o",)), expected, torch.float64, f"{form} {chunk_size}")


@pytest.mark.parametrize("T", [1, 2, 3, 40])
@pytest.mark.parametrize("name", RULES)
def test_lengths(name, T):
    for form, chunk_size in [
        ("recurrent", None),
        ("masked", None),
        ("chunk", 2),
        ("chunk", 8),
        ("chunk", 39),
        ("auto", None),
    ]:
        compare(fw.RULES[name], form, chunk_size, B=1, H=1, T=T)


@pytest.mark.parametrize("chunk_size", [1, 2, 8, None])
@pytest.mark.parametrize("name", RULES)
def test_many_chunks_of_many_heads(name, chunk_size):
    """12 heads of 40 tokens: up to 480 chunks, more than any engine takes at once."""
    compare(fw.RULES[name], "chunk", chunk_size, B=3, H=4, Hk=2, T=40, K=3, V=2)


@pytest.mark.parametrize("name", RULES)
def test_more_numbers_than_an_engine_takes_at_once(name):
    """Some 300,000 numbers of q in many chunks, plain and masked, against the recurrent form."""
    mask = torch.rand(2, 44, generator=torch.Generator().manual_seed(0)) < 0.8
    for timing, keywords in (("read-after-write", {}), ("read-before-write", {"mask": mask})):
        rule = fw.RULES[name].replace(timing=timing)
        problem = draw(rule, B=2, H=4, T=44, K=800, V=2)
        expected = run(attend(rule, "recurrent", **keywords), problem)
        for chunk_size in (2, 5):
            result = run(attend(rule, "chunk", chunk_size, **keywords), problem)
            check(result, expected, torch.float64, f"{name} {chunk_size} {list(keywords)}")


@pytest.mark.parametrize(("form", "chunk_size"), [*FEW_FORMS, ("chunk", 16)])
@pytest.mark.parametrize("pairing", ["next-latent", "same-step"])
@pytest.mark.parametrize("name", RULES)
def test_float32(name, pairing, form, chunk_size):
    compare(fw.RULES[name].replace(pairing=pairing), form, chunk_size, dtype=torch.float32, B=1, T=33, H=1, K=8, V=8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("form", "chunk_size"), FEW_FORMS)
@pytest.mark.parametrize("name", RULES)
def test_sixteen_bit_inputs(name, form, chunk_size, dtype):
    """Inputs are rounded, nothing after them is: one rounding of outputs and gradients, none of the state."""
    compare(fw.RULES[name], form, chunk_size, dtype=dtype, B=1, T=17, Hk=1)


@pytest.mark.parametrize(("form", "chunk_size"), FEW_FORMS)
@pytest.mark.parametrize("timing", ["read-after-write", "read-before-write"])
@pytest.mark.parametrize("name", ["falcon-1a", "falcon-3a"])
def test_normalised_read(name, timing, form, chunk_size):
    """Positive features, so that the denominator stays away from zero."""
    rule = fw.RULES[name].replace(read="normalized", timing=timing, read_eps=1e-3)
    problem = draw(rule, B=1)
    problem = problem._replace(q=problem.q.exp(), k=problem.k.exp())
    check(run(attend(rule, form, chunk_size), problem), expect(problem, rule), torch.float64, f"{name} {form}")


def test_backend_and_form_by_name_are_obeyed_or_refused():
    rule = fw.RULES["falcon-1"]
    q, k, v, beta, lam, *_ = draw(rule, B=1, T=3)
    with pytest.raises(ValueError, match="form"):
        fw.fast_weight_attention(q, k, v, beta, lam, rule, form="parallel")
    with pytest.raises(ValueError, match="backend"):
        fw.fast_weight_attention(q, k, v, beta, lam, rule, backend="cuda")


@pytest.mark.parametrize("name", RULES)
def test_rule_by_name_is_the_rule(name):
    problem = draw(fw.RULES[name], B=1, T=5)
    by_name, by_rule = (run(attend(r, "auto"), problem) for r in (name, fw.RULES[name]))
    assert_close(by_name.o, by_rule.o, torch.float64)


@pytest.mark.parametrize("combination", ["windowed falcon-1", "windowed falcon-1a", "falcon-3 of 1"])
def test_rules_of_your_own(combination):
    """A rule is its fields: a window on falcon-1 is falcon-3, whatever it is called."""
    base, window = {
        "windowed falcon-1": ("falcon-1", 3), "windowed falcon-1a": ("falcon-1a", 3), "falcon-3 of 1": ("falcon-3", 1),
    }[combination]  # fmt: skip
    rule = fw.RULES[base].replace(name="mine", window=window, ridge="scaled")
    for form, chunk_size in FEW_FORMS:
        compare(rule, form, chunk_size, B=1, T=8)
