"""Every memory layer: what must not matter does not, and the baselines are what their papers and transformers say.

Judges of the baselines: Mamba-2 and Gated DeltaNet are those of transformers (its torch path, float32), with weights
copied over; all four are loops written out here in float64, RetNet's in the complex, quadratic form of its paper, which
has no state. Traps: transformers keeps the rows of its input projections in orders of its own, so what is compared are
named rows; it computes in float32 whatever it is given.
"""

from functools import partial
from itertools import pairwise

import pytest
import torch
from modules import DTYPE, SETTINGS, check_all, grads, output_longhand, parts, qkv_longhand, random, seeded
from torch import nn
from transformers.models.mamba2 import Mamba2Config
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer
from transformers.models.qwen3_next import Qwen3NextConfig
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

import fastweight as fw
from fastweight.layers.attention import FastWeightAttention
from fastweight.layers.delta import DeltaAttention
from fastweight.layers.memory_mixer import LayerState
from fastweight.layers.parts import DecayGate, Gate, HeadSkip, no_weight_decay
from fastweight.layers.retention import Retention
from fastweight.layers.ssd import StateSpaceMixer

WIDTHS = {"num_key_heads": 1, "key_dim": 4, "value_dim": 3}


def builder(cls, **options):
    return lambda: seeded(cls(6, 2, **(WIDTHS | options)))


BASELINES = {
    "deltanet": builder(DeltaAttention, decay=False),
    "gated-deltanet": builder(DeltaAttention, decay=True),
    "retnet": builder(Retention),
    "lightning": builder(Retention, decay="lightning", depth=0.5, conv_width=0),
    "mamba2": builder(StateSpaceMixer),
    "mamba2 of two groups": builder(StateSpaceMixer, num_key_heads=2),
}
MEMORIES = BASELINES | {
    name: builder(FastWeightAttention, rule=rule.replace(ridge="scaled")) for name, rule in sorted(fw.RULES.items())
}
SETTLED = {
    f"{name} with all settings": builder(FastWeightAttention, rule=rule.replace(ridge="scaled"), **SETTINGS)
    for name, rule in sorted(fw.RULES.items())
} | {
    "falcon-3a with a normalised read and all settings": builder(
        FastWeightAttention, rule=fw.RULES["falcon-3a"].replace(ridge="scaled", read="normalized"), **SETTINGS
    ),
    "gated-deltanet with all settings": builder(DeltaAttention, decay=True, **SETTINGS),
    "mamba2 with all settings": builder(StateSpaceMixer, **SETTINGS),
    "retnet without positions": builder(Retention, rotary=False, value_skip=True),
}
MEMORIES |= SETTLED


