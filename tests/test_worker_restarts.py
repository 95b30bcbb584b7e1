"""Worker processes that die or hang are started again, and no transition is torn or made up."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box
from gymnasium.wrappers import NormalizeObservation
from helpers import StopAt, hashes, metric_rows, tiny
from safetensors.torch import load_file

import rl_training
from rl_training.callbacks import Callback, TrainingContext
from rl_training.envs import EnvironmentFactory, StepResult, VectorEnvironment
from rl_training.envs.snapshots.codec import Decoder
from rl_training.envs.vector import worker_process
from rl_training.envs.vector.journal import Journal
from rl_training.envs.vector.signalling import Deadline
from rl_training.envs.vector.step_arrays import buffer_size, step_layout
from rl_training.errors import EnvironmentRuntimeError
from rl_training.types import TrainResult

pytestmark = [
    pytest.mark.filterwarnings("ignore:the worker process:UserWarning"),
    pytest.mark.usefixtures("no_pictures", "two_workers"),
]


@pytest.fixture
def two_workers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Simulate a machine with two cores, and check that no process is left."""
    monkeypatch.setattr("rl_training.envs.vector.worker_process.available_cores", lambda: 2)
    yield
    assert multiprocessing.active_children() == []


@pytest.fixture
def short_journal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Capture the environments often, so that replays start from a captured state."""
    monkeypatch.setattr("rl_training.envs.vector.journal.MIN_STEPS", 7)
    monkeypatch.setattr("rl_training.envs.vector.journal.MAX_SHARE", 1e9)


def workers() -> list[int]:
    """Return the process ids of the workers, in the order of their environments at the start."""
    return sorted(process.pid for process in multiprocessing.active_children() if process.pid)


class Signal(Callback):
    """Sends a signal to a worker at some steps."""

    def __init__(self, *steps: int, worker: int = 0, number: int = signal.SIGKILL) -> None:
        super().__init__()
        self.steps, self.worker, self.number = steps, worker, number

    def on_collect_end(self, context: TrainingContext) -> None:
        if context.global_step in self.steps:
            os.kill(workers()[self.worker], self.number)

    def for_seed(self, seed: int) -> Callback:
        return self if seed == 0 else Callback()


class Count(gym.Env[np.ndarray, np.ndarray]):
    """Observes the episode and the step. Its state cannot be captured, but depends on the seed."""

    observation_space, action_space = Box(-1, 1e9, (2,)), Box(-1.0, 1.0, (1,))
    length = 11

    def __init__(self, folder: str | None = None, **odd: Any) -> None:
        self.folder, self.odd = folder, odd
        self.hidden = iter(())  # cannot be captured
        self._happen("make")

    def _happen(self, what: str) -> None:
        """Misbehave once, counted over all processes."""
        if self.folder is None or what not in self.odd:
            return
        with Path(self.folder, what).open("ab", buffering=0) as file:
            file.write(b".")
            times = file.tell()  # also right if two processes write at once
        if times == self.odd[what]:
            self.misbehave()

    def misbehave(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._happen("reset")
        self.episode, self.time = int(self.np_random.integers(1, 2**20)), 0
        return self._observe(), {}

    def step(self, action: np.ndarray) -> Any:
        self._happen("step")
        self.time += 1
        return self._observe(), float(self.time), False, self.time == self.length, {}

    def _observe(self) -> np.ndarray:
        return np.array([self.episode, self.time], np.float32)


class Hanging(Count):
    def misbehave(self) -> None:
        time.sleep(60)


def assert_same(disturbed: TrainResult, undisturbed: TrainResult) -> None:
    assert disturbed.metrics == undisturbed.metrics
    assert hashes(disturbed.checkpoint_path) == hashes(undisturbed.checkpoint_path)
    assert metric_rows(disturbed.run_dir) == metric_rows(undisturbed.run_dir)


def metadata(result: TrainResult) -> dict[str, Any]:
    return json.loads((result.run_dir / "metadata.json").read_text())


def stored(result: TrainResult) -> torch.Tensor:
    state = json.loads((result.checkpoint_path / "state.json").read_text())
    rows = load_file(result.checkpoint_path / "replay-00000.safetensors")["rows"]
    return rows[: state["replay"]["rows_added"]]


def observed(result: TrainResult) -> int:
    """Return the number of observations in the statistics of the normalizer."""
    model = load_file(result.checkpoint_path / "model.safetensors")
    (count,) = (value for name, value in model.items() if name.endswith("count"))
    return int(count)


ASYNC = {"vectorization": "async", "num_envs": 4}
TASKS = [
    ("dqn", "CartPole-v1", {}),
    ("sac", "Pendulum-v1", {"n_step": 3, "entropy_in_target": False}),
    ("sac", "Hopper-v5", {}),
]


@pytest.mark.parametrize(("algo", "env_id", "settings"), TASKS, ids=[task[1] for task in TASKS])
def test_a_run_with_killed_workers_equals_the_undisturbed_run(
    tmp_path: Path, algo: str, env_id: str, settings: dict[str, Any], short_journal: None
) -> None:
    if env_id == "Hopper-v5":
        pytest.importorskip("mujoco")
    config = tiny(tmp_path, **ASYNC, algo=algo, env_id=env_id, algo_kwargs=settings)
    config |= {"checkpoint_interval": 40}
    undisturbed = rl_training.train(config)
    kills = [Signal(4, 24, 100), Signal(28, 80, worker=1)]
    with pytest.warns(UserWarning, match=r"environments 0-1 died \(killed by SIGKILL\).* restarts"):
        disturbed = rl_training.train(config, callbacks=kills)
    assert_same(disturbed, undisturbed)
    assert metadata(disturbed)["resume_level"] == "bit-exact"


def test_seeds_that_share_workers_are_not_disturbed(tmp_path: Path, short_journal: None) -> None:
    config = tiny(tmp_path, env_id="CartPole-v1", algo="dqn", seeds=[0, 1, 2])
    config |= {"vectorization": "async", "num_envs": 2, "total_timesteps": 100}
    undisturbed = rl_training.train(config)
    kills = [Signal(12, 50), Signal(30, 82, worker=1)]
    for left, right in zip(rl_training.train(config, callbacks=kills), undisturbed, strict=True):
        assert_same(left, right)


def test_a_resumed_run_with_killed_workers_equals_the_undisturbed_run(tmp_path: Path) -> None:
    config = tiny(tmp_path, **ASYNC)
    undisturbed = rl_training.train(config)
    stopped = rl_training.train(config, callbacks=[StopAt(60)])
    resumed = rl_training.resume_training(stopped.run_dir, callbacks=[Signal(64, 72)])
    assert_same(resumed, undisturbed)


def test_a_stopped_worker_is_replaced_after_the_timeout(tmp_path: Path) -> None:
    config = tiny(tmp_path, **ASYNC, env_timeout=0.3)
    undisturbed = rl_training.train(config)
    stop = Signal(80, number=signal.SIGSTOP)
    with pytest.warns(UserWarning, match=r"did not reply within 0.3 s \(env_timeout\)"):
        disturbed = rl_training.train(config, callbacks=[stop])
    assert_same(disturbed, undisturbed)


def play(
    vector: VectorEnvironment, disturb: Callable[[int], None] = lambda step: None, steps: int = 40
) -> list[Any]:
    """Step with masks that change, and return all results."""
    rng = np.random.default_rng(3)
    seen: list[Any] = [vector.reset().tolist()]
    for step in range(steps):
        actions = rng.uniform(-1, 1, (vector.total_envs, 1))
        active = None if step % 3 == 0 else rng.random(vector.num_seeds) < 0.6
        disturb(step)
        if active is not None and not active.any():
            active = None
        vector.start(actions, active)
        result = vector.finish()
        assert result.lost is None
        assert result.errors == {}
        seen += [[field.tolist() for field in result[:5]], result.episodes]
    return [*seen, [vector.snapshot(seed_index) for seed_index in range(vector.num_seeds)]]


def short_pendulum() -> gym.Env[Any, Any]:
    return gym.make("Pendulum-v1", max_episode_steps=6)


@pytest.mark.parametrize("every", [2, 5])
def test_masked_steps_and_resets_are_repeated_as_they_were(every: int, short_journal: None) -> None:
    factory, seeds = EnvironmentFactory(short_pendulum), (1, 2, 3)

    def disturb(step: int) -> None:
        if step % every == 0:
            os.kill(workers()[step % 2], signal.SIGKILL)

    with VectorEnvironment(factory, 2, seeds) as healthy:
        expected = play(healthy)
    with VectorEnvironment(factory, 2, seeds, backend="async", restarts=40) as vector:
        assert play(vector, disturb) == expected
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("method", ["snapshot", "infos", "wrapper_statistics", "reset"])
def test_a_worker_that_died_between_steps_is_replaced(method: str) -> None:
    factory = EnvironmentFactory(short_pendulum)
    actions = np.full((4, 1), 0.3)
    with (
        VectorEnvironment(factory, 2, (1, 2)) as healthy,
        VectorEnvironment(factory, 2, (1, 2), backend="async", restarts=1) as vector,
    ):
        vector.reset(), healthy.reset()
        for _ in range(8):
            vector.step(actions), healthy.step(actions)
        os.kill(workers()[0], signal.SIGKILL)
        call = ([0],) if method == "reset" else ()
        left, right = getattr(vector, method)(*call), getattr(healthy, method)(*call)
        assert str(left) == str(right)
        left, right = vector.step(actions), healthy.step(actions)
        np.testing.assert_array_equal(left.obs, right.obs)


def test_the_run_ends_when_no_restarts_are_left(tmp_path: Path) -> None:
    config = tiny(tmp_path, **ASYNC, env_restarts=2, checkpoint_interval=20)
    kills = [Signal(24, 48, 72)]
    with pytest.raises(EnvironmentRuntimeError, match=r"All 2 restarts .*env_restarts") as raised:
        rl_training.train(config, callbacks=kills)
    assert "step_000000060" in "".join(raised.value.__notes__)
    (run_dir,) = tmp_path.iterdir()
    undisturbed = rl_training.train(config)
    assert_same(rl_training.resume_training(run_dir), undisturbed)


def test_no_restarts_end_the_run_at_the_first_death(tmp_path: Path) -> None:
    config = tiny(tmp_path, **ASYNC, env_restarts=0)
    with pytest.raises(EnvironmentRuntimeError, match=r"died \(killed by SIGKILL\)"):
        rl_training.train(config, callbacks=[Signal(24)])


@pytest.mark.parametrize("n_step", [1, 3])
def test_a_lost_episode_leaves_no_torn_transition(tmp_path: Path, n_step: int) -> None:
    config = tiny(tmp_path, **ASYNC, algo_kwargs={"n_step": n_step, "entropy_in_target": False})
    config |= {"env_id": None, "total_timesteps": 200}
    with pytest.warns(UserWarning, match="new episodes") as caught:
        result = rl_training.train(config, env=Count, callbacks=[Signal(64, 116)])
    messages = [str(warning.message) for warning in caught]
    assert sum("new episodes, because the environment's state" in each for each in messages) == 2
    rows = stored(result)
    for episode, start, _, reward, _, next_episode, last in rows.tolist():
        assert next_episode == episode
        assert 1 <= last - start <= n_step
        gamma = 0.99
        expected = sum(gamma**k * (start + k + 1) for k in range(int(last - start)))
        assert reward == pytest.approx(expected, rel=1e-5)
    assert 200 - 2 * 2 * n_step - 4 * (n_step - 1) <= len(rows) <= 200 - 4
    assert result.metrics["rollout/lost_episodes"] == 4
    state = json.loads((result.checkpoint_path / "state.json").read_text())
    assert state["collector"]["lost_episodes"] == 4
    assert state["resume_level"] == metadata(result)["resume_level"] == "statistical"


def test_a_lost_episode_lowers_the_resume_level_and_the_run_can_be_resumed(tmp_path: Path) -> None:
    config = tiny(tmp_path, vectorization="async", env_id=None)
    kill = Signal(50)
    with pytest.warns(UserWarning, match=r"statistical instead of episode-exact: .*SIGKILL"):
        result = rl_training.train(config, env=Count, callbacks=[kill, StopAt(70)])
    assert metadata(result)["resume_level"] == "statistical"
    resumed = rl_training.resume_training(result.run_dir, env=Count)
    assert resumed.metrics["global_step"] == 120
    assert resumed.metrics["rollout/lost_episodes"] == 1


class Erratic(Count):
    """Looks as if it could be captured, but does not repeat itself in another process."""

    def __init__(self) -> None:
        super().__init__()
        del self.hidden

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        first = super().reset(seed=seed)
        self.episode += os.getpid() % 1000 + 1
        return self._observe(), first[1]


@pytest.mark.parametrize("checkpoint_replay", ["full", "none"])
def test_an_environment_that_does_not_repeat_its_steps_is_not_trusted(
    tmp_path: Path, checkpoint_replay: str
) -> None:
    config = tiny(tmp_path, **ASYNC, env_id=None, checkpoint_replay=checkpoint_replay)
    with pytest.warns(UserWarning, match="does not repeat its steps exactly"):
        result = rl_training.train(config, env=Erratic, callbacks=[Signal(64), StopAt(80)])
    assert metadata(result)["resume_level"] == "statistical"
    rows = stored(result).tolist() if checkpoint_replay == "full" else []
    for episode, start, _, _, _, next_episode, last in rows:
        assert (next_episode, last) == (episode, start + 1)
    resumed = rl_training.resume_training(result.run_dir, env=Erratic)
    assert resumed.metrics["global_step"] == 120


def learned(steps: int) -> list[Any]:
    """Return the statistics of a wrapper after some steps."""
    with VectorEnvironment(EnvironmentFactory(lambda: NormalizeObservation(Count())), 1, 0) as one:
        one.reset()
        for _ in range(steps):
            one.step(np.zeros((1, 1)))
        return one.wrapper_statistics()


def times_observed(vector: VectorEnvironment, seed_index: int) -> float:
    """Return how many observations the wrapper of a seed's first environment has seen."""
    (statistics,) = vector.wrapper_statistics(seed_index)
    return float(Decoder().decode(statistics["state"])["count"])


