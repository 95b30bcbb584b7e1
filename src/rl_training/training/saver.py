"""Writes the complete state of a run to a checkpoint, and restores it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import torch
from pydantic import Field

from rl_training.callbacks import Progress
from rl_training.checkpoints.format import (
    EPISODES,
    LEARNER,
    MODEL,
    POLICY,
    ROLLOUT,
    STATE,
    CheckpointReader,
    Content,
    checkpoint_folders,
    finite_or_none,
    replay_files,
    step_folder_name,
    step_of,
    write_checkpoint,
)
from rl_training.checkpoints.replay import (
    SavedReplay,
    load_replay,
    naming,
    replay_contents,
    replay_counters,
)
from rl_training.checkpoints.run_folder import RunFolder, package_versions
from rl_training.data.replay_buffer import ReplayBuffer
from rl_training.envs.snapshots.codec import Decoder, Encoder
from rl_training.errors import CheckpointError, brief, warn_user
from rl_training.evaluation.evaluator import Evaluation
from rl_training.execution.random_streams import RandomPool, global_state, set_global_state
from rl_training.training.collector import CollectorContract
from rl_training.training.seed_run import SeedRun
from rl_training.types import FINISHED, Json, ResumeLevel, State
from rl_training.validation import StrictModel

MAX_FAILURES = 3
"""Number of consecutive failed saves after which a run stops"""


class RunDescription(StrictModel):
    """How a run was set up. Resuming can only raise its total."""

    config: Json
    execution: Json
    environment: Json
    data: Json | None
    """Fingerprint of the recorded data, if any"""
    resume_level: str
    seed_every_reset: bool | None = None
    """Whether every episode starts from its own seed. None in files of earlier versions: unless
    the resume level is bit-exact"""
    schedule_timesteps: int
    planned_updates: int
    width: Annotated[int, Field(ge=1, le=1024)]
    """Number of slots of the program that trains this run"""
    slot: Annotated[int, Field(ge=0)]
    custom_networks: str | None = None
    """Name of the class of a user's networks, if the run has any"""

    @property
    def seeds_every_reset(self) -> bool:
        if self.seed_every_reset is None:
            return self.resume_level != ResumeLevel.BIT_EXACT
        return self.seed_every_reset


