"""Shared by all benchmarks: machine description, tables of at most 100 columns, JSON files."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
BUSY = 0.5
"""Load average above which other programs are using the machine"""


def warn_if_busy() -> float:
    """Return the load of the machine, and warn if other programs would distort measured times."""
    load = os.getloadavg()[0]
    if load > BUSY:
        print(f"note: other programs use this machine (load {load:.1f}); do not keep these times")
    return round(load, 2)


def machine(**more: Any) -> dict[str, Any]:
    """What the figures depend on: processor, GPU if there is one, versions, and `more`."""
    found = {
        "processor": processor(),
        "gpu": gpu(),
        "python": platform.python_version(),
        "torch": importlib.metadata.version("torch"),
    }
    return {name: value for name, value in {**found, **more}.items() if value is not None}


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]}, {len(names)} cores" if names else platform.processor()


def gpu() -> str | None:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def process_bytes(field: str) -> int:
    """A memory field of this process: `VmRSS` (resident now) or `VmHWM` (peak resident)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {field} in /proc/self/status: this benchmark needs Linux")


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table with the first column left-aligned and the others right-aligned."""
    lines = [list(header), *map(list, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    print(f"\n{title}")
    for line in lines:
        first, *others = (
            text.rjust(width) if column else text.ljust(width)
            for column, (text, width) in enumerate(zip(line, widths, strict=True))
        )
        print("  ".join([first, *others]).rstrip())


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Write the file atomically, so that a reader never sees a partial file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    part.write_text(json.dumps(values, indent=1) + "\n")
    part.replace(path)


def write_results(path: Path, results: dict[str, Any]) -> None:
    write_json(path, results)
    about = ", ".join(f"{name} {value}" for name, value in results["machine"].items())
    print(f"\nwritten to {path}", textwrap.fill(f"({about})", 100), sep="\n")
