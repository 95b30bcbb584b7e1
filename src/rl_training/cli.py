"""The command line: entry point, error handling, and the commands `train` and `resume`.

Commands import what they need when they run, which keeps `--help` fast. Those that take a while
print a line before they import PyTorch.
"""

from __future__ import annotations

import contextlib
import gc
import math
import re
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, cast

import typer
from typer.core import TyperGroup

from rl_training import cli_completion as completion
from rl_training.cli_compare import compare_runs, report_seeds
from rl_training.cli_dataset import dataset_app
from rl_training.cli_export import export
from rl_training.cli_hub import pull, push
from rl_training.cli_options import (
    DeviceOption,
    EnvOption,
    ImportOption,
    MoveOption,
    OptionalConfigOption,
    ReadableCommand,
    ScheduleOption,
    SetOption,
    StepsOption,
    WrapperOption,
    announce,
    command_with_imports,
    finish_output,
    import_environment,
    import_flags,
    import_modules,
    outlive_output,
    prepare_streams,
    user_error,
)
from rl_training.cli_policy import evaluate, predict
from rl_training.cli_report import dashboard, report
from rl_training.cli_show import list_algorithms, show_config, show_runs, show_system
from rl_training.cli_sweep import run, sweep, sweep_worker
from rl_training.cli_video import play, video
from rl_training.errors import CLEANUP_SECONDS, STOP_SIGNALS

if TYPE_CHECKING:
    from rl_training.config import TrainConfig
    from rl_training.types import ScheduleChoice, TrainResult

TRAIN_EXAMPLES = """
Examples:

\b
  rl-training train --config sac/pendulum
  rl-training train --algo sac --env Hopper-v5 --total-timesteps 300k
  rl-training train --config sac/mujoco --seeds 0-4 --set tau=0.01

`rl-training list` shows the packaged configs, and `config --describe` all keys.
"""
EXIT_FAILURE, EXIT_USER_ERROR, EXIT_PREEMPTED, EXIT_INTERRUPTED = 1, 2, 75, 130
"""Codes that tell scripts why a command failed. The help of `train` states the last one."""
IMPORT_SYSTEM = "<frozen importlib._bootstrap>"
_ESCAPE_CODE = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|\].*?(\x07|\x1b\\)|.)", re.DOTALL)
"""Codes that change the color of text or control the terminal"""


class _Commands(TyperGroup):
    """The commands. Ctrl-C and SIGTERM in any of them are reported in one place."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as interruption:
            _report_interruption(interruption)


app = typer.Typer(
    name="rl-training",
    cls=_Commands,
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
    try:
        Path.cwd()
    except FileNotFoundError:  # PyTorch could not be loaded
        user_error("the current folder does not exist anymore; change to another folder")


@app.command(epilog=TRAIN_EXAMPLES)
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
    _report(results if isinstance(results, list) else [results])


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
    _report(results)


app.command(cls=ReadableCommand)(evaluate)
app.command(cls=ReadableCommand)(predict)
app.command(cls=ReadableCommand)(push)
app.command(cls=ReadableCommand)(pull)
app.command(cls=ReadableCommand)(video)
app.command(cls=ReadableCommand)(play)
app.command(cls=ReadableCommand)(export)
app.command("list")(list_algorithms)
app.command("config", cls=ReadableCommand)(show_config)
app.command("runs", cls=ReadableCommand)(show_runs)
app.command("compare", cls=ReadableCommand)(compare_runs)
app.command("report", cls=ReadableCommand)(report)
app.command("dashboard", cls=ReadableCommand)(dashboard)
app.command("doctor")(show_system)
app.command(cls=ReadableCommand)(run)
app.command(cls=ReadableCommand)(sweep)
app.command("sweep-worker", hidden=True)(sweep_worker)
app.add_typer(dataset_app, name="dataset")


def main() -> NoReturn:
    """Run a command and exit. A user error prints one message and exits with code 2."""
    reduce_garbage_collection()
    prepare_streams()
    warnings.showwarning = _show_warning
    invocation = Invocation()
    with _interrupted_by_signals():
        try:
            result = app(prog_name="rl-training", standalone_mode=False, obj=invocation)
        except KeyboardInterrupt as interruption:
            _report_interruption(interruption)
        except Exception as error:
            if isinstance(error.__cause__, KeyboardInterrupt):  # while arguments are parsed
                _report_interruption(error.__cause__)
            _fail(error, debug=invocation.debug)
        finally:
            finish_output()
    raise SystemExit(result if isinstance(result, int) else 0)


@contextlib.contextmanager
def _interrupted_by_signals() -> Iterator[None]:
    """Let `STOP_SIGNALS` raise `KeyboardInterrupt`; training reacts in its own way.

    While modules are imported, the previous reaction remains, because libraries turn exceptions
    there into others. `rl_training.__main__` exits then.
    """
    raised_at = -math.inf

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal raised_at
        before = previous[signal.Signals(number)]
        if callable(before) and _is_importing(frame):
            before(number, frame)
        if time.monotonic() >= raised_at + CLEANUP_SECONDS:
            raised_at = time.monotonic()
            raise KeyboardInterrupt(signal.Signals(number))

    previous = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    try:
        for number in STOP_SIGNALS:
            signal.signal(number, handle)
        yield
    finally:
        for number, handler in previous.items():  # None: one that Python cannot set
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename == IMPORT_SYSTEM:
            return True
        frame = frame.f_back
    return False


def reduce_garbage_collection() -> None:
    """Make full garbage collections rarer.

    They would cost time while modules are imported and free nothing. Collections of the younger
    generations are as frequent as before.
    """
    gc.set_threshold(700, 10, 100)


def _fail(error: Exception, *, debug: bool = False) -> NoReturn:
    if hasattr(error, "show") and hasattr(error, "exit_code"):  # click: wrong usage
        error.show()
        raise SystemExit(error.exit_code) from None
    from rl_training.errors import (
        WORKER_TRACEBACK,
        EnvironmentRuntimeError,
        TrainingError,
        UntrustedModuleError,
        UserError,
    )

    if not isinstance(error, UserError | EnvironmentRuntimeError | TrainingError | OSError):
        raise error
    if debug:
        traceback.print_exception(error)
    elif error.__cause__ is not None:
        error.add_note("rl-training --debug COMMAND shows the traceback")
    _print_error(f"error: {error}")
    if isinstance(error, UntrustedModuleError) and error.modules:
        _print_error(f"run: {command_with_imports(error.modules)}")
    for note in getattr(error, "__notes__", ()):
        if debug or not note.startswith(WORKER_TRACEBACK):
            _print_error(note)
    raise SystemExit(EXIT_USER_ERROR if isinstance(error, UserError) else EXIT_FAILURE) from None


def _print_error(message: str) -> None:
    from rl_training.errors import printable

    print(printable(message), file=sys.stderr)


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    _print_error(f"warning: {_ESCAPE_CODE.sub('', str(message))}")


def _check_packages(env_id: Any) -> None:
    """Raise a `UserError` if the environment's id is unknown or it needs a missing package."""
    from rl_training.envs import check_environment_packages

    if isinstance(env_id, str):
        check_environment_packages(env_id)


