"""Layers against longhand loops: norms, gates, the fast-weight layer, softmax attention.

Everything is tiny and in float64. `grads` makes one scalar of outputs with fixed weights, so that gradients of inputs
and parameters are compared wherever values are. The layer's judge writes out convolution, norms and gates token by
token and leaves the memory to the longhand of the op. What holds for every memory layer is in test_mixers.py.
"""

import math

import pytest
import torch
from conftest import assert_close
from longhand import longhand
from modules import (
    DTYPE,
    check_all,
    grads,
    output_longhand,
    parts,
    qkv_longhand,
    random,
    seeded,
    turned_longhand,
)
from torch import nn

import fastweight as fw
from fastweight.layers.attention import FastWeightAttention
from fastweight.layers.mixers import MIXERS, mixer_of
from fastweight.layers.parts import (
    FEATURE_MAPS,
    QK_NORMS,
    Gate,
    RMSNorm,
    feature_energy,
    l2_normalize,
    no_weight_decay,
    rms_normalize,
    rotate,
)
from fastweight.layers.softmax import SoftmaxAttention, visibility

RULES = sorted(fw.RULES)
OPTIONS = [("scaled", "normalized", "rms"), ("absolute", "normalized", "l2"), ("scaled", "direct", "l2")]


def layer_for(name, ridge="scaled", step="normalized", qk_norm="rms", **options) -> FastWeightAttention:
    rule = fw.RULES[name].replace(ridge=ridge, step=step)
    options = {"num_key_heads": 1, "key_dim": 4, "value_dim": 3} | options
    return seeded(FastWeightAttention(6, 2, rule=rule, qk_norm=qk_norm, **options))


class TestParts:
    @pytest.mark.parametrize("normalize", [rms_normalize, l2_normalize])
    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
    def test_zero_gives_zero_and_a_finite_gradient(self, normalize, dtype):
        x = torch.zeros(2, 5, dtype=dtype, requires_grad=True)
        y = normalize(x)
        (gradient,) = torch.autograd.grad(y.sum(), x)
        assert y.dtype == dtype
        assert (y == 0).all()
        assert torch.isfinite(gradient).all()

    def test_norms_are_the_formulas(self):
        u = random(3, 8)
        check_all([rms_normalize(u, 1e-3)], [u / (u.square().sum(-1, keepdim=True) / 8 + 1e-3).sqrt()], "rms")
        check_all([l2_normalize(u, 1e-3)], [u / (u.square().sum(-1, keepdim=True) + 1e-3).sqrt()], "l2")

    @pytest.mark.parametrize("qk_norm", QK_NORMS)
    @pytest.mark.parametrize("feature_map", FEATURE_MAPS)
    def test_feature_energy_is_a_bound_that_is_reached(self, qk_norm, feature_map):
        width = 8
        keys = torch.cat([random(512, width), torch.ones(1, width, dtype=DTYPE)])
        energies = FEATURE_MAPS[feature_map](QK_NORMS[qk_norm](keys, 0.0)).square().sum(-1)
        bound = feature_energy(qk_norm, feature_map, width)
        assert energies.max().item() <= bound * (1 + 1e-12)
        assert energies[-1].item() == pytest.approx(bound)

    def test_zero_keys_give_zero_features_except_for_elu(self):
        zero = torch.zeros(4, dtype=DTYPE)
        assert {name: phi(zero).sum().item() for name, phi in FEATURE_MAPS.items()} == {
            "identity": 0,
            "relu": 0,
            "elu+1": 4,
        }

    def test_rotation_keeps_lengths_and_depends_on_the_distance_only(self):
        q, k = random(1, 1, 1, 8), random(1, 1, 1, 8, seed=1)
        positions = torch.tensor([[3], [10], [103], [110]])
        at = [rotate(q, p[None], 100.0) for p in positions[::2]], [rotate(k, p[None], 100.0) for p in positions[1::2]]
        products = [(a * b).sum() for a, b in zip(*at, strict=True)]
        assert_close(products[1], products[0], DTYPE)
        assert_close(at[0][0].norm(), q.norm(), DTYPE)
        angle = torch.tensor(3 * 100.0 ** (-2 / 8), dtype=DTYPE)  # of the second pair of coordinates, 1 and 5
        turned = at[0][0].flatten()
        assert_close(turned[1], q.flatten()[1] * angle.cos() - q.flatten()[5] * angle.sin(), DTYPE)
        assert_close(turned[5], q.flatten()[5] * angle.cos() + q.flatten()[1] * angle.sin(), DTYPE)


