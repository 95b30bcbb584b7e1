"""How many processes can run side by side."""

from __future__ import annotations

import math
import os
from pathlib import Path

CONTROL_GROUP = Path("/sys/fs/cgroup")
"""Where Linux tells a container what it may use"""


def available_cores() -> int:
    """Cores this process may use: a container's share, where that is less than the machine."""
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    return math.ceil(min(cores, _granted_cores()))


SPARE_CORES = 2
"""One for this process, and one for whatever computes beside it"""

MANY_CORES = 8
"""From so many on, two that are left free cost a round less than processes that share a core"""


def suitable_workers(number: int, cores: int) -> int:
    """Processes to share `number` environments out over.

    On a machine of many cores some are left free, and among as many environments each as that
    takes, no more processes than needed: a round is over when the last of them is done, and one
    that waits for a core is always the last.
    """
    if cores < MANY_CORES:
        return min(number, cores)
    largest_share = math.ceil(number / (cores - SPARE_CORES))
    return math.ceil(number / largest_share)


def _granted_cores() -> float:
    """What the control group, of either version, grants; infinite where it sets no limit."""
    try:
        quota, period = (CONTROL_GROUP / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            quota = (CONTROL_GROUP / "cpu" / "cpu.cfs_quota_us").read_text()
            period = (CONTROL_GROUP / "cpu" / "cpu.cfs_period_us").read_text()
        except OSError:
            return math.inf
    try:
        share = int(quota) / int(period)
    except (ValueError, ZeroDivisionError):  # "max": no limit
        return math.inf
    return share if share > 0 else math.inf
