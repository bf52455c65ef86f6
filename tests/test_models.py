"""The language model with every mixer: generation, padding, packing, caches, files, training, bad input.

Models are tiny and in float64 where two ways of computing are compared, so that greedy choices cannot flip by rounding.
Traps: parameters are moved off their starting points (symmetric gates hide mistakes); comparisons of gradients go
through every parameter of the model.
"""

import copy
import json
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from conftest import assert_close
from safetensors import safe_open
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, DataCollatorWithFlattening, DynamicCache

import fastweight as fw
from fastweight.layers.mixers import MIXERS
from fastweight.layers.parts import Gate, RMSNorm, no_weight_decay
from fastweight.models import FastWeightCache, FastWeightConfig, FastWeightForCausalLM, FastWeightModel
from fastweight.models.cache import CACHE_NAME

DTYPE = torch.float64
VOCAB = 16
HYBRID = ["falcon-3", "transformer"]
EVERY = [*MIXERS, "hybrid"]
MEMORIES = [name for name in MIXERS if MIXERS[name].memory == "state"]
SIZES = {"vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}


def build(mixer="falcon-1", dtype=DTYPE, **options) -> FastWeightForCausalLM:
    """A tiny model in evaluation mode, matrices drawn with a seed, vectors moved off their starting points."""
    config = FastWeightConfig(mixer=HYBRID if mixer == "hybrid" else mixer, **(SIZES | options))
    model = FastWeightForCausalLM(config).to(dtype)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = 0.2 * torch.randn(parameter.shape, dtype=parameter.dtype, generator=generator)
            parameter.copy_(noise if parameter.ndim > 1 else parameter + noise)
    return model.eval()


def tokens(*shape, seed=0):
    return torch.randint(1, VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def weights(logits):
    return torch.randn(logits.shape, dtype=DTYPE, generator=torch.Generator().manual_seed(5))


def gradients(model, total):
    return torch.autograd.grad(total, list(model.parameters()))


def check_gradients(model, total, expected_total):
    names = [name for name, _ in model.named_parameters()]
    for name, one, other in zip(names, gradients(model, total), gradients(model, expected_total), strict=True):
        assert_close(one, other, DTYPE, "gradient", name)


def cache_of(output):
    return output.get(CACHE_NAME)


def checkpoint_activations(model, **options):
    """Gradient checkpointing under the name that this version of transformers gives it."""
    newer = getattr(model, "activation_checkpointing_enable", None)
    (newer or model.gradient_checkpointing_enable)(options)


def greedy(model, ids, **options):
    return model.generate(ids, max_new_tokens=options.pop("max_new_tokens", 12), do_sample=False, **options)


@pytest.mark.parametrize("mixer", EVERY)
class TestGeneration:
    def test_cached_greedy_equals_uncached(self, mixer):
        model = build(mixer)
        for length in (1, 5, 64, 100):
            ids = tokens(1, length)
            cached = greedy(model, ids, max_new_tokens=50)
            with torch.no_grad():
                choices = model(cached, use_cache=False).logits.argmax(-1)
            assert (choices[:, length - 1 : -1] == cached[:, length:]).all()
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

    @pytest.mark.parametrize("cuts", [[1], [6], [11], [2, 3, 9], list(range(1, 12))])
    def test_split_prefill_equals_full_forward(self, mixer, cuts):
        model, ids = build(mixer), tokens(2, 12)
        mask = torch.ones(2, 12, dtype=torch.long)
        mask[0, :2] = mask[1, 7] = 0
        full = model(ids, attention_mask=mask).logits
        cache, pieces = FastWeightCache(model.config), []
        with torch.no_grad():
            for start, end in pairwise([0, *cuts, 12]):
                output = model(ids[:, start:end], attention_mask=mask[:, :end], past_key_values=cache, use_cache=True)
                assert cache_of(output) is cache
                pieces.append(output.logits)
        keep = mask.bool()
        assert_close(torch.cat(pieces, dim=1)[keep], full[keep], DTYPE)
        assert cache.get_seq_length() == 12

    def test_beams_and_samples(self, mixer):
        model, ids = build(mixer), tokens(2, 5)
        beams = greedy(model, ids, num_beams=4, num_return_sequences=2)
        assert (beams == greedy(model, ids, num_beams=4, num_return_sequences=2, use_cache=False)).all()
        assert greedy(model, ids, num_beams=1).shape == (2, 17)
        several = model.generate(ids, max_new_tokens=4, do_sample=True, num_return_sequences=3)
        assert several.shape == (6, 9)

    def test_continuing_from_a_returned_cache(self, mixer):
        model, ids = build(mixer), tokens(1, 6)
        first = greedy(model, ids, return_dict_in_generate=True)
        more = greedy(model, first.sequences, **{CACHE_NAME: cache_of(first)})
        assert (more == greedy(model, ids, max_new_tokens=24)).all()

    def test_chunked_prefill_and_embeddings(self, mixer):
        model, ids = build(mixer), tokens(2, 8)
        expected = greedy(model, ids)
        assert (greedy(model, ids, prefill_chunk_size=3) == expected).all()
        if mixer in MEMORIES:
            assert (greedy(model, ids, cache_implementation="static") == expected).all()
        embeddings = model.get_input_embeddings()(ids)
        assert (greedy(model, None, inputs_embeds=embeddings) == expected[:, 8:]).all()

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

    def test_a_reset_cache_is_a_fresh_one(self, mixer):
        model, ids = build(mixer), tokens(2, 6)
        if mixer in MEMORIES:  # transformers keeps the length of a key-value layer when it is reset
            with torch.no_grad():
                cache = cache_of(model(tokens(2, 4, seed=1), use_cache=True))
                cache.reset()
                logits = model(ids, cache=cache).logits
            assert_close(logits, model(ids).logits, DTYPE)

    def test_assisted_decoding_is_refused(self, mixer):
        model, ids = build(mixer), tokens(1, 6)
        with pytest.raises(ValueError, match="assisted generation is not supported"):
            greedy(model, ids, assistant_model=model)
        with pytest.raises(ValueError, match="assisted generation is not supported"):
            greedy(model, ids, prompt_lookup_num_tokens=2)


@pytest.mark.parametrize("mixer", [*MEMORIES, "hybrid"])
def test_a_memory_cannot_be_cropped(mixer):
    model = build(mixer)
    cache = cache_of(model(tokens(1, 6), use_cache=True))
    assert not cache.is_croppable
    with pytest.raises(ValueError, match="crop: got -1"):
        cache.crop(-1)


@pytest.mark.parametrize("mixer", MEMORIES)
def test_a_memory_has_a_fixed_size(mixer):
    model = build(mixer)
    sizes = {cache_of(model(tokens(1, n), use_cache=True)).nbytes for n in (3, 90)}
    assert len(sizes) == 1
    assert sizes.pop() > 0


@pytest.mark.parametrize("mixer", EVERY)
class TestPacking:
    bounds = (0, 4, 5, 12)

    def separate(self, model, ids):
        return torch.cat([model(ids[:, a:b]).logits for a, b in pairwise(self.bounds)], dim=1)

    @pytest.mark.parametrize("how", ["cu_seqlens", "cu_seq_lens_q", "position_ids", "collator", "mask too"])
    def test_packed_equals_separate(self, mixer, how):
        model, ids = build(mixer), tokens(1, 12)
        bounds = torch.tensor(self.bounds, dtype=torch.int32)
        positions = torch.cat([torch.arange(b - a) for a, b in pairwise(self.bounds)])[None]
        arguments = {
            "cu_seqlens": {"cu_seqlens": bounds.long()},
            "cu_seq_lens_q": {"cu_seq_lens_q": bounds},
            "position_ids": {"position_ids": positions},
            "collator": {
                "position_ids": positions,
                "cu_seq_lens_q": bounds,
                "cu_seq_lens_k": bounds,
                "max_length_q": 7,
                "max_length_k": 7,
                "seq_idx": positions,
            },
            "mask too": {"cu_seqlens": bounds, "attention_mask": torch.ones(1, 12)},
        }[how]
        logits, expected = model(ids, **arguments).logits, self.separate(model, ids)
        assert_close(logits, expected, DTYPE)
        check_gradients(model, (logits * weights(logits)).sum(), (expected * weights(logits)).sum())

    def test_loss_asks_for_no_first_token(self, mixer):
        model, ids = build(mixer), tokens(1, 12)
        bounds = torch.tensor(self.bounds)
        positions = torch.cat([torch.arange(b - a) for a, b in pairwise(self.bounds)])[None]
        totals = [model(ids[:, a:b], labels=ids[:, a:b]).loss * (b - a - 1) for a, b in ((0, 4), (5, 12))]
        expected = sum(totals) / (3 + 6)
        for arguments in ({"cu_seqlens": bounds}, {"cu_seq_lens_q": bounds}, {"position_ids": positions}):
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
class TestTraining:
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
        carried = [part for layer in cache.layers for part in layer.tensors()]
        before = [part.clone() for part in carried]
        pieces = torch.cat([first, model(ids[:, 4:], cache=cache).logits], dim=1)
        assert all((a == b).all() for a, b in zip(carried, before, strict=True)), "a state that backward needs changed"
        assert_close(pieces, whole, DTYPE)
        check_gradients(model, (pieces * weights(whole)).sum(), (whole * weights(whole)).sum())
        assert all(not part.requires_grad for layer in cache.detach().layers for part in layer.tensors())

    def test_what_the_trainer_passes(self, mixer):
        model, ids = build(mixer, torch.float32).train(), tokens(2, 9)
        output = model(input_ids=ids, labels=ids, attention_mask=torch.ones_like(ids))
        assert cache_of(output) is None
        summed = model(ids, labels=ids, num_items_in_batch=torch.tensor(4), return_dict=False)
        assert isinstance(summed, tuple)
        assert summed[0].item() == pytest.approx(output.loss.item() * 16 / 4)
        assert_close(summed[1], output.logits, torch.float32)

    def test_autocast(self, mixer):
        model, ids = build(mixer, torch.float32).train(), tokens(2, 9)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(ids, labels=ids).loss
        loss.backward()
        assert loss.item() == pytest.approx(model(ids, labels=ids).loss.item(), rel=0.02)
        assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters())

    def test_logits_to_keep(self, mixer):
        model, ids = build(mixer), tokens(2, 9)
        logits = model(ids).logits
        assert logits.shape == (2, 9, VOCAB)
        for keep in (1, 5):
            assert_close(model(ids, logits_to_keep=keep).logits, logits[:, -keep:], DTYPE)
        chosen = torch.tensor([0, 4])
        assert_close(model(ids, logits_to_keep=chosen).logits, logits[:, chosen], DTYPE)

    def test_learns_a_batch_by_heart(self, mixer):
        torch.manual_seed(0)
        model = FastWeightForCausalLM(FastWeightConfig(mixer=HYBRID if mixer == "hybrid" else mixer, **SIZES)).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        ids, losses = tokens(4, 12), []
        for _ in range(40):
            loss = model(ids, labels=ids).loss
            losses.append(loss.item())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        assert losses[0] == pytest.approx(2.77, abs=0.1)  # log 16: no opinion yet
        assert losses[-1] < 1.2


@pytest.mark.parametrize("mixer", ["falcon-1", "transformer"])
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch.compile does it itself
def test_compiles_without_graph_breaks(mixer):
    model, ids = build(mixer, num_hidden_layers=1), tokens(2, 9)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert_close(compiled(ids, use_cache=False).logits, model(ids).logits, DTYPE)


@pytest.mark.parametrize("mixer", EVERY)
class TestFiles:
    @pytest.mark.parametrize("tied", [True, False])
    def test_reload_equals_saved(self, mixer, tied, tmp_path):
        model, ids = build(mixer, tie_word_embeddings=tied), tokens(2, 7)
        model.save_pretrained(tmp_path)
        with safe_open(tmp_path / "model.safetensors", "pt") as file:
            names = set(file.keys())
        assert ("lm_head.weight" in names) is not tied
        again, report = FastWeightForCausalLM.from_pretrained(tmp_path, output_loading_info=True, dtype=DTYPE)
        assert not report["missing_keys"]
        assert not report["unexpected_keys"]
        assert (again.lm_head.weight is again.model.embed_tokens.weight) is tied
        assert all((a == b).all() for a, b in zip(again.parameters(), model.parameters(), strict=True))
        # Not to the bit: loaded tensors lie at other alignments, and matrix products round by them.
        assert_close(again(ids).logits, model(ids).logits, DTYPE)
        again.resize_token_embeddings(VOCAB + 5)
        assert again(ids).logits.shape[-1] == VOCAB + 5
        assert (again.lm_head.weight is again.model.embed_tokens.weight) is tied

    def test_auto_classes_know_it(self, mixer, tmp_path):
        model, ids = build(mixer, torch.float32), tokens(1, 5)
        model.save_pretrained(tmp_path)
        assert isinstance(AutoConfig.from_pretrained(tmp_path), FastWeightConfig)
        assert_close(AutoModelForCausalLM.from_pretrained(tmp_path)(ids).logits, model(ids).logits, torch.float32)
        assert isinstance(AutoModel.from_pretrained(tmp_path), FastWeightModel)

    def test_half_precision_keeps_float32_gates(self, mixer, tmp_path):
        model = build(mixer, torch.float32)
        model.save_pretrained(tmp_path)
        saved = {name: parameter.clone() for name, parameter in model.named_parameters()}
        for again in (FastWeightForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16), model.to(torch.bfloat16)):
            for name, parameter in again.named_parameters():
                expected = torch.float32 if "_gate." in name else torch.bfloat16
                assert parameter.dtype == expected, name
                if expected == torch.float32:
                    assert (parameter == saved[name]).all(), f"{name} was rounded on its way"
            logits = again(tokens(1, 9)).logits
            assert logits.dtype == torch.bfloat16
            assert torch.isfinite(logits).all()

    def test_initialisation_on_the_meta_device(self, mixer):
        config = build(mixer).config
        torch.manual_seed(0)
        direct = FastWeightForCausalLM(config)
        with torch.device("meta"):
            model = FastWeightForCausalLM(config)
        model.to_empty(device="cpu")
        model.init_weights()
        for (name, one), (_, other) in zip(model.named_parameters(), direct.named_parameters(), strict=True):
            assert torch.isfinite(one).all(), name
            if not name.endswith(("gate.bias", "norm.weight")):
                assert one.std().item() == pytest.approx(other.std().item(), rel=6 * one.numel() ** -0.5), name
        for module in model.modules():
            if isinstance(module, Gate):
                assert (module.bias == module.initial_bias()).all()
            elif isinstance(module, RMSNorm):
                assert (module.weight == 1).all()


