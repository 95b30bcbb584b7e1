"""Peers are installed into virtual environments of their own, never into this package's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
HOME = ROOT / ".bench"
PACKAGES = {
    "sb3": ["stable-baselines3>=2.9", "sb3-contrib", "mujoco", "imageio", "packaging"],
}


def peer_python(peer: str) -> str:
    """The interpreter that has `peer`; its environment is made on the first call."""
    folder = HOME / peer
    python, ready = folder / "bin" / "python", folder / ".ready"
    if not ready.exists():
        print(f"installing {peer} (once) ...", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        command = [str(python), "-m", "pip", "install", "--quiet", _torch()]
        subprocess.run([*command, *PACKAGES[peer]], check=True)
        ready.touch()
    return str(python)


def _torch() -> str:
    """The same PyTorch as this package's; all else is the peer's own choice."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return next(line for line in lines if line.startswith("torch=="))
