"""Tells a page what changed since the version of the data that it has."""

from __future__ import annotations

import gzip
import json
import math
import secrets
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rl_training.types import Json

GZIP_LEVEL = 3
"""More would take longer than a local connection saves"""


@dataclass(frozen=True)
class Changes:
    """The version of the data, and a JSON object with what is new in it."""

    version: str
    body: bytes

    @cached_property
    def compressed(self) -> bytes:
        return gzip.compress(self.body, GZIP_LEVEL, mtime=0)


class VersionedData:
    """A JSON object of which only the parts that changed are sent.

    A part is a value of the object, or an item of one that is a list. Changes are sent as
    `{"version": "...", "values": {key: value}, "lists": {key: [length, {index: item}]}, "removed":
    [key]}`.
    """

    def __init__(self) -> None:
        self._start = secrets.token_hex(4)
        """Differs for every server, so that no page applies changes to the data of another one"""
        self._number = 0
        self._lists: dict[str, list[tuple[str, int]]] = {}
        self._values: dict[str, list[tuple[str, int]]] = {}
        self._removed: dict[str, int] = {}
        self._last: tuple[int, Changes] | None = None

    @property
    def version(self) -> str:
        return f"{self._start}-{self._number}"

    def update(self, data: Json, *, keep_others: bool = False) -> None:
        """Replace the data, or only these values; the version changes only if a part did."""
        number = self._number + 1
        lists = {
            key: _numbered(map(_dumped, items), self._lists.get(key, []), number)
            for key, items in data.items()
            if isinstance(items, list)
        }
        values = {
            key: _numbered([_dumped(value)], self._values.get(key, []), number)
            for key, value in data.items()
            if not isinstance(value, list)
        }
        if keep_others:
            lists, values = {**self._lists, **lists}, {**self._values, **values}
        if lists == self._lists and values == self._values:
            return
        present = lists.keys() | values.keys()
        gone = (self._lists.keys() | self._values.keys()) - present
        removed = self._removed | dict.fromkeys(gone, number)
        self._removed = {key: at for key, at in removed.items() if key not in present}
        self._lists, self._values, self._number = lists, values, number
        self._last = None

    def since(self, version: str) -> Changes:
        """Return what changed after a version; everything if that is not one of this server."""
        start, _, text = version.partition("-")
        is_known = start == self._start and text.isascii() and text.isdigit() and len(text) < 16
        known = int(text) if is_known else -1
        if self._last is None or self._last[0] != known:
            self._last = known, Changes(self.version, self._body(known).encode())
        return self._last[1]

    def _body(self, known: int) -> str:
        values = ",".join(
            f"{_dumped(key)}:{text}" for key, [(text, at)] in self._values.items() if at > known
        )
        lists = []
        for key, items in self._lists.items():
            new = ",".join(
                f'"{index}":{text}' for index, (text, at) in enumerate(items) if at > known
            )
            lists.append(f"{_dumped(key)}:[{len(items)},{{{new}}}]")
        removed = _dumped([key for key, at in self._removed.items() if at > known])
        return (
            f'{{"version":{_dumped(self.version)},"complete":{_dumped(known < 0)},'
            f'"values":{{{values}}},"lists":{{{",".join(lists)}}},"removed":{removed}}}'
        )


def _numbered(texts: Any, before: list[tuple[str, int]], number: int) -> list[tuple[str, int]]:
    """Return each text with the number of the version in which it last changed."""
    return [
        before[index] if index < len(before) and before[index][0] == text else (text, number)
        for index, text in enumerate(texts)
    ]


def _dumped(value: Any) -> str:
    try:
        return json.dumps(value, allow_nan=False, separators=(",", ":"))
    except ValueError:  # JSON has no NaN and no infinity
        return json.dumps(_finite(value), allow_nan=False, separators=(",", ":"))


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, list | tuple) else value
