"""Videos of policies: the right episodes, playable files, and runs that they do not change."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import pytest
from conftest import Command, tiny
from helpers import StopAt, hashes, keywords, metric_rows

from rl_training import SAC, TrainingInterrupted, record_video, resume_training, train
from rl_training.errors import UserError
from rl_training.evaluation import rendering
from rl_training.evaluation.video import play
from rl_training.types import TrainResult

imageio_ffmpeg = pytest.importorskip("imageio_ffmpeg")

LENGTH = 5
SIDE = 33  # H.264 needs even sizes


class Lamp(gym.Env[np.ndarray, np.ndarray]):
    """Episodes of a lamp that is more or less bright. The reward of each step is its brightness."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["rgb_array", "human"], "render_fps": 10}
    observation_space = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = gym.spaces.Box(-1.0, 1.0, (1,), np.float32)
    shown: ClassVar[list[int]] = []
    """Brightness at each frame in a window"""

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode
        self.steps = self.brightness = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps, self.brightness = 0, int(self.np_random.integers(20, 220))
        return self._observe(), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        return self._observe(), float(self.brightness), False, self.steps >= LENGTH, {}

    def _observe(self) -> np.ndarray:
        if self.render_mode == "human":
            self.shown.append(self.brightness)
        return self.np_random.uniform(-1, 1, 2).astype(np.float32)

    def render(self) -> Any:
        return np.full((SIDE, SIDE + 2, 3), self.brightness, np.uint8)


class Broken(Lamp):
    def render(self) -> Any:
        raise RuntimeError("the screen is on fire")


class Unseen(Lamp):
    """Cannot be rendered."""

    def __init__(self) -> None:
        super().__init__()


def decode(path: Path) -> list[np.ndarray]:
    """Return the frames of a video."""
    frames = imageio_ffmpeg.read_frames(str(path))
    width, height = next(frames)["source_size"]
    return [np.frombuffer(frame, np.uint8).reshape(height, width, 3) for frame in frames]


def brightness(path: Path) -> list[float]:
    """Return the brightness in the middle of each frame."""
    return [float(frame[4:-4, 4:-4].mean()) for frame in decode(path)]


def lamp_config(folder: Path, **changes: Any) -> dict[str, Any]:
    settings = {"env_id": None, "total_timesteps": 80, "eval_interval": 20, "eval_episodes": 4}
    return tiny(folder, **{**settings, "early_stopping": None, **changes})


def train_lamp(folder: Path, env: Any = Lamp, **changes: Any) -> TrainResult:
    result = train(lamp_config(folder, **changes), env=env)
    assert isinstance(result, TrainResult)
    return result


def videos_of(result: TrainResult) -> list[str]:
    folder = result.run_dir / "videos"
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


@pytest.fixture(scope="module")
def lamp_run(tmp_path_factory: pytest.TempPathFactory) -> TrainResult:
    return train_lamp(tmp_path_factory.mktemp("lamp"))


# Recording


def test_a_video_shows_every_frame_of_the_episodes(lamp_run: TrainResult, tmp_path: Path) -> None:
    out = tmp_path / "new folder" / "policy.mp4"
    episodes = record_video(lamp_run.run_dir, out, env=Lamp)
    assert [(each.number, each.length) for each in episodes] == [(1, LENGTH), (2, LENGTH), (3, 5)]
    shown = [each.episode_return / LENGTH for each in episodes for _ in range(LENGTH + 1)]
    assert brightness(out) == pytest.approx(shown, abs=6)
    assert decode(out)[0].shape == (SIDE + 1, SIDE + 3, 3)
    assert list(out.parent.iterdir()) == [out]


def test_a_browser_can_play_a_video(lamp_run: TrainResult, tmp_path: Path) -> None:
    out = tmp_path / "policy.mp4"
    record_video(lamp_run.run_dir, out, env=Lamp, episodes=1)
    data = out.read_bytes()
    assert 0 < data.index(b"moov") < data.index(b"mdat")  # the index comes first
    described = subprocess.run(
        [imageio_ffmpeg.get_ffmpeg_exe(), "-i", str(out)], capture_output=True, text=True
    ).stderr
    assert "Video: h264" in described
    assert "yuv420p" in described
    assert "10 fps" in described


