"""LeRobot's dataset format v3.0: reading, writing, and files from strangers."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hostile import forgeries
from test_offline_data import recorded

from rl_training.data import DatasetPart, array_recording, load_dataset
from rl_training.data.formats import lerobot_writing, parquet, recording
from rl_training.data.formats.lerobot_metadata import data_file
from rl_training.data.formats.parquet import ParquetColumns
from rl_training.data.formats.writing import collect, write_recording
from rl_training.datasets.describing import summary_lines
from rl_training.datasets.opening import build_dataset, open_lerobot
from rl_training.datasets.workflows import (
    convert_dataset,
    dataset_section,
    describe_dataset,
    open_source,
)
from rl_training.errors import ConfigError, DataError, UserError

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

SAMPLE = Path(__file__).parent / "fixtures" / "lerobot"
"""Four episodes of 4, 3, 1 and 5 frames, written by lerobot 0.4.4 into four files"""
EPISODES = [(5, True), (3, False), (1, True), (4, False), (1, False)]
Arrays = dict[str, np.ndarray]
Edit = Callable[[Path], None]


def written(arrays: Arrays, folder: Path, **options: Any) -> Path:
    return write_recording(array_recording(arrays), folder, "lerobot", **options)


def bounded(arrays: Arrays) -> Arrays:
    size = arrays["actions"].shape[1]
    return arrays | {"action_low": -2 * np.ones(size), "action_high": 2 * np.ones(size)}


def random_arrays(*lengths: int) -> Arrays:
    generator, rows = np.random.default_rng(0), sum(lengths)
    ends = np.isin(np.arange(1, rows + 1), np.cumsum(lengths))
    terminals = ends & (generator.random(rows) < 0.5)
    return {
        "observations": generator.normal(size=(rows, 3)).astype(np.float32),
        "actions": generator.uniform(-2, 2, (rows, 2)).astype(np.float32),
        "rewards": generator.normal(size=rows).astype(np.float32),
        # Not equal to the following observations: even such data must survive a round trip.
        "next_observations": generator.normal(size=(rows, 3)).astype(np.float32),
        "terminals": terminals,
        "timeouts": ends & ~terminals,
    }


def edit_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


def edit_table(path: Path, change: Callable[[Any], Any]) -> None:
    pq.write_table(change(pq.read_table(path)), path)


def replaced(table: Any, name: str, values: Any) -> Any:
    return table.set_column(table.schema.get_field_index(name), name, values)


def first_file(folder: Path) -> Path:
    return folder / "data" / "chunk-000" / "file-000.parquet"


def foreign(folder: Path) -> None:
    """Remove what only this package writes, so that the data looks like LeRobot's own."""
    own = ("next.terminated", "next.truncated", "next.observation.state")
    edit_json(
        folder / "meta" / "info.json", lambda info: [info["features"].pop(key) for key in own]
    )
    edit_table(first_file(folder), lambda table: table.drop_columns(list(own)))
    (folder / "meta" / "rl_training.json").unlink()


# Round trips


def check_round_trip(arrays: Arrays, folder: Path) -> None:
    expected = collect(array_recording(arrays))
    found = collect(open_lerobot(written(arrays, folder)))
    assert {key: values.dtype for key, values in found.items()} == {
        key: values.dtype for key, values in expected.items()
    }
    for key, values in expected.items():
        np.testing.assert_array_equal(found[key], values, key)


def test_a_round_trip_is_exact(tmp_path: Path) -> None:
    check_round_trip(random_arrays(5, 1, 30, 2, 1), tmp_path / "x")
    check_round_trip(bounded(recorded(EPISODES)), tmp_path / "y")


def test_a_round_trip_through_many_small_batches_files_and_chunks_is_exact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "CHUNK_ROWS", 4)
    for module in (parquet, lerobot_writing):
        monkeypatch.setattr(module, "CHUNK_ROWS", 4)
    monkeypatch.setattr(lerobot_writing, "FILE_MEGABYTES", 200 / 2**20)
    monkeypatch.setattr(lerobot_writing, "FILES_PER_CHUNK", 2)
    monkeypatch.setattr(lerobot_writing, "EPISODES_AT_A_TIME", 2)
    check_round_trip(random_arrays(5, 1, 30, 2, 1, 9, 9), tmp_path / "x")
    names = sorted(path.name for path in (tmp_path / "x" / "data").iterdir())
    assert names == ["chunk-000", "chunk-001", "chunk-002"]
    assert len(list((tmp_path / "x" / "meta" / "episodes").glob("*/*.parquet"))) > 1


