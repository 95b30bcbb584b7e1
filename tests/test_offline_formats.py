"""File formats of recorded data: reading, writing, and errors."""

from __future__ import annotations

import contextlib
import json
import os
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from test_offline_data import GAMMA, SPACES, recorded, rows

from rl_training.data import DatasetPart, OfflineDataset, array_recording, load_dataset
from rl_training.data.formats.hdf5 import open_hdf5
from rl_training.data.formats.minari import local_minari_ids, open_minari
from rl_training.data.formats.npz import open_npz
from rl_training.data.formats.recording import Recording
from rl_training.data.formats.writing import check_destination, write_recording
from rl_training.errors import DataError

EPISODES = [(5, True), (3, False), (1, True), (4, False)]
GENUINE = "D4RL/door/human-v2"

Arrays = dict[str, np.ndarray]


def write_npz(arrays: Arrays, folder: Path) -> Recording:
    np.savez(folder / "data.npz", **arrays)
    return open_npz(folder / "data.npz")


def write_compressed_npz(arrays: Arrays, folder: Path) -> Recording:
    np.savez_compressed(folder / "data.npz", **arrays)
    return open_npz(folder / "data.npz")


def write_hdf5(arrays: Arrays, folder: Path) -> Recording:
    with h5py.File(folder / "data.hdf5", "w") as file:
        for key, values in arrays.items():
            file[key] = values
    return open_hdf5(folder / "data.hdf5")


def write_compressed_hdf5(arrays: Arrays, folder: Path) -> Recording:
    with h5py.File(folder / "data.hdf5", "w") as file:
        for key, values in arrays.items():
            chunks = (2, *values.shape[1:])
            file.create_dataset(key, data=values, compression="gzip", chunks=chunks)
    return open_hdf5(folder / "data.hdf5")


def in_memory(arrays: Arrays, folder: Path) -> Recording:
    return array_recording(arrays)


FLAT = [in_memory, write_npz, write_compressed_npz, write_hdf5, write_compressed_hdf5]
Writer = Callable[[Arrays, Path], Recording]


def load(recording: Recording, **options: Any) -> OfflineDataset:
    return load_dataset([DatasetPart(recording)], SPACES, **{"gamma": GAMMA, **options})


