"""What a memory remembers: streams of key-value pairs through every rule, without any training."""

from fastweight.lab.experiments import Settings, run_lab
from fastweight.lab.report import write_lab

__all__ = ["Settings", "run_lab", "write_lab"]
