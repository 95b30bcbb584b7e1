"""The `rl-training dataset` commands: record, info, convert, split, filter, and their errors."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from conftest import Command, tree

from rl_training.data import DatasetPart, load_dataset
from rl_training.datasets.opening import build_dataset
from rl_training.datasets.selecting import filter_dataset
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
    assert rl("dataset", "convert", "a.npz", "--out", "c.hdf5").out == "written to c.hdf5\n"
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
        ((*RANDOM[1:], "--steps", "5"), "no output"),
        ((*RANDOM[1:], "--steps", "5", "--format", "npz"), "no output"),
        ((*RANDOM[1:], "--steps", "5", "--out", "x", "--format", "csv"), "npz, hdf5, minari"),
        ((*RANDOM[1:], "--steps", "0", "--out", "x.npz"), "steps = 0"),
        ((*RANDOM[1:], "--steps", "x", "--out", "x.npz"), "not an integer"),
        ((*RANDOM[1:], "--steps", "5", "--out", "x.npz", "--num-envs", "0"), "num_envs = 0"),
        ((*RANDOM[1:], "--steps", "5", "--out", "x.npz", "--seed", "-1"), "seed = -1"),
        ((*RANDOM[1:], "--steps", "5", "--out", "x.npz", "--noise", "3"), "noise = 3"),
        ((*RANDOM[1:], "--steps", "5", "--format", "minari"), "needs an id"),
        ((*RANDOM[1:], "--steps", "5", "--id", "../x-v0"), "must be a Minari id"),
        ((*RANDOM[1:], "--steps", "5", "--id", "a/data/x-v0"), "may be 'data'"),
        ((*RANDOM[1:], "--steps", "5", "--id", "a/x-v0"), "namespaces of one letter"),
        ((*RANDOM[1:], "--steps", "5", "--id", "x-v0", "--format", "npz"), "only Minari"),
        (("info", "missing.npz"), "missing.npz: no such file"),
        (("info", "."), "no Minari dataset, LeRobot dataset or run"),
        (("info", "../../etc"), "no such file or run folder"),
        (("convert", "text.npz", "y.npz"), "cannot be read as a NumPy archive"),
        (("convert", "text.txt", "y.npz"), "must end in .npz"),
        (("convert", "text.npz", "text.hdf5"), "already exists"),
        (("convert", "text.npz", "x.npz", "--out", "y.npz"), "use only one of them"),
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


# Splitting and filtering

LENGTHS = (3, 5, 2, 4, 6, 1, 3, 2, 5, 4)
RETURNS = (3.0, -5.0, 20.0, 4.0, 6.0, 20.0, -3.0, 2.0, 50.0, 0.0)
"""The return of each episode; the third and the sixth have the same"""


def write_episodes(path: Path) -> None:
    ends = np.cumsum(LENGTHS)
    number = np.repeat(np.arange(10), LENGTHS)
    rewards = np.zeros(ends[-1], np.float32)
    rewards[ends - 1] = RETURNS
    last = np.isin(np.arange(1, ends[-1] + 1), ends)
    np.savez(
        path,
        observations=np.stack([number, np.arange(ends[-1])], 1).astype(np.float32),
        next_observations=np.stack([number, np.arange(1, ends[-1] + 1)], 1).astype(np.float32),
        actions=np.linspace(-1, 1, ends[-1], dtype=np.float32)[:, None],
        rewards=rewards,
        terminals=last & (number % 2 == 0),
        timeouts=last & (number % 2 == 1),
        action_low=-np.ones(1, np.float32),
        action_high=np.ones(1, np.float32),
    )


def episodes_in(source: Path) -> list[int]:
    """Return the numbers of the episodes in a file, and check that each is complete."""
    numbers = rows(source)[:, 0].astype(int)
    found = list(dict.fromkeys(numbers.tolist()))
    assert numbers.tolist() == np.repeat(found, np.take(LENGTHS, found)).tolist()
    dataset = load_dataset([DatasetPart(open_source(source))])
    np.testing.assert_array_equal(dataset.episode_returns, np.take(RETURNS, found))
    return found


@pytest.fixture
def data(work: Path) -> Path:
    write_episodes(work / "data.npz")
    return work / "data.npz"


def test_a_split_is_by_episodes_complete_and_repeatable(
    rl: Command, work: Path, data: Path
) -> None:
    split = ("dataset", "split", "data.npz", "--fractions")
    outcome = rl(*split, "0.7,0.3", "--out", "a.npz", "b.hdf5")
    assert (outcome.code, outcome.err) == (0, "")
    assert re.search(r"^7 episodes, \d+ steps, return .* in a\.npz$", outcome.out, re.MULTILINE)
    first, second = episodes_in(work / "a.npz"), episodes_in(work / "b.hdf5")
    assert sorted(first + second) == list(range(10))
    assert (first, second) == (sorted(first), sorted(second))
    assert len(first) == 7

    assert rl(*split, "70%,30%", "--seed", "0", "--out", "c.npz", "--out", "d.npz").code == 0
    assert episodes_in(work / "c.npz") == first
    others = [
        rl(*split, "0.7,0.3", "--seed", str(seed), "--out", f"e{seed}.npz", f"f{seed}.npz").code
        for seed in (1, 2, 3)
    ]
    assert others == [0, 0, 0]
    assert any(episodes_in(work / f"e{seed}.npz") != first for seed in (1, 2, 3))
    shown = rl("dataset", "info", "b.hdf5", "--no-picture")
    assert re.search(r"made by +dataset split of npz data\.npz \([0-9a-f]{12}\)", shown.out)


def test_a_split_can_leave_episodes_out_and_write_every_format(
    rl: Command, work: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(work / "minari"))
    split = ("dataset", "split", "data.npz", "--fractions", "0.2,0.3")
    assert rl(*split, "--id", "my/a-v0", "my/b-v0").code == 0
    ids = ["my/a-v0", "my/b-v0"]
    found = [episodes_in(work / "minari" / name) for name in ids]
    assert [len(part) for part in found] == [2, 3]
    assert not set(found[0]) & set(found[1])
    assert "made by" in rl("dataset", "info", "my/a-v0", "--no-picture").out
    pytest.importorskip("pyarrow")
    assert rl(*split, "--format", "lerobot", "--fps", "5", "--out", "x", "y").code == 0
    assert [episodes_in(work / name) for name in ("x", "y")] == found
    assert "made by" in rl("dataset", "info", "x", "--no-picture").out
    # Parts of a part of a LeRobot dataset keep its frame rate.
    assert (
        rl("dataset", "filter", "x", "--top", "1%", "--format", "lerobot", "--out", "z").code == 0
    )
    assert json.loads((work / "z" / "meta" / "info.json").read_text())["fps"] == 5


@pytest.mark.parametrize(
    ("conditions", "expected"),
    [
        (("--top", "10%"), [8]),
        (("--top", "0.00000001%"), [8]),  # at least one
        (("--top", "0.2"), [2, 8]),  # of two equal returns, the earlier episode
        (("--top", "21%"), [2, 5, 8]),  # rounded up
        (("--top", "100%"), list(range(10))),
        (("--min-return", "6"), [2, 4, 5, 8]),
        (("--max-return", "-3"), [1, 6]),
        (("--min-return", "0", "--max-return", "4"), [0, 3, 7, 9]),
        (("--min-length", "5"), [1, 4, 8]),
        (("--top", "50%", "--min-length", "4"), [3, 4, 8]),
    ],
)
def test_episodes_are_filtered_by_return(
    conditions: tuple[str, ...], expected: list[int], rl: Command, work: Path, data: Path
) -> None:
    outcome = rl("dataset", "filter", "data.npz", *conditions, "--out", "best.npz")
    assert (outcome.code, outcome.err) == (0, "")
    assert episodes_in(work / "best.npz") == expected


def test_the_same_episodes_can_be_chosen_in_a_config(work: Path, data: Path) -> None:
    section = {"kind": "npz", "path": str(data), "top_episodes": 0.2}
    dataset = build_dataset(section)
    assert sorted(dataset.episode_returns) == [20, 50]
    filter_dataset(data, work / "best.npz", top=0.2)
    assert dataset.packed.equal(build_dataset({"kind": "npz", "path": "best.npz"}).packed)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("split", "--fractions", "0.5,0.5", "--out", "a.npz"), "2 fractions need 2 outputs"),
        (("split", "--fractions", "0.5,0.5"), "2 fractions need 2 outputs"),
        (("split", "--fractions", "0.9,0.2", "--out", "a.npz", "b.npz"), "more than 1"),
        (("split", "--fractions", "0.9,0", "--out", "a.npz", "b.npz"), "greater than 0"),
        (("split", "--fractions", "0.9,x", "--out", "a.npz", "b.npz"), "a fraction such as 0.1"),
        (("split", "--fractions", "0.99,0.01", "--out", "a.npz", "b.npz"), "too few for a part"),
        (("split", "--fractions", "0.5,0.5", "--out", "a.npz", "a.npz"), "the same output"),
        (("split", "--fractions", "0.5,0.5", "--out", "a.npz", "x/../a.npz"), "the same output"),
        (("split", "--fractions", "0.5,0.5", "--out", "a.npz", "data.npz"), "already exists"),
        (("split", "--fractions", "0.5,0.5", "--out", "a", "b"), "npz, hdf5, minari, lerobot"),
        (("split", "--fractions", "1", "--out", "a.npz", "--seed", "-1"), "seed = -1"),
        (("filter", "--out", "a.npz"), "--min-return"),
        (("filter", "--top", "10%"), "no output"),
        (("filter", "--top", "10", "--out", "a.npz"), "did you mean 10%?"),
        (("filter", "--top", "nan", "--out", "a.npz"), "greater than 0"),
        (("filter", "--min-return", "51", "--out", "a.npz"), "returns are -5 to 50"),
        (("filter", "--min-return", "nan", "--out", "a.npz"), "min_return = nan"),
        (("filter", "--top", "10%", "--out", "a.npz", "--fps", "5"), "only LeRobot datasets"),
        (("convert", "x", "--format", "lerobot", "--fps", "0"), "must be at least 1"),
    ],
)
def test_wrong_parts_and_conditions_are_reported_and_nothing_is_written(
    arguments: tuple[str, ...], message: str, rl: Command, work: Path, data: Path
) -> None:
    before = tree(work)
    command, *options = arguments
    outcome = rl("dataset", command, "data.npz", *options)
    assert outcome.code == 2
    assert message in outcome.err
    assert "Traceback" not in outcome.err
    assert tree(work) == before


def test_steps_without_a_next_observation_are_not_part_of_an_episode(work: Path) -> None:
    write_episodes(work / "data.npz")
    with np.load(work / "data.npz") as file:
        arrays = {key: file[key] for key in file if key != "next_observations"}
    np.savez(work / "bare.npz", **arrays)
    part = filter_dataset(work / "bare.npz", work / "best.npz", min_length=4)
    # Truncated episodes lose their last step, and with it the reward that was given there.
    assert part.returns.tolist() == [0.0, 6.0, 50.0]
    assert part.steps == len(rows(work / "best.npz")) == 4 + 6 + 5


def test_parts_of_observations_are_recorded_shown_converted_split_and_filtered(
    rl: Command, work: Path
) -> None:
    def run(command: str) -> str:
        done = rl("dataset", *command.split())
        assert (done.code, done.err) == (0, "")
        return done.out

    def parts_of(name: str) -> list[str]:
        return [leaf.name for leaf in open_source(work / name).info.observation.leaves]

    run("record --random --env Blackjack-v1 --steps 200 --out all.npz")
    run("record --random --env Blackjack-v1 --steps 200 --out some.npz --observation-keys 0,2")
    assert "  1: discrete values, values 1 to 10" in run("info all.npz")
    assert "2 arrays, 8 bytes for each step" in run("info all.npz --observation-keys 0,2")
    run("convert all.npz same.hdf5 --observation-keys 0,2")
    run("convert all.npz minari --id cards/all-v0 --observation-keys 0,2")
    written = ("some.npz", "same.hdf5", "minari/cards/all-v0")
    found = [list(open_source(work / name).chunks()) for name in written]
    assert [parts_of(name) for name in written] == [["0", "2"]] * 3
    assert len({b"".join(steps.obs.tobytes() for steps in chunks) for chunks in found}) == 1
    run("split all.npz --fractions 0.5,0.5 --out a.npz b.hdf5 --observation-keys 1")
    run("filter all.npz --min-return 1 --out c.npz --observation-keys 1")
    assert [parts_of(name) for name in ("a.npz", "b.hdf5", "c.npz")] == [["1"]] * 3
    wrong = rl("dataset", "info", "all.npz", "--observation-keys", "3")
    assert wrong.code == 2
    assert "all.npz: observation_keys: the data has no observation '3'" in wrong.err