def test_what_the_wrappers_of_each_seed_learned_survives_the_death_of_a_shared_worker() -> None:
    factory = EnvironmentFactory(lambda: NormalizeObservation(Count()))
    options: Any = {"backend": "async", "restarts": 1, "seed_every_reset": True}
    with VectorEnvironment(factory, 1, (1, 2, 3, 4), **options) as vector:
        for seed_index in range(4):
            vector.give_statistics(learned(100 * (seed_index + 1)), seed_index)
        vector.reset()
        os.kill(workers()[0], signal.SIGKILL)
        vector.step(np.zeros((4, 1)))
        counts = [times_observed(vector, seed_index) for seed_index in range(4)]
    assert counts == pytest.approx([100, 200, 300, 400], abs=45)  # and first ones


def test_statistics_that_a_new_worker_cannot_use_are_reported(tmp_path: Path) -> None:
    """For example if the environments are made by code that has changed meanwhile."""

    def make() -> Any:
        return Count() if any(tmp_path.iterdir()) else NormalizeObservation(Count())

    options: Any = {"backend": "async", "restarts": 1, "seed_every_reset": True}
    with VectorEnvironment(EnvironmentFactory(make), 2, 0, **options) as vector:
        vector.give_statistics(learned(100))
        vector.reset()
        (tmp_path / "changed").touch()
        os.kill(workers()[0], signal.SIGKILL)
        with pytest.warns(UserWarning, match="environment 0, such as .* not be restored"):
            vector.step(np.zeros((2, 1)))


