"""Experience: steps the environments with the current policy and stores what happens."""

from __future__ import annotations

import warnings
from collections import deque

import numpy as np
import torch

from rl_training.data.n_step import NStepAccumulator
from rl_training.data.replay_buffer import ReplayBuffer
from rl_training.envs import SnapshotUnsupported, VectorEnvironment
from rl_training.envs.snapshot_codec import Decoder, Encoder
from rl_training.errors import TrainingFault
from rl_training.runtime.policy import Policy
from rl_training.types import Json

EPISODES_AVERAGED = 100


class Collector:
    """Plays the policy, at first uniformly random actions, and fills the replay buffer."""

    def __init__(
        self,
        environment: VectorEnvironment,
        policy: Policy,
        buffer: ReplayBuffer,
        *,
        generator: torch.Generator,
        n_step: int,
        gamma: float,
        random_steps: int,
    ) -> None:
        self._environment, self._policy, self._buffer = environment, policy, buffer
        self._generator = generator
        self._accumulator = NStepAccumulator(n_step, gamma, environment.num_envs)
        self._random_steps = random_steps
        self._obs: np.ndarray | None = None
        self._episodes: deque[tuple[float, int]] = deque(maxlen=EPISODES_AVERAGED)

    @property
    def num_envs(self) -> int:
        return self._environment.num_envs

    @property
    def at_episode_boundary(self) -> bool:
        """Whether every environment is at the start of an episode."""
        return self._obs is None or self._environment.at_episode_boundary()

    def step(self, global_step: int, progress: float) -> None:
        """One step of every environment; complete transitions go into the buffer."""
        if self._obs is None:
            self._obs = self._environment.reset()
            self._observe(self._obs)
        obs = self._obs
        actions = self._choose_actions(obs, global_step, progress)
        if not np.isfinite(actions).all():
            raise TrainingFault(
                f"the policy gave an action that is not finite at step {global_step}; "
                "a smaller learning_rate or max_grad_norm may help"
            )
        step = self._environment.step(actions)
        self._buffer.add(
            self._accumulator.add(
                obs, actions, step.reward, step.terminated, step.truncated, step.next_obs
            )
        )
        self._observe(step.next_obs)
        if step.episodes:
            self._observe(step.obs[step.terminated | step.truncated])
        self._obs = step.obs
        self._episodes.extend((end.episode_return, end.length) for end in step.episodes)

    def metrics(self) -> dict[str, float]:
        """Mean return and length of the newest episodes; empty before the first one ends."""
        if not self._episodes:
            return {}
        returns, lengths = zip(*self._episodes, strict=True)
        return {"ep_rew_mean": float(np.mean(returns)), "ep_len_mean": float(np.mean(lengths))}

    def state_dict(self) -> Json:
        """Everything that the next steps depend on, environments included."""
        return {
            "environment": self._snapshot(),
            "accumulator": Encoder().encode(self._accumulator.state_dict()),
            "episodes": [list(episode) for episode in self._episodes],
        }

    def load_state_dict(self, state: Json) -> None:
        if state["environment"] is not None:
            self._obs = self._environment.restore(state["environment"])
        # Environments that could not be captured start their episode again: nothing waits then.
        if not self.at_episode_boundary:
            self._accumulator.load_state_dict(Decoder().decode(state["accumulator"]))
        self._episodes.extend((float(ret), int(length)) for ret, length in state["episodes"])

    def _snapshot(self) -> Json | None:
        if self._obs is None:
            return None
        try:
            return self._environment.snapshot()
        except SnapshotUnsupported as problem:
            message = f"the environment cannot be captured, resuming starts it anew: {problem}"
            warnings.warn(message, stacklevel=2)
            return None

    def _observe(self, obs: np.ndarray) -> None:
        normalizer = self._policy.normalizer
        if normalizer is not None:
            normalizer.observe(torch.tensor(obs, device=self._generator.device))

    def _choose_actions(self, obs: np.ndarray, global_step: int, progress: float) -> np.ndarray:
        if global_step < self._random_steps:
            return self._random_actions()
        return self._policy.act(obs, explore=True, generator=self._generator, progress=progress)

    def _random_actions(self) -> np.ndarray:
        spaces, device = self._environment.spaces, self._generator.device
        if spaces.discrete:
            drawn = torch.randint(
                spaces.action_dim, (self.num_envs,), generator=self._generator, device=device
            )
        else:
            shape = (self.num_envs, spaces.action_dim)
            drawn = torch.rand(shape, generator=self._generator, device=device) * 2 - 1
        actions: np.ndarray = drawn.cpu().numpy()
        return actions
