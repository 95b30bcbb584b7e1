"""Control whether the C library keeps or returns freed memory; has an effect on glibc only."""

from __future__ import annotations

import ctypes

TRIM_THRESHOLD, TOP_PAD, MMAP_THRESHOLD = -1, -2, -3
"""Options of `mallopt`"""


def keep_freed_memory() -> None:
    """Keep memory that is freed after an update, because the next update needs it again.

    By default glibc returns large blocks to the system, and each update faults them in again.
    """
    _call("mallopt", MMAP_THRESHOLD, 256 * 2**20)
    _call("mallopt", TRIM_THRESHOLD, 256 * 2**20)
    _call("mallopt", TOP_PAD, 64 * 2**20)


def release_freed_memory() -> None:
    """Return freed memory to the system, so that temporary chunks do not add to peak memory."""
    _call("malloc_trim", 0)


def _call(name: str, *arguments: int) -> None:
    try:
        function = getattr(ctypes.CDLL(None), name)
    except (AttributeError, OSError):
        return
    function(*arguments)
