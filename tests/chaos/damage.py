"""R4: damaged and forged checkpoints are passed over or refused, and never used silently.

Each trial damages one file of a run that was stopped, and then predicts, evaluates and resumes.
What counts is the result:

- Damage (the manifest does not match) must change no result. The run ends with the same bits as
  the undamaged one, because the checkpoint before is used, and a warning names the damaged one.
- A forgery (the manifest matches) may also be refused with one message. It may only be accepted if
  the results are the same, or if the value is legal: of the same kind as the one it replaces, so
  that another run could have written it.
"""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import struct
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from helpers import StopAtPosition, first_observations
from test_checkpoint_workflows import reseal

import rl_training
from rl_training.checkpoints.format import checkpoint_folders
from rl_training.data import replay_buffer
from rl_training.errors import EnvironmentRuntimeError, TrainingError, UserError

from .processes import start
from .runner import Campaign, Figures, PromiseBroken, Trial, require
from .runs import (
    SPECS,
    Digest,
    alone,
    copy_run,
    digest,
    limit_memory,
    newest,
    require_same,
    run_folders,
    small,
    without_pictures,
)

TRIALS = 2000
MEMORY = 2**31
"""Bytes that a trial may need beyond what is used at its start"""
STOP, TOTAL = 100, 130
SEGMENT = 16
"""Rows of a replay segment, so that small buffers have several"""
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "sac": ("sac", {}),
    "dqn": ("dqn", {"algo_kwargs": {"prioritized": True, "n_step": 3}}),
    "rlpd": ("rlpd", {"algo_kwargs": {"offline_pretrain_updates": 20}}),
    "iql": ("iql", {}),
    "normalized": ("td3", {"num_envs": 2, "normalize_observations": True}),
    "large": (
        "sac",
        {
            "num_envs": 16,
            "total_timesteps": 17_800,
            "checkpoint_interval": 560,
            "log_interval": 1000,
            "eval_interval": 6000,
            "algo_kwargs": {"learning_starts": 17_700, "buffer_capacity": 20_000},
        },
    ),
}
"""The last one has more rows than a real segment"""
STRANGE: list[Any] = [
    None,
    True,
    -1,
    0,
    1,
    2**31,
    10**12,
    -1e308,
    0.5,
    "strange",
    "",
    [],
    [1],
    {},
    {"a": 1},
    [[[[[[1]]]]]],
    "x" * 10**6,
]
NULLABLE = {"evaluation", "data", "stop_reason", "evaluated_at", "collector", "replay", "id"}
"""Keys whose value may be null in another run"""


@dataclass(frozen=True)
class Results:
    """What an undamaged run gives."""

    final: Digest
    """Of the run, resumed to its end"""
    by_checkpoint: dict[str, Any]
    """Actions and evaluation of each checkpoint, newest first"""


@dataclass(frozen=True)
class Mutant:
    """What was done to a copy of a run."""

    description: str
    checkpoint: str | None
    """None if the file does not belong to one"""
    forged: bool = False
    legal: bool = False


# The runs


def run_of(trial: Trial) -> str:
    names = list(RUNS)
    return names[trial.index % len(names)]


def original(trial: Trial, name: str) -> tuple[Path, Results]:
    """Return a run that was stopped, and its results; made once for all trials."""
    folder = trial.work / "originals" / name
    with alone(folder.with_suffix(".lock")):
        if not (folder / "results.json").is_file():
            folder.mkdir(parents=True, exist_ok=True)
            child = start(lambda: _make(name, folder), folder / "output.txt")
            child.wait(120)
            require(child.code == 0, f"the original run failed:\n{child.output[-600:]}")
    found = json.loads((folder / "results.json").read_text())
    return folder / "run", Results(**found)


def _make(name: str, folder: Path) -> None:
    _prepare(name)
    algo, changes = RUNS[name]
    busy = {"total_timesteps": TOTAL, "checkpoint_interval": 30, "eval_interval": 60}
    config = small(algo, folder, **{**busy, **changes})
    stop = config["total_timesteps"] - (TOTAL - STOP)
    rl_training.train(config, callbacks=[StopAtPosition(stop)])
    (run,) = run_folders(config)
    again = copy_run(run, folder / "again" / "run")
    by_checkpoint = {
        each.name: _use(name, each) for each in checkpoint_folders(run / "checkpoints")
    }
    rl_training.resume_training(again)
    results = {"final": digest(again), "by_checkpoint": by_checkpoint}
    (folder / "results.json").write_text(json.dumps(results))


