"""Load the wrappers that a config or a run folder names, from modules that the user trusts.

Importing a module runs its code, and a config or a run folder may come from a stranger. A name in
such a file therefore imports nothing: its module must be passed to `trust_modules` first, which the
command line does for every module that the command itself names. The wrappers of `PLAIN_WRAPPERS`
are always allowed.
"""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium as gym

from rl_training.envs.snapshots.layers import Environment, Wrapper, foreign_code
from rl_training.errors import EnvironmentSetupError, UntrustedModuleError
from rl_training.types import Json

TRUSTED_MODULES: dict[str, None] = {}
"""The modules passed to `trust_modules`, in that order; runs remember these names"""

MAX_MODULES = 64
"""Maximum number of modules that a run remembers"""

PLAIN_WRAPPERS = frozenset(
    {
        "rl_training.envs.atari:EpisodicLife",
        "rl_training.envs.hiding:KeepComponents",
        "gymnasium.wrappers:AddRenderObservation",
        "gymnasium.wrappers:AtariPreprocessing",
        "gymnasium.wrappers:ClipReward",
        "gymnasium.wrappers:FlattenObservation",
        "gymnasium.wrappers:FrameStackObservation",
        "gymnasium.wrappers:GrayscaleObservation",
        "gymnasium.wrappers:MaxAndSkipObservation",
        "gymnasium.wrappers:NormalizeObservation",
        "gymnasium.wrappers:NormalizeReward",
        "gymnasium.wrappers:ResizeObservation",
        "gymnasium.wrappers:StickyAction",
        "gymnasium.wrappers:TimeAwareObservation",
        "gymnasium.wrappers:TimeLimit",
    }
)
"""Wrappers that anyone may name: they only compute, from numbers.

Others of Gymnasium write files wherever they are told to."""

_MODULE_NAME = re.compile(r"_?[A-Za-z]\w*(\._?[A-Za-z]\w*)*", re.ASCII)


@dataclass(frozen=True)
class WrapperFactory:
    """Puts a wrapper around an environment."""

    name: str
    """`module:Class`"""
    kind: type[Wrapper]
    kwargs: Mapping[str, Any]

    def __call__(self, environment: Environment) -> Environment:
        with foreign_code(lambda error: self._failure(environment, error)):
            return self.kind(environment, **self.kwargs)

    def _failure(self, environment: Environment, error: BaseException) -> EnvironmentSetupError:
        given = ", ".join(f"{key}={value!r}" for key, value in self.kwargs.items())
        return EnvironmentSetupError(
            f"Wrapper {self.name} cannot be put around {environment} with "
            f"{f'the keyword arguments {given}' if given else 'no keyword arguments'}: "
            f"{type(error).__name__}: {error}{_installation_advice(error)}"
        )


def _installation_advice(error: BaseException) -> str:
    if isinstance(error, gym.error.DependencyNotInstalled) and "opencv" in str(error):
        return '; run `pip install "rl-training[pixels]"`'
    return ""


def trust_modules(*names: str) -> None:
    """Import modules, and allow the wrappers that configs and run folders name to come from them.

    Runs remember these names. Evaluating or resuming a run never imports them by itself: call this
    function again, or use `--import` on the command line. Raises `EnvironmentSetupError` if a
    module cannot be imported.
    """
    for name in names:
        _check_module_name(name)
        with foreign_code(functools.partial(_import_error, name)):
            importlib.import_module(name)
        TRUSTED_MODULES[name] = None


def _import_error(name: str, error: BaseException) -> EnvironmentSetupError:
    problem = error if isinstance(error, ImportError) else f"{type(error).__name__}: {error}"
    return EnvironmentSetupError(f"Cannot import the module {name!r}: {problem}")


def load_wrappers(settings: Sequence[Json]) -> tuple[WrapperFactory, ...]:
    """Return a factory for each `{"wrapper": "module:Class", "kwargs": {...}}`, in order.

    Raises `UntrustedModuleError` if a module is not trusted, even if it is already imported.
    """
    names = [setting["wrapper"] for setting in settings]
    named = [(name, name.partition(":")[0]) for name in names if name not in PLAIN_WRAPPERS]
    modules = [module for _, module in named]
    unknown = [name for name, module in named if module not in TRUSTED_MODULES]
    if unknown:
        raise UntrustedModuleError(
            f"wrappers: {', '.join(unknown)} cannot be loaded, because a config or a run folder "
            "imports no modules",
            untrusted(modules),
        )
    return tuple(
        WrapperFactory(
            setting["wrapper"],
            _wrapper_class(setting["wrapper"]),
            _as_arguments(setting["wrapper"], setting["kwargs"]),
        )
        for setting in settings
    )


def _as_arguments(name: str, kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return keyword arguments with tuples, which Gymnasium's wrappers expect and JSON lacks."""
    if name not in PLAIN_WRAPPERS:
        return kwargs
    return {
        key: tuple(value) if isinstance(value, list) else value for key, value in kwargs.items()
    }


def untrusted(modules: Sequence[str]) -> list[str]:
    """Return the modules that are not trusted yet, without duplicates."""
    return [name for name in dict.fromkeys(modules) if name not in TRUSTED_MODULES]


def are_module_names(names: object) -> bool:
    """Whether this is a list of module names, which can be shown as part of a command."""
    return (
        isinstance(names, list)
        and len(names) <= MAX_MODULES
        and all(isinstance(name, str) and _is_module_name(name) for name in names)
    )


def _wrapper_class(name: str) -> type[Wrapper]:
    module, _, class_name = name.partition(":")
    # Only trusted modules, which are imported, and those of `PLAIN_WRAPPERS` get here.
    found = getattr(importlib.import_module(module), class_name, None)
    if found is None:
        raise EnvironmentSetupError(f"Wrapper {name}: the module {module} has no {class_name!r}.")
    if not (isinstance(found, type) and issubclass(found, gym.Wrapper)):
        raise EnvironmentSetupError(
            f"Wrapper {name}: {class_name} must be a class that derives from gymnasium.Wrapper."
        )
    # A trusted module may import wrappers of a package that the user did not name.
    if found.__module__.partition(".")[0] != module.partition(".")[0]:
        raise EnvironmentSetupError(
            f"Wrapper {name}: {class_name} belongs to {found.__module__}; name that module."
        )
    return found


def _check_module_name(name: str) -> None:
    if _is_module_name(name):
        return
    module = name.removeprefix("./").removesuffix(".py").replace("/", ".")
    hint = f"; for a file, leave out .py: {module}" if name.endswith(".py") else f"; use {module}"
    raise EnvironmentSetupError(
        f"{name!r} is not the name of a module, such as my_package.my_module"
        f"{hint if _is_module_name(module) else ''}."
    )


def _is_module_name(name: str) -> bool:
    return len(name) <= 200 and not name.endswith(".py") and bool(_MODULE_NAME.fullmatch(name))
