"""Checks that a checkpoint is complete and that its sizes are plausible, before it is read.

What a file declares is compared with what other files contain: a few numbers in a JSON file must
not decide how much memory or time is spent.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from rl_training.checkpoints.format import (
    EPISODES,
    LEARNER,
    MODEL,
    POLICY,
    PRIORITIES,
    ROLLOUT,
    RUN_FOLDERS,
    SEGMENT,
    STATE,
    CheckpointReader,
    Shapes,
    frame_segment_name,
    replay_files,
    segment_name,
    segment_names,
    step_of,
)
from rl_training.data.replay_buffer import SEGMENT_ROWS
from rl_training.data.storage.frame_ring import segment_frames
from rl_training.data.storage.rows import RowColumns
from rl_training.data.storage.stacks import FrameLayout
from rl_training.errors import CheckpointError, MissingNetworksError, brief
from rl_training.execution.policy import Policy, PolicyDescription
from rl_training.models.recurrent import STATES
from rl_training.types import ActionSpec, Json, SpaceInfo

MODEL_FILES = (MODEL, POLICY)
EVALUATION_FILES = (*MODEL_FILES, STATE)
RUN_FILES = (LEARNER, MODEL, POLICY, STATE)
LEARNER_FACTOR, LEARNER_NUMBERS = 16, 2**22
"""The learner has at most this many numbers per number of the model, and this many besides"""
MAX_NAME = 1_000
"""Longest name of an environment"""
MAX_NUMBER = 2**20
"""Largest number of environments, steps or frames of a transition"""
MAX_SEGMENT_ROWS = max(SEGMENT_ROWS, 2**16)


def check_contents(reader: CheckpointReader, names: Iterable[str] | None = None) -> None:
    """Check a checkpoint or saved policy; verify the files in `names`, or all files if it is None.

    Raises `CheckpointError` if a file is missing, if a size is not plausible, or if a verified file
    is damaged.
    """
    reader.check_sizes()
    spaces = check_model(reader)
    if LEARNER in reader.files:
        _check_learner(reader)
    if STATE in reader.files:
        _check_run(reader, spaces, state_is_needed=names is None or STATE in set(names))
    # A saved policy has no state.
    wanted = reader.files if names is None else set(names) - ({STATE} - reader.files.keys())
    reader.verify(sorted(wanted))


def check_listed(reader: CheckpointReader) -> None:
    """Raise `CheckpointError` if the manifest does not list a required file.

    A checkpoint of a run needs its state and its learner; a saved policy has no state.
    """
    in_run = reader.folder.parent.name in RUN_FOLDERS and step_of(reader.folder) is not None
    is_policy = set(reader.files) <= {*MODEL_FILES, LEARNER}
    required = MODEL_FILES if is_policy and not in_run else RUN_FILES
    missing = [name for name in required if name not in reader.files]
    if missing:
        raise CheckpointError(
            f"{reader.folder}: {' and '.join(missing)} missing from the manifest, so the "
            "checkpoint is not complete"
        )


def check_model(reader: CheckpointReader) -> SpaceInfo:
    """Compare the sizes in `policy.json` with the tensors; return the spaces of the policy.

    The sizes of a user's networks are known only where these are given.
    """
    description, shapes = reader.json(POLICY), reader.shapes(MODEL)
    try:
        if description.get("environment"):
            check_environment_description(description["environment"])
        return Policy.untrained(description, shapes).spaces
    except MissingNetworksError:
        return PolicyDescription.of(description).spaces()
    except ValueError as error:
        raise CheckpointError(f"{reader.folder}: {brief(error)}") from None


def check_environment_description(environment: Any) -> None:
    """Raise `CheckpointError` if this does not describe the environment of a policy or a run."""
    kinds = {"id": str | None, "kwargs": dict | None, "label": str}
    if not isinstance(environment, dict) or not all(
        isinstance(value := environment.get(name), kind)
        and (not isinstance(value, str) or len(value) <= MAX_NAME)
        for name, kind in kinds.items()
    ):
        raise CheckpointError(f"{POLICY}: the description of the environment is damaged")


def _check_learner(reader: CheckpointReader) -> None:
    model, learner = (_numbers(reader.shapes(name)) for name in (MODEL, LEARNER))
    if learner > LEARNER_FACTOR * model + LEARNER_NUMBERS:
        raise CheckpointError(
            f"{reader.folder}: {LEARNER} has {learner:,} numbers, too many for a model of {model:,}"
        )


def _check_run(reader: CheckpointReader, spaces: SpaceInfo, *, state_is_needed: bool) -> None:
    try:
        state = reader.json(STATE)
    except CheckpointError:
        if state_is_needed:
            raise
        return  # a policy can be used without the state of its run
    _check_replay(reader, spaces, state)


def _check_replay(reader: CheckpointReader, spaces: SpaceInfo, state: Json) -> None:
    problem = f"{reader.folder}: the replay buffer is not complete"
    saved = state.get("replay")
    segments = segment_names(reader.files)
    if saved is None:
        if replay_files(reader.files):
            raise CheckpointError(f"{problem} ({STATE} does not describe it)")
        return
    filled, prioritized = _described_rows(reader, saved, state)
    if segments != [segment_name(index) for index in range(len(segments))]:
        raise CheckpointError(f"{problem} (replay segments are missing)")
    frames = saved_frame_layout(spaces, state)
    actions = saved_actions(spaces, state)
    others = keeps_returns(state), learns_from_rollouts(state), saved_memory(state)
    width = RowColumns(spaces.observation, actions, frames, *others).width
    _check_frames(reader, frames, saved, _capacity(state), problem)
    rows = 0
    for name in segments:
        shape = reader.shapes(name).get("rows", ())
        if len(shape) != 2 or shape[1] != width or not 0 < shape[0] <= MAX_SEGMENT_ROWS:
            raise CheckpointError(f"{problem} ({name} does not contain rows of {width} numbers)")
        rows += shape[0]
    if rows != filled:
        raise CheckpointError(
            f"{problem} (its segments have {rows:,} rows, but {filled:,} were saved)"
        )
    waits = repeats_with_goals(state) or keeps_returns(state)
    if waits and EPISODES not in reader.files:
        raise CheckpointError(f"{problem} ({EPISODES} is missing from the manifest)")
    if is_within_updates(state) and ROLLOUT not in reader.files:
        raise CheckpointError(f"{problem} ({ROLLOUT} is missing from the manifest)")
    if ROLLOUT in reader.files and _longest(reader.shapes(ROLLOUT)) != _capacity(state):
        raise CheckpointError(f"{problem} ({ROLLOUT} does not fit {_capacity(state):,} rows)")
    if prioritized and PRIORITIES not in reader.files:
        raise CheckpointError(f"{problem} ({PRIORITIES} is missing from the manifest)")
    if PRIORITIES in reader.files:
        shapes = reader.shapes(PRIORITIES)
        if shapes.get("level_0") != (filled,) or _numbers(shapes) > 4 * _capacity(state) + 2**16:
            raise CheckpointError(f"{problem} ({PRIORITIES} does not fit {filled:,} rows)")


def _check_frames(
    reader: CheckpointReader, layout: FrameLayout | None, saved: Json, capacity: int, problem: str
) -> None:
    """Check that all frames of each image are there."""
    stacks, added = () if layout is None else layout.stacks, saved.get("frames_added", [])
    if (
        not isinstance(added, list)
        or len(added) != len(stacks)
        or not all(type(number) is int and number >= 0 for number in added)
    ):
        raise CheckpointError(f"{problem} ({STATE} does not describe its frames)")
    listed = [name for name in replay_files(reader.files) if not SEGMENT.match(name)]
    expected: Shapes = {}
    for image, (stack, number) in enumerate(zip(stacks, added, strict=True)):
        assert layout is not None
        left, length = min(number, layout.ring_frames(stack, capacity)), segment_frames(stack)
        # No more files than are listed: a number in a file must not decide how many are looked for.
        for index in range(min(-(-left // length), len(listed) + 1)):
            shape = (min(length, left - index * length), stack.frame_bytes)
            expected[frame_segment_name(image, index)] = shape
    if sorted(expected) != listed:
        raise CheckpointError(f"{problem} (segments of frames are missing)")
    for name, needed in expected.items():
        if reader.shapes(name).get("frames") != needed:
            raise CheckpointError(f"{problem} ({name} does not contain {needed[0]:,} frames)")


def saved_frame_layout(spaces: SpaceInfo, state: Json) -> FrameLayout | None:
    """How the run that a state describes stores images; None: as they are."""
    replay = state.get("replay")
    if repeats_with_goals(state) and not (isinstance(replay, dict) and "frames_added" in replay):
        return None
    config = state["config"]
    if learns_from_rollouts(state):
        return None
    choice, num_envs = config.get("replay_frame_stack", "auto"), config.get("num_envs", 1)
    steps = _saved_number(config["algo_kwargs"].get("n_step", 1)), saved_chunk(state)
    _saved_number(num_envs)
    if choice != "auto":
        _saved_number(choice)
    return FrameLayout.of(spaces.observation, choice, num_envs, max(steps))


def saved_actions(spaces: SpaceInfo, state: Json) -> ActionSpec:
    """What an action is in the replay buffer of the run that a state describes."""
    chunk = saved_chunk(state)
    if chunk > 1 and not spaces.is_continuous:
        raise CheckpointError(f"{STATE}: the settings of the replay buffer are damaged")
    return spaces.actions.chunks_of(chunk)


def saved_chunk(state: Json) -> int:
    """How many actions the policy of the run that a state describes chooses at once."""
    return _saved_number(state["config"]["algo_kwargs"].get("action_chunk", 1))


def _saved_number(number: object) -> int:
    if type(number) is not int or not 1 <= number <= MAX_NUMBER:
        raise CheckpointError(f"{STATE}: the settings of the replay buffer are damaged")
    return number


def _described_rows(reader: CheckpointReader, saved: object, state: Json) -> tuple[int, bool]:
    """Return the number of saved rows, and whether they have priorities."""
    added = saved.get("rows_added") if isinstance(saved, dict) else None
    capacity = _capacity(state)
    if type(added) is not int or added < 0 or capacity < 1:
        raise CheckpointError(f"{reader.folder}: {STATE} does not describe the replay buffer")
    return min(added, capacity), state["config"]["algo_kwargs"].get("prioritized") is True


def repeats_with_goals(state: Json) -> bool:
    """Whether transitions also count with other goals, stored again or when they are sampled."""
    replay = state["config"].get("replay")
    return isinstance(replay, dict) and replay.get("hindsight") is not None


def keeps_returns(state: Json) -> bool:
    """Whether transitions are stored with their return, when their episode ends."""
    return "return_after_truncation" in state["config"]["algo_kwargs"]


def learns_from_rollouts(state: Json) -> bool:
    """Whether transitions are those of the newest rollout."""
    return "rollout_steps" in state["config"]["algo_kwargs"]


def saved_memory(state: Json) -> int:
    """How many numbers the recurrent policy of the run that a state describes remembers."""
    settings = state["config"]["algo_kwargs"]
    kind = settings.get("recurrent", "none")
    if not isinstance(kind, str) or kind not in STATES:
        raise CheckpointError(f"{STATE}: the settings of the replay buffer are damaged")
    return STATES[kind] * _saved_number(settings.get("recurrent_size", 1))


def is_within_updates(state: Json) -> bool:
    """Whether some of the updates on a rollout are left to a resumed run."""
    progress = state.get("progress")
    left = progress.get("updates_left") if isinstance(progress, dict) else 0
    return bool(left) and learns_from_rollouts(state)


def _capacity(state: Json) -> int:
    config = state.get("config")
    settings = config.get("algo_kwargs") if isinstance(config, dict) else None
    if not isinstance(config, dict) or not isinstance(settings, dict):
        return 0
    if learns_from_rollouts(state):
        return _saved_number(settings["rollout_steps"]) * _saved_number(config.get("num_envs", 1))
    capacity = settings.get("buffer_capacity")
    return capacity if type(capacity) is int else 0


def _longest(shapes: Shapes) -> int | None:
    """The length of the longest of some vectors; None if there are none, or others too."""
    if not all(len(shape) == 1 for shape in shapes.values()):
        return None
    return max((shape[0] for shape in shapes.values()), default=None)


def _numbers(shapes: Shapes) -> int:
    return sum(map(math.prod, shapes.values()))
