"""A sequence cut anywhere, stepped, packed or masked equals the plain run: outputs, States and every gradient.

The plain run is the longhand on the tokens that count. `weighted` makes a scalar of outputs and S, so that the
gradients that flow through a carried State (its key and its window too) are compared with those of the uncut run.
Traps: a masked token may hold anything; an empty document or an all-masked row keeps its state.
"""

from itertools import pairwise

import torch
from conftest import assert_close
from hypothesis import given, settings
from hypothesis import strategies as st
from inputs import Problem, check, draw, expect, leaves, run
from longhand import longhand, longhand_packed

import fastweight as fw

FORMS = ("recurrent", "masked", "chunk")
RULES = sorted(fw.RULES)
few = settings(max_examples=24, deadline=None, derandomize=True)


@st.composite
def rules(draw_one):
    """One of the six under any pairing, timing, ridge and step, the sliding ones with a window of 2 to 5."""
    rule = fw.RULES[draw_one(st.sampled_from(RULES))]
    options = {
        "pairing": draw_one(st.sampled_from(["next-latent", "same-step"])),
        "timing": draw_one(st.sampled_from(["read-after-write", "read-before-write"])),
        "ridge": draw_one(st.sampled_from(["absolute", "scaled"])),
        "step": draw_one(st.sampled_from(["normalized", "direct"])),
    }
    if rule.window > 1:
        options["window"] = draw_one(st.integers(2, 5))
    return rule.replace(**options)


forms = st.sampled_from(FORMS)
chunk_sizes = st.sampled_from([1, 2, 3, 4, 8, None])


def call(rule, form, chunk_size, inputs, state, **keywords):
    """The operator on some of its inputs, the final State always returned."""
    size = chunk_size if form == "chunk" else None
    return fw.fast_weight_attention(
        *inputs, rule, form=form, chunk_size=size, initial_state=state, output_final_state=True, **keywords
    )


def tokens(problem_inputs, where):
    """The five token streams at some tokens (a slice of the second axis)."""
    return [None if u is None else u[:, where] for u in problem_inputs]


def same_state(actual: fw.State, pairs, last_key, rule, label):
    """The State's window, count and key are the longhand's last pairs and the last key that counted."""
    for b, heads in enumerate(pairs):
        count = min(rule.window - 1, len(heads[0]))
        if rule.window > 1:
            assert actual.tail_count[b].item() == count, f"{label} tail_count"
        for h, written in enumerate(heads):
            group = h // (len(heads) // actual.key.shape[1])
            for back in range(1, count + 1):
                x, y = written[-back]
                assert_close(actual.tail_x[b, -back, group], x, x.dtype, "state", f"{label} tail_x")
                assert_close(actual.tail_y[b, -back, h], y, y.dtype, "state", f"{label} tail_y")
        if rule.pairing == "next-latent":
            assert bool(actual.has_key[b]) == (last_key[b] is not None), f"{label} has_key"
            if last_key[b] is not None:
                assert_close(actual.key[b], last_key[b], torch.float64, "state", f"{label} key")


@few
@given(rule=rules(), form=forms, size=chunk_sizes, T=st.integers(1, 14), cuts=st.lists(st.integers(0, 14), max_size=4))
def test_cut_anywhere(rule, form, size, T, cuts):
    """Pieces of any length, empty ones among them, each in the same form, joined by the full State."""
    problem = draw(rule, B=1, T=T, H=2, Hk=1, K=3, V=2, seed=T)
    bounds = [0, *sorted(min(cut, T) for cut in cuts), T]

    def pieces(q, k, v, beta, lam, S0):
        state, outputs = S0, []
        for start, end in pairwise(bounds):
            o, state = call(rule, form, size, tokens((q, k, v, beta, lam), slice(start, end)), state)
            outputs.append(o)
        same_state(state, longhand(q, k, v, beta, lam, rule, S0).pairs, [k[0, -1]], rule, "cut")
        return torch.cat(outputs, dim=1), state.S

    check(run(pieces, problem), expect(problem, rule), torch.float64, f"{form} cut at {bounds}")


