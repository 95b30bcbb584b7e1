"""Record a policy's episodes as video, or show them in a window.

The episodes are those of an evaluation with the same seed and the same number of episodes, because
they are played by the same code: environments side by side, of which some are rendered.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, SupportsFloat, get_args

import gymnasium as gym
import numpy as np

from rl_training.checkpoints.files import PlainFolder
from rl_training.checkpoints.format import POLICY, CheckpointReader
from rl_training.checkpoints.loading import (
    EVALUATION_FILES,
    find_checkpoint,
    load_policy,
    saved_config,
    saved_factory,
)
from rl_training.envs import (
    EnvironmentFactory,
    EnvironmentSource,
    EpisodeEnd,
    EvaluationFactory,
    VectorEnvironment,
)
from rl_training.envs.wrapping import WrapperFactory
from rl_training.errors import CheckpointError, EnvironmentRuntimeError, UserError, warn_user
from rl_training.evaluation.encoding import FORMATS, Encoder, ffmpeg, join
from rl_training.evaluation.evaluator import Evaluation, Evaluator, episodes_per_environment
from rl_training.evaluation.rendering import (
    check_display,
    off_screen,
    rendering_error,
    rendering_factory,
)
from rl_training.execution.policy import Policy
from rl_training.execution.random_streams import Stream, isolated_global_streams, stream_seed
from rl_training.types import RecordedEpisode, VideoSelection
from rl_training.validation import user_path

SELECTIONS = get_args(VideoSelection)
DEFAULT_EPISODES = 3
DEFAULT_FPS, MAX_FPS = 30.0, 1000.0
"""Frames per second of an environment that does not state its own, and the most"""
MAX_PIXELS = 8192
"""Largest width or height of a video"""


@dataclass(frozen=True)
class VideoOptions:
    """How a video looks. Raises `UserError` for values that no video can have."""

    fps: float | None = None
    """Frames per second; None: those of the environment"""
    width: int | None = None
    height: int | None = None

    def __post_init__(self) -> None:
        if self.fps is not None and not 0 < self.fps <= MAX_FPS:
            raise UserError(f"fps = {self.fps}: must be greater than 0 and at most {MAX_FPS:g}")
        if (self.width is None) != (self.height is None):
            raise UserError("width and height: set both of them, or neither")
        for name, number in (("width", self.width), ("height", self.height)):
            if number is not None and not 16 <= number <= MAX_PIXELS:
                raise UserError(f"{name} = {number}: must be from 16 to {MAX_PIXELS:,}")

    @property
    def size(self) -> tuple[int, int] | None:
        """Width and height, rounded up to even numbers, as H.264 needs them."""
        if self.width is None or self.height is None:
            return None
        return self.width + self.width % 2, self.height + self.height % 2


@dataclass(frozen=True)
class Subject:
    """What is recorded or shown: a policy in its environment, from a seed."""

    policy: Policy
    factory: EnvironmentFactory
    seed: int
    """Seed of the environments"""


def record(
    path: str | Path,
    out: str | Path,
    *,
    episodes: int = DEFAULT_EPISODES,
    best: bool = False,
    seed: int | None = None,
    select: VideoSelection = "all",
    fps: float | None = None,
    width: int | None = None,
    height: int | None = None,
    env: EnvironmentSource | None = None,
) -> list[RecordedEpisode]:
    """Record the policy of a run folder, a checkpoint or a saved policy to an MP4 or GIF file.

    The policy acts without exploration noise. The episodes are those of `evaluate_checkpoint` with
    the same seed and number of episodes; the default seed is that of the run. `select` records only
    the best or the worst of them. `best` uses the best checkpoint of a run folder.

    `fps` is by default the environment's own speed. Environments that cannot render in the given
    size are scaled to it. Returns the recorded episodes.
    """
    destination = check_destination(out)
    options = VideoOptions(fps, width, height)
    reader = find_checkpoint(path, best=best, names=EVALUATION_FILES)
    subject = _saved_subject(reader, path, seed, env)
    return record_policy(subject, destination, episodes=episodes, select=select, options=options)


def record_policy(
    subject: Subject,
    destination: Path,
    *,
    episodes: int = DEFAULT_EPISODES,
    select: VideoSelection = "all",
    options: VideoOptions | None = None,
) -> list[RecordedEpisode]:
    """Record episodes of a policy to a file, which is replaced if it exists."""
    destination = check_destination(destination)
    if select not in SELECTIONS:
        raise UserError(f"select = {select!r}: must be one of {', '.join(SELECTIONS)}")
    _check_number(episodes)
    ffmpeg()  # before anything is played
    with _writing(destination):
        PlainFolder(destination.parent).make()
    wanted: Sequence[int] = range(episodes)
    expected = None
    if select != "all":
        expected = Evaluator(subject.factory, episodes, subject.seed).evaluate(subject.policy)
        assert expected is not None, "nothing stops it"
        wanted = [best_and_worst(expected)[SELECTIONS.index(select) - 1]]
    with tempfile.TemporaryDirectory(prefix="rl-training-video-") as folder:
        recording = Recording(subject, episodes, wanted, Path(folder), options or VideoOptions())
        played = recording.play()
        assert played is not None, "nothing stops it"
        if expected is not None:
            warn_if_different(expected, played, wanted)
        joined = Path(folder) / f"video{destination.suffix.lower()}"
        join([recording.parts[number] for number in wanted], joined, recording.fps)
        with _writing(destination):
            PlainFolder(destination.parent).replace(destination.name, joined.read_bytes())
    return [
        RecordedEpisode(number + 1, played.returns[number], played.lengths[number])
        for number in wanted
    ]


def play(
    path: str | Path,
    *,
    episodes: int = DEFAULT_EPISODES,
    best: bool = False,
    seed: int | None = None,
    env: EnvironmentSource | None = None,
    shown: Callable[[RecordedEpisode], None] = lambda episode: None,
) -> list[RecordedEpisode]:
    """Show the policy of a run folder, a checkpoint or a saved policy in a window.

    `shown` is called after each episode. Returns the episodes.
    """
    _check_number(episodes)
    check_display()
    reader = find_checkpoint(path, best=best, names=EVALUATION_FILES)
    subject = _saved_subject(reader, path, seed, env)
    factory, _ = rendering_factory(subject.factory, "human")
    played: list[RecordedEpisode] = []
    try:
        for end in _episodes_one_by_one(replace(subject, factory=factory), episodes):
            played.append(RecordedEpisode(len(played) + 1, end.episode_return, end.length))
            shown(played[-1])
    except EnvironmentRuntimeError as error:
        if isinstance(error.__cause__, gym.error.DependencyNotInstalled | ImportError):
            raise rendering_error(factory.label, error.__cause__) from error
        raise
    return played


def _episodes_one_by_one(subject: Subject, number: int) -> Iterator[EpisodeEnd]:
    policy = subject.policy
    factory = EvaluationFactory.like(
        subject.factory.storing_as(policy.spaces.observation), policy.wrapper_statistics
    )
    ended = 0
    with (
        isolated_global_streams(subject.seed),
        VectorEnvironment(factory, 1, subject.seed, seed_every_reset=True) as environment,
    ):
        obs, player = environment.reset(), policy.player(1)
        while ended < number:
            environment.start(player.act(obs))
            step = environment.finish()
            for error in step.errors.values():
                raise error
            obs = step.obs
            player.end(step.terminated | step.truncated)
            ended += len(step.episodes)
            yield from step.episodes


def check_destination(out: str | Path) -> Path:
    """Return the path of a video that can be written; raise `UserError` for any other."""
    path = user_path(out)
    if path.suffix.lower() not in FORMATS:
        raise UserError(f"{path}: the name of a video must end with {' or '.join(FORMATS)}")
    if path.is_dir():
        raise UserError(f"{path}: is a folder; choose another name for the video")
    return path


def best_and_worst(evaluation: Evaluation) -> tuple[int, int]:
    """Return the positions of the episodes with the highest and the lowest return."""
    return int(np.argmax(evaluation.returns)), int(np.argmin(evaluation.returns))


def warn_if_different(expected: Evaluation, played: Evaluation, numbers: Collection[int]) -> None:
    """Warn if episodes that were played again for a video had other returns."""
    if any(expected.returns[number] != played.returns[number] for number in numbers):
        warn_user(
            "the environment does not repeat its episodes from the same seed, so that the video "
            "shows other episodes than the evaluation"
        )


class Recording:
    """Plays an evaluation's episodes and encodes some of them, each to a file in `folder`."""

    def __init__(
        self,
        subject: Subject,
        episodes: int,
        wanted: Collection[int],
        folder: Path,
        options: VideoOptions | None = None,
    ) -> None:
        """Record the episodes with the positions `wanted` among the `episodes` of an evaluation."""
        self._subject, self._episodes, self._wanted = subject, episodes, frozenset(wanted)
        self._folder, self._options = folder, options or VideoOptions()
        self.parts: dict[int, Path] = {}
        """The complete files, by the position of their episode"""
        self.fps = DEFAULT_FPS
        self.failure: UserError | None = None
        self._open: dict[int, Encoder] = {}
        self._environments = 0
        self._firsts: list[int] = []

    def play(self, stopping: Callable[[], bool] = lambda: False) -> Evaluation | None:
        """Play all episodes; None if `stopping` returned True before the last one ended.

        Raises `UserError` if rendering or encoding fails.
        """
        subject = self._subject
        quota = episodes_per_environment(self._episodes)
        self._firsts = [int(quota[:index].sum()) for index in range(len(quota) + 1)]
        try:
            with off_screen(subject.factory), isolated_global_streams(subject.seed):
                factory, own_fps = rendering_factory(
                    subject.factory, "rgb_array", self._options.size
                )
                self.fps = self._options.fps or min(own_fps or DEFAULT_FPS, MAX_FPS)
                wrapper = WrapperFactory("recording", _RecordedEnvironment, {"recording": self})
                recorded = replace(factory, wrappers=(*factory.wrappers, wrapper))
                return self._played(Evaluator(recorded, self._episodes, subject.seed), stopping)
        finally:
            for encoder in self._open.values():
                encoder.abandon()

    def _played(self, evaluator: Evaluator, stopping: Callable[[], bool]) -> Evaluation | None:
        def must_stop() -> bool:
            return self.failure is not None or stopping()

        evaluation = evaluator.evaluate(self._subject.policy, must_stop)
        if self.failure is not None:
            raise self.failure
        return evaluation

    def add_environment(self) -> int:
        """Return the index of a new environment; a factory makes them in order."""
        self._environments += 1
        return self._environments - 1

    def wants(self, environment: int, episode: int) -> int | None:
        """Return the position of an environment's episode if it is to be recorded."""
        first, end = self._firsts[environment : environment + 2]
        number = first + episode
        return number if number < end and number in self._wanted else None

    def add_frame(self, number: int, environment: gym.Env[Any, Any], *, is_last: bool) -> None:
        """Render a frame of an episode. An error ends the recording, but not the episode."""
        if self.failure is not None:
            return
        try:
            encoder = self._open.get(number)
            if encoder is None:
                path = self._folder / f"episode_{number}.mp4"
                encoder = self._open[number] = Encoder(path, self.fps, self._options.size)
            encoder.write(environment.render())
            if is_last:
                encoder.finish()
                self.parts[number] = encoder.path
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # the code of another package may raise anything
            self.failure = rendering_error(self._subject.factory.label, error)
            self.failure.__cause__ = error if self.failure is not error else None