def _prepare(name: str) -> None:
    without_pictures()
    replay_buffer.SEGMENT_ROWS = 16_384 if name == "large" else SEGMENT
    limit_memory(MEMORY)


def _use(name: str, path: Path) -> dict[str, Any]:
    """Return what `predict` and `evaluate` give for a checkpoint or run."""
    return {verb: use(name, path) for verb, use in READERS.items()}


def _predict(name: str, path: Path) -> Any:
    observations = first_observations(SPECS[RUNS[name][0]], 2)
    return np.asarray(rl_training.predict_checkpoint(path, observations)).tolist()


def _evaluate(name: str, path: Path) -> Any:
    return rl_training.evaluate_checkpoint(path, num_episodes=1, seed=3)


READERS: dict[str, Callable[[str, Path], Any]] = {"predict": _predict, "evaluate": _evaluate}


# The damages


def _files(checkpoint: Path) -> list[Path]:
    return sorted(checkpoint.iterdir())


def _some_checkpoint(run: Path, generator: random.Random) -> Path:
    """Mostly the newest, which is the one that matters."""
    folders = checkpoint_folders(run / "checkpoints")
    return folders[0] if generator.random() < 0.8 else generator.choice(folders)


def flip_bits(path: Path, generator: random.Random) -> None:
    """Flip bits in place, as a disk would: also in other links to the same file."""
    with path.open("r+b") as file:
        size = path.stat().st_size
        for _ in range(generator.choice([1, 1, 1, 8, 64])):
            position = generator.randrange(size)
            file.seek(position)
            (byte,) = file.read(1)
            file.seek(position)
            file.write(bytes([byte ^ (1 << generator.randrange(8))]))


def cut(path: Path, generator: random.Random) -> None:
    with path.open("r+b") as file:
        file.truncate(generator.randrange(path.stat().st_size))


def lengthen(path: Path, generator: random.Random) -> None:
    with path.open("ab") as file:
        file.write(generator.randbytes(generator.choice([1, 8, 4096])))


def remove(path: Path, generator: random.Random) -> None:
    path.unlink()


def make_a_folder(path: Path, generator: random.Random) -> None:
    path.unlink()
    path.mkdir()


def zero(path: Path, generator: random.Random) -> None:
    """Overwrite a block with zeros, as a file system may after a crash."""
    size = path.stat().st_size
    begin = generator.randrange(size) // 512 * 512
    with path.open("r+b") as file:
        file.seek(begin)
        file.write(bytes(min(4096, size - begin)))


def swap_with_older(path: Path, generator: random.Random) -> None:
    older = checkpoint_folders(path.parent.parent)[-1] / path.name
    data = older.read_bytes() if older.is_file() else b""
    path.unlink()
    path.write_bytes(data)


def swap_within(path: Path, generator: random.Random) -> None:
    other = generator.choice([each for each in _files(path.parent) if each != path])
    own = path.read_bytes()
    for target, data in ((path, other.read_bytes()), (other, own)):
        target.unlink()
        target.write_bytes(data)


DAMAGES = [
    flip_bits,
    cut,
    lengthen,
    remove,
    make_a_folder,
    zero,
    swap_with_older,
    swap_within,
]


def damage(run: Path, generator: random.Random) -> Mutant:
    """Damage one file of a checkpoint."""
    checkpoint = _some_checkpoint(run, generator)
    path, change = generator.choice(_files(checkpoint)), generator.choice(DAMAGES)
    change(path, generator)
    return Mutant(f"{change.__name__} of {checkpoint.name}/{path.name}", checkpoint.name)


def flip_in_a_segment(run: Path, generator: random.Random) -> Mutant:
    """Flip bits in a file of the replay buffer, which checkpoints may share."""
    checkpoint = checkpoint_folders(run / "checkpoints")[0]
    segments = sorted(checkpoint.glob("replay-*")) or [checkpoint / "model.safetensors"]
    path = generator.choice([segments[0], generator.choice(segments)])
    flip_bits(path, generator)
    return Mutant(f"flip_bits of {checkpoint.name}/{path.name}", checkpoint.name)