@few
@given(rule=rules(), form=forms, T=st.integers(1, 10), prefix=st.integers(0, 10))
def test_step_by_step(rule, form, T, prefix):
    """A prefix in any form, then one token at a time."""
    problem = draw(rule, B=2, T=T, H=2, Hk=1, K=3, V=2, seed=T)
    start = min(prefix, T)

    def stepped(q, k, v, beta, lam, S0):
        o, state = call(rule, form, 3, tokens((q, k, v, beta, lam), slice(0, start)), S0)
        outputs = [o]
        for t in range(start, T):
            o_t, state = fw.step(q[:, t], k[:, t], v[:, t], beta[:, t], lam[:, t], state, rule)
            outputs.append(o_t[:, None])
        same_state(state, longhand(q, k, v, beta, lam, rule, S0).pairs, k[:, -1], rule, "step")
        return torch.cat(outputs, dim=1), state.S

    check(run(stepped, problem), expect(problem, rule), torch.float64, f"{form} {start} then steps")


@few
@given(
    rule=rules(), form=forms, size=chunk_sizes,
    lengths=st.lists(st.integers(0, 7), min_size=1, max_size=5), wide=st.booleans(), with_state=st.booleans(),
)  # fmt: skip
def test_packed(rule, form, size, lengths, wide, with_state):
    """Documents of any length, empty ones among them, in one row: each as if alone, N states in and out."""
    N, T = len(lengths), sum(lengths)
    bounds = [0]
    for length in lengths:
        bounds.append(bounds[-1] + length)
    problem = draw(rule, B=1, T=T, H=2, Hk=1, K=3, V=2, seed=T)
    several = draw(rule, B=N, T=1, H=2, Hk=1, K=3, V=2, seed=N)
    problem = problem._replace(S0=several.S0 if with_state else None, w_S=several.w_S)
    cu_seqlens = torch.tensor(bounds, dtype=torch.int64 if wide else torch.int32)

    def packed(q, k, v, beta, lam, S0):
        o, state = call(rule, form, size, (q, k, v, beta, lam), S0, cu_seqlens=cu_seqlens)
        assert len(state.S) == N
        return o, state.S

    def alone(q, k, v, beta, lam, S0):
        return longhand_packed(q, k, v, beta, lam, rule, bounds, S0)

    check(run(packed, problem), run(alone, problem), torch.float64, f"{form} packed {lengths}")


@few
@given(rule=rules(), form=forms, lengths=st.lists(st.integers(0, 5), min_size=1, max_size=4), cut=st.integers(0, 5))
def test_packed_continues(rule, form, lengths, cut):
    """Each document cut in two: the second halves packed again, from the States of the first, equal the whole."""
    firsts = [min(cut, length) for length in lengths]
    N, T = len(lengths), sum(lengths)
    bounds, index = [0], [[], []]
    for length, first in zip(lengths, firsts, strict=True):
        index[0] += range(bounds[-1], bounds[-1] + first)
        index[1] += range(bounds[-1] + first, bounds[-1] + length)
        bounds.append(bounds[-1] + length)
    problem = draw(rule, B=1, T=T, H=1, K=3, V=2, seed=T)
    several = draw(rule, B=N, T=1, H=1, K=3, V=2, seed=N)
    problem = problem._replace(S0=several.S0, w_S=several.w_S)
    halves = (firsts, [length - first for length, first in zip(lengths, firsts, strict=True)])

    def in_two(q, k, v, beta, lam, S0):
        state, outputs = S0, []
        for part, sizes in zip(index, halves, strict=True):
            cu_seqlens = torch.tensor([0, *sizes]).cumsum(0)
            o, state = call(rule, form, 2, tokens((q, k, v, beta, lam), part), state, cu_seqlens=cu_seqlens)
            outputs.append(o)
        order = torch.tensor(index[0] + index[1], dtype=torch.int64).argsort()
        return torch.cat(outputs, dim=1)[:, order], state.S

    def alone(q, k, v, beta, lam, S0):
        return longhand_packed(q, k, v, beta, lam, rule, bounds, S0)

    check(run(in_two, problem), run(alone, problem), torch.float64, f"{form} {lengths} cut at {firsts}")


