"""The command line. Each command calls one workflow; heavy imports wait until one runs."""

from __future__ import annotations

import gc
import json
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, cast

import typer

from rl_training.cli_dataset import dataset_app
from rl_training.cli_ope import (
    DatasetOption,
    FqeUpdatesOption,
    HeldOutOption,
    OpeOption,
    evaluate_by_data,
    with_data,
)
from rl_training.cli_options import (
    CheckpointOption,
    ConfigOption,
    EnvOption,
    ImportOption,
    PolicyArgument,
    ScheduleOption,
    SetOption,
    StepsOption,
    import_environment,
    import_modules,
    one_path,
    user_error,
)

if TYPE_CHECKING:
    from rl_training.types import ScheduleChoice, TrainResult

EXIT_FAILURE, EXIT_USER_ERROR, EXIT_INTERRUPTED = 1, 2, 130

app = typer.Typer(
    name="rl-training",
    help="Train control policies: one config, one command, every run can be resumed.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(dataset_app, name="dataset")


def _show_version(wanted: bool) -> None:
    if wanted:
        from rl_training.version import __version__

        print(__version__)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Train control policies: one config, one command, every run can be resumed."""


@app.command()
def train(
    config: ConfigOption,
    env: EnvOption = None,
    seed: Annotated[int | None, typer.Option(help="Random seed.")] = None,
    seeds: Annotated[str | None, typer.Option(help="Several seeds: 0,1,2.")] = None,
    total_timesteps: StepsOption = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda or cuda:N.")] = None,
    output_dir: Annotated[str | None, typer.Option(help="Where run folders go.")] = None,
    from_checkpoint: Annotated[
        str | None, typer.Option(help="Start from the policy of this checkpoint (init_from).")
    ] = None,
    overrides: SetOption = None,
    modules: ImportOption = None,
) -> None:
    """Train a policy."""
    from rl_training.config_files import load_config
    from rl_training.runtime import workflows

    if env is not None or modules:
        env = import_environment(env, modules)
    given = {
        "env_id": env,
        "seed": seed,
        "seeds": None if seeds is None else _parse_seeds(seeds),
        "total_timesteps": total_timesteps,
        "device": device,
        "output_dir": output_dir,
        "init_from": from_checkpoint,
    }
    changes: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    if seed is not None and seeds is not None:
        user_error("--seed and --seeds: give one of them")
    if seed is not None:
        changes["seeds"] = None  # one seed is wanted, whatever the file says
    resolved = load_config(config, overrides or (), **changes)
    results = workflows.train(resolved, progress=True)
    _report(results if isinstance(results, list) else [results])


@app.command()
def resume(
    runs: Annotated[
        list[Path],
        typer.Argument(
            help="A run folder or one of its checkpoints; seeds trained together, together."
        ),
    ],
    total_timesteps: StepsOption = None,
    schedule: ScheduleOption = None,
    modules: ImportOption = None,
) -> None:
    """Continue a run, or several, exactly where they stopped."""
    from rl_training.runtime import workflows

    import_modules(modules)
    results = workflows.resume_together(
        runs,
        total_timesteps=total_timesteps,
        schedule=cast("ScheduleChoice | None", schedule),
        progress=True,
    )
    _report(results)


@app.command()
def evaluate(
    policy: PolicyArgument = None,
    checkpoint: CheckpointOption = None,
    best: Annotated[bool, typer.Option("--best", help="The best checkpoint of a run.")] = False,
    episodes: Annotated[int | None, typer.Option(help="How many episodes to play.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the fresh episodes.")] = None,
    ope: OpeOption = False,
    dataset: DatasetOption = None,
    held_out: HeldOutOption = None,
    fqe_updates: FqeUpdatesOption = None,
    modules: ImportOption = None,
) -> None:
    """Play the policy's best actions in fresh episodes; with --ope use recorded data instead."""
    from rl_training.runtime import workflows

    path = one_path(policy, checkpoint)
    import_modules(modules)
    if with_data(ope, episodes, dataset, held_out, fqe_updates):
        evaluate_by_data(path, dataset, best, seed, held_out, fqe_updates)
        return
    result = workflows.evaluate_policy_at(path, num_episodes=episodes, seed=seed, best=best)
    low, high = result.interval
    metrics = result.metrics
    print(
        f"return {metrics['eval_return_mean']:.2f} ± {metrics['eval_return_std']:.2f} "
        f"(95 % interval of the mean {low:.2f} to {high:.2f}; "
        f"min {metrics['eval_return_min']:.2f}, max {metrics['eval_return_max']:.2f}; "
        f"mean length {metrics['eval_length_mean']:.1f})"
    )
    print(f"over {result.episodes}")
    if result.score is not None:
        print(f"score {result.score:.1f} ({result.scale})")


@app.command()
def predict(
    path: PolicyArgument = None,
    checkpoint: CheckpointOption = None,
    obs: Annotated[
        str | None, typer.Option(help="Observation(s) as JSON; else lines on standard input.")
    ] = None,
    stochastic: Annotated[bool, typer.Option("--stochastic", help="Sample actions.")] = False,
) -> None:
    """Print actions for observations, as JSON."""
    from rl_training.runtime import workflows

    policy = workflows.read_policy(one_path(path, checkpoint))
    for line in [obs] if obs is not None else sys.stdin:
        if line.strip() or obs is not None:
            actions = policy.predict(_parse_obs(line), deterministic=not stochastic)
            print(json.dumps(actions.tolist()), flush=True)


@app.command("list")
def list_command() -> None:
    """Show the algorithms and the packaged configs."""
    from rl_training.config_files import packaged_configs
    from rl_training.experiment.registry import list_algorithm_specs

    packaged = packaged_configs()
    print(f"{'algorithm':<10} {'actions':<11} {'trained':<24} {'configs'}")
    for spec in list_algorithm_specs():
        configs = [name for name in packaged if name.startswith(f"{spec.name}/")]
        regimes = ", ".join(spec.regimes)
        print(f"{spec.name:<10} {spec.action_kind:<11} {regimes:<24} {', '.join(configs)}")
        print(f"{'':<10} {spec.title} ({spec.reference})")


@app.command("config")
def config_command(
    config: ConfigOption, overrides: SetOption = None, env: EnvOption = None
) -> None:
    """Print the resolved config."""
    from rl_training.config_files import dump_yaml, load_config

    changes = {} if env is None else {"env_id": env}
    print(dump_yaml(load_config(config, overrides or (), **changes).to_mapping()), end="")


@app.command()
def runs(folder: Annotated[Path, typer.Argument(help="Where to look.")] = Path("runs")) -> None:
    """Show runs, how they stand, and their best and last results."""
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
            f"of {run.total_timesteps:,}; best {best}, last {last} in its own evaluations"
        )


