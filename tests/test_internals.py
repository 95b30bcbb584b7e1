"""Fallbacks for missing private PyTorch APIs give the same results."""

from __future__ import annotations

import importlib
import re
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conformance import stack
from test_learner import batches, learner, make_algorithm
from torch import Tensor
from torch.fx import Graph
from torch.fx.experimental.proxy_tensor import make_fx

import rl_training
from rl_training import internals
from rl_training.algorithms.functional import Adam
from rl_training.execution import compile_cache
from rl_training.execution import learner as learner_module
from rl_training.execution.common_subexpressions import merge_equal_nodes
from rl_training.execution.programs import compile_program


class Without:
    """Wraps a module in which one name is missing or is a function without parameters."""

    def __init__(self, module: Any, path: str, missing: str, changed: bool) -> None:
        self._module, self._path, self._missing, self._changed = module, path, missing, changed

    def __getattr__(self, name: str) -> Any:
        path = f"{self._path}.{name}"
        if path == self._missing:
            if self._changed:
                return lambda: None
            raise AttributeError(path)
        value = getattr(self._module, name)
        inside = self._missing.startswith(f"{path}.")
        return Without(value, path, self._missing, self._changed) if inside else value


@pytest.fixture
def hide(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that hides a private API from the package but not from PyTorch itself."""

    def take_away(missing: str, *, changed: bool = False) -> None:
        def import_module(name: str) -> Any:
            if name == missing:
                raise ImportError(name)
            return Without(importlib.import_module(name), name, missing, changed)

        monkeypatch.setattr(internals, "torch", Without(torch, "torch", missing, changed))
        monkeypatch.setattr(internals, "import_module", import_module)

    return take_away


Hide = Callable[..., None]
Results = tuple[Tensor, list[Tensor]]

PRIVATE = re.compile(
    r"\btorch(\.\w+)*\._(?!_)|from torch\S* import .*\b_|\._schema\b|_debug_get_cache_entry_list"
    r"|guard_filter_fn|post_grad_custom|cpp_wrapper|vec_isa_ok|\"deterministic\""
)


def test_no_other_module_uses_private_apis() -> None:
    package = Path(rl_training.__file__).parent
    users = {
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        if PRIVATE.search(path.read_text(encoding="utf-8"))
    }
    assert users == {"internals.py"}


@pytest.mark.parametrize("changed", [False, True])
def test_batched_tensors_are_detected_without_the_private_api(hide: Hide, changed: bool) -> None:
    answers = []

    def record(tensor: Tensor) -> Tensor:
        answers.append(internals.is_batched(tensor))
        return tensor

    record(torch.zeros(3))
    torch.func.vmap(record)(torch.zeros(3))
    hide("torch._C._functorch.is_batchedtensor", changed=changed)
    record(torch.zeros(3))
    torch.func.vmap(record)(torch.zeros(3))
    assert answers == [False, True, False, True]


def test_batched_tensors_are_detected_where_gradients_are_computed() -> None:
    answers = []

    def record(tensor: Tensor) -> Tensor:
        answers.append(internals.is_batched(tensor))
        return tensor.sum()

    torch.func.grad(record)(torch.zeros(3))
    torch.func.vmap(torch.func.grad(record))(torch.zeros(2, 3))
    torch.func.grad(torch.func.grad(record))(torch.tensor(1.0))
    assert answers == [False, True, False]


@pytest.mark.parametrize("seeds", [1, 2])
def test_updates_are_bitwise_equal_without_the_check_for_batched_tensors(
    hide: Hide, seeds: int
) -> None:
    def updated() -> dict[str, Tensor]:
        given = [stack((batch,) * seeds) for batch in batches(3)]
        one = learner(*(make_algorithm(seed) for seed in range(seeds)), given=given)
        one.update(0, 3)
        return one.state

    expected = updated()
    hide("torch._C._functorch.is_batchedtensor")
    torch.testing.assert_close(updated(), expected, rtol=0, atol=0)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("changed", [False, True])
def test_adam_takes_the_same_steps_without_the_fused_kernel(
    hide: Hide, changed: bool, weight_decay: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    adam, by_operations = Adam(0.01, weight_decay=weight_decay), []

    def steps() -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(0)
        state = {"actor": torch.randn(50, generator=generator)}
        state |= adam.initial_state("actor", state["actor"])
        for _ in range(20):
            adam.step(state, "actor", torch.randn(50, generator=generator))
        return state

    original = Adam._composed_step

    def recorded(self: Adam, *arguments: Any) -> None:
        by_operations.append(True)
        original(self, *arguments)

    monkeypatch.setattr(Adam, "_composed_step", recorded)
    fused = steps()
    assert not by_operations
    hide("torch._fused_adamw_" if weight_decay else "torch._fused_adam_", changed=changed)
    torch.testing.assert_close(steps(), fused, rtol=1e-5, atol=1e-6)
    assert len(by_operations) == 20


@pytest.mark.skipif(not hasattr(torch.cpu, "get_capabilities"), reason="this PyTorch has no such")
def test_bfloat16_support_is_the_same_by_the_public_api(
    hide: Hide, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = internals.multiplies_bfloat16()
    hide("torch.cpu._is_avx512_bf16_supported")
    assert internals.multiplies_bfloat16() == expected
    for supported in (False, True):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda on=supported: {"avx512_bf16": on})
        assert internals.multiplies_bfloat16() == supported
    monkeypatch.delattr(torch.cpu, "get_capabilities")
    assert not internals.multiplies_bfloat16()


@pytest.mark.parametrize(
    "missing",
    [
        "torch._inductor.cpu_vec_isa",
        "torch._inductor.cpu_vec_isa.valid_vec_isa_list",
        "torch._inductor.config.cpp",
    ],
)
def test_vector_instructions_are_not_cached_without_the_search(
    hide: Hide, missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(compile_cache.CACHE_VARIABLE, str(tmp_path))
    hide(missing)
    compile_cache.remember_vector_instructions()
    assert not list(tmp_path.iterdir())


@pytest.mark.compiled
def test_cached_vector_instructions_equal_those_of_a_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor import config, cpu_vec_isa

    monkeypatch.setenv(compile_cache.CACHE_VARIABLE, str(tmp_path))
    found = []
    # The fixture `monkeypatch` would delete the option at its end: `config.cpp` is a proxy.
    with config.patch({"cpp.vec_isa_ok": None}):
        for remember in (False, True, True):  # the second creates the marker, the third reads it
            config.cpp.vec_isa_ok = None
            cpu_vec_isa.valid_vec_isa_list.cache_clear()
            if remember:
                compile_cache.remember_vector_instructions()
            found.append(list(map(str, cpu_vec_isa.valid_vec_isa_list())))
        assert config.cpp.vec_isa_ok
    assert found[0] == found[1] == found[2]
    assert len(list(tmp_path.glob("vector-instructions-*"))) == 1


def test_operators_with_effects_or_random_numbers_are_not_pure() -> None:
    aten = torch.ops.aten
    assert internals.is_pure_operator(aten.add.Tensor)
    assert not internals.is_pure_operator(aten.add_.Tensor)
    assert not internals.is_pure_operator(aten.bernoulli.default)
    assert not internals.is_pure_operator(torch.add)


@pytest.mark.parametrize("is_hidden", [False, True])
def test_equal_nodes_are_merged_only_where_operators_are_known(hide: Hide, is_hidden: bool) -> None:
    def twice(inputs: Tensor) -> Tensor:
        return inputs.tanh() * 2 + inputs.tanh()

    inputs = torch.randn(5)
    traced = make_fx(twice)(inputs)
    if is_hidden:
        hide("torch._ops.OpOverload")
    merge_equal_nodes(traced.graph)
    traced.recompile()
    calls = [node for node in traced.graph.nodes if node.target is torch.ops.aten.tanh.default]
    assert len(calls) == (2 if is_hidden else 1)
    assert torch.equal(traced(inputs), twice(inputs))


@pytest.mark.parametrize("missing", ["", ".CustomGraphPass"])
def test_a_graph_pass_is_left_out_without_its_base_class(hide: Hide, missing: str) -> None:
    def keep(graph: Graph) -> None:
        pass

    [graph_pass] = internals.graph_pass_options(keep, "version 1").values()
    assert graph_pass.uuid() == "version 1"
    hide(f"torch._inductor.custom_graph_pass{missing}")
    assert internals.graph_pass_options(keep, "version 1") == {}


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
@pytest.mark.filterwarnings("error:PyTorch .* does not accept")
def test_this_pytorch_accepts_all_compile_options(device_type: str) -> None:
    options = internals.kernel_options(device_type) | internals.guard_options()
    options |= internals.graph_pass_options(merge_equal_nodes, "1")
    assert len(options) == 3
    internals.compile_with_options(torch.sin, options)


def test_unknown_compile_options_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    accepted: list[dict[str, Any]] = []
    original = torch.compile

    def recording(*arguments: Any, options: dict[str, Any], **settings: Any) -> Any:
        before = dict(options)
        result = original(*arguments, options=options, **settings)
        accepted.append(before)
        return result

    monkeypatch.setattr(torch, "compile", recording)
    options = {"cpp_wrapper": True, "unknown_option": 1, **internals.guard_options()}
    with pytest.warns(UserWarning, match="options unknown_option;"):
        internals.compile_with_options(torch.sin, options)
    assert accepted[-1].keys() == {"cpp_wrapper", "guard_filter_fn"}
    assert options.keys() == {"cpp_wrapper", "unknown_option", "guard_filter_fn"}


def test_an_error_unrelated_to_compile_options_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: Any, options: dict[str, Any], **settings: Any) -> Any:
        if len(options) > 1:
            raise RuntimeError("these options exclude each other")

    monkeypatch.setattr(torch, "compile", broken)
    with pytest.raises(RuntimeError, match="exclude"):
        internals.compile_with_options(torch.sin, {"first": 1, "second": 2})


def shared_work(state: dict[str, Tensor], inputs: Tensor) -> dict[str, Tensor]:
    """Compute two gradients with a common forward pass, and make an in-place step."""

    def first(weight: Tensor) -> Tensor:
        return (inputs @ weight).tanh().square().sum()

    def second(weight: Tensor) -> Tensor:
        return (inputs @ weight).tanh().sum()

    gradient = torch.func.grad(first)(state["weight"]) + torch.func.grad(second)(state["weight"])
    state["weight"].sub_(0.1 * gradient)
    return {"norm": gradient.norm()}


def compiled_results() -> Results:
    """Return the weights and metrics after four calls of a newly compiled program."""
    program = compile_program(shared_work, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    state = {"weight": torch.randn(8, 4, generator=generator)}
    inputs = torch.randn(4, 16, 8, generator=generator)
    norms = [program(state, batch)["norm"].clone() for batch in inputs]
    return state["weight"], norms


@pytest.fixture(scope="module")
def expected_results() -> Iterator[Results]:
    """Return the results with all private APIs, without reading the compile cache."""
    before = torch.compiler.config.force_disable_caches
    torch.compiler.config.force_disable_caches = True
    try:
        yield compiled_results()
    finally:  # not with monkeypatch, which would delete the setting instead of restoring it
        torch.compiler.config.force_disable_caches = before


@pytest.mark.compiled
@pytest.mark.parametrize(
    ("missing", "changed"),
    [
        ("torch._inductor.custom_graph_pass", False),
        ("torch._ops.OpOverload", False),
        ("torch._ops.OpOverload", True),
        ("torch._dynamo.eval_frame", False),
        ("torch._dynamo.eval_frame._debug_get_cache_entry_list", False),
        ("torch._dynamo.eval_frame._debug_get_cache_entry_list", True),
    ],
)
def test_compiled_programs_give_the_same_numbers_without_private_apis(
    missing: str, changed: bool, hide: Hide, expected_results: Results
) -> None:
    hide(missing, changed=changed)
    torch.testing.assert_close(compiled_results(), expected_results, rtol=1e-5, atol=1e-6)


CPU_OPTIONS = ("guard_filter_fn", "post_grad_custom_pre_pass", "cpp_wrapper")


@pytest.mark.compiled
@pytest.mark.parametrize("refused", [*((name,) for name in CPU_OPTIONS), CPU_OPTIONS])
def test_compiled_programs_give_the_same_numbers_without_options(
    refused: tuple[str, ...], expected_results: Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = torch.compile

    def older_compile(*arguments: Any, options: dict[str, Any], **settings: Any) -> Any:
        for name in options:
            if name in refused:
                raise RuntimeError(f"Unexpected optimization option {name}")
        return original(*arguments, options=options, **settings)

    monkeypatch.setattr(torch, "compile", older_compile)
    with pytest.warns(UserWarning, match=f"options {', '.join(sorted(refused))};"):
        results = compiled_results()
    torch.testing.assert_close(results, expected_results, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("with_gradients", [False, True])
@pytest.mark.parametrize("maps_views", [True, False])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32])
def test_bytes_are_read_as_another_type_where_views_cannot_be_mapped(
    monkeypatch: pytest.MonkeyPatch, maps_views: bool, dtype: torch.dtype, with_gradients: bool
) -> None:
    if maps_views and not internals._MAPS_VIEWS:
        pytest.skip("this version of PyTorch cannot map views as another type")
    monkeypatch.setattr(internals, "_MAPS_VIEWS", maps_views)
    words = torch.randint(2**31, (2, 3, 4), dtype=torch.int32).view(torch.float32)

    def read(rows: torch.Tensor) -> torch.Tensor:
        if with_gradients:
            _, read_there = torch.func.grad(read_and_sum, has_aux=True)(rows)
            return read_there
        return internals.reinterpreted(rows, dtype)

    def read_and_sum(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return rows.nan_to_num().sum(), internals.reinterpreted(rows.detach(), dtype)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mapped = torch.func.vmap(read)(words)
    assert torch.equal(mapped, words.view(dtype))
    assert torch.equal(read(words), words.view(dtype))


def test_a_program_is_compiled_in_the_main_thread_where_pytorch_needs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads: list[threading.Thread] = []

    def compile_all() -> None:
        threads.append(threading.current_thread())

    for in_threads in (False, True):
        monkeypatch.setattr(learner_module, "compiles_in_threads", lambda x=in_threads: x)
        assert learner_module.compile_stoppable(compile_all, lambda: False)
    assert threads[0] is threading.current_thread()
    assert threads[1] is not threading.current_thread()
