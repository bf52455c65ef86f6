"""Files that are whole or absent, whenever the process that writes them is killed."""

import json
import os
from pathlib import Path
from typing import Any


def write_text(path: Path, text: str) -> None:
    """Write text so that a reader sees the old file or the new one, never half of one."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def write_json(path: Path, value: Any) -> None:
    """The same for JSON."""
    write_text(path, json.dumps(value, indent=2))
