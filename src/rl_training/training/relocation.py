"""Continue a run with its environments elsewhere, which does not change its results."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from rl_training.errors import ConfigError
from rl_training.training.saved_run import SavedRun
from rl_training.validation import short

KEYS = (
    *("vectorization", "env_workers", "env_worker_cpus"),
    *("ray_address", "env_timeout", "env_restarts"),
)
"""The settings that say where environments run and how long they are waited for"""


def relocated(run: SavedRun, changes: Mapping[str, Any]) -> SavedRun:
    """Return a saved run with some of `KEYS` changed; raise `ConfigError` for anything else."""
    if unknown := [key for key in changes if key not in KEYS]:
        raise ConfigError(
            f"{unknown[0]}: cannot be changed in a run that is resumed; only {', '.join(KEYS)} can"
        )
    changes = dict(changes)
    before, after = run.execution.vectorization, changes.get("vectorization")
    if after is not None and (after == "tensors") != (before == "tensors"):
        raise ConfigError(
            f"vectorization = {short(after)}: worlds that are tensors are not the environments "
            "that other vectorizations step; start a new run to change between them"
        )
    if after == "auto" or (after == "ray-async") > (before == "ray-async"):
        ways = "'sync', 'async' or 'ray'"
        raise ConfigError(
            f"vectorization = {short(after)}: a run that is resumed needs {ways}"
            + ("; a run that is exact cannot become 'ray-async'" if after != "auto" else "")
        )
    if after in ("sync", "ray-async"):
        changes.setdefault("env_workers", None)  # they have no number of workers
    config = run.config.with_changes(**changes)
    execution = dataclasses.replace(run.execution, vectorization=after or before)
    description = run.description.model_copy(
        update={"config": config.to_mapping(), "execution": execution.to_json()}
    )
    return dataclasses.replace(run, config=config, execution=execution, description=description)
