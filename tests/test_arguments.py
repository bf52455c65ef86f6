"""Bad arguments raise ValueError that names the argument, what was got and what was expected.

Layouts of other libraries (heads before tokens), sizes, dtypes, bounds, states that do not fit, and fields of rules.
"""

import pytest
import torch
from inputs import draw

import fastweight as fw

R = fw.RULES
RULES = sorted(R)


def arguments(rule="falcon-1", **shape):
    problem = draw(R[rule], **{"B": 2, "T": 6, "H": 4, "Hk": 2, "K": 5, "V": 3, **shape})
    return problem._asdict()


def refuse(match, rule="falcon-1", keywords=None, **changes):
    """The call with some arguments changed raises ValueError that names `match` and says what it expected."""
    given = {**arguments(rule), **changes}
    with pytest.raises(ValueError, match=rf"\b{match}\b") as caught:
        fw.fast_weight_attention(*(given[n] for n in ("q", "k", "v", "beta", "lam")), rule, **(keywords or {}))
    message = str(caught.value)
    assert "got" in message, message
    assert "expected" in message, message


@pytest.mark.parametrize("rule", RULES)
def test_wrong_layouts_name_the_argument(rule):
    a = arguments(rule)
    heads_first = {n: a[n].transpose(1, 2) for n in ("q", "k", "v", "beta", "lam")}
    for name, value in heads_first.items():
        with pytest.raises(ValueError, match=r"\b(q|k|v|beta|lam)\b"):
            fw.fast_weight_attention(*({**a, name: value}[n] for n in ("q", "k", "v", "beta", "lam")), rule)
    refuse("beta", rule, beta=heads_first["beta"])
    refuse("lam", rule, lam=heads_first["lam"])
    refuse("beta", rule, beta=a["beta"][:, :-1])
    refuse("lam", rule, lam=a["lam"][..., None])
    refuse("lam", rule, lam=a["lam"][:, :, :2])
    refuse("q", rule, q=a["q"][:, :-1])
    refuse("q", rule, q=a["q"][..., :-1])
    refuse("k", rule, k=a["k"][:1])
    refuse("v", rule, v=a["v"][:, :, :3], beta=a["beta"][:, :, :3], lam=a["lam"][:, :, :3])
    refuse("q", rule, q=a["q"][:, :, 0])
    refuse("v", rule, v=a["v"].long())
    refuse("beta", rule, beta=a["beta"].tolist())


def test_column_gain_where_there_is_none():
    """beta [B, T, H, V] with a scalar rule is an error, not a silent broadcast."""
    refuse("beta", "falcon-1", beta=torch.ones(2, 6, 4, 3).double())
    refuse("beta", "falcon-2", beta=torch.ones(2, 6, 4, 2).double())


def test_other_arguments_are_named():
    a = arguments()
    S = torch.zeros(2, 4, 5, 3).double()
    for keywords, name in [
        ({"chunk_size": 0}, "chunk_size"),
        ({"chunk_size": -3}, "chunk_size"),
        ({"chunk_size": 2.5}, "chunk_size"),
        ({"form": "loop"}, "form"),
        ({"backend": "numpy"}, "backend"),
        ({"mask": torch.ones(2, 6)}, "mask"),
        ({"mask": torch.ones(2, 5, dtype=torch.bool)}, "mask"),
        ({"mask": torch.ones(6, 2, dtype=torch.bool)}, "mask"),
        ({"initial_state": S.transpose(2, 3)}, "initial_state"),
        ({"initial_state": S[:1]}, "initial_state"),
        ({"initial_state": S[:, :2]}, "initial_state"),
        ({"initial_state": (S,)}, "initial_state"),
        ({"initial_state": fw.State.zeros("falcon-3", 2, 4, 5, 3, num_key_heads=2)}, "initial_state"),
        ({"initial_state": fw.State.zeros("falcon-1", 2, 4, 5, 3)}, "initial_state"),
    ]:
        with pytest.raises(ValueError, match=name):
            fw.fast_weight_attention(a["q"], a["k"], a["v"], a["beta"], a["lam"], "falcon-1", **keywords)
    for rule in ("falcon-4", "Falcon-1", None, 3):
        with pytest.raises(ValueError, match="rule"):
            fw.fast_weight_attention(a["q"], a["k"], a["v"], a["beta"], a["lam"], rule)