class TestConfig:
    def test_named_models_of_the_paper_are_expressible(self):
        named = {
            ".1": {"qk_norm": "l2", "step": "normalized"},
            ".2": {"qk_norm": "l2", "step": "direct"},
            ".3": {"qk_norm": "rms", "step": "direct"},
        }
        for options in named.values():
            model = build("falcon-1a", **options)
            mixer = model.model.layers[0].mixer
            assert (mixer.qk_norm, mixer.rule.step) == (options["qk_norm"], options["step"])

    def test_rule_options_reach_the_rule_and_survive_a_file(self, tmp_path):
        options = {
            "window": 7,
            "pairing": "same-step",
            "timing": "read-before-write",
            "ridge": "absolute",
            "step": "direct",
            "step_eps": 1e-3,
            "decay_floor": 1e-2,
        }
        FastWeightConfig(mixer="falcon-3", **SIZES, **options).save_pretrained(tmp_path)
        config = FastWeightConfig.from_pretrained(tmp_path)
        rule = FastWeightForCausalLM(config).model.layers[1].mixer.rule
        changes = {"eps" if name == "step_eps" else name: value for name, value in options.items()}
        assert rule == fw.RULES["falcon-3"].replace(**changes)
        assert json.loads((tmp_path / "config.json").read_text())["mixer"] == "falcon-3"

    def test_a_window_is_for_the_rules_that_slide(self):
        assert build("falcon-1", window=7).model.layers[0].mixer.rule.window == 1
        assert build("falcon-3a", window=7).model.layers[0].mixer.rule.window == 7
        assert build("falcon-3a").model.layers[0].mixer.rule.window == 4

    def test_layers_may_differ(self):
        config = build("hybrid").config
        assert config.layer_types == ["linear_attention", "full_attention"]
        assert FastWeightConfig(**SIZES).layer_types == ["linear_attention"] * 2

    def test_the_size_of_the_paper(self):
        with torch.device("meta"):
            sizes = {m: FastWeightForCausalLM(FastWeightConfig(mixer=m)).num_parameters() for m in MIXERS}
        assert 123e6 < sizes["transformer"] < 125e6
        assert 130e6 < sizes["falcon-1"] < 132e6

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"mixer": "lstm"}, "mixer: got 'lstm', expected one of .*falcon-1.*transformer"),
            ({"mixer": ["falcon-1"]}, "mixer: got a list of 1"),
            ({"hidden_size": 0}, "hidden_size: got 0"),
            ({"num_attention_heads": 3}, "num_attention_heads: got 3, expected a divisor of hidden_size 16"),
            ({"pairing": "none"}, "rule.pairing: got 'none'"),
            ({"read": "normalized"}, "rule.read"),
        ],
    )
    def test_wrong_fields_are_named(self, options, message):
        with pytest.raises(ValueError, match=message):
            FastWeightConfig(**(SIZES | options))


