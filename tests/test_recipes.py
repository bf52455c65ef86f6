"""Recipes: every one builds, settings are strict, overrides and ancestors merge as documented."""

import json
from pathlib import Path

import pytest

from fastweight.recipes import AdditionTask, TextTask, load_recipe, recipe_names, to_dict
from fastweight.recipes.loader import build_run
from fastweight.training.model import config_of


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_builds_its_configuration_for_every_mixer(name: str) -> None:
    from fastweight.layers.mixers import MIXERS

    for mixer in MIXERS:
        run = load_recipe(name, [f"model.mixer={mixer}"])
        assert config_of(run).mixer == mixer
        assert run.name == name
        assert run.about
        assert build_run(json.loads(json.dumps(to_dict(run)))) == run  # what run.json holds is the run


def test_overrides_change_what_they_name() -> None:
    run = load_recipe(
        "addition-tiny",
        ["model.hidden_size=32", "optimizer.learning_rate=3e-4", "training.precision=bf16", "task.train_widths=[1, 3]"],
    )
    assert run.model["hidden_size"] == 32
    assert run.optimizer.learning_rate == 3e-4  # YAML calls 3e-4 text
    assert run.training.precision == "bf16"
    assert run.task.train_widths == (1, 3)
    plain = load_recipe("addition-tiny")
    assert run.optimizer.betas == plain.optimizer.betas


@pytest.mark.parametrize(
    ("ending", "norm", "step"), [("1", "l2", "normalized"), ("2", "l2", "direct"), ("3", "rms", "direct")]
)
def test_the_papers_endings_name_settings(ending: str, norm: str, step: str) -> None:
    config = config_of(load_recipe("addition-paper", [f"model.mixer=falcon-1a.{ending}"]))
    assert (config.mixer, config.qk_norm, config.step) == ("falcon-1a", norm, step)
    with pytest.raises(ValueError, match=r"falcon-1a\.4"):
        config_of(load_recipe("addition-paper", ["model.mixer=falcon-1a.4"]))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optimizer.learning_rat=1", "optimizer.learning_rat: unknown setting .did you mean optimizer.learning_rate"),
        ("optimiser.clip=1", "optimiser: unknown setting"),
        ("training.steps=many", "training.steps: got 'many', expected int"),
        ("training.steps=true", "training.steps: got True"),
        ("training.steps=0", "training.steps: got 0"),
        ("training.micro_batch_size=7", "training.micro_batch_size: got 7"),
        ("training.threads=0", "training.threads: got 0"),
        ("training.precision=fp8", "training.precision: got 'fp8', expected one of fp32, bf16"),
        ("training.keep_checkpoints=1", "training.keep_checkpoints"),
        ("task.train_widths=4", "task.train_widths: got 4"),
        ("task.test_widths=[2, 9]", "task.test_widths: got .2, 9., expected widths above"),
        ("optimizer.betas=[0.9, 1.0]", "optimizer.betas"),
        ("optimizer=3", "optimizer: got 3, expected a mapping"),
        ("name.first=x", "'name' is a single value"),
        ("training.steps", "expected KEY=VALUE"),
    ],
)
def test_wrong_settings_are_named(override: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_recipe("addition-tiny", [override])


def test_unknown_recipes_and_model_settings_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="recipe: got 'addition-huge'"):
        load_recipe("addition-huge")
    with pytest.raises(ValueError, match=r"did you mean model\.hidden_size"):
        config_of(load_recipe("addition-tiny", ["model.hiden_size=8"]))
    own = tmp_path / "own.yaml"
    own.write_text("training: {steps: 3}\n")
    assert load_recipe(str(own)).training.steps == 3


# Tasks by kind


