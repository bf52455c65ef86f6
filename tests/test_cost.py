"""Costs against what torch itself counts and holds, and the sizes of the named recipes.

The judge of the memory's FLOP is the recurrence of one token written as matrix products here; that of attention is
torch's own count for one query over cached keys. Traps: FlopCounterMode sees matrix products only, and the recurrent
form of the memory has none, so a model's single token counts its matrices alone; it knows attention on a CPU only
through the plain (MATH) kernel.
"""

from pathlib import Path

import pytest
import torch
import yaml
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from fastweight import cli
from fastweight.layers.memory_mixer import MemoryMixer
from fastweight.layers.mixers import MIXERS
from fastweight.models import FastWeightCache, FastWeightConfig, FastWeightForCausalLM
from fastweight.models.cost import flops_per_token, meta_model, num_parameters, state_bytes
from fastweight.recipes import load_recipe
from fastweight.training.model import config_of as config_of_run

SIZES = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
HYBRID = ["falcon-2", "transformer"]
EVERY = [*MIXERS, "hybrid"]


def config_of(mixer, **options) -> FastWeightConfig:
    return FastWeightConfig(mixer=HYBRID if mixer == "hybrid" else mixer, **(SIZES | options))


def count(function) -> int:
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


def memory_flops(mixer) -> int:
    """One token of every head: read, and for every pair of the window a residual (regression only) and a write."""
    S, x = torch.ones(mixer.key_dim, mixer.value_dim), torch.ones(mixer.key_dim, 1)

    def token():
        for _ in range(mixer.num_heads):
            for _ in range(mixer.rule.window):
                residual = torch.mm(S.T, x) if mixer.rule.objective == "regression" else x.new_ones(len(S.T), 1)
                torch.mm(x, residual.T)
            torch.mm(S.T, x)

    return count(token)


@pytest.mark.parametrize("mixer", EVERY)
@pytest.mark.parametrize("widths", [{}, {"key_dim": 4, "value_dim": 6}])
def test_decoding_flops_are_those_that_torch_counts(mixer, widths):
    config, seen = config_of(mixer, **widths), 7
    model, cache = FastWeightForCausalLM(config).eval(), FastWeightCache(config)
    with torch.no_grad():
        model(torch.zeros(1, seen - 1, dtype=torch.long), cache=cache)
    counted = count(lambda: model(torch.zeros(1, 1, dtype=torch.long), cache=cache))
    counted += sum(memory_flops(b.mixer) for b in model.model.layers if isinstance(b.mixer, MemoryMixer))
    assert flops_per_token(config, seen, training=False) == counted


@pytest.mark.parametrize("mixer", EVERY)
def test_training_is_three_times_the_mean_forward(mixer):
    config = config_of(mixer)
    each = [flops_per_token(config, seen, training=False) for seen in range(1, 10)]
    assert flops_per_token(config, 9) == pytest.approx(3 * sum(each) / 9)


def test_training_flops_are_those_that_torch_counts_forward_and_backward():
    """No memory, so no form to depend on; torch computes the whole square of scores, the invisible half included."""
    config, T = config_of("transformer"), 8
    model, ids = FastWeightForCausalLM(config), torch.zeros(1, T, dtype=torch.long)
    counted = count(lambda: model(ids).logits.sum().backward())
    invisible = 3 * sum(b.mixer.core_flops(T) - b.mixer.core_flops((T + 1) / 2) for b in model.model.layers)
    assert (flops_per_token(config, T) + invisible) * T == counted


@pytest.mark.parametrize("mixer", EVERY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"num_key_heads": 1, "key_dim": 4, "value_dim": 6, "conv_width": 3}])
def test_state_bytes_are_those_of_a_cache(mixer, dtype, options):
    config = config_of(mixer, **options)
    model = FastWeightForCausalLM(config).to(dtype).eval()
    cache = FastWeightCache(config)
    with torch.no_grad():
        model(torch.zeros(1, 5, dtype=torch.long), cache=cache)
    assert state_bytes(config, 5, dtype) == cache.nbytes


@pytest.mark.parametrize("tied", [True, False])
def test_parameters_with_and_without_embeddings(tied):
    config = config_of("falcon-1", tie_word_embeddings=tied)
    model = FastWeightForCausalLM(config)
    assert num_parameters(model) == sum({p.data_ptr(): p.numel() for p in model.parameters()}.values())
    assert num_parameters(model) - num_parameters(model, embeddings=False) == 40 * 16 * (1 if tied else 2)


