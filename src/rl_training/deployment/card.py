"""The model card of a published policy: `README.md` with metadata in the Hub's convention.

Text that comes from a run is escaped, so that it can be neither Markdown nor HTML nor YAML.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rl_training.deployment.anonymous import REMOVED
from rl_training.deployment.hub_files import CONFIG, observation_size
from rl_training.deployment.results import PolicyScore, Results, SeedScores
from rl_training.errors import one_line
from rl_training.types import Json

TASK = "reinforcement-learning"
TAGS = (TASK, "deep-reinforcement-learning", "rl_training")
LIBRARY = "rl_training"
MAX_TEXT = 200
"""Longest text of a run on a card"""
MOST_SEEDS = 20
"""Most seeds that a card names one by one"""
_NOT_SHOWN = frozenset(
    {
        "algo_kwargs",
        *("vectorization", "env_workers", "env_worker_cpus", "ray_address"),
        *("env_timeout", "env_restarts", "device", "compile", "overlap"),
        *("num_threads", "float32_precision", "checkpoint_interval", "checkpoint_replay"),
        *("replay_device", "replay_frame_stack", "log_interval"),
        "video_interval",
    }
)
"""Settings that do not change what is learned, which only the config lists"""
_PLAIN = re.compile(r"[A-Za-z0-9_.,:=+/()\[\]{}\"' -]+")
"""What can be shown as code without being changed"""


@dataclass(frozen=True)
class CardContents:
    """What a card is written from."""

    repo_id: str
    algorithm: str
    environment: str
    policy: Json
    """The published `policy.json`"""
    config: Json | None
    """The published settings; None for a policy that was saved without its run"""
    results: Results
    step: int | None
    """Steps that the policy was trained for"""
    is_best: bool
    versions: Mapping[str, str | None]
    has_video: bool


def model_card(contents: CardContents) -> str:
    """Return the text of `README.md`, checked with the Hub's own reader of metadata."""
    from huggingface_hub import ModelCard

    text = "\n".join(["---", _metadata(contents), "---", *_body(contents)]) + "\n"
    ModelCard(text)  # raises an error if the Hub could not read the metadata
    return text


def _metadata(contents: CardContents) -> str:
    from huggingface_hub import EvalResult, ModelCardData

    name = one_line(contents.environment, MAX_TEXT)
    score = contents.results.policy
    results = (
        []
        if score is None
        else [
            EvalResult(
                task_type=TASK,
                task_name=TASK,
                dataset_type=name,
                dataset_name=name,
                metric_type="mean_reward",
                metric_name="mean_reward",
                metric_value=_score(score),
                verified=False,
            )
        ]
    )
    data = ModelCardData(
        library_name=LIBRARY,
        tags=[name, *TAGS, contents.algorithm],
        pipeline_tag=TASK,
        model_name=contents.algorithm.upper(),
        eval_results=results or None,
    )
    return str(data.to_yaml())


def _score(score: PolicyScore) -> str:
    """Return a score as the Hub's leaderboards read it."""
    return f"{score.mean:.2f} +/- {score.deviation or 0.0:.2f}"


def _body(contents: CardContents) -> list[str]:
    algorithm, environment = contents.algorithm.upper(), escaped(contents.environment)
    which = "the best checkpoint" if contents.is_best else "the last checkpoint"
    trained = f", trained for {contents.step:,} steps" if contents.step else ""
    if trained and contents.results.training_seconds is not None:
        trained += f" in {_duration(contents.results.training_seconds)}"
    return [
        "",
        f"# {escaped(algorithm)} policy for {environment}",
        "",
        f"A policy of {shown(algorithm)} for {shown(contents.environment)}{trained}"
        + (f" ({which} of its run)." if contents.config else "."),
        "It was trained with `rl_training`, a PyTorch package for control policies.",
        *(["", "[`replay.mp4`](replay.mp4) shows the policy."] if contents.has_video else []),
        *_results_section(contents.results),
        *_usage_section(contents),
        *_training_section(contents),
    ]


def _results_section(results: Results) -> list[str]:
    if results.policy is None and results.seeds is None:
        return []
    lines = ["", "## Results", ""]
    if results.policy is not None:
        lines.append(_policy_sentence(results.policy))
    if results.seeds is not None:
        lines += ["", *_seed_table(results.seeds)]
    if results.notes:
        lines += ["", *(f"- {note}" for note in results.notes)]
    lines += ["", "`results.json` has these numbers and the learning curve."]
    return lines


def _policy_sentence(score: PolicyScore) -> str:
    episodes = "" if score.episodes is None else f" over {_count(score.episodes, 'episode')}"
    kind = (
        "played for this card, not used to choose the checkpoint"
        if score.is_new
        else f"the run's own evaluation at step {score.step:,}"
    )
    return (
        f"This policy: mean return **{_score(score)}** (standard deviation{episodes}; {kind}), "
        "without exploration noise."
    )