def test_discrete_actions_their_number_and_their_start_survive(tmp_path: Path) -> None:
    arrays = random_arrays(4, 6)
    arrays["actions"] = np.arange(10) % 3 + 2
    check_round_trip(arrays, tmp_path / "x")
    info = open_lerobot(tmp_path / "x").info
    assert (info.action_kind, info.action_dim) == ("discrete", 0)  # unknown to arrays

    edit_json(
        tmp_path / "x" / "meta" / "rl_training.json",
        lambda own: own.update(actions=3, action_start=2),
    )
    info = open_lerobot(tmp_path / "x").info
    assert (info.action_dim, info.action_start) == (3, 2)


def test_the_fingerprint_is_that_of_the_source(tmp_path: Path) -> None:
    arrays = bounded(recorded(EPISODES))
    np.savez(tmp_path / "x.npz", **arrays)
    written(arrays, tmp_path / "x")
    sections = [{"kind": "npz", "path": f"{tmp_path}/x.npz"}, {"kind": "lerobot", "path": "x"}]
    sections[1]["path"] = str(tmp_path / "x")
    hashes = [build_dataset(section).fingerprint["parts"][0]["sha256"] for section in sections]
    assert hashes[0] == hashes[1]


def test_the_environment_and_reference_scores_survive(tmp_path: Path) -> None:
    pytest.importorskip("h5py")
    folder = Path(__file__).parents[2] / "shared/data/minari/D4RL/door/human-v2"
    if not folder.is_dir():
        pytest.skip("needs D4RL/door/human-v2")
    source = open_source(folder)
    copy = open_lerobot(write_recording(source, tmp_path / "x", "lerobot"))
    for key in ("environment", "reference_scores", "obs_dim", "action_dim", "max_rows"):
        assert getattr(copy.info, key) == getattr(source.info, key)
    rows = [load_dataset([DatasetPart(each)]).packed for each in (source, copy)]
    assert rows[0].equal(rows[1])


# What LeRobot expects


def test_metadata_describe_the_data(tmp_path: Path) -> None:
    arrays = random_arrays(4, 6)
    written(arrays, tmp_path / "x", frames_per_second=20)
    meta = tmp_path / "x" / "meta"
    info = json.loads((meta / "info.json").read_text())
    assert {key: info[key] for key in ("codebase_version", "total_frames", "fps", "splits")} == {
        "codebase_version": "v3.0",
        "total_frames": 10,
        "fps": 20,
        "splits": {"train": "0:2"},
    }
    table = pq.read_table(first_file(tmp_path / "x"))
    assert table.schema.names == list(info["features"])
    assert table.schema.field("observation.state").type == pa.list_(pa.float32(), 3)
    assert table["frame_index"].to_pylist() == [*range(4), *range(6)]
    assert table["index"].to_pylist() == list(range(10))
    np.testing.assert_allclose(table["timestamp"], np.asarray(table["frame_index"]) / 20, rtol=1e-6)
    assert np.flatnonzero(table["next.done"]).tolist() == [3, 9]

    episodes = pq.read_table(meta / "episodes" / "chunk-000" / "file-000.parquet")
    assert episodes["length"].to_pylist() == [4, 6]
    assert episodes["dataset_from_index"].to_pylist() == [0, 4]
    second = episodes["stats/next.reward/std"].to_pylist()[1]
    np.testing.assert_allclose(second, [arrays["rewards"][4:].astype(np.float64).std()])
    stats = json.loads((meta / "stats.json").read_text())
    actions = arrays["actions"].astype(np.float64)
    np.testing.assert_allclose(stats["action"]["mean"], actions.mean(0))
    np.testing.assert_allclose(stats["action"]["std"], actions.std(0))
    np.testing.assert_allclose(stats["action"]["max"], actions.max(0))
    assert stats["action"]["count"] == [10]
    pandas = pytest.importorskip("pandas")
    tasks = pandas.read_parquet(meta / "tasks.parquet")
    assert (tasks.index.name, tasks["task_index"].tolist()) == ("task", [0])


# Data that LeRobot wrote