class TestGate:
    @pytest.mark.parametrize("narrow", [nn.Module.bfloat16, nn.Module.half, lambda m: m.to(torch.bfloat16)])
    def test_keeps_float32_in_a_half_precision_model(self, narrow):
        model = nn.Sequential(nn.Linear(4, 4), Gate(4, [1.0, 4.3]))
        before = [p.clone() for p in model[1].parameters()]
        narrow(model)
        assert model[0].weight.dtype.itemsize == 2
        for parameter, old in zip(model[1].parameters(), before, strict=True):
            assert parameter.dtype == torch.float32
            assert (parameter == old).all()
        assert model[1](torch.ones(1, 1, 4, dtype=torch.bfloat16)).dtype == torch.float32

    def test_follows_a_float64_model_and_ignores_autocast(self):
        gate, x = Gate(4, [0.5]), torch.ones(1, 1, 4)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert (gate(x) == gate.weight.sum() + gate.bias).all()
        assert gate.double()(x).dtype == torch.float64

    def test_is_float32_under_a_half_precision_default(self):
        torch.set_default_dtype(torch.bfloat16)
        try:
            assert {p.dtype for p in Gate(4, [0.0]).parameters()} == {torch.float32}
        finally:
            torch.set_default_dtype(torch.float32)

    def test_gates_and_norms_do_not_decay(self):
        layer = FastWeightAttention(8, 2)
        names = set(no_weight_decay(nn.ModuleDict({"mixer": layer, "norm": RMSNorm(8)})))
        assert names == {
            "mixer.step_gate.weight",
            "mixer.step_gate.bias",
            "mixer.lam_gate.weight",
            "mixer.lam_gate.bias",
            "mixer.o_norm.weight",
            "norm.weight",
        }


def layer_longhand(layer: FastWeightAttention, x, mask=None):
    """The layer on one batch, from a fresh start, with its parameters but none of its code."""
    (B, T, _), K, V, H = x.shape, layer.key_dim, layer.value_dim, layer.num_heads
    mask = torch.ones(B, T, dtype=torch.bool) if mask is None else mask
    q, k, v = qkv_longhand(layer, x, mask)
    size = K if layer.qk_norm == "rms" else 1
    q, k = (u / (u.square().sum(-1, keepdim=True) / size + 1e-6).sqrt() for u in (q, k))
    if layer.rotary:
        q, k = (turned_longhand(u, mask, layer.rope_theta) for u in (q, k))
    eta_max = 2 / (size + layer.lambda_scale * (size if layer.rule.ridge == "scaled" else 1))
    step = torch.sigmoid(x @ layer.step_gate.weight.T + layer.step_gate.bias)
    step = step * (2 if layer.rule.step == "normalized" else eta_max)
    step = step.reshape(B, T, H, V) if layer.rule.gain == "column" else step
    lam = layer.lambda_scale * torch.sigmoid(x @ layer.lam_gate.weight.T + layer.lam_gate.bias)
    o = longhand(q, k, v, step, lam, layer.rule, mask=mask).o
    return output_longhand(layer, o if layer.skip is None else o + layer.skip.weight[:, None] * v, x)


