"""Decoding without the host in the way: fixed addresses, no waiting for the device, one graph for every token.

A CUDA graph needs a GPU; on a CPU its recording is played by a function that runs the same forward again, which leaves
the bookkeeping around it (what is recorded when, which buffers are read and written) to be tested.
"""

import pytest
import torch
from conftest import assert_close
from tiny import DTYPE, MEMORIES, build, greedy, tokens
from torch.utils._python_dispatch import TorchDispatchMode

from fastweight.models import FastWeightCache, decoding
from fastweight.models.cache import CACHE_NAME
from fastweight.models.decoding import GraphedForward


class Operators(TorchDispatchMode):
    """Names of the operators that ran."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


# Reading a tensor on the host, sizes that depend on values, tensors made from Python numbers (a copy to the device).
WAITS = {"_local_scalar_dense", "item", "nonzero", "masked_select", "unique", "lift_fresh", "equal"}


def prompted(model, ids):
    cache = FastWeightCache(model.config, static=True)
    with torch.no_grad():
        model(ids, cache=cache)
    return cache


def addresses(cache):
    return [part.data_ptr() for layer in cache.layers for part in (*layer.tensors(), layer.num_seen)]


@pytest.mark.parametrize("mixer", MEMORIES)
class TestOneToken:
    def test_asks_nothing_of_the_device_and_moves_nothing(self, mixer):
        model, ids = build(mixer), tokens(2, 9)
        cache = prompted(model, ids[:, :4])
        places = addresses(cache)
        with torch.no_grad():
            for t in range(4, 9):
                with Operators() as seen:
                    logits = model(ids[:, t : t + 1], cache=cache).logits
                assert not seen.names & WAITS
                assert addresses(cache) == places
        assert_close(logits, model(ids).logits[:, -1:], DTYPE)
        assert cache.get_seq_length() == 9

    def test_reordering_rows_moves_nothing(self, mixer):
        model, ids = build(mixer), tokens(2, 9)
        cache = prompted(model, ids[:, :4])
        places = addresses(cache)
        with torch.no_grad():
            cache.reorder_cache(torch.tensor([1, 0]))
            logits = model(ids[[1, 0], 4:], cache=cache).logits
        assert addresses(cache) == places
        assert_close(logits, model(ids).logits[[1, 0], 4:], DTYPE)


@pytest.mark.parametrize("mixer", MEMORIES)
def test_a_state_is_overwritten_only_where_that_is_allowed(mixer):
    layer, x = build(mixer).model.layers[0].mixer, torch.randn(3, 6, 16, dtype=DTYPE)
    mask = torch.tensor([[True], [False], [True]])
    with torch.no_grad():
        _, state = layer(x[:, :5], output_state=True)
        held = [part.clone() for part in state.memory]
        expected, after = layer(x[:, 5:], mask=mask, state=state, output_state=True)
        assert all(torch.equal(part, old) for part, old in zip(state.memory, held, strict=True))
        out, new = layer(x[:, 5:], mask=mask, state=state, output_state=True, overwrite_state=True)
    assert_close(out, expected, DTYPE)
    assert_close(new.conv, after.conv, DTYPE)
    for name, part, right in zip(after.memory._fields, new.memory, after.memory, strict=True):
        assert_close(part, right, DTYPE, "state", name)
    assert all(part is old for part, old in zip(new.memory, state.memory, strict=True)), "no step in place"
    with torch.no_grad():
        several, _ = layer(x[:, :2], state=new, output_state=True, overwrite_state=True)
    assert torch.isfinite(several).all()
    explicit = build(mixer, backend="torch").model.layers[0].mixer
    with torch.no_grad():
        _, state = explicit(x[:, :5], output_state=True)
        held = state.memory.S.clone()
        explicit(x[:, 5:], state=state, output_state=True, overwrite_state=True)
    assert torch.equal(state.memory.S, held)  # a backend that was named is used as it is


@pytest.fixture
def recordings(monkeypatch):
    """Recording on a CPU: a list that grows by one with each; a replay runs the forward into the same buffer."""
    made = []

    def record(run):
        made.append(run)
        result = torch.full((2, 1, 16), torch.nan, dtype=DTYPE)
        return result, lambda: result.copy_(run())

    monkeypatch.setattr(decoding, "RECORDED_ON", ("cpu",))
    monkeypatch.setattr(decoding, "record", record)
    return made


@pytest.mark.parametrize("mixer", ["falcon-1", "falcon-3a", "mamba2"])
def test_every_token_after_the_first_is_a_replay(mixer, recordings):
    model, ids = build(mixer), tokens(2, 12)
    expected = model(ids).logits
    cache = prompted(model, ids[:, :4])
    forward = GraphedForward(model)
    with torch.no_grad():
        for t in range(4, 12):
            logits = forward(input_ids=ids[:, t : t + 1], **{CACHE_NAME: cache}).logits
            assert_close(logits, expected[:, t : t + 1], DTYPE, name=f"token {t}")
            assert len(recordings) == (t > 4)
    # Another cache lies elsewhere: a new recording, and the old one is not used for it.
    other = prompted(model, ids[:, :4])
    with torch.no_grad():
        for t in range(4, 7):
            logits = forward(input_ids=ids[:, t : t + 1], **{CACHE_NAME: other}).logits
            assert_close(logits, expected[:, t : t + 1], DTYPE, name=f"token {t} again")
    assert len(recordings) == 2
    assert cache.get_seq_length() == 12


def test_what_cannot_be_replayed_is_not(recordings):
    model, ids = build("falcon-1"), tokens(2, 12)
    forward, cache = GraphedForward(model), prompted(model, ids[:, :4])
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[0, 5] = 0
    with torch.no_grad():
        masked = [
            forward(input_ids=ids[:, t : t + 1], attention_mask=mask[:, : t + 1], **{CACHE_NAME: cache}).logits
            for t in range(4, 8)
        ]
        several = forward(input_ids=ids[:, 8:10], attention_mask=mask[:, :10], **{CACHE_NAME: cache}).logits
    expected = model(ids, attention_mask=mask).logits
    assert_close(torch.cat([*masked, several], 1)[mask[:, 4:10].bool()], expected[:, 4:10][mask[:, 4:10].bool()], DTYPE)
    with torch.no_grad():
        states = forward(input_ids=ids[:, 10:11], output_hidden_states=True, **{CACHE_NAME: cache}).hidden_states
    assert len(states) == 3
    forward(input_ids=ids[:, 11:], **{CACHE_NAME: cache})  # with gradients, states are replaced
    assert not recordings


@pytest.mark.parametrize("mixer", ["falcon-3", "gated-deltanet"])
def test_generate_decodes_through_the_recording(mixer, recordings, monkeypatch):
    model, ids = build(mixer), tokens(2, 5)
    # transformers decides by the device whether to ask for a compiled forward; here a CPU stands for a GPU.
    monkeypatch.setattr(type(model), "_valid_auto_compile_criteria", lambda self, kwargs, config: True)
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    expected = greedy(model, ids, attention_mask=mask, pad_token_id=0)
    assert not recordings
    options = {"attention_mask": mask, "pad_token_id": 0, "cache_implementation": "static"}
    assert (greedy(model, ids, **options) == expected).all()
    assert len(recordings) == 1


@pytest.mark.parametrize("mixer", ["falcon-1a"])
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch.compile does it itself
def test_a_compiled_token_is_compiled_once(mixer):
    model, ids = build(mixer, num_hidden_layers=1), tokens(2, 12)
    cache, compiled = prompted(model, ids[:, :4]), []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    forward = torch.compile(model, backend=backend, fullgraph=True)
    with torch.no_grad():
        logits = [forward(ids[:, t : t + 1].clone(), cache=cache, use_cache=True).logits for t in range(4, 12)]
    assert len(compiled) == 1
    assert_close(torch.cat(logits, 1), model(ids).logits[:, 4:], DTYPE)


@pytest.mark.gpu
@pytest.mark.parametrize("mixer", MEMORIES)
def test_cuda_graphs_generate_what_plain_decoding_does(mixer):
    model, ids = build(mixer, torch.float32).cuda(), tokens(2, 5).cuda()
    expected = greedy(model, ids, max_new_tokens=20)
    replayed = greedy(model, ids, max_new_tokens=20, cache_implementation="static")
    assert (replayed == expected).all()
    cache = FastWeightCache(model.config, static=True)
    with torch.no_grad():
        model(ids, cache=cache)
        forward = GraphedForward(model)
        logits = [forward(input_ids=expected[:, t : t + 1], **{CACHE_NAME: cache}).logits.clone() for t in range(5, 25)]
        plain = model(expected).logits[:, 5:]
    assert forward.replay is not None
    assert_close(torch.cat(logits, 1), plain, torch.float32)
