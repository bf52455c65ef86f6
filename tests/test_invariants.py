"""What must not matter, for every mixer and a hybrid: how a sequence is cut, padded, packed, batched or recomputed.

Comparisons are in float64, where no rounding can flip a greedy choice; gradients go through every parameter.
"""

import copy
import random
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from conftest import assert_close
from tiny import (
    DTYPE,
    EVERY,
    MEMORIES,
    build,
    cache_of,
    check_gradients,
    checkpoint_activations,
    gradients,
    greedy,
    tokens,
    weights,
)
from transformers import DataCollatorWithFlattening

from fastweight.models import FastWeightCache

LONG_RUNS = ["falcon-1", "falcon-3", "transformer", "hybrid"]


def feed(model, ids, cuts, cache, mask=None):
    """Logits of all tokens, read in the pieces that `cuts` leaves."""
    pieces = []
    for start, end in pairwise([0, *cuts, ids.shape[1]]):
        seen = None if mask is None else mask[:, :end]
        output = model(ids[:, start:end], attention_mask=seen, cache=cache, use_cache=True)
        assert cache_of(output) is cache
        pieces.append(output.logits)
    return torch.cat(pieces, dim=1)


def assert_generated_greedily(model, sequences, length):
    """Every new token is the choice of an uncached forward over what stood before it."""
    with torch.no_grad():
        choices = model(sequences, use_cache=False).logits.argmax(-1)
    assert (choices[:, length - 1 : -1] == sequences[:, length:]).all()


@pytest.mark.parametrize("mixer", LONG_RUNS)
@pytest.mark.parametrize("length", [1, 5, 64, 100])
def test_fifty_cached_tokens_equal_uncached_ones(mixer, length):
    model, ids = build(mixer), tokens(1, length)
    assert_generated_greedily(model, greedy(model, ids, max_new_tokens=50), length)


