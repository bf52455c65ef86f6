"""Chunk maps: applied in order, composed in any order, and cut anywhere, they give the state that the op gives."""

import pytest
import torch
from conftest import assert_close

import fastweight as fw
from fastweight.memory.maps import ChunkMap, chunk_maps

RULES = [name for name, rule in fw.RULES.items() if (rule.objective, rule.gain) != ("regression", "column")]


def draw(rule: fw.Rule, T: int = 23, seed: int = 0) -> list[torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    k = torch.randn(2, T, 2, 5, dtype=torch.float64, generator=rng)
    v = torch.randn(2, T, 4, 3, dtype=torch.float64, generator=rng)
    gates = (2, T, 4, 3) if rule.gain == "column" else (2, T, 4)
    beta = 1.8 * torch.rand(gates, dtype=torch.float64, generator=rng)
    lam = 3 * torch.rand(2, T, 4, dtype=torch.float64, generator=rng)
    S = torch.randn(2, 4, 5, 3, dtype=torch.float64, generator=rng)
    return [t.requires_grad_() for t in (k, v, beta, lam, S)]


def tree(maps: ChunkMap) -> ChunkMap:
    """Composes a stack of maps by halves, as devices would."""
    parts = [maps.chunk(i) for i in range(len(maps.b))]
    while len(parts) > 1:
        paired = [later.after(earlier) for earlier, later in zip(parts[::2], parts[1::2], strict=False)]
        parts = paired + parts[len(parts) - len(parts) % 2 :]
    return parts[0]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", RULES)
def test_composed_maps_give_the_final_state(name, masked):
    rule = fw.RULES[name]
    leaves = draw(rule)
    k, v, beta, lam, S = leaves
    mask = torch.rand(2, 23, generator=torch.Generator().manual_seed(1)) > 0.3 if masked else None
    _, final = fw.fast_weight_attention(
        k, k, v, beta, lam, rule, form="recurrent", initial_state=S, output_final_state=True, mask=mask
    )
    assert final is not None
    weight = torch.randn(final.S.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    expected = torch.autograd.grad((final.S * weight).sum(), leaves)
    maps = chunk_maps(k, v, beta, lam, rule, chunk_size=5, mask=mask)
    one_by_one = S
    for i in range(len(maps.b)):
        one_by_one = maps.chunk(i)(one_by_one)
    for state in (one_by_one, tree(maps)(S)):
        assert_close(state, final.S, torch.float64, "state", name)
        found = torch.autograd.grad((state * weight).sum(), leaves, retain_graph=True)
        for got, want, label in zip(found, expected, ("k", "v", "beta", "lam", "S"), strict=True):
            assert_close(got, want, torch.float64, "gradient", f"{name} {label}")


@pytest.mark.parametrize("name", RULES)
def test_maps_continue_from_the_boundary_of_the_tokens_before(name):
    """The second half's map needs the first half's boundary, but not its S."""
    rule = fw.RULES[name]
    k, v, beta, lam, S = (t.detach() for t in draw(rule))
    halves = [tuple(t[:, part] for t in (k, v, beta, lam)) for part in (slice(0, 11), slice(11, 23))]
    _, boundary = fw.fast_weight_attention(halves[0][0], *halves[0], rule, output_final_state=True)
    assert boundary is not None
    first = tree(chunk_maps(*halves[0], rule, chunk_size=4))
    second = tree(chunk_maps(*halves[1], rule, chunk_size=4, initial_state=boundary))
    _, final = fw.fast_weight_attention(k, k, v, beta, lam, rule, initial_state=S, output_final_state=True)
    assert final is not None
    assert_close(second.after(first)(S), final.S, torch.float64, "state", name)


def test_a_gain_per_column_has_no_map():
    k, v, beta, lam, _ = draw(fw.RULES["falcon-2"])
    with pytest.raises(ValueError, match="rule: got 'falcon-2'"):
        chunk_maps(k, v, beta, lam, "falcon-2")