@pytest.mark.skipif(not SAMPLE.is_dir(), reason="needs the repository's fixtures")
@pytest.mark.filterwarnings("ignore:.*ignores observation.environment_state")
def test_data_of_lerobot_is_read() -> None:
    arrays = collect(open_lerobot(SAMPLE))  # the last step of each episode is dropped
    assert arrays["observations"][:, 0].tolist() == [0, 1, 2, 4, 5, 8, 9, 10, 11]
    assert arrays["next_observations"][:, 0].tolist() == [1, 2, 3, 5, 6, 9, 10, 11, 12]
    assert arrays["rewards"].tolist() == [0, 0.5, 1, 2, 2.5, 4, 4.5, 5, 5.5]
    assert np.flatnonzero(arrays["timeouts"]).tolist() == [2, 4, 8]
    assert not arrays["terminals"].any()
    np.testing.assert_allclose(arrays["actions"][3], [0.2, -0.2])

    arrays = collect(open_lerobot(SAMPLE, episode_end="termination"))
    assert len(arrays["rewards"]) == 13
    assert np.flatnonzero(arrays["terminals"]).tolist() == [3, 6, 7, 12]

    arrays = collect(open_lerobot(SAMPLE, episode_end="success"))
    assert arrays["observations"][:, 0].tolist() == [0, 1, 2, 3, 4, 5, 7, 8, 9, 10, 11]
    assert np.flatnonzero(arrays["terminals"]).tolist() == [3, 6]
    assert np.flatnonzero(arrays["timeouts"]).tolist() == [5, 10]


@pytest.mark.skipif(not SAMPLE.is_dir(), reason="needs the repository's fixtures")
def test_observations_are_chosen_and_the_others_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.warns(UserWarning, match=r"ignores observation\.environment_state; to read more"):
        assert open_lerobot(SAMPLE).info.obs_dim == 3
    monkeypatch.setattr(parquet, "CHUNK_ROWS", 2)
    chosen = ["observation.environment_state", "observation.state"]
    arrays = collect(open_lerobot(SAMPLE, observations=chosen))
    assert arrays["observations"][4].tolist() == [1, -1, 5, 1, 1]
    assert arrays["next_observations"][4].tolist() == [1, -2, 6, 2, 1]
    with pytest.raises(DataError, match=r"no vector 'observation\.x'; it has observation\.state"):
        open_lerobot(SAMPLE, observations=["observation.x"])


def test_the_end_of_foreign_episodes_is_a_setting(tmp_path: Path) -> None:
    arrays = recorded([(3, True), (2, True)])
    foreign(written(arrays, tmp_path / "x"))
    section = {"kind": "lerobot", "path": str(tmp_path / "x"), "action_low": -9, "action_high": 9}
    assert len(build_dataset(section)) == 3
    assert len(build_dataset(section | {"episode_end": "termination"})) == 5
    with pytest.raises(DataError, match=r"no feature 'next\.success'"):
        build_dataset(section | {"episode_end": "success"})
    with pytest.raises(ConfigError, match=r"dataset\.episode_end = 'done'"):
        build_dataset(section | {"episode_end": "done"})


def test_truncations_that_a_foreign_dataset_marks_are_used(tmp_path: Path) -> None:
    written(recorded([(3, True), (2, False)]), tmp_path / "x")
    edit_json(
        tmp_path / "x" / "meta" / "info.json", lambda info: info["features"].pop("next.terminated")
    )
    arrays = collect(open_lerobot(tmp_path / "x"))
    assert np.flatnonzero(arrays["terminals"]).tolist() == [2]
    assert np.flatnonzero(arrays["timeouts"]).tolist() == [4]


def test_missing_rewards_are_zeros_with_a_warning(tmp_path: Path) -> None:
    written(recorded(EPISODES), tmp_path / "x")
    info = tmp_path / "x" / "meta" / "info.json"
    edit_json(info, lambda values: values["features"].pop("next.reward"))
    with pytest.warns(UserWarning, match=r"no rewards \(next\.reward\); all rewards are 0"):
        source = open_lerobot(tmp_path / "x")
    assert not collect(source)["rewards"].any()


def test_images_are_ignored_with_a_warning_or_refused(tmp_path: Path) -> None:
    written(recorded(EPISODES), tmp_path / "x")
    info = tmp_path / "x" / "meta" / "info.json"
    camera = {"dtype": "video", "shape": [96, 96, 3], "names": None}
    edit_json(info, lambda values: values["features"].update({"observation.images.top": camera}))
    with pytest.warns(UserWarning, match=r"ignores observation\.images\.top \(images are not"):
        open_lerobot(tmp_path / "x")
    with pytest.raises(DataError, match="holds images, which are not supported"):
        open_lerobot(tmp_path / "x", observations=["observation.images.top"])
    edit_json(info, lambda values: values["features"].pop("observation.state"))
    with pytest.raises(DataError, match="only images, which are not supported"):
        open_lerobot(tmp_path / "x")


