"""Tells transformers' Auto classes about model_type "fastweight" without importing transformers first.

`import fastweight` stays quick and needs torch only; once transformers is imported, before or after, models register.
Trap: others look for transformers without loading it (importlib.util.find_spec), so the hook stays until it is loaded.
"""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType


class _WhenLoaded(importlib.abc.MetaPathFinder):
    """Lets transformers load as usual, then imports fastweight.models, which registers."""

    searching = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "transformers" or self.searching:
            return None
        self.searching = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self.searching = False
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def load_and_register(module: ModuleType) -> None:
            load(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            importlib.import_module("fastweight.models")

        spec.loader.exec_module = load_and_register  # type: ignore[method-assign]
        return spec


def register_with_transformers() -> None:
    """Registers now if transformers is loaded, else as soon as it is."""
    if "transformers" in sys.modules:
        importlib.import_module("fastweight.models")
    elif not any(isinstance(finder, _WhenLoaded) for finder in sys.meta_path):
        sys.meta_path.insert(0, _WhenLoaded())
