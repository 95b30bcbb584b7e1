"""Live progress of a run: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rl_training.callbacks import Callback, TrainingContext

if TYPE_CHECKING:
    from rich.progress import Progress

REFRESH_SECONDS = 0.25
LINE_SECONDS = 10.0
WINDOW = 40
"""Number of refreshes over which the speed is averaged"""
WIDE = 100
"""Columns of a terminal from which losses are shown"""


def progress_callback() -> Callback:
    """Return a bar if standard output is a terminal, or else lines."""
    return ProgressBar() if _in_terminal() else ProgressLines()


def with_progress(callbacks: Sequence[Callback], chosen: bool | None) -> list[Callback]:
    """Add a progress display if it is chosen; None chooses it in a terminal and in a notebook.

    A display that is already among the callbacks is not repeated.
    """
    wanted = _in_terminal() or _in_notebook() if chosen is None else chosen
    if not wanted or any(isinstance(callback, _LiveProgress) for callback in callbacks):
        return list(callbacks)
    return [*callbacks, progress_callback()]


def _in_terminal() -> bool:
    return sys.stdout is not None and sys.stdout.isatty()


def _in_notebook() -> bool:
    """Whether this process is the kernel of a notebook, such as Jupyter or Colab."""
    ipython = sys.modules.get("IPython")
    shell = type(ipython.get_ipython()) if ipython is not None else object
    return any(base.__name__ == "ZMQInteractiveShell" for base in shell.__mro__)


class _LiveProgress(Callback):
    """Shows the state of a run every `seconds` seconds."""

    seconds = REFRESH_SECONDS

    def __init__(self, label: str = "") -> None:
        """`label` names the seed if there are several."""
        self.label = label
        self._shown_at = 0.0
        self._recent: deque[tuple[float, int]] = deque(maxlen=WINDOW)

    def on_train_start(self, context: TrainingContext) -> None:
        self._shown_at = time.perf_counter()
        self._recent.append((self._shown_at, context.steps_of_phase))

    def on_collect_end(self, context: TrainingContext) -> None:
        self._maybe_show(context)

    def on_update_end(self, context: TrainingContext) -> None:
        self._maybe_show(context)

    def show(self, context: TrainingContext) -> None:
        """Show the current state of the run."""
        raise NotImplementedError

    def describe(self, context: TrainingContext, *, losses: bool = True) -> str:
        """Return one line with speed, returns, losses and the remaining time."""
        speed = self._speed(context)
        unit = "updates/s" if context.is_pretraining else "steps/s"
        parts = [*([self.label] if self.label else []), f"{speed:,.0f} {unit}"]
        if context.is_pretraining:
            parts.insert(-1, "pretraining")
        rollout = context.rollout_metrics()
        # Read only if they are shown, because reading them waits for the device.
        metrics = context.train_metrics() if losses else {}
        if "ep_rew_mean" in rollout:
            parts.append(f"return {rollout['ep_rew_mean']:.1f}")
        if context.evaluation is not None:
            parts.append(f"eval {context.evaluation.metrics['eval_return_mean']:.1f}")
        for name in ("critic_loss", "actor_loss"):
            if name in metrics:
                parts.append(f"{name.removesuffix('_loss')} loss {metrics[name]:.3g}")
        # Random actions and pretraining run at a different speed than the rest of the run.
        if context.gradient_steps > context.pretraining_updates and speed:
            left = (context.total_timesteps - context.global_step) / speed
            parts.append(f"{_clock(max(0.0, left))} left")
        return "  ".join(parts)

    def _speed(self, context: TrainingContext) -> float:
        """Return the steps per second over the last refreshes."""
        (then, step), now = self._recent[0], time.perf_counter()
        return (context.steps_of_phase - step) / max(now - then, 1e-9)

    def _maybe_show(self, context: TrainingContext) -> None:
        now = time.perf_counter()
        if context.ends_pretraining:  # the next phase runs at a different speed
            self._recent.clear()
            self._recent.append((now, 0))
        if now - self._shown_at >= self.seconds:
            self._shown_at = now
            self.show(context)
            self._recent.append((now, context.steps_of_phase))


class ProgressLines(_LiveProgress):
    """Prints a line every ten seconds and after each evaluation, for logs and pipes."""

    seconds = LINE_SECONDS

    def for_seed(self, seed: int) -> Callback:
        return ProgressLines(f"seed {seed}")

    def on_train_start(self, context: TrainingContext) -> None:
        super().on_train_start(context)
        print(_opening(context, self.label), flush=True)

    def show(self, context: TrainingContext) -> None:
        total = context.pretraining_updates if context.is_pretraining else context.total_timesteps
        print(f"{_position(context)} of {total:,}  {self.describe(context)}", flush=True)

    def on_evaluation_end(self, context: TrainingContext) -> None:
        assert context.evaluation is not None
        metrics = context.evaluation.metrics
        label = f"{self.label}  " if self.label else ""
        print(
            f"{label}{_position(context)}  evaluation {metrics['eval_return_mean']:.2f} "
            f"± {metrics['eval_return_std']:.2f}",
            flush=True,
        )


class ProgressBar(_LiveProgress):
    """Shows a bar with speed, returns, losses and the remaining time, one bar per seed."""

    def __init__(self, label: str = "", bars: _Bars | None = None) -> None:
        super().__init__(label)
        self._bars = bars or _Bars()

    def for_seed(self, seed: int) -> Callback:
        return ProgressBar(f"seed {seed}", self._bars)

    def on_train_start(self, context: TrainingContext) -> None:
        super().on_train_start(context)
        progress = self._bars.open()
        progress.console.print(_opening(context, self.label), highlight=False, soft_wrap=True)
        self._task = progress.add_task(
            "", total=context.pretraining_updates + context.total_timesteps
        )

    def show(self, context: TrainingContext) -> None:
        progress = self._bars.open()
        text = self.describe(context, losses=progress.console.width >= WIDE)
        progress.update(self._task, completed=context.position, description=text)

    def on_train_end(self, context: TrainingContext) -> None:
        self.show(context)

    def close(self) -> None:
        self._bars.close()


class _Bars:
    """The display that the bars of all seeds share."""

    def __init__(self) -> None:
        self._progress: Progress | None = None

    def open(self) -> Progress:
        from rich.progress import BarColumn, Progress, TextColumn

        if self._progress is None:
            self._progress = Progress(
                TextColumn("{task.percentage:>3.0f}%"),
                BarColumn(bar_width=12),
                TextColumn("{task.description}"),
            )
            self._progress.start()
        return self._progress

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


def _position(context: TrainingContext) -> str:
    if context.is_pretraining:
        return f"update {context.gradient_steps:,}"
    return f"step {context.global_step:,}"


def _opening(context: TrainingContext, label: str) -> str:
    start = f"training {label} in" if label else "training in"
    text = (
        f"{start} {context.run_dir} to step {context.total_timesteps:,} "
        f"({context.execution}; resume: {context.resume_level})"
    )
    if context.config.init_from is not None and context.position == 0:
        text += f"\nthis is a new run that starts from the policy in {context.config.init_from}"
    if context.compiled:
        text += "\nthe first update is compiled, which can take a minute; later runs use the cache"
    return text


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
