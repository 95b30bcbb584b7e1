"""Run folders, checkpoints and policies from a stranger: links, traps, bombs, forged values."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import socket
import time
import tracemalloc
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from helpers import tiny
from hostile import HOSTILE_TEXTS, forgeries, seal

from rl_training import SAC, evaluate_checkpoint, predict_checkpoint, resume_training, train
from rl_training.checkpoints.files import PlainFolder
from rl_training.checkpoints.format import CheckpointReader, checkpoint_folders
from rl_training.checkpoints.loading import find_checkpoint
from rl_training.checkpoints.run_folder import RunFolder, last_metrics, read_metrics
from rl_training.cli.completion import run_folders
from rl_training.datasets.replay import open_replay
from rl_training.errors import CheckpointError, ConfigError, UserError
from rl_training.experiment.overview import UNREADABLE, list_runs
from rl_training.training.needs import memory_needs
from rl_training.types import TrainResult

OBSERVATION = [1.0, 0.0, 0.5]
CHECKPOINT = "checkpoints/step_000000120"
FILES = (
    ".lock",
    "config.yaml",
    "learning_curve.png",
    "metadata.json",
    "metrics.jsonl",
    "checkpoints/best.json",
    f"{CHECKPOINT}/MANIFEST.json",
    f"{CHECKPOINT}/learner.safetensors",
    f"{CHECKPOINT}/model.safetensors",
    f"{CHECKPOINT}/policy.json",
    f"{CHECKPOINT}/replay-00000.safetensors",
    f"{CHECKPOINT}/state.json",
)
FOLDERS = ("checkpoints", CHECKPOINT, "superseded", "tensorboard")
COMMANDS: dict[str, Callable[[Path], object]] = {
    "evaluate": lambda run: evaluate_checkpoint(run, num_episodes=1),
    "init_from": lambda run: SAC.load(run).policy,
    "predict": lambda run: predict_checkpoint(run, OBSERVATION),
    "replay": open_replay,
    "resume": lambda run: resume_training(run, progress=False),
    "runs": lambda run: list_runs(run),
}
each_command = pytest.mark.parametrize("command", COMMANDS)


@pytest.fixture(autouse=True)
def _quiet(no_pictures: None) -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.fixture
def outside(tmp_path: Path, finished_run: TrainResult) -> Path:
    """Files of the user that no run folder may reach."""
    shutil.copytree(finished_run.run_dir / "checkpoints", tmp_path / "outside/folder")
    (tmp_path / "outside/thesis.txt").write_text("the only copy")
    return tmp_path / "outside"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def clear(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)


def works_or_is_refused(command: str, run: Path, within: float = 1.0) -> str | None:
    """Run a command; return the message if it was refused. Any other exception is a failure."""
    began, message = time.process_time(), None
    try:
        COMMANDS[command](run)
    except UserError as error:
        message = str(error)
    if message is not None:
        assert time.process_time() - began < within, "refused too late"
        assert len(message) < 3_000
    return message


# Links


@pytest.mark.parametrize("name", [*FILES, *FOLDERS])
def test_a_link_in_a_run_folder_is_refused_before_anything_is_written(
    name: str, run_copy: Path, outside: Path
) -> None:
    clear(run_copy / name)
    target = outside / ("folder" if name in FOLDERS else "thesis.txt")
    (run_copy / name).symlink_to(target)
    before = contents(outside)
    message = works_or_is_refused("resume", run_copy)
    assert message is not None
    assert f"{run_copy / name}: is a link" in message
    for command in ("predict", "runs"):
        works_or_is_refused(command, run_copy)
    assert contents(outside) == before
    assert sorted(path.name for path in outside.rglob("step_*")) == [
        "step_000000080",
        "step_000000120",
    ]


def test_a_lock_that_is_a_link_is_refused_in_a_folder_without_checkpoints(
    tmp_path: Path, outside: Path
) -> None:
    (tmp_path / "evil/checkpoints").mkdir(parents=True)
    (tmp_path / "evil/.lock").symlink_to(outside / "thesis.txt")
    with pytest.raises(CheckpointError, match="is a link"):
        resume_training(tmp_path / "evil", progress=False)
    assert (outside / "thesis.txt").read_text() == "the only copy"


@pytest.mark.parametrize("name", [".lock", "metrics.jsonl"])
def test_a_hard_link_is_not_written_in_place(name: str, run_copy: Path, outside: Path) -> None:
    clear(run_copy / name)
    os.link(outside / "thesis.txt", run_copy / name)
    refused = pytest.raises(CheckpointError, match="is a hard link")
    if name == "metrics.jsonl":  # a log that cannot be written does not stop a run
        refused = pytest.warns(UserWarning, match="is a hard link")  # type: ignore[assignment]
    with refused:
        resume_training(run_copy, total_timesteps=160, progress=False)
    assert (outside / "thesis.txt").read_text() == "the only copy"


@pytest.mark.parametrize("part", ["checkpoints", CHECKPOINT])
def test_links_are_refused_when_a_path_inside_the_run_is_named(
    part: str, run_copy: Path, outside: Path
) -> None:
    clear(run_copy / "checkpoints")
    (run_copy / "checkpoints").symlink_to(outside / "folder")
    for command in ("evaluate", "predict", "resume"):
        with pytest.raises(CheckpointError, match=r"checkpoints: is a link"):
            COMMANDS[command](run_copy / part)


def test_links_above_and_to_a_run_folder_are_followed(run_copy: Path, tmp_path: Path) -> None:
    (tmp_path / "runs").symlink_to(run_copy.parent)
    (tmp_path / "latest").symlink_to(run_copy)
    for path in (tmp_path / "runs" / run_copy.name, tmp_path / "latest"):
        assert predict_checkpoint(path, OBSERVATION) == predict_checkpoint(run_copy, OBSERVATION)
        assert resume_training(path, progress=False).metrics["global_step"] == 120


def test_a_folder_that_becomes_a_link_is_not_followed(run_copy: Path, outside: Path) -> None:
    """As if it were replaced between the check and the write."""
    run, before = RunFolder(run_copy), contents(outside)
    run.check_plain()
    clear(run.checkpoints)
    run.checkpoints.symlink_to(outside / "folder")
    for write in (lambda: run.prune(None), lambda: run.mark_best(120, 1.0), run.lock):
        with pytest.raises(CheckpointError, match="is a link"):
            write()
    assert contents(outside) == before


def test_links_are_refused_where_folders_cannot_be_opened(
    run_copy: Path, outside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on Windows."""
    monkeypatch.setattr("rl_training.checkpoints.files._RELATIVE", False)
    assert resume_training(run_copy, total_timesteps=160, progress=False).metrics["global_step"]
    clear(run_copy / "checkpoints")
    (run_copy / "checkpoints").symlink_to(outside / "folder")
    for command in ("predict", "resume"):
        with pytest.raises(CheckpointError, match="is a link"):
            COMMANDS[command](run_copy)


