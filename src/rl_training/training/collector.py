"""Collects transitions: steps the environments with the current policies."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from rl_training.callbacks import LastStep, Stopwatch
from rl_training.data.hindsight.collected import EpisodeRelabeller
from rl_training.data.hindsight.returns import EpisodesWithReturns
from rl_training.data.n_step import NStepAccumulator, Transitions
from rl_training.data.replay_buffer import ReplayBuffer
from rl_training.data.rollouts.steps import RolloutSteps
from rl_training.data.transforms import ObservationNormalizer, ReturnScaler, RewardTransform
from rl_training.envs import SnapshotUnsupported, VectorEnvironment
from rl_training.envs.snapshots.codec import Decoder, Encoder
from rl_training.envs.vector.step_arrays import StepResult, all_finite, errors_in_values
from rl_training.errors import TrainingError, warn_user
from rl_training.execution.learner import Explorer
from rl_training.execution.open_loop import ActionQueue
from rl_training.types import Json

EPISODES_AVERAGED = 100
STEPS_AVERAGED = 1_000

Episode = tuple[float, int, bool | None]
"""Return and length of an episode, and whether it was a success, if the environment says so"""


class CollectorContract(Protocol):
    """What the training loop, the runs and their checkpoints need of a collector.

    `Collector` describes the methods. `TensorCollector` does the same with worlds on the device.
    """

    @property
    def steps_per_round(self) -> int: ...
    def at_episode_boundary(self, seed_index: int = 0) -> bool: ...
    def retire(self, seed_index: int) -> None: ...
    def acts_at_random(self, global_step: int) -> bool: ...
    def begin(self, global_step: int, progress: float, updates: int = 0) -> None: ...
    def finish(self, global_step: int, updates: int = 0) -> dict[int, Exception]: ...
    def why_lost(self, seed_index: int = 0) -> str | None: ...
    def watch_for_stop(self, stopping: Callable[[], bool]) -> None: ...
    def metrics(self, seed_index: int = 0) -> dict[str, float]: ...
    def last_step(self, seed_index: int = 0) -> LastStep | None: ...
    def infos(self, seed_index: int = 0) -> tuple[Mapping[str, Any], ...]: ...
    def environment_of(self, seed_index: int = 0) -> Any: ...
    def state_dict(self, seed_index: int = 0) -> Json: ...
    def load_state_dict(self, state: Json, seed_index: int = 0) -> None: ...
    def unfinished_episodes(self, seed_index: int = 0) -> dict[str, np.ndarray]: ...
    def load_unfinished_episodes(
        self, state: Mapping[str, np.ndarray], seed_index: int = 0
    ) -> None: ...
    def wrapper_statistics(self, seed_index: int = 0) -> list[Json] | None: ...
    def give_wrapper_statistics(self, learned: list[Json], seed_index: int = 0) -> None: ...


class Collector:
    """Steps the environments of all seeds together and fills the replay buffers.

    The first `random_steps` actions are uniformly random.
    """

    def __init__(
        self,
        environment: VectorEnvironment,
        explorers: Sequence[Explorer],
        replays: Sequence[ReplayBuffer],
        *,
        n_step: int,
        gamma: float,
        random_steps: int,
        action_chunk: int = 1,
        normalizers: Sequence[ObservationNormalizer] = (),
        rewards: RewardTransform | None = None,
        scalers: Sequence[ReturnScaler] = (),
        relabeller: EpisodeRelabeller | None = None,
        with_returns: EpisodesWithReturns | None = None,
        rollout_steps: RolloutSteps | None = None,
        stopwatch: Stopwatch | None = None,
    ) -> None:
        """One explorer and replay buffer per program; one normalizer and scaler, if any, per seed.

        With a `relabeller`, the transitions of each episode are stored again with other goals when
        it ends. `with_returns` gives transitions the return of their episode: they are stored when
        it ends. With `rollout_steps`, the buffers are filled with rollouts. With an `action_chunk`,
        policies choose that many actions at once, and transitions span `n_step` = `action_chunk`
        steps.
        """
        self._environment = environment
        self._explorers, self._replays = list(explorers), list(replays)
        self._sizes = [explorer.num_seeds for explorer in explorers]
        self._fills_rollouts = rollout_steps is not None
        self._remembers = explorers[0].remembered is not None
        self._normalizers, self._scalers = normalizers, scalers
        self._rewards = None if rewards == RewardTransform() else rewards
        self._with_returns = with_returns
        self._accumulator = (
            with_returns
            or rollout_steps
            or NStepAccumulator(n_step, gamma, environment.total_envs, chunks=action_chunk > 1)
        )
        self._action_chunk, self._queue = action_chunk, None
        if action_chunk > 1:
            size = environment.total_envs, environment.spaces.action_dim
            self._queue = ActionQueue(action_chunk, *size)
        self._warned_of_short_episodes = False
        self._relabeller = relabeller
        self._random_steps = random_steps
        self._stopwatch = stopwatch or Stopwatch()
        self._obs: np.ndarray | None = None
        self._actions: np.ndarray | None = None
        self._begun: np.ndarray | None = None
        """The actions of the last step, with which some environments may still be busy"""
        self._errors: dict[int, Exception] = {}
        self._active: np.ndarray | None = None
        self._last_step: StepResult | None = None
        self._episodes: list[deque[Episode]] = [
            deque(maxlen=EPISODES_AVERAGED) for _ in range(environment.num_seeds)
        ]
        self._lost_episodes = [0] * environment.num_seeds
        self._ages = PolicyAges(environment) if environment.steps_some else None

    @property
    def num_envs(self) -> int:
        """Number of environments per seed."""
        return self._environment.num_envs

    @property
    def steps_per_round(self) -> int:
        """Number of steps of each seed that one `step` completes."""
        return self._environment.steps_per_round

    def at_episode_boundary(self, seed_index: int = 0) -> bool:
        """Whether all environments of the seed are at the start of an episode."""
        return self._obs is None or self._environment.at_episode_boundary(seed_index)

    def retire(self, seed_index: int) -> None:
        """Stop stepping the environments of this seed."""
        if self._active is None:
            self._active = np.ones(self._environment.num_seeds, dtype=np.bool_)
        self._active[seed_index] = False

    def step(self, global_step: int, progress: float) -> dict[int, Exception]:
        """Step every environment once and store the complete transitions."""
        self.begin(global_step, progress)
        return self.finish(global_step)

    def acts_at_random(self, global_step: int) -> bool:
        """Whether the actions of this step are uniformly random, without the policy."""
        return global_step < self._random_steps

    def begin(self, global_step: int, progress: float, updates: int = 0) -> None:
        """Start computing the next actions; `updates` is how many were made so far."""
        self._stopwatch.start()
        if self._obs is None:
            self._start_episodes()
            assert self._obs is not None
            self._stopwatch.stop("environments")
        if self._ages is not None:
            self._ages.choose(updates)
        # Updates launched from here on run after the actions on the device.
        at_random, first = self.acts_at_random(global_step), 0
        for explorer, size in zip(self._explorers, self._sizes, strict=True):
            last = first + size * self.num_envs
            idle = self._queue is not None and not self._need_actions()[first:last].any()
            explorer.begin(self._obs[first:last], progress, at_random=at_random, idle=idle)
            first = last
        self._stopwatch.stop("acting")
        if all(explorer.has_chosen for explorer in self._explorers):
            self._act(global_step)  # worker processes can then run during updates

    def _need_actions(self) -> np.ndarray:
        """Mask of the environments whose policy has to choose a new chunk of actions."""
        assert self._queue is not None
        active = self._active_environments()
        return self._queue.is_empty if active is None else self._queue.is_empty & active

    def _start_episodes(self) -> None:
        seed_indices = range(self._environment.num_seeds)
        self._obs, errors = self._environment.try_reset(seed_indices)
        self._take_errors(errors)
        active = self._active_environments()
        self._observe(self._obs, slice(None) if active is None else active)

    def _active_environments(self) -> np.ndarray | None:
        """Mask of the environments that are stepped; None for all."""
        return None if self._active is None else np.repeat(self._active, self.num_envs)

    def finish(self, global_step: int, updates: int = 0) -> dict[int, Exception]:
        """Finish the step and store its transitions; return the errors by seed index.

        `updates` is how many were made so far. A seed with an error is not stepped again.
        """
        self._stopwatch.start()
        if self._actions is None:
            self._act(global_step)
        assert self._obs is not None
        assert self._actions is not None
        step = self._environment.finish()
        self._stopwatch.stop("environments")
        self._take_errors(step.errors)
        self._store(self._obs, self._actions, step)
        if self._ages is not None:
            self._ages.record(step, updates)
        self._stopwatch.stop("sampling")
        self._begun, self._obs, self._actions = self._actions, step.obs, None
        self._last_step = step
        errors, self._errors = self._errors, {}
        return errors

    def _act(self, global_step: int) -> None:
        chosen, busy = [explorer.finish() for explorer in self._explorers], self._environment.busy()
        if self._queue is None or self.acts_at_random(global_step):
            known = [actions for actions in chosen if actions is not None]
            self._actions = known[0] if len(known) == 1 else np.concatenate(known)
        else:
            self._actions = self._next_of_chunks(self._queue, chosen, busy)
        if busy is not None and self._begun is not None:
            self._actions[busy] = self._begun[busy]
        self._take_errors(self._action_errors(self._actions, global_step))
        self._stopwatch.stop("acting")
        self._environment.start(self._actions, self._active)
        self._stopwatch.stop("environments")

    def _next_of_chunks(
        self, queue: ActionQueue, chosen: list[np.ndarray | None], busy: np.ndarray | None
    ) -> np.ndarray:
        """Hand out the new chunks and return the next action of each environment."""
        first, ready = 0, None if busy is None else ~busy
        for chunks, size in zip(chosen, self._sizes, strict=True):
            if chunks is not None:
                queue.fill(chunks, first, ready)
            first += size * self.num_envs
        return queue.take(ready)

    def _take_errors(self, errors: Mapping[int, Exception]) -> None:
        for seed_index, error in errors.items():
            self._errors[seed_index] = error
            self.retire(seed_index)

    def _action_errors(self, actions: np.ndarray, global_step: int) -> dict[int, TrainingError]:
        if all_finite(actions):
            return {}
        finite = np.isfinite(actions).reshape(self._environment.num_seeds, -1).all(axis=1)
        if self._active is not None:
            finite |= ~self._active
        error = TrainingError(f"an action of the policy is not finite at step {global_step:,}")
        return {int(seed_index): error for seed_index in np.flatnonzero(~finite)}

    def _store(self, obs: np.ndarray, actions: np.ndarray, step: StepResult) -> None:
        active, ended = self._active_environments(), step.terminated | step.truncated
        started = ended
        if step.stepped is not None:
            active = step.stepped if active is None else active & step.stepped
        if step.lost is not None:
            self._count_losses(step.lost)
            has_started = step.lost if step.abandoned is None else step.lost & ~step.abandoned
            started = started | has_started
            active = ~step.lost if active is None else active & ~step.lost
        with np.errstate(over="ignore", invalid="ignore"):  # checked below
            reward = step.reward if self._rewards is None else self._rewards(step.reward)
            rows, environments = self._accumulator.add(
                obs, actions, reward, step.terminated, step.truncated, step.next_obs, active
            )
        if self._remembers:
            rows = self._with_memory(rows)
        is_summed = rows.reward is not reward
        if (
            not all_finite(reward)
            or (is_summed and not all_finite(rows.reward))
            or (rows.returns is not None and not all_finite(rows.returns))
        ):
            rows, environments = self._refuse_overflows(step.reward, reward, rows, environments)
        self._add_to_replay(rows, environments, ended)
        if self._scalers:
            self._observe_returns(reward, ended, step.lost, active)
        if self._relabeller is not None:
            self._relabel(self._relabeller, obs, actions, reward, step, active)
        self._observe(step.next_obs, slice(None) if active is None else active)
        if step.episodes or step.lost is not None:
            self._observe(step.obs, started)
        if self._queue is not None:
            self._queue.discard(started)
            self._warn_of_short_episodes(step)
        for end in step.episodes:
            episode = end.episode_return, end.length, end.success
            self._episodes[end.env_index // self.num_envs].append(episode)

    def _with_memory(self, rows: Transitions) -> Transitions:
        """Add what recurrent policies remembered to the rows of a rollout, and remember the step.

        An episode begins after every row that says that its own ended, or that it was lost.
        """
        parts = [explorer.remembered for explorer in self._explorers]
        known = [part.copy() for part in parts if part is not None]
        assert rows.ended is not None, "recurrent policies learn from rollouts"
        first = 0
        for explorer, part in zip(self._explorers, known, strict=True):
            last = first + len(part)
            explorer.move_on(rows.ended[first:last] > 0)
            first = last
        return rows._replace(memory=np.concatenate(known))

    def _observe_returns(
        self,
        reward: np.ndarray,
        ended: np.ndarray,
        lost: np.ndarray | None,
        active: np.ndarray | None,
    ) -> None:
        """Update the return statistics of each seed."""
        chosen = active
        if not all_finite(reward):
            chosen = np.isfinite(reward) if active is None else active & np.isfinite(reward)
        for seed_index, scaler in enumerate(self._scalers):
            rows = self._environments_of(seed_index)
            its = None if chosen is None or chosen[rows].all() else chosen[rows]
            scaler.observe(reward[rows], ended[rows], its)
            if lost is not None:
                scaler.drop(lost[rows])

    def _warn_of_short_episodes(self, step: StepResult) -> None:
        """Warn once of an episode that is too short to be learned from."""
        for end in step.episodes:
            short = end.length < self._action_chunk and not step.terminated[end.env_index]
            if short and not self._warned_of_short_episodes:
                self._warned_of_short_episodes = True
                warn_user(
                    f"an episode was truncated after {end.length} steps, fewer than action_chunk = "
                    f"{self._action_chunk}; nothing is learned from such episodes"
                )

    def _relabel(
        self,
        relabeller: EpisodeRelabeller,
        obs: np.ndarray,
        actions: np.ndarray,
        reward: np.ndarray,
        step: StepResult,
        active: np.ndarray | None,
    ) -> None:
        """Store the transitions of the episodes that ended with other goals."""
        found, errors = relabeller.add(
            obs, actions, reward, step.terminated, step.truncated, step.next_obs, active
        )
        self._take_errors(errors)
        for index, rows in found:
            self._add_to_replay(rows, np.full(len(rows.reward), index))

    def _count_losses(self, lost: np.ndarray) -> None:
        self._accumulator.drop(lost)
        if self._queue is not None:
            self._queue.discard(lost)
        if self._relabeller is not None:
            self._relabeller.drop(lost)
        for index in np.flatnonzero(lost).tolist():
            self._lost_episodes[index // self.num_envs] += 1
            if not self._fills_rollouts:  # a rollout gets a row that says which episode was lost
                self._interrupt(index // self.num_envs)

    def _interrupt(self, seed_index: int) -> None:
        """Tell the replay buffer of a seed that its next rows do not continue its episodes."""
        self._replays[self._program_of(seed_index)].interrupt(seed_index)

    def _program_of(self, seed_index: int) -> int:
        """The position of the explorer and the replay buffer of a seed."""
        return int(np.searchsorted(np.cumsum(self._sizes), seed_index, side="right"))

    def why_lost(self, seed_index: int = 0) -> str | None:
        """Why a seed lost an episode in this process; None if it lost none."""
        return self._environment.why_lost(seed_index)

    def watch_for_stop(self, stopping: Callable[[], bool]) -> None:
        """Once `stopping` returns True, wait only a few seconds for environments that hang."""
        self._environment.watch_for_stop(stopping)

    def _refuse_overflows(
        self,
        original: np.ndarray,
        reward: np.ndarray,
        rows: Transitions,
        environments: np.ndarray | None,
    ) -> tuple[Transitions, np.ndarray]:
        """Return the rows of the other seeds, if scaled rewards or their n-step sums overflow."""
        if environments is None:
            environments = np.arange(len(reward))
        overflows = ~np.isfinite(rows.reward)
        if rows.returns is not None:
            overflows |= ~np.isfinite(rows.returns)
        values = reward.copy()
        values[environments[overflows]] = np.inf
        what = "reward, after scaling or n-step summation,"
        self._take_errors(errors_in_values(what, values, original, self.num_envs))
        assert self._active is not None
        kept = self._active[environments // self.num_envs]
        return rows.select(kept), environments[kept]

    def _add_to_replay(
        self,
        rows: Transitions,
        environments: np.ndarray | None,
        ended: np.ndarray | None = None,
    ) -> None:
        """Add rows to the buffers of their seeds; `ended` says which environments' episodes did."""
        first = 0
        for replay, size in zip(self._replays, self._sizes, strict=True):
            last = first + size * self.num_envs
            if environments is None and len(self._replays) == 1:
                replay.add(rows, ended=ended)
            elif environments is None:
                its: slice | np.ndarray = slice(first, last)
                replay.add(rows.select(its), ended=None if ended is None else ended[its])
            else:
                its = (environments >= first) & (environments < last)
                of_rows = environments[its]
                replay.add(
                    rows.select(its),
                    of_rows // self.num_envs,
                    ended=None if ended is None else ended[of_rows],
                )
            first = last

    def metrics(self, seed_index: int = 0) -> dict[str, float]:
        """Means over the latest episodes; empty until an episode has ended.

        `ep_rew_last` is the return of the last episode alone, which does not lag behind.
        `success_rate` is left out if the environment's infos have no `is_success` or `success`,
        and `lost_episodes` if no episode was lost with its worker process. The age of the policy is
        only measured if environments may be busy for several steps.
        """
        lost = self._lost_episodes[seed_index]
        counted = {"lost_episodes": float(lost)} if lost else {}
        if self._ages is not None:
            counted |= self._ages.metrics(seed_index)
        if not self._episodes[seed_index]:
            return counted
        returns, lengths, successes = zip(*self._episodes[seed_index], strict=True)
        found = {
            "ep_rew_mean": float(np.mean(returns)),
            "ep_len_mean": float(np.mean(lengths)),
            "ep_rew_last": float(returns[-1]),
        }
        known = [success for success in successes if success is not None]
        rate = {"success_rate": float(np.mean(known))} if known else {}
        return found | rate | counted

    def last_step(self, seed_index: int = 0) -> LastStep | None:
        """The last step of a seed's environments; None before the first one of this process."""
        step, rows = self._last_step, self._environments_of(seed_index)
        if step is None:
            return None
        return LastStep(
            observations=self._environment.spaces.observation.arrays_of(step.obs[rows].copy()),
            actions=self._environment.last_actions(seed_index),
            rewards=step.reward[rows].copy(),
            terminations=step.terminated[rows].copy(),
            truncations=step.truncated[rows].copy(),
        )

    def infos(self, seed_index: int = 0) -> tuple[Mapping[str, Any], ...]:
        """The infos of the last step of a seed's environments."""
        return tuple(self._environment.infos(seed_index))

    def environment_of(self, seed_index: int = 0) -> Any:
        """The environment of a seed, or a list of several; None if worker processes have them."""
        found = self._environment.environments(seed_index)
        return found[0] if found is not None and len(found) == 1 else found

    def state_dict(self, seed_index: int = 0) -> Json:
        """The state that the next steps of a seed depend on, including its environments."""
        lost = self._lost_episodes[seed_index]
        return {
            "environment": self._snapshot(seed_index),
            "accumulator": Encoder().encode(self._waiting_steps(seed_index)),
            "episodes": [_encode(episode) for episode in self._episodes[seed_index]],
            **({"lost_episodes": lost} if lost else {}),
            **self._encoded_returns(seed_index),
            **self._encoded_chunks(seed_index),
        }

    def _encoded_chunks(self, seed_index: int) -> Json:
        """The actions that a seed's environments still have to execute; empty without chunks."""
        if self._queue is None:
            return {}
        return {
            "chunks": Encoder().encode(self._queue.state_dict(self._environments_of(seed_index)))
        }

    def _encoded_returns(self, seed_index: int) -> Json:
        if not self._scalers:
            return {}
        return {"returns": Encoder().encode(self._scalers[seed_index].state)}

    def load_state_dict(self, state: Json, seed_index: int = 0) -> None:
        rows = self._environments_of(seed_index)
        if state["environment"] is not None:
            if self._obs is None:
                shape = (self._environment.total_envs, self._environment.spaces.obs_dim)
                self._obs = np.zeros(shape, dtype=np.float32)
            self._obs[rows] = self._environment.restore(state["environment"], seed_index)
        # Environments without a snapshot restart their episode, so no n-step rewards are pending,
        # no actions of a chunk, and nothing is remembered.
        if self.at_episode_boundary(seed_index):
            self._interrupt(seed_index)
            self._explorers[self._program_of(seed_index)].forget(seed_index)
        elif self._with_returns is None:
            self._accumulator.load_state_dict(Decoder().decode(state["accumulator"]), rows)
            if self._queue is not None:
                self._queue.load_state_dict(Decoder().decode(state["chunks"]), rows)
        self._episodes[seed_index].extend(_decode(*values) for values in state["episodes"])
        self._lost_episodes[seed_index] = int(state.get("lost_episodes", 0))
        if self._scalers:
            self._scalers[seed_index].load_state(Decoder().decode(state["returns"]))
            if state["environment"] is None:
                self._scalers[seed_index].drop(np.ones(self.num_envs, np.bool_))

    def _waiting_steps(self, seed_index: int) -> dict[str, np.ndarray]:
        """The steps that wait for their n-th reward; entire episodes are saved separately."""
        if self._with_returns is not None:
            return {}
        return self._accumulator.state_dict(self._environments_of(seed_index))

    def unfinished_episodes(self, seed_index: int = 0) -> dict[str, np.ndarray]:
        """The steps that wait for the end of their episode; empty if none ever do."""
        if self._with_returns is not None:
            return self._with_returns.state_dict(self._environments_of(seed_index))
        return {} if self._relabeller is None else self._relabeller.state_dict(seed_index)

    def load_unfinished_episodes(
        self, state: Mapping[str, np.ndarray], seed_index: int = 0
    ) -> None:
        """Restore what `unfinished_episodes` returned, after `load_state_dict`."""
        restarts = self.at_episode_boundary(seed_index)
        if self._with_returns is not None and not restarts:
            self._with_returns.load_state_dict(state, self._environments_of(seed_index))
        if self._relabeller is not None:
            self._relabeller.load_state_dict(state, seed_index, restarts=restarts)

    def _environments_of(self, seed_index: int) -> slice:
        return slice(seed_index * self.num_envs, (seed_index + 1) * self.num_envs)

    def _snapshot(self, seed_index: int) -> Json | None:
        if self._obs is None:
            return None
        try:
            return self._environment.snapshot(seed_index)
        except SnapshotUnsupported as problem:
            message = f"the environment cannot be captured; resuming restarts it: {problem}"
            warn_user(message)
            return None

    def wrapper_statistics(self, seed_index: int = 0) -> list[Json] | None:
        """The statistics of the wrappers of the seed's first environment."""
        try:
            return self._environment.wrapper_statistics(seed_index) or None
        except SnapshotUnsupported as problem:
            message = f"evaluation cannot use the statistics of wrappers: {problem}"
            warn_user(message)
            return None

    def give_wrapper_statistics(self, learned: list[Json], seed_index: int = 0) -> None:
        """Set the statistics of the wrappers of the seed's environments."""
        self._environment.give_statistics(learned, seed_index)

    def _observe(self, obs: np.ndarray, chosen: slice | np.ndarray) -> None:
        """Update the normalizer of each seed with the observations of the chosen environments."""
        if not self._normalizers:
            return
        picked = np.zeros(len(obs), dtype=np.bool_)
        picked[chosen] = True
        for seed_index, normalizer in enumerate(self._normalizers):
            rows = obs[self._environments_of(seed_index)][picked[self._environments_of(seed_index)]]
            if len(rows):
                normalizer.observe(torch.tensor(rows))