class TestBadInput:
    model = build("falcon-1")

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"input_ids": None}, "input_ids: got both or neither"),
            ({"attention_mask": torch.ones(2, 3)}, r"attention_mask: got shape \(2, 3\), expected \[2, 5\]"),
            ({"attention_mask": torch.ones(2, 1, 5, 5)}, "attention_mask: got shape"),
            ({"cu_seqlens": torch.tensor([0, 5])}, "cu_seqlens: got a batch of 2"),
            ({"cu_seqlens": torch.tensor([0]), "cu_seq_lens_q": torch.tensor([0])}, "cu_seqlens: got cu_seqlens and"),
            (
                {"position_ids": torch.tensor([[0, 1, 0, 1, 2]] * 2)},
                "position_ids: got several documents in a batch of 2",
            ),
            ({"cache": DynamicCache()}, "cache: got DynamicCache, expected a FastWeightCache"),
        ],
    )
    def test_is_named(self, arguments, message):
        with pytest.raises(ValueError, match=message):
            self.model(**({"input_ids": tokens(2, 5)} | arguments))

    def test_two_caches(self):
        caches = [FastWeightCache(self.model.config) for _ in range(2)]
        with pytest.raises(ValueError, match="cache: got cache and past_key_values"):
            self.model(tokens(1, 5), cache=caches[0], past_key_values=caches[1])

    def test_a_cache_of_another_batch_size(self):
        cache = cache_of(self.model(tokens(1, 5), use_cache=True))
        with pytest.raises(ValueError, match="state: got 1 sequences, expected a LayerState of 3"):
            self.model(tokens(3, 2), cache=cache)

    def test_a_cache_under_gradient_checkpointing(self):
        model = build("falcon-1").train()
        checkpoint_activations(model)
        with pytest.raises(ValueError, match="cache: got one with gradient checkpointing"):
            model(tokens(1, 5), cache=FastWeightCache(model.config))

    def test_packed_documents_with_a_key_value_cache(self):
        with pytest.raises(ValueError, match="cu_seqlens: got packed documents with a key-value state"):
            build("transformer")(tokens(1, 5), cu_seqlens=torch.tensor([0, 2, 5]), use_cache=True)


def test_both_names_of_the_cache_are_one():
    model, ids = build("falcon-3a"), tokens(1, 6)
    expected = model(ids).logits[:, 4:]
    for name in ("cache", "past_key_values"):
        cache = cache_of(model(ids[:, :4], use_cache=True))
        assert_close(model(ids[:, 4:], **{name: cache}).logits, expected, DTYPE)


def test_hidden_states_on_request():
    model, ids = build("falcon-1"), tokens(1, 6)
    states = model(ids, output_hidden_states=True).hidden_states
    assert len(states) == 3
    assert_close(model.lm_head(states[-1]), model(ids).logits, DTYPE)
    assert model(ids).hidden_states is None


def test_names_without_weight_decay():
    model = build("falcon-2")
    names = set(no_weight_decay(model))
    gates = [module for module in model.modules() if isinstance(module, Gate)]
    assert len(gates) == 4
    assert len(names) == 2 * 4 + 2 * 3 + 1
    assert names < {name for name, _ in model.named_parameters()}
    assert "model.norm.weight" in names
    assert "model.layers.1.mixer.lam_gate.bias" in names
    assert not any("proj" in name or "embed" in name for name in names)
