"""What several test modules share: a tiny config, one finished run, and the command line."""

from __future__ import annotations

import io
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium as gym
import hypothesis
import pytest

# They assert on behalf of several test modules.
pytest.register_assert_rewrite("conformance", "example_runs", "helpers", "trainer_smoke")

# A machine that is busy with other tests must not fail one for being slow.
# Whether a commit passes depends on the commit alone; `--hypothesis-profile explore` looks further.
hypothesis.settings.register_profile("repeat", deadline=None, derandomize=True)
hypothesis.settings.register_profile("explore", deadline=None, max_examples=1_000)
hypothesis.settings.load_profile("repeat")

# Before anything imports PyTorch; workers and the commands they start share few cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(autouse=True)
def _fixed_global_seeds() -> None:
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


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs draw no learning curve, which is a third of a tiny run's time."""
    monkeypatch.setattr("rl_training.training.run.draw_learning_curve", lambda *_, **__: None)


def tree(folder: Path) -> set[str]:
    """Everything below a folder, to say that nothing was added or removed."""
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*")}


class Outcome(NamedTuple):
    code: int
    out: str
    err: str


Command = Callable[..., Outcome]


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in."""
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def rl(
    work: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Command]:
    """Runs a command in this process, as the installed script does."""
    from rl_training import cli

    known_ids = set(gym.registry)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])

    def run(*arguments: str | Path, stdin: str = "") -> Outcome:
        monkeypatch.setattr(sys, "argv", ["rl-training", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main()
        code = ended.value.code
        return Outcome(code if isinstance(code, int) else 0, *capsys.readouterr())

    yield run
    for added in set(gym.registry) - known_ids:
        del gym.registry[added]
