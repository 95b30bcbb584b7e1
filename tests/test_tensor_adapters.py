"""Environments of other packages as tensor environments, against small stand-ins."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from helpers import StopAt, tiny, tiny_of
from safetensors.torch import load_file

import rl_training
from rl_training.algorithms.spec import get_algorithm_spec
from rl_training.envs.tensors.adapters import JaxWorlds, VecEnvWorlds, VectorWorlds
from rl_training.envs.tensors.contract import TensorSource
from rl_training.errors import EnvironmentSetupError
from rl_training.runtime.workflows import resume_together
from rl_training.types import TrainResult

LIMIT = 5


class StandIn:
    """A counter per world: terminated by the action 1, truncated after `LIMIT` steps."""

    def __init__(self, num_envs: int = 3) -> None:
        self.num_envs, self.num_actions, self.device = num_envs, 1, "cpu"
        self.count = torch.zeros(num_envs)

    def observe(self) -> torch.Tensor:
        return torch.stack([self.count, -self.count], dim=1)

    def advance(self, actions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return what was reached, and which worlds are terminated and truncated."""
        self.count = self.count + 1
        reached = self.observe()
        terminated = actions[:, 0] >= 1
        truncated = (self.count >= LIMIT) & ~terminated
        self.count = torch.where(terminated | truncated, 0.0, self.count)
        return reached, terminated, truncated


class RslEnv(StandIn):
    """The `VecEnv` of rsl_rl."""

    tells_final = False

    def get_observations(self) -> dict[str, torch.Tensor]:
        return {"policy": self.observe(), "critic": self.observe()}

    def step(self, actions: torch.Tensor) -> tuple[Any, torch.Tensor, torch.Tensor, dict[str, Any]]:
        reached, terminated, truncated = self.advance(actions)
        extras: dict[str, Any] = {"time_outs": truncated}
        if self.tells_final:
            extras["final_obs"] = {"policy": reached}
        dones = (terminated | truncated).long()
        return self.get_observations(), torch.ones(self.num_envs), dones, extras


class FinalEnv(RslEnv):
    tells_final = True


def test_a_vec_env_without_final_observations_leaves_truncated_transitions_out() -> None:
    worlds = VecEnvWorlds(RslEnv())
    assert worlds.reset([0]).tolist() == [[0, 0]] * 3
    actions = torch.tensor([[1.0], [0.0], [0.0]])
    step = worlds.step(actions)
    assert step.terminated.tolist() == [True, False, False]
    assert step.obs.tolist() == [[0, 0], [1, -1], [1, -1]]
    assert not step.left_out.any()
    for _ in range(LIMIT - 1):
        step = worlds.step(torch.zeros(3, 1))
    assert step.truncated.tolist() == [False, True, True]
    assert step.left_out.tolist() == [False, True, True]


def test_a_vec_env_with_final_observations_bootstraps_from_them() -> None:
    worlds = VecEnvWorlds(FinalEnv())
    worlds.reset([0])
    for _ in range(LIMIT):
        step = worlds.step(torch.zeros(3, 1))
    assert step.truncated.all()
    assert not step.left_out.any()
    assert step.final_obs.tolist() == [[LIMIT, -LIMIT]] * 3
    assert step.obs.tolist() == [[0, 0]] * 3


def test_a_final_state_at_the_time_limit_is_an_end() -> None:
    env = FinalEnv()
    worlds = VecEnvWorlds(env)
    worlds.reset([0])
    for _ in range(LIMIT - 1):
        worlds.step(torch.zeros(3, 1))
    env.reset_terminated = torch.tensor([True, False, False])
    step = worlds.step(torch.zeros(3, 1))
    assert step.terminated.tolist() == [True, False, False]
    assert step.truncated.tolist() == [False, True, True]


def test_a_broken_world_that_its_simulator_has_reset_is_noticed() -> None:
    class BreakingEnv(FinalEnv):
        def step(
            self, actions: torch.Tensor
        ) -> tuple[Any, torch.Tensor, torch.Tensor, dict[str, Any]]:
            obs, reward, dones, extras = super().step(actions)
            extras["final_obs"]["policy"][0] = torch.nan
            return obs, reward, dones, extras

    worlds = VecEnvWorlds(BreakingEnv())
    worlds.reset([0])
    step = worlds.step(torch.tensor([[1.0], [1.0], [0.0]]))
    assert step.broken.tolist() == [True, False, False]
    assert step.terminated.tolist() == [False, True, False]
    # Where no episode ends, the final observation does not count.
    assert not worlds.step(torch.zeros(3, 1)).broken.any()


