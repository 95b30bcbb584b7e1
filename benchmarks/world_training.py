"""Train on a GPU for some time: return by wall time, pace, memory, a kill and resume.

    python benchmarks/world_training.py --config ppo/warp --env warp/Ant-v5 --seconds 600
                                        [--set KEY=VALUE ...] [--kill-after SECONDS]
                                        [--stop-at RETURN] [--output FILE]

The run is a process of its own, started by the command line as a user would. It is stopped after
`--seconds`, or at its first evaluation of at least `--stop-at`. With `--kill-after` it is killed
(SIGKILL) that long after its first update, and resumed. Memory is read every few seconds from the
outside. At the end, the deterministic policy plays new episodes in Gymnasium's environment and, if
it was trained in a tensor environment, in many worlds of that.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import torch
from reporting import RESULTS, machine, print_table, warn_if_busy, write_results

from rl_training import evaluate_checkpoint
from rl_training.checkpoints.loading import find_checkpoint, load_policy
from rl_training.checkpoints.run_folder import git_commit
from rl_training.config_files import load_config
from rl_training.envs import environment_factory
from rl_training.envs.tensors.vector import TensorVector

POLL_SECONDS = 1.0
MEMORY_SECONDS = 10.0
WORLDS, EPISODES = 256, 50
"""Episodes that the final policy plays in the simulator, and in Gymnasium's environment"""
STOP_SECONDS = 60.0
"""Time that a stopped run has to save its last checkpoint"""


class Run:
    """A training process, which can be killed and resumed."""

    def __init__(self, command: Sequence[str], folder: Path, log: Path) -> None:
        self.folder, self._log, self._read = folder, log, 0
        self._began = time.perf_counter()
        self.rows: list[dict[str, Any]] = []
        """The rows of its metrics, with the seconds since the first start at which they came"""
        self.memory: list[dict[str, float]] = []
        self._start(command)

    def _start(self, command: Sequence[str]) -> None:
        with self._log.open("a") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._began

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def watch(self) -> None:
        """Wait a little, then read new metrics and the memory."""
        time.sleep(POLL_SECONDS)
        path = self.folder / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        if len(lines) < self._read:  # a resumed run removes what came after its checkpoint
            self._read = len(lines)
        for line in lines[self._read :]:
            if line.endswith("\n"):
                self.rows.append({"seconds": round(self.seconds, 1), **json.loads(line)})
                self._read += 1
        if not self.memory or self.seconds - self.memory[-1]["seconds"] > MEMORY_SECONDS:
            self.memory.append({"seconds": round(self.seconds, 1), **self._memory()})

    def _memory(self) -> dict[str, float]:
        status = Path(f"/proc/{self._process.pid}/status")
        lines = status.read_text().splitlines() if status.exists() else []
        resident = [int(line.split()[1]) / 2**10 for line in lines if line.startswith("VmRSS:")]
        found = {"host_mib": round(resident[0], 1)} if resident else {}
        if torch.cuda.is_available():
            free, total = torch.cuda.mem_get_info()
            found["gpu_mib"] = round((total - free) / 2**20, 1)
            if (own := gpu_memory_of(self._process.pid)) is not None:
                found["gpu_own_mib"] = own
        return found

    def kill_and_resume(self) -> dict[str, Any]:
        """Kill the process, and continue from its last checkpoint."""
        self._process.kill()
        self._process.wait()
        before = self.rows[-1]
        self._start([sys.executable, "-m", "rl_training", "resume", str(self.folder)])
        return {
            "at_seconds": round(self.seconds, 1),
            "at_step": before["step"],
            "training_return": before.get("rollout/ep_rew_mean"),
        }

    def stop(self) -> None:
        self._process.send_signal(signal.SIGINT)
        self._process.wait(STOP_SECONDS)


def gpu_memory_of(process: int) -> float | None:
    """GPU memory of one process in MiB; None where the driver does not say. Other programs may
    share the GPU."""
    query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True)
        rows = [line.split(",") for line in answer.stdout.splitlines()]
        return next((float(used) for pid, used in rows if int(pid) == process), None)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def simulator_returns(run: Path, environment_id: str, device: str) -> np.ndarray:
    """Return of the first episode of each of many new worlds, with deterministic actions."""
    policy = load_policy(find_checkpoint(run))
    factory = environment_factory(environment_id, {}, None)
    vector = TensorVector(factory, WORLDS, [10_000], device)
    obs, returns = vector.reset(), np.zeros(WORLDS)
    player, playing = policy.player(WORLDS), np.ones(WORLDS, dtype=bool)
    while playing.any():
        actions = torch.from_numpy(player.act(obs.cpu().numpy())).to(device)
        step = vector.step(actions)
        returns += np.where(playing, step.reward.cpu().numpy(), 0.0)
        ended = (step.terminated | step.truncated | step.broken).cpu().numpy()
        player.end(ended)
        playing &= ~ended
        obs = step.obs
    vector.close()
    return returns


