"""The `rl-training dataset` commands: record, info, convert, and their error messages."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from conftest import Command, tree

from rl_training.data import DatasetPart, load_dataset
from rl_training.datasets.workflows import open_source


def rows(source: Path | str) -> np.ndarray:
    return load_dataset([DatasetPart(open_source(source))]).packed.numpy()


RANDOM = ("dataset", "record", "--random", "--env", "Pendulum-v1")


def test_random_data_can_be_recorded_inspected_and_converted(rl: Command, work: Path) -> None:
    recorded = rl(*RANDOM, "--steps", "4e2", "--num-envs", "2", "--out", "a.npz", "--seed", "3")
    assert (recorded.code, recorded.err) == (0, "")
    assert "400 steps in a.npz" in recorded.out
    with np.load(work / "a.npz", allow_pickle=False) as arrays:
        assert arrays["observations"].shape == (400, 3)
        assert np.abs(arrays["actions"]).max() > 1.5  # in the environment's units
        assert arrays["timeouts"].sum() == 2

    shown = rl("dataset", "info", "a.npz")
    assert (shown.code, shown.err) == (0, "")
    assert "steps         400" in shown.out
    assert "episodes      2: 0 terminated, 2 truncated" in shown.out
    assert "return        mean -" in shown.out
    assert re.search(r"; \d+\.\d% of them within 1 % of a bound", shown.out)
    assert max(map(len, shown.out.splitlines())) <= 80
    assert "--out FILE.png" in shown.out
    assert {path.name for path in work.iterdir()} == {"a.npz"}  # no picture unless requested

    drawn = rl("dataset", "info", "a.npz", "--out", "a.png")
    assert (drawn.code, drawn.err) == (0, "")
    assert "picture       a.png" in drawn.out
    assert (work / "a.png").read_bytes().startswith(b"\x89PNG")
    unknown = rl("dataset", "info", "a.npz", "--out", "a.data")
    assert unknown.code == 2
    assert "a.data: cannot be written" in unknown.err

    assert rl("dataset", "convert", "a.npz", "b.hdf5").code == 0
    with h5py.File(work / "b.hdf5") as file:
        assert file["next_observations"].shape == (400, 3)
    np.testing.assert_array_equal(rows(work / "a.npz"), rows(work / "b.hdf5"))

    again = rl(*RANDOM, "--steps", "400", "--num-envs", "2", "--out", "c.npz", "--seed", "3")
    assert again.code == 0
    assert (work / "c.npz").read_bytes() == (work / "a.npz").read_bytes()


def test_a_recorded_minari_dataset_opens_in_minari_with_its_environment(
    rl: Command,
    work: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    minari = pytest.importorskip("minari")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(work / "minari"))
    recorded = rl(*RANDOM, "--steps", "450", "--format", "minari", "--id", "my/pendulum/random-v0")
    assert (recorded.code, recorded.err) == (0, "")
    dataset = minari.load_dataset("my/pendulum/random-v0")
    assert (dataset.total_steps, dataset.total_episodes) == (450, 3)
    environment = dataset.recover_environment()
    assert environment.spec is not None
    assert environment.spec.id == "Pendulum-v1"
    assert [episode.truncations[-1] for episode in dataset.iterate_episodes()] == [True] * 3
    shown = rl("dataset", "info", "my/pendulum/random-v0", "--no-picture")
    assert shown.code == 0
    assert "environment   Pendulum-v1" in shown.out
    assert rl("dataset", "convert", "my/pendulum/random-v0", "x.npz").code == 0
    np.testing.assert_array_equal(rows("my/pendulum/random-v0"), rows(work / "x.npz"))


def test_policy_data_and_replay_are_recorded_from_a_run_folder(
    rl: Command,
    work: Path,
    finished_run: Any,
) -> None:
    run = finished_run.run_dir
    before = tree(run)
    recorded = rl("dataset", "record", "--checkpoint", run, "--steps", "50", "--out", "p.hdf5")
    assert (recorded.code, recorded.err) == (0, "")
    assert rows(work / "p.hdf5").shape == (50, 9)
    shown = rl("dataset", "info", run, "--picture", "replay.png")
    assert shown.code == 0
    assert "steps         120" in shown.out
    assert (work / "replay.png").exists()
    assert rl("dataset", "convert", run, "replay.npz").code == 0
    np.testing.assert_allclose(rows(work / "replay.npz"), rows(run), atol=1e-6)
    assert tree(run) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("record", "--steps", "5", "--out", "x.npz"), "either --checkpoint PATH, or --random"),
        (("record", "--random", "--steps", "5", "--out", "x.npz"), "--env ID"),
        (
            ("record", "--random", "--checkpoint", "r", "--steps", "5", "--out", "x.npz"),
            "either --checkpoint",
        ),
        (
            ("record", "--random", "--env", "Pendulm-v1", "--steps", "5", "--out", "x.npz"),
            "Did you mean Pendulum-v1?",
        ),
        ((*RANDOM[1:], "--steps", "5", "--out", "x.zip"), "unknown format"),
        ((*RANDOM[1:], "--steps", "5"), "unknown format"),
        ((*RANDOM[1:], "--steps", "5", "--format", "npz"), "no destination"),
        ((*RANDOM[1:], "--steps", "5", "--out", "x", "--format", "csv"), "npz, hdf5, minari"),
        ((*RANDOM[1:], "--steps", "0", "--out", "x.npz"), "steps = 0"),
        ((*RANDOM[1:], "--steps", "x", "--out", "x.npz"), "not an integer"),
        ((*RANDOM[1:], "--steps", "5", "--out", "x.npz", "--num-envs", "0"), "num_envs = 0"),
        ((*RANDOM[1:], "--steps", "5", "--out", "x.npz", "--seed", "-1"), "seed = -1"),
        ((*RANDOM[1:], "--steps", "5", "--out", "x.npz", "--noise", "3"), "noise = 3"),
        ((*RANDOM[1:], "--steps", "5", "--format", "minari"), "needs an id"),
        ((*RANDOM[1:], "--steps", "5", "--id", "../x-v0"), "must be a Minari id"),
        ((*RANDOM[1:], "--steps", "5", "--id", "a/data/x-v0"), "may be 'data'"),
        ((*RANDOM[1:], "--steps", "5", "--id", "x-v0", "--format", "npz"), "only Minari"),
        (("info", "missing.npz"), "missing.npz: no such file"),
        (("info", "."), "neither a Minari dataset nor a run"),
        (("info", "../../etc"), "no such file or run folder"),
        (("convert", "text.npz", "y.npz"), "cannot be read as a NumPy archive"),
        (("convert", "text.txt", "y.npz"), "must end in .npz"),
        (("convert", "text.npz", "text.hdf5"), "already exists"),
    ],
)
def test_an_error_is_reported_exits_with_2_and_creates_no_files(
    arguments: tuple[str, ...],
    message: str,
    rl: Command,
    work: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(work / "minari"))
    for name in ("text.npz", "text.txt", "text.hdf5"):
        (work / name).write_text("no data")
    before = tree(work)
    outcome = rl("dataset", *arguments)
    assert outcome.code == 2
    assert message in outcome.err
    assert "Traceback" not in outcome.err
    assert tree(work) == before


def test_rounding_errors_do_not_split_episodes_in_info_and_convert(rl: Command, work: Path) -> None:
    walk = np.random.default_rng(0).normal(size=(101, 3))
    following = walk[1:].copy()
    following[49] += 1
    np.savez(
        work / "data.npz",
        observations=walk[:-1].astype(np.float32),
        next_observations=following,
        actions=np.zeros((100, 1), np.float32),
        rewards=np.ones(100),
        terminals=np.zeros(100),
    )
    shown = rl("dataset", "info", "data.npz", "--no-picture")
    assert "episodes      2: 0 terminated, 2 truncated" in shown.out
    assert rl("dataset", "convert", "data.npz", "copy.hdf5").code == 0
    with h5py.File(work / "copy.hdf5") as file:
        assert np.flatnonzero(file["timeouts"]).tolist() == [49, 99]


def write_beyond_bounds(path: Path) -> None:
    actions = np.full((20, 2), 0.5, np.float32)
    actions[3], actions[7, 1] = (1.5, -4.0), 1.00001  # the last one only by a rounding error
    np.savez(
        path,
        observations=np.arange(20, dtype=np.float32)[:, None],
        next_observations=np.arange(1, 21, dtype=np.float32)[:, None],
        actions=actions,
        rewards=np.ones(20, np.float32),
        terminals=np.arange(20) % 10 == 9,
        action_low=-np.ones(2, np.float32),
        action_high=np.ones(2, np.float32),
    )


def test_actions_out_of_bounds_are_reported_and_can_be_clipped(rl: Command, work: Path) -> None:
    write_beyond_bounds(work / "data.npz")
    shown = rl("dataset", "info", "data.npz", "--no-picture")
    assert "2 of 40 components are out of bounds (clip_actions)" in shown.out

    assert rl("dataset", "convert", "data.npz", "same.npz").err == ""
    clipped = rl("dataset", "convert", "data.npz", "clipped.npz", "--clip-actions")
    assert clipped.code == 0
    assert "2 of 40 action components were out of bounds and were clipped" in clipped.err
    with np.load(work / "same.npz") as same, np.load(work / "clipped.npz") as inside:
        assert same["actions"][3].tolist() == [1.5, -4.0]
        np.testing.assert_array_equal(inside["actions"], np.clip(same["actions"], -1, 1))
    assert "out of bounds" not in rl("dataset", "info", "clipped.npz", "--no-picture").out
    assert len(rows(work / "clipped.npz")) == 20


def test_actions_without_bounds_cannot_be_clipped(rl: Command, work: Path) -> None:
    write_beyond_bounds(work / "data.npz")
    with np.load(work / "data.npz") as file:
        arrays = {key: file[key] for key in file if not key.startswith("action_")}
    np.savez(work / "bare.npz", **arrays)
    np.savez(work / "choices.npz", **{**arrays, "actions": np.arange(20) % 3})
    for name, reason in (
        ("bare", "its action bounds are unknown"),
        ("choices", "discrete actions"),
    ):
        refused = rl("dataset", "convert", f"{name}.npz", "new.npz", "--clip-actions")
        assert refused.code == 2
        assert reason in refused.err
        assert not (work / "new.npz").exists()
