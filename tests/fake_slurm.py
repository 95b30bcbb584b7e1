"""The commands of Slurm that a sweep uses, on one machine: jobs are processes.

`install` makes a folder with `sbatch`, `srun`, `squeue`, `scancel` and `scontrol` to put on PATH.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

COMMANDS = ("sbatch", "srun", "squeue", "scancel", "scontrol")
FIRST_JOB = "4711"
KILL_WAIT = 3.0


def install(folder: Path) -> Path:
    folder.mkdir()
    for name in COMMANDS:
        script = folder / name
        command = shlex.join([sys.executable, str(Path(__file__).resolve()), str(folder), name])
        script.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        script.chmod(0o755)
    return folder


def sbatch(state: Path, script: str) -> None:
    text = Path(script).read_text()
    job = str(int(FIRST_JOB) + len(list(state.glob("*.sh"))))
    (state / f"{job}.sh").write_text(text)
    array = re.search(r"--array=0-(\d+)", text)
    places = [None] if array is None else range(int(array[1]) + 1)
    for place in places:
        name = job if place is None else f"{job}_{place}"
        subprocess.Popen(
            [sys.executable, __file__, str(state), "task", name],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        (state / f"{name}.queued").touch()
    print(f"Submitted batch job {job}")


def task(state: Path, name: str) -> None:
    """Run a job, again and again while it is queued again."""
    job, _, place = name.partition("_")
    environment = {
        **os.environ,
        "SLURM_JOB_ID": job,
        "SLURM_PROCID": "0",
        "SLURM_NTASKS": "1",
        **({"SLURM_ARRAY_JOB_ID": job, "SLURM_ARRAY_TASK_ID": place} if place else {}),
    }
    while (state / f"{name}.queued").exists():
        (state / f"{name}.queued").rename(state / f"{name}.runs")
        process = subprocess.Popen(["bash", state / f"{job}.sh"], env=environment)
        (state / f"{name}.runs").write_text(str(process.pid))
        process.wait()
        (state / f"{name}.runs").unlink()


def srun(state: Path, *arguments: str) -> None:
    """Run a command; the names of its logs have placeholders."""
    command = list(arguments)
    logs = {}
    while command[0].startswith("--"):
        option = command.pop(0)
        if option in ("--output", "--error"):
            logs[option] = command.pop(0)
    places = {"%A": "SLURM_ARRAY_JOB_ID", "%a": "SLURM_ARRAY_TASK_ID", "%j": "SLURM_JOB_ID"}
    for option, path in logs.items():
        for place, variable in places.items():
            path = path.replace(place, os.environ.get(variable, ""))
        file = os.open(path.replace("%t", "0"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, 1 if option == "--output" else 2)
    os.execvp(command[0], command)  # noqa: S606


def squeue(state: Path, *_: str) -> None:
    """Print the name of each job that is queued or runs, as `--format=%j` does."""
    for path in sorted([*state.glob("*.queued"), *state.glob("*.runs")]):
        print(name_of(state, path.stem))


def name_of(state: Path, job: str) -> str:
    script = (state / f"{job.partition('_')[0]}.sh").read_text()
    found = re.search(r"^#SBATCH --job-name=(\S+)$", script, re.MULTILINE)
    return found[1] if found else ""


def scancel(state: Path, *arguments: str) -> None:
    """Cancel jobs: SIGTERM, and after a while SIGKILL."""
    only_pending = "--state=PENDING" in arguments
    jobs = [each for each in arguments if not each.startswith("--")]
    names = [each.removeprefix("--name=") for each in arguments if each.startswith("--name=")]
    for path in [*state.glob("*.queued"), *state.glob("*.runs")]:
        if path.stem.partition("_")[0] not in jobs and name_of(state, path.stem) not in names:
            continue
        if path.suffix == ".queued":
            path.unlink()
        elif not only_pending:
            send(state, path.stem, signal.SIGTERM)
            time.sleep(KILL_WAIT)
            send(state, path.stem, signal.SIGKILL)


def scontrol(state: Path, action: str, name: str) -> None:
    assert action == "requeue"
    with (state / "requeued").open("a") as file:
        file.write(f"{name}\n")
    (state / f"{name}.queued").touch()


def send(state: Path, name: str, number: int) -> None:
    """Send a signal to the processes of a job's step, as Slurm does."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
        shell = int((state / f"{name}.runs").read_text())
        for process in Path(f"/proc/{shell}/task/{shell}/children").read_text().split():
            os.kill(int(process), number)


if __name__ == "__main__":
    here, called, *given = sys.argv[1:]
    globals()[called](Path(here), *given)
