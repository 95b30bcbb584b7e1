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
