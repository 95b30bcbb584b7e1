"""How a run goes, live: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from rl_training.runtime.callbacks import Callback, TrainingContext

if TYPE_CHECKING:
    from rich.progress import Progress

REFRESH_SECONDS = 0.25
LINE_SECONDS = 10.0


def progress_callback() -> Callback:
    """What suits the place that standard output goes to."""
    return ProgressBar() if sys.stdout.isatty() else ProgressLines()


class _LiveProgress(Callback):
    """Shows something every few moments, by the clock rather than by steps."""

    seconds = REFRESH_SECONDS

    def __init__(self) -> None:
        self._started_at = self._shown_at = 0.0
        self._started_step = 0

    def on_train_start(self, context: TrainingContext) -> None:
        self._started_at = self._shown_at = time.perf_counter()
        self._started_step = context.global_step

    def on_collect_end(self, context: TrainingContext) -> None:
        self._maybe_show(context)

    def on_update_end(self, context: TrainingContext) -> None:
        self._maybe_show(context)

    def show(self, context: TrainingContext) -> None:
        """Show where the run stands."""
        raise NotImplementedError

    def describe(self, context: TrainingContext) -> str:
        """Speed, returns and losses in one line."""
        elapsed = max(time.perf_counter() - self._started_at, 1e-9)
        parts = [f"{(context.global_step - self._started_step) / elapsed:,.0f} steps/s"]
        rollout, metrics = context.rollout_metrics(), context.train_metrics()
        if "ep_rew_mean" in rollout:
            parts.append(f"return {rollout['ep_rew_mean']:.1f}")
        if context.evaluation is not None:
            parts.append(f"eval {context.evaluation.metrics['eval_return_mean']:.1f}")
        for name in ("critic_loss", "actor_loss"):
            if name in metrics:
                parts.append(f"{name.removesuffix('_loss')} loss {metrics[name]:.3g}")
        return "  ".join(parts)

    def time_left(self, context: TrainingContext) -> float:
        """Seconds until the end at the speed so far."""
        done = context.global_step - self._started_step
        elapsed = time.perf_counter() - self._started_at
        return elapsed / max(done, 1) * max(0, context.total_timesteps - context.global_step)

    def _maybe_show(self, context: TrainingContext) -> None:
        now = time.perf_counter()
        if now - self._shown_at >= self.seconds:
            self._shown_at = now
            self.show(context)


class ProgressLines(_LiveProgress):
    """A line every ten seconds and at each evaluation, for logs and pipes."""

    seconds = LINE_SECONDS

    def on_train_start(self, context: TrainingContext) -> None:
        super().on_train_start(context)
        print(_opening(context), flush=True)

    def show(self, context: TrainingContext) -> None:
        left = _clock(self.time_left(context))
        print(
            f"step {context.global_step:,} of {context.total_timesteps:,}  "
            f"{self.describe(context)}  {left} left",
            flush=True,
        )

    def on_evaluation_end(self, context: TrainingContext) -> None:
        assert context.evaluation is not None
        metrics = context.evaluation.metrics
        print(
            f"step {context.global_step:,}  evaluation {metrics['eval_return_mean']:.2f} "
            f"± {metrics['eval_return_std']:.2f}",
            flush=True,
        )


class ProgressBar(_LiveProgress):
    """A bar with speed, returns, losses and the time left."""

    def __init__(self) -> None:
        super().__init__()
        self._bar: Progress | None = None

    def on_train_start(self, context: TrainingContext) -> None:
        from rich.progress import BarColumn, Progress, TextColumn

        super().on_train_start(context)
        self._bar = Progress(
            TextColumn("{task.percentage:>3.0f}%"),
            BarColumn(bar_width=20),
            TextColumn("{task.description}"),
        )
        self._bar.console.print(_opening(context), highlight=False, soft_wrap=True)
        self._task = self._bar.add_task("", total=context.total_timesteps)
        self._bar.start()

    def show(self, context: TrainingContext) -> None:
        assert self._bar is not None
        text = f"{self.describe(context)}  {_clock(self.time_left(context))} left"
        self._bar.update(self._task, completed=context.global_step, description=text)

    def on_train_end(self, context: TrainingContext) -> None:
        self.show(context)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()


def _opening(context: TrainingContext) -> str:
    return f"training in {context.run_dir} (resume: {context.resume_level})"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
