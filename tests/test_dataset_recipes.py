"""Datasets from recipes and from replay buffers of earlier runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import tiny
from probes import Countdown

from rl_training import train
from rl_training.data.sections import PolicySection, RandomSection
from rl_training.datasets.opening import build_dataset, check_sections, open_section
from rl_training.datasets.recipes import recipe_envs, record_random
from rl_training.envs import EnvironmentFactory
from rl_training.errors import CheckpointError, ConfigError, DataError, UserError
from rl_training.types import Batch

PENDULUM = EnvironmentFactory("Pendulum-v1")
GAMMA = 0.5

FINGERPRINTS = """
import sys
from rl_training.envs import EnvironmentFactory
from rl_training.datasets.opening import build_dataset
factory = EnvironmentFactory("Pendulum-v1")
sources = [{"kind": "random", "size": 4100, "seed": 7},
           {"kind": "policy", "size": 500, "seed": 7, "checkpoint": sys.argv[1], "noise": 0.2}]
for source in sources:
    print(build_dataset(source, factory=factory).fingerprint["sha256"])
"""


def rows(dataset: Any) -> Batch:
    return dataset.rows(torch.arange(len(dataset)))


def test_recipes_give_the_same_bytes_in_every_process(finished_run: Any) -> None:
    printed = [
        subprocess.run(
            [sys.executable, "-c", FINGERPRINTS, str(finished_run.run_dir)],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split()
        for _ in range(2)
    ]
    assert printed[0] == printed[1]
    assert len(set(printed[0])) == 2
    source = {"kind": "random", "size": 4100, "seed": 7}
    here = build_dataset(source, factory=PENDULUM).fingerprint["sha256"]
    assert here == printed[0][0]
    other = build_dataset({**source, "seed": 8}, factory=PENDULUM).fingerprint["sha256"]
    assert other != here


@pytest.mark.parametrize("num_envs", [1, 3])
def test_recorded_steps_are_exactly_those_of_the_environment(num_envs: int) -> None:
    recording = record_random(EnvironmentFactory(Countdown), 40, 0, num_envs=num_envs)
    steps = [step for chunk in recording.chunks() for step in zip(*chunk[:6], strict=True)]
    assert len(steps) == 40
    terminations = truncations = 0
    for index, (obs, action, reward, next_obs, terminated, ended) in enumerate(steps):
        assert next_obs[0] == obs[0]  # never across a reset
        assert next_obs[1] == obs[1] + 1
        assert reward == next_obs[1]
        assert -1 <= action[0] <= 1
        if not ended:
            assert steps[index + 1][0].tolist() == next_obs.tolist()
        if terminated:
            assert obs[0] % 2 == 1  # only odd episodes terminate; even ones are truncated
        terminations += bool(terminated)
        truncations += bool(ended and not terminated)
    assert terminations > 0
    assert truncations > 0


def test_recipes_give_the_requested_number_of_rows() -> None:
    assert [recipe_envs(size) for size in (1, 1999, 4000, 10**6)] == [1, 1, 2, 8]
    for size in (1, 7, 4001):
        dataset = build_dataset({"kind": "random", "size": size}, factory=PENDULUM, gamma=GAMMA)
        assert len(dataset) == size
        batch = rows(dataset)
        assert (batch.discount == GAMMA).all()  # Pendulum never terminates
        assert batch.action.abs().max() <= 1
    assert dataset.episode_lengths.max() == 200


def test_random_actions_cover_their_range_evenly() -> None:
    action = rows(build_dataset({"kind": "random", "size": 4000}, factory=PENDULUM)).action
    counts, _ = np.histogram(action.numpy(), bins=8, range=(-1, 1))
    assert (np.abs(counts - 500) < 120).all()


def test_policy_data_contain_its_actions_with_noise(finished_run: Any) -> None:
    section = PolicySection(checkpoint=str(finished_run.run_dir), size=300, noise=0.0)
    exact = rows(build_dataset(section, factory=PENDULUM))
    from rl_training.checkpoints.loading import find_checkpoint, load_policy

    policy = load_policy(find_checkpoint(finished_run.run_dir))
    np.testing.assert_allclose(exact.action, policy.act(exact.obs.numpy()), atol=1e-5)
    noisy = rows(build_dataset(section.model_copy(update={"noise": 0.1}), factory=PENDULUM))
    deviation = noisy.action.numpy() - policy.act(noisy.obs.numpy())
    inside = np.abs(noisy.action.numpy()) < 1
    assert 0.08 < deviation[inside].std() < 0.12


def test_random_choices_are_recorded_where_actions_are_discrete() -> None:
    factory = EnvironmentFactory("CartPole-v1")
    dataset = build_dataset({"kind": "random", "size": 500}, factory=factory)
    batch = rows(dataset)
    assert batch.action.dtype == torch.int64
    assert set(batch.action.tolist()) == {0, 1}
    assert (batch.discount == 0).sum() == len(dataset.episode_ends) - 1


def test_recording_does_not_use_the_global_random_streams() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    build_dataset({"kind": "random", "size": 10}, factory=PENDULUM)
    assert torch.rand(3).equal(expected)


# Earlier runs


def replay_of(config: dict[str, Any]) -> tuple[Any, list[tuple[float, ...]]]:
    """Return the replay buffer of a run as a recording, and the rows of its checkpoint."""
    from safetensors.torch import load_file

    result = train(config)
    segments = sorted(result.checkpoint_path.glob("replay-*.safetensors"))
    saved = torch.cat([load_file(path)["rows"] for path in segments])
    return result, sorted(map(tuple, saved.tolist()))


@pytest.mark.filterwarnings("ignore:nothing will be learned")
@pytest.mark.parametrize(("num_envs", "capacity"), [(1, 500), (3, 500), (3, 205)])
def test_replay_rows_are_read_in_chronological_order(
    num_envs: int, capacity: int, tmp_path: Path
) -> None:
    config = tiny(
        tmp_path,
        num_envs=num_envs,
        total_timesteps=420,
        algo_kwargs={"buffer_capacity": capacity, "learning_starts": 1000},
    )
    result, saved = replay_of(config)
    dataset = build_dataset({"kind": "run", "path": str(result.run_dir)}, gamma=0.99)
    assert sorted(map(tuple, dataset.packed.tolist())) == saved
    batch, ends = rows(dataset), set(dataset.episode_ends.tolist())
    for index in range(len(dataset) - 1):
        continues = bool((batch.next_obs[index] == batch.obs[index + 1]).all())
        assert continues == (index + 1 not in ends)
    # Steps of each environment are consecutive. Episodes end only at the limit of 200 steps.
    assert len(ends) == sum(-(-number // 200) for number in _rows_per_env(len(dataset), num_envs))
    assert dataset.spaces.action_high.tolist() == [2.0]


def _rows_per_env(total: int, num_envs: int) -> list[int]:
    return [total // num_envs + (index < total % num_envs) for index in range(num_envs)]


def test_replay_can_be_used_with_another_gamma_and_n_step(finished_run: Any) -> None:
    source = {"kind": "run", "path": str(finished_run.run_dir)}
    one, three = (build_dataset(source, gamma=GAMMA, n_step=n) for n in (1, 3))
    first, rewards = rows(three), rows(one).reward
    assert first.discount[0].item() == pytest.approx(GAMMA**3)
    expected = rewards[0] + GAMMA * rewards[1] + GAMMA**2 * rewards[2]
    assert first.reward[0].item() == pytest.approx(expected.item(), rel=1e-5)


def test_replay_of_n_step_returns_and_policies_without_replay_are_refused(tmp_path: Path) -> None:
    result = train(tiny(tmp_path, algo_kwargs={"n_step": 3, "entropy_in_target": False}))
    with pytest.raises(DataError, match="3-step returns"):
        build_dataset({"kind": "run", "path": str(result.run_dir)})
    with pytest.raises(CheckpointError, match="no such run folder"):
        build_dataset({"kind": "run", "path": str(tmp_path / "missing")})


# Datasets from sections


def test_sections_and_arrays_can_be_mixed_in_one_dataset() -> None:
    arrays = {
        "observations": np.full((5, 3), 9.0),
        "actions": np.zeros((5, 1)),
        "rewards": np.zeros(5),
        "terminals": np.arange(5) == 4,
        "next_observations": np.full((5, 3), 9.0),
    }
    sections = [{"kind": "random", "size": 20, "weight": 3.0}, arrays]
    dataset = build_dataset(sections, factory=PENDULUM)
    share = (dataset.sample(4000).obs[:, 0] == 9.0).float().mean()
    assert 0.2 < share < 0.3


def test_missing_sources_are_reported_before_anything_is_recorded(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs an environment"):
        open_section(RandomSection(size=5))
    with pytest.raises(CheckpointError, match="no such run folder"):
        check_sections([PolicySection(checkpoint=str(tmp_path / "no"), size=5)])
    with pytest.raises(DataError, match="no such file"):
        build_dataset({"kind": "npz", "path": str(tmp_path / "no.npz")})


def test_a_policy_for_another_environment_is_refused(finished_run: Any) -> None:
    section = PolicySection(checkpoint=str(finished_run.run_dir), size=5)
    with pytest.raises(UserError, match="the policy expects 3 observations and 1 actions"):
        build_dataset(section, factory=EnvironmentFactory("CartPole-v1"))


def test_explicit_bounds_are_refused_where_the_action_space_is_known() -> None:
    source = {"kind": "random", "size": 5, "action_low": -1, "action_high": 1}
    with pytest.raises(DataError, match="action_low and action_high must not be set"):
        build_dataset(source, factory=PENDULUM)
