"""Optuna's study of a sweep: which trials there are, what they have reported, what comes next."""

from __future__ import annotations

import contextlib
import inspect
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rl_training.errors import ConfigError, UserError, last_line, one_line
from rl_training.sweeps.file import (
    PRUNER_NAMES,
    PRUNERS,
    SAMPLERS,
    SEQUENCES,
    SweepFile,
    masked,
    without_password,
)
from rl_training.sweeps.folder import SweepFolder
from rl_training.sweeps.space import Params
from rl_training.validation import short, suggestion

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

NAME = "sweep"
LOCK_SECONDS = 10
"""After so long, the journal's lock belongs to a process that was killed"""
REHEARSED = 12
"""Trials that a sampler suggests before a sweep starts: more than TPE and GP choose at random"""
QUEUED, RUNNING, FINISHED, PRUNED, FAILED = "queued", "running", "finished", "pruned", "failed"
_STATES = {"WAITING": QUEUED, "RUNNING": RUNNING, "COMPLETE": FINISHED, "PRUNED": PRUNED}
_SCORES, _MESSAGE, _DEATHS = "scores", "message", "deaths"
"""User attributes of a trial"""


@dataclass(frozen=True)
class Trial:
    """A trial as the study knows it."""

    number: int
    state: str
    """queued, running, finished, pruned or failed"""
    params: Params
    value: float | None = None
    """The objective; of a pruned trial, the last value that it reported"""
    scores: list[float] = field(default_factory=list)
    """The metric of each seed"""
    message: str = ""
    reports: dict[int, float] = field(default_factory=dict)
    """The objective at each evaluation, by step"""

    @property
    def is_over(self) -> bool:
        return self.state in (FINISHED, PRUNED, FAILED)


@dataclass(frozen=True)
class _Suggestion:
    """A trial that a sampler wants."""

    parameters: dict[str, Any]
    notes: dict[str, Any] = field(default_factory=dict)
    """What the sampler needs to know of the trial later, such as its generation"""


