"""The resolved execution of a run: device, compilation, threads and precision."""

from __future__ import annotations

import contextlib
import shutil
import sysconfig
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from rl_training.algorithms.hyperparameters import (
    Hyperparameters,
    OnlineHyperparameters,
    RolloutHyperparameters,
)
from rl_training.config import TrainConfig
from rl_training.envs.vector.backends import Backend
from rl_training.envs.vector.step_arrays import steps_per_round
from rl_training.errors import ConfigError
from rl_training.execution.compile_cache import keep_compiled_programs
from rl_training.internals import keep_freed_memory
from rl_training.models.mlp import LARGE_PRODUCT
from rl_training.types import Json

COMPILE_PAYS_FROM = {"cpu": 10_000, "cuda": 2_000}
"""Number of updates from which compilation saves more time than it takes"""

MOST_OVERLAPPED_UPDATES = 256
"""Updates between two steps of the environments up to which both can overlap. A signal can end a
block of updates early only if its transitions are already stored, so that it can be completed on
the same data later."""

BATCHED_ON = ("cuda",)
"""Devices on which several seeds run in one program"""


@dataclass(frozen=True)
class Execution:
    """How a run is executed.

    Numbers depend on it, so it is stored in the checkpoint and reused on resume.
    """

    device: str
    compiled: bool
    num_threads: int
    float32_precision: str
    graphed: bool = False
    """Whether programs are captured as CUDA graphs"""
    overlap: bool = False
    """Whether environments step while updates run"""
    batched: bool = False
    """Whether several seeds run in one program, with an axis of slots, rather than in turn"""
    vectorization: Backend = "sync"
    """Where environments run"""
    replay_on_host: bool = False
    """Whether updates on a GPU sample from a replay buffer in the memory of the host"""

    def apply(self) -> None:
        """Set the process-wide settings of PyTorch and of the memory allocator."""
        keep_freed_memory()
        if self.compiled:
            keep_compiled_programs()
        torch.set_num_threads(self.num_threads)
        # On a CPU only updates are rounded, and the learner does that.
        on_cpu = self.device == "cpu"
        torch.set_float32_matmul_precision("highest" if on_cpu else self.float32_precision)
        if not on_cpu:  # by default, cuDNN computes the convolutions of a user's networks in TF32
            torch.backends.cudnn.allow_tf32 = self.float32_precision != "highest"

    @property
    def graphs_updates(self) -> bool:
        """Whether updates are captured; a graph cannot sample from the memory of the host."""
        return self.graphed and not self.replay_on_host

    @property
    def rounds_products(self) -> bool:
        """Whether updates compute large matrix products in bfloat16, which only a CPU does."""
        return self.device == "cpu" and self.float32_precision == "medium"

    def describe(self) -> str:
        """Return a short description for progress output, such as `cpu, compiled`."""
        words = [self.device, "compiled" if self.compiled else "eager"]
        if self.rounds_products:
            words.append("large products in bfloat16")
        elif self.device != "cpu" and self.float32_precision != "highest":
            words.append("TF32")
        if self.replay_on_host:
            words.append("replay in host memory")
        return ", ".join(words)

    def to_json(self) -> Json:
        return asdict(self)


def resolve_execution(
    config: TrainConfig, planned_updates: int, *, elsewhere: str | None = None
) -> Execution:
    """Resolve each `auto` of the config for this machine and this number of updates.

    `elsewhere` is the device, `cpu` or `cuda`, of another machine that can compile.
    """
    if elsewhere is None:
        device = resolve_device(config.device)
        missing = missing_for_compilation(device)
    else:
        device, missing = elsewhere if config.device == "auto" else config.device, None
    compiled = _resolve_compile(config.compile, device, planned_updates, missing)
    on_cuda, precision = device.startswith("cuda"), config.float32_precision
    return Execution(
        device=device,
        compiled=compiled,
        num_threads=config.num_threads or suitable_threads(config.algo_kwargs),
        float32_precision="highest" if precision == "auto" else precision,
        graphed=compiled and on_cuda,
        overlap=_resolve_overlap(config, on_cuda=on_cuda),
        batched=device.partition(":")[0] in BATCHED_ON,
    )


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Use a single thread, because a sum that is split between threads may round differently."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def suitable_threads(hyperparameters: Hyperparameters) -> int:
    """Return 1 for networks too small for a second thread, or else PyTorch's number of threads.

    A waiting thread spins, which slows down other work on a shared core.
    """
    widest = max(hyperparameters.hidden_sizes, default=1)
    products = hyperparameters.batch_size * widest**2
    return 1 if products < LARGE_PRODUCT else torch.get_num_threads()


def resolve_device(wanted: str) -> str:
    """Return a device of this machine; raise `ConfigError` if there is no such device."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted == "auto":
        return "cuda:0" if count else "cpu"
    if wanted == "cpu":
        return wanted
    index = int(wanted.partition(":")[2] or 0)
    if index >= count:
        found = f"{count} CUDA device(s)" if count else "no CUDA device"
        raise ConfigError(f"device = {wanted!r}: this machine has {found}; use auto or cpu")
    return f"cuda:{index}"


def missing_for_compilation(device: str) -> str | None:
    """Return what `torch.compile` lacks on this machine, or None."""
    if device.startswith("cuda"):
        try:
            import triton  # type: ignore[import-untyped,unused-ignore]  # noqa: F401
        except ImportError:
            return "Triton"
        return None
    if not any(shutil.which(name) for name in ("c++", "g++", "clang++", "cl")):
        return "a C++ compiler (such as g++)"
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        return "Python's headers (such as the package python3-dev)"
    return None


def _resolve_overlap(config: TrainConfig, *, on_cuda: bool) -> bool:
    if isinstance(config.algo_kwargs, RolloutHyperparameters):
        return False  # updates need the complete rollout
    updates = _updates_between_steps(config)
    if config.overlap == "auto":
        return on_cuda and updates <= MOST_OVERLAPPED_UPDATES
    if config.overlap == "on" and updates > MOST_OVERLAPPED_UPDATES:
        raise ConfigError(
            f"overlap = 'on': {updates:,} updates between two steps of the environments are more "
            f"than {MOST_OVERLAPPED_UPDATES}, so a signal could not stop the run soon; use "
            "overlap: auto, which is as fast here"
        )
    return config.overlap == "on"


def _updates_between_steps(config: TrainConfig) -> int:
    """The largest number of updates that are due after one step of all environments."""
    chosen = config.hyperparameters
    if config.resolved_regime == "offline" or not isinstance(chosen, OnlineHyperparameters):
        return 1
    steps = steps_per_round(config.vectorization, config.num_envs)
    return -(-steps // chosen.train_frequency) * chosen.gradient_updates_per_step


def _resolve_compile(wanted: str, device: str, planned_updates: int, missing: str | None) -> bool:
    if wanted == "off":
        return False
    if wanted == "on":
        if missing:
            raise ConfigError(f"compile = 'on': needs {missing}; install it or use compile: off")
        return True
    return missing is None and planned_updates >= COMPILE_PAYS_FROM[device.partition(":")[0]]