def test_a_name_cannot_leave_its_folder(tmp_path: Path) -> None:
    for name in ("..", "../outside", "/etc/passwd", "", "a\0b"):
        with pytest.raises(CheckpointError, match="is not a file name"):
            PlainFolder(tmp_path).open(name)


def test_a_run_folder_with_too_many_folders_is_refused(run_copy: Path) -> None:
    deep = run_copy.joinpath(*"abcdefghij")
    deep.mkdir(parents=True)
    with pytest.raises(CheckpointError, match="nested more than 8 deep"):
        RunFolder(run_copy).check_plain()


# Special files


def make_socket(path: Path) -> None:
    before = Path.cwd()
    os.chdir(path.parent)  # the path of a socket must be short
    with socket.socket(socket.AF_UNIX) as opened:
        opened.bind(path.name)
    os.chdir(before)


def make_sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(10**12)


TRAPS: dict[str, Callable[[Path], object]] = {
    "fifo": os.mkfifo,
    "socket": make_socket,
    "folder": Path.mkdir,
    "terabyte": make_sparse,
}


@pytest.mark.parametrize("trap", TRAPS)
@pytest.mark.parametrize("name", FILES)
def test_a_trap_in_the_place_of_a_file_stops_nothing(
    name: str, trap: str, run_copy: Path, tmp_path: Path
) -> None:
    clear(run_copy / name)
    TRAPS[trap](run_copy / name)
    for command in ("predict", "resume", "runs"):
        works_or_is_refused(command, run_copy)


