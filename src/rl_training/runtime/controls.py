"""The controls every trainer has: evaluation cadence, best policy, early stopping, checkpoints."""

from __future__ import annotations

from rl_training.config import EarlyStopping, TrainConfig
from rl_training.runtime.callbacks import Callback, PeriodicCallback, TrainingContext
from rl_training.types import Json


class PeriodicEvaluation(PeriodicCallback):
    """Asks for an evaluation every `eval_interval` steps."""

    def due(self, context: TrainingContext) -> None:
        context.request_evaluation()


class PeriodicCheckpoint(PeriodicCallback):
    """Asks for a checkpoint every `checkpoint_interval` steps."""

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
    """Stops when the metric has not improved for `patience` evaluations, or is good enough.

    Patience begins with the first environment step: pretraining comes to its end.
    """

    def __init__(self, settings: EarlyStopping) -> None:
        self.settings = settings
        self.best: float | None = None
        self.evaluations_without_improvement = 0

    def on_evaluation_end(self, context: TrainingContext) -> None:
        assert context.evaluation is not None
        # Compared as if more were always better.
        sign = 1.0 if self.settings.mode == "max" else -1.0
        value = sign * context.evaluation.metrics[self.settings.metric]
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
        elif self.evaluations_without_improvement >= self.settings.patience:
            context.request_stop("early_stopping")

    def state_dict(self) -> Json:
        return {"best": self.best, "waited": self.evaluations_without_improvement}

    def load_state_dict(self, state: Json) -> None:
        self.best = state["best"]
        self.evaluations_without_improvement = int(state["waited"])


def build_control_callbacks(config: TrainConfig) -> list[Callback]:
    """Evaluation, best policy, early stopping and checkpoints as the config asks for them."""
    callbacks: list[Callback] = [
        PeriodicEvaluation(config.eval_interval),
        KeepBest(),
        PeriodicCheckpoint(config.checkpoint_interval),
    ]
    if config.early_stopping is not None:
        callbacks.append(StopEarly(config.early_stopping))
    return callbacks
