"""Progress bar for reading and recording data on a terminal."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator

from rl_training.data.formats.recording import ProgressListener

REFRESH_SECONDS = 0.1


@contextlib.contextmanager
def reading_progress(label: str) -> Iterator[ProgressListener | None]:
    """Yield a listener that updates a progress bar; None if stdout is not a terminal."""
    if not sys.stdout.isatty():
        yield None
        return
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (TextColumn(label), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, transient=True) as bar:
        task, shown_at = bar.add_task(label, total=None), 0.0

        def show(done: int, total: int) -> None:
            nonlocal shown_at
            now = time.perf_counter()
            if now - shown_at > REFRESH_SECONDS or done == total:
                shown_at = now
                bar.update(task, completed=done, total=total)

        yield show
