"""Make environments that render, off-screen or in a window.

MuJoCo renders off-screen with EGL or OSMesa. Which of them works is found out in a separate
process: a broken graphics driver can end the process that loads it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal

import gymnasium as gym

from rl_training.envs import EnvironmentFactory
from rl_training.envs.make import close_environment
from rl_training.envs.packages import gymnasium_id
from rl_training.errors import EnvironmentSetupError, UserError, last_line, one_line

RenderMode = Literal["rgb_array", "human"]

PROBE_SECONDS = 60.0
MAX_REASON = 200
"""Characters of another program's error that a message repeats"""
GRAPHICS = "MUJOCO_GL"
"""The environment variable that selects how MuJoCo renders"""
_WITHOUT_MUJOCO = tuple(
    f"gymnasium.envs.{name}"
    for name in ("box2d", "classic_control", "phys2d", "tabular", "toy_text")
)
_PROBE = """
import mujoco
model = mujoco.MjModel.from_xml_string(
    '<mujoco><worldbody><light pos="0 0 3"/><geom type="sphere" size="1"/></worldbody></mujoco>'
)
data = mujoco.MjData(model)
mujoco.mj_forward(model, data)
renderer = mujoco.Renderer(model, 16, 16)
renderer.update_scene(data)
if renderer.render().max() == 0:
    raise SystemExit("the picture is empty")
renderer.close()
"""
_INSTALL = (
    "install one of them, for example with `apt-get install libegl1 libgl1` for EGL (on a machine "
    "with a GPU, its driver provides it) or `apt-get install libosmesa6` for OSMesa"
)


@contextlib.contextmanager
def off_screen(factory: EnvironmentFactory) -> Iterator[None]:
    """Render without a window inside this block; variables that the user has set stay as they are.

    Raises `UserError` if the environment may use MuJoCo, which then could not render.
    """
    wanted = {
        "SDL_VIDEODRIVER": "dummy",
        "SDL_AUDIODRIVER": "dummy",
        "PYGAME_HIDE_SUPPORT_PROMPT": "1",
    }
    if sys.platform == "linux" and GRAPHICS not in os.environ and _may_use_mujoco(factory):
        wanted[GRAPHICS] = mujoco_backend()
    added = {name: value for name, value in wanted.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


@functools.cache
def mujoco_backend() -> str:
    """Return the first way in which MuJoCo can render here: `egl`, `osmesa`, or `glfw`.

    Raises `UserError` if there is none.
    """
    names = {"egl": "EGL", "osmesa": "OSMesa"}
    if os.environ.get("DISPLAY"):
        names["glfw"] = "GLFW"
    reasons = []
    for backend, name in names.items():
        reason = _why_it_fails(backend)
        if reason is None:
            return backend
        reasons.append(f"{name}: {reason}")
    raise UserError(f"MuJoCo cannot render off-screen here ({'; '.join(reasons)}); {_INSTALL}")


def _why_it_fails(backend: str) -> str | None:
    """Render a picture in a new process; return the reason if that fails."""
    try:
        done = subprocess.run(  # noqa: S603 (this Python and a constant)
            [sys.executable, "-c", _PROBE],
            env={**os.environ, GRAPHICS: backend},
            cwd=tempfile.gettempdir(),  # MuJoCo writes its errors to a file there
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=PROBE_SECONDS,
            check=False,
            start_new_session=True,  # Ctrl-C is for this process, which then stops in order
        )
    except subprocess.TimeoutExpired:
        return f"no picture after {PROBE_SECONDS:.0f} seconds"
    except OSError as error:
        return str(error.strerror or error)
    if done.returncode == 0:
        return None
    if done.returncode < 0:
        return f"the graphics driver crashed (signal {-done.returncode})"
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    return one_line(lines[-1], MAX_REASON) if lines else f"exit code {done.returncode}"


def _may_use_mujoco(factory: EnvironmentFactory) -> bool:
    if isinstance(factory.source, str) and not factory.wrappers:
        spec = gym.registry.get(gymnasium_id(factory.source))
        if spec is not None and str(spec.entry_point).startswith(_WITHOUT_MUJOCO):
            return False
    try:
        return importlib.util.find_spec("mujoco") is not None
    except (ImportError, ValueError):
        return False


def rendering_factory(
    factory: EnvironmentFactory, mode: RenderMode, size: tuple[int, int] | None = None
) -> tuple[EnvironmentFactory, float | None]:
    """Return a factory whose environments render, and their frames per second, if they have any.

    The environment is asked for pictures of `size` (width, height), but may not support that.
    Raises `UserError` if it does not support the mode.
    """
    shape = {} if size is None else {"width": size[0], "height": size[1]}
    attempts: list[Mapping[str, Any]] = [{"render_mode": mode}, {}]
    if shape:
        attempts.insert(0, {"render_mode": mode, **shape})
    reason = ""
    for extra in attempts:
        candidate = replace(factory, kwargs={**factory.kwargs, **extra})
        try:
            environment = candidate()
        except EnvironmentSetupError as error:
            if not extra:
                raise
            reason = f" ({one_line(str(error), MAX_REASON)})"
            continue
        try:
            if environment.render_mode == mode:
                return candidate, _frames_per_second(environment)
        finally:
            close_environment(environment)
    raise UserError(
        f"{factory.label} cannot render as {mode!r}{reason}; its constructor needs an argument "
        f"`render_mode`, or pass a function that makes it with render_mode={mode!r}"
    )


def _frames_per_second(environment: gym.Env[Any, Any]) -> float | None:
    found = (environment.metadata or {}).get("render_fps")
    try:
        number = float(found)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None
    return number if 0 < number < float("inf") else None


def check_display() -> None:
    """Raise `UserError` if there is no screen on which a window could open."""
    if sys.platform != "linux" or os.environ.get("SDL_VIDEODRIVER"):
        return
    if not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        raise UserError(
            "there is no display to open a window on (neither DISPLAY nor WAYLAND_DISPLAY is set); "
            "record a video instead: rl-training video RUN --out policy.mp4"
        )


def rendering_error(label: str, error: BaseException) -> UserError:
    """Describe an error of an environment's `render`."""
    if isinstance(error, UserError):
        return error
    text = one_line(last_line(error), MAX_REASON)
    hint = ""
    if isinstance(error, gym.error.DependencyNotInstalled | ImportError) and "pygame" in str(error):
        hint = "; install it with `pip install 'rl-training[classic-control]'`"
    elif os.environ.get(GRAPHICS) and "mujoco" in sys.modules:
        hint = f"; {GRAPHICS} is {os.environ[GRAPHICS]!r}"
    return UserError(f"{label} could not be rendered: {text}{hint}")
