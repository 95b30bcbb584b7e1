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
from rl_training.checkpoints.run_folder import RunFolder
from rl_training.evaluation.evaluator import Evaluation, Evaluator
from rl_training.types import TrainResult

pytestmark = pytest.mark.usefixtures("no_pictures")
NO_SPACE = OSError(28, "No space left on device")


def trained(config: dict[str, Any], **options: Any) -> TrainResult:
    result = rl_training.train(config, **options)
    assert isinstance(result, TrainResult)
    return result


def best_of(run: Path) -> str:
    name: str = json.loads((run / "checkpoints/best.json").read_text())["checkpoint"]
    return name


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
