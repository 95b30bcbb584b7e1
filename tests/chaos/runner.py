"""Runs the trials of a campaign in forked processes, so that each takes no time to import.

A trial is a function that returns figures, or raises if a promise was broken. It runs in a session
of its own: whatever it leaves running is found, ended and counted as a failure.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import select
import shutil
import signal
import statistics
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .processes import end_session, session_processes

Figures = dict[str, float]
"""What a trial measured, such as `exit_seconds`"""


class PromiseBroken(AssertionError):
    """A trial found that a promise does not hold."""


class Skipped(Exception):
    """This machine cannot run the trial."""


@dataclass(frozen=True)
class Trial:
    """One trial of a campaign. Everything random in it comes from its own random numbers."""

    campaign: str
    seed: int
    index: int
    work: Path
    """The folder that all trials of the campaign share"""
    device: str = "cpu"

    @property
    def folder(self) -> Path:
        """The trial's own folder."""
        return self.work / f"trial-{self.index:05d}"

    @property
    def command(self) -> str:
        """The command that repeats the trial."""
        device = "" if self.device == "cpu" else f" --device {self.device}"
        return (
            f"python -m tests.chaos {self.campaign} --seed {self.seed} --trial {self.index}{device}"
        )

    def random(self) -> random.Random:
        return random.Random(f"{self.campaign} {self.seed} {self.index}")


@dataclass(frozen=True)
class Campaign:
    """The trials that show one promise."""

    name: str
    title: str
    trials: int
    """Number of trials at the full figure"""
    run: Callable[[Trial], Figures]
    describe: Callable[[Trial], str] = lambda trial: ""
    """What a trial does, in a few words"""
    timeout: float = 60.0
    """Seconds after which a trial is ended and has failed"""
    timed: bool = False
    """Whether times are measured, so that no other trial runs at the same time"""
    per_process: int = 1
    """Number of trials that share a process, where each is short and harmless"""
    compiling: int = 0
    """Number of trials at the end that compile, which takes long"""
    on_gpu: bool = False
    """Whether it can also be run with `--device cuda`"""
    counted: tuple[str, ...] = ()
    """Figures that the report adds up; of the others it has the median and the worst"""


@dataclass(frozen=True)
class Outcome:
    """The result of one trial."""

    index: int
    held: bool
    seconds: float
    figures: Figures = field(default_factory=dict)
    problem: str = ""
    skipped: bool = False


def require(condition: object, problem: str) -> None:
    """Raise `PromiseBroken` with a message unless the condition holds."""
    if not condition:
        raise PromiseBroken(problem)


def choose_trials(campaign: Campaign, count: int | None, *, fast: bool = False) -> list[int]:
    """Return all trials of a campaign, or `count` that are spread evenly over its kinds.

    `fast` leaves out the trials that compile.
    """
    total = campaign.trials - (campaign.compiling if fast else 0)
    if count is None or count >= total:
        return list(range(total))
    # Multiples of a number near the golden ratio, without a common divisor, are spread well.
    distance = round(total * (5**0.5 - 1) / 2)
    while math.gcd(distance, total) > 1:
        distance += 1
    return sorted(number * distance % total for number in range(count))


def run_trials(
    campaign: Campaign, trials: Sequence[Trial], processes: int = 2, *, keep: bool = False
) -> Iterator[Outcome]:
    """Run trials in parallel and yield their outcomes as they end.

    `keep` leaves the folders of the trials, so that a failure can be examined.
    """
    size = campaign.per_process
    waiting = deque(deque(trials[first : first + size]) for first in range(0, len(trials), size))
    active: dict[int, _Worker] = {}
    try:
        while waiting or active:
            while waiting and len(active) < (1 if campaign.timed else processes):
                worker = _Worker(campaign, waiting.popleft(), keep=keep)
                active[worker.pipe] = worker
            ready, _, _ = select.select(list(active), [], [], 0.1)
            for worker in list(active.values()):
                yield from worker.read(worker.pipe in ready)
                if worker.ended:
                    del active[worker.pipe]
                    os.close(worker.pipe)
                    if worker.trials:
                        waiting.appendleft(worker.trials)
    finally:
        for worker in active.values():
            worker.end()


