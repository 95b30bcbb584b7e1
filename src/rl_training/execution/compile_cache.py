"""Keeps compiled programs in a folder that is not deleted when the machine restarts."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from pathlib import Path

import torch

from rl_training import internals

CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


def keep_compiled_programs() -> None:
    """Set PyTorch's compile cache to the user's cache folder, unless the variable is already set.

    If the folder cannot be created, PyTorch uses its temporary folder.
    """
    if CACHE_VARIABLE not in os.environ:
        home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        try:
            folder = Path(home).expanduser() / "rl_training" / "compiled"
            folder.mkdir(parents=True, exist_ok=True)
        except (OSError, RuntimeError):  # RuntimeError: the user has no home folder
            return
        os.environ[CACHE_VARIABLE] = str(folder)


def remember_vector_instructions() -> None:
    """Find out once per machine which vector instructions the C++ compiler can use.

    If there is no folder or no compiler, PyTorch finds out at every start.
    """
    try:
        marker = Path(os.environ[CACHE_VARIABLE]) / f"vector-instructions-{_toolchain()}"
        internals.remember_vector_instructions(marker)
    except (KeyError, OSError):
        return


def last_compile_seconds(programs: str, device: str) -> float | None:
    """How long these programs took to compile the last time; None if unknown."""
    try:
        return float(_duration_file(programs, device).read_text())
    except (KeyError, OSError, ValueError):
        return None


def remember_compile_seconds(programs: str, device: str, seconds: float) -> None:
    """Keep a duration for `last_compile_seconds`, if there is a folder for it."""
    with contextlib.suppress(KeyError, OSError):
        file = _duration_file(programs, device)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{seconds:.1f}")


def _duration_file(programs: str, device: str) -> Path:
    """A file per description of programs: others take a different time, or are not cached yet."""
    described = f"{programs}|{device.partition(':')[0]}|{torch.__version__}"
    name = hashlib.sha256(described.encode()).hexdigest()[:16]
    return Path(os.environ[CACHE_VARIABLE]) / f"compile-seconds-{name}"


def _toolchain() -> str:
    """Return a hash of everything that the usable instructions depend on."""
    compiler = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), "")
    parts = (
        torch.__version__,
        torch.backends.cpu.get_cpu_capability(),
        os.path.realpath(compiler),
        str(os.stat(compiler).st_mtime_ns),
    )
    return hashlib.sha256("|".join(parts).encode()).hexdigest()[:16]