def test_a_terabyte_with_a_matching_manifest_is_not_hashed(run_copy: Path) -> None:
    for folder in checkpoint_folders(run_copy / "checkpoints"):
        make_sparse(folder / "model.safetensors")
        manifest = json.loads((folder / "MANIFEST.json").read_text())
        manifest["files"]["model.safetensors"]["size"] = 10**12
        (folder / "MANIFEST.json").write_text(json.dumps(manifest))
    for command in ("evaluate", "predict", "replay", "resume"):
        assert works_or_is_refused(command, run_copy) is not None


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("model.safetensors", "actor.weight_0"),
        ("learner.safetensors", "target_critic"),
        ("replay-00000.safetensors", "rows"),
    ],
)
def test_tensors_that_do_not_fit_the_policy_are_not_hashed(
    name: str, tensor: str, run_copy: Path
) -> None:
    """A sparse file of eight gigabytes, whose header and manifest agree."""
    for folder in checkpoint_folders(run_copy / "checkpoints"):
        shape = [2**17, 2**14]
        size = 4 * shape[0] * shape[1]
        header = {tensor: {"dtype": "F32", "shape": shape, "data_offsets": [0, size]}}
        text = json.dumps(header).encode()
        with (folder / name).open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + size)
        manifest = json.loads((folder / "MANIFEST.json").read_text())
        manifest["files"][name]["size"] = 8 + len(text) + size
        (folder / "MANIFEST.json").write_text(json.dumps(manifest))
    for command in ("evaluate", "predict", "replay", "resume"):
        assert works_or_is_refused(command, run_copy) is not None


# Bombs


