"""Recipe names or YAML files, with dotted overrides, into a checked `Run`.

`extends: NAME` at the top of a recipe takes another one first: mappings are merged key by key at every depth, anything
else (lists too) is replaced, and the name of the other is not inherited. A YAML file named there is looked for beside
the recipe that names it. Overrides come last.

An unknown key is an error that lists the known ones, wherever it stands; a value of the wrong kind is an error that
names the key. A mixer may carry one of the paper's endings: falcon-1a.1 (l2, beta), .2 (l2, eta), .3 (RMSNorm, eta).
Traps: YAML reads 1e-3 (no dot) as text, so text that is a number is taken as one where a number is expected; a mixer's
ending wins over `qk_norm` and `step` set beside it; `model` keys are checked against FastWeightConfig when the model is
built (a recipe does not know it).
"""

import difflib
import types
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml

from fastweight.recipes.schema import Run

# The paper's tables: how q and k are normalised, and whether the token emits beta (normalised step) or eta (direct).
ENDINGS = {
    "1": {"qk_norm": "l2", "step": "normalized"},
    "2": {"qk_norm": "l2", "step": "direct"},
    "3": {"qk_norm": "rms", "step": "direct"},
}


def recipe_names() -> list[str]:
    """Names of the recipes that come with the package."""
    files = resources.files("fastweight.recipes").iterdir()
    return sorted(Path(file.name).stem for file in files if file.name.endswith(".yaml"))


def load_recipe(name: str, overrides: Iterable[str] = ()) -> Run:
    """A Run from a recipe name or a path to a YAML file, changed by overrides such as "model.hidden_size=64".

    Raises ValueError for an unknown recipe, key or value.
    """
    raw = _with_ancestors(name, None, ())
    raw.setdefault("name", name if name in recipe_names() else Path(name).stem)
    for override in overrides:
        _apply(raw, override)
    _expand_mixer(raw.get("model"))
    return build_run(raw)


def build_run(raw: Mapping[str, Any]) -> Run:
    """A checked Run from nested plain data; ValueError names the key that is unknown or wrong."""
    return _record(Run, raw, "")


def _expand_mixer(model: Any) -> None:
    """Turn a mixer name with one of the paper's endings, as falcon-3a.3, into the name and the settings it means."""
    name, dot, ending = str(model.get("mixer", "") if isinstance(model, dict) else "").rpartition(".")
    if dot and ending in ENDINGS:
        model |= {"mixer": name, **ENDINGS[ending]}


def _with_ancestors(name: str, folder: Path | None, seen: tuple[str, ...]) -> dict[str, Any]:
    """The settings of a recipe on top of those it extends; `folder` and `seen` are of the recipes that led here."""
    text, identity, own_folder = _read(name, folder)
    if identity in seen:
        raise ValueError(f"extends: got {name!r} again, expected no circle ({' -> '.join((*seen, identity))})")
    raw = yaml.safe_load(text) or {}
    if not isinstance(raw, dict):
        raise ValueError(f"recipe {name}: got {type(raw).__name__}, expected a mapping of settings")
    parent = raw.pop("extends", None)
    if parent is None:
        return raw
    if not isinstance(parent, str):
        raise ValueError(f"extends: got {parent!r} in recipe {name}, expected the name of one recipe")
    inherited = _with_ancestors(parent, own_folder, (*seen, identity))
    inherited.pop("name", None)
    return _merged(inherited, raw)


def _merged(below: Any, above: Any) -> Any:
    if not isinstance(below, dict) or not isinstance(above, dict):
        return above
    return below | {key: _merged(below.get(key), value) for key, value in above.items()}


def _read(name: str, folder: Path | None) -> tuple[str, str, Path | None]:
    """Text of a recipe, what tells it from others, and the folder of its file (None for one of the package)."""
    if name in recipe_names():
        return resources.files("fastweight.recipes").joinpath(f"{name}.yaml").read_text(encoding="utf-8"), name, None
    path = Path(name) if folder is None else folder / name
    if path.suffix in (".yaml", ".yml") and path.is_file():
        return path.read_text(encoding="utf-8"), str(path.resolve()), path.parent
    raise ValueError(f"recipe: got {name!r}, expected a YAML file or one of {', '.join(recipe_names())}")


def _apply(raw: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not all(key.split(".")):
        raise ValueError(f"override: got {override!r}, expected KEY=VALUE with a dotted key, as model.hidden_size=64")
    *path, last = key.split(".")
    place = raw
    for part in path:
        place = place.setdefault(part, {})
        if not isinstance(place, dict):
            raise ValueError(f"override: got {override!r}, but {part!r} is a single value and holds no keys")
    place[last] = yaml.safe_load(text)


def _record(cls: Any, raw: Any, where: str) -> Any:
    if not isinstance(raw, Mapping):
        raise ValueError(f"{where.rstrip('.')}: got {raw!r}, expected a mapping of settings")
    hints, known = get_type_hints(cls), [field.name for field in fields(cls)]
    for key in raw:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f" (did you mean {where}{near[0]}?)" if near else ""
            raise ValueError(f"{where}{key}: unknown setting{hint}; expected one of {', '.join(known)}")
    return cls(**{key: _value(hints[key], value, where + key) for key, value in raw.items()})


def _value(kind: Any, value: Any, where: str) -> Any:
    if is_dataclass(kind):
        return _record(kind, value, where + ".")
    origin, options = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        if all(is_dataclass(option) for option in options):
            return _record(_of_kind(options, value, where), value, where + ".")
        return None if value is None else _value(next(o for o in options if o is not type(None)), value, where)
    if origin is Literal:
        if value not in options:
            raise ValueError(f"{where}: got {value!r}, expected one of {', '.join(map(str, options))}")
        return value
    if origin is tuple:
        if not isinstance(value, list | tuple) or len(value) != len(options):
            raise ValueError(f"{where}: got {value!r}, expected a list of {len(options)} values")
        return tuple(_value(option, item, where) for option, item in zip(options, value, strict=True))
    if origin is dict:
        if not isinstance(value, Mapping):
            raise ValueError(f"{where}: got {value!r}, expected a mapping of settings")
        return dict(value)
    return _scalar(kind, value, where)


def _of_kind(records: tuple[Any, ...], value: Any, where: str) -> Any:
    """The record whose `kind` the value names; the first one when it names none."""
    by_kind = {str(record.kind): record for record in records}
    kind = value.get("kind", next(iter(by_kind))) if isinstance(value, Mapping) else next(iter(by_kind))
    if kind not in by_kind:
        raise ValueError(f"{where}.kind: got {kind!r}, expected one of {', '.join(by_kind)}")
    return by_kind[kind]


def _scalar(kind: type, value: Any, where: str) -> Any:
    if kind is float and isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            raise ValueError(f"{where}: got {value!r}, expected a number") from None
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ValueError(f"{where}: got {value!r}, expected {kind.__name__}")
    return value