@pytest.mark.parametrize("build", MEMORIES.values(), ids=MEMORIES.keys())
class TestEveryMemory:
    def test_masked_tokens_are_as_if_removed(self, build):
        layer, x = build(), random(2, 8, 6).requires_grad_()
        mask = torch.tensor([[0, 0, 1, 1, 0, 1, 1, 1], [1, 0, 0, 0, 1, 1, 0, 0]], dtype=torch.bool)
        y, state = layer(x, mask, output_state=True)
        alone = [layer(x[b : b + 1, mask[b]], output_state=True) for b in range(2)]
        check_all([y[b, mask[b]] for b in range(2)], [o[0] for o, _ in alone], "output")
        check_all(parts(state), [torch.cat(p) for p in zip(*(parts(s) for _, s in alone), strict=True)], "state")
        outputs = [y[b, mask[b]] for b in range(2)] + [state.memory.S[0], state.memory.S[1]]
        expected = [o[0] for o, _ in alone] + [s.memory.S[0] for _, s in alone]
        sources = [x, *layer.parameters()]
        check_all(grads(outputs, sources), grads(expected, sources), "gradient", "gradient")

    @pytest.mark.parametrize("cuts", [[1], [4], [7], [2, 3, 6], list(range(1, 9))])
    def test_cut_anywhere_equals_whole(self, build, cuts):
        layer, x = build(), random(2, 9, 6).requires_grad_()
        mask = random(2, 9, seed=6) > -0.7
        whole, last = layer(x, mask, output_state=True)
        pieces, state = [], None
        for start, end in pairwise([0, *cuts, 9]):
            o, state = layer(x[:, start:end], mask[:, :end], state=state, output_state=True)
            pieces.append(o)
        y = torch.cat(pieces, dim=1) * mask[..., None]
        whole = whole * mask[..., None]
        check_all([y, *parts(state)], [whole, *parts(last)], "output and state")
        sources = [x, *layer.parameters()]
        ends = (state.memory.S, last.memory.S)
        check_all(grads([y, ends[0]], sources), grads([whole, ends[1]], sources), "gradient", "gradient")

    def test_packed_equals_separate(self, build):
        layer, bounds = build(), [0, 4, 4, 5, 11]
        x = random(1, 11, 6).requires_grad_()
        _, start = layer(random(4, 5, 6, seed=7), output_state=True)
        start = start.detach()
        y, state = layer(x, cu_seqlens=torch.tensor(bounds), state=start, output_state=True)
        alone = [
            layer(x[:, a:b], state=start.index_select(torch.tensor([n])), output_state=True)
            for n, (a, b) in enumerate(pairwise(bounds))
        ]
        expected = [torch.cat([o for o, _ in alone], dim=1)]
        states = [torch.cat(p) for p in zip(*(parts(s) for _, s in alone), strict=True)]
        check_all([y, *parts(state)], expected + states, "output and state")
        sources = [x, *layer.parameters()]
        last = torch.cat([s.memory.S for _, s in alone])
        check_all(grads([y, state.memory.S], sources), grads([*expected, last], sources), "gradient", "gradient")

    def test_packed_with_a_mask_equals_separate_without_the_masked(self, build):
        layer, bounds, x = build(), [0, 4, 9], random(1, 9, 6)
        mask = torch.tensor([[0, 1, 1, 0, 1, 0, 1, 1, 0]], dtype=torch.bool)
        y, state = layer(x, mask, torch.tensor(bounds), output_state=True)
        for n, (a, b) in enumerate(pairwise(bounds)):
            o, alone = layer(x[:, a:b][:, mask[0, a:b]], output_state=True)
            own = parts(state.index_select(torch.tensor([n])))
            check_all([y[:, a:b][:, mask[0, a:b]], *own], [o, *parts(alone)], f"document {n}")

    def test_state_has_a_fixed_size_and_survives_a_file(self, build):
        layer = build()
        _, short = layer(random(2, 3, 6), output_state=True)
        _, long = layer(random(2, 40, 6), output_state=True)
        assert [p.shape for p in parts(short)] == [p.shape for p in parts(long)]
        again = LayerState.from_tensors(long.tensors("layer."), "layer.")
        check_all(parts(again), parts(long), "part")
        assert not any(p.requires_grad for p in parts(long.detach()))
        assert layer(random(1, 3, 6))[1] is None

    def test_half_precision_keeps_a_float32_memory(self, build):
        layer = build().float().bfloat16()
        x = random(2, 9, 6).bfloat16()
        y, state = layer(x, output_state=True)
        y.float().sum().backward()
        assert (y.dtype, state.conv.dtype, state.memory.S.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
        assert all(torch.isfinite(p.grad).all() for p in layer.parameters())

    def test_zero_hidden_states_are_harmless(self, build):
        layer, x = build(), torch.zeros(1, 5, 6, dtype=DTYPE, requires_grad=True)
        y, _ = layer(x)
        assert (y == 0).all()
        assert all(torch.isfinite(g).all() for g in grads([y], [x, *layer.parameters()]))


def squared(u):
    return u.square().sum(-1, keepdim=True)


def each_head(layer, x, mask):
    """(row, value head, key head, real tokens) of a batch."""
    groups = layer.num_heads // layer.num_key_heads
    for b in range(len(x)):
        for h in range(layer.num_heads):
            yield b, h, h // groups, mask[b].nonzero()[:, 0].tolist()


def gates(gate: DecayGate, x):
    """dt and the carry, [B, T, H] each."""
    dt = torch.log(1 + torch.exp(x @ gate.dt.weight.T + gate.dt.bias))
    return dt, torch.exp(-torch.exp(gate.A_log) * dt)


def delta_longhand(layer: DeltaAttention, x, mask):
    q, k, v = qkv_longhand(layer, x, mask)
    q, k = q / (squared(q) + 1e-6).sqrt() / layer.key_dim**0.5, k / (squared(k) + 1e-6).sqrt()
    beta = torch.sigmoid(x @ layer.beta_gate.weight.T + layer.beta_gate.bias)
    carry = torch.ones_like(beta) if layer.decay_gate is None else gates(layer.decay_gate, x)[1]
    o = torch.zeros_like(v)
    for b, h, g, tokens in each_head(layer, x, mask):
        S = x.new_zeros(layer.key_dim, layer.value_dim)
        for t in tokens:
            S = carry[b, t, h] * S
            S = S + beta[b, t, h] * torch.outer(k[b, t, g], v[b, t, h] - S.T @ k[b, t, g])
            o[b, t, h] = S.T @ q[b, t, g]
    return output_longhand(layer, o, x)


def retention_longhand(layer: Retention, x, mask):
    """sum_s gamma^(t-s) Re(conj(q_t e^(i w t)) k_s e^(i w s)) v_s over real tokens s <= t: no state anywhere."""
    q, k, v = qkv_longhand(layer, x, mask)
    half, H = layer.key_dim // 2, layer.num_heads
    turn = 10_000.0 ** -(torch.arange(half, dtype=DTYPE) / half)
    q, k = (torch.complex(u[..., :half], u[..., half:]) for u in (q / layer.key_dim**0.5, k))
    o = torch.zeros_like(v)
    for b, h, g, tokens in each_head(layer, x, mask):
        gamma = 1 - 2.0 ** (-5 - h) if layer.decay == "retnet" else 2.718281828459045 ** -lightning_rate(h, H)
        for i, t in enumerate(tokens):
            for j, s in enumerate(tokens[: i + 1]):
                score = (
                    q[b, t, g].conj() * k[b, s, g] * torch.polar(torch.ones(()).double(), turn * (j - i))
                ).real.sum()
                o[b, t, h] += gamma ** (i - j) * score * v[b, s, h]
    return output_longhand(layer, o, x)


def lightning_rate(h, H):
    return 2.0 ** (-8 * (h + 1) / H) * (1 - 0.5 + 1e-5)


def state_space_longhand(layer: StateSpaceMixer, x, mask):
    C, B, v = qkv_longhand(layer, x, mask)
    dt, carry = gates(layer.decay_gate, x)
    y = torch.zeros_like(v)
    for b, h, g, tokens in each_head(layer, x, mask):
        S = x.new_zeros(layer.key_dim, layer.value_dim)
        for t in tokens:
            S = carry[b, t, h] * S + dt[b, t, h] * torch.outer(B[b, t, g], v[b, t, h])
            y[b, t, h] = S.T @ C[b, t, g] + layer.skip.weight[h] * v[b, t, h]
    z = x @ layer.g_proj.weight.T
    y = (y.flatten(2) * z * torch.sigmoid(z)).unflatten(-1, (layer.num_key_heads, -1))
    y = (y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt()).flatten(2)
    return (y * layer.o_norm.weight) @ layer.o_proj.weight.T


LONGHANDS = {DeltaAttention: delta_longhand, Retention: retention_longhand, StateSpaceMixer: state_space_longhand}


@pytest.mark.parametrize("build", BASELINES.values(), ids=BASELINES.keys())
def test_a_baseline_equals_its_longhand(build):
    layer, x = build(), random(2, 7, 6).requires_grad_()
    mask = random(2, 7, seed=5) > -0.5
    keep = mask[..., None]
    actual, expected = layer(x, mask)[0] * keep, LONGHANDS[type(layer)](layer, x, mask) * keep
    check_all([actual], [expected], "output")
    sources = [x, *layer.parameters()]
    check_all(grads([actual], sources), grads([expected], sources), "gradient", "gradient")


class Rows:
    """The same numbers in two modules: rows `of` a parameter here, rows `to` of one there."""

    def __init__(self, ours, of, theirs, to):
        self.ours, self.of, self.theirs, self.to = ours, of, theirs, to

    def copy(self):
        with torch.no_grad():
            self.ours[self.of] = self.theirs[self.to].reshape(self.ours[self.of].shape)

    def gradients(self):
        theirs = self.theirs.grad[self.to]
        return self.ours.grad[self.of], theirs.reshape(self.ours.grad[self.of].shape)


ALL = slice(None)


def mamba2(groups):
    """A StateSpaceMixer, transformers' mixer, and the rows they share; theirs are z, x, B, C, dt (and x, B, C)."""
    H, V, N = 4, 6, 5
    config = Mamba2Config(
        hidden_size=12, num_heads=H, head_dim=V, expand=2, state_size=N, n_groups=groups, conv_kernel=4, chunk_size=4,
        use_bias=False, layer_norm_epsilon=1e-6, num_hidden_layers=1,
    )  # fmt: skip
    theirs = randomized(Mamba2Mixer(config, 0))
    if groups > 1 and not hasattr(theirs.norm, "group_size"):
        pytest.skip("this version of transformers normalises all groups together, unlike the published code")
    ours = StateSpaceMixer(12, H, key_dim=N, num_key_heads=groups)
    I, G = H * V, groups * N
    z, x, B, C, dt = torch.arange(2 * I + 2 * G + H).split([I, I, G, G, H])
    conv = torch.cat([C, B, x]) - I
    gate = ours.decay_gate
    return ours, theirs, [
        Rows(ours.qkv_proj.weight, ALL, theirs.in_proj.weight, torch.cat([C, B, x])),
        Rows(ours.g_proj.weight, ALL, theirs.in_proj.weight, z),
        Rows(gate.dt.weight, ALL, theirs.in_proj.weight, dt),
        Rows(gate.dt.bias, ALL, theirs.dt_bias, ALL),
        Rows(gate.A_log, ALL, theirs.A_log, ALL),
        Rows(ours.conv.weight, ALL, theirs.conv1d.weight, conv),
        Rows(ours.conv.bias, ALL, theirs.conv1d.bias, conv),
        Rows(ours.skip.weight, ALL, theirs.D, ALL),
        Rows(ours.o_norm.weight, ALL, theirs.norm.weight, ALL),
        Rows(ours.o_proj.weight, ALL, theirs.out_proj.weight, ALL),
    ]  # fmt: skip


def gated_deltanet(key_heads):
    """A DeltaAttention, transformers' mixer, and the rows they share; theirs are q, k, v, z by key head."""
    H, K, V = 4, 6, 5
    config = Qwen3NextConfig(
        hidden_size=12, linear_num_value_heads=H, linear_num_key_heads=key_heads, linear_key_head_dim=K,
        linear_value_head_dim=V, linear_conv_kernel_dim=4, rms_norm_eps=1e-6, hidden_act="silu", num_hidden_layers=1,
        layer_types=["linear_attention"],
    )  # fmt: skip
    theirs = randomized(Qwen3NextGatedDeltaNet(config, 0))
    ours = DeltaAttention(12, H, decay=True, key_dim=K, value_dim=V, num_key_heads=key_heads)
    R = H // key_heads
    q, k, v, z = torch.arange(key_heads * 2 * (K + R * V)).view(key_heads, -1).split([K, K, R * V, R * V], dim=1)
    b, a = torch.arange(2 * H).view(key_heads, -1).split([R, R], dim=1)
    qkv = torch.cat([u.flatten() for u in (q, k, v)])
    gate = ours.decay_gate
    return ours, theirs, [
        Rows(ours.qkv_proj.weight, ALL, theirs.in_proj_qkvz.weight, qkv),
        Rows(ours.g_proj.weight, ALL, theirs.in_proj_qkvz.weight, z.flatten()),
        Rows(ours.beta_gate.weight, ALL, theirs.in_proj_ba.weight, b.flatten()),
        Rows(gate.dt.weight, ALL, theirs.in_proj_ba.weight, a.flatten()),
        Rows(gate.dt.bias, ALL, theirs.dt_bias, ALL),
        Rows(gate.A_log, ALL, theirs.A_log, ALL),
        Rows(ours.conv.weight, ALL, theirs.conv1d.weight, ALL),
        Rows(ours.o_norm.weight, ALL, theirs.norm.weight, ALL),
        Rows(ours.o_proj.weight, ALL, theirs.out_proj.weight, ALL),
    ]  # fmt: skip


def randomized(module: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))
    return module