class Study:
    """The trials of a sweep, in Optuna's journal or database."""

    def __init__(self, folder: SweepFolder, sweep: SweepFile) -> None:
        optuna = import_optuna()
        self._sweep, self._space = sweep, sweep.space
        self._study = optuna.create_study(
            storage=_storage(folder.journal, sweep.settings.study),
            study_name=NAME if sweep.settings.study is None else folder.unique_name,
            direction="maximize" if sweep.objective.mode == "max" else "minimize",
            sampler=optuna.samplers.RandomSampler(),  # never used: `plan` decides
            pruner=build_pruner(sweep),
            load_if_exists=True,
        )

    def trials(self) -> list[Trial]:
        """All trials by number."""
        return [self._trial(each) for each in self._study.get_trials(deepcopy=False)]

    def _trial(self, found: FrozenTrial) -> Trial:
        state = _STATES.get(found.state.name, FAILED)
        value = found.value if state == FINISHED else None
        if state == PRUNED and found.intermediate_values:
            value = found.intermediate_values[max(found.intermediate_values)]
        return Trial(
            found.number,
            state,
            self._space.to_values(found.params),
            value,
            list(found.user_attrs.get(_SCORES, [])),
            str(found.user_attrs.get(_MESSAGE, "")),
            dict(found.intermediate_values),
        )

    def plan(self) -> list[Trial]:
        """Add the trials that are due now, as queued; return all trials.

        Call this while no other process plans. With rounds, what is planned depends only on the
        settings and the rounds before, which are over; otherwise, on the trials that are over.
        """
        trials, size = self.trials(), self._sweep.planned_at_once
        begun = len(trials) // size * size
        is_due = len(trials) < self._sweep.trials and not any(t.state == QUEUED for t in trials)
        if self._sweep.settings.rounds is not None:
            is_due = is_due or len(trials) > begun  # a round that is not stored completely
            is_due = is_due and all(trial.is_over for trial in trials[:begun])
        if not is_due:
            return trials
        count = min(size, self._sweep.trials - begun)
        for suggested in self._suggest(begun, count)[len(trials) - begun :]:
            self._enqueue(suggested)
        return self.trials()

    def _enqueue(self, suggested: _Suggestion) -> None:
        # Not by `enqueue_trial`, which stores the parameters one by one when the trial begins: a
        # kill in between would leave half of them.
        optuna = import_optuna()
        self._study.add_trial(
            optuna.trial.create_trial(
                state=optuna.trial.TrialState.WAITING,
                params=suggested.parameters,
                distributions=self._space.distributions(),
                system_attrs=suggested.notes,
            )
        )

    def _suggest(self, number: int, count: int) -> list[_Suggestion]:
        """Optuna's parameters of `count` trials from `number` on.

        The sampler works on a copy in memory, which has the trials before them, so that the same
        trials are suggested again if this process is killed before all of them are stored.
        """
        if self._sweep.settings.grid is not None:
            return [_Suggestion(each) for each in self._space.grid()[number : number + count]]
        # A sequence is asked again from its start: how far it is would be stored in the copy.
        skipped = number if self._sweep.sampler[0] in SEQUENCES else 0
        copy = import_optuna().create_study(
            direction=self._study.direction, sampler=build_sampler(self._sweep, number - skipped)
        )
        copy.add_trials(self._study.get_trials(deepcopy=False)[: number - skipped])
        distributions = self._space.distributions()
        for _ in range(skipped + count):
            copy.ask(distributions)
        asked = copy.get_trials(deepcopy=False)[number:]
        return [_Suggestion(each.params, dict(each.system_attrs)) for each in asked]

    def begin(self) -> int:
        """Mark the first queued trial as running; return its number."""
        return int(self._study.ask().number)

    def note_death(self, number: int, step: int) -> int:
        """Count that the process of a trial died; return how often without progress.

        `step` is that of its last checkpoint; a report at a later step counts as well.
        """
        found = self._study.get_trials(deepcopy=False)[number]
        reached = max([step, *found.intermediate_values])
        last = found.user_attrs.get(_DEATHS, {"step": -1, "count": 0})
        count = int(last["count"]) + 1 if reached <= last["step"] else 1
        self._note(found, _DEATHS, {"step": reached, "count": count})
        return count

    def _note(self, trial: FrozenTrial, key: str, value: Any) -> None:
        # Optuna has no public way to a trial that another process has begun.
        self._study._storage.set_trial_user_attr(trial._trial_id, key, value)

    def report(self, number: int, step: int, value: float) -> bool:
        """Report the objective at a step; return whether the trial should be pruned."""
        optuna = import_optuna()
        found = self._study.get_trials(deepcopy=False)[number]
        trial = optuna.trial.Trial(self._study, found._trial_id)
        if step not in found.intermediate_values:
            trial.report(value, step)
        return self._sweep.pruner is not None and trial.should_prune()

    def finish(self, number: int, value: float, scores: Sequence[float]) -> None:
        """End a trial with its objective and the metric of each seed."""
        self._end(number, "COMPLETE", value, {_SCORES: list(scores)})

    def prune(self, number: int, scores: Sequence[float]) -> None:
        """End a trial that its pruner has stopped."""
        self._end(number, "PRUNED", None, {_SCORES: list(scores)})

    def fail(self, number: int, message: str) -> None:
        """End a trial that cannot be completed."""
        self._end(number, "FAIL", None, {_MESSAGE: one_line(message, 500)})

    def _end(
        self, number: int, state: str, value: float | None, attributes: Mapping[str, Any]
    ) -> None:
        optuna = import_optuna()
        found = self._study.get_trials(deepcopy=False)[number]
        if found.state.is_finished():  # by the same process, which was killed afterwards
            return
        for key, given in attributes.items():
            self._note(found, key, given)
        if found.state.name == "WAITING":  # only a running trial can be ended
            running = optuna.trial.TrialState.RUNNING
            self._study._storage.set_trial_state_values(found._trial_id, state=running)
        self._study.tell(number, value, state=getattr(optuna.trial.TrialState, state))


def import_optuna() -> Any:
    """Import Optuna, quietly; raise a `UserError` where it is missing."""
    try:
        import optuna
    except ImportError:
        raise UserError(
            'sweeps need Optuna: pip install "rl-training[sweep]" (or pip install optuna)'
        ) from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
    # The last step of a range may be below its upper bound, as in Python's `range`.
    warnings.filterwarnings("ignore", message="The distribution is specified by .* divisible by")
    return optuna


def rehearse(sweep: SweepFile) -> None:
    """Raise `ConfigError` if the sampler or the pruner does not work; stores nothing."""
    if sweep.pruner is not None:
        _rehearse_pruner(sweep, *sweep.pruner)
    name, arguments = sweep.sampler
    if name == "grid":
        return
    optuna = import_optuna()
    copy = optuna.create_study(sampler=build_sampler(sweep, 0))
    distributions = sweep.space.distributions()
    with _explained("sampler", name, arguments):
        for number in range(REHEARSED):
            copy.tell(copy.ask(distributions), float(number))


