"""The data of the page: everything that it shows of runs, as bounded JSON.

`page_data` reads run folders. Where runs are read again and again, as in the dashboard, `read_run`
and `assemble` do the same in two parts, so that runs that did not change need not be read again.
"""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rl_training.errors import UserError
from rl_training.experiment.curves import NO_EVALUATIONS, Group, find_runs, group_runs
from rl_training.experiment.overview import RUNNING
from rl_training.experiment.score_rows import Row
from rl_training.experiment.statistics import RESAMPLES
from rl_training.report.health import group_health, group_phases
from rl_training.report.numbers import Axes
from rl_training.report.results import (
    comparisons_json,
    curve_json,
    group_rows,
    published_json,
    score_json,
    time_json,
)
from rl_training.report.runs import Link, RunDetails, machine_facts, read_run, run_json
from rl_training.report.settings import changes_json, differences_json, is_offline
from rl_training.types import Json
from rl_training.validation import user_path
from rl_training.version import __version__

TITLE = "Training report"
MOST_POINTS, FEWEST_POINTS = 500, 10
"""Points of a curve"""
RUN_POINTS, GROUP_POINTS, HEALTH_POINTS = 40_000, 8_000, 2_000
"""Points of all runs, of all groups, and of the health of all groups"""
MOST_NOTES = 20


def page_data(
    paths: Sequence[str | Path],
    *,
    published: bool = True,
    videos: bool = True,
    title: str | None = None,
    link: Link | None = None,
    detail: float = 1.0,
    resamples: int = RESAMPLES,
) -> Json:
    """Read the runs at or below `paths` and return the data of their page.

    `link` gives the address of a video, relative to the page; without it, videos are left out.
    `detail` below 1 reduces the number of points.
    """
    found = find_runs(paths)
    if not found:
        raise no_runs(paths)
    return assemble(
        [read_run(path) for path in found],
        published=published,
        title=title,
        link=link if videos else None,
        detail=detail,
        resamples=resamples,
    )


def no_runs(paths: Sequence[str | Path]) -> UserError:
    """Return the error for folders that have no runs."""
    places = ", ".join(str(user_path(path)) for path in paths)
    return UserError(f"{places}: no runs found; name run folders, or folders that contain them")


def assemble(
    runs: Sequence[RunDetails],
    *,
    published: bool = True,
    title: str | None = None,
    link: Link | None = None,
    detail: float = 1.0,
    resamples: int = RESAMPLES,
) -> Json:
    """Return the data of a page about runs that have been read."""
    page = _Page(runs, group_runs([run.curve for run in runs]), Axes(), detail, resamples)
    groups = page.groups_json()
    shown_runs, machines = page.runs_json(link)
    return {
        "title": title or TITLE,
        "created": datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
        "version": __version__,
        "notes": _notes(runs),
        "methods": [{"label": label, "algorithm": each} for label, each in page.methods.items()],
        "tasks": page.tasks_json(),
        "groups": groups,
        "runs": shown_runs,
        "machines": machines,
        "published": page.published_json(groups) if published else [],
        "differences": differences_json([group.runs[0].config for group in page.groups]),
        **comparisons_json(
            [row for row in page.rows if row is not None], page.tasks, list(page.methods), resamples
        ),
        "axes": page.axes.values,
    }


