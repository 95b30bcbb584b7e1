"""The small runs of the campaigns, and what two equal runs have in common."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import mmap
import os
import resource
import shutil
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml
from helpers import BUILT_IN, hashes, metric_rows, tiny_of

import rl_training
from rl_training.callbacks import Callback, TrainingContext
from rl_training.checkpoints.format import CheckpointReader, checkpoint_folders
from rl_training.runtime import workflows
from rl_training.training import run as training_run

from .disk import Operation, watch
from .processes import Child, start, start_command, start_fresh_command
from .runner import Trial, require

Config = dict[str, Any]
Digest = dict[str, Any]
SPECS = {spec.name: spec for spec in BUILT_IN}
RUN = "run"
TOTAL, INTERVAL = 240, 40
STATE_KEYS = (
    "progress",
    "replay",
    "streams",
    "global_streams",
    "collector",
    "evaluation",
    "train_metrics",
)
"""Of `state.json`: what the rest of the run depends on. The others are settings, versions and the
states of callbacks, which hold the length of a log with times in it."""
OF_FIRST_SEED = ("global_streams",)
"""Drawn from the first seed that trains: a seed whose folder did not exist yet trains alone"""


def small(algo: str, output_dir: Path, **changes: Any) -> Config:
    """Return the config of a run that takes about a second and saves every 40 steps."""
    spec = SPECS[algo]
    busy = {
        "run_name": RUN,
        "num_threads": 1,
        "total_timesteps": TOTAL,
        "checkpoint_interval": INTERVAL,
        "eval_interval": 60,
        "log_interval": 20,
    }
    return tiny_of(spec, output_dir, **{**busy, **changes})


def without_pictures() -> None:
    """Draw no learning curves in this process: they take a third of a small run's time."""
    training_run.draw_learning_curve = lambda *_, **__: None


def write_config(config: Config, path: Path) -> Path:
    path.write_text(yaml.safe_dump(config))
    return path


def run_folders(config: Config) -> list[Path]:
    """Return the folders that the runs of a config get."""
    parent, name = Path(config["output_dir"]), config["run_name"]
    seeds = config.get("seeds")
    return [parent / name] if not seeds else [parent / f"{name}__seed{seed}" for seed in seeds]


def newest(run: Path) -> Path:
    return checkpoint_folders(run / "checkpoints")[0]


def saved_position(run: Path) -> int:
    """Return the step of the newest checkpoint, or 0 if there is none."""
    folders = checkpoint_folders(run / "checkpoints")
    return int(folders[0].name.removeprefix("step_")) if folders else 0


def digest(run: Path) -> Digest:
    """Return hashes of everything that two equal runs have in common."""
    last = newest(run)
    state = json.loads((last / "state.json").read_text())
    rows = metric_rows(run)
    return {
        "checkpoint": last.name,
        **hashes(last),
        **{key: _hash(state[key]) for key in STATE_KEYS},
        "policy.json": _hash(json.loads((last / "policy.json").read_text())),
        **_metric_hashes(rows),
        "rows": len(rows),
    }


def _metric_hashes(rows: list[dict[str, float]]) -> dict[str, str]:
    """Return a hash of each column of the metrics, so that a difference names its quantity."""
    names = sorted({name for row in rows for name in row})
    return {f"metrics.jsonl: {name}": _hash([row.get(name) for row in rows]) for name in names}


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def require_same(found: Digest, expected: Digest, ignoring: Iterable[str] = ()) -> None:
    """Check that two digests are equal, except for some keys."""
    keys = (found.keys() | expected.keys()) - set(ignoring)
    different = sorted(key for key in keys if found.get(key) != expected.get(key))
    require(
        not different,
        f"differs from the uninterrupted run in {', '.join(different)} "
        f"(at {found['checkpoint']}, expected {expected['checkpoint']})",
    )


def saved_state(run: Path) -> dict[str, Any]:
    """Return `state.json` of the newest checkpoint."""
    state: dict[str, Any] = json.loads((newest(run) / "state.json").read_text())
    return state


def stop_reason(run: Path) -> str | None:
    """Return why a run stopped, according to its newest checkpoint."""
    reason: str | None = saved_state(run)["progress"]["stop_reason"]
    return reason


def leftovers(run: Path) -> list[str]:
    """Return the temporary files below a run folder."""
    return sorted(str(path.relative_to(run)) for path in run.rglob(".tmp-*"))


def require_sound(run: Path) -> None:
    """Check that a run folder has no temporary files and that all its checkpoints are intact."""
    require(not leftovers(run), f"left temporary files: {leftovers(run)}")
    for folder in checkpoint_folders(run / "checkpoints"):
        CheckpointReader(folder).verify()


def require_clean(child: Child, *codes: int) -> None:
    """Check that a command ended with one of these codes and without a traceback."""
    expected = codes or (0,)
    require(child.code in expected, f"exit code {child.code}, expected one of {expected}")
    require("Traceback" not in child.output, "printed a traceback")