class _RecordedEnvironment(gym.Wrapper[Any, Any, Any, Any]):
    """Renders the first state of a recorded episode, and each state after it."""

    def __init__(self, env: gym.Env[Any, Any], recording: Recording) -> None:
        super().__init__(env)
        self._recording, self._index = recording, recording.add_environment()
        self._episode = -1
        self._number: int | None = None

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        first = self.env.reset(seed=seed, options=options)
        self._episode += 1
        self._number = self._recording.wants(self._index, self._episode)
        self._add_frame(is_last=False)
        return first

    def step(self, action: Any) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        result = self.env.step(action)
        self._add_frame(is_last=bool(result[2] or result[3]))
        return result

    def _add_frame(self, *, is_last: bool) -> None:
        if self._number is not None:
            self._recording.add_frame(self._number, self.env, is_last=is_last)


def _saved_subject(
    reader: CheckpointReader, path: str | Path, seed: int | None, env: EnvironmentSource | None
) -> Subject:
    environment: Mapping[str, Any] = reader.json(POLICY).get("environment") or {}
    if env is None and environment.get("id") is None:
        raise CheckpointError(
            f"{path}: was trained in a custom environment ({environment.get('label')}); "
            "record it from Python with record_video(path, out, env=...)"
        )
    if seed is None:
        config = saved_config(reader)
        seed = config.seed if config else 0
    factory = saved_factory(dict(environment), env)
    return Subject(load_policy(reader), factory, fresh_seed(seed))


def fresh_seed(seed: int) -> int:
    """Return the seed of the environments of `evaluate`, whose episodes no run has used."""
    if seed < 0:
        raise UserError(f"seed = {seed}: must not be negative")
    return stream_seed(seed, Stream.REPORT_ENVIRONMENT)


def _check_number(episodes: int) -> None:
    if episodes < 1:
        raise UserError(f"episodes = {episodes}: must be at least 1")


@contextlib.contextmanager
def _writing(destination: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"{destination}: cannot be written ({error.strerror or error})") from error