@dataclass(frozen=True)
class _Page:
    """The runs of a page and their groups, which its parts refer to by their places."""

    runs: Sequence[RunDetails]
    groups: Sequence[Group]
    axes: Axes
    detail: float
    resamples: int

    @functools.cached_property
    def tasks(self) -> list[str]:
        return list(dict.fromkeys(group.environment for group in self.groups))

    @functools.cached_property
    def methods(self) -> dict[str, str]:
        """Labels with their algorithms, in the order of their colors."""
        return dict(sorted((group.label, group.algorithm) for group in self.groups))

    @functools.cached_property
    def _places(self) -> dict[Path, int]:
        return {run.curve.path: place for place, run in enumerate(self.runs)}

    @functools.cached_property
    def rows(self) -> list[Row | None]:
        """The scores of each group; None for one without evaluations."""
        return group_rows(self.groups, self.resamples)

    def tasks_json(self) -> list[Json]:
        """Return the names of tasks, and what their runs count as steps."""
        counts = {
            task: {
                "updates" if is_offline(group.runs[0].config) else "environment steps"
                for group in self.groups
                if group.environment == task
            }
            for task in self.tasks
        }
        return [{"name": task, "unit": " or ".join(sorted(counts[task]))} for task in self.tasks]

    def groups_json(self) -> list[Json]:
        labels = list(self.methods)
        return [
            {
                "method": labels.index(group.label),
                "task": self.tasks.index(group.environment),
                "score": score_json(row),
                **self._group_json(group, [self._places[run.path] for run in group.runs]),
            }
            for group, row in zip(self.groups, self.rows, strict=True)
        ]

    def _group_json(self, group: Group, members: list[int]) -> Json:
        points = self._points(GROUP_POINTS, len(self.groups))
        few = self._points(HEALTH_POINTS, len(self.groups))
        runs = [self.runs[place] for place in members]
        return {
            "runs": members,
            "notes": list(group.notes),
            "curve": curve_json(group, self.axes, points, self.resamples),
            "time": time_json(group, self.axes, points, self.resamples),
            "health": group_health([run.health for run in runs], self.axes, few),
            "phases": group_phases([(run.seconds, run.step) for run in runs]),
            "settings": changes_json(group.runs[0].config),
        }

    def runs_json(self, link: Link | None) -> tuple[list[Json], list[list[list[str]]]]:
        """Return the runs, and the different machines that they refer to."""
        points = self._points(RUN_POINTS, len(self.runs))
        machines: dict[str, int] = {}
        shown = []
        for run in self.runs:
            facts = json.dumps(machine_facts(run.metadata))
            shown.append(
                {
                    **run_json(run, self.axes, points, link),
                    "group": self._group_of(run),
                    "machine": machines.setdefault(facts, len(machines)),
                }
            )
        return shown, [json.loads(facts) for facts in machines]

    def _group_of(self, run: RunDetails) -> int | None:
        """Return the place of a run's group, also for a second run of a seed; None without one."""
        same = [
            place
            for place, group in enumerate(self.groups)
            if (group.environment, group.algorithm) == (run.curve.environment, run.curve.algorithm)
        ]
        for place in same:
            if any(each.path == run.curve.path for each in self.groups[place].runs):
                return place
        for place in same:
            if self.groups[place].runs[0].config == run.curve.config:
                return place
        return None

    def published_json(self, groups: Sequence[Json]) -> list[Json]:
        """Return published curves beside runs that learn online, as those of the curves did."""
        curves = []
        for task, name in enumerate(self.tasks):
            scores = [
                shown["score"]
                for group, shown in zip(self.groups, groups, strict=True)
                if shown["task"] == task and not is_offline(group.runs[0].config)
            ]
            if scores:
                last = max((score["step"] for score in scores if score), default=0)
                curves += published_json(task, name, last)
        return curves

    def _points(self, budget: int, curves: int) -> int:
        """Return the most points of each of several curves that share a budget."""
        share = int(self.detail * min(MOST_POINTS, budget / max(1, curves)))
        return max(FEWEST_POINTS, share)


def _notes(runs: Sequence[RunDetails]) -> list[str]:
    """Say which runs are missing from the comparison, and why.

    A run that has just begun has no evaluations yet, which is nothing to warn of.
    """
    notes = [
        f"{run.curve.name}: {run.curve.problem}"
        for run in runs
        if run.curve.problem is not None
        and (run.curve.state, run.curve.problem) != (RUNNING, NO_EVALUATIONS)
    ]
    more = len(notes) - MOST_NOTES
    return [*notes[:MOST_NOTES], *([f"and {more} more runs"] if more > 0 else [])]
