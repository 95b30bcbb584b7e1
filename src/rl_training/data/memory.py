"""Memory that is no longer used, back to the system."""

from __future__ import annotations

import ctypes


def release_freed_memory() -> None:
    """Return what was freed: glibc keeps much of it, and other C libraries are left as they are.

    Pieces of data that pass through memory would otherwise leave a trail beside the data.
    """
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (AttributeError, OSError):
        return