def rewrite(run: Path, name: str, path: tuple[str, ...], value: Any) -> None:
    """Set a value in a JSON file of every checkpoint, with a matching manifest."""
    for folder in checkpoint_folders(run / "checkpoints"):
        values = json.loads((folder / name).read_text())
        part = values
        for key in path[:-1]:
            part = part[key]
        part[path[-1]] = value
        (folder / name).write_text(json.dumps(values))
        seal(folder)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_sizes", [65536, 65536]),
        ("hidden_sizes", [1] * 100_000),
        ("actor_hidden_sizes", [65536, 65536]),
        ("critic_hidden_sizes", [65536, 65536]),
        ("num_critics", 10**9),
    ],
)
def test_declared_networks_must_have_the_size_of_the_saved_ones(
    key: str, value: Any, run_copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rewrite(run_copy, "policy.json", ("algo_kwargs", key), value)
    allocated: list[int] = []
    flatten = "rl_training.models.mlp.ParameterLayout.flatten"
    monkeypatch.setattr(flatten, lambda layout, tensors: allocated.append(layout.size))
    for command in ("evaluate", "init_from", "predict", "replay", "resume"):
        message = works_or_is_refused(command, run_copy)
        assert message is not None
        assert "larger than the saved ones" in message or f"{key} = [" in message
    assert sum(allocated) < 10**5


def test_a_policy_that_does_not_fit_into_memory_is_refused(
    run_copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rl_training.execution.policy.SMALL", 0)
    monkeypatch.setattr("rl_training.execution.policy.available_memory", lambda _: 10_000)
    with pytest.raises(CheckpointError, match="10,000 are available"):
        predict_checkpoint(run_copy, OBSERVATION)


@pytest.mark.parametrize("key", ["obs_dim", "action_dim"])
@pytest.mark.parametrize("value", [10**7, 10**12, -1])
def test_declared_spaces_must_fit_the_saved_networks(key: str, value: int, run_copy: Path) -> None:
    rewrite(run_copy, "policy.json", (key,), value)
    for command in ("evaluate", "init_from", "predict", "replay", "resume"):
        assert works_or_is_refused(command, run_copy) is not None


@pytest.mark.parametrize(
    "path",
    [
        ("width",),
        ("config", "num_envs"),
        ("config", "algo_kwargs", "batch_size"),
        ("config", "algo_kwargs", "buffer_capacity"),
        ("config", "algo_kwargs", "hidden_sizes"),
        ("config", "algo_kwargs", "num_critics"),
        ("execution", "num_threads"),
    ],
)
def test_a_run_that_asks_for_too_much_is_refused(path: tuple[str, ...], run_copy: Path) -> None:
    """Environments and memory are not allocated first."""
    limits = {"num_envs": 4096, "hidden_sizes": [65536, 65536], "width": 65536}
    rewrite(run_copy, "state.json", path, limits.get(path[-1], 10**9))
    message = works_or_is_refused("resume", run_copy)
    assert message is not None
    assert path[-1] in message or "slot" in message


def test_the_width_of_a_population_counts_as_memory(finished_run: TrainResult) -> None:
    config, policy = SAC.load(finished_run.run_dir).config, SAC.load(finished_run.run_dir).policy
    alone, wide = (
        memory_needs([config], policy.spaces, online=False, width=width) for width in (1, 1000)
    )
    assert wide == {key: 1000 * needed for key, needed in alone.items()}


# Forged values


@each_command
@pytest.mark.parametrize("name", ["MANIFEST.json", "policy.json", "state.json"])
def test_forged_values_are_refused_or_harmless(name: str, command: str, run_copy: Path) -> None:
    """A sample; `make chaos` tries all."""
    folder = run_copy / CHECKPOINT
    values = json.loads((folder / name).read_text())
    number = 2 if command == "resume" else 6
    cases = random.Random(f"{name} {command}").sample(forgeries(values), number)
    original = {path: path.read_bytes() for path in folder.iterdir()}
    texts = HOSTILE_TEXTS if command == "runs" else ()
    for data in [*texts, *(case.of(values) for case in cases)]:
        for path, intact in original.items():
            path.write_bytes(intact)
        (folder / name).write_bytes(data)
        if name != "MANIFEST.json":
            seal(folder)
        works_or_is_refused(command, run_copy, within=2.0)


def rewrite_rows(run: Path, change: Callable[[torch.Tensor], torch.Tensor]) -> Path:
    """Change the replay rows of the newest checkpoint, and return their file."""
    checkpoint = checkpoint_folders(run / "checkpoints")[0]
    path = checkpoint / "replay-00000.safetensors"
    rows = safetensors.torch.load(path.read_bytes())["rows"]
    path.write_bytes(safetensors.torch.save({"rows": change(rows)}))
    seal(checkpoint)
    return path


def with_value(column: int, value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(rows: torch.Tensor) -> torch.Tensor:
        rows[5, column] = value
        return rows

    return change


@pytest.mark.parametrize("column", [0, 3, 4, 5, 8])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_replay_rows_that_are_not_finite_are_refused(
    column: int, value: float, run_copy: Path
) -> None:
    path = rewrite_rows(run_copy, with_value(column, value))
    with pytest.raises(CheckpointError, match=f"{path}: contains numbers that are not finite"):
        resume_training(run_copy, total_timesteps=160, progress=False)


@pytest.mark.parametrize("kind", [torch.float64, torch.int32, torch.bool])
def test_replay_rows_of_another_type_are_refused(kind: torch.dtype, run_copy: Path) -> None:
    path = rewrite_rows(run_copy, lambda rows: rows.to(kind))
    with pytest.raises(CheckpointError, match=f"{path}: does not contain rows of 9 float32"):
        resume_training(run_copy, total_timesteps=160, progress=False)


@pytest.fixture(scope="module")
def discrete_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("discrete")
    result = train(tiny(folder, algo="dqn", env_id="CartPole-v1", total_timesteps=60))
    assert isinstance(result, TrainResult)
    return result.run_dir


@pytest.mark.parametrize("action", [77.0, 2.0, -6.0, 0.5, -0.5, float("nan")])
def test_replay_actions_that_do_not_exist_are_refused(
    action: float, discrete_run: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(discrete_run, tmp_path / "run")
    path = rewrite_rows(run, with_value(4, action))
    with pytest.raises(CheckpointError, match=f"{path}: contains (actions|numbers)"):
        resume_training(run, total_timesteps=90, progress=False)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("tensorboard", "waiting"), [[10**30, 0, {"a": 1}]]),
        (("tensorboard", "waiting"), [[1, 0, {"\ud800": 1}]]),
        (("logged",), {"\ud800": 1}),
    ],
)
def test_forged_logs_are_refused(place: tuple[str, ...], value: object, run_copy: Path) -> None:
    rewrite(run_copy, "state.json", ("callbacks", "MetricsLog", *place), value)
    message = works_or_is_refused("resume", run_copy)
    assert message is not None
    assert "does not match this run" in message


@pytest.mark.parametrize("name", ["checkpoints/best.json", "metadata.json"])
def test_forged_small_files_are_refused_or_harmless(name: str, run_copy: Path) -> None:
    values = json.loads((run_copy / name).read_text())
    cases = random.Random(name).sample(forgeries(values), 40)
    for data in [*HOSTILE_TEXTS, *(case.of(values) for case in cases)]:
        (run_copy / name).write_bytes(data)
        (found,) = list_runs(run_copy)
        assert "\x1b" not in str(found)
        RunFolder(run_copy).best()
        RunFolder(run_copy).best_checkpoint()


@pytest.mark.parametrize(
    "line",
    [b"[" * 100_000, b"5", b'{"step": "x"}', b'{"step": 1e999}', b'{"eval/mean_reward": "\x1b"}'],
)
def test_forged_metrics_hide_no_other_run(line: bytes, run_copy: Path, tmp_path: Path) -> None:
    shutil.copytree(run_copy, tmp_path / "another")
    (run_copy / "metrics.jsonl").write_bytes(line + b"\n")
    states = {run.path.name: run.state for run in list_runs(tmp_path)}
    assert states["another"] == "finished"
    assert states[run_copy.name] in ("finished", UNREADABLE)


NESTED = b'{"step": 1, "x": [' + b"[]," * 300_000 + b"[]]}\n"
BOMBS = {
    "a long row": NESTED + b" " * 2**20,
    "many values in a row": NESTED,
    "nested values in many rows": (b'{"step": 1, "x": [' + b"[]," * 5_000 + b"[]]}\n") * 1_200,
    "many values in many rows": (b"{" + b'"a": 1, ' * 6_000 + b'"b": 1}\n') * 1_000,
}


@pytest.mark.parametrize("bomb", BOMBS.values(), ids=BOMBS)
def test_metrics_that_would_fill_the_memory_are_not_parsed(bomb: bytes, run_copy: Path) -> None:
    (run_copy / "metrics.jsonl").write_bytes(bomb)
    tracemalloc.start()
    with contextlib.suppress(CheckpointError):
        assert read_metrics(run_copy / "metrics.jsonl") == []
    last_metrics(RunFolder(run_copy), "x")
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 2 * len(bomb) + 20_000_000


def test_values_that_are_not_numbers_are_left_out(run_copy: Path) -> None:
    (run_copy / "metrics.jsonl").write_text('{"step": 1, "a": [2], "b": "c", "d": 0.5, "e": null}')
    assert read_metrics(run_copy / "metrics.jsonl") == [{"step": 1, "d": 0.5, "e": None}]


def test_one_unreadable_folder_hides_no_other_run(
    run_copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(run_copy, tmp_path / "another")
    original = PlainFolder.entries

    def refuse(folder: PlainFolder) -> dict[str, int]:
        if folder.path.parent == run_copy:
            raise PermissionError(13, "Permission denied", str(folder.path))
        return original(folder)

    monkeypatch.setattr(PlainFolder, "entries", refuse)  # permissions do not bind the superuser
    found = {run.path.name: run for run in list_runs(tmp_path)}
    assert found["another"].state == "finished"
    assert found[run_copy.name].state == UNREADABLE
    assert "Permission denied" in found[run_copy.name].detail


def test_an_overview_shows_no_control_codes(run_copy: Path) -> None:
    shutil.rmtree(run_copy / "checkpoints")
    text = (run_copy / "config.yaml").read_text().replace("algo: sac", 'algo: "\\e[2J\\nsac"')
    (run_copy / "config.yaml").write_text(text)
    (found,) = list_runs(run_copy)
    assert found.algo == " [2J sac"


def test_completion_offers_no_folder_behind_a_link(
    run_copy: Path, outside: Path, tmp_path: Path
) -> None:
    (tmp_path / "evil").mkdir()
    (tmp_path / "evil/checkpoints").symlink_to(outside / "folder")
    assert run_folders(f"{tmp_path}/") == [f"{tmp_path}/{run_copy.name}"]


# Files that the manifest does not list


def unlist(checkpoint: Path, *names: str) -> None:
    manifest = json.loads((checkpoint / "MANIFEST.json").read_text())
    for name in names:
        del manifest["files"][name]
    (checkpoint / "MANIFEST.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize("name", ["learner", "model", "policy", "replay-00000", "state"])
def test_a_checkpoint_that_lacks_a_file_is_passed_over(name: str, run_copy: Path) -> None:
    files = {path.stem: path.name for path in (run_copy / CHECKPOINT).iterdir()}
    unlist(run_copy / CHECKPOINT, files[name])
    for names in (None, ("policy.json", "model.safetensors")):
        with pytest.warns(UserWarning, match=r"skipped a damaged checkpoint.*step_000000120"):
            assert find_checkpoint(run_copy, names=names).folder.name == "step_000000080"
    with pytest.raises(CheckpointError, match="not complete"):
        find_checkpoint(run_copy / CHECKPOINT)


def test_a_file_that_is_not_listed_is_not_read(run_copy: Path) -> None:
    shutil.copy(run_copy / CHECKPOINT / "state.json", run_copy / CHECKPOINT / "extra.json")
    shutil.copy(
        run_copy / CHECKPOINT / "model.safetensors", run_copy / CHECKPOINT / "b.safetensors"
    )
    reader = CheckpointReader(run_copy / CHECKPOINT)
    with pytest.raises(CheckpointError, match="missing from the manifest"):
        reader.json("extra.json")
    with pytest.raises(CheckpointError, match="missing from the manifest"):
        reader.tensors("b.safetensors")


def test_what_is_read_is_what_was_verified(run_copy: Path) -> None:
    """A file that changes after it was verified is not used."""
    reader = find_checkpoint(run_copy)
    verified = json.loads((reader.folder / "policy.json").read_text())
    for name in ("policy.json", "model.safetensors", "state.json"):
        data = bytearray((reader.folder / name).read_bytes())
        data[-3] ^= 1
        (reader.folder / name).write_bytes(data)
    assert reader.json("policy.json") == verified  # read when it was verified
    with pytest.raises(CheckpointError, match="hash differs"):
        CheckpointReader(reader.folder).json("policy.json")
    with pytest.raises(CheckpointError, match="hash differs"):
        reader.tensors("model.safetensors")


def test_a_damaged_best_checkpoint_is_named(run_copy: Path) -> None:
    best = json.loads((run_copy / "checkpoints/best.json").read_text())["checkpoint"]
    unlist(run_copy / "checkpoints" / best, "learner.safetensors")
    with pytest.raises(CheckpointError, match=rf"best checkpoint cannot be used: .*{best}"):
        find_checkpoint(run_copy, best=True)
    (run_copy / "checkpoints/best.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"best\.json is damaged"):
        find_checkpoint(run_copy, best=True)


def test_memory_of_the_run_is_checked_with_the_saved_width(run_copy: Path) -> None:
    rewrite(run_copy, "state.json", ("execution", "batched"), True)
    rewrite(run_copy, "state.json", ("width",), 1024)
    rewrite(run_copy, "state.json", ("config", "algo_kwargs", "batch_size"), 10**6)
    with pytest.raises((CheckpointError, ConfigError), match="batch_size"):
        resume_training(run_copy, progress=False)
