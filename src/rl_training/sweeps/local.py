"""Run a sweep on this machine: worker processes, sized to its cores and GPUs."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rl_training.envs.cores import available_cores
from rl_training.errors import ConfigError, TrainingError, last_line
from rl_training.runtime.job_needs import job_needs
from rl_training.sweeps.file import SweepFile
from rl_training.sweeps.folder import STUDY_VARIABLE, SweepFolder

MOST_DEATHS = 5
"""Workers that may die in a row before they have worked for a while"""
QUICK_SECONDS = 60.0
STOP_SECONDS = 30.0
POLL_SECONDS = 0.2
EXIT_DONE, EXIT_PREEMPTED = 0, 75
MIN_GPU_BYTES = 2 * 2**30
"""What a trial on a GPU needs at least: the CUDA context and compiled programs"""
USABLE = 0.8
"""Share of a GPU's memory to plan with"""


@dataclass
class _Worker:
    place: int
    process: subprocess.Popen[bytes]
    began: float = field(default_factory=time.monotonic)


class LocalWorkers:
    """Worker processes of a sweep. One that dies is started again.

    Each has a pipe to this process. If this process is killed, the pipe ends, and the workers stop
    with a checkpoint.
    """

    def __init__(
        self,
        folder: SweepFolder,
        sweep: SweepFile,
        number: int,
        modules: Sequence[str] = (),
    ) -> None:
        self._folder, self._modules = folder, modules
        self._study = sweep.settings.study
        self._devices = gpu_places(number)
        self._workers = [self._start(place) for place in range(number)]
        self._deaths = 0

    def _start(self, place: int) -> _Worker:
        command = [sys.executable, "-m", "rl_training", "sweep-worker", str(self._folder.path)]
        for module in self._modules:
            command += ["--import", module]
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        if self._study is not None:
            environment[STUDY_VARIABLE] = self._study
        if self._devices:
            environment["CUDA_VISIBLE_DEVICES"] = self._devices[place]
        with _log(self._folder, place).open("ab") as log:
            process = subprocess.Popen(  # noqa: S603 (this program)
                command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,  # Ctrl-C is for this process alone
            )
        return _Worker(place, process)

    def watch(self, look: Callable[[], None]) -> None:
        """Wait until all workers are done; `look` is called several times a second.

        Raises `TrainingError` if workers die again and again.
        """
        while self._workers:
            look()
            time.sleep(POLL_SECONDS)
            for worker in list(self._workers):
                code = worker.process.poll()
                if code is None:
                    continue
                if code == EXIT_DONE:
                    self._workers.remove(worker)
                    continue
                self._count_death(worker, code)
                self._workers[self._workers.index(worker)] = self._start(worker.place)

    def _count_death(self, worker: _Worker, code: int) -> None:
        quick = time.monotonic() - worker.began < QUICK_SECONDS
        self._deaths = self._deaths + 1 if quick else 1
        if self._deaths > MOST_DEATHS:
            log = _log(self._folder, worker.place)
            raise TrainingError(
                f"{self._deaths} workers ended one after another (exit code {code}); "
                f"the last lines of {log} are:\n{tail(log)}"
            )

    def stop(self) -> None:
        """Stop all workers with checkpoints; kill those that do not end in time."""
        for worker in self._workers:
            with contextlib.suppress(ProcessLookupError):
                worker.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + STOP_SECONDS
        for worker in self._workers:
            try:
                worker.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                worker.process.kill()
                worker.process.wait()
        self._workers.clear()


@contextlib.contextmanager
def local_workers(
    folder: SweepFolder, sweep: SweepFile, number: int, modules: Sequence[str] = ()
) -> Iterator[LocalWorkers]:
    """Start worker processes, and stop them at the end."""
    workers = LocalWorkers(folder, sweep, number, modules)
    try:
        yield workers
    finally:
        workers.stop()


def check_gpus(sweep: SweepFile) -> None:
    """Raise `ConfigError` if trials need a GPU and this machine has none."""
    wanted = sweep.settings.resources.gpus
    if not wanted:
        return
    import torch

    if not torch.cuda.is_available():
        raise ConfigError(
            f"resources.gpus = {wanted:g}: this machine has no GPU that PyTorch can use; remove "
            "gpus, or use --on ray or --on slurm"
        )


def suitable_workers(sweep: SweepFile) -> int:
    """How many trials this machine should run at once."""
    import torch

    by_cores = max(1, available_cores() // sweep.settings.resources.cpus)
    example = sweep.config(next(sweep.examples()))
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not gpus or example.device == "cpu":
        return min(by_cores, sweep.trials)
    if share := sweep.settings.resources.gpus:
        by_gpus = int(gpus / share)
    else:
        need = job_needs(example.with_changes(seeds=sweep.seeds)).memory + MIN_GPU_BYTES
        memory = torch.cuda.get_device_properties(0).total_memory
        by_gpus = gpus * int(USABLE * memory // need)
    return max(1, min(by_cores, by_gpus, sweep.trials))


def gpu_places(number: int) -> list[str]:
    """The GPU of each worker, in turn; empty if there is at most one."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count < 2:
        return []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(index) for index in range(count)]
    return [names[place % count] for place in range(number)]


def stop_with_parent() -> None:
    """Stop this process with a checkpoint when the pipe from its parent ends."""
    import threading

    def wait() -> None:
        with contextlib.suppress(OSError, ValueError):
            while os.read(0, 4096):
                pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="parent", daemon=True).start()


def _log(folder: SweepFolder, place: int) -> Path:
    return folder.workers / f"{os.uname().nodename}-{place}.log"


def tail(path: Path) -> str:
    """The last lines of a log."""
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError as error:
        return last_line(error)
    return "\n".join(lines[-15:])
