"""The checkpoint format: a folder of JSON and safetensors files, written atomically.

The files are first written to a temporary folder and flushed to disk. The manifest, with the size
and the hash of each file, is written last. Then the folder is renamed, so a checkpoint is either
complete or absent. Only JSON and safetensors files are read, so no file can execute code. Only
files that the manifest lists are read, and what is read is what was compared with the manifest.

PyTorch is imported when tensors are read or written, so that an overview of runs needs none of it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import shutil
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from rl_training.checkpoints.files import TEMPORARY, PlainFolder, temporary_name
from rl_training.errors import CheckpointError
from rl_training.types import Json, State
from rl_training.validation import short

if TYPE_CHECKING:
    from torch import Tensor

FORMAT_VERSION = 1
MANIFEST = "MANIFEST.json"
MODEL, POLICY = "model.safetensors", "policy.json"
LEARNER, STATE = "learner.safetensors", "state.json"
PRIORITIES, EPISODES = "priorities.safetensors", "episodes.safetensors"
ROLLOUT = "rollout.safetensors"
SEGMENT = re.compile(r"^replay-\d{5,}\.safetensors$")
FRAME_SEGMENT = re.compile(r"^frames-(\d{2,})-\d{5,}\.safetensors$", re.ASCII)
MAX_STATE_BYTES, MAX_JSON_BYTES = 64 * 2**20, 16 * 2**20
"""Largest `state.json`, which has snapshots of up to thousands of environments, and other JSON"""
MAX_STATE_VALUES, MAX_JSON_VALUES = 2_500_000, 500_000
"""Most values in them: each takes up to a hundred times its length in memory"""
MAX_TENSOR_BYTES = 16 * 2**30
MAX_HEADER_BYTES = 4 * 2**20
"""Longest header of a safetensors file, which lists its tensors"""
MAX_AXES = 8
RUN_FOLDERS = ("checkpoints", "superseded")
"""Folders inside a run folder that contain checkpoints"""
_REPLACED = ".replaced-"
"""Begins the name of a checkpoint while another one takes its place"""
_STEP_NAME = re.compile(r"^step_(\d{9,})$", re.ASCII)
_FILE_NAME = re.compile(r"^\w[\w.-]*$", re.ASCII)
_ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "I16": 2, "U16": 2, "F16": 2,
    "BF16": 2, "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8,
}  # fmt: skip


@dataclass(frozen=True)
class Link:
    """A file with the same bytes in an earlier checkpoint, to be linked instead of written."""

    source: Path
    size: int
    sha256: str


Content = State | Json | Link
"""Tensors, JSON values, or a file to link"""

Shapes = dict[str, tuple[int, ...]]
"""Shapes of tensors by name"""


class CheckpointReader:
    """Reads one checkpoint or saved policy: only files that its manifest lists, and checked."""

    def __init__(self, folder: Path, manifest: Json | None = None) -> None:
        """Read the manifest, unless its content is given."""
        self.folder = folder
        self._plain = plain_folder(folder)
        if manifest is None:
            manifest = read_json_in(self._plain, MANIFEST)
        version = manifest.get("format_version")
        if version != FORMAT_VERSION or isinstance(version, bool):
            raise CheckpointError(
                f"{folder}: format version {short(version)} is not supported; "
                f"this package reads version {FORMAT_VERSION}"
            )
        self.files = _checked_entries(folder, manifest)
        self._parsed: dict[str, Json] = {}

    def verify(self, names: Iterable[str] | None = None) -> CheckpointReader:
        """Check the size and the hash of these files, or of all files; return the reader itself."""
        for name in self.files if names is None else names:
            self._check_size(name)
            if name.endswith(".safetensors"):
                self.shapes(name)
            with self._plain.reading(name) as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
            self._check_hash(name, found)
        return self

    def check_sizes(self) -> None:
        """Check that every listed file exists and has its size, without reading it."""
        for name in self.files:
            self._check_size(name)

    def json(self, name: str) -> Json:
        """Read a JSON file and check it against the manifest, once; do not change the result."""
        if name not in self._parsed:
            data = self._checked_bytes(name, _json_limit(name))
            self._parsed[name] = parse_json(data, self.folder, name)
        return self._parsed[name]

    def tensors(self, name: str) -> dict[str, Tensor]:
        """Read a safetensors file and check it against the manifest."""
        import safetensors.torch

        self.shapes(name)
        data = self._checked_bytes(name, MAX_TENSOR_BYTES)
        try:
            return safetensors.torch.load(data)
        except (ValueError, RuntimeError, KeyError, safetensors.SafetensorError) as error:
            raise CheckpointError(f"{self.folder}: {name} cannot be read ({error})") from None

    def shapes(self, name: str) -> Shapes:
        """Read the shapes of the tensors of a safetensors file, which must add up to its size.

        Only its header is read, which is not compared with the manifest.
        """
        size = self._check_size(name)
        with self._plain.reading(name) as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(MAX_HEADER_BYTES, size - 8):
                raise CheckpointError(f"{self.folder}: {name} is damaged (its header is too long)")
            header = parse_json(file.read(length), self.folder, name)
        return _checked_shapes(header, size - 8 - length, f"{self.folder}: {name} is damaged")

    def has(self, name: str) -> bool:
        """Return whether the manifest lists a file and the file exists."""
        return name in self.files and self._plain.has_file(name)

    def link(self, name: str) -> Link:
        """Return a file of this checkpoint as content for the next one."""
        entry = self.files[name]
        return Link(self.folder / name, entry["size"], entry["sha256"])

    def _check_size(self, name: str) -> int:
        if name not in self.files:
            raise CheckpointError(f"{self.folder}: {name} is missing from the manifest")
        listed: int = self.files[name]["size"]
        limit = MAX_TENSOR_BYTES if name.endswith(".safetensors") else _json_limit(name)
        size = self._plain.size(name)
        if size != listed:
            raise CheckpointError(
                f"{self.folder}: {name} has {size} bytes, the manifest says {listed}"
            )
        if size > limit:
            raise CheckpointError(f"{self.folder}: {name} has {size:,} bytes; at most {limit:,}")
        return size

    def _checked_bytes(self, name: str, limit: int) -> bytes:
        self._check_size(name)
        data = self._plain.read(name, limit)
        self._check_hash(name, hashlib.sha256(data).hexdigest())
        return data

    def _check_hash(self, name: str, found: str) -> None:
        if found != self.files[name]["sha256"]:
            raise CheckpointError(f"{self.folder}: {name} is damaged (its hash differs)")


def plain_folder(path: Path) -> PlainFolder:
    """Return a checkpoint, a saved policy or a folder of checkpoints, to open files in it.

    In a run folder, `checkpoints` may not be a link either.
    """
    if path.name in RUN_FOLDERS:
        return PlainFolder(path, path.parent)
    inside = path.parent.name in RUN_FOLDERS and step_of(path) is not None
    return PlainFolder(path, path.parent.parent if inside else path)


def write_checkpoint(destination: Path, contents: dict[str, Content]) -> Json:
    """Write a checkpoint folder and return its manifest.

    Even after an error, `destination` is complete or absent.
    """
    parent = plain_folder(destination.parent)
    parent.make()
    name = temporary_name()
    temporary = parent.make_inner(name)
    try:
        entries = {name: _write(temporary, name, content) for name, content in contents.items()}
        manifest = {"format_version": FORMAT_VERSION, "files": entries}
        temporary.write_new(MANIFEST, _json_bytes(manifest))
        temporary.sync()
        _replace_folder(parent, name, destination.name)
        parent.sync()
    except BaseException:
        parent.remove(name)
        raise
    return manifest


def copy_checkpoint(reader: CheckpointReader, destination: Path) -> None:
    """Copy the files that the manifest lists to a new folder; nothing is linked."""
    parent, origin = plain_folder(destination.parent), plain_folder(reader.folder)
    parent.make()
    folder = parent.make_inner(destination.name)
    for name in (*reader.files, MANIFEST):
        _copy(origin, name, folder, name)
    folder.sync()
    parent.sync()


def write_json(path: Path, values: Json) -> None:
    """Write a small JSON file atomically."""
    write_file(path, _json_bytes(values))


def write_file(path: Path, data: bytes) -> None:
    """Write a small file atomically."""
    plain_folder(path.parent).replace(path.name, data)


def segment_name(index: int) -> str:
    """Return the name of the file with the replay rows of a segment."""
    return f"replay-{index:05d}.safetensors"


def segment_names(names: Iterable[str]) -> list[str]:
    """Return those of the files that contain replay rows, in the order of their segments."""
    return sorted(name for name in names if SEGMENT.match(name))


def frame_segment_name(image: int, index: int) -> str:
    """Return the name of the file with the frames of an image in a segment."""
    return f"frames-{image:02d}-{index:05d}.safetensors"


def frame_segment_names(names: Iterable[str], image: int) -> list[str]:
    """Return those of the files that contain frames of an image, in the order of their segments."""
    found = {name: FRAME_SEGMENT.match(name) for name in names}
    return sorted(name for name, match in found.items() if match and int(match[1]) == image)


def replay_files(names: Iterable[str]) -> list[str]:
    """Return those of the files that contain rows or frames of a replay buffer."""
    return sorted(name for name in names if SEGMENT.match(name) or FRAME_SEGMENT.match(name))


def step_folder_name(step: int) -> str:
    return f"step_{step:09d}"


def step_of(folder: Path) -> int | None:
    """Return the step in a checkpoint folder's name, or None for any other folder."""
    match = _STEP_NAME.match(folder.name)
    return int(match[1]) if match else None