@pytest.mark.parametrize(
    "build",
    [partial(mamba2, 1), partial(mamba2, 2), partial(gated_deltanet, 2), partial(gated_deltanet, 4)],
    ids=["mamba2", "mamba2 of two groups", "gated-deltanet of shared keys", "gated-deltanet"],
)
@pytest.mark.parametrize("length", [1, 11, 70])
def test_a_baseline_equals_that_of_transformers(build, length):
    ours, theirs, rows = build()
    for row in rows:
        row.copy()
    if isinstance(ours, DeltaAttention):
        nn.init.zeros_(ours.beta_gate.bias)  # theirs has none
    copied = {id(row.ours) for row in rows} | {id(p) for n, p in ours.named_parameters() if n == "beta_gate.bias"}
    assert copied == {id(p) for p in ours.parameters()}
    assert {id(row.theirs) for row in rows} == {id(p) for p in theirs.parameters()}
    one, other = (random(2, length, 12).float().requires_grad_() for _ in range(2))
    y, expected = ours(one)[0], theirs(other)
    check_all([y], [expected], "output", dtype=torch.float32)
    weights = random(*y.shape, seed=9).float()
    (y * weights).sum().backward()
    (expected * weights).sum().backward()
    pairs = [(one.grad, other.grad), *(row.gradients() for row in rows)]
    check_all(*zip(*pairs, strict=True), "gradient", "gradient", torch.float32)


