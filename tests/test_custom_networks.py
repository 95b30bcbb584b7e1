"""A user's own networks: trained, saved, resumed and mapped over seeds like built-in ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conformance import assert_agree, assert_same, copied, moved, prepared_learner
from helpers import StopAt, tiny
from observation_zoo import OBSERVATIONS, Zoo
from test_networks import (
    ACTIONS,
    SMALL,
    SPEC,
    assert_module_acts_like,
    batches,
    policy_of,
    rows,
)
from torch import Tensor, nn

import rl_training
from rl_training import SAC
from rl_training.algorithms import get_algorithm_spec
from rl_training.errors import ConfigError, MissingNetworksError, OtherNetworksError, UserError
from rl_training.execution.learner import Learner
from rl_training.execution.policy import Policy
from rl_training.models.custom_networks import given_networks, networks_name
from rl_training.observations import ObservationSpec


class CameraAndPosition(nn.Module):
    def __init__(self, observation: ObservationSpec) -> None:
        super().__init__()
        channels = observation.leaf("camera").shape[-1]
        self.convolution = nn.Conv2d(channels, 4, 3)
        self.position = nn.Linear(3, 5)
        self.register_buffer("mean", torch.full((1,), 0.5))

    def forward(self, leaves: dict[str, Tensor]) -> Tensor:
        camera = leaves["camera"].movedim(-1, 1) / 255 - self.mean
        seen = torch.relu(self.convolution(camera)).mean((2, 3))
        return torch.cat([seen, torch.tanh(self.position(leaves["position"]))], -1)


def layers(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, outputs))


class AllNetworks:
    def encoder(self, observation: ObservationSpec) -> nn.Module:
        return CameraAndPosition(observation)

    def actor(self, inputs: int, outputs: int) -> nn.Module:
        return layers(inputs, outputs)

    def critic(self, inputs: int, outputs: int) -> nn.Module:
        return layers(inputs, outputs)


class OnlyCritic:
    def critic(self, inputs: int, outputs: int) -> nn.Module:
        return layers(inputs, outputs)


class Branching(nn.Module):
    """Has a branch that depends on data, so that it cannot be mapped."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.layer = nn.Linear(inputs, outputs)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.layer(inputs)
        return outputs if outputs.mean() > 0 else 2 * outputs


class BranchingNetworks:
    def critic(self, inputs: int, outputs: int) -> nn.Module:
        return Branching(inputs, outputs)


def make(name: str, factory: object, *, seed: int = 0, **settings: Any) -> Any:
    kind = get_algorithm_spec(name).algorithm
    return kind(SPEC, ACTIONS, {**SMALL, **settings}, seed=seed, custom_networks=factory)


@pytest.mark.parametrize("name", ["sac", "td3", "iql", "awac", "tqc", "redq"])
@pytest.mark.parametrize("factory", [AllNetworks, OnlyCritic, AllNetworks()])
def test_updates_train_every_layer(name: str, factory: object) -> None:
    algorithm = make(name, factory, policy_delay=1)
    before = copied(algorithm.state)
    for batch in batches(name, 2):
        algorithm.update(batch)
    for part, network in algorithm.networks().items():
        old, new = network.unflatten(before[part]), network.unflatten(algorithm.state[part])
        constants = {layer for layer in new if layer.endswith("mean")}
        assert moved(old, new) == new.keys() - constants


