"""Named, complete configurations: a YAML file each, read into one `Run`."""

from fastweight.recipes.loader import load_recipe, recipe_names
from fastweight.recipes.schema import AdditionTask, Engine, Optimizer, Run, TextTask, Training, to_dict
from fastweight.recipes.synthetic import DrawnTask, RecallTask, TrackingTask

__all__ = [
    "AdditionTask",
    "DrawnTask",
    "Engine",
    "Optimizer",
    "RecallTask",
    "Run",
    "TextTask",
    "TrackingTask",
    "Training",
    "load_recipe",
    "recipe_names",
    "to_dict",
]
