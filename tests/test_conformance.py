"""Every registered algorithm passes the checks of `conformance.py`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import conformance
import pytest
from conformance import CASES, Case, Settings
from helpers import BUILT_IN, OFFLINE, ONLINE, each_algorithm

from rl_training.algorithms.spec import AlgorithmSpec, get_algorithm_spec
from rl_training.execution import execution


def case_of(spec: AlgorithmSpec) -> Case:
    assert spec.name in CASES, f"tell the conformance suite of {spec.name}: conformance.CASES"
    return CASES[spec.name]


def variants(specs: list[AlgorithmSpec], *, delay: int) -> list[Any]:
    """Return each algorithm with its defaults, a delayed policy, and its own further settings."""
    cases = {spec: CASES.get(spec.name, Case(frozenset())) for spec in specs}
    return [
        pytest.param(spec, settings, id=f"{name_of(spec)}-{label}")
        for spec, case in cases.items()
        for label, settings in {
            "plain": {},
            **({"delayed": case.delayed(delay)} if case.delayed(delay) else {}),
            **case.interesting,
        }.items()
    ]


def name_of(spec: AlgorithmSpec) -> str:
    """Return its name, with the kind of actions if it is not the first that it supports."""
    kind, first = spec.actions[0], get_algorithm_spec(spec.name).actions[0]
    return spec.name if kind == first else f"{spec.name} {kind}"


def with_further_kinds(specs: list[AlgorithmSpec]) -> list[AlgorithmSpec]:
    """Return the algorithms, and each once more for every further kind of actions."""
    return specs + further_kinds(specs)


def further_kinds(specs: list[AlgorithmSpec]) -> list[AlgorithmSpec]:
    return [replace(spec, actions=(kind,)) for spec in specs for kind in spec.actions[1:]]


each_variant = pytest.mark.parametrize(
    ("spec", "settings"), variants(with_further_kinds(BUILT_IN), delay=3)
)
each_kind = pytest.mark.parametrize("spec", with_further_kinds(BUILT_IN), ids=name_of)


@each_variant
@pytest.mark.parametrize("check", conformance.ONE_UPDATE_CHECKS, ids=lambda check: check.__name__)
def test_an_update_passes_the_conformance_checks(
    check: Any, spec: AlgorithmSpec, settings: Settings
) -> None:
    check(spec, case_of(spec), settings)


@each_variant
def test_losses_have_gradients_only_for_their_parameters(
    spec: AlgorithmSpec, settings: Settings
) -> None:
    conformance.check_that_losses_have_gradients_only_for_their_parameters(
        spec, case_of(spec), settings
    )


@each_algorithm
def test_invalid_settings_are_refused_by_name(spec: AlgorithmSpec) -> None:
    conformance.check_that_invalid_settings_are_refused_by_name(spec, case_of(spec))


# Rounding errors can change the sign of a unit or the smaller critic, and learners then diverge.
# Settings without kinks avoid this. With kinks, learners agree only for a few updates.
modes = pytest.mark.parametrize(
    ("smooth", "updates"), [(True, 100), (False, 20)], ids=["smooth", "kinked"]
)


@each_kind
@modes
@pytest.mark.filterwarnings("error:There is a performance drop")
@pytest.mark.fast_cases
def test_a_population_agrees_with_single_learners(
    spec: AlgorithmSpec, smooth: bool, updates: int
) -> None:
    case = case_of(spec)
    conformance.check_that_a_population_agrees_with_single_learners(
        spec, case, {"activation": "tanh", **case.smooth} if smooth else {}, updates=updates
    )


@pytest.mark.compiled
@each_kind
@pytest.mark.parametrize("seeds", [(0,), (0, 1, 2)], ids=["single", "population"])
@modes
def test_compiled_updates_agree_with_eager_ones(
    spec: AlgorithmSpec, seeds: tuple[int, ...], smooth: bool, updates: int
) -> None:
    case = case_of(spec)
    conformance.check_that_compiled_updates_agree_with_eager_ones(
        spec,
        case,
        {"activation": "tanh", **case.smooth} if smooth else {},
        seeds=seeds,
        updates=updates,
    )


@pytest.mark.parametrize(
    ("spec", "settings"),
    [
        pytest.param(
            spec, {**settings, **conformance.over_steps(spec, 3)}, id=f"{name_of(spec)}-{label}"
        )
        for spec in with_further_kinds(ONLINE)
        for label, settings in CASES.get(spec.name, Case(frozenset())).interesting.items()
    ],
)
@pytest.mark.thorough
def test_an_online_run_with_all_options_resumes_bit_for_bit(
    spec: AlgorithmSpec, settings: Settings, tmp_path: Path
) -> None:
    conformance.check_that_a_run_resumes_bit_for_bit(
        spec, settings, tmp_path, normalize_observations=True, num_envs=2
    )


@pytest.mark.parametrize("spec", with_further_kinds(ONLINE), ids=name_of)
@pytest.mark.thorough
def test_a_population_resumes_bit_for_bit(
    spec: AlgorithmSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Train seeds batched, as on a GPU, with the first of the algorithm's further settings."""
    settings = next(iter(case_of(spec).interesting.values()), {})
    monkeypatch.setattr(execution, "BATCHED_ON", ("cpu", "cuda"))
    conformance.check_that_a_population_resumes_bit_for_bit(
        spec,
        {**settings, **conformance.over_steps(spec, 2)},
        tmp_path,
        normalize_observations=True,
        total_timesteps=100,
    )


@pytest.mark.parametrize("spec", with_further_kinds(OFFLINE), ids=name_of)
@pytest.mark.parametrize("batched", [False, True], ids=["in turn", "batched"])
@pytest.mark.thorough
def test_an_offline_population_resumes_bit_for_bit(
    spec: AlgorithmSpec, batched: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if batched:
        monkeypatch.setattr(execution, "BATCHED_ON", ("cpu", "cuda"))
    settings = next(iter(case_of(spec).interesting.values()))
    conformance.check_that_a_population_resumes_bit_for_bit(
        spec, settings, tmp_path, normalize_observations=True, total_timesteps=100
    )


@pytest.mark.parametrize("spec", further_kinds(BUILT_IN), ids=name_of)
@pytest.mark.fast_cases("sac discrete", "ppo multi_discrete")
def test_a_run_with_a_further_kind_of_actions_resumes_bit_for_bit(
    spec: AlgorithmSpec, tmp_path: Path
) -> None:
    """Runs with the first kind are resumed by test_resume.py."""
    conformance.check_that_a_run_resumes_bit_for_bit(spec, {}, tmp_path)


@pytest.mark.parametrize("spec", further_kinds(BUILT_IN), ids=name_of)
@pytest.mark.fast_cases("sac discrete", "ppo multi_discrete")
def test_a_policy_of_a_further_kind_of_actions_can_be_exported(
    spec: AlgorithmSpec, tmp_path: Path
) -> None:
    """Policies of the first kind are exported by test_export.py."""
    conformance.check_that_its_policy_can_be_exported(spec, tmp_path)
