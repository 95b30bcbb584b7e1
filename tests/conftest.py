"""What several test modules share: a tiny config, and one finished run to look at and to damage."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import pytest

# They assert on behalf of several test modules.
pytest.register_assert_rewrite("conformance", "example_runs", "trainer_smoke")

# A machine that is busy with other tests must not fail one for being slow.
hypothesis.settings.register_profile("default", deadline=None)
hypothesis.settings.load_profile("default")

# Before anything imports PyTorch; workers and the commands they start share few cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(autouse=True)
def _same_numbers_every_time() -> None:
    """What a test draws without a seed of its own must not make it fail once in a while."""
    import torch

    torch.manual_seed(0)


def tiny(output_dir: Path, **changes: Any) -> dict[str, Any]:
    """A tiny config, with evaluations, checkpoints and logs on the way."""
    from helpers import tiny as quiet

    busy = {"num_threads": 1, "eval_interval": 40, "checkpoint_interval": 40, "log_interval": 20}
    algo_kwargs = {"learning_starts": 50, "buffer_capacity": 1000}
    algo_kwargs |= changes.pop("algo_kwargs", {})
    return quiet(output_dir, **{**busy, **changes}, algo_kwargs=algo_kwargs)


@pytest.fixture
def make_config(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Tiny configs with changes, whose runs go into a folder of this test's own."""
    return lambda **changes: tiny(tmp_path / "runs", **changes)


@pytest.fixture
def tiny_config(make_config: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    return make_config()


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The `TrainResult` of a tiny run with evaluations and checkpoints at 40, 80 and 120.

    Shared: look, but do not touch; `run_copy` is for that.
    """
    from rl_training import train

    return train(tiny(tmp_path_factory.mktemp("shared") / "runs"))


@pytest.fixture
def run_copy(finished_run: Any, tmp_path: Path) -> Path:
    """A run folder to resume, damage or lock."""
    return Path(shutil.copytree(finished_run.run_dir, tmp_path / "copied-run"))


def tree(folder: Path) -> set[str]:
    """Everything below a folder, to say that nothing was added or removed."""
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*")}