def test_given_statistics_are_kept_when_replays_are_given_up() -> None:
    factory = EnvironmentFactory(lambda: NormalizeObservation(Erratic()))
    with VectorEnvironment(factory, 2, 0, backend="async", restarts=10) as vector:
        vector.give_statistics(learned(100))
        vector.reset()
        for _ in range(3):  # the first deaths end the replays
            for worker in workers():
                os.kill(worker, signal.SIGKILL)
            vector.step(np.zeros((2, 1)))
        assert times_observed(vector, 0) > 100


@pytest.mark.parametrize("replays", [True, False])
def test_large_observations_are_captured_often_only_for_replays(
    replays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps take memory only if they are kept, so that they can be repeated."""
    monkeypatch.setattr("rl_training.envs.vector.journal.MAX_BYTES", 50_000)
    space = Box(-1.0, 1.0, (1000,))
    layout = step_layout(1, space, space)
    journal = Journal(bytearray(buffer_size(layout)), layout, replays=replays)
    for _ in range(20):
        journal.add(b"s", ())
    assert journal.is_full is replays


@pytest.mark.parametrize("kind", [Count, Hanging])
@pytest.mark.parametrize("odd", [{"make": 3}, {"reset": 9}, {"step": 50}], ids=str)
def test_a_death_or_hang_anywhere_in_an_environment_is_survived(
    tmp_path: Path, kind: Any, odd: dict[str, int]
) -> None:
    factory = EnvironmentFactory(kind, {"folder": str(tmp_path), **odd})
    options: Any = {"seed_every_reset": True, "timeout": 0.3, "restarts": 2}
    with pytest.warns(UserWarning, match=r"\((1 restart|0 restarts) left\)"):
        seen = play_unmasked(factory, **options)
    assert sum(result.lost.sum() for result in seen if result.lost is not None) in (0, 2)


def play_unmasked(factory: EnvironmentFactory, **options: Any) -> list[StepResult]:
    with VectorEnvironment(factory, 4, 0, backend="async", **options) as vector:
        vector.reset()
        return [vector.step(np.zeros((4, 1))) for _ in range(30)]


class Fatal(Count):
    """Ends its process at one state, however often that is repeated."""

    def __init__(self) -> None:
        super().__init__()
        del self.hidden

    def step(self, action: np.ndarray) -> Any:
        if self.episode % 5 == 0 and self.time == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)


@pytest.mark.thorough
def test_an_episode_that_kills_its_worker_again_and_again_is_given_up() -> None:
    with VectorEnvironment(
        EnvironmentFactory(Fatal), 1, (0, 1, 2, 3, 4, 5), backend="async", restarts=1000
    ) as vector:
        vector.reset()
        lost = 0
        for _ in range(60):
            result = vector.step(np.zeros((6, 1)))
            lost += 0 if result.lost is None else int(result.lost.sum())
    assert lost > 0


@pytest.mark.thorough
def test_a_hanging_worker_does_not_delay_a_requested_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rl_training.envs.vector.signalling.STOP_SECONDS", 0.5)

    class Interrupt(Callback):
        def on_collect_end(self, context: TrainingContext) -> None:
            if context.global_step == 60:
                os.kill(workers()[0], signal.SIGSTOP)
                signal.setitimer(signal.ITIMER_REAL, 0.2)

    def interrupt(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    signal.signal(signal.SIGALRM, interrupt)
    config = tiny(tmp_path, **ASYNC)
    began = time.monotonic()
    with pytest.raises(rl_training.TrainingInterrupted) as raised:
        rl_training.train(config, callbacks=[Interrupt()])
    assert time.monotonic() - began < 8
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    resumed = rl_training.resume_training(raised.value.result.run_dir)
    assert_same(resumed, rl_training.train(config))


class Fragile(Count):
    """Hangs everywhere while a file exists, as with a simulator that does not respond."""

    def __init__(self, down: Path) -> None:
        self.down = down
        self._hang()
        super().__init__()
        del self.hidden

    def _hang(self) -> None:
        while self.down.exists():
            time.sleep(0.02)

    def step(self, action: np.ndarray) -> Any:
        self._hang()
        return super().step(action)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self._hang()
        return super().reset(seed=seed, options=options)


class StopWithHungWorkers(Callback):
    """Requests a stop, by a signal, when the workers hang."""

    def __init__(self, down: Path, when: str) -> None:
        self.down, self.when, self.began = down, when, 0.0

    def on_collect_end(self, context: TrainingContext) -> None:
        if context.global_step == 60:
            self.down.touch()
            self.began = time.monotonic()
            if self.when == "save":
                for worker in workers():
                    os.kill(worker, signal.SIGSTOP)
                os.kill(os.getpid(), signal.SIGINT)
            else:
                threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()


@pytest.mark.parametrize("when", ["step", "save"])
def test_all_waits_after_a_requested_stop_have_one_time_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Every save reads several things from the workers, and each of them would wait."""
    monkeypatch.setattr("rl_training.envs.vector.signalling.STOP_SECONDS", 0.5)
    monkeypatch.setattr("rl_training.envs.vector.signalling.REPAIR_SECONDS", 0.4)
    config = tiny(tmp_path / "runs", **ASYNC, env_id=None, normalize_observations=True)
    stop = StopWithHungWorkers(tmp_path / "down", when)
    with pytest.raises(rl_training.TrainingInterrupted) as raised:
        rl_training.train(config, env=lambda: Fragile(stop.down), callbacks=[stop])
    assert time.monotonic() - stop.began < 2.5
    result = raised.value.result
    assert result.metrics["global_step"] == (64 if when == "step" else 60)
    assert metadata(result)["resume_level"] == "statistical"
    assert observed(result) == 60 + 4 * 2  # and the first observations of two episodes
    stop.down.unlink()
    resumed = rl_training.resume_training(result.run_dir, env=lambda: Fragile(stop.down))
    assert resumed.metrics["global_step"] == 120


@pytest.mark.faults
@pytest.mark.parametrize(("signals", "seconds"), [(1, 10), (2, 2)])
def test_a_program_with_hung_workers_exits_soon_after_a_signal(
    tmp_path: Path, signals: int, seconds: float
) -> None:
    down, settings = tmp_path / "down", tiny(tmp_path / "runs", **ASYNC, env_id=None)
    settings |= {"total_timesteps": 10**6, "checkpoint_interval": 20}
    script = (
        "import pathlib, rl_training, test_worker_restarts as tests",
        f"down = pathlib.Path({str(down)!r})",
        f"rl_training.train({settings!r}, env=lambda: tests.Fragile(down))",
    )
    program = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", "\n".join(script)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        runs = tmp_path / "runs"
        wait_until(lambda: any(runs.glob("*/checkpoints/step_000000020")))
        down.touch()
        for _ in range(signals):
            time.sleep(0.5)
            program.send_signal(signal.SIGTERM)
        began = time.monotonic()
        output = program.communicate(timeout=30)[1]
        assert time.monotonic() - began < seconds, output
    finally:
        program.kill()
    assert "Interrupt" in output
    down.unlink()
    (run_dir,) = runs.iterdir()
    resumed = rl_training.resume_training(run_dir, env=lambda: Fragile(down), callbacks=[StopAt(0)])
    assert resumed.metrics["global_step"] > 20


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_signal_while_a_worker_is_given_up_leaves_usable_environments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The pipes of the worker are closed by then, and must not be used again."""
    end_workers, interrupts = worker_process.end_workers, [KeyboardInterrupt]

    def end_and_interrupt(given: Any) -> None:
        end_workers(given)
        if interrupts:
            raise interrupts.pop()

    factory, actions = EnvironmentFactory(short_pendulum), np.zeros((2, 1))
    with VectorEnvironment(factory, 2, 0, backend="async", restarts=1) as vector:
        expected = vector.reset()
        monkeypatch.setattr(worker_process, "end_workers", end_and_interrupt)
        os.kill(workers()[0], signal.SIGKILL)
        with pytest.raises(KeyboardInterrupt):
            vector.step(actions)
        np.testing.assert_array_equal(vector.reset(), expected)
        vector.step(actions)


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
@pytest.mark.faults
def test_other_start_methods_replace_workers_too(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = multiprocessing.get_context(method)
    monkeypatch.setattr(multiprocessing, "get_context", lambda: context)
    factory, actions = EnvironmentFactory("Pendulum-v1"), np.full((4, 1), 0.3)
    with (
        VectorEnvironment(factory, 2, (1, 2)) as healthy,
        VectorEnvironment(factory, 2, (1, 2), backend="async", restarts=1) as vector,
    ):
        vector.reset(), healthy.reset()
        for step in range(8):
            if step == 5:
                os.kill(workers()[-1], signal.SIGKILL)
            left, right = vector.step(actions), healthy.step(actions)
            np.testing.assert_array_equal(left.obs, right.obs)


class Suspended:
    """Every wait seems to take long, because the process was stopped meanwhile."""

    def __init__(self) -> None:
        self.now, self.waits = 0.0, 0

    def poll(self, milliseconds: float) -> list[Any]:
        if milliseconds:
            self.now, self.waits = self.now + 1000.0, self.waits + 1
        return []


def test_time_in_which_the_process_was_suspended_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    poll: Any = Suspended()
    monkeypatch.setattr(time, "monotonic", lambda: poll.now)
    with pytest.raises(TimeoutError):
        Deadline(2.0).wait(poll)
    assert poll.waits == 4


def run_script(*lines: str) -> subprocess.Popen[str]:
    """Start a program in its own process group. It prints the ids of its workers first."""
    head = (
        "import multiprocessing, os, signal, sys, time",
        "import gymnasium as gym, numpy as np",
        "from rl_training.envs import EnvironmentFactory, VectorEnvironment",
        "def children(): return [each.pid for each in multiprocessing.active_children()]",
        "class Slow(gym.Wrapper):",
        "    def step(self, action):",
        "        time.sleep(0.2)",
        "        return super().step(action)",
        "factory = EnvironmentFactory(lambda: Slow(gym.make('Pendulum-v1')))",
        "options = {'backend': 'async', 'restarts': 3, 'timeout': 1.0}",
        "vector = VectorEnvironment(factory, 2, 0, **options)",
        "vector.reset()",
        "step = lambda: vector.step(np.zeros((2, 1)))",
    )
    return subprocess.Popen(
        [sys.executable, "-W", "always", "-c", "\n".join(head + lines)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


@pytest.mark.faults
def test_a_suspended_program_does_not_take_its_workers_for_dead() -> None:
    program = run_script("print('ready', flush=True)", "for _ in range(10): step()", "print('end')")
    assert program.stdout is not None
    assert program.stdout.readline() == "ready\n"
    for _ in range(2):
        time.sleep(0.3)
        os.killpg(program.pid, signal.SIGSTOP)
        time.sleep(2.5)
        os.killpg(program.pid, signal.SIGCONT)
    assert program.communicate(timeout=30)[0] == "end\n"


@pytest.mark.faults
def test_a_new_worker_ends_with_its_parent() -> None:
    program = run_script(
        "first = children()",
        "os.kill(first[0], signal.SIGKILL)",
        "step()",
        "print(*children(), flush=True)",
        "time.sleep(60)",
    )
    assert program.stdout is not None
    lines = iter(program.stdout.readline, "")
    ids = next(line for line in lines if re.fullmatch(r"\d+ \d+\n", line)).split()
    program.kill()
    program.wait()
    deadline = time.monotonic() + 10
    while alive := [each for each in ids if _runs(int(each))]:
        assert time.monotonic() < deadline, alive
        time.sleep(0.05)


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
