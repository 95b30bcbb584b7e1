"""How one environment is made, from an id, a class, a function or an example.

A first look at an environment, before anything depends on it.
"""

from __future__ import annotations

import copy
import difflib
import importlib
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import gymnasium as gym
from gymnasium.wrappers import NormalizeObservation

from rl_training.envs.snapshots.layers import has_own_snapshot, layers_of
from rl_training.envs.snapshots.mujoco import keep_mujoco_quiet
from rl_training.errors import ConfigError, EnvironmentSetupError

Environment = gym.Env[Any, Any]
EnvironmentSource = str | Environment | Callable[..., Environment]
"""A registered id, an environment to make more of, or a class or function that makes one."""


@dataclass(frozen=True)
class EnvironmentFactory:
    """Makes fresh environments; each call gives one that shares nothing with the others.

    `kwargs` go to `gym.make` for an id, and to the class or function otherwise. Raises
    `EnvironmentSetupError` where an environment cannot be made.
    """

    source: EnvironmentSource
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self) -> Environment:
        if isinstance(self.source, str):
            environment = _make_by_id(self.source, self.kwargs)
        elif isinstance(self.source, gym.Env):
            environment = _make_another(self.source, self.kwargs)
        elif callable(self.source):
            environment = self._call_source(self.source)
        else:
            _refuse_vector(self.source)
            raise EnvironmentSetupError(
                "An environment is given as an id, a gymnasium.Env or a function that makes one, "
                f"not as {type(self.source).__name__}."
            )
        if not isinstance(environment, gym.Env):
            _refuse_vector(environment)
            raise EnvironmentSetupError(
                f"{self.label} returned {type(environment).__name__}, not a gymnasium.Env."
            )
        return environment

    def _call_source(self, source: Callable[..., Environment]) -> Environment:
        keep_mujoco_quiet()
        try:
            return source(**self.kwargs)
        except TypeError as error:
            raise _argument_error(self.label, self.kwargs, error) from error

    @property
    def label(self) -> str:
        """What to call it in messages: the id, else the qualified name of the class or function."""
        if isinstance(self.source, str):
            return self.source
        if isinstance(self.source, gym.Env):
            return _spec_id(self.source) or _qualified_name(type(self.source.unwrapped))
        return _qualified_name(self.source)

    @property
    def is_registered_id(self) -> bool:
        """Whether the source is an id, and so can be written to a config file."""
        return isinstance(self.source, str)


def _refuse_vector(environment: object) -> None:
    if isinstance(environment, gym.vector.VectorEnv):
        raise EnvironmentSetupError(
            f"{type(environment).__name__} is a vector environment. Give a single one, and set "
            "num_envs for several; instead of a wrapper from gymnasium.wrappers.vector use its "
            "counterpart in gymnasium.wrappers, or `normalize_observations: true`."
        )


def check_environment_id(environment_id: str) -> None:
    """Raise `EnvironmentSetupError` unless the id is registered; makes and imports nothing."""
    if ":" in environment_id:
        module, _, name = environment_id.partition(":")
        raise EnvironmentSetupError(
            f"Environment id {environment_id!r} asks to import {module!r}, which an id may not do. "
            f"Import the module first (`--import {module}` on the command line, "
            f"`import {module}` in Python) and use the id {name!r}."
        )
    if environment_id not in gym.registry:
        suggestions = _similar_ids(environment_id)
        hint = f" Did you mean {' or '.join(suggestions)}?" if suggestions else ""
        raise EnvironmentSetupError(
            f"Environment {environment_id!r} is not registered.{hint} If it comes from a package "
            "of its own, import that first (`--import MODULE` on the command line)."
        )


def environment_factory(
    environment_id: str | None, kwargs: Mapping[str, Any], source: EnvironmentSource | None
) -> EnvironmentFactory:
    """What makes the run's environments: the user's own object, or a registered id."""
    if source is not None:
        return EnvironmentFactory(source, kwargs)
    if environment_id is None:
        raise ConfigError(
            "env_id: required, but not given (a Gymnasium id such as Pendulum-v1); "
            "one of your own is handed over in Python: train(config, env=lambda: MyEnv())"
        )
    check_environment_id(environment_id)
    return EnvironmentFactory(environment_id, kwargs)


def _similar_ids(environment_id: str) -> list[str]:
    """Up to three registered ids: the same name's newest version, then similar spellings."""
    name = re.sub(r"-v\d+$", "", environment_id).lower()
    versions = [
        (int(found[2]), known)
        for known in gym.registry
        if (found := re.fullmatch(r"(.+)-v(\d+)", known)) and found[1].lower() == name
    ]
    newest = [known for _, known in sorted(versions, reverse=True)[:1]]
    by_lower = {known.lower(): known for known in gym.registry}
    close = difflib.get_close_matches(environment_id.lower(), by_lower, n=3, cutoff=0.75)
    return list(dict.fromkeys(newest + [by_lower[match] for match in close]))[:3]


