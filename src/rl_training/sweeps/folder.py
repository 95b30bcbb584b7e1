"""The folder of a sweep.

FOLDER/
  sweep.json     the settings of the sweep, without passwords
  journal.log    Optuna's study
  results.json   the table, written when a trial ends
  trials/        the job of each trial
  winner/        the job of the best trial with fresh seeds
  workers/       what the worker processes print
"""

from __future__ import annotations

import shutil
import uuid
from dataclasses import dataclass
from pathlib import Path

from rl_training.checkpoints.files import is_temporary
from rl_training.checkpoints.format import read_json, write_json
from rl_training.checkpoints.lease import Lease
from rl_training.config import TrainConfig
from rl_training.errors import CheckpointError, ConfigError
from rl_training.runtime.job_folder import JOB, prepare_job
from rl_training.runtime.job_needs import gives_success, job_needs
from rl_training.sweeps.file import SweepFile, checked, masked
from rl_training.sweeps.settings import SweepSettings
from rl_training.training.memory import gibibytes
from rl_training.types import SUCCESS_RATE, Json
from rl_training.validation import plain, short, validate

SWEEP = "sweep.json"
STUDY_VARIABLE = "RL_TRAINING_SWEEP_STUDY"
"""Passes the URL of a database to other processes: everyone can read their arguments"""
LOCK_PATIENCE = 600.0
"""How long a worker waits for its turn, in seconds; a turn takes a fraction of a second"""


@dataclass(frozen=True)
class SweepFolder:
    """The paths of a sweep."""

    path: Path

    @property
    def journal(self) -> Path:
        return self.path / "journal.log"

    @property
    def results(self) -> Path:
        return self.path / "results.json"

    @property
    def winner(self) -> Path:
        return self.path / "winner"

    @property
    def workers(self) -> Path:
        return self.path / "workers"

    @property
    def claims(self) -> Path:
        """Owned by the process that hands out trials."""
        return self.path / "claims"

    def trial(self, number: int) -> Path:
        return self.path / "trials" / f"trial_{number:04}"

    def exists(self) -> bool:
        return (self.path / SWEEP).is_file()

    def check(self, sweep: SweepFile) -> None:
        """Raise `ConfigError` if the folder of a new sweep cannot be here. Creates nothing."""
        if self.path.exists() and not self._is_unused():
            raise ConfigError(
                f"{self.path}: is not an empty folder and has no sweep; choose another --output-dir"
            )
        _check_metric(sweep)
        _check_space(self.path, sweep)

    def open(self, sweep: SweepFile) -> None:
        """Create the folder, or check that it has the same sweep; the rest of it may change."""
        if not self.exists():
            self._create(sweep)
        values = self._stored()
        _require_same(self.path, values["identity"], sweep.identity)
        _require_study(self.path, values["settings"], sweep.settings.study)

    def _create(self, sweep: SweepFile) -> None:
        try:
            self.claims.mkdir(parents=True, exist_ok=True)
            self.workers.mkdir(exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"{self.path}: cannot be created ({error.strerror}); choose another --output-dir"
            ) from None
        values = {
            "id": f"{self.path.absolute().name}-{uuid.uuid4().hex[:12]}",
            "settings": sweep.to_json(),
            "base": sweep.base,
            "identity": sweep.identity,
        }
        with self.lock():
            if not self.exists():  # another process may start the same sweep
                write_json(self.path / SWEEP, plain(values))

    def _is_unused(self) -> bool:
        """Whether the folder has at most what a process left that was killed while creating it."""
        own = (self.claims.name, self.workers.name)
        return self.path.is_dir() and all(
            each.name in own or is_temporary(each.name) for each in self.path.iterdir()
        )

    @property
    def unique_name(self) -> str:
        """The name of this sweep in a database or storage that it shares with others.

        It stays when the folder is moved, and a sweep that was deleted leaves its name to nobody.
        """
        name = read_json(self.path / SWEEP).get("id")
        if not isinstance(name, str) or not name.isprintable() or "/" in name or ".." in name:
            raise CheckpointError(f"{self.path / SWEEP}: is damaged; restore it from a copy")
        return name

    def read(self, study: str | None = None) -> SweepFile:
        """Return the sweep of this folder; `study` is the URL of its database, if it has one."""
        if not self.exists():
            raise ConfigError(f"{self.path}: has no sweep; start one with `rl-training sweep FILE`")
        values = self._stored()
        _require_study(self.path, values["settings"], study)
        settings = validate(SweepSettings, {**values["settings"], "study": study})
        return checked(SweepFile(settings, values["base"]))

    def _stored(self) -> dict[str, Json]:
        """The content of `sweep.json`."""
        values = read_json(self.path / SWEEP)
        for key in ("settings", "base", "identity"):
            if not isinstance(values.get(key), dict):
                raise CheckpointError(f"{self.path / SWEEP}: is damaged; restore it from a copy")
        return values

    def is_prepared(self, number: int) -> bool:
        return (self.trial(number) / JOB).is_file()

    def prepare(self, sweep: SweepFile, number: int, config: TrainConfig) -> None:
        """Store the job of a trial, as queued."""
        gpus = sweep.settings.resources.gpus
        prepare_job(
            config,
            sweep.seeds,
            self.trial(number),
            device="cuda" if gpus else None,
        )

    def lock(self) -> Lease:
        """Become the process that hands out trials; wait for another one."""
        return Lease.acquire(self.claims, patience=LOCK_PATIENCE)


