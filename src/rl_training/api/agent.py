"""`Agent`: the base class of the managed classes, such as `SAC`.

Its methods call `runtime.workflows`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, overload

import numpy as np
from pydantic import BaseModel

from rl_training.algorithms.hyperparameters import Hyperparameters, OnlineHyperparameters
from rl_training.algorithms.spec import get_algorithm_spec, unknown_setting_hint
from rl_training.api.other_packages import (
    as_steps,
    as_verbose,
    check_learn_options,
    check_no_policy_class,
    check_setting,
    either,
    has_no_effect,
    progress_choice,
)
from rl_training.api.parameters import LazyDocumentation, LazySignature
from rl_training.callbacks import Callback, as_callbacks
from rl_training.config import TrainConfig
from rl_training.config_files import load_config
from rl_training.envs import EnvironmentSource
from rl_training.errors import ConfigError, TrainingInterrupted, UserError
from rl_training.runtime import workflows
from rl_training.types import Json, RecordedEpisode, ScheduleChoice, TrainResult, VideoSelection

if TYPE_CHECKING:
    from rl_training.deployment.formats import Format


class Agent:
    """Base class of the managed classes. Use a subclass such as `SAC`."""

    algo: ClassVar[str]
    """Name of the algorithm"""
    config: TrainConfig
    """All settings, with defaults"""
    result: TrainResult | None
    """Result of the last call of `learn`"""
    __signature__: ClassVar[LazySignature] = LazySignature()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if cls.__init__ is Agent.__init__:
            cls.__doc__ = LazyDocumentation(cls.__doc__)  # type: ignore[assignment]

    def __init__(
        self,
        env: EnvironmentSource | TrainConfig | None = None,
        *others: Any,
        verbose: int | None = None,
        **settings: Any,
    ) -> None:
        """Create an untrained agent.

        Args:
            env: Gymnasium id, environment, environment class or factory, or a `TrainConfig`.
            *others: Not supported; Stable-Baselines3's `SAC("MlpPolicy", env)` is explained.
            verbose: 1 shows the progress of `learn`, 0 does not; by default it is shown in a
                terminal or a notebook. `learn(progress=...)` takes precedence.
            **settings: Config keys and hyper-parameters, for example
                `SAC("Pendulum-v1", seed=1, total_timesteps=10_000, learning_rate=1e-3)`.
                `dataset` may also be a mapping of arrays with D4RL's names, for example
                `TD3BC(dataset={"observations": ..., ...})`, and `networks` a class of your own
                networks instead of settings.
        """
        check_no_policy_class(type(self).__name__, env, others, settings)
        self._env: EnvironmentSource | None = None
        self._progress = as_verbose(verbose)
        self._arrays, self._networks = _take_arrays(settings), _take_networks(settings)
        if isinstance(env, TrainConfig):
            values = {**env.to_mapping(), **self._sort_settings(settings, env)}
        else:
            values = self._sort_settings(settings, None)
            if isinstance(env, str):
                values["env_id"] = env
            elif env is not None:
                self._env = env
        self.config = TrainConfig(**{"algo": self.algo, **values})
        if self.config.algo != self.algo:
            raise ConfigError(
                f"algo = {self.config.algo!r}: {type(self).__name__} needs {self.algo!r}"
            )
        if self.config.seeds is not None:
            raise ConfigError(
                "seeds: an agent supports one seed; use rl_training.train for several"
            )
        self.result = None
        self._saved: Path | None = None
        self._resumable = False
        self._policy: workflows.Policy | None = None
        self._environment_description: Json | None = None

    @classmethod
    def from_config(cls, source: str | Path | TrainConfig, **settings: Any) -> Self:
        """Create an agent from a config file or a packaged name such as `sac/pendulum`."""
        return cls(load_config(source), **settings)

    @classmethod
    def load(
        cls,
        path: str | Path,
        env: EnvironmentSource | None = None,
        *,
        dataset: Any = None,
        networks: object = None,
    ) -> Self:
        """Load a trained agent from a run folder, a checkpoint or a saved policy.

        After loading a run or a checkpoint, `learn` resumes the run. If the run used an environment
        object or arrays, pass them again as `env` and `dataset`, and your own networks as
        `networks`. After loading a saved policy, or with another environment, `learn(n)` trains n
        steps in a new run that starts from the policy.
        """
        saved = workflows.open_policy(path, networks=networks)
        policy, environment = saved.policy, saved.environment
        if policy.algorithm_name != cls.algo:
            raise UserError(
                f"{path}: contains a policy of {policy.algorithm_name!r}, not {cls.algo!r}"
            )
        config = saved.config or TrainConfig(
            algo=cls.algo,
            env_id=environment.get("id"),
            env_kwargs=environment.get("kwargs") or {},
            wrappers=environment.get("wrappers") or [],
            algo_kwargs=_restore_auto(policy.algorithm.hyperparameters),
            normalize_observations=policy.normalizer is not None,
        )
        if isinstance(env, str):
            config = config.with_changes(env_id=env, env_kwargs={})
        agent = cls(config, **({} if dataset is None else {"dataset": dataset}))
        agent._env = None if isinstance(env, str) else env
        agent._networks = networks
        agent._saved, agent._policy = Path(path), policy
        agent._environment_description = environment if env is None else None
        # With `env`, a run can be resumed only if its own environment was an object without an id.
        has_id = environment.get("id") is not None
        same_environment = env is None or not (has_id or isinstance(env, str))
        agent._resumable = saved.config is not None and same_environment
        return agent

    def learn(
        self,
        total_timesteps: int | float | None = None,
        callbacks: Callback | Sequence[Callback] | None = None,
        *,
        schedule: ScheduleChoice | None = None,
        progress: bool | None = None,
        verbose: int | None = None,
        callback: Callback | Sequence[Callback] | None = None,
        progress_bar: bool | None = None,
        **others: Any,
    ) -> TrainResult:
        """Train the agent, or continue to train it.

        The first `learn(n)` trains n steps; after that, or after loading a run, `learn(n)` trains
        n more steps of the same run. `learn()` trains to the total of the config, or what is left
        of it after an interruption. Steps are environment steps, or gradient steps if training is
        offline.

        Args:
            total_timesteps: Number of steps to train.
            callbacks: Callbacks of this call.
            schedule: When continuing, `"extend"` stretches learning-rate schedules, and all others
                that depend on the length of the run, to the new total. `"keep"` leaves them
                unchanged, even if every learning rate has decayed to zero.
            progress: Whether to show progress; by default in a terminal or a notebook.
            verbose: Stable-Baselines3's name: 0 means `progress=False`, 1 means `progress=True`.
            callback: Stable-Baselines3's name of `callbacks`.
            progress_bar: Stable-Baselines3's name of `progress`.
            **others: Not supported; options of other packages are explained.

        Raises:
            TrainingInterrupted: After Ctrl-C or a signal, once a checkpoint is saved. `learn()`
                continues.
        """
        workflows.check_schedule_choice(schedule)
        check_learn_options(others)
        chosen = as_callbacks(either("callbacks", callbacks, "callback", callback))
        shown = progress_choice(progress, verbose, progress_bar)
        shown = self._progress if shown is None else shown
        steps = as_steps(total_timesteps)
        config = self._planned(steps)
        try:
            result = self._train(config, steps, schedule, chosen, shown)
        except TrainingInterrupted as interruption:
            self._keep(interruption.result, config)
            raise
        self._keep(result, config)
        return result

    def _planned(self, steps: int | None) -> TrainConfig:
        """Return the config of the next call of `learn`."""
        if self._resumable:
            assert self._saved is not None
            status = workflows.read_status(self._saved)
            total = status.total_timesteps if steps is None else status.step + steps
            return self.config.with_changes(total_timesteps=total)
        changes: dict[str, Any] = {} if steps is None else {"total_timesteps": steps}
        if self._saved is not None:
            if steps is None:
                raise ConfigError(
                    f"{self._saved}: learn() starts a new run from this policy and needs a number "
                    "of steps, such as learn(10_000)"
                )
            changes |= {"init_from": str(self._saved), "run_name": None}
        return self.config.with_changes(**changes)

    def _train(
        self,
        config: TrainConfig,
        steps: int | None,
        schedule: ScheduleChoice | None,
        callbacks: list[Callback],
        progress: bool | None,
    ) -> TrainResult:
        """Resume the agent's run, or start one if there is none."""
        if self._resumable:
            assert self._saved is not None
            return workflows.resume_training(
                self._saved,
                total_timesteps=None if steps is None else config.total_timesteps,
                schedule=schedule,
                callbacks=callbacks,
                env=self._env,
                dataset=self._arrays,
                networks=self._networks,
                progress=progress,
            )
        result = workflows.train(
            config,
            callbacks=callbacks,
            env=self._env,
            dataset=self._arrays,
            networks=self._networks,
            progress=progress,
        )
        assert isinstance(result, TrainResult), "an agent has one seed"
        return result

    def _keep(self, result: TrainResult, config: TrainConfig) -> None:
        """Use the run of this result from now on."""
        self.result, self.config = result, config
        self._saved, self._resumable, self._policy = result.run_dir, True, None

    def evaluate(
        self, num_episodes: int | None = None, *, seed: int | None = None
    ) -> dict[str, float]:
        """Evaluate the policy in new episodes and return statistics of their returns.

        The episodes differ from those of the evaluations during training, which select the best
        checkpoint.
        """
        found = workflows.evaluate_policy(
            self.policy, self.config, num_episodes=num_episodes, seed=seed, env=self._env
        )
        return dict(found.metrics)

    @overload
    def predict(
        self, obs: Any, deterministic: bool = ..., *, state: None = ..., episode_start: None = ...
    ) -> np.ndarray: ...

    @overload
    def predict(
        self,
        obs: Any,
        deterministic: bool = ...,
        *,
        state: np.ndarray,
        episode_start: workflows.EpisodeStart | None = ...,
    ) -> tuple[np.ndarray, np.ndarray]: ...

    @overload
    def predict(
        self,
        obs: Any,
        deterministic: bool = ...,
        *,
        state: np.ndarray | None = ...,
        episode_start: workflows.EpisodeStart,
    ) -> tuple[np.ndarray, np.ndarray]: ...

    def predict(
        self,
        obs: Any,
        deterministic: bool = True,
        *,
        state: np.ndarray | None = None,
        episode_start: workflows.EpisodeStart | None = None,
    ) -> np.ndarray | tuple[np.ndarray, np.ndarray]:
        """Return actions in environment units for one observation or a batch of observations.

        With the setting `action_chunk`, an action has a leading axis of that length: the actions to
        execute one after another.

        With `state` or `episode_start`, return the actions and the next state, which a recurrent
        policy needs:

            action, state = agent.predict(obs, episode_start=True)   # an episode begins
            action, state = agent.predict(obs, state=state)          # it goes on

        With both, `episode_start` says for which observations of a batch an episode begins.
        """
        return self.policy.predict(
            obs, deterministic=deterministic, state=state, episode_start=episode_start
        )

    def record_video(
        self,
        path: str | Path,
        episodes: int = 3,
        *,
        seed: int | None = None,
        select: VideoSelection = "all",
        fps: float | None = None,
        width: int | None = None,
        height: int | None = None,
    ) -> list[RecordedEpisode]:
        """Record episodes of the policy to an MP4 or GIF file.

        The episodes are those of `evaluate` with the same seed and number of episodes. `select`
        records only the `"best"` or the `"worst"` of them. The speed and the size are by default
        those of the environment. Returns the recorded episodes, with their returns and lengths.
        """
        return workflows.record_policy_video(
            self.policy,
            self.config,
            path,
            episodes=episodes,
            seed=seed,
            select=select,
            fps=fps,
            width=width,
            height=height,
            env=self._env,
        )

    def save(self, path: str | Path) -> Path:
        """Save the policy to a folder, which `load` and the command line accept."""
        return workflows.save_policy(
            self.policy,
            path,
            environment=self._environment_description or None,
            config=self.config,
            env=self._env,
        )

    def export(
        self, path: str | Path, *, format: Format = "onnx", stochastic: bool = False
    ) -> Path:
        """Export the policy to a file that runs without this package; see `rl_training.export`."""
        from rl_training.deployment.export import export_policy

        return export_policy(
            self.policy,
            path,
            format=format,
            stochastic=stochastic,
            environment=self._environment_description or None,
            config=self.config,
            env=self._env,
            saved=self._saved,
        )

    def __repr__(self) -> str:
        """Say in a few lines what the agent will do or has done."""
        from rl_training.api.description import describe_agent

        return describe_agent(
            type(self).__name__,
            self.config,
            self._env,
            has_arrays=self._arrays is not None,
            saved=self._saved,
            is_resumable=self._resumable,
        )

    @property
    def policy(self) -> workflows.Policy:
        """The current policy. It is untrained before `learn` or `load`."""
        if self._policy is None:
            self._policy = (
                workflows.read_policy(self._saved, networks=self._networks)
                if self._saved
                else workflows.untrained_policy(self.config, self._env, networks=self._networks)
            )
        return self._policy

    @classmethod
    def _sort_settings(cls, settings: dict[str, Any], base: TrainConfig | None) -> dict[str, Any]:
        """Move hyper-parameters of the algorithm into `algo_kwargs`; reject unknown settings."""
        kind = get_algorithm_spec(cls.algo).hyperparameters_type
        own = kind.model_fields
        known = [*TrainConfig.model_fields, *own]
        settings = {
            name: value for name, value in settings.items() if not has_no_effect(name, value, known)
        }
        for name in settings:
            check_setting(cls.__name__, name, settings[name], known)
            if name not in known:
                hint = unknown_setting_hint(name, known)
                raise ConfigError(f"{name} = {settings[name]!r}: unknown setting{hint}")
        values = {name: value for name, value in settings.items() if name not in own}
        given = values.get("algo_kwargs")
        if given is None:
            given = base.algo_kwargs.given() if base else {}
        elif isinstance(given, kind):
            given = given.given()
        chosen = {name: value for name, value in settings.items() if name in own}
        values["algo_kwargs"] = {**given, **chosen} if isinstance(given, Mapping) else given
        return values


def _restore_auto(hyperparameters: Hyperparameters) -> Hyperparameters:
    """Restore `learning_starts="auto"`, which version 0.1 saved as a number."""
    if not isinstance(hyperparameters, OnlineHyperparameters):
        return hyperparameters
    if hyperparameters.learning_starts != hyperparameters.default_learning_starts:
        return hyperparameters
    return hyperparameters.model_copy(update={"learning_starts": "auto"})


def _take_networks(settings: dict[str, Any]) -> object:
    """Remove and return a user's networks; `networks` may also be a section of settings."""
    given = settings.get("networks")
    if given is None or isinstance(given, str | Mapping | BaseModel):
        return None
    return settings.pop("networks")


def _take_arrays(settings: dict[str, Any]) -> workflows.Arrays | None:
    return dict(settings.pop("dataset")) if workflows.are_arrays(settings.get("dataset")) else None
