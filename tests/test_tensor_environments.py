"""Tensor environments: equal to Gymnasium's, independent worlds, masked resets and snapshots."""

import gymnasium as gym
import numpy as np
import pytest
import torch

from rl_training.envs.tensors.classic_control import CartPole, Pendulum
from rl_training.envs.tensors.random_numbers import normal, uniform, world_keys
from rl_training.envs.tensors.simulated import SimulatedWorlds
from rl_training.errors import CheckpointError

CPU = torch.device("cpu")


def random_actions(environment: SimulatedWorlds, generator: torch.Generator) -> torch.Tensor:
    space = environment.action_space
    if isinstance(space, gym.spaces.Discrete):
        return torch.randint(int(space.n), (environment.num_envs,), generator=generator)
    numbers = torch.rand(environment.num_envs, *space.shape, generator=generator)
    low, high = torch.from_numpy(space.low), torch.from_numpy(space.high)
    return low + (high - low) * numbers


def test_pendulum_equals_gymnasiums() -> None:
    twin = gym.make("Pendulum-v1").unwrapped
    worlds, generator = Pendulum(64, "cpu"), torch.Generator().manual_seed(0)
    worlds.reset([3])
    worst = 0.0
    for _ in range(50):
        actions = 1.5 * random_actions(worlds, generator)  # some beyond the bounds
        angle, speed = worlds.angle.double().numpy(), worlds.speed.double().numpy()
        step = worlds.step(actions)
        for index in range(worlds.num_envs):
            twin.reset()
            twin.state = np.array([angle[index], speed[index]])
            obs, reward, *_ = twin.step(actions[index].double().numpy())
            worst = max(worst, float(np.abs(step.final_obs[index].numpy() - obs).max()))
            worst = max(worst, abs(float(step.reward[index]) - float(reward)) / 10)
    assert worst < 1e-5


def test_cartpole_equals_gymnasiums() -> None:
    twin = gym.make("CartPole-v1").unwrapped
    worlds, generator = CartPole(64, "cpu"), torch.Generator().manual_seed(0)
    worlds.reset([3])
    ended = 0
    for _ in range(60):
        before = worlds.numbers.double().numpy().copy()
        actions = random_actions(worlds, generator)
        step = worlds.step(actions)
        for index in range(worlds.num_envs):
            twin.reset()
            twin.state = before[index]
            obs, reward, terminated, *_ = twin.step(int(actions[index]))
            np.testing.assert_allclose(step.final_obs[index], obs, atol=1e-5)
            assert float(step.reward[index]) == reward
            assert bool(step.terminated[index]) == terminated
            ended += terminated
    assert ended > 20


@pytest.mark.parametrize("kind", [Pendulum, CartPole])
def test_spaces_and_first_observations_are_gymnasiums(kind: type[SimulatedWorlds]) -> None:
    twin = gym.make(f"{kind.__name__}-v1")
    worlds = kind(2_000, "cpu")
    assert worlds.observation_space.shape == twin.observation_space.shape
    np.testing.assert_allclose(worlds.observation_space.high, twin.observation_space.high, 1e-6)
    assert worlds.action_space == twin.action_space
    assert worlds.max_steps == twin.spec.max_episode_steps
    first = worlds.reset([0]).numpy()
    several = np.stack([twin.reset(seed=seed)[0] for seed in range(2_000)])
    np.testing.assert_allclose(first.mean(0), several.mean(0), atol=0.06)
    np.testing.assert_allclose(first.std(0), several.std(0), atol=0.05)


