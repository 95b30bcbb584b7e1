"""Recorded data by name: its files, and what is known of them without reading them.

`benchmarks/recorded_data.py` writes a file per task and kind of data, and describes the files of a
task in a small JSON file that is kept with the results. So a plan can be listed, and results can
be judged, where the files are not.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from reporting import RESULTS

from rl_training.config import TrainConfig
from rl_training.data.loading import RETURN_RANGE
from rl_training.data.sections import DataSection
from rl_training.datasets.opening import build_dataset
from rl_training.errors import UserError

FILES, ABOUT = Path(".bench/data"), RESULTS / "recorded_data"
"""Where the files are, and where they are described"""
REPLAY, MEDIUM, EXPERT = "replay", "medium", "expert"
KINDS = (REPLAY, MEDIUM, EXPERT)
MIXTURES = {"medium-expert": (MEDIUM, EXPERT), "medium-replay-expert": (MEDIUM, REPLAY, EXPERT)}
NAMES = (*KINDS, *MIXTURES)
OPTIONS = set(DataSection.model_fields) - {"kind", "weight"}
"""Keys of a `dataset` section that do not say where its data comes from"""


def parts_of(name: str) -> tuple[str, ...]:
    """The kinds of data that a name stands for; they are mixed with equal weights."""
    return MIXTURES.get(name, (name,))


def data_file(folder: Path, env: str, kind: str) -> Path:
    return folder / f"{env.replace('/', '-')}__{kind}.npz"


def about_file(folder: Path, env: str) -> Path:
    return folder / f"{env.replace('/', '-')}.json"


def read_about(folder: Path, env: str) -> dict[str, Any]:
    """What is known of the files of a task, by kind; empty if nothing is."""
    path = about_file(folder, env)
    try:
        return dict(json.loads(path.read_text())["files"])
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UserError(f"{path}: cannot be read ({error!r}); record the data again") from None


def described(folder: Path, env: str, name: str) -> dict[str, Any] | None:
    """The description of data that results store; None if some of it was never recorded."""
    known, kinds = read_about(folder, env), parts_of(name)
    if not all(kind in known for kind in kinds):
        return None
    keys = ("fingerprint", "rows", "return_mean", "return_low", "return_high")
    parts = [{"kind": kind, **{key: known[kind][key] for key in keys}} for kind in kinds]
    return {"name": name, "parts": parts}


def missing_files(files: Path, about: Path, env: str, name: str) -> list[Path]:
    """The files of the data that are not on this machine, or were never described."""
    known = read_about(about, env)
    paths = {kind: data_file(files, env, kind) for kind in parts_of(name)}
    return [path for kind, path in paths.items() if kind not in known or not path.is_file()]


def how_to_record(missing: Mapping[str, Sequence[Path]], files: Path) -> str:
    """One message for all data that is missing, by task."""
    names = ", ".join(str(path) for paths in missing.values() for path in paths)
    command = f"python benchmarks/recorded_data.py --tasks {' '.join(missing)}"
    command += f" --data {files}" if files != FILES else ""
    return f"recorded data is missing: {names}; copy the files here, or make them with: {command}"


def check_data(files: Path, about: Path, env: str, name: str) -> None:
    """Raise `UserError` if a file is missing, or has other rows than its description says."""
    if missing := missing_files(files, about, env, name):
        raise UserError(how_to_record({env: missing}, files))
    known = read_about(about, env)
    for kind in parts_of(name):
        path = data_file(files, env, kind)
        found, wanted = data_fingerprint(path), known[kind]["fingerprint"]
        if found != wanted:
            raise UserError(
                f"{path}: has the fingerprint {found:.12}, but {about_file(about, env)} describes "
                f"{wanted:.12}; copy both from the same machine, or record the data again"
            )


def data_fingerprint(path: Path) -> str:
    """The hash of the rows of a file, as a run with the default discount computes it."""
    [part] = build_dataset({"kind": "npz", "path": str(path)}).fingerprint["parts"]
    return str(part["sha256"])


def return_scale(config: TrainConfig, data: Mapping[str, Any]) -> float:
    """By what the config multiplies the rewards of this data, taken together."""
    own = config.dataset_sections
    if not own or own[0].reward_normalization == "none":
        return own[0].reward_scale if own else 1.0
    highest = max(part["return_high"] for part in data["parts"])
    lowest = min(part["return_low"] for part in data["parts"])
    return float(own[0].reward_scale * RETURN_RANGE / (highest - lowest))


def with_data(config: TrainConfig, files: Path, data: Mapping[str, Any]) -> TrainConfig:
    """The config with recorded data in place of its own, with the same options of rewards."""
    own = config.dataset_sections
    options = own[0].model_dump(exclude_defaults=True, include=OPTIONS) if own else {}
    if len(data["parts"]) > 1 and "reward_normalization" in options:
        # Each section would be divided by a range of its own.
        del options["reward_normalization"]
        options["reward_scale"] = return_scale(config, data)
    sections = [
        {"kind": "npz", "path": str(data_file(files, str(config.env_id), part["kind"])), **options}
        for part in data["parts"]
    ]
    return config.with_changes(dataset=sections if len(sections) > 1 else sections[0])
