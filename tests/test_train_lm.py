"""Training language models: exact batches, losses and resume, groups, rates, and the command."""

import json
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from typer.testing import CliRunner

from fastweight import cli
from fastweight.data import Windows, open_shards
from fastweight.evaluation.addition import load_model
from fastweight.recipes import Optimizer, TextTask, rundir
from fastweight.recipes.rundir import METRICS
from fastweight.training import arguments, train
from fastweight.training.groups import parameter_groups
from fastweight.training.material import IGNORE, InOrder, material_of, pack, stack
from fastweight.training.model import build_model, config_of
from fastweight.training.throughput import Meter, in_words, peak_flops
from tests.lm_runs import SETTINGS, VOCAB, run_of, write_data


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("text") / "data")


def quiet() -> Console:
    return Console(quiet=True)


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / METRICS).read_text().splitlines()]


def losses(run_dir: Path) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in metrics(run_dir) if "loss" in line}


def validations(run_dir: Path) -> dict[int, float]:
    return {line["step"]: line["validation"]["loss"] for line in metrics(run_dir) if "validation" in line}


def parameters(checkpoint: Path) -> dict[str, torch.Tensor]:
    return load_model(checkpoint).cpu().state_dict()


def model_for(run) -> Any:
    return build_model(run, config_of(run, VOCAB, 0))


# Batches


def test_steps_see_the_windows_in_order_and_begin_anew(data: Path) -> None:
    shards = open_shards(data, "train")
    windows = Windows(shards, 16, seed=3)
    most = 2 * windows.per_epoch + 3
    items, epochs = InOrder(windows, most), Windows(shards, 16, seed=3, epochs=3)
    assert len(items) == most
    assert all(torch.equal(items[i]["input_ids"], epochs[i]["input_ids"]) for i in range(most))
    assert len(windows) == windows.per_epoch  # the given windows are as they were
    for index in (most, -1):
        with pytest.raises(IndexError):
            items[index]


def test_rows_of_documents_do_not_see_each_other(data: Path, assert_close) -> None:
    """The loss of a packed micro-batch is that of its documents, one by one."""
    run = run_of(data, task={"packing": "documents"})
    model, windows = model_for(run).train(), Windows(open_shards(data, "train"), 16, packing="documents")
    batch = pack([windows[i] for i in range(3)])
    count = int((batch["labels"] != IGNORE).sum())
    packed = model(**batch, num_items_in_batch=1).loss
    bounds, total, predicted = batch["cu_seq_lens_q"].tolist(), 0.0, 0
    assert bounds[0] == 0
    assert bounds[-1] == 48
    for start, stop in pairwise(bounds):
        ids = batch["input_ids"][:, start:stop]
        total = total + model(input_ids=ids, labels=ids, num_items_in_batch=1).loss
        predicted += stop - start - 1
    assert count == predicted  # what the Trainer counts is what is predicted
    assert_close(packed, total, torch.float32)
    rows = stack([windows[i] for i in range(3)])
    assert rows["input_ids"].shape == (3, 16)
    assert bool((rows["labels"][:, 0] == IGNORE).all())


# Losses


def test_the_first_loss_is_the_mean_over_the_tokens_of_the_step(data: Path, tmp_path: Path) -> None:
    run = run_of(data, training={"steps": 1, "log_every": 1})
    last = train(run, tmp_path / "run", console=quiet())
    windows = Windows(open_shards(data, "train"), 16, seed=run.training.seed)
    ids = torch.stack([windows[i]["input_ids"] for i in range(8)])
    logits = model_for(run).eval()(input_ids=ids).logits
    expected = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    assert losses(tmp_path / "run") == {1: pytest.approx(expected.item(), rel=1e-5)}
    held_out = Windows(open_shards(data, "validation"), 16, shuffle=False)
    ids = torch.stack([held_out[i]["input_ids"] for i in range(5)])
    logits = load_model(last).cpu()(input_ids=ids).logits
    expected = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    assert validations(tmp_path / "run") == {1: pytest.approx(expected.item(), rel=1e-5)}


