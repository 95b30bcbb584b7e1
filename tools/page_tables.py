"""Replaces tables between comments in a page whose other text is written by hand."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

START, END = "<!-- {}: written by `{}` -->\n", "<!-- end of {} -->\n"


def with_tables(page: Path, text: str, tables: Mapping[str, str], command: str) -> str:
    """Return the text of a page with these tables, by name, in place of those that it has."""
    for name, table in tables.items():
        start, end = START.format(name, command), END.format(name)
        if text.count(start) != 1 or text.count(end) != 1:
            sys.exit(f"{page}: must contain once {start.strip()} and {end.strip()}")
        before, rest = text.split(start)
        text = f"{before}{start}\n{table}\n{end}{rest.split(end)[1]}"
    return text
