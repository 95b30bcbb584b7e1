"""The callbacks that evaluate a run, save it, keep its best policy and stop it early."""

from __future__ import annotations

from rl_training.callbacks import Callback, PeriodicCallback, TrainingContext
from rl_training.config import EarlyStopping, TrainConfig
from rl_training.errors import warn_user
from rl_training.training.engine import UpdateSchedule, steps_at_once
from rl_training.types import Json


class PeriodicEvaluation(PeriodicCallback):
    """Requests an evaluation every `eval_interval` steps."""

    def due(self, context: TrainingContext) -> None:
        context.request_evaluation()


class PeriodicCheckpoint(PeriodicCallback):
    """Requests a checkpoint every `checkpoint_interval` steps."""

    def due(self, context: TrainingContext) -> None:
        context.request_checkpoint()


class KeepBest(Callback):
    """Marks the checkpoint with the highest mean evaluation return."""

    def on_evaluation_end(self, context: TrainingContext) -> None:
        assert context.evaluation is not None
        value = context.evaluation.metrics["eval_return_mean"]
        if context.best_return is None or value > context.best_return:
            context.request_checkpoint(best=True)


class StopEarly(Callback):
    """Stops when the metric has not improved for `patience` evaluations or reaches its target.

    Evaluations during pretraining do not count towards `patience`. An evaluation at the last step
    `end` is too late to stop the run early.
    """

    def __init__(self, settings: EarlyStopping, end: int) -> None:
        self.settings, self.end = settings, end
        self.best: float | None = None
        self.evaluations_without_improvement = 0

    def on_evaluation_end(self, context: TrainingContext) -> None:
        assert context.evaluation is not None
        # The sign makes larger values better in both modes.
        sign = 1.0 if self.settings.mode == "max" else -1.0
        found = context.evaluation.metrics.get(self.settings.metric)
        if found is None:  # only the success rate can be missing
            warn_user(
                f"early_stopping has no effect: metric = {self.settings.metric!r} needs an "
                'environment with info["is_success"] or info["success"]; choose another metric'
            )
            return
        value = sign * found
        if self.best is None or value > self.best + self.settings.min_delta:
            self.best = value
            self.evaluations_without_improvement = 0
        elif not context.is_pretraining:
            self.evaluations_without_improvement += 1
        if context.global_step < self.settings.min_steps:
            return
        target = self.settings.target_value
        if target is not None and value >= sign * target:
            context.request_stop("target_value")
            return
        waited = self.evaluations_without_improvement >= self.settings.patience
        if waited and context.global_step < self.end:
            context.request_stop("early_stopping")

    def state_dict(self) -> Json:
        return {"best": self.best, "waited": self.evaluations_without_improvement}

    def load_state_dict(self, state: Json) -> None:
        self.best = state["best"]
        self.evaluations_without_improvement = int(state["waited"])


def build_control_callbacks(config: TrainConfig) -> list[Callback]:
    """Build the callbacks for evaluation, best policy, checkpoints and early stopping."""
    callbacks: list[Callback] = [
        PeriodicEvaluation(config.eval_interval),
        KeepBest(),
        PeriodicCheckpoint(config.checkpoint_interval),
    ]
    if config.early_stopping is not None:
        callbacks.append(StopEarly(config.early_stopping, planned_end(config)))
    return callbacks


def why_never_stopped_early(config: TrainConfig, *, can_evaluate: bool) -> str | None:
    """Explain why `early_stopping` can never act and what to change; None if it can."""
    settings, interval = config.early_stopping, config.eval_interval
    if settings is None:
        return None
    if not can_evaluate:
        return "there is no environment to evaluate in; set env_id"
    if interval == 0:
        return (
            "eval_interval = 0 switches evaluations off (unless a callback requests them); set it "
            "to a number of steps"
        )
    end, stride = planned_end(config), steps_at_once(config)
    # An evaluation at the last step is too late to stop the run early.
    evaluations = max(0, end - stride) // max(interval, stride)
    last = -(-evaluations * max(interval, stride) // stride) * stride
    pretrained = _evaluates_pretraining(config)
    enough = evaluations + pretrained > settings.patience and last >= settings.min_steps
    reachable = evaluations > 0 or (pretrained and settings.min_steps == 0)
    if enough or (settings.target_value is not None and reachable and last >= settings.min_steps):
        return None
    if evaluations + pretrained == 0:
        return (
            f"eval_interval = {interval:,} leaves no evaluation before the run ends at step "
            f"{end:,}; make it smaller"
        )
    if last < settings.min_steps:
        return (
            f"min_steps = {settings.min_steps:,} is beyond the last evaluation before the end, "
            f"at step {last:,}; make min_steps or eval_interval smaller"
        )
    return (
        f"patience = {settings.patience} takes {settings.patience + 1} evaluations before the end, "
        f"and there are {evaluations + pretrained}; make eval_interval or patience smaller, or set "
        "target_value"
    )


def planned_end(config: TrainConfig) -> int:
    """The step at which a run ends without early stopping."""
    steps, stride = config.total_timesteps, steps_at_once(config)
    if config.max_updates is not None:
        schedule, after = (
            UpdateSchedule.of(config),
            config.max_updates - config.pretraining_updates,
        )
        blocks = -(-max(0, after) // schedule.updates_per_block)
        reached = schedule.learning_starts + blocks * schedule.train_frequency
        steps = min(steps, reached if after > 0 else 0)
    return -(-steps // stride) * stride


def _evaluates_pretraining(config: TrainConfig) -> bool:
    """Whether pretraining has an evaluation that is not also the end of the run."""
    updates, budget = config.pretraining_updates, config.max_updates
    if budget is None or budget > updates:
        return updates > 0
    return budget > config.eval_interval
