"""`evaluate --ope`: what recorded data says of a policy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rl_training.cli_options import count, user_error

OpeOption = Annotated[
    bool, typer.Option("--ope", help="Evaluate on recorded data instead of playing.")
]
DatasetOption = Annotated[
    str | None,
    typer.Option(help="With --ope: a file, Minari id or run folder; else the run's own data."),
]
HeldOutOption = Annotated[
    float | None, typer.Option(help="With --ope: share of the episodes held out (0.2).")
]
FqeUpdatesOption = Annotated[
    int | None,
    typer.Option(
        parser=count,
        metavar="N",
        help="With --ope: updates of fitted Q evaluation (10000); 0 leaves it out.",
    ),
]


def with_data(
    ope: bool,
    episodes: int | None,
    dataset: str | None,
    held_out: float | None,
    fqe_updates: int | None,
) -> bool:
    """Whether recorded data is to be asked; options that do not go together are refused."""
    if ope and episodes is not None:
        user_error("--episodes: none are played with --ope")
    if not ope and any(value is not None for value in (dataset, held_out, fqe_updates)):
        user_error("--dataset, --held-out and --fqe-updates: only with --ope")
    return ope


def evaluate_by_data(
    checkpoint: Path,
    dataset: str | None,
    best: bool,
    seed: int | None,
    held_out: float | None,
    fqe_updates: int | None,
) -> None:
    """Print the numbers and how to read them."""
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
