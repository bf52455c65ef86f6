"""A `Run` into a trained model: transformers.Trainer with complete checkpoints, exact resume and plain metrics."""

from fastweight.recipes.rundir import newest_complete_checkpoint
from fastweight.training.trainer import train

__all__ = ["newest_complete_checkpoint", "train"]
