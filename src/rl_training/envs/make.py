"""Make environments from an id, a class, a function or an example, and check them.

`EnvironmentFactory` makes environments to train in, `EvaluationFactory` those to evaluate in.
`check_environment` finds common errors in an environment before a run starts.
"""

from __future__ import annotations

import copy
import difflib
import functools
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import gymnasium as gym

from rl_training.envs.packages import (
    TENSOR_IDS,
    gymnasium_id,
    import_known_package,
    keep_emulator_quiet,
    twin_kwargs,
)
from rl_training.envs.snapshots.atari import record_emulator
from rl_training.envs.snapshots.layers import (
    Environment,
    TrainingBoundary,
    foreign_code,
    learning_wrappers,
    normalizes_for_training_only,
)
from rl_training.envs.snapshots.mujoco import keep_mujoco_quiet
from rl_training.envs.spaces import StatedActionRange, describe_spaces
from rl_training.envs.tensors.contract import TensorSource
from rl_training.envs.wrapper_statistics import use_statistics
from rl_training.envs.wrapping import WrapperFactory, are_module_names, load_wrappers, untrusted
from rl_training.errors import (
    ConfigError,
    EnvironmentSetupError,
    UntrustedModuleError,
    UserError,
    last_line,
    warn_user,
)
from rl_training.observations import NumberTypes, ObservationSpec
from rl_training.types import Json, SpaceInfo

EnvironmentSource = str | Environment | TensorSource | Callable[..., Environment]
"""A registered id, an example environment, a class or function that makes one, or a
`TensorSource`"""


