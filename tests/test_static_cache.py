"""Decoding without the host in the way: fixed addresses, no waiting for the device, one graph for every token.

A CUDA graph needs a GPU; on a CPU its recording is played by a function that runs the same forward again, which leaves
the bookkeeping around it (what is recorded when, which buffers are read and written) to be tested.
"""

import pytest
import torch
from conftest import assert_close
from tiny import DTYPE, EVERY, MEMORIES, build, greedy, tokens
from torch.utils._python_dispatch import TorchDispatchMode

from fastweight.models import FastWeightCache, decoding, load_state, save_state
from fastweight.models import cache as cache_module
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


def prompted(model, ids, mask=None):
    cache = FastWeightCache(model.config, static=True, max_cache_len=30)
    with torch.no_grad():
        model(ids, cache=cache, attention_mask=mask)
    return cache


def addresses(cache):
    counts = [layer.num_seen for layer in cache.layers if hasattr(layer, "num_seen")]
    return [part.data_ptr() for part in (*cache.tensors(), *counts)]


@pytest.mark.parametrize("mixer", EVERY)
class TestOneToken:
    def test_asks_nothing_of_the_device_and_moves_nothing(self, mixer, monkeypatch):
        model, ids = build(mixer), tokens(2, 9)
        cache = prompted(model, ids[:, :4])
        places = addresses(cache)
        with torch.no_grad():
            for t in range(4, 9):
                monkeypatch.setattr(cache_module, "_capturing", lambda: True)  # as while a graph is recorded
                with Operators() as seen:
                    logits = model(ids[:, t : t + 1], cache=cache).logits
                monkeypatch.undo()
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


@pytest.mark.parametrize("mixer", ["falcon-1", "falcon-3a", "mamba2", "transformer", "hybrid"])
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


@pytest.mark.parametrize("mixer", ["falcon-3", "gated-deltanet", "transformer", "hybrid"])
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


@pytest.mark.parametrize("mixer", ["transformer", "hybrid"])
class TestStaticKeysAndValues:
    """The room of fixed size says what the growing cache says."""

    PADDED = torch.tensor([[0, 0, 0, 1, 1, 1], [1, 1, 1, 1, 1, 1]])

    @pytest.mark.parametrize("pieces", [(6, 1, 1, 4), (2, 1, 3, 1, 5), (1, 1, 1, 9)], ids=str)
    def test_any_split_of_a_padded_batch(self, mixer, pieces):
        model, ids = build(mixer), tokens(2, 12)
        mask = torch.cat([self.PADDED, torch.ones(2, 6, dtype=torch.long)], 1)
        expected = model(ids, attention_mask=mask).logits
        for given in (True, False):
            cache, seen, logits = FastWeightCache(model.config, static=True, max_cache_len=12), 0, []
            with torch.no_grad():
                for piece in pieces:
                    told = given or seen < 6  # the mask of the prompt is remembered
                    upto = mask[:, : seen + piece] if told else None
                    logits.append(model(ids[:, seen : seen + piece], attention_mask=upto, cache=cache).logits)
                    seen += piece
            assert_close(torch.cat(logits, 1)[mask.bool()], expected[mask.bool()], DTYPE)
            assert cache.get_seq_length() == 12

    def test_a_replayed_token_knows_the_padding_and_the_given_position(self, mixer, recordings):
        model, ids = build(mixer), tokens(2, 12)
        mask = torch.cat([self.PADDED, torch.ones(2, 6, dtype=torch.long)], 1)
        for shift in (None, 5):
            positions = None if shift is None else (mask.cumsum(1) - 1).clamp(min=0) + shift * (torch.arange(12) >= 6)
            expected = model(ids, attention_mask=mask, position_ids=positions).logits
            forward, cache = GraphedForward(model), prompted(model, ids[:, :6], self.PADDED)
            with torch.no_grad():
                for t in range(6, 12):
                    given = {} if positions is None else {"position_ids": positions[:, t : t + 1]}
                    logits = forward(input_ids=ids[:, t : t + 1], **given, **{CACHE_NAME: cache}).logits
                    assert_close(logits, expected[:, t : t + 1], DTYPE, name=f"token {t}")
        assert len(recordings) == 2

    def test_rows_are_selected_and_repeated(self, mixer):
        model, ids = build(mixer), tokens(2, 9)
        cache = prompted(model, ids[:, :6], self.PADDED)
        expected = model(ids, attention_mask=torch.nn.functional.pad(self.PADDED, (0, 3), value=1)).logits[:, 6:]
        with torch.no_grad():
            cache.batch_repeat_interleave(2)
            cache.batch_select_indices(torch.tensor([3, 0]))
            logits = model(ids[[1, 0], 6:], cache=cache).logits
        assert_close(logits, expected[[1, 0]], DTYPE)

    def test_a_full_room_is_an_error(self, mixer, recordings):
        model, ids = build(mixer), tokens(2, 70)
        with pytest.raises(ValueError, match="max_cache_len: got None for a static cache"):
            FastWeightCache(model.config, static=True)
        forward, cache = GraphedForward(model), prompted(model, ids[:, :60])  # 30 is rounded up to 64
        with torch.no_grad():
            for t in range(60, 64):
                forward(input_ids=ids[:, t : t + 1], **{CACHE_NAME: cache})
            assert len(recordings) == 1
            with pytest.raises(ValueError, match="cache: got 1 more tokens, expected at most 0"):
                forward(input_ids=ids[:, 64:65], **{CACHE_NAME: cache})
        assert cache.get_seq_length() == 64
        with pytest.raises(ValueError, match="crop: got"):
            cache.crop(-1)

    def test_a_state_from_a_file(self, mixer, tmp_path):
        model, ids = build(mixer), tokens(2, 9)
        save_state(prompted(model, ids[:, :6]), model.config, tmp_path / "state")
        with torch.no_grad():
            for how in ({}, {"static": True, "max_cache_len": 9}):
                cache = load_state(tmp_path / "state", model.config, **how)
                assert_close(model(ids[:, 6:], cache=cache).logits, model(ids).logits[:, 6:], DTYPE)


@pytest.mark.gpu
@pytest.mark.parametrize("mixer", EVERY)
def test_cuda_graphs_generate_what_plain_decoding_does(mixer):
    model, ids = build(mixer, torch.float32).cuda(), tokens(2, 5).cuda()
    expected = greedy(model, ids, max_new_tokens=20)
    replayed = greedy(model, ids, max_new_tokens=20, cache_implementation="static")
    assert (replayed == expected).all()
    cache = FastWeightCache(model.config, static=True, max_cache_len=25)
    with torch.no_grad():
        model(ids, cache=cache)
        forward = GraphedForward(model)
        logits = [forward(input_ids=expected[:, t : t + 1], **{CACHE_NAME: cache}).logits.clone() for t in range(5, 25)]
        plain = model(expected).logits[:, 5:]
    assert forward.replay is not None
    assert_close(torch.cat(logits, 1), plain, torch.float32)
