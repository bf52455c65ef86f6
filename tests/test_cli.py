"""The command line: help with examples, one-line errors, and every command doing what it says on a tiny model."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from fastweight import cli

SMALL = [
    "model.hidden_size=16",
    "model.intermediate_size=32",
    "model.num_hidden_layers=1",
    "model.num_attention_heads=2",
    "task.train_widths=[1, 2]",
    "task.test_widths=[3, 4]",
    "task.test_problems=6",
    "training.batch_size=8",
    "training.steps=2",
    "training.checkpoint_every=1",
    "training.validate_every=0",
    "training.device=cpu",
]
SETTINGS = [word for setting in SMALL for word in ("--set", setting)]


def commands() -> Iterator[list[str]]:
    """Every command, as typed."""

    def walk(app: typer.Typer, path: list[str]) -> Iterator[list[str]]:
        for command in app.registered_commands:
            assert command.callback is not None
            yield [*path, command.name or command.callback.__name__]
        for group in app.registered_groups:
            assert group.typer_instance is not None
            yield from walk(group.typer_instance, [*path, str(group.name)])

    yield from walk(cli.app, [])


def run_main(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    """Exit code of `fastweight WORDS`, through the real entry point."""
    monkeypatch.setattr("sys.argv", ["fastweight", *words])
    try:
        cli.main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def test_the_commands_are_these() -> None:
    assert sorted(map(" ".join, commands())) == [
        "bench",
        "demo",
        "eval addition",
        "eval harness",
        "eval ppl",
        "eval task",
        "generate",
        "info",
        "lab",
        "prepare",
        "report",
        "study",
        "train addition",
        "train lm",
        "train task",
    ]


@pytest.mark.parametrize("words", list(commands()), ids=" ".join)
def test_help_has_an_example_that_starts_with_the_command(words: list[str]) -> None:
    result = CliRunner().invoke(cli.app, [*words, "--help"], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    example = re.search(r"Example: fastweight (.*)", result.output)
    assert example is not None
    assert example[1].startswith(" ".join(words))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "addition", "--recipe", "nothing"], "recipe: got 'nothing', expected a YAML file or one of"),
        (["train", "addition", "--mixer", "falcon-9"], "mixer: got 'falcon-9', expected one of falcon-1"),
        (["train", "addition", "--set", "training.stepz=1"], "did you mean training.steps"),
        (["eval", "addition", "missing"], "expected a directory written by `fastweight train`"),
        (["eval", "addition", "missing", "--widths", "a-b"], "--widths: got 'a-b'"),
        (["generate", "missing", "1+1="], "expected a run directory or a checkpoint"),
    ],
)
def test_mistakes_end_in_one_readable_message(
    words: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_main(monkeypatch, *words) == 2
    said = capsys.readouterr()
    assert message in " ".join(said.err.split())
    assert "Traceback" not in said.err
    assert said.out == ""
    assert list(tmp_path.iterdir()) == []  # nothing was begun


def test_a_place_that_cannot_be_written_ends_in_one_readable_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    assert (
        run_main(monkeypatch, "train", "addition", "--recipe", "addition-tiny", "--out", str(tmp_path / "file/x")) == 2
    )
    said = capsys.readouterr().err
    assert "Error: [Errno 20] Not a directory" in " ".join(said.split())
    assert "Traceback" not in said


def test_a_missing_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert run_main(monkeypatch, "train", "addition", "--out", str(tmp_path)) == 2
    assert 'training needs accelerate, which is not installed: pip install "fastweight[train]"' in " ".join(
        capsys.readouterr().err.split()
    )
    assert run_main(monkeypatch, "eval", "addition", str(tmp_path)) == 2
    assert "matplotlib" in capsys.readouterr().err


def test_an_interruption_says_how_to_go_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def interrupted(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("fastweight.training.train", interrupted)
    assert run_main(monkeypatch, "train", "addition", "--out", str(tmp_path), *SETTINGS) == 130
    assert "goes on from the last complete checkpoint" in capsys.readouterr().err


def test_train_then_generate(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_main(monkeypatch, "train", "addition", "--mixer", "falcon-1a", *SETTINGS) == 0
    checkpoint = capsys.readouterr().out.strip()
    assert checkpoint == "runs/addition-tiny/falcon-1a/checkpoint-2"
    assert run_main(monkeypatch, "generate", "runs/addition-tiny/falcon-1a", "12+34=", "9+9=") == 0
    first, second = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"12\+34=[\d+=_]{3}  \((right|wrong, 640 is right)\)", first)
    assert re.fullmatch(r"9\+9=[\d+=_]{2}  \((right|wrong, 81 is right)\)", second)


def test_demo_trains_two_models_reports_and_does_not_train_twice(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out, threads = tmp_path / "demo", torch.get_num_threads()
    assert run_main(monkeypatch, "demo", "--out", str(out), *SETTINGS) == 0
    said = capsys.readouterr()
    assert "falcon-3a" in said.out
    assert "transformer" in said.out
    assert f"png  {out / 'addition.png'}" in said.out
    report = json.loads((out / "addition.json").read_text())
    assert [model["mixer"] for model in report["models"]] == ["falcon-3a", "transformer"]
    assert said.out.splitlines()[-1] == report["verdict"]
    assert "trained already" not in said.err
    assert run_main(monkeypatch, "demo", "--out", str(out), *SETTINGS) == 0
    again = capsys.readouterr()
    assert again.err.count("trained already") == 2
    assert again.out == said.out
    torch.set_num_threads(threads)
    assert run_main(monkeypatch, "eval", "addition", str(out / "transformer"), "--out", str(tmp_path / "one")) == 0
    assert "transformer" in (tmp_path / "one" / "addition.md").read_text()


def test_bench_passes_its_options_on(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[list[str], Path]] = []

    def call(words: list[str], cwd: Path) -> int:
        calls.append((words, cwd))
        return 3

    monkeypatch.setattr("subprocess.call", call)
    assert run_main(monkeypatch, "bench", "--quick", "--only", "falcon-1") == 3
    ((words, cwd),) = calls
    assert words[1:] == ["-m", "benchmarks.cpu", "--quick", "--only", "falcon-1"]
    assert (cwd / "benchmarks" / "cpu.py").is_file()
    monkeypatch.setattr("fastweight.cli.machine.__file__", "/nowhere/fastweight/cli/machine.py")
    assert run_main(monkeypatch, "bench") == 2
    assert len(calls) == 1


def test_info_names_what_there_is(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_main(monkeypatch, "info") == 0
    said = capsys.readouterr().out
    assert "falcon-3a" in said
    assert "addition-tiny" in said
