"""Publish policies on the Hugging Face Hub.

A published policy has the format of any saved policy, with a config, results, a video and a card
beside it. `hub_pull` gets it back.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rl_training.checkpoints.format import MANIFEST
from rl_training.deployment.hub_client import Hub, Repository
from rl_training.deployment.hub_files import LIMITS, readable_size
from rl_training.errors import UserError
from rl_training.version import __version__

if TYPE_CHECKING:
    from rl_training.deployment.publication import Publication

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
    from rl_training.deployment.publication import write_publication  # imports PyTorch

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
