"""Commands that only print information: `list`, `config`, `runs` and `doctor`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rl_training.cli_options import ConfigOption, EnvOption, SetOption


def list_algorithms() -> None:
    """List the algorithms and the packaged configs."""
    from rl_training.config_files import packaged_configs
    from rl_training.experiment.registry import list_algorithm_specs

    packaged = packaged_configs()
    print(f"{'algorithm':<10} {'actions':<11} {'trained':<24} {'configs'}")
    for spec in list_algorithm_specs():
        configs = [name for name in packaged if name.startswith(f"{spec.name}/")]
        regimes = ", ".join(spec.regimes)
        print(f"{spec.name:<10} {spec.action_kind:<11} {regimes:<24} {', '.join(configs)}")
        print(f"{'':<10} {spec.title} ({spec.reference})")


def show_config(config: ConfigOption, overrides: SetOption = None, env: EnvOption = None) -> None:
    """Print a complete config, with all defaults and changes."""
    from rl_training.config_files import dump_yaml, load_config

    changes = {} if env is None else {"env_id": env}
    print(dump_yaml(load_config(config, overrides or (), **changes).to_mapping()), end="")


def show_runs(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Folder that contains run folders.")
    ] = Path("runs"),
) -> None:
    """List runs with their state and evaluation results."""
    from rl_training.experiment.overview import list_runs

    found = list_runs(folder)
    if not found:
        print(f"no runs in {folder}")
    for run in found:
        best = "-" if run.best_return is None else f"{run.best_return:.1f}"
        last = "-" if run.last_return is None else f"{run.last_return:.1f}"
        print(run.path)
        print(
            f"    {run.algo} on {run.environment}, seed {run.seed}: {run.state}; step {run.step:,} "
            f"of {run.total_timesteps:,}; best {best}, last {last} in the run's own evaluations"
        )


def show_system() -> None:
    """Show installed versions, devices and missing optional packages."""
    from rl_training.experiment.doctor import diagnose

    for line in diagnose():
        print(line)