def masks(T):
    """Left padding, right padding, all or nothing, and random holes."""
    left = st.integers(0, T).map(lambda n: [t >= n for t in range(T)])
    right = st.integers(0, T).map(lambda n: [t < n for t in range(T)])
    return st.one_of(left, right, st.lists(st.booleans(), min_size=T, max_size=T))


def check_masked(rule, form, size, mask, junk):
    """Each row equals the longhand on its unmasked tokens; what is masked holds junk (by name) and gets no gradient."""
    B, T = mask.shape
    problem = draw(rule, B=B, T=T, H=2, Hk=1, K=3, V=2, seed=T)
    hide = ~mask
    filled = {n: getattr(problem, n).clone() for n in ("q", "k", "v", "beta", "lam")}
    for n, value in filled.items():
        value[hide] = junk.get(n, 1e8)
    w_o = problem.w_o.masked_fill(hide[..., None, None], 0)
    problem = problem._replace(w_o=w_o, **filled)

    def masked(q, k, v, beta, lam, S0):
        o, state = call(rule, form, size, (q, k, v, beta, lam), S0, mask=mask)
        last = [k[b, mask[b]][-1] if mask[b].any() else None for b in range(B)]
        same_state(state, longhand(q, k, v, beta, lam, rule, S0, mask).pairs, last, rule, "masked")
        return torch.where(mask[..., None, None], o, 0), state.S

    def compact(q, k, v, beta, lam, S0):
        o, S = torch.zeros_like(v), []
        for b in range(B):
            kept = mask[b].nonzero().flatten()
            row = [u[b : b + 1, kept] for u in (q, k, v, beta, lam)]
            result = longhand(*row, rule, S0[b : b + 1])
            o = o.index_put((torch.full_like(kept, b), kept), result.o[0])
            S.append(result.S)
        return o, torch.cat(S)

    check(run(masked, problem), run(compact, problem), torch.float64, f"{form} masked {mask.int().tolist()}")


@few
@given(
    rule=rules(), form=forms, size=chunk_sizes, two=st.integers(1, 10).flatmap(lambda T: st.tuples(masks(T), masks(T)))
)
def test_masked(rule, form, size, two):
    check_masked(rule, form, size, torch.tensor(two), junk={})


@few
@given(
    rule=rules(),
    form=forms,
    two=st.integers(1, 10).flatmap(lambda T: st.tuples(masks(T), masks(T))),
    cut=st.integers(0, 10),
)
def test_masked_and_cut(rule, form, two, cut):
    """Masked, cut anywhere, the rest stepped or in one piece: the carried key and window are those that counted."""
    mask = torch.tensor(two)
    T = mask.shape[1]
    problem = draw(rule, B=2, T=T, H=2, Hk=1, K=3, V=2, seed=T)
    problem = problem._replace(w_o=problem.w_o.masked_fill(~mask[..., None, None], 0))
    first = min(cut, T)

    def in_pieces(q, k, v, beta, lam, S0):
        inputs = (q, k, v, beta, lam)
        o, state = call(rule, form, 2, tokens(inputs, slice(0, first)), S0, mask=mask[:, :first])
        middle = (first + T) // 2
        o2, state = call(rule, form, 2, tokens(inputs, slice(first, middle)), state, mask=mask[:, first:middle])
        outputs = [o, o2]
        for t in range(middle, T):
            o_t, state = fw.step(*(u[:, t] for u in inputs), state, rule, mask_t=mask[:, t])
            outputs.append(o_t[:, None])
        last = [k[b, mask[b]][-1] if mask[b].any() else None for b in range(2)]
        same_state(state, longhand(*inputs, rule, S0, mask).pairs, last, rule, "masked and cut")
        return torch.cat(outputs, dim=1), state.S

    check(run(in_pieces, problem), expect(problem, rule, mask), torch.float64, f"{form} cut at {first} {two}")


def test_masked_tokens_may_hold_anything():
    """Infinities and NaN in what would be written change nothing, values and gradients."""
    mask = torch.tensor([[False, True, True, False, True], [True, False, False, True, False]])
    for name in RULES:
        for form in FORMS:
            for worst in (float("nan"), float("inf")):
                check_masked(fw.RULES[name], form, 2, mask, junk=dict.fromkeys(("k", "v", "beta", "lam"), worst))


