"""Checkpoints: contents, uses, and protection against damage and loss."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import multiprocessing
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import safetensors
import torch
from conformance import check_that_a_run_resumes_bit_for_bit
from conftest import tree
from helpers import (
    StopAt,
    assert_actions_fit,
    each_algorithm,
    first_observations,
    metric_rows,
    model_bytes,
)

from rl_training import SAC, evaluate_checkpoint, predict_checkpoint, resume_training, train
from rl_training.algorithms.dqn import DQN
from rl_training.algorithms.spec import AlgorithmSpec
from rl_training.callbacks import Callback, TrainingContext
from rl_training.checkpoints.format import CheckpointReader, checkpoint_folders
from rl_training.checkpoints.loading import cached_policy, find_checkpoint, load_policy
from rl_training.checkpoints.run_folder import RunFolder
from rl_training.data import replay_buffer
from rl_training.envs import EnvironmentFactory, environment_factory
from rl_training.envs.spaces import describe_spaces
from rl_training.envs.vector.step_arrays import EpisodeTracker
from rl_training.errors import CheckpointError, RunLockedError, UserError
from rl_training.evaluation.evaluator import Evaluator
from rl_training.execution.policy import Policy
from rl_training.execution.random_streams import Stream, stream_seed
from rl_training.experiment.overview import list_runs
from rl_training.types import TrainResult

OBSERVATION = [1.0, 0.0, 0.5]
FILES = [
    "learner.safetensors",
    "model.safetensors",
    "policy.json",
    "replay-00000.safetensors",
    "state.json",
]
MakeConfig = Callable[..., dict[str, Any]]


def newest(run: Path) -> Path:
    return checkpoint_folders(run / "checkpoints")[0]


def saved_steps(run: Path) -> list[int]:
    return sorted(int(folder.name[5:]) for folder in checkpoint_folders(run / "checkpoints"))


def leftovers(run: Path) -> list[str]:
    return [name for name in tree(run) if ".tmp-" in name]


def assert_no_duplicate_rows(run: Path) -> None:
    kinds = [(row["step"], "eval/mean_reward" in row) for row in metric_rows(run)]
    assert len(kinds) == len(set(kinds))
    assert [step for step, _ in kinds] == sorted(step for step, _ in kinds)


def reseal(checkpoint: Path) -> None:
    """Make the manifest match the files, as in a forged checkpoint."""
    manifest = json.loads((checkpoint / "MANIFEST.json").read_text())
    for name, entry in manifest["files"].items():
        data = (checkpoint / name).read_bytes()
        entry.update(size=len(data), sha256=hashlib.sha256(data).hexdigest())
    (checkpoint / "MANIFEST.json").write_text(json.dumps(manifest))


def rewrite(checkpoint: Path, name: str, change: Callable[[Any], None]) -> None:
    """Change a JSON file of a checkpoint and update the manifest."""
    values = json.loads((checkpoint / name).read_text())
    change(values)
    (checkpoint / name).write_text(json.dumps(values))
    reseal(checkpoint)


# The format


def test_a_checkpoint_is_json_and_safetensors_under_a_manifest(finished_run: TrainResult) -> None:
    folder = finished_run.checkpoint_path
    assert folder.name == "step_000000120"
    assert sorted(path.name for path in folder.iterdir()) == sorted(["MANIFEST.json", *FILES])
    manifest = json.loads((folder / "MANIFEST.json").read_text())
    assert manifest["format_version"] == 1
    assert sorted(manifest["files"]) == FILES
    for name, entry in manifest["files"].items():
        data = (folder / name).read_bytes()
        assert entry == {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        if name.endswith(".json"):
            json.loads(data, parse_constant=pytest.fail)
        else:
            with safetensors.safe_open(folder / name, "pt") as file:
                assert list(file.keys())


def test_only_filled_replay_rows_are_saved(finished_run: TrainResult) -> None:
    saved = CheckpointReader(finished_run.checkpoint_path).tensors("replay-00000.safetensors")
    assert len(saved["rows"]) == 120


def test_the_same_seed_gives_the_same_bytes_in_any_folder(
    finished_run: TrainResult, tiny_config: dict[str, Any]
) -> None:
    again = train({**tiny_config, "run_name": "another-name"})
    assert isinstance(again, TrainResult)
    for name in ("model.safetensors", "learner.safetensors", "replay-00000.safetensors"):
        first = (finished_run.checkpoint_path / name).read_bytes()
        assert (again.checkpoint_path / name).read_bytes() == first
        assert b"__metadata__" not in first
        assert b"sac__" not in first
    assert metric_rows(again.run_dir) == metric_rows(finished_run.run_dir)
    assert again.metrics == finished_run.metrics


def test_another_seed_gives_another_policy(
    finished_run: TrainResult, tiny_config: dict[str, Any]
) -> None:
    other = train({**tiny_config, "seed": 1, "total_timesteps": 20})
    assert isinstance(other, TrainResult)
    a, b = (predict_checkpoint(r.run_dir, OBSERVATION) for r in (finished_run, other))
    assert a != b


# Retention


def test_the_last_two_and_the_best_are_kept(make_config: MakeConfig) -> None:
    """Evaluations of an untrained policy are noise, so any checkpoint can be the best."""
    for seed in (0, 1):
        config = make_config(seed=seed, total_timesteps=100, eval_interval=10)
        config |= {"checkpoint_interval": 10}
        result = train(config)
        assert isinstance(result, TrainResult)
        run = result.run_dir
        found = [row for row in metric_rows(run) if _is_eval(row)]
        evaluations = {row["step"]: row["eval/mean_reward"] for row in found}
        assert sorted(evaluations) == list(range(10, 101, 10))
        best = max(evaluations, key=lambda step: evaluations[int(step)])
        named = json.loads((run / "checkpoints/best.json").read_text())
        assert named == {
            "checkpoint": f"step_{best:09d}",
            "step": best,
            "eval_return_mean": evaluations[best],
        }
        assert saved_steps(run) == sorted({best, 90, 100})
        assert result.best_checkpoint_path == run / "checkpoints" / named["checkpoint"]
        # It contains the evaluated policy, and `--best` loads it.
        own = stream_seed(seed, Stream.EVALUATION_ENVIRONMENT)
        again = Evaluator(EnvironmentFactory("Pendulum-v1"), 1, own)
        policy = load_policy(find_checkpoint(run, best=True))
        evaluation = again.evaluate(policy)
        assert evaluation is not None
        assert evaluation.metrics["eval_return_mean"] == evaluations[best]
        fresh = evaluate_checkpoint(run, best=True)
        assert fresh == evaluate_checkpoint(run / "checkpoints" / named["checkpoint"])


class ProcessNumber(gym.Wrapper[Any, Any, Any, Any]):
    """Ends with a success in any process but the first."""

    def step(self, action: Any) -> Any:
        observation, reward, terminated, truncated, info = self.env.step(action)
        info["is_success"] = multiprocessing.parent_process() is not None
        return observation, reward, terminated, truncated, info


def test_an_evaluation_in_processes_gives_the_same_returns() -> None:
    factory = environment_factory(None, {}, lambda: ProcessNumber(gym.make("CartPole-v1")))
    learner = DQN(4, 2, {"hidden_sizes": [8]}, seed=3)
    policy = Policy(learner, describe_spaces(factory()), algorithm_name="dqn")
    here = Evaluator(factory, 3, 7).evaluate(policy)
    elsewhere = Evaluator(factory, 3, 7, in_processes=True).evaluate(policy)
    assert here is not None
    assert elsewhere is not None
    assert (here.returns, here.lengths) == (elsewhere.returns, elsewhere.lengths)
    assert (here.successes, elsewhere.successes) == ((False,) * 3, (True,) * 3)


def _is_eval(row: dict[str, float]) -> bool:
    return "eval/mean_reward" in row


def test_unchanged_replay_segments_are_linked_to_the_checkpoint_before_the_previous_one(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The best checkpoint stays, so that its files can be compared with those of the last two."""
    monkeypatch.setattr(replay_buffer, "SEGMENT_ROWS", 16)
    monkeypatch.setattr("rl_training.evaluation.evaluator.Evaluator.evaluate", _evaluate_at_once)
    result = train(make_config(total_timesteps=120, checkpoint_interval=40, eval_interval=40))
    assert isinstance(result, TrainResult)
    first, second, third = (
        result.run_dir / f"checkpoints/step_{step:09d}" for step in (40, 80, 120)
    )
    assert shared_files(first, third) == {"replay-00000.safetensors", "replay-00001.safetensors"}
    assert shared_files(second, third) == set()
    shutil.rmtree(second)
    resumed = resume_training(result.run_dir, total_timesteps=130)
    assert resumed.metrics["global_step"] == 130