@pytest.mark.parametrize("mixer", EVERY)
class TestGeneration:
    def test_cached_greedy_equals_uncached(self, mixer):
        model = build(mixer)
        for length in (1, 5, 64):
            ids = tokens(2, length)
            assert_generated_greedily(model, greedy(model, ids), length)
        assert (greedy(model, ids[:, :5], use_cache=False) == greedy(model, ids[:, :5])).all()

    def test_left_padding_changes_nothing(self, mixer):
        model, rows = build(mixer), [tokens(1, n, seed=n) for n in (3, 9, 6)]
        outputs = {}
        for pad in (0, 7):
            ids = torch.full((3, 9), pad)
            mask = torch.zeros(3, 9, dtype=torch.long)
            for row, one in enumerate(rows):
                ids[row, 9 - one.shape[1] :] = one
                mask[row, 9 - one.shape[1] :] = 1
            logits = model(ids, attention_mask=mask).logits
            for row, one in enumerate(rows):
                assert_close(logits[row, 9 - one.shape[1] :], model(one).logits[0], DTYPE, name=f"row {row}")
            outputs[pad] = greedy(model, ids, attention_mask=mask, pad_token_id=0)[:, 9:]
        assert (outputs[0] == outputs[7]).all()
        for row, one in enumerate(rows):
            assert (outputs[0][row] == greedy(model, one)[0, one.shape[1] :]).all()
        beams = greedy(model, ids, attention_mask=mask, pad_token_id=0, num_beams=2)[:, 9:]
        for row, one in enumerate(rows):
            assert (beams[row] == greedy(model, one, num_beams=2)[0, one.shape[1] :]).all()

    def test_any_split_of_a_prompt_equals_the_whole(self, mixer):
        model, ids = build(mixer), tokens(2, 12)
        mask = torch.ones(2, 12, dtype=torch.long)
        mask[0, :2] = mask[1, 7] = 0
        full, draw = model(ids, attention_mask=mask).logits, random.Random(0)
        random_cuts = [sorted(draw.sample(range(1, 12), draw.randint(1, 6))) for _ in range(3)]
        for cuts in ([1], [11], list(range(1, 12)), *random_cuts):
            cache = FastWeightCache(model.config)
            with torch.no_grad():
                logits = feed(model, ids, cuts, cache, mask)
            assert_close(logits[mask.bool()], full[mask.bool()], DTYPE, name=f"cut at {cuts}")
            assert cache.get_seq_length() == 12

    def test_beams(self, mixer):
        model, ids = build(mixer), tokens(2, 5)
        beams = greedy(model, ids, num_beams=4, num_return_sequences=2)
        assert (beams == greedy(model, ids, num_beams=4, num_return_sequences=2, use_cache=False)).all()
        assert beams.shape == (4, 13)
        alone = greedy(model, ids[:1], num_beams=4, num_return_sequences=2)
        assert (beams[:2] == alone).all()

    def test_samples_follow_the_seed(self, mixer):
        model, ids, drawn = build(mixer), tokens(2, 5), []
        for seed, use_cache in ((0, True), (0, False), (1, True)):
            torch.manual_seed(seed)
            drawn.append(
                model.generate(ids, max_new_tokens=8, do_sample=True, num_return_sequences=3, use_cache=use_cache)
            )
        assert drawn[0].shape == (6, 13)
        assert (drawn[0] == drawn[1]).all()
        assert (drawn[0] != drawn[2]).any()
        assert len({tuple(row) for row in drawn[0][:3].tolist()}) > 1, "samples of one prompt are copies"

    def test_going_on_from_a_returned_cache(self, mixer):
        model, ids = build(mixer), tokens(2, 6)
        expected = greedy(model, ids, max_new_tokens=16)
        for name in ("cache", "past_key_values"):
            first = greedy(model, ids, return_dict_in_generate=True)
            cache, read = cache_of(first), first.sequences
            assert cache.get_seq_length() == read.shape[1] - 1  # the last choice was not fed back
            # Only what is new, with a mask for all; and the whole sequence.
            branch = copy.deepcopy(cache)
            new = greedy(model, read[:, -1:], attention_mask=torch.ones_like(read), **{name: branch})
            assert (new[:, 1:] == expected[:, 14:]).all()
            assert (greedy(model, read, **{name: cache}) == expected).all()
        with pytest.raises(ValueError, match="inputs: got 1 tokens for a cache that has seen 21"):
            greedy(model, read[:, -1:], cache=cache)

    def test_prefill_in_chunks_from_embeddings_and_with_fixed_addresses(self, mixer):
        model, ids = build(mixer), tokens(2, 8)
        expected = greedy(model, ids)
        assert (greedy(model, ids, prefill_chunk_size=3) == expected).all()
        embeddings = model.get_input_embeddings()(ids)
        assert (greedy(model, None, inputs_embeds=embeddings) == expected[:, 8:]).all()
        assert (greedy(model, ids, cache_implementation="static") == expected).all()
        assert (greedy(model, ids, cache_implementation="static", prefill_chunk_size=3) == expected).all()
        beams = greedy(model, ids, num_beams=3)
        assert (greedy(model, ids, num_beams=3, cache_implementation="static") == beams).all()
        with pytest.raises(ValueError, match="cache_implementation: got 'offloaded'"):
            greedy(model, ids, cache_implementation="offloaded")

    def test_copies_of_a_cache_are_independent(self, mixer):
        model, ids = build(mixer), tokens(1, 6)
        with torch.no_grad():
            cache = cache_of(model(ids, use_cache=True))
            branch = copy.deepcopy(cache)
            model(tokens(1, 3, seed=8), cache=cache)
            logits = model(ids[:, :2], cache=branch).logits
        assert_close(logits, model(torch.cat([ids, ids[:, :2]], 1)).logits[:, 6:], DTYPE)

    def test_rows_of_a_cache_can_be_repeated_and_selected(self, mixer):
        model, ids = build(mixer), tokens(2, 6)
        with torch.no_grad():
            cache = cache_of(model(ids, use_cache=True))
            cache.batch_repeat_interleave(2)
            cache.reorder_cache(torch.tensor([3, 0, 1, 2]))
            cache.batch_select_indices(torch.tensor([0, 2]))
            logits = model(ids[[1, 0], :2], cache=cache).logits
        assert_close(logits, model(torch.cat([ids, ids[:, :2]], 1)).logits[[1, 0], 6:], DTYPE)

    def test_a_cache_made_in_inference_mode_can_be_used_outside(self, mixer):
        model, ids = build(mixer), tokens(1, 6)
        with torch.inference_mode():
            cache = cache_of(model(ids[:, :3], use_cache=True))
            model(ids[:, 3:4], cache=cache)
        with torch.no_grad():
            logits = [model(ids[:, t : t + 1], cache=cache).logits for t in (4, 5)]
        assert_close(torch.cat(logits, 1), model(ids).logits[:, 4:], DTYPE)

    @pytest.mark.parametrize("static", [False, True])
    def test_a_reset_cache_is_a_fresh_one(self, mixer, static):
        model, ids = build(mixer), tokens(2, 6)
        cache = FastWeightCache(model.config, static=static, max_cache_len=10)
        with torch.no_grad():
            model(tokens(2, 4, seed=1), cache=cache)
            cache.reset()
            assert cache.is_empty
            assert cache.get_seq_length() == 0
            logits = model(ids, cache=cache).logits
        assert_close(logits, model(ids).logits, DTYPE)
        assert cache.get_seq_length() == 6

    def test_assisted_decoding_is_refused(self, mixer):
        model, ids = build(mixer), tokens(1, 6)
        for options in ({"assistant_model": model}, {"prompt_lookup_num_tokens": 2}):
            with pytest.raises(ValueError, match="assisted generation is not supported"):
                greedy(model, ids, **options)


