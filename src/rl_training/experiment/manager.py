"""`ExperimentManager`: train, resume and summarize one config with several seeds."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from rl_training.callbacks import Callback
from rl_training.config import ConfigSource, TrainConfig
from rl_training.config_files import load_config
from rl_training.envs import EnvironmentSource
from rl_training.errors import TrainingInterrupted
from rl_training.runtime.workflows import resume_together, train
from rl_training.types import ScheduleChoice, TrainResult


class ExperimentManager:
    """Train, resume and summarize the runs of one config, one per seed."""

    def __init__(self, config: ConfigSource, *, env: EnvironmentSource | None = None) -> None:
        self.config: TrainConfig = load_config(config)
        self.results: list[TrainResult] = []
        self._env = env

    @property
    def seeds(self) -> list[int]:
        return [self.config.seed] if self.config.seeds is None else list(self.config.seeds)

    def train(
        self, callbacks: Sequence[Callback] | None = None, *, progress: bool | None = None
    ) -> list[TrainResult]:
        """Train every seed. Each seed has its own run folder."""
        with self._kept_if_interrupted():
            result = train(self.config, callbacks=callbacks, env=self._env, progress=progress)
            self.results = result if isinstance(result, list) else [result]
        return self.results

    def resume(
        self,
        run_dirs: Sequence[str | Path] | None = None,
        *,
        total_timesteps: int | None = None,
        schedule: ScheduleChoice | None = None,
        callbacks: Sequence[Callback] | None = None,
        progress: bool | None = None,
    ) -> list[TrainResult]:
        """Resume the given runs, by default those that this manager trained."""
        chosen = run_dirs or [result.run_dir for result in self.results]
        with self._kept_if_interrupted():
            self.results = resume_together(
                chosen,
                total_timesteps=total_timesteps,
                schedule=schedule,
                callbacks=callbacks,
                env=self._env,
                progress=progress,
            )
        return self.results

    @contextlib.contextmanager
    def _kept_if_interrupted(self) -> Iterator[None]:
        """Keep the results of interrupted runs, so that `resume()` continues them."""
        try:
            yield
        except TrainingInterrupted as interruption:
            self.results = interruption.results
            raise

    def summary(self) -> dict[str, float]:
        """Return mean and standard deviation over seeds of the final evaluation's mean return."""
        if not self.results:
            raise ValueError("no results to summarize; call train() first")
        returns = np.array([result.metrics["eval_return_mean"] for result in self.results])
        spread = float(returns.std(ddof=1)) if len(returns) > 1 else 0.0
        return {
            "num_seeds": float(len(returns)),
            "eval_return_mean": float(returns.mean()),
            "eval_return_std_over_seeds": spread,
        }