def pace_of(rows: Sequence[dict[str, Any]]) -> list[dict[str, float]]:
    """Steps per second between rows of the training log, by the run's own clock.

    Evaluations and saving are in that time. A resumed run begins anew.
    """
    logged = [row for row in rows if "time/time_elapsed" in row]
    found = []
    for before, after in itertools.pairwise(logged):
        steps, seconds = (after[name] - before[name] for name in ("step", "time/time_elapsed"))
        if steps > 0 and seconds > 0:
            found.append({"step": after["step"], "steps_per_second": round(steps / seconds)})
    return found


def train(arguments: argparse.Namespace, folder: Path) -> tuple[Run, dict[str, Any] | None]:
    command = [sys.executable, "-m", "rl_training", "train", "--config", arguments.config]
    command += ["--env", arguments.env]
    for setting in (*arguments.set, f"output_dir={folder}", "run_name=run"):
        command += ["--set", setting]
    run, killed, first_update = Run(command, folder / "run", folder / "log.txt"), None, None
    while run.is_running and run.seconds < arguments.seconds:
        run.watch()
        if run.rows and first_update is None:
            first_update = run.seconds
        due = arguments.kill_after is not None and first_update is not None
        if due and killed is None and run.seconds - first_update > arguments.kill_after:
            killed = run.kill_and_resume()
        scores = [row["eval/mean_reward"] for row in run.rows if "eval/mean_reward" in row]
        if arguments.stop_at is not None and scores and scores[-1] >= arguments.stop_at:
            break
    if run.is_running:
        run.stop()
        run.watch()
    return run, killed


def command_of(arguments: argparse.Namespace) -> str:
    """The command that measures this again, without what depends on the machine."""
    words = ["--config", arguments.config, "--env", arguments.env]
    words += ["--set", *arguments.set] if arguments.set else []
    for option in ("seconds", "kill_after", "stop_at"):
        value = getattr(arguments, option)
        words += [] if value is None else [f"--{option.replace('_', '-')}", f"{value:g}"]
    return shlex.join(["python", "benchmarks/world_training.py", *words])


def parse_arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="ppo/warp")
    parser.add_argument("--env", default="warp/HalfCheetah-v5")
    parser.add_argument("--set", nargs="+", action="extend", default=[])
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--kill-after", type=float)
    parser.add_argument("--stop-at", type=float)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--commit", help="commit of this code, where git is not available")
    return parser.parse_args(given)


def main() -> None:
    arguments = parse_arguments()
    name = f"{arguments.config}__{arguments.env}".replace("/", "-")
    output = arguments.output or RESULTS / "worlds" / f"{name}.json"
    load = warn_if_busy()
    with tempfile.TemporaryDirectory() as folder:
        run, killed = train(arguments, Path(folder))
        print((Path(folder) / "log.txt").read_text()[-2_000:])
        curve = [
            {"step": row["step"], "seconds": row["seconds"], "return": row["eval/mean_reward"]}
            for row in run.rows
            if "eval/mean_reward" in row
        ]
        training = [
            {"step": row["step"], "seconds": row["seconds"], "return": row["rollout/ep_rew_mean"]}
            for row in run.rows
            if "rollout/ep_rew_mean" in row
        ]
        timed = [row for row in run.rows if "time/time_elapsed" in row]
        compiling = max((row.get("time/compilation_seconds", 0.0) for row in timed), default=0.0)
        found: dict[str, Any] = {
            "command": command_of(arguments),
            "commit": arguments.commit or git_commit(),
            "machine": machine(device=arguments.device, load_before=load),
            "config": {**load_config(arguments.config).to_mapping(), "env_id": arguments.env},
            "compilation_seconds": round(compiling, 1),
            "evaluations": curve,
            "training": training[:: max(1, len(training) // 100)],
            "pace": pace_of(timed)[:: max(1, len(timed) // 100)],
            "memory": run.memory,
            "killed": killed,
        }
        if (run.folder / "checkpoints").exists():
            found["final"] = final_returns(run.folder, arguments)
    paces = [row["steps_per_second"] for row in found["pace"]]
    print_table(
        f"{arguments.config} in {arguments.env}, compilation {compiling:.0f} s of the time",
        ["seconds", "steps", "return"],
        [[f"{row['seconds']:.0f}", f"{row['step']:,}", f"{row['return']:.0f}"] for row in curve],
    )
    print(f"steps per second: median {statistics.median(paces or [0]):,.0f}")
    print(json.dumps({name: found.get(name) for name in ("killed", "final")}))
    write_results(output, found)


def final_returns(run: Path, arguments: argparse.Namespace) -> dict[str, float]:
    """Mean return of the final policy in the simulator and in Gymnasium's environment."""
    played = evaluate_checkpoint(run, num_episodes=EPISODES, seed=1)
    found = {
        "gymnasium_mean": round(played["eval_return_mean"], 1),
        "gymnasium_std": round(played["eval_return_std"], 1),
    }
    if environment_factory(arguments.env, {}, None).tensor_source is None:
        return found
    simulated = simulator_returns(run, arguments.env, arguments.device)
    return {
        **found,
        "simulator_mean": round(float(simulated.mean()), 1),
        "simulator_std": round(float(simulated.std()), 1),
        "ratio": round(float(played["eval_return_mean"] / simulated.mean()), 3),
    }


if __name__ == "__main__":
    main()