PAPER_SIZES = [
    "transformer",
    "retnet",
    "mamba2",
    "deltanet",
    "gated-deltanet",
    *("falcon-1.3", "falcon-1a.1", "falcon-1a.2", "falcon-1a.3", "falcon-3a.3"),  # scored by the paper
    *("falcon-2.3", "falcon-2a.3", "falcon-3.3"),  # defined by the paper
]


@pytest.mark.parametrize("name", PAPER_SIZES)
def test_named_recipes_have_the_papers_size_and_setting(name):
    run = load_recipe(name)
    config = config_of_run(run)
    assert 123.5e6 <= num_parameters(meta_model(config)) <= 130e6
    assert (config.vocab_size, config.tie_word_embeddings) == (50_257, True)
    assert config.mixer == name.rpartition(".")[0] or config.mixer == name
    task, optimizer, training = run.task, run.optimizer, run.training
    assert (task.sequence_length, training.batch_size, training.steps, training.precision) == (
        1024,
        480,
        100_000,
        "bf16",
    )
    assert (optimizer.learning_rate, optimizer.warmup_steps, optimizer.betas) == (1e-3, 2000, (0.9, 0.95))
    assert (optimizer.weight_decay, optimizer.clip, optimizer.base_width) == (0.1, 1.0, 768)


def test_the_table_of_recipes_is_what_is_counted():
    page = (Path(__file__).parents[1] / "docs" / "RECIPES.md").read_text(encoding="utf-8")
    page = page.split("## The paper's sizes")[1].split("\n## ")[0]
    rows = {
        name: cells
        for name, *cells in (map(str.strip, line.split("|")[1:-1]) for line in page.splitlines() if "| `" in line)
    }
    assert sorted(rows) == sorted(f"`{name}`" for name in PAPER_SIZES)
    for name in PAPER_SIZES:
        config = config_of_run(load_recipe(name))
        model, H = meta_model(config), config.num_attention_heads
        assert rows[f"`{name}`"] == [
            f"{num_parameters(model) / 1e6:.1f}M",
            f"{num_parameters(model, embeddings=False) / 1e6:.1f}M",
            str(config.num_hidden_layers),
            f"{H} x {config.key_dim or config.hidden_size // H}",
            str(config.intermediate_size or "none"),
            f"{state_bytes(config, 1024) / 1e6:.1f} MB",
            f"{flops_per_token(config, 1024) / 1e6:.0f}M",
            f"{flops_per_token(config, 1024, training=False) / 1e6:.0f}M",
        ], name


@pytest.mark.parametrize("pairing", ["next-latent", "same-step"])
@pytest.mark.parametrize("timing", ["read-after-write", "read-before-write"])
def test_the_four_cells_are_two_words_apart(pairing, timing):
    config = config_of_run(load_recipe("falcon-1.3", [f"model.pairing={pairing}", f"model.timing={timing}"]))
    rule = meta_model(config).model.layers[0].mixer.rule
    assert (rule.pairing, rule.timing, rule.step) == (pairing, timing, "direct")


def test_info_tells_the_cost_and_every_setting(capsys, monkeypatch):
    monkeypatch.setattr(
        "sys.argv", ["fastweight", "info", "transformer", "--set", "model.hidden_size=96", "--mixer", "falcon-1a.2"]
    )
    cli.app(standalone_mode=False)
    printed = capsys.readouterr().out
    config = config_of_run(load_recipe("transformer", ["model.hidden_size=96", "model.mixer=falcon-1a.2"]))
    model = meta_model(config)
    assert f"{num_parameters(model):,}, {num_parameters(model, embeddings=False):,} without embeddings" in printed
    assert f"{state_bytes(config, 1024):,} bytes a sequence after 1,024 tokens, however many tokens" in printed
    assert f"{flops_per_token(config, 1024):.4g} FLOP per token in sequences of 1,024" in printed
    settings = yaml.safe_load(printed.partition("\n\n")[2])
    assert settings["model"]["mixer"] == "falcon-1a"
    assert all(settings["model"][name] == getattr(config, name) for name in settings["model"])
    assert len(settings["model"]) > 30
    assert settings["training"]["steps"] == 100_000


def test_info_of_a_growing_state_and_of_no_recipe(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["fastweight", "info", "addition-tiny", "--mixer", "transformer"])
    cli.app(standalone_mode=False)
    assert "18,432 bytes a sequence after 12 tokens, 1,536 more for each token" in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", ["fastweight", "info", "--mixer", "transformer"])
    with pytest.raises(ValueError, match="info: got --mixer or --set without a recipe"):
        cli.app(standalone_mode=False)