def test_the_episodes_are_those_of_an_evaluation(tmp_path: Path) -> None:
    agent = SAC(Lamp, **keywords(lamp_config(tmp_path)))
    evaluated = agent.evaluate(12, seed=3)
    recorded = agent.record_video(tmp_path / "all.mp4", 12, seed=3)
    returns = [each.episode_return for each in recorded]
    assert np.mean(returns) == evaluated["eval_return_mean"]
    assert len(set(returns)) == 12
    for select, extreme in (("best", "eval_return_max"), ("worst", "eval_return_min")):
        out = tmp_path / f"{select}.mp4"
        (chosen,) = agent.record_video(out, 12, seed=3, select=select)  # type: ignore[arg-type]
        assert chosen.episode_return == evaluated[extreme]
        assert brightness(out) == pytest.approx([evaluated[extreme] / LENGTH] * 6, abs=6)


def test_speed_size_and_format(tmp_path: Path) -> None:
    agent = SAC(Lamp, **keywords(lamp_config(tmp_path)))
    options: dict[str, Any] = {"fps": 5, "width": 81, "height": 60}
    agent.record_video(tmp_path / "small.mp4", 1, **options)
    agent.record_video(tmp_path / "small.gif", 1, **options)
    assert decode(tmp_path / "small.mp4")[0].shape == (60, 82, 3)
    assert decode(tmp_path / "small.gif")[0].shape == (60, 82, 3)
    assert (tmp_path / "small.gif").read_bytes().startswith(b"GIF89a")
    assert len(decode(tmp_path / "small.mp4")) == len(decode(tmp_path / "small.gif")) == LENGTH + 1


