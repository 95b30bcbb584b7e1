"""The managed classes, such as `SAC`: learn, evaluate, predict, save and load."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import safetensors.torch
from conftest import tiny, tree
from helpers import (
    BUILT_IN,
    StopAt,
    assert_actions_fit,
    each_algorithm,
    first_observations,
    keywords,
    model_bytes,
    tiny_of,
)

import rl_training
from rl_training import (
    SAC,
    TrainConfig,
    evaluate_checkpoint,
    predict_checkpoint,
    resume_training,
    train,
)
from rl_training.algorithms.dqn import DQNHyperparameters
from rl_training.algorithms.sac import SACHyperparameters
from rl_training.algorithms.spec import AlgorithmSpec
from rl_training.callbacks import Callback, TrainingContext
from rl_training.config_files import load_config
from rl_training.errors import CheckpointError, ConfigError, EnvironmentSetupError, UserError
from rl_training.training.engine import planned_updates
from rl_training.types import TrainResult

PENDULUM_OBS = np.array([1.0, 0.0, 0.5], dtype=np.float32)


class Valve(gym.Env[np.ndarray, np.ndarray]):
    """A user's environment with episodes of ten steps. Openings near a set point are rewarded."""

    observation_space = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = gym.spaces.Box(np.array([3.0, -1.0]), np.array([5.0, 0.0]), dtype=np.float64)

    def __init__(self, set_point: float = 4.0) -> None:
        self.set_point, self.steps = set_point, 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps = 0
        return self._observe(), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(np.asarray(action, dtype=np.float64))
        self.steps += 1
        reward = -abs(float(action[0]) - self.set_point)
        return self._observe(), reward, False, self.steps >= 10, {}

    def _observe(self) -> np.ndarray:
        return self.np_random.uniform(-1, 1, 2).astype(np.float32)


@pytest.fixture
def quick(tmp_path: Path) -> dict[str, Any]:
    """Return keyword arguments for a run that takes a fraction of a second."""
    return keywords(tiny(tmp_path / "runs", total_timesteps=60))


@pytest.fixture(scope="module")
def valve_run(tmp_path_factory: pytest.TempPathFactory) -> TrainResult:
    """Return a finished run in an environment without an id. It is shared: copy it to resume."""
    config = tiny(tmp_path_factory.mktemp("valve") / "runs", env_id=None, total_timesteps=60)
    result = train(config, env=Valve)
    assert isinstance(result, TrainResult)
    return result


# The example in the documentation


def test_the_example_of_the_documentation(quick: dict[str, Any], tmp_path: Path) -> None:
    agent = SAC("Pendulum-v1", **quick)
    result = agent.learn()
    assert result.metrics["global_step"] == 60
    assert result.metrics["gradient_steps"] == 10
    assert {"eval_return_mean", "eval_return_std"} <= result.metrics.keys()

    more = agent.learn(30)
    assert more.run_dir == result.run_dir
    assert (more.metrics["global_step"], more.metrics["gradient_steps"]) == (90, 40)
    assert agent.result == more

    evaluation = agent.evaluate(num_episodes=3)
    assert evaluation["eval_return_min"] <= evaluation["eval_return_mean"] < 0
    assert evaluation["eval_return_mean"] == pytest.approx(
        evaluate_checkpoint(more.run_dir, num_episodes=3)["eval_return_mean"]
    )

    action = agent.predict(PENDULUM_OBS, deterministic=True)
    saved = agent.save(tmp_path / "policy")
    loaded = SAC.load(saved)
    assert np.array_equal(loaded.predict(PENDULUM_OBS), action)
    assert loaded.evaluate(num_episodes=3) == evaluation


# Every algorithm


