"""Observations of every kind become rows, and nothing of them is lost on the way."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from observation_zoo import OBSERVATIONS, Zoo

from rl_training.data.leaves.description import leaves_from
from rl_training.envs import EnvironmentFactory, VectorEnvironment
from rl_training.envs.spaces import describe_observations
from rl_training.errors import EnvironmentRuntimeError, EnvironmentSetupError
from rl_training.observations import MAX_AXES, ObservationSpec


def flat_leaves(space: spaces.Space[Any], value: Any, name: str = "") -> dict[str, np.ndarray]:
    """The leaves of an observation by name, found independently of `ObservationSpec`."""
    if isinstance(space, spaces.Dict):
        parts = [(key, part, value[key]) for key, part in space.spaces.items()]
    elif isinstance(space, spaces.Tuple):
        parts = [(str(i), part, value[i]) for i, part in enumerate(space.spaces)]
    else:
        return {name: np.asarray(value)}
    found: dict[str, np.ndarray] = {}
    for key, part, inner in parts:
        found |= flat_leaves(part, inner, f"{name}/{key}" if name else key)
    return found


def check_leaves(spec: ObservationSpec, rows: np.ndarray, expected: list[dict[str, Any]]) -> None:
    leaves = spec.leaves_of(torch.from_numpy(rows.copy()))
    assert list(leaves) == list(expected[0])
    for index, values in enumerate(expected):
        for name, value in values.items():
            assert leaves[name].shape[1:] == value.shape
            if value.dtype.kind == "f":
                value = value.astype(np.float32)
            np.testing.assert_array_equal(leaves[name][index].numpy(), value)


@pytest.mark.parametrize("name", OBSERVATIONS)
def test_rows_hold_every_leaf(name: str) -> None:
    space = OBSERVATIONS[name]
    spec = describe_observations(space)
    space.seed(3)
    values = [space.sample() for _ in range(5)]
    rows = np.zeros((5, spec.size), np.float32)
    for value, row in zip(values, rows, strict=True):
        spec.write(value, row)
        one, is_batch = spec.rows_of(value)
        assert not is_batch
        assert one.tobytes() == row.tobytes()
    check_leaves(spec, rows, [flat_leaves(space, value) for value in values])
    assert spec.problem_in(rows) is None


@pytest.mark.parametrize("name", OBSERVATIONS)
def test_leaves_are_the_same_when_mapped_over_seeds(name: str) -> None:
    space = OBSERVATIONS[name]
    spec = describe_observations(space)
    rows = np.zeros((6, spec.size), np.float32)
    space.seed(1)
    for row in rows:
        spec.write(space.sample(), row)
    mapped = torch.func.vmap(spec.leaves_of)(torch.from_numpy(rows).view(2, 3, -1))
    alone = spec.leaves_of(torch.from_numpy(rows))
    for leaf, values in mapped.items():
        assert torch.equal(values.flatten(0, 1), alone[leaf])


def test_images_take_one_byte_for_each_number() -> None:
    spec = describe_observations(spaces.Box(0, 255, (84, 84, 4), np.uint8))
    assert 4 * spec.size == 84 * 84 * 4


def test_a_batch_is_recognized_by_its_leading_axis() -> None:
    space = OBSERVATIONS["dictionary"]
    spec = describe_observations(space)
    space.seed(0)
    several = [space.sample() for _ in range(3)]
    batch = {
        "camera": np.stack([each["camera"] for each in several]),
        "position": np.stack([each["position"] for each in several]),
        "mode": np.array([each["mode"] for each in several]),
        "arm": {
            key: np.stack([each["arm"][key] for each in several]) for key in ("joints", "grip")
        },
    }
    rows, is_batch = spec.rows_of(batch)
    assert is_batch
    for row, each in zip(rows, several, strict=True):
        assert row.tobytes() == spec.rows_of(each)[0].tobytes()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"camera": np.zeros((9, 11), np.uint8)}, r"'camera' has shape \(9, 11\)"),
        ({"camera": np.zeros((9, 11, 3))}, "'camera' has type float64, not uint8"),
        ({"camera": np.full((9, 11, 3), 256)}, "'camera' is out of range"),
        ({"mode": 1.0}, "'mode' has type float64, not int32"),
        ({"mode": 4}, "'mode' is out of range: array\\(4\\)"),
        ({"mode": -1}, "'mode' is out of range"),
        (
            {"camera": np.full((9, 11, 3), 300)},
            r"range: array\(\[\[\[300, 300, 300\], \[",
        ),
        ({"arm": {"joints": np.zeros((2, 2))}}, "has no observation 'arm/grip'"),
        ({"arm": 3}, "has no observation 'arm/grip'"),
        ({"position": ["a", "b", "c"]}, "'position' is not numeric"),
    ],
)
def test_observations_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    space = OBSERVATIONS["dictionary"]
    spec = describe_observations(space)
    with pytest.raises(ValueError, match=message):
        spec.write({**space.sample(), **changes}, np.zeros(spec.size, np.float32))


def test_lists_of_integers_are_images_too() -> None:
    spec = describe_observations(OBSERVATIONS["image"])
    image = OBSERVATIONS["image"].sample()
    assert spec.rows_of(image.tolist())[0].tobytes() == spec.rows_of(image)[0].tobytes()


def test_keys_select_leaves() -> None:
    space = OBSERVATIONS["dictionary"]
    names = [leaf.name for leaf in describe_observations(space, ["arm", "position"]).leaves]
    assert sorted(names) == ["arm/grip", "arm/joints", "position"]
    with pytest.raises(EnvironmentSetupError, match="no observation 'positon'; did you mean"):
        describe_observations(space, ["positon"])


def test_text_can_be_left_out() -> None:
    space = spaces.Dict(
        {"image": spaces.Box(0, 255, (7, 7, 3), np.uint8), "mission": spaces.Text(9)}
    )
    with pytest.raises(
        EnvironmentSetupError, match=r"'mission'.*Text.*observation_keys: \[image\]"
    ):
        describe_observations(space)
    assert [leaf.name for leaf in describe_observations(space, ["image"]).leaves] == ["image"]


def test_all_observations_that_environments_may_have_can_be_described_in_files() -> None:
    """A run must not stop at its first checkpoint, which describes the observations."""
    for space in (
        spaces.Box(-1.0, 1.0, (1,) * (MAX_AXES - 1) + (2,)),
        spaces.Box(0, 9, (1_200_000,), np.uint8),
    ):
        spec = describe_observations(space)
        assert leaves_from(spec.to_json()) == spec


@pytest.mark.parametrize(
    ("space", "message"),
    [
        (spaces.Box(-1.0, 1.0, (1,) * (MAX_AXES + 1)), "The observation has 31 axes; at most 30"),
        (spaces.Box(0, 9, (40_000_004,), np.uint8), "has 40,000,004 bytes, most of them in the"),
        (spaces.Discrete(3, start=-(2**31) - 5), "values from -2,147,483,653 to -2,147,483,651"),
        (spaces.Dict(a=spaces.Discrete(2**31)), "The discrete observation 'a' has values from 0"),
    ],
)
def test_observations_that_files_cannot_describe_are_refused(space: Any, message: str) -> None:
    with pytest.raises(EnvironmentSetupError, match=message):
        describe_observations(space)


def test_the_size_of_a_row_does_not_overflow() -> None:
    huge = [
        {
            "name": name,
            "kind": "numbers",
            "shape": [2**16] * 3 + [2**14],
            "choices": [],
            "starts": [],
        }
        for name in "abcd"
    ]
    with pytest.raises(ValueError, match="which is too many"):
        leaves_from(huge)


def test_rows_from_files_are_checked() -> None:
    spec = describe_observations(OBSERVATIONS["dictionary"])
    rows, _ = spec.rows_of(OBSERVATIONS["dictionary"].sample())
    wrong = rows.copy()
    wrong[0, spec.columns("mode")] = np.array([9], np.int32).view(np.float32)
    assert "'mode'" in str(spec.problem_in(wrong))
    wrong = rows.copy()
    wrong[0, spec.columns("position")] = np.inf
    assert "not finite" in str(spec.problem_in(wrong))


@pytest.mark.parametrize("backend", ["sync", "async"])
@pytest.mark.parametrize("name", OBSERVATIONS)
def test_vector_environments_give_the_observations_of_single_ones(name: str, backend: Any) -> None:
    env, space = Zoo(name), OBSERVATIONS[name]
    spec = describe_observations(space)
    with VectorEnvironment(
        EnvironmentFactory(Zoo, {"observation": name}), 1, 5, backend=backend
    ) as vector:
        rows = vector.reset()
        seed = vector._episodes.seed(0)
        expected, _ = env.reset(seed=seed)
        for _ in range(20):
            check_leaves(spec, rows, [flat_leaves(space, expected)])
            action = np.array([[0.5, -0.25]], np.float32)
            step = vector.step(action)
            expected, reward, terminated, truncated, _ = env.step(action[0] * 2)
            check_leaves(spec, step.next_obs, [flat_leaves(space, expected)])
            assert step.reward[0] == np.float32(reward)
            if terminated or truncated:
                expected, _ = env.reset()
            rows = step.obs


@pytest.mark.parametrize("name", OBSERVATIONS)
def test_environments_continue_exactly_from_a_snapshot(name: str) -> None:
    factory = EnvironmentFactory(Zoo, {"observation": name})
    actions = np.linspace(-1, 1, 24, dtype=np.float32).reshape(12, 1, 2)
    with VectorEnvironment(factory, 1, 0) as first, VectorEnvironment(factory, 1, 1) as second:
        first.reset()
        for action in actions[:6]:
            first.step(action)
        before = second.restore(first.snapshot())
        assert before.tobytes() == first.restore(first.snapshot()).tobytes()
        for action in actions[6:]:
            one, other = first.step(action), second.step(action)
            assert one.next_obs.tobytes() == other.next_obs.tobytes()
            assert one.obs.tobytes() == other.obs.tobytes()


class Wrong(Zoo):
    """Returns an observation that is out of range at the third step."""

    def _observe(self) -> Any:
        found = super()._observe()
        if self.time == 3:
            found["mode"] = 17
        return found


class Infinite(Zoo):
    """Returns a position that is not finite at the third step."""

    def _observe(self) -> Any:
        found = super()._observe()
        if self.time == 3:
            found["position"][1] = np.nan
        return found


@pytest.mark.parametrize(
    ("kind", "message"), [(Wrong, "'mode' is out of range"), (Infinite, "not finite")]
)
def test_impossible_observations_of_environments_are_errors(kind: Any, message: str) -> None:
    with VectorEnvironment(EnvironmentFactory(kind), 1, 0) as vector:
        vector.reset()
        action = np.zeros((1, 2), np.float32)
        vector.step(action)
        vector.step(action)
        with pytest.raises(EnvironmentRuntimeError, match=message):
            vector.step(action)


def test_a_plain_vector_is_its_own_row() -> None:
    spec = describe_observations(gym.make("Pendulum-v1").observation_space)
    assert spec.is_vector
    assert spec == ObservationSpec.vector(3)
