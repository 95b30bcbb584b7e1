"""Every use of an undocumented API of PyTorch, or of the operating system, each with a fallback.

`pyproject.toml` bounds PyTorch to versions in which these APIs were tested. If another version
lacks one, or has changed it, the fallback computes the same numbers, perhaps more slowly. No other
module of the package uses names of PyTorch with a leading underscore.

The compiler takes a second to import, so functions that need it import it when they are called.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph

TRIM_THRESHOLD, TOP_PAD, MMAP_THRESHOLD = -1, -2, -3
"""Options of `mallopt`"""

_CHANGED = (AttributeError, ImportError, TypeError)
"""Raised by a private API that was removed or whose signature changed"""

MAPPED_BY_A_LOOP = "There is a performance drop"
"""Start of the warning that `torch.func.vmap` repeats an operation for each slot"""
_MAPS_VIEWS = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)
"""Whether `torch.func.vmap` supports views as another type"""


def is_batched(tensor: Tensor) -> bool:
    """Return whether `torch.func.vmap` is mapping over `tensor`.

    Uses `torch._C._functorch.is_batchedtensor`, because there is no public test, and looks through
    the wrappers of `torch.func.grad`. Without these, a batched tensor is recognized by its missing
    data pointer.
    """
    try:
        functorch = torch._C._functorch
        while functorch.is_gradtrackingtensor(tensor):
            tensor = functorch.get_unwrapped(tensor)
        return bool(functorch.is_batchedtensor(tensor))
    except _CHANGED:
        return not _has_data_pointer(tensor)


def _has_data_pointer(tensor: Tensor) -> bool:
    try:
        tensor.data_ptr()
    except RuntimeError:
        return False
    return True


def reinterpreted(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the bytes of a tensor as another type, also under `torch.func.vmap`.

    PyTorch 2.11 cannot map such a view. There, a mapped or compiled tensor is copied. The compiler
    needs a single axis, because it may store a column of several rows by columns.
    """
    is_compiling = torch.compiler.is_compiling()
    if _MAPS_VIEWS or not (is_compiling or is_batched(tensor)):
        return tensor.view(dtype)
    if is_compiling:
        size = tensor.shape[-1] * tensor.element_size() // dtype.itemsize
        flat = tensor.reshape(-1).clone(memory_format=torch.contiguous_format)
        return torch.view_copy(flat, dtype=dtype).view(*tensor.shape[:-1], size)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", MAPPED_BY_A_LOOP)
        return torch.view_copy(tensor, dtype=dtype)


def compiles_in_threads() -> bool:
    """Return whether programs can be compiled in a thread other than the main one.

    A build of PyTorch 2.11 with CUDA crashes there if the machine has no GPU, because it replaces
    its missing GPU driver while it traces.
    """
    is_built = torch.backends.cuda.is_built()  # type: ignore[no-untyped-call]
    return torch.cuda.is_available() or not is_built


def fused_adam_step(
    vector: Tensor,
    gradient: Tensor,
    moments: list[Tensor],
    *,
    learning_rate: Tensor | float,
    beta1: float,
    beta2: float,
    epsilon: float,
    weight_decay: float,
) -> bool:
    """Take one Adam step in place; return False if the kernel is not available.

    `moments` are the running mean, the running square and the number of this step. Weight decay is
    decoupled from the gradient.

    Uses `torch._fused_adam_` and `torch._fused_adamw_`, which read each vector once. The public
    `torch.optim.Adam(fused=True)` calls them too, but first sorts its parameters by device and
    type. Without them, the caller computes the step by separate operations.
    """
    mean, square, count = moments
    try:
        kernel = torch._fused_adamw_ if weight_decay else torch._fused_adam_
        kernel(
            [vector],
            [gradient],
            [mean],
            [square],
            [],
            [count],
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=learning_rate,
            weight_decay=weight_decay,
            eps=epsilon,
            maximize=False,
        )
    except _CHANGED:
        return False
    return True


