"""Environments of several seeds: independence, errors of single seeds, and worker processes."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import wrappers
from gymnasium.spaces import Box
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_training.envs import (
    EnvironmentFactory,
    EpisodeEnd,
    StepResult,
    VectorEnvironment,
    measure_step_seconds,
    suitable_backend,
)
from rl_training.envs.cores import available_cores
from rl_training.envs.vector.signalling import (
    LONG_PATIENCE,
    SHORT_PATIENCE,
    Listener,
)
from rl_training.errors import EnvironmentRuntimeError, EnvironmentSetupError

BACKENDS = ("sync", "async")
SEEDS = (7, 3, 11, 4)
NAN_OBSERVATION, ENDLESS_REWARD, BAD_SHAPE, RAISE, DIE = 0.2, 0.4, 0.6, 0.8, 1.0
"""Values of the second action component that cause an error"""


class Wander(gym.Env[np.ndarray, np.ndarray]):
    """A random walk with random episode ends, so that all results depend on the random stream."""

    def __init__(self) -> None:
        self.observation_space = Box(-np.inf, np.inf, (2,), np.float64)
        self.action_space = Box(-1.0, 1.0, (2,), np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.place = float(self.np_random.normal())
        return self.observe(), {}

    def step(self, action: np.ndarray) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        error_value = round(float(action[1]), 3)
        if error_value == RAISE:
            raise ZeroDivisionError("wandered off")
        if error_value == DIE:
            os.kill(os.getpid(), signal.SIGKILL)
        self.place += float(action[0]) + float(self.np_random.normal())
        observation = self.observe()
        if error_value == NAN_OBSERVATION:
            observation[1] = np.nan
        if error_value == BAD_SHAPE:
            observation = np.zeros(3)
        reward = np.inf if error_value == ENDLESS_REWARD else self.place
        return observation, reward, bool(self.np_random.random() < 0.15), False, {}

    def observe(self) -> np.ndarray:
        return np.array([self.place, self.np_random.random()])


def wander() -> gym.Env[Any, Any]:
    return wrappers.TimeLimit(Wander(), 9)


FACTORY = EnvironmentFactory(wander)


@pytest.fixture
def two_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a machine with two cores."""
    monkeypatch.setattr("rl_training.envs.vector.worker_process.available_cores", lambda: 2)


def actions_of(seed: int, num_envs: int, steps: int) -> np.ndarray:
    """Return actions of shape `(steps, num_envs, 2)` that depend only on the seed."""
    actions = np.random.default_rng(seed).uniform(-1, 1, (steps, num_envs, 2))
    actions[..., 1] = 0.0
    return actions.astype(np.float32)


Seen = list[tuple[bytes, ...] | EpisodeEnd]


def note(seen: Seen, result: StepResult, seed_index: int, num_envs: int) -> None:
    """Record the exact results of one seed in a step, with indices counted within the seed."""
    first = seed_index * num_envs
    seen.append(tuple(array[first : first + num_envs].tobytes() for array in result[:5]))
    seen.extend(
        EpisodeEnd(end.env_index - first, end.episode_return, end.length)
        for end in result.episodes
        if first <= end.env_index < first + num_envs
    )


def alone(seed: int, num_envs: int, steps: int, **options: Any) -> Seen:
    """Return the results of a seed's environments without other seeds."""
    seen: Seen = []
    with VectorEnvironment(FACTORY, num_envs, seed, **options) as vector:
        seen.append((vector.reset().tobytes(),))
        for actions in actions_of(seed, num_envs, steps):
            note(seen, vector.step(actions), 0, num_envs)
    return seen


