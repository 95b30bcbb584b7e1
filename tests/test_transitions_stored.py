"""Stored transitions: truncation bootstraps, termination does not, and none crosses a reset."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from probes import Countdown

from rl_training.algorithms import SACAlgorithm
from rl_training.data import ReplayBuffer
from rl_training.envs import EnvironmentFactory, VectorEnvironment
from rl_training.execution.execution import Execution
from rl_training.execution.learner import Explorer, Learner
from rl_training.training.collector import Collector

GAMMA = 0.5


class CountdownOfOwnLength(Countdown):
    """Each instance has its own episode length, drawn at its first reset."""

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            self.length = 2 + seed % 4
        return super().reset(seed=seed, options=options)


def collect(num_envs: int, backend: str, n_step: int, steps: int) -> list[tuple[float, ...]]:
    factory = EnvironmentFactory(CountdownOfOwnLength)
    environment = VectorEnvironment(factory, num_envs, seed=5, backend=backend)
    buffer = ReplayBuffer(10_000, 2, 1)
    algorithm = SACAlgorithm(2, 1, {"hidden_sizes": [4]})
    learner = Learner([algorithm], buffer, Execution("cpu", False, 1, "highest"))
    explorer = Explorer(learner, environment.spaces, num_envs, [torch.Generator().manual_seed(0)])
    collector = Collector(
        environment,
        [explorer],
        [buffer],
        n_step=n_step,
        gamma=GAMMA,
        random_steps=steps // 2,
    )
    for step in range(steps):
        collector.step(step * num_envs, 0.0)
    environment.close()
    batch = buffer.rows(torch.arange(len(buffer)))
    columns = (batch.obs, batch.next_obs, batch.reward[:, None], batch.discount[:, None])
    return [tuple(row) for row in torch.cat(columns, 1).tolist()]


@pytest.mark.parametrize("n_step", [1, 3])
@pytest.mark.parametrize(("num_envs", "backend"), [*itertools.product([1, 4], ["sync", "async"])])
def test_stored_transitions_equal_those_of_the_environment(
    num_envs: int, backend: str, n_step: int
) -> None:
    steps = 40
    rows = collect(num_envs, backend, n_step, steps)
    endings = 0
    for episode, start, next_episode, last, reward, discount in rows:
        assert next_episode == episode  # never across a reset
        assert 1 <= last - start <= n_step
        # The reward is the number of the step.
        expected = sum(GAMMA**k * (start + k + 1) for k in range(int(last - start)))
        assert reward == pytest.approx(expected)
        if discount == 0.0:
            endings += 1
            assert episode % 2 == 1  # only odd episodes terminate; even ones are truncated
        else:
            assert discount == pytest.approx(GAMMA ** (last - start))
    assert endings > 0
    waiting = num_envs * (n_step - 1)
    assert num_envs * steps - waiting <= len(rows) <= num_envs * steps


def test_each_truncated_episode_bootstraps_from_its_true_final_observation() -> None:
    rows = collect(1, "sync", 1, 40)
    finals = {}
    for episode, start, _, last, _, discount in rows:
        finals[episode] = max(finals.get(episode, (0, 0, 0)), (start, last, discount))
    complete = [finals[episode] for episode in sorted(finals)[:-1]]
    lengths = {last for _, last, _ in complete}
    assert len(lengths) == 1  # the final observation is the episode's last, in every episode
    assert [discount for *_, discount in complete] == [GAMMA, 0.0] * (len(complete) // 2) + (
        [GAMMA] if len(complete) % 2 else []
    )


def test_sync_and_async_store_the_same_transitions() -> None:
    run = functools.partial(collect, 4, n_step=2, steps=30)
    assert run(backend="sync") == run(backend="async")
