"""A save that fails: what is counted, what is kept, and which seeds continue."""

from __future__ import annotations

import dataclasses
import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import StopAt, hashes, tiny

import rl_training
from rl_training.callbacks import Callback, TrainingContext
from rl_training.checkpoints.format import checkpoint_folders, step_of
from rl_training.checkpoints.run_folder import RunFolder
from rl_training.errors import CheckpointError
from rl_training.evaluation.evaluator import Evaluation, Evaluator
from rl_training.runtime.workflows import resume_together
from rl_training.training import saver, seed_run
from rl_training.types import TrainResult

pytestmark = [
    pytest.mark.usefixtures("no_pictures"),
    pytest.mark.filterwarnings("ignore:checkpoint not written:UserWarning"),
]
NO_SPACE = OSError(28, "No space left on device")


def trained(config: dict[str, Any], **options: Any) -> TrainResult:
    result = rl_training.train(config, **options)
    assert isinstance(result, TrainResult)
    return result


def best_of(run: Path) -> str:
    name: str = json.loads((run / "checkpoints/best.json").read_text())["checkpoint"]
    return name


def newest_step(run: Path) -> int | None:
    return step_of(checkpoint_folders(run / "checkpoints")[0])


@pytest.fixture
def failing_marks(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Let the first `number` writes of `best.json` fail."""

    def install(number: int) -> None:
        real, left = RunFolder.mark_best, number

        def mark_best(folder: RunFolder, step: int, value: float) -> None:
            nonlocal left
            left -= 1
            if left >= 0:
                raise NO_SPACE
            real(folder, step, value)

        monkeypatch.setattr(RunFolder, "mark_best", mark_best)

    return install


@pytest.mark.parametrize("later", [{}, {"checkpoint_interval": 5}], ids=["last", "every 5"])
def test_a_best_checkpoint_that_cannot_be_marked_does_not_prevent_a_resume(
    tmp_path: Path, failing_marks: Callable[[int], None], later: dict[str, int]
) -> None:
    config = tiny(tmp_path, eval_interval=40, total_timesteps=60, **later)
    uninterrupted = trained(config)
    stopped = trained(config, callbacks=[StopAt(40)])
    os.unlink(stopped.run_dir / "checkpoints/best.json")  # as after a crash before it was written
    failing_marks(1)
    with pytest.warns(UserWarning, match="best checkpoint not marked, the next save tries again"):
        resumed = rl_training.resume_training(stopped.run_dir)
    assert hashes(resumed.checkpoint_path) == hashes(uninterrupted.checkpoint_path)
    assert best_of(resumed.run_dir) == best_of(uninterrupted.run_dir)
    assert resumed.best_checkpoint_path is not None
    assert resumed.best_checkpoint_path.is_dir()


def test_a_worse_checkpoint_does_not_replace_the_best_that_could_not_be_marked(
    tmp_path: Path, failing_marks: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    returns = iter([-900.0, -100.0, -500.0, -600.0])
    real = Evaluator.evaluate

    def evaluate(*arguments: Any, **options: Any) -> Evaluation | None:
        found = real(*arguments, **options)
        return found and dataclasses.replace(found, returns=(next(returns),))

    monkeypatch.setattr(Evaluator, "evaluate", evaluate)
    config = tiny(tmp_path, eval_interval=20, total_timesteps=80)
    stopped = trained(config, callbacks=[StopAt(40)])
    best = stopped.run_dir / "checkpoints/best.json"
    best.write_text(best.read_text().replace("40", "20").replace("-100.0", "-900.0"))
    assert (stopped.run_dir / "checkpoints/step_000000020").is_dir()
    failing_marks(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        resumed = rl_training.resume_training(stopped.run_dir)
    assert best_of(resumed.run_dir) == "step_000000040"


FailAt = Callable[..., None]


@pytest.fixture
def fail_at(monkeypatch: pytest.MonkeyPatch) -> FailAt:
    """Let the saves at some steps fail, of all seeds or of one."""
    real = saver.write_checkpoint

    def install(*steps: int, seed: int | None = None, error: Exception = NO_SPACE) -> None:
        def write_checkpoint(destination: Path, contents: dict[str, Any]) -> Any:
            is_seed = seed is None or f"__seed{seed}" in str(destination)
            if is_seed and step_of(destination) in steps:
                raise error
            return real(destination, contents)

        monkeypatch.setattr(saver, "write_checkpoint", write_checkpoint)

    return install


@pytest.mark.parametrize("failing_seed", [None, 0, 1], ids=["all seeds", "seed 0", "seed 1"])
def test_two_failed_saves_in_a_row_stop_no_seed(
    tmp_path: Path, fail_at: FailAt, failing_seed: int | None
) -> None:
    config = tiny(tmp_path, seeds=[0, 1], run_name="run", checkpoint_interval=20)
    fail_at(40, 60, seed=failing_seed)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        results = rl_training.train(config)
    assert [result.metrics["global_step"] for result in results] == [120, 120]
    messages = [str(each.message) for each in warned]
    expected = 2 if failing_seed is not None else 4  # one warning per failed save
    assert sum("checkpoint not written" in message for message in messages) == expected


def test_three_failed_saves_in_a_row_stop_that_seed_alone(tmp_path: Path, fail_at: FailAt) -> None:
    config = tiny(tmp_path, seeds=[0, 1], run_name="run", checkpoint_interval=20)
    fail_at(40, 60, 80, seed=0)
    with (
        pytest.warns(UserWarning, match="seed 0 failed, the others continue"),
        pytest.raises(OSError, match="No space left"),
    ):
        rl_training.train(config)
    assert newest_step(tmp_path / "run__seed0") == 20
    assert newest_step(tmp_path / "run__seed1") == 120


LINKED = CheckpointError("checkpoints is a link")


def test_a_seed_whose_folder_cannot_be_used_stops_alone(tmp_path: Path, fail_at: FailAt) -> None:
    config = tiny(tmp_path, seeds=[0, 1], run_name="run", checkpoint_interval=20)
    fail_at(40, seed=0, error=LINKED)
    with (
        pytest.warns(UserWarning, match="seed 0 failed, the others continue: .* is a link"),
        pytest.raises(CheckpointError, match="is a link") as stopped,
    ):
        rl_training.train(config)
    assert any("step_000000020" in note for note in stopped.value.__notes__)
    assert newest_step(tmp_path / "run__seed0") == 20
    assert newest_step(tmp_path / "run__seed1") == 120


def test_a_resumed_run_whose_folder_cannot_be_used_stops_alone(
    tmp_path: Path, fail_at: FailAt
) -> None:
    """The runs are at different steps, so that one is resumed after the other."""
    runs = []
    for seed, step in ((0, 50), (1, 60)):
        config = tiny(tmp_path, seed=seed, run_name=f"run__seed{seed}", checkpoint_interval=40)
        runs.append(trained(config, callbacks=[StopAt(step)]).run_dir)
    fail_at(80, seed=0, error=LINKED)
    with pytest.raises(CheckpointError, match="is a link"):
        resume_together(runs)
    assert [newest_step(run) for run in runs] == [50, 120]


class History(Callback):
    """Has a state that is too large to be saved, between two steps."""

    def __init__(self, first: int, last: int, state: object) -> None:
        self.first, self.last, self.state, self.is_large = first, last, state, False

    def for_seed(self, seed: int) -> Callback:
        return self if seed == 0 else Callback()

    def on_collect_end(self, context: TrainingContext) -> None:
        self.is_large = self.first <= context.global_step < self.last

    def state_dict(self) -> dict[str, Any]:
        return {"history": self.state if self.is_large else None}


def test_a_callback_with_a_large_state_only_fails_a_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seed_run, "MAX_CALLBACK_VALUES", 5_000)
    config = tiny(tmp_path, checkpoint_interval=20)
    pattern = "checkpoint not written, training continues: callbacks: the state_dict of History"
    with pytest.warns(UserWarning, match=pattern):
        result = trained(config, callbacks=[History(35, 70, [0] * 5_000)])
    assert result.metrics["global_step"] == 120


def test_a_callback_whose_state_stays_large_stops_its_seed_and_is_named(tmp_path: Path) -> None:
    history = History(35, 1_000, " " * 2 * seed_run.MAX_CALLBACK_BYTES)
    config = tiny(tmp_path, seeds=[0, 1], run_name="run", checkpoint_interval=20)
    with (
        pytest.warns(UserWarning, match="seed 0 failed, the others continue"),
        pytest.raises(OSError, match="the state_dict of History is too large"),
    ):
        rl_training.train(config, callbacks=[history])
    assert newest_step(tmp_path / "run__seed0") == 20
    assert newest_step(tmp_path / "run__seed1") == 120
