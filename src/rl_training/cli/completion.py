"""Values that a shell offers when Tab is pressed. PyTorch is not imported, so they appear at once.

Where a function offers nothing, the shell completes file names.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

Offer = Callable[[str], list[str]]
"""Returns the values that begin with the text typed so far"""


def choices(*values: str) -> Offer:
    """Offer fixed values."""

    def offer(incomplete: str) -> list[str]:
        return [value for value in values if value.startswith(incomplete)]

    return offer


def algorithms(incomplete: str) -> list[str]:
    from rl_training.algorithms.spec import list_algorithm_summaries

    return choices(*(summary.name for summary in list_algorithm_summaries()))(incomplete)


def configs(incomplete: str) -> list[str]:
    """Offer packaged configs and the YAML files of the current folder."""
    from rl_training.config_files import packaged_configs

    files = sorted(path.name for path in Path().glob("*.yaml"))
    return choices(*packaged_configs(), *files)(incomplete)


def environments(incomplete: str) -> list[str]:
    """Offer the environments that Gymnasium has registered."""
    import gymnasium

    return choices(*gymnasium.registry)(incomplete)


def run_folders(incomplete: str) -> list[str]:
    """Offer the runs in the folder typed so far, which is `runs` at first."""
    folder, slash, _ = incomplete.rpartition("/")
    prefix = f"{folder}{slash}" or "runs/"
    runs = sorted(path.name for path in _folders(Path(prefix)) if _is_run(path))
    return choices(*(f"{prefix}{name}" for name in runs))(incomplete)


def _folders(parent: Path) -> list[Path]:
    try:
        return [path for path in parent.iterdir() if path.name.isprintable()]
    except OSError:
        return []


def _is_run(path: Path) -> bool:
    from rl_training.checkpoints.files import PlainFolder

    try:
        return PlainFolder(path).has_folder("checkpoints")
    except OSError:  # not a folder, or not permitted
        return False


def sort_keys(incomplete: str) -> list[str]:
    from rl_training.experiment.overview import SORT_KEYS

    return choices(*SORT_KEYS)(incomplete)


def filter_keys(incomplete: str) -> list[str]:
    from rl_training.experiment.overview import FILTER_KEYS

    return choices(*(f"{key}=" for key in FILTER_KEYS))(incomplete)