@dataclass(frozen=True)
class EnvironmentFactory:
    """Makes a new, independent environment at every call.

    `kwargs` are passed to `gym.make` for an id, else to the class or function. `wrappers` are put
    around the environment, the first one innermost. `observation_keys` select leaves of its
    observations (None: all). `training_wrappers` are put around the others, but not in evaluation.
    Raises `EnvironmentSetupError` if the environment cannot be made.
    """

    source: EnvironmentSource
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    wrappers: Sequence[WrapperFactory] = ()
    action_range: tuple[float, float] | None = None
    """The range of actions in an action space without finite bounds"""
    observation_keys: Sequence[str] | None = None
    training_wrappers: Sequence[WrapperFactory] = ()
    number_types: NumberTypes | None = None
    """The types in which numbers of observations are stored; None: those of the space"""

    def __call__(self) -> Environment:
        environment = self._make()
        record_emulator(environment)
        try:
            for wrapper in self.wrappers:
                environment = wrapper(environment)
            if self.action_range is not None:
                environment = StatedActionRange(environment, self.action_range)
            if self.training_wrappers:
                environment = self._wrap_for_training(environment)
        except BaseException:
            close_environment(environment)
            raise
        return environment

    def storing_as(self, observation: ObservationSpec) -> EnvironmentFactory:
        """The same environments, whose observations are stored in the types of others."""
        return replace(self, number_types=observation.number_types)

    def spaces_of(self, environment: Environment) -> SpaceInfo:
        """Describe the spaces of an environment that was made here."""
        return describe_spaces(environment, self.observation_keys, self.number_types)

    def make_many(self, number: int) -> list[Environment]:
        """Make `number` environments; `EnvironmentSetupError` if two are the same object."""
        environments: list[Environment] = []
        try:
            for _ in range(number):
                environments.append(self())
            if len({id(environment.unwrapped) for environment in environments}) < number:
                raise EnvironmentSetupError(
                    f"{self.label} returned the same environment twice; it must make a new one "
                    "each time, as `lambda: MyEnv()` does."
                )
        except BaseException:
            for environment in environments:
                close_environment(environment)
            raise
        return environments

    def _wrap_for_training(self, environment: Environment) -> Environment:
        wrapped: Environment = TrainingBoundary(environment)
        for wrapper in self.training_wrappers:
            wrapped = wrapper(wrapped)
            for space in ("observation_space", "action_space"):
                if getattr(wrapped, space) != getattr(environment, space):
                    raise EnvironmentSetupError(
                        f"training_wrappers: {wrapper.name} changes the {space.replace('_', ' ')}, "
                        "so evaluations cannot do without it; move it to wrappers"
                    )
        if normalizes_for_training_only(wrapped):
            raise EnvironmentSetupError(
                "training_wrappers: NormalizeObservation changes observations, so evaluations "
                "cannot do without it; move it to wrappers, or set `normalize_observations: true`"
            )
        return wrapped

    @property
    def tensor_source(self) -> TensorSource | None:
        """How worlds that are tensors are made; None if the environment has none."""
        if isinstance(self.source, str) and self.source in TENSOR_IDS:
            return TENSOR_IDS[self.source].source(self.source)
        return self.source if isinstance(self.source, TensorSource) else None

    @property
    def can_evaluate(self) -> bool:
        """Whether more environments can be made while a run has its own."""
        return not isinstance(self.source, TensorSource) or self.source.evaluated

    _ends_broken = False
    """Whether an episode ends where a world of tensors breaks, instead of being an error"""

    @property
    def is_tensors(self) -> bool:
        """Whether the worlds of the environment are tensors. Imports nothing."""
        if isinstance(self.source, str):
            return self.source in TENSOR_IDS
        return isinstance(self.source, TensorSource)

    def _make(self) -> Environment:
        if isinstance(self.source, str):
            environment = _make_by_id(self.source, self.kwargs)
        elif isinstance(self.source, TensorSource):
            environment = self._single_world(self.source)
        elif isinstance(self.source, gym.Env):
            environment = _make_another(self.source, self.kwargs)
        elif callable(self.source):
            environment = self._call_source(self.source)
        else:
            _refuse_vector(self.source)
            raise EnvironmentSetupError(
                "Pass an environment as an id, a gymnasium.Env or a function that makes one, "
                f"not as {type(self.source).__name__}."
            )
        if not isinstance(environment, gym.Env):
            _refuse_vector(environment)
            raise EnvironmentSetupError(
                f"{self.label} returned {type(environment).__name__}, not a gymnasium.Env."
            )
        return environment

    def _single_world(self, source: TensorSource) -> Environment:
        from rl_training.envs.tensors.single import SingleWorld  # few runs need it

        with foreign_code(lambda error: _making_error(self.label, self.kwargs, error)):
            return SingleWorld(
                source.make(1, "cpu", **self.kwargs),
                shared=not source.evaluated,
                ends_broken=self._ends_broken,
            )

    def _call_source(self, source: Callable[..., Environment]) -> Environment:
        _quiet_simulators()
        with foreign_code(lambda error: _making_error(self.label, self.kwargs, error)):
            return source(**self.kwargs)

    @property
    def label(self) -> str:
        """Name for messages: the id, else the qualified name of the class or function."""
        if isinstance(self.source, str):
            return self.source
        if isinstance(self.source, gym.Env):
            return _spec_id(self.source) or _qualified_name(type(self.source.unwrapped))
        if isinstance(self.source, TensorSource):
            return _qualified_name(self.source.make)
        return _qualified_name(self.source)

    @property
    def is_registered_id(self) -> bool:
        """Whether the source is an id, which can be written to a config file."""
        return isinstance(self.source, str)


@dataclass(frozen=True)
class EvaluationFactory(EnvironmentFactory):
    """Makes environments for evaluation, whose wrappers use the statistics of training.

    They do not have the `training_wrappers`. Every episode starts from the same statistics. Rewards
    are not normalized by `NormalizeReward`.
    """

    _ends_broken = True

    statistics: Sequence[Json] = ()

    @classmethod
    def like(
        cls, factory: EnvironmentFactory, statistics: Sequence[Json] | None
    ) -> EvaluationFactory:
        """Make the environments of `factory`, with the statistics that a policy was saved with."""
        values = {each.name: getattr(factory, each.name) for each in fields(EnvironmentFactory)}
        return cls(**{**values, "training_wrappers": ()}, statistics=statistics or ())

    def __call__(self) -> Environment:
        environment = super().__call__()
        if not self.statistics and not learning_wrappers(environment):
            return environment
        try:
            return use_statistics(environment, self.statistics)
        except BaseException:
            close_environment(environment)
            raise


