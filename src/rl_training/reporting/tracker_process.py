"""A program that passes rows to an experiment tracker; `trackers.py` starts it as a process.

The clients of trackers take seconds to import, and their calls can block for minutes if a server
does not answer. In a process of their own they slow nothing down, and can be ended at any time.

It is run as a file and imports nothing of this package, so that it starts quickly. It reads one
JSON object per line from standard input, and answers each with one on standard output.
"""

from __future__ import annotations

import contextlib
import contextvars
import importlib
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

ENDING_SECONDS = 30.0
"""How long this process goes on after the run's process has died"""
DEFAULTS = {
    # Without a terminal, nobody can answer a question or read a line.
    "WANDB_SILENT": "true",
    "WANDB_CONSOLE": "off",
    "WANDB_DISABLE_GIT": "true",
    "WANDB_DISABLE_CODE": "true",
    # This package tries again by itself; the clients should give up soon.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
    "WANDB_INIT_TIMEOUT": "30",
}
"""Environment variables, unless the user has set them"""
MAX_METRICS = 1000
"""Most metrics in one request to MLflow"""
MAX_PARAMETER = 500
"""Characters of a setting in MLflow"""
TAG = "rl_training_id"


class Row(NamedTuple):
    """A row of `metrics.jsonl`."""

    position: int
    wall_time: float
    values: Mapping[str, float]


class Remote(Protocol):
    """A run at a tracker."""

    def log(self, rows: Sequence[Row]) -> None: ...
    def finish(self, summary: Mapping[str, float], status: str) -> None: ...


