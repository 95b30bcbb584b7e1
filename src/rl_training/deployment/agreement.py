"""Checks that an exported policy acts as the policy does.

Continuous actions are compared in units of half the range of each component, in which they are in
[-1, 1]. They may differ by `TOLERANCE`, and by what float32 cannot represent: a few rounding steps
at the bounds, and a multiple of the policy's own rounding error, which is measured by computing the
same actions in double precision. For most policies both are far below the tolerance.

For discrete actions the same holds for their values, in units of the largest value. The chosen
actions must be equal, unless their values differ by no more than that. The next state of a
recurrent policy is compared like actions, in its own units.
"""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from rl_training.deployment.formats import Arrays, Runner
from rl_training.errors import UserError
from rl_training.execution.policy import Policy
from rl_training.observations import ObservationLeaf
from rl_training.types import SpaceInfo

TOLERANCE = 1e-5
BATCHES = (1, 2, 17)
ROUNDING_STEPS, ROUNDING_FACTOR = 4, 8
WIDTH = 3.0
"""Spread of the observations that are tried, in standard deviations"""
LARGEST = 1_000
"""Largest whole number that is tried"""


def check_agreement(policy: Policy, exact: nn.Module, run: Runner, *, stochastic: bool) -> float:
    """Compare an exported policy with the policy itself, on random observations.

    `exact` is the exported module in double precision. Returns the largest difference of actions,
    or of the values of discrete actions. Raises `UserError` if a difference is too large.
    """
    random = np.random.default_rng(0)
    largest = 0.0
    for rows in BATCHES:
        inputs = inputs_of(policy, rows, random, stochastic=stochastic)
        found = run(inputs)
        expected = expected_outputs(policy, inputs)
        _check_kinds(found, expected)
        reference = _in_double_precision(exact, inputs)
        if policy.memory_size:
            own, expected_state, exact_state = (each.pop() for each in (found, expected, reference))
            largest = max(largest, _compare(own, expected_state, exact_state, np.ones(())))
        if not policy.spaces.is_continuous:
            difference = _compare_choices(found, expected, reference, policy.spaces.action_start)
        else:
            difference = _compare_actions(found[0], expected[0], reference[0], policy.spaces)
        largest = max(largest, difference)
    return largest


def inputs_of(
    policy: Policy, rows: int, random: np.random.Generator, *, stochastic: bool
) -> dict[str, np.ndarray]:
    """Draw inputs of an exported policy, by name and in order."""
    observation = policy.spaces.observation
    if observation.is_vector:
        inputs = {"obs": observations(policy, rows, random)}
    else:
        words = np.split(observations(policy, rows, random), observation.offsets[1:], 1)
        inputs = {
            f"obs/{leaf.name}" if leaf.name else "obs": _leaf(leaf, drawn, random)
            for leaf, drawn in zip(observation.leaves, words, strict=True)
            if leaf in policy.algorithm.acting_leaves()
        }
    if policy.memory_size:
        inputs["state"] = random.uniform(-1, 1, (rows, policy.memory_size)).astype(np.float32)
    if stochastic:
        draw = policy.algorithm.exploration_noise(rows)["action"]
        drawn = random.standard_normal if draw.kind == "normal" else random.random
        inputs["noise"] = drawn(draw.shape, np.float32)
    return inputs