@each_algorithm
@pytest.mark.usefixtures("no_pictures")
@pytest.mark.fast_cases
def test_every_managed_class_learns_evaluates_predicts_saves_and_loads(
    spec: AlgorithmSpec, tmp_path: Path
) -> None:
    managed = getattr(rl_training, spec.algorithm.__name__)
    config = tiny_of(spec, tmp_path / "runs", total_timesteps=60)
    agent = managed(config["env_id"], **keywords(config))
    assert agent.config == TrainConfig(**config)
    stopped = agent.learn(callbacks=[StopAt(50)])
    assert (stopped.stop_reason, stopped.metrics["global_step"]) == ("test", 50)
    result = agent.learn()
    assert (result.run_dir, result.metrics["global_step"]) == (stopped.run_dir, 60)
    assert result.metrics["gradient_steps"] == planned_updates(agent.config)
    assert model_bytes(result) != (stopped.checkpoint_path / "model.safetensors").read_bytes()

    evaluation = agent.evaluate(num_episodes=1, seed=5)
    found = evaluate_checkpoint(result.run_dir, num_episodes=1, seed=5)
    assert evaluation["eval_return_mean"] == found["eval_return_mean"]

    observations = first_observations(spec)
    actions = agent.predict(observations)
    assert np.array_equal(actions, predict_checkpoint(result.run_dir, observations))
    assert_actions_fit(spec, actions)
    assert_actions_fit(spec, agent.predict(observations, deterministic=False))

    policy = agent.save(tmp_path / "policy")
    assert (policy / "model.safetensors").read_bytes() == model_bytes(result)
    for path in (policy, result.run_dir):
        loaded = managed.load(path)
        assert np.array_equal(loaded.predict(observations), actions)
        assert loaded.evaluate(num_episodes=1, seed=5) == evaluation
    other = BUILT_IN[BUILT_IN.index(spec) - 1]
    with pytest.raises(UserError, match=f"contains a policy of '{spec.name}', not '{other.name}'"):
        getattr(rl_training, other.algorithm.__name__).load(policy)


# Predicting actions


def test_actions_are_in_environment_units(valve_run: TrainResult) -> None:
    agent = SAC.load(valve_run.run_dir)
    observations = np.random.default_rng(0).uniform(-1, 1, (50, 2))
    for deterministic in (True, False):
        actions = agent.predict(observations, deterministic=deterministic)
        assert actions.shape == (50, 2)
        assert all(Valve.action_space.contains(action.astype(np.float64)) for action in actions)
        assert np.ptp(actions[:, 0]) > 0


def test_one_observation_and_a_batch_give_the_same_actions(finished_run: TrainResult) -> None:
    agent = SAC.load(finished_run.run_dir)
    batch = np.stack([PENDULUM_OBS, -PENDULUM_OBS])
    together = agent.predict(batch)
    alone = [agent.predict(obs) for obs in batch]
    assert (together.shape, alone[0].shape) == ((2, 1), (1,))
    np.testing.assert_allclose(together, alone, rtol=1e-5)
    np.testing.assert_array_equal(agent.predict(PENDULUM_OBS.tolist()), alone[0])
    np.testing.assert_array_equal(agent.predict(PENDULUM_OBS.astype(np.float64)), alone[0])


def test_deterministic_actions_repeat_and_sampled_actions_vary(finished_run: TrainResult) -> None:
    agent = SAC.load(finished_run.run_dir)
    best = [agent.predict(PENDULUM_OBS) for _ in range(3)]
    sampled = {float(agent.predict(PENDULUM_OBS, deterministic=False)[0]) for _ in range(5)}
    assert np.array_equal(best[0], best[1])
    assert np.array_equal(best[0], best[2])
    assert len(sampled) == 5


def test_predict_does_not_change_the_observation(finished_run: TrainResult) -> None:
    agent, obs = SAC.load(finished_run.run_dir), PENDULUM_OBS.copy()
    obs.flags.writeable = False
    agent.predict(obs)
    assert np.array_equal(obs, PENDULUM_OBS)


@pytest.mark.parametrize(
    "obs", [[1.0], np.zeros((2, 2, 3)), [np.nan, 0, 0], "text", [[1, 2, 3], [1]], {"a": 1}], ids=str
)
def test_an_observation_that_does_not_fit_is_refused(finished_run: TrainResult, obs: Any) -> None:
    with pytest.raises(UserError, match="obs"):
        SAC.load(finished_run.run_dir).predict(obs)