def damage_others(run: Path, generator: random.Random) -> Mutant:
    """Damage a file outside the checkpoints. None of them is needed to resume."""
    others = [path for path in _files(run) if path.is_file() and path.name != ".lock"]
    path = generator.choice([*others, run / "checkpoints" / "best.json"])
    change = generator.choice([flip_bits, cut, lengthen, remove, zero])
    if path.is_file() and path.stat().st_size:
        change(path, generator)
    return Mutant(f"{change.__name__} of {path.name}", None)


# The forgeries


def edit_manifest(run: Path, generator: random.Random) -> Mutant:
    """Change the manifest alone, or drop an entry and damage its file, which nobody then checks."""
    checkpoint = _some_checkpoint(run, generator)
    path = checkpoint / "MANIFEST.json"
    manifest = json.loads(path.read_text())
    name = generator.choice(sorted(manifest["files"]))
    kind = generator.choice(list(MANIFEST_EDITS))
    MANIFEST_EDITS[kind](manifest, name, generator)
    if kind == "drop and damage":
        flip_bits(checkpoint / name, generator)
    path.unlink()
    path.write_text(json.dumps(manifest))
    return Mutant(f"{kind} {name} in the manifest of {checkpoint.name}", checkpoint.name)


def _drop(manifest: Any, name: str, generator: random.Random) -> None:
    del manifest["files"][name]


def _set(key: str) -> Callable[[Any, str, random.Random], None]:
    def change(manifest: Any, name: str, generator: random.Random) -> None:
        manifest["files"][name][key] = generator.choice([*STRANGE[:-1], "0" * 64])

    return change


def _replace_entry(manifest: Any, name: str, generator: random.Random) -> None:
    manifest["files"][name] = generator.choice(STRANGE)


def _rename(manifest: Any, name: str, generator: random.Random) -> None:
    other = generator.choice(["../x", "other.json", "replay-99999.safetensors", "", name.upper()])
    manifest["files"][other] = manifest["files"].pop(name)


def _change_version(manifest: Any, name: str, generator: random.Random) -> None:
    manifest["format_version"] = generator.choice([value for value in STRANGE if value != 1])


def _change_files(manifest: Any, name: str, generator: random.Random) -> None:
    manifest["files"] = generator.choice(STRANGE)


MANIFEST_EDITS: dict[str, Callable[[Any, str, random.Random], None]] = {
    "drop": _drop,
    "drop and damage": _drop,
    "set the size of": _set("size"),
    "set the hash of": _set("sha256"),
    "replace the entry of": _replace_entry,
    "rename": _rename,
    "change the version beside": _change_version,
    "replace the files with": _change_files,
}


def forge_header(run: Path, generator: random.Random) -> Mutant:
    """Replace the header of a tensor file, mostly with a manifest that matches."""
    checkpoint = checkpoint_folders(run / "checkpoints")[0]
    path = generator.choice(sorted(checkpoint.glob("*.safetensors")))
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    forged = _forged_header(json.loads(data[8 : 8 + length]), generator)
    size = generator.choice([len(forged), len(forged), 0, 2**40, 2**63, 2**64 - 1, length + 1])
    path.unlink()
    path.write_bytes(struct.pack("<Q", size) + forged + data[8 + length :])
    if sealed := generator.random() < 0.7:
        reseal(checkpoint)
    return Mutant(f"forged header of {path.name}", checkpoint.name, forged=sealed)


def _forged_header(header: dict[str, Any], generator: random.Random) -> bytes:
    name = generator.choice(sorted(header))
    entry = header[name]
    change = generator.randrange(6)
    if change == 0:
        entry["shape"] = [2**40, *entry["shape"]]
    elif change == 1:
        entry["shape"] = [-size for size in entry["shape"]] or [-1]
    elif change == 2:
        entry["data_offsets"] = [0, 2**50]
    elif change == 3:
        entry["dtype"] = generator.choice(["F64", "I8", "BOOL", "OBJECT", ""])
    elif change == 4:
        header[generator.choice(["extra", name + "x"])] = header.pop(name)
    else:
        del header[name]
    return json.dumps(header).encode()


def forge_values(run: Path, generator: random.Random) -> Mutant:
    """Flip bits of a tensor file and update the manifest: other numbers, all of them legal."""
    checkpoint = checkpoint_folders(run / "checkpoints")[0]
    path = generator.choice(sorted(checkpoint.glob("*.safetensors")))
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data)  # not in other links
    flip_bits(path, generator)
    reseal(checkpoint)
    return Mutant(f"forged values of {path.name}", checkpoint.name, forged=True, legal=True)


