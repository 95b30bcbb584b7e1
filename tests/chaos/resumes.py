"""R2: a run that was stopped anywhere and resumed equals the uninterrupted run, bit for bit."""

from __future__ import annotations

import functools
import shutil
import signal
import time
from pathlib import Path
from typing import Any

from helpers import StopAt, StopAtPosition

import rl_training
from rl_training.envs import trust_modules

from .processes import run_command, start, start_fresh_command
from .runner import Campaign, Figures, Trial, require
from .runs import (
    SPECS,
    Config,
    Counter,
    cache,
    digest,
    reference,
    require_clean,
    require_same,
    require_sound,
    run_folders,
    saved_state,
    small,
    train_and_count,
    without_pictures,
    write_config,
)

NEXT = 1000
"""Transitions after the last stop, all of them in the buffer that is compared"""
LATEST_STOP = 300
ATTEMPTS = 5
"""How often a run is trained that was not stopped within a block of updates"""
WRAPPERS = "gymnasium.wrappers"
CONTINUOUS = ("Pendulum-v1", "HalfCheetah-v5", "Hopper-v5", "Walker2d-v5", "Ant-v5", "Swimmer-v5")
DISCRETE = ("CartPole-v1", "Acrobot-v1")
FEATURES = (
    "plain",
    "n-step and three environments",
    "normalized",
    "offline to online",
    "seeds",
    "worker processes",
    "left within a block of updates",
    "warm-up",
)
COMPILED = ("sac", "td3", "iql")
TRIALS = len(SPECS) * len(FEATURES) + len(COMPILED)


def algorithm_of(trial: Trial) -> str:
    first_compiled = len(SPECS) * len(FEATURES)
    if trial.index >= first_compiled:
        return COMPILED[trial.index - first_compiled]
    return list(SPECS)[trial.index % len(SPECS)]


def feature_of(trial: Trial) -> str:
    number = trial.index // len(SPECS)
    return FEATURES[number] if number < len(FEATURES) else "compiled"


