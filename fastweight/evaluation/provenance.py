"""Where and by what a result was made: command, device, versions, commit, date; plain text for JSON and tables."""

import os
import platform
import subprocess
import time
from pathlib import Path

import torch


def made_by(command: str, on_cpu: bool = False) -> dict[str, str]:
    """What stands beside every result; `on_cpu`: accelerators were left alone."""
    devices = [] if on_cpu else [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "command": command,
        "device": ", ".join(devices) or f"CPU ({platform.machine()}), {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def commit() -> str:
    """The short commit of the checkout that this package runs from; of a copy without its history, what
    FASTWEIGHT_COMMIT says, else "unknown"."""
    folder = Path(__file__).resolve().parents[2]
    try:
        asked = ["git", "-C", str(folder), "rev-parse", "--short", "HEAD"]
        return subprocess.run(asked, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return os.environ.get("FASTWEIGHT_COMMIT", "unknown")
