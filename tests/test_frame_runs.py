"""Runs with images: checkpoints of their frames, resumes, and what they need of the machine."""

from __future__ import annotations

import json
import os
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from frame_patterns import SIZE, stacked_pixels
from helpers import StopAt, hashes, tiny
from hostile import seal
from safetensors.torch import load_file, save_file

from rl_training.algorithms.base import Draw
from rl_training.checkpoints.loading import find_checkpoint
from rl_training.checkpoints.run_folder import RunFolder
from rl_training.config import TrainConfig
from rl_training.data import replay_buffer
from rl_training.data.storage import frame_ring
from rl_training.datasets.replay import open_replay
from rl_training.errors import CheckpointError, ConfigError, DataError
from rl_training.execution.random_streams import RandomPool
from rl_training.observations import ObservationLeaf, ObservationSpec
from rl_training.runtime.workflows import resume_training, train
from rl_training.training import needs
from rl_training.training.needs import memory_needs, replay_is_on_host
from rl_training.training.seed_run import SeedRun
from rl_training.types import SpaceInfo, TrainResult


def config_of(folder: Path, **changes: Any) -> dict[str, Any]:
    algo_kwargs = {"buffer_capacity": 100, **changes.pop("algo_kwargs", {})}
    settings = {"algo": "dqn", "env_id": None, "total_timesteps": 200, **changes}
    return tiny(folder, **settings, algo_kwargs=algo_kwargs)


def trained(folder: Path, **changes: Any) -> TrainResult:
    callbacks = changes.pop("callbacks", [])
    return train(config_of(folder, **changes), env=stacked_pixels, callbacks=callbacks)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> TrainResult:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(frame_ring, "SEGMENT_BYTES", 20 * SIZE**2)
        return trained(tmp_path_factory.mktemp("finished"), checkpoint_interval=20)


