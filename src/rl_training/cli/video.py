"""Commands that show a policy: `video` and `play`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from rl_training.cli import completion
from rl_training.cli.options import (
    CheckpointOption,
    EnvOption,
    ImportOption,
    PolicyArgument,
    announce,
    count,
    import_environment,
    single_path,
)

if TYPE_CHECKING:
    from rl_training.types import RecordedEpisode, VideoSelection

DEFAULT_EPISODES = 3
BestOption = Annotated[bool, typer.Option("--best", help="Use the best checkpoint of the run.")]
EpisodesOption = Annotated[
    int | None, typer.Option(parser=count, metavar="N", help="Number of episodes. Default: 3.")
]
SeedOption = Annotated[
    int | None, typer.Option(metavar="N", help="Random seed. Default: the run's seed.")
]
SelectOption = Annotated[
    str,
    typer.Option(
        metavar="all|best|worst",
        help="Which of the episodes to record.",
        autocompletion=completion.choices("all", "best", "worst"),
    ),
]


def video(
    policy: PolicyArgument = None,
    checkpoint: CheckpointOption = None,
    out: Annotated[
        Path, typer.Option("--out", metavar="FILE", help="Video to write: .mp4 or .gif.")
    ] = Path("policy.mp4"),
    episodes: EpisodesOption = None,
    best: BestOption = False,
    select: SelectOption = "all",
    seed: SeedOption = None,
    fps: Annotated[
        float | None,
        typer.Option(metavar="N", help="Frames per second. Default: the environment's own."),
    ] = None,
    width: Annotated[
        int | None, typer.Option(metavar="PIXELS", help="Width of the video, with --height.")
    ] = None,
    height: Annotated[
        int | None, typer.Option(metavar="PIXELS", help="Height of the video, with --width.")
    ] = None,
    env: EnvOption = None,
    modules: ImportOption = None,
) -> None:
    """Record episodes of a policy as a video.

    The policy acts without exploration noise. The episodes are those of `evaluate` with the same
    seed and number of episodes. No display is needed.
    """
    path = single_path(policy, checkpoint)
    number = DEFAULT_EPISODES if episodes is None else episodes
    announce(f"recording {path}", keep_output_clean=True)
    environment = import_environment(env, modules)
    from rl_training.runtime import workflows

    recorded = workflows.record_video(
        path,
        out,
        episodes=number,
        best=best,
        seed=seed,
        select=cast("VideoSelection", select),
        fps=fps,
        width=width,
        height=height,
        env=environment,
    )
    for episode in recorded:
        _show(episode)
    print(f"video {out}")


def play(
    policy: PolicyArgument = None,
    checkpoint: CheckpointOption = None,
    episodes: EpisodesOption = None,
    best: BestOption = False,
    seed: SeedOption = None,
    env: EnvOption = None,
    modules: ImportOption = None,
) -> None:
    """Show episodes of a policy in a window.

    Ctrl-C closes the window. Where there is no display, use `video`.
    """
    path = single_path(policy, checkpoint)
    number = DEFAULT_EPISODES if episodes is None else episodes
    announce(f"playing {path}", keep_output_clean=True)
    environment = import_environment(env, modules)
    from rl_training.runtime import workflows

    workflows.play_policy(path, episodes=number, best=best, seed=seed, env=environment, shown=_show)


def _show(episode: RecordedEpisode) -> None:
    number, value, length = episode.number, episode.episode_return, episode.length
    print(f"episode {number}: return {value:.2f}, length {length}", flush=True)