def multiplies_bfloat16() -> bool:
    """Return whether this CPU has instructions for products of bfloat16 numbers.

    Uses `torch.cpu._is_avx512_bf16_supported`, because `torch.cpu.get_capabilities` is new. Without
    it, `get_capabilities` is used; without both, the answer is False.
    """
    try:
        return bool(torch.cpu._is_avx512_bf16_supported())
    except _CHANGED:
        capabilities: Mapping[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
        return bool(capabilities.get("avx512_bf16", False))


def compile_with_options(
    function: Callable[..., Any], options: dict[str, Any]
) -> Callable[..., Any]:
    """Compile `function` into a single graph, with those `options` that PyTorch accepts.

    Uses options of `torch.compile` that only the compiler's source describes. PyTorch raises
    RuntimeError for an option that it does not know. The program is then compiled without that
    option, and a warning names it.
    """
    try:
        return _compile(function, options)
    except RuntimeError:
        accepted = {name: value for name, value in options.items() if _accepts(name, value)}
        if accepted == options:
            raise
        refused = ", ".join(sorted(options.keys() - accepted.keys()))
        warnings.warn(
            f"PyTorch {torch.__version__} does not accept the compile options {refused}; "
            "compiled updates may be slower, and on CUDA may differ between runs",
            stacklevel=2,
        )
        return _compile(function, accepted)


def _compile(function: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    # A copy, because `torch.compile` removes options from the dictionary.
    compiled: Callable[..., Any] = torch.compile(
        function, fullgraph=True, dynamic=False, options=dict(options)
    )
    return compiled


def _accepts(name: str, value: Any) -> bool:
    """Return whether PyTorch knows a compile option; nothing is compiled before a first call."""
    try:
        _compile(lambda: None, {name: value})
    except RuntimeError:
        return False
    return True


def guard_options() -> dict[str, Any]:
    """Return the compile option that removes all guards.

    Uses `guard_filter_fn`. The caller guarantees that shapes, strides and settings never change, so
    there is nothing to check at each call. Without it, PyTorch checks at each call.
    """
    return {"guard_filter_fn": lambda guards: [False for _ in guards]}


def kernel_options(device_type: str) -> dict[str, Any]:
    """Return the compile options that decide how kernels are chosen and called.

    Uses `cpp_wrapper` on a CPU: kernels are called from C++ rather than from Python. Without it,
    each call takes longer.

    Uses `deterministic` on CUDA: kernels are not chosen by timing them, which could choose a
    kernel that sums in another order the next time. It costs nothing measurable. Without it, two
    runs may differ by rounding.
    """
    return {"cpp_wrapper": True} if device_type == "cpu" else {"deterministic": True}


def graph_pass_options(transform: Callable[[Graph], None], version: str) -> dict[str, Any]:
    """Return the compile option that applies `transform` to a program's graph.

    Uses `post_grad_custom_pre_pass` and `torch._inductor.custom_graph_pass.CustomGraphPass`, which
    makes `version` part of the key of the compile cache. Without them, graphs are compiled as they
    are.
    """
    try:
        base: Any = import_module("torch._inductor.custom_graph_pass").CustomGraphPass
    except _CHANGED:
        return {}

    class GraphPass(base):  # type: ignore[misc]
        def __call__(self, graph: Graph) -> None:
            transform(graph)

        def uuid(self) -> str:
            return version

    return {"post_grad_custom_pre_pass": GraphPass()}


def is_pure_operator(target: object) -> bool:
    """Return whether the target of a graph node is an operator without effects or random numbers.

    Uses `torch._ops.OpOverload` and its `_schema`. Without them, the answer is False: equal nodes
    are then not merged.
    """
    try:
        return (
            isinstance(target, torch._ops.OpOverload)
            and not target._schema.is_mutable
            and torch.Tag.nondeterministic_seeded not in target.tags
        )
    except _CHANGED:
        return False


def compiled_function(function: FunctionType) -> Callable[..., Any] | None:
    """Return the code that the first call of a compiled function produced, without its guards.

    Uses `_debug_get_cache_entry_list` of `torch._dynamo.eval_frame`. The wrapper that
    `torch.compile` returns decides at every call whether to compile again. For a small update this
    takes half as long as the update itself. Returns None if there is not exactly one cache entry,
    or no such API; the wrapper is then called each time.
    """
    try:
        eval_frame = import_module("torch._dynamo.eval_frame")
        [entry] = eval_frame._debug_get_cache_entry_list(function.__code__)
        names = _called_directly(entry.code.co_names, function.__globals__)
        return FunctionType(entry.code, names, closure=function.__closure__)
    except (*_CHANGED, ValueError):
        return None


class _Unrecorded:
    """`torch._dynamo.utils` without its notes for a profiler, which no call here needs."""

    def __init__(self, utils: ModuleType) -> None:
        self._utils = utils

    def __getattr__(self, name: str) -> Any:
        return getattr(self._utils, name)

    def record_pregraph_bytecode_enter(self) -> None:
        return None

    def record_pregraph_bytecode_exit(self, recorded: None) -> None:
        return None


def _called_directly(used: Iterable[str], names: dict[str, Any]) -> dict[str, Any]:
    """Return the names that compiled code uses, with functions that do less at every call.

    Uses `_torchdynamo_orig_callable`: what is called switches the compiler off around itself,
    where it is off anyway, and notes its start. For a small program that takes a third of the time.
    Without it, names are left as they are.
    """
    found = dict(names)
    for name in used:
        value = names.get(name)
        if isinstance(value, ModuleType) and value.__name__ == "torch._dynamo.utils":
            found[name] = _Unrecorded(value)
        elif original := getattr(value, "_torchdynamo_orig_callable", None):
            found[name] = original
    return found


def remember_vector_instructions(marker: Path) -> None:
    """Skip the compiler's search for vector instructions if the file `marker` exists.

    The compiler finds out at every start which vector instructions it can use, by compiling and
    loading test programs. This takes longer than loading a cached update. The first call creates
    `marker` if all instructions that the CPU reports can be compiled.

    Uses `torch._inductor.cpu_vec_isa.valid_vec_isa_list` and `torch._inductor.config.cpp`. Without
    them, the compiler searches at every start.
    """
    try:
        candidates = import_module("torch._inductor.cpu_vec_isa").valid_vec_isa_list
        settings = import_module("torch._inductor.config").cpp
        if settings.vec_isa_ok is not None:
            return
        if not marker.exists():
            usable = candidates()
            candidates.cache_clear()
            settings.vec_isa_ok = True
            if candidates() != usable:
                settings.vec_isa_ok = None
                candidates.cache_clear()
                return
            marker.touch()
        settings.vec_isa_ok = True
    except _CHANGED:
        return


def cancel_compilations() -> None:
    """Cancel the C++ compilations that have not begun.

    PyTorch keeps a pool of threads that run the compiler, `AsyncCompile.pool` in
    `torch._inductor.async_compile`. Without this they would go on, and Python waits for them at
    exit. The next compilation makes a new pool.
    """
    module = sys.modules.get("torch._inductor.async_compile")
    pool = getattr(getattr(module, "AsyncCompile", None), "pool", None)
    if isinstance(pool, functools._lru_cache_wrapper) and pool.cache_info().currsize:
        pool().shutdown(wait=False, cancel_futures=True)
        pool.cache_clear()


def forget_compiler_probes() -> None:
    """Let the compiler find out again what it has found out about the C++ compiler and the CPU.

    A trial that was ended looks like a failed one, and PyTorch would keep that answer: programs
    would then be compiled without vector instructions, with slightly different numbers.

    Clears the caches of functions in `torch._inductor.cpu_vec_isa` and in `cpp_builder` beside it.
    """
    for name in ("torch._inductor.cpu_vec_isa", "torch._inductor.cpp_builder"):
        module = sys.modules.get(name)
        members = [] if module is None else list(vars(module).values())
        classes = [member for member in members if isinstance(member, type)]
        for function in [*members, *(each for kind in classes for each in vars(kind).values())]:
            if isinstance(function, functools._lru_cache_wrapper):
                function.cache_clear()


def keep_freed_memory() -> None:
    """Keep freed memory in the process, because the next update needs it again.

    Uses `mallopt` of the GNU C library, which by default returns large blocks to the system.
    Without it, updates spend time on page faults.
    """
    _call_c_library("mallopt", MMAP_THRESHOLD, 256 * 2**20)
    _call_c_library("mallopt", TRIM_THRESHOLD, 256 * 2**20)
    _call_c_library("mallopt", TOP_PAD, 64 * 2**20)


def release_freed_memory() -> None:
    """Return freed memory to the system, to keep the peak low while data is loaded.

    Uses `malloc_trim` of the GNU C library. Without it, the process keeps the memory.
    """
    _call_c_library("malloc_trim", 0)


def _call_c_library(name: str, *arguments: int) -> None:
    try:
        function = getattr(ctypes.CDLL(None), name)
    except (AttributeError, OSError):
        return
    function(*arguments)


def available_memory(device: torch.device | str) -> int | None:
    """Return the bytes that can still be allocated on a device; None if that is unknown."""
    device = torch.device(device)
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return free + cached
    known = [free for free in (_free_host_memory(), *_free_group_memory()) if free is not None]
    return min(known, default=None)


def _free_host_memory() -> int | None:
    """Return the memory that Linux can provide without swapping."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line[:12] == "MemAvailable")
    except (OSError, ValueError, IndexError, StopIteration):
        return None


def _free_group_memory() -> list[int]:
    """Return what is left of the memory limits of this process's control groups (containers)."""
    free = []
    for folder, limit, used in _memory_groups():
        try:
            statistics = dict(
                line.split() for line in (folder / "memory.stat").read_text().splitlines()
            )
            # Cached files are counted as used, but are dropped when memory is needed.
            cached = int(statistics.get("total_inactive_file", statistics.get("inactive_file", 0)))
            allowed = int((folder / limit).read_text())
            free.append(max(0, allowed - int((folder / used).read_text()) + cached))
        except (OSError, ValueError):  # "max": no limit
            continue
    return free


def _memory_groups() -> list[tuple[Path, str, str]]:
    """Return the folders of this process's control groups, with the names of limit and usage."""
    try:
        entries = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found = []
    for entry in entries:
        _, controllers, path = entry.split(":", 2)
        if controllers == "":
            root, limit, used = Path("/sys/fs/cgroup"), "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            root = Path("/sys/fs/cgroup/memory")
            limit, used = "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        group = root / path.lstrip("/")
        # Inside a container, the group is often mounted at the root itself.
        parents = [folder for folder in group.parents if folder.is_relative_to(root)]
        found += [(folder, limit, used) for folder in (group, *parents)]
    return found


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether PyTorch or NumPy could not allocate memory."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    reasons = [
        "allocate memory",
        "not enough memory",
        "out of memory",
        "multiplication overflow",  # more bytes than an integer can count
        "size calculation overflow",
    ]
    return isinstance(error, RuntimeError) and any(reason in str(error) for reason in reasons)
