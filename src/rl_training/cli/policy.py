"""Commands that use a trained policy: `evaluate` and `predict`."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from rl_training.cli.options import (
    CheckpointOption,
    ImportOption,
    PolicyArgument,
    announce,
    count,
    import_modules,
    single_path,
    user_error,
)

OpeOption = Annotated[bool, typer.Option("--ope", help="Off-policy evaluation on recorded data.")]
DatasetOption = Annotated[
    str | None,
    typer.Option(
        metavar="SOURCE",
        help="With --ope: file, Minari id or run folder. Default: the run's dataset.",
    ),
]
HeldOutOption = Annotated[
    float | None,
    typer.Option(
        metavar="FRACTION", help="With --ope: fraction of episodes to hold out. Default: 0.2."
    ),
]
FqeUpdatesOption = Annotated[
    int | None,
    typer.Option(
        parser=count,
        metavar="N",
        help="With --ope: updates of fitted Q evaluation, 0 to skip it. Default: 10000.",
    ),
]


def evaluate(
    policy: PolicyArgument = None,
    checkpoint: CheckpointOption = None,
    best: Annotated[
        bool, typer.Option("--best", help="Use the best checkpoint of the run.")
    ] = False,
    episodes: Annotated[
        int | None,
        typer.Option(
            parser=count, metavar="N", help="Number of episodes. Default: eval_episodes of the run."
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(metavar="N", help="Random seed. Default: the run's seed; 0 with --ope."),
    ] = None,
    ope: OpeOption = False,
    dataset: DatasetOption = None,
    held_out: HeldOutOption = None,
    fqe_updates: FqeUpdatesOption = None,
    modules: ImportOption = None,
) -> None:
    """Evaluate a policy in new episodes or on recorded data.

    By default the policy runs without exploration noise in new episodes. With --ope it is
    evaluated on recorded data and runs no episodes.
    """
    path = single_path(policy, checkpoint)
    uses_recorded_data = _uses_recorded_data(ope, episodes, dataset, held_out, fqe_updates)
    announce(f"evaluating {path}", keep_output_clean=True)
    from rl_training.runtime import workflows
    from rl_training.types import SUCCESS_RATE

    import_modules(modules)
    if uses_recorded_data:
        _evaluate_on_recorded_data(path, dataset, best, seed, held_out, fqe_updates)
        return
    result = workflows.evaluate_policy_at(path, num_episodes=episodes, seed=seed, best=best)
    metrics = result.metrics
    print(_describe_returns(metrics, result.interval))
    if SUCCESS_RATE in metrics:
        print(f"success rate {metrics[SUCCESS_RATE]:.0%}")
    print(f"over {result.episodes}")
    if result.played_in is not None:
        print(
            f"in Gymnasium's {result.played_in}, of which the tensor environment that the policy "
            "was trained in is a copy"
        )
    if result.score is not None:
        print(f"score {result.score:.1f} ({result.scale})")


def _describe_returns(metrics: Mapping[str, float], interval: tuple[float, float]) -> str:
    mean, length = f"return {metrics['eval_return_mean']:.2f}", metrics["eval_length_mean"]
    low, high = interval
    if math.isinf(low):  # one episode has neither a spread nor an interval
        return f"{mean} (length {length:.1f})"
    return (
        f"{mean} ± {metrics['eval_return_std']:.2f} "
        f"(95 % confidence interval of the mean {low:.2f} to {high:.2f}; "
        f"min {metrics['eval_return_min']:.2f}, max {metrics['eval_return_max']:.2f}; "
        f"mean length {length:.1f})"
    )


def predict(
    path: PolicyArgument = None,
    checkpoint: CheckpointOption = None,
    obs: Annotated[
        str | None,
        typer.Option(
            metavar="JSON",
            help="One observation or a batch. Default: read one per line from standard input. "
            "For a recurrent policy it is a first step, and lines are the steps of an episode.",
        ),
    ] = None,
    stochastic: Annotated[
        bool,
        typer.Option(
            "--stochastic", help="Sample actions instead of using the deterministic policy."
        ),
    ] = False,
    modules: ImportOption = None,
) -> None:
    """Print a policy's actions for observations, as JSON.

    A recurrent policy remembers from line to line: the lines of standard input are the steps of one
    episode, or of several if each line is a batch.
    """
    from rl_training.errors import UserError
    from rl_training.runtime import workflows

    import_modules(modules)
    policy, state = workflows.read_policy(single_path(path, checkpoint)), None
    for where, text in [("--obs", obs)] if obs is not None else _input_lines():
        given = _parse_obs(where, text)
        try:
            if policy.memory_size:
                actions, state = policy.predict(
                    given, deterministic=not stochastic, state=state, episode_start=state is None
                )
            else:
                actions = policy.predict(given, deterministic=not stochastic)
        except UserError as error:
            user_error(f"{where}: {error}")
        print(json.dumps(actions.tolist()), flush=True)


def _uses_recorded_data(
    ope: bool,
    episodes: int | None,
    dataset: str | None,
    held_out: float | None,
    fqe_updates: int | None,
) -> bool:
    """Whether to evaluate on recorded data. Raise a `UserError` if options conflict."""
    if ope and episodes is not None:
        user_error("--episodes: cannot be used with --ope, which runs no episodes")
    if not ope and any(value is not None for value in (dataset, held_out, fqe_updates)):
        user_error("--dataset, --held-out and --fqe-updates: can only be used with --ope")
    return ope


def _evaluate_on_recorded_data(
    checkpoint: Path,
    dataset: str | None,
    best: bool,
    seed: int | None,
    held_out: float | None,
    fqe_updates: int | None,
) -> None:
    """Evaluate a policy on recorded data and print the results."""
    from rl_training.runtime import workflows

    result = workflows.evaluate_offline_at(
        checkpoint,
        dataset,
        seed=0 if seed is None else seed,
        best=best,
        held_out=workflows.HELD_OUT if held_out is None else held_out,
        fqe_updates=workflows.FQE_UPDATES if fqe_updates is None else fqe_updates,
    )
    for line in result.lines():
        print(line)


def _input_lines() -> Iterator[tuple[str, str]]:
    """Return the lines of standard input that are not empty, each with its place."""
    if sys.stdin.isatty():
        print("type observations, one per line, such as [0.1, 0.2]; Ctrl-D ends", file=sys.stderr)
    lines = enumerate(sys.stdin, start=1)
    try:
        for number, line in lines:
            if line.strip():
                yield f"standard input, line {number}", line
    except UnicodeDecodeError as error:
        user_error(f"standard input: not text in UTF-8 ({error})")


def _parse_obs(where: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        user_error(
            f"{where}: {text.strip()[:80]!r} is not JSON ({error}); "
            "expected a list such as [0.1, 0.2]"
        )
