"""Writes the page: one HTML file with its data, styles and scripts, which loads nothing else."""

from __future__ import annotations

import base64
import functools
import hashlib
import html
import json
import os
import re
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path
from urllib.parse import quote

from rl_training.checkpoints.files import PlainFolder
from rl_training.errors import UserError
from rl_training.experiment.curves import find_runs
from rl_training.report.data import assemble, no_runs
from rl_training.report.runs import Link, read_run
from rl_training.types import Json
from rl_training.validation import user_path

SCRIPTS = (
    *("uplot/uPlot.iife.min.js", "elements.js", "charts.js", "results.js", "curves.js"),
    *("comparison.js", "health.js", "runs.js", "page.js"),
)
LIVE_SCRIPTS = ("live.js",)
"""What the dashboard adds"""
SWEEP_SCRIPTS = ("sweep.js", "trials.js", "parallel.js")
"""What the page of a sweep adds"""
STYLES = ("uplot/uPlot.min.css", "style.css")
MOST_BYTES = 1_900_000
"""Size above which curves get fewer points"""
DETAILS = (1.0, 0.5, 0.25, 0.1)
_ESCAPED = {
    "<": "\\u003c",
    ">": "\\u003e",
    "&": "\\u0026",
    "\u2028": "\\u2028",
    "\u2029": "\\u2029",
}
"""Characters that could end the element around the data, or a line in it"""


def write_report(
    paths: str | Path | Sequence[str | Path],
    out: str | Path = "report.html",
    *,
    published: bool = True,
    title: str | None = None,
) -> Path:
    """Write a page about the runs at or below `paths` and return its path.

    The page is one file that needs no network. Videos are not in it: it links to those in the run
    folders, relative to its own folder.
    """
    page = checked_page(out)
    given = [paths] if isinstance(paths, str | Path) else list(paths)
    found = find_runs(given)
    if not found:
        raise no_runs(given)
    runs = [read_run(path) for path in found]
    link = beside(page.parent)
    return write_page(
        page,
        lambda detail: assemble(runs, published=published, title=title, link=link, detail=detail),
    )


def write_page(page: Path, data: Callable[[float], Json]) -> Path:
    """Write a page and return its path. `data` gets how detailed curves may be, 1 or less."""
    text = ""
    for detail in DETAILS:
        text = render(data(detail))
        if len(text.encode()) <= MOST_BYTES:
            break
    try:
        page.parent.mkdir(parents=True, exist_ok=True)
        PlainFolder(page.parent).replace(page.name, text.encode())
    except OSError as error:
        raise UserError(f"{page}: cannot be written ({error.strerror or error})") from None
    return page


def checked_page(out: str | Path) -> Path:
    """Return the path of a page to write; raise `UserError` if it cannot be one."""
    page = user_path(out)
    if page.suffix.lower() not in (".html", ".htm"):
        raise UserError(f"{page}: the name of a page must end with .html")
    if page.is_dir():
        raise UserError(f"{page}: is a folder; name a file in it, such as {page / 'report.html'}")
    return page


def beside(folder: Path) -> Link:
    """Return a function that gives the address of a file relative to a page in `folder`."""

    def link(path: Path) -> str:
        relative = Path(os.path.relpath(path, folder)).as_posix()
        address = quote(relative)  # a colon too, so that no name can begin with a scheme
        return address if address.startswith("../") else f"./{address}"

    return link


def render(data: Json, *, live: bool = False, nonce: str | None = None) -> str:
    """Return the page with its data. With `live`, it asks its server for `data.json` instead.

    The policy of the page allows its own script and style alone: by their hashes, or by `nonce`.
    """
    style = _joined(STYLES)
    script = _script((*(LIVE_SCRIPTS if live else ()), *(SWEEP_SCRIPTS if "sweep" in data else ())))
    shown = {"live": True, "title": data.get("title", "")} if live else data
    parts = {
        "POLICY": _policy(style, script, live=live, nonce=nonce),
        "TITLE": html.escape(_encodable(str(data.get("title", "")))),
        "NONCE": "" if nonce is None else f' nonce="{html.escape(nonce)}"',
        "STYLE": style,
        "SCRIPT": script,
        "DATA": embedded(shown),
    }
    # In one pass, so that nothing that is filled in is searched again.
    return re.sub(r"%%([A-Z]+)%%", lambda found: parts[found[1]], _asset("template.html"))


def embedded(data: Json) -> str:
    """Return JSON that can stand in a script element whatever its texts are."""
    text = json.dumps(data, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    return re.sub("[<>&\\u2028\\u2029]", lambda found: _ESCAPED[found[0]], _encodable(text))


def _encodable(text: str) -> str:
    """Replace surrogates that are no character, which names of files and arguments can have."""
    return text.encode("utf-8", "replace").decode()


def _policy(style: str, script: str, *, live: bool, nonce: str | None) -> str:
    def source(text: str) -> str:
        return _hash(text) if nonce is None else f"'nonce-{html.escape(nonce)}'"

    connect = "'self'" if live else "'none'"
    media = "'self'" if live else "'self' file:"
    return (
        f"default-src 'none'; script-src {source(script)}; style-src {source(style)}; "
        f"img-src data:; media-src {media}; connect-src {connect}; base-uri 'none'; "
        "form-action 'none'"
    )


def _hash(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"


@functools.cache
def _joined(names: Sequence[str]) -> str:
    return "\n".join(map(_asset, names))


def _script(more: Sequence[str]) -> str:
    library, *own = (*SCRIPTS, *more)
    return f'{_asset(library)}\n(() => {{\n"use strict";\n{_joined(tuple(own))}\nstart();\n}})();\n'


@functools.cache
def _asset(name: str) -> str:
    folder = resources.files("rl_training") / "assets" / "page"
    return (folder / name).read_text(encoding="utf-8")
