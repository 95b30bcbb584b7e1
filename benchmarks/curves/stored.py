"""Stored curves: which are complete, which were asked for, and which are of other code."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from curves.mathematics import cached_mathematics, stale
from rl_training.config_files import load_config
from rl_training.errors import UserError
from rl_training.experiment.settings import NOT_LEARNING


def other_request(kept: dict[str, Any], wanted: dict[str, Any]) -> str | None:
    """Why a curve is not the one that is wanted, or None if it is: by settings, not by code."""
    for key in ("config", "seeds", "planned_steps", "eval_episodes"):
        if kept[key] != wanted[key]:
            return f"it has {key} = {kept[key]!r}, not {wanted[key]!r}"
    before, now = (
        {key: value for key, value in each["settings"].items() if key not in NOT_LEARNING}
        for each in (kept, wanted)
    )
    if keys := sorted(key for key in before | now if before.get(key) != now.get(key)):
        return f"its settings differ ({', '.join(keys)})"
    if _rows(kept) != _rows(wanted):
        return "it learned from other recorded data"
    return None


def _rows(values: dict[str, Any]) -> list[str]:
    """The fingerprints of the data that a curve was learned from."""
    data = values.get("data")
    return [] if data is None else [part["fingerprint"] for part in data["parts"]]


def difference(kept: dict[str, Any], wanted: dict[str, Any]) -> str | None:
    """Why a curve is not the one that is wanted: by settings, by code, or because the run that it
    starts from is another one. None if it is."""
    reason = other_request(kept, wanted) or stale(kept.get("mathematics"), wanted["mathematics"])
    before, now = kept.get("init_from"), wanted.get("init_from")
    if reason is None and (before is None) != (now is None):
        return "it does not start from the same run"
    if reason is None and before is not None and now is not None:
        reason = difference(before, now)
        return reason and f"{now['name']}, from which it starts: {reason}"
    return reason


def is_complete(values: dict[str, Any]) -> bool:
    """Whether a stored curve has all evaluations of all seeds up to the planned step."""
    rounds = values["evaluations"]
    return (
        bool(rounds)
        and rounds[-1]["step"] >= values["planned_steps"]
        and not any(None in each["returns"] for each in rounds)
    )


def read_stored(path: Path) -> dict[str, Any] | None:
    """A stored curve, or None if there is none."""
    try:
        values = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path}: cannot be read ({error}); remove it to measure it again"
        ) from None
    if not isinstance(values, dict):
        raise UserError(f"{path}: is not a learning curve; remove it to measure it again")
    return values


def why_stale() -> Callable[[dict[str, Any]], str | None]:
    """A function that says why a stored curve is not one of this code, or None if it may be.

    Curves from before rehearsals were stored cannot be judged.
    """
    rehearsed = cached_mathematics()

    def reason(values: dict[str, Any]) -> str | None:
        if (start := values.get("init_from")) and (found := reason(start)):
            return f"{start['name']}, from which it starts: {found}"
        if not (kept := values.get("mathematics")) or values.get("peer"):
            return None
        given = {**values["settings"], "env_id": values["env"]}
        try:
            config = load_config(
                values["config"], [f"{key}={json.dumps(value)}" for key, value in given.items()]
            )
        except UserError as error:
            return f"its config cannot be loaded any more ({error})"
        return stale(kept, rehearsed(config))

    return reason