class TestDecayGate:
    def test_starts_inside_the_published_ranges_and_in_float32(self):
        gate = DecayGate(8, 24)
        dt, log_decay = gate(torch.zeros(1, 1, 8))
        rates = (-log_decay / dt)[0, 0]
        assert dt[0, 0, [0, -1]].tolist() == pytest.approx([1e-3, 1e-1])
        ratios = dt[0, 0, 1:] / dt[0, 0, :-1]
        assert ratios.tolist() == pytest.approx([100 ** (1 / 23)] * 23, rel=1e-4)
        assert 1 <= rates.min() < 2
        assert 15 < rates.max() <= 16
        assert abs(torch.corrcoef(torch.stack([dt[0, 0].log(), rates]))[0, 1]) < 0.2
        assert DecayGate(8, 1)(torch.zeros(1, 1, 8))[0].item() == pytest.approx(1e-2)

    @pytest.mark.parametrize("layer", [StateSpaceMixer(8, 2), DeltaAttention(8, 2, decay=True)])
    def test_gates_keep_float32_and_do_not_decay(self, layer):
        wide = {f"{n}.{p}" for n, m in layer.named_modules() if isinstance(m, Gate | DecayGate | HeadSkip)
                for p, _ in m.named_parameters(recurse=False)}  # fmt: skip
        assert wide >= {"decay_gate.A_log", "decay_gate.dt.weight", "decay_gate.dt.bias"}
        assert wide | {"o_norm.weight"} == set(no_weight_decay(layer))
        for name, parameter in layer.bfloat16().named_parameters():
            assert parameter.dtype == (torch.float32 if name in wide else torch.bfloat16), name


