"""Export a policy to a file that runs without this package."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from rl_training.checkpoints.files import PlainFolder
from rl_training.checkpoints.format import MODEL
from rl_training.checkpoints.loading import MODEL_FILES, find_checkpoint, load_policy
from rl_training.config import TrainConfig
from rl_training.deployment.agreement import TOLERANCE, check_agreement, inputs_of
from rl_training.deployment.formats import (
    ENDINGS,
    FORMATS,
    Format,
    check_packages,
    runner,
    write,
)
from rl_training.deployment.metadata import Origin, described_environment, metadata
from rl_training.envs import EnvironmentSource
from rl_training.errors import CheckpointError, UserError
from rl_training.execution.policy import Policy
from rl_training.execution.policy_module import (
    LeafInputs,
    PolicyLayers,
    PolicyModuleWithValues,
    policy_module,
)
from rl_training.models.custom_networks import given_networks
from rl_training.training.inputs import describe_environment, run_factory
from rl_training.types import Json
from rl_training.validation import short, user_path

EXAMPLE_ROWS = 2
"""Rows of the example inputs; with one row, `torch.export` would fix the batch size to one"""


@dataclass(frozen=True)
class Exported:
    """An exported file, and what is in it."""

    path: Path
    metadata: dict[str, str]
    inputs: dict[str, tuple[int, ...]]
    """Shape of one row of each input"""
    outputs: tuple[str, ...]
    largest_difference: float
    """From the actions of the policy, in units of half their range"""

    def lines(self) -> list[str]:
        """Describe the file to the user."""
        about = self.metadata
        step = f" at step {int(about['step']):,}" if "step" in about else ""
        given = ", ".join(
            f"{name} ({', '.join(['batch', *map(str, shape)])})"
            for name, shape in self.inputs.items()
        )
        lines = [
            f"exported the policy of {about['algorithm']}{step} to {self.path} "
            f"({self.path.stat().st_size:,} bytes)",
            f"inputs         {given}",
            f"outputs        {', '.join(self.outputs)}",
            f"checked        differs from the policy by at most {self.largest_difference:.1e} "
            f"(allowed: {TOLERANCE:g})",
        ]
        if "action_chunk" in about:
            lines.append(
                f"note           an action is a chunk of {about['action_chunk']} actions (batch, "
                f"{about['action_chunk']}, ...), to be executed one after another"
            )
        if "state_size" in about:
            lines.append(
                "note           the policy is recurrent: state is zero at the start of an episode, "
                "and next_state of the step before otherwise"
            )
        if "wrappers" in about:
            lines.append(
                "note           the environment's wrappers are not in the file: it takes "
                "observations as they leave the wrappers, and returns actions as they enter them"
            )
        return lines


def export(
    run: str | Path,
    out: str | Path,
    *,
    format: Format = "onnx",
    stochastic: bool = False,
    best: bool = False,
    networks: object = None,
) -> Path:
    """Export the policy of a run folder, a checkpoint or a saved policy to a file.

    The file maps a batch of observations, `obs`, to `action`, both in environment units.
    Observation normalization and the scaling of actions are part of it. For discrete actions there
    is a second output, `q_values`. If the policy chooses chunks (`action_chunk`), `action` has an
    axis of that length after the first. If the policy is recurrent, `state` is the second input
    and `next_state` the second output: zeros at the start of an episode, then the `next_state` of
    the step before. The file is checked against the policy before it is written.

    Args:
        run: Run folder, checkpoint or saved policy.
        out: File to write, such as `policy.onnx` or `policy.pt2`. An earlier export is replaced.
        format: `onnx`, which needs the extra `export`, or `torch`, for `torch.export.load`.
        stochastic: Sample actions: `noise` is the last input, standard normal
            `(batch, action_dim)`; for choices, uniform with one number for each. Only for
            algorithms whose policy is a distribution.
        best: Use the best checkpoint of a run instead of the newest.

    Raises:
        UserError: If a package is missing, the policy cannot be exported like this, or the file
            cannot be written.
    """
    with given_networks(networks):
        return export_run(run, out, format=format, stochastic=stochastic, best=best).path


def export_run(
    run: str | Path,
    out: str | Path,
    *,
    format: str = "onnx",
    stochastic: bool = False,
    best: bool = False,
) -> Exported:
    """Like `export`, but say what was written."""
    destination = _checked_destination(out, format)
    check_packages(format)
    reader = find_checkpoint(run, best=best, names=MODEL_FILES)
    return _export(load_policy(reader), Origin.of(reader), destination, format, stochastic)


def export_policy(
    policy: Policy,
    out: str | Path,
    *,
    format: str = "onnx",
    stochastic: bool = False,
    environment: Json | None = None,
    config: TrainConfig,
    env: EnvironmentSource | None = None,
    saved: str | Path | None = None,
) -> Path:
    """Export a policy in memory. `saved` is the run, checkpoint or policy that it was read from.

    `environment` is the description of its environment, by default that of the config or `env`.
    """
    destination = _checked_destination(out, format)
    check_packages(format)
    if environment is None:
        environment = describe_environment(run_factory(config, env), config)
    name, wrappers = described_environment(environment)
    origin = replace(_origin_of(policy, saved), environment=name, wrappers=wrappers)
    return _export(policy, origin, destination, format, stochastic).path


def _origin_of(policy: Policy, saved: str | Path | None) -> Origin:
    """Return the origin of a policy, unless it was changed since it was read."""
    if saved is not None:
        try:
            reader = find_checkpoint(saved, names=MODEL_FILES)
            tensors = reader.tensors(MODEL)
        except CheckpointError:  # removed or damaged since
            return Origin()
        own = policy.tensors()
        if own.keys() == tensors.keys() and all(torch.equal(own[k], tensors[k]) for k in own):
            return Origin.of(reader)
    return Origin()


def _export(
    policy: Policy, origin: Origin, destination: Path, format_name: str, stochastic: bool
) -> Exported:
    if (wrong := policy.first_not_finite()) is not None:
        raise UserError(f"the policy cannot be exported: {wrong} is not finite")
    module, outputs = _module_of(policy, stochastic=stochastic)
    about = metadata(policy, origin, stochastic=stochastic)
    exact = copy.deepcopy(module).double()
    given = inputs_of(policy, EXAMPLE_ROWS, np.random.default_rng(0), stochastic=stochastic)
    examples = {name: torch.from_numpy(array) for name, array in given.items()}
    data = write(format_name, module, examples, outputs, about)
    difference = check_agreement(policy, exact, runner(format_name, data), stochastic=stochastic)
    _write_file(destination, data)
    rows = {name: tuple(example.shape[1:]) for name, example in examples.items()}
    return Exported(destination, about, rows, outputs, difference)


def _module_of(policy: Policy, *, stochastic: bool) -> tuple[nn.Module, tuple[str, ...]]:
    """Return the module to export and the names of its outputs."""
    algorithm, spaces = policy.algorithm, policy.spaces
    parts = (algorithm, spaces, policy.normalizer)
    outputs: tuple[str, ...] = ("action",)
    example = spaces.observation.smallest_rows(1)
    module: PolicyLayers
    if stochastic:
        if (reason := algorithm.why_deterministic()) is not None:
            raise UserError(
                f"{policy.algorithm_name} cannot be exported with --stochastic (stochastic=True): "
                f"{reason}"
            )
        module = policy_module(*parts, stochastic=True)
    elif not policy.memory_size and policy.action_values(example) is not None:
        module = PolicyModuleWithValues(*parts)
        outputs = ("action", "q_values")
    else:
        module = policy_module(*parts)
    if policy.memory_size:
        outputs = ("action", "next_state")
    given: nn.Module = module
    if not spaces.observation.is_vector:
        given = LeafInputs(module, spaces.observation, algorithm.acting_leaves())
    return given.cpu().eval().requires_grad_(False), outputs


def _checked_destination(out: str | Path, format_name: Any) -> Path:
    """Return the file to write. Raise `UserError` if it cannot or should not be written."""
    if format_name not in FORMATS:
        raise UserError(f"format {short(format_name)}: choose from {', '.join(FORMATS)}")
    path = user_path(out)
    ending = path.suffix.lower()
    for other, its_ending in ENDINGS.items():
        if ending == its_ending and other != format_name:
            raise UserError(
                f"{path}: a file that ends with {its_ending} has the format {other}; use "
                f"--format {other} (format={other!r}), or a name that ends with "
                f"{ENDINGS[format_name]}"
            )
    if path.is_dir():
        raise UserError(f"{path}: is a folder; add the name of a file, such as policy.onnx")
    if path.exists() and ending != ENDINGS[format_name]:
        raise UserError(f"{path}: exists and is not an exported policy; choose another name")
    return path


def _write_file(path: Path, data: bytes) -> None:
    """Write the file under a temporary name first, so that it is complete or absent."""
    folder = PlainFolder(path.parent)
    try:
        folder.make()
        folder.replace(path.name, data)
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror or error})") from error