class CheckpointSaver:
    """Writes checkpoints of a seed's run to its run folder.

    Unchanged segments of the replay buffer are linked, not written again. They are linked to the
    second newest checkpoint, so that the two newest ones never share a file and damage to one of
    them leaves the other intact.
    """

    def __init__(
        self,
        folder: RunFolder,
        description: RunDescription,
        replay: ReplayBuffer | None,
        streams: dict[str, RandomPool],
    ) -> None:
        self._folder, self._description = folder, description
        self._replay, self._streams = replay, streams
        self._saves_replay = description.config.get("checkpoint_replay") != "none"
        self._newest: SavedReplay | None = None
        self._second_newest: SavedReplay | None = None
        self.saved_progress = Progress()
        """Progress of the latest checkpoint that this process wrote or started from"""
        self._failures = 0
        self._best_to_mark: tuple[int, float] | None = None
        self.best_checkpoint: Path | None = None
        self._best_return: float | None = None

    def save(self, run: SeedRun, *, best: bool) -> bool:
        """Save a checkpoint and optionally mark it as the best; return whether that succeeded.

        A failed write is a warning; after `MAX_FAILURES` in a row it is an error. The last
        checkpoint of a run is tried again at once.
        """
        step = run.progress.position
        if best and run.evaluation is not None:
            self._best_to_mark = (step, run.evaluation.metrics["eval_return_mean"])
        while not self._try_to_save(run):
            if not run.progress.should_stop:
                return False
        self._failures = 0
        self._folder.prune(self.best_checkpoint)
        return True

    def _try_to_save(self, run: SeedRun) -> bool:
        destination = self._destination(run)
        try:
            if not self._is_saved(run, destination):
                self._write(run, destination)
            if self._best_to_mark is not None:
                self._mark_best()
        except OSError as error:
            self._failures += 1
            if self._failures >= MAX_FAILURES:
                raise
            what_next = "trying again" if run.progress.should_stop else "training continues"
            warn_user(f"checkpoint not written, {what_next}: {error}")
            return False
        return True

    def _is_saved(self, run: SeedRun, destination: Path) -> bool:
        """Whether the latest checkpoint has this step with all that belongs to it.

        A signal can end a block of updates or an evaluation, which a resumed run completes at the
        same step. The last step of a run also has the reason of its end.
        """
        saved, current = self.saved_progress, run.progress
        return (
            self.latest == destination
            and saved.gradient_steps == current.gradient_steps
            and saved.evaluation_due <= current.evaluation_due
            and (saved.stop_reason in FINISHED or current.stop_reason not in FINISHED)
        )

    def _write(self, run: SeedRun, destination: Path) -> None:
        contents, is_new = self._contents(run), not destination.exists()
        try:
            manifest = write_checkpoint(destination, contents)
        except OSError:
            if is_new and destination.is_dir():  # complete; only the last flush failed
                self._remember(run, destination)
            raise
        self._remember(run, destination, manifest)
        self._folder.note_checkpoint()

    def mark_if_best(self, run: SeedRun) -> None:
        """Mark the restored checkpoint as the best if a crash prevented that."""
        step, evaluation = run.progress.position, run.evaluation
        if evaluation is None or run.progress.evaluated_at != step:
            return
        value = evaluation.metrics["eval_return_mean"]
        if self._best_return is None or value > self._best_return:
            self._best_to_mark = (step, value)
            try:
                self._mark_best()
            except OSError as error:
                warn_user(f"best checkpoint not marked, the next save tries again: {error}")

    def _mark_best(self) -> None:
        assert self._best_to_mark is not None
        step, value = self._best_to_mark
        folder = self._folder.checkpoints / step_folder_name(step)
        if folder.is_dir():
            # Known before it is written: no save removes it, and no worse one takes its place.
            self.best_checkpoint, self._best_return = folder, value
            self._folder.mark_best(step, value)
        self._best_to_mark = None

    def best_return(self) -> float | None:
        """Mean return of the best checkpoint. Kept in memory: a disk may fail for a while."""
        return self._best_return

    def _read_best(self) -> None:
        best, self.best_checkpoint = self._folder.best(), self._folder.best_checkpoint()
        if best is not None and self.best_checkpoint is not None:
            self._best_return = float(best["eval_return_mean"])

    def describe_loss(self, level: ResumeLevel) -> None:
        """State this level in `metadata.json` and in later checkpoints, after a lost episode."""
        changes = {"resume_level": level.value, "seed_every_reset": True}
        self._description = self._description.model_copy(update=changes)
        self._folder.write_metadata(self._description.model_dump())

    @property
    def environment(self) -> Json:
        """What the files say about the environment."""
        return self._description.environment

    @property
    def latest(self) -> Path | None:
        """The latest checkpoint that this process wrote or started from."""
        return None if self._newest is None else self._newest.reader.folder

    def restore(self, run: SeedRun, reader: CheckpointReader) -> None:
        """Restore the run from a checkpoint."""
        state = reader.json(STATE)
        try:
            _load_learner(run, reader, state)
            if self._replay is not None and self._saves_replay:
                load_replay(self._replay, reader, state["replay"], run.seed_index)
            _load_rollout(run, reader, self._description.slot)
            for name, pool in self._streams.items():
                pool.load_state_dict(state["streams"][name], self._description.slot)
            _load_exploration(run, state)
            if run.collector is not None:
                run.return_wrapper_statistics()
                run.collector.load_state_dict(state["collector"], run.seed_index)
                _load_episodes(run.collector, run.seed_index, reader)
            run.load_callback_states(state["callbacks"])
            run.progress = Progress(**state["progress"])
            if self._replay is not None and not self._saves_replay:
                run.refill_replay()
            saved = state["evaluation"]
            run.evaluation = None if saved is None else Evaluation.from_json(saved)
            set_global_state(state["global_streams"])
        except (
            ArithmeticError,
            AttributeError,
            LookupError,
            RuntimeError,
            TypeError,
            ValueError,
        ) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(
                f"{reader.folder}: does not match this run ({brief(error)})"
            ) from error
        if reader.folder.parent == self._folder.checkpoints:
            self._second_newest = self._older_than(reader)
            self._newest = SavedReplay.now(reader, self._replay, run.seed_index)
            self.saved_progress = dataclasses.replace(run.progress)
            self._read_best()

    def _remember(self, run: SeedRun, folder: Path, manifest: Json | None = None) -> None:
        """Remember the newest checkpoint, even if its save failed: its files are not shared."""
        neighbor, self._second_newest = self._neighbor_of(folder), None
        try:
            reader = CheckpointReader(folder, manifest)
            self._newest = SavedReplay.now(reader, self._replay, run.seed_index)
        except CheckpointError as error:
            raise OSError(str(error)) from error
        self._second_newest, self.saved_progress = neighbor, dataclasses.replace(run.progress)

    def _destination(self, run: SeedRun) -> Path:
        return self._folder.checkpoints / step_folder_name(run.progress.position)

    def _neighbor_of(self, destination: Path) -> SavedReplay | None:
        """The second newest checkpoint once `destination` is written, which may replace one."""
        return self._second_newest if self.latest == destination else self._newest

    def _older_than(self, reader: CheckpointReader) -> SavedReplay | None:
        """The newest checkpoint that is older than this one, if its replay segments are intact."""
        folders = checkpoint_folders(self._folder.checkpoints)
        step = step_of(reader.folder) or 0
        older = next((each for each in folders if (step_of(each) or 0) < step), None)
        if older is None or self._replay is None or not self._saves_replay:
            return None
        try:
            found = CheckpointReader(older)
            found.verify([STATE, *replay_files(found.files)])
            return SavedReplay.read(found, found.json(STATE)["replay"])
        except (CheckpointError, KeyError, TypeError, ValueError):
            return None  # all segments are then written again

    def _contents(self, run: SeedRun) -> dict[str, Content]:
        tensors = run.policy.tensors()
        run.describe_wrappers()
        contents: dict[str, Content] = {
            POLICY: policy_description(run.policy.describe(), self._description.environment),
            MODEL: tensors,
            LEARNER: _learner_tensors(run),
        }
        contents |= self._replay_contents(run)
        replay = self._replay if self._saves_replay else None
        collected = run.collector and run.collector.state_dict(run.seed_index)
        contents |= _episode_contents(run) | _rollout_contents(run, self._description.slot)
        run.notice_losses()  # before the level is stated: a worker may be lost while it is captured
        contents[STATE] = {
            **self._description.model_dump(),
            "versions": package_versions(),
            "progress": run.progress.to_json(),
            "replay": None if replay is None else replay_counters(replay, run.seed_index),
            "streams": {
                name: pool.state_dict(self._description.slot)
                for name, pool in self._streams.items()
            },
            "global_streams": global_state(),
            **_exploration_contents(run),
            "collector": collected,
            "callbacks": run.callback_states(),
            "evaluation": run.evaluation and run.evaluation.to_json(),
            "train_metrics": {
                name: finite_or_none(value)
                for name, value in run.shared.learner.metrics(run.seed_index).items()
            },
        }
        return contents

    def _replay_contents(self, run: SeedRun) -> dict[str, Content]:
        if self._replay is None or not self._saves_replay:
            return {}
        destination = self._destination(run)
        source = self._newest if self.latest == destination else self._second_newest
        neighbor = self._neighbor_of(destination)
        return replay_contents(self._replay, run.seed_index, source, neighbor)


