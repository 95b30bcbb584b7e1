"""Action chunks: windows of steps, open-loop execution, exact resume, prediction and export."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from by_hand import make_batch
from conformance import (
    assert_same,
    check_that_a_population_resumes_bit_for_bit,
    check_that_a_run_resumes_bit_for_bit,
)
from helpers import StopAt, tiny_of
from observation_zoo import CONTINUOUS, Zoo
from test_spaces_zoo import config_of

import rl_training
from rl_training.algorithms import FQLAlgorithm, RLPDAlgorithm
from rl_training.algorithms.fql import FQL
from rl_training.algorithms.spec import get_algorithm_spec
from rl_training.callbacks import Callback, TrainingContext
from rl_training.checkpoints.loading import find_checkpoint, load_policy
from rl_training.config_files import load_config
from rl_training.data import DatasetPart, OfflineDataset, array_recording, load_dataset
from rl_training.data.n_step import NStepAccumulator
from rl_training.deployment.export import export_run
from rl_training.envs import environment_factory
from rl_training.envs.snapshots.codec import Decoder
from rl_training.envs.spaces import describe_spaces
from rl_training.errors import ConfigError, DataError, UserError
from rl_training.evaluation.evaluator import Evaluator
from rl_training.execution import execution
from rl_training.execution.open_loop import ActionQueue
from rl_training.execution.policy import Policy
from rl_training.types import ActionSpec, TrainResult

CHUNK, GAMMA = 3, 0.9
CHUNKED = [get_algorithm_spec(name) for name in ("fql", "rlpd")]
each_chunked = pytest.mark.parametrize("spec", CHUNKED, ids=lambda spec: spec.name)
BOUNDS = (np.full(2, -1.0), np.full(2, 1.0))


# Windows


def random_steps(rows: int, seed: int) -> dict[str, np.ndarray]:
    """Return steps of episodes of 1 to 7 steps, of which some are terminated, others truncated."""
    generator = np.random.default_rng(seed)
    ended = generator.random(rows) < 0.25
    terminated = ended & (generator.random(rows) < 0.5)
    return {
        "observations": generator.normal(size=(rows, 3)).astype(np.float32),
        "actions": generator.uniform(-1, 1, size=(rows, 2)).astype(np.float32),
        "rewards": generator.normal(size=rows).astype(np.float32),
        "terminals": terminated,
        "timeouts": ended & ~terminated,
        "next_observations": generator.normal(size=(rows, 3)).astype(np.float32),
    }


def windows_by_hand(steps: dict[str, np.ndarray]) -> list[tuple[Any, ...]]:
    """Return the transitions of one environment, step by step; the last episode is open."""
    terminated, truncated = steps["terminals"], steps["timeouts"]
    rows, found = len(terminated), []
    for start in range(rows):
        taken, reward, step = [], 0.0, start
        while True:
            taken.append(steps["actions"][step])
            reward += GAMMA ** (step - start) * float(steps["rewards"][step])
            if len(taken) == CHUNK or terminated[step] or truncated[step] or step == rows - 1:
                break
            step += 1
        if len(taken) < CHUNK and not terminated[step]:
            continue  # what the rest of the chunk would have done is not known
        discount = 0.0 if terminated[step] else GAMMA**CHUNK
        chunk = np.concatenate(taken + taken[-1:] * (CHUNK - len(taken)))
        after = steps["next_observations"][step]
        found.append((steps["observations"][start], chunk, reward, discount, after))
    return found


def collected(streams: list[dict[str, np.ndarray]]) -> list[list[tuple[Any, ...]]]:
    """Return the transitions of each environment, when all are stepped together."""
    accumulator = NStepAccumulator(CHUNK, GAMMA, len(streams), chunks=True)
    found: list[list[tuple[Any, ...]]] = [[] for _ in streams]
    all_of = range(len(streams))
    names = ("observations", "actions", "rewards", "terminals", "timeouts", "next_observations")
    for step in range(len(streams[0]["rewards"])):
        columns = [np.stack([stream[name][step] for stream in streams]) for name in names]
        rows, environments = accumulator.add(*columns)
        for row, environment in enumerate(all_of if environments is None else environments):
            found[environment].append(tuple(field[row] for field in rows[:5]))
    return found


def assert_windows(found: list[tuple[Any, ...]], expected: list[tuple[Any, ...]]) -> None:
    assert len(found) == len(expected) > 0

    def by_start(window: tuple[Any, ...]) -> float:
        return float(window[0][0])

    for one, other in zip(sorted(found, key=by_start), sorted(expected, key=by_start), strict=True):
        for part, wanted in zip(one, other, strict=True):
            np.testing.assert_allclose(part, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_collected_windows_are_those_worked_out_by_hand(seed: int) -> None:
    streams = [random_steps(60, 10 * seed + index) for index in range(3)]
    for found, stream in zip(collected(streams), streams, strict=True):
        assert_windows(found, windows_by_hand(stream))


def load(steps: dict[str, np.ndarray], chunk: int = CHUNK) -> OfflineDataset:
    part = DatasetPart(array_recording(steps), action_bounds=BOUNDS)
    return load_dataset([part], gamma=GAMMA, action_chunk=chunk)


@pytest.mark.parametrize("seed", range(3))
def test_recorded_windows_are_those_worked_out_by_hand(seed: int) -> None:
    steps = random_steps(60, seed)
    dataset = load(steps)
    batch = dataset.rows(torch.arange(len(dataset)))
    found = list(zip(*(field.numpy() for field in batch[:5]), strict=True))
    assert_windows(found, windows_by_hand(steps))
    assert dataset.episode_ends[-1] == len(dataset)
    assert dataset.sample(5).action.shape == (5, CHUNK * 2)


def test_windows_of_one_step_are_the_usual_rows() -> None:
    steps = random_steps(30, 0)
    usual = load_dataset([DatasetPart(array_recording(steps), action_bounds=BOUNDS)], gamma=GAMMA)
    assert torch.equal(load(steps, 1).packed, usual.packed)
    assert load(steps, 1).fingerprint == usual.fingerprint
    assert load(steps, 3).fingerprint != usual.fingerprint


def test_episodes_that_are_too_short_are_refused() -> None:
    steps = random_steps(20, 0)
    steps["terminals"][:], steps["timeouts"][:] = False, True
    with pytest.raises(DataError, match="no episode has the 3 steps of an action chunk"):
        load(steps)


def test_rewards_that_overflow_in_a_chunk_are_refused() -> None:
    steps = random_steps(20, 0)
    steps["terminals"][:], steps["timeouts"][:] = False, False
    steps["rewards"][:] = 2e38
    with pytest.raises(DataError, match="summed over an action chunk"):
        load(steps)


def test_waiting_steps_of_a_window_are_saved() -> None:
    streams = [random_steps(40, seed) for seed in (1, 2)]
    names = ("observations", "actions", "rewards", "terminals", "timeouts", "next_observations")
    whole = NStepAccumulator(CHUNK, GAMMA, 2, chunks=True)
    for step in range(40):
        columns = [np.stack([stream[name][step] for stream in streams]) for name in names]
        again = NStepAccumulator(CHUNK, GAMMA, 2, chunks=True)
        again.load_state_dict(whole.state_dict())
        found, expected = again.add(*columns), whole.add(*columns)
        for one, other in zip(found[0], expected[0], strict=True):
            np.testing.assert_array_equal(one, other)


# Learners


@each_chunked
def test_actor_and_critics_take_chunks(spec: Any) -> None:
    learner = spec.algorithm(3, 2, {"hidden_sizes": [8, 8], "action_chunk": CHUNK})
    size = 2 * CHUNK
    assert (learner.action_chunk, learner.action_dim) == (CHUNK, size)
    assert learner.networks()["critic"].sizes[0] == 3 + size
    obs = torch.zeros(4, 3)
    assert learner.act(learner.state, obs).shape == (4, size)
    result = learner.update(make_batch(4, action_dim=size))
    assert all(metric.isfinite() for metric in result.metrics.values())


def test_the_target_entropy_counts_all_actions_of_a_chunk() -> None:
    single, chunked = (RLPDAlgorithm(3, 2, {"action_chunk": chunk}) for chunk in (1, 5))
    assert single.target_entropy == -1.0  # the authors' -0.5 for each number
    assert chunked.target_entropy == -5.0


def test_a_target_discounts_the_value_after_the_chunk_once() -> None:
    """With critics that are constant, a target is `R + gamma^h c`."""
    learner = FQLAlgorithm(3, 2, {"hidden_sizes": [8], "action_chunk": CHUNK}, seed=0)
    learner.state["target_critic"].zero_()
    learner.networks()["critic"].unflatten(learner.state["target_critic"])["bias_1"].fill_(7.0)
    steps = random_steps(60, 4)
    dataset = load(steps)
    expected = [reward + discount * 7.0 for _, _, reward, discount, _ in windows_by_hand(steps)]
    batch = dataset.rows(torch.arange(len(dataset)))
    noise = {"next_action": torch.zeros(len(dataset), 2 * CHUNK)}
    _, metrics = learner.critic_loss(learner.state, batch, noise)
    assert metrics["target_q_mean"].item() == pytest.approx(np.mean(expected), rel=1e-5)


def test_chunks_of_choices_are_refused() -> None:
    assert ActionSpec("continuous", 2).chunks_of(3) == ActionSpec("continuous", 6)
    assert ActionSpec("discrete", 2).chunks_of(1) == ActionSpec("discrete", 2)
    with pytest.raises(ValueError, match="chunks of discrete actions"):
        ActionSpec("discrete", 2).chunks_of(3)


# Execution


def test_a_queue_hands_out_the_actions_of_each_environment_in_order() -> None:
    queue = ActionQueue(3, 2, 1)
    assert queue.is_empty.all()
    queue.fill(np.array([[1, 2, 3], [10, 20, 30]]))
    assert queue.take().ravel().tolist() == [1, 10]
    queue.discard(np.array([False, True]))  # its episode is over
    assert queue.is_empty.tolist() == [False, True]
    queue.fill(np.array([[4, 5, 6], [40, 50, 60]]))  # the first is still busy with its chunk
    assert queue.take().ravel().tolist() == [2, 40]
    saved = ActionQueue(3, 2, 1)
    saved.load_state_dict(queue.state_dict())
    for each in (queue, saved):
        assert each.take(np.array([True, False])).ravel().tolist() == [3, 50]
        assert each.take(np.array([False, True])).ravel()[1] == 50
        assert each.is_empty.tolist() == [True, False]


@pytest.mark.parametrize("wrong", ["left", "chunks"])
def test_a_damaged_queue_is_refused(wrong: str) -> None:
    queue = ActionQueue(3, 2, 1)
    state = queue.state_dict()
    state[wrong] = np.full((2,), 4)
    with pytest.raises(ValueError, match="saved action chunks"):
        queue.load_state_dict(state)


class Clock(gym.Env):
    """Observes the time and the length of the episode, and keeps the actions it gets."""

    taken: list[list[tuple[float, float]]]

    def __init__(self, taken: list[list[tuple[float, float]]], lengths: tuple[int, ...]) -> None:
        self.observation_space = gym.spaces.Box(-10, 10, (2,), np.float32)
        self.action_space = gym.spaces.Box(-1, 1, (1,), np.float32)
        self._lengths, self.taken, self._episode = lengths, taken, 0

    def _obs(self) -> np.ndarray:
        return np.array([self._time / 100, self._length / 100], np.float32)

    def reset(self, **options: Any) -> tuple[np.ndarray, dict]:
        super().reset(seed=options.get("seed"))
        self._length, self._time = self._lengths[self._episode % len(self._lengths)], 0
        self._episode += 1
        self._episode_steps: list[tuple[float, float]] = []
        self.taken.append(self._episode_steps)
        return self._obs(), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict]:
        self._episode_steps.append((self._time / 100, float(action[0])))
        self._time += 1
        done = self._time >= self._length
        return self._obs(), 1.0, done, False, {}


def planned(state: Any, obs: torch.Tensor, *others: Any) -> torch.Tensor:
    """Choose chunks that say when they were chosen: the time, plus a quarter for each action."""
    return torch.cat([obs[:, :1] + 0.25 * index for index in range(CHUNK)], dim=-1)


def assert_open_loop(episodes: list[list[tuple[float, float]]]) -> None:
    """Check that every third action of an episode was chosen at its own time."""
    assert max(map(len, episodes)) > CHUNK
    for episode in episodes:
        for step, (_, action) in enumerate(episode):
            chosen_at = episode[step - step % CHUNK][0]
            assert action == pytest.approx(chosen_at + 0.25 * (step % CHUNK), abs=1e-6)


def test_collected_actions_are_executed_open_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FQL, "explore", lambda self, *inputs: planned(*inputs))
    taken: list[list[tuple[float, float]]] = []
    settings = {"action_chunk": CHUNK, "learning_starts": 0}
    config = tiny_of(
        CHUNKED[0], tmp_path, regime="online", env_id=None, algo_kwargs=settings, num_envs=2
    )
    del config["dataset"]
    collected: list[list[tuple[float, float]]] = []

    class Watch(Callback):
        """Leaves out what probes and evaluations of the environment do."""

        def on_train_start(self, context: TrainingContext) -> None:
            taken.clear()

        def on_evaluation_start(self, context: TrainingContext) -> None:
            collected.extend(taken)

    env = partial(Clock, taken, (7, 4, 2, 9))
    rl_training.train({**config, "health": False}, env=env, callbacks=[Watch()])
    assert sum(map(len, collected)) == 120
    assert_open_loop(collected)


def test_evaluations_are_executed_open_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FQL, "act", lambda self, *inputs: planned(*inputs))
    taken: list[list[tuple[float, float]]] = []
    learner = FQL(2, 1, {"hidden_sizes": [8], "action_chunk": CHUNK})
    factory = environment_factory(None, {}, partial(Clock, taken, (7, 4, 2, 9)))
    policy = Policy(learner, describe_spaces(factory()), algorithm_name="fql")
    taken.clear()
    found = Evaluator(factory, 6, 0).evaluate(policy)
    assert found is not None
    assert sorted(found.lengths) == [7] * 6  # each environment starts with its first episode
    assert_open_loop([episode for episode in taken if episode])


# Runs


def queue_of(run: Path) -> list[int]:
    """Return how many actions each environment of a stopped run still has to execute."""
    state = find_checkpoint(run).json("state.json")
    left = Decoder().decode(state["collector"]["chunks"])["left"]
    return [int(number) for number in left]


def chunked_run(spec: Any, tmp_path: Path, **changes: Any) -> TrainResult:
    settings = {"action_chunk": 4, **changes.pop("algo_kwargs", {})}
    return rl_training.train(
        tiny_of(spec, tmp_path, regime="mixed", algo_kwargs=settings, **changes)
    )


@pytest.mark.parametrize(
    ("spec", "num_envs"),
    [
        pytest.param(CHUNKED[0], 1, id="fql-1"),
        pytest.param(CHUNKED[1], 2, id="rlpd-2"),
        pytest.param(CHUNKED[0], 2, id="fql-2", marks=pytest.mark.thorough),
        pytest.param(CHUNKED[1], 1, id="rlpd-1", marks=pytest.mark.thorough),
    ],
)
def test_a_run_resumes_in_the_middle_of_a_chunk(spec: Any, num_envs: int, tmp_path: Path) -> None:
    settings = {"action_chunk": 4, "learning_starts": 40}
    changes = {"regime": "mixed", "num_envs": num_envs}
    stopped = rl_training.train(
        tiny_of(spec, tmp_path / "first", algo_kwargs=settings, **changes), callbacks=[StopAt(77)]
    )
    assert any(0 < left < 4 for left in queue_of(stopped.run_dir))
    check_that_a_run_resumes_bit_for_bit(spec, settings, tmp_path, **changes)


@pytest.mark.parametrize(
    ("spec", "batched"),
    [
        pytest.param(CHUNKED[0], True, id="fql-batched"),
        pytest.param(CHUNKED[1], False, id="rlpd-in turn", marks=pytest.mark.thorough),
        pytest.param(CHUNKED[0], False, id="fql-in turn", marks=pytest.mark.thorough),
        pytest.param(CHUNKED[1], True, id="rlpd-batched", marks=pytest.mark.thorough),
    ],
)
def test_a_population_resumes_in_the_middle_of_chunks(
    spec: Any, batched: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if batched:  # as on a GPU
        monkeypatch.setattr(execution, "BATCHED_ON", ("cpu", "cuda"))
    settings = {"action_chunk": 4, "learning_starts": 40}
    check_that_a_population_resumes_bit_for_bit(spec, settings, tmp_path, regime="mixed")


@each_chunked
def test_an_offline_run_with_chunks_resumes_bit_for_bit(spec: Any, tmp_path: Path) -> None:
    settings = {"action_chunk": 4}
    check_that_a_run_resumes_bit_for_bit(spec, settings, tmp_path, regime="offline")


class StopSeed(Callback):
    """Stops one of several seeds."""

    def __init__(self, seed: int, step: int) -> None:
        self._seed, self._step = seed, step

    def for_seed(self, seed: int) -> Callback:
        return StopAt(self._step) if seed == self._seed else Callback()


def test_the_chunks_of_a_seed_do_not_depend_on_other_seeds(tmp_path: Path) -> None:
    settings = {"action_chunk": 4, "learning_starts": 40}
    config = tiny_of(CHUNKED[0], tmp_path, regime="mixed", algo_kwargs=settings, num_envs=2)
    alone = rl_training.train({**config, "seed": 1})
    both = rl_training.train({**config, "seeds": [3, 1]}, callbacks=[StopSeed(3, 60)])
    assert both[0].metrics["global_step"] < both[1].metrics["global_step"]
    assert_same(alone, both[1])


@pytest.mark.thorough
@pytest.mark.parametrize("observation", ["dictionary", "frames", "image"])
def test_chunks_work_with_other_observations(observation: str, tmp_path: Path) -> None:
    env = partial(Zoo, observation, CONTINUOUS)
    config = config_of(CHUNKED[0], tmp_path, regime="mixed")
    config["algo_kwargs"] = {**config["algo_kwargs"], "action_chunk": 3, "learning_starts": 20}
    uninterrupted = rl_training.train(config, env=env)
    stopped = rl_training.train(config, env=env, callbacks=[StopAt(42)])
    resumed = rl_training.resume_training(stopped.run_dir, env=env)
    assert resumed.metrics == uninterrupted.metrics
    exported = export_run(resumed.run_dir, tmp_path / "policy.pt2", format="torch")
    assert exported.metadata["action_chunk"] == "3"  # compared with the policy before it is written


# Policies


@each_chunked
def test_predictions_are_chunks_in_environment_units(spec: Any, tmp_path: Path) -> None:
    run = chunked_run(spec, tmp_path)
    policy = load_policy(find_checkpoint(run.run_dir))
    obs = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
    chunks = policy.predict(obs)
    assert chunks.shape == (5, 4, 1)
    assert policy.predict(obs[0]).shape == (4, 1)
    np.testing.assert_allclose(chunks.reshape(5, 4), 2 * policy.act(obs), rtol=1e-6)  # ±2
    with torch.no_grad():
        found = policy.module(torch.from_numpy(obs))
    np.testing.assert_allclose(found.numpy(), chunks, rtol=1e-5, atol=1e-6)


@each_chunked
@pytest.mark.parametrize("stochastic", [False, True])
def test_an_export_gives_chunks_and_says_their_length(
    spec: Any, stochastic: bool, tmp_path: Path
) -> None:
    run = chunked_run(spec, tmp_path)
    out = tmp_path / "policy.pt2"
    exported = export_run(run.run_dir, out, format="torch", stochastic=stochastic)
    assert exported.metadata["action_chunk"] == "4"
    assert json.loads(exported.metadata["action_space"])["shape"] == [1]
    assert any("chunk of 4 actions" in line for line in exported.lines())
    given = [torch.zeros(2, 3)] + ([torch.zeros(2, 4)] if stochastic else [])
    assert torch.export.load(out).module()(*given).shape == (2, 4, 1)


def test_exports_of_single_actions_do_not_mention_chunks(tmp_path: Path) -> None:
    run = rl_training.train(tiny_of(CHUNKED[0], tmp_path, total_timesteps=10))
    exported = export_run(run.run_dir, tmp_path / "policy.pt2", format="torch")
    assert "action_chunk" not in exported.metadata


def test_data_can_be_recorded_with_a_policy_that_chooses_chunks(tmp_path: Path) -> None:
    run = chunked_run(CHUNKED[0], tmp_path)
    section = {"kind": "policy", "checkpoint": str(run.run_dir), "size": 300, "noise": 0.0}
    again = rl_training.train(
        tiny_of(get_algorithm_spec("bc"), tmp_path, total_timesteps=10, dataset=section)
    )
    assert again.metrics["gradient_steps"] == 10


# Refusals


def test_impossible_combinations_are_refused(tmp_path: Path) -> None:
    def config(**changes: Any) -> Any:
        return load_config({"algo": "fql", "env_id": "Pendulum-v1", **changes})

    with pytest.raises(ConfigError, match="n_step = 3: must be 1 with action_chunk = 4"):
        config(algo_kwargs={"action_chunk": 4, "n_step": 3})
    with pytest.raises(ConfigError, match="action_chunk"):
        config(algo_kwargs={"action_chunk": 0})
    with pytest.raises(ConfigError, match=r"replay\.hindsight: cannot be combined"):
        config(algo_kwargs={"action_chunk": 4}, replay={"hindsight": {}})
    with pytest.raises(ConfigError, match="action_chunk"):
        load_config({"algo": "sac", "algo_kwargs": {"action_chunk": 4}})


def test_what_needs_single_actions_says_so(tmp_path: Path) -> None:
    run = chunked_run(CHUNKED[0], tmp_path)
    with pytest.raises(UserError, match="chooses chunks of 4 actions"):
        rl_training.evaluate_offline(run.run_dir)
    section = {"kind": "run", "path": str(run.run_dir)}
    with pytest.raises(DataError, match="windows of 4 steps"):
        rl_training.train(tiny_of(get_algorithm_spec("bc"), tmp_path, dataset=section))
    with pytest.raises(ConfigError, match="was trained with action_chunk = 4"):
        rl_training.train(tiny_of(CHUNKED[0], tmp_path, init_from=str(run.run_dir)))


def test_episodes_too_short_for_a_chunk_are_mentioned(tmp_path: Path) -> None:
    config = tiny_of(
        CHUNKED[1], tmp_path, regime="online", env_id=None, algo_kwargs={"action_chunk": 5}
    )
    del config["dataset"]
    env = partial(gym.wrappers.TimeLimit, Clock([], (100,)), 3)
    with pytest.warns(UserWarning, match="truncated after 3 steps, fewer than action_chunk = 5"):
        rl_training.train({**config, "health": False}, env=env)


@pytest.mark.learning
@pytest.mark.parametrize(("config", "chunk"), [("fql/pendulum", 3), ("rlpd/pendulum", 2)])
def test_a_policy_that_chooses_chunks_learns(config: str, chunk: int, tmp_path: Path) -> None:
    chosen = load_config(config)
    settings = {**chosen.algo_kwargs.given(), "action_chunk": chunk}
    result = rl_training.train(
        load_config(config, output_dir=str(tmp_path), algo_kwargs=settings, compile="off")
    )
    found = rl_training.evaluate_checkpoint(result.run_dir, num_episodes=20, seed=1000)
    assert found["eval_return_mean"] >= -250


def test_a_chunk_waits_for_the_observation_after_the_last_one() -> None:
    """An environment that is still busy with its last action is not given the next chunk."""
    queue = ActionQueue(2, 2, 1)
    queue.fill(np.array([[1.0, 2.0], [3.0, 4.0]], np.float32))
    queue.take()
    assert queue.take().tolist() == [[2.0], [4.0]]
    ready = np.array([True, False])
    queue.fill(np.array([[5.0, 6.0], [7.0, 8.0]], np.float32), ready=ready)
    assert queue.is_empty.tolist() == [False, True]
    assert queue.take(ready)[0].tolist() == [5.0]
    queue.fill(np.array([[0.0, 0.0], [9.0, 10.0]], np.float32))
    assert queue.take().tolist() == [[6.0], [9.0]]