def _leaf(leaf: ObservationLeaf, drawn: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Draw values of a leaf; those of float32 are given."""
    shape = (len(drawn), *leaf.shape)
    if leaf.is_float32:
        return drawn.reshape(shape)
    if leaf.holds_integers:
        limits = np.iinfo(leaf.dtype)
        ends = max(limits.min, -LARGEST), min(limits.max, LARGEST)
        return random.integers(*ends, size=shape, dtype=leaf.dtype, endpoint=True)
    if leaf.kind == "numbers":
        return (WIDTH * random.standard_normal(shape)).astype(leaf.dtype)
    if leaf.kind == "discrete":
        low = np.asarray(leaf.starts)
        size = (len(drawn), leaf.numbers)
        return random.integers(low, low + np.asarray(leaf.choices), size).reshape(shape)
    return random.integers(256 if leaf.kind == "image" else 2, size=shape, dtype=np.uint8)


def observations(policy: Policy, rows: int, random: np.random.Generator) -> np.ndarray:
    """Draw observations around the mean of those in training, where it is known, else around 0."""
    drawn = WIDTH * random.standard_normal((rows, policy.spaces.obs_dim))
    if policy.normalizer is not None:
        shift, scale = policy.normalizer.shift, policy.normalizer.scale
        drawn = shift.numpy(force=True) + drawn / scale.numpy(force=True)
    return drawn.astype(np.float32)


def expected_outputs(policy: Policy, inputs: Arrays) -> list[np.ndarray]:
    """Return the policy's own outputs: actions, then the next state or the values of actions."""
    obs = [array for name, array in inputs.items() if name not in ("noise", "state")]
    rows, memory = policy.rows_of_leaves(obs), inputs.get("state")
    if "noise" in inputs:
        actions, after = policy.sample(rows, inputs["noise"], memory)
    else:
        actions, after = policy.act_in_environment(rows, memory)
    if after is not None:
        return [actions, after]
    values = None if "noise" in inputs else policy.action_values(rows)
    return [actions] if values is None else [actions, values]


def _check_kinds(found: list[np.ndarray], expected: list[np.ndarray]) -> None:
    kinds = [
        [f"{each.dtype}{list(each.shape)}" for each in outputs] for outputs in (found, expected)
    ]
    if kinds[0] != kinds[1]:
        _fail(f"its outputs are {', '.join(kinds[0])} instead of {', '.join(kinds[1])}")


def _compare_actions(
    found: np.ndarray, expected: np.ndarray, reference: np.ndarray, spaces: SpaceInfo
) -> float:
    # A chunk of actions has one axis more.
    shape = spaces.action_shape or (spaces.action_dim,)
    low, high = (bound.astype(np.float64).reshape(shape) for bound in spaces.bounds)
    unit = np.where(high > low, 0.5 * (high - low), 1.0)
    steps = np.spacing(np.maximum(abs(low), abs(high)).astype(np.float32)).astype(np.float64)
    return _compare(found, expected, reference, unit, ROUNDING_STEPS * steps / unit)


def _compare_choices(
    found: list[np.ndarray], expected: list[np.ndarray], reference: list[np.ndarray], start: int
) -> float:
    differing = found[0] != expected[0]
    if len(found) == 1:  # values are not known
        if (differing & (expected[0] == reference[0])).any():
            _fail("it chooses other actions")
        return 0.0
    values = expected[1].astype(np.float64)
    unit = np.maximum(1.0, abs(values).max())
    largest = _compare(found[1], expected[1], reference[1], unit)
    rows = np.arange(len(values))
    lost = values[rows, expected[0] - start] - values[rows, found[0] - start]
    allowed = TOLERANCE + _rounding(expected[1], reference[1], unit)
    if (differing & (lost > 2 * allowed * unit)).any():
        _fail("it chooses other actions")
    return largest


def _compare(
    found: np.ndarray,
    expected: np.ndarray,
    reference: np.ndarray,
    unit: np.ndarray,
    representable: np.ndarray | float = 0.0,
) -> float:
    differences = abs(found.astype(np.float64) - expected) / unit
    allowed = TOLERANCE + representable + _rounding(expected, reference, unit)
    if not (differences <= allowed).all():  # also if one is NaN
        _fail(f"its outputs differ by {differences.max():.1e}")
    return float(differences.max())


def _rounding(expected: np.ndarray, reference: np.ndarray, unit: np.ndarray) -> float:
    return ROUNDING_FACTOR * float((abs(expected - reference) / unit).max())


def _in_double_precision(module: nn.Module, inputs: Arrays) -> list[np.ndarray]:
    given = (torch.from_numpy(array) for array in inputs.values())
    doubles = (each.double() if each.is_floating_point() else each for each in given)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)  # encoders convert images to it
    try:
        with torch.inference_mode(), _CastsToDouble():
            found = module(*doubles)
    finally:
        torch.set_default_dtype(before)
    tensors = found if isinstance(found, tuple) else (found,)
    return [tensor.numpy(force=True) for tensor in tensors]


class _CastsToDouble(TorchFunctionMode):
    """Casts to double what a user's network casts to float32, for example by `images.float()`."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is torch.Tensor.view:  # of the same bits
            return function(*args, **(kwargs or {}))
        if function is torch.Tensor.float:
            function = torch.Tensor.double
        named = {name: _as_double(each) for name, each in (kwargs or {}).items()}
        return function(*map(_as_double, args), **named)


def _as_double(argument: Any) -> Any:
    return torch.float64 if argument is torch.float32 else argument


def _fail(problem: str) -> NoReturn:
    raise UserError(
        f"the exported policy does not act as the policy does: {problem}; nothing was written. "
        "This is an error in rl_training or in an exporter; please report it together with the "
        "output of `rl-training doctor`"
    )
