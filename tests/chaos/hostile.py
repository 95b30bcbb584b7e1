"""R5: files from a stranger execute nothing, change nothing outside, and are refused quickly.

Each trial plants something in a copy of a run folder, or writes a hostile config, and then uses it
with every command. A command may refuse it, within 100 ms, or work without any effect outside the
run folder. A tree of files beside the run folder shows such effects.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import pickle
import shutil
import socket
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from test_checkpoint_workflows import Executed, reseal, rewrite

import rl_training
from rl_training.config_files import load_config
from rl_training.experiment import overview

from .damage import READERS, attempt, original
from .runner import Campaign, Figures, Trial, require
from .runs import copy_run, limit_memory, memory, newest, small

LIMIT = 0.1
"""Seconds in which a command refuses a file, imports not counted"""
ATTEMPTS = 3
"""How often a refusal is repeated that took longer: the machine may have been busy"""
MEMORY, PEAK = 2**31, 256 * 2**20
"""Bytes that a trial may reserve, and use"""
RUN = "sac"
CHECKPOINT = (
    "MANIFEST.json",
    "model.safetensors",
    "learner.safetensors",
    "policy.json",
    "state.json",
    "replay-00000.safetensors",
)
PLACES = (
    ".lock",
    "metrics.jsonl",
    "learning_curve.png",
    "tensorboard",
    "tensorboard/{event}",
    "config.yaml",
    "metadata.json",
    "run.json",
    "superseded",
    ".tmp-planted",
    "checkpoints",
    "checkpoints/best.json",
    "checkpoints/.tmp-planted",
    "checkpoints/{step}",
    *(f"checkpoints/{{step}}/{name}" for name in CHECKPOINT),
)
Plant = Callable[[Path, Path], None]
"""Puts something at a path of the run folder; the second path is the folder outside"""


# What is planted


def link_to_a_copy(path: Path, outside: Path) -> None:
    """A link to the same bytes outside: who follows it, works as before."""
    target = outside / f"moved-{path.name}"
    if path.exists():
        path.rename(target)
    else:
        target.write_text("{}")
    path.symlink_to(target)


def link_to_a_file(path: Path, outside: Path) -> None:
    _clear(path)
    path.symlink_to(outside / "thesis.txt")


def link_to_nothing(path: Path, outside: Path) -> None:
    _clear(path)
    path.symlink_to(outside / "made-by-following")


def link_to_a_folder(path: Path, outside: Path) -> None:
    _clear(path)
    path.symlink_to(outside / "folder")


def pipe(path: Path, outside: Path) -> None:
    _clear(path)
    os.mkfifo(path)


def unix_socket(path: Path, outside: Path) -> None:
    _clear(path)
    here = Path.cwd()
    os.chdir(path.parent)  # the names of sockets must be short
    with socket.socket(socket.AF_UNIX) as planted:
        planted.bind(path.name)
    os.chdir(here)


def endless(path: Path, outside: Path) -> None:
    """A file of a terabyte that takes no space."""
    _clear(path)
    path.touch()
    os.truncate(path, 2**40)


def pickled(path: Path, outside: Path) -> None:
    _clear(path)
    path.write_bytes(pickle.dumps(Executed(outside / "executed")))


def saved_by_torch(path: Path, outside: Path) -> None:
    _clear(path)
    buffer = io.BytesIO()
    torch.save(Executed(outside / "executed"), buffer)
    path.write_bytes(buffer.getvalue())


def deep(path: Path, outside: Path) -> None:
    """JSON and YAML that is nested too deeply to parse."""
    _clear(path)
    path.write_text("[" * 200_000)


def _clear(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


PLANTS: list[Plant] = [
    link_to_a_file,
    link_to_a_copy,
    link_to_nothing,
    link_to_a_folder,
    pipe,
    endless,
    pickled,
    saved_by_torch,
    deep,
    unix_socket,
]


# What is declared


def _declare(name: str, *keys: str, value: Any) -> Callable[[Path], None]:
    """Set a value in a JSON file of the newest checkpoint, whose manifest then matches."""

    def change(values: Any) -> None:
        for key in keys[:-1]:
            values = values.setdefault(key, {})
        values[keys[-1]] = value

    return lambda run: rewrite(newest(run), name, change)


HUGE = 10**9
DECLARATIONS: dict[str, Callable[[Path], None]] = {
    f"{name}: {'.'.join(keys)} = {str(value)[:30]}": _declare(name, *keys, value=value)
    for name, keys, value in [
        ("policy.json", ("algo_kwargs", "hidden_sizes"), [65536, 65536]),
        ("policy.json", ("algo_kwargs", "hidden_sizes"), [HUGE]),
        ("policy.json", ("algo_kwargs", "hidden_sizes"), [16] * 100_000),
        ("policy.json", ("algo_kwargs", "num_critics"), HUGE),
        ("policy.json", ("obs_dim",), HUGE),
        ("policy.json", ("action_dim",), HUGE),
        ("policy.json", ("action_low",), [0.0] * 1_000_000),
        ("policy.json", ("wrapper_statistics",), [{"a": [0] * 1_000_000}]),
        ("policy.json", ("environment", "id"), "evil_module:Evil-v0"),
        ("policy.json", ("environment", "modules"), ["evil_module"]),
        ("policy.json", ("environment", "wrappers"), [{"wrapper": "evil_module:Wrapper"}]),
        ("policy.json", ("environment", "kwargs"), {"render_mode": "human", "x": [0] * 10**6}),
        ("policy.json", ("algo",), "evil_module"),
        ("state.json", ("width",), 65536),
        ("state.json", ("width",), HUGE),
        ("state.json", ("config", "num_envs"), HUGE),
        ("state.json", ("config", "output_dir"), "../outside"),
        ("state.json", ("config", "env_id"), "evil_module:Evil-v0"),
        ("state.json", ("config", "wrappers"), [{"wrapper": "evil_module:Wrapper", "kwargs": {}}]),
        ("state.json", ("config", "init_from"), "/etc"),
        ("state.json", ("config", "algo_kwargs", "hidden_sizes"), [65536, 65536]),
        ("state.json", ("config", "algo_kwargs", "buffer_capacity"), 10**13),
        ("state.json", ("config", "algo_kwargs", "batch_size"), HUGE),
        ("state.json", ("config", "algo_kwargs", "num_critics"), HUGE),
        ("state.json", ("config", "eval_episodes"), HUGE),
        ("state.json", ("environment", "id"), "evil_module:Evil-v0"),
        ("state.json", ("environment", "modules"), ["evil_module"]),
        ("state.json", ("replay", "rows_added"), 10**15),
        ("state.json", ("streams",), {str(number): [0] * 100 for number in range(10_000)}),
        ("state.json", ("callbacks",), {"MetricsLog": {"offset": 10**15}}),
        ("state.json", ("callbacks",), {"MetricsLog": {"offset": -1}}),
    ]
}


def _manifest_names(name: str) -> Callable[[Path], None]:
    """List a file outside the checkpoint in its manifest."""

    def change(run: Path) -> None:
        path = newest(run) / "MANIFEST.json"
        manifest = json.loads(path.read_text())
        content = (run.parent / "outside" / "thesis.txt").read_bytes()
        digest = hashlib.sha256(content).hexdigest()
        manifest["files"][name] = {"size": len(content), "sha256": digest}
        path.write_text(json.dumps(manifest))

    return change


def _best_is_outside(run: Path) -> None:
    values = {"checkpoint": "../../outside/folder", "step": 1, "eval_return_mean": 0.0}
    (run / "checkpoints" / "best.json").write_text(json.dumps(values))


DECLARATIONS |= {
    f"manifest lists {name}": _manifest_names(name)
    for name in ("../../../outside/thesis.txt", "/etc/hostname", "..", "a/b", "")
}
DECLARATIONS["best.json names a folder outside"] = _best_is_outside


# Configs

LAUGHS = "\n".join(
    [
        "a: &a [x, x, x, x, x, x, x, x, x]",
        *(
            f"{this}: &{this} [{', '.join([f'*{last}'] * 9)}]"
            for last, this in zip("abcdefghij", "bcdefghijk", strict=True)
        ),
    ]
)
CONFIGS: dict[str, str] = {
    "alias bomb": f"algo: sac\nenv_id: Pendulum-v1\n{LAUGHS}\n",
    "alias bomb in env_kwargs": "algo: sac\nenv_kwargs:\n" + textwrap.indent(LAUGHS, "  "),
    "python/object": "algo: !!python/object/apply:os.system ['touch {outside}/executed']\n",
    "python/name": "algo: !!python/name:os.system\nenv_id: Pendulum-v1\n",
    "python/module": "algo: !!python/module:evil_module\n",
    "nested": "algo: " + "[" * 100_000,
    "wrapper": "algo: sac\nenv_id: Pendulum-v1\nwrappers: ['evil_module:Wrapper']\n",
    "environment": "algo: sac\nenv_id: 'evil_module:Evil-v0'\n",
    "run_name": "algo: sac\nenv_id: Pendulum-v1\nrun_name: ../outside/folder/new\n",
    "absolute run_name": "algo: sac\nenv_id: Pendulum-v1\nrun_name: {outside}/new\n",
    "hidden_sizes": "algo: sac\nenv_id: Pendulum-v1\nalgo_kwargs: {hidden_sizes: [1000000000]}\n",
    "num_envs": "algo: sac\nenv_id: Pendulum-v1\nnum_envs: 1000000000\n",
    "null bytes": "algo: sac\0\nenv_id: Pendulum-v1\n",
}


# The trial


@dataclass(frozen=True)
class Case:
    description: str
    prepare: Callable[[Path, Path], None] | None
    """Changes a run folder, given the folder outside; None for a config"""
    config: str = ""
    is_linked: bool = False
    """Whether following it would work as before"""


def _planted(place: str, plant: Plant) -> Case:
    def prepare(run: Path, outside: Path) -> None:
        event = next(path.name for path in (run / "tensorboard").iterdir())
        path = run / place.format(step=newest(run).name, event=event)
        if path.parent.is_dir():
            plant(path, outside)
        if plant in (pickled, saved_by_torch) and "{step}/" in place and "MANIFEST" not in place:
            reseal(newest(run))

    read = place == "checkpoints" or "{step}" in place
    return Case(f"{plant.__name__} at {place}", prepare, is_linked=plant is link_to_a_copy and read)


CASES = [
    *(_planted(place, plant) for plant in PLANTS for place in PLACES),
    *(
        Case(name, lambda run, _, change=change: change(run))
        for name, change in DECLARATIONS.items()
    ),
    *(Case(f"config: {name}", None, text) for name, text in CONFIGS.items()),
]


def run(trial: Trial) -> Figures:
    case = CASES[trial.index % len(CASES)]
    source, _ = original(trial, RUN)
    _warm_up(source, trial)
    verbs = TRAINERS if case.prepare is None else VERBS
    slowest, peak = 0.0, 0
    for verb, use in verbs.items():
        folder = trial.folder / verb
        outside = _make_outside(folder)
        path = folder / "config.yaml"
        if case.prepare is None:
            path.write_text(case.config.replace("{outside}", str(outside)))
        else:
            path = copy_run(source, folder / "run")
            case.prepare(path, outside)
        before = _tree(folder, except_for=path)
        slowest, used = _use(use, path, folder, case, verb, slowest)
        peak = max(peak, used)
        after = _tree(folder, except_for=path)
        changed = sorted(set(before.items()) ^ set(after.items()))
        require(not changed, f"{verb}: changed outside of the run folder: {changed[:4]}")
        require("evil_module" not in sys.modules, f"{verb} imported a module")
    return {"refused_seconds": slowest, "peak_megabytes": peak / 2**20}


def _use(
    use: Callable[[Path], Any], path: Path, folder: Path, case: Case, verb: str, slowest: float
) -> tuple[float, int]:
    """Use a path with a command; return the longest time of a refusal, and the memory needed."""
    limit_memory(MEMORY)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    used = memory("VmRSS")
    for _ in range(ATTEMPTS):
        began = time.perf_counter()
        _, warned, refusal = attempt(lambda: use(path))
        seconds = time.perf_counter() - began
        if refusal is None or seconds <= LIMIT:
            break
    peak = max(0, memory("VmHWM") - used)
    if refusal is not None:
        require(seconds <= LIMIT, f"{verb} took {seconds * 1000:.0f} ms to refuse it: {refusal}")
        slowest = max(slowest, seconds)
    elif case.is_linked and verb in ("resume", *READERS):
        require(warned, f"{verb} followed the link without a warning")
    require(peak <= PEAK, f"{verb} used {peak / 2**20:.0f} MB")
    return slowest, peak


def _list_runs(path: Path) -> None:
    for each in overview.list_runs(path.parent):
        str(each)


VERBS: dict[str, Callable[[Path], Any]] = {
    "resume": rl_training.resume_training,
    **{verb: lambda path, use=use: use(RUN, path) for verb, use in READERS.items()},
    "evaluate --best": lambda path: rl_training.evaluate_checkpoint(
        path, best=True, num_episodes=1
    ),
    "runs": _list_runs,
    "train --from-checkpoint": lambda path: rl_training.train(
        small(RUN, path.parent / "run" / "new", init_from=str(path), total_timesteps=1)
    ),
}
TRAINERS: dict[str, Callable[[Path], Any]] = {
    "train": lambda path: rl_training.train(
        load_config(path, total_timesteps=1, output_dir=str(path.parent / "config.yaml.d"))
    ),
}


def _make_outside(folder: Path) -> Path:
    """Make the tree that must not change, with a module that must not be imported."""
    outside = folder / "outside"
    (outside / "folder" / "step_000000001").mkdir(parents=True)
    (outside / "folder" / "step_000000002").mkdir()
    (outside / "folder" / "notes.txt").write_text("notes")
    (outside / "thesis.txt").write_text("a thesis")
    module = folder / "evil_module.py"
    module.write_text(f"open({str(outside / 'executed')!r}, 'w')\n")
    sys.path.insert(0, str(folder))
    return outside


def _tree(folder: Path, except_for: Path) -> dict[str, str]:
    """Describe everything below a folder except for one path."""
    found = {}
    for path in folder.rglob("*"):
        if path == except_for or except_for in path.parents:
            continue
        status = path.lstat()
        content = ""
        if path.is_file() and not path.is_symlink() and status.st_size < 2**24:
            content = hashlib.sha256(path.read_bytes()).hexdigest()
        found[str(path)] = f"{status.st_mode} {status.st_size} {content}"
    return found


_is_warm = False


def _warm_up(source: Path, trial: Trial) -> None:
    """Use a healthy run once: what a first use imports and builds is not part of a refusal."""
    global _is_warm
    if not _is_warm:
        for verb, use in VERBS.items():
            folder = trial.folder / "healthy" / verb
            _make_outside(folder)
            with contextlib.suppress(Exception):
                use(copy_run(source, folder / "run"))
        shutil.rmtree(trial.folder / "healthy")
    _is_warm = True


CAMPAIGN = Campaign(
    name="R5",
    title="hostile files",
    trials=len(CASES),
    run=run,
    describe=lambda trial: CASES[trial.index % len(CASES)].description,
    timed=True,
    per_process=24,
    timeout=25.0,
)