def checkpoint_folders(parent: Path) -> list[Path]:
    """Return the checkpoint folders, newest first, without checking their files."""
    entries = plain_folder(parent).entries()
    folders = [parent / name for name, mode in entries.items() if not stat.S_ISREG(mode)]
    known = [folder for folder in folders if step_of(folder) is not None]
    return sorted(known, key=lambda path: step_of(path) or 0, reverse=True)


def replaced_folder(path: Path) -> Path:
    """Return where a saved policy is while another one takes its place, or was when it failed."""
    return path.with_name(f"{_REPLACED}{path.name}")


def has_only_checkpoint_files(folder: PlainFolder) -> bool:
    """Return whether a folder contains nothing but files that a checkpoint can have."""
    return all(
        stat.S_ISREG(mode) and name.endswith((".json", ".safetensors"))
        for name, mode in folder.entries().items()
    )


def remove_checkpoint(folder: Path) -> None:
    """Remove a checkpoint; it is renamed first, so that no partial checkpoint remains."""
    parent, temporary = plain_folder(folder.parent), temporary_name()
    with contextlib.suppress(OSError):
        parent.rename(folder.name, temporary)
        parent.remove(temporary)


def remove_leftovers(parent: Path) -> None:
    """Remove the temporary files of interrupted saves. The caller must hold the run's lock."""
    folder = plain_folder(parent)
    for name in folder.entries():
        if name.startswith(_REPLACED):
            original = name.removeprefix(_REPLACED)
            if folder.mode(original) is None:
                folder.rename(name, original)
            else:  # its replacement exists
                folder.remove(name)
        elif name.startswith(TEMPORARY):
            folder.remove(name)


