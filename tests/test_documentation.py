"""Code, configs and commands in the documentation work, and its site can be built.

`code_blocks.py` explains how a page is run and which marks its blocks can have.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import pytest
import typer.main
from code_blocks import MARKS, ROOT, RUN, SHOWN, Block, blocks_of, looks_like, pages, run_page

import rl_training
from rl_training.cli import app
from rl_training.config_files import load_config, parse_yaml
from rl_training.sweeps.file import read_sweep

PAGES = pages()
BLOCKS = [block for page in PAGES for block in blocks_of(page)]
each_block = pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.place)


def commands_in(block: Block) -> list[list[str]]:
    """Return the arguments of each `rl-training` command, without comments and line breaks."""
    lines = block.text.replace("\\\n", " ").splitlines()
    shown = [line.removeprefix("$ ") for line in lines]
    return [
        shlex.split(line, comments=True)[1:] for line in shown if line.startswith("rl-training ")
    ]


COMMANDS = {
    f"{block.page}: {shlex.join(arguments)}": arguments
    for block in BLOCKS
    if block.language in RUN
    for arguments in commands_in(block)
}


@pytest.mark.parametrize("arguments", COMMANDS.values(), ids=COMMANDS)
def test_a_command_and_its_options_exist(arguments: list[str]) -> None:
    command: Any = typer.main.get_command(app)
    known, remaining = set(), list(arguments)
    while True:
        known |= {option for parameter in command.params for option in parameter.opts}
        subcommands = getattr(command, "commands", {})
        names = [word for word in remaining if word in subcommands]
        if not names:
            break
        remaining.remove(names[0])
        command = subcommands[names[0]]
    options = [word.partition("=")[0] for word in remaining if word.startswith("--")]
    assert [option for option in options if option not in {*known, "--help"}] == []


@pytest.mark.parametrize(
    "block",
    [block for block in BLOCKS if block.language == "yaml" and "not run" not in dict(block.marks)],
    ids=lambda block: block.place,
)
def test_a_config_is_valid(block: Block, tmp_path: Path) -> None:
    if block.text.startswith("base: "):  # a sweep file
        read_sweep(parse_yaml(block.text, block.place))
        return
    beginning = "" if "algo: " in block.text else "algo: iql\nenv_id: Pendulum-v1\n"
    file = tmp_path / "config.yaml"
    file.write_text(beginning + block.text)
    load_config(file)


def test_the_page_about_sweeps_shows_the_example() -> None:
    example = (ROOT / "examples/sweeps/pendulum.yaml").read_text("utf-8")
    page = [block for block in BLOCKS if str(block.page).endswith("how-to/sweeps.md")]
    [shown] = [block.text for block in page if block.file == "pendulum.yaml"]
    values = parse_yaml(shown, "page")
    assert values == parse_yaml(example, "example")
    assert read_sweep(values).is_exact


@each_block
def test_a_block_is_run_or_says_why_not(block: Block) -> None:
    """A language that is neither run nor merely shown needs a mark, as does each exception."""
    marks = dict(block.marks)
    assert marks.keys() <= MARKS, f"{block.place}: unknown mark"
    assert "not run" not in marks or len(marks["not run"].split()) >= 3, "say why it is not run"
    is_directive = block.language.startswith("{")
    assert is_directive or block.language in RUN | SHOWN or marks, "a mark must say how it is run"
    for shown, run in block.replacements:
        assert shown in block.text, f"{block.place}: {shown!r} is not in the block"
        assert run, f"{block.place}: say what is run in place of {shown!r}"
    if block.file is not None:
        page = (ROOT / block.page).read_text("utf-8")
        assert f"`{block.file}`" in page, f"{block.place}: tell the reader the name of the file"


@pytest.mark.parametrize(
    ("shown", "printed", "same"),
    [
        ("step 10,000: -127.63", "step 300:  -1,594.9\n", True),
        ("first\n...\nlast", "first\nsecond\nthird\nlast", True),
        ("lr 1e-3", "lr 0.001", True),
        ("finished", "finished\nTraceback", False),
        ("step 10", "step ten", False),
    ],
)
def test_outputs_are_compared_without_their_numbers(shown: str, printed: str, same: bool) -> None:
    assert looks_like(shown, printed) == same


PAGE = """
```python
x = 1
```
<!-- run with: 1000 -> 2 -->
```bash
echo "total 1000" > total.txt
```
<!-- file: module.py -->
```python
name = "of a file"
```
   ```python
   from module import name
   assert (x, name, open("total.txt").read()) == (1, "of a file", "total 2\\n")
   ```
<!-- not run: it would fail here -->
```bash
false
```
```console
$ cat total.txt
total 1000
$ exit 3
```
"""


def test_the_blocks_of_a_page_run_in_order_and_share_their_variables(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    run_page(page, tmp_path, Path(sys.executable), os.environ)


@pytest.mark.parametrize(
    ("ending", "message"),
    [
        ("```python\nraise SystemError(x)\n```\n", r"line 27, (?s:.*)SystemError: 1"),
        ("```bash\nfalse\ntrue\n```\n", "non-zero exit status"),
        ("```console\n$ echo one\ntwo\n```\n", "printed:\none"),
    ],
    ids=["python", "bash", "console"],
)
def test_a_block_that_fails_fails_its_page(ending: str, message: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE + ending)
    with pytest.raises(AssertionError, match=message):
        run_page(page, tmp_path, Path(sys.executable), os.environ)


@pytest.mark.docs
@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if any(block.runs for block in blocks_of(page))],
    ids=lambda page: page.relative_to(ROOT).as_posix(),
)
def test_the_code_of_a_page_works_in_an_empty_folder(page: Path, tmp_path: Path) -> None:
    run_page(page, tmp_path, Path(sys.executable), os.environ)


@pytest.mark.docs
def test_the_site_is_complete_and_needs_no_network(tmp_path: Path) -> None:
    """Every link and anchor exists, every public name is in the reference, nothing is remote."""
    site = tmp_path / "html"
    strict = ["--fail-on-warning", "--keep-going", "--quiet"]
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", *strict, "-d", tmp_path / "doctrees", ROOT / "docs", site],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert set(rl_training.__all__) - documented_names(site) - {"__version__"} == set()
    loaded = [
        address
        for page in site.rglob("*.html")
        for address in re.findall(
            r"<(?:script|img|link)[^>]*(?:src|href)=\"(http[^\"]+)", page.read_text("utf-8")
        )
    ]
    assert loaded == []


def documented_names(site: Path) -> set[str]:
    """Return the last part of every name in the reference, from the inventory of the site."""
    header = b"# The remainder of this file is compressed using zlib.\n"
    _, _, compressed = (site / "objects.inv").read_bytes().partition(header)
    entries = zlib.decompress(compressed).decode().splitlines()
    return {entry.split()[0].rpartition(".")[2] for entry in entries if " py:" in entry}
