"""The connection to the Hub: names, tokens, errors, and downloads of bounded size.

Uses the package `huggingface_hub`, which is imported when something is pushed or pulled. Answers of
the server are treated like files from strangers: checked before they are used, and cleaned before
they are shown.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import IO, Any

from rl_training.errors import UserError, brief, one_line
from rl_training.types import Json
from rl_training.version import __version__

LOGIN = "log in with `hf auth login`, or set the environment variable HF_TOKEN"
TIMEOUT_SECONDS = 20.0
"""How long the first answer of the Hub may take"""
HASH_BLOCK = 2**20
_NAME = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
"""What every name has; the client knows further rules"""
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_NETWORK_PACKAGES = ("httpx", "httpx2", "httpcore", "httpcore2", "requests", "urllib3")
"""Packages that different versions of `huggingface_hub` send requests with"""
_DOWNLOAD_HEADERS = {"Accept-Encoding": "identity"}
"""Files are not compressed on the way, so that their size is known"""


@dataclass(frozen=True)
class Repository:
    """What the Hub says of a repository."""

    repo_id: str
    commit: str
    is_private: bool


@dataclass(frozen=True)
class ListedFile:
    """A file of a repository, as the Hub lists it."""

    name: str
    size: int
    sha256: str | None
    """Hash of a file in large file storage"""
    git_hash: str | None
    """Hash of any other file, in the way of git"""

    def matches(self, file: IO[bytes]) -> bool:
        """Return whether a file has the hash that is listed; True if none is listed."""
        if self.sha256 is not None:
            return _digest(file, hashlib.sha256()) == self.sha256
        if self.git_hash is not None:
            # Not for security: git identifies files by this hash.
            start = hashlib.sha1(f"blob {self.size}\0".encode(), usedforsecurity=False)
            return _digest(file, start) == self.git_hash
        return True


class Hub:
    """A connection to the Hub. Every error is a `UserError`, and no message shows the token."""

    def __init__(self, token: str | None = None) -> None:
        """`token` replaces the saved one; it is neither shown nor saved."""
        self._library = _library()
        self._token = token or self._library.get_token()
        self._api = self._library.HfApi(
            token=self._token, library_name="rl_training", library_version=__version__
        )

    @property
    def address(self) -> str:
        """Where the Hub is, without a password, should the address contain one."""
        return re.sub(r"//[^/@]*@", "//", str(self._api.endpoint))

    def check_name(self, repo_id: str) -> None:
        """Raise `UserError` unless this is a name such as `USER/NAME`."""
        try:
            self._library.utils.validate_repo_id(repo_id)
            valid = _NAME.fullmatch(repo_id) is not None
        except (TypeError, ValueError):
            valid = False
        if not valid:
            raise UserError(
                f"{one_line(repr(repo_id), 200)}: not the name of a repository; use USER/NAME, "
                "such as alice/sac-pendulum, with letters, digits and single - _ . inside"
            )

    def check_login(self) -> None:
        """Raise `UserError` if there is no token; sends nothing."""
        if self._token is None:
            raise UserError(f"you are not logged in to the Hub; {LOGIN}")

    def check_may_write(self, repo_id: str, *, exists: bool) -> None:
        """Raise `UserError` if the user cannot write to the repository, as far as is known."""
        with self._explained(repo_id):
            user = self._api.whoami()
        try:
            name = user["name"]
            owners = [name, *(each["name"] for each in user.get("orgs") or [])]
            role = ((user.get("auth") or {}).get("accessToken") or {}).get("role")
        except (AttributeError, KeyError, TypeError):
            raise UserError("the Hub did not say who you are; try again later") from None
        owner = repo_id.partition("/")[0]
        if owner.lower() not in (str(each).lower() for each in owners):
            problem = "belongs to another user" if exists else f"{owner} is another user"
            raise UserError(
                f"{repo_id}: {problem}, or an organization that you are not in; you are logged "
                f"in as {self._clean(name)}, so use {self._clean(name)}/{repo_id.partition('/')[2]}"
            )
        if role == "read":
            raise UserError(
                "your token can only read; create one with write access in the settings of the "
                f"Hub, then {LOGIN}"
            )

    def repository(self, repo_id: str, revision: str | None = None) -> Repository | None:
        """Look up a repository; None if there is none that the user may see."""
        try:
            with self._explained(repo_id, revision):
                found = self._api.model_info(
                    repo_id, revision=revision, expand=["sha", "private"], timeout=TIMEOUT_SECONDS
                )
                commit, private = found.sha, found.private
        except _NoRepositoryError:
            return None
        if not isinstance(commit, str) or not _COMMIT.fullmatch(commit):
            raise UserError(f"{repo_id}: the Hub named no commit; try again later")
        return Repository(repo_id, commit, private is not False)

    def files(self, repository: Repository, names: Sequence[str]) -> dict[str, ListedFile]:
        """Return those of the files that the repository has; only these names are asked for."""
        with self._explained(repository.repo_id):
            listed = self._api.get_paths_info(
                repository.repo_id, paths=list(names), revision=repository.commit
            )
            found = [
                _listed_file(each)
                for each in listed
                if getattr(each, "path", None) in names and hasattr(each, "size")
            ]
        return {file.name: file for file in found}

    def download(self, repository: Repository, listed: ListedFile, file: IO[bytes]) -> None:
        """Write a file of the repository to `file`, but never more bytes than are listed."""
        name, wanted = listed.name, _BoundedFile(file, listed)
        with self._explained(repository.repo_id):
            address = self._library.hf_hub_url(
                repository.repo_id, name, revision=repository.commit, endpoint=self._api.endpoint
            )
            headers = self._library.utils.build_hf_headers(
                token=self._token or False,
                library_name="rl_training",
                library_version=__version__,
            )
            # The client's own function for downloads to a file. Those that take a path write as
            # many bytes as the server sends, and keep a copy in a cache of links.
            self._library.file_download.http_get(
                address,
                wanted,
                headers={**headers, **_DOWNLOAD_HEADERS},
                expected_size=listed.size,
                displayed_filename=name,
            )

    def create(self, repo_id: str, *, private: bool) -> None:
        """Create a repository for a model."""
        with self._explained(repo_id):
            self._api.create_repo(repo_id, private=private, repo_type="model", exist_ok=True)

    def commit(
        self,
        repository: Repository,
        files: dict[str, str],
        removed: Sequence[str],
        message: str,
    ) -> Json:
        """Send files, from the paths by their names, as one commit; return its id and address.

        Fails if the repository has changed since it was looked up.
        """
        operations: list[Any] = [
            self._library.CommitOperationAdd(path_in_repo=name, path_or_fileobj=path)
            for name, path in files.items()
        ]
        operations += [self._library.CommitOperationDelete(path_in_repo=name) for name in removed]
        with self._explained(repository.repo_id):
            made = self._api.create_commit(
                repository.repo_id,
                operations,
                commit_message=message,
                parent_commit=repository.commit,
                repo_type="model",
            )
            return {"commit": self._clean(made.oid), "url": self._clean(made.commit_url)}

    @contextlib.contextmanager
    def _explained(self, repo_id: str, revision: str | None = None) -> Iterator[None]:
        """Turn the errors of the client into a `UserError` with one message."""
        errors = self._library.errors
        try:
            yield
        except UserError:
            raise
        except errors.LocalTokenNotFoundError:
            raise UserError(f"you are not logged in to the Hub; {LOGIN}") from None
        except errors.OfflineModeIsEnabled:
            raise UserError(
                "the Hub is not used because HF_HUB_OFFLINE is set; unset this variable"
            ) from None
        except errors.RevisionNotFoundError:
            raise UserError(
                f"{repo_id}: has no revision {one_line(repr(revision), 100)}; give a branch, a tag "
                "or a commit"
            ) from None
        except errors.GatedRepoError:
            raise UserError(
                f"{repo_id}: its owner decides who may read it; ask for access on its page, then "
                f"{LOGIN}"
            ) from None
        except errors.RepositoryNotFoundError:
            raise _NoRepositoryError(self.not_found(repo_id)) from None
        except errors.EntryNotFoundError:
            raise UserError(
                f"{repo_id}: the Hub does not have a file that it lists; try again later"
            ) from None
        except Exception as error:
            status = getattr(getattr(error, "response", None), "status_code", None)
            if isinstance(status, int):
                raise self._http_error(repo_id, error, status) from None
            raise self._other_error(repo_id, error) from None

    def _http_error(self, repo_id: str, error: Exception, status: int) -> UserError:
        if status == 404:
            return _NoRepositoryError(self.not_found(repo_id))
        if status == 401:
            if self._token is None:
                return _NoRepositoryError(self.not_found(repo_id))
            return UserError(f"the Hub does not accept your token (error 401); {LOGIN}")
        if status == 403:
            return UserError(
                f"{repo_id}: your token does not permit this (error 403); use a name of your own, "
                "or a token with write access to this repository"
            )
        if status in (409, 412):
            return UserError(f"{repo_id}: was changed by someone else meanwhile; try again")
        if status == 429:
            return UserError("the Hub has received too many requests from you; try again later")
        if status >= 500:
            return UserError(f"the Hub has a problem (error {status}); try again later")
        return UserError(f"{repo_id}: the Hub refused the request ({self._clean(brief(error))})")

    def _other_error(self, repo_id: str, error: Exception) -> UserError:
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, UserError):  # raised while a file was written
                return cause
            package = type(cause).__module__.partition(".")[0]
            if package in _NETWORK_PACKAGES or isinstance(cause, ConnectionError | TimeoutError):
                return UserError(
                    f"the Hub at {self.address} cannot be reached "
                    f"({self._clean(brief(cause))}); check your network"
                )
            cause = cause.__cause__
        return UserError(
            f"{repo_id}: the exchange with the Hub failed ({self._clean(brief(error))})"
        )

    def not_found(self, repo_id: str) -> str:
        """Return the message for a repository that the user cannot see."""
        hint = (
            f"if it is private, {LOGIN}"
            if self._token is None
            else "check its name, and that you may see it"
        )
        return f"{repo_id}: no such repository on the Hub; {hint}"

    def _clean(self, text: object) -> str:
        """Return text of the server in one line, without the token, should it contain it."""
        shown = one_line(str(text), 500)
        return shown.replace(self._token, "(token)") if self._token else shown


class _NoRepositoryError(UserError):
    """There is no repository of that name, or the user may not see it."""


class _BoundedFile:
    """A file that refuses more bytes than are listed, whatever the server sends."""

    def __init__(self, file: IO[bytes], listed: ListedFile) -> None:
        self._file, self._listed = file, listed

    def write(self, data: bytes) -> int:
        if self._file.tell() + len(data) > self._listed.size:
            raise UserError(
                f"{self._listed.name}: the server sends more than the {self._listed.size:,} bytes "
                "that it lists; nothing was kept"
            )
        return self._file.write(data)

    def tell(self) -> int:
        return self._file.tell()

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._file.seek(offset, whence)

    def truncate(self, size: int | None = None) -> int:
        return self._file.truncate(size)

    def flush(self) -> None:
        self._file.flush()


def _library() -> ModuleType:
    try:
        import huggingface_hub
        import huggingface_hub.errors
        import huggingface_hub.file_download
        import huggingface_hub.utils
    except ImportError:
        raise UserError(
            "the Hub needs the package huggingface_hub; install it with "
            "`pip install 'rl-training[hub]'`"
        ) from None
    return huggingface_hub


def _listed_file(entry: Any) -> ListedFile:
    """Check what the server says of a file."""
    size, large = entry.size, getattr(entry, "lfs", None)
    if type(size) is not int or size < 0:
        raise UserError(f"{entry.path}: the Hub lists no size")
    sha256, git_hash = getattr(large, "sha256", None), getattr(entry, "blob_id", None)
    if large is not None and not (isinstance(sha256, str) and _SHA256.fullmatch(sha256)):
        raise UserError(f"{entry.path}: the Hub lists a hash that is not one")
    is_git_hash = isinstance(git_hash, str) and _COMMIT.fullmatch(git_hash) is not None
    return ListedFile(entry.path, size, sha256, git_hash if is_git_hash else None)


def _digest(file: IO[bytes], digest: Any) -> str:
    file.seek(0)
    while block := file.read(HASH_BLOCK):
        digest.update(block)
    return str(digest.hexdigest())
