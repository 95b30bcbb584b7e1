"""The checkpoint format: a folder of JSON and safetensors files, written atomically.

The files are first written to a temporary folder and flushed to disk. The manifest, with the size
and the hash of each file, is written last. Then the folder is renamed, so a checkpoint is either
complete or absent. Only JSON and safetensors files are read, so no file can execute code.

PyTorch is imported when tensors are read or written, so that an overview of runs needs none of it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_training.errors import CheckpointError
from rl_training.types import Json, State

if TYPE_CHECKING:
    from torch import Tensor

FORMAT_VERSION = 1
MANIFEST = "MANIFEST.json"
MODEL, POLICY = "model.safetensors", "policy.json"
LEARNER, STATE = "learner.safetensors", "state.json"
PRIORITIES = "priorities.safetensors"
MAX_JSON_BYTES = 64 * 2**20
_STEP_NAME = re.compile(r"^step_(\d{9,})$")
_FILE_NAME = re.compile(r"^[\w][\w.-]*$")
_TEMPORARY = ".tmp-"


@dataclass(frozen=True)
class Link:
    """A file with the same bytes in an earlier checkpoint, to be linked instead of written."""

    source: Path
    size: int
    sha256: str


Content = State | Json | Link
"""Tensors, JSON values, or a file to link"""


class CheckpointReader:
    """Reads one checkpoint or saved policy.

    Call `verify` before reading a file: it checks the file against the manifest.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        manifest = read_json(folder / MANIFEST)
        version = manifest.get("format_version")
        if version != FORMAT_VERSION:
            raise CheckpointError(
                f"{folder}: format version {version!r} is not supported; "
                f"this package reads version {FORMAT_VERSION}"
            )
        self.files = _checked_entries(folder, manifest)

    def verify(self, names: Iterable[str] | None = None) -> CheckpointReader:
        """Check the size and the hash of these files, or of all files; return the reader itself."""
        for name in self.files if names is None else names:
            if name not in self.files:
                raise CheckpointError(f"{self.folder}: {name} is missing from the manifest")
            entry, path = self.files[name], self.folder / name
            try:
                size = path.stat().st_size
            except OSError:
                raise CheckpointError(f"{self.folder}: {name} is missing") from None
            if size != entry["size"]:
                raise CheckpointError(
                    f"{self.folder}: {name} has {size} bytes, the manifest says {entry['size']}"
                )
            if _hash_file(path) != entry["sha256"]:
                raise CheckpointError(f"{self.folder}: {name} is damaged (its hash differs)")
        return self

    def json(self, name: str) -> Json:
        """Read a JSON file."""
        return read_json(self.folder / name)

    def tensors(self, name: str) -> dict[str, Tensor]:
        """Read a safetensors file."""
        import safetensors.torch

        try:
            return safetensors.torch.load_file(self.folder / name)
        except (OSError, safetensors.SafetensorError) as error:
            raise CheckpointError(f"{self.folder}: {name} cannot be read ({error})") from None

    def has(self, name: str) -> bool:
        """Return whether the manifest lists a file and the file exists."""
        return name in self.files and (self.folder / name).is_file()

    def link(self, name: str) -> Link:
        """Return a file of this checkpoint as content for the next one."""
        entry = self.files[name]
        return Link(self.folder / name, entry["size"], entry["sha256"])


