"""Tokens and seconds into rates: tokens/s, model FLOP utilisation, peak memory.

    mfu = tokens/s * FLOP per training token / (devices * peak FLOP/s of one)

The FLOP are those of the model (`models.cost`), without recomputation; the peak is the dense bfloat16 rate of the data
sheet, so 1.0 is out of reach of any program (products alone reach about 0.8 on an H200). Trap: validations and
checkpoints do not count as training time.
"""

import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

# Dense bfloat16 FLOP/s by a part of the device's name, the first that fits.
PEAK_FLOPS = (
    ("GB200", 2.5e15),
    ("B200", 2.25e15),
    ("H200", 989e12),
    ("GH200", 989e12),
    ("H100 PCIe", 756e12),
    ("H100 NVL", 835e12),
    ("H100", 989e12),
    ("H800", 989e12),
    ("H20", 148e12),
    ("A100", 312e12),
    ("A800", 312e12),
    ("L40S", 362e12),
    ("L40", 181e12),
    ("L4", 121e12),
    ("A40", 150e12),
    ("A10", 125e12),
    ("RTX 4090", 165e12),
    ("RTX 3090", 71e12),
    ("MI300X", 1307e12),
    ("MI250", 362e12),
)


def peak_flops(device_name: str) -> float | None:
    """Dense bfloat16 FLOP/s of a device, or None when it is not in the table."""
    return next((rate for part, rate in PEAK_FLOPS if part in device_name), None)


class Meter:
    """Counts one process's tokens, and the seconds since the last reading.

    Args:
        flops_per_token: of training; None leaves `mfu` out.
        peak: FLOP/s of one device; None (a CPU, or an unknown device) leaves `mfu` out.
        num_processes: one device each.
    """

    def __init__(self, flops_per_token: float | None, peak: float | None, num_processes: int = 1) -> None:
        self.flops_per_token, self.peak, self.num_processes = flops_per_token, peak, num_processes
        self.restart(0)

    def restart(self, step: int) -> None:
        """Forget what was counted: the next reading begins here."""
        self.started, self.step, self.tokens = time.monotonic(), step, 0

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Time inside does not count."""
        before = time.monotonic()
        try:
            yield
        finally:
            self.started += time.monotonic() - before

    def read(self, step: int, tokens: int) -> dict[str, Any]:
        """Rates since the last reading, in which `tokens` went through all processes; a new reading begins."""
        seconds = max(time.monotonic() - self.started, 1e-9)
        rate = tokens / seconds
        figures: dict[str, Any] = {
            "steps_per_second": round((step - self.step) / seconds, 3),
            "tokens_per_second": round(rate),
        }
        if self.flops_per_token is not None and self.peak is not None:
            figures["mfu"] = round(rate * self.flops_per_token / (self.peak * self.num_processes), 4)
        figures["peak_memory_gib"] = round(peak_memory() / 2**30, 3)
        self.restart(step)
        return figures


def peak_memory() -> int:
    """Most bytes held so far: by tensors on the GPU in use, else by this process."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def in_words(figures: dict[str, Any]) -> str:
    """Rates for the progress bar; MFU is n/a where there is no peak to compare with."""
    mfu = f"{100 * figures['mfu']:.1f}%" if "mfu" in figures else "n/a"
    return f"{figures['tokens_per_second']:,} tokens/s, MFU {mfu}, {figures['peak_memory_gib']:.1f} GiB"
