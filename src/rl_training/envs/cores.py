"""The number of CPU cores that this process may use."""

from __future__ import annotations

import math
import os
from pathlib import Path

CONTROL_GROUP = Path("/sys/fs/cgroup")
"""Folder in which Linux shows the resource limits of a container"""


def available_cores() -> int:
    """Return the number of cores this process may use, including a container's CPU limit."""
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    return math.ceil(min(cores, _core_limit()))


def _core_limit() -> float:
    """Return the CPU limit of the control group (version 1 or 2), or infinity without a limit."""
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
