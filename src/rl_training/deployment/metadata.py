"""What an exported file says about itself: spaces, algorithm, origin and versions.

Everything is text. Values that are not known are left out. Nothing describes the machine: neither
its name nor a path.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass

import numpy as np
import torch

from rl_training.checkpoints.format import MODEL, POLICY, STATE, CheckpointReader
from rl_training.checkpoints.loading import find_run
from rl_training.checkpoints.run_folder import RUN
from rl_training.config import read_wrappers
from rl_training.errors import CheckpointError, one_line
from rl_training.execution.policy import Policy
from rl_training.observations import ObservationSpec
from rl_training.types import Json, SpaceInfo
from rl_training.version import __version__

FORMAT_VERSION = 1
"""Version of the names and meanings of inputs, outputs and metadata"""
LONGEST = 1_000
"""Longest text from a run, in characters"""


@dataclass(frozen=True)
class Origin:
    """Where a policy comes from; None where that is not known."""

    environment: str | None = None
    """Id of its environment, or the label of one without an id"""
    wrappers: tuple[str, ...] = ()
    """Names of the environment's wrappers, the last is outermost"""
    run_id: str | None = None
    """Name that its run was given when it was created"""
    step: int | None = None
    model_sha256: str | None = None
    """SHA-256 of its `model.safetensors`"""

    @classmethod
    def of(cls, reader: CheckpointReader) -> Origin:
        """Read the origin of a checkpoint or saved policy; only the policy must be intact."""
        environment = reader.json(POLICY).get("environment")
        return cls(
            *described_environment(environment if isinstance(environment, dict) else {}),
            run_id=_run_id(reader),
            step=_step(reader),
            model_sha256=reader.files[MODEL]["sha256"],
        )


def described_environment(environment: Json) -> tuple[str | None, tuple[str, ...]]:
    """Return the name of an environment and of its wrappers, from a policy's description."""
    name = environment.get("id") or environment.get("label")
    wrappers = read_wrappers(environment.get("wrappers") or [])
    named = tuple(each.wrapper for each in wrappers)
    return _clean(name) if isinstance(name, str) else None, named


def metadata(policy: Policy, origin: Origin, *, stochastic: bool) -> dict[str, str]:
    """Return the metadata of an exported policy."""
    values = {
        "format": "rl_training policy",
        "format_version": str(FORMAT_VERSION),
        "algorithm": _clean(policy.algorithm_name),
        "observation_space": json.dumps(observation_space(policy)),
        "action_space": json.dumps(action_space(policy.spaces)),
        "action_chunk": None if policy.action_chunk == 1 else str(policy.action_chunk),
        "stochastic": json.dumps(stochastic),
        "normalizes_observations": json.dumps(policy.normalizer is not None),
        "environment": origin.environment,
        "wrappers": json.dumps(origin.wrappers) if origin.wrappers else None,
        "run_id": origin.run_id,
        "step": None if origin.step is None else str(origin.step),
        "model_sha256": origin.model_sha256,
        "rl_training_version": __version__,
        "torch_version": torch.__version__,
    }
    return {name: value for name, value in values.items() if value is not None}


def observation_space(policy: Policy) -> Json:
    """Describe what actions depend on. A policy does not store the bounds of observations."""
    needed = ObservationSpec(policy.algorithm.acting_leaves())
    first = needed.leaves[0]
    if not first.name and first.kind == "numbers" and len(first.shape) == 1:
        return {"type": "Box", "shape": list(first.shape), "dtype": first.dtype.name}
    return {"type": "Dict", "leaves": needed.to_json()}


def action_space(spaces: SpaceInfo) -> Json:
    """Describe the actions, in environment units."""
    if spaces.action_kind == "discrete":
        return {"type": "Discrete", "n": spaces.action_dim, "start": spaces.action_start}
    shape = list(spaces.action_shape or (spaces.action_dim,))
    if spaces.action_kind == "multi_binary":
        return {"type": "MultiBinary", "shape": shape}
    low, high = (bound.reshape(shape) for bound in spaces.bounds)
    if spaces.action_kind == "multi_discrete":
        low, nvec = low.astype(np.int64), (high - low + 1).astype(np.int64)
        return {"type": "MultiDiscrete", "nvec": nvec.tolist(), "start": low.tolist()}
    return {
        "type": "Box",
        "shape": shape,
        "dtype": "float32",
        "low": low.tolist(),
        "high": high.tolist(),
    }


def _run_id(reader: CheckpointReader) -> str | None:
    with contextlib.suppress(CheckpointError, OSError):
        run = find_run(reader.folder)
        if run is not None and run.plain.has_file(RUN):
            name = run.start().get("name")
            return _clean(name) if isinstance(name, str) else None
    return None


def _step(reader: CheckpointReader) -> int | None:
    if STATE not in reader.files:
        return None
    with contextlib.suppress(CheckpointError, LookupError, TypeError):
        step = reader.json(STATE)["progress"]["global_step"]
        return step if type(step) is int and 0 <= step < 2**63 else None
    return None


def _clean(text: str) -> str:
    return one_line(text, LONGEST)
