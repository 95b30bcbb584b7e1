"""Run tests/test_simulators.py with real simulators, each in a virtual environment of its own.

`python benchmarks/simulators.py [NAME ...]` installs what is not there yet: several gigabytes. A
simulator that cannot be installed is skipped, and the reason is shown.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from peers import ROOT, PeerMissing, installed_python

OWN = ("--editable", str(ROOT), "pytest", "hypothesis")
"""What the tests need besides the simulator"""
# The versions that the tests were run with, on Python 3.11.
PACKAGES = {
    "mjlab": ("mjlab==1.6.0", "mujoco-warp==3.11.0", "rsl-rl-lib==5.4.2", "warp-lang==1.19.0"),
    "jax": (
        "jax==0.10.2",
        "brax==0.14.2",
        "playground==0.2.0",
        "mujoco==4.0.0",
        "mujoco-mjx==3.17.0",
        "warp-lang==1.19.0",
    ),
    "maniskill": ("mani_skill==3.0.1", "sapien==3.0.3"),
    "gymnasium": ("gymnasium==1.4.0", "array-api-compat==1.16.0"),
}
TESTS = {
    "mjlab": "mjlab",
    "jax": "brax or playground",
    "maniskill": "maniskill",
    "gymnasium": "gymnasium",
}
"""The tests of each environment, as pytest's -k"""


def main(names: list[str]) -> int:
    """Return 1 if a test failed, else 0."""
    if unknown := set(names) - set(PACKAGES):
        sys.exit(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(PACKAGES)}")
    outcomes = {name: tested(name) for name in names or PACKAGES}
    print("\n".join(f"{name}: {outcome}" for name, outcome in outcomes.items()))
    return int("failed" in outcomes.values())


def tested(name: str) -> str:
    """Run the tests of a simulator, and say in one line how they went."""
    try:
        python = installed_python(f"simulators-{name}", (*OWN, *PACKAGES[name]))
    except PeerMissing as error:
        return f"skipped, {error}"
    command = [python, "-m", "pytest", "-m", "simulators", "-k", TESTS[name], "-rs"]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1"}
    code = subprocess.run([*command, "tests/test_simulators.py"], cwd=ROOT, env=environment)
    return "failed" if code.returncode else "passed"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