def test_random_numbers_are_uniform_normal_and_independent() -> None:
    keys = world_keys([0, 1], 20_000, CPU)
    assert len(keys.unique()) == 20_000
    numbers = uniform(keys, torch.zeros_like(keys), 3)
    assert numbers.min() >= 0
    assert numbers.max() < 1
    torch.testing.assert_close(numbers.mean(0), torch.full((3,), 0.5), atol=0.01, rtol=0)
    torch.testing.assert_close(numbers.var(0), torch.full((3,), 1 / 12), atol=0.002, rtol=0)
    gaussian = normal(keys, torch.ones_like(keys), 3)
    torch.testing.assert_close(gaussian.mean(0), torch.zeros(3), atol=0.03, rtol=0)
    torch.testing.assert_close(gaussian.std(0), torch.ones(3), atol=0.03, rtol=0)
    both = torch.cat([numbers, uniform(keys, torch.ones_like(keys), 3), gaussian], dim=1)
    off_diagonal = torch.corrcoef(both.T) - torch.eye(9)
    assert off_diagonal.abs().max() < 0.03


def test_a_seed_has_the_same_worlds_alone_and_beside_others() -> None:
    both, alone = Pendulum(8, "cpu"), Pendulum(4, "cpu")
    torch.testing.assert_close(both.reset([5, 9])[4:], alone.reset([9]), atol=0, rtol=0)
    generator = torch.Generator().manual_seed(1)
    for _ in range(450):  # beyond two time limits
        actions = random_actions(both, generator)
        step, own = both.step(actions), alone.step(actions[4:])
        torch.testing.assert_close(step.obs[4:], own.obs, atol=0, rtol=0)
    assert alone.episodes.tolist() == [2] * 4


def test_worlds_that_end_start_again_and_give_their_final_observation() -> None:
    worlds = CartPole(16, "cpu")
    obs = worlds.reset([0])
    generator, seen = torch.Generator().manual_seed(2), 0
    for _ in range(100):
        step = worlds.step(random_actions(worlds, generator))
        ended = step.terminated | step.truncated
        assert (step.obs[ended].abs() <= 0.05).all()
        assert (step.final_obs[ended][:, 2].abs() > worlds.max_angle).all()
        torch.testing.assert_close(step.obs[~ended], step.final_obs[~ended], atol=0, rtol=0)
        assert (worlds.lengths[ended] == 0).all()
        seen += int(ended.sum())
        obs = step.obs
    assert seen > 16
    assert int(worlds.episodes.sum()) == seen
    assert obs.shape == (16, 4)


def test_a_time_limit_truncates() -> None:
    worlds = Pendulum(3, "cpu")
    worlds.reset([0])
    for number in range(200):
        step = worlds.step(torch.zeros(3, 1))
        assert step.truncated.all() == (number == 199)
        assert not step.terminated.any()


def test_a_world_that_breaks_is_reset_and_reported() -> None:
    worlds = Pendulum(4, "cpu")
    worlds.reset([0])
    worlds.speed[2] = torch.nan
    step = worlds.step(torch.zeros(4, 1))
    assert step.broken.tolist() == [False, False, True, False]
    assert torch.isfinite(step.obs).all()
    assert not step.terminated.any()
    assert not step.truncated.any()
    assert not worlds.step(torch.zeros(4, 1)).broken.any()


@pytest.mark.parametrize("kind", [Pendulum, CartPole])
def test_a_snapshot_continues_bit_for_bit(kind: type[SimulatedWorlds]) -> None:
    first, second = kind(8, "cpu"), kind(8, "cpu")
    first.reset([7])
    generator = torch.Generator().manual_seed(3)
    for _ in range(150):
        first.step(random_actions(first, generator))
    second.reset([0])
    second.restore(first.snapshot())
    for _ in range(300):
        actions = random_actions(first, generator)
        for mine, other in zip(first.step(actions), second.step(actions), strict=True):
            torch.testing.assert_close(mine, other, atol=0, rtol=0)


def test_a_snapshot_of_other_worlds_is_refused() -> None:
    worlds = Pendulum(8, "cpu")
    worlds.reset([0])
    other = Pendulum(4, "cpu")
    other.reset([0])
    with pytest.raises(CheckpointError, match="another shape"):
        worlds.restore(other.snapshot())
    with pytest.raises(CheckpointError, match="lacks angle, speed"):
        worlds.restore({k: v for k, v in worlds.snapshot().items() if k not in ("angle", "speed")})
