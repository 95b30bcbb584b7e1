"""A run's config: what can be set, what it means, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    InstanceOf,
    ValidationError,
    field_serializer,
    field_validator,
    model_validator,
)

from rl_training.algorithms.hyperparameters import Hyperparameters, MixedHyperparameters
from rl_training.algorithms.spec import AlgorithmSpec, get_algorithm_spec
from rl_training.data.sections import DataSection, as_list, read_sections
from rl_training.errors import ConfigError
from rl_training.types import EvaluationMetric, Regime
from rl_training.validation import StrictModel, explain, plain, validate

Positive = Annotated[int, Field(ge=1)]
Interval = Annotated[int, Field(ge=0)]
"""Steps between two occurrences; 0 switches the thing off"""
Seed = Annotated[int, Field(ge=0, lt=2**32)]


class EarlyStopping(StrictModel):
    """Stop when evaluations no longer improve, or are good enough."""

    metric: EvaluationMetric = "eval_return_mean"
    mode: Literal["max", "min"] = "max"
    patience: Positive = 10
    """Evaluations without improvement before the run stops"""
    min_delta: Annotated[float, Field(ge=0)] = 0.0
    """Smaller improvements do not count"""
    min_steps: Interval = 0
    """Never stop before this step"""
    target_value: float | None = None
    """Stop as soon as the metric is at least (mode max) or at most (mode min) this"""


class TrainConfig(StrictModel):
    """Everything that decides what a run does."""

    algo: str
    """The algorithm's name, such as sac"""
    env_id: str | None = None
    """A registered Gymnasium id; absent where the environment is the user's own object"""
    env_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Passed on to the environment when it is made"""
    seed: Seed = 0
    """Decides every random number of a run"""
    seeds: Annotated[list[Seed], Field(min_length=1)] | None = None
    """Several runs that differ in nothing else"""
    total_timesteps: Annotated[int, Field(ge=1, le=10**12)] = 1_000_000
    """Environment steps; gradient steps where training is offline"""
    num_envs: Annotated[int, Field(ge=1, le=4096)] = 1
    """Environments that are stepped together"""
    vectorization: Literal["auto", "sync", "async"] = "auto"
    """Environments in this process one after another, or shared out over worker processes"""
    device: str = Field(
        "auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$", description="auto, cpu, cuda or cuda:N"
    )
    """Where networks and replay live: auto (CUDA where there is any), cpu, cuda or cuda:N"""
    compile: Literal["auto", "on", "off"] = "auto"
    """Whether updates are compiled; `auto` weighs the time that it takes against the updates"""
    float32_precision: Literal["auto", "highest", "high", "medium"] = "auto"
    """Of an update's large products: `high` allows TF32 on CUDA, `medium` bfloat16 on a CPU.

    `auto` is float32 (`highest`) on every device
    """
    overlap: Literal["auto", "on", "off"] = "auto"
    """Step environments while updates run, which then miss the newest transition; auto: on CUDA"""
    num_threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    """CPU threads for tensor operations; where absent, one if networks are small"""
    output_dir: str = Field("runs", pattern=r"^[^\x00]+$", description="the path of a folder")
    """The folder that run folders are made in"""
    run_name: str | None = Field(
        None,
        pattern=r"^\w[\w.+=@-]{0,199}$",
        description="a folder name of letters, digits and . _ - + = @",
    )
    """The run folder's name; where absent, made of algorithm, environment, seed and time"""
    eval_interval: Interval = 10_000
    """Steps between evaluations, beside that at the end; 0 for no others"""
    eval_episodes: Annotated[int, Field(ge=1, le=100_000)] = 10
    """Episodes of each evaluation"""
    checkpoint_interval: Interval = 10_000
    """Steps between checkpoints, beside those at both ends and at each new best; 0 for no others"""
    log_interval: Positive = 1_000
    """Steps between rows of metrics"""
    early_stopping: EarlyStopping | None = None
    """When to stop before `total_timesteps`"""
    max_updates: Positive | None = None
    """Stop after this many gradient steps"""
    normalize_observations: bool | None = None
    """Where absent, what is usual for the algorithm"""
    dataset: InstanceOf[DataSection] | list[InstanceOf[DataSection]] | None = None
    """Recorded data to learn from; several sections are mixed by their weights"""
    regime: Regime | None = None
    """Where batches come from; where absent, the algorithm's default"""
    init_from: str | None = None
    """A run folder, checkpoint or saved policy to start from"""
    algo_kwargs: InstanceOf[Hyperparameters]
    """The algorithm's hyper-parameters"""

    def __init__(self, /, **values: Any) -> None:
        # Not left to pydantic: only the algorithm's own model can say what `algo_kwargs` may hold,
        # and only the kind of a data set what its section may.
        resolved = {**plain(values), "algo_kwargs": _hyperparameters(values)}
        if values.get("dataset") is not None:
            resolved["dataset"] = read_sections(values["dataset"])
        for switch in ("compile", "overlap"):  # YAML reads on and off as true and false
            if isinstance(resolved.get(switch), bool):
                resolved[switch] = "on" if resolved[switch] else "off"
        try:
            super().__init__(**resolved)
        except ValidationError as error:
            raise ConfigError(explain(error, TrainConfig)) from None

    @property
    def spec(self) -> AlgorithmSpec:
        return get_algorithm_spec(self.algo)

    @property
    def dataset_sections(self) -> list[DataSection]:
        """The data sets to mix; none where the run collects all of its data."""
        return as_list(self.dataset)

    @property
    def normalizes_observations(self) -> bool:
        wanted = self.normalize_observations
        return self.spec.normalizes_observations if wanted is None else wanted

    @property
    def resolved_regime(self) -> Regime:
        return self.regime or self.spec.regimes[0]

    @property
    def hyperparameters(self) -> Hyperparameters:
        """`algo_kwargs` with every `auto` resolved for this run."""
        regime = self.resolved_regime
        if regime == "mixed" and not self.reads_data:
            regime = "online"
        return self.algo_kwargs.for_run(regime, is_trained=self.init_from is not None)

    @property
    def reads_data(self) -> bool:
        """Whether any update does: a mixed run without offline rows in its batches is online."""
        chosen, regime = self.algo_kwargs, self.resolved_regime
        if regime != "mixed" or not isinstance(chosen, MixedHyperparameters):
            return regime == "offline"
        return chosen.offline_batch_ratio != 0 or chosen.offline_pretrain_updates > 0

    @property
    def pretraining_updates(self) -> int:
        """Updates on recorded data alone that come before the first step."""
        return self._offline_updates if self.resolved_regime == "mixed" else 0

    @property
    def _offline_updates(self) -> int:
        chosen = self.algo_kwargs
        return chosen.offline_pretrain_updates if isinstance(chosen, MixedHyperparameters) else 0

    def _check_pretraining(self, regime: Regime) -> None:
        updates = self._offline_updates
        if updates and regime != "mixed":
            raise ValueError(
                f"algo_kwargs.offline_pretrain_updates = {updates}: is for regime 'mixed', where "
                f"steps in the environment follow, but this is {regime!r}"
            )

    def _check_weights(self, regime: Regime) -> None:
        ratio = getattr(self.algo_kwargs, "offline_batch_ratio", None)
        if regime != "mixed" or ratio != "uniform":
            return
        if len({section.weight for section in self.dataset_sections}) > 1:
            raise ValueError(
                "algo_kwargs.offline_batch_ratio = 'uniform': makes every row equally likely, so "
                "data sets cannot have different weights; leave out weight, or set a ratio"
            )

    def with_changes(self, **changes: Any) -> TrainConfig:
        """A copy with other values at the top level, checked again."""
        return TrainConfig(**{**self.to_mapping(), **changes})

    @classmethod
    def from_saved(cls, values: Mapping[str, Any]) -> TrainConfig:
        """The config that a checkpoint holds, also one of an older version."""
        kind = get_algorithm_spec(str(values.get("algo"))).hyperparameters_type
        return cls(**{**values, "algo_kwargs": kind.upgrade(values.get("algo_kwargs") or {})})

    def to_mapping(self) -> dict[str, Any]:
        """Plain values that `TrainConfig(**values)` and YAML take."""
        return self.model_dump(mode="json")

    @field_serializer("algo_kwargs")
    def _dump_hyperparameters(self, value: Hyperparameters) -> dict[str, Any]:
        return value.model_dump(mode="json")

    @field_serializer("dataset")
    def _dump_sections(self, value: DataSection | list[DataSection] | None) -> Any:
        if isinstance(value, list):
            return [section.model_dump(mode="json") for section in value]
        return None if value is None else value.model_dump(mode="json")

    @field_validator("env_kwargs")
    @classmethod
    def _check_plain(cls, value: dict[str, Any]) -> dict[str, Any]:
        if problem := _not_plain(value):
            raise ValueError(f"env_kwargs: {problem}; only plain values can be saved with a run")
        return value

    @field_validator("seeds")
    @classmethod
    def _check_seeds_differ(cls, value: list[int] | None) -> list[int] | None:
        if value is not None and len(set(value)) < len(value):
            raise ValueError(f"seeds = {value}: each seed may be given once")
        return value

    @model_validator(mode="after")
    def _check_regime(self) -> TrainConfig:
        spec = self.spec
        regime = self.resolved_regime
        if regime not in spec.regimes:
            hint = "; its policy goes on under another algorithm, with init_from"
            raise ValueError(
                f"regime = {regime!r}: {self.algo} can be trained {' or '.join(spec.regimes)}"
                + (hint if spec.regimes == ("offline",) else "")
            )
        if regime == "online" == spec.regimes[0] and self.dataset is not None:
            raise ValueError(
                f"dataset: {self.algo} learns online and takes no data set; remove this section"
            )
        self._check_pretraining(regime)
        self._check_weights(regime)
        return self