@pytest.mark.parametrize("mixer", [*MEMORIES, "hybrid"])
def test_a_memory_cannot_be_cropped(mixer):
    model = build(mixer)
    cache = cache_of(model(tokens(1, 6), use_cache=True))
    assert not cache.is_croppable
    before = [part.clone() for part in cache.tensors()]
    with pytest.raises(ValueError, match="crop: got -1"):
        cache.crop(-1)
    assert all(torch.equal(a, b) for a, b in zip(cache.tensors(), before, strict=True))


@pytest.mark.parametrize("mixer", MEMORIES)
def test_a_memory_has_a_fixed_size(mixer):
    model = build(mixer)
    sizes = {cache_of(model(tokens(1, n), use_cache=True)).nbytes for n in (3, 90)}
    assert len(sizes) == 1
    assert sizes.pop() > 0


@pytest.mark.parametrize("mixer", EVERY)
class TestPacking:
    bounds = (0, 4, 5, 12)
    positions = torch.tensor([[0, 1, 2, 3, 0, 0, 1, 2, 3, 4, 5, 6]])

    def test_packed_equals_separate(self, mixer):
        model, ids, bounds = build(mixer), tokens(1, 12), torch.tensor(self.bounds)
        expected = torch.cat([model(ids[:, a:b]).logits for a, b in pairwise(self.bounds)], dim=1)
        for arguments in (
            {"cu_seq_lens_q": bounds.int()},
            {"position_ids": self.positions},
            {"position_ids": self.positions, "attention_mask": torch.ones(1, 12)},
            {"cu_seqlens": bounds, "attention_mask": torch.ones(1, 12)},
            {"cu_seqlens": bounds},
        ):
            logits = model(ids, **arguments).logits
            assert_close(logits, expected, DTYPE, name=", ".join(arguments))
        check_gradients(model, (logits * weights(logits)).sum(), (expected * weights(logits)).sum())

    def test_loss_asks_for_no_first_token(self, mixer):
        model, ids, bounds = build(mixer), tokens(1, 12), torch.tensor(self.bounds)
        totals = [model(ids[:, a:b], labels=ids[:, a:b]).loss * (b - a - 1) for a, b in ((0, 4), (5, 12))]
        expected = sum(totals) / (3 + 6)
        for arguments in ({"cu_seqlens": bounds}, {"cu_seq_lens_q": bounds}, {"position_ids": self.positions}):
            assert model(ids, labels=ids, **arguments).loss.item() == pytest.approx(expected.item(), rel=1e-5)

    def test_the_flattening_collator_of_transformers_fits(self, mixer):
        model, documents = build(mixer), [tokens(n, seed=n) for n in (4, 1, 7)]
        collator = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
        batch = collator([{"input_ids": document.tolist()} for document in documents])
        output = model(**batch)
        logits = [model(document[None]).logits[0] for document in documents]
        assert_close(output.logits[0], torch.cat(logits), DTYPE)
        losses = [F.cross_entropy(l[:-1], d[1:], reduction="sum") for l, d in zip(logits, documents, strict=True)]
        assert output.loss.item() == pytest.approx(sum(losses).item() / 9, rel=1e-5)

    def test_masked_tokens_inside_packed_documents_are_absent(self, mixer):
        model, ids, mask = build(mixer), tokens(1, 12), torch.ones(1, 12, dtype=torch.bool)
        mask[0, [0, 3, 7]] = False
        logits = model(ids, attention_mask=mask, cu_seqlens=torch.tensor(self.bounds)).logits
        for a, b in pairwise(self.bounds):
            keep = mask[0, a:b]
            assert_close(logits[:, a:b][:, keep], model(ids[:, a:b][:, keep]).logits, DTYPE)


