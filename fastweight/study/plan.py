"""A study by name: one recipe, arms that change it, seeds; YAML files in `fastweight/recipes/studies`.

    about: one sentence
    recipe: addition-small
    settings: [changes of all arms]
    arms: {label: [changes of this arm]}
    against: label of the arm that others are compared with
    seeds: 5
    scored: validation           of a sweep that chooses settings: the training sizes alone; else the test

Every arm sees the same data with the same seed, so arms are compared seed by seed. Trap: a seed is also that of the
parameters, so two arms of one seed start alike only where their parameters have the same shapes.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from fastweight.recipes import Run, load_recipe

KNOWN = ("about", "recipe", "settings", "arms", "against", "seeds", "scored")
SCORED = ("test", "validation")


@dataclass(frozen=True)
class Study:
    """What is run.

    Fields:
        name, about: for people.
        recipe: that all arms change.
        settings: changes that all arms share.
        arms: changes by label, in the order of tables.
        against: the arm that the others are compared with.
        seeds: how many, from 0.
        scored: "test", or "validation" where settings are chosen: validation problems of the training sizes alone.
    """

    name: str
    about: str
    recipe: str
    arms: dict[str, list[str]]
    against: str
    settings: list[str] = field(default_factory=list)
    seeds: int = 5
    scored: str = "test"

    def __post_init__(self) -> None:
        if not self.arms or self.against not in self.arms:
            raise ValueError(f"study.against: got {self.against!r}, expected one of the arms {', '.join(self.arms)}")
        if self.seeds < 1:
            raise ValueError(f"study.seeds: got {self.seeds}, expected at least 1")
        if self.scored not in SCORED:
            raise ValueError(f"study.scored: got {self.scored!r}, expected one of {', '.join(SCORED)}")

    def run(self, arm: str, seed: int) -> Run:
        """The recipe of one arm and seed; ValueError for settings that the recipe does not know."""
        return load_recipe(self.recipe, [*self.settings, *self.arms[arm], f"training.seed={seed}"])

    @property
    def judged_by(self) -> str:
        """The first measure of drawn problems: of sums whole answers, as in the paper, else single ones."""
        return "exact" if self.recipe.startswith("addition") else "token"

    def told(self) -> dict[str, Any]:
        """Plain data for a report, without where data lies, which says nothing to others."""
        settings = [setting for setting in self.settings if not setting.startswith("task.data=")]
        return {**asdict(self), "settings": settings}

    def members(self) -> list[tuple[str, int]]:
        """All (arm, seed): one seed of every arm before the next, so that a study cut short still compares arms."""
        return [(arm, seed) for seed in range(self.seeds) for arm in self.arms]


def study_names() -> list[str]:
    """Names of the studies that come with the package."""
    folder = resources.files("fastweight.recipes") / "studies"
    return sorted(file.name.removesuffix(".yaml") for file in folder.iterdir() if file.name.endswith(".yaml"))


def load_study(
    name: str,
    settings: Iterable[str] = (),
    seeds: int | None = None,
    only: Iterable[str] = (),
    recipe: str | None = None,
) -> Study:
    """A study by name or YAML file.

    Args:
        settings: on top of its own; ValueError for one that an arm sets too, and so would overrule.
        seeds: instead of its own number.
        only: arms to keep; none: all.
        recipe: instead of its own, the same arms on another task or size; the study is then called NAME-RECIPE.
    """
    if name in study_names():
        text = (resources.files("fastweight.recipes") / "studies" / f"{name}.yaml").read_text(encoding="utf-8")
    elif Path(name).suffix in (".yaml", ".yml") and Path(name).is_file():
        text = Path(name).read_text(encoding="utf-8")
    else:
        raise ValueError(f"study: got {name!r}, expected a YAML file or one of {', '.join(study_names())}")
    raw: dict[str, Any] = yaml.safe_load(text)
    unknown = [key for key in raw if key not in KNOWN]
    if unknown or not {"recipe", "arms"} <= raw.keys():
        raise ValueError(f"study {name}: got {', '.join(raw)}, expected recipe, arms and no key but {', '.join(KNOWN)}")
    arms = {str(label): list(changes or []) for label, changes in raw["arms"].items()}
    chosen = list(only)
    missing = [label for label in chosen if label not in arms]
    if missing:
        raise ValueError(f"--only: got {', '.join(missing)}, expected arms of {', '.join(arms)}")
    arms = {label: changes for label, changes in arms.items() if not chosen or label in chosen}
    settings = list(settings)
    _check_not_overruled(settings, arms)
    against = raw.get("against")
    return Study(
        name=Path(name).stem if recipe is None else f"{Path(name).stem}-{Path(recipe).stem}",
        about=raw.get("about", "")
        if recipe is None
        else f"The arms of {Path(name).stem} on recipe {Path(recipe).stem}.",
        recipe=raw["recipe"] if recipe is None else recipe,
        arms=arms,
        against=against if against in arms else next(iter(arms)),
        settings=_last([*raw.get("settings", []), *settings]),
        seeds=raw.get("seeds", 5) if seeds is None else seeds,
        scored=raw.get("scored", "test"),
    )


def _check_not_overruled(settings: Iterable[str], arms: Mapping[str, Sequence[str]]) -> None:
    for name in map(_name_of, settings):
        if name == "training.seed":
            raise ValueError("--set: got training.seed, which every member has its own of; expected --seeds NUMBER")
        deaf = [label for label, changes in arms.items() if name in map(_name_of, changes)]
        if deaf:
            raise ValueError(
                f"--set: got {name}, which these arms set themselves: {', '.join(deaf)}; expected a setting that no "
                "arm has (--only leaves arms out, a YAML file has arms of your own)"
            )


def _name_of(setting: str) -> str:
    return setting.partition("=")[0]


def _last(settings: Iterable[str]) -> list[str]:
    """One setting of each name: the last, which is the one that counts."""
    return list({_name_of(setting): setting for setting in settings}.values())