def test_a_column_whose_name_continues_another_name_is_not_read(tmp_path: Path) -> None:
    arrays = recorded(EPISODES)
    written(arrays, tmp_path / "x")
    number = len(arrays["rewards"])
    edit_table(
        first_file(tmp_path / "x"),
        lambda table: table.append_column("observation.state.camera", [[b"x" * 1000] * number]),
    )
    found = collect(open_lerobot(tmp_path / "x"))
    np.testing.assert_array_equal(found["observations"], arrays["observations"])


def test_a_folder_is_recognized(tmp_path: Path) -> None:
    folder = written(bounded(recorded(EPISODES)), tmp_path / "x")
    assert dataset_section(str(folder)) == {"kind": "lerobot", "path": str(folder)}
    assert open_source(folder).info.kind == "lerobot"
    text = f"{{kind: lerobot, path: {folder}, episode_end: truncation}}"
    assert not collect(open_source(text))["terminals"].any()
    with pytest.raises(UserError, match="reward_scale: is an option for training"):
        open_source({"kind": "lerobot", "path": str(folder), "reward_scale": 2.0})
    with pytest.raises(DataError, match="is not a LeRobot dataset"):
        open_lerobot(tmp_path)


def test_pyarrow_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = written(recorded(EPISODES), tmp_path / "x")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    message = r"needs the package pyarrow; install it with `pip install 'rl-training\[lerobot\]'`"
    with pytest.raises(DataError, match=message):
        open_lerobot(folder)
    with pytest.raises(DataError, match=message):
        written(recorded(EPISODES), tmp_path / "y")


# Files from strangers


def set_info(**values: Any) -> Edit:
    return lambda folder: edit_json(folder / "meta" / "info.json", lambda info: info.update(values))


def set_feature(name: str, **values: Any) -> Edit:
    return lambda folder: edit_json(
        folder / "meta" / "info.json", lambda info: info["features"][name].update(values)
    )


def set_column(name: str, values: list[Any], kind: Any = None) -> Edit:
    return lambda folder: edit_table(
        first_file(folder), lambda table: replaced(table, name, pa.array(values, kind))
    )


def set_episodes(name: str, values: list[Any]) -> Edit:
    return lambda folder: edit_table(
        folder / "meta" / "episodes" / "chunk-000" / "file-000.parquet",
        lambda table: replaced(table, name, pa.array(values)),
    )


def link(path: str) -> Edit:
    def replace_by_link(folder: Path) -> None:
        target = folder.parent / "elsewhere"
        shutil.move(folder / path, target)
        (folder / path).symlink_to(target)

    return replace_by_link


