"""Removes from settings what tells of a machine or a person, before they are published.

Strings that name a place (paths, addresses) or a person are replaced as a whole. Everything else of
a run that could tell them, such as its command line, is not published in the first place.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import platform
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rl_training.types import Json

REMOVED = "removed"
"""What replaces a string"""
_LEFT_OUT = ("output_dir", "run_name", "seeds", "ray_address")
"""Keys of a config that tell of the user's folders or machines, or of other runs"""
_PATHS = ("init_from", "path", "checkpoint")
"""Keys of a config whose values are paths"""
_PLACE = re.compile(
    r"""
      (?:^|[^\w.])[\\/]          # a path from the root: the slash does not follow a name
    | ^[.~]{1,2}(?:[\\/]|$)      # a path from the current folder or the home folder
    | ^[A-Za-z]:[\\/]            # a path of Windows
    | ://                        # an address, which may contain a password
    | \S@\S                      # an address of mail, or of an account
    | \b\d{1,3}(?:\.\d{1,3}){3}\b
    """,
    re.VERBOSE,
)
_FREE_TEXT = ("env_kwargs", "kwargs", "wrappers", "training_wrappers", "dataset")
"""Keys whose values the user has written freely, so that they may name a person"""
_NAMES = ("id", "kind", "wrapper")
"""Keys of names that the policy or its data is found by"""
_NOBODY = frozenset({"admin", "localhost", "root", "runner", "ubuntu", "user"})
"""Names that many machines have"""
_FEWEST_LETTERS = 2
"""Shortest name of a user or a machine that is looked for"""


def published_config(config: Mapping[str, Any]) -> Json:
    """Return the settings of a run that are published.

    They can still be loaded: a path is replaced, so that users see what to fill in.
    Nothing of trackers is published, since it names accounts and servers.
    """
    kept = {
        key: value
        for key, value in config.items()
        if key not in _LEFT_OUT and not key.startswith("tracker")
    }
    settings: Json = _cleaned(kept, personal_words())
    return settings


def published_environment(environment: Mapping[str, Any]) -> Json:
    """Return the description of an environment that is published in `policy.json`."""
    described: Json = _cleaned(dict(environment), personal_words())
    return described


def personal_words() -> list[str]:
    """Return the names of this user and this machine."""
    words = {platform.node(), platform.node().partition(".")[0], Path.home().name}
    with contextlib.suppress(ImportError, KeyError, OSError):  # no name for this user id
        words.add(getpass.getuser())
    words |= {os.environ.get(name, "") for name in ("USER", "LOGNAME", "USERNAME", "HOSTNAME")}
    return sorted(
        word for word in words if len(word) >= _FEWEST_LETTERS and word.lower() not in _NOBODY
    )


def found_places(text: str, extra: Sequence[Path] = ()) -> list[str]:
    """Return the folders of this user that text names; used as a last check."""
    folders = {Path.home(), Path.cwd(), Path(tempfile.gettempdir()), *extra}
    spellings = {str(path) for each in folders for path in (each, each.absolute())}
    return sorted(
        path
        for path in spellings
        if os.sep in path.rstrip(os.sep)
        and re.search(rf"(?<![\w.]){re.escape(path)}(?!\w)", text) is not None
    )


def _cleaned(value: Any, words: Sequence[str], key: str = "", *, is_free_text: bool = False) -> Any:
    if isinstance(value, str):
        tells = _names_place(value) or (is_free_text and _names_person(value, words))
        return REMOVED if key in _PATHS or tells else value
    if isinstance(value, Mapping):
        return {
            name: _cleaned(
                part,
                words,
                name,
                is_free_text=name not in _NAMES and (is_free_text or name in _FREE_TEXT),
            )
            for name, part in value.items()
            if not _names_place(name)
        }
    if isinstance(value, list | tuple):
        return [_cleaned(part, words, key, is_free_text=is_free_text) for part in value]
    return value


def _names_place(text: str) -> bool:
    return _PLACE.search(text) is not None


def _names_person(text: str, words: Sequence[str]) -> bool:
    """Return whether text has the name of this user or this machine as a word."""
    return any(
        re.search(rf"(?<![^\W_]){re.escape(word)}(?![^\W_])", text, re.IGNORECASE) for word in words
    )
