"""Shared fixtures: a tiny config, one finished run, and the command line."""

from __future__ import annotations

import functools
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
import typer
from browser_pages import browser  # noqa: F401

# Show assertion details of shared helpers.
pytest.register_assert_rewrite("conformance", "example_runs", "helpers", "trainer_smoke")

# Commands are built once: that takes longer than many of them run.
typer.main.get_command = functools.cache(typer.main.get_command)

# No deadline, so that a busy machine does not cause failures.
# Results depend only on the commit; `--hypothesis-profile explore` tries other random examples.
hypothesis.settings.register_profile("repeat", deadline=None, derandomize=True)
hypothesis.settings.register_profile("explore", deadline=None, max_examples=1_000)
hypothesis.settings.load_profile("repeat")

FEW_ALGORITHMS = ("dqn", "fql", "ppo", "sac", "xqc")
"""Algorithms of different kinds, for tests that take long with each of them"""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give the marker `thorough` to all cases of a test but its `fast_cases`."""
    for item in items:
        marker = item.get_closest_marker("fast_cases")
        if marker is not None:
            case = f"-{item.callspec.id}-"  # type: ignore[attr-defined]
            if not any(f"-{kept}-" in case for kept in marker.args or FEW_ALGORITHMS):
                item.add_marker(pytest.mark.thorough)


# Set before PyTorch is imported: test workers and their subprocesses share few cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(autouse=True)
def _fixed_global_seeds() -> None:
    """Seed PyTorch's global stream, so that tests without an explicit seed are deterministic."""
    import torch

    torch.manual_seed(0)


def tiny(output_dir: Path, **changes: Any) -> dict[str, Any]:
    """Return a tiny config with evaluations, checkpoints and logs."""
    from helpers import tiny as quiet

    busy = {"num_threads": 1, "eval_interval": 40, "checkpoint_interval": 40, "log_interval": 20}
    algo_kwargs = {"learning_starts": 50, "buffer_capacity": 1000}
    algo_kwargs |= changes.pop("algo_kwargs", {})
    return quiet(output_dir, **{**busy, **changes}, algo_kwargs=algo_kwargs)


@pytest.fixture
def make_config(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Return a function that makes tiny configs with changes; runs go to the test's own folder."""
    return lambda **changes: tiny(tmp_path / "runs", **changes)


@pytest.fixture
def tiny_config(make_config: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    return make_config()


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The `TrainResult` of a tiny run with evaluations and checkpoints at 40, 80 and 120.

    Shared by all tests and read-only. Use `run_copy` to change it.
    """
    from rl_training import train

    return train(tiny(tmp_path_factory.mktemp("shared") / "runs"))


@pytest.fixture
def run_copy(finished_run: Any, tmp_path: Path) -> Path:
    """A copy of the finished run that a test may change."""
    return Path(shutil.copytree(finished_run.run_dir, tmp_path / "copied-run"))


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable learning curves, which take a third of a tiny run's time."""
    monkeypatch.setattr("rl_training.training.run.draw_learning_curve", lambda *_, **__: None)


def tree(folder: Path) -> set[str]:
    """Return all paths below a folder, to check that none was added or removed."""
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*")}


class Outcome(NamedTuple):
    code: int
    out: str
    err: str


Command = Callable[..., Outcome]


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder."""
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def rl(
    work: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Command]:
    """Return a function that runs a command in this process, as the installed script does."""
    from rl_training import cli
    from rl_training.envs import TRUSTED_MODULES

    known_ids = set(gym.registry)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])

    def run(*arguments: str | Path, stdin: str = "") -> Outcome:
        monkeypatch.setattr(sys, "argv", ["rl-training", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        TRUSTED_MODULES.clear()  # every command is its own process
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main()
        code = ended.value.code
        return Outcome(code if isinstance(code, int) else 0, *capsys.readouterr())

    yield run
    TRUSTED_MODULES.clear()
    for added in set(gym.registry) - known_ids:
        del gym.registry[added]
