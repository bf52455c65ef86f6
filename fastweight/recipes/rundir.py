"""Which checkpoint of a run directory can be trusted, and whether a run may go on from it.

A checkpoint is complete when its manifest, written last and by renaming, lists every file with its size and all sizes
still hold. Traps this exists for: the Trainer takes the highest number whatever its state, crashes on a truncated file
and silently starts a fresh optimizer when optimizer.pt is missing; it only warns, or says nothing, when the batch, the
number of processes or the length of the schedule has changed.
"""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fastweight.files import write_json
from fastweight.recipes.loader import build_run
from fastweight.recipes.schema import to_dict

MANIFEST = "complete.json"
RUN_RECORD = "run.json"
METRICS = "metrics.jsonl"
SET_ASIDE = "incomplete-"

# Settings that change neither the data, nor the model, nor the course of the optimizer.
FREE_SETTINGS = (
    "run.name",
    "run.about",
    "run.training.log_every",
    "run.training.checkpoint_every",
    "run.training.keep_checkpoints",
    "run.training.validate_every",
    "run.task.test_widths",
    "run.task.test_sizes",
    "run.task.test_problems",
    "run.task.validation_problems",
    "run.task.test_seed",
    "run.task.data",  # the fingerprint of what is in it counts, not where it lies
    "run.task.validation_sequences",
    "run.engine.workers",
    "run.engine.graphs",  # the same kernels on the same numbers
    "run.engine.report",
)


def mark_complete(checkpoint: Path) -> None:
    """Write the manifest of a checkpoint all of whose files are written."""
    sizes = {
        str(file.relative_to(checkpoint)): file.stat().st_size
        for file in sorted(checkpoint.rglob("*"))
        if file.is_file() and file.name != MANIFEST
    }
    write_json(checkpoint / MANIFEST, {"files": sizes})


def what_is_missing(checkpoint: Path) -> str | None:
    """Why a checkpoint is not complete, in words, or None when it is."""
    try:
        files = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))["files"]
    except FileNotFoundError:
        return f"{MANIFEST} is missing (saving was cut short)"
    except (ValueError, KeyError, TypeError):
        return f"{MANIFEST} cannot be read"
    for name, size in files.items():
        file = checkpoint / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size} bytes, not {size}"
    return None


def checkpoints_of(run_dir: Path) -> list[Path]:
    """All checkpoint directories of a run, newest (most steps) first, complete or not."""
    found = [path for path in run_dir.glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", path.name)]
    return sorted(found, key=steps_of, reverse=True)


def steps_of(checkpoint: Path) -> int:
    """Optimizer steps done at a checkpoint, from its name."""
    return int(checkpoint.name.rsplit("-", 1)[1])


def newest_complete_checkpoint(run_dir: Path, say: Callable[[str], None] = print) -> Path | None:
    """The newest checkpoint that is complete, saying why newer ones were skipped; None when there is none."""
    for checkpoint in checkpoints_of(run_dir):
        reason = what_is_missing(checkpoint)
        if reason is None:
            return checkpoint
        say(f"Skipping {checkpoint}: {reason}.")
    return None


def set_aside_incomplete(run_dir: Path) -> None:
    """Rename incomplete checkpoints, so that they neither count as newest nor push complete ones out of rotation."""
    for checkpoint in checkpoints_of(run_dir):
        if what_is_missing(checkpoint) is not None:
            target, number = checkpoint.with_name(SET_ASIDE + checkpoint.name), 1
            while target.exists():
                target, number = checkpoint.with_name(f"{SET_ASIDE}{checkpoint.name}-{number}"), number + 1
            checkpoint.rename(target)


def changes_between(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Settings that differ between two records, as "key: old -> new", without those that are free to change."""
    before, after = _flat(old), _flat(new)
    return [
        f"{key}: {before.get(key, 'unset')} -> {after.get(key, 'unset')}"
        for key in sorted(before.keys() | after.keys())
        if key not in FREE_SETTINGS and before.get(key, "unset") != after.get(key, "unset")
    ]


def check_same_run(run_dir: Path, record: Mapping[str, Any], allow_changes: bool) -> list[str]:
    """The changes against the run that `run_dir` holds; ValueError lists them unless they are allowed."""
    path = run_dir / RUN_RECORD
    if not path.is_file():
        return []
    before = json.loads(path.read_text(encoding="utf-8"))
    # Settings that the schema has gained since stand at their defaults, which is what that run did.
    changes = changes_between(before | {"run": to_dict(build_run(before["run"]))}, record)
    if changes and not allow_changes:
        listed = "\n  ".join(changes)
        raise ValueError(
            f"run_dir: {run_dir} holds a run with other settings, expected the same to go on from its checkpoint:\n"
            f"  {listed}\nUse another directory, or allow the changes (--allow-changes), which gives up exact resume."
        )
    return changes


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(value, Mapping):
        return {k: v for key, item in value.items() for k, v in _flat(item, f"{prefix}{key}.").items()}
    return {prefix.rstrip("."): value}
