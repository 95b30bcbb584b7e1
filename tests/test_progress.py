"""The speed and the remaining time that progress shows, with a clock that tests control."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import pytest
from helpers import tiny

import rl_training
from rl_training import callbacks as callbacks_module
from rl_training.callbacks import Callback, TrainingContext
from rl_training.reporting import progress as progress_module
from rl_training.reporting.progress import ProgressLines, Speed
from rl_training.training import seed_run as seed_run_module


class FakeTime(Callback):
    """A clock that advances at the events of a run: by 1/8 s per step and 7/8 s per update."""

    def __init__(self) -> None:
        self.now, self.evaluation_seconds = 0.0, 0.0

    def perf_counter(self) -> float:
        return self.now

    def for_seed(self, seed: int) -> Callback:
        return self

    def on_collect_end(self, context: TrainingContext) -> None:
        self.now += 0.125

    def on_update_end(self, context: TrainingContext) -> None:
        updates = context.gradient_steps - getattr(self, "updates", 0)
        self.updates = context.gradient_steps
        self.now += 0.875 * updates

    def on_evaluation_end(self, context: TrainingContext) -> None:
        self.now += self.evaluation_seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    fake = FakeTime()
    for module in (callbacks_module, progress_module, seed_run_module):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=fake.perf_counter))
    monkeypatch.setattr(ProgressLines, "seconds", 1.0)
    return fake


def lines_of(
    tmp_path: Path, clock: FakeTime, capsys: pytest.CaptureFixture[str], *more: Callback, **kw: Any
) -> list[str]:
    rl_training.train(tiny(tmp_path, **kw), callbacks=[clock, ProgressLines(), *more])
    return capsys.readouterr().out.splitlines()


def step_of(line: str) -> int:
    found = re.match(r"step ([\d,]+)", line)
    assert found, line
    return int(found[1].replace(",", ""))


def seconds_left(line: str) -> int | None:
    found = re.search(r"(\d+):(\d\d) left", line)
    return int(found[1]) * 60 + int(found[2]) if found else None


def test_the_warm_up_does_not_distort_the_time_left(
    tmp_path: Path, clock: FakeTime, capsys: pytest.CaptureFixture[str]
) -> None:
    opening, *lines = lines_of(tmp_path, clock, capsys, total_timesteps=100)
    assert opening.startswith("training in ")
    lines = [line for line in lines if " of 100 " in line]
    warm_up = [line for line in lines if step_of(line) <= 40]
    assert [step_of(line) for line in warm_up] == [8, 16, 24, 32, 40]
    assert all("warm-up  8.0 steps/s" in line and "left" not in line for line in warm_up)
    learning = lines[len(warm_up) :]
    early = [line for line in learning if seconds_left(line) is None]
    assert [step_of(line) for line in early] == [41, 42, 43]
    for line in learning[3:-1]:  # a step takes one second
        assert "  1.0 steps/s  " in line
        assert seconds_left(line) == pytest.approx(100 - step_of(line), abs=1)
    assert len(learning) > 50


def test_evaluations_do_not_change_the_speed_but_count_in_the_time_left(
    tmp_path: Path, clock: FakeTime, capsys: pytest.CaptureFixture[str]
) -> None:
    clock.evaluation_seconds = 7.0
    lines = lines_of(tmp_path, clock, capsys, total_timesteps=100, eval_interval=20)
    learning = [line for line in lines if " of 100 " in line and seconds_left(line) is not None]
    assert len(learning) > 40
    for line in learning:
        assert "  1.0 steps/s  " in line
        step = step_of(line)
        evaluations = 5 - step // 20
        assert seconds_left(line) == pytest.approx(100 - step + 7 * evaluations, abs=1)


def test_updates_in_blocks_are_measured_from_block_to_block(
    tmp_path: Path, clock: FakeTime, capsys: pytest.CaptureFixture[str]
) -> None:
    block = {"train_frequency": 10, "gradient_updates_per_step": 10, "learning_starts": 20}
    lines = lines_of(tmp_path, clock, capsys, total_timesteps=100, algo_kwargs=block)
    learning = [line for line in lines if " of 100 " in line and seconds_left(line) is not None]
    assert {step_of(line) for line in learning} >= {40, 50, 60, 70, 80, 90}
    for line in learning:
        assert "  1.0 steps/s  " in line
        assert seconds_left(line) == pytest.approx(100 - step_of(line), abs=1)


def test_the_time_left_ends_at_max_updates(
    tmp_path: Path, clock: FakeTime, capsys: pytest.CaptureFixture[str]
) -> None:
    clock.evaluation_seconds = 7.0
    settings = {"total_timesteps": 1_000, "max_updates": 40, "eval_interval": 20}
    lines = lines_of(tmp_path, clock, capsys, **settings)
    learning = [line for line in lines if " of 1,000 " in line and seconds_left(line) is not None]
    assert len(learning) > 20
    for line in learning:  # updates start after step 40, one per step
        evaluations = 4 - step_of(line) // 20
        assert seconds_left(line) == pytest.approx(80 - step_of(line) + 7 * evaluations, abs=1)


def test_pretraining_has_its_own_speed(
    tmp_path: Path, clock: FakeTime, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = lines_of(
        tmp_path,
        clock,
        capsys,
        algo="rlpd",
        total_timesteps=60,
        dataset={"kind": "random", "size": 50, "seed": 0},
        algo_kwargs={
            "offline_pretrain_updates": 20,
            "num_critics": 2,
            "gradient_updates_per_step": 1,
            "learning_starts": 20,
        },
    )
    pretraining = [line for line in lines if line.startswith("update ") and " of 20 " in line]
    assert len(pretraining) > 5
    assert all("pretraining  1.1 updates/s" in line for line in pretraining[2:])
    assert not any("left" in line for line in pretraining)
    after = [line for line in lines if " of 60 " in line]
    assert "warm-up  8.0 steps/s" in after[0]
    for line in after:
        if (left := seconds_left(line)) is not None:
            assert left == pytest.approx(60 - step_of(line), abs=1)
    assert seconds_left(after[-3]) is not None


def test_seeds_that_wait_for_each_other_agree_on_speed_and_time(
    tmp_path: Path, clock: FakeTime, capsys: pytest.CaptureFixture[str]
) -> None:
    clock.evaluation_seconds = 4.0
    clock.on_update_end = lambda context: setattr(clock, "now", clock.now + 0.375)  # type: ignore
    lines = lines_of(tmp_path, clock, capsys, seeds=[3, 4], total_timesteps=100, eval_interval=50)
    for seed in (3, 4):
        own = [line for line in lines if f"  seed {seed}  " in line and seconds_left(line)]
        assert len(own) > 40
        for line in own:  # a step of both seeds takes one second
            assert f"seed {seed}  1.0 steps/s" in line
            # An evaluation of each seed at step 50 and at the end
            ahead = 8 * (2 - step_of(line) // 50) if step_of(line) > 50 else None
            if ahead is not None:
                assert seconds_left(line) == pytest.approx(100 - step_of(line) + ahead, abs=1)
    assert len([line for line in lines if line.startswith("training seed ")]) == 2


class Compile(Callback):
    """Behaves like a run whose programs take `seconds` to compile."""

    def __init__(self, clock: FakeTime, seconds: float) -> None:
        self.clock, self.seconds = clock, seconds
        self.events: list[str] = []

    def on_train_start(self, context: TrainingContext) -> None:
        run: Any = context._run
        run.before_compiling()
        self.clock.now += self.seconds
        run.after_compiling()

    def on_compile_start(self, context: TrainingContext) -> None:
        self.events.append("start")

    def on_compile_end(self, context: TrainingContext) -> None:
        self.events.append("end")
        self.last = context.last_compile_seconds


def test_compiling_says_how_long_it_took_the_last_time(
    tmp_path: Path,
    clock: FakeTime,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    first = Compile(clock, 38.2)
    lines = lines_of(tmp_path, clock, capsys, first, total_timesteps=50)
    assert "compiling the update (about a minute the first time)" in lines
    assert "compiled in 38 s" in lines
    assert first.events == ["start", "end"]
    assert first.last == pytest.approx(38.2)
    warm_up = [line for line in lines if "warm-up" in line]
    assert warm_up
    assert all("8.0 steps/s" in line for line in warm_up[1:])
    lines = lines_of(tmp_path, clock, capsys, Compile(clock, 5.0), total_timesteps=50)
    assert "compiling the update (last time: 38 s)" in lines
    # Another algorithm takes another time.
    lines = lines_of(tmp_path, clock, capsys, Compile(clock, 5.0), total_timesteps=50, algo="td3")
    assert "compiling the update (about a minute the first time)" in lines


def test_a_duration_that_cannot_be_kept_is_no_error(
    tmp_path: Path,
    clock: FakeTime,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(file))
    lines = lines_of(tmp_path, clock, capsys, Compile(clock, 3.0), total_timesteps=10)
    assert "compiled in 3 s" in lines


def test_the_speed_forgets_what_is_older_than_its_window() -> None:
    speed = Speed()
    assert speed.per_second is None
    for second in range(61):
        speed.add(float(second), position=10 * second if second <= 30 else 300 + (second - 30))
    assert speed.per_second == pytest.approx(1.0)
    assert speed.measured_seconds == 30.0
    speed.restart()
    assert speed.per_second is None


class Reached(gym.Wrapper):
    def step(self, action: Any) -> Any:
        *others, info = self.env.step(action)
        return *others, {**info, "is_success": True}


def test_success_rates_are_shown_with_the_returns_of_the_same_episodes(
    tmp_path: Path, clock: FakeTime, capsys: pytest.CaptureFixture[str]
) -> None:
    def make() -> gym.Env[Any, Any]:
        return Reached(gym.make("Pendulum-v1", max_episode_steps=20))

    rl_training.train(
        tiny(tmp_path, eval_interval=60), env=make, callbacks=[clock, ProgressLines()]
    )
    shown = capsys.readouterr().out
    assert re.search(r"  return -[\d.]+ \(success 100%\)  eval -[\d.]+ \(success 100%\)", shown)
    assert re.search(r"step 60  evaluation -[\d.]+ ± [\d.]+ \(success 100%\)\n", shown)
