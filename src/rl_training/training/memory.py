"""Explain that a run does not fit into memory, and what would fit."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rl_training.algorithms.hyperparameters import Hyperparameters
from rl_training.errors import ConfigError, TrainingError
from rl_training.internals import available_memory

USABLE = 0.9
"""Fraction of the available memory to plan with; the rest is for everything that is not counted"""
EXACT = ("buffer_capacity", "rollout_steps")
"""Keys whose needs are known exactly, and not only a lower bound"""
PER_TRANSITION = ("num_critics", "num_quantiles", "num_cql_samples")
"""Keys that need memory for each transition and each unit. Unless their values are unusual, a large
minibatch or large layers are the reason"""
UNUSUAL = 10
"""Factor over the default from which a setting is named as a possible reason"""


def memory_error(
    settings: Hyperparameters, needs: Mapping[str, int], device: str, *, seeds: int = 1
) -> ConfigError:
    """Return an error that names the setting that needs most, and a value that would fit.

    `needs` are the bytes that settings need at least, by key.
    """
    available = available_memory(device)
    key = largest_need(settings, needs)
    if available is None or sum(needs.values()) <= available:
        return ConfigError(_unexpected(settings, key, device))
    which = f" for {seeds} seeds" if seeds > 1 else ""
    where = "" if device == "cpu" else f" on {device}"
    named = f"algo_kwargs.{key} = {_written(getattr(settings, key))}{which}"
    exactly = "" if key in EXACT else "at least "
    others = sum(needs.values()) - needs[key]
    advice = f"use a smaller value (default: {_written(_default(settings, key))})"
    if key in EXACT and (fitting := _fitting(settings, key, needs, USABLE * available - others)):
        advice = f"{key} = {fitting:,} would fit"
    fewer = ", or train fewer seeds at once" if seeds > 1 else ""
    return ConfigError(
        f"{named}: needs {exactly}{gibibytes(needs[key])} of memory; {gibibytes(available)} are "
        f"available{where}; {advice}{fewer}"
    )


def largest_need(settings: Hyperparameters, needs: Mapping[str, int]) -> str:
    """Return the key of the setting that needs most memory."""
    possible = [
        key
        for key in needs
        if key not in PER_TRANSITION
        or (
            hasattr(settings, key)
            and getattr(settings, key) > UNUSUAL * max(_default(settings, key), 1)
        )
    ]
    return max(possible, key=needs.__getitem__)


def training_memory_error(
    settings: Hyperparameters, device: str, error: BaseException
) -> TrainingError:
    """Return an error that explains that memory ran out while training; it keeps the notes."""
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    found = TrainingError(f"{_unexpected(settings, 'batch_size', device)} ({reason})")
    for note in getattr(error, "__notes__", ()):
        found.add_note(note)
    return found


def gibibytes(number: float) -> str:
    """Format a number of bytes: `84 GiB`, `0.52 GiB`."""
    amount = number / 2**30
    return f"{amount:,.0f} GiB" if amount >= 10 else f"{amount:.2g} GiB"


def _fitting(settings: Hyperparameters, key: str, needs: Mapping[str, int], usable: float) -> int:
    """Return the largest value with two significant digits that fits; 0 if there is none."""
    largest = int(getattr(settings, key) * usable / needs[key])
    if largest < 1:
        return 0
    unit = 10 ** max(0, int(math.log10(largest)) - 1)
    return int(largest // unit * unit)


def _unexpected(settings: Hyperparameters, key: str, device: str) -> str:
    """Name the settings that are far above their defaults, else the one that needs most."""
    unusual = [
        f"algo_kwargs.{name} = {value:,}"
        for name, value in settings
        if type(value) is int
        and type(default := _default(settings, name)) is int
        and value > UNUSUAL * max(default, 1)
    ]
    names = unusual or [f"algo_kwargs.{key} = {_written(getattr(settings, key))}"]
    where = "memory" if device == "cpu" else f"the memory of {device}"
    return f"{', '.join(names)}: does not fit into {where}; use a smaller value"


def _default(settings: Hyperparameters, key: str) -> Any:
    return type(settings).model_fields[key].default


def _written(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else str(list(value))