def _refuse_vector(environment: object) -> None:
    if isinstance(environment, gym.vector.VectorEnv):
        raise EnvironmentSetupError(
            f"{type(environment).__name__} is a vector environment. Pass a single environment and "
            "set num_envs. Instead of a wrapper from gymnasium.wrappers.vector, use the one from "
            "gymnasium.wrappers, or set `normalize_observations: true`."
        )


def check_environment_id(environment_id: str, modules: Sequence[str] = ()) -> None:
    """Raise `EnvironmentSetupError` unless the id is registered.

    Imports nothing but packages that are known by their ids (see `packages.py`). `modules` are
    those that a run was trained with. They must have been imported even if the id is registered,
    because one of them may register another environment with this id.
    """
    if ":" in environment_id:
        module, _, name = environment_id.partition(":")
        # A file may contain anything, also line breaks and escape codes.
        shown = module if are_module_names([module]) else "MODULE"
        raise EnvironmentSetupError(
            f"Environment id {environment_id!r} names a module to import, which is not allowed. "
            f"Import the module first (`--import {shown}` on the command line, "
            f"`import {shown}` in Python) and use the id {name!r}."
        )
    if modules:
        _check_imported(environment_id, modules)
    import_known_package(environment_id)
    if environment_id not in gym.registry and environment_id not in TENSOR_IDS:
        suggestions = _similar_ids(environment_id)
        hint = f" Did you mean {' or '.join(suggestions)}?" if suggestions else ""
        raise EnvironmentSetupError(
            f"Environment {environment_id!r} is not registered.{hint} If it comes from another "
            "package, import that first (`--import MODULE` on the command line)."
        )


def _check_imported(environment_id: str, modules: Sequence[str]) -> None:
    if missing := [name for name in untrusted(modules) if name not in sys.modules]:
        raise UntrustedModuleError(
            f"The run was trained with {' '.join(f'--import {name}' for name in modules)}, which "
            f"may define its environment {environment_id!r}",
            missing,
        )


def check_environment_packages(environment_id: str) -> None:
    """Import the code of a registered environment, without making one.

    Raises `EnvironmentSetupError` if the id is not registered or a package is missing.
    """
    check_environment_id(environment_id)
    entry_point = gym.registry[gymnasium_id(environment_id)].entry_point
    if not isinstance(entry_point, str):
        return
    with foreign_code(lambda error: _id_error(environment_id, {}, error)):
        importlib.import_module(entry_point.partition(":")[0])


def environment_factory(
    environment_id: str | None,
    kwargs: Mapping[str, Any],
    source: EnvironmentSource | None,
    *,
    wrappers: Sequence[Json] = (),
    modules: Sequence[str] = (),
    action_range: tuple[float, float] | None = None,
    observation_keys: Sequence[str] | None = None,
    training_wrappers: Sequence[Json] = (),
    number_types: NumberTypes | None = None,
) -> EnvironmentFactory:
    """Return a factory for `source` if given, else for the registered `environment_id`.

    `wrappers` and `training_wrappers` are the settings that `load_wrappers` takes. `modules` are
    those that a run was trained with, and which must have been imported. `action_range` is the
    range of actions, for action spaces without finite bounds. `observation_keys` select leaves of
    the observations (None: all), and `number_types` are the types in which their numbers are stored
    (None: those of the space).
    """
    if source is None and environment_id is None:
        raise ConfigError(
            "env_id: required, but not given (a Gymnasium id such as Pendulum-v1); "
            "pass your own environment in Python: train(config, env=lambda: MyEnv())"
        )
    if source is None:
        assert environment_id is not None
        check_environment_id(environment_id, modules)
        source = environment_id
    return EnvironmentFactory(
        source,
        kwargs,
        load_wrappers(wrappers),
        action_range,
        observation_keys,
        load_wrappers(training_wrappers),
        number_types,
    )


