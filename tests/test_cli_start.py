"""How the command line starts: first line, fast commands, shell completion, help and `runs`."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from conftest import Command

from rl_training import Callback, internals, train
from rl_training.algorithms import spec as registry
from rl_training.cli.show import runs_table
from rl_training.experiment.overview import RunOverview
from rl_training.experiment.registry import list_algorithm_specs, list_algorithm_summaries
from rl_training.version import __version__

COMMANDS = [
    "",
    "train",
    "resume",
    "evaluate",
    "predict",
    "list",
    "config",
    "runs",
    "doctor",
    "dataset",
    "dataset record",
    "dataset info",
    "dataset convert",
]
EXIT_OF_TORCH = 33


@pytest.fixture
def without_torch(tmp_path: Path) -> dict[str, str]:
    """Environment variables with which `import torch` prints a line and ends the process."""
    folder = tmp_path / "torch_replacement"
    folder.mkdir()
    code = f"print('importing torch', flush=True); raise SystemExit({EXIT_OF_TORCH})"
    (folder / "torch.py").write_text(code)
    paths = [str(folder), *filter(None, sys.path)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def start(
    *arguments: str | Path, cwd: Path, env: dict[str, str], **options: Any
) -> subprocess.CompletedProcess[str]:
    code = "import sys; sys.argv[0] = 'rl-training'; from rl_training.cli import main; main()"
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        cwd=cwd,
        env=env,
        text=True,
        timeout=60,
        check=False,
        **streams,
    )


# The first line


def test_train_and_resume_print_a_line_before_torch_is_imported(
    work: Path, without_torch: dict[str, str]
) -> None:
    done = start("train", "-c", "sac/pendulum", cwd=work, env=without_torch)
    first = f"rl-training {__version__}: preparing sac/pendulum ..."
    assert done.stdout.splitlines() == [first, "importing torch"]
    assert done.returncode == EXIT_OF_TORCH
    done = start("resume", "runs/a", "runs/b", cwd=work, env=without_torch)
    first = f"rl-training {__version__}: resuming runs/a runs/b ..."
    assert done.stdout.splitlines() == [first, "importing torch"]


def test_evaluate_prints_its_first_line_only_to_a_terminal(
    work: Path, without_torch: dict[str, str]
) -> None:
    done = start("evaluate", "runs/a", cwd=work, env=without_torch)
    assert (done.stdout, done.stderr) == ("importing torch\n", "")
    reader, terminal = os.openpty()
    done = start("evaluate", "runs/a", cwd=work, env=without_torch, stderr=terminal)
    os.close(terminal)
    assert done.stdout == "importing torch\n"
    shown = os.read(reader, 1000).decode().strip()
    os.close(reader)
    assert shown == f"rl-training {__version__}: evaluating runs/a ..."


def test_a_missing_package_of_an_environment_is_reported_before_torch_is_imported(
    work: Path, without_torch: dict[str, str]
) -> None:
    (work / "lands.py").write_text(
        "import gymnasium\ngymnasium.register('Land-v0', entry_point='lands_env:Land')\n"
    )
    (work / "lands_env.py").write_text("import package_that_is_not_installed\n")
    done = start(
        "train", "-c", "sac/pendulum", "--env", "lands:Land-v0", cwd=work, env=without_torch
    )
    assert done.returncode == 2
    assert "importing torch" not in done.stdout
    assert "Land-v0 needs a package" in done.stderr
    assert "No module named 'package_that_is_not_installed'" in done.stderr
    done = start(
        "train", "-c", "sac/pendulum", "--set", "env_id=Pendulm-v1", cwd=work, env=without_torch
    )
    assert done.returncode == 2
    assert "Did you mean Pendulum-v1" in done.stderr


def test_nothing_is_compiled_before_training_starts(
    monkeypatch: pytest.MonkeyPatch, tiny_config: dict[str, Any]
) -> None:
    """Compiling takes seconds to start, and a mistake in the environment must be found first."""
    compiled: list[Any] = []

    def compile_nothing(function: Any, options: Any) -> Any:
        compiled.append(function)
        return function

    monkeypatch.setattr(internals, "compile_with_options", compile_nothing)
    monkeypatch.setattr(internals, "compiled_function", lambda function: None)
    monkeypatch.setattr(internals, "graph_pass_options", lambda *_: {})
    monkeypatch.setattr(internals, "remember_vector_instructions", lambda marker: None)
    monkeypatch.setattr(
        "rl_training.execution.execution.missing_for_compilation", lambda device: None
    )
    programs_at_start = []

    class Watch(Callback):
        def on_train_start(self, context: Any) -> None:
            programs_at_start.append(len(compiled))

    train({**tiny_config, "compile": "on", "device": "cpu"}, callbacks=[Watch()])
    assert programs_at_start == [0]
    assert compiled


# Commands that do not need torch


def test_version_list_and_runs_answer_without_torch(
    work: Path, without_torch: dict[str, str], run_copy: Path
) -> None:
    for arguments, words in (
        (["--version"], __version__),
        (["list"], "Soft Actor-Critic"),
        (["runs", run_copy.parent], str(run_copy)),
        (["runs", run_copy.parent, "--json"], str(run_copy)),
    ):
        done = start(*arguments, cwd=work, env=without_torch)
        assert (done.returncode, done.stderr) == (0, "")
        assert words in done.stdout


def test_help_imports_nothing_heavy() -> None:
    code = """
