"""Forge checkpoints as a stranger could, with a manifest that matches."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HOSTILE_VALUES: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    65_536,
    10**9,
    10**400,
    -0.5,
    1e300,
    "",
    "x" * 10_000,
    "../../etc/passwd",
    "\x1b[2J\n",
    [],
    [65_536, 65_536],
    {},
    {"kind": "array"},
)
HOSTILE_TEXTS = (
    b"",
    b"\xff\xfe",
    b"[]",
    b"null",
    b'{"a": 1, "a": 2}',
    b'{"a": NaN}',
    b'{"a": -Infinity}',
    b'{"a": 1e999}',
    b'{"a": ' + b"9" * 5_000 + b"}",
    b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    b"[" + b"{}," * 1_000_000 + b"{}]",
    b"\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94.",
)


def seal(checkpoint: Path) -> None:
    """Make the manifest match the files."""
    manifest = json.loads((checkpoint / "MANIFEST.json").read_text())
    for name, entry in manifest["files"].items():
        data = (checkpoint / name).read_bytes()
        entry.update(size=len(data), sha256=hashlib.sha256(data).hexdigest())
    (checkpoint / "MANIFEST.json").write_text(json.dumps(manifest))


def places(values: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Yield the path of every value in a JSON object; of a list, only those of its first items."""
    if path:
        yield path
    if isinstance(values, dict):
        for key, part in values.items():
            yield from places(part, (*path, key))
    elif isinstance(values, list):
        for index, part in enumerate(values[:2]):
            yield from places(part, (*path, index))


def forge(values: Any, path: tuple[str | int, ...], value: Any) -> Any:
    """Return a copy in which the value at `path` is another one, or missing if it is `...`."""
    forged = copy.deepcopy(values)
    part = forged
    for key in path[:-1]:
        part = part[key]
    if value is ...:
        del part[path[-1]]
    else:
        part[path[-1]] = value
    return forged


@dataclass(frozen=True)
class Forgery:
    """A value of a JSON object that is replaced, or removed if the new value is `...`."""

    path: tuple[str | int, ...]
    value: Any

    def of(self, values: Any) -> bytes:
        """Return the forged object as JSON."""
        return json.dumps(forge(values, self.path, self.value)).encode()

    def __str__(self) -> str:
        shown = "removed" if self.value is ... else repr(self.value)[:40]
        return f"{'.'.join(map(str, self.path))} = {shown}"


def forgeries(values: Any) -> list[Forgery]:
    """Return every forgery of a JSON object: each value removed or replaced by a hostile one."""
    return [Forgery(path, value) for path in places(values) for value in (..., *HOSTILE_VALUES)]
