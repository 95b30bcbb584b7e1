"""How one environment is made, from an id, a class, a function or an example."""

from __future__ import annotations

import copy
import difflib
import importlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import gymnasium as gym

from rl_training.envs.mujoco_support import keep_mujoco_quiet
from rl_training.errors import EnvironmentSetupError

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
