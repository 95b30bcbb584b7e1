"""Writes the files of a published policy to a folder, without anything that tells of its origin."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rl_training.checkpoints.files import PlainFolder
from rl_training.checkpoints.format import (
    MODEL,
    POLICY,
    CheckpointReader,
    Content,
    read_json,
    step_of,
    write_checkpoint,
)
from rl_training.checkpoints.loading import (
    EVALUATION_FILES,
    find_checkpoint,
    find_run,
    load_policy,
    saved_config,
    saved_modules,
)
from rl_training.config import TrainConfig, read_wrappers
from rl_training.config_files import dump_yaml
from rl_training.deployment.anonymous import (
    found_places,
    published_config,
    published_environment,
)
from rl_training.deployment.card import CardContents, model_card
from rl_training.deployment.hub_files import CARD, CONFIG, LIMITS, REQUIRED, RESULTS, VIDEO
from rl_training.deployment.results import Results, collect_results
from rl_training.errors import CheckpointError, UserError, brief
from rl_training.training.saver import policy_description
from rl_training.types import Json
from rl_training.validation import user_path

VIDEO_EPISODES = 1
_MP4 = b"ftyp"
"""What an MP4 file has after its first four bytes"""


@dataclass(frozen=True)
class Publication:
    """A policy that is ready to be published."""

    folder: Path
    files: dict[str, int]
    """Names of the files, with their sizes in bytes"""
    algorithm: str
    environment: str
    results: Results
    notes: tuple[str, ...]
    """What the user should know before the files are sent"""


def write_publication(
    run: str | Path,
    folder: Path,
    repo_id: str,
    *,
    best: bool = False,
    video: str | Path | bool = True,
    runs: Sequence[str | Path] | None = None,
    episodes: int | None = None,
) -> Publication:
    """Write all files of a policy to an existing, empty folder.

    `run` is a run folder, a checkpoint or a saved policy. Raises `UserError` if a file would name
    one of the user's folders.
    """
    reader = find_checkpoint(run, best=best, names=EVALUATION_FILES)
    config = saved_config(reader)
    description = _write_policy(reader, folder)
    environment = _environment_name(description)
    origin = find_run(run)
    results = collect_results(
        origin,
        reader.folder,
        best=best,
        episodes=episodes,
        eval_episodes=None if config is None else config.eval_episodes,
        others=runs,
    )
    notes = [*_removal_notes(reader, config, description)]
    if (problem := _add_video(video, run, best, folder)) is not None:
        notes.append(problem)
    published = None if config is None else published_config(config.to_mapping())
    if published is not None:
        (folder / CONFIG).write_text(dump_yaml(published))
    _write_json(folder / RESULTS, _results(results, description, environment, reader, best))
    card = model_card(
        CardContents(
            repo_id=repo_id,
            algorithm=str(description["algo"]),
            environment=environment,
            policy=description,
            config=published,
            results=results,
            step=step_of(reader.folder),
            is_best=best,
            versions=_versions(origin.path if origin is not None else None),
            has_video=(folder / VIDEO).exists(),
        )
    )
    (folder / CARD).write_text(card)
    _check_places(folder, user_path(run))
    sizes = {name: (folder / name).stat().st_size for name in LIMITS if (folder / name).exists()}
    return Publication(folder, sizes, str(description["algo"]), environment, results, tuple(notes))


def _write_policy(reader: CheckpointReader, folder: Path) -> Json:
    """Save the policy anew, so that only what belongs to it is published; return `policy.json`."""
    environment = published_environment(_saved_environment(reader))
    policy = load_policy(reader)
    if (wrong := policy.first_not_finite()) is not None:
        raise UserError(f"{reader.folder}: the policy is not usable: {wrong} is not finite")
    saved = folder / "policy"
    contents: dict[str, Content] = {
        POLICY: policy_description(policy.describe(), environment),
        MODEL: policy.tensors(),
    }
    write_checkpoint(saved, contents)
    for name in REQUIRED:
        (saved / name).rename(folder / name)
    saved.rmdir()
    return read_json(folder / POLICY)


def _saved_environment(reader: CheckpointReader) -> Json:
    """Return the description of the environment; it may be a stranger's, so it is checked."""
    environment = reader.json(POLICY).get("environment") or {}
    names = ("id", "label")
    if not isinstance(environment, dict) or not all(
        isinstance(environment.get(name), str | None) for name in names
    ):
        raise CheckpointError(f"{POLICY}: the description of the environment is damaged")
    saved_modules(environment)
    read_wrappers(environment.get("wrappers") or [])
    return environment


def _environment_name(description: Json) -> str:
    environment = description.get("environment") or {}
    return str(environment.get("id") or environment.get("label") or "own environment")


def _removal_notes(
    reader: CheckpointReader, config: TrainConfig | None, description: Json
) -> list[str]:
    notes = []
    if (reader.json(POLICY).get("environment") or {}) != (description.get("environment") or {}):
        notes.append(
            "the environment's settings name a local place or a person; this was removed, so that "
            "others must pass their own environment to evaluate the policy"
        )
    if config is None:
        notes.append("a policy that was saved without its run has no config and no learning curve")
    return notes


def _add_video(video: str | Path | bool, run: str | Path, best: bool, folder: Path) -> str | None:
    """Write `replay.mp4`; return why there is none, if the user should know."""
    destination = folder / VIDEO
    if video is False:
        return None
    if video is True:
        try:
            from rl_training.evaluation.video import record

            record(run, destination, episodes=VIDEO_EPISODES, best=best)
        except Exception as error:  # rendering fails in many ways, and a policy needs no video
            destination.unlink(missing_ok=True)
            return f"no {VIDEO}: the policy could not be filmed ({brief(error)})"
        return None
    path = user_path(video)
    try:
        with path.open("rb") as file:
            is_video = path.is_file() and file.read(8)[4:] == _MP4
        size = path.stat().st_size
    except OSError as error:
        raise UserError(f"--video {path}: cannot be read ({error.strerror or error})") from None
    if not is_video:
        raise UserError(f"--video {path}: is not an MP4 file")
    if size > LIMITS[VIDEO]:
        raise UserError(f"--video {path}: has {size:,} bytes; at most {LIMITS[VIDEO]:,}")
    shutil.copyfile(path, destination)
    return None


def _results(
    results: Results, description: Json, environment: str, reader: CheckpointReader, best: bool
) -> Json:
    return {
        "algorithm": description["algo"],
        "environment": environment,
        "checkpoint": "best" if best else "last",
        "step": step_of(reader.folder),
        **results.to_json(),
    }


def _versions(run: Path | None) -> dict[str, str | None]:
    """Return the versions of the packages that a run was started with."""
    if run is None or not PlainFolder(run).has_file("metadata.json"):
        return {}
    versions = read_json(run / "metadata.json").get("versions")
    if not isinstance(versions, dict):
        return {}
    return {str(name): str(value) for name, value in versions.items() if isinstance(value, str)}


def _check_places(folder: Path, run: Path) -> None:
    """Raise `UserError` if a file names a folder of the user, which `anonymous` must prevent."""
    for name in (POLICY, CONFIG, RESULTS, CARD):
        if not (folder / name).exists():
            continue
        if found := found_places((folder / name).read_text(), [run]):
            raise UserError(
                f"{name} would contain {found[0]}, a folder on this machine; nothing was sent; "
                "remove it from the settings of the run"
            )


def _write_json(path: Path, values: Json) -> None:
    path.write_text(json.dumps(values, indent=1, allow_nan=False) + "\n")
