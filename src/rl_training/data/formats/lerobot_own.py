"""What this package adds to a LeRobot dataset: action bounds, environment and provenance."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from rl_training.data.formats.lerobot_metadata import STATE
from rl_training.data.formats.recording import RecordingInfo
from rl_training.data.formats.stored import PROVENANCE, provenance_of
from rl_training.data.leaves.description import leaves_from
from rl_training.errors import ConfigError, DataError
from rl_training.observations import ALL_FLOAT32, ObservationLeaf, ObservationSpec
from rl_training.types import ACTION_KINDS, ActionKind, Json

MAX_ACTIONS = 2**31
MAX_AXES = 32
"""Most axes of an array in NumPy 1"""


@dataclass(frozen=True)
class OwnValues:
    """The checked contents of `meta/rl_training.json`."""

    action_kind: ActionKind = "continuous"
    choices: int = 0
    action_low: np.ndarray | None = None
    action_high: np.ndarray | None = None
    action_shape: tuple[int, ...] | None = None
    action_start: int | None = None
    environment: Json | None = None
    reference_scores: tuple[float, float] | None = None
    provenance: Json | None = None
    observation: ObservationSpec | None = None
    """The leaves of observations that are not one vector, all of them numbers"""

    @classmethod
    def read(cls, values: Json, action_dim: int, is_one: bool, name: str) -> OwnValues:
        """Check the values of a dataset; all are optional.

        `is_one` says that an action is one integer, which is a choice unless the values differ.
        """
        try:
            kind = values.get("action_kind", "discrete" if is_one else "continuous")
            if kind not in ACTION_KINDS or (kind == "discrete") > is_one:
                raise ValueError("action_kind")
            discrete = kind == "discrete"
            low, high = (
                _bound(values.get(key), action_dim) for key in ("action_low", "action_high")
            )
            scores = values.get("reference_scores")
            if scores is not None:
                scores = (float(scores[0]), float(scores[1]))
                if not scores[0] < scores[1]:
                    raise ValueError("reference_scores")
            environment = values.get("environment")
            if environment is not None:
                environment = {
                    "id": _text(environment["id"]),
                    "kwargs": dict(environment.get("kwargs") or {}),
                } | ({"spec": _text(environment["spec"])} if environment.get("spec") else {})
            return cls(
                kind,
                abs(_whole(values.get("actions", 0))) if discrete else 0,
                None if discrete else low,
                None if discrete else high,
                None if discrete else _shape(values.get("action_shape"), action_dim),
                _whole(values["action_start"]) if discrete and "action_start" in values else None,
                environment,
                scores,
                provenance_of(values.get(PROVENANCE)),
                _observation(values.get("observation")),
            )
        except (ConfigError, KeyError, TypeError, ValueError, OverflowError, IndexError) as error:
            raise DataError(
                f"{name}: meta/rl_training.json is damaged ({type(error).__name__}: {error!s:.80})"
            ) from None


def own_values(info: RecordingInfo, provenance: Json | None, description: str) -> Json:
    """Return what a dataset says about itself beyond LeRobot's own files, as JSON values."""
    values: Json = {"description": description}
    if not info.is_continuous:
        values["action_kind"] = info.action_kind
    if info.action_kind == "discrete":
        values["actions"] = info.action_dim
        if info.action_start is not None:
            values["action_start"] = info.action_start
    elif _is_finite(info.action_low) and _is_finite(info.action_high):
        values["action_low"] = np.asarray(info.action_low, np.float64).tolist()
        values["action_high"] = np.asarray(info.action_high, np.float64).tolist()
    if info.action_shape is not None:
        values["action_shape"] = list(info.action_shape)
    observation = info.observation.stored_as(ALL_FLOAT32)  # which is what LeRobot's features are
    if not observation.is_vector:
        values["observation"] = observation.to_json()
    if info.environment is not None:
        values["environment"] = json.loads(json.dumps(info.environment, default=str))
    if info.reference_scores is not None:
        values["reference_scores"] = list(info.reference_scores)
    if provenance is not None:
        values[PROVENANCE] = provenance
    return values


def leaf_features(observation: ObservationSpec, name: str) -> dict[str, ObservationLeaf]:
    """Return the leaf that each feature of observations holds; raise `DataError` if one cannot be.

    An array without a name is `observation.state`.
    """
    for leaf in observation.leaves:
        if leaf.kind != "numbers":
            raise DataError(
                f"{name}: the {leaf.label} is {leaf.kind}; only numbers can be written as a "
                "LeRobot dataset, so choose another format or leave it out (observation_keys)"
            )
    features = {_feature(leaf): leaf for leaf in observation.leaves}
    if len(features) < len(observation.leaves):
        raise DataError(f"{name}: two observations have the same name as LeRobot's features")
    return features


def _feature(leaf: ObservationLeaf) -> str:
    return f"observation.{leaf.name.replace('/', '.')}" if leaf.name else STATE


def _observation(values: Any) -> ObservationSpec | None:
    if values is None:
        return None
    spec = leaves_from(values)
    if not spec.is_numeric:
        raise ValueError("observations that are not numbers")
    return spec.stored_as(ALL_FLOAT32)


def _is_finite(bound: np.ndarray | None) -> bool:
    return bound is not None and bool(np.isfinite(bound).all())


def _bound(values: Any, size: int) -> np.ndarray | None:
    if values is None:
        return None
    bound = np.asarray(values, np.float32)
    if bound.shape != (size,) or not np.isfinite(bound).all():
        raise ValueError("action bounds")
    return bound


def _shape(values: Any, size: int) -> tuple[int, ...] | None:
    if values is None:
        return None
    shape = tuple(map(_whole, values))
    if math.prod(shape) != size or min(shape, default=1) < 1 or len(shape) > MAX_AXES:
        raise ValueError("action_shape")
    return shape


def _whole(value: Any) -> int:
    if type(value) is not int or abs(value) > MAX_ACTIONS:
        raise ValueError("discrete actions")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("environment")
    value.encode()  # raises a ValueError for what no file and no terminal can hold
    return value
