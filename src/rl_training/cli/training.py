"""The commands `train` and `resume`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from rl_training.cli import completion
from rl_training.cli.options import (
    DeviceOption,
    EnvOption,
    ImportOption,
    MoveOption,
    OptionalConfigOption,
    ScheduleOption,
    SetOption,
    StepsOption,
    WrapperOption,
    announce,
    import_environment,
    import_modules,
    outlive_output,
    user_error,
)
from rl_training.cli.results import print_results

if TYPE_CHECKING:
    from rl_training.config import TrainConfig
    from rl_training.types import ScheduleChoice

TRAIN_EXAMPLES = """
Examples:

\b
  rl-training train --config sac/pendulum
  rl-training train --algo sac --env Hopper-v5 --total-timesteps 300k
  rl-training train --config sac/mujoco --seeds 0-4 --set tau=0.01

`rl-training list` shows the packaged configs, and `config --describe` all keys.
"""


def train(
    config: OptionalConfigOption = None,
    algo: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Algorithm, e.g. sac; with --env, no config is needed.",
            autocompletion=completion.algorithms,
        ),
    ] = None,
    env: EnvOption = None,
    seed: Annotated[int | None, typer.Option(metavar="N", help="Random seed.")] = None,
    seeds: Annotated[
        str | None,
        typer.Option(metavar="N,N-N,...", help="Train one run per seed, e.g. 0-4 or 0,2,5-7."),
    ] = None,
    total_timesteps: StepsOption = None,
    device: DeviceOption = None,
    output_dir: Annotated[
        str | None, typer.Option(metavar="PATH", help="Folder in which to create run folders.")
    ] = None,
    from_checkpoint: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            help="Initialize the policy from a run folder, checkpoint or saved policy.",
            autocompletion=completion.run_folders,
        ),
    ] = None,
    dataset: Annotated[
        str | None,
        typer.Option(
            metavar="SOURCE", help="Recorded data to learn from: file, Minari id or run folder."
        ),
    ] = None,
    overrides: SetOption = None,
    wrappers: WrapperOption = None,
    modules: ImportOption = None,
) -> None:
    """Train a policy and save the results in a new run folder.

    Name an algorithm and an environment (--algo sac --env Pendulum-v1), a config (--config
    sac/pendulum), or a config with changes.

    Ctrl-C or SIGTERM stops with a checkpoint and exits with code 130; `resume` continues the run. A
    second one stops at once, and `resume` continues from the last checkpoint. SIGUSR1, which
    schedulers send before they take a machine away, does the same and exits with code 75.
    """
    if config is None and algo is None:
        user_error(
            "nothing to train; name an algorithm and an environment, or a config:\n"
            "  rl-training train --algo sac --env Pendulum-v1\n"
            "  rl-training train --config sac/pendulum"
        )
    if seed is not None and seeds is not None:
        user_error("--seed and --seeds: use only one of them")
    outlive_output()
    announce(f"preparing {config or algo}" + (f" in {env}" if env else ""))
    from rl_training.validation import parse_seeds

    values = {
        "env_id": import_environment(env, modules, wrappers),
        "seed": seed,
        "seeds": None if seeds is None else parse_seeds(seeds),
        "total_timesteps": total_timesteps,
        "device": device,
        "output_dir": output_dir,
        "init_from": from_checkpoint,
    }
    changes: dict[str, Any] = {key: value for key, value in values.items() if value is not None}
    if seed is not None:
        changes["seeds"] = None  # --seed overrides `seeds` in the config file
    from rl_training.config_files import chosen_environment, load_config, read_config

    settings = {"algo": algo} if config is None else read_config(config)
    if dataset is None and "dataset" not in settings:  # data may replace the environment
        # Before PyTorch is imported, which takes seconds.
        _check_packages(chosen_environment({**settings, **changes}, overrides or ()))
    from rl_training.runtime import workflows

    if dataset is not None:
        changes["dataset"] = workflows.dataset_section(dataset, settings.get("dataset"))
    resolved = load_config(config or settings, overrides or (), **changes)
    if wrappers:
        resolved = load_config(resolved, wrappers=[*resolved.wrappers, *wrappers])
    _check_choice(algo, resolved, has_config=config is not None)
    results = workflows.train(resolved, progress=True)
    print_results(results if isinstance(results, list) else [results])


def resume(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN",
            help="Run folder or checkpoint. Seeds that were trained together continue together.",
            autocompletion=completion.run_folders,
        ),
    ],
    total_timesteps: StepsOption = None,
    schedule: ScheduleOption = None,
    changes: MoveOption = None,
    modules: ImportOption = None,
) -> None:
    """Continue one or more runs exactly where they stopped."""
    outlive_output()
    announce(f"resuming {' '.join(map(str, runs))}")
    from rl_training.config_files import parse_overrides
    from rl_training.runtime import workflows

    import_modules(modules)
    results = workflows.resume_together(
        runs,
        total_timesteps=total_timesteps,
        schedule=cast("ScheduleChoice | None", schedule),
        changes=parse_overrides(changes or ()),
        progress=True,
    )
    print_results(results)


def _check_choice(algo: str | None, config: TrainConfig, *, has_config: bool) -> None:
    """Raise a `UserError` if `--algo` contradicts the config, or lacks an environment or data."""
    if algo is not None and algo != config.algo:
        user_error(f"--algo {algo}: the config is for {config.algo}; use only one of them")
    if has_config:
        return
    example = f"rl-training train --algo {algo} --env"
    environment = "CartPole-v1" if config.spec.actions[0] == "discrete" else "Pendulum-v1"
    if config.reads_data and config.dataset is None:
        user_error(
            f"--algo {algo}: learns from recorded data; add --dataset with a file, a Minari id or "
            f"a run folder: {example} {environment} --dataset data.npz"
        )
    if config.env_id is None and config.resolved_regime != "offline":
        user_error(f"--algo {algo}: needs an environment: {example} {environment}")


def _check_packages(env_id: Any) -> None:
    """Raise a `UserError` if the environment's id is unknown or it needs a missing package."""
    from rl_training.envs import check_environment_packages

    if isinstance(env_id, str):
        check_environment_packages(env_id)
