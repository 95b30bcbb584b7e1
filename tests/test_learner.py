"""Eager, compiled and population execution of the same update step agree."""

from __future__ import annotations

import pytest
import torch
from conformance import stack

from rl_training.algorithms import SACAlgorithm
from rl_training.config import TrainConfig
from rl_training.data import ObservationNormalizer
from rl_training.data.transforms import normalize_batch
from rl_training.errors import ConfigError
from rl_training.execution import execution
from rl_training.execution.execution import Execution, resolve_execution
from rl_training.execution.learner import Learner
from rl_training.execution.programs import Population
from rl_training.models.mlp import rounded_products
from rl_training.types import Batch

SIZE = 32


def batches(count: int, seed: int = 0) -> list[Batch]:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    return [
        Batch(
            draw(SIZE, 3),
            draw(SIZE, 2).tanh(),
            draw(SIZE),
            torch.full((SIZE,), 0.99),
            draw(SIZE, 3),
        )
        for _ in range(count)
    ]


def make_algorithm(seed: int = 0, **settings: object) -> SACAlgorithm:
    return SACAlgorithm(3, 2, {"hidden_sizes": [32, 32], "batch_size": SIZE, **settings}, seed=seed)


def assert_states_agree(first: dict, second: dict, tolerance: float) -> None:
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        torch.testing.assert_close(
            tensor, second[name], rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


class Given:
    """A source that returns prepared batches and ignores the drawn indices."""

    def __init__(self, prepared: list[Batch]) -> None:
        self._batches = iter(prepared)

    def __len__(self) -> int:
        return SIZE

    def flush(self) -> None:
        pass

    def draw(self, bits: torch.Tensor) -> Batch:
        return next(self._batches)


def learner(*algorithms: SACAlgorithm, given: list[Batch], compiled: bool = False) -> Learner:
    slots = tuple(range(len(algorithms)))
    return Learner(
        algorithms,
        Given(given),
        Execution("cpu", compiled, torch.get_num_threads(), "highest"),
        population=Population(len(slots), slots),
        generators=[torch.Generator().manual_seed(seed) for seed in slots],
    )


@pytest.mark.parametrize("settings", [{}, {"alpha": 0.2, "policy_delay": 2, "max_grad_norm": 1.0}])
@pytest.mark.filterwarnings("error:There is a performance drop")
def test_a_populations_members_agree_with_single_learners(settings: dict) -> None:
    streams = [batches(100, seed) for seed in range(3)]
    stacked = [stack(parts) for parts in zip(*streams, strict=True)]
    members = [make_algorithm(seed, **settings) for seed in range(3)]
    together = learner(*members, given=stacked)
    together.update(0, 100)
    for seed, stream in enumerate(streams):
        alone = make_algorithm(seed, **settings)
        single = Learner(
            [alone],
            Given(stream),
            Execution("cpu", False, 1, "highest"),
            generators=[torch.Generator().manual_seed(seed)],
        )
        single.update(0, 60)
        single.update(60, 40)
        assert_states_agree(alone.state, members[seed].state, 1e-4)
        assert single.metrics() == pytest.approx(together.metrics(seed), rel=1e-3, abs=1e-4)


def test_a_population_member_gives_the_same_bits_without_the_others() -> None:
    """Its slot in a program of the same width does not depend on the state of other slots."""
    streams = [batches(20, seed) for seed in range(3)]
    stacked = [stack(parts) for parts in zip(*streams, strict=True)]
    members = [make_algorithm(seed) for seed in range(3)]
    learner(*members, given=stacked).update(0, 20)
    alone = make_algorithm(1)
    one = Learner(
        [alone],
        Given([Batch(*(field[[1, 1, 1]] for field in batch[:5])) for batch in stacked]),
        Execution("cpu", False, 1, "highest"),
        population=Population(3, (1,)),
        generators=[torch.Generator().manual_seed(seed) for seed in (7, 1, 8)],
    )
    one.update(0, 20)
    for name, tensor in alone.state.items():
        assert torch.equal(tensor, members[1].state[name]), name


@pytest.mark.compiled
@pytest.mark.parametrize("settings", [{}, {"policy_delay": 2, "critic_layer_norm": True}])
@pytest.mark.parametrize("seeds", [1, 3])
def test_compiled_updates_agree_with_eager_ones(settings: dict, seeds: int) -> None:
    given = batches(100)
    if seeds > 1:
        given = [Batch(*(field.expand(seeds, *field.shape) for field in one[:5])) for one in given]
    slow, fast = (
        learner(
            *(make_algorithm(seed, **settings) for seed in range(seeds)), given=given, compiled=on
        )
        for on in (False, True)
    )
    slow.update(0, 100)
    fast.update(0, 100)
    assert_states_agree(slow.state, fast.state, 1e-4)
    assert slow.metrics() == pytest.approx(fast.metrics(), rel=1e-3, abs=1e-3)


@pytest.mark.compiled
def test_compiled_learners_of_one_process_do_not_share_programs() -> None:
    """Programs have no guards at each call, so different learners need separate programs."""
    pairs = []
    for settings in ({"tau": 0.5}, {"tau": 0.1, "alpha": 0.3}):
        pairs.append(
            [
                learner(make_algorithm(**settings), given=batches(3), compiled=on)
                for on in (False, True)
            ]
        )
    for number in range(3):
        for pair in pairs:
            for one in pair:
                one.update(number)
    for slow, fast in pairs:
        assert_states_agree(slow.state, fast.state, 1e-4)


@pytest.mark.compiled
def test_the_batch_to_compile_with_does_not_count_as_sampling() -> None:
    """Otherwise more would be subtracted from the time of the first updates than they took."""
    prepared = learner(make_algorithm(0), given=batches(3), compiled=True)
    assert prepared.prepare(lambda: False)
    assert prepared.take_sampling_seconds() == 0.0


@pytest.mark.compiled
def test_identical_learners_can_share_compiled_programs() -> None:
    slow = learner(make_algorithm(1), given=batches(3))
    first = learner(make_algorithm(0), given=batches(3), compiled=True)
    second = Learner(
        [make_algorithm(1)],
        Given(batches(3)),
        first.execution,
        generators=[torch.Generator().manual_seed(0)],
        like=first,
    )
    for one in (slow, first, second):
        one.update(0, 3)
    assert_states_agree(slow.state, second.state, 1e-4)


def test_metrics_keep_their_newest_value_between_policy_updates() -> None:
    one = learner(make_algorithm(policy_delay=3), given=batches(4))
    assert one.metrics() == {}
    one.update(0, 4)
    assert {"actor_loss", "critic_loss"} <= one.metrics().keys()


def test_updates_see_normalized_observations() -> None:
    normalizer = ObservationNormalizer(3)
    normalizer.observe(torch.randn(50, 3) * 5 + 3)
    raw, normalized = make_algorithm(), make_algorithm()
    [batch] = batches(1)
    one = Learner(
        [raw],
        Given([batch]),
        Execution("cpu", False, 1, "highest"),
        generators=[torch.Generator().manual_seed(0)],
        normalizers=[normalizer],
    )
    one.update(0)
    learner(normalized, given=[normalize_batch(batch, normalizer.shift, normalizer.scale)]).update(
        0
    )
    assert torch.equal(raw.state["critic"], normalized.state["critic"])


def test_state_that_does_not_fit_is_refused_by_name() -> None:
    algorithm = make_algorithm()
    with pytest.raises(ValueError, match="log_alpha"):
        algorithm.load_state({k: v for k, v in algorithm.state.items() if k != "log_alpha"})
    with pytest.raises(ValueError, match="actor has shape"):
        algorithm.load_state({**algorithm.state, "actor": torch.zeros(3)})


def config(**changes: object) -> TrainConfig:
    return TrainConfig(**{"algo": "sac", "device": "cpu", **changes})


def test_automatic_compilation_depends_on_the_length_of_the_run() -> None:
    assert not resolve_execution(config(), 100).compiled
    assert not resolve_execution(config(compile="off"), 10**7).compiled
    assert resolve_execution(config(compile="on"), 1).compiled
    assert resolve_execution(config(), 10**7).compiled


def test_without_a_compiler_auto_is_eager_and_on_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(execution.shutil, "which", lambda name: None)
    assert not resolve_execution(config(), 10**7).compiled
    with pytest.raises(ConfigError, match="C\\+\\+ compiler"):
        resolve_execution(config(compile="on"), 10**7)


def test_an_unavailable_device_is_refused() -> None:
    with pytest.raises(ConfigError, match="cuda:7"):
        resolve_execution(config(device="cuda:7"), 1)


def wide(precision: str, *, compiled: bool = False, updates: int = 20) -> Learner:
    """Return a learner after some updates, with matrix products large enough for bfloat16."""
    threads = torch.get_num_threads()
    one = Learner(
        [make_algorithm(hidden_sizes=[384, 384])],
        Given(batches(updates)),
        Execution("cpu", compiled, threads, precision),
        generators=[torch.Generator().manual_seed(0)],
    )
    one.update(0, updates)
    return one


def assert_learned_nearly_the_same(first: Learner, second: Learner) -> None:
    """Check that both differ from each other far less than from their initial parameters.

    Adam also makes full steps for tiny gradients, whose sign can change by rounding.
    """
    start = make_algorithm(hidden_sizes=[384, 384]).state
    for name in ("actor", "critic"):
        moved = (first.state[name] - start[name]).norm()
        assert 0 < (first.state[name] - second.state[name]).norm() < 0.25 * moved, name
    for name, value in first.metrics().items():
        assert second.metrics()[name] == pytest.approx(value, rel=0.02, abs=0.02), name


def test_rounded_updates_learn_nearly_the_same_as_exact_ones() -> None:
    assert_learned_nearly_the_same(wide("highest"), wide("medium"))


@pytest.mark.compiled
def test_compiled_rounded_updates_agree_with_eager_ones() -> None:
    eager, compiled = (wide("medium", compiled=on, updates=100) for on in (False, True))
    assert_learned_nearly_the_same(eager, compiled)


def test_reduced_precision_applies_only_to_updates() -> None:
    one = wide("medium", updates=1)
    with pytest.raises(StopIteration):
        one.update(1)  # fails without a second batch, and must restore the precision
    obs = torch.randn(512, 3, generator=torch.Generator().manual_seed(1))
    model = one.algorithms[0].model
    with torch.no_grad():
        answered = model.actions(obs)
        with rounded_products(False):
            exact = model.actions(obs)
        with rounded_products():
            rounded = model.actions(obs)
    torch.testing.assert_close(answered, exact, rtol=0.0, atol=0.0)
    assert not torch.equal(answered, rounded)


@pytest.mark.parametrize("updates", [100, 10**7])
@pytest.mark.parametrize("has_bfloat16", [False, True])
def test_the_default_precision_on_every_cpu_is_float32(
    updates: int, has_bfloat16: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: has_bfloat16)
    assert resolve_execution(config(), updates).float32_precision == "highest"
    rounded = resolve_execution(config(float32_precision="medium"), updates)
    assert rounded.describe().endswith("large products in bfloat16")
