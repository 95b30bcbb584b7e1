"""Environments in Ray actors give the same bits as local ones, also if actors or nodes are lost."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from conftest import Command
from gymnasium.spaces import Box
from gymnasium.wrappers import NormalizeReward
from helpers import StopAt, hashes, metric_rows, tiny
from safetensors.torch import load_file

import rl_training
from rl_training.callbacks import Callback, TrainingContext
from rl_training.config_files import load_config
from rl_training.data.n_step import NStepAccumulator
from rl_training.envs import EnvironmentFactory, VectorEnvironment, trust_modules
from rl_training.envs.vector.backends import Placement
from rl_training.envs.vector.step_arrays import steps_per_round
from rl_training.envs.wrapping import WrapperFactory
from rl_training.errors import ConfigError, EnvironmentSetupError, UserError
from rl_training.ray_session import ray_session
from rl_training.types import TrainResult

pytestmark = [
    pytest.mark.filterwarnings("ignore:the worker process:UserWarning"),
    pytest.mark.filterwarnings("ignore:vectorization = 'ray-async':UserWarning"),
    pytest.mark.usefixtures("no_pictures"),
]
RAY = {"vectorization": "ray", "env_workers": 2, "num_envs": 4}
START = "rl_training.envs.vector.ray_workers.START_SECONDS"


class Nodes:
    """A head without CPUs, and nodes with one CPU each: two for workers, and a spare one."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        head = {"num_cpus": 0, "include_dashboard": False}
        self.cluster = Cluster(initialize_head=True, head_node_args=head)
        self.nodes = [self.cluster.add_node(num_cpus=1, wait=False) for _ in range(3)]
        self.cluster.wait_for_nodes()
        self.left_signals_alone = False
        """Whether joining the cluster did; its nodes in this process handle SIGTERM themselves"""

    def lose(self, process: int) -> None:
        """Lose the node of an actor: its processes are gone, and so is Ray's."""
        parent = parent_of(process)
        (node,) = (each for each in self.nodes if raylet_of(each) == parent)
        self.nodes.remove(node)
        self.cluster.remove_node(node, allow_graceful=False)
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)

    def refill(self) -> None:
        while len(self.nodes) < 3:
            self.nodes.append(self.cluster.add_node(num_cpus=1))


def handlers() -> list[Any]:
    return [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]


def raylet_of(node: Any) -> int:
    return int(node.all_processes["raylet"][0].process.pid)


