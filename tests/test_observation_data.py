"""Recorded observations of every kind: written, read, and trained on, bit for bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import h5py
import numpy as np
import pytest
import torch
from observation_zoo import OBSERVATIONS, Zoo

from rl_training.data.formats.columns import array_recording
from rl_training.data.formats.recording import Recording
from rl_training.data.formats.writing import collect, write_recording
from rl_training.data.leaves.description import LeafChoice
from rl_training.data.loading import DatasetPart, load_dataset
from rl_training.data.offline_dataset import OfflineDataset
from rl_training.data.transforms import ObservationNormalizer
from rl_training.datasets.describing import summary_lines
from rl_training.datasets.opening import build_dataset
from rl_training.datasets.recipes import record_random
from rl_training.datasets.workflows import convert_dataset, describe_dataset, open_source
from rl_training.envs import EnvironmentFactory
from rl_training.envs.spaces import describe_observations, describe_spaces
from rl_training.errors import DataError

FORMATS: list[Any] = ["npz", "hdf5", "minari"]
ID = "zoo/recorded/random-v0"
STEPS = 40


def recorded(name: str, keys: list[str] | None = None) -> Recording:
    return record_random(
        EnvironmentFactory(Zoo, {"observation": name}, observation_keys=keys), STEPS, 1
    )


def written(recording: Recording, data_format: Any, folder: Path) -> Path:
    if data_format == "minari":
        return write_recording(recording, folder, "minari", dataset_id=ID)
    return write_recording(recording, folder / f"data.{data_format}", data_format)


def packed(recording: Recording, **options: Any) -> OfflineDataset:
    return load_dataset([DatasetPart(recording)], **options)


def raw(dataset: OfflineDataset) -> bytes:
    """All rows but the actions, which are rounded when they are scaled."""
    rows = dataset.packed.numpy()
    return b"".join(
        rows[:, columns].tobytes()
        for columns in (slice(dataset.layout.obs_dim), slice(dataset.layout.reward, None))
    )


@pytest.mark.parametrize("data_format", FORMATS)
@pytest.mark.parametrize("name", OBSERVATIONS)
def test_written_observations_are_read_bit_for_bit(
    name: str, data_format: Any, tmp_path: Path
) -> None:
    recording = recorded(name)
    again = open_source(written(recording, data_format, tmp_path))
    assert again.info.observation == describe_observations(OBSERVATIONS[name])
    assert again.info.observation == recording.info.observation
    first, second = packed(recording), packed(again)
    assert raw(first) == raw(second)
    action = first.layout.action
    torch.testing.assert_close(first.packed[:, action], second.packed[:, action])
    assert (first.episode_ends == second.episode_ends).all()


@pytest.mark.parametrize("data_format", FORMATS)
@pytest.mark.parametrize("name", OBSERVATIONS)
def test_written_arrays_are_those_of_the_environment(
    name: str, data_format: Any, tmp_path: Path
) -> None:
    """Compared with an environment of its own, without any of this package's rows."""
    recording = recorded(name)
    arrays = collect(open_source(written(recording, data_format, tmp_path)))
    env = Zoo(name)
    first = next(iter(recording.chunks()))
    space = describe_observations(env.observation_space)
    leaves = space.leaves_of(torch.from_numpy(first.obs.copy()))
    for leaf in space.leaves:
        stored = arrays[f"observations/{leaf.name}" if leaf.name else "observations"]
        assert stored.shape == (STEPS, *leaf.shape)
        assert leaf.kind != "numbers" or stored.dtype == leaf.number_type
        np.testing.assert_array_equal(stored[: len(first.obs)], leaves[leaf.name].numpy())


