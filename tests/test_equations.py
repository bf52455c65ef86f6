"""One worked example per rule, T = 1 to 3, every number done by hand; longhand and package are held to the figures.

The comments carry the arithmetic. What they pin down: next-latent pairing writes nothing at the first token and does
not decay it; the residual is taken before the decay; the read comes after (or before) the write; q is not scaled.
"""

import pytest
import torch
from conftest import assert_close
from longhand import longhand

import fastweight as fw

FORMS = [("recurrent", None), ("masked", None), ("chunk", 1), ("chunk", 2), ("chunk", 64), ("auto", None)]


def column(*values):
    """One sequence, one head, width one: [1, T, 1, 1]."""
    return torch.tensor(values, dtype=torch.float64).reshape(1, -1, 1, 1)


def rows(*values):
    """One sequence, one head: rows of width K or V, [1, T, 1, W]."""
    return torch.tensor(values, dtype=torch.float64)[None, :, None]


def gates(*values):
    return torch.tensor(values, dtype=torch.float64).reshape(1, -1, 1)


def state(*values):
    """S0 [1, 1, K, V] from nested lists."""
    return torch.tensor(values, dtype=torch.float64)[None, None]


def expect_numbers(rule, q, k, v, beta, lam, S0, o, S):
    """Longhand, every form and token-by-token stepping give exactly these outputs and this final state."""
    o, S = o.double(), S.double()
    result = longhand(q, k, v, beta, lam, rule, S0)
    assert_close(result.o, o, torch.float64, "forward", "longhand o")
    assert_close(result.S, S, torch.float64, "state", "longhand S")
    for form, chunk_size in FORMS:
        out, final = fw.fast_weight_attention(
            q, k, v, beta, lam, rule, form=form, chunk_size=chunk_size, initial_state=S0, output_final_state=True
        )
        assert_close(out, o, torch.float64, "forward", f"{form} {chunk_size} o")
        assert_close(final.S, S, torch.float64, "state", f"{form} {chunk_size} S")


# k_3 and v_1 take no part in next-latent pairing: their odd values would show at once.
SCALAR = {
    "q": column(1, 1, 2),
    "k": column(1, 2, 77),
    "v": column(99, 3, 4),
    "beta": gates(1, 1, 0.5),
    "lam": gates(1, 1, 1),
    "S0": state([2.0]),
}


def test_falcon_1_by_hand():
    # t=1: no pair, S = 2.                               o = 1 * 2
    # t=2: x=1 y=3 eta=1/(1+1)=.5  gamma=.5 r=3-2*1=1    S = .5*2 + .5*1*1 = 1.5
    # t=3: x=2 y=4 eta=.5/(4+1)=.1 gamma=.9 r=4-1.5*2=1  S = .9*1.5 + .1*2*1 = 1.55   o = 2 * 1.55
    rule = fw.RULES["falcon-1"].replace(eps=0.0)
    expect_numbers(rule, **SCALAR, o=column(2, 1.5, 3.1), S=state([1.55]))


def test_residual_is_taken_before_the_decay():
    # With the residual on the decayed state, t=2 would give r = 3 - 1 = 2 and S = 1 + .5*2 = 2.
    rule = fw.RULES["falcon-1"].replace(eps=0.0)
    inputs = {name: u[:, :2] if name != "S0" else u for name, u in SCALAR.items()}
    expect_numbers(rule, **inputs, o=column(2, 1.5), S=state([1.5]))


def test_one_token_writes_nothing_and_does_not_decay():
    inputs = {name: u[:, :1] if name != "S0" else u for name, u in SCALAR.items()}
    for name, rule in fw.RULES.items():
        expect_numbers(
            rule.replace(name=f"{name}, one token", pairing="next-latent"), **inputs, o=column(2), S=state([2.0])
        )


def test_falcon_1a_by_hand():
    # t=2: S = .5*2 + .5*1*3 = 2.5 ; t=3: S = .9*2.5 + .1*2*4 = 3.05, o = 2 * 3.05
    rule = fw.RULES["falcon-1a"].replace(eps=0.0)
    expect_numbers(rule, **SCALAR, o=column(2, 2.5, 6.1), S=state([3.05]))


COLUMNS = {
    "q": column(1, 1, 2),
    "k": column(1, 2, 77),
    "v": rows([99, 99], [3, 5], [4, 1]),
    "beta": rows([1.0, 1.0], [1.0, 1.5], [0.5, 1.0]),
    "lam": gates(1, 1, 1),
    "S0": state([2.0, 4.0]),
}


