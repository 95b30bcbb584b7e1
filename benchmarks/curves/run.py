"""Trains the seeds of a variant together, and writes their curve after every evaluation."""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from reporting import machine, warn_if_busy, write_json

import rl_training
from curves.data import check_data
from curves.mathematics import mathematics
from curves.peer_tasks import code_of
from curves.settings import (
    FINAL,
    Variant,
    code_commit,
    command_line,
    curve_path,
    fingerprint,
    placed,
    request,
    start_folder,
    variant_config,
)
from curves.stored import difference, read_stored
from rl_training.callbacks import TrainingContext
from rl_training.checkpoints.loading import MODEL_FILES, find_checkpoint
from rl_training.checkpoints.run_folder import package_versions
from rl_training.config import TrainConfig
from rl_training.data.scores import ReferenceScale, reference_scale
from rl_training.envs.cores import available_cores
from rl_training.errors import TrainingInterrupted, UserError
from rl_training.experiment.curves import find_runs, read_curve
from rl_training.runtime.workflows import resume_together

CURVE, RUNS = "curve.json", "runs"
"""What the work folder of a curve contains: the curve so far, and the run folders"""

Rounds = list[dict[str, Any]]


class CurveRecorder(rl_training.Callback):
    """Collects the evaluations of all seeds, and passes all of them on after each one."""

    def __init__(
        self,
        seeds: Sequence[int],
        keep: Callable[[str, Rounds], None],
        before: Sequence[dict[str, Any]] = (),
        seconds: float = 0.0,
        scale: ReferenceScale | None = None,
    ) -> None:
        """`keep` receives a description of the execution mode, and the rounds so far. `before` are
        the rounds of earlier processes, which took `seconds`. With a `scale`, rounds also have
        scores."""
        self._seeds, self._keep, self._scale = list(seeds), keep, scale
        self._rounds: dict[int, dict[str, Any]] = {each["step"]: dict(each) for each in before}
        self._began = time.perf_counter() - seconds

    @property
    def seconds(self) -> float:
        """Including set-up, compilation and evaluations: the time that a user waits."""
        return time.perf_counter() - self._began

    def for_seed(self, seed: int) -> CurveRecorder:
        return self  # a round contains all seeds

    def on_evaluation_end(self, context: TrainingContext) -> None:
        assert context.evaluation is not None
        step, seconds = context.position, self.seconds
        found = self._rounds.setdefault(step, {"step": step, "returns": [None] * len(self._seeds)})
        seed_index = self._seeds.index(context.config.seed)
        found["returns"][seed_index] = context.evaluation.metrics["eval_return_mean"]
        if (training := context.rollout_metrics().get("ep_rew_mean")) is not None:
            # Of the latest 100 episodes, with exploration: what some packages report.
            of_seeds = found.setdefault("training_returns", [None] * len(self._seeds))
            of_seeds[seed_index] = training
        if self._scale is not None:
            found["scores"] = scores(found["returns"], self._scale)
        found["wall_seconds"] = round(seconds, 2)
        found["steps_per_second"] = round(step * len(self._seeds) / seconds, 1)
        self._keep(context.execution, list(self._rounds.values()))


def score_scale(config: TrainConfig, arguments: argparse.Namespace) -> ReferenceScale | None:
    """The scale of the scores of runs on recorded data and after it; None for other runs."""
    return reference_scale(config.env_id) if arguments.data or arguments.init_from else None


def scores(returns: Sequence[float | None], scale: ReferenceScale) -> list[float | None]:
    return [None if each is None else round(scale.score(each), 2) for each in returns]


def learn(variant: Variant, arguments: argparse.Namespace) -> Path:
    """Train the seeds of the variant together, and return the file with their curve.

    With `arguments.work`, run folders are kept there until the curve is complete. A run that was
    stopped is continued, unless the code computes something else now. With `arguments.keep`, the
    last checkpoints stay there. Raises `TrainingInterrupted` after a signal.
    """
    config = variant_config(variant, arguments)
    assert config.seeds is not None
    path = curve_path(arguments.out, str(config.env_id), variant.name, arguments.first_seed)
    if arguments.data is not None:
        check_data(arguments.data_folder, arguments.data_about, str(config.env_id), arguments.data)
    about = describe(variant, arguments, config)
    scale = score_scale(config, arguments)
    with work_folder(arguments.work, path.stem) as work:
        runs, earlier = continued(work, about)
        about["sessions"] = [*earlier.get("sessions", []), session(about, runs)]
        kept = {**about, "execution": None, "seconds": earlier.get("seconds", 0.0)}
        kept["evaluations"] = earlier.get("evaluations", [])
        write_json(work / CURVE, kept)

        further = stored_steps(path, about)

        def keep(execution: str, rounds: Rounds) -> None:
            kept.update(execution=execution, seconds=round(recorder.seconds, 2), evaluations=rounds)
            if rounds[-1]["step"] >= further:
                write_json(path, kept)
            write_json(work / CURVE, kept)
            show(variant.name, rounds[-1])

        recorder = CurveRecorder(config.seeds, keep, kept["evaluations"], kept["seconds"], scale)
        try:
            train_or_continue(placed(config, arguments), work / RUNS, runs, recorder)
        except TrainingInterrupted:
            # Time after the last evaluation counts as well.
            write_json(work / CURVE, {**kept, "seconds": round(recorder.seconds, 2)})
            raise
        if not path.exists():  # all was trained before, and the file was lost
            write_json(path, kept)
        if arguments.keep:
            keep_checkpoints(work, kept)
        else:
            shutil.rmtree(work, ignore_errors=True)
    return path