@contextlib.contextmanager
def alone(path: Path) -> Iterator[None]:
    """Hold a lock that trials of the campaign share."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@dataclass(frozen=True)
class Reference:
    """An uninterrupted run."""

    digests: list[Digest]
    """One for each seed"""
    seconds: float
    operations: int
    """Number of file operations in its output folder"""


def reference(
    trial: Trial,
    name: str,
    config: Config,
    prepare: Callable[[], object] = without_pictures,
    train: Callable[[Config], object] | None = None,
) -> Reference:
    """Return the uninterrupted run of a config, trained once for all trials that need it.

    `prepare` is called in the process that trains it; `train` replaces the command.
    """
    folder = reference_folder(trial, name)
    with alone(folder.with_suffix(".lock")):
        if not (folder / "reference.json").is_file():
            found = _train_reference(trial, folder, config, prepare, train)
            (folder / "reference.json").write_text(json.dumps(asdict(found)))
        return Reference(**json.loads((folder / "reference.json").read_text()))


def _train_reference(
    trial: Trial,
    folder: Path,
    config: Config,
    prepare: Callable[[], object],
    train: Callable[[Config], object] | None,
) -> Reference:
    folder.mkdir(parents=True, exist_ok=True)
    config = {**config, "output_dir": str(folder / "runs")}
    source, log, operations = (
        write_config(config, folder / "config.yaml"),
        folder / "log",
        Counter(),
    )

    def count(_: Operation) -> None:
        operations.value += 1

    def prepare_and_count() -> None:
        prepare()
        watch(folder / "runs", count)

    if config["compile"] == "on":
        # Twice: the first run fills the cache, the second one has the usual duration.
        start_fresh_command("train", "--config", source, log=log, **cache(trial)).wait(300)
        shutil.rmtree(folder / "runs")
        child = start_fresh_command("train", "--config", source, log=log, **cache(trial))
    elif train is not None:
        child = start(lambda: train(config), log)
    else:
        child = start_command("train", "--config", source, log=log, prepare=prepare_and_count)
    seconds = child.wait(300)
    require(child.code == 0, f"the uninterrupted run failed:\n{child.output[-800:]}")
    return Reference([digest(run) for run in run_folders(config)], seconds, operations.value)


def reference_folder(trial: Trial, name: str) -> Path:
    """Return the folder of an uninterrupted run; its runs are in `runs`."""
    return trial.work / "references" / name


def cache(trial: Trial) -> dict[str, str]:
    """Return the environment variables with which all trials share compiled programs."""
    return {"TORCHINDUCTOR_CACHE_DIR": str(trial.work / "compiled")}


class Counter:
    """A number in memory that processes share: forked ones, or all that know the path of a file."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        if path is None:
            self._memory = mmap.mmap(-1, 8)
            return
        with path.open("a+b") as file:
            file.truncate(8)
            self._memory = mmap.mmap(file.fileno(), 8)

    @property
    def value(self) -> int:
        number: int = struct.unpack("q", self._memory[:8])[0]
        return number

    @value.setter
    def value(self, number: int) -> None:
        self._memory[:8] = struct.pack("q", number)


class Position(Callback):
    """Tells another process which step a run has reached."""

    def __init__(self, reached: Counter) -> None:
        self._reached = reached

    def for_seed(self, seed: int) -> Position:
        return self

    def on_collect_end(self, context: TrainingContext) -> None:
        self._reached.value = context.position

    def on_update_end(self, context: TrainingContext) -> None:
        self._reached.value = context.position


def train_and_count(config: Config, reached: Counter, **options: Any) -> None:
    """Train a config; `reached` always has the current step."""
    rl_training.train(config, callbacks=[Position(reached)], **options)


def memory(field: str) -> int:
    """Return a memory field of this process in bytes: `VmSize`, `VmRSS` or its peak, `VmHWM`."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(field)


def limit_memory(more: int) -> None:
    """Let this process allocate at most `more` bytes from now on."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (memory("VmSize") + more, hard))


def count_steps_of_commands(reached: Counter) -> None:
    """Let commands of this process tell which step they have reached, instead of printing it."""
    workflows.with_progress = lambda callbacks, progress: [*callbacks, Position(reached)]


def copy_run(source: Path, target: Path) -> Path:
    """Copy a run folder. Files that share their bytes on disk do so in the copy too."""
    copied: dict[int, Path] = {}
    for folder, _, names in os.walk(source):
        own = target / Path(folder).relative_to(source)
        own.mkdir(parents=True, exist_ok=True)
        for name in names:
            path, number = Path(folder, name), Path(folder, name).stat().st_ino
            if number in copied:
                os.link(copied[number], own / name)
            else:
                (own / name).write_bytes(path.read_bytes())
                copied[number] = own / name
    return target