class Scaled(nn.Module):
    """Has a constant buffer and a constant parameter."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.layer = nn.Linear(inputs, outputs)
        self.register_buffer("scale", torch.full((inputs,), 8.0))
        self.shift = nn.Parameter(torch.full((outputs,), 2.0), requires_grad=False)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.layer(inputs / self.scale) + self.shift
        return outputs


class ScaledNetworks(AllNetworks):
    def actor(self, inputs: int, outputs: int) -> nn.Module:
        return Scaled(inputs, outputs)

    def critic(self, inputs: int, outputs: int) -> nn.Module:
        return Scaled(inputs, outputs)


@pytest.mark.parametrize("seeds", [1, 2])
@pytest.mark.parametrize("name", ["sac", "td3", "iql", "redq"])
def test_weight_decay_keeps_constants(name: str, seeds: int) -> None:
    algorithms = [
        make(name, ScaledNetworks, seed=seed, weight_decay=0.5, learning_rate=0.1, policy_delay=1)
        for seed in range(seeds)
    ]
    before = [copied(algorithm.state) for algorithm in algorithms]
    streams = [batches(name, 2, seed) for seed in range(seeds)]
    prepared_learner(algorithms, streams, range(seeds)).update(0, 2)
    for algorithm, old_state in zip(algorithms, before, strict=True):
        for part, network in algorithm.networks().items():
            old, new = network.unflatten(old_state[part]), network.unflatten(algorithm.state[part])
            constants = {layer for layer in new if layer.endswith(("mean", "scale", "shift"))}
            assert len(constants) == (1 if part == "value" else 3)
            assert moved(old, new) == new.keys() - constants


def test_a_member_of_an_ensemble_is_its_module() -> None:
    algorithm = make("sac", OnlyCritic)
    critic = algorithm.model.critic
    parts = critic.unflatten(critic.vector)
    features = critic.encode(obs := rows(4, np.random.default_rng(0)))
    actions = torch.rand(4, ACTIONS)
    module = layers(features.shape[1] + ACTIONS, 1)
    for member in range(2):
        own = {name: part[member] for name, part in parts.items() if not name.startswith("encoder")}
        module.load_state_dict(own)
        expected = module(torch.cat([features, actions], -1)).squeeze(-1)
        torch.testing.assert_close(algorithm.model.q_values(obs, actions)[:, member], expected)
    assert not torch.equal(parts["0.weight"][0], parts["0.weight"][1])


def test_a_shared_encoder_can_be_custom() -> None:
    algorithm = make("sac", AllNetworks, networks={"shared_encoder": True})
    algorithm.update(next(batches("sac", 1)))
    assert algorithm.model.actor.sizes == (9, 2 * ACTIONS)


class Tied(nn.Module):
    """Has a layer under two names, and a layer with the weights of another one."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(inputs, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.third.weight = self.second.weight
        self.layers = nn.Sequential(self.first, nn.Tanh(), self.second, self.third)
        self.output = nn.Linear(8, outputs)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.output(self.layers(inputs))
        return outputs


class TiedNetworks:
    def actor(self, inputs: int, outputs: int) -> nn.Module:
        return Tied(inputs, outputs)

    def critic(self, inputs: int, outputs: int) -> nn.Module:
        return Tied(inputs, outputs)


def test_parts_of_a_network_may_have_several_names_and_share_parameters() -> None:
    algorithm = make("sac", TiedNetworks)
    algorithm.update(next(batches("sac", 1)))
    together = learner_of(TiedNetworks, (5, 6))
    together.update(0, 1)
    actor = algorithm.model.actor
    parts = actor.unflatten(algorithm.state["actor"])
    own = {name: part for name, part in parts.items() if not name.startswith("encoder")}
    module = Tied(own["first.weight"].shape[1], 2 * ACTIONS)
    module.load_state_dict(own, strict=False)
    features = torch.rand(3, own["first.weight"].shape[1])
    found = actor.decode(features, algorithm.state["actor"])
    torch.testing.assert_close(found, module(features))
    assert {each for each in own if "weight" in each} == {
        "first.weight",
        "second.weight",
        "output.weight",
    }


class CastingEncoder(nn.Module):
    """Names float32, also where a check computes in double precision."""

    def __init__(self, observation: ObservationSpec) -> None:
        super().__init__()
        self.layer = nn.Linear(observation.leaf("camera").numbers, 4)

    def forward(self, leaves: dict[str, Tensor]) -> Tensor:
        outputs: Tensor = self.layer(leaves["camera"].flatten(1).float() / 255)
        return outputs + leaves["mode"].to(torch.float32)[:, None]