@pytest.fixture
def minari_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty folder for Minari datasets."""
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    return tmp_path / "minari"


def write_minari(arrays: Arrays, folder: Path, **options: Any) -> Path:
    return write_recording(
        array_recording(arrays), folder, "minari", dataset_id="my/set/test-v0", **options
    )


# Reading


@pytest.mark.parametrize("left_out", ["", "timeouts", "next_observations"])
@pytest.mark.parametrize("write", FLAT)
def test_every_flat_format_gives_the_same_rows_for_any_chunk_size(
    write: Writer, left_out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays = {key: values for key, values in recorded(EPISODES).items() if key != left_out}
    expected = load(array_recording(arrays))
    arrays["infos/qpos"] = np.zeros((3, 3))  # extra arrays are ignored
    for module in ("columns", "hdf5"):
        monkeypatch.setattr(f"rl_training.data.formats.{module}.CHUNK_ROWS", 3)
    dataset = load(write(arrays, tmp_path))
    assert dataset.packed.equal(expected.packed)
    assert dataset.fingerprint["sha256"] == expected.fingerprint["sha256"]


@pytest.mark.parametrize("write", FLAT)
def test_truncated_episodes_bootstrap_in_every_flat_format(write: Writer, tmp_path: Path) -> None:
    batch = rows(load(write(recorded([(2, False), (2, True)]), tmp_path)))
    assert batch.discount.tolist() == [GAMMA, GAMMA, GAMMA, 0.0]
    assert batch.next_obs[1].item() == 2.0


@pytest.mark.usefixtures("minari_folder")
def trajectories(*lengths: int, reached: int) -> Arrays:
    """Return OGBench arrays: `terminals` ends a trajectory, `masks` is 0 for terminal steps."""
    number = sum(lengths)
    states = np.arange(number + len(lengths), dtype=np.float32)[:, None]
    last = np.cumsum(np.add(lengths, 1)) - 1  # each trajectory's final observation
    steps = np.delete(np.arange(len(states)), last)
    return {
        "observations": states[steps],
        "next_observations": states[steps + 1],
        "actions": np.zeros((number, 1), np.float32),
        "rewards": np.arange(number, dtype=np.float32),
        "terminals": np.isin(steps + 1, last).astype(np.float32),
        "masks": (np.arange(number) != reached).astype(np.float32),
    }


@pytest.mark.parametrize("write", FLAT)
def test_masks_distinguish_terminations_from_ends_of_trajectories(
    write: Writer, tmp_path: Path
) -> None:
    dataset = load(write(trajectories(3, 4, 3, reached=6), tmp_path))
    discounts = np.where(np.arange(10) == 6, 0.0, GAMMA)
    np.testing.assert_array_equal(rows(dataset).discount, discounts.astype(np.float32))
    assert dataset.episode_lengths.tolist() == [3, 4, 3]
    # A termination in the middle of a trajectory ends an episode.
    earlier = load(array_recording(trajectories(3, 4, 3, reached=4)))
    assert earlier.episode_lengths.tolist() == [3, 2, 2, 3]


@pytest.mark.parametrize("write", FLAT)
@pytest.mark.parametrize("reached", [6, 10])
def test_the_compact_layout_of_ogbench_gives_the_same_rows(
    reached: int, write: Writer, tmp_path: Path
) -> None:
    regular = trajectories(3, 4, 3, reached=reached)
    expected = load(array_recording(regular))
    # One row for the final observation of each trajectory. Its other arrays are unused.
    after = np.flatnonzero(regular["terminals"]) + 1
    compact = {key: np.insert(values, after, 1, axis=0) for key, values in regular.items()}
    final = after + np.arange(3)
    compact["observations"] = np.arange(13, dtype=np.float32)[:, None]
    compact["masks"][final] = 0
    compact["valids"] = (~np.isin(np.arange(13), final)).astype(np.float32)
    del compact["next_observations"]
    dataset = load(write(compact, tmp_path))
    assert dataset.packed.equal(expected.packed)
    assert dataset.episode_ends.tolist() == expected.episode_ends.tolist()


@pytest.mark.parametrize("write", FLAT)
def test_a_file_of_ogbench_marks_only_final_observations(write: Writer, tmp_path: Path) -> None:
    """The last step of a trajectory has no known next observation and is dropped."""
    regular = trajectories(3, 4, 3, reached=-1)
    after = np.flatnonzero(regular["terminals"]) + 1
    stored = {key: np.insert(values, after, 1, axis=0) for key, values in regular.items()}
    stored["observations"] = np.arange(13, dtype=np.float32)[:, None]
    stored["terminals"] = np.isin(np.arange(13), after + np.arange(3))
    del stored["next_observations"]
    dataset = load(write(stored, tmp_path))
    assert dataset.packed.equal(load(array_recording(regular)).packed)
    assert dataset.episode_lengths.tolist() == [3, 4, 3]


def test_invalid_steps_are_dropped_if_next_observations_are_recorded() -> None:
    arrays = trajectories(3, 4, reached=-1)
    del arrays["masks"]
    arrays["terminals"][:] = 0  # so that only jumps mark episode ends
    arrays["valids"] = np.arange(7) != 5
    dataset = load(array_recording(arrays))
    assert rows(dataset).reward.tolist() == [0, 1, 2, 3, 4, 6]
    assert dataset.episode_lengths.tolist() == [3, 2, 1]


def test_truncated_episodes_bootstrap_in_minari(minari_folder: Path) -> None:
    write_minari(recorded(EPISODES), minari_folder)
    dataset = load(open_minari("my/set/test-v0"))
    expected = rows(load(array_recording(recorded(EPISODES))))
    batch = rows(dataset)
    assert batch.discount.equal(expected.discount)
    assert batch.next_obs.equal(expected.next_obs)
    assert batch.action.equal(expected.action)
    assert dataset.episode_lengths.tolist() == [length for length, _ in EPISODES]


@pytest.mark.parametrize("write", [write_npz, write_hdf5])
@pytest.mark.parametrize("dtype", ["float16", "float64", ">f4", "int8"])
def test_all_numeric_types_are_read(write: Writer, dtype: str, tmp_path: Path) -> None:
    arrays = recorded(EPISODES, terminals=recorded(EPISODES)["terminals"].astype(np.float64))
    arrays["observations"] = arrays["observations"].astype(dtype)
    arrays["next_observations"] = arrays["next_observations"].astype(dtype)
    arrays["rewards"] = arrays["rewards"][:, None].astype(dtype)
    expected = load(array_recording(recorded(EPISODES)))
    assert load(write(arrays, tmp_path)).packed.equal(expected.packed)


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
@pytest.mark.parametrize("order", ["C", "F"])
def test_npy_files_of_every_version_and_memory_order_are_read(
    version: tuple[int, int], order: Any, tmp_path: Path
) -> None:
    arrays = recorded(EPISODES) | {"action_low": np.array([-2.0]), "action_high": np.array([2.0])}
    wide = np.random.default_rng(0).normal(size=(13, 2)).astype(np.float32)
    arrays["observations"] = np.asarray(wide, order=order)
    arrays["next_observations"] = np.asarray(wide[::-1], order=order)
    with zipfile.ZipFile(tmp_path / "data.npz", "w") as archive:
        for key, values in arrays.items():
            with archive.open(f"{key}.npy", "w") as file:
                np.lib.format.write_array(file, values, version)
    dataset = load_dataset([DatasetPart(open_npz(tmp_path / "data.npz"))])
    assert rows(dataset).obs.equal(torch.from_numpy(wide))
    assert rows(dataset).next_obs.equal(torch.from_numpy(wide[::-1].copy()))
    assert dataset.spaces.action_high == [2.0]


def test_an_hdf5_file_is_read_in_complete_blocks(tmp_path: Path) -> None:
    """This also holds if HDF5 chunks are narrower than a row."""
    calls = Path("/proc/self/io")
    if not calls.exists():
        pytest.skip("the system does not count reads")
    number = 20_000
    arrays = recorded([(number, True)], observations=np.ones((number, 4), np.float32))
    del arrays["next_observations"]
    with h5py.File(tmp_path / "data.hdf5", "w") as file:
        for key, values in arrays.items():
            file.create_dataset(key, data=values, chunks=(5000, 1)[: values.ndim])

    def reads() -> int:
        return int(calls.read_text().split("syscr:")[1].split()[0])

    recording, before = open_hdf5(tmp_path / "data.hdf5"), reads()
    assert sum(len(steps.obs) for steps in recording.chunks()) == number
    assert reads() - before < number / 10


# Writing


@pytest.mark.parametrize("data_format", ["npz", "hdf5", "minari"])
def test_written_data_are_read_as_the_same_rows(
    data_format: Any, tmp_path: Path, minari_folder: Path
) -> None:
    arrays = recorded(EPISODES) | {"action_low": np.array([-2.0]), "action_high": np.array([2.0])}
    recording = array_recording(arrays)
    openers = {"npz": open_npz, "hdf5": open_hdf5, "minari": lambda _: open_minari("my/b-v0")}
    destination = minari_folder if data_format == "minari" else tmp_path / f"x.{data_format}"
    path = write_recording(recording, destination, data_format, dataset_id="my/b-v0")
    again = openers[data_format](path)
    assert load_dataset([DatasetPart(again)]).packed.equal(
        load_dataset([DatasetPart(recording)]).packed
    )
    assert again.info.action_low == [-2.0]
    with pytest.raises(DataError, match="already exists"):
        write_recording(recording, destination, data_format, dataset_id="my/b-v0")
    leftovers = [path for path in tmp_path.rglob("*") if ".tmp-" in path.name]
    assert leftovers == []


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("data_format", ["npz", "hdf5"])
def test_the_number_of_discrete_actions_is_kept(
    data_format: Any, known: bool, tmp_path: Path, minari_folder: Path
) -> None:
    actions = np.arange(13) % 2 - 1  # the largest action of three was never taken
    arrays = recorded(EPISODES) | {"actions": actions}
    if known:
        arrays["discrete_actions"] = np.array([-1, 3])
    path = write_recording(array_recording(arrays), tmp_path / f"x.{data_format}", data_format)
    written = open_npz(path) if data_format == "npz" else open_hdf5(path)
    assert (written.info.action_start, written.info.action_dim) == ((-1, 3) if known else (None, 0))
    write_recording(written, minari_folder, "minari", dataset_id="my/b-v0")
    info = open_minari("my/b-v0").info
    assert (info.action_start, info.action_dim) == (-1, 3 if known else 2)


@pytest.mark.parametrize("wrong", [[0, 0], [0.0, 3.0], [3], 3])
def test_impossible_discrete_actions_are_refused(wrong: Any) -> None:
    arrays = recorded(EPISODES) | {"actions": np.arange(13) % 2}
    with pytest.raises(DataError, match="discrete_actions must be two integers"):
        array_recording(arrays | {"discrete_actions": np.array(wrong)})


def test_a_written_dataset_opens_in_minari(minari_folder: Path) -> None:
    minari = pytest.importorskip("minari")
    arrays = recorded(EPISODES) | {"action_low": np.array([-2.0]), "action_high": np.array([2.0])}
    write_minari(arrays, minari_folder)
    assert local_minari_ids() == ["my/set/test-v0"]
    assert list(minari.list_local_datasets()) == ["my/set/test-v0"]
    dataset = minari.load_dataset("my/set/test-v0")
    assert (dataset.total_episodes, dataset.total_steps) == (4, 13)
    assert dataset.action_space.high == [2.0]
    for episode, (length, terminated) in zip(dataset.iterate_episodes(), EPISODES, strict=True):
        assert episode.observations.shape == (length + 1, 1)
        assert episode.terminations.tolist() == [False] * (length - 1) + [terminated]
        assert episode.truncations.tolist() == [False] * (length - 1) + [not terminated]


@pytest.mark.parametrize("data_format", ["npz", "hdf5", "minari"])
def test_a_failed_write_leaves_no_files(
    data_format: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(np, "savez", fail)
    monkeypatch.setattr(h5py.Group, "create_dataset", fail)
    monkeypatch.setattr(json, "dumps", fail)
    root = tmp_path / "out"
    destination = root if data_format == "minari" else root / f"x.{data_format}"
    with pytest.raises(DataError, match="disk full"):
        write_recording(
            array_recording(recorded(EPISODES)), destination, data_format, dataset_id="my/b-v0"
        )
    assert [path for path in root.rglob("*") if path.is_file()] == []


# Errors


def test_an_archive_is_never_unpickled(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "sprung"),)

    arrays = recorded(EPISODES) | {"rewards": np.array([Trap()] * 13, dtype=object)}
    np.savez(tmp_path / "trap.npz", **arrays)
    with pytest.raises(DataError, match="rewards has type Python objects; it must be numeric"):
        open_npz(tmp_path / "trap.npz")
    assert not (tmp_path / "sprung").exists()


def rewritten(
    path: Path,
    entry: str,
    change: Callable[[bytes], bytes],
    compression: int = zipfile.ZIP_STORED,
) -> Path:
    """Return a copy of the archive with changed bytes in one entry."""
    changed = path.with_name("changed.npz")
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(changed, "w", compression) as target:
        for name in source.namelist():
            data = source.read(name)
            target.writestr(name, change(data) if name == entry else data)
    return changed


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data.replace(b"(13,)", b"(10**9,)"), "header that cannot be read"),
        (lambda data: data.replace(b"(13,), }", b"(99999999,), }"), "is damaged"),
        (lambda data: data.replace(b"'<f4'", b"'|O' "), "Python objects"),
        (lambda data: data.replace(b"'<f4'", b"'<c8'"), "must be numeric"),
        (lambda data: data[:-4], "is damaged"),
        (lambda data: b"\x80\x04cos\nsystem\n.", "is not a NumPy array"),
        (lambda data: data[:8] + b"\xff\xff" + data[10:], "expected 65535 bytes"),
        (lambda data: b"\x93NUMPY", "cannot be read"),
        (lambda data: data[:60], "header that cannot be read"),
        (lambda data: data[:6] + b"\x04" + data[7:], "unknown version"),
        (lambda data: data.replace(b"(13,), }", b"(-13,-1)}"), "is damaged"),
        (lambda data: data.replace(b"'<f4'", b"'f,,'"), "header that cannot be read"),
    ],
)
def test_a_hostile_or_damaged_array_is_refused(
    change: Callable[[bytes], bytes], message: str, tmp_path: Path
) -> None:
    np.savez(tmp_path / "data.npz", **recorded(EPISODES))
    path = rewritten(tmp_path / "data.npz", "rewards.npy", change)
    with pytest.raises(DataError, match=message):
        load(open_npz(path))


@pytest.mark.parametrize("fields", [[("x", "<f4")], [("x", "O")]])
def test_an_array_of_records_is_refused(fields: Any, tmp_path: Path) -> None:
    np.savez(tmp_path / "data.npz", **recorded(EPISODES) | {"rewards": np.zeros(13, fields)})
    with pytest.raises(DataError, match=r"rewards has type .*; it must be numeric"):
        open_npz(tmp_path / "data.npz")


def test_an_endless_header_needs_little_memory(tmp_path: Path) -> None:
    np.savez(tmp_path / "data.npz", **recorded(EPISODES))
    number = 2**26
    header = b"\x93NUMPY\x02\x00" + number.to_bytes(4, "little") + b" " * number
    path = rewritten(tmp_path / "data.npz", "rewards.npy", lambda _: header, zipfile.ZIP_DEFLATED)
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match="header that cannot be read"):
            open_npz(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < number / 16


@pytest.mark.parametrize("order", ["C", "F"])
def test_an_array_whose_bytes_changed_is_refused(order: Any, tmp_path: Path) -> None:
    arrays = recorded(EPISODES)
    arrays["observations"] = np.asarray(np.arange(1000, 1026).reshape(13, 2), order=order)
    del arrays["next_observations"]
    np.savez(tmp_path / "data.npz", **arrays)
    stored = arrays["observations"].tobytes(order)
    data = (tmp_path / "data.npz").read_bytes()
    assert data.count(stored) == 1
    (tmp_path / "data.npz").write_bytes(data.replace(stored, stored[:-1] + b"\x01"))
    with pytest.raises(DataError, match="Bad CRC-32"):
        load_dataset([DatasetPart(open_npz(tmp_path / "data.npz"))])


@pytest.mark.parametrize("opener", [open_npz, open_hdf5])
def test_a_file_of_another_format_is_refused(opener: Callable[[Path], Any], tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        opener(tmp_path / "missing")
    (tmp_path / "text").write_text("observations")
    with pytest.raises(DataError, match="cannot be read as"):
        opener(tmp_path / "text")
    with pytest.raises(DataError, match="no such file"):
        opener(tmp_path)


@pytest.mark.parametrize("kind", ["npz", "hdf5"])
def test_a_truncated_or_corrupted_file_is_refused_or_read_completely(
    kind: str, tmp_path: Path
) -> None:
    arrays = recorded([(50, True)] * 4)
    write = write_npz if kind == "npz" else write_hdf5
    opener = open_npz if kind == "npz" else open_hdf5
    write(arrays, tmp_path)
    path = tmp_path / f"data.{kind}"
    data = path.read_bytes()
    generator = np.random.default_rng(0)
    for trial in range(60):
        damaged = bytearray(data)
        if trial % 2:
            del damaged[int(generator.integers(len(data))) :]
        else:
            damaged[int(generator.integers(len(data)))] ^= 1 << int(generator.integers(8))
        target = tmp_path / f"damaged-{trial}.{kind}"
        target.write_bytes(damaged)
        with contextlib.suppress(DataError):
            assert len(load(opener(target))) == 200


def test_an_hdf5_file_cannot_refer_to_another(tmp_path: Path) -> None:
    write_hdf5(recorded(EPISODES), tmp_path)
    path = tmp_path / "link.hdf5"
    with h5py.File(path, "w") as file:
        for key, values in recorded(EPISODES).items():
            if key == "rewards":
                file[key] = h5py.ExternalLink(tmp_path / "data.hdf5", "rewards")
            else:
                file[key] = values
    with pytest.raises(DataError, match="rewards is a link"):
        open_hdf5(path)
    (tmp_path / "raw").write_bytes(bytes(13 * 4))
    with h5py.File(path, "w") as file:
        for key, values in recorded(EPISODES, rewards=None).items():
            file[key] = values
        external = [(str(tmp_path / "raw"), 0, 13 * 4)]
        file.create_dataset("rewards", (13,), "f4", external=external)
    with pytest.raises(DataError, match="rewards refers to other files"):
        open_hdf5(path)
    with h5py.File(path, "w") as file:
        for key, values in recorded(EPISODES, rewards=None).items():
            file[key] = values
        file["rewards"] = ["text"] * 13
    with pytest.raises(DataError, match="rewards has type object; it must be numeric"):
        open_hdf5(path)


@pytest.mark.parametrize(
    "bad_id", ["../x-v0", "/tmp/x-v0", "a/../../x-v0", "a.b-v0", "", "x", "a/"]
)
def test_an_id_cannot_refer_to_a_path_outside_the_data_folder(
    bad_id: str, minari_folder: Path
) -> None:
    write_minari(recorded(EPISODES), minari_folder.parent)
    with pytest.raises(DataError, match="must be a Minari id"):
        open_minari(bad_id)
    with pytest.raises(DataError, match="must be a Minari id"):
        write_recording(
            array_recording(recorded(EPISODES)), minari_folder, "minari", dataset_id=bad_id
        )


def test_the_error_for_a_dataset_that_cannot_be_downloaded_suggests_a_name(
    minari_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    minari = pytest.importorskip("minari")
    monkeypatch.setattr("rl_training.data.formats.minari._unreachable", lambda: None)
    write_minari(recorded(EPISODES), minari_folder)
    requested = []

    def unreachable(dataset_id: str) -> None:
        requested.append(dataset_id)
        raise ConnectionError("no network")

    monkeypatch.setattr(minari, "download_dataset", unreachable)
    with pytest.raises(DataError) as caught:
        open_minari("my/set/test-v1")
    assert requested == ["my/set/test-v1"]
    for part in ("no network", str(minari_folder), "did you mean 'my/set/test-v0'?"):
        assert part in str(caught.value)


@pytest.mark.parametrize("typo", ["my/set/tset-v0", "my/st/test-v0", "my/set/tests-v0"])
def test_a_misspelled_minari_id_is_answered_without_the_network(
    minari_folder: Path, monkeypatch: pytest.MonkeyPatch, typo: str
) -> None:
    write_minari(recorded(EPISODES), minari_folder)

    def connect(*_: Any) -> None:
        raise AssertionError("the network was used")

    monkeypatch.setattr("socket.create_connection", connect)
    with pytest.raises(DataError, match=r"did you mean 'my/set/test-v0'\?.*minari download my/"):
        open_minari(typo)


def test_a_server_that_cannot_be_reached_is_not_tried_again(
    minari_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    minari = pytest.importorskip("minari")
    attempts = []

    def connect(address: tuple[str, int], timeout: float) -> None:
        attempts.append(address)
        raise OSError(-2, "Name or service not known")

    monkeypatch.setattr("socket.create_connection", connect)
    monkeypatch.setattr("urllib.request.getproxies", dict)
    monkeypatch.delenv("HF_ENDPOINT", raising=False)
    monkeypatch.delenv("MINARI_REMOTE", raising=False)
    monkeypatch.setattr(minari, "download_dataset", lambda _: pytest.fail("tried to download"))
    with pytest.raises(DataError, match=r"huggingface\.co: Name or service not known"):
        open_minari("other/set-v0")
    assert attempts == [("huggingface.co", 443)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda about: about.pop("action_space"), "has no 'action_space'"),
        (lambda about: about.update(total_steps=5), "more than the 5 steps"),
        (lambda about: about.update(total_steps=0), "contains no steps"),
        (lambda about: about.update(total_steps="many"), "total_steps in its metadata is 'many'"),
        (lambda about: about.update(data_format="arrow"), "stored as 'arrow'"),
        (
            lambda about: about.update(
                observation_space=json.dumps({"type": "Dict", "subspaces": {}})
            ),
            "observation_space in its metadata cannot be read .a Dict without parts",
        ),
        (
            lambda about: about.update(action_space="{"),
            "action_space in its metadata cannot be read",
        ),
    ],
)
def test_metadata_that_does_not_fit_is_refused(
    change: Callable[[dict[str, Any]], Any], message: str, minari_folder: Path
) -> None:
    path = write_minari(recorded(EPISODES), minari_folder) / "data" / "metadata.json"
    about = json.loads(path.read_text())
    change(about)
    path.write_text(json.dumps(about))
    with pytest.raises(DataError, match=message):
        load(open_minari("my/set/test-v0"))


def test_a_dataset_without_metadata_or_with_a_bad_episode_is_refused(minari_folder: Path) -> None:
    data = write_minari(recorded(EPISODES), minari_folder) / "data"
    with h5py.File(data / "main_data.hdf5", "a") as file:
        file["episode_2/observations"][0] = np.nan
    with pytest.raises(DataError, match=r"my/set/test-v0: episode_2/observations\[0, 0\] is nan"):
        load(open_minari("my/set/test-v0"))
    with h5py.File(data / "main_data.hdf5", "a") as file:
        del file["episode_2/observations"]
        file["episode_2/observations"] = np.zeros((1, 1))
    with pytest.raises(DataError, match=r"episode_2/observations has shape \(1, 1\); expected"):
        load(open_minari("my/set/test-v0"))
    (data / "metadata.json").unlink()
    with pytest.raises(DataError, match=r"is incomplete; .*metadata\.json is missing"):
        open_minari("my/set/test-v0")


# A published dataset


@pytest.fixture
def genuine() -> Recording:
    root = os.environ.get("MINARI_DATASETS_PATH")
    if root is None or not (Path(root) / GENUINE).is_dir():
        pytest.skip("the genuine dataset is not here (MINARI_DATASETS_PATH)")
    return open_minari(GENUINE, download=False)


def test_published_human_demonstrations_load_as_in_minari(genuine: Recording) -> None:
    minari = pytest.importorskip("minari")
    dataset = load_dataset([DatasetPart(genuine)])
    assert (len(dataset), len(dataset.episode_ends)) == (6729, 25)
    assert genuine.info.reference_scores == pytest.approx((-45.807, 2940.578), abs=1e-3)
    first = 0
    for episode in minari.load_dataset(GENUINE).iterate_episodes():
        batch = dataset.rows(torch.arange(first, first + len(episode.rewards)))
        np.testing.assert_array_equal(batch.obs, episode.observations[:-1].astype(np.float32))
        np.testing.assert_array_equal(batch.next_obs, episode.observations[1:].astype(np.float32))
        np.testing.assert_allclose(batch.action, episode.actions, atol=1e-6)
        np.testing.assert_array_equal(batch.reward, episode.rewards.astype(np.float32))
        np.testing.assert_allclose(batch.discount, 0.99 * ~episode.terminations, rtol=1e-6)
        first += len(episode.rewards)
    assert first == len(dataset)


@pytest.mark.parametrize("dataset_id", ["a/b-v0", "my/b-v0", "a/b/c-v0", "b-v0", "_/b-v0"])
def test_a_minari_id_is_written_if_minari_accepts_it(tmp_path: Path, dataset_id: str) -> None:
    minari_dataset = pytest.importorskip("minari.dataset.minari_dataset")
    try:
        minari_dataset.parse_dataset_id(dataset_id)
    except ValueError:
        with pytest.raises(DataError, match="namespaces of one letter"):
            check_destination(tmp_path, "minari", dataset_id)
    else:
        check_destination(tmp_path, "minari", dataset_id)
