"""The command line: entry point, error handling, and the commands `train` and `resume`.

Commands import what they need when they run, which keeps `--help` fast. Those that take a while
print a line before they import PyTorch.
"""

from __future__ import annotations

import gc
import sys
import traceback
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, cast

import typer

from rl_training import cli_completion as completion
from rl_training.cli_dataset import dataset_app
from rl_training.cli_options import (
    ConfigOption,
    DeviceOption,
    EnvOption,
    ImportOption,
    ReadableCommand,
    ScheduleOption,
    SetOption,
    StepsOption,
    announce,
    import_environment,
    import_modules,
    user_error,
)
from rl_training.cli_policy import evaluate, predict
from rl_training.cli_show import list_algorithms, show_config, show_runs, show_system

if TYPE_CHECKING:
    from rl_training.types import ScheduleChoice, TrainResult

TRAIN_EXAMPLES = """
Examples:

\b
  rl-training train --config sac/pendulum
  rl-training train --config sac/mujoco --env Hopper-v5 --seeds 0,1,2
  rl-training train --config sac/mujoco --set algo_kwargs.tau=0.01

`rl-training list` shows the packaged configs, and `rl-training config` all keys.
"""
EXIT_FAILURE, EXIT_USER_ERROR, EXIT_INTERRUPTED = 1, 2, 130

app = typer.Typer(
    name="rl-training",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@dataclass
class Invocation:
    """The options before the command."""

    debug: bool = False


def _show_version(requested: bool) -> None:
    if requested:
        from rl_training.version import __version__

        print(__version__)
        raise typer.Exit


@app.callback()
def options(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of an error in your input.")
    ] = False,
) -> None:
    """Train reinforcement learning policies, resume runs, and evaluate the results."""
    context.ensure_object(Invocation).debug = debug


@app.command(epilog=TRAIN_EXAMPLES)
def train(
    config: ConfigOption,
    env: EnvOption = None,
    seed: Annotated[int | None, typer.Option(metavar="N", help="Random seed.")] = None,
    seeds: Annotated[
        str | None, typer.Option(metavar="N,N,...", help="Train one run per seed, e.g. 0,1,2.")
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
    overrides: SetOption = None,
    modules: ImportOption = None,
) -> None:
    """Train a policy and save the results in a new run folder."""
    announce(f"preparing {config}" + (f" in {env}" if env else ""))
    from rl_training.config_files import config_values, load_config

    if env is not None or modules:
        env = import_environment(env, modules)
    values = {
        "env_id": env,
        "seed": seed,
        "seeds": None if seeds is None else _parse_seeds(seeds),
        "total_timesteps": total_timesteps,
        "device": device,
        "output_dir": output_dir,
        "init_from": from_checkpoint,
    }
    changes: dict[str, Any] = {key: value for key, value in values.items() if value is not None}
    if seed is not None and seeds is not None:
        user_error("--seed and --seeds: use only one of them")
    if seed is not None:
        changes["seeds"] = None  # --seed overrides `seeds` in the config file
    chosen = config_values(config, overrides or (), **changes)
    _check_packages(chosen.get("env_id"))  # before PyTorch is imported, which takes seconds
    from rl_training.runtime import workflows

    resolved = load_config(chosen)
    results = workflows.train(resolved, progress=True)
    _report(results if isinstance(results, list) else [results])


@app.command(cls=ReadableCommand)
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
    modules: ImportOption = None,
) -> None:
    """Continue one or more runs exactly where they stopped."""
    announce(f"resuming {' '.join(map(str, runs))}")
    from rl_training.runtime import workflows

    import_modules(modules)
    results = workflows.resume_together(
        runs,
        total_timesteps=total_timesteps,
        schedule=cast("ScheduleChoice | None", schedule),
        progress=True,
    )
    _report(results)


app.command(cls=ReadableCommand)(evaluate)
app.command(cls=ReadableCommand)(predict)
app.command("list")(list_algorithms)
app.command("config", cls=ReadableCommand)(show_config)
app.command("runs", cls=ReadableCommand)(show_runs)
app.command("doctor")(show_system)
app.add_typer(dataset_app, name="dataset")


def main() -> NoReturn:
    """Run a command and exit. A user error prints one message and exits with code 2."""
    reduce_garbage_collection()
    warnings.showwarning = _show_warning
    invocation = Invocation()
    try:
        result = app(prog_name="rl-training", standalone_mode=False, obj=invocation)
    except Exception as error:
        _fail(error, debug=invocation.debug)
    raise SystemExit(result if isinstance(result, int) else 0)


def reduce_garbage_collection() -> None:
    """Make full garbage collections rarer.

    They would cost time while modules are imported and free nothing. Collections of the younger
    generations are as frequent as before.
    """
    gc.set_threshold(700, 10, 100)


def _fail(error: Exception, *, debug: bool = False) -> NoReturn:
    if type(error).__name__ == "Abort":  # click's exception for a second Ctrl-C
        _print_error("interrupted; continue from the last checkpoint with: rl-training resume RUN")
        raise SystemExit(EXIT_INTERRUPTED) from None
    if hasattr(error, "show") and hasattr(error, "exit_code"):  # click: wrong usage
        error.show()
        raise SystemExit(error.exit_code) from None
    from rl_training.errors import EnvironmentRuntimeError, TrainingError, UserError

    if not isinstance(error, UserError | EnvironmentRuntimeError | TrainingError | OSError):
        raise error
    if debug:
        traceback.print_exception(error)
    _print_error(f"error: {error}")
    for note in getattr(error, "__notes__", ()):
        _print_error(note)
    raise SystemExit(EXIT_USER_ERROR if isinstance(error, UserError) else EXIT_FAILURE) from None


def _print_error(message: str) -> None:
    print(message, file=sys.stderr)


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    _print_error(f"warning: {message}")


def _check_packages(env_id: Any) -> None:
    """Raise a `UserError` if the environment's id is unknown or it needs a missing package."""
    from rl_training.envs import check_environment_packages

    if isinstance(env_id, str):
        check_environment_packages(env_id)


def _parse_seeds(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        user_error(f"--seeds {text!r}: must be integers separated by commas, such as 0,1,2")


def _report(results: list[TrainResult]) -> None:
    for result in results:
        _report_one(result)
    interrupted = [str(result.run_dir) for result in results if result.stop_reason == "interrupted"]
    if interrupted:
        _print_error(f"continue with: rl-training resume {' '.join(interrupted)}")
        raise SystemExit(EXIT_INTERRUPTED)


def _report_one(result: TrainResult) -> None:
    metrics = result.metrics
    reason = "finished" if result.stop_reason == "total_timesteps" else result.stop_reason
    mean, spread = metrics["eval_return_mean"], metrics["eval_return_std"]
    returns = "not evaluated yet" if mean != mean else f"evaluation {mean:.2f} ± {spread:.2f}"
    print(
        f"{reason} at step {int(metrics['global_step']):,} "
        f"({int(metrics['gradient_steps']):,} updates), {returns}"
    )
    if mean == mean:  # biased: the same episodes select the best checkpoint
        print("evaluated on   the run's own evaluation episodes, which select the best checkpoint")
        print(f"for an unbiased estimate: rl-training evaluate {result.run_dir}")
    print(f"run            {result.run_dir}")
    print(f"checkpoint     {result.checkpoint_path}")
    if result.best_checkpoint_path is not None:
        print(f"best           {result.best_checkpoint_path}")
    print(f"learning curve {result.run_dir / 'learning_curve.png'}")
