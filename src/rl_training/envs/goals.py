"""The goals of an environment: where observations have them, and what reaching one is worth.

An environment with goals has the interface of Gymnasium-Robotics' `GoalEnv`: its observations are a
dictionary with an `achieved_goal` and a `desired_goal`, and its method `compute_reward` returns the
reward of a step that achieved one goal while another one was desired.

An environment may have functions of PyTorch instead: `compute_reward_torch(achieved_goal,
desired_goal)`, and `compute_terminated_torch` if episodes end at goals.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from rl_training.envs.make import EnvironmentFactory, close_environment
from rl_training.envs.snapshots.layers import foreign_code
from rl_training.envs.spaces import describe_observations
from rl_training.errors import EnvironmentRuntimeError, EnvironmentSetupError, last_line
from rl_training.observations import ObservationSpec

if TYPE_CHECKING:
    from torch import Tensor

ACHIEVED, DESIRED = "achieved_goal", "desired_goal"
CHECKED_STEPS = 10
"""Steps whose rewards are compared with those of `compute_reward`"""
TOLERANCE = 1e-4
"""Largest difference by rounding"""
REWARD, TERMINATED = "compute_reward", "compute_terminated"
TORCH = "_torch"
"""End of the names of functions of tensors"""


class GoalEnvironment:
    """An environment that is made for its goal functions; it is not trained in.

    `compute_reward`, and `compute_terminated` if there is one, are called for many goals together
    if they take arrays with a leading axis, else once for each goal. `info` is always empty. A
    reward must not depend on anything else, such as the state of the simulation.

    A time limit is not part of this: a truncated episode goes on, whatever the goal.

    An environment with `compute_reward_torch` has functions of float32 tensors with any leading
    axes, and no others are used.

    Raises `EnvironmentSetupError` if the environment has no goals or its rewards differ from those
    of `compute_reward`, for example because a wrapper changes them.
    """

    def __init__(self, factory: EnvironmentFactory) -> None:
        self._label = factory.label
        self._env = factory()
        try:
            observation = describe_observations(
                self._env.observation_space, factory.observation_keys, factory.number_types
            )
            self._require_goals(observation)
            self._goal = observation.leaf(DESIRED)
            self.achieved, self.desired = (
                observation.columns(name) for name in (ACHIEVED, DESIRED)
            )
            self._space = self._env.observation_space[DESIRED]  # type: ignore[index]
            self.has_tensor_functions = self._env.has_wrapper_attr(REWARD + TORCH)
            """Whether rewards are functions of tensors"""
            ending = TORCH if self.has_tensor_functions else ""
            self._compute_reward = self._find(REWARD + ending)
            self._compute_terminated = None
            if self._env.has_wrapper_attr(TERMINATED + ending):
                self._compute_terminated = self._find(TERMINATED + ending)
            self._check()
        except BaseException:
            self.close()
            raise

    def rewards(self, achieved: np.ndarray, desired: np.ndarray) -> np.ndarray:
        """The rewards `(n,)`, float32, of steps that lead to `achieved`, `(n, words)`."""
        values = self._call(self._compute_reward, achieved, desired)
        with np.errstate(over="ignore"):  # infinite rewards are found by the caller
            return values.astype(np.float32)

    def terminations(self, achieved: np.ndarray, desired: np.ndarray) -> np.ndarray | None:
        """Whether such steps end the episode, `(n,)` bool; None without `compute_terminated`."""
        if self._compute_terminated is None:
            return None
        return self._call(self._compute_terminated, achieved, desired).astype(np.bool_)

    def tensor_rewards(self, achieved: Tensor, desired: Tensor) -> Tensor:
        """The rewards `(...,)`, float32, of steps that lead to `achieved`, `(..., words)`."""
        return self._of_tensors(self._compute_reward, achieved, desired).float()

    def tensor_terminations(self, achieved: Tensor, desired: Tensor) -> Tensor | None:
        """Whether such steps end the episode; None without `compute_terminated_torch`."""
        if self._compute_terminated is None:
            return None
        return self._of_tensors(self._compute_terminated, achieved, desired).bool()

    def close(self) -> None:
        close_environment(self._env)

    def _of_tensors(self, function: _GoalFunction, achieved: Tensor, desired: Tensor) -> Tensor:
        return function.of_tensors(*map(self._goal.tensor_in, (achieved, desired)))

    def _require_goals(self, observation: ObservationSpec) -> None:
        """Raise an error that says what is needed, unless everything is there."""
        leaves = {leaf.name: leaf for leaf in observation.leaves}
        achieved, desired = leaves.get(ACHIEVED), leaves.get(DESIRED)
        has_goals = (
            achieved is not None
            and desired is not None
            and achieved.kind == desired.kind == "numbers"
            and (achieved.shape, achieved.dtype) == (desired.shape, desired.dtype)
        )
        names = (REWARD, REWARD + TORCH)
        has_rewards = any(self._env.has_wrapper_attr(name) for name in names)
        if has_goals and has_rewards:
            return
        raise EnvironmentSetupError(
            "replay.hindsight: needs an environment with goals: observations with achieved_goal "
            "and desired_goal (numbers, of one shape and type), and a method "
            "compute_reward(achieved_goal, desired_goal, info), or "
            "compute_reward_torch(achieved_goal, desired_goal) for "
            f"tensors; {self._label} has the observations {observation.describe()} and "
            f"{'a' if has_rewards else 'no'} compute_reward"
        )

    def _find(self, name: str) -> _GoalFunction:
        return _GoalFunction(name, self._env.get_wrapper_attr(name))

    def _call(
        self, function: _GoalFunction, achieved: np.ndarray, desired: np.ndarray
    ) -> np.ndarray:
        words = (achieved, desired)
        goals = [self._goal.values_in(each).astype(self._space.dtype) for each in words]
        with foreign_code(
            lambda error: EnvironmentRuntimeError(
                f"{self._label}: {function.name} failed: {last_line(error)}"
            )
        ):
            return function(*goals)

    def _check(self) -> None:
        """Compare what some steps return with what the functions say about them."""
        if self.has_tensor_functions and self._compute_terminated is None:
            self._require_no_other_ends()
        steps = self._some_steps()
        self._check_function(self._compute_reward, steps, [step.reward for step in steps])
        if self._compute_terminated is not None:
            terminated = [float(step.terminated) for step in steps]
            self._check_function(self._compute_terminated, steps, terminated)

    def _require_no_other_ends(self) -> None:
        if self._env.has_wrapper_attr(TERMINATED):
            raise EnvironmentSetupError(
                f"replay.hindsight: {self._label} has {REWARD}{TORCH} and {TERMINATED}, but no "
                f"{TERMINATED}{TORCH}(achieved_goal, desired_goal); add it, so that both are "
                "functions of tensors"
            )

    def _check_function(
        self, function: _GoalFunction, steps: Sequence[_Step], returned: Sequence[float]
    ) -> None:
        with foreign_code(lambda error: self._unusable(function.name, error)):
            for step, expected in zip(steps, returned, strict=True):
                found = function.one(step.achieved, step.desired)
                if not np.isclose(found, expected, rtol=TOLERANCE, atol=TOLERANCE):
                    raise self._unusable(
                        function.name, f"it returns {found:g} for a step that returned {expected:g}"
                    )
            goals = [steps[0].desired, *(step.achieved for step in steps)]
            number = len(goals)
            if self.has_tensor_functions:
                function.check_axes(np.stack(goals))
                return
            function.find_out(np.stack(goals * number), np.repeat(np.stack(goals), number, axis=0))

    def _unusable(self, name: str, problem: str | BaseException) -> EnvironmentSetupError:
        if isinstance(problem, EnvironmentSetupError):
            return problem
        what = problem if isinstance(problem, str) else last_line(problem)
        return EnvironmentSetupError(
            f"replay.hindsight: {name} of {self._label} cannot be used: {what}; it "
            "must depend on the two goals only, with an empty info, and no wrapper may change "
            "rewards, terminations or goals"
        )

    def _some_steps(self) -> list[_Step]:
        """A few random steps of an episode."""
        found: list[_Step] = []
        with foreign_code(lambda error: self._unusable("step", error)):
            self._env.reset(seed=0)
            self._env.action_space.seed(0)
            while len(found) < CHECKED_STEPS:
                action = self._env.action_space.sample()
                observation, reward, terminated, truncated, _ = self._env.step(action)
                achieved, desired = (np.array(observation[name]) for name in (ACHIEVED, DESIRED))
                found.append(_Step(achieved, desired, float(reward), bool(terminated)))
                if terminated or truncated:
                    break
        return found


class _Step(NamedTuple):
    """What a step returned."""

    achieved: np.ndarray
    desired: np.ndarray
    reward: float
    terminated: bool


class _GoalFunction:
    """A function of goals that takes many of them, even if the environment's own takes one."""

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self.name, self._function = name, function
        self._takes_many = False

    def __call__(self, achieved: np.ndarray, desired: np.ndarray) -> np.ndarray:
        if not self._takes_many:
            return np.array([self.one(*goals) for goals in zip(achieved, desired, strict=True)])
        values = np.asarray(self._function(achieved, desired, {}))
        if values.shape != (len(achieved),):
            raise ValueError(f"it returned the shape {values.shape} for {len(achieved)} goals")
        return values

    def one(self, achieved: np.ndarray, desired: np.ndarray) -> float:
        """The value for a single goal."""
        if self.name.endswith(TORCH):
            return float(self.of_tensors(*map(_float_tensor, (achieved, desired))).item())
        value = np.asarray(self._function(achieved, desired, {}))
        if value.size != 1:
            raise ValueError(f"it returned the shape {value.shape} for one goal")
        return float(value.item())

    def find_out(self, achieved: np.ndarray, desired: np.ndarray) -> None:
        """Find out whether the function takes arrays of goals, by comparing the values."""
        expected = self(achieved, desired)
        try:
            found = np.asarray(self._function(achieved, desired, {}))
        except Exception:  # it takes one goal: anything may be raised for many
            return
        self._takes_many = found.shape == expected.shape and np.allclose(
            found, expected, rtol=TOLERANCE, atol=TOLERANCE
        )

    def of_tensors(self, achieved: Tensor, desired: Tensor) -> Tensor:
        """The values for tensors of goals, if the function is one of tensors."""
        found: Tensor = self._function(achieved, desired)
        return found

    def check_axes(self, goals: np.ndarray) -> None:
        """Raise `ValueError` unless the function takes tensors with any leading axes."""
        number = len(goals)
        many = _float_tensor(goals)
        for axes in ((number,), (2, number)):
            shape = (*axes, *many.shape[1:])
            found = self.of_tensors(many.expand(shape), many.flip(0).expand(shape))
            if tuple(found.shape) != axes:
                raise ValueError(
                    f"it returned the shape {tuple(found.shape)} for goals of the shape {shape}"
                )


def _float_tensor(values: np.ndarray) -> Tensor:
    import torch  # few environments need it

    return torch.as_tensor(values, dtype=torch.float32)
