"""The code blocks of the documentation: reading them from pages, and running them.

A page is run as one program in an empty folder: its Python blocks share their variables, like the
cells of a notebook, and its commands run between them. Comments before a block, which readers of
the page do not see, change how the block is run. Several can precede one block:

    <!-- not run: needs a GPU -->           the block is only shown; the reason is required
    <!-- run with: 10_000 -> 700 -->        text that is replaced in the test, to keep it short
    <!-- file: my_environment.py -->        the block is saved under this name instead of run

`bash` blocks stop at the first error. `console` blocks show commands after `$ ` and their output.
In the output, any number matches any other one, `...` matches anything, and spaces do not matter.
"""

from __future__ import annotations

import os
import re
import subprocess
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
RUN = {"bash", "console", "python"}
SHOWN = {"", "json", "mermaid", "text", "toml", "yaml"}
"""Languages that need no mark because there is nothing to run"""
MARKS = {"file", "not run", "run with"}

FENCE = re.compile(
    r"(?P<marks>(?:^[ ]*<!--[^\n]*-->\n)*)"
    r"^(?P<indent>[ ]*)(?P<fence>```+)(?P<language>[^\n`]*)\n"
    r"(?P<text>.*?)^(?P=indent)(?P=fence)[ ]*$",
    re.DOTALL | re.MULTILINE,
)
MARK = re.compile(r"<!-- (?P<name>[a-z ]+)(?:: (?P<value>.*?))? -->")
TIMEOUT_SECONDS = 600


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    """Line of the opening fence"""
    language: str
    text: str
    marks: tuple[tuple[str, str], ...] = ()

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def runs(self) -> bool:
        return self.language in RUN and not {"not run", "file"} & dict(self.marks).keys()

    @property
    def file(self) -> str | None:
        """Name under which the block is saved, if it is a file."""
        return dict(self.marks).get("file")

    @property
    def replacements(self) -> list[tuple[str, str]]:
        """Texts of the block, each with what the test runs in its place."""
        found = [value.partition(" -> ") for name, value in self.marks if name == "run with"]
        return [(shown, run) for shown, _, run in found]

    def as_run(self) -> str:
        """Return the text that the test runs."""
        text = self.text
        for shown, run in self.replacements:
            text = text.replace(shown, run)
        return text


def pages() -> list[Path]:
    """Return the pages of the documentation, without the output of a build."""
    found = [path for path in ROOT.glob("docs/**/*.md") if "_build" not in path.parts]
    return [ROOT / "README.md", *sorted(found)]


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text("utf-8")
    name = page.relative_to(ROOT).as_posix() if page.is_relative_to(ROOT) else page.name
    return [
        Block(
            name,
            text[: found.start("fence")].count("\n") + 1,
            found["language"].strip(),
            textwrap.dedent(found["text"]),
            tuple((mark["name"], mark["value"] or "") for mark in MARK.finditer(found["marks"])),
        )
        for found in FENCE.finditer(text)
    ]


def program_of(blocks: list[Block], outputs: Path) -> str:
    """Return a Python program that runs the blocks of one page in order.

    Each block is at the lines that it has in the page, so that a traceback shows the right numbers.
    The output of each command of a `console` block is written to a file in `outputs`.
    """
    lines: list[str] = []
    for block in blocks:
        if block.file is not None:
            lines += [""] * (block.line - 1 - len(lines))
            lines.append(_once(f"open({block.file!r}, 'w').write({block.as_run()!r})"))
        elif block.runs:
            code = block.as_run()
            if block.language != "python":
                code = _once(*_shell_calls(block, outputs))
            start = block.line if block.language == "python" else block.line - 1
            lines += [""] * (start - len(lines))
            lines += code.splitlines()
    return "\n".join(lines) + "\n"


def _once(*statements: str) -> str:
    """Return one line of code that worker processes skip when they import the program."""
    return f"if __name__ == '__main__': {'; '.join(statements)}"


def _shell_calls(block: Block, outputs: Path) -> Iterator[str]:
    yield "import subprocess"
    if block.language == "bash":
        yield f"subprocess.run({_shell(block.as_run())!r}, check=True)"
        return
    for number, (command, _) in enumerate(conversation(block.as_run())):
        file = str(output_file(outputs, block, number))
        yield f"subprocess.run({_shell(command)!r}, stdout=open({file!r}, 'w'), stderr=-2)"


def _shell(command: str) -> list[str]:
    return ["bash", "-euo", "pipefail", "-c", command]


def output_file(outputs: Path, block: Block, number: int) -> Path:
    return outputs / f"line_{block.line}_command_{number}.txt"


def conversation(text: str) -> list[tuple[str, str]]:
    """Return the commands of a `console` block, each with the output that follows it."""
    parts = re.split(r"^\$ ((?:[^\n]*\\\n)*[^\n]*)\n?", text, flags=re.MULTILINE)
    return list(zip(parts[1::2], parts[2::2], strict=True))


NUMBER = r"[-+]?\d[\d,_]*(?:\.\d+)?(?:e[-+]?\d+)?"


def looks_like(shown: str, printed: str) -> bool:
    """Compare an output in the documentation with the actual one; see the top of this module."""
    pattern = re.escape(_squeezed(re.sub(NUMBER, "0", shown))).replace(r"\.\.\.", ".*")
    return re.fullmatch(pattern, _squeezed(re.sub(NUMBER, "0", printed)), re.DOTALL) is not None


def _squeezed(text: str) -> str:
    return " ".join(text.split())


def run_page(page: Path, folder: Path, python: Path, environment: Mapping[str, str]) -> None:
    """Run all blocks of a page in an empty folder, with an interpreter and its commands."""
    blocks = blocks_of(page)
    work, outputs = folder / "work", folder / "outputs"
    work.mkdir()
    outputs.mkdir()
    program = work / f"page_{page.stem.replace('-', '_')}.py"
    program.write_text(program_of(blocks, outputs), "utf-8")
    done = subprocess.run(
        [str(python), program.name],
        cwd=work,
        env={**environment, "PATH": f"{python.parent}{os.pathsep}{environment['PATH']}"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )
    assert done.returncode == 0, f"{page.name}\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    for block in blocks:
        if block.language != "console" or not block.runs:
            continue
        for number, (command, shown) in enumerate(conversation(block.as_run())):
            printed = output_file(outputs, block, number).read_text("utf-8")
            assert looks_like(shown, printed), (
                f"{block.place}: $ {command}\nshown:\n{shown}\nprinted:\n{printed}"
            )


def extras_of(page: Path) -> set[str]:
    """Return the extras that a block of the page installs."""
    commands = "\n".join(block.text for block in blocks_of(page) if block.language == "bash")
    found = re.findall(r"rl-training\[([\w,-]+)\]", commands)
    return {extra for names in found for extra in names.split(",")}
