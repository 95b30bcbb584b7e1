"""Commands that only print information: `list`, `config`, `runs` and `doctor`."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer

from rl_training.cli_options import EnvOption, SetOption, user_error


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


def show_config(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="ALGO|KEY",
            help="With --describe: an algorithm, then keys. Without keys, all settings.",
        ),
    ] = None,
    config: Annotated[
        str | None,
        typer.Option(
            *("--config", "-c"),
            metavar="CONFIG",
            help="YAML file or packaged name such as sac/pendulum.",
        ),
    ] = None,
    overrides: SetOption = None,
    env: EnvOption = None,
    describe: Annotated[
        bool,
        typer.Option(
            "--describe", help="Explain settings: type, default, meaning, symbol in the paper."
        ),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="With --describe: print JSON instead of text.")
    ] = False,
) -> None:
    """Print a complete config, with all defaults and changes; or explain its settings."""
    from rl_training.config_files import dump_yaml, load_config

    changes = {} if env is None else {"env_id": env}
    loaded = None if config is None else load_config(config, overrides or (), **changes)
    if describe:
        from rl_training.cli_describe import describe as describe_settings

        width = shutil.get_terminal_size().columns
        print(describe_settings(names or (), loaded, width=width, as_json=as_json))
        return
    if names or as_json:
        user_error(f"{names[0] if names else '--json'}: needs --describe")
    if loaded is None:
        user_error("missing --config CONFIG to print, or --describe to explain settings")
    print(dump_yaml(loaded.to_mapping()), end="")


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
