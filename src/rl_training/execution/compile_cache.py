"""Compiled programs are kept for later runs, in a folder that outlives a restart of the machine."""

from __future__ import annotations

import hashlib
import importlib
import os
import shutil
from pathlib import Path

import torch

CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


def keep_compiled_programs() -> None:
    """Let PyTorch keep its compiled programs in the user's cache folder, unless told another."""
    if CACHE_VARIABLE not in os.environ:
        home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        folder = Path(home).expanduser() / "rl_training" / "compiled"
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError:
            return  # then in its own, temporary place
        os.environ[CACHE_VARIABLE] = str(folder)


def remember_vector_instructions() -> None:
    """Find out only once which vector instructions the C++ compiler can use.

    PyTorch finds out at every start, by compiling and loading trial programs, which takes longer
    than loading the compiled update itself.
    """
    try:
        chosen = importlib.import_module("torch._inductor.cpu_vec_isa")
        settings = importlib.import_module("torch._inductor.config").cpp
        marker = Path(os.environ[CACHE_VARIABLE]) / f"vector-instructions-{_toolchain()}"
        if settings.vec_isa_ok is not None:
            return
        if not marker.exists():
            tried = chosen.valid_vec_isa_list()
            chosen.valid_vec_isa_list.cache_clear()
            settings.vec_isa_ok = True
            if chosen.valid_vec_isa_list() != tried:  # some can't be compiled or loaded here
                settings.vec_isa_ok = None
                chosen.valid_vec_isa_list.cache_clear()
                return
            marker.touch()
        settings.vec_isa_ok = True
    except (AttributeError, ImportError, KeyError, OSError):
        return  # another PyTorch, or no folder to remember in: it finds out each time


def _toolchain() -> str:
    """What the answer depends on."""
    compiler = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), "")
    parts = (
        torch.__version__,
        torch.backends.cpu.get_cpu_capability(),
        os.path.realpath(compiler),
        str(os.stat(compiler).st_mtime_ns),
    )
    return hashlib.sha256("|".join(parts).encode()).hexdigest()[:16]