import sys
from rl_training import cli

for command in ([], ["train"], ["evaluate"], ["predict"], ["resume"], ["runs"]):
    sys.argv = ["rl-training", *command, "--help"]
    try:
        cli.main()
    except SystemExit as ended:
        assert not ended.code
heavy = {"torch", "gymnasium", "numpy", "matplotlib", "rich.progress"}
print("heavy:", *heavy & set(sys.modules), file=sys.stderr)
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr.split() == ["heavy:"]


def test_the_generated_summaries_are_those_of_the_algorithms() -> None:
    assert list_algorithm_summaries() == [spec.summary for spec in list_algorithm_specs()]


def test_list_fits_80_columns_and_shows_algorithms_of_other_packages(
    rl: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = registry.get_algorithm_spec("sac")
    other = registry.AlgorithmSpec("mine", "My Algorithm", "a paper", own.algorithm)
    monkeypatch.setattr(registry, "_from_entry_points", lambda: {"mine": other})
    done = rl("list")
    assert re.search(r"^mine +continuous +online\n +My Algorithm \(a paper\)$", done.out, re.M)
    assert max(map(len, done.out.splitlines())) <= 80


# Shell completion


def completion_variables(words: str) -> dict[str, str]:
    """Environment variables with which bash requests values for the last word of a command line."""
    return {
        "_RL_TRAINING_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split(" ")) - 1),
    }


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("rl-training tr", ["train"]),
        ("rl-training train --config sac/pe", ["sac/pendulum"]),
        ("rl-training train --config mi", ["mine.yaml"]),
        ("rl-training train --env HalfCheetah-v5", ["HalfCheetah-v5"]),
        ("rl-training train --device ", ["auto", "cpu", "cuda"]),
        ("rl-training resume --schedule ", ["extend", "keep"]),
        ("rl-training resume ", ["runs/first"]),
        ("rl-training evaluate runs/f", ["runs/first"]),
        ("rl-training runs --sort b", ["best"]),
        ("rl-training runs --filter al", ["algo="]),
    ],
)
def test_shells_complete_commands_and_values(
    words: str, expected: list[str], rl: Command, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (work / "mine.yaml").touch()
    (work / "runs/first/checkpoints").mkdir(parents=True)
    for name, value in completion_variables(words).items():
        monkeypatch.setenv(name, value)
    done = rl()
    assert (done.code, done.err) == (0, "")
    assert done.out.split() == expected


def test_shells_complete_without_torch(work: Path, without_torch: dict[str, str]) -> None:
    for words in ("rl-training train --config sac/p", "rl-training train --env Pend"):
        done = start(cwd=work, env={**without_torch, **completion_variables(words)})
        assert (done.returncode, done.stderr) == (0, "")
        assert "endulum" in done.stdout


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_has_a_completion_script(
    shell: str, rl: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("_RL_TRAINING_COMPLETE", f"source_{shell}")
    done = rl()
    assert done.code == 0
    assert f"_RL_TRAINING_COMPLETE=complete_{shell}" in done.out


# Help and errors


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_words_instead_of_python_types(
    command: str, rl: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    done = rl(*command.split(), "--help")
    assert done.code == 0
    assert re.findall(r"<\w+|\b(?:INTEGER|FLOAT|TEXT)\b", done.out) == []
    assert max(map(len, done.out.splitlines())) <= 80


def test_help_of_train_has_examples(rl: Command) -> None:
    assert "\n    rl-training train --config sac/pendulum\n" in rl("train", "--help").out


def test_debug_shows_the_traceback_of_a_user_error(rl: Command) -> None:
    wrong = ["train", "-c", "sac/nothing"]
    plain, debugged = rl(*wrong), rl("--debug", *wrong)
    assert (plain.code, debugged.code) == (2, 2)
    assert "Traceback" not in plain.err
    assert "Traceback (most recent call last)" in debugged.err
    assert debugged.err.endswith(plain.err)


# runs


def overview(name: str, **values: Any) -> RunOverview:
    return RunOverview(path=Path("runs") / name, **{"state": "finished", **values})


def listed(rl: Command, folder: Path, *options: str) -> list[dict[str, Any]]:
    done = rl("runs", folder, "--json", *options)
    assert (done.code, done.err) == (0, "")
    found: list[dict[str, Any]] = json.loads(done.out)
    return found


@pytest.fixture
def three_runs(run_copy: Path, tmp_path: Path) -> Path:
    """A folder with the runs a, b and c, of which c has no checkpoints and no evaluation."""
    folder = tmp_path / "three"
    for seed, name in enumerate("abc"):
        run = Path(shutil.copytree(run_copy, folder / name))
        for file in [*run.glob("checkpoints/*/state.json"), run / "config.yaml"]:
            text = file.read_text()
            file.write_text(re.sub(r'("?seed"?:) 0\b', rf"\1 {seed}", text))
        for manifest in run.glob("checkpoints/*/MANIFEST.json"):
            _refresh(manifest)
        metadata = json.loads((run / "metadata.json").read_text())
        metadata["created"] = f"2026-01-0{3 - seed}T00:00:00+00:00"
        (run / "metadata.json").write_text(json.dumps(metadata))
    shutil.rmtree(folder / "c/checkpoints")
    (folder / "c/metrics.jsonl").unlink()
    return folder


def _refresh(manifest: Path) -> None:
    """Write the size and hash of a changed `state.json` to its manifest."""
    import hashlib

    content = json.loads(manifest.read_text())
    data = (manifest.parent / "state.json").read_bytes()
    content["files"]["state.json"] = {
        "size": len(data),
        "sha256": hashlib.sha256(data).hexdigest(),
    }
    manifest.write_text(json.dumps(content))


def names(runs: Sequence[dict[str, Any]]) -> str:
    return "".join(run["name"] for run in runs)


def test_runs_are_sorted_and_those_without_a_value_come_last(rl: Command, three_runs: Path) -> None:
    assert names(listed(rl, three_runs)) == "cba"  # oldest first
    assert names(listed(rl, three_runs, "--sort", "name")) == "abc"
    assert names(listed(rl, three_runs, "--sort", "-seed")) == "cba"
    assert names(listed(rl, three_runs, "--sort", "-date")) == "abc"
    assert names(listed(rl, three_runs, "--sort", "-best"))[-1] == "c"
    assert names(listed(rl, three_runs, "--sort", "best"))[-1] == "c"


def test_runs_are_filtered_by_all_filters(rl: Command, three_runs: Path) -> None:
    assert names(listed(rl, three_runs, "--filter", "seed=1")) == "b"
    assert names(listed(rl, three_runs, "--filter", "env=pendulum*")) == "cba"
    both = ["--filter", "algo=sac", "--filter", "state=finished"]
    assert names(listed(rl, three_runs, *both)) == "ba"
    assert listed(rl, three_runs, "--filter", "algo=td3") == []
    done = rl("runs", three_runs, "--filter", "algo=td3")
    assert done.out == f"no runs in {three_runs} match algo=td3\n"


def test_json_has_all_values_of_a_run(rl: Command, three_runs: Path) -> None:
    run = listed(rl, three_runs, "--filter", "name=b")[0]
    assert run == {
        "name": "b",
        "path": str(three_runs / "b"),
        "algo": "sac",
        "env": "Pendulum-v1",
        "seed": 1,
        "state": "finished",
        "detail": "stop reason: total_timesteps",
        "step": 120,
        "total_timesteps": 120,
        "best": run["best"],
        "last": run["last"],
        "date": "2026-01-02T00:00:00+00:00",
    }
    assert run["best"] >= run["last"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--sort", "bset"], ["--sort 'bset'", "did you mean 'best'", "name, algo, env, seed"]),
        (["--filter", "alog=sac"], ["--filter 'alog'", "did you mean 'algo'", "state, date"]),
        (["--filter", "sac"], ["--filter 'sac'", "KEY=VALUE"]),
    ],
)
def test_a_wrong_key_of_runs_is_explained(
    options: list[str], words: list[str], rl: Command, three_runs: Path
) -> None:
    done = rl("runs", three_runs, *options)
    assert done.code == 2
    assert [word for word in words if word not in done.err] == []


@pytest.mark.parametrize(
    ("file", "text"),
    [("config.yaml", "algo: ["), ("config.yaml", "seed: 0"), ("metadata.json", "[")],
)
def test_one_unreadable_run_does_not_fail_the_list(
    file: str, text: str, rl: Command, three_runs: Path
) -> None:
    (three_runs / "c" / file).write_text(text)
    runs = {run["name"]: run for run in listed(rl, three_runs)}
    assert (runs["c"]["state"], runs["b"]["state"]) == ("unreadable", "finished")
    assert "cannot be read: " in runs["c"]["detail"]
    shown = rl("runs", three_runs).out
    assert f"{three_runs / 'c'}\n      cannot be read: " in shown


def test_the_table_of_runs_fits_a_narrow_terminal_and_keeps_paths() -> None:
    long_path = "a-run-name-that-is-much-longer-than-the-terminal-" * 3
    values = {"seed": 0, "step": 1_000_000, "total_timesteps": 1_000_000}
    runs = [
        overview("a", algo="sac", environment="MountainCarContinuous-v0", **values),
        overview(long_path, algo="td3_bc", environment="Ant-v5", best_return=-1234.5, **values),
    ]
    header, first, path, second, long, *_ = runs_table(runs, width=72)
    assert (path.strip(), long.strip()) == ("runs/a", f"runs/{long_path}")
    assert {len(header), len(first), len(second)} <= set(range(73))
    assert re.search(r" MountainCar\w*… ", first)
    assert "MountainCarContinuous-v0" in runs_table(runs)[1]
