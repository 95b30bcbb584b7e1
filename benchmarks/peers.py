"""Install peers into separate virtual environments, never into the one of this package."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from contest import Contestant

ROOT = Path(__file__).parents[1]
HOME = ROOT / ".bench"
CONTESTANTS = Path(__file__).parent / "contestants"
MUJOCO = ("mujoco", "imageio", "packaging")


class PeerMissing(Exception):
    """A peer could not be installed."""


@dataclass(frozen=True)
class Peer:
    """The module with the classes of a peer, and the script that runs them."""

    environment: str
    """A key of `PACKAGES`; several peers may share one"""
    script: str
    """A script in `contestants/`"""
    module: str
    variables: dict[str, str] = field(default_factory=dict)
    """Environment variables of the process; `{threads}` is replaced by the number of threads"""


PACKAGES = {
    "sb3": ("stable-baselines3>=2.9", "sb3-contrib", *MUJOCO),
    "sbx": ("sbx-rl", *MUJOCO),
    # Pins gymnasium 1.0, which has the same HalfCheetah-v5 and supports the same MuJoCo.
    "d3rlpy": ("d3rlpy", *MUJOCO),
    # What its scripts need besides PyTorch, in the versions that its authors pin.
    "cleanrl": ("gymnasium==0.29.1", "mujoco==2.3.3", "imageio", "numpy<2", "tensorboard", "tyro"),
}
# These limit the threads of JAX, judging by CPU time over wall time; the usual XLA_FLAGS do not.
JAX_THREADS = {"PJRT_NPROC": "{threads}", "JAX_PLATFORMS": "cpu"}
PEERS = {
    "sb3": Peer("sb3", "sb3.py", "stable_baselines3"),
    "sb3-contrib": Peer("sb3", "sb3.py", "sb3_contrib"),
    "sbx": Peer("sbx", "sb3.py", "sbx", JAX_THREADS),
    "d3rlpy": Peer("d3rlpy", "d3rlpy_online.py", "d3rlpy.algos"),
    "cleanrl": Peer("cleanrl", "cleanrl_ppo.py", ""),
    "d3rlpy offline": Peer("d3rlpy", "d3rlpy_offline.py", "d3rlpy.algos"),
}


def peer_contestant(name: str, task: dict[str, Any]) -> Contestant:
    """A peer with a task. Raises `PeerMissing` if the peer cannot be installed."""
    peer = PEERS[name]
    return Contestant(
        name=name,
        python=peer_python(peer.environment),
        script=CONTESTANTS / peer.script,
        task={**task, "module": peer.module},
        variables={
            key: value.format(threads=task["threads"]) for key, value in peer.variables.items()
        },
    )


def available_python(environment: str) -> str:
    """The interpreter for a peer: its own, or else this one if it has the peer, as on a machine
    that cannot install anything. Otherwise the peer is installed."""
    module = PEERS[environment].module.partition(".")[0]
    if not (HOME / environment / ".ready").exists() and importlib.util.find_spec(module):
        return sys.executable
    return peer_python(environment)


def peer_python(environment: str) -> str:
    """The interpreter of a peer's virtual environment, which the first call creates."""
    return installed_python(environment, PACKAGES[environment])


def installed_python(environment: str, packages: Sequence[str]) -> str:
    """The interpreter of a virtual environment with `packages`, which the first call creates.

    `packages` are arguments of `pip install`. Raises `PeerMissing` if they cannot be installed.
    """
    folder = HOME / environment
    python, ready = folder / "bin" / "python", folder / ".ready"
    if not ready.exists():
        print(f"installing {environment} (once) ...", flush=True)
        install = [str(python), "-m", "pip", "install", "--quiet", _torch()]
        try:
            subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
            subprocess.run([*install, *packages], check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise PeerMissing(f"could not be installed: {error}") from error
        ready.touch()
    return str(python)


def _torch() -> str:
    """The PyTorch version of this package; the peer chooses everything else."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return next(line for line in lines if line.startswith("torch=="))
