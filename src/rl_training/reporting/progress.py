"""Live progress of a run: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from rl_training.callbacks import Callback, TrainingContext
from rl_training.types import SUCCESS_RATE

if TYPE_CHECKING:
    from rich.progress import Progress

REFRESH_SECONDS = 0.25
LINE_SECONDS = 10.0
WINDOW_SECONDS = 30.0
"""Time over which the speed is averaged"""
ENOUGH_SECONDS = 3.0
"""Time that must be measured before the remaining time is shown"""
BAR_COLUMNS = 16
"""Columns of the percentage and the bar"""
WIDE = 100
"""Columns of a terminal from which losses are shown"""

Phase = Literal["pretraining", "warm-up", "learning"]
"""Updates on recorded data, steps before the first update, or steps with updates"""


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


class Speed:
    """Steps per second in the last `WINDOW_SECONDS` of one phase."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque()

    def restart(self) -> None:
        """Forget everything, because what follows runs at a different speed."""
        self._samples.clear()

    def add(self, seconds: float, position: int) -> None:
        """Add the position of the run at a time."""
        samples = self._samples
        samples.append((seconds, position))
        while len(samples) > 2 and samples[1][0] <= seconds - WINDOW_SECONDS:
            samples.popleft()

    @property
    def measured_seconds(self) -> float:
        return self._samples[-1][0] - self._samples[0][0] if self._samples else 0.0

    @property
    def per_second(self) -> float | None:
        """None until something was measured."""
        seconds = self.measured_seconds
        return (self._samples[-1][1] - self._samples[0][1]) / seconds if seconds else None


class _LiveProgress(Callback):
    """Shows the state of a run every `seconds` seconds.

    The speed is that of the current phase, without evaluations and checkpoints. The remaining time
    includes them: it assumes that each takes as long as the last one.
    """

    seconds = REFRESH_SECONDS

    def __init__(self, label: str = "", together: list[TrainingContext] | None = None) -> None:
        """`label` names the seed if there are several; `together` has the runs of all seeds."""
        self.label = label
        self._together = [] if together is None else together
        self._shown_at = self._measured_at = self._compiling_since = 0.0
        self._speed, self._phase = Speed(), ""

    def on_train_start(self, context: TrainingContext) -> None:
        self._together.append(context)
        self._shown_at, self._phase = time.perf_counter(), ""

    def on_compile_start(self, context: TrainingContext) -> None:
        self._compiling_since = time.perf_counter()

    def on_compile_end(self, context: TrainingContext) -> None:
        self._speed.restart()

    def on_collect_end(self, context: TrainingContext) -> None:
        self._observe(context, after_update=False)

    def on_update_end(self, context: TrainingContext) -> None:
        self._observe(context, after_update=True)

    def close(self) -> None:
        self._together.clear()

    def show(self, context: TrainingContext) -> None:
        """Show the current state of the run."""
        raise NotImplementedError

    def describe(self, context: TrainingContext, *, losses: bool = True) -> list[str]:
        """Return speed, remaining time, returns and losses, the most important parts first."""
        phase, speed = _phase(context), self._speed.per_second
        parts = [self.label, "" if phase == "learning" else phase]
        if speed is not None:
            unit = "updates/s" if phase == "pretraining" else "steps/s"
            digits = 0 if round(speed, 1) >= 10 else 1
            parts.append(f"{speed:,.{digits}f} {unit}")
        if phase == "learning" and not context.should_stop:
            parts.append(self._time_left(context))
        rollout = context.rollout_metrics()
        # Read only if they are shown, because reading them waits for the device.
        metrics = context.train_metrics() if losses else {}
        if "ep_rew_mean" in rollout:
            success = _success(rollout.get("success_rate"))
            parts.append(f"return {rollout['ep_rew_mean']:.1f}{success}")
        if context.evaluation is not None:
            evaluated = context.evaluation.metrics
            success = _success(evaluated.get(SUCCESS_RATE))
            parts.append(f"eval {evaluated['eval_return_mean']:.1f}{success}")
        for name in ("critic_loss", "actor_loss"):
            if name in metrics:
                parts.append(f"{name.removesuffix('_loss')} loss {metrics[name]:.3g}")
        return [part for part in parts if part]

    def _time_left(self, context: TrainingContext) -> str:
        """Empty until the speed of learning has been measured long enough."""
        speed = self._speed.per_second
        if not speed or self._speed.measured_seconds < ENOUGH_SECONDS:
            return ""
        left = max(0, context.planned_end - context.global_step) / speed
        left += sum(_pauses_ahead(each) for each in self._together)
        return f"{_clock(left)} left"

    def _observe(self, context: TrainingContext, *, after_update: bool) -> None:
        phase, now = _phase(context), time.perf_counter()
        is_new = phase != self._phase
        if is_new:
            self._phase = phase
            self._speed.restart()
        # Updates may come in blocks, so learning is measured from the end of one to the end of
        # another: that time contains all updates that belong to its steps.
        complete = after_update or phase != "learning"
        if complete and (is_new or now - self._measured_at >= REFRESH_SECONDS):
            self._measured_at = now
            paused = sum(each.pauses.total for each in self._together)
            self._speed.add(now - paused, context.position)
        if now - self._shown_at >= self.seconds:
            self._shown_at = now
            self.show(context)