@few
@given(rule=rules(), form=forms, lengths=st.lists(st.integers(1, 5), min_size=1, max_size=4), data=st.data())
def test_masked_inside_packed(rule, form, lengths, data):
    """mask and cu_seqlens together: both hold."""
    T = sum(lengths)
    mask = torch.tensor([data.draw(st.lists(st.booleans(), min_size=T, max_size=T))])
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    problem = draw(rule, B=1, T=T, H=1, K=3, V=2, seed=T)
    several = draw(rule, B=len(lengths), T=1, H=1, K=3, V=2, seed=T)
    w_o = problem.w_o.masked_fill(~mask[..., None, None], 0)
    problem = problem._replace(S0=several.S0, w_S=several.w_S, w_o=w_o)

    def packed(q, k, v, beta, lam, S0):
        o, state = call(rule, form, 2, (q, k, v, beta, lam), S0, cu_seqlens=bounds, mask=mask)
        return torch.where(mask[..., None, None], o, 0), state.S

    def alone(q, k, v, beta, lam, S0):
        outputs, states = [], []
        for n, (start, end) in enumerate(pairwise(bounds.tolist())):
            part = tokens((q, k, v, beta, lam), slice(start, end))
            result = longhand(*part, rule, S0[n : n + 1], mask[:, start:end])
            outputs.append(result.o)
            states.append(result.S)
        return torch.where(mask[..., None, None], torch.cat(outputs, dim=1), 0), torch.cat(states)

    check(run(packed, problem), run(alone, problem), torch.float64, f"{form} {lengths} {mask.int().tolist()}")


@few
@given(rule=rules(), first=forms, second=forms, cut=st.integers(0, 9))
def test_forms_hand_over(rule, first, second, cut):
    """One form may go on where another stopped."""
    problem = draw(rule, B=1, T=9, H=1, K=3, V=2)

    def mixed(q, k, v, beta, lam, S0):
        o1, state = call(rule, first, 4, tokens((q, k, v, beta, lam), slice(0, cut)), S0)
        o2, state = call(rule, second, 4, tokens((q, k, v, beta, lam), slice(cut, 9)), state)
        return torch.cat((o1, o2), dim=1), state.S

    check(run(mixed, problem), expect(problem, rule), torch.float64, f"{first} then {second} at {cut}")


def test_bare_state_is_a_fresh_boundary():
    """Carrying only S starts a new segment: its first token neither writes nor decays, and the window is empty."""
    for name in RULES:
        rule = fw.RULES[name]
        problem = draw(rule, B=1, T=8)

        def segments(q, k, v, beta, lam, S0, rule=rule):
            o1, state = call(rule, "chunk", 3, tokens((q, k, v, beta, lam), slice(0, 5)), S0)
            o2, state = call(rule, "chunk", 3, tokens((q, k, v, beta, lam), slice(5, 8)), state.S)
            return torch.cat((o1, o2), dim=1), state.S

        def by_hand(q, k, v, beta, lam, S0, rule=rule):
            first = longhand(*tokens((q, k, v, beta, lam), slice(0, 5)), rule, S0)
            second = longhand(*tokens((q, k, v, beta, lam), slice(5, 8)), rule, first.S)
            return torch.cat((first.o, second.o), dim=1), second.S

        check(run(segments, problem), run(by_hand, problem), torch.float64, name)


def test_normalised_read_continues():
    """The normaliser is carried too: cut, stepped and masked."""
    for name in ("falcon-1a", "falcon-3a"):
        rule = fw.RULES[name].replace(read="normalized", read_eps=1e-3)
        problem = draw(rule, B=1, T=9)
        problem = problem._replace(q=problem.q.exp(), k=problem.k.exp())

        def pieces(q, k, v, beta, lam, S0, rule=rule):
            o1, state = call(rule, "chunk", 2, tokens((q, k, v, beta, lam), slice(0, 5)), S0)
            o2, state = call(rule, "chunk", 2, tokens((q, k, v, beta, lam), slice(5, 8)), state)
            o3, state = fw.step(q[:, 8], k[:, 8], v[:, 8], beta[:, 8], lam[:, 8], state, rule)
            return torch.cat((o1, o2, o3[:, None]), dim=1), state.S

        check(run(pieces, problem), expect(problem, rule), torch.float64, name)