def remove(path: str) -> Edit:
    return lambda folder: (folder / path).unlink()


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (set_info(codebase_version="v2.1"), "has version 'v2.1'.*LeRobot itself can convert"),
        (set_info(total_frames=6), "do not add up to the 6 frames"),
        (set_info(total_frames=10**30), "total_frames in info.json is 1000"),
        (set_info(total_frames="5"), "it must be a count"),
        (set_info(total_episodes=3), "lists 2 episodes, but info.json declares 3"),
        (set_info(fps=0), "fps in info.json is 0"),
        (set_info(features=[]), "does not describe any features"),
        (set_info(data_path=7), "data_path in info.json is 7"),
        (set_feature("action", shape=[10**9]), "1,000,000,000 components"),
        (set_feature("action", shape=[2, 2]), "no feature 'action' that is a vector"),
        (set_feature("action", dtype="string"), "no feature 'action' that is a vector"),
        (set_feature("action", shape=[3]), "action has type float; it must be a list of 3"),
        (set_feature("next.done", shape=[4]), "next.done must be one number"),
        (set_column("next.reward", [1.0, None, 1, 1, 1]), "next.reward has missing values"),
        (set_column("next.reward", ["a"] * 5), "next.reward holds BYTE_ARRAY values"),
        (set_column("next.done", [0, 0, 1, 0, 7]), r"next.done\[4\] is 7; it must be 0 or 1"),
        (set_column("action", [[1.0], [], [1.0], [1.0], [1.0]]), "values of different lengths"),
        (set_column("action", [[[1.0]]] * 5), "action has type|it must be numeric"),
        (set_column("observation.state", [float("nan")] * 5), r"observations\[0, 0\] is nan"),
        (set_column("episode_index", [0, 0, 1, 1, 1]), r"episode_index\[2\] is 1.*damaged"),
        (set_column("frame_index", [0, 1, 2, 1, 0]), r"frame_index\[3\] is 1.*damaged"),
        (set_episodes("dataset_to_index", [3, 9]), "do not add up"),
        (set_episodes("dataset_from_index", [-3, 3]), "must be a number from 0"),
        (set_episodes("episode_index", [1, 1]), "do not add up"),
        (set_episodes("data/file_index", [0, 8]), "file-008.parquet is missing"),
        (remove("data/chunk-000/file-000.parquet"), "file-000.parquet is missing"),
        (remove("meta/episodes/chunk-000/file-000.parquet"), "meta/episodes has no files"),
        (link("meta"), "meta is a link, and links are not followed"),
        (link("meta/info.json"), "info.json is a link"),
        (link("meta/episodes/chunk-000"), "chunk-000 is a link"),
        (link("data"), "data is a link"),
        (link("data/chunk-000/file-000.parquet"), "file-000.parquet is a link"),
        (link("meta/rl_training.json"), "rl_training.json is a link"),
    ],
)
def test_a_wrong_dataset_is_refused_with_a_reason(edit: Edit, message: str, tmp_path: Path) -> None:
    folder = written(recorded([(3, True), (2, False)]), tmp_path / "x")
    edit(folder)
    with pytest.raises(DataError, match=message):
        collect(open_lerobot(folder))


@pytest.mark.parametrize(
    "template",
    [
        "/etc/passwd",
        "../x/chunk-{chunk_index:03d}.parquet",
        "data/../../{file_index}.parquet",
        "data/{chunk_index.__class__}/{file_index}",
        "data/{chunk_index:999999999d}.parquet",
        "data/{episode_index}.parquet",
        "data/{0}/{file_index}",
        "data\\..\\x",
        "C:/x",
        "data/\x00x",
        "",
        "/",
    ],
)
def test_a_path_outside_the_dataset_is_refused(template: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="must be a path inside the dataset"):
        data_file(template, 0, 0, "x")
    folder = written(recorded(EPISODES), tmp_path / "x")
    set_info(data_path=template)(folder)
    with pytest.raises(DataError, match="must be a path inside the dataset"):
        open_lerobot(folder)


def test_placeholders_of_a_path_are_replaced() -> None:
    usual = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
    assert "/".join(data_file(usual, 2, 1234, "x")) == "data/chunk-002/file-1234.parquet"
    assert data_file("{chunk_index}/{file_index:6d}", 1, 2, "x") == ("1", "000002")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("file", ["info.json", "rl_training.json"])
def test_no_value_in_the_metadata_raises_another_error(file: str, tmp_path: Path) -> None:
    folder = written(bounded(recorded([(3, True), (2, False)])), tmp_path / "x")
    path = folder / "meta" / file
    values = json.loads(path.read_text())
    for forgery in forgeries(values)[::7]:  # every value at some places: all would take long
        path.write_bytes(forgery.of(values))
        try:
            collect(open_lerobot(folder))
        except DataError as error:
            message = str(error)
        else:
            message = ""
        assert len(message) < 2_000, forgery


def test_a_damaged_file_is_refused_or_read_completely(tmp_path: Path) -> None:
    arrays = random_arrays(40, 60)
    folder = written(arrays, tmp_path / "x")
    path, generator = first_file(folder), np.random.default_rng(0)
    content = path.read_bytes()
    for attempt in range(60):
        damaged = bytearray(content)
        if attempt % 3:
            first = len(content) - 3_000 if attempt % 3 == 1 else 0  # in the footer, or anywhere
            position = int(generator.integers(first, len(content)))
            damaged[position] ^= 1 << int(generator.integers(8))
        else:
            damaged = damaged[: int(generator.integers(len(content)))]
        path.write_bytes(damaged)
        try:
            found = collect(open_lerobot(folder))
        except DataError:
            continue
        for key in ("observations", "rewards", "next_observations"):
            np.testing.assert_array_equal(found[key], arrays[key])


