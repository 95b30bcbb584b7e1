"""What MuJoCo needs: quiet warnings, and its simulation state as plain arrays.

MuJoCo is an optional extra, so nothing here imports it before an environment has.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

import numpy as np

logger = logging.getLogger(__name__)

DERIVED_FIELDS = ("xpos", "xipos")
"""Body positions: Ant and Humanoid read them before they step, and setting a state leaves them."""


def _log_warning(message: str | bytes) -> None:
    text = message.decode(errors="replace") if isinstance(message, bytes) else message
    # Deprecated model attributes are for those who write the models, not for those who train.
    if "deprecated" not in text:
        logger.warning("MuJoCo: %s", text.strip())


def keep_mujoco_quiet() -> None:
    """Send MuJoCo's warnings to `logging`, if it is loaded and nobody listens to them yet.

    Left alone it prints them and drops MUJOCO_LOG.TXT into the working folder.
    """
    mujoco = sys.modules.get("mujoco")
    if mujoco is not None and mujoco.get_mju_user_warning() is None:
        mujoco.set_mju_user_warning(_log_warning)


def has_mujoco_state(layer: object) -> bool:
    """Whether `layer` itself holds a MuJoCo simulation as `model` and `data`."""
    mujoco = sys.modules.get("mujoco")
    attributes = vars(layer)
    return (
        mujoco is not None
        and isinstance(attributes.get("model"), mujoco.MjModel)
        and isinstance(attributes.get("data"), mujoco.MjData)
    )


def _integration_state() -> int:
    # Not mjSTATE_FULLPHYSICS: without the solver's warm start the next step is off by 1e-15.
    return int(sys.modules["mujoco"].mjtState.mjSTATE_INTEGRATION)


def read_simulation(layer: Any) -> dict[str, np.ndarray]:
    """The simulation's state by name: `integration`, and each of `DERIVED_FIELDS`."""
    mujoco = sys.modules["mujoco"]
    kind = _integration_state()
    state = np.empty(mujoco.mj_stateSize(layer.model, kind), dtype=np.float64)
    mujoco.mj_getState(layer.model, layer.data, state, kind)
    derived = {name: np.array(getattr(layer.data, name)) for name in DERIVED_FIELDS}
    return {"integration": state, **derived}


def check_simulation(layer: Any, state: object) -> None:
    """Raise ValueError unless `state` has the names, shapes and types this simulation has."""
    own = read_simulation(layer)
    if not isinstance(state, dict) or state.keys() != own.keys():
        raise ValueError("the MuJoCo state is incomplete")
    for name, array in own.items():
        given = state[name]
        if not isinstance(given, np.ndarray) or given.dtype != array.dtype:
            raise ValueError(f"MuJoCo's {name} is not an array of {array.dtype}")
        if given.shape != array.shape:
            raise ValueError(f"MuJoCo's {name} has shape {given.shape}, not {array.shape}")


def write_simulation(layer: Any, state: dict[str, np.ndarray]) -> None:
    """Set what `read_simulation` gave; arguments by position, their names differ by version."""
    mujoco = sys.modules["mujoco"]
    mujoco.mj_setState(layer.model, layer.data, state["integration"], _integration_state())
    for name in DERIVED_FIELDS:
        getattr(layer.data, name)[:] = state[name]