def _checked_entries(folder: Path, manifest: Json) -> dict[str, Json]:
    files = manifest.get("files")
    if not isinstance(files, dict) or not files:
        raise CheckpointError(f"{folder}: the manifest lists no files")
    for name, entry in files.items():
        if not _FILE_NAME.fullmatch(name):
            raise CheckpointError(
                f"{folder}: the manifest lists {short(name)}, an invalid file name"
            )
        if not (
            isinstance(entry, dict)
            and type(entry.get("size")) is int
            and isinstance(entry.get("sha256"), str)
        ):
            raise CheckpointError(f"{folder}: the manifest's entry for {name} is damaged")
    return files


def _checked_shapes(header: Json, data_bytes: int, problem: str) -> Shapes:
    """Return the shapes in a safetensors header; they must fill the rest of the file exactly."""
    shapes: Shapes = {}
    total = 0
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        shape = entry.get("shape") if isinstance(entry, dict) else None
        if (
            not isinstance(shape, list)
            or len(shape) > MAX_AXES
            or not all(type(size) is int and 0 <= size <= data_bytes for size in shape)
            or entry.get("dtype") not in _ITEM_BYTES
        ):
            raise CheckpointError(f"{problem} (its header describes no tensor {short(name)})")
        shapes[name] = tuple(shape)
        total += math.prod(shape) * _ITEM_BYTES[entry["dtype"]]
    if total != data_bytes:
        raise CheckpointError(f"{problem} (its header describes {total:,} bytes of {data_bytes:,})")
    return shapes