def config_of(trial: Trial) -> Config:
    algo, feature, generator = algorithm_of(trial), feature_of(trial), trial.random()
    spec = SPECS[algo]
    known = spec.hyperparameters_type.model_fields
    settings: dict[str, Any] = {
        "learning_starts": 100,
        "train_frequency": 4,
        "gradient_updates_per_step": 1,
        "buffer_capacity": 4000,
        "prioritized": True,
    }
    tasks = DISCRETE if (spec.actions[0] == "discrete") else CONTINUOUS
    changes: dict[str, Any] = {
        "env_id": tasks[trial.index // len(SPECS) % len(tasks)],
        "seed": generator.randrange(1000),
        "total_timesteps": LATEST_STOP + NEXT,
        "checkpoint_interval": 0,
        "eval_interval": 450,
        "log_interval": 150,
        "device": trial.device,
    }
    settings, changes = _with_feature(feature, algo, settings, changes)
    if _collects_nothing(algo, changes):
        changes |= {"total_timesteps": 500, "eval_interval": 150}
    settings = {name: value for name, value in settings.items() if name in known}
    return small(algo, trial.folder / "runs", **changes, algo_kwargs=settings)


def _with_feature(
    feature: str, algo: str, settings: dict[str, Any], changes: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    regimes = SPECS[algo].regimes
    if feature == "n-step and three environments":
        settings |= {"n_step": 3, "entropy_in_target": False}
        changes |= {"num_envs": 3}
    elif feature == "normalized":
        changes |= {"normalize_observations": True, "wrappers": [f"{WRAPPERS}:NormalizeReward"]}
    elif feature == "offline to online" and "mixed" in regimes:
        settings |= {"offline_pretrain_updates": 100}
        changes |= {"regime": "mixed"}
    elif feature == "seeds":
        changes |= {"seeds": [5, 1]}
    elif feature == "worker processes":
        changes |= {"num_envs": 2, "vectorization": "async"}
    elif feature == "left within a block of updates":
        settings |= {"train_frequency": 100, "gradient_updates_per_step": 60}
        # A block that overlaps with a step, as short ones do on a GPU, is never left.
        changes |= {"overlap": "off"}
    elif feature == "compiled":
        changes |= {"compile": "on", "env_id": "Pendulum-v1"}
    if feature in ("worker processes", "left within a block of updates") and "online" in regimes:
        changes |= {"regime": "online", "dataset": None}
    return settings, changes


def _collects_nothing(algo: str, changes: dict[str, Any]) -> bool:
    return changes.get("regime", SPECS[algo].regimes[0]) == "offline"


def run(trial: Trial) -> Figures:
    config = config_of(trial)
    expected = reference(trial, f"{trial.index:05d}", config, prepare=_prepare)
    generator, log = trial.random(), trial.folder / "output.txt"
    latest = LATEST_STOP if config["total_timesteps"] > LATEST_STOP + 1 else 200
    stops = sorted(generator.sample(range(1, latest), generator.choice([1, 1, 2])))
    if feature_of(trial) == "warm-up":
        stops = [generator.randrange(1, 100)]
    if feature_of(trial) == "left within a block of updates":
        _stop_within_a_block(config, generator.uniform(0.0, 0.1), log)
    elif feature_of(trial) == "compiled":
        _stop_a_fresh_one(trial, config)
    else:
        left = start(functools.partial(_stop_at, config, stops), log)
        left.wait(120)
        require_clean(left, 0)
    folders = run_folders(config)
    if feature_of(trial) == "compiled":
        resumed = start_fresh_command("resume", *folders, log=log, **cache(trial))
        resumed.wait(200)
    else:
        resumed = run_command("resume", *folders, log=log, prepare=_prepare, timeout=120)
    require_clean(resumed, 0)
    for folder, wanted in zip(folders, expected.digests, strict=True):
        require_same(digest(folder), wanted)
        require_sound(folder)
    return {}


def _prepare() -> None:
    without_pictures()
    trust_modules(WRAPPERS)


def _stop_at(config: Config, stops: list[int]) -> None:
    """Train until the first stop, then, if it is a single run, from stop to stop."""
    _prepare()
    stop = StopAtPosition if "offline_pretrain_updates" in config["algo_kwargs"] else StopAt
    result = rl_training.train(config, callbacks=[stop(stops[0])])
    for later in stops[1:]:
        if not isinstance(result, list):
            result = rl_training.resume_training(result.run_dir, callbacks=[stop(later)])


def _stop_within_a_block(config: Config, delay: float, log: Path) -> None:
    """Send a signal while updates are made. If it came too late, train again and send it sooner.

    Offline runs collect nothing and make no blocks: they are stopped once.
    """
    (folder,), has_blocks = run_folders(config), not _collects_nothing(config["algo"], config)
    for _ in range(ATTEMPTS):
        _stop_after(delay, config, log)
        if not has_blocks or saved_state(folder)["progress"]["updates_left"] > 0:
            return
        shutil.rmtree(config["output_dir"])
        delay /= 3
    raise AssertionError("no signal came within a block of updates")


def _stop_after(delay: float, config: Config, log: Path) -> None:
    """Send a signal some time after step 200 was collected, with which a block begins."""
    reached = Counter()

    def train() -> None:
        _prepare()
        train_and_count(config, reached)

    child = start(train, log)
    child.wait_until(lambda: reached.value >= 200)
    time.sleep(delay)
    child.send(signal.SIGTERM)
    child.wait()
    require(child.code == 1, f"exit code {child.code} after a signal")
    require("TrainingInterrupted" in child.output, "a signal did not end training")


def _stop_a_fresh_one(trial: Trial, config: Config) -> None:
    log = trial.folder / "output.txt"
    source = write_config(config, trial.folder / "config.yaml")
    (run,) = run_folders(config)
    child = start_fresh_command("train", "--config", source, log=log, **cache(trial))
    child.wait_until(lambda: (run / "metrics.jsonl").is_file(), 200)
    time.sleep(trial.random().uniform(0.0, 3.0))
    child.send(signal.SIGTERM)
    child.wait(100)
    require_clean(child, 0, 130)


CAMPAIGN = Campaign(
    name="R2",
    title="continuation after resume",
    trials=TRIALS,
    run=run,
    describe=lambda trial: f"{algorithm_of(trial)}, {feature_of(trial)}",
    timeout=400.0,
    compiling=len(COMPILED),
    on_gpu=True,
)