class _Worker:
    """A forked process that runs trials one after another and reports each as a line of JSON."""

    def __init__(self, campaign: Campaign, trials: deque[Trial], *, keep: bool) -> None:
        self.trials, self.ended = trials, False
        self._campaign, self._keep, self._text = campaign, keep, b""
        self.pipe, sink = os.pipe()
        self.process = os.fork()
        if self.process == 0:
            os.close(self.pipe)
            _run_and_exit(campaign, trials, sink)
        os.close(sink)
        self._began = time.monotonic()

    def read(self, is_ready: bool) -> Iterator[Outcome]:
        """Yield what is new, and notice if the process has ended or takes too long."""
        if is_ready:
            data = os.read(self.pipe, 65536)
            self._text += data
            *lines, self._text = self._text.split(b"\n")
            for line in lines:
                yield self._outcome(Outcome(**json.loads(line)))
            if not data:
                yield from self._close("the process of the trial died")
        elif time.monotonic() - self._began > self._campaign.timeout:
            yield from self._close(f"did not end within {self._campaign.timeout:.0f} s")

    def end(self) -> None:
        end_session(self.process)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.process, 0)
        self.ended = True

    def _close(self, problem: str) -> Iterator[Outcome]:
        self.end()
        if self.trials:
            seconds = time.monotonic() - self._began
            yield self._outcome(Outcome(self.trials[0].index, False, seconds, problem=problem))

    def _outcome(self, outcome: Outcome) -> Outcome:
        trial, self._began = self.trials.popleft(), time.monotonic()
        if not outcome.held and (log := trial.folder / "output.txt").is_file():
            tail = log.read_text(errors="replace").splitlines()[-8:]
            shown = "\n".join(tail)
            outcome = Outcome(**{**asdict(outcome), "problem": f"{outcome.problem}\n{shown}"})
        if not self._keep:
            shutil.rmtree(trial.folder, ignore_errors=True)
        return outcome


def _run_and_exit(campaign: Campaign, trials: Iterable[Trial], sink: int) -> None:
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    code = 1
    try:
        for trial in trials:
            outcome = _run(campaign, trial)
            os.write(sink, (json.dumps(asdict(outcome)) + "\n").encode())
        code = 0
    finally:
        os._exit(code)


def _run(campaign: Campaign, trial: Trial) -> Outcome:
    began, problem, skipped, figures = time.monotonic(), "", False, {}
    shutil.rmtree(trial.folder, ignore_errors=True)
    trial.folder.mkdir(parents=True)
    _redirect(trial.folder / "output.txt")
    try:
        figures = campaign.run(trial)
        left = _left_running()
        require(not left, f"left processes running: {left}")
    except Skipped as reason:
        problem, skipped = str(reason), True
    except PromiseBroken as broken:
        problem = str(broken)
    except BaseException:
        problem = traceback.format_exc(limit=-4)
    return Outcome(
        trial.index, not problem or skipped, time.monotonic() - began, figures, problem, skipped
    )


def _left_running(patience: float = 5.0) -> list[str]:
    """Return the other processes of this session that do not end by themselves."""
    until = time.monotonic() + patience
    while found := session_processes(os.getpid(), except_for=os.getpid()):
        if time.monotonic() > until:
            return [str(each) for each in found]
        time.sleep(0.02)
    return []


def _redirect(log: Path) -> None:
    """Send everything that is printed from now on to a file."""
    sys.stdout.flush()
    sys.stderr.flush()
    target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(target, 1)
    os.dup2(target, 2)
    os.close(target)


def summarize(campaign: Campaign, trials: Sequence[Trial], outcomes: list[Outcome]) -> Any:
    """Return the campaign's entry of the report."""
    by_index = {trial.index: trial for trial in trials}
    failures = [each for each in outcomes if not each.held]
    names = sorted({name for each in outcomes for name in each.figures})
    values = {name: [o.figures[name] for o in outcomes if name in o.figures] for name in names}
    return {
        "title": campaign.title,
        "full": campaign.trials,
        "trials": len(outcomes),
        "held": sum(each.held and not each.skipped for each in outcomes),
        "failed": len(failures),
        "skipped": sum(each.skipped for each in outcomes),
        "longest_trial_seconds": round(max((o.seconds for o in outcomes), default=0.0), 1),
        "figures": {
            name: _summary(found, is_counted=name in campaign.counted)
            for name, found in values.items()
        },
        "failures": [
            {
                "command": by_index[each.index].command,
                "trial": campaign.describe(by_index[each.index]),
                "problem": each.problem,
            }
            for each in sorted(failures, key=lambda each: each.index)
        ],
    }


def _summary(values: Sequence[float], *, is_counted: bool) -> dict[str, float]:
    if is_counted:
        return {"total": sum(values)}
    return {"median": round(statistics.median(values), 4), "worst": round(max(values), 4)}
