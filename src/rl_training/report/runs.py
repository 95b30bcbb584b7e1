"""What the page shows of one run. Everything is read through the readers of run folders."""

from __future__ import annotations

import re
import shlex
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rl_training.checkpoints.format import read_json
from rl_training.checkpoints.run_folder import RunFolder, last_metrics, read_metrics
from rl_training.errors import CheckpointError
from rl_training.experiment.curves import RETURN, SECONDS, RunCurve, read_curve
from rl_training.report.health import Health, health_of, phase_seconds
from rl_training.report.numbers import Axes, chosen, exact, rounded, text
from rl_training.types import Json

LOGGED = "time/time_elapsed"
"""Key of the rows that are written every `log_interval` steps, which have the time of each phase"""
VIDEOS = "videos"
MOST_VIDEOS = 40
"""Most videos of a run that are linked: those of its newest evaluations"""
MOST_FACTS, MAX_COMMAND = 20, 600
_VIDEO = re.compile(r"step_(\d{9,12})_(best|worst)\.mp4", re.ASCII)
Link = Callable[[Path], str]
"""From the path of a file to its address, relative to the page"""


@dataclass(frozen=True)
class RunDetails:
    """What was read from one run folder."""

    curve: RunCurve
    step: int
    """Steps so far, as far as rows say so"""
    total: int | None
    speed: float | None
    """Steps per second at the last row"""
    health: Health
    seconds: dict[str, float]
    """Training time of each phase, and the total"""
    metadata: Json
    videos: tuple[tuple[int, str, Path], ...]
    """Step, `best` or `worst`, and file; the newest first"""


def read_run(path: Path) -> RunDetails:
    """Read a run folder. Whatever is damaged or missing is left out."""
    curve, folder = read_curve(path), RunFolder(path)
    evaluations = readable(lambda: read_metrics(folder.metrics, RETURN), [])
    last: Json = readable(lambda: last_metrics(folder), {})
    timed: Json = readable(lambda: last_metrics(folder, LOGGED), {})
    metadata: Json = readable(lambda: read_json(path / "metadata.json"), {})
    total = curve.config.get("total_timesteps")
    return RunDetails(
        curve=curve,
        step=max(curve.last_step, count(last.get("step")) or 0),
        total=count(total),
        speed=_positive(readable(lambda: last_metrics(folder, "time/fps"), {}).get("time/fps")),
        health=health_of(evaluations),
        seconds=phase_seconds(timed, last.get(SECONDS)),
        metadata=metadata,
        videos=readable(lambda: videos_of(folder), ()),
    )


def run_json(run: RunDetails, axes: Axes, points: int, link: Link | None) -> Json:
    """Return what the page shows of a run, without its group and its machine."""
    curve = run.curve
    places = chosen(len(curve.steps), points)
    has_times = len(places) > 0 and bool(np.isfinite(curve.wall_seconds).any())
    best = int(np.argmax(curve.returns)) if len(curve.returns) else None
    return {
        "name": curve.name,
        "path": text(curve.path),
        "id": curve.run_id,
        "seed": curve.seed,
        "state": curve.state,
        "problem": curve.problem,
        "step": run.step,
        "total": run.total,
        "speed": run.speed,
        "last": _evaluation(curve, -1) if len(curve.steps) else None,
        "best": None if best is None else _evaluation(curve, best),
        "x": axes.add(curve.steps[places]),
        "returns": rounded(curve.returns[places]),
        "seconds": rounded(curve.wall_seconds[places]) if has_times else None,
        "created": _text_or_none(run.metadata.get("created")),
        "repeat": _repeat(run),
        "resume": _resume(run),
        "started_with": _started_with(run.metadata.get("command")),
        "videos": [] if link is None else [_video(*each, link) for each in run.videos],
    }


def machine_facts(metadata: Json) -> list[list[str]]:
    """Return versions, hardware and commit as pairs of a name and a text."""
    facts: list[list[str]] = []
    commit = _text_or_none(metadata.get("git_commit"))
    if commit:
        facts.append(["Commit", commit])
    for name, key in (
        ("Versions", "versions"),
        ("Machine", "hardware"),
        ("Execution", "execution"),
    ):
        section = metadata.get(key)
        if isinstance(section, dict):
            words = [
                f"{text(each, 40)} {text(value, 80)}"
                for each, value in list(section.items())[:MOST_FACTS]
                if value is not None and not isinstance(value, dict | list)
            ]
            facts.append([name, " · ".join(words)])
    level = _text_or_none(metadata.get("resume_level"))
    if level:
        facts.append(["Resume level", level])
    return facts


def _evaluation(curve: RunCurve, place: int) -> Json:
    return {"step": int(curve.steps[place]), "value": exact(curve.returns[place])}


def _repeat(run: RunDetails) -> str | None:
    if run.curve.state == "unreadable":
        return None
    return shell_command("train", "--config", path_argument(run.curve.path / "config.yaml"))


def _resume(run: RunDetails) -> str | None:
    if run.curve.state == "unreadable":
        return None
    more = []
    if run.curve.state == "finished" and run.total is not None:  # it needs a new end
        more = ["--total-timesteps", str(2 * run.total)]
    return shell_command("resume", path_argument(run.curve.path), *more)


def path_argument(path: Path) -> str:
    """Return a path that cannot be taken for an option, or for somebody's home folder."""
    given = str(path)
    return f"./{given}" if given.startswith(("-", "~")) else given


def shell_command(*words: str) -> str | None:
    """Return a command to paste into a shell; None if a control code makes that unsafe."""
    command = shlex.join(["rl-training", *words])
    return command if command.isprintable() else None


def _started_with(command: Any) -> str | None:
    """Return the recorded command as text. It is a stranger's, so the page offers no copy of it."""
    if not isinstance(command, list) or not all(isinstance(word, str) for word in command):
        return None
    words = list(command)
    if words and words[0].endswith("rl_training/__main__.py"):
        words[0] = "rl-training"
    return text(shlex.join(words), MAX_COMMAND)


def videos_of(folder: RunFolder) -> tuple[tuple[int, str, Path], ...]:
    """Return step, kind and file of the newest videos of a run."""
    if not folder.plain.has_folder(VIDEOS):
        return ()
    inner = folder.plain.inner(VIDEOS)
    found = [
        (int(named[1]), named[2], inner.path / name)
        for name, mode in inner.entries().items()
        if stat.S_ISREG(mode) and (named := _VIDEO.fullmatch(name))
    ]
    return tuple(sorted(found, key=lambda video: (-video[0], video[1]))[:MOST_VIDEOS])


def _video(step: int, kind: str, path: Path, link: Link) -> Json:
    return {"step": step, "kind": kind, "href": link(path)}


def readable(read: Callable[[], Any], otherwise: Any) -> Any:
    """Return what is read; `otherwise` if that fails."""
    try:
        return read()
    except (OSError, CheckpointError):
        return otherwise


def count(value: Any) -> int | None:
    """Return a number from a file if it can be a count, which JavaScript can hold."""
    return value if type(value) is int and 0 <= value < 2**53 else None


def _positive(value: Any) -> float | None:
    is_number = type(value) in (int, float) and 0 < value < 1e12
    return float(f"{value:.4g}") if is_number else None


def _text_or_none(value: Any) -> str | None:
    return text(value) if isinstance(value, str) and value else None
