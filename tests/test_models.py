"""The language model with every mixer: what training passes, files, the configuration, bad input.

That nothing depends on how a sequence is cut, padded, packed or cached is in test_invariants.py; PEFT, pipelines,
torch.compile and the rest of the ecosystem are in test_ecosystem.py.
"""

import json

import pytest
import torch
from conftest import assert_close
from safetensors import safe_open
from tiny import DTYPE, EVERY, SIZES, VOCAB, build, cache_of, checkpoint_activations, config_of, tokens
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, DynamicCache

import fastweight as fw
from fastweight.layers.mixers import MIXERS
from fastweight.layers.parts import Gate, RMSNorm, no_weight_decay
from fastweight.models import FastWeightCache, FastWeightConfig, FastWeightForCausalLM, FastWeightModel


@pytest.mark.parametrize("mixer", EVERY)
class TestTraining:
    def test_what_the_trainer_passes(self, mixer):
        model, ids = build(mixer, torch.float32).train(), tokens(2, 9)
        output = model(input_ids=ids, labels=ids, attention_mask=torch.ones_like(ids))
        assert cache_of(output) is None
        summed = model(ids, labels=ids, num_items_in_batch=torch.tensor(4), return_dict=False)
        assert isinstance(summed, tuple)
        assert summed[0].item() == pytest.approx(output.loss.item() * 16 / 4)
        assert len(summed) == 1  # training makes no logits unless they are asked for
        assert output.logits is None
        with_logits = model(ids, labels=ids, output_logits=True)
        assert_close(with_logits.logits, model(ids).logits, torch.float32)
        assert with_logits.loss.item() == pytest.approx(output.loss.item())

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

    def test_the_loss_is_of_all_tokens_whatever_logits_are_kept(self, mixer):
        model, ids = build(mixer), tokens(2, 9)
        expected = model(ids, labels=ids).loss
        for keep in (1, 5, torch.tensor([0, 3])):
            output = model(ids, labels=ids, logits_to_keep=keep)
            assert output.logits.shape[1] == (keep if isinstance(keep, int) else len(keep))
            assert output.loss.item() == pytest.approx(expected.item(), rel=1e-5)  # transformers' own is float32

    def test_learns_a_batch_by_heart(self, mixer):
        torch.manual_seed(0)
        model = FastWeightForCausalLM(config_of(mixer)).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2)
        ids, losses = tokens(4, 8), []
        for _ in range(20):
            loss = model(ids, labels=ids).loss
            losses.append(loss.item())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        assert losses[0] == pytest.approx(2.77, abs=0.1)  # log 16: no opinion yet
        assert losses[-1] < 1.2


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
        for asked in (None, "sdpa", "eager"):  # which there is but one of; scripts name it all the same
            again = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=asked)
            assert_close(again(ids).logits, model(ids).logits, torch.float32)
        assert isinstance(AutoModel.from_pretrained(tmp_path), FastWeightModel)

    def test_half_precision_keeps_float32_gates(self, mixer, tmp_path):
        model = build(mixer, torch.float32)
        model.save_pretrained(tmp_path)
        saved = {name: parameter.clone() for name, parameter in model.named_parameters()}
        for again in (FastWeightForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16), model.to(torch.bfloat16)):
            for name, parameter in again.named_parameters():
                expected = torch.float32 if "_gate." in name or ".skip." in name else torch.bfloat16
                assert parameter.dtype == expected, name
                if expected == torch.float32:
                    assert (parameter == saved[name]).all(), f"{name} was rounded on its way"
            logits = again(tokens(1, 9)).logits
            assert logits.dtype == torch.bfloat16
            assert torch.isfinite(logits).all()
        model.save_pretrained(tmp_path / "half")
        with safe_open(tmp_path / "half" / "model.safetensors", "pt") as file:
            assert "lm_head.weight" not in set(file.keys())
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "half")  # in the dtypes of the file
        assert again.lm_head.weight is again.model.embed_tokens.weight
        for (name, one), other in zip(again.named_parameters(), model.parameters(), strict=True):
            assert one.dtype == other.dtype, name
            assert torch.equal(one, other), name

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
            ({"position_ids": torch.arange(5)}, r"position_ids: got shape \(5,\)"),
            ({"seq_idx": torch.zeros(2, 5)}, "seq_idx: got it alone, expected packed documents by cu_seqlens"),
            ({"cache": DynamicCache()}, "cache: got DynamicCache, expected a FastWeightCache"),
        ],
    )
    def test_is_named(self, arguments, message):
        with pytest.raises(ValueError, match=message):
            self.model(**({"input_ids": tokens(2, 5)} | arguments))

    @pytest.mark.parametrize("other", ["transformer", "hybrid"])
    def test_a_cache_of_other_layers(self, other):
        cache = FastWeightCache(build(other).config)
        with pytest.raises(
            ValueError, match=r"cache: got one of \d layers of other kinds, expected one made for mixers"
        ):
            self.model(tokens(1, 5), cache=cache)

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