def keep_checkpoints(work: Path, kept: dict[str, Any]) -> None:
    """Leave only the last checkpoint of each seed and the curve, for runs that start from them."""
    final, part = work / FINAL, work / f"{FINAL}.part"
    for folder in (final, part):
        shutil.rmtree(folder, ignore_errors=True)
    part.mkdir()
    for run in find_runs([work / RUNS]):
        checkpoint = find_checkpoint(run, names=MODEL_FILES).folder
        shutil.copytree(checkpoint, part / f"seed{read_curve(run).seed}")
    write_json(part / CURVE, kept)
    part.rename(final)
    shutil.rmtree(work / RUNS)
    (work / CURVE).unlink()


def start_of(arguments: argparse.Namespace, env: str) -> dict[str, Any] | None:
    """What is known of the run that this one starts from; None if it starts from nothing."""
    if arguments.init_from is None:
        return None
    if arguments.work is None:
        raise UserError(
            "--init-from: needs --work, the folder with the run that this one starts from"
        )
    path = start_folder(arguments, env) / FINAL / CURVE
    if (kept := read_stored(path)) is None:
        raise UserError(
            f"--init-from {arguments.init_from}: {path} does not exist; measure that run first, "
            "with --keep"
        )
    own = ("name", "config", "env", "settings", "seeds", "planned_steps", "eval_episodes", "data")
    more = ("init_from", "config_fingerprint", "mathematics", "commit")
    found = {key: kept[key] for key in (*own, *more) if key in kept}
    return {**found, "returns": kept["evaluations"][-1]["returns"]}


def stored_steps(path: Path, about: dict[str, Any]) -> int:
    """How far the stored curve reaches if it is one of the same settings and code, else 0.

    It may come from another machine, and is replaced when the new one has reached as far.
    """
    values = read_stored(path)
    if values is None:
        return 0
    try:
        if difference(values, about):
            return 0
        return max((each["step"] for each in values["evaluations"]), default=0)
    except (LookupError, TypeError, AttributeError):  # not a curve
        return 0


def describe(
    variant: Variant, arguments: argparse.Namespace, config: TrainConfig
) -> dict[str, Any]:
    """Everything about a curve that is known before it is measured."""
    wanted, start = request(variant, arguments, config), start_of(arguments, str(config.env_id))
    scale = score_scale(config, arguments)
    from_start = None if start is None else start["config_fingerprint"]
    return {
        "machine": machine(cores=available_cores(), load_before=warn_if_busy()),
        "command": command_line(variant, arguments),
        **wanted,
        "config_fingerprint": fingerprint(config, wanted.get("data"), from_start),
        "mathematics": code_of(config, arguments, mathematics),
        "commit": arguments.commit or code_commit(),
        "versions": package_versions(),
        **({} if start is None else {"init_from": start}),
        **({} if scale is None else {"score_scale": str(scale)}),
    }


def session(about: dict[str, Any], runs: Sequence[Path]) -> dict[str, Any]:
    """The part of a curve that one process makes."""
    step = min((read_curve(run).last_step for run in runs), default=0)
    return {"from_evaluation": step, "commit": about["commit"], "machine": about["machine"]}


def show(name: str, newest: dict[str, Any]) -> None:
    if None not in newest["returns"]:
        mean = sum(newest["returns"]) / len(newest["returns"])
        print(
            f"{name}: {newest['step']:,} steps, mean return {mean:.1f}, "
            f"{newest['wall_seconds']:.0f} s, {newest['steps_per_second']:,.0f} steps/s",
            flush=True,
        )


@contextlib.contextmanager
def work_folder(parent: Path | None, name: str) -> Iterator[Path]:
    """A folder that stays if the run does not finish; without a parent, a temporary one."""
    if parent is not None:
        yield parent / name
        return
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def continued(work: Path, about: dict[str, Any]) -> tuple[list[Path], dict[str, Any]]:
    """The runs in a work folder that this code can continue, and their curve so far."""
    runs = find_runs([work / RUNS]) if (work / RUNS).is_dir() else []
    if not runs:
        return [], {}
    reason = cannot_continue(work, runs, about)
    if reason is None:
        return runs, json.loads((work / CURVE).read_text())
    print(f"stale: the runs in {work} are trained again from the beginning: {reason}", flush=True)
    shutil.rmtree(work)
    return [], {}


def cannot_continue(work: Path, runs: Sequence[Path], about: dict[str, Any]) -> str | None:
    try:
        kept = json.loads((work / CURVE).read_text())
    except (OSError, ValueError):
        return f"{CURVE} is missing or damaged"
    if reason := difference(kept, about):
        return reason
    if "init_from" in about and kept["init_from"]["returns"] != about["init_from"]["returns"]:
        return f"{about['init_from']['name']}, from which they start, was trained again"
    if sorted(str(read_curve(run).seed) for run in runs) != sorted(map(str, about["seeds"])):
        return "some seeds have no run folder"
    return None


def train_or_continue(
    config: TrainConfig, folder: Path, runs: Sequence[Path], recorder: CurveRecorder
) -> None:
    if not runs:
        rl_training.train(
            config.with_changes(output_dir=str(folder)), callbacks=[recorder], progress=False
        )
    elif unfinished := [run for run in runs if read_curve(run).state != "finished"]:
        resume_together(unfinished, callbacks=[recorder], progress=False)