def test_detached_state_cuts_the_gradient():
    """State.detach keeps the values and stops the gradients at the cut."""
    rule = fw.RULES["falcon-3"]
    problem: Problem = draw(rule, B=1, T=6)
    inputs = leaves(problem)
    S0 = inputs.pop("S0")
    _, state = call(rule, "chunk", 2, tokens(inputs.values(), slice(0, 3)), S0)
    o, _ = call(rule, "chunk", 2, tokens(inputs.values(), slice(3, 6)), state.detach())
    o.sum().backward()
    assert S0.grad is None
    assert inputs["v"].grad[:, :3].abs().max() == 0
    assert inputs["v"].grad[:, 3:].abs().max() > 0


def test_state_survives_saving_gathering_and_joining(tmp_path):
    """A State written to a file, reordered along its batch and joined again continues as before."""
    from safetensors.torch import load_file, save_file

    for name in RULES:
        rule = fw.RULES[name]
        problem = draw(rule, B=3, T=7, Hk=1)
        inputs = problem[:5]
        _, state = call(rule, "recurrent", None, tokens(inputs, slice(0, 4)), problem.S0)
        expected, _ = call(rule, "recurrent", None, tokens(inputs, slice(4, 7)), state)
        path = str(tmp_path / f"{name}.safetensors")
        save_file(state.tensors("memory."), path)
        loaded = fw.State.from_tensors(load_file(path), "memory.")
        order = torch.tensor([2, 0, 1])
        turned = [u[order] for u in tokens(inputs, slice(4, 7))]
        one = call(rule, "chunk", 2, turned, loaded.index_select(order))[0]
        assert_close(one, expected[order], torch.float64, "forward", f"{name} reordered")
        joined = fw.State.cat([loaded.index_select(torch.tensor([b])) for b in range(3)])
        again = call(rule, "chunk", 2, tokens(inputs, slice(4, 7)), joined)[0]
        assert_close(again, expected, torch.float64, "forward", f"{name} joined")


def test_empty_state_is_no_state():
    """State.zeros continues as no initial state does, under every option that adds parts to it."""
    for name in RULES:
        for changes in ({}, {"read": "normalized"}):
            if changes and name not in ("falcon-1a", "falcon-3a"):
                continue
            rule = fw.RULES[name].replace(**changes)
            problem = draw(rule, B=2, T=5, H=4, Hk=2, drop=("S0",))
            zeros = fw.State.zeros(rule, 2, 4, 4, 3, num_key_heads=2, dtype=torch.float64)
            with_zeros, _ = call(rule, "chunk", 2, problem[:5], zeros)
            without, _ = call(rule, "chunk", 2, problem[:5], None)
            assert_close(with_zeros, without, torch.float64, "forward", name)


def test_unreal_parts_of_a_state_are_ignored():
    """A row reset by its flags (has_key False, tail_count 0) is a fresh boundary, whatever its key and tail hold."""
    for name in RULES:
        rule = fw.RULES[name]
        problem = draw(rule, B=2, T=9, Hk=1)
        _, state = call(rule, "recurrent", None, tokens(problem[:5], slice(0, 4)), problem.S0)
        count = torch.zeros_like(state.tail_count)
        reset = state._replace(has_key=torch.tensor([False, False]), tail_count=count)
        rest = problem._replace(**{n: getattr(problem, n)[:, 4:] for n in ("q", "k", "v", "beta", "lam", "w_o")})
        rest = rest._replace(S0=state.S)
        expected = expect(rest, rule)
        for form in FORMS:
            for mask in (None, torch.ones(2, 5, dtype=torch.bool)):

                def again(q, k, v, beta, lam, S0, rule=rule, form=form, mask=mask, reset=reset):
                    o, after = call(rule, form, 2, (q, k, v, beta, lam), reset._replace(S=S0), mask=mask)
                    return o, after.S

                check(run(again, rest), expected, torch.float64, f"{name} {form}")
