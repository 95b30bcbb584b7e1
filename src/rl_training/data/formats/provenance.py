"""How a file says that it was made from other data: a small JSON object, which is only shown."""

from __future__ import annotations

import json
from typing import Any

from rl_training.types import Json

PROVENANCE = "provenance"
"""Name of the entry in a file"""
MAX_BYTES = 100_000
TEXTS = ("command", "source", "source_sha256", "version")
LONGEST = 500


def provenance_of(value: Any) -> Json | None:
    """Return what a file says about its origin; None if there is nothing that can be shown.

    `value` is an object, or JSON text. Only short values of known names are kept.
    """
    if isinstance(value, str | bytes):
        try:
            value = json.loads(value) if len(value) <= MAX_BYTES else None
        except (ValueError, RecursionError):
            return None
    if not isinstance(value, dict):
        return None
    found: Json = {key: value[key][:LONGEST] for key in TEXTS if isinstance(value.get(key), str)}
    if type(value.get("source_episodes")) is int:
        found["source_episodes"] = value["source_episodes"]
    options = value.get("options")
    if isinstance(options, dict):
        found["options"] = {str(key)[:LONGEST]: repr(options[key])[:LONGEST] for key in options}
    return found or None