def test_falcon_2_by_hand():
    # first column as falcon-1 above; second column:
    # t=2: eta=1.5/2=.75 gamma=.25 r=5-4=1        S = .25*4 + .75*1*1 = 1.75
    # t=3: eta=1/5=.2    gamma=.8  r=1-1.75*2=-2.5  S = .8*1.75 + .2*2*(-2.5) = .4   o = 2 * .4
    rule = fw.RULES["falcon-2"].replace(eps=0.0)
    o = rows([2.0, 4.0], [1.5, 1.75], [3.1, 0.8])
    expect_numbers(rule, **COLUMNS, o=o, S=state([1.55, 0.4]))


def test_falcon_2a_by_hand():
    # second column: t=2: S = .25*4 + .75*1*5 = 4.75 ; t=3: S = .8*4.75 + .2*2*1 = 4.2, o = 8.4
    rule = fw.RULES["falcon-2a"].replace(eps=0.0)
    o = rows([2.0, 4.0], [2.5, 4.75], [6.1, 8.4])
    expect_numbers(rule, **COLUMNS, o=o, S=state([3.05, 4.2]))


# Orthogonal keys, lengths 1 and 2: the mean covariance has top eigenvalue max(1, 4)/2 = 2, the mean energy is 2.5.
WINDOW = {
    "q": rows([1.0, 1.0], [1.0, 0.0], [1.0, 2.0]),
    "k": rows([1.0, 0.0], [0.0, 2.0], [77.0, 77.0]),
    "v": column(99, 3, 4),
    "lam": gates(0.5, 0.5, 0.5),
    "S0": state([2.0], [1.0]),
}


def test_falcon_3_by_hand():
    # t=2: window {1 pair}: eta=1/(1+.5+.5)=.5 alpha=.25; r=3-2=1; S = .75*[2,1] + .5*1*[1,0] = [2, .75], o = 2
    # t=3: mu=2: eta=.6/3=.2 alpha=.1; old pair r=3-2=1 x=[1,0]; new pair r=4-.75*2=2.5 x=[0,2]
    #      S = .9*[2,.75] + (.2/2)*([1,0] + [0,5]) = [1.9, 1.175], o = 1.9 + 2*1.175 = 4.25
    rule = fw.RULES["falcon-3"].replace(eps=0.5, window=2)
    expect_numbers(rule, **WINDOW, beta=gates(1, 1, 0.6), o=column(3, 2, 4.25), S=state([1.9], [1.175]))


def test_falcon_3a_by_hand():
    # t=2: eta=.5: S = .75*[2,1] + .5*3*[1,0] = [3, .75], o = 3
    # t=3: mean energy 2.5: eta=.7/3.5=.2 alpha=.1; S = .9*[3,.75] + .1*([3,0] + [0,8]) = [3, 1.475], o = 5.95
    rule = fw.RULES["falcon-3a"].replace(eps=0.5, window=2)
    expect_numbers(rule, **WINDOW, beta=gates(1, 1, 0.7), o=column(3, 3, 5.95), S=state([3.0], [1.475]))


def test_window_forgets_the_pair_that_leaves_it():
    # Same step, window 2, eta = 1 direct, no ridge, S0 = 0, keys 1: t=1 writes v1; t=2 (v1+v2)/2 on top; t=3 (v2+v3)/2.
    rule = fw.RULES["falcon-3a"].replace(window=2, pairing="same-step", step="direct")
    k, v = column(1, 1, 1), column(8, 2, 4)
    expect_numbers(rule, k, k, v, None, None, state([0.0]), o=column(8, 13, 16), S=state([16.0]))


def test_read_before_write_by_hand():
    # The states are those of falcon-1 above, each read one token late: q * S_{t-1} = 1*2, 1*2, 2*1.5.
    rule = fw.RULES["falcon-1"].replace(eps=0.0, timing="read-before-write")
    expect_numbers(rule, **SCALAR, o=column(2, 2, 3), S=state([1.55]))


SAME_STEP = dict(SCALAR, k=column(1, 2, 1), v=column(3, 4, 2), beta=gates(1, 0.5, 1))


def test_same_step_by_hand():
    # The first token writes: 1.5 and 1.55 as above, then x=1 y=2 eta=.5 gamma=.5 r=2-1.55=.45: S = .775 + .225 = 1.
    rule = fw.RULES["falcon-1"].replace(eps=0.0, pairing="same-step")
    expect_numbers(rule, **SAME_STEP, o=column(1.5, 1.55, 2), S=state([1.0]))


def test_same_step_read_before_write_by_hand():
    rule = fw.RULES["falcon-1"].replace(eps=0.0, pairing="same-step", timing="read-before-write")
    expect_numbers(rule, **SAME_STEP, o=column(2, 1.5, 3.1), S=state([1.0]))


