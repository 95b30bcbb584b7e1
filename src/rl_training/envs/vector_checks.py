"""Numbers that may go on to a buffer: float32 and finite."""

from __future__ import annotations

import numpy as np

from rl_training.errors import EnvironmentFault


def as_float32(values: np.ndarray) -> np.ndarray:
    """A float32 copy; what is too large becomes infinite, for `require_finite` to refuse."""
    with np.errstate(over="ignore"):
        return np.asarray(values).astype(np.float32)


def require_finite(what: str, values: np.ndarray, original: np.ndarray) -> None:
    """`EnvironmentFault` naming the first environment (a row of `values`) that is not finite."""
    finite = np.isfinite(values)
    if finite.all():
        return
    index = int(np.argmin(finite.reshape(len(values), -1).all(axis=1)))
    raise EnvironmentFault(
        f"Environment {index}: its {what} is not finite in float32: {original[index]}"
    )