def read_json(path: Path) -> Json:
    """Read a JSON object from a file; raise `CheckpointError` if that fails."""
    return read_json_in(plain_folder(path.parent), path.name)


def read_json_in(folder: PlainFolder, name: str) -> Json:
    """Like `read_json`, for a file of an opened folder."""
    return parse_json(folder.read(name, _json_limit(name)), folder.path, name)


def parse_json(data: bytes, folder: Path, name: str) -> Json:
    """Parse a JSON object with bounded time and memory; raise `CheckpointError` if that fails."""
    problem = f"{folder}: {name} cannot be read"
    if too_large := _too_large(name, data):
        raise CheckpointError(f"{problem} ({too_large})")
    try:
        values = json.loads(data, parse_constant=_refuse_constant, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{problem} ({error})") from None
    if not isinstance(values, dict):
        raise CheckpointError(f"{folder}: {name} is damaged (not a JSON object)")
    return values


def finite_or_none(value: float | None) -> float | None:
    """Return the number itself, or None if JSON cannot represent it."""
    return value if value is not None and math.isfinite(value) else None


def _unique(pairs: list[tuple[str, Any]]) -> Json:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError("a key is given twice")
    return values


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _json_limit(name: str) -> int:
    return MAX_STATE_BYTES if name == STATE else MAX_JSON_BYTES


def _too_large(name: str, data: bytes) -> str | None:
    """Return why JSON would take too much memory, or None."""
    if len(data) > _json_limit(name):
        return f"it has {len(data):,} bytes; at most {_json_limit(name):,}"
    limit = MAX_STATE_VALUES if name == STATE else MAX_JSON_VALUES
    return f"it has more than {limit:,} values" if count_values(data) > limit else None


def count_values(data: bytes) -> int:
    """Return how many values JSON may have: one per comma or opening bracket."""
    return sum(map(data.count, (b",", b"[", b"{")))


def _write(folder: PlainFolder, name: str, content: Content) -> Json:
    if isinstance(content, Link):
        _link_or_copy(content.source, folder, name)
        return {"size": content.size, "sha256": content.sha256}
    if name.endswith(".json"):
        # With line breaks, Python uses a slower encoder, and the state is large.
        data = _json_bytes(content, indent=None if name == STATE else 1)
        if too_large := _too_large(name, data):  # nothing is written that could not be read
            raise CheckpointError(f"{name} cannot be saved: {too_large}; use a smaller num_envs")
    else:
        import safetensors.torch

        data = safetensors.torch.save(
            {name: tensor.detach().cpu().contiguous() for name, tensor in content.items()}
        )
    folder.write_new(name, data)
    return {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def _link_or_copy(source: Path, folder: PlainFolder, name: str) -> None:
    origin = plain_folder(source.parent)
    try:
        folder.link(name, origin, source.name)
    except OSError:  # the file system has no hard links
        _copy(origin, source.name, folder, name)


def _copy(origin: PlainFolder, source: str, folder: PlainFolder, name: str) -> None:
    with origin.open(source) as old, folder.open(name, "xb") as new:
        shutil.copyfileobj(old, new)
        new.flush()
        os.fsync(new.fileno())


def _json_bytes(values: Any, indent: int | None = 1) -> bytes:
    return (json.dumps(values, indent=indent, allow_nan=False) + "\n").encode()


def _replace_folder(parent: PlainFolder, temporary: str, name: str) -> None:
    aside = replaced_folder(parent.path / name).name
    if parent.mode(aside) is not None and not has_only_checkpoint_files(parent.inner(aside)):
        raise CheckpointError(f"{parent.path / aside}: is not a checkpoint; rename it or remove it")
    if parent.mode(name) is None:
        parent.rename(temporary, name)
        parent.remove(aside)  # of a process that was killed below
        return
    # Only for a damaged checkpoint, one whose block of updates was interrupted, or a policy that is
    # saved again under the same name.
    parent.remove(aside)
    try:
        parent.rename(name, aside)
        parent.rename(temporary, name)
    except BaseException:
        if parent.mode(name) is None and parent.mode(aside) is not None:
            parent.rename(aside, name)
        raise
    parent.remove(aside)