def _make_by_id(environment_id: str, kwargs: Mapping[str, Any]) -> Environment:
    check_environment_id(environment_id)
    entry_point = gym.registry[environment_id].entry_point
    try:
        if isinstance(entry_point, str):
            # Loaded before it is called, since MuJoCo already warns while it reads the model.
            importlib.import_module(entry_point.partition(":")[0])
        keep_mujoco_quiet()
        return gym.make(environment_id, disable_env_checker=True, **kwargs)
    except (gym.error.DependencyNotInstalled, ImportError) as error:
        raise _dependency_error(environment_id, str(entry_point), error) from error
    except TypeError as error:
        raise _argument_error(environment_id, kwargs, error) from error
    except gym.error.Error as error:
        raise EnvironmentSetupError(f"Cannot make {environment_id}: {error}") from error


def _make_another(example: Environment, kwargs: Mapping[str, Any]) -> Environment:
    """A fresh environment like `example`, which itself is left alone."""
    keep_mujoco_quiet()
    if _spec_id(example) is not None and example.spec is not None:
        try:
            return gym.make(example.spec, disable_env_checker=True, **kwargs)
        except (gym.error.Error, ValueError):
            pass  # a wrapper that Gymnasium cannot make again: a copy may still do
    name = _qualified_name(type(example.unwrapped))
    if kwargs:
        raise EnvironmentSetupError(
            f"Keyword arguments {', '.join(kwargs)} cannot change an environment that is already "
            f"made ({name}). Pass its class or a function that makes it."
        )
    try:
        return copy.deepcopy(example)
    except Exception as error:  # whatever an environment's own members raise when copied
        raise EnvironmentSetupError(
            f"{name} cannot be copied ({error}), and training, evaluation and each parallel "
            "environment need their own. Pass a function that makes it, as `lambda: MyEnv()`."
        ) from error


def _spec_id(environment: Environment) -> str | None:
    spec = environment.spec
    return None if spec is None else spec.id


def _qualified_name(source: Any) -> str:
    named = source if hasattr(source, "__qualname__") else type(source)
    return f"{named.__module__}.{named.__qualname__}"


def _dependency_error(
    environment_id: str, entry_point: str, error: Exception
) -> EnvironmentSetupError:
    needs_mujoco = "mujoco" in f"{entry_point} {error}".lower()
    hint = 'Run `pip install "rl-training[mujoco]"`.' if needs_mujoco else "Install what it needs."
    return EnvironmentSetupError(f"{environment_id} needs a package: {error}. {hint}")


def _argument_error(
    label: str, kwargs: Mapping[str, Any], error: TypeError
) -> EnvironmentSetupError:
    given = f"the keyword arguments {', '.join(kwargs)}" if kwargs else "no keyword arguments"
    return EnvironmentSetupError(f"Cannot make {label} with {given}: {error}")


def check_environment(factory: EnvironmentFactory, *, reads_data: bool = False) -> None:
    """Make one environment and see that `reset` and `step` are Gymnasium's, or say what is not.

    `reads_data` says that the run learns from recorded observations too: a wrapper that normalises
    live ones would put the two on different scales.
    """
    environment = factory()
    try:
        if reads_data and _normalizes_observations(environment):
            raise EnvironmentSetupError(
                f"{factory.label}: NormalizeObservation normalises live observations by what it "
                "sees, which is not how recorded ones were; leave that wrapper out and set "
                "`normalize_observations: true`, which takes its statistics from the data"
            )
        _check_reset(environment, factory.label)
        _check_step(environment, factory.label)
    finally:
        environment.close()


def _normalizes_observations(environment: Environment) -> bool:
    """Whether a wrapper of Gymnasium's does, by statistics of what it has seen."""
    return any(
        isinstance(layer, NormalizeObservation) and not has_own_snapshot(layer)
        for layer in layers_of(environment)
    )


def _check_reset(environment: gym.Env[Any, Any], label: str) -> None:
    parameters = inspect.signature(environment.unwrapped.reset).parameters
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    if "seed" not in parameters and not takes_any:
        raise EnvironmentSetupError(
            f"{label}: reset must be `reset(self, *, seed=None, options=None)`; "
            f"this one takes ({', '.join(parameters)})"
        )
    result = environment.reset(seed=0)
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)):
        raise EnvironmentSetupError(
            f"{label}: reset must return `observation, info`; this one returned {_kind(result)}"
        )


def _check_step(environment: gym.Env[Any, Any], label: str) -> None:
    environment.action_space.seed(0)
    result = environment.step(environment.action_space.sample())
    if not (isinstance(result, tuple) and len(result) == 5):
        raise EnvironmentSetupError(
            f"{label}: step must return `observation, reward, terminated, truncated, info`; "
            f"this one returned {_kind(result)}"
        )


def _kind(result: Any) -> str:
    return f"{len(result)} values" if isinstance(result, tuple) else type(result).__name__
