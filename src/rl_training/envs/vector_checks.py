"""Numbers that may go on to a buffer: float32 and finite."""

from __future__ import annotations

import numpy as np

from rl_training.envs.processes import WorkerDied
from rl_training.envs.sequential import Troubles
from rl_training.envs.step_arrays import StepArrays
from rl_training.errors import EnvironmentFault

Faults = dict[int, EnvironmentFault]
"""By group: the first thing that is wrong with it"""


def all_finite(values: np.ndarray) -> bool:
    """Whether all are; looking through bytes takes half the time of `.all()` for a few numbers."""
    return b"\0" not in np.isfinite(values).tobytes()


def as_float32(values: np.ndarray) -> np.ndarray:
    """A float32 copy; what is too large becomes infinite, which `all_finite` refuses."""
    if values.dtype == np.float32:
        return values.copy()
    with np.errstate(over="ignore"):
        return values.astype(np.float32)


def find_faults(arrays: StepArrays, troubles: Troubles, ended: list[int], num_envs: int) -> Faults:
    """What is wrong after a step or reset, in words, with the groups of `num_envs` rows."""
    faults: Faults = {}
    for index, error in troubles.items():
        group, within = divmod(index, num_envs)
        faults.setdefault(group, _fault_of_trouble(within, error))
    next_obs = arrays.obs.copy()
    next_obs[ended] = arrays.final_obs[ended]
    for obs in (next_obs, arrays.obs):
        faults = faults_of_values("observation", as_float32(obs), obs, num_envs) | faults
    return faults


def faults_of_values(what: str, values: np.ndarray, original: np.ndarray, num_envs: int) -> Faults:
    """By group of `num_envs` rows, a fault naming its first environment that is not finite."""
    bad = ~np.isfinite(values).reshape(len(values), -1).all(axis=1)
    faults: Faults = {}
    for index in np.flatnonzero(bad):
        group, within = divmod(int(index), num_envs)
        message = f"Environment {within}: its {what} is not finite in float32: {original[index]}"
        faults.setdefault(group, EnvironmentFault(message))
    return faults


def _fault_of_trouble(within: int, error: Exception) -> EnvironmentFault:
    """One environment's trouble as its group's fault; `__cause__` is what it raised itself."""
    if isinstance(error, WorkerDied):
        return EnvironmentFault(str(error))
    if isinstance(error, EnvironmentFault):
        return EnvironmentFault(f"Environment {within}: {error}")
    fault = EnvironmentFault(f"Environment {within} raised {type(error).__name__}: {error}")
    fault.__cause__ = error
    return fault