@pytest.mark.parametrize("name", RULES)
class TestFastWeightAttention:
    @pytest.mark.parametrize(("ridge", "step", "qk_norm"), OPTIONS)
    def test_equals_the_longhand(self, name, ridge, step, qk_norm):
        layer, x = layer_for(name, ridge, step, qk_norm), random(2, 7, 6).requires_grad_()
        mask = random(2, 7, seed=5) > -0.5
        y, _ = layer(x, mask)
        y, expected = y * mask[..., None], layer_longhand(layer, x, mask) * mask[..., None]
        check_all([y], [expected], "output")
        sources = [x, *layer.parameters()]
        check_all(grads([y], sources), grads([expected], sources), "gradient", "gradient")

    def test_with_positions_a_way_past_and_no_silu_equals_the_longhand(self, name):
        layer = layer_for(name, rotary=True, value_skip=True, rope_theta=30.0, conv_activation="none")
        x, mask = random(2, 9, 6).requires_grad_(), random(2, 9, seed=5) > -0.5
        actual, expected = layer(x, mask)[0] * mask[..., None], layer_longhand(layer, x, mask) * mask[..., None]
        check_all([actual], [expected], "output")
        sources = [x, *layer.parameters()]
        check_all(grads([actual], sources), grads([expected], sources), "gradient", "gradient")
        plain = layer_for(name)
        plain.load_state_dict(layer.state_dict(), strict=False)
        assert (plain(x)[0] - layer(x)[0]).abs().max() > 1e-2

    def test_shared_keys_equal_repeated_keys(self, name):
        shared, full = layer_for(name, num_key_heads=1), layer_for(name, num_key_heads=2)
        index = torch.cat([torch.arange(0, 4).repeat(2), torch.arange(4, 8).repeat(2), torch.arange(8, 14)])
        full.load_state_dict(
            shared.state_dict()
            | {
                "qkv_proj.weight": shared.qkv_proj.weight[index],
                "conv.weight": shared.conv.weight[index],
            }
        )
        x = random(2, 6, 6)
        check_all([shared(x)[0]], [full(x)[0]], "output")


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("ridge", ["scaled", "absolute"])
@pytest.mark.parametrize("step", ["normalized", "direct"])
@pytest.mark.parametrize("qk_norm", ["rms", "l2"])
class TestGatesAtTheStart:
    def gates(self, name, ridge, step, qk_norm, logit=None):
        """Energy, eta and lambda of each head at that gate logit (None: as initialised), hidden state 0."""
        layer = FastWeightAttention(
            32, 4, rule=fw.RULES[name].replace(ridge=ridge, step=step), qk_norm=qk_norm
        ).double()
        energy = 8.0 if qk_norm == "rms" else 1.0
        if logit is not None:
            nn.init.constant_(layer.step_gate.bias, logit)
            nn.init.constant_(layer.lam_gate.bias, logit)
        gain, lam = layer._gates(torch.zeros(1, 1, 32, dtype=DTYPE))
        gain = gain[..., 0] if layer.rule.gain == "column" else gain
        lam = lam * (energy if ridge == "scaled" else 1.0)
        return energy, gain / (energy + lam) if step == "normalized" else gain, lam

    def test_carries_spread_from_16_to_1024_tokens(self, name, ridge, step, qk_norm):
        _, eta, lam = self.gates(name, ridge, step, qk_norm)
        assert (1 / (eta * lam)).flatten().tolist() == pytest.approx([16, 64, 256, 1024])

    def test_the_step_is_in_the_middle_of_the_stable_range(self, name, ridge, step, qk_norm):
        energy, eta, lam = self.gates(name, ridge, step, qk_norm)
        if step == "normalized":
            assert (eta * (energy + lam)).flatten().tolist() == pytest.approx([1] * 4)
        else:
            assert (eta * energy).flatten().tolist() == pytest.approx([0.5] * 4)

    def test_no_gate_can_leave_the_stable_range(self, name, ridge, step, qk_norm):
        energy, eta, lam = self.gates(name, ridge, step, qk_norm, logit=50.0)
        assert (eta * (energy + lam) <= 2 + 1e-12).all()
        assert (eta * lam <= 1 + 1e-12).all()


@pytest.mark.parametrize("name", ["falcon-1", "falcon-2", "falcon-3"])
@pytest.mark.parametrize(
    ("step", "feature_map"),  # a normalised step may fit a tiny relu key with huge weights: exact, but not bounded
    [("normalized", "identity"), ("normalized", "elu+1"), *(("direct", feature_map) for feature_map in FEATURE_MAPS)],
)
def test_regression_rules_stay_bounded_with_gates_wide_open(name, step, feature_map):
    rule = fw.RULES[name].replace(step=step, ridge="scaled")
    layer = FastWeightAttention(8, 2, rule=rule, feature_map=feature_map, conv_width=0, lambda_scale=0.01)
    layer = seeded(layer)
    nn.init.constant_(layer.step_gate.bias, 4.0)  # beta = 1.96
    nn.init.constant_(layer.lam_gate.bias, -4.0)
    _, state = layer(random(1, 600, 8).abs(), output_state=True)
    assert state.memory.S.abs().max() < 100


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_heads": 0}, "num_heads: got 0"),
        ({"num_heads": 4, "num_key_heads": 3}, "num_key_heads: got 3, expected a divisor of num_heads 4"),
        ({"rule": "falcon-9"}, "rule: got 'falcon-9'"),
        ({"qk_norm": "layer"}, "qk_norm: got 'layer', expected one of 'rms', 'l2'"),
        ({"feature_map": "exp"}, "feature_map: got 'exp'"),
        ({"conv_width": -1}, "conv_width: got -1"),
        ({"lambda_scale": 0.0}, "lambda_scale: got 0.0"),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        FastWeightAttention(8, options.pop("num_heads", 2), **options)


def test_wrong_inputs_are_named():
    layer, x = FastWeightAttention(8, 2), torch.zeros(2, 3, 8)
    _, state = layer(x, output_state=True)
    for arguments, message in [
        ({"mask": torch.ones(2, 2, dtype=torch.bool)}, "mask: got"),
        ({"mask": torch.ones(2, 3)}, "mask: got torch.float32"),
        ({"cu_seqlens": torch.tensor([0, 3])}, "cu_seqlens: got a batch of 2"),
        ({"state": state.memory}, "state: got State, expected a LayerState of 2 sequences"),
        ({"state": state.index_select(torch.tensor([0]))}, "state: got 1 sequences"),
    ]:
        with pytest.raises(ValueError, match=message):
            layer(x, **arguments)
    for wrong in (x[0], x[..., :5], x[None]):
        with pytest.raises(ValueError, match=r"hidden_states: got shape .*, expected \[batch, tokens, 8\]"):
            layer(wrong)


