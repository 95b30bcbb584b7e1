"""Train tiny runs with this version and keep them for `test_compatibility.py`.

Run it by hand, once, from the code of a version that is about to be released:

    OMP_NUM_THREADS=1 python tests/make_compatibility_fixtures.py [CASE ...]

It writes `tests/fixtures/v<version>/<case>/` for the named cases, by default all below, and refuses
to touch a folder that exists: the files of a released version never change. Each case keeps

    run/                  a run that was stopped halfway, reduced to what `resume` needs
    policy/               its policy, as `Agent.save` writes it
    expected.json         observations with the actions for them, and the metrics of the full run
    expected.safetensors  all learned tensors at the end of the uninterrupted run
"""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from helpers import StopAt, hashes
from safetensors.torch import save_file
from torch import Tensor

import rl_training
from rl_training.api.algorithms import Agent
from rl_training.checkpoints.format import LEARNER, MODEL, CheckpointReader
from rl_training.execution import execution
from rl_training.types import TrainResult

FIXTURES = Path(__file__).parent / "fixtures"

STOP, TOTAL = 180, 250
"""After the stop an episode ends, and random numbers that are drawn in advance run out."""

TINY = {"hidden_sizes": [8, 8], "batch_size": 16}
ONLINE = {**TINY, "learning_starts": 50, "buffer_capacity": 150}
ENSEMBLE = {**ONLINE, "num_critics": 3, "gradient_updates_per_step": 2}
DQN = {**ONLINE, "target_update_interval": 25}
RECORDED = {"kind": "random", "size": 500, "seed": 0}

Case = dict[str, Any]


def online(algo: str, algo_kwargs: Case = ONLINE, **changes: Any) -> Case:
    return {"algo": algo, "env_id": "Pendulum-v1", "algo_kwargs": algo_kwargs, **changes}


def offline(algo: str, algo_kwargs: Case = TINY, **changes: Any) -> Case:
    return online(algo, algo_kwargs, **{"dataset": RECORDED, **changes})


def discrete(**settings: Any) -> Case:
    return online("dqn", {**DQN, **settings}, env_id="CartPole-v1")


ADVANCED_DQN = {"prioritized": True, "n_step": 3, "learning_rate_schedule": "linear"}

CASES: dict[str, Case] = {
    "dqn": discrete(),
    "dqn_dueling": discrete(dueling=True, **ADVANCED_DQN),
    "dqn_prioritized": discrete(**ADVANCED_DQN),
    "ddpg": online("ddpg"),
    "td3": online("td3"),
    "sac": online("sac"),
    "sac_n_step": online("sac", {**ONLINE, "n_step": 3}),
    "sac_normalized": online(
        "sac",
        {**ONLINE, "warmup_steps": 100, "max_grad_norm": 1.0, "policy_delay": 2},
        num_envs=2,
        normalize_observations=True,
    ),
    "sac_population": online("sac", seeds=[3, 1]),
    "tqc": online("tqc", {**ONLINE, "num_quantiles": 5, "top_quantiles_to_drop_per_critic": 1}),
    "redq": online("redq", ENSEMBLE),
    "rlpd": offline("rlpd", ENSEMBLE),
    "rlpd_pretrained": offline(
        "rlpd",
        {**ENSEMBLE, "offline_pretrain_updates": 30, "offline_batch_ratio": 0.25},
        regime="mixed",
        dataset={**RECORDED, "reward_normalization": "return_range"},
    ),
    "bc": offline("bc"),
    "bc_likelihood": offline("bc", {**TINY, "objective": "likelihood"}),
    "awac": offline("awac"),
    "awac_mixed": offline("awac", ONLINE, regime="mixed"),
    "iql": offline("iql"),
    "iql_online": online("iql", regime="online", init_from="runs/iql"),
    "cql": offline("cql", {**TINY, "num_cql_samples": 3}),
    "cql_target_gap": offline("cql", {**TINY, "num_cql_samples": 3, "cql_target_gap": 1.0}),
    "td3_bc": offline("td3_bc"),
    "rebrac": offline("rebrac"),
    "fql": offline("fql"),
}
"""Every algorithm as it is by default, and what is stored or computed in a way of its own"""


def learned_tensors(checkpoint: Path) -> dict[str, Tensor]:
    """Return networks, normaliser, targets, moments, temperature and counters of a checkpoint."""
    reader = CheckpointReader(checkpoint)
    return {**reader.tensors(MODEL), **reader.tensors(LEARNER)}


