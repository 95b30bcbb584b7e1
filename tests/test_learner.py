"""One pure step, executed eagerly, compiled, or for a population: always the same learning."""

from __future__ import annotations

import pytest
import torch

from rl_training.algorithms import SACAlgorithm
from rl_training.config import TrainConfig
from rl_training.data import ObservationNormalizer
from rl_training.errors import ConfigError
from rl_training.runtime import execution
from rl_training.runtime.execution import Execution, resolve_execution
from rl_training.runtime.learner import Learner
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
    return SACAlgorithm(3, 2, {"hidden_sizes": [32, 32], **settings}, seed=seed)


def assert_states_agree(first: dict, second: dict, tolerance: float) -> None:
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        torch.testing.assert_close(
            tensor, second[name], rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("settings", [{}, {"alpha": 0.2, "policy_delay": 2, "max_grad_norm": 1.0}])
@pytest.mark.filterwarnings("error:There is a performance drop")
def test_a_populations_members_agree_with_single_learners(settings: dict) -> None:
    """The step maps over a leading seed axis of state, batch and noise."""
    alone = [make_algorithm(seed, **settings) for seed in range(3)]
    together = {
        name: torch.stack([member.state[name].clone() for member in alone])
        for name in alone[0].state
    }
    streams = [batches(100, seed) for seed in range(3)]
    for number in range(100):
        update_policy = (number + 1) % alone[0].hyperparameters.policy_delay == 0
        noises = [m.draw_noise(SIZE, torch.Generator().manual_seed(number)) for m in alone]
        with torch.no_grad():
            torch.func.vmap(
                lambda state, batch, noise, on=update_policy: alone[0].step(
                    state, batch, noise, update_policy=on
                )
            )(
                together,
                Batch(*(torch.stack(f) for f in zip(*(s[number] for s in streams), strict=True))),
                {name: torch.stack([noise[name] for noise in noises]) for name in noises[0]},
            )
            for member, stream, noise in zip(alone, streams, noises, strict=True):
                member.step(member.state, stream[number], noise, update_policy=update_policy)
    for index, member in enumerate(alone):
        assert_states_agree(
            member.state, {name: tensor[index] for name, tensor in together.items()}, 1e-4
        )


def learner(algorithm: SACAlgorithm, *, compiled: bool) -> Learner:
    return Learner(algorithm, Execution("cpu", compiled, torch.get_num_threads(), "highest"))


@pytest.mark.compiled
@pytest.mark.parametrize("settings", [{}, {"policy_delay": 2, "critic_layer_norm": True}])
def test_compiled_updates_agree_with_eager_ones(settings: dict) -> None:
    eager, compiled = make_algorithm(**settings), make_algorithm(**settings)
    slow, fast = learner(eager, compiled=False), learner(compiled, compiled=True)
    for batch in batches(100):
        slow.update(batch)
        fast.update(batch)
    assert_states_agree(eager.state, compiled.state, 1e-3)
    assert slow.metrics() == pytest.approx(fast.metrics(), rel=1e-2, abs=1e-2)


@pytest.mark.compiled
def test_compiled_learners_of_one_process_do_not_share_programs() -> None:
    """Programs are not checked at each call, so each learner must have its own."""
    pairs = []
    for settings in ({"tau": 0.5}, {"tau": 0.1, "alpha": 0.3}):
        eager, compiled = make_algorithm(**settings), make_algorithm(**settings)
        pairs.append((learner(eager, compiled=False), learner(compiled, compiled=True)))
    for batch in batches(3):
        for slow, fast in pairs:
            slow.update(batch)
            fast.update(batch)
    for slow, fast in pairs:
        assert_states_agree(slow.algorithm.state, fast.algorithm.state, 1e-4)
    [_, (_, fast)] = pairs
    with pytest.raises(ValueError, match="batches of 32 rows, got 16"):
        fast.update(Batch(*(field[:16] for field in batches(1)[0])))


def test_metrics_keep_their_newest_value_between_policy_updates() -> None:
    one = learner(make_algorithm(policy_delay=3), compiled=False)
    assert one.metrics() == {}
    for batch in batches(4):
        one.update(batch)
    assert {"actor_loss", "critic_loss"} <= one.metrics().keys()


def test_updates_see_normalised_observations() -> None:
    normalizer = ObservationNormalizer(3)
    normalizer.observe(torch.randn(50, 3) * 5 + 3)
    raw, normalised = make_algorithm(), make_algorithm()
    [batch] = batches(1)
    Learner(raw, Execution("cpu", False, 1, "highest"), normalizer).update(batch)
    normalised.update(normalizer.normalize_batch(batch))
    assert torch.equal(raw.state["critic"], normalised.state["critic"])


def test_state_that_does_not_fit_is_refused_by_name() -> None:
    algorithm = make_algorithm()
    with pytest.raises(ValueError, match="log_alpha"):
        algorithm.load_state({k: v for k, v in algorithm.state.items() if k != "log_alpha"})
    with pytest.raises(ValueError, match="actor has shape"):
        algorithm.load_state({**algorithm.state, "actor": torch.zeros(3)})


def config(**changes: object) -> TrainConfig:
    return TrainConfig(**{"algo": "sac", "device": "cpu", **changes})


def test_automatic_compilation_weighs_the_length_of_the_run() -> None:
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


def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="cuda:7"):
        resolve_execution(config(device="cuda:7"), 1)