def _seed_table(scores: SeedScores) -> list[str]:
    count = len(scores.seeds)
    lines = [
        f"Training with {count} seeds, mean return of each seed's evaluation at step "
        f"{scores.step:,}:",
        "",
        "| IQM | 95 % interval | mean | median | seeds |",
        "|---|---|---|---|---|",
        f"| {scores.interquartile_mean:.2f} | {scores.low:.2f} to {scores.high:.2f} "
        f"| {scores.mean:.2f} | {scores.median:.2f} | {count} |",
        "",
        "IQM is the interquartile mean. The interval is a percentile bootstrap over seeds.",
    ]
    if count <= MOST_SEEDS:
        each = ", ".join(
            f"{seed}: {value:.2f}" for seed, value in zip(scores.seeds, scores.returns, strict=True)
        )
        lines += [f"Every seed: {each}."]
    return lines


def _usage_section(contents: CardContents) -> list[str]:
    name = contents.repo_id.partition("/")[2]
    length = observation_size(contents.policy)
    observation = None
    if length is not None and length <= MOST_SEEDS:
        observation = json.dumps([0.0] * length)
    predict = (
        [f"rl-training predict {name} --obs '{observation}'"] if observation is not None else []
    )
    needed = _needed_modules(contents.policy)
    modules = (
        [
            "The environment needs modules that are not part of this repository: "
            + ", ".join(map(shown, needed))
            + ". They are imported only if you name them, with `--import`.",
            "",
        ]
        if needed
        else []
    )
    return [
        "",
        "## Usage",
        "",
        *modules,
        "```bash",
        "pip install 'rl-training[hub]'",
        f"rl-training pull {contents.repo_id}",
        f"rl-training evaluate {name} --episodes 10",
        *predict,
        "```",
        "",
        "```python",
        "import rl_training",
        "",
        f'path = rl_training.pull_from_hub("{contents.repo_id}")',
        *_prediction(contents.policy, length),
        "```",
        "",
        "Loading this policy runs no code: its files are safetensors, JSON and YAML, they are "
        "compared with `MANIFEST.json`, and nothing that they name is imported.",
    ]


def _prediction(policy: Json, length: int | None) -> list[str]:
    """Return the code that uses a policy, step by step if it remembers.

    `length` is that of an observation, if it is one vector.
    """
    obs = "observation" if length is None else f"[0.0] * {length}"
    if (policy.get("algo_kwargs") or {}).get("recurrent", "none") == "none":
        return [f"action = rl_training.predict_checkpoint(path, {obs})"]
    call = f"action, state = rl_training.predict_checkpoint(path, {obs}, "
    return [
        call + "episode_start=True)  # an episode begins",
        call + "state=state)  # it goes on",
    ]


def _needed_modules(policy: Json) -> list[str]:
    environment = policy.get("environment") or {}
    wrappers = [each.get("wrapper", "") for each in environment.get("wrappers") or []]
    names = [*environment.get("modules", []), *(each.partition(":")[0] for each in wrappers)]
    own = ("gymnasium", "rl_training")
    return sorted({str(name) for name in names if str(name).partition(".")[0] not in own})


def _training_section(contents: CardContents) -> list[str]:
    versions = ", ".join(
        f"{shown(name)} {shown(version)}"
        for name, version in contents.versions.items()
        if version is not None
    )
    lines = ["", "## Training", ""]
    if contents.config is None:
        lines += ["The policy was saved without its run, so the settings are those of the policy."]
        settings = {"algo": contents.algorithm, **(contents.policy.get("algo_kwargs") or {})}
    else:
        lines += [_how_to_train_again(contents, contents.config)]
        settings = {
            **{key: value for key, value in contents.config.items() if key not in _NOT_SHOWN},
            **(contents.config.get("algo_kwargs") or {}),
        }
    if versions:
        lines += ["", f"Versions: {versions}."]
    return [*lines, "", "| setting | value |", "|---|---|", *_rows(settings)]


def _how_to_train_again(contents: CardContents, config: Json) -> str:
    """Say what the settings are good for."""
    removed = (
        " Paths and names of people and machines were removed." if _has_removed(config) else ""
    )
    if config.get("env_id") is None:
        return (
            f"`{CONFIG}` has all settings; pass your own environment to train with them.{removed}"
        )
    name = contents.repo_id.partition("/")[2]
    again = f"`rl-training train --config {name}/{CONFIG}` trains with the same settings and seed."
    return f"{again}{removed}"


def _has_removed(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_has_removed, value.values()))
    if isinstance(value, list):
        return any(map(_has_removed, value))
    return bool(value == REMOVED)


def _rows(settings: Mapping[str, Any]) -> list[str]:
    """Return a row for each setting that has a value."""
    return [
        f"| {shown(key)} | {shown(_value(value))} |"
        for key, value in settings.items()
        if value is not None and value not in ([], {})
    ]


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def shown(text: object) -> str:
    """Return text of a run as code, or escaped if it has characters that could end the code."""
    line = one_line(str(text), MAX_TEXT)
    return f"`{line}`" if _PLAIN.fullmatch(line) and line.strip() == line else escaped(line)


def escaped(text: object) -> str:
    """Return text of a run in one line in which no character means anything to Markdown or HTML."""
    line = one_line(str(text), MAX_TEXT)
    return "".join(each if each.isalnum() or each in " -" else f"&#{ord(each)};" for each in line)


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} seconds"
    return f"{seconds / 60:.0f} minutes" if seconds < 7200 else f"{seconds / 3600:.1f} hours"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