def _report(results: list[TrainResult]) -> None:
    if len(results) == 1:
        _report_one(results[0])
    elif results:
        report_seeds(results)


def _report_interruption(interruption: KeyboardInterrupt) -> NoReturn:
    """Report what was saved; after a second signal, the notes name the last checkpoints."""
    from rl_training.errors import TrainingInterrupted

    notes = getattr(interruption, "__notes__", ())
    if isinstance(interruption, TrainingInterrupted) and not notes:
        _report(interruption.results)
        if interruption.__cause__ is not None:
            _print_error(f"error: {interruption.__cause__}")
        flags = import_flags() if interruption.unfinished else ""
        _print_error(f"{interruption.report()}{flags}")
        raise SystemExit(_exit_code(interruption) if interruption.unfinished else 0) from None
    if interruption.__cause__ is not None:
        _print_error(f"error: {interruption.__cause__}")
    _print_error("interrupted")
    for note in notes:
        _print_error(note)
    raise SystemExit(_exit_code(interruption)) from None


def _exit_code(interruption: KeyboardInterrupt) -> int:
    """75 after SIGUSR1, by which a scheduler says that it will start the command again."""
    from rl_training.errors import stop_signals

    received = stop_signals(interruption)
    if received and set(received) == {getattr(signal, "SIGUSR1", None)}:
        return EXIT_PREEMPTED
    return EXIT_INTERRUPTED


def _report_one(result: TrainResult) -> None:
    from rl_training.types import SUCCESS_RATE

    metrics = result.metrics
    reason = "finished" if result.stop_reason == "total_timesteps" else result.stop_reason
    mean, spread = metrics["eval_return_mean"], metrics["eval_return_std"]
    returns = "not evaluated" if mean != mean else f"evaluation {mean:.2f} ± {spread:.2f}"
    print(
        f"{reason} at step {int(metrics['global_step']):,} "
        f"({int(metrics['gradient_steps']):,} updates), {returns}"
    )
    if mean == mean:  # biased: the same episodes select the best checkpoint
        if SUCCESS_RATE in metrics:
            print(f"success rate {metrics[SUCCESS_RATE]:.0%}")
        print("these episodes also select the best checkpoint; for an unbiased estimate:")
        print(f"  rl-training evaluate {result.run_dir}{import_flags()}")
    print(f"run            {result.run_dir}")
    print(f"checkpoint     {result.checkpoint_path}")
    if result.best_checkpoint_path is not None:
        print(f"best           {result.best_checkpoint_path}")
    curve = result.run_dir / "learning_curve.png"
    if curve.exists():  # not drawn if the run was interrupted
        print(f"learning curve {curve}")