def test_retention_decays_are_those_of_the_papers():
    like = torch.zeros(1, dtype=DTYPE)
    retnet = Retention(16, 4).log_decay(like).exp()
    assert retnet.tolist() == pytest.approx([1 - 1 / 32, 1 - 1 / 64, 1 - 1 / 128, 1 - 1 / 256], rel=1e-12)
    first, last = (Retention(16, 4, decay="lightning", depth=depth).log_decay(like) for depth in (0.0, 1.0))
    assert first.tolist() == pytest.approx([-(2.0 ** (-2 * h)) * (1 + 1e-5) for h in (1, 2, 3, 4)])
    assert last.tolist() == pytest.approx([-(2.0 ** (-2 * h)) * 1e-5 for h in (1, 2, 3, 4)])


@pytest.mark.parametrize(
    "build", [partial(Retention, 8, 2), partial(FastWeightAttention, 8, 2, rule="falcon-3", rotary=True)]
)
def test_rotary_positions_go_on_exactly_however_far_they_have_come(build):
    """Positions are counted from the last token, so nothing grows: 400 tokens one by one equal 400 at once."""
    layer, x = build().float(), random(1, 400, 8).float()
    with torch.no_grad():
        whole, last = layer(x, output_state=True)
        state = None
        for t in range(400):
            o, state = layer(x[:, t : t + 1], state=state, output_state=True)
    check_all([o, state.memory.S], [whole[:, -1:], last.memory.S], "last token", dtype=torch.float32)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (partial(Retention, 6, 2), "key_dim: got 3, expected an even width"),
        (partial(Retention, 8, 2, decay="linear"), "decay: got 'linear', expected 'retnet' or 'lightning'"),
        (partial(StateSpaceMixer, 8, 4, num_key_heads=3), "num_key_heads: got 3, expected a divisor of num_heads 4"),
        (partial(DeltaAttention, 8, 0, decay=True), "num_heads: got 0"),
        (partial(DeltaAttention, 8, 2, decay=False, conv_width=-1), "conv_width: got -1"),
        (partial(DeltaAttention, 8, 2, decay=False, conv_start="zero"), "conv_start: got 'zero'"),
        (partial(DeltaAttention, 8, 2, decay=False, conv_activation="relu"), "conv_activation: got 'relu'"),
        (partial(DeltaAttention, 6, 2, decay=False, rotary=True), "key_dim: got 3, expected an even width"),
        (partial(FastWeightAttention, 8, 2, rotary=True, feature_map="relu"), "feature_map: got 'relu'"),
    ],
)
def test_wrong_options_are_named(build, message):
    with pytest.raises(ValueError, match=message):
        build()