def parent_of(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    pytest.importorskip("ray")
    started = Nodes()
    try:
        before = handlers()
        with ray_session(started.cluster.address):
            started.left_signals_alone = handlers() == before
            yield started
    finally:
        started.cluster.shutdown()


def actors() -> list[int]:
    """Return the process ids of the actors with environments, in the order of their start."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if (folder / "cmdline").read_bytes().startswith(b"ray::EnvironmentActor"):
                found.append(int(folder.name))
    return sorted(found)


def all_ended() -> bool:
    """Wait until no actor is left; Ray takes a moment to end their processes."""
    for _ in range(150):
        if not actors():
            return True
        time.sleep(0.1)
    return False


class Disturb(Callback):
    """Does something at a step."""

    def __init__(self, step: int, action: Callable[[], None]) -> None:
        self.step, self.action = step, action

    def on_collect_end(self, context: TrainingContext) -> None:
        if context.global_step == self.step:
            self.action()


def kill(number: int = signal.SIGKILL, actor: int = 0) -> Callable[[], None]:
    return lambda: os.kill(actors()[actor], number)


def assert_same(one: TrainResult, other: TrainResult) -> None:
    assert one.metrics == other.metrics
    assert hashes(one.checkpoint_path) == hashes(other.checkpoint_path)
    assert metric_rows(one.run_dir) == metric_rows(other.run_dir)


def metadata(result: TrainResult) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((result.run_dir / "metadata.json").read_text())
    return found


# Without Ray


def test_a_missing_package_is_reported_before_anything_is_created(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rl_training.ray_session.importlib.util.find_spec", lambda name: None)
    for name in ("ray", "ray-async"):
        with pytest.raises(
            UserError, match=rf"vectorization = '{name}': needs.* 'rl-training\[ray\]'"
        ):
            rl_training.train(tiny(tmp_path / "runs", vectorization=name))
    assert not (tmp_path / "runs").exists()


def test_importing_the_package_imports_no_ray() -> None:
    script = (
        "import sys, rl_training, rl_training.envs, rl_training.ray_session, "
        "rl_training.runtime.workflows, rl_training.training.run; print('ray' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == "False\n"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vectorization": "sync", "env_workers": 2}, r"env_workers = 2: vectorization 'sync' has"),
        ({"vectorization": "ray-async", "env_workers": 2}, "has one worker per environment"),
        ({"vectorization": "rays"}, "vectorization"),
        ({"env_workers": 0}, "env_workers"),
        ({"env_worker_cpus": -1}, "env_worker_cpus"),
        ({"ray_address": "a b"}, "ray_address"),
    ],
)
def test_wrong_settings_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        rl_training.TrainConfig(**tiny(tmp_path, **changes))


def test_an_address_that_cannot_be_joined_is_reported_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray")
    with closing(socket.socket()) as unused:
        unused.bind(("127.0.0.1", 0))
        free = f"127.0.0.1:{unused.getsockname()[1]}"
        config = tiny(tmp_path / "runs", vectorization="ray", num_envs=2)
        with pytest.raises(
            UserError, match=f"ray_address = '{free}': the cluster cannot be joined"
        ):
            rl_training.train({**config, "ray_address": free})
        monkeypatch.setenv("RAY_ADDRESS", free)
        with pytest.raises(UserError, match=f"RAY_ADDRESS = '{free}': the cluster cannot be"):
            rl_training.train(config)
    for wrong, why in (("head", "must be host:port"), ("ray://head:10001", "not supported")):
        with pytest.raises(UserError, match=f"ray_address = '{wrong}': .*{why}"):
            rl_training.train({**config, "ray_address": wrong})
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_envs": 3}, "num_envs: cannot be changed in a run that is resumed; only vectorizat"),
        ({"vectorization": "auto"}, "vectorization = 'auto': a run that is resumed needs 'sync'"),
        ({"vectorization": "ray-async"}, "a run that is exact cannot become 'ray-async'"),
        ({"env_workers": -1}, "env_workers"),
    ],
)
def test_only_the_place_of_environments_can_be_changed_in_a_resumed_run(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    run = rl_training.train(tiny(tmp_path, total_timesteps=20)).run_dir
    with pytest.raises(ConfigError, match=message):
        rl_training.resume_training(run, total_timesteps=40, changes=changes)


def test_a_resumed_run_moves_from_one_process_to_workers(tmp_path: Path, rl: Command) -> None:
    config = tiny(tmp_path, num_envs=2, vectorization="sync")
    undisturbed = rl_training.train(config)
    run = rl_training.train(config, callbacks=[StopAt(60)]).run_dir
    rl("resume", str(run), "--set", "vectorization=async", "--set", "env_workers=1")
    (last,) = (run / "checkpoints").glob("*120")
    assert hashes(last) == hashes(undisturbed.checkpoint_path)
    assert json.loads((last / "state.json").read_text())["execution"]["vectorization"] == "async"


def test_an_asynchronous_round_takes_half_of_the_environments_of_a_seed() -> None:
    assert [steps_per_round("ray-async", number) for number in (1, 2, 3, 16)] == [1, 1, 2, 8]
    assert [steps_per_round(each, 3) for each in ("auto", "sync", "async", "ray")] == [3] * 4


@pytest.mark.parametrize("n_step", [1, 2, 4])
def test_n_step_transitions_of_environments_that_step_at_different_times(n_step: int) -> None:
    """They equal those of environments that are alone."""
    rng = np.random.default_rng(n_step)
    number, together, alone = 3, NStepAccumulator(n_step, 0.9, 3), []
    for _ in range(number):
        alone.append(NStepAccumulator(n_step, 0.9, 1))
    expected: list[list[Any]] = [[] for _ in range(number)]
    found: list[list[Any]] = [[] for _ in range(number)]
    for _ in range(60):
        active = rng.random(number) < 0.5
        step = [
            rng.normal(size=(number, 2)).astype(np.float32),
            rng.normal(size=(number, 1)).astype(np.float32),
            rng.normal(size=number).astype(np.float32) * active,
            (rng.random(number) < 0.1) & active,
            (rng.random(number) < 0.1) & active,
            rng.normal(size=(number, 2)).astype(np.float32),
        ]
        rows, environments = together.add(*[each.copy() for each in step], active)
        if environments is None:  # one row of each, in order
            environments = np.arange(number)
        for index, environment in enumerate(environments):
            found[environment].append([field[index].tolist() for field in rows[:5]])
        for environment in np.flatnonzero(active):
            its = slice(environment, environment + 1)
            single, _ = alone[environment].add(*(each[its] for each in step))
            expected[environment] += [
                list(row) for row in zip(*(f.tolist() for f in single[:5]), strict=True)
            ]
    assert found == expected


# Lock-step: the same bits


@pytest.mark.ray
@pytest.mark.parametrize(
    ("algo", "env_id", "changes"),
    [
        ("sac", "Pendulum-v1", {"algo_kwargs": {"n_step": 3, "entropy_in_target": False}}),
        ("dqn", "CartPole-v1", {"seeds": [0, 1], "num_envs": 2, "env_workers": 3}),
    ],
)
def test_a_run_in_ray_actors_equals_local_runs(
    tmp_path: Path, nodes: Nodes, algo: str, env_id: str, changes: dict[str, Any]
) -> None:
    config = {**tiny(tmp_path, algo=algo, env_id=env_id), **RAY, **changes}
    config["algo_kwargs"] = tiny(tmp_path, algo_kwargs=changes.get("algo_kwargs", {}))[
        "algo_kwargs"
    ]
    remote, workers, here = (
        as_list(rl_training.train({**config, **where}))
        for where in (
            {},
            {"vectorization": "async"},
            {"vectorization": "sync", "env_workers": None},
        )
    )
    for one, other, third in zip(remote, workers, here, strict=True):
        assert_same(one, third)
        assert_same(other, third)
        assert metadata(one)["resume_level"] == "bit-exact"
    assert all_ended()


def as_list(results: TrainResult | list[TrainResult]) -> list[TrainResult]:
    return results if isinstance(results, list) else [results]


@pytest.mark.ray
def test_a_run_that_loses_an_actor_and_a_node_equals_the_undisturbed_run(
    tmp_path: Path, nodes: Nodes
) -> None:
    config = tiny(tmp_path, checkpoint_interval=40, **RAY)
    undisturbed = rl_training.train({**config, "vectorization": "sync", "env_workers": None})
    disturb = [Disturb(24, kill()), Disturb(80, lambda: nodes.lose(actors()[0]))]
    with pytest.warns(UserWarning, match="environments") as warnings:
        disturbed = rl_training.train(config, callbacks=disturb)
    nodes.refill()
    assert_same(disturbed, undisturbed)
    told = [str(each.message) for each in warnings if "worker process of" in str(each.message)]
    host = re.escape(socket.gethostname())
    assert len(told) == 2
    for message in told:  # Ray takes seconds to notice that a node is lost
        assert re.search(rf"died \(its Ray (actor|node) on {host} .*so nothing is lost", message)
    assert metadata(disturbed)["resume_level"] == "bit-exact"


@pytest.mark.ray
def test_a_stopped_actor_is_replaced_after_the_timeout(tmp_path: Path, nodes: Nodes) -> None:
    config = tiny(tmp_path, env_timeout=10.0, **RAY)
    undisturbed = rl_training.train({**config, "vectorization": "async"})
    stopped: list[int] = []

    def stop() -> None:
        stopped.append(actors()[0])
        os.kill(stopped[0], signal.SIGSTOP)

    try:
        with pytest.warns(UserWarning, match=r"did not reply within 10 s \(env_timeout\)"):
            disturbed = rl_training.train(config, callbacks=[Disturb(80, stop)])
    finally:
        with suppress(ProcessLookupError):
            os.kill(stopped[0], signal.SIGKILL)
    assert_same(disturbed, undisturbed)


@pytest.mark.ray
def test_a_run_is_resumed_under_another_backend(tmp_path: Path, nodes: Nodes) -> None:
    here = {"vectorization": "sync", "env_workers": None}
    config = tiny(tmp_path, **RAY)
    undisturbed = rl_training.train({**config, **here})
    stopped = rl_training.train(config, callbacks=[StopAt(60)])
    moved = rl_training.resume_training(stopped.run_dir, changes={"vectorization": "sync"})
    assert_same(moved, undisturbed)
    stopped = rl_training.train({**config, **here}, callbacks=[StopAt(60)])
    to_ray = {"vectorization": "ray", "env_workers": 2}
    moved = rl_training.resume_training(stopped.run_dir, changes=to_ray)
    assert_same(moved, undisturbed)
    saved = json.loads((moved.checkpoint_path / "state.json").read_text())
    assert saved["execution"]["vectorization"] == saved["config"]["vectorization"] == "ray"


# Errors


class Odd(gym.Env[np.ndarray, np.ndarray]):
    """Raises in its fifth step, and cannot be made in the process `refuse`."""

    observation_space, action_space = Box(-1, 1e9, (2,)), Box(-1.0, 1.0, (1,))

    def __init__(self, home: int | None = None) -> None:
        if home not in (None, os.getpid()):
            raise OSError("no simulator on this machine")
        self.time = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.time = 0
        return np.zeros(2, np.float32), {}

    def step(self, action: np.ndarray) -> Any:
        self.time += 1
        if self.time == 5:
            raise ValueError("the gripper is stuck")
        return (
            np.zeros(2, np.float32),
            0.0,
            False,
            False,
            {"threads": os.environ["OMP_NUM_THREADS"]},
        )


@pytest.mark.ray
def test_errors_in_actors_are_those_of_the_environment(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An environment also computes with as many threads as it would here."""
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    with VectorEnvironment(EnvironmentFactory(Odd), 1, (0, 1), backend="ray") as vector:
        vector.reset()
        for _ in range(4):
            vector.step(np.zeros((2, 1)))
        assert vector.infos(1) == [{"threads": "3"}]
        with pytest.raises(ValueError, match="the gripper is stuck") as raised:
            vector.step(np.zeros((2, 1)))
        assert "In an environment's worker process" in raised.value.__notes__[0]
        assert vector.reset().shape == (2, 2)
        vector.step(np.zeros((2, 1)))


@pytest.mark.ray
def test_an_environment_that_an_actor_cannot_make_is_reported_at_once(nodes: Nodes) -> None:
    factory = EnvironmentFactory(Odd, {"home": os.getpid()})
    with pytest.raises(EnvironmentSetupError, match="no simulator on this machine"):
        VectorEnvironment(factory, 2, 0, backend="ray", restarts=10)
    assert all_ended()


@pytest.mark.ray
def test_a_worker_without_a_place_does_not_hang(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(START, 3.0)
    factory = EnvironmentFactory("Pendulum-v1")
    with pytest.raises(
        EnvironmentSetupError, match=r"not placed it within 3 s. It needs 2 CPU.* has 3, and 3 of"
    ):
        VectorEnvironment(factory, 1, 0, backend="ray", placement=Placement(1, cpus=2.0))


@pytest.mark.ray
def test_actors_import_the_modules_that_the_user_trusts(
    tmp_path: Path, nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_remote_tasks.py").write_text(
        "import gymnasium as gym\n"
        "gym.register('RemotePendulum-v0', 'gymnasium.envs.classic_control:PendulumEnv')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    trust_modules("my_remote_tasks")
    try:
        factory = EnvironmentFactory("RemotePendulum-v0")
        with (
            VectorEnvironment(factory, 2, 0, backend="ray") as remote,
            VectorEnvironment(factory, 2, 0) as here,
        ):
            assert remote.reset().tolist() == here.reset().tolist()
    finally:
        from rl_training.envs import TRUSTED_MODULES

        del TRUSTED_MODULES["my_remote_tasks"], gym.registry["RemotePendulum-v0"]


# Asynchronous rounds


class Uneven(gym.Env[np.ndarray, np.ndarray]):
    """Observes the episode, the time and the last action; some steps take longer than others."""

    observation_space, action_space = Box(-1, 1e9, (3,)), Box(-1.0, 1.0, (1,))
    length = 7

    def __init__(self, slowest: float = 0.05) -> None:
        self.slowest = slowest

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.episode, self.time = int(self.np_random.integers(1, 2**20)), 0
        return np.array([self.episode, 0, 0], np.float32), {}

    def step(self, action: np.ndarray) -> Any:
        time.sleep(self.slowest * float(self.np_random.random()) ** 4)
        self.time += 1
        observation = np.array([self.episode, self.time, action[0]], np.float32)
        return observation, float(self.time), False, self.time == self.length, {}


def stored(result: TrainResult) -> np.ndarray:
    """Return the rows of the replay buffer: obs, action, reward, discount, next_obs."""
    state = json.loads((result.checkpoint_path / "state.json").read_text())
    rows = load_file(result.checkpoint_path / "replay-00000.safetensors")["rows"]
    found: np.ndarray = rows[: state["replay"]["rows_added"]].numpy()
    return found


def assert_whole(rows: np.ndarray) -> None:
    """Check that every transition has the observation and the action that it was started with."""
    obs, action, reward, following = rows[:, :3], rows[:, 3], rows[:, 4], rows[:, 6:9]
    assert (following[:, 0] == obs[:, 0]).all()
    assert (following[:, 1] == obs[:, 1] + 1).all()
    assert (following[:, 2] == action).all()
    assert (reward == following[:, 1]).all()
    assert len(np.unique(rows[:, :2], axis=0)) == len(rows)


@pytest.mark.ray
def test_an_asynchronous_run_counts_exactly_and_stores_whole_transitions(
    tmp_path: Path, nodes: Nodes
) -> None:
    config = tiny(tmp_path, env_id=None, vectorization="ray-async", env_worker_cpus=0, num_envs=3)
    with pytest.warns(UserWarning, match="neither be repeated nor resumed exactly"):
        stopped = rl_training.train(config, env=Uneven, callbacks=[StopAt(60)])
    assert metadata(stopped)["resume_level"] == "statistical"
    assert stopped.metrics["global_step"] == len(stored(stopped)) == 60
    assert_whole(stored(stopped))
    resumed = rl_training.resume_training(
        stopped.run_dir, env=Uneven, callbacks=[Disturb(90, kill(actor=1))]
    )
    lost = resumed.metrics["rollout/lost_episodes"]
    assert lost == 1
    assert resumed.metrics["global_step"] == len(stored(resumed)) + lost == 120
    assert resumed.metrics["gradient_steps"] == 120 - 40
    assert_whole(stored(resumed))
    mean = resumed.metrics["rollout/policy_age_mean"]
    assert 0 < mean < resumed.metrics["rollout/policy_age_max"]
    rows = [row for row in metric_rows(resumed.run_dir) if "rollout/policy_age_mean" in row]
    assert rows
    assert all_ended()


@pytest.mark.ray
def test_asynchronous_rounds_do_not_wait_for_the_slowest_environment(nodes: Nodes) -> None:
    placement = Placement(cpus=0.0)
    wrapper = WrapperFactory("gymnasium.wrappers:NormalizeReward", NormalizeReward, {})
    factory = EnvironmentFactory(Uneven, {"slowest": 0.0}, [wrapper])
    with VectorEnvironment(
        factory, 3, (0, 1), backend="ray-async", seed_every_reset=True, placement=placement
    ) as vector:
        vector.reset()
        assert vector.steps_per_round == 2
        slow = actors()[0]
        os.kill(slow, signal.SIGSTOP)
        seen = np.zeros(6, np.int64)
        try:
            for _ in range(12):
                result = vector.step(np.zeros((6, 1)))
                assert result.stepped is not None
                assert result.stepped.reshape(2, 3).sum(axis=1).tolist() == [2, 2]
                assert not result.reward[~result.stepped].any()
                seen += result.stepped
        finally:
            os.kill(slow, signal.SIGCONT)
        assert np.sort(seen).tolist()[:2] != [0, 0]  # only the one that was stopped is missing
        assert seen.min() == 0
        assert [len(infos) for infos in (vector.infos(0), vector.infos(1))] == [3, 3]
        for _ in range(100):  # until the one that was stopped has caught up
            seen += vector.step(np.zeros((6, 1))).stepped
            if seen.min() > 0:
                break
            time.sleep(0.05)
        busy = vector.busy()
        assert seen.min() > 0
        assert busy is not None
        assert busy.reshape(2, 3).sum(axis=1).tolist() == [1, 1]
        for seed_index in range(2):
            assert vector.wrapper_statistics(seed_index)  # also if the first environment is busy
            assert sum(info == {} for info in vector.infos(seed_index)) >= 1
        assert (vector.busy() == busy).all()
        steps = vector.step(np.zeros((6, 1))).stepped
        assert steps is not None
        assert steps.sum() == 4


@pytest.mark.ray
def test_sessions_share_one_connection_and_leave_signals_alone(nodes: Nodes) -> None:
    import ray

    with (
        pytest.warns(UserWarning, match="not used, because this process is already connected"),
        ray_session("10.255.255.1:6379"),
    ):
        assert ray.is_initialized()
    with ray_session("auto"), ray_session():
        pass
    assert ray.is_initialized()
    assert nodes.left_signals_alone


@pytest.mark.ray
def test_a_cluster_may_be_named_by_its_host(nodes: Nodes) -> None:
    """Ray calls it by its number, which is not another cluster."""
    port = nodes.cluster.address.rpartition(":")[2]
    join = f"with ray_session('localhost:{port}'), ray_session('localhost:{port}'): pass"
    code = f"from rl_training.ray_session import ray_session\n{join}"
    joined = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert joined.returncode == 0, joined.stderr


# An embedded Ray


@pytest.mark.ray
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda each: each.name)
def test_a_signal_to_all_processes_saves_a_checkpoint_first(
    tmp_path: Path, number: signal.Signals
) -> None:
    """As in a terminal or under Slurm, the processes of the embedded Ray get the signal too."""
    pytest.importorskip("ray")
    environment = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    command = [sys.executable, "-m", "rl_training"]
    settings = (
        "run_name=run",
        "eval_interval=0",
        "num_envs=4",
        "learning_starts=100",
        "compile=off",
    )
    changes = [part for each in settings for part in ("--set", each)]
    ray = ["--set", "vectorization=ray", "--set", "env_workers=2"]
    train = [*command, "train", "-c", "sac/pendulum", *changes, "--output-dir", str(tmp_path)]
    run = tmp_path / "run"
    with subprocess.Popen(
        [*train, "--total-timesteps", "100000", *ray],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        while process.poll() is None and not (run / "metrics.jsonl").exists():
            time.sleep(0.1)
        os.killpg(process.pid, number)
        output, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    first, last = errors.splitlines()
    assert first == "stopping, with a checkpoint ..."
    step = int(re.findall(r"stopped at step ([\d,]+) with a checkpoint", last)[0].replace(",", ""))
    assert "aylet" not in output + errors
    assert json.loads((run / "metadata.json").read_text())["resume_level"] == "bit-exact"
    assert [each for each in processes_of(process.pid) if "ray" in each] == []

    total = step + 200
    resumed = rl_training.resume_training(
        run, total_timesteps=total, changes={"vectorization": "sync"}
    )
    config = load_config(
        "sac/pendulum", settings, total_timesteps=total, output_dir=str(tmp_path / "alone")
    )
    assert_same(resumed, rl_training.train(config))


def processes_of(group: int) -> list[str]:
    """Return the commands of the processes in a group."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if int((folder / "stat").read_text().rpartition(")")[2].split()[2]) == group:
                found.append((folder / "cmdline").read_bytes().decode(errors="replace"))
    return found