@pytest.mark.parametrize("name", OBSERVATIONS)
def test_minari_reads_what_is_written(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    minari = pytest.importorskip("minari")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    recording = recorded(name)
    written(recording, "minari", tmp_path)
    dataset, space = minari.load_dataset(ID), OBSERVATIONS[name]
    assert type(dataset.observation_space) is type(space)
    assert describe_observations(dataset.observation_space) == describe_observations(space)
    row = 0
    spec, steps = recording.info.observation, next(iter(recording.chunks()))
    for episode in dataset.iterate_episodes():
        rows, _ = spec.rows_of(episode.observations)
        assert len(rows) == len(episode.rewards) + 1
        assert rows[:-1].tobytes() == steps.obs[row : row + len(rows) - 1].tobytes()
        row += len(rows) - 1
        assert rows[-1].tobytes() == steps.next_obs[row - 1].tobytes()
    assert row == STEPS


def buffers(space: gym.Space[Any], lengths: list[int]) -> list[Any]:
    """Episodes of random observations, as Minari collects them."""
    from minari.data_collector import EpisodeBuffer

    found = []
    for number, length in enumerate(lengths):
        space.seed(number)
        samples = [space.sample() for _ in range(length + 1)]
        found.append(
            EpisodeBuffer(
                id=number,
                observations=listed(space, samples),
                actions=[np.float32([0.1 * step, -0.5]) for step in range(length)],
                rewards=[float(step) for step in range(length)],
                terminations=[False] * length,
                truncations=[step == length - 1 for step in range(length)],
                infos={},
            )
        )
    return found


def listed(space: gym.Space[Any], samples: list[Any]) -> Any:
    if isinstance(space, gym.spaces.Dict):
        return {k: listed(part, [s[k] for s in samples]) for k, part in space.spaces.items()}
    if isinstance(space, gym.spaces.Tuple):
        parts = enumerate(space.spaces)
        return tuple(listed(part, [s[i] for s in samples]) for i, part in parts)
    return samples


def made_by_minari(
    space: gym.Space[Any], monkeypatch: pytest.MonkeyPatch, folder: Path, **options: Any
) -> list[Any]:
    minari = pytest.importorskip("minari")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(folder))
    episodes = buffers(space, [4, 3])
    minari.create_dataset_from_buffers(
        ID,
        episodes,
        action_space=gym.spaces.Box(-2, 2, (2,)),
        observation_space=space,
        algorithm_name="random",
        code_permalink="https://example.org",
        author="a",
        author_email="a@example.org",
        **options,
    )
    return episodes


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", OBSERVATIONS)
def test_data_of_minari_is_read(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    space = OBSERVATIONS[name]
    episodes = made_by_minari(space, monkeypatch, tmp_path)
    recording = open_source(ID)
    assert recording.info.observation == describe_observations(space)
    assert not recording.info.lossy_images
    for steps, episode in zip(recording.chunks(), episodes, strict=True):
        rows, _ = recording.info.observation.rows_of(stacked(episode.observations))
        assert steps.obs.tobytes() == rows[:-1].tobytes()
        assert steps.next_obs.tobytes() == rows[1:].tobytes()


def stacked(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: stacked(inner) for key, inner in value.items()}
    return tuple(map(stacked, value)) if isinstance(value, tuple) else np.array(value)


IMAGES = gym.spaces.Dict(
    {
        "camera": gym.spaces.Box(0, 255, (32, 40, 3), np.uint8),
        "gray": gym.spaces.Box(0, 255, (33, 32), np.uint8),
        "mission": gym.spaces.Text(8),
        "pose": gym.spaces.Box(-1, 1, (2,)),
    }
)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("jpeg", [True, False])
def test_images_of_minari_are_read_as_minari_does(
    jpeg: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    minari = pytest.importorskip("minari")
    episodes = made_by_minari(IMAGES, monkeypatch, tmp_path, jpeg_encoding=jpeg)
    with pytest.raises(
        DataError, match=r"'mission' .* Text.*observation_keys: \[camera, gray, pose"
    ):
        open_source(ID)
    recording = open_source(ID, ["camera", "pose", "gray"])
    assert recording.info.lossy_images is jpeg
    spec = recording.info.observation
    for steps, mine, original in zip(
        recording.chunks(), minari.load_dataset(ID), episodes, strict=True
    ):
        rows, _ = spec.rows_of(mine.observations)
        assert steps.obs.tobytes() == rows[:-1].tobytes()
        exact, _ = spec.rows_of(stacked(original.observations))
        assert (exact.tobytes() == rows.tobytes()) is not jpeg
    lines = "\n".join(summary_lines(describe_dataset(ID, observation_keys=["camera", "pose"])))
    assert ("stored as JPEG" in lines) is jpeg
    assert "camera: images of shape (32, 40, 3), pixels" in lines
    # What is written from it is not changed again.
    copy = convert_dataset(ID, tmp_path / "copy.npz", observation_keys=["camera", "pose", "gray"])
    assert raw(packed(open_source(copy))) == raw(packed(recording))


@pytest.mark.filterwarnings("ignore")
def test_images_of_equal_length_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Minari stores files of the same length as one array of two dimensions."""
    space = gym.spaces.Box(0, 255, (32, 32, 3), np.uint8)
    monkeypatch.setattr(space, "sample", lambda: np.full((32, 32, 3), 9, np.uint8))
    made_by_minari(space, monkeypatch, tmp_path)
    with h5py.File(tmp_path / ID / "data" / "main_data.hdf5") as file:
        assert file["episode_0/observations"].ndim == 2
    steps = next(iter(open_source(ID).chunks()))
    assert (steps.obs.view(np.uint8) == 9).all()


def wrong_size(group: Any) -> Any:
    return [np.frombuffer(jpeg_of(np.zeros((40, 40, 3), np.uint8)), np.uint8)] * 5


def jpeg_of(image: np.ndarray) -> bytes:
    import io

    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, format="JPEG")
    return buffer.getvalue()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("values", "message"),
    [
        (wrong_size, "is an image of 40 by 40 pixels; expected"),
        (lambda group: [np.frombuffer(jpeg_of(np.zeros((32, 40), np.uint8)), np.uint8)] * 5,
         r"of shape \(32, 40\); expected"),
        (lambda group: [np.frombuffer(group["observations/camera"][0][:300], np.uint8)] * 5,
         "cannot be read as JPEG"),
        (lambda group: [np.zeros(90, np.uint8)] * 5, "cannot be read as JPEG"),
        (lambda group: [np.zeros(0, np.uint8)] * 5, "too few for an image"),
        (lambda group: list(group["observations/camera"][()])[:3], "has 3 images; expected 5"),
    ],
)  # fmt: skip
def test_wrong_images_are_refused(
    values: Callable[[Any], Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_by_minari(IMAGES, monkeypatch, tmp_path)
    with h5py.File(tmp_path / ID / "data" / "main_data.hdf5", "a") as file:
        group = file["episode_0"]
        images = values(group)
        del group["observations/camera"]
        array = group.create_dataset(
            "observations/camera", (len(images),), h5py.vlen_dtype(np.uint8)
        )
        for index, image in enumerate(images):
            array[index] = image
    with pytest.raises(DataError, match=message):
        list(open_source(ID, ["camera"]).chunks())


def minari_data(name: str, folder: Path) -> tuple[Path, Path]:
    path = written(recorded(name), "minari", folder) / "data"
    return path / "metadata.json", path / "main_data.hdf5"


def deep(levels: int) -> str:
    return '{"type": "Dict", "subspaces": {"a": ' * levels + "1" + "}}" * levels


@pytest.mark.parametrize(
    ("space", "message"),
    [
        (deep(60), "more than 50 levels"),
        (deep(20_000), "cannot be read"),
        ({"type": "Dict", "subspaces": {"a/b": {"type": "Discrete", "n": 2}}}, "keys with '/'"),
        ({"type": "Dict", "subspaces": {"": {"type": "Discrete", "n": 2}}}, "keys with '/'"),
        ({"type": "Dict", "subspaces": 3}, "cannot be read"),
        ({"type": "Tuple", "subspaces": []}, "a Tuple without parts"),
        ({"type": "Dict"}, "has no 'subspaces'"),
        ([], "cannot be read"),
        ({"type": "Graph"}, "the observation space is Graph, which is not supported"),
        ({"type": ["Box"]}, "not supported"),
        ({"type": "Box", "shape": [10**9], "dtype": "float32"}, "cannot be read"),
        ({"type": "Box", "shape": [10**5, 10**5], "dtype": "uint8"}, "which is too many"),
        ({"type": "Box", "shape": [-3], "dtype": "float32"}, "cannot be read"),
        ({"type": "Box", "shape": 3, "dtype": "float32"}, "cannot be read"),
        ({"type": "Box", "shape": [3], "dtype": "object"}, "the type 'object'"),
        ({"type": "Box", "shape": [3]}, "has no 'dtype'"),
        ({"type": "Discrete", "n": 2**40}, "cannot be read"),
        ({"type": "Discrete", "n": 9, "start": 2**31 - 3}, "too large for int32"),
        ({"type": "Discrete", "n": "9"}, "cannot be read"),
        ({"type": "MultiDiscrete", "nvec": [[2], [2, 3]]}, "cannot be read"),
        ({"type": "MultiDiscrete", "nvec": [2, 3], "start": [0]}, "2 choices and starts"),
        ({"type": "MultiDiscrete", "nvec": [2.5]}, "cannot be read"),
        ({"type": "MultiBinary", "n": {}}, "cannot be read"),
        ({"type": "MultiBinary", "n": [0]}, "cannot be read"),
    ],
)  # fmt: skip
def test_hostile_spaces_are_refused(space: Any, message: str, tmp_path: Path) -> None:
    path, _ = minari_data("dictionary", tmp_path)
    about = json.loads(path.read_text())
    about["observation_space"] = space if isinstance(space, str) else json.dumps(space)
    path.write_text(json.dumps(about))
    with pytest.raises(DataError, match=message):
        open_source(tmp_path / ID)


def replaced(path: str, values: Any) -> Callable[[Any], None]:
    def change(file: Any) -> None:
        del file[path]
        if values is not None:
            file[path] = values

    return change


def linked(file: Any) -> None:
    arm = file["episode_0/observations/arm"]
    del file["episode_0/observations/arm"]
    file["elsewhere"] = arm
    file["episode_0/observations/arm"] = h5py.SoftLink("/elsewhere")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (replaced("episode_0/observations/mode", None), "observations/mode missing"),
        (replaced("episode_0/observations/arm", 3), "arm/grip"),
        (replaced("episode_0/observations/camera", np.zeros((3, 2))), "has shape"),
        (replaced("episode_0/observations/position", np.zeros(3)), "has shape"),
        (linked, "is a link"),
        (replaced("episode_0/observations", np.zeros((4, 3))), "observations"),
    ],
)
def test_wrong_arrays_of_minari_are_refused(
    change: Callable[[Any], None], message: str, tmp_path: Path
) -> None:
    _, path = minari_data("dictionary", tmp_path)
    with h5py.File(path, "a") as file:
        change(file)
    with pytest.raises(DataError, match=message):
        list(open_source(tmp_path / ID).chunks())


def test_a_small_file_cannot_claim_a_huge_episode(tmp_path: Path) -> None:
    about, path = minari_data("image", tmp_path)
    metadata = json.loads(about.read_text())
    about.write_text(json.dumps({**metadata, "total_steps": 10**6}))
    rows = {"observations": 10**6 + 1}
    with h5py.File(path, "a") as file:
        group = file["episode_0"]
        for key, array in list(group.items()):
            shape = (rows.get(key, 10**6), *array.shape[1:])
            del group[key]  # zeros that are not stored
            group.create_dataset(key, shape, array.dtype, chunks=(1000, *shape[1:]))
    with pytest.raises(DataError, match=r"claims .* bytes, but 0 are stored"):
        list(open_source(tmp_path / ID).chunks())


def test_the_row_and_leaf_of_a_wrong_value_are_named(tmp_path: Path) -> None:
    _, path = minari_data("dictionary", tmp_path)
    with h5py.File(path, "a") as file:
        file["episode_1/observations/mode"][2] = 7
    with pytest.raises(
        DataError, match=r"episode_1/observations/mode\[2\] is 7; it must be between 0 and 3"
    ):
        list(open_source(tmp_path / ID).chunks())
    with h5py.File(path, "a") as file:
        file["episode_1/observations/mode"][2] = 3
        file["episode_1/observations/arm/joints"][1, 0, 1] = np.nan
    recording = open_source(tmp_path / ID)
    with pytest.raises(
        DataError, match=r"episode_1/observations/arm/joints\[1, 0, 1\] is nan, not a finite"
    ):
        packed(recording)
    with pytest.raises(DataError, match="not a finite"):
        describe_dataset(tmp_path / ID)


@pytest.mark.parametrize("data_format", ["npz", "hdf5"])
@pytest.mark.parametrize(
    "text", ["", "[", "[]", "3", '[{"name": "x"}]', "null", '[{"name": 1}]', "[" * 99_999]
)
def test_a_damaged_description_is_refused(data_format: str, text: str, tmp_path: Path) -> None:
    path = written(recorded("dictionary"), data_format, tmp_path)
    if data_format == "npz":
        arrays = {**np.load(path), "observation_leaves": np.asarray(text)}
        np.savez(path, **arrays)
    else:
        with h5py.File(path, "a") as file:
            replaced("observation_leaves", np.bytes_(text))(file)
    with pytest.raises(DataError, match="observation_leaves is damaged"):
        open_source(path)


@pytest.mark.parametrize("data_format", ["npz", "hdf5"])
def test_files_without_a_description_are_read_as_the_environment_says(
    data_format: str, tmp_path: Path
) -> None:
    recording = recorded("dictionary")
    path = written(recording, data_format, tmp_path)
    if data_format == "npz":
        arrays = dict(np.load(path))
        del arrays["observation_leaves"]
        np.savez(path, **arrays)
    else:
        with h5py.File(path, "a") as file:
            del file["observation_leaves"]
    spaces = describe_spaces(Zoo("dictionary"))
    dataset = build_dataset({"kind": data_format, "path": str(path)}, spaces=spaces)
    assert raw(dataset) == raw(packed(recording))
    alone = open_source(path).info.observation
    assert alone.leaf("mode").kind == "numbers"  # nothing says how many modes there are
    assert alone.leaf("camera").kind == "image"
    assert alone.leaf("arm/grip").kind == "binary"


def test_names_that_hdf5_would_change_are_refused(tmp_path: Path) -> None:
    arrays = episode(**{".": np.zeros((3, 2)), "a": np.zeros(3)})
    recording = array_recording(arrays)
    assert raw(packed(open_source(written(recording, "npz", tmp_path)))) == raw(packed(recording))
    for data_format in ("hdf5", "minari"):
        with pytest.raises(DataError, match=r"'\.' cannot be a name in HDF5"):
            written(recording, data_format, tmp_path)


@pytest.mark.parametrize("data_format", ["npz", "hdf5"])
def test_jumps_of_any_leaf_end_an_episode(data_format: str, tmp_path: Path) -> None:
    """Without marked ends, an episode ends where the next observation is another one."""
    images = np.arange(7, dtype=np.uint8)[:, None, None] * np.ones((1, 2, 3), np.uint8)
    place = np.zeros((7, 1), np.float32)
    arrays = {
        **episode(camera=images[:6], place=place[:6]),
        "next_observations": {"camera": images[1:].copy(), "place": place[1:]},
        "actions": np.zeros((6, 1), np.float32),
        "rewards": np.ones(6),
        "terminals": np.zeros(6),
    }
    del arrays["timeouts"]
    arrays["next_observations"]["camera"][2, 1, 2] = 200
    recording = array_recording(arrays)
    assert packed(recording).episode_ends.tolist() == [3, 6]
    again = open_source(written(recording, data_format, tmp_path))
    assert packed(again).episode_ends.tolist() == [3, 6]


def test_keys_choose_leaves_of_every_source(tmp_path: Path) -> None:
    keys = ["arm", "mode"]
    expected = raw(packed(recorded("dictionary", keys)))
    complete = recorded("dictionary")
    for data_format in FORMATS:
        path = written(complete, data_format, tmp_path)
        source = tmp_path / ID if data_format == "minari" else path
        assert raw(packed(open_source(source, keys))) == expected
    arrays = collect(complete)
    assert raw(packed(array_recording(arrays, leaves=LeafChoice(keys)))) != expected  # no spec
    with pytest.raises(DataError, match=r"no observation 'modes'; did you mean 'mode'\?"):
        open_source(tmp_path / "data.npz", ["modes"])


def test_leaves_are_put_into_the_order_of_the_environment(tmp_path: Path) -> None:
    numbers = gym.spaces.Box(-1, 1, (2,))
    ordered = gym.spaces.Dict([("b", numbers), ("a", gym.spaces.Discrete(3))])
    spaces = describe_spaces(_Spaces(ordered))
    arrays = episode(a=np.array([0, 1, 2]), b=np.arange(6.0).reshape(3, 2))
    dataset = build_dataset(arrays, spaces=spaces)
    leaves = spaces.observation.leaves_of(dataset.sample(8).obs)
    assert list(leaves) == ["b", "a"]
    assert (leaves["b"][:, 0] == 2 * leaves["a"]).all()


class _Spaces(gym.Env[Any, Any]):
    def __init__(self, observation_space: gym.Space[Any]) -> None:
        self.observation_space = observation_space
        self.action_space = gym.spaces.Box(-1, 1, (1,))


def episode(**leaves: np.ndarray) -> dict[str, Any]:
    return {
        "observations": leaves,
        "next_observations": leaves,
        "actions": np.zeros((3, 1), np.float32),
        "rewards": np.zeros(3),
        "terminals": np.array([0, 0, 1]),
        "timeouts": np.zeros(3),
        "action_low": np.array([-1.0]),
        "action_high": np.array([1.0]),
    }


@pytest.mark.parametrize(
    ("leaves", "message"),
    [
        ({"a": np.zeros((3, 2))}, "has no observation 'b', which the environment has"),
        (
            {"a": np.zeros((3, 2)), "b": np.zeros(3, int), "c": np.zeros(3)},
            r"has the observation 'c', which the environment does not have.*\[a, b\]",
        ),
        (
            {"a": np.zeros((3, 4)), "b": np.zeros(3, int)},
            r"'a' is numbers of shape \(4,\), the environment's is numbers of shape \(2,\)",
        ),
        (
            {"a": np.zeros((3, 2)), "b": np.zeros(3)},
            r"'b' is numbers of shape \(\), the environment's is discrete .* values 0 to 2",
        ),
        ({"a": np.zeros((3, 2)), "b": np.array([0, 1, 3])}, r"observations/b\[2\] is 3; it must"),
        ({"a": np.zeros((3, 0)), "b": np.zeros(3, int)}, "observations/a has shape"),
        ({"a": np.array(["x"] * 3), "b": np.zeros(3, int)}, "must be numeric"),
        ({"a": np.zeros((2, 2)), "b": np.zeros(3, int)}, "different numbers of steps"),
    ],
)
def test_the_leaf_that_does_not_fit_is_named(leaves: dict[str, Any], message: str) -> None:
    space = gym.spaces.Dict({"a": gym.spaces.Box(-1, 1, (2,)), "b": gym.spaces.Discrete(3)})
    with pytest.raises(DataError, match=message):
        build_dataset(episode(**leaves), spaces=describe_spaces(_Spaces(space)))


def test_only_numbers_are_normalized() -> None:
    dataset = packed(recorded("dictionary"))
    with pytest.raises(DataError, match="only numbers can be normalized"):
        dataset.fit(ObservationNormalizer(dataset.spaces.obs_dim))
    assert dataset.fingerprint["parts"][0]["observation"].startswith("arm/grip")
    assert np.isfinite(dataset.fingerprint["parts"][0]["obs_sum"])


@pytest.mark.parametrize("name", OBSERVATIONS)
def test_batches_have_the_recorded_observations(name: str) -> None:
    recording = recorded(name)
    dataset = packed(recording, n_step=3, next_actions=True)
    steps = next(iter(recording.chunks()))
    known = {row.tobytes() for row in steps.obs}
    batch = dataset.sample(64)
    assert {row.tobytes() for row in batch.obs.numpy()} <= known
    assert not batch.reward.isnan().any()


@pytest.mark.parametrize("name", OBSERVATIONS)
@pytest.mark.fast_cases("dictionary", "image")
def test_a_summary_and_its_picture_show_every_leaf(name: str, tmp_path: Path) -> None:
    path = written(recorded(name), "npz", tmp_path)
    summary = describe_dataset(path, picture=tmp_path / "picture.png")
    text = "\n".join(summary_lines(summary))
    assert (tmp_path / "picture.png").stat().st_size > 1000
    for leaf in describe_observations(OBSERVATIONS[name]).leaves:
        assert not leaf.shape or f"of shape {leaf.shape}" in text
        assert not leaf.name or f"  {leaf.name}: " in text


def test_pixels_are_summarized_exactly(tmp_path: Path) -> None:
    recording = recorded("image")
    steps = np.concatenate([each.obs for each in recording.chunks()])
    pixels = recording.info.observation.unpack(steps)[""].astype(np.float64)
    (leaf,) = describe_dataset(written(recording, "npz", tmp_path)).observations
    assert leaf.ranges.mean[0] == pytest.approx(pixels.mean())
    assert leaf.ranges.std[0] == pytest.approx(pixels.std())
    assert (leaf.ranges.low[0], leaf.ranges.high[0]) == (pixels.min(), pixels.max())


def test_numbers_become_features_of_lerobot(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    keys = ["position", "arm/joints"]
    recording = recorded("dictionary", keys)
    path = write_recording(recording, tmp_path / "lerobot", "lerobot")
    features = json.loads((path / "meta" / "info.json").read_text())["features"]
    assert features["observation.arm.joints"]["shape"] == [4]
    assert features["next.observation.position"]["shape"] == [3]
    again = open_source(path)
    assert again.info.observation == recording.info.observation
    assert raw(packed(again)) == raw(packed(recording))
    assert raw(packed(open_source(path, ["position"]))) != raw(packed(recording))
    with pytest.raises(DataError, match="'arm/grip' is binary; only numbers can be written"):
        write_recording(recorded("dictionary"), tmp_path / "other", "lerobot")
    assert not (tmp_path / "other").exists()


def test_a_matrix_is_one_feature_of_lerobot(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    recording = recorded("matrix")
    path = write_recording(recording, tmp_path / "lerobot", "lerobot")
    assert raw(packed(open_source(path))) == raw(packed(recording))