def test_groups_of_observations_are_chosen_by_name() -> None:
    both = VecEnvWorlds(RslEnv(), group=("policy", "critic"))
    assert list(both.observation_space) == ["critic", "policy"]
    assert both.reset([0]).shape == (3, 4)
    with pytest.raises(EnvironmentSetupError, match=r"no group 'actor'.* there are policy, critic"):
        VecEnvWorlds(RslEnv(), group="actor")


class IsaacLabEnv(RslEnv):
    """What Isaac Lab's `RslRlVecEnvWrapper` has besides: pairs from `reset`, and a time that runs.

    One of its worlds breaks when it is pushed hard, and stays so until its time is over.
    """

    is_finite_horizon = False
    clip_actions, max_episode_length = 3.0, LIMIT

    def __init__(self, num_envs: int = 3) -> None:
        super().__init__(num_envs)
        self.unwrapped = SimpleNamespace(cfg=SimpleNamespace())
        self.seeds: list[int] = []

    @property
    def episode_length_buf(self) -> torch.Tensor:
        return self.count

    def seed(self, seed: int) -> None:
        self.seeds.append(seed)

    def close(self) -> None:
        raise AssertionError("whoever made it closes it: the next run needs it")

    def reset(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        self.count, self.hurt = torch.zeros(self.num_envs), torch.zeros(self.num_envs, dtype=bool)
        return self.get_observations(), {}

    def step(self, actions: torch.Tensor) -> tuple[Any, torch.Tensor, torch.Tensor, dict[str, Any]]:
        self.hurt |= actions[:, 0] <= -3
        _, reward, dones, extras = super().step(actions)
        self.hurt &= dones == 0
        if self.is_finite_horizon:
            del extras["time_outs"]
        return self.get_observations(), reward, dones, extras

    def observe(self) -> torch.Tensor:
        hurt = getattr(self, "hurt", torch.zeros(self.num_envs, dtype=bool))
        return super().observe().masked_fill(hurt[:, None], torch.nan)


def test_a_broken_world_is_told_that_its_time_is_over() -> None:
    worlds = VecEnvWorlds(IsaacLabEnv())
    assert worlds.action_space == gym.spaces.Box(-3.0, 3.0, (1,))
    worlds.reset([0])
    step = worlds.step(torch.tensor([[-3.0], [0.0], [0.0]]))
    assert step.broken.tolist() == [True, False, False]
    step = worlds.step(torch.zeros(3, 1))
    assert step.obs[0].tolist() == [0, 0]
    assert not step.broken.any()  # counted once
    assert step.left_out.tolist() == [True, False, False]
    assert not (step.terminated | step.truncated).any()
    for _ in range(LIMIT - 2):
        step = worlds.step(torch.zeros(3, 1))
    assert step.truncated.tolist() == [False, True, True]


def test_the_limit_of_a_finite_horizon_is_an_end() -> None:
    env = IsaacLabEnv()
    env.is_finite_horizon = True
    worlds = VecEnvWorlds(env)
    worlds.reset([0])
    for _ in range(LIMIT):
        step = worlds.step(torch.zeros(3, 1))
    assert step.terminated.all()
    assert not step.left_out.any()


class ManualEnv(IsaacLabEnv):
    """mjlab's with `auto_reset = False`: it must not be stepped before ended worlds are reset."""

    def __init__(self, num_envs: int = 3) -> None:
        super().__init__(num_envs)
        self.unwrapped = SimpleNamespace(
            cfg=SimpleNamespace(auto_reset=False), reset=self.reset_some
        )
        self.due = torch.zeros(num_envs, dtype=bool)

    def step(self, actions: torch.Tensor) -> tuple[Any, torch.Tensor, torch.Tensor, dict[str, Any]]:
        assert not self.due.any()
        self.count, self.hurt = self.count + 1, self.hurt | (actions[:, 0] <= -3)
        late = self.count >= LIMIT
        self.due = late | (actions[:, 0] >= 1)
        extras = {"time_outs": late}
        return self.get_observations(), torch.ones(self.num_envs), self.due.long(), extras

    def reset_some(self, env_ids: torch.Tensor) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        self.count[env_ids], self.due[env_ids], self.hurt[env_ids] = 0, False, False
        return self.get_observations(), {}


def test_worlds_that_are_left_to_the_caller_are_reset_and_their_ends_are_known() -> None:
    worlds = VecEnvWorlds(ManualEnv())
    worlds.reset([0])
    step = worlds.step(torch.tensor([[1.0], [-3.0], [0.0]]))
    assert step.terminated.tolist() == [True, False, False]
    assert step.broken.tolist() == [False, True, False]
    assert step.obs.tolist() == [[0, 0], [0, 0], [1, -1]]
    assert step.final_obs[0].tolist() == [1, -1]
    for _ in range(LIMIT - 1):
        step = worlds.step(torch.zeros(3, 1))
    assert step.truncated.tolist() == [False, False, True]
    assert not step.left_out.any()
    assert step.final_obs[2].tolist() == [LIMIT, -LIMIT]


def test_ends_are_known_where_a_reset_overwrites_the_observations() -> None:
    class ReusingEnv(ManualEnv):
        """Has one buffer of observations, which `step` and `reset` write."""

        buffer = torch.zeros(3, 2)

        def observe(self) -> torch.Tensor:
            return self.buffer.copy_(super().observe())

    worlds = VecEnvWorlds(ReusingEnv())
    worlds.reset([0])
    for _ in range(LIMIT):
        step = worlds.step(torch.zeros(3, 1))
    assert step.final_obs.tolist() == [[LIMIT, -LIMIT]] * 3
    assert step.obs.tolist() == [[0, 0]] * 3


def test_several_seeds_share_the_worlds(tmp_path: Path) -> None:
    env = IsaacLabEnv(4)
    worlds = VecEnvWorlds(env)
    source = TensorSource(lambda num_envs, device: worlds, exact=False, evaluated=False)
    settings = {"train_frequency": 8}
    config = tiny(tmp_path, env_id=None, num_envs=2, total_timesteps=120, algo_kwargs=settings)
    stopped = rl_training.train({**config, "seeds": [0, 1]}, env=source, callbacks=[StopAt(60)])
    assert isinstance(stopped, list)
    assert len(set(env.seeds)) > 1
    for result in resume_together([each.run_dir for each in stopped], env=source):
        assert result.metrics["global_step"] == 120
        assert 0 < result.metrics["rollout/ep_len_mean"] <= LIMIT
    with pytest.raises(EnvironmentSetupError, match=r"made 4 worlds.*set num_envs to 4"):
        rl_training.train(config, env=source)


class VectorEnv(gym.vector.VectorEnv[Any, Any, Any]):
    """A vector environment that returns tensors."""

    def __init__(self, mode: gym.vector.AutoresetMode = gym.vector.AutoresetMode.SAME_STEP) -> None:
        self._worlds, self.num_envs = StandIn(), 3
        self.metadata = {"autoreset_mode": mode}
        self.single_observation_space = gym.spaces.Box(-np.inf, np.inf, (2,))
        self.single_action_space = gym.spaces.Box(-1.0, 1.0, (1,))

    def reset(self, **_: Any) -> tuple[torch.Tensor, dict[str, Any]]:
        return self._worlds.observe(), {}

    def step(self, actions: torch.Tensor) -> Any:
        reached, terminated, truncated = self._worlds.advance(actions)
        ended = terminated | truncated
        infos = {"final_observation": reached, "_final_observation": ended} if ended.any() else {}
        return self._worlds.observe(), torch.ones(3), terminated, truncated, infos


def test_a_vector_environment_of_tensors_gives_final_observations() -> None:
    worlds = VectorWorlds(VectorEnv(), "cpu")
    worlds.reset([0])
    for _ in range(LIMIT):
        step = worlds.step(torch.zeros(3, 1))
    assert step.truncated.all()
    assert not step.left_out.any()
    assert step.final_obs.tolist() == [[LIMIT, -LIMIT]] * 3
    with pytest.raises(EnvironmentSetupError, match=r"NEXT_STEP.*AutoresetMode.DISABLED"):
        VectorWorlds(VectorEnv(gym.vector.AutoresetMode.NEXT_STEP), "cpu")


def jax_worlds() -> JaxWorlds:
    """Functions as those of Brax, with arrays of NumPy in place of JAX's."""

    def state(count: np.ndarray, done: np.ndarray, late: np.ndarray) -> SimpleNamespace:
        count = np.where(done > 0, 0, count).astype(np.float32)
        obs, reward = np.stack([count, -count], axis=1), np.ones(3, np.float32)
        return SimpleNamespace(
            count=count, obs=obs, reward=reward, done=done, info={"truncation": late}
        )

    def step(before: Any, actions: np.ndarray) -> SimpleNamespace:
        count = before.count + 1
        terminated = (actions[:, 0] >= 1).astype(np.float32)
        late = (count >= LIMIT).astype(np.float32) * (1 - terminated)
        return state(count, np.maximum(terminated, late), late)

    none = np.zeros(3, np.float32)
    return JaxWorlds(
        lambda seed: state(none, none, none),
        step,
        num_envs=3,
        device="cpu",
        observation_space=gym.spaces.Box(-np.inf, np.inf, (2,)),
        action_space=gym.spaces.Box(-1.0, 1.0, (1,)),
        to_jax=np.from_dlpack,
    )


def test_arrays_are_passed_by_dlpack() -> None:
    worlds = jax_worlds()
    worlds.reset([0])
    step = worlds.step(torch.tensor([[1.0], [0.0], [0.0]]))
    assert step.terminated.tolist() == [True, False, False]
    for _ in range(LIMIT - 1):
        step = worlds.step(torch.zeros(3, 1))
    assert step.left_out.tolist() == [False, True, True]


def test_arrays_that_do_not_fit_are_refused() -> None:
    class Small(RslEnv):
        def step(self, actions: torch.Tensor) -> Any:
            obs, reward, *rest = super().step(actions)
            return obs, reward[:2], *rest

    worlds = VecEnvWorlds(Small())
    worlds.reset([0])
    with pytest.raises(EnvironmentSetupError, match="expected 3 worlds"):
        worlds.step(torch.zeros(3, 1))


@pytest.mark.parametrize("kind", [RslEnv, FinalEnv])
def test_a_simulator_that_exists_once_is_trained_and_resumed(
    tmp_path: Path, kind: type[RslEnv]
) -> None:
    worlds = VecEnvWorlds(kind(4))
    source = TensorSource(lambda num_envs, device: worlds, exact=False, evaluated=False)
    settings = {"train_frequency": 8}
    config = tiny(tmp_path, env_id=None, num_envs=4, total_timesteps=160, algo_kwargs=settings)
    stopped = rl_training.train(config, env=source, callbacks=[StopAt(80)])
    assert isinstance(stopped, TrainResult)
    resumed = rl_training.resume_training(stopped.run_dir, env=source)
    assert resumed.metrics["global_step"] == 160
    assert np.isnan(resumed.metrics["eval_return_mean"])
    assert 0 < resumed.metrics["rollout/ep_len_mean"] <= LIMIT
    assert np.isfinite(resumed.metrics["train/critic_loss"])


def test_a_resumed_rollout_does_not_continue_episodes_that_are_gone(tmp_path: Path) -> None:
    worlds = VecEnvWorlds(FinalEnv(4))
    source = TensorSource(lambda num_envs, device: worlds, exact=False, evaluated=False)
    task = {"env_id": None, "num_envs": 4, "total_timesteps": 32}
    settings = {"rollout_steps": 8, "batch_size": 32}
    config = tiny_of(get_algorithm_spec("ppo"), tmp_path, **task, algo_kwargs=settings)
    stopped = rl_training.train(config, env=source, callbacks=[StopAt(12)])
    assert isinstance(stopped, TrainResult)
    resumed = rl_training.resume_training(stopped.run_dir, env=source)
    [rows] = [load_file(path) for path in resumed.checkpoint_path.glob("replay-*.safetensors")]
    [stored] = rows.values()
    ended = stored[:, -1].view(8, 4)
    assert (ended[2] == 1).all()
    assert not (ended[:2] == 1).all(1).any()


def test_a_resumed_run_does_not_continue_returns_of_episodes_that_are_gone(
    tmp_path: Path,
) -> None:
    worlds = VecEnvWorlds(IsaacLabEnv(2), action_range=(0.0, 0.5))
    source = TensorSource(lambda num_envs, device: worlds, exact=False, evaluated=False)
    task = {"env_id": None, "num_envs": 2, "total_timesteps": 8}
    config = tiny_of(get_algorithm_spec("flash_sac"), tmp_path, **task)
    stopped = rl_training.train(config, env=source, callbacks=[StopAt(6)])
    assert isinstance(stopped, TrainResult)
    resumed = rl_training.resume_training(stopped.run_dir, env=source)
    [saved] = resumed.checkpoint_path.glob("episodes*.safetensors")
    [returns] = [value for name, value in load_file(saved).items() if "scaler.returns" in name]
    assert returns.tolist() == [1, 1]  # three steps were made before it was stopped


def test_transitions_that_are_left_out_are_never_stored(tmp_path: Path) -> None:
    worlds = VecEnvWorlds(RslEnv(4))  # all worlds are truncated in the same step
    source = TensorSource(lambda num_envs, device: worlds, exact=False, evaluated=False)
    config = tiny(tmp_path, env_id=None, num_envs=4, total_timesteps=160)
    result = rl_training.train(config, env=source)
    assert isinstance(result, TrainResult)
    [rows] = [load_file(path) for path in result.checkpoint_path.glob("replay-*.safetensors")]
    [stored] = rows.values()
    before, after, discount = stored[:, 0], stored[:, 5], stored[:, 4]
    assert ((after == before + 1) | (discount == 0)).all()
    assert after.max() < LIMIT


def test_the_same_environment_serves_rsl_rl_and_this_package(tmp_path: Path) -> None:
    """Pendulum as a real `VecEnv`: rsl_rl's PPO trains in it, and so does SAC, adapted."""
    rsl_rl = pytest.importorskip("rsl_rl")
    from rsl_rl.env import VecEnv
    from rsl_rl.runners import OnPolicyRunner
    from tensordict import TensorDict

    from rl_training.envs.tensors.classic_control import Pendulum

    class PendulumVecEnv(VecEnv):
        def __init__(self, num_envs: int) -> None:
            self.worlds = Pendulum(num_envs, "cpu")
            self.num_envs, self.num_actions, self.device = num_envs, 1, "cpu"
            self.max_episode_length, self.cfg = self.worlds.max_steps, {}
            self.obs = self.worlds.reset([0])

        @property
        def episode_length_buf(self) -> torch.Tensor:
            return self.worlds.lengths

        def get_observations(self) -> TensorDict:
            return TensorDict({"policy": self.obs}, batch_size=[self.num_envs])

        def step(self, actions: torch.Tensor) -> Any:
            step = self.worlds.step(actions)
            self.obs = step.obs
            dones = (step.terminated | step.truncated).long()
            return self.get_observations(), step.reward, dones, {"time_outs": step.truncated}

    assert rsl_rl is not None
    model = {"class_name": "MLPModel", "hidden_dims": [16], "activation": "elu"}
    noise = {"class_name": "GaussianDistribution", "init_std": 1.0}
    settings = {
        "algorithm": {"class_name": "PPO", "num_learning_epochs": 1, "num_mini_batches": 1},
        "actor": {**model, "distribution_cfg": noise},
        "critic": model,
        "obs_groups": {"actor": ["policy"], "critic": ["policy"]},
        "num_steps_per_env": 8,
        "save_interval": 100,
    }
    OnPolicyRunner(PendulumVecEnv(4), settings, log_dir=None, device="cpu").learn(2)
    worlds = VecEnvWorlds(PendulumVecEnv(4), action_range=(-2.0, 2.0))
    source = TensorSource(lambda num_envs, device: worlds, exact=False, evaluated=False)
    config = tiny(tmp_path, env_id=None, num_envs=4, total_timesteps=4 * 210)
    result = rl_training.train({**config, "algo_kwargs": {"train_frequency": 40}}, env=source)
    assert isinstance(result, TrainResult)
    assert result.metrics["rollout/ep_len_mean"] >= 199  # the check before a run takes a step