def together(
    seeds: Sequence[int], num_envs: int, masks: Sequence[Sequence[bool]], **options: Any
) -> list[Seen]:
    """Like `alone` for several seeds at once. Each seed acts only where its mask is true."""
    actions = np.stack([actions_of(seed, num_envs, len(masks)) for seed in seeds])
    taken = np.zeros(len(seeds), dtype=int)
    with VectorEnvironment(FACTORY, num_envs, seeds, **options) as vector:
        assert (vector.num_envs, vector.num_seeds) == (num_envs, len(seeds))
        assert vector.total_envs == num_envs * len(seeds)
        obs = vector.reset()
        seen: list[Seen] = [
            [(obs[seed_index * num_envs : (seed_index + 1) * num_envs].tobytes(),)]
            for seed_index in range(len(seeds))
        ]
        for mask in masks:
            current = np.full((len(seeds), num_envs, 2), np.nan, np.float32)
            for seed_index in np.flatnonzero(mask):
                current[seed_index] = actions[seed_index, taken[seed_index]]
                taken[seed_index] += 1
            result = vector.step(current.reshape(-1, 2), np.array(mask))
            assert result.errors == {}
            asleep = np.repeat(~np.array(mask), num_envs)
            np.testing.assert_array_equal(result.obs[asleep], obs[asleep])
            np.testing.assert_array_equal(result.next_obs[asleep], obs[asleep])
            assert not (result.reward[asleep].any())
            assert not (result.terminated[asleep].any())
            assert not result.truncated[asleep].any()
            obs = result.obs
            for seed_index in np.flatnonzero(mask):
                note(seen[seed_index], result, int(seed_index), num_envs)
    return seen


@pytest.mark.parametrize("seed_every_reset", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_each_seed_behaves_as_if_alone(backend: Any, seed_every_reset: bool) -> None:
    steps, num_envs = 40, 3
    seen = together(
        SEEDS,
        num_envs,
        [[True] * len(SEEDS)] * steps,
        backend=backend,
        seed_every_reset=seed_every_reset,
    )
    for seed, results in zip(SEEDS, seen, strict=True):
        assert results == alone(seed, num_envs, steps, seed_every_reset=seed_every_reset)
    assert len({json.dumps(str(results)) for results in seen}) == len(SEEDS)


populations = st.integers(1, 4).flatmap(
    lambda num_seeds: st.tuples(
        st.lists(st.integers(0, 2**32), min_size=num_seeds, max_size=num_seeds),
        st.integers(1, 3),
        st.lists(
            st.lists(st.booleans(), min_size=num_seeds, max_size=num_seeds), min_size=1, max_size=25
        ),
    )
)


@given(populations, st.booleans())
@settings(max_examples=30)
def test_paused_seeds_lose_no_steps(population: Any, seed_every_reset: bool) -> None:
    seeds, num_envs, masks = population
    seen = together(seeds, num_envs, masks, seed_every_reset=seed_every_reset)
    for seed_index, seed in enumerate(seeds):
        steps = sum(mask[seed_index] for mask in masks)
        assert seen[seed_index] == alone(seed, num_envs, steps, seed_every_reset=seed_every_reset)


def test_paused_seeds_lose_no_steps_in_processes(two_workers: None) -> None:
    rng = np.random.default_rng(0)
    masks = (rng.random((40, 3)) < 0.6).tolist()
    assert together((1, 2, 3), 3, masks, backend="async") == together((1, 2, 3), 3, masks)


def step_with(vector: VectorEnvironment, errors: dict[int, float]) -> StepResult:
    actions = np.zeros((vector.total_envs, 2), np.float32)
    for index, error_value in errors.items():
        actions[index, 1] = error_value
    vector.start(actions)
    return vector.finish()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("error_value", "message"),
    [
        (NAN_OBSERVATION, r"Environment 1: its observation is not finite in float32: .*nan"),
        (ENDLESS_REWARD, r"Environment 1: its reward is not finite in float32: inf"),
        (BAD_SHAPE, r"Environment 1: its observation has shape \(3,\), not \(2,\)"),
        (RAISE, r"Environment 1 raised ZeroDivisionError: wandered off"),
    ],
)
def test_an_error_affects_only_its_seed(error_value: float, message: str, backend: Any) -> None:
    with (
        VectorEnvironment(FACTORY, 2, SEEDS, backend=backend) as vector,
        VectorEnvironment(FACTORY, 2, SEEDS) as healthy,
    ):
        vector.reset()
        healthy.reset()
        result, expected = step_with(vector, {3: error_value}), step_with(healthy, {})
        assert list(result.errors) == [1]
        with pytest.raises(EnvironmentRuntimeError, match=message):
            raise result.errors[1]
        others = np.array([0, 1, 4, 5, 6, 7])
        for step in range(20):
            for left, right in zip(result[:5], expected[:5], strict=True):
                np.testing.assert_array_equal(left[others], right[others])
            assert np.isfinite(result.obs).all()
            with pytest.raises(RuntimeError, match=r"reset\(\)"):
                vector.step(np.zeros((8, 2)))
            actions = np.full((8, 2), [0.1 * step, 0.0])
            result = vector.step(actions, np.array([True, False, True, True]))
            expected = healthy.step(actions)
        with pytest.raises(RuntimeError, match="snapshot"):
            vector.snapshot(1)
        obs = vector.reset([1])
        np.testing.assert_array_equal(obs[others], result.obs[others])
        assert step_with(vector, {}).errors == {}


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_action_that_is_not_finite_stops_the_step_of_its_seed(backend: Any) -> None:
    actions = np.zeros((4, 2), np.float32)
    with VectorEnvironment(FACTORY, 2, (5, 6), backend=backend) as vector:
        before = vector.reset()
        actions[3, 0] = np.nan
        vector.start(actions)
        result = vector.finish()
        assert str(result.errors[1]).startswith("Environment 1: its action is not finite")
        np.testing.assert_array_equal(result.obs[2:], before[2:])
        assert vector.at_episode_boundary(1)
        assert not vector.at_episode_boundary(0)
        with pytest.raises(EnvironmentRuntimeError, match="action"):
            vector.step(actions)
        actions[3, 0] = 0.0
        assert vector.step(actions).errors == {}


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_exception_of_an_environment_is_raised_in_the_caller(backend: Any) -> None:
    with VectorEnvironment(FACTORY, 2, 0, backend=backend) as vector:
        vector.reset()
        with pytest.raises(ZeroDivisionError, match="wandered off") as raised:
            vector.step(np.array([[0, 0], [0, RAISE]], np.float32))
        if backend == "async":
            assert "in step" in "".join(raised.value.__notes__)
        vector.reset()
        vector.step(np.zeros((2, 2)))