@app.command()
def doctor() -> None:
    """Show versions and devices, and what is missing."""
    from rl_training.experiment.doctor import diagnose

    for line in diagnose():
        print(line)


def main() -> NoReturn:
    """Run a command; the user's mistakes end in one message and exit code 2."""
    start_quickly()
    warnings.showwarning = _show_warning
    try:
        result = app(standalone_mode=False)
    except Exception as error:
        _fail(error)
    raise SystemExit(result if isinstance(result, int) else 0)


def start_quickly() -> None:
    """Look through old objects seldom: while modules are imported they are all in use.

    Young ones are looked through as ever.
    """
    gc.set_threshold(700, 10, 100)


def _fail(error: Exception) -> NoReturn:
    if type(error).__name__ == "Abort":  # what the command-line library makes of a second Ctrl-C
        _say("interrupted at once; the last checkpoint is whole: rl-training resume continues it")
        raise SystemExit(EXIT_INTERRUPTED) from None
    if hasattr(error, "show") and hasattr(error, "exit_code"):  # its own: options and arguments
        error.show()
        raise SystemExit(error.exit_code) from None
    from rl_training.errors import EnvironmentRuntimeError, TrainingError, UserError

    if not isinstance(error, UserError | EnvironmentRuntimeError | TrainingError | OSError):
        raise error
    _say(f"error: {error}")
    for note in getattr(error, "__notes__", ()):
        _say(note)
    raise SystemExit(EXIT_USER_ERROR if isinstance(error, UserError) else EXIT_FAILURE) from None


def _say(message: str) -> None:
    print(message, file=sys.stderr)


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    _say(f"warning: {message}")


def _parse_seeds(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        user_error(f"--seeds {text!r}: write whole numbers with commas between, such as 0,1,2")


def _parse_obs(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        user_error(f"--obs {text.strip()[:80]!r}: not JSON ({error}); write it as [0.1, 0.2, 0.3]")


def _report(results: list[TrainResult]) -> None:
    for result in results:
        _report_one(result)
    interrupted = [str(result.run_dir) for result in results if result.stop_reason == "interrupted"]
    if interrupted:
        _say(f"continue with: rl-training resume {' '.join(interrupted)}")
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
    if mean == mean:  # a result on episodes by which something was chosen flatters
        print("evaluated on   the run's own evaluation episodes, which choose the best checkpoint")
        print(f"for a fresh number: rl-training evaluate {result.run_dir}")
    print(f"run            {result.run_dir}")
    print(f"checkpoint     {result.checkpoint_path}")
    if result.best_checkpoint_path is not None:
        print(f"best           {result.best_checkpoint_path}")
    print(f"learning curve {result.run_dir / 'learning_curve.png'}")