class Casting:
    def encoder(self, observation: ObservationSpec) -> nn.Module:
        return CastingEncoder(observation)


def test_a_network_that_casts_to_float32_is_exported(tmp_path: Path) -> None:
    agent = SAC(Zoo, networks=Casting, hidden_sizes=[8], output_dir=str(tmp_path))
    assert agent.export(tmp_path / "policy.pt2", format="torch").exists()


def test_parameters_depend_on_the_seed_alone() -> None:
    first, second, other = (make("sac", AllNetworks, seed=seed).state for seed in (1, 1, 2))
    assert torch.equal(first["critic"], second["critic"])
    assert not torch.equal(first["critic"], other["critic"])


def learner_of(factory: object, seeds: tuple[int, ...], *, compiled: bool = False) -> Learner:
    algorithms = [make("sac", factory, seed=seed) for seed in seeds]
    streams = [batches("sac", 2, seed) for seed in seeds]
    return prepared_learner(algorithms, streams, seeds, compiled=compiled)


def test_a_population_agrees_with_single_learners() -> None:
    together = learner_of(AllNetworks, (5, 6))
    together.update(0, 2)
    for index, seed in enumerate((5, 6)):
        alone = learner_of(AllNetworks, (seed,))
        alone.update(0, 2)
        assert_agree(alone.algorithms[0].state, together.algorithms[index].state)


@pytest.mark.compiled
@pytest.mark.parametrize("seeds", [(3,), (3, 4)])
def test_compiled_updates_agree_with_eager_ones(seeds: tuple[int, ...]) -> None:
    slow, fast = (learner_of(AllNetworks, seeds, compiled=on) for on in (False, True))
    slow.update(0, 2)
    fast.update(0, 2)
    assert_agree(slow.state, fast.state)


def test_a_policy_is_loaded_only_with_its_networks() -> None:
    policy = policy_of(make("sac", AllNetworks), "sac")
    description, tensors = policy.describe(), policy.tensors()
    assert "critic.encoder.convolution.weight" in tensors
    with pytest.raises(MissingNetworksError, match=r"class AllNetworks; .*networks=AllNetworks"):
        Policy.from_parts(description, tensors)
    with given_networks(AllNetworks):
        loaded = Policy.from_parts(description, tensors)
    obs = rows(3, np.random.default_rng(0)).numpy()
    assert np.array_equal(loaded.act(obs), policy.act(obs))
    assert_module_acts_like(policy, obs)


class Wider(AllNetworks):
    def critic(self, inputs: int, outputs: int) -> nn.Module:
        return nn.Sequential(nn.Linear(inputs, 900), nn.ReLU(), nn.Linear(900, outputs))


@pytest.mark.parametrize("given", [Wider, Wider(), OnlyCritic])
def test_a_policy_says_which_networks_it_was_trained_with(given: object) -> None:
    policy = policy_of(make("sac", AllNetworks), "sac")
    name = networks_name(given)
    told = rf"networks = {name}: do not fit.* class AllNetworks .*; pass networks=AllNetworks"
    with given_networks(given), pytest.raises(OtherNetworksError, match=told):
        Policy.from_parts(policy.describe(), policy.tensors())


# What is wrong, and where


def wrong(**methods: Any) -> object:
    return type("Wrong", (), {name: staticmethod(method) for name, method in methods.items()})


