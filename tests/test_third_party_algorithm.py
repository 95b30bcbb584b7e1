"""A third-party algorithm needs only its own file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import conformance
import numpy as np
import pytest
import torch
from helpers import StopAt, hashes, metric_rows, tiny
from torch import Tensor

import rl_training
from rl_training.algorithms import spec as registry
from rl_training.algorithms.base import Algorithm, Draw, Draws, Objective
from rl_training.algorithms.functional import Adam
from rl_training.algorithms.hyperparameters import OnlineHyperparameters
from rl_training.api import Agent
from rl_training.errors import ConfigError
from rl_training.execution import execution
from rl_training.experiment import AlgorithmSpec, register_algorithm
from rl_training.models import MLP
from rl_training.types import Batch, Metrics, Noise, State


class HillClimberHyperparameters(OnlineHyperparameters):
    spread: float = 0.3


class HillClimber(Algorithm):
    """A toy algorithm: learns the reward of an action and follows its gradient."""

    hyperparameters_type = HillClimberHyperparameters

    def build_model(self, generator: torch.Generator) -> torch.nn.ModuleDict:
        sizes = self.hyperparameters.hidden_sizes
        return torch.nn.ModuleDict(
            {
                "actor": MLP(self.obs_dim, sizes, self.action_dim, generator=generator),
                "reward": MLP(self.obs_dim + self.action_dim, sizes, 1, generator=generator),
            }
        )

    def networks(self) -> dict[str, MLP]:
        return dict(self.model.items())

    def targets(self) -> dict[str, str]:
        return {}

    def optimizers(self) -> dict[str, Adam]:
        return {name: Adam(1e-3) for name in self.networks()}

    def objectives(self, *, update_policy: bool) -> list[Objective]:
        return [Objective(("reward",), self.reward_loss), Objective(("actor",), self.actor_loss)]

    def reward_loss(self, state: State, batch: Batch, noise: Noise) -> tuple[Tensor, Metrics]:
        error = (self.reward(state, batch.obs, batch.action) - batch.reward).square().mean()
        return error, {"critic_loss": error}

    def actor_loss(self, state: State, batch: Batch, noise: Noise) -> tuple[Tensor, Metrics]:
        loss = -self.reward(state, batch.obs, self.act(state, batch.obs)).mean()
        return loss, {"actor_loss": loss}

    def reward(self, state: State, obs: Tensor, action: Tensor) -> Tensor:
        return self.model["reward"](torch.cat([obs, action], -1), state["reward"]).squeeze(-1)

    def update_targets(self, state: State, *, policy_updated: bool) -> None:
        pass

    def update_noise(self, batch_size: int) -> Draws:
        return {}

    def act(self, state: State, obs: Tensor) -> Tensor:
        return torch.tanh(self.model["actor"](obs, state["actor"]))

    def exploration_noise(self, batch_size: int) -> Draws:
        return {"action": Draw("normal", (batch_size, self.action_dim))}

    def explore(self, state: State, obs: Tensor, noise: Noise, progress: Tensor) -> Tensor:
        spread = self.hyperparameters.spread
        return (self.act(state, obs) + spread * noise["action"]).clamp(-1, 1)


@pytest.fixture
def hill_climber() -> Iterator[AlgorithmSpec]:
    spec = AlgorithmSpec(
        name="hill_climber", title="Hill climber", reference="a test", algorithm=HillClimber
    )
    yield register_algorithm(spec)
    del registry._registered["hill_climber"]


def config(tmp_path: Path) -> dict:
    return tiny(tmp_path, algo="hill_climber", algo_kwargs={"spread": 0.5})


@pytest.mark.usefixtures("hill_climber")
def test_it_trains_evaluates_predicts_and_resumes(tmp_path: Path) -> None:
    uninterrupted = rl_training.train(config(tmp_path))
    assert uninterrupted.metrics["gradient_steps"] == 80
    assert {"train/critic_loss", "train/actor_loss"} <= uninterrupted.metrics.keys()
    evaluation = rl_training.evaluate_checkpoint(uninterrupted.run_dir, num_episodes=2)
    assert evaluation["eval_return_mean"] < 0
    action = rl_training.predict_checkpoint(uninterrupted.run_dir, [0.1, 0.2, 0.3])
    assert np.abs(action).item() <= 2.0
    stopped = rl_training.train(config(tmp_path), callbacks=[StopAt(77)])
    resumed = rl_training.resume_training(stopped.run_dir)
    assert hashes(resumed.checkpoint_path) == hashes(uninterrupted.checkpoint_path)
    assert metric_rows(resumed.run_dir) == metric_rows(uninterrupted.run_dir)


@pytest.mark.usefixtures("hill_climber")
def test_a_managed_class_needs_only_the_algorithm_name(tmp_path: Path) -> None:
    class Climber(Agent):
        algo = "hill_climber"

    agent = Climber("Pendulum-v1", output_dir=str(tmp_path), spread=0.1, learning_starts=10)
    assert agent.learn(30).metrics["gradient_steps"] == 20
    loaded = Climber.load(agent.save(tmp_path / "policy"))
    obs = [0.1, 0.2, 0.3]
    assert loaded.predict(obs) == agent.predict(obs)


@pytest.mark.usefixtures("hill_climber")
def test_its_settings_are_validated(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"algo_kwargs.spraed = 1: .*did you mean 'spread'"):
        rl_training.train(tiny(tmp_path, algo="hill_climber", algo_kwargs={"spraed": 1}))


CASE = conformance.Case(
    metrics=frozenset({"critic_loss", "actor_loss"}), unbounded=frozenset({"spread"})
)


@pytest.mark.parametrize("check", conformance.ONE_UPDATE_CHECKS, ids=lambda check: check.__name__)
def test_it_passes_the_conformance_checks_of_updates(
    check: Any, hill_climber: AlgorithmSpec
) -> None:
    check(hill_climber, CASE, {})


def test_it_passes_the_other_conformance_checks(
    hill_climber: AlgorithmSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    conformance.check_that_invalid_settings_are_refused_by_name(hill_climber, CASE)
    conformance.check_that_a_population_agrees_with_single_learners(
        hill_climber, CASE, {}, updates=20
    )
    monkeypatch.setattr(execution, "BATCHED_ON", ("cpu", "cuda"))
    conformance.check_that_a_population_resumes_bit_for_bit(hill_climber, {}, tmp_path)


def test_a_built_in_name_cannot_be_registered() -> None:
    spec = AlgorithmSpec(name="sac", title="Other", reference="", algorithm=HillClimber)
    with pytest.raises(ConfigError, match="already used"):
        register_algorithm(spec)