def _episode_contents(run: SeedRun) -> dict[str, Content]:
    """The episodes that wait for their end, or worlds that are tensors, in the midst of theirs."""
    found = {} if run.collector is None else run.collector.unfinished_episodes(run.seed_index)
    return {EPISODES: {k: torch.from_numpy(v) for k, v in found.items()}} if found else {}


def _load_episodes(collector: CollectorContract, seed_index: int, reader: CheckpointReader) -> None:
    if EPISODES in reader.files:
        with naming(reader.folder / EPISODES):
            saved = {name: value.numpy() for name, value in reader.tensors(EPISODES).items()}
            collector.load_unfinished_episodes(saved, seed_index)


def _rollout_contents(run: SeedRun, slot: int) -> dict[str, Content]:
    """What the rest of a block of updates on a rollout needs; a stop can leave one unfinished."""
    rollouts = run.shared.learner.rollouts
    if rollouts is None or not run.progress.updates_left:
        return {}
    return {ROLLOUT: rollouts.state_dict(slot)}


def _load_rollout(run: SeedRun, reader: CheckpointReader, slot: int) -> None:
    rollouts = run.shared.learner.rollouts
    if rollouts is not None and ROLLOUT in reader.files:
        with naming(reader.folder / ROLLOUT):
            rollouts.load_state_dict(reader.tensors(ROLLOUT), slot)


def _exploration_contents(run: SeedRun) -> Json:
    """What exploration remembers from step to step."""
    explorer = run.shared.explorer
    memory = None if explorer is None else explorer.memory(run.seed_index)
    return {} if memory is None else {"exploration": Encoder().encode(memory)}


def _load_exploration(run: SeedRun, state: Json) -> None:
    explorer = run.shared.explorer
    if explorer is not None and explorer.memory(run.seed_index) is not None:
        explorer.load_memory(Decoder().decode(state["exploration"]), run.seed_index)


def policy_description(policy: Json, environment: Json) -> Json:
    """The contents of `policy.json`."""
    return {**policy, "environment": environment}


def _learner_tensors(run: SeedRun) -> State:
    """The learned state outside the policy: targets, moments, temperature, counters."""
    algorithm = run.policy.algorithm
    of_policy = algorithm.networks().keys() | algorithm.buffers().keys()
    return {k: v for k, v in algorithm.state.items() if k not in of_policy}


def _load_learner(run: SeedRun, reader: CheckpointReader, state: Json) -> None:
    algorithm = run.policy.algorithm
    run.policy.load_tensors(reader.tensors(MODEL))
    of_policy = algorithm.networks().keys() | algorithm.buffers().keys()
    loaded = {name: algorithm.state[name] for name in of_policy}
    algorithm.load_state({**reader.tensors(LEARNER), **loaded})
    run.shared.learner.load_metrics(state["train_metrics"], run.seed_index)