class ProgressLines(_LiveProgress):
    """Prints a line every ten seconds and after each evaluation, for logs and pipes."""

    seconds = LINE_SECONDS

    def for_seed(self, seed: int) -> Callback:
        return ProgressLines(f"seed {seed}", self._together)

    def on_train_start(self, context: TrainingContext) -> None:
        super().on_train_start(context)
        print(_opening(context, self.label), flush=True)

    def on_compile_start(self, context: TrainingContext) -> None:
        super().on_compile_start(context)
        if context is self._together[0]:  # seeds are compiled together
            print(_compiling(context), flush=True)

    def on_compile_end(self, context: TrainingContext) -> None:
        super().on_compile_end(context)
        if context is self._together[0]:
            print(f"compiled in {time.perf_counter() - self._compiling_since:.0f} s", flush=True)

    def show(self, context: TrainingContext) -> None:
        total = context.pretraining_updates if context.is_pretraining else context.total_timesteps
        print(f"{_position(context)} of {total:,}", *self.describe(context), sep="  ", flush=True)

    def on_evaluation_end(self, context: TrainingContext) -> None:
        assert context.evaluation is not None
        metrics = context.evaluation.metrics
        label = f"{self.label}  " if self.label else ""
        success = _success(metrics.get(SUCCESS_RATE))
        print(
            f"{label}{_position(context)}  evaluation {metrics['eval_return_mean']:.2f} "
            f"± {metrics['eval_return_std']:.2f}{success}",
            flush=True,
        )


class ProgressBar(_LiveProgress):
    """Shows a bar with speed, remaining time, returns and losses, one bar per seed."""

    def __init__(
        self,
        label: str = "",
        together: list[TrainingContext] | None = None,
        bars: _Bars | None = None,
    ) -> None:
        super().__init__(label, together)
        self._bars = bars or _Bars()

    def for_seed(self, seed: int) -> Callback:
        return ProgressBar(f"seed {seed}", self._together, self._bars)

    def on_train_start(self, context: TrainingContext) -> None:
        super().on_train_start(context)
        progress = self._bars.open()
        progress.console.print(_opening(context, self.label), highlight=False, soft_wrap=True)
        self._task = progress.add_task(
            self.label, total=context.pretraining_updates + context.total_timesteps
        )

    def on_compile_start(self, context: TrainingContext) -> None:
        super().on_compile_start(context)
        self._describe(context, [self.label, _compiling(context)])

    def on_compile_end(self, context: TrainingContext) -> None:
        super().on_compile_end(context)
        self.show(context)

    def on_evaluation_start(self, context: TrainingContext) -> None:
        self._describe(context, [self.label, "evaluating"])

    def show(self, context: TrainingContext) -> None:
        losses = self._bars.open().console.width >= WIDE
        self._describe(context, self.describe(context, losses=losses))

    def _describe(self, context: TrainingContext, parts: list[str]) -> None:
        progress = self._bars.open()
        text = _fit(parts, progress.console.width - BAR_COLUMNS)
        progress.update(self._task, completed=context.position, description=text)

    def on_train_end(self, context: TrainingContext) -> None:
        self.show(context)

    def close(self) -> None:
        super().close()
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
                BarColumn(bar_width=10),
                TextColumn("{task.description}"),
            )
            self._progress.start()
        return self._progress

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


def _success(rate: float | None) -> str:
    """Describe the success rate of the episodes whose return is shown before it."""
    return "" if rate is None else f" (success {rate:.0%})"


def _fit(parts: list[str], columns: int) -> str:
    """Join the first parts that fit, and at least the first."""
    text = ""
    for part in filter(None, parts):
        longer = f"{text}  {part}" if text else part
        if text and len(longer) > columns:
            break
        text = longer
    return text


def _phase(context: TrainingContext) -> Phase:
    if context.is_pretraining:
        return "pretraining"
    return "learning" if context.gradient_steps > context.pretraining_updates else "warm-up"


def _pauses_ahead(context: TrainingContext) -> float:
    """Seconds that the remaining evaluations and checkpoints of a run will probably take."""
    if context.should_stop:
        return 0.0
    config, last = context.config, context.pauses.last
    evaluations = _times_due(config.eval_interval, context)
    checkpoints = _times_due(config.checkpoint_interval, context)
    return evaluations * last.get("evaluation", 0.0) + checkpoints * last.get("checkpoint", 0.0)


def _times_due(interval: int, context: TrainingContext) -> int:
    """How often something is still due: at each multiple of the interval, and at the end."""
    if interval == 0:
        return 1
    return -(-context.planned_end // interval) - context.global_step // interval


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
    return text


def _compiling(context: TrainingContext) -> str:
    last = context.last_compile_seconds
    if last is None:
        return "compiling the update (about a minute the first time)"
    return f"compiling the update (last time: {last:.0f} s)"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