def test_scaled_ridge_by_hand():
    # lambda-bar 1 and .25 at energies 1 and 4 are lambda = 1 and 1: the figures of falcon-1 above.
    rule = fw.RULES["falcon-1"].replace(eps=0.0, ridge="scaled")
    expect_numbers(rule, **dict(SCALAR, lam=gates(9, 1, 0.25)), o=column(2, 1.5, 3.1), S=state([1.55]))


def test_direct_step_by_hand():
    # eta given as .5 and .1: the figures of falcon-1 above, whatever the energy.
    rule = fw.RULES["falcon-1"].replace(step="direct")
    expect_numbers(rule, **dict(SCALAR, beta=gates(9, 0.5, 0.1)), o=column(2, 1.5, 3.1), S=state([1.55]))


def test_clamped_decay_keeps_the_write_gain():
    # eta=1 direct, lam=5: alpha = min(5, 1-.25) = .75, gamma=.25, but the write stays 1 * x * r with r = 3 - 2 = 1.
    rule = fw.RULES["falcon-1"].replace(step="direct", decay_floor=0.25)
    q, k, v = column(1, 1), column(1, 77), column(99, 3)
    expect_numbers(rule, q, k, v, gates(1, 1), gates(5, 5), state([2.0]), o=column(2, 1.5), S=state([1.5]))


def test_zero_denominator_is_no_step():
    # Same step, key 0, lam 0, eps 0: eta := 0, so nothing is written and nothing decays.
    rule = fw.RULES["falcon-1"].replace(eps=0.0, pairing="same-step")
    expect_numbers(rule, column(1), column(0), column(5), gates(1), gates(0), state([2.0]), o=column(2), S=state([2.0]))


def test_normalised_read_by_hand():
    # Same step, eta = 1 direct, lam 1 with floor .5: gamma = .5. Keys 1, 2 and targets 6, 3, read_eps .5, q = 1:
    # t=1: S = 6, z = 1: o = 6/1.5 ; t=2: S = 3 + 2*3 = 9, z = .5 + 2 = 2.5: o = 9/3
    changes = {"pairing": "same-step", "step": "direct", "decay_floor": 0.5, "read": "normalized", "read_eps": 0.5}
    rule = fw.RULES["falcon-1a"].replace(**changes)
    q, k, v = column(1, 1), column(1, 2), column(6, 3)
    expect_numbers(rule, q, k, v, gates(1, 1), gates(1, 1), state([0.0]), o=column(4, 3), S=state([9.0]))


@pytest.mark.parametrize(("form", "chunk_size"), FORMS)
def test_gradients_by_hand(form, chunk_size):
    """Derivatives of o_3 = 2 S_3 in the falcon-1 example, each from the formula for one step S' = (1-a)S + eta x r."""
    rule = fw.RULES["falcon-1"].replace(eps=0.0)
    inputs = {name: u.clone().requires_grad_() for name, u in SCALAR.items()}
    S0 = inputs.pop("S0")
    o, _ = fw.fast_weight_attention(*inputs.values(), rule, form=form, chunk_size=chunk_size, initial_state=S0)
    o[0, 2].sum().backward()
    # dS_3/dS_2 = .9 - .1*4 = .5 ; dS_2/dS_0 = .5 - .5 = 0 ; dS_2/d eta_2 = x r - lam S_0 = 1 - 2 = -1
    expected = {
        # o_3 = q_3 S_3
        "q": [0, 0, 1.55],
        # k_1: terms -S_0 d alpha = 1, r d eta = -.5, eta d(x r) = .5*(3-4) = -.5, sum 0.
        # k_2: eta' = -.5*2*2/25 = -.08: 1.5*.08 - .08*2*1 + .1*(4 - 2*1.5*2) = -.24, times 2. k_3: not used.
        "k": [0, -0.48, 0],
        # v_2: 2 * .5 * eta_2 x_2 = .5 ; v_3: 2 * eta_3 x_3 = .4
        "v": [0, 0.5, 0.4],
        # beta_2: 2 * .5 * (-1) / 2 ; beta_3: 2 * (x r - lam S_2) / 5 = 2 * (2 - 1.5) / 5
        "beta": [0, -0.5, 0.2],
        # lam_2: deta = -1/4, dalpha = 1/4: 2*.5*(-2/4 - 1/4)
        # lam_3: deta = -.5/25, dalpha = .5*4/25: 2*(-.04*1 - .08*1.5)
        "lam": [0, -0.75, -0.32],
    }
    for name, values in expected.items():
        assert_close(
            inputs[name].grad.flatten(), torch.tensor(values, dtype=torch.float64), torch.float64, "gradient", name
        )
    assert S0.grad.abs().max().item() < 1e-15