class Forgetful(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        return torch.dropout(inputs[:, :1], 0.5, True)


class Frequencies(nn.Module):
    """Random features that are neither a buffer nor a parameter."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.directions = torch.randn(inputs, outputs)

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.sin(inputs @ self.directions)


class ListOfLayers(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.layers = [nn.Linear(inputs, outputs)]

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.layers[0](inputs)
        return outputs


class Counting(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(inputs, outputs), 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        outputs: Tensor = self.layer(inputs) + self.calls
        return outputs


def batch_statistics(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(inputs, outputs), nn.BatchNorm1d(outputs, track_running_stats=False)
    )


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (
            wrong(critic=lambda inputs, outputs: nn.Linear(inputs, 3)),
            r"Wrong.critic: gave outputs \(2, 3\) for inputs \(2, \d+\), expected \(2, 1\)",
        ),
        (
            wrong(actor=lambda inputs, outputs: nn.Linear(inputs + 1, outputs)),
            r"Wrong.actor: failed for inputs \(2, \d+\): mat1 and mat2 shapes cannot be multiplied",
        ),
        (
            wrong(encoder=lambda observation: nn.Identity()),
            "Wrong.encoder: gave dict, not a tensor",
        ),
        (
            wrong(critic=lambda inputs: nn.Linear(inputs, 1)),
            r"Wrong.critic: cannot be called with \(inputs, outputs\): too many",
        ),
        (
            wrong(encoder=lambda: nn.Identity()),
            r"Wrong.encoder: cannot be called with \(observation\): too many",
        ),
        (wrong(critic=lambda inputs, outputs: 3), "Wrong.critic: returned int, not a torch.nn"),
        (wrong(critic=lambda inputs, outputs: Forgetful()), "Wrong.critic: .*random numbers"),
        (
            wrong(critic=lambda inputs, outputs: nn.BatchNorm1d(inputs)),
            "Wrong.critic: its buffer 'num_batches_tracked' .*LayerNorm",
        ),
        (
            wrong(critic=lambda inputs, outputs: nn.Sequential(nn.LazyLinear(outputs))),
            "Wrong.critic: its parameter '0.weight' has no shape yet; .*nn.Linear instead",
        ),
        (
            wrong(critic=lambda inputs, outputs: nn.Linear(inputs, outputs).double()),
            "Wrong.critic: its parameter 'weight' has type torch.float64",
        ),
        (
            wrong(actor=lambda inputs, outputs: nn.Sequential(Frequencies(inputs, outputs))),
            "Wrong.actor: .* a tensor as the attribute '0.directions', .*register_buffer",
        ),
        (wrong(critic=ListOfLayers), "Wrong.critic: .* attribute 'layers', .*nn.ModuleList"),
        (wrong(critic=Counting), "Wrong.critic: .*on earlier calls"),
        (wrong(actor=batch_statistics), "Wrong.actor: failed for inputs"),
        (wrong(value=lambda inputs, outputs: layers(inputs, outputs)), "no network 'value'"),
        (
            wrong(critic=nn.Linear, actors=layers),
            "Wrong.actors: is never called; did you mean 'actor'",
        ),
        (wrong(critics=layers), "Wrong.critics: is never called; .*'critic'"),
        (object(), "networks = object: defines none of the methods encoder, actor, critic"),
    ],
)
def test_a_wrong_network_is_refused_by_its_method(factory: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make("sac", factory)


class Helped(nn.Module):
    """Has public methods of another package, a function of one, and a helper."""

    activation = nn.functional.silu

    def critic(self, inputs: int, outputs: int) -> nn.Module:
        return self._layers(inputs, outputs)

    def _layers(self, inputs: int, outputs: int) -> nn.Module:
        return layers(inputs, outputs)


def test_a_factory_may_have_other_attributes() -> None:
    assert make("sac", Helped).model.critic.sizes[-1] == 1


def test_dueling_streams_cannot_be_replaced() -> None:
    with pytest.raises(ConfigError, match=r"dueling = True: .*OnlyCritic.critic"):
        make("dqn", OnlyCritic, dueling=True)


def test_networks_that_cannot_be_mapped_are_trained_one_at_a_time(tmp_path: Path) -> None:
    assert "critic: " in str(make("sac", BranchingNetworks).why_not_mapped())
    assert make("sac", AllNetworks).why_not_mapped() is None
    config = {**tiny(tmp_path), "compile": "on", "total_timesteps": 60}
    config["algo_kwargs"] = {**SMALL, "learning_starts": 30}
    with pytest.warns(UserWarning, match="not compiled, and seeds are trained one at a time"):
        result = rl_training.train(config, networks=BranchingNetworks)
    assert result.metrics["gradient_steps"] > 0


# Runs


def test_an_agent_trains_saves_and_resumes_with_its_own_networks(tmp_path: Path) -> None:
    config = {**tiny(tmp_path), "env_id": None, "total_timesteps": 50}
    config["algo_kwargs"] = {**SMALL, "learning_starts": 20}
    uninterrupted = rl_training.train(config, env=Zoo, networks=AllNetworks)
    stopped = rl_training.train(config, env=Zoo, networks=AllNetworks, callbacks=[StopAt(35)])
    with pytest.raises(MissingNetworksError, match="AllNetworks"):
        rl_training.resume_training(stopped.run_dir, env=Zoo)
    resumed = rl_training.resume_training(stopped.run_dir, env=Zoo, networks=AllNetworks)
    assert_same(uninterrupted, resumed)

    obs = OBSERVATIONS["dictionary"].sample()
    with pytest.raises(MissingNetworksError):
        rl_training.predict_checkpoint(resumed.run_dir, obs)
    action = rl_training.predict_checkpoint(resumed.run_dir, obs, networks=AllNetworks)
    with pytest.raises(MissingNetworksError):
        SAC.load(resumed.run_dir)
    agent = SAC.load(resumed.run_dir, Zoo, networks=AllNetworks)
    assert np.array_equal(agent.predict(obs), action)
    saved = agent.save(tmp_path / "policy")
    assert np.array_equal(SAC.load(saved, networks=AllNetworks).predict(obs), action)
    agent.learn(10)


def test_an_agent_takes_networks_as_settings_or_as_a_class(tmp_path: Path) -> None:
    settings = {"encoders": {"observation": "mlp"}}
    agent = SAC("Pendulum-v1", networks=settings, hidden_sizes=[8])
    assert "encoder.observation.layer_0.weight" in agent.policy.algorithm.model.actor.layout.shapes
    own = SAC("Pendulum-v1", networks=OnlyCritic, hidden_sizes=[8], output_dir=str(tmp_path))
    assert own.policy.algorithm.model.critic.sizes == (4, 1)


def test_a_run_with_built_in_networks_refuses_others(tmp_path: Path) -> None:
    config = {**tiny(tmp_path), "total_timesteps": 20}
    result = rl_training.train(config)
    with pytest.raises(UserError, match="built-in networks; leave out networks"):
        rl_training.resume_training(result.run_dir, networks=OnlyCritic)


class BranchingActor:
    def actor(self, inputs: int, outputs: int) -> nn.Module:
        return Branching(inputs, outputs)


@pytest.mark.parametrize("data_format", ["torch", "onnx"])
def test_networks_that_cannot_be_traced_are_not_exported(
    tmp_path: Path, data_format: str, capfd: pytest.CaptureFixture[str]
) -> None:
    if data_format == "onnx":
        pytest.importorskip("onnxscript")
    settings: dict[str, Any] = {"hidden_sizes": [8], "output_dir": str(tmp_path)}
    settings |= {"total_timesteps": 60, "learning_starts": 40, "batch_size": 8, "eval_interval": 0}
    agent = SAC("Pendulum-v1", networks=BranchingActor, **settings)
    agent.learn()
    with pytest.raises(UserError, match=r"cannot be exported.*must not branch") as error:
        agent.export(tmp_path / f"policy.{data_format}", format=data_format)
    assert "\n" not in str(error.value)
    assert "def forward" not in capfd.readouterr().err