@pytest.fixture(autouse=True)
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Save twenty frames per file."""
    monkeypatch.setattr(frame_ring, "SEGMENT_BYTES", 20 * SIZE**2)


@pytest.mark.parametrize("prioritized", [False, True])
@pytest.mark.parametrize("num_envs", [1, 3])
@pytest.mark.fast_cases("3-True")
def test_a_resumed_run_has_the_same_rows_frames_and_networks(
    tmp_path: Path, prioritized: bool, num_envs: int
) -> None:
    settings = {
        "num_envs": num_envs,
        "total_timesteps": 240,
        "algo_kwargs": {"prioritized": prioritized, "n_step": 3},
    }
    whole = trained(tmp_path / "whole", **settings)
    part = trained(tmp_path / "part", **settings, callbacks=[StopAt(150)])
    resumed = resume_training(part.run_dir, env=stacked_pixels)
    assert hashes(resumed.checkpoint_path) == hashes(whole.checkpoint_path)
    assert any(name.startswith("frames-00-") for name in hashes(whole.checkpoint_path))


def test_unchanged_frames_are_linked_but_not_between_the_newest_checkpoints(
    tmp_path: Path,
) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()

    class Keep(StopAt):
        """Links every checkpoint to another folder, so that none is removed."""

        def on_collect_end(self, context: Any) -> None:
            for folder in (context.run_dir / "checkpoints").glob("step_*"):
                if not (kept / folder.name).exists():
                    shutil.copytree(folder, kept / folder.name, copy_function=os.link)

    settings = {"buffer_capacity": 400}
    trained(tmp_path / "run", checkpoint_interval=40, algo_kwargs=settings, callbacks=[Keep(10**9)])
    checkpoints = sorted(kept.iterdir())
    first = "frames-00-00000.safetensors"
    for one, neighbor, following in zip(
        checkpoints[1:], checkpoints[2:], checkpoints[3:], strict=False
    ):
        assert not (one / first).samefile(neighbor / first)
        assert (one / first).samefile(following / first)


def test_the_replay_of_a_run_with_frames_is_recorded_data(finished: TrainResult) -> None:
    recording = open_replay(finished.run_dir)
    chunks = list(recording.chunks())
    images = np.concatenate([steps.obs for steps in chunks]).view(np.uint8).reshape(-1, 4, SIZE**2)
    following = np.concatenate([steps.next_obs for steps in chunks]).view(np.uint8)
    following = following.reshape(-1, 4, SIZE**2)
    ended = np.concatenate([steps.ended for steps in chunks])
    assert 70 < len(images) == recording.info.max_rows <= 100
    assert np.array_equal(images[:, 1:], following[:, :-1])
    assert np.array_equal(following[:-1][~ended[:-1]], images[1:][~ended[:-1]])
    lengths = np.diff(np.flatnonzero(ended)).tolist()
    assert lengths[:-1] == [7] * (len(lengths) - 1), "all but the last, which the run cut off"


def copied(result: TrainResult, folder: Path) -> Path:
    """Copy a run; return its newest checkpoint, and leave no other."""
    shutil.copytree(result.run_dir, folder)
    newest = folder / "checkpoints" / result.checkpoint_path.name
    for other in newest.parent.glob("step_*"):
        if other != newest:
            shutil.rmtree(other)
    return newest


@pytest.mark.parametrize("column", [0, -2], ids=["observation", "next observation"])
@pytest.mark.parametrize("position", [-1, 10**6])
def test_frames_that_are_not_there_are_refused(
    tmp_path: Path, finished: TrainResult, column: int, position: int
) -> None:
    newest = copied(finished, tmp_path / "run")
    rows = load_file(newest / "replay-00000.safetensors")["rows"]
    rows.view(torch.int32)[5, column] = position
    save_file({"rows": rows}, newest / "replay-00000.safetensors")
    seal(newest)
    with pytest.raises(CheckpointError, match=r"replay-00000.*refers to frames"):
        resume_training(tmp_path / "run", total_timesteps=300, env=stacked_pixels)
    with pytest.raises(CheckpointError, match="refers to frames"):
        open_replay(tmp_path / "run")


@pytest.mark.parametrize("damage", ["missing", "short", "count", "text", "extra"])
def test_checkpoints_whose_frames_are_not_complete_are_refused(
    tmp_path: Path, finished: TrainResult, damage: str
) -> None:
    newest = copied(finished, tmp_path / "run")
    name = "frames-00-00001.safetensors"
    manifest = json.loads((newest / "MANIFEST.json").read_text())
    state = json.loads((newest / "state.json").read_text())
    if damage == "missing":
        (newest / name).unlink()
        del manifest["files"][name]
    elif damage == "short":
        save_file({"frames": load_file(newest / name)["frames"][:-1].clone()}, newest / name)
    elif damage == "extra":
        shutil.copy(newest / name, newest / "frames-01-00000.safetensors")
        manifest["files"]["frames-01-00000.safetensors"] = manifest["files"][name]
    else:
        state["replay"]["frames_added"] = {"count": [30], "text": "many"}[damage]
    (newest / "MANIFEST.json").write_text(json.dumps(manifest))
    (newest / "state.json").write_text(json.dumps(state))
    seal(newest)
    with pytest.raises(CheckpointError, match="replay buffer is not complete"):
        find_checkpoint(tmp_path / "run")


def test_without_its_replay_a_run_collects_before_it_learns_again(tmp_path: Path) -> None:
    settings = {"checkpoint_replay": "none", "algo_kwargs": {"learning_starts": 40}}
    part = trained(tmp_path, **settings, callbacks=[StopAt(120)])
    names = {path.name for path in part.checkpoint_path.iterdir()}
    assert not any(name.startswith(("replay", "frames")) for name in names)
    metadata = json.loads((part.run_dir / "metadata.json").read_text())
    assert metadata["resume_level"] == "statistical"
    with pytest.warns(UserWarning, match="updates continue after 40 new transitions"):
        result = resume_training(part.run_dir, env=stacked_pixels)
    assert result.metrics["global_step"] == 200
    # 80 updates after the first 40 steps, and as many as steps after 40 new transitions.
    assert result.metrics["gradient_steps"] == 80 + 80 - 39
    with pytest.raises(DataError, match="checkpoint_replay: none"):
        open_replay(part.run_dir)


def test_leaving_out_the_replay_changes_nothing_that_is_learned(
    tmp_path: Path, finished: TrainResult
) -> None:
    without = trained(tmp_path, checkpoint_replay="none", checkpoint_interval=20)
    states = [
        json.loads((run.checkpoint_path / "state.json").read_text()) for run in (finished, without)
    ]
    assert [state["resume_level"] for state in states] == ["bit-exact", "statistical"]
    for name in ("model.safetensors", "learner.safetensors"):
        assert hashes(finished.checkpoint_path)[name] == hashes(without.checkpoint_path)[name]
    environments = [state["collector"]["environment"] for state in states]
    assert environments[0]["observations"] == environments[1]["observations"]


def test_a_run_whose_checkpoints_do_not_fit_on_the_disk_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage, settings = namedtuple("usage", "total used free"), {"checkpoint_interval": 50}
    known, free = needs.disk_bytes, []

    def disk_bytes(*arguments: Any, **options: Any) -> int:
        free.append(known(*arguments, **options))
        return free[-1]

    with monkeypatch.context() as patch:
        patch.setattr(needs, "disk_bytes", disk_bytes)
        trained(tmp_path / "before", **settings, checkpoint_replay="none")
    monkeypatch.setattr(needs.shutil, "disk_usage", lambda _: usage(9, 9, free[0]))
    with pytest.raises(ConfigError) as caught:
        trained(tmp_path / "runs", **settings)
    for word in ("checkpoint_replay: none", "buffer_capacity", "output_dir", "are free"):
        assert word in str(caught.value)
    assert not (tmp_path / "runs").exists()
    trained(tmp_path / "runs", **settings, checkpoint_replay="none")


def bytes_on_disk(folder: Path) -> int:
    """Bytes of all files below a folder; linked files count once."""
    files = [path.stat() for path in folder.rglob("*") if path.is_file()]
    return sum({file.st_ino: file.st_size for file in files}.values())


@pytest.mark.parametrize(
    "changes",
    [
        {"checkpoint_interval": 250, "eval_interval": 290},  # frames are overwritten in between
        {"checkpoint_interval": 250, "eval_interval": 0},
        {"checkpoint_interval": 0, "eval_interval": 0},
        {"checkpoint_interval": 500, "eval_interval": 0},  # two checkpoints
        {"checkpoint_interval": 20, "eval_interval": 110, "algo_kwargs": {"buffer_capacity": 5000}},
        {"checkpoint_interval": 250, "eval_interval": 290, "checkpoint_replay": "none"},
    ],
)
def test_the_disk_space_of_a_run_is_known_before_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    changes = dict(changes)
    monkeypatch.setattr(needs, "SEGMENT_ROWS", 20)
    monkeypatch.setattr(replay_buffer, "SEGMENT_ROWS", 20)
    estimates, peaks = [], []

    def request_checkpoint(run: SeedRun, *, best: bool = False) -> None:
        """The first evaluated policy stays the best one."""
        if not best or run.progress.global_step < 300:
            request(run, best=best)

    def disk_bytes(*arguments: Any, **options: Any) -> int:
        estimates.append(known(*arguments, **options))
        return estimates[-1]

    def prune(folder: RunFolder, best: Path | None) -> None:
        peaks.append(bytes_on_disk(folder.checkpoints))
        then(folder, best)

    request, known, then = SeedRun.request_checkpoint, needs.disk_bytes, RunFolder.prune
    monkeypatch.setattr(SeedRun, "request_checkpoint", request_checkpoint)
    monkeypatch.setattr(needs, "disk_bytes", disk_bytes)
    monkeypatch.setattr(RunFolder, "prune", prune)
    settings = {"learning_starts": 990, **changes.pop("algo_kwargs", {})}
    trained(tmp_path, total_timesteps=1000, eval_episodes=1, algo_kwargs=settings, **changes)
    # Beside replay and networks, a checkpoint has a few small files.
    small = 4 * 60_000
    assert max(peaks) - small <= estimates[0] <= 1.25 * max(peaks)


ATARI = ObservationSpec((ObservationLeaf("", "image", (4, 84, 84)),))


def atari_config(**changes: Any) -> TrainConfig:
    return TrainConfig(algo="dqn", **changes, algo_kwargs={"buffer_capacity": 1_000_000})


def test_memory_needs_count_each_frame_once() -> None:
    spaces = SpaceInfo(ATARI.size, 4, "discrete", given_observation=ATARI)
    needs = memory_needs([atari_config()], spaces, online=True)
    assert 7e9 < needs["buffer_capacity"] < 8e9
    whole = memory_needs([atari_config(replay_frame_stack=1)], spaces, online=True)
    assert 28e9 < whole["buffer_capacity"] < 32e9


def test_the_replay_is_on_the_host_if_it_does_not_fit_on_the_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spaces = SpaceInfo(ATARI.size, 4, "discrete", given_observation=ATARI)

    def on_host(device: str, free: float, **changes: Any) -> bool:
        monkeypatch.setattr("rl_training.training.needs.available_memory", lambda _: free)
        return replay_is_on_host([atari_config(**changes)], spaces, device, online=True)

    assert not on_host("cuda:0", 20e9)
    assert on_host("cuda:0", 6e9)
    assert on_host("cuda:0", 20e9, replay_device="cpu")
    assert not on_host("cuda:0", 6e9, replay_device="cuda")
    assert not on_host("cpu", 6e9, replay_device="cpu")
    with pytest.raises(ConfigError, match="replay_device = 'cuda': updates run on the CPU"):
        on_host("cpu", 6e9, replay_device="cuda")


def test_random_numbers_on_the_host_are_those_of_the_current_round() -> None:
    draws = {"noise": Draw("bits", (3,)), "rows": Draw("bits", (5,))}
    for slots in (1, 2):
        pool = RandomPool(draws, [torch.Generator().manual_seed(i) for i in range(slots)], "cpu")
        for _ in range(130):  # with two refills
            rows = pool.take()["rows"]
            assert torch.equal(pool.current_on_host("rows"), rows)