def forge_json(run: Path, generator: random.Random) -> Mutant:
    """Replace or remove a value of a JSON file and update the manifest."""
    checkpoint = checkpoint_folders(run / "checkpoints")[0]
    path = checkpoint / generator.choice(["state.json", "state.json", "policy.json"])
    values = json.loads(path.read_text())
    parent, key, where = _some_place(values, generator)
    old, new = parent[key], generator.choice(STRANGE)
    if removed := generator.random() < 0.15:
        del parent[key]
    else:
        parent[key] = new
    path.unlink()
    path.write_text(json.dumps(values))
    reseal(checkpoint)
    legal = not removed and (_kind(old) == _kind(new) or (new is None and key in NULLABLE))
    what = "removed" if removed else f"= {str(new)[:40]!r}"
    return Mutant(f"{path.name}: {where} {what}", checkpoint.name, forged=True, legal=legal)


def _some_place(values: Any, generator: random.Random) -> tuple[Any, Any, str]:
    """Return a random place in nested values: the container, the key in it, and its path."""
    parent, path = values, ""
    while True:
        keys = sorted(parent) if isinstance(parent, dict) else list(range(len(parent)))
        key = generator.choice(keys)
        path += f".{key}"
        if not isinstance(parent[key], dict | list) or not parent[key] or generator.random() < 0.2:
            return parent, key, path[1:]
        parent = parent[key]


def _kind(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return str(type(value))
    return "number" if isinstance(value, int | float) else str(type(value))


MUTATIONS: list[Callable[[Path, random.Random], Mutant]] = [
    damage,
    damage,
    flip_in_a_segment,
    forge_json,
    edit_manifest,
    damage,
    forge_header,
    forge_json,
    forge_values,
    edit_manifest,
    damage_others,
]


def mutation_of(trial: Trial) -> Callable[[Path, random.Random], Mutant]:
    return MUTATIONS[trial.index // len(RUNS) % len(MUTATIONS)]


# The trial


def run(trial: Trial) -> Figures:
    source, results = original(trial, run_of(trial))
    copied = copy_run(source, trial.folder / "run")
    mutant = mutation_of(trial)(copied, trial.random())
    print(mutant)
    _prepare(run_of(trial))
    _check_readers(run_of(trial), copied, mutant, results)
    _check_resume(copied, mutant, results)
    return {}


def attempt(action: Callable[[], Any]) -> tuple[Any, list[str], str | None]:
    """Return the result of an action, its warnings, and the message of a user error."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always", UserWarning)
        result, refusal = None, None
        try:
            result = action()
        except UserError as error:
            refusal = str(error)
    return result, [str(each.message) for each in warned], refusal


def _check_readers(name: str, run: Path, mutant: Mutant, results: Results) -> None:
    last = next(iter(results.by_checkpoint))
    for verb, use in READERS.items():
        found, warned, refusal = attempt(lambda use=use: use(name, run))
        if refusal is not None:
            require(mutant.forged, f"{verb} refused instead of using the one before: {refusal}")
            continue
        equal = [each for each, value in results.by_checkpoint.items() if value[verb] == found]
        require(equal or mutant.legal, f"{verb} used it: {mutant.description}")
        if equal and last not in equal:
            require(any(last in each for each in warned), f"{verb} did not say what it skipped")


def _check_resume(run: Path, mutant: Mutant, results: Results) -> None:
    last = newest(run).name
    try:
        _, warned, refusal = attempt(lambda: rl_training.resume_training(run))
    except (TrainingError, EnvironmentRuntimeError) as error:
        require(mutant.legal, f"resume failed later: {error!r}")
        return
    if refusal is not None:
        require(mutant.forged, f"resume refused instead of using the one before: {refusal}")
        return
    if mutant.checkpoint is None:  # logs are not part of the promise
        require(newest(run).name == results.final["checkpoint"], "resume did not finish")
        return
    try:
        require_same(digest(run), results.final)
    except PromiseBroken:
        if mutant.legal:
            return
        raise
    if not mutant.forged and mutant.checkpoint == last:
        skipped = (run / "superseded" / last).exists()
        require(not skipped or any(last in each for each in warned), "did not say what it skipped")
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(run / "superseded")


CAMPAIGN = Campaign(
    name="R4",
    title="damaged and forged checkpoints",
    trials=TRIALS,
    run=run,
    describe=lambda trial: f"{run_of(trial)}, {mutation_of(trial).__name__}",
    per_process=20,
)