class WandbRun:
    """A run of Weights & Biases.

    The horizontal axis is a metric of its own. The step that W&B counts can only grow, so that a
    resumed run could not repeat one.
    """

    def __init__(self, run: Mapping[str, Any]) -> None:
        wandb: Any = importlib.import_module("wandb")

        # Left out, because they can reveal more than the user wants to publish.
        hidden = {
            "host": "",
            "program": "",
            "program_relpath": "",
            "program_abspath": "",
            "x_executable": "",
            "x_disable_meta": True,
            "x_disable_machine_info": True,
        }
        known = getattr(wandb.Settings, "model_fields", {})
        self._run = wandb.init(
            project=run["project"] or os.environ.get("WANDB_PROJECT") or run["default_project"],
            id=run["id"],
            name=run["name"],
            group=run["group"],
            config=run["config"],
            resume="allow",
            reinit="create_new",
            allow_val_change=True,
            settings=wandb.Settings(**{key: hidden[key] for key in hidden if key in known}),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self._run.log({**row.values, "step": row.position})

    def finish(self, summary: Mapping[str, float], status: str) -> None:
        self._run.summary.update({**summary, "status": status})
        self._run.finish(exit_code=1 if status == "failed" else 0)


class MlflowRun:
    """A run of MLflow, found again by a tag."""

    def __init__(self, run: Mapping[str, Any]) -> None:
        mlflow: Any = importlib.import_module("mlflow")
        self._entities: Any = importlib.import_module("mlflow.entities")
        self._client = mlflow.MlflowClient()
        experiment = self._experiment(
            run["project"] or os.environ.get("MLFLOW_EXPERIMENT_NAME") or run["default_project"]
        )
        found = self._client.search_runs([experiment], f"tags.{TAG} = '{run['id']}'", max_results=1)
        if found:
            self._id = found[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
            return
        tags = {TAG: run["id"], "group": run["group"]}
        made = self._client.create_run(experiment, tags=tags, run_name=run["name"])
        self._id = made.info.run_id
        parameters = [
            self._entities.Param(key, value[:MAX_PARAMETER]) for key, value in _flat(run["config"])
        ]
        for first in range(0, len(parameters), 100):  # the most that MLflow takes at once
            self._client.log_batch(self._id, params=parameters[first : first + 100])

    def _experiment(self, name: str) -> str:
        found = self._client.get_experiment_by_name(name)
        if found is not None:
            return str(found.experiment_id)
        try:
            return str(self._client.create_experiment(name))
        except Exception:  # another run may have been faster
            found = self._client.get_experiment_by_name(name)
            if found is None:
                raise
            return str(found.experiment_id)

    def log(self, rows: Sequence[Row]) -> None:
        metrics = [
            self._entities.Metric(name, value, int(row.wall_time * 1000), row.position)
            for row in rows
            for name, value in row.values.items()
        ]
        for first in range(0, len(metrics), MAX_METRICS):
            self._client.log_batch(self._id, metrics=metrics[first : first + MAX_METRICS])

    def finish(self, summary: Mapping[str, float], status: str) -> None:
        for name, value in summary.items():
            self._client.log_metric(self._id, name, value)
        self._client.set_tag(self._id, "status", status)
        ended = {"failed": "FAILED", "interrupted": "KILLED"}.get(status, "FINISHED")
        self._client.set_terminated(self._id, ended)


class TrackioRun:
    """A run of Trackio, found again by its name, which contains the id."""

    def __init__(self, run: Mapping[str, Any]) -> None:
        trackio: Any = importlib.import_module("trackio")

        project = run["project"] or os.environ.get("TRACKIO_PROJECT") or run["default_project"]
        # In a context of its own: `init` ends the run that it finds in the current one.
        self._run = contextvars.copy_context().run(
            trackio.init,
            project,
            name=f"{run['name']}-{run['id']}",
            group=run["group"],
            config=run["config"],
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self._run.log(dict(row.values), step=row.position)

    def finish(self, summary: Mapping[str, float], status: str) -> None:
        if summary:
            self._run.log({**summary, "status": status})
        self._run.finish()


TRACKERS: dict[str, Callable[[Mapping[str, Any]], Remote]] = {
    "wandb": WandbRun,
    "mlflow": MlflowRun,
    "trackio": TrackioRun,
}


class Server:
    """Answers requests about the runs of one tracker.

    An answer has the key `error` if the request failed and can be repeated, `rejected` if these
    rows will never be accepted, or `fatal` if nothing can ever be sent.
    """

    def __init__(self, tracker: str) -> None:
        self._tracker = tracker
        self._remotes: dict[str, Remote] = {}

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        try:
            importlib.import_module(self._tracker)
        except BaseException as error:
            return {"fatal": f"the package {self._tracker} cannot be imported ({_line(error)})"}
        try:
            getattr(self, f"_{request['kind']}")(**request["arguments"])
        except BaseException as error:  # a client may raise anything, also SystemExit
            refused = request["kind"] == "log" and _is_refused(error)
            return {"rejected" if refused else "error": _line(error)}
        return {}

    def _open(self, key: str, run: Mapping[str, Any]) -> None:
        self._remotes[key] = TRACKERS[self._tracker](run)

    def _log(self, key: str, rows: Sequence[Sequence[Any]]) -> None:
        self._remotes[key].log([Row(*row) for row in rows])

    def _finish(self, key: str, summary: Mapping[str, float], status: str) -> None:
        if key in self._remotes:
            self._remotes[key].finish(summary, status)
            del self._remotes[key]

    def finish_all(self) -> None:
        """Finish the runs whose process has died."""
        for key in list(self._remotes):
            with contextlib.suppress(Exception):
                self._finish(key, {}, "interrupted")


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Yield nested settings as `a.b` and text, as MLflow needs them."""
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from _flat(part, f"{name}.{key}" if name else str(key))
    else:
        yield name, str(value)


def _is_refused(error: BaseException) -> bool:
    """Whether a server has answered that a request is wrong, so that it must not be repeated."""
    status = getattr(error, "get_http_status_code", None)
    return callable(status) and status() in (400, 413, 422)


def _line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # the run's process decides when this one ends
        signal.signal(number, signal.SIG_IGN)
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    # Whatever a client prints must not be taken for an answer.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    with open(os.devnull, "w") as null:
        os.dup2(null.fileno(), 1)
    server = Server(sys.argv[1])
    for line in sys.stdin:
        answer = server.answer(json.loads(line))
        try:
            print(json.dumps(answer), file=answers, flush=True)
        except OSError:  # the run's process has died
            break
    ending = threading.Timer(ENDING_SECONDS, os._exit, (1,))
    ending.daemon = True
    ending.start()
    server.finish_all()
    ending.cancel()


if __name__ == "__main__":
    main()
