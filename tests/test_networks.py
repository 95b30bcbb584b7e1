"""Algorithms whose networks encode observations: updates, populations, policies, settings."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conformance import assert_agree, assert_same, copied, moved, prepared_learner
from gymnasium.spaces import Box, Discrete
from gymnasium.spaces import Dict as DictSpace
from helpers import StopAt, has_returns, has_rollouts, rollout_fields, tiny
from observation_zoo import OBSERVATIONS, Zoo
from torch import Tensor

import rl_training
from rl_training.algorithms import get_algorithm_spec
from rl_training.algorithms.base import Algorithm, draw_noise
from rl_training.algorithms.spec import list_built_in_specs
from rl_training.config import TrainConfig
from rl_training.data import ReplayBuffer
from rl_training.data.n_step import Transitions
from rl_training.deployment.export import export_policy
from rl_training.envs.spaces import describe_observations, describe_space_pair
from rl_training.errors import CheckpointError, ConfigError, UserError
from rl_training.execution.execution import Execution
from rl_training.execution.learner import Learner
from rl_training.execution.policy import Policy
from rl_training.execution.policy_module import LeafInputs
from rl_training.execution.programs import ROWS, SHIFTS, Population, placeholder
from rl_training.models import MLP
from rl_training.models.encoders.augmentation import RandomShift
from rl_training.models.encoders.images import ImageLayout
from rl_training.models.network_settings import NetworkSettings
from rl_training.models.networks import EncodedNetwork
from rl_training.observations import ObservationLeaf, ObservationSpec
from rl_training.types import Batch, SpaceInfo
from rl_training.validation import validate

SPEC = describe_observations(OBSERVATIONS["dictionary"])
ACTIONS, BATCH = 2, 6
SMALL: dict[str, Any] = {"hidden_sizes": [16, 12], "batch_size": BATCH}
SIZES = {"flash_sac": {"hidden_sizes": [12, 12]}}  # residual blocks have one size
EMBEDDED = {"image_encoder": "impala", "encoders": {"mode": "embedding", "position": "mlp"}}
SHARED = {"image_encoder": "drq", "shared_encoder": True, "random_shift": 2}
ASYMMETRIC = {"actor_obs": ["position", "mode"]}


def rows(number: int, generator: np.random.Generator) -> Tensor:
    space = OBSERVATIONS["dictionary"]
    space.seed(int(generator.integers(2**31)))
    return torch.tensor(np.concatenate([SPEC.rows_of(space.sample())[0] for _ in range(number)]))


def batches(name: str, count: int, seed: int = 0) -> Iterator[Batch]:
    generator, spec = np.random.default_rng(seed), get_algorithm_spec(name)
    for _ in range(count):
        action = torch.tensor(generator.uniform(-1, 1, (BATCH, ACTIONS)), dtype=torch.float32)
        batch = Batch(
            rows(BATCH, generator),
            torch.tensor(generator.integers(0, ACTIONS, BATCH)) if is_discrete(name) else action,
            torch.tensor(generator.normal(size=BATCH), dtype=torch.float32),
            torch.full((BATCH,), 0.9),
            rows(BATCH, generator),
            next_action=action.flip(0) if spec.uses_next_actions else None,
            returns=action[:, 0] if has_returns(spec) else None,
        )
        of_rollout = rollout_fields(action[:, 0].clone) if has_rollouts(spec) else {}
        yield batch.with_fields(**of_rollout)


def is_discrete(name: str) -> bool:
    return get_algorithm_spec(name).algorithm.plain_actions == "discrete"


def make(name: str, networks: dict[str, Any] | None = None, *, seed: int = 0, **others: Any) -> Any:
    kind = get_algorithm_spec(name).algorithm
    chosen = {**SMALL, **SIZES.get(name, {}), "networks": networks, **others}
    return kind(SPEC, ACTIONS, chosen, seed=seed)


def learner_of(
    name: str, seeds: tuple[int, ...], updates: int, *, compiled: bool = False, **settings: Any
) -> Learner:
    algorithms = [make(name, seed=seed, **settings) for seed in seeds]
    streams = [batches(name, updates, seed) for seed in seeds]
    return prepared_learner(algorithms, streams, seeds, compiled=compiled)


def policy_of(algorithm: Algorithm, name: str) -> Policy:
    bounds = (
        {}
        if is_discrete(name)
        else {"action_low": -np.ones(2, "f4"), "action_high": np.ones(2, "f4")}
    )
    spaces = SpaceInfo(
        SPEC.size,
        ACTIONS,
        action_kind="discrete" if is_discrete(name) else "continuous",
        given_observation=SPEC,
        **bounds,
    )
    return Policy(algorithm, spaces, algorithm_name=name)


def cases() -> list[tuple[str, dict[str, Any] | None]]:
    every: list[tuple[str, dict[str, Any] | None]] = []
    for spec in list_built_in_specs():
        has_both = spec.name != "bc" and not is_discrete(spec.name)
        every += [(spec.name, None), (spec.name, EMBEDDED)]
        shared = {**SHARED, "random_shift": 0} if has_rollouts(spec) else SHARED
        every += [(spec.name, shared), (spec.name, ASYMMETRIC)] if has_both else []
    return every


@pytest.mark.parametrize(("name", "networks"), cases())
def test_updates_train_every_layer_and_policies_are_saved(
    name: str, networks: dict[str, Any] | None
) -> None:
    algorithm = make(name, networks, policy_delay=1)
    before = copied(algorithm.state)
    for batch in batches(name, 2):
        algorithm.update(batch)
    for part, network in algorithm.networks().items():
        old, new = network.unflatten(before[part]), network.unflatten(algorithm.state[part])
        assert moved(old, new) >= {layer for layer in new if not layer.endswith("embedding_0")}

    policy = policy_of(algorithm, name)
    tensors = policy.tensors()
    loaded = Policy.from_parts(policy.describe(), tensors)
    obs = rows(5, np.random.default_rng(1)).numpy()
    assert np.array_equal(policy.act(obs), loaded.act(obs))
    assert_module_acts_like(policy, obs)


def assert_module_acts_like(policy: Policy, obs: np.ndarray) -> None:
    """The module takes the leaves of observations."""
    leaves, module = SPEC.leaves_of(torch.tensor(obs)), policy.module
    assert isinstance(module, LeafInputs)
    given = [leaves[name.removeprefix("obs/")] for name in module.names]
    actions = module(*given).detach().numpy()
    np.testing.assert_allclose(actions, policy._in_environment_units(policy.act(obs)), atol=1e-5)


def test_tensors_of_encoders_have_readable_names() -> None:
    names = policy_of(make("sac", EMBEDDED), "sac").tensors().keys()
    assert "critic.encoder.camera.block_0_1.convolution_0.weight" in names
    assert "actor.encoder.mode.embedding_0.weight" in names
    assert {"critic.weight_0", "actor.weight_2"} <= names


def test_vectors_and_dictionaries_of_numbers_keep_plain_mlps() -> None:
    kind = get_algorithm_spec("sac").algorithm
    numbers = ObservationSpec(
        (ObservationLeaf("a", "numbers", (2,)), ObservationLeaf("b", "numbers", (1,)))
    )
    plain, described = kind(3, 2, SMALL), kind(numbers, 2, SMALL)
    assert all(type(network) is MLP for network in described.networks().values())
    assert all(torch.equal(plain.state[part], described.state[part]) for part in plain.state)


def test_the_members_of_an_ensemble_share_their_encoder() -> None:
    critic = make("sac", num_critics=3).model.critic
    assert isinstance(critic, EncodedNetwork)
    parts = critic.unflatten(critic.vector)
    assert parts["encoder.camera.convolution_0.weight"].dim() == 4
    assert parts["weight_0"].shape[0] == 3
    assert torch.equal(critic.flatten(parts), critic.vector)
    inputs = torch.cat([rows(4, np.random.default_rng(0)), torch.zeros(4, ACTIONS)], -1)
    some = critic(inputs, critic.select(critic.vector, torch.tensor([2, 0])))
    torch.testing.assert_close(some, critic(inputs)[[2, 0]])
    torch.testing.assert_close(critic(inputs, parts), critic(inputs))


def test_features_join_the_leaves_and_the_actions() -> None:
    algorithm, obs = make("sac"), rows(4, np.random.default_rng(0))
    critic, actions = algorithm.model.critic, torch.rand(4, ACTIONS)
    features = critic.encode(obs)
    assert features.shape == (4, 512 + 3 + 4 + 4 + 3)
    # The leaves are in alphabetical order, as in the space.
    assert torch.equal(features[:, -3:], SPEC.leaves_of(obs)["position"])
    parts = critic.unflatten(critic.vector)
    hidden = torch.cat([features, actions], -1)
    for layer in range(2):
        hidden = (hidden @ parts[f"weight_{layer}"] + parts[f"bias_{layer}"]).relu()
    expected = (hidden @ parts["weight_2"] + parts["bias_2"]).squeeze(-1).mT
    torch.testing.assert_close(algorithm.model.q_values(obs, actions), expected)


def test_parameters_depend_on_the_seed_alone() -> None:
    before = torch.get_rng_state()
    first, second, other = (make("td3", seed=seed).state for seed in (4, 4, 5))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(first[part], second[part]) for part in first)
    assert not torch.equal(first["critic"], other["critic"])


@pytest.mark.parametrize("kind", ["orthogonal", "xavier"])
def test_initialization_includes_encoders(kind: str) -> None:
    parts = make("sac", {"image_encoder": "drq"}, initialization=kind).model.actor
    named = parts.unflatten(parts.vector)
    assert not named["encoder.camera.convolution_1.bias"].any()
    weight = named["encoder.camera.convolution_1.weight"].flatten(1)
    if kind == "orthogonal":
        torch.testing.assert_close(weight @ weight.T, 2 * torch.eye(32), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("name", "networks"),
    [("sac", None), ("sac", SHARED), ("sac", EMBEDDED), ("ddpg", SHARED), ("dqn", EMBEDDED)],
)
def test_a_population_agrees_with_single_learners(
    name: str, networks: dict[str, Any] | None
) -> None:
    seeds, updates = (5, 6), 3
    together = learner_of(name, seeds, updates, networks=networks)
    together.update(0, updates)
    for index, seed in enumerate(seeds):
        alone = learner_of(name, (seed,), updates, networks=networks)
        alone.update(0, updates)
        assert_agree(alone.algorithms[0].state, together.algorithms[index].state)


@pytest.mark.compiled
@pytest.mark.parametrize("seeds", [(3,), (3, 4)])
@pytest.mark.parametrize(("name", "networks"), [("sac", SHARED), ("sac", EMBEDDED), ("dqn", None)])
def test_compiled_updates_agree_with_eager_ones(
    name: str, networks: dict[str, Any] | None, seeds: tuple[int, ...]
) -> None:
    slow, fast = (
        learner_of(name, seeds, 3, compiled=on, networks=networks) for on in (False, True)
    )
    slow.update(0, 3)
    fast.update(0, 3)
    assert_agree(slow.state, fast.state)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("seeds", [(3,), (3, 4)])
@pytest.mark.parametrize(("name", "networks"), [("sac", SHARED), ("ddpg", EMBEDDED), ("dqn", None)])
def test_updates_captured_as_cuda_graphs_agree_with_eager_ones(
    name: str, networks: dict[str, Any] | None, seeds: tuple[int, ...]
) -> None:
    slow, fast = (graphed_learner(name, networks, seeds, graphed=on) for on in (False, True))
    slow.update(0, 3)
    fast.update(0, 3)
    assert_agree(slow.state, fast.state)


def graphed_learner(
    name: str, networks: dict[str, Any] | None, seeds: tuple[int, ...], *, graphed: bool
) -> Learner:
    torch.set_float32_matmul_precision("highest")
    kind = get_algorithm_spec(name).algorithm
    settings = {**SMALL, "networks": networks}
    algorithms = [kind(SPEC, ACTIONS, settings, seed=seed, device="cuda") for seed in seeds]
    population = Population(len(seeds), tuple(range(len(seeds))))
    replay = ReplayBuffer(
        BATCH,
        SPEC,
        algorithms[0].actions,
        device="cuda",
        slots=population.slots,
        width=population.width,
    )
    for index, seed in enumerate(seeds):
        fields = [field.numpy() for field in next(batches(name, 1, seed))[:5]]
        replay.add(Transitions(*fields), np.full(BATCH, index))
    return Learner(
        algorithms,
        replay,
        Execution("cuda:0", graphed, 1, "highest", graphed=graphed),
        population=population,
        generators=[torch.Generator("cuda").manual_seed(seed) for seed in seeds],
    )


# What actors and critics see


def changed_leaf(obs: Tensor, leaf: str) -> Tensor:
    changed = obs.clone()
    columns = SPEC.columns(leaf)
    changed[:, columns] = obs[:, columns].flip(0)
    return changed


def test_an_actor_sees_only_the_chosen_leaves() -> None:
    algorithm, obs = make("sac", ASYMMETRIC), rows(6, np.random.default_rng(2))
    unseen, seen = changed_leaf(obs, "camera"), changed_leaf(obs, "position")
    actions = algorithm.act(algorithm.state, obs)
    assert torch.equal(algorithm.act(algorithm.state, unseen), actions)
    assert not torch.equal(algorithm.act(algorithm.state, seen), actions)
    q = algorithm.model.q_values(obs, actions)
    assert not torch.equal(algorithm.model.q_values(unseen, actions), q)
    assert not any("camera" in name for name in algorithm.model.actor.layout.shapes)


@pytest.mark.parametrize(("name", "networks"), [("sac", ASYMMETRIC), ("dqn", None)])
def test_policies_act_without_what_only_critics_see(
    name: str, networks: dict[str, Any] | None, tmp_path: Path
) -> None:
    if networks is None:  # the policy is the critic
        networks = {"critic_obs": ASYMMETRIC["actor_obs"]}
    space = OBSERVATIONS["dictionary"]
    action_space = Discrete(ACTIONS) if is_discrete(name) else Box(-1, 1, (ACTIONS,))
    policy = Policy(
        make(name, networks), describe_space_pair(space, action_space), algorithm_name=name
    )
    observation = space.sample()
    seen = {key: observation[key] for key in ("position", "mode")}
    expected = policy.predict(observation)
    assert np.array_equal(policy.predict(seen), expected)
    with pytest.raises(UserError, match=r"no observation 'mode'; .* takes mode \(\), position"):
        policy.predict({"position": observation["position"]})

    assert isinstance(policy.module, LeafInputs)
    inputs = [name.removeprefix("obs/") for name in policy.module.names]
    assert set(inputs) == {"position", "mode"}
    config = TrainConfig(algo=name, env_id="Pendulum-v1")
    file = export_policy(policy, tmp_path / "policy.pt2", format="torch", config=config)
    given = [torch.as_tensor(np.asarray(seen[leaf])).unsqueeze(0) for leaf in inputs]
    given = [each.float() if each.is_floating_point() else each for each in given]
    found = torch.export.load(file).module()(*given)
    action = found[0] if is_discrete(name) else found
    np.testing.assert_allclose(action[0].numpy(), expected, atol=1e-5)


def test_numbers_that_only_critics_see_are_no_inputs() -> None:
    space = DictSpace({"a": Box(-1, 1, (2,)), "secret": Box(-1, 1, (3,)), "b": Box(-1, 1, ())})
    spaces = describe_space_pair(space, Box(-1, 1, (2,)))
    settings = {**SMALL, "networks": {"actor_obs": ["a", "b"]}}
    algorithm = get_algorithm_spec("td3").algorithm(spaces.observation, spaces.actions, settings)
    policy = Policy(algorithm, spaces, algorithm_name="td3")
    seen = {"a": np.ones(2, np.float32), "b": np.float32(0.5)}
    expected = policy.predict({**seen, "secret": np.ones(3, np.float32)})
    assert np.array_equal(policy.predict(seen), expected)
    found = policy.module(torch.ones(1, 2), torch.full((1,), 0.5))
    np.testing.assert_allclose(found[0].detach().numpy(), expected, atol=1e-6)


def test_a_shared_encoder_is_trained_by_the_critics_alone() -> None:
    algorithm, batch = make("sac", SHARED), next(batches("sac", 1))
    noise = draw_noise(algorithm.update_noise(BATCH), algorithm.generator)
    state = {
        name: tensor.clone().requires_grad_()
        for name, tensor in algorithm.state.items()
        if tensor.is_floating_point()
    }
    loss, _ = algorithm.policy_loss(state, batch, noise)
    (gradient,) = torch.autograd.grad(loss, state["critic"], allow_unused=True)
    assert gradient is None
    features = algorithm.model.critic.encode(batch.obs, algorithm.state["critic"])
    expected = algorithm.model.actions(features, actor=algorithm.state["actor"])
    assert torch.equal(algorithm.act(algorithm.state, batch.obs), expected)


def test_targets_of_ddpg_use_the_current_shared_encoder() -> None:
    algorithm, batch = make("ddpg", SHARED), next(batches("ddpg", 1))
    state = dict(algorithm.state)
    state["target_critic"] = state["target_critic"] + 0.1
    critic = algorithm.model.critic
    action = torch.zeros(BATCH, ACTIONS)
    expected = critic.head(
        torch.cat([critic.encode(batch.next_obs, state["critic"]), action], -1),
        critic._split(state["target_critic"])[1],
    )
    found = algorithm.next_values(state, batch, action, {})
    torch.testing.assert_close(found, expected.squeeze(-1).squeeze(0))


def test_a_dictionary_selects_all_of_its_parts() -> None:
    robot = DictSpace({"joints": Box(-1, 1, (2,)), "load": Box(-1, 1, ())})
    space = DictSpace({"robot": robot, "secret": Box(-1, 1, (3,))})
    spaces = describe_space_pair(space, Box(-1, 1, (2,)))

    def state(names: list[str]) -> dict[str, torch.Tensor]:
        settings = {**SMALL, "networks": {"actor_obs": names}}
        found = get_algorithm_spec("td3").algorithm(spaces.observation, spaces.actions, settings)
        return found.state

    torch.testing.assert_close(state(["robot"]), state(["robot/joints", "robot/load"]))
    with pytest.raises(ConfigError, match="actor_obs: the observation has no part 'rob'"):
        state(["rob"])


@pytest.mark.parametrize(
    ("name", "networks", "message"),
    [
        ("sac", {"critic_obs": ["camra"]}, "critic_obs: .* no part 'camra'; it has .*'camera'"),
        ("sac", {"encoders": {"lidar": "mlp"}}, "encoders: .* no part 'lidar'"),
        ("bc", {"critic_obs": ["camera"]}, "critic_obs = .*no critic"),
        ("dqn", {"actor_obs": ["camera"]}, "actor_obs = .*no actor"),
        ("dqn", {"shared_encoder": True}, "shared_encoder = True: .* both actor and critic"),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    name: str, networks: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make(name, networks)


@pytest.mark.parametrize(
    ("networks", "message"),
    [
        ({"shared_encoder": True}, "no encoder to share"),
        ({"random_shift": 4}, "random_shift = 4: observations have no images"),
        ({"actor_obs": ["x"]}, "no part 'x'; it has 'observation'"),
    ],
)
def test_settings_for_images_are_refused_for_vectors(
    networks: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        get_algorithm_spec("sac").algorithm(3, 1, networks=networks)


def test_a_single_array_is_called_observation() -> None:
    settings = {"networks": {"encoders": {"observation": {"encoder": "mlp", "feature_size": 7}}}}
    actor = get_algorithm_spec("sac").algorithm(3, 1, settings).model.actor
    assert actor.layout.shapes["encoder.observation.layer_0.weight"] == (7, 3)


def test_a_saved_policy_does_not_allocate_more_than_its_tensors() -> None:
    policy = policy_of(make("sac", {"image_encoder": "drq"}), "sac")
    description, tensors = policy.describe(), policy.tensors()
    large = {"encoder": "drq", "feature_size": 65536}
    description["algo_kwargs"]["networks"]["encoders"] = {"camera": large}
    with pytest.raises(CheckpointError, match="larger than the saved ones"):
        Policy.from_parts(description, tensors)


def test_dueling_streams_share_one_encoder() -> None:
    for hidden in ([8], [16, 8]):
        algorithm = make("dqn", dueling=True, hidden_sizes=hidden)
        encoded = [n for n, net in algorithm.networks().items() if isinstance(net, EncodedNetwork)]
        assert encoded == ["critic_body"]
        algorithm.update(next(batches("dqn", 1)))


# Random shifts


SHAPES = [(12, 10), (9, 11, 3), (3, 12, 10), (2, 7, 9, 3), (2, 3, 8, 9)]


@pytest.mark.parametrize("shape", SHAPES)
def test_random_shifts_pad_and_crop(shape: tuple[int, ...]) -> None:
    leaves = (
        ObservationLeaf("before", "numbers", (2,)),
        ObservationLeaf("image", "image", shape),
        ObservationLeaf("after", "numbers", (1,)),
    )
    spec, largest = ObservationSpec(leaves), 3
    shift = RandomShift(spec, validate(NetworkSettings, {"random_shift": largest}))
    generator = np.random.default_rng(0)
    images = generator.integers(0, 256, (5, *shape), dtype=np.uint8)
    numbers = generator.normal(size=(5, 3)).astype(np.float32)
    obs, _ = spec.rows_of({"before": numbers[:, :2], "image": images, "after": numbers[:, 2:]})
    bits = torch.randint(0, 2**62, (5, shift.numbers))

    moved = spec.leaves_of(shift(torch.tensor(obs), bits))
    assert torch.equal(moved["before"], torch.tensor(numbers[:, :2]))
    assert torch.equal(moved["after"], torch.tensor(numbers[:, 2:]))
    layout = ImageLayout.of(shape)
    planes = layout.channels_first(torch.tensor(images)).float()
    padded = F.pad(planes, (largest,) * 4, mode="replicate")
    found = layout.channels_first(moved["image"]).float()
    for row in range(5):
        down, right = (int(number) % (2 * largest + 1) for number in bits[row])
        cut = padded[row, :, down : down + layout.height, right : right + layout.width]
        assert torch.equal(found[row], cut)


def test_random_shifts_come_from_the_stream_of_the_learner() -> None:
    shifts, none = learner_of("sac", (3,), 1, networks=SHARED), learner_of("sac", (3,), 1)
    drawn, plain = shifts.pool.take(), none.pool.take()
    assert drawn[SHIFTS].shape == (2, BATCH, 2)
    assert SHIFTS not in plain
    assert plain[ROWS].shape == drawn[ROWS].shape
    assert torch.equal(plain["action"], drawn["action"])
    first = shifts._batch_of(shifts.source, dict(drawn))
    assert not torch.equal(first.obs.view(torch.int32), first.next_obs.view(torch.int32))


# Runs


@pytest.mark.parametrize(
    ("name", "networks"),
    [
        ("sac", SHARED),
        pytest.param("td3", EMBEDDED, marks=pytest.mark.thorough),
        pytest.param("sac", ASYMMETRIC, marks=pytest.mark.thorough),
    ],
)
def test_a_run_resumes_bit_for_bit(name: str, networks: dict[str, Any], tmp_path: Path) -> None:
    changes = {"algo": name, "algo_kwargs": {**SMALL, "networks": networks, "learning_starts": 20}}
    config = {**tiny(tmp_path), **changes, "env_id": None, "total_timesteps": 60}
    uninterrupted = rl_training.train(config, env=Zoo)
    stopped = rl_training.train(config, env=Zoo, callbacks=[StopAt(40)])
    resumed = rl_training.resume_training(stopped.run_dir, env=Zoo)
    assert_same(uninterrupted, resumed)
    action = rl_training.predict_checkpoint(resumed.run_dir, OBSERVATIONS["dictionary"].sample())
    assert action.shape == (2,)


@pytest.mark.thorough
def test_seeds_are_trained_alone_and_together(tmp_path: Path) -> None:
    algo_kwargs = {**SMALL, "networks": SHARED, "learning_starts": 20}
    config = {**tiny(tmp_path), "algo": "sac", "algo_kwargs": algo_kwargs, "env_id": None}
    config |= {"total_timesteps": 40}
    results = rl_training.train({**config, "seeds": [1, 2]}, env=Zoo)
    alone = rl_training.train({**config, "seed": 2}, env=Zoo)
    assert_same(results[1], alone)


COUNTS_FROM_4 = Discrete(1_200, start=4)
"""More values than are one-hot by default, and zero is none of them"""


class CountsFrom4(Zoo):
    def __init__(self) -> None:
        super().__init__("discrete", Discrete(2))
        self.observation_space = COUNTS_FROM_4


@pytest.mark.compiled
def test_values_from_4_are_embedded_in_compiled_runs(tmp_path: Path) -> None:
    config = {**tiny(tmp_path), "env_id": None, "algo": "dqn", "compile": "on"}
    config["algo_kwargs"] = {"hidden_sizes": [4], "batch_size": 4, "learning_starts": 10}
    result = rl_training.train({**config, "total_timesteps": 20}, env=CountsFrom4)
    assert result.metrics["gradient_steps"] > 0


def test_a_policy_that_embeds_values_from_4_is_exported(tmp_path: Path) -> None:
    agent = rl_training.DQN(CountsFrom4, hidden_sizes=[4], output_dir=str(tmp_path))
    assert agent.export(tmp_path / "policy.pt2", format="torch").exists()


def test_slots_without_a_seed_have_possible_observations() -> None:
    observation = describe_observations(COUNTS_FROM_4)
    algorithm, population = SimpleNamespace(observation=observation), Population(3, (0, 2))
    found = placeholder(algorithm, population, 2)  # type: ignore[arg-type]
    assert found.shape == (3, 2, 1)
    assert (observation.leaves_of(found)[""] == 4).all()