@pytest.mark.parametrize("packing", ["contiguous", "documents"])
def test_accumulation_changes_nothing(packing: str, data: Path, tmp_path: Path, assert_close) -> None:
    """8 x 1 == 4 x 2 == 1 x 8, losses, validations and parameters."""
    found = {}
    for micro in (1, 2, 8):
        settings = {"steps": 3, "log_every": 1, "validate_every": 3, "micro_batch_size": micro}
        run = run_of(data, task={"packing": packing}, training=settings)
        last = train(run, tmp_path / str(micro), console=quiet())
        found[micro] = losses(tmp_path / str(micro)), validations(tmp_path / str(micro)), parameters(last)
    for micro in (1, 2):
        for of_one, of_all in zip(found[micro][:2], found[8][:2], strict=True):
            assert of_one == pytest.approx(of_all, rel=1e-5)
        for name, value in found[8][2].items():
            assert_close(found[micro][2][name], value, torch.float32, "gradient", name)


def test_half_precision_keeps_gates_and_checkpointing_keeps_losses(data: Path, tmp_path: Path) -> None:
    short = {"steps": 3, "log_every": 1, "validate_every": 0}
    train(run_of(data, training=short), tmp_path / "plain", console=quiet())
    again = run_of(data, training=short, engine={"gradient_checkpointing": True})
    train(again, tmp_path / "again", console=quiet())
    assert losses(tmp_path / "again") == pytest.approx(losses(tmp_path / "plain"), rel=1e-6)
    half = run_of(data, training=short | {"precision": "bf16-weights"})
    kinds = {name: value.dtype for name, value in model_for(half).named_parameters()}
    assert {name for name, kind in kinds.items() if kind == torch.float32} == {n for n in kinds if "gate." in n}
    train(half, tmp_path / "half", console=quiet())
    assert losses(tmp_path / "half") == pytest.approx(losses(tmp_path / "plain"), rel=2e-2)


@pytest.mark.filterwarnings("ignore:.*script_method.*:DeprecationWarning")  # torch's own, when a compiler is loaded
def test_compiled_blocks_keep_their_names(data: Path) -> None:
    plain, compiled = model_for(run_of(data)), model_for(run_of(data, engine={"compile": True}))
    assert all(block._compiled_call_impl is not None for block in compiled.model.layers)
    assert all(block._compiled_call_impl is None for block in plain.model.layers)
    assert list(compiled.state_dict()) == list(plain.state_dict())


# Stopping and going on


def test_stopping_early_does_not_change_the_schedule(data: Path, tmp_path: Path) -> None:
    run = run_of(data)
    whole = train(run, tmp_path / "whole", console=quiet())
    said = Console(record=True, width=200, quiet=False, file=(tmp_path / "said").open("w"))
    first = train(run, tmp_path / "cut", max_steps=5, console=said)
    assert "Stopping after step 5 of 8" in said.export_text()
    said.file.close()
    assert first.name == "checkpoint-5"
    assert rundir.what_is_missing(first) is None
    assert train(run, tmp_path / "cut", max_steps=5, console=quiet()) == first  # nothing to do
    last = train(run, tmp_path / "cut", console=quiet())
    expected = parameters(whole)
    assert all(torch.equal(value, expected[name]) for name, value in parameters(last).items())
    rates = {line["step"]: line["learning_rate"] for line in metrics(tmp_path / "whole") if "loss" in line}
    cut = {line["step"]: line["learning_rate"] for line in metrics(tmp_path / "cut") if "loss" in line}
    assert rates.items() <= cut.items()  # one line more, at the checkpoint where it stopped
    with pytest.raises(ValueError, match="max_steps: got 0"):
        train(run, tmp_path / "cut", max_steps=0, console=quiet())


def test_other_data_is_refused_and_moved_data_is_not(data: Path, tmp_path: Path) -> None:
    short = {"steps": 1, "validate_every": 0}
    train(run_of(data, training=short), tmp_path / "run", console=quiet())
    moved = shutil.copytree(data, tmp_path / "moved")
    assert train(run_of(moved, training=short), tmp_path / "run", console=quiet()).name == "checkpoint-1"
    other = write_data(tmp_path / "other", seed=1)
    with pytest.raises(ValueError, match=r"data\.fingerprint: .* -> "):
        train(run_of(other, training=short), tmp_path / "run", console=quiet())
    assert train(run_of(other, training=short), tmp_path / "run", allow_changes=True, console=quiet())


