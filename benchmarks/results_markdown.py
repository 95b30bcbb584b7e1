"""Numbers, intervals and tables as Markdown."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from learning_rows import Estimate

LINK = "../benchmarks/results/"
"""From docs/ to the files"""
NO_BREAK = "\u00a0"
"""A space that keeps an interval in one line of a narrow column"""


def table(header: Sequence[str], alignment: str, rows: Sequence[Sequence[str]]) -> str:
    """A table with a letter for each column in `alignment`: l for left, r for right."""
    rule = "|".join({"l": "---", "r": "---:"}[letter] for letter in alignment)
    lines = [f"| {' | '.join(cells)} |" for cells in (header, *rows)]
    text = "\n".join([lines[0], f"|{rule}|", *lines[1:]])
    return re.sub(r"\|  (?=\|)", "| ", text) + "\n"


def number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:,.0f}"


def with_interval(found: Estimate) -> str:
    if math.isnan(found.low):
        return number(found.value)
    return f"{number(found.value)} [{number(found.low)},{NO_BREAK}{number(found.high)}]"