class StubbornError(Exception):
    """Cannot be recreated from its message."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")


class Stubborn(Wander):
    def step(self, action: np.ndarray) -> Any:
        raise StubbornError("this", "that")


def test_the_message_of_an_error_that_cannot_be_pickled_is_kept() -> None:
    with VectorEnvironment(EnvironmentFactory(Stubborn), 1, 0, backend="async") as vector:
        vector.reset()
        with pytest.raises(RuntimeError, match="StubbornError: this and that"):
            vector.step(np.zeros((1, 2)))


def workers() -> list[Any]:
    return sorted(multiprocessing.active_children(), key=lambda process: process.pid)


def test_a_killed_worker_affects_only_its_seeds(two_workers: None) -> None:
    with (
        VectorEnvironment(FACTORY, 1, SEEDS, backend="async") as vector,
        VectorEnvironment(FACTORY, 1, SEEDS) as healthy,
    ):
        vector.reset()
        healthy.reset()
        step_with(vector, {})
        step_with(healthy, {})
        saved = vector.snapshot(1)
        os.kill(workers()[0].pid, signal.SIGKILL)
        result, expected = step_with(vector, {}), step_with(healthy, {})
        assert {index: str(error) for index, error in result.errors.items()} == dict.fromkeys(
            (0, 1), "An environment's worker process died (killed by SIGKILL)."
        )
        for left, right in zip(result[:5], expected[:5], strict=True):
            np.testing.assert_array_equal(left[2:], right[2:])
        # A new worker continues from a snapshot. The other seed still needs its own snapshot.
        vector.restore(saved, 1)
        vector.step(np.zeros((4, 2)), np.array([False, True, True, True]))
        with pytest.raises(RuntimeError, match="reset"):
            vector.step(np.zeros((4, 2)))
        vector.reset([0])
        again, expected = step_with(vector, {}), step_with(healthy, {})
        assert again.errors == {}
        np.testing.assert_array_equal(again.obs[2:], step_with(healthy, {}).obs[2:])
        # One step behind, because it was restored from its snapshot.
        np.testing.assert_array_equal(again.obs[1], expected.obs[1])
    assert workers() == []


def test_a_dead_worker_found_by_the_reset_of_another_seed_is_reported(two_workers: None) -> None:
    with VectorEnvironment(FACTORY, 1, SEEDS, backend="async") as vector:
        vector.reset()
        os.kill(workers()[0].pid, signal.SIGKILL)
        with pytest.raises(EnvironmentRuntimeError, match="died"):
            vector.snapshot(0)
        vector.reset([0])
        result = step_with(vector, {})
        assert {index: str(error) for index, error in result.errors.items()} == {
            1: "An environment's worker process died (killed by SIGKILL)."
        }
        vector.step(np.zeros((4, 2)), np.array([True, False, True, True]))
        vector.reset([1])
        vector.step(np.zeros((4, 2)))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("seed_every_reset", [False, True])
def test_a_seed_can_move_between_populations(backend: Any, seed_every_reset: bool) -> None:
    options = {"backend": backend, "seed_every_reset": seed_every_reset}
    one = {"seed_every_reset": seed_every_reset}
    zeros = np.zeros((4, 2))
    with (
        VectorEnvironment(FACTORY, 2, (8, 9), **options) as pair,
        VectorEnvironment(FACTORY, 2, 9, **one) as single,
    ):
        pair.reset()
        single.reset()
        for _ in range(12):
            pair.step(zeros)
            single.step(zeros[:2])
        saved = json.loads(json.dumps(pair.snapshot(1), allow_nan=False))
        assert saved == single.snapshot()
        left, right = pair.restore(saved, 1), single.restore(saved)
        np.testing.assert_array_equal(left, right)
        with VectorEnvironment(FACTORY, 2, (1, 9, 2), **options) as trio:
            trio.reset()
            np.testing.assert_array_equal(trio.restore(saved, 1), right)
            for _ in range(15):
                expected, pair_step = single.step(zeros[:2]), pair.step(zeros)
                trio_step = trio.step(np.zeros((6, 2)))
                np.testing.assert_array_equal(pair_step.obs[2:], expected.obs)
                np.testing.assert_array_equal(trio_step.obs[2:4], expected.obs)
                assert [end.length for end in trio_step.episodes if 2 <= end.env_index < 4] == [
                    end.length for end in expected.episodes
                ]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_partial_reset_does_not_affect_other_seeds(backend: Any) -> None:
    with VectorEnvironment(FACTORY, 2, (1, 2, 3), backend=backend) as vector:
        first = vector.reset()
        zeros = np.zeros((6, 2))
        for _ in range(5):
            before = vector.step(zeros).obs
        obs = vector.reset([1])
        np.testing.assert_array_equal(obs[2:4], first[2:4])
        np.testing.assert_array_equal(obs[[0, 1, 4, 5]], before[[0, 1, 4, 5]])
        assert [vector.at_episode_boundary(seed_index) for seed_index in range(3)][1]


class Footprint(Wander):
    """Writes a file in each step, slowly."""

    def __init__(self, path: Path, seconds: float = 0.0) -> None:
        super().__init__()
        self.path, self.seconds = path, seconds

    def step(self, action: np.ndarray) -> Any:
        self.path.touch()
        time.sleep(self.seconds)
        return super().step(action)

    def snapshot(self) -> dict[str, Any]:
        time.sleep(self.seconds)
        return {"place": self.place}

    def restore(self, snapshot: dict[str, Any]) -> None:
        self.place = snapshot["place"]


def wait_until(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 20
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def test_workers_step_before_the_result_is_requested(tmp_path: Path) -> None:
    path = tmp_path / "stepped"
    factory = EnvironmentFactory(Footprint, {"path": path})
    with VectorEnvironment(factory, 1, 0, backend="async") as vector:
        vector.reset()
        vector.start(np.zeros((1, 2)))
        assert wait_until(path.exists)
        assert vector.finish().errors == {}


def test_start_and_finish_must_alternate() -> None:
    with VectorEnvironment(FACTORY, 1, (0, 1)) as vector:
        zeros = np.zeros((2, 2))
        with pytest.raises(RuntimeError, match="reset"):
            vector.start(zeros)
        vector.reset()
        with pytest.raises(RuntimeError, match="start"):
            vector.finish()
        with pytest.raises(ValueError, match="shape"):
            vector.start(np.zeros((1, 2)))
        vector.start(zeros)
        for refused in (
            lambda: vector.start(zeros),
            vector.snapshot,
            lambda: vector.reset([1]),
        ):
            with pytest.raises(RuntimeError, match=r"finish\(\)"):
                refused()
        vector.finish()
        vector.start(zeros)
        vector.reset()
        assert vector.step(zeros).errors == {}


def test_an_interrupted_step_can_be_restarted(tmp_path: Path) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    def interrupted(action: Callable[[], Any]) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(KeyboardInterrupt):
            action()

    factory = EnvironmentFactory(Footprint, {"path": tmp_path / "stepped", "seconds": 0.3})
    previous = signal.signal(signal.SIGALRM, interrupt)
    try:
        with VectorEnvironment(factory, 2, 0, backend="async") as vector:
            first = vector.reset()
            vector.start(np.zeros((2, 2)))
            interrupted(vector.finish)
            with pytest.raises(RuntimeError, match="reset"):
                vector.step(np.zeros((2, 2)))
            np.testing.assert_array_equal(vector.reset(), first)
            expected = vector.snapshot()
            interrupted(vector.snapshot)
            assert vector.snapshot() == expected
            interrupted(vector.snapshot)
            assert vector.step(np.zeros((2, 2))).errors == {}
            vector.start(np.zeros((2, 2)))
    finally:
        signal.signal(signal.SIGALRM, previous)
    assert workers() == []


class Homesick(Wander):
    """Can only be created in the process that first created it."""

    home = os.getpid()

    def __init__(self) -> None:
        if os.getpid() != self.home:
            raise EnvironmentSetupError("far from home")
        super().__init__()


def test_closing_leaves_no_process_running() -> None:
    vector = VectorEnvironment(FACTORY, 2, 0, backend="async")
    assert workers()
    vector.close()
    vector.close()
    assert workers() == []
    forgotten = VectorEnvironment(FACTORY, 2, 0, backend="async")
    forgotten.reset()
    del forgotten
    gc.collect()
    assert workers() == []
    with pytest.raises(EnvironmentSetupError, match="far from home"):
        VectorEnvironment(EnvironmentFactory(Homesick), 2, 0, backend="async")
    assert workers() == []


PROGRAM = """
import multiprocessing, os, signal, sys
import numpy as np
from rl_training.envs import EnvironmentFactory, VectorEnvironment