def write_checkpoint(destination: Path, contents: dict[str, Content]) -> None:
    """Write a checkpoint folder; even after an error, `destination` is complete or absent."""
    destination.parent.mkdir(parents=True, exist_ok=True)
    temporary = destination.parent / f"{_TEMPORARY}{uuid.uuid4().hex}"
    temporary.mkdir()
    try:
        entries = {name: _write(temporary / name, content) for name, content in contents.items()}
        manifest = {"format_version": FORMAT_VERSION, "files": entries}
        _write_bytes(temporary / MANIFEST, _json_bytes(manifest))
        sync_folder(temporary)
        _replace_folder(temporary, destination)
        sync_folder(destination.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def copy_checkpoint(reader: CheckpointReader, destination: Path) -> None:
    """Copy the files that the manifest lists to a new folder; nothing is linked."""
    destination.mkdir(parents=True)
    for name in (*reader.files, MANIFEST):
        _copy(reader.folder / name, destination / name)
    sync_folder(destination)
    sync_folder(destination.parent)


def write_json(path: Path, values: Json) -> None:
    """Write a small JSON file atomically."""
    write_file(path, _json_bytes(values))


def write_file(path: Path, data: bytes) -> None:
    """Write a small file atomically."""
    temporary = path.with_name(f"{_TEMPORARY}{uuid.uuid4().hex}")
    try:
        _write_bytes(temporary, data)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def step_folder_name(step: int) -> str:
    return f"step_{step:09d}"


def step_of(folder: Path) -> int | None:
    """Return the step in a checkpoint folder's name, or None for any other folder."""
    match = _STEP_NAME.match(folder.name)
    return int(match[1]) if match else None


def checkpoint_folders(parent: Path) -> list[Path]:
    """Return the checkpoint folders, newest first, without checking their files."""
    if not parent.is_dir():
        return []
    folders = [path for path in parent.iterdir() if path.is_dir() and step_of(path) is not None]
    return sorted(folders, key=lambda path: step_of(path) or 0, reverse=True)


def remove_checkpoint(folder: Path) -> None:
    """Remove a checkpoint; it is renamed first, so that no partial checkpoint remains."""
    temporary = folder.with_name(f"{_TEMPORARY}{uuid.uuid4().hex}")
    with contextlib.suppress(OSError):
        folder.rename(temporary)
        shutil.rmtree(temporary, ignore_errors=True)


def remove_leftovers(parent: Path) -> None:
    """Remove the temporary files of interrupted saves. The caller must hold the run's lock."""
    for path in parent.glob(f"{_TEMPORARY}*"):
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


def _checked_entries(folder: Path, manifest: Json) -> dict[str, Json]:
    files = manifest.get("files")
    if not isinstance(files, dict) or not files:
        raise CheckpointError(f"{folder}: the manifest lists no files")
    for name, entry in files.items():
        if not _FILE_NAME.fullmatch(name):
            raise CheckpointError(f"{folder}: the manifest lists {name!r}, an invalid file name")
        if not (
            isinstance(entry, dict)
            and isinstance(entry.get("size"), int)
            and isinstance(entry.get("sha256"), str)
        ):
            raise CheckpointError(f"{folder}: the manifest's entry for {name} is damaged")
    return files


def read_json(path: Path) -> Json:
    """Read a JSON object from a file; raise `CheckpointError` if that fails."""
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise CheckpointError(
                f"{path.parent}: {path.name} is larger than {MAX_JSON_BYTES:,} bytes"
            )
        values = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent}: {path.name} is missing") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path.parent}: {path.name} cannot be read ({error})") from None
    if not isinstance(values, dict):
        raise CheckpointError(f"{path.parent}: {path.name} is damaged (not a JSON object)")
    return values


def _write(path: Path, content: Content) -> Json:
    if isinstance(content, Link):
        _link_or_copy(content.source, path)
        return {"size": content.size, "sha256": content.sha256}
    if path.suffix == ".json":
        # With line breaks, Python uses a slower encoder, and the state is large.
        data = _json_bytes(content, indent=None if path.name == STATE else 1)
    else:
        import safetensors.torch

        data = safetensors.torch.save(
            {name: tensor.detach().cpu().contiguous() for name, tensor in content.items()}
        )
    _write_bytes(path, data)
    return {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def _link_or_copy(source: Path, path: Path) -> None:
    try:
        os.link(source, path)
    except OSError:  # the file system has no hard links
        _copy(source, path)


def _copy(source: Path, path: Path) -> None:
    shutil.copyfile(source, path)
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _json_bytes(values: Any, indent: int | None = 1) -> bytes:
    return (json.dumps(values, indent=indent, allow_nan=False) + "\n").encode()


def _write_bytes(path: Path, data: bytes) -> None:
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _replace_folder(temporary: Path, destination: Path) -> None:
    if not destination.exists():
        temporary.rename(destination)
        return
    # Only for a damaged checkpoint, or a policy that is saved again under the same name.
    aside = destination.with_name(f"{_TEMPORARY}{uuid.uuid4().hex}")
    destination.rename(aside)
    temporary.rename(destination)
    shutil.rmtree(aside, ignore_errors=True)


def sync_folder(folder: Path) -> None:
    """Flush the names of a folder's files to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
