"""Read and write columns of numbers in Parquet files, in batches, with pyarrow.

Files may come from strangers. Only columns of numbers are read, and their declared sizes are
checked before any data is. Nothing in a file is executed: pyarrow reads a type that it does not
know as its plain storage, and it no longer loads pickled types.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np

from rl_training.data.formats.parquet_footers import RowGroup, read_row_groups
from rl_training.data.formats.recording import CHUNK_ROWS
from rl_training.data.formats.stored import Arrays
from rl_training.errors import DataError, brief
from rl_training.types import Json

BATCH_BYTES = 2**24
"""Decoded size of the values that are read at a time, at most, if rows are not larger"""
MAX_COMPONENTS = 100_000
"""Most numbers in one value of a column"""
MAX_COLUMN_BYTES = 2**30
"""Most decoded bytes of a column in one row group, which pyarrow may hold in memory"""
MAX_EXPANSION, SMALL_BYTES = 1_000, 2**28
"""How much larger than the file its decoded values may be, and up to which size that is ignored.

A column of equal values takes almost no space in a file; without a limit, a tiny file could take
hours to read."""
READ_BYTES = 2**20
NUMBERED_FILE = "chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
VALUE_BYTES = 8
NOT_NUMBERS = ("BYTE_ARRAY", "FIXED_LEN_BYTE_ARRAY", "INT96")


class ParquetColumns:
    """The columns of numbers in one Parquet file."""

    def __init__(self, opened: Callable[[], IO[bytes]], name: str) -> None:
        """`opened` opens the file; it is called for each pass over the data."""
        self._opened, self._name = opened, name
        with self._file() as file:
            self.rows: int = file.metadata.num_rows
            self.names: list[str] = list(file.schema_arrow.names)

    def batches(self, sizes: Mapping[str, int]) -> Iterator[dict[str, np.ndarray]]:
        """Yield these columns in batches, each as `(rows, size)`.

        `sizes` are the numbers of components. All batches together have `rows` rows.
        """
        row_bytes = VALUE_BYTES * sum(sizes.values())
        batch_rows = max(1, min(CHUNK_ROWS, BATCH_BYTES // row_bytes))
        with self._file() as file:
            leaves = [file.schema.column(leaf).path for leaf in self._leaves(file, sizes).values()]
            left = self.rows
            for batch in file.iter_batches(batch_rows, columns=leaves, use_threads=False):
                left -= batch.num_rows
                if left < 0:
                    break
                yield {
                    key: _numbers(batch.column(key), size, f"{self._name}: {key}")
                    for key, size in sizes.items()
                }
            if left:  # the number of rows is declared twice
                raise DataError(f"{self._name}: does not have the {self.rows:,} rows it declares")

    def check(self, sizes: Mapping[str, int]) -> None:
        """Raise a `DataError` if the columns are missing, or larger than they should be.

        Must be called before `batches`: pyarrow decodes what a file declares, however large it is.
        """
        with self._file() as file:
            leaves = self._leaves(file, sizes)
            groups = file.metadata.num_row_groups
            # A column without lists has one value for each row; others may have any number.
            lists = [key for key in sizes if file.schema.column(leaves[key]).max_repetition_level]
        with parquet_errors(self._name), self._opened() as raw:
            declared = read_row_groups(raw, self._name) if lists else []
            stored = raw.seek(0, 2)
        if lists and (len(declared), sum(group.rows for group in declared)) != (groups, self.rows):
            raise DataError(f"{self._name}: cannot be read as Parquet (its footer is damaged)")
        for group in declared:
            for key in lists:
                self._check_list(group, leaves[key], sizes[key], key)
        total = VALUE_BYTES * self.rows * sum(sizes.values())
        if total > max(SMALL_BYTES, MAX_EXPANSION * stored):
            raise DataError(
                f"{self._name}: {stored:,} bytes claim to hold {total:,} bytes of numbers, more "
                f"than {MAX_EXPANSION:,} times as many; such files are not read"
            )

    def _check_list(self, group: RowGroup, leaf: int, size: int, key: str) -> None:
        values, decoded = group.columns[leaf] if leaf < len(group.columns) else (-1, 0)
        if values != size * group.rows:
            raise DataError(
                f"{self._name}: {key} has {values} values in {group.rows} rows; each row must "
                f"have {size}"
            )
        if decoded > MAX_COLUMN_BYTES:
            raise DataError(
                f"{self._name}: {key} has a row group of {decoded:,} bytes; at most "
                f"{MAX_COLUMN_BYTES:,} are read"
            )

    def _leaves(self, file: Any, sizes: Mapping[str, int]) -> dict[str, int]:
        """Return the position of each column among the leaves of the file's schema.

        pyarrow selects by path, and everything below it: the name `action` alone would also select
        the column `action.image`.
        """
        positions, position = {}, 0
        for field in file.schema_arrow:
            positions[field.name] = position
            position += _count_leaves(field.type)
        for key in sizes:
            if self.names.count(key) != 1:
                found = ", ".join(name for name in self.names[:20])
                raise DataError(f"{self._name}: has not one column {key!r}; found {found:.500}")
            field = file.schema_arrow.field(key)
            kind = file.schema.column(min(positions[key], len(file.schema) - 1)).physical_type
            if _count_leaves(field.type) != 1 or kind in NOT_NUMBERS:
                raise DataError(f"{self._name}: {key} holds {kind} values; it must be numeric")
        if position != len(file.schema):
            raise DataError(f"{self._name}: its columns cannot be told apart")
        return {key: positions[key] for key in sizes}

    @contextmanager
    def _file(self) -> Iterator[Any]:
        import pyarrow.parquet

        with parquet_errors(self._name), self._opened() as file:
            yield pyarrow.parquet.ParquetFile(
                file,
                buffer_size=READ_BYTES,
                pre_buffer=False,
                page_checksum_verification=True,
            )


class NumberedFiles:
    """New Parquet files `chunk-000/file-000.parquet` and so on in a folder."""

    def __init__(self, folder: Path, schema: Any, files_per_chunk: int) -> None:
        self._folder, self._columns, self._files_per_chunk = folder, schema, files_per_chunk
        self._writer: Any = None
        self.chunk = self.file = self.rows = 0

    @property
    def bytes(self) -> int:
        """Size of the current file so far."""
        return 0 if self._writer is None else self._path.stat().st_size

    @property
    def _path(self) -> Path:
        return self._folder / NUMBERED_FILE.format(chunk_index=self.chunk, file_index=self.file)

    def write(self, columns: Arrays) -> None:
        import pyarrow

        arrays = [_arrow(columns[field.name], field.type) for field in self._columns]
        self._write(pyarrow.Table.from_arrays(arrays, schema=self._columns))

    def write_rows(self, rows: list[Json]) -> None:
        import pyarrow

        self._write(pyarrow.Table.from_pylist(rows, schema=self._columns))

    def next_file(self) -> None:
        """Close the current file; the next rows are written to a new one."""
        self.close()
        self.file, self.rows = self.file + 1, 0
        if self.file == self._files_per_chunk:
            self.chunk, self.file = self.chunk + 1, 0

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _write(self, table: Any) -> None:
        import pyarrow.parquet

        if self._writer is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._writer = pyarrow.parquet.ParquetWriter(
                self._path, self._columns, compression="snappy", write_page_checksum=True
            )
        self._writer.write_table(table)
        self.rows += table.num_rows


def require_pyarrow(what: str) -> None:
    """Raise a `DataError` that says what to install if pyarrow is missing."""
    if importlib.util.find_spec("pyarrow") is None:
        raise DataError(
            f"{what} needs the package pyarrow; install it with "
            "`pip install 'rl-training[lerobot]'`"
        )


@contextmanager
def parquet_errors(name: str) -> Iterator[None]:
    """Convert the errors that pyarrow raises for a damaged file to `DataError`."""
    import pyarrow

    try:
        yield
    except DataError:
        raise
    except (
        pyarrow.ArrowException,
        OSError,
        ValueError,
        KeyError,
        OverflowError,
        MemoryError,
    ) as error:
        raise DataError(f"{name}: cannot be read as Parquet ({brief(error)})") from None


def _count_leaves(kind: Any) -> int:
    """Return how many columns a Parquet file stores for a type."""
    if hasattr(kind, "storage_type"):  # an extension type
        return _count_leaves(kind.storage_type)
    if hasattr(kind, "value_type") and not hasattr(kind, "index_type"):  # not a dictionary
        key = _count_leaves(kind.key_type) if hasattr(kind, "key_type") else 0
        item = kind.item_type if hasattr(kind, "item_type") else kind.value_type
        return key + _count_leaves(item)
    if kind.num_fields and not hasattr(kind, "index_type"):
        return sum(_count_leaves(kind.field(index).type) for index in range(kind.num_fields))
    return 1


def _numbers(array: Any, size: int, name: str) -> np.ndarray:
    """Return an Arrow array as `(rows, size)`."""
    import pyarrow
    import pyarrow.compute
    from pyarrow import types

    rows, kind = len(array), array.type
    if array.null_count:
        raise DataError(f"{name} has missing values")
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        lengths = pyarrow.compute.list_value_length(array)
        if rows and pyarrow.compute.min_max(lengths).as_py() != {"min": size, "max": size}:
            raise DataError(f"{name} has values of different lengths; each must have {size}")
        array = array.flatten()
    elif size != 1:
        raise DataError(f"{name} has type {kind!s:.80}; it must be a list of {size} numbers")
    kind = array.type
    if not (types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)):
        raise DataError(f"{name} has type {kind!s:.80}; it must be numeric")
    if array.null_count:
        raise DataError(f"{name} has missing values")
    return np.asarray(array.to_numpy(zero_copy_only=False)).reshape(rows, size)


def _arrow(values: np.ndarray, kind: Any) -> Any:
    import pyarrow

    flat = pyarrow.array(np.ascontiguousarray(values).reshape(-1))
    if pyarrow.types.is_fixed_size_list(kind):
        return pyarrow.FixedSizeListArray.from_arrays(flat, type=kind)
    return flat


def joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Join columns side by side."""
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)
