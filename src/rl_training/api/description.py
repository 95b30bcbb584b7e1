"""What an agent will do or has done, in a few lines, for its `repr`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rl_training.config import TrainConfig
from rl_training.envs import EnvironmentSource, environment_factory
from rl_training.errors import UserError
from rl_training.runtime import workflows


def describe_agent(
    name: str,
    config: TrainConfig,
    env: EnvironmentSource | None,
    *,
    has_arrays: bool,
    saved: Path | None,
    is_resumable: bool,
) -> str:
    """Describe an agent without creating an environment; never raises a user error.

    `saved` is its run, or, if that is not resumable, the policy from which `learn` starts.
    """
    data = _data(config, has_arrays=has_arrays)
    place = _environment(config, env) or ("recorded data" if data else None)
    facts = {"data": data} if data else {}
    if saved is not None and not is_resumable:
        facts |= _new_run_from(saved, config)
    else:
        facts |= _progress(config, saved)
    lines = [f"  {label:8}{text}" for label, text in facts.items()]
    return "\n".join([f"{name} on {place}" if place else f"{name} without environment", *lines])


def _new_run_from(policy: Path, config: TrainConfig) -> dict[str, str]:
    return {
        "policy": str(policy),
        "steps": "learn(n) trains n steps in a new run that starts from the policy",
        "seed": str(config.seed),
        "device": config.device,  # whether updates are compiled depends on the number of steps
        "run": f"a new folder in {config.output_dir}",
    }


def _progress(config: TrainConfig, run: Path | None) -> dict[str, str]:
    unit = " gradient steps" if config.resolved_regime == "offline" else ""
    if run is not None:
        try:
            status = workflows.read_status(run)
        except (UserError, OSError) as error:
            return {"run": f"{run} (cannot be read: {error})"}
        advice = (
            "finished; learn(n) trains n more"
            if status.is_finished
            else "learn() trains the rest, learn(n) trains n more"
        )
        steps = f"{status.step:,} of {status.total_timesteps:,}{unit} ({advice})"
        execution, place = status.execution, str(run)
    else:
        steps = f"0 of {config.total_timesteps:,}{unit} (learn() trains them)"
        execution, place = _execution(config), f"a new folder in {config.output_dir}"
    return {"steps": steps, "seed": str(config.seed), "device": execution, "run": place}


def _environment(config: TrainConfig, env: Any) -> str | None:
    if env is None:
        return config.env_id
    try:
        return environment_factory(None, {}, env).label
    except UserError:  # not an environment; `learn` explains it
        return repr(env)


def _data(config: TrainConfig, *, has_arrays: bool) -> str | None:
    """Name the recorded data, such as `npz pendulum.npz`; None if there is none."""
    if has_arrays:
        return "arrays in memory"
    naming = ("kind", "path", "id", "checkpoint", "size")
    sections = [section.model_dump() for section in config.dataset_sections]
    named = [" ".join(str(each[key]) for key in naming if key in each) for each in sections]
    return ", ".join(named) or None


def _execution(config: TrainConfig) -> str:
    try:
        return workflows.planned_execution(config)
    except UserError as error:  # for example a device that this machine does not have
        return str(error)
