"""Sweeps on a real Ray cluster of several nodes, whose workers, nodes and driver are killed."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("optuna")
pytest.importorskip("ray")

import psutil
from ray.cluster_utils import Cluster
from sweep_helpers import (
    GRID,
    RANDOM,
    kill,
    kill_seeds,
    require_same,
    run_sweep_command,
    run_with_kills,
    start_sweep,
    sweep_file,
)

pytestmark = pytest.mark.ray

NODE = {"num_cpus": 1, "object_store_memory": 80 * 2**20}
KILLS = 6


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A head without cores, and two nodes that run one trial each."""
    nodes = Cluster(
        initialize_head=True,
        head_node_args={**NODE, "num_cpus": 0, "include_dashboard": False},
    )
    for _ in range(2):
        nodes.add_node(**NODE)
    nodes.wait_for_nodes()
    yield nodes
    nodes.shutdown()


@pytest.fixture(scope="module", params=[GRID, RANDOM], ids=["grid", "random"])
def alone(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """A sweep, and its folder after it ran on one machine, undisturbed."""
    folder = tmp_path_factory.mktemp("alone")
    run_sweep_command(sweep_file(folder, request.param), folder / "sweep")
    return request.param, folder / "sweep"


class Disturber:
    """Kills workers of trials, nodes and the driver, one at a time."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.done: list[str] = []

    def __call__(self, chance: random.Random, driver: subprocess.Popen[bytes]) -> None:
        what = chance.choice(["worker", "worker", "node", "driver"])
        self.done.append(what)
        if what == "driver":
            driver.kill()
        elif what == "worker" and (workers := running_trials()):
            kill(chance.choice(workers).pid)
        elif what == "node":
            lost = chance.choice(sorted(self._cluster.worker_nodes, key=id))
            self._cluster.remove_node(lost, allow_graceful=False)
            self._cluster.add_node(**NODE)


def running_trials() -> list[psutil.Process]:
    """The processes of Ray that run a trial now."""
    found = []
    for process in psutil.process_iter():
        try:
            if "ray::" in " ".join(process.cmdline()) and "_run_remotely" in process.cmdline()[0]:
                found.append(process)
        except (psutil.Error, IndexError):
            continue
    return found


def test_losses_of_workers_nodes_and_driver_change_nothing(
    cluster: Cluster, alone: tuple[dict, Path], tmp_path: Path
) -> None:
    values, reference = alone
    file = sweep_file(tmp_path, values)
    for seed in kill_seeds():
        output = tmp_path / f"sweep-{seed}"

        def start(output: Path = output) -> subprocess.Popen[bytes]:
            return start_sweep(file, output, "--on", "ray", "--address", cluster.address)

        run_with_kills(start, Disturber(cluster), seed=seed, times=KILLS)

        require_same(output, reference)


def test_trials_move_between_machines_without_a_shared_disk(
    cluster: Cluster, alone: tuple[dict, Path], tmp_path: Path
) -> None:
    values, reference = alone
    file = sweep_file(tmp_path, values, storage=f"file://{tmp_path}/storage")
    output = tmp_path / "sweep"
    options = ("--on", "ray", "--address", cluster.address)

    run_with_kills(
        lambda: start_sweep(file, output, *options), Disturber(cluster), seed=1, times=KILLS // 2
    )

    require_same(output, reference)


def test_a_full_object_store_changes_nothing(cluster: Cluster, tmp_path: Path) -> None:
    few = {**GRID, "grid": {"learning_rate": [1e-4, 1e-3]}}
    file, output = sweep_file(tmp_path, few), tmp_path / "sweep"
    filler = subprocess.Popen([sys.executable, "-c", FILL, cluster.address], stdout=subprocess.PIPE)
    try:
        assert filler.stdout is not None
        assert filler.stdout.readline() == b"full\n"
        run_sweep_command(file, output, "--on", "ray", "--address", cluster.address)
    finally:
        filler.kill()
        filler.wait()

    run_sweep_command(sweep_file(tmp_path, few), tmp_path / "alone")
    require_same(output, tmp_path / "alone")


FILL = """
import sys, time
import numpy, ray
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="CRITICAL")
@ray.remote(num_cpus=0, scheduling_strategy="SPREAD")
def fill():
    return numpy.zeros(20 * 2**20, numpy.uint8)
kept = [fill.remote() for _ in range(16)]
ray.wait(kept, num_returns=len(kept), timeout=60)
print("full", flush=True)
time.sleep(600)
"""