def test_options_reach_the_op():
    x = random(1, 5, 8)
    outputs = {}
    for feature_map in FEATURE_MAPS:
        for value_norm in (False, True):
            layer = FastWeightAttention(8, 2, feature_map=feature_map, value_norm=value_norm).double()
            layer.load_state_dict(seeded(FastWeightAttention(8, 2)).state_dict())
            outputs[feature_map, value_norm] = layer(x)[0]
    values = list(outputs.values())
    assert all((a - b).abs().max() > 1e-6 for i, a in enumerate(values) for b in values[:i])
    with pytest.raises(ValueError, match="form"):
        FastWeightAttention(8, 2, form="quick").double()(x)
    with pytest.raises(ValueError, match="chunk_size"):
        FastWeightAttention(8, 2, chunk_size=0).double()(x)
    assert FastWeightAttention(8, 2, conv_width=0, output_gate=False).double()(x)[0].shape == x.shape


def test_no_tokens_give_no_output_and_keep_the_state():
    layer = layer_for("falcon-3")
    _, state = layer(random(2, 4, 6), output_state=True)
    y, same = layer(random(2, 0, 6), state=state, output_state=True)
    assert y.shape == (2, 0, 6)
    check_all(parts(same), parts(state), "part")


def softmax_longhand(layer: SoftmaxAttention, x):
    """One sequence [T, D] from the start, query by query."""
    T, H, d = len(x), layer.num_heads, layer.head_dim
    q, k, v = (x @ layer.qkv_proj.weight.T).reshape(T, 3, H, d).unbind(1)
    q, k = turned_longhand(torch.stack((q, k)), torch.ones(2, T), layer.rope_theta)
    rows = []
    for t in range(T):
        scores = (q[t] * k[: t + 1]).sum(-1) / math.sqrt(d)  # [t+1, H]
        rows.append((torch.softmax(scores, 0)[..., None] * v[: t + 1]).sum(0).flatten())
    return torch.stack(rows) @ layer.o_proj.weight.T


class TestSoftmaxAttention:
    layer = seeded(SoftmaxAttention(8, 2, rope_theta=50.0))

    @pytest.mark.parametrize("masked", [False, True])
    def test_equals_the_longhand(self, masked):
        x = random(2, 6, 8).requires_grad_()
        mask = torch.tensor([[0, 1, 1, 0, 1, 1], [1, 1, 1, 1, 0, 0]], dtype=torch.bool) if masked else None
        keep = torch.ones(2, 6, dtype=torch.bool) if mask is None else mask
        y = self.layer(x, mask)[0][keep]
        expected = torch.cat([softmax_longhand(self.layer, x[b, keep[b]]) for b in range(2)])
        check_all([y], [expected], "output")
        sources = [x, *self.layer.parameters()]
        check_all(grads([y], sources), grads([expected], sources), "gradient", "gradient")

    def test_packed_equals_separate(self):
        x, bounds = random(1, 7, 8).requires_grad_(), [0, 3, 3, 7]
        y = self.layer(x, cu_seqlens=torch.tensor(bounds))[0]
        expected = torch.cat([softmax_longhand(self.layer, x[0, a:b]) for a, b in ((0, 3), (3, 7))])[None]
        check_all([y], [expected], "output")
        sources = [x, *self.layer.parameters()]
        check_all(grads([y], sources), grads([expected], sources), "gradient", "gradient")

    def test_padding_before_the_first_token_is_finite(self):
        y, _ = self.layer(random(1, 4, 8), torch.tensor([[False, False, True, True]]))
        assert torch.isfinite(y).all()
        visible = visibility(torch.tensor([[False, False, True, True]]), None, 4, 0, "cpu")
        assert visible[0, 0].tolist() == [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]

    def test_wrong_arguments_are_named(self):
        with pytest.raises(ValueError, match="head_dim: got 3"):
            SoftmaxAttention(6, 2)
        with pytest.raises(ValueError, match=r"mask: .* expected bool \(1, 4\): 0 cached and 4 new tokens"):
            self.layer(random(1, 4, 8), torch.ones(1, 5, dtype=torch.bool))
        with pytest.raises(ValueError, match="cu_seqlens: got packed documents with a key-value state"):
            self.layer(random(1, 4, 8), cu_seqlens=torch.tensor([0, 4]), state=_Empty())


class _Empty:
    def get_seq_length(self):
        return 0


def test_the_registry_knows_the_mixers_and_says_so():
    assert {*fw.RULES, "transformer"} <= set(MIXERS)
    with pytest.raises(ValueError, match=r"mixer: got 'lstm', expected one of .*falcon-3a.*transformer"):
        mixer_of("lstm")
