"""Off-policy evaluation: estimate how good a policy is from recorded data only."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from rl_training.algorithms.hyperparameters import return_after_truncation
from rl_training.algorithms.spec import get_algorithm_spec
from rl_training.checkpoints.format import POLICY, STATE, CheckpointReader
from rl_training.checkpoints.loading import (
    load_policy,
    restore_learned,
    saved_factory,
    saved_keys,
)
from rl_training.data.leaves.description import LeafChoice
from rl_training.data.loading import DatasetPart, RewardOptions, load_dataset
from rl_training.data.offline_dataset import OfflineDataset
from rl_training.data.packing import fit_spaces
from rl_training.data.sections import (
    DataSection,
    PolicySection,
    RandomSection,
    as_list,
    read_sections,
)
from rl_training.data.transforms import RewardTransform
from rl_training.datasets.opening import (
    DatasetSource,
    check_sections,
    open_part,
    reward_options,
)
from rl_training.datasets.reading_progress import reading_progress
from rl_training.datasets.workflows import open_source
from rl_training.envs import EnvironmentSource
from rl_training.errors import CheckpointError, DataError, UserError
from rl_training.evaluation.diagnostics import (
    batches,
    missing_metrics,
    policy_metrics,
    validation_losses,
)
from rl_training.evaluation.evaluator import student_quantile
from rl_training.evaluation.fitted_q import ENSEMBLE_SIZE, FittedQ
from rl_training.execution.execution import one_thread
from rl_training.execution.policy import Policy
from rl_training.execution.random_streams import Stream, stream_generator, stream_seed
from rl_training.types import Json

HELD_OUT = 0.2
FQE_UPDATES = 10_000

EvaluationData = str | Path | DatasetSource | Sequence[DatasetSource]
"""A source as for `dataset info`, `dataset` sections, or arrays in memory"""

MEANINGS = {
    "ope_data_return_mean": "data, as recorded, undiscounted",
    "ope_data_value": "data, discounted, first states",
    "ope_fqe_value": "policy, fitted Q, first states",
    "ope_fqe_std": "std over resampled episodes",
    "ope_fqe_low": "95 % interval of ope_fqe_value,",
    "ope_fqe_high": "  does not include bias of the fit",
    "ope_fqe_td_error": "squared, of the fit, data's actions",
    "ope_q_mean": "critics, the data's actions",
    "ope_q_policy_mean": "critics, the policy's actions",
    "ope_q_gap": "the policy's actions minus the data's",
    "ope_td_error": "squared, of the critics",
    "ope_action_distance": "squared, policy's to data's actions",
    "ope_log_likelihood": "of the data's actions",
    "ope_validation_loss": "sum of the algorithm's losses",
}


@dataclass(frozen=True)
class OfflineEvaluation:
    """Metrics by name, and notes on how to interpret them."""

    metrics: dict[str, float]
    subject: str
    notes: tuple[str, ...]

    def lines(self) -> Iterator[str]:
        """Format the result for the terminal, in lines of at most 80 columns."""
        yield from textwrap.wrap(self.subject, 80)
        ordered = [name for name in MEANINGS if name in self.metrics]
        for name in [*ordered, *(name for name in self.metrics if name not in MEANINGS)]:
            line = f"{name:<27}{self.metrics[name]:>12.5g}  {MEANINGS.get(name, '')}"
            yield line.rstrip()
        for note in self.notes:
            yield from textwrap.wrap(f"note: {note}", 80, subsequent_indent="  ")


def evaluate_on_data(
    reader: CheckpointReader,
    source: EvaluationData | None,
    *,
    seed: int,
    held_out: float,
    fqe_updates: int,
    env: EnvironmentSource | None,
) -> OfflineEvaluation:
    """Compute metrics of a checkpoint's policy on held-out episodes.

    The Q-networks of fitted Q evaluation are trained on the other episodes. `env` is needed only
    for recipes whose environment has no id.
    """
    for name, number in (("seed", seed), ("fqe_updates", fqe_updates)):
        if number < 0:
            raise UserError(f"{name} = {number}: must not be negative")
    policy, run = load_policy(reader), _run_state(reader)
    if policy.action_chunk > 1:
        raise UserError(
            f"{reader.folder}: its policy chooses chunks of {policy.action_chunk} actions "
            "(action_chunk), and evaluation on recorded data needs single ones; evaluate it in "
            "its environment"
        )
    if policy.memory_size:
        raise UserError(
            f"{reader.folder}: its policy is recurrent, and evaluation on recorded data looks at "
            "single steps; evaluate it in its environment"
        )
    complete = restore_learned(policy.algorithm, reader) or _is_complete(policy)
    keys = saved_keys(reader.json(POLICY).get("environment") or {})
    leaves = LeafChoice(keys, policy.spaces.observation)
    opened = _open_parts(source, reader, run, env, leaves)
    parts = _with_policy_rewards(opened, policy)
    for part in parts:
        fit_spaces(part.recording.info, policy.spaces, "the policy")
    gamma = policy.algorithm.hyperparameters.gamma
    with reading_progress("reading data") as progress:
        dataset = load_dataset(
            parts,
            policy.spaces,
            gamma=gamma,
            next_actions=get_algorithm_spec(policy.algorithm_name).uses_next_actions,
            returns=return_after_truncation(policy.algorithm.hyperparameters),
            progress=progress,
        )
    if policy.rewards is None:
        _require_known_rewards(dataset, parts, run, reader.folder, _stated_rewards(source))
    kept, held = dataset.split(held_out, seed)
    # One thread: the networks are small, and results do not depend on the number of cores.
    with one_thread():
        metrics = _data_metrics(held, gamma)
        if fqe_updates > 0:
            fitted = FittedQ(policy, kept, stream_seed(seed, Stream.FITTED_Q))
            with reading_progress("fitting Q") as progress:
                fitted.fit(kept, fqe_updates, progress)
            metrics |= fitted_q_metrics(fitted, held)
        metrics |= policy_metrics(policy, held)
        if complete:
            metrics |= validation_losses(policy, held, stream_generator(seed, Stream.VALIDATION))
    notes = [*_data_notes(dataset, held, run), *missing_metrics(policy, metrics)]
    if not isinstance(source, str | Path | None):
        notes += _reward_notes(opened, policy)
    subject = _subject(policy, reader, parts, kept, held)
    return OfflineEvaluation(metrics, subject, tuple(notes))


def _data_metrics(held: OfflineDataset, gamma: float) -> dict[str, float]:
    """Undiscounted and discounted returns of the recorded episodes."""
    values = held.returns_to_go(gamma)[_first_rows(held).numpy()]
    return {
        "ope_data_return_mean": float(held.episode_returns.mean()),
        "ope_data_value": float(values.mean()),
    }


def fitted_q_metrics(fitted: FittedQ, held: OfflineDataset) -> dict[str, float]:
    """Value of the policy from the first states of held-out episodes, and errors of the fit."""
    values = fitted.policy_values(held.rows(_first_rows(held)).obs).double()
    mean = float(values.mean())
    spread = float(values.mean(-1).std())
    # Two sources of variance: the episodes of the fit, and the held-out first states.
    first_states = float(values.mean(0).std(correction=0)) / math.sqrt(values.shape[1])
    half = student_quantile(ENSEMBLE_SIZE - 1) * math.hypot(spread, first_states)
    errors = sum(float(fitted.squared_errors(batch).mean(0).sum()) for batch in batches(held))
    return {
        "ope_fqe_value": mean,
        "ope_fqe_std": spread,
        "ope_fqe_low": mean - half,
        "ope_fqe_high": mean + half,
        "ope_fqe_td_error": errors / len(held),
    }


def _open_parts(
    source: EvaluationData | None,
    reader: CheckpointReader,
    run: Json,
    env: EnvironmentSource | None,
    leaves: LeafChoice,
) -> list[DatasetPart]:
    """Open the data with the options of its sections; a path gets the options of the run."""
    sections = as_list(read_sections((run.get("config") or {}).get("dataset")))
    if isinstance(source, str | Path):
        clips = any(section.clip_actions for section in sections)
        rewards = _run_rewards(sections)
        recording = open_source(source, leaves.keys, expected=leaves.expected)
        return [DatasetPart(recording, rewards=rewards, clip_actions=clips)]
    if source is None:
        if not sections:
            raise DataError(
                f"{reader.folder}: the config of its run has no dataset; pass --dataset or "
                "dataset=...: a file, a Minari id, or a run's folder for its replay buffer"
            )
        check_sections(sections)
        several: list[DatasetSource] = [*sections]
    else:
        several = [source] if isinstance(source, DataSection | Mapping) else list(source)
    return [_open_part(each, reader, env, leaves) for each in several]


def _open_part(
    source: DatasetSource,
    reader: CheckpointReader,
    env: EnvironmentSource | None,
    leaves: LeafChoice,
) -> DatasetPart:
    if not isinstance(source, DataSection) and "kind" in source:
        (source,) = as_list(read_sections(source))
    if not isinstance(source, RandomSection | PolicySection):
        return open_part(source, leaves=leaves)
    # Only a recipe needs an environment, to record its data.
    environment = reader.json(POLICY).get("environment") or {}
    if env is None and environment.get("id") is None:
        raise DataError(
            f"dataset.kind = {source.kind!r}: needs the custom environment of the run; record the "
            "data, or pass the environment: evaluate_offline(path, env=...)"
        )
    return open_part(source, saved_factory(environment, env))


def _run_rewards(sections: Sequence[DataSection]) -> RewardOptions:
    """Reward options of the run, if all its sections have the same."""
    found = {reward_options(section) for section in sections}
    return found.pop() if len(found) == 1 else RewardOptions()


def _with_policy_rewards(parts: Sequence[DatasetPart], policy: Policy) -> list[DatasetPart]:
    """Apply the reward transform of the policy, because its critics use that scale.

    If the policy learned from datasets with different transforms, each part keeps its options.
    """
    if policy.rewards is None:
        return list(parts)
    return [replace(part, rewards=policy.rewards) for part in parts]


def _require_known_rewards(
    dataset: OfflineDataset,
    parts: Sequence[DatasetPart],
    run: Json,
    folder: Path,
    stated: Sequence[bool],
) -> None:
    """Raise `DataError` for data whose reward transform is not known.

    A policy that learned from datasets with different transforms has none for other data, and the
    range of other returns is another one. `stated` says whose section states the transform.
    """
    learned = {part["sha256"]: _reward_values(part) for part in _learned_parts(run)}
    stated = stated or [False] * len(parts)
    for part, loaded, is_stated in zip(parts, dataset.parts, stated, strict=True):
        options = part.rewards
        computed = isinstance(options, RewardOptions) and options.normalize_return_range
        own = learned.get(loaded.fingerprint["sha256"])
        if own != _reward_values(loaded.fingerprint) and (computed or not is_stated):
            raise DataError(
                f"{part.recording.info.name}: its rewards cannot be transformed as in the policy's "
                "training, which used datasets with different transforms; leave out the dataset to "
                "evaluate on all data of the run, or state the scale in Python: evaluate_offline("
                f"{str(folder)!r}, {{'kind': ..., 'path': ..., 'reward_scale': ...}})"
            )


def _stated_rewards(source: EvaluationData | None) -> list[bool]:
    """Whether each section of the source states how rewards are transformed; empty for a path."""
    if isinstance(source, str | Path | None):
        return []
    several = [source] if isinstance(source, DataSection | Mapping) else source
    given = (
        each.model_fields_set if isinstance(each, DataSection) else each.keys() for each in several
    )
    return [any(key.startswith("reward_") for key in keys) for keys in given]


def _reward_values(part: Json) -> Json:
    """The reward options in a fingerprint."""
    options = _mapping(part, "options") or {}
    return {key: value for key, value in options.items() if key.startswith("reward_")}


def _learned_parts(run: Json) -> list[Json]:
    """The fingerprints of the data that the policy learned from."""
    return (run.get("data") or {}).get("parts") or []


def _reward_notes(parts: Sequence[DatasetPart], policy: Policy) -> Iterator[str]:
    """Notes on reward options of the sections that are not used."""
    for part in parts:
        options = part.rewards
        if policy.rewards is None or options == RewardOptions():
            continue
        assert isinstance(options, RewardOptions)
        same = RewardTransform(scale=options.scale, shift=options.shift, clip=options.clip)
        if options.normalize_return_range or same != policy.rewards:
            yield (
                f"{part.recording.info.name}: the reward options of its section are not used; "
                f"rewards are {policy.rewards}, as in the policy's training"
            )


def _run_state(reader: CheckpointReader) -> Json:
    """State of the run in a checkpoint; empty for a saved policy."""
    if STATE not in reader.files:
        return {}
    state = reader.json(STATE)
    parts = (_mapping(state, "data") or {}).get("parts") or []
    are_parts = isinstance(parts, list) and all(
        isinstance(part, dict) and isinstance(part.get("sha256"), str) for part in parts
    )
    if not are_parts or _mapping(state, "config") is None:
        raise CheckpointError(f"{reader.folder}: {STATE} is damaged")
    return state


def _mapping(values: Json, key: str) -> Json | None:
    found = values.get(key)
    return found if isinstance(found, dict) else None


def _is_complete(policy: Policy) -> bool:
    """Whether the losses need only the networks."""
    return not policy.algorithm.targets() and not policy.algorithm.extra_state()


def _first_rows(dataset: OfflineDataset) -> torch.Tensor:
    return torch.from_numpy(dataset.episode_ends - dataset.episode_lengths)


def _subject(
    policy: Policy,
    reader: CheckpointReader,
    parts: Sequence[DatasetPart],
    kept: OfflineDataset,
    held: OfflineDataset,
) -> str:
    names = ", ".join(part.recording.info.name for part in parts)
    count, rest = len(held.episode_ends), len(kept.episode_ends)
    gamma = policy.algorithm.hyperparameters.gamma
    return (
        f"{policy.algorithm_name} {reader.folder} on {names}: {count:,} of {count + rest:,} "
        f"episodes held out ({len(held):,} steps), discount {gamma:g}"
    )


def _data_notes(dataset: OfflineDataset, held: OfflineDataset, run: Json) -> Iterator[str]:
    learned_from = {part["sha256"] for part in _learned_parts(run)}
    if learned_from & {part.fingerprint["sha256"] for part in dataset.parts}:
        yield (
            "the policy was trained on this data, including the held-out episodes; only the "
            "fitted Q-networks have not seen them"
        )
    last = held.rows(torch.from_numpy(held.episode_ends - 1))
    cut = int((last.discount > 0).sum())
    if cut:
        yield (
            f"held-out episodes that were truncated: {cut:,}; ope_data_value counts rewards up to "
            "the truncation, ope_fqe_value also estimates those after it"
        )
    if dataset.rewards != RewardTransform():
        how = "transformed by each section" if dataset.rewards is None else dataset.rewards
        yield f"all metrics except ope_data_return_mean use rewards {how}"