@pytest.mark.parametrize("mixer", MEMORIES)
def test_packed_prompts_can_be_continued_as_a_batch(mixer):
    model, ids = build(mixer), tokens(1, 12)
    with torch.no_grad():
        cache = cache_of(model(ids, cu_seqlens=torch.tensor([0, 4, 12]), use_cache=True))
        logits = model(ids[:, :2].expand(2, 2), cache=cache).logits
    for row, (a, b) in enumerate(((0, 4), (4, 12))):
        whole = model(torch.cat([ids[:, a:b], ids[:, :2]], 1)).logits
        assert_close(logits[row], whole[0, -2:], DTYPE)


@pytest.mark.parametrize("mixer", EVERY)
class TestGradients:
    def test_gradient_checkpointing_changes_nothing(self, mixer):
        model, ids = build(mixer).train(), tokens(2, 9)
        expected = model(ids, labels=ids).loss
        reference = gradients(model, expected)
        for reentrant in (False, True):
            checkpoint_activations(model, use_reentrant=reentrant)
            if reentrant:
                model.enable_input_require_grads()
            loss = model(ids, labels=ids).loss
            model.zero_grad()
            loss.backward()
            assert loss.item() == expected.item()
            for (name, parameter), other in zip(model.named_parameters(), reference, strict=True):
                assert_close(parameter.grad, other, DTYPE, "gradient", name)

    def test_segments_with_a_carried_cache_equal_the_whole(self, mixer):
        model, ids = build(mixer).train(), tokens(2, 9)
        whole = model(ids).logits
        cache = FastWeightCache(model.config)
        first = model(ids[:, :4], cache=cache).logits
        carried = cache.tensors()
        before = [part.clone() for part in carried]
        pieces = torch.cat([first, feed(model, ids[:, 4:], [1, 3], cache)], dim=1)
        assert all((a == b).all() for a, b in zip(carried, before, strict=True)), "a state that backward needs changed"
        assert_close(pieces, whole, DTYPE)
        check_gradients(model, (pieces * weights(whole)).sum(), (whole * weights(whole)).sum())
        assert all(not part.requires_grad for part in cache.detach().tensors())