def make_all(destination: Path, names: Iterable[str]) -> None:
    """Train these cases in a temporary folder, and keep them if all succeeded."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for name in names:
            print(name, flush=True)
            keep(name, CASES[name], Path("kept") / name)
        shutil.copytree("kept", destination)


def keep(name: str, case: Case, destination: Path) -> None:
    """Train one case with and without a stop in the working folder, and write its fixture files."""
    with batched_on_cpu("seeds" in case):
        stopped = train(name, case, "runs", callbacks=[StopAt(STOP, "paused")])
        expected = train(name, case, "whole")
    copy_run(stopped, destination / "run")
    agent_type = agent_class(case["algo"])
    agent_type.load(stopped.run_dir).save(destination / "policy")
    agent = agent_type.load(destination / "policy")
    drawn = np.random.default_rng(0).normal(size=(5, agent.policy.spaces.obs_dim))
    observations = drawn.astype(np.float32)
    values = {
        "observations": observations.tolist(),
        "actions": agent.predict(observations).tolist(),
        "sampled_actions": agent.predict(observations, deterministic=False).tolist(),
        "metrics": {
            metric: expected.metrics[metric]
            for metric in ("global_step", "gradient_steps", "eval_return_mean")
        },
    }
    (destination / "expected.json").write_text(json.dumps(values, indent=1) + "\n")
    save_file(learned_tensors(expected.checkpoint_path), destination / "expected.safetensors")
    check(destination, stopped, expected)


def train(name: str, case: Case, output_dir: str, **options: Any) -> TrainResult:
    """Train one run. With several seeds, return one that is not the first of the population."""
    config = {
        "total_timesteps": TOTAL,
        # Evaluate at the stop, so that the newest checkpoint is usually the best one.
        "eval_interval": STOP,
        "eval_episodes": 1,
        "checkpoint_interval": 0,
        "log_interval": 60,
        "device": "cpu",
        "compile": "off",
        "num_threads": 1,
        "output_dir": output_dir,
        "run_name": name,
        **case,
    }
    result = rl_training.train(config, **options)
    return result[-1] if isinstance(result, list) else result


def agent_class(algo: str) -> type[Agent]:
    """Return the managed class of an algorithm, such as `SAC`."""
    return next(each for each in Agent.__subclasses__() if each.algo == algo)


def copy_run(result: TrainResult, destination: Path) -> None:
    """Copy the newest and best checkpoints and the small files, without local details."""
    destination.mkdir(parents=True)
    for name in ("config.yaml", "metrics.jsonl", "run.json", "checkpoints/best.json"):
        (destination / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(result.run_dir / name, destination / name)
    assert result.best_checkpoint_path is not None
    for checkpoint in {result.checkpoint_path, result.best_checkpoint_path}:
        shutil.copytree(checkpoint, destination / "checkpoints" / checkpoint.name)
    metadata = json.loads((result.run_dir / "metadata.json").read_text())
    metadata |= {"command": [], "git_commit": None}
    metadata["hardware"] = dict.fromkeys(metadata["hardware"])
    (destination / "metadata.json").write_text(json.dumps(metadata, indent=1) + "\n")


def check(kept: Path, stopped: TrainResult, expected: TrainResult) -> None:
    """Check that resuming the fixture reaches the state of the uninterrupted run."""
    copy = Path(tempfile.mkdtemp(dir=".")) / "run"
    shutil.copytree(kept / "run", copy)
    resumed = rl_training.resume_training(copy)
    assert hashes(resumed.checkpoint_path) == hashes(expected.checkpoint_path)
    assert resumed.metrics == expected.metrics
    assert resumed.metrics["gradient_steps"] >= stopped.metrics["gradient_steps"] + 20
    before, after = (learned_tensors(each.checkpoint_path) for each in (stopped, resumed))
    still = [name for name, tensor in after.items() if tensor.equal(before[name])]
    assert all(name.startswith("normalizer.") for name in still), still


@contextlib.contextmanager
def batched_on_cpu(wanted: bool) -> Iterator[None]:
    """Train seeds as one program, as on a GPU. On a CPU, each seed is stored like a single run."""
    before = execution.BATCHED_ON
    execution.BATCHED_ON = ("cpu", "cuda") if wanted else before
    try:
        yield
    finally:
        execution.BATCHED_ON = before


def main() -> None:
    destination = FIXTURES / f"v{rl_training.__version__}"
    if destination.exists():
        sys.exit(f"{destination}: exists; files of a released version are not made again")
    make_all(destination.resolve(), sys.argv[1:] or CASES)


if __name__ == "__main__":
    main()
