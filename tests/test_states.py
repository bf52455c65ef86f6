"""States in files, and training over segments that hand them on: equal to one run, or cut where that was asked."""

import re

import pytest
import torch
from conftest import assert_close
from safetensors.torch import save_file
from tiny import DTYPE, EVERY, MEMORIES, build, config_of, gradients, greedy, tokens, weights

from fastweight.models import FastWeightCache, load_state, save_state


@pytest.mark.parametrize("mixer", EVERY)
def test_a_state_from_a_file_goes_on_as_if_nothing_had_happened(mixer, tmp_path):
    model, ids, path = build(mixer), tokens(2, 12), tmp_path / "state.safetensors"
    with torch.no_grad():
        cache = FastWeightCache(model.config)
        model(ids[:, :7], cache=cache)
        save_state(cache, model.config, path)
        again = load_state(path, model.config, static=mixer in MEMORIES)
        assert again.get_seq_length() == 7
        for one, other in zip(again.tensors(), cache.tensors(), strict=True):
            assert torch.equal(one, other)
            assert one.dtype == other.dtype
        assert_close(model(ids[:, 7:], cache=again).logits, model(ids).logits[:, 7:], DTYPE)
    assert (greedy(model, ids, cache=load_state(path, model.config)) == greedy(model, ids)).all()


def test_a_state_of_bfloat16_and_of_gradients_can_be_saved(tmp_path):
    model = build("falcon-3", torch.bfloat16).train()
    cache = FastWeightCache(model.config)
    model(tokens(1, 5), cache=cache)
    assert any(part.requires_grad for part in cache.tensors())
    save_state(cache, model.config, tmp_path / "state")
    again = load_state(tmp_path / "state", model.config)
    assert [part.dtype for part in again.tensors()] == [part.dtype for part in cache.tensors()]
    assert not any(part.requires_grad for part in again.tensors())


def test_wrong_files_and_models_are_named(tmp_path):
    model, path = build("falcon-1"), tmp_path / "state"
    with pytest.raises(ValueError, match="cache: got one that has seen no token"):
        save_state(FastWeightCache(model.config), model.config, path)
    cache = FastWeightCache(model.config)
    with torch.no_grad():
        model(tokens(1, 5), cache=cache)
    save_state(cache, model.config, path)
    for changes in ({"pairing": "same-step"}, {"hidden_size": 32}, {"mixer": ["falcon-1", "falcon-2"]}):
        with pytest.raises(ValueError, match=f"config: got a state written with .*{next(iter(changes))}"):
            load_state(path, config_of(**({"mixer": "falcon-1"} | changes)))
    save_file({"x": torch.zeros(1)}, tmp_path / "other")
    with pytest.raises(ValueError, match=re.escape("expected a file written by save_state")):
        load_state(tmp_path / "other", model.config)


@pytest.mark.parametrize("mixer", EVERY)
def test_truncated_training_stops_gradients_at_the_cut_and_nowhere_else(mixer):
    """Two segments with a cut between them: values as uncut, gradients as if the second began with constants."""
    model, ids = build(mixer).train(), tokens(2, 8)
    whole = model(ids).logits
    cache = FastWeightCache(model.config)
    first = model(ids[:, :5], cache=cache).logits
    second = model(ids[:, 5:], cache=cache.detach()).logits
    assert_close(torch.cat([first, second], dim=1), whole, DTYPE)

    constants = FastWeightCache(model.config)
    with torch.no_grad():
        model(ids[:, :5], cache=constants)
    separate = model(ids[:, 5:], cache=constants).logits
    together = gradients(model, (first * weights(first)).sum() + (second * weights(second)).sum())
    alone = gradients(model, (model(ids[:, :5]).logits * weights(first)).sum())
    rest = gradients(model, (separate * weights(separate)).sum())
    uncut = gradients(model, (whole[:, 5:] * weights(second)).sum())
    for a, b, c in zip(together, alone, rest, strict=True):
        assert_close(a, b + c, DTYPE, "gradient")
    assert any((c - d).abs().max() > 1e-6 * d.abs().max() for c, d in zip(rest, uncut, strict=True)), "nothing was cut"