def test_predict_reads_no_file_after_the_first_call(
    finished_run: TrainResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = SAC.load(finished_run.run_dir)
    first = agent.predict(PENDULUM_OBS)

    def reading(*_: Any, **__: Any) -> None:
        pytest.fail("a file was read again")

    for name in ("open", "read_bytes", "read_text", "stat"):
        monkeypatch.setattr(Path, name, reading)
    monkeypatch.setattr(safetensors.torch, "load_file", reading)
    assert np.array_equal(agent.predict(PENDULUM_OBS), first)


def test_predict_checkpoint_loads_the_tensors_once(
    run_copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads, load = [], safetensors.torch.load
    monkeypatch.setattr(safetensors.torch, "load", lambda data: loads.append(data) or load(data))
    for _ in range(3):
        predict_checkpoint(run_copy, PENDULUM_OBS)
    assert len(loads) == 1


def test_predict_needs_no_environment(run_copy: Path) -> None:
    script = """
        import sys
        import gymnasium

        def unavailable(*_, **__):
            sys.exit("an environment was made")

        gymnasium.make = gymnasium.make_vec = unavailable
        gymnasium.registry.clear()
        from rl_training import SAC, predict_checkpoint

        action = SAC.load(sys.argv[1]).predict([1.0, 0.0, 0.5])
        assert action == predict_checkpoint(sys.argv[1], [1.0, 0.0, 0.5])
        print(float(action[0]))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(run_copy)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == pytest.approx(float(predict_checkpoint(run_copy, PENDULUM_OBS)[0]))


def test_predict_normalizes_as_training_did(quick: dict[str, Any], tmp_path: Path) -> None:
    agent = SAC("Pendulum-v1", normalize_observations=True, **quick)
    agent.learn()
    policy = agent.policy
    assert policy.normalizer is not None
    loaded = SAC.load(agent.save(tmp_path / "policy"))
    assert np.array_equal(loaded.predict(PENDULUM_OBS), agent.predict(PENDULUM_OBS))
    assert loaded.config.normalize_observations


def test_an_untrained_agent_predicts_and_can_be_evaluated() -> None:
    agent = SAC("Pendulum-v1", hidden_sizes=[16, 16])
    assert agent.predict(PENDULUM_OBS).shape == (1,)
    assert agent.evaluate(num_episodes=1)["eval_length_mean"] == 200


# Environments


@pytest.mark.parametrize(
    "source",
    [Valve, Valve(), lambda: Valve(), lambda **kwargs: Valve(**kwargs)],
    ids=["class", "instance", "factory", "factory with arguments"],
)
def test_an_environment_object_class_or_factory_can_be_used(
    quick: dict[str, Any], source: Any
) -> None:
    agent = SAC(source, **quick)
    result = agent.learn()
    assert agent.evaluate(num_episodes=2)["eval_length_mean"] == 10
    assert agent.learn(10).run_dir == result.run_dir
    assert Valve.action_space.contains(agent.predict([0.0, 0.0]).astype(np.float64))


def test_an_instance_made_by_gymnasium_trains_like_its_id(
    quick: dict[str, Any],
) -> None:
    by_id = SAC("Pendulum-v1", **quick).learn()
    instance = gym.make("Pendulum-v1")
    by_instance = SAC(instance, **quick).learn()
    assert model_bytes(by_id) == model_bytes(by_instance)
    assert by_instance.run_dir.name.startswith("sac__Pendulum-v1__seed0__")


def test_the_same_environment_object_and_seed_give_the_same_policy(
    quick: dict[str, Any], valve_run: TrainResult
) -> None:
    assert model_bytes(SAC(Valve, **quick).learn()) == model_bytes(valve_run)


def test_environment_arguments_reach_a_class(quick: dict[str, Any]) -> None:
    made: list[float] = []

    class Watched(Valve):
        def __init__(self, set_point: float = 4.0) -> None:
            super().__init__(set_point)
            made.append(set_point)

    SAC(Watched, env_kwargs={"set_point": 4.5}, **quick).learn()
    assert set(made) == {4.5}


def test_environment_arguments_survive_save_and_load(quick: dict[str, Any], tmp_path: Path) -> None:
    agent = SAC("Pendulum-v1", env_kwargs={"g": 2.0}, **quick)
    agent.learn()
    loaded = SAC.load(agent.save(tmp_path / "policy"))
    assert loaded.config.env_kwargs == {"g": 2.0}
    assert loaded.evaluate(num_episodes=1) == agent.evaluate(num_episodes=1)


@pytest.mark.parametrize(
    "source", [3, lambda: "no environment", lambda x: Valve()], ids=["number", "text", "argument"]
)
def test_an_invalid_environment_is_rejected(quick: dict[str, Any], source: Any) -> None:
    with pytest.raises(EnvironmentSetupError):
        SAC(source, **quick).learn()
    assert not Path(quick["output_dir"]).exists()


def test_an_unknown_id_or_unsuitable_environment_creates_no_files(quick: dict[str, Any]) -> None:
    with pytest.raises(EnvironmentSetupError, match="Did you mean Pendulum-v1"):
        SAC("Pendulm-v1", **quick).learn()
    with pytest.raises(EnvironmentSetupError, match="needs continuous actions"):
        rl_training.TQC("CartPole-v1", **quick).learn()
    with pytest.raises(ConfigError, match="env_id"):
        SAC(**quick).learn()
    assert not Path(quick["output_dir"]).exists()


# Settings


def test_hyper_parameters_go_into_algo_kwargs() -> None:
    agent = SAC("Pendulum-v1", seed=4, total_timesteps=500, tau=0.1, hidden_sizes=[8, 8])
    assert (agent.config.env_id, agent.config.seed) == ("Pendulum-v1", 4)
    assert agent.config.total_timesteps == 500
    chosen = agent.config.algo_kwargs.model_dump()
    assert (chosen["tau"], chosen["hidden_sizes"]) == (0.1, (8, 8))


def test_settings_add_to_those_of_a_config() -> None:
    config = TrainConfig(algo="sac", env_id="Pendulum-v1", seed=3, algo_kwargs={"tau": 0.2})
    agent = SAC(config, seed=5, gamma=0.5)
    assert agent.config.seed == 5
    chosen = agent.config.algo_kwargs.model_dump()
    assert (chosen["tau"], chosen["gamma"]) == (0.2, 0.5)
    assert SAC(config).config == config


@pytest.mark.parametrize(
    "given",
    [{"tau": 0.2}, MappingProxyType({"tau": 0.2}), SACHyperparameters(tau=0.2), None],
    ids=lambda given: type(given).__name__,
)
def test_settings_add_to_hyper_parameters_in_every_form(given: Any) -> None:
    chosen = SAC("Pendulum-v1", algo_kwargs=given, gamma=0.5).config.algo_kwargs.given()
    assert chosen == ({"gamma": 0.5} if given is None else {"tau": 0.2, "gamma": 0.5})


def test_hyper_parameters_of_another_algorithm_are_refused() -> None:
    with pytest.raises(ConfigError, match="mapping of sac's hyper-parameters"):
        SAC("Pendulum-v1", algo_kwargs=DQNHyperparameters(), gamma=0.5)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "make",
    [
        lambda algo, base, changes: (
            getattr(rl_training, algo.upper())(
                TrainConfig(algo=algo, algo_kwargs=base), **changes
            ).config
        ),
        lambda algo, base, changes: (
            getattr(rl_training, algo.upper())
            .from_config(TrainConfig(algo=algo, algo_kwargs=base), **changes)
            .config
        ),
        lambda algo, base, changes: load_config(
            TrainConfig(algo=algo, algo_kwargs=base),
            [f"algo_kwargs.{key}={value}" for key, value in changes.items()],
        ),
    ],
    ids=["class", "from_config", "override"],
)
def test_a_default_that_depends_on_another_setting_is_updated(make: Callable) -> None:
    """Defaults that depend on other settings: `policy_delay` in REDQ, critic sizes in TQC."""
    changed = make("redq", {"gradient_updates_per_step": 5}, {"gradient_updates_per_step": 3})
    assert changed.algo_kwargs.policy_delay == 3
    changed = make("redq", {"policy_delay": 7}, {"gradient_updates_per_step": 3})
    assert changed.algo_kwargs.policy_delay == 7
    changed = make("tqc", {"batch_size": 8}, {"hidden_sizes": [8, 4]})
    assert changed.algo_kwargs.critic_hidden_sizes is None
    changed = make("tqc", {"critic_hidden_sizes": [9]}, {"hidden_sizes": [8, 4]})
    assert changed.algo_kwargs.critic_hidden_sizes == (9,)
    # A round trip through the saved config keeps them.
    assert TrainConfig(**changed.to_mapping()) == changed


def test_from_config_accepts_names_files_and_changes(tmp_path: Path) -> None:
    assert SAC.from_config("sac/pendulum").config.env_id == "Pendulum-v1"
    path = tmp_path / "mine.yaml"
    path.write_text("algo: sac\nenv_id: Pendulum-v1\nalgo_kwargs: {tau: 0.3}\n")
    agent = SAC.from_config(path, seed=8, gamma=0.9)
    chosen = agent.config.algo_kwargs.model_dump()
    assert (agent.config.seed, chosen["tau"], chosen["gamma"]) == (8, 0.3, 0.9)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"learnin_rate": 1e-3}, r"learnin_rate = 0\.001: unknown.*did you mean 'learning_rate'\?"),
        ({"total_timestep": 5}, r"total_timestep = 5: unknown.*did you mean 'total_timesteps'\?"),
        ({"recurrent": "gru"}, "recurrent = 'gru': unknown setting; it is a setting of a2c, ppo"),
        ({"zzzzz": 1}, r"zzzzz = 1: unknown setting; allowed: .*learning_rate"),
        ({"tau": 7}, r"algo_kwargs\.tau = 7"),
        ({"seed": "x"}, "seed = 'x'"),
        ({"algo": "bc"}, "algo"),
        ({"seeds": [0, 1]}, "seeds"),
        ({"algo_kwargs": 3}, "algo_kwargs = 3"),
    ],
)
def test_an_invalid_setting_is_explained(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SAC("Pendulum-v1", **settings)


@pytest.mark.parametrize("number", [0, -1])
def test_an_evaluation_has_at_least_one_episode(finished_run: TrainResult, number: int) -> None:
    with pytest.raises(UserError, match="num_episodes"):
        SAC.load(finished_run.run_dir).evaluate(num_episodes=number)


# Continuing


def test_learning_in_two_calls_equals_learning_in_one(
    quick: dict[str, Any], finished_run: TrainResult
) -> None:
    agent = SAC("Pendulum-v1", **{**quick, "total_timesteps": 120})

    class Pause(Callback):
        def on_collect_end(self, context: TrainingContext) -> None:
            if context.global_step == 75:
                context.request_stop("interrupted")

    assert agent.learn(callbacks=[Pause()]).stop_reason == "interrupted"
    assert agent.learn().stop_reason == "total_timesteps"
    assert agent.result is not None
    assert model_bytes(agent.result) == model_bytes(finished_run)


def test_a_loaded_run_continues_in_its_folder(run_copy: Path) -> None:
    agent = SAC.load(run_copy)
    before = agent.predict(PENDULUM_OBS)
    result = agent.learn(20)
    assert (result.run_dir, result.metrics["global_step"]) == (run_copy, 140)
    assert not np.array_equal(agent.predict(PENDULUM_OBS), before)


def test_a_loaded_policy_starts_a_new_run(run_copy: Path, tmp_path: Path) -> None:
    policy = SAC.load(run_copy).save(tmp_path / "policy")
    agent = SAC.load(policy)
    agent.config = agent.config.with_changes(
        output_dir=str(tmp_path / "new"), eval_interval=0, eval_episodes=1
    )
    result = agent.learn(20)
    assert result.run_dir.parent == tmp_path / "new"
    assert result.metrics["global_step"] == 20
    assert model_bytes(result) == (policy / "model.safetensors").read_bytes()


def test_another_environment_starts_a_new_run_from_the_policy(
    run_copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = tree(run_copy)
    light = SAC.load(run_copy, env=lambda: gym.make("Pendulum-v1", g=5.0))
    light.config = light.config.with_changes(output_dir=str(tmp_path / "new"))
    result = light.learn(total_timesteps=20)
    assert result.run_dir.parent == tmp_path / "new"
    assert result.metrics["global_step"] == 20
    assert (
        model_bytes(result)
        == (run_copy / "checkpoints/step_000000120/model.safetensors").read_bytes()
    )
    assert tree(run_copy) == before


def test_a_policy_does_not_start_in_an_environment_of_another_shape(
    run_copy: Path, tmp_path: Path
) -> None:
    agent = SAC.load(run_copy, env=Valve)
    agent.config = agent.config.with_changes(output_dir=str(tmp_path / "new"))
    with pytest.raises(UserError):
        agent.learn(total_timesteps=20)
    assert not (tmp_path / "new").exists()


# Runs in environment objects


@pytest.mark.parametrize("source", [Valve, lambda: Valve()], ids=["class", "factory"])
def test_a_run_in_an_environment_object_continues_after_loading(
    quick: dict[str, Any], source: Callable[[], Valve]
) -> None:
    result = SAC(source, **quick).learn()
    agent = SAC.load(result.run_dir, env=source)
    more = agent.learn(20)
    assert more.run_dir == result.run_dir
    assert more.metrics["global_step"] == 80
    assert agent.evaluate(num_episodes=1)["eval_length_mean"] == 10


def test_a_run_in_an_environment_object_can_be_resumed(quick: dict[str, Any]) -> None:
    result = SAC(Valve, **quick).learn()
    more = resume_training(result.run_dir, total_timesteps=80, env=Valve)
    assert (more.run_dir, more.metrics["global_step"]) == (result.run_dir, 80)
    uninterrupted = SAC(Valve, **{**quick, "total_timesteps": 80}).learn()
    assert model_bytes(uninterrupted) == model_bytes(more)


def test_a_missing_environment_object_is_reported(valve_run: TrainResult) -> None:
    before = tree(valve_run.run_dir)
    with pytest.raises(CheckpointError, match=r"Valve.*resume_training\(path, env=\.\.\.\)"):
        resume_training(valve_run.run_dir, total_timesteps=80)
    with pytest.raises(CheckpointError, match=r"Valve.*evaluate_checkpoint\(path, env=\.\.\.\)"):
        evaluate_checkpoint(valve_run.run_dir)
    agent = SAC.load(valve_run.run_dir)
    with pytest.raises(UserError, match="env"):
        agent.learn(total_timesteps=80)
    with pytest.raises(UserError, match="env"):
        agent.evaluate()
    assert tree(valve_run.run_dir) == before


def test_a_run_in_an_environment_object_can_be_evaluated(valve_run: TrainResult) -> None:
    found = evaluate_checkpoint(valve_run.run_dir, env=Valve, num_episodes=1)
    assert found["eval_length_mean"] == valve_run.metrics["eval_length_mean"]
    assert SAC.load(valve_run.run_dir, env=Valve).evaluate(num_episodes=1) == found


def test_a_loaded_policy_can_be_saved_without_its_environment(
    valve_run: TrainResult, tmp_path: Path
) -> None:
    first = SAC.load(valve_run.run_dir).save(tmp_path / "first")
    second = SAC.load(first).save(tmp_path / "second")
    for name in ("model.safetensors", "policy.json"):
        assert (first / name).read_bytes() == (second / name).read_bytes()
        assert (first / name).read_bytes() == (valve_run.checkpoint_path / name).read_bytes()


# Saving


def test_save_overwrites_only_a_saved_policy(finished_run: TrainResult, tmp_path: Path) -> None:
    agent = SAC.load(finished_run.run_dir)
    assert agent.save(tmp_path / "policy") == agent.save(tmp_path / "policy")
    assert tree(tmp_path / "policy") == {"MANIFEST.json", "model.safetensors", "policy.json"}
    assert [path.name for path in tmp_path.iterdir()] == ["policy"]
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis/chapter-1.tex").write_text("years of work")
    with pytest.raises(UserError, match="thesis"):
        agent.save(tmp_path / "thesis")
    assert tree(tmp_path / "thesis") == {"chapter-1.tex"}


def test_a_policy_is_not_saved_over_a_checkpoint_of_a_run(run_copy: Path) -> None:
    checkpoint = run_copy / "checkpoints/step_000000120"
    before = tree(checkpoint)
    with pytest.raises(UserError):
        SAC.load(run_copy).save(checkpoint)
    assert tree(checkpoint) == before


def test_a_saved_policy_contains_no_local_paths(finished_run: TrainResult, tmp_path: Path) -> None:
    folder = SAC.load(finished_run.run_dir).save(tmp_path / "policy")
    for path in folder.iterdir():
        assert str(tmp_path.parent).encode() not in path.read_bytes()
        assert finished_run.run_dir.name.encode() not in path.read_bytes()


# Types of arguments


def test_numpy_numbers_and_paths_are_accepted(tmp_path: Path) -> None:
    agent = SAC(
        "Pendulum-v1",
        seed=np.int64(3),
        output_dir=tmp_path,
        learning_rate=np.float32(0.5),
        hidden_sizes=np.array([16, 16]),
        batch_size=np.int32(8),
    )
    assert (agent.config.seed, agent.config.output_dir) == (3, str(tmp_path))
    assert agent.config.algo_kwargs.hidden_sizes == (16, 16)


def test_an_invalid_callback_is_rejected_before_files_are_created(tmp_path: Path) -> None:
    agent = SAC("Pendulum-v1", output_dir=str(tmp_path), total_timesteps=10)
    with pytest.raises(ConfigError, match=r"not a Callback; derive a class from"):
        agent.learn(callbacks=[print])
    assert not list(tmp_path.iterdir())


class OldReset(gym.Env):
    observation_space = gym.spaces.Box(-1, 1, (2,))
    action_space = gym.spaces.Box(-1, 1, (1,))

    def reset(self) -> Any:
        return self.observation_space.sample()


class LoneObservation(OldReset):
    def reset(self, *, seed: int | None = None, options: dict | None = None) -> Any:
        return self.observation_space.sample()


class OldStep(OldReset):
    def reset(self, *, seed: int | None = None, options: dict | None = None) -> Any:
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> Any:
        return self.observation_space.sample(), 0.0, False, {}


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (OldReset, r"reset must be `reset\(self, \*, seed=None, options=None\)`"),
        (LoneObservation, "reset must return `observation, info`; it returned ndarray"),
        (OldStep, "step must return .*; it returned 4 values"),
    ],
)
def test_the_error_for_another_environment_interface_says_what_is_expected(
    tmp_path: Path, environment: type[gym.Env], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        SAC(environment, output_dir=str(tmp_path), total_timesteps=10).learn()
    assert not list(tmp_path.iterdir())


def test_a_policy_is_not_evaluated_in_an_environment_of_another_shape(tmp_path: Path) -> None:
    policy = SAC("Pendulum-v1", hidden_sizes=[8]).save(tmp_path / "policy")
    with pytest.raises(UserError, match=r"expects 3 observations and 1 actions, .* has 2 and 1"):
        SAC.load(policy, env="MountainCarContinuous-v0").evaluate(num_episodes=1)


def test_a_run_without_updates_warns(tmp_path: Path) -> None:
    settings: Any = {"output_dir": str(tmp_path), "total_timesteps": 10}
    cause = r"total_timesteps = 10, learning_starts = 5,000\); .* a smaller learning_starts"
    with pytest.warns(UserWarning, match=f"nothing will be learned: .*{cause}"):
        SAC("Pendulum-v1", **settings, learning_starts=5_000).learn()
    with pytest.warns(UserWarning, match=r"train_frequency = 8\); .* a smaller train_frequency"):
        SAC("Pendulum-v1", **settings, learning_starts=5, train_frequency=8).learn()


def test_warnings_point_to_the_users_line(tmp_path: Path) -> None:
    settings: Any = {"output_dir": str(tmp_path), "total_timesteps": 10}
    with pytest.warns(UserWarning, match="nothing will be learned") as from_class:
        SAC("Pendulum-v1", **settings).learn()
    with pytest.warns(UserWarning, match="nothing will be learned") as from_function:
        rl_training.train({"algo": "sac", "env_id": "Pendulum-v1", **settings})
    assert [caught[0].filename for caught in (from_class, from_function)] == [__file__] * 2
