"""Record the best and the worst episode of some of a run's evaluations."""

from __future__ import annotations

import tempfile
from pathlib import Path

from rl_training.callbacks import PeriodicCallback, TrainingContext
from rl_training.checkpoints.files import is_temporary
from rl_training.checkpoints.format import step_folder_name
from rl_training.checkpoints.run_folder import RunFolder
from rl_training.config import TrainConfig
from rl_training.envs import EnvironmentFactory
from rl_training.errors import UserError, brief, warn_user
from rl_training.evaluation.encoding import ffmpeg
from rl_training.evaluation.video import Recording, Subject, best_and_worst, warn_if_different
from rl_training.execution.random_streams import Stream, stream_seed
from rl_training.types import Json


class PeriodicVideos(PeriodicCallback):
    """Writes `videos/step_<position>_best.mp4` and `_worst.mp4` into the run folder.

    Every `interval` steps a video becomes due, and the next evaluation is played again in new
    environments with the same seeds, of which two are rendered. Neither this evaluation nor any
    random stream of the run is changed. What cannot be recorded is only a warning, once.
    """

    def __init__(
        self, config: TrainConfig, factory: EnvironmentFactory | None, folder: RunFolder
    ) -> None:
        super().__init__(config.video_interval or 0)
        self._factory, self._num_episodes = factory, config.eval_episodes
        self._seed = stream_seed(config.seed, Stream.EVALUATION_ENVIRONMENT)
        self._folder = folder.plain.inner(folder.videos.name)
        self._is_due = False
        self._has_warned = False

    def on_train_start(self, context: TrainingContext) -> None:
        super().on_train_start(context)
        if self._factory is None:
            warn_user(
                "video_interval has no effect: there is no environment to evaluate in; set env_id"
            )
        if context.position == 0:
            self._is_due = False
        self._remove_leftovers()

    def due(self, context: TrainingContext) -> None:
        self._is_due = True

    def on_evaluation_end(self, context: TrainingContext) -> None:
        if not self._is_due or context.is_interrupted:
            return
        try:
            self._is_due = not self._record(context)
        except KeyboardInterrupt:
            raise
        except Exception as error:  # other packages may raise anything; training goes on
            self._is_due = False
            self._warn_once(error)

    def _record(self, context: TrainingContext) -> bool:
        """Write the videos of the last evaluation; return False if a signal interrupted that."""
        assert self._factory is not None, "without an environment there is no evaluation"
        assert context.evaluation is not None
        ffmpeg()
        best, worst = best_and_worst(context.evaluation)
        subject = Subject(context.policy, self._factory, self._seed)
        with tempfile.TemporaryDirectory(prefix="rl-training-video-") as temporary:
            recording = Recording(subject, self._num_episodes, {best, worst}, Path(temporary))
            played = recording.play(lambda: context.is_interrupted)
            if played is None:
                return False
            warn_if_different(context.evaluation, played, {best, worst})
            self._folder.make()
            # Equal if all returns are equal, as in an evaluation of one episode.
            for name, number in {"best": best, "worst": worst}.items():
                if name == "best" or number != best:
                    file = f"{step_folder_name(context.position)}_{name}.mp4"
                    self._folder.replace(file, recording.parts[number].read_bytes())
        return True

    def _remove_leftovers(self) -> None:
        """Remove what a killed process left of a video."""
        try:
            for name in filter(is_temporary, self._folder.entries()):
                self._folder.remove(name)
        except (OSError, UserError) as error:  # such as a link in the place of the folder
            self._warn_once(error)

    def _warn_once(self, error: Exception) -> None:
        if not self._has_warned:
            self._has_warned = True
            warn_user(f"a video could not be recorded, training continues: {brief(error)}")

    def state_dict(self) -> Json:
        return {**super().state_dict(), "is_due": self._is_due}

    def load_state_dict(self, state: Json) -> None:
        super().load_state_dict(state)
        self._is_due = state["is_due"] is True