@pytest.fixture(scope="module")
def driven(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of `lm_runs.main`: whole; cut, killed at nine moments; two, by two processes."""
    directory = tmp_path_factory.mktemp("driven")
    write_data(directory / "data")
    root = Path(__file__).parents[1]
    words = [sys.executable, "-m", "tests.lm_runs", str(directory)]
    ended = subprocess.run(words, cwd=root, capture_output=True, text=True, timeout=500, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return directory


def test_a_run_killed_at_any_moment_ends_as_if_it_never_was(driven: Path) -> None:
    assert losses(driven / "cut") == losses(driven / "whole")
    assert validations(driven / "cut") == validations(driven / "whole")
    assert [line["step"] for line in metrics(driven / "cut")] == [line["step"] for line in metrics(driven / "whole")]
    for name in ("checkpoint-6", "checkpoint-8"):
        expected = parameters(driven / "whole" / name)
        assert all(torch.equal(v, expected[k]) for k, v in parameters(driven / "cut" / name).items())
    assert list((driven / "cut").glob("incomplete-*"))  # it was killed while it saved


def test_two_processes_train_as_one(driven: Path, assert_close) -> None:
    assert losses(driven / "two") == pytest.approx(losses(driven / "whole"), rel=1e-5)
    assert validations(driven / "two") == pytest.approx(validations(driven / "whole"), rel=1e-5)
    expected = parameters(driven / "whole" / "checkpoint-8")
    for name, value in parameters(driven / "two" / "checkpoint-8").items():
        assert_close(value, expected[name], torch.float32, "gradient", name)
    assert json.loads((driven / "two" / "run.json").read_text())["processes"] == 2


def test_a_sharded_model_trains_as_a_whole_one(driven: Path) -> None:
    """FSDP2 on two processes: float32 losses, never all logits at once, the same gradients, gates in float32."""
    found = json.loads((driven / "sharded.json").read_text())
    assert found["dtype"] == "torch.float32"
    assert found["chunked"] == 2  # before sharding, and after
    assert found["loss"] == pytest.approx(found["expected"], rel=1e-6)
    assert max(found["gaps"].values()) < 1e-2, found["gaps"]  # each rank rounds its own products to bfloat16
    assert max(gap for name, gap in found["gaps"].items() if "_gate." in name) < 1e-5


# Settings


@pytest.mark.parametrize("mixer", ["falcon-2", "transformer", "mamba2"])
def test_groups_hold_what_they_say(mixer: str, data: Path) -> None:
    model = model_for(run_of(data, model={"mixer": mixer, "tie_word_embeddings": False}))
    names = {id(value): name for name, value in model.named_parameters()}
    groups = parameter_groups(model, Optimizer(learning_rate=0.4, weight_decay=0.1, base_width=4))
    held = [{names[id(value)] for value in group["params"]} for group in groups]
    assert [(group["lr"], group["weight_decay"]) for group in groups] == [(0.4, 0.1), (0.4, 0.0), (0.1, 0.1)]
    plain, free, hidden = held
    assert sorted(name for group in held for name in group) == sorted(names.values())  # each in exactly one
    assert {"model.embed_tokens.weight", "lm_head.weight"} <= plain
    assert plain - {"model.embed_tokens.weight", "lm_head.weight"} == {n for n in names.values() if "conv.weight" in n}
    assert {name for name in names.values() if "norm" in name or "gate." in name or "bias" in name} <= free
    assert any("mlp.down_proj" in name for name in hidden)
    assert all("proj" in name for name in hidden)
    (one, two) = parameter_groups(model, Optimizer(learning_rate=0.4))
    assert (one["lr"], two["lr"]) == (0.4, 0.4)
    assert {names[id(value)] for value in one["params"]} == plain | hidden


def test_what_excludes_each_other_is_refused(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"engine.parallel: got 'fsdp2' on a CPU, where it would silently become DDP"):
        train(run_of(data, engine={"parallel": "fsdp2"}), tmp_path / "a", console=quiet())
    assert not (tmp_path / "a").exists()
    with monkeypatch.context() as patch:
        patch.setattr(arguments, "is_torch_bf16_gpu_available", lambda: False)
        with pytest.raises(ValueError, match=r"training.precision: got 'bf16' on a machine without a GPU that has it"):
            train(run_of(data, training={"precision": "bf16", "device": "auto"}), tmp_path / "a", console=quiet())
        assert not (tmp_path / "a").exists()
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        half = run_of(data, engine={"parallel": "fsdp2"}, training={"precision": "bf16-weights", "device": "auto"})
        with pytest.raises(ValueError, match=r"training.precision: got 'bf16-weights' with engine.parallel 'fsdp2'"):
            arguments._sharding(half)
        sharded = run_of(data, engine={"parallel": "fsdp2"}, training={"device": "auto"})
        assert arguments._sharding(sharded)["fsdp_config"]["version"] == 2
    monkeypatch.setattr(arguments.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"engine.report: got 'wandb', which is not installed"):
        train(run_of(data, engine={"report": "wandb"}), tmp_path / "a", console=quiet())


def test_what_is_missing_is_named(data: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"task.data: got nothing"):
        material_of(run_of(data).__class__("x", task=TextTask()))
    with pytest.raises(ValueError, match=r"model.vocab_size: got 8, expected at least the 24"):
        train(run_of(data, model={"vocab_size": 8}), tmp_path / "a", console=quiet())
    with pytest.raises(ValueError, match=r"expected at most the .* tokens of train"):
        train(run_of(data, task={"sequence_length": 10_000}), tmp_path / "a", console=quiet())


# Rates


def test_the_meter_counts_training_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("fastweight.training.throughput.time.monotonic", lambda: now[0])
    meter = Meter(flops_per_token=50.0, peak=1000.0, num_processes=2)
    meter.restart(4)
    now[0] += 3
    with meter.paused():
        now[0] += 50
    now[0] += 1
    figures = meter.read(6, tokens=80)
    assert (figures["steps_per_second"], figures["tokens_per_second"]) == (0.5, 20)
    assert figures["mfu"] == 0.5  # 20 * 50 / (2 * 1000)
    assert in_words(figures).startswith("20 tokens/s, MFU 50.0%, ")
    now[0] += 2
    assert meter.read(7, tokens=10)["tokens_per_second"] == 5  # counted from the last reading
    now[0] += 2
    unknown = Meter(50.0, None).read(1, 1)
    assert "mfu" not in unknown
    assert "MFU n/a" in in_words(unknown)


def test_devices_are_told_apart() -> None:
    assert peak_flops("NVIDIA H200") == peak_flops("NVIDIA H100 80GB HBM3") == 989e12
    assert peak_flops("NVIDIA H100 PCIe") == 756e12
    assert peak_flops("NVIDIA B200") == 2.25e15
    assert peak_flops("NVIDIA L40S") != peak_flops("NVIDIA L4")
    assert peak_flops("NVIDIA H20") == 148e12
    assert peak_flops("Some CPU") is None


# The command


def test_the_command_trains_reports_and_saves_the_tokenizer(data: Path, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from transformers import AutoTokenizer

    recipe = tmp_path / "mine.yaml"
    recipe.write_text(json.dumps({key: value for key, value in SETTINGS.items() if key not in ("name", "engine")}))
    words = ["train", "lm", "--recipe", str(recipe), "--data", str(data), "--mixer", "falcon-1a.3", "--max-steps", "4"]
    result = CliRunner().invoke(cli.app, [*words, "--out", str(tmp_path / "run"), "--set", "training.log_every=2"])
    assert result.exit_code == 0, result.output
    checkpoint = tmp_path / "run" / "checkpoint-4"
    assert str(checkpoint) in result.output
    assert AutoTokenizer.from_pretrained(checkpoint)("w3").input_ids == [3]
    config = load_model(checkpoint).config
    assert (config.mixer, config.step, config.vocab_size, config.eos_token_id) == ("falcon-1a", "direct", VOCAB, 0)
    line = metrics(tmp_path / "run")[0]
    assert line["tokens_per_second"] > 0
    assert line["peak_memory_gib"] > 0
    assert "mfu" not in line
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    shown = {event.step: event.value for event in events.Scalars("train/loss")}
    assert shown == pytest.approx(losses(tmp_path / "run"))
    assert [event.step for event in events.Scalars("eval/loss")] == [4]
    wrong = CliRunner().invoke(cli.app, ["train", "lm", "--recipe", "addition-tiny"])
    assert isinstance(wrong.exception, ValueError)
    assert "a recipe of the addition task" in str(wrong.exception)