def _hyperparameters(values: Mapping[str, Any]) -> Hyperparameters:
    algo = values.get("algo")
    if not isinstance(algo, str):
        raise ConfigError(
            "algo: required, but not given; `rl-training list` shows the algorithms"
            if algo is None
            else f"algo = {algo!r}: must be text"
        )
    given = values.get("algo_kwargs")
    kind = get_algorithm_spec(algo).hyperparameters_type
    if isinstance(given, kind):
        return given
    if given is not None and not isinstance(given, Mapping):
        raise ConfigError(f"algo_kwargs = {given!r}: must be a mapping of {algo}'s settings")
    return validate(kind, given or {}, section="algo_kwargs")


def _not_plain(value: Any, depth: int = 0) -> str | None:
    """What of a value JSON could not hold, or None."""
    if value is None or isinstance(value, bool | str | int):
        return None
    if isinstance(value, float):
        return None if math.isfinite(value) else f"{value} is not a finite number"
    if depth > 20:
        return "nested too deeply"
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):
            return "keys must be names"
        parts = list(value.values())
    elif isinstance(value, list):
        parts = value
    else:
        return f"a value of type {type(value).__name__}"
    problems = (_not_plain(part, depth + 1) for part in parts)
    return next((problem for problem in problems if problem), None)
