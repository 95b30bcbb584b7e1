"""What the site takes from the package and the repository instead of from a page.

- The page of the command line ends with the help of every command.
- Each managed class has a page of its own.
- Links to files outside `docs/` lead to their page on the site, or to the repository.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.main
from pydantic import BaseModel
from sphinx.application import Sphinx

import rl_training.api
from rl_training.api import Agent
from rl_training.cli import app as command_line

COMMAND_LINE = "reference/command-line"
AGENTS = Path("reference/agents")
PAGES_OF_FILES = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}
"""Files at the root of the repository that have a page on the site"""
OUTSIDE = re.compile(r"\]\((?P<up>(?:\.\./)+)(?P<file>[\w./-]+)")
"""A link that leads upwards, such as `](../CONTRIBUTING.md`"""

ARGUMENT = re.compile(
    r"^ {4}(?P<name>\*{0,2}\w+)(?: \((?P<type>.+?)\))?: (?P<meaning>.*)$", re.MULTILINE
)
"""A line of an `Args:` section: `name (type = default): meaning`"""
SECTIONS = {"Args": "Arguments", "Raises": "Raises"}
SECTION = re.compile(rf"^({'|'.join(SECTIONS)}):$", re.MULTILINE)


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("builder-inited", write_agent_pages)
    app.connect("source-read", complete_page)
    app.connect("autodoc-process-signature", shorten_signature)
    app.connect("autodoc-process-docstring", show_arguments)
    # A chapter of `index.md` may have no pages yet. Sphinx 9 has no setting for this warning.
    toctrees = logging.getLogger("sphinx.sphinx.directives.other")
    toctrees.addFilter(lambda record: "glob pattern" not in str(record.msg))
    return {"parallel_read_safe": True}


def write_agent_pages(app: Sphinx) -> None:
    """Write one page per managed class, so that a new algorithm needs no page by hand."""
    folder = app.srcdir / AGENTS
    folder.mkdir(exist_ok=True)
    names = [name for name in rl_training.api.__all__ if name != Agent.__name__]
    for stale in {path.stem for path in folder.glob("*.md")} - set(names):
        (folder / f"{stale}.md").unlink()
    for name in names:
        page = folder / f"{name}.md"
        text = f"# {name}\n\n```{{eval-rst}}\n.. autoclass:: rl_training.{name}\n```\n"
        if not page.exists() or page.read_text("utf-8") != text:  # an unchanged page is not rebuilt
            page.write_text(text, "utf-8")


def complete_page(app: Sphinx, page: str, source: list[str]) -> None:
    """Add the help of the command line to its page, and redirect links out of the folder."""
    if page == COMMAND_LINE:
        app.env.note_reread()  # the help may change while the page does not
        source[0] += "\n".join(command_pages(typer.main.get_command(command_line)))
    source[0] = OUTSIDE.sub(lambda link: site_link(app, page, link), source[0])


def site_link(app: Sphinx, page: str, link: re.Match[str]) -> str:
    """Return the beginning of a link to the page of a repository's file, or to the file."""
    depth = page.count("/")
    if link["up"].count("../") <= depth:
        return link[0]
    if link["file"] in PAGES_OF_FILES:
        return f"]({'../' * depth}{PAGES_OF_FILES[link['file']]}"
    options = app.config.html_theme_options
    return f"]({options['source_repository']}blob/{options['source_branch']}/{link['file']}"


def command_pages(command: Any, parent: Any = None) -> Iterator[str]:
    """Yield the Markdown lines of a command and of its subcommands: usage, purpose, options."""
    # The constructor of a context differs between the releases of typer.
    context = command.make_context(
        command.name if parent else "rl-training", [], parent=parent, resilient_parsing=True
    )
    subcommands = getattr(command, "commands", {})
    if parent is not None:
        yield f"\n## {context.command_path.removeprefix('rl-training ')}\n"
    usage = command.get_usage(context).removeprefix("Usage: ")
    yield f"```text\n{' '.join(usage.split())}\n```\n"
    yield from (f"{plain_text(part)}\n" for part in (command.help or "").split("\n\n"))
    for parameter in command.get_params(context):
        if record := parameter.get_help_record(context):  # None for a hidden option
            names, meaning = record
            yield f"`{names}`\n: {plain_text(meaning)}\n"
    for subcommand in subcommands.values():
        yield from command_pages(subcommand, context)


def plain_text(text: str) -> str:
    """Return a help text as Markdown in which no character has a special meaning."""
    return re.sub(r"([\\`*_{}<>\[\]$|~])", r"\\\1", " ".join(text.split()))


def shorten_signature(
    app: Sphinx, kind: str, name: str, thing: Any, *_: Any
) -> tuple[str, str] | None:
    """Show the name of a class with many settings alone; the settings follow as a list."""
    if kind == "class" and isinstance(thing, type):
        if issubclass(thing, Agent):
            return "(env=None, **settings)", ""
        if issubclass(thing, BaseModel):
            return "(**settings)", ""
    return None


def show_arguments(
    app: Sphinx, kind: str, name: str, thing: Any, options: Any, lines: list[str]
) -> None:
    """Show the sections `Args:` and `Raises:` of a docstring as lists of terms."""
    text = "\n".join(lines)
    start = SECTION.search(text)
    if start:
        unwrapped = re.sub(r"\n {8,}(?=\S)", " ", text[start.start() :])
        titled = SECTION.sub(lambda found: f".. rubric:: {SECTIONS[found[1]]}\n", unwrapped)
        lines[:] = (text[: start.start()] + ARGUMENT.sub(_as_term, titled)).split("\n")


def _as_term(argument: re.Match[str]) -> str:
    kind = f" : ``{argument['type']}``" if argument["type"] else ""
    return f"``{argument['name']}``{kind}\n    {argument['meaning']}\n"
