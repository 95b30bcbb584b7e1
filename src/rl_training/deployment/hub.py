"""Publish policies on the Hugging Face Hub, and get those of others.

A published policy has the format of any saved policy, with a config, results, a video and a card
beside it. What is pulled is a file from a stranger: only the known files are downloaded, in bounded
size, and compared with the hashes of the Hub and of the manifest. Nothing is executed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rl_training.checkpoints.files import PlainFolder, temporary_name
from rl_training.checkpoints.format import MANIFEST, POLICY, CheckpointReader
from rl_training.checkpoints.loading import saved_modules
from rl_training.deployment.hub_client import Hub, ListedFile, Repository
from rl_training.deployment.publication import LIMITS, REQUIRED, Publication, write_publication
from rl_training.errors import CheckpointError, UserError, one_line
from rl_training.validation import user_path
from rl_training.version import __version__

MAX_MESSAGE = 200
"""Longest message of a commit"""


@dataclass(frozen=True)
class PushResult:
    """A commit on the Hub."""

    repo_id: str
    commit: str
    """Id of the commit"""
    url: str
    """Address of the commit"""
    files: dict[str, int]
    """Names of the files that were sent, with their sizes in bytes"""


@dataclass(frozen=True)
class PushPlan:
    """What a push would send. Until `send` is called, nothing has left this machine."""

    hub: Hub
    repo_id: str
    private: bool
    message: str
    publication: Publication
    repository: Repository | None
    """The repository, if it exists"""
    replaced: tuple[str, ...]
    """Files of the repository that are replaced"""
    removed: tuple[str, ...]
    """Files of an earlier push that this one does not have"""

    def lines(self) -> list[str]:
        """Describe what would be sent, one line per file."""
        visible = "private" if self._is_private else "public, for everyone"
        state = "new" if self.repository is None else "exists"
        sizes = self.publication.files
        width = max(map(len, (*sizes, *self.removed)))
        return [
            f"to {self.hub.address}/{self.repo_id} ({state}, {visible})",
            *(
                f"  {name:{width}}  {readable_size(size):>9}"
                + ("  replaces the file there" if name in self.replaced else "")
                for name, size in sizes.items()
            ),
            *(f"  {name:{width}}  is deleted there" for name in self.removed),
            *(f"note: {note}" for note in self.publication.notes),
        ]

    def send(self) -> PushResult:
        """Create the repository if it does not exist, and send the files as one commit."""
        repository = self.repository
        if repository is None:
            self.hub.create(self.repo_id, private=self.private)
            repository = self.hub.repository(self.repo_id)
            if repository is None:
                raise UserError(f"{self.repo_id}: the Hub did not create the repository; try again")
            _check_privacy(repository, self.private)
        folder = self.publication.folder
        sent = self.hub.commit(
            repository,
            {name: str(folder / name) for name in self.publication.files},
            self.removed,
            self.message,
        )
        return PushResult(self.repo_id, sent["commit"], sent["url"], self.publication.files)

    @property
    def _is_private(self) -> bool:
        return self.private if self.repository is None else self.repository.is_private


@contextlib.contextmanager
def prepared_push(
    run: str | Path,
    repo_id: str,
    *,
    private: bool = False,
    best: bool = False,
    message: str | None = None,
    video: str | Path | bool = True,
    runs: Sequence[str | Path] | None = None,
    episodes: int | None = None,
    token: str | None = None,
) -> Iterator[PushPlan]:
    """Write the files of a push to a temporary folder and look up the repository; send nothing.

    The arguments are those of `push_to_hub`.
    """
    hub = Hub(token)
    hub.check_name(repo_id)
    hub.check_login()
    repository = hub.repository(repo_id)
    hub.check_may_write(repo_id, exists=repository is not None)
    there = _files_there(hub, repository)
    if repository is not None:
        _check_privacy(repository, private)
    with tempfile.TemporaryDirectory(prefix="rl-training-") as folder:
        publication = write_publication(
            run, Path(folder), repo_id, best=best, video=video, runs=runs, episodes=episodes
        )
        yield PushPlan(
            hub=hub,
            repo_id=repo_id,
            private=private,
            message=_commit_message(message, publication),
            publication=publication,
            repository=repository,
            replaced=tuple(name for name in publication.files if name in there),
            removed=tuple(name for name in there if name not in publication.files),
        )


def push_to_hub(
    run: str | Path,
    repo_id: str,
    *,
    private: bool = False,
    best: bool = False,
    message: str | None = None,
    video: str | Path | bool = True,
    runs: Sequence[str | Path] | None = None,
    episodes: int | None = None,
    token: str | None = None,
) -> PushResult:
    """Publish a policy on the Hugging Face Hub, in one commit.

    `run` is a run folder, a checkpoint or a saved policy, and `repo_id` a name such as
    `alice/sac-pendulum`. The repository is created if it does not exist, and is visible to everyone
    unless `private` is true. `best` publishes the best checkpoint of the run instead of the newest.

    The policy is accompanied by its settings, results, a video and a model card. Paths, names of
    the user and the machine, and the command line are not published. `video` is an MP4 file; by
    default one episode is filmed, and with False there is no video. `runs` are runs of other seeds,
    for the results; by default those beside `run` that differ only in seed. With `episodes`, the
    policy plays that many new episodes, and the card reports them instead of the run's own
    evaluation.

    `token` replaces the token that `hf auth login` saved. Raises `UserError` if the policy cannot
    be published.
    """
    with prepared_push(
        run,
        repo_id,
        private=private,
        best=best,
        message=message,
        video=video,
        runs=runs,
        episodes=episodes,
        token=token,
    ) as plan:
        return plan.send()


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


@dataclass(frozen=True)
class DescribedPolicy:
    """What a saved policy says of itself, cleaned for a terminal."""

    algorithm: str
    environment: str
    environment_id: str | None
    """None if others cannot create the environment by its id"""
    observation_size: int
    modules: tuple[str, ...]
    """Modules that the environment needs; none of them is imported"""

    @property
    def import_flags(self) -> str:
        """The flags that a user adds who trusts the modules."""
        return "".join(f" --import {name}" for name in self.modules)


def described_policy(folder: Path) -> DescribedPolicy:
    """Read `policy.json` of a folder that `pull_from_hub` has made."""
    values = CheckpointReader(folder).json(POLICY)
    environment = values.get("environment")
    environment = environment if isinstance(environment, dict) else {}
    known, label = environment.get("id"), environment.get("label")
    size = values.get("obs_dim")
    name = known if isinstance(known, str) else label
    return DescribedPolicy(
        algorithm=one_line(str(values.get("algo")), MAX_MESSAGE),
        environment=one_line(str(name or "an environment of its own"), MAX_MESSAGE),
        environment_id=known if isinstance(known, str) else None,
        observation_size=size if type(size) is int and size > 0 else 1,
        modules=tuple(saved_modules(environment)),
    )


def readable_size(size: int) -> str:
    """Return a number of bytes as people read it."""
    value = float(size)
    for unit in ("B", "kB", "MB"):
        if value < 1_000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1_000
    return f"{value:.1f} GB"


def _files_there(hub: Hub, repository: Repository | None) -> tuple[str, ...]:
    """Return the known files of a repository, which must be empty or a published policy."""
    if repository is None:
        return ()
    there = tuple(hub.files(repository, list(LIMITS)))
    if there and MANIFEST not in there:
        raise UserError(
            f"{repository.repo_id}: holds something else than a policy of rl_training (it has "
            f"{there[0]}, but no {MANIFEST}); choose another name"
        )
    return there


def _check_privacy(repository: Repository, private: bool) -> None:
    """Raise `UserError` if files that are meant to be private would be visible to everyone."""
    if private and not repository.is_private:
        raise UserError(
            f"{repository.repo_id}: exists and is public; make it private in its settings, or "
            "leave out --private (private=True)"
        )


def _commit_message(message: str | None, publication: Publication) -> str:
    if message is None:
        return (
            f"{publication.algorithm.upper()} policy for {publication.environment}, "
            f"rl_training {__version__}"
        )[:MAX_MESSAGE]
    if not message.strip() or len(message) > MAX_MESSAGE:
        raise UserError(f"the message must have 1 to {MAX_MESSAGE} characters")
    return message


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
            f"{repository.repo_id}: not an rl_training policy (its manifest does not fit its "
            "files)"
        )


def _check_space(folder: Path, listed: dict[str, ListedFile]) -> None:
    needed = sum(file.size for file in listed.values())
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise UserError(
            f"{folder}: the policy has {readable_size(needed)}, but only {readable_size(free)} "
            "are free"
        )