@pytest.mark.parametrize(
    "changes",
    [
        {"objective": "l1"}, {"gain": "matrix"}, {"window": 0}, {"window": 2.0}, {"window": True}, {"pairing": "both"},
        {"timing": "now"}, {"ridge": "none"}, {"step": "big"}, {"eps": -1.0}, {"eps": float("nan")},
        {"decay_floor": 0.0}, {"decay_floor": 1.0}, {"read": "normalized"}, {"no_such_field": 1},
    ],
    ids=str,
)  # fmt: skip
def test_rule_fields_are_checked(changes):
    with pytest.raises(ValueError, match=next(iter(changes))):
        R["falcon-1"].replace(**changes)


def test_window_rule_wants_an_eps():
    with pytest.raises(ValueError, match="eps"):
        R["falcon-3"].replace(eps=0.0)


@pytest.mark.parametrize(
    ("bounds", "batch"),
    [
        ([0, 3, 6], 2), ([1, 3, 6], 1), ([0, 4, 3, 6], 1), ([0, 3, 5], 1), ([0, 3, 7], 1), ([], 1), ([0, 6, 3], 1),
        ([-1, 6], 1),
    ],
    ids=str,
)  # fmt: skip
def test_bad_bounds(bounds, batch):
    a = arguments(B=batch)
    for dtype in (torch.int32, torch.int64):
        with pytest.raises(ValueError, match="cu_seqlens"):
            fw.fast_weight_attention(
                a["q"], a["k"], a["v"], a["beta"], a["lam"], "falcon-1", cu_seqlens=torch.tensor(bounds, dtype=dtype)
            )


def test_bounds_of_another_kind():
    a = arguments(B=1)
    for bounds in (torch.tensor([0.0, 6.0]), torch.tensor([[0, 6]]), [0, 6], torch.tensor([0, 6], dtype=torch.int16)):
        with pytest.raises(ValueError, match="cu_seqlens"):
            fw.fast_weight_attention(a["q"], a["k"], a["v"], a["beta"], a["lam"], "falcon-1", cu_seqlens=bounds)


def test_as_many_states_as_sequences():
    a = arguments(B=1)
    for N in (1, 3):
        for state in (torch.zeros(N, 4, 5, 3), fw.State.zeros("falcon-1", N, 4, 5, 3, num_key_heads=2)):
            with pytest.raises(ValueError, match="initial_state"):
                fw.fast_weight_attention(
                    a["q"], a["k"], a["v"], a["beta"], a["lam"], "falcon-1",
                    cu_seqlens=torch.tensor([0, 2, 6]), initial_state=state,
                )  # fmt: skip


def test_flags_and_counts_of_a_state_keep_their_dtypes():
    state = fw.State.zeros("falcon-3", 2, 4, 5, 3, num_key_heads=2)
    for name, wrong in (("has_key", state.has_key.float()), ("tail_count", state.tail_count.half())):
        refuse(name, "falcon-3", {"initial_state": state._replace(**{name: wrong})})


def test_a_rule_of_another_kind():
    for rule in (["falcon-1"], None, 1, "falcon1"):
        with pytest.raises(ValueError, match=r"rule: got .*, expected a fastweight Rule or one of"):
            fw.State.zeros(rule, 1, 1, 1, 1)


def test_step_and_relatives_name_their_arguments():
    a = arguments()
    q, k, v, beta, lam = (a[n] for n in ("q", "k", "v", "beta", "lam"))
    state = fw.State.zeros("falcon-1", 2, 4, 5, 3, num_key_heads=2)
    with pytest.raises(ValueError, match="q"):
        fw.step(q, k[:, 0], v[:, 0], beta[:, 0], lam[:, 0], state, "falcon-1")
    with pytest.raises(ValueError, match="v"):
        fw.step(q[:, 0], k[:, 0], v[:, 0, 0], beta[:, 0], lam[:, 0], state, "falcon-1")
    with pytest.raises(ValueError, match="beta"):
        fw.step(q[:, 0], k[:, 0], v[:, 0], beta[:, 0].T, lam[:, 0], state, "falcon-1")
    with pytest.raises(ValueError, match="state"):
        fw.step(q[:, 0], k[:, 0], v[:, 0], beta[:, 0], lam[:, 0], fw.State.zeros("falcon-1", 1, 4, 5, 3), "falcon-1")
    with pytest.raises(ValueError, match="beta"):
        fw.delta_rule(q, k, v, beta.transpose(1, 2))
    with pytest.raises(ValueError, match="log_decay"):
        fw.delta_rule(q, k, v, beta, -lam.transpose(1, 2))
    with pytest.raises(ValueError, match="log_decay"):
        fw.linear_attention(q, k, v, -lam[..., None])
    with pytest.raises(ValueError, match="v"):
        fw.linear_attention(q, k, v.transpose(1, 2))
