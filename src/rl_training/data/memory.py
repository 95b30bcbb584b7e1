"""What the C library does with freed memory; only glibc is asked, others are left as they are."""

from __future__ import annotations

import ctypes

TRIM_THRESHOLD, TOP_PAD, MMAP_THRESHOLD = -1, -2, -3
"""Options of `mallopt`"""


def keep_freed_memory() -> None:
    """Keep what an update frees: the next one needs just that again.

    By default it is returned to the system and faulted in anew each time.
    """
    _call("mallopt", MMAP_THRESHOLD, 256 * 2**20)
    _call("mallopt", TRIM_THRESHOLD, 256 * 2**20)
    _call("mallopt", TOP_PAD, 64 * 2**20)


def release_freed_memory() -> None:
    """Return what was freed: pieces of data that pass through would leave a trail beside it."""
    _call("malloc_trim", 0)


def _call(name: str, *arguments: int) -> None:
    try:
        function = getattr(ctypes.CDLL(None), name)
    except (AttributeError, OSError):
        return
    function(*arguments)