def _require_same(path: Path, stored: Json, given: Json) -> None:
    for key in sorted({*stored, *given}):
        if stored.get(key) != plain(given).get(key):
            raise ConfigError(
                f"{path}: has another sweep ({key} = {short(stored.get(key))} there, "
                f"{short(given.get(key))} in the file); restore the file, or choose another "
                "--output-dir"
            )


def _require_study(path: Path, settings: Json, study: str | None) -> None:
    """Raise `ConfigError` rather than start a second study beside the first one."""
    stored = settings.get("study")
    if stored is not None and study is None:
        raise ConfigError(
            f"{path}: the study of this sweep is in a database, {masked(str(stored))!r}; start the "
            f"sweep with its file, or set {STUDY_VARIABLE} to the URL"
        )
    if stored is None and study is not None:
        raise ConfigError(
            f"study = {masked(study)!r}: the study of {path} is a journal file; remove study, or "
            "choose another --output-dir"
        )


def _check_metric(sweep: SweepFile) -> None:
    """Raise `ConfigError` if the environment of a trial does not give the objective's metric."""
    metric = sweep.objective.parts[0]
    environments = {}
    for example in sweep.examples():
        config = sweep.config(example)
        environments[repr((config.env_id, config.env_kwargs, config.wrappers))] = config
    for config in environments.values():
        if config.env_id is None:
            raise ConfigError(
                f"objective.metric = {short(sweep.objective.metric)}: never appears, because the "
                "config has no env_id to evaluate in; set one"
            )
        if metric == SUCCESS_RATE and not gives_success(config):
            raise ConfigError(
                f"objective.metric = {short(sweep.objective.metric)}: never appears, because the "
                f"last info of an episode in {config.env_id} has neither is_success nor success; "
                "use eval_return_iqm"
            )


def _check_space(path: Path, sweep: SweepFile) -> None:
    """Raise `ConfigError` if the checkpoints of all trials do not fit on the disk.

    Makes an environment, so that one that does not exist or does not fit is found here too.
    """
    existing = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    needed = max(
        job_needs(sweep.config(example).with_changes(seeds=sweep.seeds)).disk
        for example in sweep.examples()
    )
    free = shutil.disk_usage(existing).free
    if sweep.trials * needed > free:
        runs = sweep.trials * len(sweep.seeds)
        raise ConfigError(
            f"{path}: the checkpoints of {runs:,} runs need about "
            f"{gibibytes(sweep.trials * needed)}, and {gibibytes(free)} are free on this disk; use "
            "another --output-dir, fewer trials or seeds, or a smaller buffer_capacity"
        )
