"""What the guides show works: their Python blocks run, in order, and so do their commands, on a small text.

Commands in a console block need downloads, and are the business of test_harness.py.
"""

import re
import shlex
from pathlib import Path

import pytest
import torch
from test_cli import run_main
from texts import byte_tokenizer, documents

GUIDES = Path(__file__).parent.parent / "docs" / "guides"
BLOCK = re.compile(r"^```(python|bash)\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)
# What makes a training run one of a second; other commands run as they stand.
SMALL = {
    "train lm": [
        "model.hidden_size=16",
        "model.intermediate_size=32",
        "model.num_hidden_layers=1",
        "task.sequence_length=32",
        "task.validation_sequences=2",
        "training.steps=2",
        "training.checkpoint_every=1",
        "training.validate_every=0",
        "training.device=cpu",
    ]
}


def guides():
    return sorted(path for path in GUIDES.glob("*.md") if path.name != "README.md")


def blocks(path):
    return BLOCK.findall(path.read_text(encoding="utf-8"))


def run_command(line, monkeypatch):
    program, *words = shlex.split(line, comments=True)
    assert program == "fastweight", f"only our own commands are run here: {line}"
    settings = SMALL.get(" ".join(words[:2]), [])
    assert run_main(monkeypatch, *words, *(word for setting in settings for word in ("--set", setting))) == 0, line


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")  # PEFT asks under the old name
@pytest.mark.parametrize("path", guides(), ids=lambda path: path.stem)
def test_blocks_run(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("texts").mkdir()
    for i, text in enumerate(documents(60)):
        Path(f"texts/{i}.txt").write_text(text, encoding="utf-8")
    byte_tokenizer(Path("tokenizer.json"))
    threads, names = torch.get_num_threads(), {"__name__": "guide"}
    found = blocks(path)
    assert found, "a guide without an example"
    for kind, code in found:
        if kind == "python":
            exec(compile(code, path.name, "exec"), names)
        else:
            for line in code.replace("\\\n", " ").splitlines():
                if line.strip() and not line.startswith("#"):
                    run_command(line, monkeypatch)
    torch.set_num_threads(threads)


def test_the_index_lists_every_guide():
    index = (GUIDES / "README.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"\]\(([a-z-]+\.md)\)", index))
    assert listed == {path.name for path in guides()}
