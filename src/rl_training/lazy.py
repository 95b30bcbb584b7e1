"""Import the names of a package on first use, which keeps its other modules fast to import."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def lazy_names(package: str, sources: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package that imports each name from its `module:name`."""

    def import_name(name: str) -> Any:
        if name not in sources:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, _, original = sources[name].partition(":")
        return getattr(importlib.import_module(module), original)

    return import_name