def test_the_kind_of_task_decides_its_settings() -> None:
    assert isinstance(build_run({"name": "x"}).task, AdditionTask)
    assert isinstance(
        build_run({"name": "x", "task": {"train_widths": [1, 2], "test_widths": [3, 4]}}).task, AdditionTask
    )
    text = build_run({"name": "x", "task": {"kind": "text", "sequence_length": 64}})
    assert text.task == TextTask(sequence_length=64)
    assert build_run(json.loads(json.dumps(to_dict(text)))) == text


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ({"kind": "texts"}, "task.kind: got 'texts', expected one of addition, text"),
        ({"kind": "text", "train_widths": [1, 2]}, "task.train_widths: unknown setting"),
        ({"sequence_length": 64}, "task.sequence_length: unknown setting"),
        ({"kind": "text", "sequence_length": 1}, "task.sequence_length: got 1"),
        ({"kind": "text", "packing": "dense"}, "task.packing: got 'dense', expected one of contiguous, documents"),
        ({"kind": "text", "validation_sequences": 0}, "task.validation_sequences: got 0"),
        (3, "task: got 3, expected a mapping"),
    ],
)
def test_wrong_settings_of_a_task_are_named(task: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_run({"name": "x", "task": task})


# Recipes on top of recipes


def write(folder: Path, **recipes: str) -> None:
    for name, text in recipes.items():
        (folder / f"{name}.yaml").write_text(text)


def test_a_recipe_is_merged_into_the_one_that_it_extends(tmp_path: Path) -> None:
    write(
        tmp_path,
        root="{name: root, model: {hidden_size: 8, mixer: retnet}, optimizer: {betas: [0.5, 0.6], clip: 2.0}}",
        middle="{extends: root.yaml, about: B., model: {mixer: falcon-1}, optimizer: {betas: [0.1, 0.2]}}",
        leaf="{extends: middle.yaml, model: {num_hidden_layers: 2}}",
    )
    run = load_recipe(str(tmp_path / "leaf.yaml"), ["model.hidden_size=16"])
    assert run.name == "leaf"  # a name is never inherited
    assert run.about == "B."
    assert run.model == {"hidden_size": 16, "mixer": "falcon-1", "num_hidden_layers": 2}
    assert run.optimizer.betas == (0.1, 0.2)
    assert run.optimizer.clip == 2.0


def test_a_recipe_may_extend_one_of_the_package(tmp_path: Path) -> None:
    write(tmp_path, own="{extends: addition-tiny, training: {steps: 3}}")
    run, base = load_recipe(str(tmp_path / "own.yaml")), load_recipe("addition-tiny")
    assert run.training.steps == 3
    assert (run.model, run.task, run.optimizer) == (base.model, base.task, base.optimizer)


@pytest.mark.parametrize("last", ["root", "middle", "leaf"])
def test_circles_are_refused(last: str, tmp_path: Path) -> None:
    write(
        tmp_path,
        root=f"extends: {last}.yaml",
        middle="extends: root.yaml",
        leaf="extends: middle.yaml",
    )
    with pytest.raises(ValueError, match=r"extends: got .* again, expected no circle"):
        load_recipe(str(tmp_path / "leaf.yaml"))


@pytest.mark.parametrize(
    ("value", "message"),
    [("nothing", "recipe: got 'nothing'"), ("[a, b]", "extends: got .'a', 'b'."), ("7", "extends: got 7")],
)
def test_unknown_ancestors_are_refused(value: str, message: str, tmp_path: Path) -> None:
    write(tmp_path, own=f"extends: {value}")
    with pytest.raises(ValueError, match=message):
        load_recipe(str(tmp_path / "own.yaml"))


def test_a_recipe_name_may_contain_dots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, **{"falcon-9.3": "extends: parent-1.5", "parent-1.5": "model: {mixer: falcon-1.3}"})
    monkeypatch.setattr("fastweight.recipes.loader.resources.files", lambda package: tmp_path)
    assert recipe_names() == ["falcon-9.3", "parent-1.5"]
    run = load_recipe("falcon-9.3")
    assert run.name == "falcon-9.3"
    assert run.model == {"mixer": "falcon-1", "qk_norm": "rms", "step": "direct"}