def _rehearse_pruner(sweep: SweepFile, name: str, arguments: Params) -> None:
    optuna, config = import_optuna(), sweep.config(next(sweep.examples()))
    copy = optuna.create_study(sampler=optuna.samplers.RandomSampler(0), pruner=build_pruner(sweep))
    with _explained("prune", name, arguments):
        for number in range(REHEARSED):
            trial = copy.ask()
            for step in (config.eval_interval, config.total_timesteps):
                trial.report(float(number), step)
                trial.should_prune()
            copy.tell(trial, float(number))


def build_sampler(sweep: SweepFile, number: int) -> Any:
    """The sampler that suggests the trials from `number` on."""
    name, arguments = sweep.sampler
    if "seed" in arguments:
        raise ConfigError(f"sampler.{name}.seed: use seed at the top of the file")
    own = {"seed": int(np.random.SeedSequence([sweep.settings.seed, number]).generate_state(1)[0])}
    if name == "tpe":
        own["constant_liar"] = True
    return _build("samplers", SAMPLERS[name], "sampler", name, arguments, own)


def build_pruner(sweep: SweepFile) -> Any:
    if sweep.pruner is None:
        return import_optuna().pruners.NopPruner()
    name, arguments = sweep.pruner
    return _build("pruners", PRUNERS[name], "prune", name, arguments, {})


def _build(room: str, kind: str, key: str, name: str, arguments: Params, own: Params) -> Any:
    """Make an object of Optuna from the arguments of a sweep file and our own defaults."""
    made = getattr(getattr(import_optuna(), room), kind)
    short_names = PRUNER_NAMES.get(name, {}) if key == "prune" else {}
    theirs = [each for each in inspect.signature(made).parameters if not each.startswith("_")]
    accepted = [*short_names, *(each for each in theirs if each != "seed")]
    for argument in arguments:
        if argument not in accepted:
            raise ConfigError(
                f"{key}.{name}.{argument} = {short(arguments[argument])}: unknown argument"
                f"{suggestion(argument, accepted)}; Optuna's {kind} has {', '.join(accepted)}"
            )
    given = {short_names.get(each, each): value for each, value in arguments.items()}
    with _explained(key, name, arguments):
        return made(**{**own, **given})


@contextlib.contextmanager
def _explained(key: str, name: str, arguments: Params) -> Iterator[None]:
    """Turn an error of Optuna about its arguments into a `ConfigError`."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{key}.{name}: needs the package {error.name}; run `pip install {error.name}`"
        ) from None
    except Exception as error:
        reason = one_line(last_line(error), 300)
        raise ConfigError(
            f"{key}.{name} = {short(arguments)}: Optuna refuses it: {reason}"
        ) from None


def _storage(journal: Path, url: str | None) -> Any:
    optuna = import_optuna()
    if url is None:
        return optuna.storages.JournalStorage(_journal_backend(journal))
    return open_database(url)


def open_database(url: str) -> Any:
    """Open the storage of studies in a database; raise `ConfigError` without its password."""
    optuna = import_optuna()
    try:
        return optuna.storages.RDBStorage(url)
    except Exception as error:  # of SQLAlchemy, or of a database's own package
        reason = one_line(without_password(str(error), url), 300)
        raise ConfigError(f"study = {masked(url)!r}: cannot be opened ({reason})") from None


def _journal_backend(path: Path) -> Any:
    from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock

    class RepairingBackend(JournalFileBackend):
        """Removes half a line, left by a full disk or a power failure, that would hide the rest."""

        def append_logs(self, logs: list[dict[str, Any]]) -> None:
            lock.acquire()
            try:
                _remove_half_line(path)
            finally:
                lock.release()
            super().append_logs(logs)

    lock = JournalFileSymlinkLock(str(path), grace_period=LOCK_SECONDS)
    return RepairingBackend(str(path), lock_obj=lock)


def _remove_half_line(path: Path) -> None:
    with path.open("rb+") as file:
        size = file.seek(0, os.SEEK_END)
        if size == 0:
            return
        file.seek(size - 1)
        if file.read(1) == b"\n":
            return
        start = max(0, size - 2**20)
        file.seek(start)
        file.truncate(start + file.read().rfind(b"\n") + 1)