if __name__ == "__main__":
    multiprocessing.set_start_method(sys.argv[1])
    factory = EnvironmentFactory(lambda **kwargs: __import__("gymnasium").make("Pendulum-v1"))
    vectors = [VectorEnvironment(factory, 2, (0, 1), backend="async") for _ in range(2)]
    for vector in vectors:
        vector.reset()
        vector.step(np.zeros((4, 1)))
    print(*(process.pid for process in multiprocessing.active_children()), flush=True)
    vectors[0].start(np.zeros((4, 1)))
    if sys.argv[2] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if sys.argv[2] == "raises":
        raise SystemExit(3)
"""


def is_running(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    # Orphans stay zombies if no process collects them.
    return status.rpartition(")")[2].split()[0] != "Z"


@pytest.mark.faults
@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc")
@pytest.mark.parametrize(
    ("method", "end", "code"),
    [
        ("fork", "killed", -signal.SIGKILL),
        ("fork", "returns", 0),
        ("fork", "raises", 3),
        ("spawn", "returns", 0),
        ("spawn", "killed", -signal.SIGKILL),
        ("forkserver", "returns", 0),
    ],
)
def test_workers_end_with_their_parent(tmp_path: Path, method: str, end: str, code: int) -> None:
    """This holds however the parent ends. Workers print nothing, and factories may be lambdas."""
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, "-W", "error", str(script), method, end],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == code, done.stderr
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) >= 2
    assert wait_until(lambda: not any(map(is_running, pids)))
    assert done.stderr == ""


def test_processes_are_used_for_slow_steps() -> None:
    assert suitable_backend(1e-3, total_envs=8, cores=4) == "async"
    assert suitable_backend(45e-6, total_envs=16, cores=2) == "async"
    assert suitable_backend(45e-6, total_envs=4, cores=2) == "async"
    assert suitable_backend(45e-6, total_envs=2, cores=2) == "sync"
    assert suitable_backend(6e-6, total_envs=8, cores=2) == "sync"
    assert suitable_backend(1e-3, total_envs=1, cores=8) == "sync"
    assert suitable_backend(1e-3, total_envs=8, cores=1) == "sync"


@given(st.floats(1e-7, 1.0), st.integers(1, 300), st.integers(1, 64))
def test_processes_are_kept_for_slower_steps(seconds: float, envs: int, cores: int) -> None:
    if suitable_backend(seconds, envs, cores) == "async":
        assert suitable_backend(2 * seconds, envs, cores) == "async"
        assert min(envs, cores) > 1


def test_step_time_is_measured(tmp_path: Path) -> None:
    factory = EnvironmentFactory(Footprint, {"path": tmp_path / "stepped", "seconds": 2e-3})
    assert 2e-3 <= measure_step_seconds(factory) < 0.1


def test_processes_with_spare_cores_give_the_same_results(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def trajectory() -> list[bytes]:
        with VectorEnvironment(FACTORY, 1, (3, 4), backend="async") as vector:
            vector.reset()
            steps = (vector.step(np.full((2, 2), 0.1, np.float32)) for _ in range(25))
            return [step.obs.tobytes() for step in steps]

    found = {}
    for cores in (2, 64):
        monkeypatch.setattr(
            "rl_training.envs.vector.worker_process.available_cores",
            lambda n=cores: n,
        )
        found[cores] = trajectory()
    assert found[2] == found[64]


@pytest.mark.parametrize("patience", [SHORT_PATIENCE, LONG_PATIENCE])
def test_a_listener_sleeps_during_a_long_wait(patience: float) -> None:
    ours, theirs = multiprocessing.Pipe(duplex=False)
    with ours, theirs:
        listener = Listener(ours, patience)
        used = time.process_time()
        for byte in (b"a", b"b", b"c"):
            timer = threading.Timer(0.1, os.write, (theirs.fileno(), byte))
            timer.start()
            assert listener.hear() == byte
            timer.join()
        assert time.process_time() - used < 0.15
        theirs.close()
        assert listener.hear() == b""


def test_a_listener_keeps_its_patience_after_one_long_wait() -> None:
    """Otherwise a pause, such as an evaluation, would make processes sleep after every step."""
    ours, theirs = multiprocessing.Pipe(duplex=False)
    with ours, theirs:
        listener = Listener(ours, LONG_PATIENCE)
        for pause in (0.02, 0.02):
            timer = threading.Timer(pause, os.write, (theirs.fileno(), b"a"))
            timer.start()
            assert listener.hear() == b"a"
            timer.join()
        assert listener._patience() == LONG_PATIENCE
        for _ in range(300):  # on a busy machine, a wait may begin late and then be short
            if listener._patience() == SHORT_PATIENCE:
                break
            timer = threading.Timer(0.01, os.write, (theirs.fileno(), b"a"))
            timer.start()
            assert listener.hear() == b"a"
            timer.join()
        assert listener._patience() == SHORT_PATIENCE
        os.write(theirs.fileno(), b"b")
        assert listener.hear() == b"b"
        assert listener._patience() == LONG_PATIENCE


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 8),
        ({"cpu.max": "max 100000"}, 8),
        ({"cpu.max": "250000 100000"}, 3),
        ({"cpu.max": "50000 100000"}, 1),
        ({"cpu.max": "6400000 100000"}, 8),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 8),
        ({"cpu/cpu.cfs_quota_us": "400000", "cpu/cpu.cfs_period_us": "100000"}, 4),
        ({"cpu.max": ""}, 8),
    ],
)
def test_the_cpu_limit_of_a_container_is_used(
    files: dict[str, str], cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    monkeypatch.setattr("rl_training.envs.cores.CONTROL_GROUP", tmp_path)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(8), raising=False)
    assert available_cores() == cores