def test_environments_that_render_are_found(tmp_path: Path) -> None:
    settings = keywords(lamp_config(tmp_path))
    sources = [
        lambda: Lamp("rgb_array"),
        Lamp("rgb_array"),
        lambda render_mode=None: Lamp(render_mode),
    ]
    for source in sources:
        assert SAC(source, **settings).record_video(tmp_path / "a.mp4", 1)
    with pytest.raises(UserError, match=r"Unseen cannot render as 'rgb_array'.*render_mode"):
        SAC(Unseen, **settings).record_video(tmp_path / "b.mp4")
    assert not (tmp_path / "b.mp4").exists()


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (None, r"render\(\) returned NoneType, not a picture"),
        (np.zeros((4, 4), np.uint8), r"ndarray of shape \(4, 4\), not a picture"),
        (np.zeros((4, 4, 3)), r"values of type float64, not uint8"),
    ],
)
def test_what_is_not_a_picture_is_named(frame: Any, message: str, tmp_path: Path) -> None:
    class Odd(Lamp):
        def render(self) -> Any:
            return frame

    with pytest.raises(UserError, match=message):
        SAC(Odd, **keywords(lamp_config(tmp_path))).record_video(tmp_path / "odd.mp4")
    assert list(tmp_path.glob("*.mp4")) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"out": "policy.avi"}, r"policy\.avi: the name of a video must end with \.mp4 or \.gif"),
        ({"out": "."}, "must end with"),
        ({"episodes": 0}, "episodes = 0: must be at least 1"),
        ({"seed": -1}, "seed = -1: must not be negative"),
        ({"select": "median"}, "select = 'median': must be one of all, best, worst"),
        ({"fps": 0}, "fps = 0: must be greater than 0"),
        ({"width": 100}, "set both of them, or neither"),
        ({"width": 100, "height": 7}, "height = 7: must be from 16 to 8,192"),
        ({"env": None}, r"was trained in a custom environment .*record_video\(path, out, env="),
    ],
)
def test_wrong_options_are_explained(
    options: dict[str, Any], message: str, lamp_run: TrainResult, tmp_path: Path
) -> None:
    given = {"env": Lamp, **options}
    out = tmp_path / given.pop("out", "policy.mp4")
    with pytest.raises(UserError, match=message):
        record_video(lamp_run.run_dir, out, **given)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_package_is_named(
    lamp_run: TrainResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    with pytest.raises(UserError, match=r"imageio-ffmpeg; install it with .*rl-training\[video\]"):
        record_video(lamp_run.run_dir, tmp_path / "policy.mp4", env=Lamp)


def test_a_missing_program_is_named(
    lamp_run: TrainResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", str(tmp_path / "none"))
    with pytest.raises(UserError, match=r"needs ffmpeg: .*none is no program"):
        record_video(lamp_run.run_dir, tmp_path / "policy.mp4", env=Lamp)


def test_environment_variables_are_set_only_while_recording(tmp_path: Path) -> None:
    seen: set[str | None] = set()

    class Curious(Lamp):
        def render(self) -> Any:
            seen.add(os.environ.get("SDL_VIDEODRIVER"))
            return super().render()

    before = dict(os.environ)
    SAC(Curious, **keywords(lamp_config(tmp_path))).record_video(tmp_path / "a.mp4", 1)
    assert dict(os.environ) == before
    assert seen == {"dummy"}


# MuJoCo


def test_where_mujoco_cannot_render_the_message_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mujoco")
    monkeypatch.delenv("MUJOCO_GL", raising=False)
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.setattr(rendering, "_PROBE", "raise SystemExit('no library')")
    rendering.mujoco_backend.cache_clear()
    agent = SAC("InvertedPendulum-v5", **keywords(tiny(tmp_path)))
    expected = r"off-screen here \(EGL: no library; OSMesa: no library\); .*libegl1.*libosmesa6"
    with pytest.raises(UserError, match=expected):
        agent.record_video(tmp_path / "policy.mp4")
    monkeypatch.setattr(rendering, "_PROBE", "import os; os.kill(os.getpid(), 11)")
    with pytest.raises(UserError, match=r"the graphics driver crashed \(signal 11\)"):
        agent.record_video(tmp_path / "policy.mp4")
    rendering.mujoco_backend.cache_clear()


def test_mujoco_renders_off_screen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mujoco")
    monkeypatch.delenv("MUJOCO_GL", raising=False)
    rendering.mujoco_backend.cache_clear()
    try:
        rendering.mujoco_backend()
    except UserError as error:
        pytest.skip(str(error))
    out = tmp_path / "policy.mp4"
    settings = keywords(tiny(tmp_path, env_kwargs={"max_episode_steps": 4}))
    agent = SAC("InvertedPendulum-v5", **settings)
    (episode,) = agent.record_video(out, 1, width=64, height=48)
    frames = decode(out)
    assert len(frames) == episode.length + 1 == 5
    assert frames[0].shape == (48, 64, 3)
    assert frames[0].std() > 10  # there is something to see
    assert "MUJOCO_GL" not in os.environ


# Videos of evaluations


def test_videos_change_nothing_else_in_a_run(tmp_path: Path) -> None:
    plain = train_lamp(tmp_path / "plain")
    filmed = train_lamp(tmp_path / "filmed", video_interval=40)
    assert videos_of(plain) == []
    assert videos_of(filmed) == [
        f"step_0000000{step}_{which}.mp4" for step in (40, 80) for which in ("best", "worst")
    ]
    assert metric_rows(filmed.run_dir) == metric_rows(plain.run_dir)
    without = {"state.json", "manifest.json"}  # they have the config
    ours, theirs = hashes(filmed.checkpoint_path), hashes(plain.checkpoint_path)
    assert {name: ours[name] for name in ours if name not in without} == {
        name: theirs[name] for name in theirs if name not in without
    }
    returns = filmed.metrics["eval_return_max"], filmed.metrics["eval_return_min"]
    for which, value in zip(("best", "worst"), returns, strict=True):
        shown = brightness(filmed.run_dir / "videos" / f"step_000000080_{which}.mp4")
        assert shown == pytest.approx([value / LENGTH] * (LENGTH + 1), abs=6)


def test_a_video_waits_for_the_next_evaluation(tmp_path: Path) -> None:
    result = train_lamp(tmp_path, video_interval=30, eval_interval=40, eval_episodes=1)
    # One episode is the best and the worst.
    assert videos_of(result) == ["step_000000040_best.mp4", "step_000000080_best.mp4"]


def test_a_resumed_run_and_several_seeds_have_videos(tmp_path: Path) -> None:
    config = lamp_config(tmp_path, video_interval=40, eval_interval=0, seeds=[3, 4])
    results = train(config, env=Lamp, callbacks=[StopAt(40)])
    assert isinstance(results, list)
    for result in results:
        assert videos_of(result) == ["step_000000040_best.mp4", "step_000000040_worst.mp4"]
        resumed = resume_training(result.run_dir, env=Lamp)
        assert "step_000000080_best.mp4" in videos_of(resumed)


def test_training_goes_on_where_rendering_fails(tmp_path: Path) -> None:
    plain = train_lamp(tmp_path / "plain")
    with pytest.warns(UserWarning, match="a video could not be recorded.*on fire") as warnings:
        failed = train_lamp(tmp_path / "failed", Broken, video_interval=20)
    assert len([each for each in warnings if "video" in str(each.message)]) == 1
    assert videos_of(failed) == []
    assert metric_rows(failed.run_dir) == metric_rows(plain.run_dir)
    with pytest.warns(UserWarning, match="cannot render as 'rgb_array'"):
        train_lamp(tmp_path / "unseen", Unseen, video_interval=20)


def test_a_link_in_the_place_of_the_videos_is_not_followed(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    stopped = train(lamp_config(tmp_path, video_interval=20), env=Lamp, callbacks=[StopAt(10)])
    assert isinstance(stopped, TrainResult)
    (stopped.run_dir / "videos").symlink_to(elsewhere)
    with pytest.raises(UserError, match="is a link"):
        resume_training(stopped.run_dir, env=Lamp)
    assert list(elsewhere.iterdir()) == []


def test_a_full_disk_is_only_a_warning(tmp_path: Path) -> None:
    class Occupied(Lamp):
        def render(self) -> Any:
            for run in (tmp_path / "runs").iterdir():
                (run / "videos").touch()  # a file, so that there can be no folder
            return super().render()

    with pytest.warns(UserWarning, match="a video could not be recorded"):
        result = train_lamp(tmp_path / "runs", Occupied, video_interval=20)
    assert result.stop_reason == "total_timesteps"


def test_a_signal_ends_a_recording(tmp_path: Path) -> None:
    class Stopping(Lamp):
        frames = 0

        def render(self) -> Any:
            Stopping.frames += 1
            if Stopping.frames == 4:
                os.kill(os.getpid(), signal.SIGTERM)
            return super().render()

    with pytest.raises(TrainingInterrupted) as interruption:
        train(lamp_config(tmp_path, video_interval=40), env=Stopping)
    stopped = interruption.value.result
    assert Stopping.frames <= 6  # of the best and the worst episode: the step was completed
    assert (stopped.metrics["global_step"], videos_of(stopped)) == (40, [])
    resumed = resume_training(stopped.run_dir, env=Stopping)
    assert videos_of(resumed)[0] == "step_000000060_best.mp4"  # made up for at the next one


def test_videos_need_an_environment_to_evaluate_in(tmp_path: Path) -> None:
    data = {
        "observations": np.zeros((40, 2), np.float32),
        "actions": np.zeros((40, 1), np.float32),
        "rewards": np.zeros(40, np.float32),
        "terminals": np.zeros(40, bool),
        "timeouts": np.arange(40) % 10 == 9,
        "action_low": np.array([-1.0]),
        "action_high": np.array([1.0]),
    }
    config = tiny(tmp_path, algo="bc", env_id=None, video_interval=10, total_timesteps=20)
    kwargs = {"hidden_sizes": [16], "batch_size": 16}
    with pytest.warns(UserWarning, match="video_interval has no effect.*set env_id"):
        train({**config, "algo_kwargs": kwargs}, dataset=data)


# Windows and the command line


def test_a_policy_is_played_in_a_window(
    lamp_run: TrainResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    Lamp.shown.clear()
    ended: list[float] = []
    played = play(
        lamp_run.run_dir, episodes=2, env=Lamp, shown=lambda each: ended.append(each.episode_return)
    )
    assert ended == [each.episode_return for each in played]
    expected = [each / LENGTH for each in ended for _ in range(LENGTH + 1)]
    assert Lamp.shown[: 2 * (LENGTH + 1)] == expected


def test_without_a_display_play_points_to_video(
    rl: Command, finished_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    played = rl("play", finished_run.run_dir)
    assert played.code == 2
    assert "there is no display" in played.err
    assert "rl-training video RUN --out policy.mp4" in played.err


def test_the_video_command(rl: Command, finished_run: Any, work: Path) -> None:
    pytest.importorskip("pygame")
    run = finished_run.run_dir
    options = ("--episodes", "2", "--best", "--select", "best", "--width", "64", "--height", "64")
    made = rl("video", run, "--out", "best.mp4", *options)
    evaluated = rl("evaluate", run, "--best", "--episodes", "2")
    assert (made.code, made.err) == (0, "")
    shown = made.out.splitlines()
    assert shown[1:] == ["video best.mp4"]
    value = shown[0].removeprefix("episode 1: return ").removeprefix("episode 2: return ")
    assert f"max {value.partition(',')[0]};" in evaluated.out
    frames = decode(work / "best.mp4")
    assert len(frames) == 201
    assert max(frame.std() for frame in frames) > 10