def _similar_ids(environment_id: str) -> list[str]:
    """Return up to three registered ids: the newest version of the name, then similar names."""
    name = re.sub(r"-v\d+$", "", environment_id).lower()
    versions = [
        (int(found[2]), known)
        for known in gym.registry
        if (found := re.fullmatch(r"(.+)-v(\d+)", known)) and found[1].lower() == name
    ]
    newest = [known for _, known in sorted(versions, reverse=True)[:1]]
    by_lower = {known.lower(): known for known in gym.registry}
    by_lower |= {known.lower(): known for known in TENSOR_IDS}
    close = difflib.get_close_matches(environment_id.lower(), by_lower, n=3, cutoff=0.75)
    return list(dict.fromkeys(newest + [by_lower[match] for match in close]))[:3]


def _make_by_id(environment_id: str, kwargs: Mapping[str, Any]) -> Environment:
    # Imported first, since MuJoCo already warns when the constructor reads the model.
    check_environment_packages(environment_id)
    with foreign_code(lambda error: _id_error(environment_id, kwargs, error)):
        _quiet_simulators()
        if environment_id in TENSOR_IDS:
            return _make_twin(environment_id, kwargs)
        return gym.make(environment_id, disable_env_checker=True, **kwargs)


def _make_twin(environment_id: str, kwargs: Mapping[str, Any]) -> Environment:
    """Make the environment of Gymnasium that a tensor environment is a copy of."""
    kept, twin = twin_kwargs(environment_id, kwargs), gymnasium_id(environment_id)
    environment: Environment = gym.make(twin, disable_env_checker=True, **kept)
    if TENSOR_IDS[environment_id].newton:
        import mujoco

        environment.unwrapped.model.opt.solver = mujoco.mjtSolver.mjSOL_NEWTON  # type: ignore[attr-defined]
    return environment


def _make_another(example: Environment, kwargs: Mapping[str, Any]) -> Environment:
    """Make a new environment like `example`, which is not changed."""
    _quiet_simulators()
    if _spec_id(example) is not None and example.spec is not None:
        try:
            return gym.make(example.spec, disable_env_checker=True, **kwargs)
        except (gym.error.Error, ValueError):
            pass  # Gymnasium cannot make one of the wrappers again, but a copy may work
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # the code of another package may raise anything
            raise _making_error(example.spec.id, kwargs, error) from error
    name = _qualified_name(type(example.unwrapped))
    if kwargs:
        raise EnvironmentSetupError(
            f"Keyword arguments {', '.join(kwargs)} cannot be passed to an existing environment "
            f"({name}). Pass its class or a function that makes it."
        )
    with foreign_code(
        lambda error: EnvironmentSetupError(
            f"{name} cannot be copied ({error}), but training and evaluation need several "
            "environments. Pass a function that makes one, such as `lambda: MyEnv()`."
        )
    ):
        return copy.deepcopy(example)


def _quiet_simulators() -> None:
    keep_emulator_quiet()
    if sys.modules.get("mujoco") is not None:
        keep_mujoco_quiet()


def _spec_id(environment: Environment) -> str | None:
    spec = environment.spec
    return None if spec is None else spec.id


def _qualified_name(source: Any) -> str:
    while isinstance(source, functools.partial):
        source = source.func
    if getattr(source, "__name__", "") == "<lambda>":
        code = source.__code__
        return f"lambda ({Path(code.co_filename).name}, line {code.co_firstlineno})"
    named = source if hasattr(source, "__qualname__") else type(source)
    return f"{named.__module__}.{named.__qualname__}"


