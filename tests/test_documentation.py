"""Code, configs and commands in the documentation work."""

from __future__ import annotations

import glob
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer.main
from conftest import Command

from rl_training.cli import app
from rl_training.config_files import load_config

ROOT = Path(__file__).parent.parent


class Block(NamedTuple):
    page: str
    language: str
    text: str


def blocks_of(page: Path) -> Iterator[Block]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text("utf-8"), re.DOTALL | re.MULTILINE)
    return (Block(page.name, language, text) for language, text in found)


BLOCKS = [
    block
    for page in [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
    for block in blocks_of(page)
]


def commands_in(block: Block) -> list[list[str]]:
    """Return the arguments of each `rl-training` command, without comments and line breaks."""
    lines = block.text.replace("\\\n", " ").splitlines()
    return [
        shlex.split(line, comments=True)[1:] for line in lines if line.startswith("rl-training ")
    ]


def only(page: str, language: str) -> str:
    [text] = [block.text for block in BLOCKS if block[:2] == (page, language)]
    return text


COMMANDS = {
    f"{block.page}: {shlex.join(arguments)}": arguments
    for block in BLOCKS
    for arguments in commands_in(block)
}


@pytest.mark.parametrize("arguments", COMMANDS.values(), ids=COMMANDS)
def test_a_command_and_its_options_exist(arguments: list[str]) -> None:
    command: Any = typer.main.get_command(app)
    remaining = list(arguments)
    while hasattr(command, "commands"):
        command = command.commands[remaining.pop(0)]
    known = {option for parameter in command.params for option in parameter.opts}
    assert [word for word in remaining if word.startswith("--") and word not in known] == []


@pytest.mark.parametrize("page", sorted({b.page for b in BLOCKS if b.language == "yaml"}))
def test_a_config_is_valid(page: str, tmp_path: Path) -> None:
    text = only(page, "yaml")
    beginning = "" if "algo: " in text else "algo: iql\nenv_id: Pendulum-v1\n"
    file = tmp_path / "config.yaml"
    file.write_text(beginning + text)
    load_config(file)


def test_the_error_message_in_the_readme_is_current(rl: Command) -> None:
    shown, *answer = only("README.md", "console").splitlines()
    outcome = rl(*shlex.split(shown.removeprefix("$ rl-training ")))
    assert (outcome.code, outcome.err.splitlines()) == (2, answer)


def shortened(arguments: list[str]) -> list[str]:
    """Return the command with fewer steps. Expand `...` to the rest of a name."""
    short = list(arguments)
    if short[0] == "train":
        short += ["--total-timesteps", "60", "--set", "eval_episodes=1"]
    elif "--total-timesteps" in short:
        short[short.index("--total-timesteps") + 1] = "80"
    expanded = [glob.glob(word.replace("...", "*")) or [word] for word in short]
    return [word for words in expanded for word in words]


@pytest.mark.docs
def test_the_commands_of_the_readme_work_in_order(rl: Command) -> None:
    for block in BLOCKS:
        if block.page == "README.md" and block.language == "bash":
            for arguments in commands_in(block):
                outcome = rl(*shortened(arguments))
                assert outcome.code == 0, f"{shlex.join(arguments)}\n{outcome.err}"


@pytest.mark.docs
def test_the_python_code_of_the_readme_works(tmp_path: Path) -> None:
    code = only("README.md", "python")
    short = code.replace("total_timesteps=10_000", "total_timesteps=700")
    assert short != code
    done = subprocess.run(
        [sys.executable, "-c", short], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "eval_return_mean" in done.stdout