class PolicyAges:
    """How many updates old the policy was that chose the actions of stored transitions.

    The age counts the updates between the choice of an action and the storing of its transition.
    """

    def __init__(self, environment: VectorEnvironment) -> None:
        self._environment = environment
        self._chosen_after = np.zeros(environment.total_envs, np.int64)
        self._latest: list[deque[int]] = [
            deque(maxlen=STEPS_AVERAGED) for _ in range(environment.num_seeds)
        ]

    def choose(self, updates: int) -> None:
        """The actions of all environments that are not busy are chosen after these updates."""
        busy = self._environment.busy()
        self._chosen_after[slice(None) if busy is None else ~busy] = updates

    def record(self, step: StepResult, updates: int) -> None:
        """The transitions of this step are stored after these updates."""
        assert step.stepped is not None
        stored = step.stepped if step.lost is None else step.stepped & ~step.lost
        for index in np.flatnonzero(stored):
            age = updates - int(self._chosen_after[index])
            self._latest[index // self._environment.num_envs].append(age)

    def metrics(self, seed_index: int) -> dict[str, float]:
        """Mean and maximum over the latest steps; empty before the first one."""
        ages = self._latest[seed_index]
        if not ages:
            return {}
        return {"policy_age_mean": float(np.mean(ages)), "policy_age_max": float(max(ages))}


def _encode(episode: Episode) -> list[float | int | bool]:
    """Leave out an unknown success, as in the checkpoints of earlier versions."""
    return [value for value in episode if value is not None]


def _decode(episode_return: float, length: int, success: bool | None = None) -> Episode:
    return float(episode_return), int(length), None if success is None else bool(success)
