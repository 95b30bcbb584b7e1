"""Encode frames as H.264 video, which browsers play, or as an animated GIF."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import numpy as np

from rl_training.errors import UserError, one_line

FORMATS = (".mp4", ".gif")
FINISH_SECONDS = 120.0
"""How long ffmpeg may take after the last frame"""
GIF_FRAMES = 25.0
"""Most frames per second of a GIF; viewers slow down faster ones"""
MAX_REASON = 300
_QUIET = ("-hide_banner", "-loglevel", "error", "-nostdin", "-y")
_PLAYABLE = ("-movflags", "+faststart")
"""Puts the index first, so that a browser starts to play before it has the complete file"""


def ffmpeg() -> str:
    """Return the path of ffmpeg; raise `UserError` if there is none."""
    try:
        from imageio_ffmpeg import get_ffmpeg_exe
    except ImportError:
        raise UserError(
            "recording a video needs the package imageio-ffmpeg; install it with "
            "`pip install 'rl-training[video]'`"
        ) from None
    try:
        found: str = get_ffmpeg_exe()
    except RuntimeError as error:
        raise UserError(f"recording a video needs ffmpeg: {one_line(str(error), 300)}") from None
    if shutil.which(found) is None:  # the variable is not checked by imageio-ffmpeg
        raise UserError(
            f"recording a video needs ffmpeg: {one_line(found, 300)} is no program; correct or "
            "unset the environment variable IMAGEIO_FFMPEG_EXE"
        )
    return found


class Encoder:
    """Writes frames to an MP4 file as they come. The first frame determines the size."""

    def __init__(self, path: Path, fps: float, size: tuple[int, int] | None = None) -> None:
        """`size` is the width and height of the video; by default those of the frames."""
        self.path, self._fps, self._size = path, fps, size
        self._shape: tuple[int, ...] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._messages: IO[bytes] | None = None

    def write(self, frame: object) -> None:
        """Add a frame; raise `UserError` if it is not a picture, or cannot be encoded."""
        pixels = _checked(frame)
        if self._process is None:
            self._start(pixels)
        elif pixels.shape != self._shape:
            raise UserError(f"a frame has shape {pixels.shape}, the first one had {self._shape}")
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(pixels.data)
        except OSError:  # it has ended
            self.finish()
            raise UserError("ffmpeg ended before the last frame") from None

    def finish(self) -> None:
        """Complete the file; raise `UserError` if that fails."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        with contextlib.suppress(OSError):
            process.stdin.close()
        try:
            code = process.wait(FINISH_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
        reason = self._reason()
        if code != 0:
            raise UserError(f"the video could not be encoded: {reason or f'exit code {code}'}")

    def abandon(self) -> None:
        """End ffmpeg and leave the file incomplete."""
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        assert process.stdin is not None
        with contextlib.suppress(OSError):
            process.stdin.close()
        self._reason()

    def _start(self, pixels: np.ndarray) -> None:
        height, width, _ = self._shape = pixels.shape
        self._messages = open(self.path.with_suffix(".log"), "w+b")  # noqa: SIM115 (closed later)
        self._process = subprocess.Popen(  # noqa: S603 (the program of imageio-ffmpeg)
            [
                *(ffmpeg(), *_QUIET),
                *("-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{width}x{height}"),
                *("-r", f"{self._fps:g}", "-i", "pipe:0", "-vf", self._filter()),
                # One thread, because training may be using the other cores.
                *("-c:v", "libx264", "-preset", "veryfast", "-crf", "20", "-threads", "1"),
                *("-pix_fmt", "yuv420p", *_PLAYABLE, str(self.path)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=self._messages,
            start_new_session=True,  # Ctrl-C is for this process, which then stops in order
        )

    def _filter(self) -> str:
        if self._size is None:
            return "pad=ceil(iw/2)*2:ceil(ih/2)*2"  # H.264 needs even sizes
        width, height = self._size
        return (
            f"scale={width}:{height}:force_original_aspect_ratio=decrease,"
            f"pad={width}:{height}:(ow-iw)/2:(oh-ih)/2"
        )

    def _reason(self) -> str:
        """Return the first message of ffmpeg, and close the file with them."""
        messages, self._messages = self._messages, None
        if messages is None:
            return ""
        with messages:
            messages.seek(0)
            text = messages.read(10_000).decode(errors="replace")
        return one_line(text.strip().partition("\n")[0], MAX_REASON)


def join(parts: Sequence[Path], destination: Path, fps: float) -> None:
    """Join MP4 files of equal format; the destination's suffix chooses MP4 or GIF."""
    listing = destination.with_suffix(".txt")
    listing.write_text("".join(f"file '{part.name}'\n" for part in parts))  # in the same folder
    source = ["-f", "concat", "-safe", "0", "-i", str(listing)]
    if destination.suffix == ".gif":
        palette = f"fps={min(fps, GIF_FRAMES):g},split[a][b];[a]palettegen[p];[b][p]paletteuse"
        _run([*source, "-vf", palette, str(destination)])
    else:
        _run([*source, "-c", "copy", *_PLAYABLE, str(destination)])


def _run(arguments: Sequence[str]) -> None:
    try:
        done = subprocess.run(  # noqa: S603 (the program of imageio-ffmpeg)
            [ffmpeg(), *_QUIET, *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=FINISH_SECONDS,
            check=False,
            start_new_session=True,
        )
    except subprocess.TimeoutExpired:
        raise UserError(f"ffmpeg did not end within {FINISH_SECONDS:.0f} seconds") from None
    if done.returncode != 0:
        first = done.stderr.decode(errors="replace").strip().partition("\n")[0]
        raise UserError(f"the video could not be encoded: {one_line(first, MAX_REASON)}")


def _checked(frame: object) -> np.ndarray:
    """Return a frame as contiguous RGB bytes; raise `UserError` if it is not a picture."""
    pixels = np.asarray(frame)
    if pixels.ndim != 3 or pixels.shape[-1] not in (3, 4) or 0 in pixels.shape:
        kind = type(frame).__name__
        shape = f" of shape {pixels.shape}" if pixels.ndim else ""
        raise UserError(
            f"render() returned {kind}{shape}, not a picture of shape (height, width, 3)"
        )
    if pixels.dtype != np.uint8:
        raise UserError(f"render() returned values of type {pixels.dtype}, not uint8")
    return np.ascontiguousarray(pixels[..., :3])