def shared_files(one: Path, other: Path) -> set[str]:
    """Return the names of the files that are one file on the disk."""
    names = {path.name for path in one.iterdir()} & {path.name for path in other.iterdir()}
    return {name for name in names if (one / name).samefile(other / name)}


def test_linked_segments_contain_no_overwritten_rows(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A buffer of 40 rows in segments of 16 gives the same bytes whether saved often or once."""
    monkeypatch.setattr(replay_buffer, "SEGMENT_ROWS", 16)
    kwargs = {"buffer_capacity": 40, "learning_starts": 1000}
    often, once = (
        train(
            make_config(
                total_timesteps=97,
                checkpoint_interval=interval,
                eval_interval=0,
                algo_kwargs=kwargs,
            )
        )
        for interval in (7, 0)
    )
    assert isinstance(often, TrainResult)
    assert isinstance(once, TrainResult)
    names = sorted(path.name for path in once.checkpoint_path.glob("replay-*"))
    assert len(names) == 3
    for name in names:
        saved = (often.checkpoint_path / name).read_bytes()
        assert saved == (once.checkpoint_path / name).read_bytes()


# Commands


@each_algorithm
@pytest.mark.usefixtures("no_pictures")
@pytest.mark.fast_cases
def test_a_run_of_any_algorithm_resumes_bit_for_bit_and_can_be_used(
    spec: AlgorithmSpec, tmp_path: Path
) -> None:
    result = check_that_a_run_resumes_bit_for_bit(spec, {}, tmp_path)
    path = result.run_dir
    evaluation = evaluate_checkpoint(path, num_episodes=2, seed=5)
    assert {"eval_return_mean", "eval_return_std"} <= evaluation.keys()
    assert np.isfinite(evaluation["eval_return_mean"])
    assert evaluate_checkpoint(path, num_episodes=2, seed=5) == evaluation

    observations = first_observations(spec)
    actions = predict_checkpoint(path, observations)
    assert_actions_fit(spec, actions)
    assert np.array_equal(predict_checkpoint(path, observations), actions)
    assert_actions_fit(spec, predict_checkpoint(path, observations, deterministic=False))
    np.testing.assert_allclose(predict_checkpoint(path, observations[0]), actions[0], rtol=1e-5)

    before = model_bytes(result)
    extended = resume_training(path, total_timesteps=130, schedule="extend")
    assert (extended.run_dir, extended.metrics["global_step"]) == (path, 130)
    assert extended.metrics["gradient_steps"] > result.metrics["gradient_steps"]
    assert model_bytes(extended) != before


def test_every_kind_of_path_loads_the_same_policy(
    finished_run: TrainResult, tmp_path: Path
) -> None:
    run = finished_run.run_dir
    policy = SAC.load(run).save(tmp_path / "policy")
    paths = [run, str(run), run / "checkpoints", finished_run.checkpoint_path, policy]
    actions = [predict_checkpoint(path, OBSERVATION) for path in paths]
    assert all(np.array_equal(action, actions[0]) for action in actions)
    evaluations = [evaluate_checkpoint(path, num_episodes=2, seed=4) for path in paths]
    assert all(evaluation == evaluations[0] for evaluation in evaluations)


def test_evaluate_uses_other_episodes_than_the_evaluations_of_the_run(
    finished_run: TrainResult,
) -> None:
    """This holds for the run's seed and any other seed. Equal seeds give equal results."""
    own = finished_run.metrics["eval_return_mean"]
    found = evaluate_checkpoint(finished_run.run_dir)
    assert found["eval_return_mean"] != own
    assert found == evaluate_checkpoint(finished_run.run_dir, seed=0)
    assert found == SAC.load(finished_run.run_dir).evaluate()
    assert found != evaluate_checkpoint(finished_run.run_dir, seed=99)
    best = evaluate_checkpoint(finished_run.run_dir, best=True)["eval_return_mean"]
    assert best != RunFolder(finished_run.run_dir).best()["eval_return_mean"]


def test_evaluate_and_the_evaluations_of_a_run_share_no_episode_seeds() -> None:
    """Compare the seeds of the first hundreds of episodes for several seeds."""

    def episode_seeds(stream: Stream) -> set[int]:
        seeds = set()
        for root in (0, 1, 2, 1000, 2**32 - 1):
            tracker = EpisodeTracker([stream_seed(root, stream)], 10, seed_every_reset=True)
            seeds |= {tracker.seed(index, episode) for index in range(10) for episode in range(20)}
        return seeds

    own, fresh = map(episode_seeds, (Stream.EVALUATION_ENVIRONMENT, Stream.REPORT_ENVIRONMENT))
    assert len(own) == len(fresh) == 1000
    assert not own & fresh
    assert not fresh & episode_seeds(Stream.TRAINING_ENVIRONMENT)


def test_stream_numbers_do_not_change() -> None:
    """Results of a seed depend on them."""
    assert {stream.name: stream.value for stream in Stream} == {
        "INITIALIZATION": 0,
        "EXPLORATION": 1,
        "UPDATE_NOISE": 3,
        "TRAINING_ENVIRONMENT": 4,
        "EVALUATION_ENVIRONMENT": 5,
        "GLOBAL": 6,
        "VALIDATION": 7,
        "FITTED_Q": 8,
        "REPORT_ENVIRONMENT": 9,
        "HEALTH": 10,
        "HINDSIGHT": 11,
        "ROLLOUTS": 12,
    }


def test_a_saved_policy_is_a_small_subset_of_a_checkpoint(
    finished_run: TrainResult, tmp_path: Path
) -> None:
    policy = SAC.load(finished_run.run_dir).save(tmp_path / "policy")
    assert tree(policy) == {"MANIFEST.json", "model.safetensors", "policy.json"}
    for name in ("model.safetensors", "policy.json"):
        assert (policy / name).read_bytes() == (finished_run.checkpoint_path / name).read_bytes()


def test_resume_accepts_a_larger_total(run_copy: Path) -> None:
    result = resume_training(run_copy, total_timesteps=150)
    assert result.run_dir == run_copy
    assert result.metrics["global_step"] == 150
    assert result.metrics["gradient_steps"] == 100
    assert result.stop_reason == "total_timesteps"
    assert saved_steps(run_copy)[-2:] == [120, 150]
    assert_no_duplicate_rows(run_copy)


def test_resuming_a_finished_run_changes_nothing(run_copy: Path, finished_run: TrainResult) -> None:
    before = tree(run_copy / "checkpoints")
    result = resume_training(run_copy)
    assert result.metrics["global_step"] == 120
    assert result.metrics["eval_return_mean"] == finished_run.metrics["eval_return_mean"]
    assert tree(run_copy / "checkpoints") == before
    assert metric_rows(run_copy) == metric_rows(finished_run.run_dir)


def test_resuming_with_a_smaller_total_trains_no_further(run_copy: Path) -> None:
    try:
        result = resume_training(run_copy, total_timesteps=100)
    except UserError as error:
        assert "100" in str(error)  # noqa: PT017
    else:
        assert result.metrics["global_step"] == 120
    assert saved_steps(run_copy)[-1] == 120


def test_resuming_from_an_earlier_checkpoint_repeats_the_run_exactly(
    run_copy: Path, finished_run: TrainResult
) -> None:
    result = resume_training(run_copy / "checkpoints/step_000000080")
    assert result.run_dir == run_copy
    for name in ("model.safetensors", "learner.safetensors", "replay-00000.safetensors"):
        saved = (result.checkpoint_path / name).read_bytes()
        assert saved == (finished_run.checkpoint_path / name).read_bytes()
    assert metric_rows(run_copy) == metric_rows(finished_run.run_dir)
    assert (run_copy / "superseded/step_000000120/MANIFEST.json").is_file()


def test_a_checkpoint_can_be_given_as_the_current_folder(
    run_copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(newest(run_copy))
    assert resume_training(".", total_timesteps=125).run_dir.resolve() == run_copy.resolve()


def test_resuming_a_copied_checkpoint_starts_a_new_run(
    tiny_config: dict[str, Any], tmp_path: Path
) -> None:
    first = train({**tiny_config, "total_timesteps": 60})
    assert isinstance(first, TrainResult)
    alone = shutil.copytree(first.checkpoint_path, tmp_path / "alone")
    before = tree(first.run_dir)
    result = resume_training(alone, total_timesteps=80)
    assert result.run_dir != first.run_dir
    assert result.metrics["global_step"] == 80
    assert tree(first.run_dir) == before


def test_an_interrupted_run_resumes_to_its_total(
    tiny_config: dict[str, Any], finished_run: TrainResult
) -> None:
    stopped = train(tiny_config, callbacks=[StopAt(67, "interrupted")])
    assert isinstance(stopped, TrainResult)
    assert stopped.stop_reason == "interrupted"
    assert stopped.checkpoint_path.name == "step_000000067"
    result = resume_training(stopped.run_dir)
    assert result.metrics["global_step"] == 120
    name = "model.safetensors"
    saved = (result.checkpoint_path / name).read_bytes()
    assert saved == (finished_run.checkpoint_path / name).read_bytes()
    assert metric_rows(stopped.run_dir) == metric_rows(finished_run.run_dir)


def test_the_new_total_of_an_extended_run_is_saved(run_copy: Path) -> None:
    stopped = resume_training(run_copy, total_timesteps=160, callbacks=[StopAt(130, "interrupted")])
    assert stopped.metrics["global_step"] == 130
    assert resume_training(run_copy).metrics["global_step"] == 160


def test_a_run_ended_by_early_stopping_continues_only_with_a_larger_total(
    make_config: MakeConfig,
) -> None:
    stopped = train(make_config(early_stopping={"target_value": -1e9}))
    assert isinstance(stopped, TrainResult)
    assert (stopped.stop_reason, stopped.metrics["global_step"]) == ("target_value", 40)
    again = resume_training(stopped.run_dir)
    assert (again.stop_reason, again.metrics["global_step"]) == ("target_value", 40)
    extended = resume_training(stopped.run_dir, total_timesteps=50)
    assert extended.metrics["global_step"] == 50


@pytest.mark.parametrize("verb", [evaluate_checkpoint, resume_training, cached_policy, SAC.load])
@pytest.mark.parametrize("kind", ["missing", "empty folder", "a file", "run without checkpoints"])
def test_a_path_without_a_checkpoint_is_refused_by_name(
    tmp_path: Path, verb: Callable[[Path], Any], kind: str
) -> None:
    path = tmp_path / "nothing-here"
    if kind == "empty folder":
        path.mkdir()
    elif kind == "a file":
        path.write_text("{}")
    elif kind == "run without checkpoints":
        (path / "checkpoints").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="nothing-here"):
        verb(path)


# Damage


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut_in_half(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def lengthen(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"\0")


def swap_with_an_older_one(path: Path) -> None:
    older = checkpoint_folders(path.parent.parent)[1] / path.name
    path.write_bytes(older.read_bytes())


DAMAGES = [flip_a_bit, cut_in_half, lengthen, swap_with_an_older_one, Path.unlink]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("name", ["MANIFEST.json", *FILES])
def test_the_previous_checkpoint_is_loaded_when_a_file_is_damaged(
    run_copy: Path, name: str, damage: Callable[[Path], None]
) -> None:
    broken, before = checkpoint_folders(run_copy / "checkpoints")[:2]
    if name == "policy.json" and damage is swap_with_an_older_one:
        pytest.skip("the description of the policy is the same in both")
    damage(broken / name)
    with pytest.raises(CheckpointError, match=broken.name):
        find_checkpoint(broken)
    with pytest.warns(UserWarning, match=rf"skipped .*: .*{broken.name}.*") as warned:
        assert find_checkpoint(run_copy).folder == before
    assert len(warned) == 1


@pytest.mark.parametrize("seed", range(40))
def test_a_checkpoint_with_random_damage_is_not_loaded_wrongly(run_copy: Path, seed: int) -> None:
    """If some bytes of a file change, loading fails or gives the same contents."""
    generator = random.Random(seed)
    broken, before = checkpoint_folders(run_copy / "checkpoints")[:2]
    path = broken / generator.choice(["MANIFEST.json", *FILES])
    original = path.read_bytes()
    data = bytearray(original)
    for _ in range(generator.choice([1, 1, 4, 64])):
        data[generator.randrange(len(data))] = generator.randrange(256)
    path.write_bytes(data)
    harmless = bytes(data) == original or (
        path.name == "MANIFEST.json" and _parsed(bytes(data)) == json.loads(original)
    )
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        found = find_checkpoint(run_copy).folder
    assert found == (broken if harmless else before)
    assert len(warned) == (0 if harmless else 1)


def _parsed(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        return None


@pytest.mark.parametrize("damage", [cut_in_half, Path.unlink], ids=["truncated", "removed"])
def test_a_run_resumes_from_the_last_undamaged_checkpoint(
    run_copy: Path, finished_run: TrainResult, damage: Callable[[Path], None]
) -> None:
    damage(newest(run_copy) / "learner.safetensors")
    with pytest.warns(UserWarning, match="skipped"):
        result = resume_training(run_copy)
    model = "model.safetensors"
    saved = (result.checkpoint_path / model).read_bytes()
    assert saved == (finished_run.checkpoint_path / model).read_bytes()
    assert metric_rows(run_copy) == metric_rows(finished_run.run_dir)


def test_the_error_lists_each_damaged_checkpoint_if_all_are_damaged(run_copy: Path) -> None:
    for folder in checkpoint_folders(run_copy / "checkpoints"):
        cut_in_half(folder / "state.json")
    with pytest.raises(CheckpointError) as caught:
        resume_training(run_copy)
    for folder in checkpoint_folders(run_copy / "checkpoints"):
        assert folder.name in str(caught.value)


@pytest.mark.parametrize("content", [None, "", "[]", "{}", '{"checkpoint": 3}', "not json"])
def test_a_damaged_best_json_does_not_stop_a_run(run_copy: Path, content: str | None) -> None:
    path = run_copy / "checkpoints/best.json"
    path.unlink() if content is None else path.write_text(content)
    with pytest.raises(CheckpointError, match="best"):
        evaluate_checkpoint(run_copy, best=True)
    assert predict_checkpoint(run_copy, OBSERVATION).shape == (1,)


def test_a_best_result_that_is_not_a_number_does_not_stop_a_run(run_copy: Path) -> None:
    best = {"checkpoint": newest(run_copy).name, "step": 120, "eval_return_mean": "high"}
    (run_copy / "checkpoints/best.json").write_text(json.dumps(best))
    assert resume_training(run_copy, total_timesteps=125).metrics["global_step"] == 125


@pytest.mark.parametrize("kept", [0, 100], ids=["lost", "cut short"])
def test_a_lost_metric_log_does_not_stop_a_run(run_copy: Path, kept: int) -> None:
    """A log is not synchronized like a checkpoint: after a power failure it may lack rows."""
    os.truncate(run_copy / "metrics.jsonl", kept)
    resume_training(run_copy, total_timesteps=150)
    data = (run_copy / "metrics.jsonl").read_bytes()
    assert b"\0" not in data
    complete = [json.loads(line) for line in data.splitlines() if line.endswith(b"}")]
    assert [row["step"] for row in complete if _is_eval(row)] == [150]


def test_files_of_an_interrupted_save_are_removed(run_copy: Path) -> None:
    for name in ("step_000000080", "step_000000120"):
        shutil.copytree(run_copy / "checkpoints" / name, run_copy / f"checkpoints/.tmp-{name}")
    (run_copy / "checkpoints/.tmp-json").write_text("{")
    assert find_checkpoint(run_copy).folder.name == "step_000000120"
    resume_training(run_copy, total_timesteps=125)
    assert leftovers(run_copy) == []


# Hostile files


class Executed:
    """A pickle that creates a file when it is loaded."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.marker,)


@pytest.mark.parametrize("name", ["MANIFEST.json", *FILES])
@pytest.mark.parametrize("kind", ["pickle", "torch"])
def test_a_pickle_is_refused_without_loading_it(
    run_copy: Path, tmp_path: Path, name: str, kind: str
) -> None:
    """Also if the manifest lists it."""
    checkpoint, marker = newest(run_copy), tmp_path / "executed"
    if kind == "pickle":
        (checkpoint / name).write_bytes(pickle.dumps(Executed(marker)))
    else:
        torch.save(Executed(marker), checkpoint / name)
    if name != "MANIFEST.json":
        reseal(checkpoint)
    if name != "policy.json":  # not read by resume
        with pytest.raises(CheckpointError):
            resume_training(checkpoint)
    if name in ("MANIFEST.json", "model.safetensors", "policy.json"):
        for verb in (cached_policy, SAC.load, evaluate_checkpoint):
            with pytest.raises(CheckpointError):
                verb(checkpoint)
    assert not marker.exists()


@pytest.mark.parametrize("name", ["../stolen", "/etc/hostname", "..", ".hidden", "a/b", ""])
def test_a_manifest_cannot_refer_to_files_outside_the_checkpoint(run_copy: Path, name: str) -> None:
    path = newest(run_copy) / "MANIFEST.json"
    manifest = json.loads(path.read_text())
    manifest["files"][name] = {"size": 0, "sha256": hashlib.sha256(b"").hexdigest()}
    path.write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="invalid file name"):
        find_checkpoint(newest(run_copy))


def test_best_json_cannot_refer_to_folders_outside_the_run(
    run_copy: Path, finished_run: Any
) -> None:
    elsewhere = os.path.relpath(finished_run.checkpoint_path, run_copy / "checkpoints")
    values = {"checkpoint": elsewhere, "step": 120, "eval_return_mean": 0.0}
    (run_copy / "checkpoints/best.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match=r"best\.json is damaged"):
        find_checkpoint(run_copy, best=True)


@pytest.mark.parametrize("version", [0, 2, None, "1"])
def test_another_format_version_is_refused(run_copy: Path, version: Any) -> None:
    path = newest(run_copy) / "MANIFEST.json"
    manifest = {**json.loads(path.read_text()), "format_version": version}
    path.write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="format version"):
        cached_policy(newest(run_copy))


POLICY_KEYS = [
    "algo",
    "algo_kwargs",
    "obs_dim",
    "action_dim",
    "discrete",
    "action_start",
    "action_low",
    "action_high",
    "normalize_observations",
    "environment",
]


@pytest.mark.parametrize("key", POLICY_KEYS)
@pytest.mark.parametrize("value", ["strange", None, [1], {"a": 1}, 10**12, -1], ids=repr)
def test_a_forged_policy_predicts_or_is_refused(run_copy: Path, key: str, value: Any) -> None:
    """With any value and a matching manifest, the user gets at most one error message."""
    checkpoint = newest(run_copy)
    rewrite(checkpoint, "policy.json", lambda policy: policy.update({key: value}))
    with contextlib.suppress(UserError):
        assert np.isfinite(predict_checkpoint(checkpoint, OBSERVATION)).all()


STATE_KEYS = [
    "versions",
    "config",
    "custom_networks",
    "data",
    "evaluation",
    "execution",
    "environment",
    "resume_level",
    "seed_every_reset",
    "schedule_timesteps",
    "planned_updates",
    "width",
    "slot",
    "progress",
    "replay",
    "streams",
    "global_streams",
    "collector",
    "callbacks",
    "train_metrics",
]


def test_all_keys_of_the_state_are_tested(finished_run: TrainResult) -> None:
    state = CheckpointReader(finished_run.checkpoint_path).json("state.json")
    assert sorted(state) == sorted(STATE_KEYS)


@pytest.mark.parametrize("key", STATE_KEYS)
@pytest.mark.parametrize("value", [None, "strange", [1]], ids=repr)
def test_a_forged_state_is_resumed_or_refused(run_copy: Path, key: str, value: Any) -> None:
    rewrite(newest(run_copy), "state.json", lambda state: state.update({key: value}))
    with contextlib.suppress(UserError):
        assert resume_training(newest(run_copy), total_timesteps=121).metrics["global_step"] == 121


OPTIONAL_KEYS = ("versions", "custom_networks", "seed_every_reset")
"""Keys that older checkpoints lack; networks of users are found by the names of their tensors"""


@pytest.mark.parametrize("key", [key for key in STATE_KEYS if key not in OPTIONAL_KEYS])
def test_a_state_with_a_missing_key_is_refused(run_copy: Path, key: str) -> None:
    rewrite(newest(run_copy), "state.json", lambda state: state.pop(key))
    with pytest.raises(CheckpointError, match=newest(run_copy).name):
        resume_training(newest(run_copy), total_timesteps=121)


@pytest.mark.parametrize("part", ["config", "algo_kwargs", "execution", "progress"])
def test_missing_settings_and_counters_are_not_replaced_by_defaults(
    run_copy: Path, part: str
) -> None:
    def values_of(state: dict[str, Any]) -> dict[str, Any]:
        return state["config"]["algo_kwargs"] if part == "algo_kwargs" else state[part]

    checkpoint = newest(run_copy)
    saved = CheckpointReader(checkpoint).json("state.json")
    for name in values_of(saved):
        changed = copy.deepcopy(saved)
        del values_of(changed)[name]
        rewrite(checkpoint, "state.json", lambda state, new=changed: state.update(new))
        with pytest.raises(CheckpointError, match=checkpoint.name):
            resume_training(checkpoint)


def test_a_checkpoint_with_a_wrong_rest_of_a_block_is_refused(run_copy: Path) -> None:
    rewrite(newest(run_copy), "state.json", lambda state: state["progress"].update(updates_left=-3))
    with pytest.raises(CheckpointError, match="updates_left"):
        resume_training(newest(run_copy))


def test_an_old_run_that_was_interrupted_at_its_last_step_is_finished_by_a_resume(
    run_copy: Path,
) -> None:
    """Such a checkpoint of an earlier version says "interrupted", although nothing is left."""

    def state_of_run() -> str:
        (run,) = list_runs(run_copy.parent)
        return run.state

    def interrupt(state: Any) -> None:
        state["progress"].update(stop_reason="interrupted")

    rewrite(newest(run_copy), "state.json", interrupt)
    assert state_of_run() == "stopped"
    resume_training(run_copy)
    assert state_of_run() == "finished"


# Concurrent use and disk errors


def test_a_second_process_cannot_use_a_run_in_use(run_copy: Path) -> None:
    holder = RunFolder(run_copy)
    holder.lock()
    try:
        before = tree(run_copy)
        with pytest.raises(RunLockedError, match=f"process {os.getpid()}"):
            resume_training(run_copy, total_timesteps=150)
        assert tree(run_copy) == before
        assert predict_checkpoint(run_copy, OBSERVATION).shape == (1,)
    finally:
        holder.unlock()
    assert resume_training(run_copy, total_timesteps=125).metrics["global_step"] == 125


def test_a_lock_is_refused_a_second_time_in_the_same_process(run_copy: Path) -> None:
    holder, other = RunFolder(run_copy), RunFolder(run_copy)
    holder.lock()
    with pytest.raises(RunLockedError, match=f"process {os.getpid()}"):
        other.lock()
    assert other.is_locked()
    other.unlock()
    assert other.is_locked()
    holder.unlock()
    assert not other.is_locked()


@pytest.mark.parametrize(
    ("content", "owner"),
    [
        (b"", "another process"),
        (b"\x00\xff garbage \x1b[31m", "another process"),
        (b"9" * 500, "another process"),
        (b"0", "another process"),
        (b"-1", "another process"),
        (b"2147483647", "another process"),
        (b"9999999999", "another process"),
        (b"2147483647 node17.cluster", "process 2147483647 on node17.cluster"),
        (b"1", "process 1"),
    ],
)
def test_the_owner_of_a_lock_is_named_if_it_is_known_and_alive(
    run_copy: Path, content: bytes, owner: str
) -> None:
    holder = RunFolder(run_copy)
    holder.lock()
    (run_copy / ".lock").write_bytes(content)
    with pytest.raises(RunLockedError) as refused:
        RunFolder(run_copy).lock()
    assert f"is being trained by {owner};" in str(refused.value)
    holder.unlock()


def test_a_forked_process_does_not_keep_the_lock(run_copy: Path) -> None:
    holder = RunFolder(run_copy)
    holder.lock()
    context = multiprocessing.get_context("fork")
    running = context.Event()

    def live_on() -> None:
        running.set()
        time.sleep(60)

    child = context.Process(target=live_on, daemon=True)
    child.start()
    try:
        assert running.wait(30)
        assert RunFolder(run_copy).is_locked()
        holder.unlock()
        assert not RunFolder(run_copy).is_locked()
    finally:
        child.kill()
        child.join()


@pytest.mark.faults
@pytest.mark.parametrize("stopped", [False, True], ids=["running", "SIGSTOP"])
def test_a_killed_run_can_be_resumed_while_its_workers_live(tmp_path: Path, stopped: bool) -> None:
    run = tmp_path / "run"
    settings = "vectorization=async", "num_envs=2", "run_name=run", "checkpoint_interval=100"
    changes = [part for each in settings for part in ("--set", each)]
    command = [sys.executable, "-m", "rl_training"]
    train = [*command, "train", "-c", "sac/pendulum", *changes, "--output-dir", str(tmp_path)]
    with subprocess.Popen(train, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        # Any of them: the first is removed soon after two newer ones are saved.
        wait_for(lambda: any((run / "checkpoints").glob("step_*")))
        workers = children_of(process.pid)
        assert len(workers) == 2
        try:
            if stopped:
                for worker in workers:
                    os.kill(worker, signal.SIGSTOP)
            process.kill()
            process.wait()
            if stopped:
                assert all(Path(f"/proc/{worker}").exists() for worker in workers)
            runs = subprocess.run(
                [*command, "runs", str(tmp_path)], capture_output=True, text=True, check=True
            )
            assert "stopped" in runs.stdout
            resume = [*command, "resume", str(run)]
            # The killed run may have saved several checkpoints; a newer one is the resumed run's.
            last = max((run / "checkpoints").glob("step_*")).name
            with subprocess.Popen(resume, stderr=subprocess.PIPE, text=True) as resumed:
                wait_for(lambda: max((run / "checkpoints").glob("step_*")).name > last)
                resumed.terminate()
                _, errors = resumed.communicate(timeout=30)
            assert (resumed.returncode, "is being trained" in errors) == (130, False)
        finally:
            for worker in workers:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(worker, signal.SIGKILL)


def wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


def children_of(process: int) -> list[int]:
    listed = Path(f"/proc/{process}/task/{process}/children").read_text()
    return [int(child) for child in listed.split()]


def test_a_failed_run_releases_the_lock_of_its_folder(tiny_config: dict[str, Any]) -> None:
    class Fails(Callback):
        def on_update_end(self, context: TrainingContext) -> None:
            raise ZeroDivisionError

    config = {**tiny_config, "run_name": "failing"}
    with pytest.raises(ZeroDivisionError) as caught:
        train(config, callbacks=[Fails()])
    run = Path(config["output_dir"]) / "failing"
    assert any("step_000000040" in note for note in caught.value.__notes__)
    assert resume_training(run).metrics["global_step"] == 120


class FailingDisk(Callback):
    """Makes some calls of `os.fsync` fail after the start of training."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, fails: Callable[[int], bool] = lambda call: False
    ) -> None:
        self.calls = 0
        self._patch, self._fails, self._real = monkeypatch, fails, os.fsync

    def on_train_start(self, context: TrainingContext) -> None:
        self._patch.setattr(os, "fsync", self._fsync)

    def _fsync(self, descriptor: int) -> None:
        self.calls += 1
        if self._fails(self.calls):
            raise OSError(28, "No space left on device")
        self._real(descriptor)


@pytest.fixture
def brief_config(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, no_pictures: None
) -> Callable[[], dict[str, Any]]:
    """Return a config with four checkpoints, the first one the best, and no learning curve."""
    monkeypatch.setattr("rl_training.evaluation.evaluator.Evaluator.evaluate", _evaluate_at_once)
    return lambda: make_config(
        total_timesteps=8,
        checkpoint_interval=2,
        eval_interval=2,
        algo_kwargs={"learning_starts": 1000},
    )


def _evaluate_at_once(*_: Any) -> Any:
    from rl_training.evaluation.evaluator import Evaluation

    return Evaluation((1.0,), (1,))


def test_one_failed_write_loses_one_checkpoint_and_warns_once(
    brief_config: Callable[[], dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a write before the last save fails, the run continues and keeps all other checkpoints."""
    real = os.fsync
    counting = FailingDisk(monkeypatch)
    complete = train(brief_config(), callbacks=[counting])
    assert isinstance(complete, TrainResult)
    files_of_last_save = len(list(complete.checkpoint_path.iterdir())) + 2
    for failing in range(1, counting.calls - files_of_last_save + 1):
        monkeypatch.setattr(os, "fsync", real)
        disk = FailingDisk(monkeypatch, lambda call, failing=failing: call == failing)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always", UserWarning)
            result = train(brief_config(), callbacks=[disk])
        assert isinstance(result, TrainResult)
        run = result.run_dir
        assert (failing, saved_steps(run)[-1]) == (failing, 8)
        assert len([w for w in warned if "No space left" in str(w.message)]) == 1
        assert leftovers(run) == []
        for folder in checkpoint_folders(run / "checkpoints"):
            CheckpointReader(folder).verify()
        best = RunFolder(run).best()
        assert best is None or (run / "checkpoints" / best["checkpoint"]).is_dir()


def test_a_full_disk_ends_the_run_cleanly_after_three_failures(
    brief_config: Callable[[], dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {**brief_config(), "total_timesteps": 20, "eval_interval": 0, "run_name": "full"}
    real = os.fsync
    disk = FailingDisk(monkeypatch, lambda call: call > 20)
    with (
        pytest.warns(UserWarning, match="No space left on device") as warned,
        pytest.raises(OSError, match="No space left on device") as caught,
    ):
        train(config, callbacks=[disk])
    monkeypatch.setattr(os, "fsync", real)
    run = Path(config["output_dir"]) / "full"
    assert sum("No space left" in str(warning.message) for warning in warned) == 2
    assert leftovers(run) == []
    last = find_checkpoint(run).folder
    assert any(last.name in note for note in caught.value.__notes__)
    assert resume_training(run).metrics["global_step"] == 20
