"""Read from the footer of a Parquet file how many values each column declares.

pyarrow has this information too. But it ends the whole process when it is asked about a column
whose description is inconsistent, and a stranger's file may contain that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import IO

from rl_training.errors import DataError

MAGIC, TAIL_BYTES = b"PAR1", 8
MAX_FOOTER_BYTES = 2**30
MAX_DEPTH = 32
# Numbers of the fields in the structures of Parquet's footer, which are encoded by Thrift.
_ROW_GROUPS, _COLUMNS, _ROWS, _COLUMN_METADATA, _VALUES, _BYTES = 4, 1, 3, 3, 5, 6
# Types of Thrift's compact protocol.
_TRUE, _FALSE, _BYTE, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = 1, 2, 3, 7, 8, 9, 10, 11, 12
_INTEGERS = (4, 5, 6)


@dataclass
class RowGroup:
    """What a footer declares about one row group."""

    rows: int = 0
    columns: list[tuple[int, int]] = field(default_factory=list)
    """Number of values and decoded bytes of each column"""


def read_row_groups(file: IO[bytes], name: str) -> list[RowGroup]:
    """Read the row groups that the footer of a file declares."""
    size = file.seek(0, 2)
    file.seek(max(size - TAIL_BYTES, 0))
    tail = file.read(TAIL_BYTES)
    length = int.from_bytes(tail[:4], "little")
    if tail[4:] != MAGIC or length + TAIL_BYTES > min(size, MAX_FOOTER_BYTES):
        raise DataError(f"{name}: cannot be read as Parquet (it has no valid footer)")
    file.seek(size - length - TAIL_BYTES)
    thrift = _Compact(file.read(length))
    groups: list[RowGroup] = []
    try:
        for number, kind in thrift.fields():
            if (number, kind) == (_ROW_GROUPS, _LIST):
                groups = [_row_group(thrift) for _ in range(thrift.length(_STRUCT))]
            else:
                thrift.skip(kind)
    except (IndexError, ValueError):
        raise DataError(f"{name}: cannot be read as Parquet (its footer is damaged)") from None
    return groups


def _row_group(thrift: _Compact) -> RowGroup:
    group = RowGroup()
    for number, kind in thrift.fields():
        if (number, kind) == (_COLUMNS, _LIST):
            group.columns = [_column(thrift) for _ in range(thrift.length(_STRUCT))]
        elif number == _ROWS:
            group.rows = thrift.integer(kind)
        else:
            thrift.skip(kind)
    return group


def _column(thrift: _Compact) -> tuple[int, int]:
    values = size = -1
    for number, kind in thrift.fields():
        if (number, kind) != (_COLUMN_METADATA, _STRUCT):
            thrift.skip(kind)
            continue
        for inner, inner_kind in thrift.fields():
            if inner == _VALUES:
                values = thrift.integer(inner_kind)
            elif inner == _BYTES:
                size = thrift.integer(inner_kind)
            else:
                thrift.skip(inner_kind)
    return values, size


class _Compact:
    """A reader of Thrift's compact protocol; every element that it reads takes at least a byte."""

    def __init__(self, data: Sequence[int]) -> None:
        self._data, self._at = data, 0

    def fields(self) -> Iterator[tuple[int, int]]:
        """Yield number and type of each field of a structure; the caller reads or skips it."""
        number = 0
        while head := self._byte():
            number = number + (head >> 4) if head >> 4 else self._signed()
            yield number, head & 15

    def integer(self, kind: int) -> int:
        if kind not in _INTEGERS:
            raise ValueError(kind)
        return self._signed()

    def length(self, expected: int | None = None) -> int:
        """Read the head of a list."""
        return self._list_head(expected)[0]

    def skip(self, kind: int, depth: int = 0, *, in_list: bool = False) -> None:
        """Skip a value of this type."""
        if depth > MAX_DEPTH:
            raise ValueError("too deep")
        if kind in (_TRUE, _FALSE):
            self._at += in_list  # the type of a field is its value
        elif kind == _BYTE:
            self._at += 1
        elif kind in _INTEGERS:
            self._varint()
        elif kind == _DOUBLE:
            self._at += 8
        elif kind == _BINARY:
            length = self._varint()
            self._at += length
        elif kind in (_LIST, _SET):
            number, element = self._list_head()
            for _ in range(number):
                self.skip(element, depth + 1, in_list=True)
        elif kind == _MAP:
            number = self._varint()
            kinds = self._byte() if number else 0
            for _ in range(number):
                self.skip(kinds >> 4, depth + 1, in_list=True)
                self.skip(kinds & 15, depth + 1, in_list=True)
        elif kind == _STRUCT:
            for _, inner in self.fields():
                self.skip(inner, depth + 1)
        else:
            raise ValueError(kind)
        if self._at > len(self._data):
            raise IndexError(self._at)

    def _list_head(self, expected: int | None = None) -> tuple[int, int]:
        head = self._byte()
        if expected is not None and head & 15 != expected:
            raise ValueError(head)
        return (self._varint() if head >> 4 == 15 else head >> 4), head & 15

    def _byte(self) -> int:
        value = self._data[self._at]
        self._at += 1
        return value

    def _varint(self) -> int:
        value = shift = 0
        while True:
            byte = self._byte()
            value |= (byte & 127) << shift
            if byte < 128:
                return value
            shift += 7
            if shift > 63:
                raise ValueError("too long")

    def _signed(self) -> int:
        value = self._varint()
        return (value >> 1) ^ -(value & 1)
