"""What the README shows works: its Python blocks run, in order, in a fresh interpreter with warnings as errors."""

import os
import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"


def python_blocks() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", README.read_text(), flags=re.MULTILINE | re.DOTALL)


def test_python_blocks_run(tmp_path):
    blocks = python_blocks()
    assert blocks, "the README shows no Python example"
    script = tmp_path / "readme.py"
    script.write_text("\n".join(blocks))
    environment = {**os.environ, "PYTHONPATH": str(README.parent), "CUDA_VISIBLE_DEVICES": ""}
    finished = subprocess.run(
        [sys.executable, "-W", "error", str(script)],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr[-2000:]


def test_commands_exist():
    """Every `make X` that the README names is a target of the Makefile."""
    named = set(re.findall(r"\bmake ([a-z]+)\b", README.read_text()))
    targets = set(re.findall(r"^([a-z]+):", (README.parent / "Makefile").read_text(), flags=re.MULTILINE))
    assert {"demo", "test"} <= named, f"the README names {named}"
    assert named <= targets, f"no such targets: {named - targets}"


def test_tree_names_what_is_there():
    """The README's tree has every package directory."""
    text = README.read_text()
    packages = sorted(path.parent.name for path in (README.parent / "fastweight").glob("*/__init__.py"))
    missing = [name for name in packages if f"{name}/" not in text]
    assert not missing, f"the README's tree does not mention {missing}"