def _id_error(environment_id: str, kwargs: Mapping[str, Any], error: BaseException) -> Exception:
    if not isinstance(error, gym.error.DependencyNotInstalled | ImportError):
        return _making_error(environment_id, kwargs, error)
    entry_point = gym.registry[gymnasium_id(environment_id)].entry_point
    needs_mujoco = "mujoco" in f"{entry_point} {error}".lower()
    hint = 'Run `pip install "rl-training[mujoco]"`.' if needs_mujoco else "Install that package."
    return EnvironmentSetupError(f"{environment_id} needs a package: {last_line(error)}. {hint}")


def _making_error(label: str, kwargs: Mapping[str, Any], error: BaseException) -> Exception:
    """Describe an error of the environment's own code; errors of this package stay as they are."""
    if isinstance(error, UserError):
        return error
    if isinstance(error, TypeError):  # usually a missing or unknown argument
        given = f"the keyword arguments {', '.join(kwargs)}" if kwargs else "no keyword arguments"
        return EnvironmentSetupError(f"Cannot make {label} with {given}: {error}")
    return EnvironmentSetupError(f"Cannot make {label}: {last_line(error)}")


def close_environment(environment: Environment) -> None:
    """Close an environment; an error is only a warning, since nothing depends on it."""
    try:
        environment.close()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # the code of another package may raise anything
        name = _spec_id(environment) or _qualified_name(type(environment.unwrapped))
        warn_user(f"{name} could not be closed: {last_line(error)}")


def check_environment(factory: EnvironmentFactory, *, reads_data: bool = False) -> str:
    """Make one environment and check that `reset` and `step` follow the Gymnasium API.

    Returns its name: the id, or the qualified name of its class. Raises `EnvironmentSetupError` if
    a check fails. Set `reads_data` if the run also learns from recorded observations:
    `NormalizeObservation` would scale live observations differently.
    """
    environment = factory()
    try:
        kinds = [kind for _, kind in learning_wrappers(environment)]
        if reads_data and "observation" in kinds:
            raise EnvironmentSetupError(
                f"{factory.label}: NormalizeObservation scales live observations differently from "
                "the recorded ones; remove that wrapper and set `normalize_observations: true`, "
                "which takes its statistics from the data"
            )
        _check_reset(environment, factory.label)
        _check_step(environment, factory.label)
        if factory.is_registered_id:
            return factory.label
        return _spec_id(environment) or _qualified_name(type(environment.unwrapped))
    finally:
        close_environment(environment)


def _check_reset(environment: Environment, label: str) -> None:
    parameters = inspect.signature(environment.unwrapped.reset).parameters
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    if "seed" not in parameters and not takes_any:
        raise EnvironmentSetupError(
            f"{label}: reset must be `reset(self, *, seed=None, options=None)`; "
            f"it takes ({', '.join(parameters)})"
        )
    with foreign_code(lambda error: _failure(label, "reset", error)):
        result = environment.reset(seed=0)
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)):
        raise EnvironmentSetupError(
            f"{label}: reset must return `observation, info`; it returned {_kind(result)}"
        )


def _check_step(environment: Environment, label: str) -> None:
    with foreign_code(lambda error: _failure(label, "step", error)):
        environment.action_space.seed(0)
        result = environment.step(environment.action_space.sample())
    if not (isinstance(result, tuple) and len(result) == 5):
        raise EnvironmentSetupError(
            f"{label}: step must return `observation, reward, terminated, truncated, info`; "
            f"it returned {_kind(result)}"
        )


def _failure(label: str, method: str, error: BaseException) -> EnvironmentSetupError:
    return EnvironmentSetupError(f"{label}: {method} failed: {last_line(error)}")


def _kind(result: Any) -> str:
    return f"{len(result)} values" if isinstance(result, tuple) else type(result).__name__
