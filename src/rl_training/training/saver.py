"""Writes the complete state of a run to a checkpoint, and restores it."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Annotated

from pydantic import Field

from rl_training.callbacks import Progress
from rl_training.checkpoints.format import (
    LEARNER,
    MODEL,
    POLICY,
    PRIORITIES,
    STATE,
    CheckpointReader,
    Content,
    segment_name,
    step_folder_name,
    write_checkpoint,
)
from rl_training.checkpoints.run_folder import RunFolder, package_versions
from rl_training.data.replay_buffer import ReplayBuffer
from rl_training.errors import CheckpointError, brief, warn_user
from rl_training.evaluation.evaluator import Evaluation
from rl_training.execution.random_streams import RandomPool, global_state, set_global_state
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
    schedule_timesteps: int
    planned_updates: int
    width: Annotated[int, Field(ge=1, le=1024)]
    """Number of slots of the program that trains this run"""
    slot: Annotated[int, Field(ge=0)]


class CheckpointSaver:
    """Writes checkpoints of a seed's run to its run folder."""

    def __init__(
        self,
        folder: RunFolder,
        description: RunDescription,
        replay: ReplayBuffer | None,
        streams: dict[str, RandomPool],
    ) -> None:
        self._folder, self._description = folder, description
        self._replay, self._streams = replay, streams
        self._previous: CheckpointReader | None = None
        self._previous_rows = 0
        self.saved_progress = Progress()
        """Progress of the latest checkpoint that this process wrote or started from"""
        self._failures = 0
        self._best_to_mark: tuple[int, float] | None = None

    def save(self, run: SeedRun, *, best: bool) -> None:
        """Save a checkpoint and optionally mark it as the best.

        A failed write is a warning; after `MAX_FAILURES` in a row, or at the end, it is an error.
        """
        step = run.progress.position
        destination = self._folder.checkpoints / step_folder_name(step)
        if best and run.evaluation is not None:
            self._best_to_mark = (step, run.evaluation.metrics["eval_return_mean"])
        try:
            if not self._is_saved(run, destination):
                write_checkpoint(destination, self._contents(run))
                self._remember(run, CheckpointReader(destination))
            if self._best_to_mark is not None:
                self._mark_best()
        except OSError as error:
            self._failures += 1
            if self._failures >= MAX_FAILURES or run.progress.should_stop:
                raise
            warn_user(f"checkpoint not written, training continues: {error}")
            return
        self._failures = 0
        self._folder.prune()

    def _is_saved(self, run: SeedRun, destination: Path) -> bool:
        """Whether the latest checkpoint has this step, all its updates and the end of the run.

        A signal can end a block of updates, which a resumed run completes at the same step.
        """
        saved, current = self.saved_progress, run.progress
        return (
            self.latest == destination
            and saved.gradient_steps == current.gradient_steps
            and (saved.stop_reason in FINISHED or current.stop_reason not in FINISHED)
        )

    def mark_if_best(self, run: SeedRun) -> None:
        """Mark the restored checkpoint as the best if a crash prevented that."""
        step, evaluation = run.progress.position, run.evaluation
        if evaluation is None or run.progress.evaluated_at != step:
            return
        value, best = evaluation.metrics["eval_return_mean"], self.best_return()
        if best is None or value > best:
            self._folder.mark_best(step, value)

    def _mark_best(self) -> None:
        assert self._best_to_mark is not None
        step, value = self._best_to_mark
        if (self._folder.checkpoints / step_folder_name(step)).is_dir():
            self._folder.mark_best(step, value)
        self._best_to_mark = None

    def best_return(self) -> float | None:
        best = self._folder.best() if self._folder.best_checkpoint() else None
        return None if best is None else float(best["eval_return_mean"])

    def describe_resume_level(self, level: ResumeLevel) -> None:
        """State this level in `metadata.json` and in later checkpoints."""
        self._description = self._description.model_copy(update={"resume_level": level.value})
        try:
            self._folder.write_metadata(**metadata(self._description))
        except OSError as error:
            warn_user(f"metadata.json not written, training continues: {error}")

    @property
    def latest(self) -> Path | None:
        """The latest checkpoint that this process wrote or started from."""
        return None if self._previous is None else self._previous.folder

    def restore(self, run: SeedRun, reader: CheckpointReader) -> None:
        """Restore the run from a checkpoint."""
        state = reader.json(STATE)
        try:
            _load_learner(run, reader, state)
            if self._replay is not None:
                self._load_replay(run, reader, state["replay"])
            for name, pool in self._streams.items():
                pool.load_state_dict(state["streams"][name], self._description.slot)
            if run.collector is not None:
                run.return_wrapper_statistics()
                run.collector.load_state_dict(state["collector"], run.seed_index)
            run.load_callback_states(state["callbacks"])
            run.progress = Progress(**state["progress"])
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
            self._remember(run, reader)

    def _remember(self, run: SeedRun, reader: CheckpointReader) -> None:
        self._previous, self.saved_progress = reader, dataclasses.replace(run.progress)
        self._previous_rows = 0 if self._replay is None else self._replay.rows_added(run.seed_index)

    def _contents(self, run: SeedRun) -> dict[str, Content]:
        tensors = run.policy.tensors()
        run.describe_wrappers()
        contents: dict[str, Content] = {
            POLICY: policy_description(run.policy.describe(), self._description.environment),
            MODEL: tensors,
            LEARNER: _learner_tensors(run),
        }
        contents |= self._replay_contents(run)
        collected = run.collector and run.collector.state_dict(run.seed_index)
        run.notice_losses()  # before the level is stated: a worker may be lost while it is captured
        contents[STATE] = {
            **self._description.model_dump(),
            "versions": package_versions(),
            "progress": run.progress.to_json(),
            "replay": self._replay_counters(run),
            "streams": {
                name: pool.state_dict(self._description.slot)
                for name, pool in self._streams.items()
            },
            "global_streams": global_state(),
            "collector": collected,
            "callbacks": run.callback_states(),
            "evaluation": run.evaluation and run.evaluation.to_json(),
            "train_metrics": _finite(run.shared.learner.metrics(run.seed_index)),
        }
        return contents

    def _replay_counters(self, run: SeedRun) -> Json | None:
        if self._replay is None:
            return None
        return {"rows_added": self._replay.rows_added(run.seed_index)}

    def _replay_contents(self, run: SeedRun) -> dict[str, Content]:
        """Replay rows as segments; unchanged segments are hard links to the previous checkpoint."""
        contents: dict[str, Content] = {}
        if self._replay is None:
            return contents
        since = None if self._previous is None else self._previous_rows
        for index, rows, changed in self._replay.segments(since, run.seed_index):
            name = segment_name(index)
            if self._previous is not None and not changed and self._previous.has(name):
                contents[name] = self._previous.link(name)
            else:
                contents[name] = {"rows": rows}
        priorities = self._replay.priority_state(run.seed_index)
        return contents | ({PRIORITIES: priorities} if priorities else {})

    def _load_replay(self, run: SeedRun, reader: CheckpointReader, saved: Json) -> None:
        assert self._replay is not None
        names = sorted(name for name in reader.files if name.startswith("replay-"))
        if names != [segment_name(index) for index in range(len(names))]:
            raise CheckpointError(f"{reader.folder}: replay segments are missing")
        segments = [reader.tensors(name)["rows"] for name in names]
        self._replay.load_segments(segments, int(saved["rows_added"]), run.seed_index)
        if PRIORITIES in reader.files:
            self._replay.load_priority_state(reader.tensors(PRIORITIES), run.seed_index)


def metadata(description: RunDescription) -> Json:
    """What `metadata.json` says about a run, apart from the machine."""
    return {
        "environment": description.environment,
        "execution": description.execution,
        "resume_level": description.resume_level,
    }


def policy_description(policy: Json, environment: Json) -> Json:
    """The contents of `policy.json`."""
    return {**policy, "environment": environment}


def _learner_tensors(run: SeedRun) -> State:
    """The learned state outside the policy: targets, moments, temperature, counters."""
    algorithm = run.policy.algorithm
    return {k: v for k, v in algorithm.state.items() if k not in algorithm.networks()}


def _load_learner(run: SeedRun, reader: CheckpointReader, state: Json) -> None:
    algorithm = run.policy.algorithm
    run.policy.load_tensors(reader.tensors(MODEL))
    networks = {name: algorithm.state[name] for name in algorithm.networks()}
    algorithm.load_state({**reader.tensors(LEARNER), **networks})
    run.shared.learner.load_metrics(state["train_metrics"], run.seed_index)


def _finite(values: dict[str, float]) -> dict[str, float | None]:
    """Replace values that JSON cannot represent by None."""
    return {name: value if math.isfinite(value) else None for name, value in values.items()}
