"""Get policies from the Hugging Face Hub.

What is pulled is a file from a stranger: only the known files are downloaded, in bounded size, and
compared with the hashes of the Hub and of the manifest. Nothing is executed.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from rl_training.checkpoints.files import PlainFolder, temporary_name
from rl_training.checkpoints.format import MANIFEST, POLICY, CheckpointReader
from rl_training.deployment.hub_client import Hub, ListedFile, Repository
from rl_training.deployment.hub_files import LIMITS, REQUIRED, observation_size, readable_size
from rl_training.errors import CheckpointError, UserError, one_line
from rl_training.validation import user_path

MAX_NAME = 200
"""Longest name of a policy that is shown"""


@dataclass(frozen=True)
class DescribedPolicy:
    """What a saved policy says of itself, cleaned for a terminal."""

    algorithm: str
    environment: str
    environment_id: str | None
    """None if others cannot create the environment by its id"""
    observation_size: int | None
    """Numbers of an observation; None if it is not one vector"""
    modules: tuple[str, ...]
    """Modules that the environment needs; none of them is imported"""


def pull_from_hub(
    repo_id: str,
    *,
    revision: str | None = None,
    out: str | Path | None = None,
    token: str | None = None,
) -> Path:
    """Download a policy from the Hugging Face Hub and return its folder.

    The folder is new: `out`, or the name of the repository in the current folder. It is a saved
    policy, which `evaluate_checkpoint`, `predict_checkpoint` and `load` accept. `revision` is a
    branch, a tag or a commit.

    Only the files of a policy are downloaded, and only if they have a plausible size and the hashes
    that the Hub and the manifest list. No code is executed. Raises `UserError` if the policy cannot
    be downloaded; the folder does not exist then.
    """
    hub = Hub(token)
    hub.check_name(repo_id)
    destination = user_path(out if out is not None else repo_id.partition("/")[2])
    if os.path.lexists(destination):
        raise UserError(f"{destination}: already exists; choose another folder with --out (out=)")
    repository = hub.repository(repo_id, revision)
    if repository is None:
        raise UserError(hub.not_found(repo_id))
    listed = hub.files(repository, list(LIMITS))
    _check_listing(repo_id, listed)
    try:
        _download(hub, repository, listed, destination)
    except OSError as error:
        raise UserError(f"{destination}: cannot be written ({error.strerror or error})") from None
    return destination


def described_policy(folder: Path) -> DescribedPolicy:
    """Read `policy.json` of a folder that `pull_from_hub` has made."""
    values = CheckpointReader(folder).json(POLICY)
    environment = values.get("environment")
    environment = environment if isinstance(environment, dict) else {}
    known, label = environment.get("id"), environment.get("label")
    name = known if isinstance(known, str) else label
    return DescribedPolicy(
        algorithm=one_line(str(values.get("algo")), MAX_NAME),
        environment=one_line(str(name or "an environment of its own"), MAX_NAME),
        environment_id=known if isinstance(known, str) else None,
        observation_size=observation_size(values),
        modules=_module_names(environment.get("modules")),
    )


def _module_names(value: object) -> tuple[str, ...]:
    names = value if isinstance(value, list) else []
    return tuple(
        name
        for name in names
        if isinstance(name, str) and all(map(str.isidentifier, name.split(".")))
    )


def _check_listing(repo_id: str, listed: dict[str, ListedFile]) -> None:
    missing = [name for name in REQUIRED if name not in listed]
    if missing:
        raise UserError(f"{repo_id}: not an rl_training policy ({missing[0]} is missing)")
    for name, file in listed.items():
        if file.size > LIMITS[name]:
            raise UserError(
                f"{repo_id}: {name} has {file.size:,} bytes; at most {LIMITS[name]:,} are "
                "downloaded"
            )


def _download(
    hub: Hub, repository: Repository, listed: dict[str, ListedFile], destination: Path
) -> None:
    """Download and check all files in a temporary folder, which then gets its name."""
    parent = PlainFolder(destination.parent)
    parent.make()
    _check_space(destination.parent, listed)
    temporary = temporary_name()
    folder = parent.make_inner(temporary)
    try:
        for name in (name for name in LIMITS if name in listed):
            _fetch(hub, repository, listed[name], folder)
            if name == MANIFEST:
                _check_manifest(repository, folder, listed)
        CheckpointReader(folder.path).verify(REQUIRED[1:])
        folder.sync()
        if os.path.lexists(destination):
            raise UserError(f"{destination}: already exists; choose another folder with --out")
        parent.rename(temporary, destination.name)
        parent.sync()
    except CheckpointError as error:
        parent.remove(temporary)
        reason = str(error).removeprefix(f"{folder.path}: ")
        raise UserError(f"{repository.repo_id}: not an rl_training policy ({reason})") from None
    except BaseException:
        parent.remove(temporary)
        raise


def _fetch(hub: Hub, repository: Repository, listed: ListedFile, folder: PlainFolder) -> None:
    folder.write_new(listed.name, b"")
    with folder.open(listed.name, "r+b") as file:
        hub.download(repository, listed, file)
        file.flush()
        os.fsync(file.fileno())
        size = os.fstat(file.fileno()).st_size
        if size != listed.size or not listed.matches(file):
            raise UserError(
                f"{repository.repo_id}: {listed.name} is not the file that the Hub lists (its hash "
                "or size differs); nothing was kept; try again"
            )


def _check_manifest(
    repository: Repository, folder: PlainFolder, listed: dict[str, ListedFile]
) -> None:
    """Compare the manifest with what the Hub lists, before large files are downloaded."""
    entries = CheckpointReader(folder.path).files
    if set(entries) != set(REQUIRED[1:]) or any(
        entries[name]["size"] != listed[name].size for name in entries
    ):
        raise UserError(
            f"{repository.repo_id}: not an rl_training policy (its manifest does not fit its files)"
        )


def _check_space(folder: Path, listed: dict[str, ListedFile]) -> None:
    needed = sum(file.size for file in listed.values())
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise UserError(
            f"{folder}: the policy has {readable_size(needed)}, but only {readable_size(free)} "
            "are free"
        )