def test_the_rows_are_those_that_a_file_declares(tmp_path: Path) -> None:
    """A footer has the number of rows twice: for the file, and for its row groups."""
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"a": pa.array(range(30))}), path)
    content, forged = path.read_bytes(), 0
    for position in [at for at, byte in enumerate(content) if byte == 2 * 30]:
        path.write_bytes(content[:position] + bytes([2 * 20]) + content[position + 1 :])
        try:
            columns = ParquetColumns(lambda: path.open("rb"), "x")
            columns.check({"a": 1})
        except DataError:
            continue
        if columns.rows == 20:
            forged += 1
            with pytest.raises(DataError, match="does not have the 20 rows it declares"):
                list(columns.batches({"a": 1}))
    assert forged == 1


@pytest.mark.parametrize("name", ["\x1b[31mred\nlines", "\ud800"])
def test_the_name_of_an_environment_is_a_strangers_text(name: str, tmp_path: Path) -> None:
    folder = written(random_arrays(3, 2), tmp_path / "x")
    own = folder / "meta" / "rl_training.json"
    own.write_text(json.dumps({"environment": {"id": name, "kwargs": {}}}))
    if name.isascii():
        lines = list(summary_lines(describe_dataset(folder)))
        assert "environment    [31mred lines" in lines
    else:
        with pytest.raises(DataError, match=r"rl_training\.json is damaged"):
            open_lerobot(folder)


def test_a_file_name_that_is_no_text_can_be_the_source(tmp_path: Path) -> None:
    source = tmp_path / os.fsdecode(b"a\xff.npz")
    np.savez(source, **random_arrays(3, 2))  # type: ignore[arg-type]
    convert_dataset(source, tmp_path / "x", data_format="lerobot")
    assert open_lerobot(tmp_path / "x").info.max_rows == 5


def test_a_small_file_cannot_claim_to_be_huge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = 100_000
    arrays = {
        "observations": np.zeros((rows, 3), np.float32),
        "actions": np.zeros((rows, 1), np.float32),
        "rewards": np.zeros(rows, np.float32),
        "next_observations": np.zeros((rows, 3), np.float32),
        "terminals": np.arange(rows) == rows - 1,
        "timeouts": np.zeros(rows, np.bool_),
    }
    folder = written(arrays, tmp_path / "x")
    assert open_lerobot(folder).info.max_rows == rows  # constant data is not refused as such
    monkeypatch.setattr(parquet, "SMALL_BYTES", 2**16)
    monkeypatch.setattr(parquet, "MAX_EXPANSION", 5)
    with pytest.raises(DataError, match=r"claim to hold [\d,]+ bytes of numbers"):
        open_lerobot(folder)
    monkeypatch.setattr(parquet, "MAX_COLUMN_BYTES", 100)
    with pytest.raises(DataError, match="has a row group of"):
        open_lerobot(folder)


def test_a_row_cannot_hold_an_endless_list(tmp_path: Path) -> None:
    folder = written(random_arrays(3, 2), tmp_path / "x")
    rows = [[1.0, 2.0, 3.0]] * 4 + [[0.0] * 1_000_000]
    set_column("observation.state", rows, pa.list_(pa.float32()))(folder)
    assert first_file(folder).stat().st_size < 20_000
    with pytest.raises(DataError, match=r"observation\.state has 1000012 values in 5 rows"):
        open_lerobot(folder)


def test_reading_and_writing_need_little_memory(tmp_path: Path) -> None:
    rows = 200_000
    arrays = random_arrays(*[1000] * (rows // 1000))
    pool, usual = pa.proxy_memory_pool(pa.default_memory_pool()), pa.default_memory_pool()
    pa.set_memory_pool(pool)
    try:
        folder = written(arrays, tmp_path / "x")
        assert sum(len(steps.reward) for steps in open_lerobot(folder).chunks()) == rows
    finally:
        pa.set_memory_pool(usual)
    assert pool.max_memory() < 8 * 2**20  # the data has 8 MB in memory, and more in a file


class Trap:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_a_pickled_type_is_not_loaded(tmp_path: Path) -> None:
    folder = written(recorded(EPISODES), tmp_path / "x")
    bait = {
        "ARROW:extension:name": "arrow.py_extension_type",
        "ARROW:extension:metadata": pickle.dumps(Trap(tmp_path / "trapped")),
    }

    def add_type(table: Any) -> Any:
        fields = [field.with_metadata(bait) for field in table.schema]
        return table.cast(pa.schema(fields))

    edit_table(first_file(folder), add_type)
    assert len(collect(open_lerobot(folder))["rewards"]) == 14
    assert not (tmp_path / "trapped").exists()
