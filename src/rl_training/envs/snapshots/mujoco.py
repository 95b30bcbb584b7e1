"""Read and write the state of a MuJoCo simulation, and send MuJoCo's warnings to `logging`.

MuJoCo is an optional dependency, so it is never imported here: call these functions only if
`"mujoco" in sys.modules`.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

import numpy as np

logger = logging.getLogger(__name__)

DERIVED_FIELDS = ("xpos", "xipos")
"""Body positions: setting a state does not update them, but Ant and Humanoid read them first."""


def _log_warning(message: str | bytes) -> None:
    text = message.decode(errors="replace") if isinstance(message, bytes) else message
    # Deprecated model attributes concern the authors of a model, not its users.
    if "deprecated" not in text:
        logger.warning("MuJoCo: %s", text.strip())


def keep_mujoco_quiet() -> None:
    """Send MuJoCo's warnings to `logging`, unless another handler is set.

    By default, MuJoCo prints them and writes MUJOCO_LOG.TXT to the working directory.
    """
    mujoco = sys.modules["mujoco"]
    if mujoco.get_mju_user_warning() is None:
        mujoco.set_mju_user_warning(_log_warning)


def has_mujoco_state(layer: object) -> bool:
    """Whether `layer` has the attributes `model` and `data` of a MuJoCo simulation."""
    mujoco, attributes = sys.modules["mujoco"], vars(layer)
    return isinstance(attributes.get("model"), mujoco.MjModel) and isinstance(
        attributes.get("data"), mujoco.MjData
    )


def _integration_state() -> int:
    # mjSTATE_FULLPHYSICS lacks the solver's warm start: the next step would differ by 1e-15.
    return int(sys.modules["mujoco"].mjtState.mjSTATE_INTEGRATION)


def read_simulation(layer: Any) -> dict[str, np.ndarray]:
    """Return the simulation's state by name: `integration` and each of `DERIVED_FIELDS`."""
    mujoco = sys.modules["mujoco"]
    kind = _integration_state()
    state = np.empty(mujoco.mj_stateSize(layer.model, kind), dtype=np.float64)
    mujoco.mj_getState(layer.model, layer.data, state, kind)
    derived = {name: np.array(getattr(layer.data, name)) for name in DERIVED_FIELDS}
    return {"integration": state, **derived}


def check_simulation(layer: Any, state: object) -> None:
    """Raise ValueError unless `state` has the names, shapes and types of this simulation."""
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
    """Set a state that `read_simulation` returned."""
    mujoco = sys.modules["mujoco"]
    # Positional arguments, since their names differ between versions.
    mujoco.mj_setState(layer.model, layer.data, state["integration"], _integration_state())
    for name in DERIVED_FIELDS:
        getattr(layer.data, name)[:] = state[name]
