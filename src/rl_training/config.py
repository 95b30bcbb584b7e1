"""`TrainConfig`: the settings of a run, their meaning and their validation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    InstanceOf,
    Strict,
    ValidationError,
    field_serializer,
    field_validator,
    model_validator,
)

from rl_training.algorithms.hyperparameters import (
    Hyperparameters,
    MixedHyperparameters,
    ReturnHyperparameters,
    RolloutHyperparameters,
    action_chunk,
)
from rl_training.algorithms.spec import AlgorithmSpec, get_algorithm_spec
from rl_training.data.sections import DataSection, as_list, read_sections
from rl_training.errors import ConfigError
from rl_training.types import EvaluationMetric, Regime
from rl_training.validation import StrictModel, explain, key_name, plain, short, validate

LARGEST = 10**18
"""Larger integers do not fit into 64 bits"""
MAX_SEEDS = 10_000
MAX_WRAPPERS = 100
MAX_ENVIRONMENTS = 65_536
"""Maximum number of environments of all seeds together"""
MAX_ON_HOST = 4_096
"""Maximum number of environments of a seed that are no tensors"""
MAX_TEXT, MAX_PARTS = 4096, 1_000
"""Maximum length of a string, and of a list or mapping, in keyword arguments"""
Positive = Annotated[int, Field(ge=1, le=LARGEST)]
Interval = Annotated[int, Field(ge=0, le=LARGEST)]
"""Number of steps between two events; 0 disables them"""
Seed = Annotated[int, Field(ge=0, lt=2**32)]
ActionRange = Annotated[float, Field(gt=0)] | Annotated[tuple[float, float], Strict(False)]


class EarlyStopping(StrictModel):
    """Stop a run when its evaluations stop improving or reach a target."""

    metric: EvaluationMetric = "eval_return_mean"
    """Evaluation metric to compare"""
    mode: Literal["max", "min"] = "max"
    """Whether a larger (`max`) or smaller (`min`) metric is better"""
    patience: Positive = 10
    """Number of evaluations in a row without improvement after which the run stops"""
    min_delta: Annotated[float, Field(ge=0)] = 0.0
    """Smallest change of the metric that counts as an improvement"""
    min_steps: Interval = 0
    """The run does not stop early before this step"""
    target_value: float | None = None
    """Stop when the metric is at least (`max`) or at most (`min`) this. Not set: no target"""


class HindsightSection(StrictModel):
    """Learn from goals that episodes happened to reach (1707.01495).

    The environment must have goals, as those of Gymnasium-Robotics and panda-gym do. Collected and
    recorded transitions are repeated with other goals, and with the rewards for these. If the
    environment has `compute_reward_torch`, they get other goals when they are sampled instead.
    """

    strategy: Literal["future", "final", "episode"] = "future"
    """New goals are those reached at or after the transition (`future`), at the end of its episode
    (`final`), or anywhere in it (`episode`)"""
    per_transition: Annotated[int, Field(ge=1, le=100)] = 4
    """Number of new goals for each transition"""


class ReplaySection(StrictModel):
    """What is learned from transitions besides what they are."""

    hindsight: HindsightSection | None = None
    """Repeat transitions with other goals. Not set: only with their own"""


class WrapperSection(StrictModel):
    """A Gymnasium wrapper to put around every environment.

    Some wrappers of Gymnasium, such as `FrameStackObservation`, are always allowed. Another one is
    loaded only if its module is named on the command line (`--import` or `--wrapper`), or passed to
    `rl_training.envs.trust_modules` in Python.
    """

    wrapper: str = Field(
        pattern=r"^_?[A-Za-z][A-Za-z0-9_]*(\._?[A-Za-z][A-Za-z0-9_]*)*:_?[A-Za-z][A-Za-z0-9_]*$",
        max_length=200,
        description="module:Class, such as gymnasium.wrappers:TimeAwareObservation",
    )
    """Class of the wrapper, as `module:Class`"""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments for the wrapper's constructor, after the environment"""

    @field_validator("kwargs")
    @classmethod
    def _check_kwargs(cls, value: dict[str, Any]) -> dict[str, Any]:
        if problem := _json_problem(value):
            raise ValueError(
                f"wrappers: kwargs: {problem}; only JSON values can be saved with a run"
            )
        return value


class TrainConfig(StrictModel):
    """All settings of a run."""

    algo: str
    """Name of the algorithm, such as `sac`; `rl-training list` shows all names"""
    env_id: str | None = None
    """Gymnasium id of the environment, such as `Hopper-v5`; not needed if an environment object is
    passed"""
    env_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments for `gymnasium.make`; JSON values only"""
    wrappers: list[InstanceOf[WrapperSection]] = Field(default_factory=list)
    """Wrappers to put around every environment, the first one innermost: `module:Class`, or a
    mapping with `wrapper` and `kwargs`"""
    training_wrappers: list[InstanceOf[WrapperSection]] = Field(default_factory=list)
    """Wrappers that are only used in training, around the others; evaluations do without them, for
    example without clipped rewards"""
    observation_keys: Annotated[list[str], Field(min_length=1, max_length=1000)] | None = None
    """Parts of a dictionary or tuple observation to use, such as `image` or `robot/position`. Not
    set: all"""
    action_range: ActionRange | None = None
    """Range of the actions if the environment's action space has no finite bounds, as
    `[low, high]`, or as a number for a range around zero. Policies cannot choose actions outside
    of it. Not set: the bounds of the action space"""
    seed: Seed = 0
    """Random seed of the run: networks, minibatches, exploration and environments"""
    seeds: Annotated[list[Seed], Field(min_length=1, max_length=MAX_SEEDS)] | None = None
    """Train one run per seed, with otherwise equal settings. Replaces `seed`"""
    total_timesteps: Annotated[int, Field(ge=1, le=10**12)] = 1_000_000
    """Length of the run in environment steps, over all environments; in updates if training is
    offline"""
    num_envs: Annotated[int, Field(ge=1, le=MAX_ENVIRONMENTS)] = 1
    """Number of environments that are stepped in parallel: up to 65,536 if they are tensors, else
    up to 4,096"""
    vectorization: Literal["auto", "sync", "async", "ray", "ray-async", "tensors"] = "auto"
    """Step environments in this process (`sync`), in worker processes (`async`) or in Ray actors,
    also on other machines (`ray`): the results are the same. `ray-async` does not wait for the
    slower half of the environments, which cannot be repeated exactly. `tensors`: step the worlds
    of a tensor environment, such as `warp/HalfCheetah-v5`, on the device of the networks. `auto`:
    `tensors` for tensor environments, else `sync` or `async`, by the measured step time of the
    environment"""
    env_workers: Annotated[int, Field(ge=1, le=4096)] | None = None
    """Number of workers that share the environments; not for `sync` and `ray-async`. Not set: one
    per core of this machine, or of the Ray cluster"""
    env_worker_cpus: Annotated[float, Field(ge=0, le=1024)] = 1.0
    """CPUs that Ray reserves for each worker. An embedded Ray that has fewer reserves none"""
    ray_address: str | None = Field(
        None, pattern=r"^\S{1,200}$", description="host:port, or auto for a cluster on this machine"
    )
    """Ray cluster for the environments, as `host:port`, or `auto` for one that runs on this
    machine. Not set: that of the variable `RAY_ADDRESS`, or else an embedded Ray on this machine"""
    env_timeout: Annotated[float, Field(gt=0)] | None = 300.0
    """Seconds after which a worker that does not reply is started again; `null`: never. Does not
    apply to environments in this process"""
    env_restarts: Interval = 10
    """How often workers that died or hung are started again before the run stops. A resumed run
    counts from zero"""
    device: str = Field(
        "auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$", description="auto, cpu, cuda or cuda:N"
    )
    """Device of networks and replay buffer: `cpu`, `cuda` or `cuda:N`. `auto`: CUDA if present"""
    replay_device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the replay buffer of a run on CUDA is: in the memory of the GPU, or of the host, from
    which each batch is copied. `auto`: on the GPU if it fits"""
    replay_frame_stack: Annotated[int, Field(ge=1, le=64)] | Literal["auto"] = "auto"
    """Number of frames on the first axis of images. The replay buffer stores each frame once. 1: no
    stacks. `auto`: all of `(frames, height, width, colors)`, and of `(frames, height, width)` if
    there are 2, 4, 5, 7 or 8"""
    compile: Literal["auto", "on", "off"] = "auto"
    """Compile updates with `torch.compile`. `auto`: if the run is long enough to gain from it"""
    float32_precision: Literal["auto", "highest", "high", "medium"] = "auto"
    """Precision of matrix products in updates: `highest` is float32, `high` allows TF32 on CUDA,
    `medium` allows bfloat16 on CPU. `auto`: `highest`"""
    overlap: Literal["auto", "on", "off"] = "auto"
    """Step environments while an update runs, which then misses the newest transition. `auto`: `on`
    for CUDA with at most 256 updates per step, else `off`"""
    num_threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Number of CPU threads for tensor operations. Not set: 1 for small networks, PyTorch's choice
    for large ones"""
    output_dir: str = Field("runs", pattern=r"^[^\x00]+$", description="the path of a folder")
    """Folder in which run folders are created"""
    run_name: str | None = Field(
        None,
        pattern=r"^\w[\w.+=@-]{0,199}$",
        description="a folder name of letters, digits and . _ - + = @",
    )
    """Name of the run folder. Not set: built from algorithm, environment, seed and time"""
    eval_interval: Interval = 10_000
    """Steps between evaluations; 0: only at the end of the run"""
    eval_episodes: Annotated[int, Field(ge=1, le=100_000)] = 10
    """Number of episodes in an evaluation"""
    health: bool = True
    """Log figures of the run's health with each evaluation: Q-values against returns, entropy,
    norms and dead units"""
    video_interval: Positive | None = None
    """Steps between videos of the best and the worst episode of an evaluation; the next evaluation
    is recorded. Not set: no videos"""
    checkpoint_interval: Interval = 10_000
    """Steps between checkpoints; 0: only at the start, at the end and at each new best
    evaluation"""
    checkpoint_replay: Literal["full", "none"] = "full"
    """Whether checkpoints contain the replay buffer. With `none` they are small, and a resumed run
    collects `learning_starts` transitions before it makes updates again. A run that is not stopped
    learns the same either way"""
    log_interval: Positive = 1_000
    """Steps between two rows of logged metrics"""
    trackers: list[Literal["wandb", "mlflow", "trackio"]] = Field(default_factory=list)
    """Experiment trackers that get every row of the metrics, besides TensorBoard"""
    tracker_project: str | None = Field(
        None,
        pattern=r"^\w[\w.-]{0,99}$",
        description="a name of letters, digits and . _ -",
    )
    """Project (in MLflow: experiment) of the trackers. Not set: that of the tracker's environment
    variable, or else `rl_training`"""
    early_stopping: EarlyStopping | None = None
    """Conditions for stopping before `total_timesteps`. Not set: the run never stops early"""
    max_updates: Positive | None = None
    """The run stops after this number of updates. Not set: no limit"""
    normalize_observations: bool | None = None
    """Normalize observations by their mean and standard deviation; their numbers are then stored
    as float32. Not set: as in the policy of `init_from`, or else as the algorithm does by
    default"""
    dataset: InstanceOf[DataSection] | list[InstanceOf[DataSection]] | None = None
    """Recorded data to learn from: one section, or a list of sections that are mixed by `weight`.
    Not set: no recorded data"""
    replay: ReplaySection | None = None
    """How transitions are changed before they are learned from. Not set: they are not"""
    regime: Regime | None = None
    """Source of batches: the environment (`online`), recorded data (`offline`) or both (`mixed`).
    Not set: the first that the algorithm supports"""
    init_from: str | None = None
    """Run folder, checkpoint or saved policy whose networks the run starts from. In the path,
    the word `seed` in braces stands for the seed of the run. Not set: new networks"""
    algo_kwargs: InstanceOf[Hyperparameters]
    """Settings of the algorithm"""

    def __init__(self, /, **values: Any) -> None:
        # Validated here because the model of `algo_kwargs` depends on the algorithm, and that of
        # `dataset` on the kind of dataset.
        resolved = {**plain(values), "algo_kwargs": _hyperparameters(values)}
        _check_places(resolved)
        if values.get("dataset") is not None:
            resolved["dataset"] = read_sections(values["dataset"])
        for key in ("wrappers", "training_wrappers"):
            if values.get(key):
                resolved[key] = read_wrappers(values[key], key)
        for switch in ("compile", "overlap"):  # YAML parses on and off as booleans
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
        """The datasets to mix; empty if all data comes from the environment."""
        return as_list(self.dataset)

    @property
    def stated_action_range(self) -> tuple[float, float] | None:
        """`action_range` as two numbers."""
        given = self.action_range
        return (-given, given) if isinstance(given, float) else given

    @property
    def hindsight(self) -> HindsightSection | None:
        """How transitions are repeated with other goals; None: not at all."""
        return None if self.replay is None else self.replay.hindsight

    @property
    def normalizes_observations(self) -> bool:
        chosen = self.normalize_observations
        return self.spec.normalizes_observations if chosen is None else chosen

    @property
    def resolved_regime(self) -> Regime:
        return self.regime or self.spec.regimes[0]

    @property
    def hyperparameters(self) -> Hyperparameters:
        """`algo_kwargs` with every `auto` value resolved for this run."""
        regime = self.resolved_regime
        if regime == "mixed" and not self.reads_data:
            regime = "online"
        return self.algo_kwargs.for_run(regime, is_trained=self.init_from is not None)

    @property
    def reads_data(self) -> bool:
        """Whether any update uses recorded data. A `mixed` run may be configured to use none."""
        chosen, regime = self.algo_kwargs, self.resolved_regime
        if regime != "mixed" or not isinstance(chosen, MixedHyperparameters):
            return regime == "offline"
        return chosen.offline_batch_ratio != 0 or chosen.offline_pretrain_updates > 0

    @property
    def pretraining_updates(self) -> int:
        """Number of updates on recorded data before the first environment step."""
        return self._offline_updates if self.resolved_regime == "mixed" else 0

    @property
    def _offline_updates(self) -> int:
        chosen = self.algo_kwargs
        return chosen.offline_pretrain_updates if isinstance(chosen, MixedHyperparameters) else 0

    def _check_pretraining(self, regime: Regime) -> None:
        updates = self._offline_updates
        if updates and regime != "mixed":
            raise ValueError(
                f"algo_kwargs.offline_pretrain_updates = {updates}: needs regime 'mixed', "
                f"but the regime is {regime!r}"
            )

    def _check_weights(self, regime: Regime) -> None:
        ratio = getattr(self.algo_kwargs, "offline_batch_ratio", None)
        if regime != "mixed" or ratio != "uniform":
            return
        if len({section.weight for section in self.dataset_sections}) > 1:
            raise ValueError(
                "algo_kwargs.offline_batch_ratio = 'uniform': datasets cannot have different "
                "weights, since all transitions are equally likely; remove weight or set a ratio"
            )

    def _check_returns(self) -> None:
        if self.hindsight is not None and isinstance(self.algo_kwargs, ReturnHyperparameters):
            raise ValueError(
                f"replay.hindsight: {self.algo} needs the returns of episodes, which are not known "
                "for other goals; remove this section, or use another algorithm"
            )

    def _check_rollouts(self) -> None:
        """Refuse settings of replay buffers if the algorithm has none."""
        if not isinstance(self.algo_kwargs, RolloutHyperparameters):
            return
        for key in ("replay", "replay_device", "replay_frame_stack", "checkpoint_replay"):
            if getattr(self, key) != type(self).model_fields[key].default:
                raise ValueError(
                    f"{key}: {self.algo} learns from rollouts and has no replay buffer; remove "
                    f"{key}"
                )
        rows = self.algo_kwargs.rollout_steps * self.num_envs
        if self.algo_kwargs.normalize_advantages and min(self.algo_kwargs.batch_size, rows) == 1:
            raise ValueError(
                "algo_kwargs.normalize_advantages: a minibatch of one transition has no standard "
                "deviation; use a batch_size and a rollout of at least 2, or "
                "normalize_advantages: false"
            )
        if self.overlap == "on":
            raise ValueError(
                f"overlap = 'on': {self.algo} learns from complete rollouts, so that environments "
                "and updates take turns; use overlap: auto"
            )
        if self.vectorization == "ray-async":
            raise ValueError(
                f"vectorization = 'ray-async': {self.algo} needs the same number of steps of each "
                "environment; use 'ray'"
            )

    def with_changes(self, **changes: Any) -> TrainConfig:
        """Return a validated copy with some top-level values replaced."""
        return TrainConfig(**{**self.to_mapping(), **changes})

    @classmethod
    def from_saved(cls, values: Mapping[str, Any]) -> TrainConfig:
        """Build the config that a checkpoint stores, including those of older versions."""
        kind = get_algorithm_spec(str(values.get("algo"))).hyperparameters_type
        return cls(**{**values, "algo_kwargs": kind.upgrade(values.get("algo_kwargs") or {})})

    def to_mapping(self) -> dict[str, Any]:
        """Return plain values that `TrainConfig(**values)` and YAML accept."""
        return self.model_dump(mode="json")

    @field_serializer("wrappers", "training_wrappers")
    def _dump_wrappers(self, value: list[WrapperSection]) -> list[dict[str, Any]]:
        return [section.model_dump(mode="json") for section in value]

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
    def _check_env_kwargs(cls, value: dict[str, Any]) -> dict[str, Any]:
        if problem := _json_problem(value):
            raise ValueError(f"env_kwargs: {problem}; only JSON values can be saved with a run")
        return value

    @field_validator("action_range")
    @classmethod
    def _check_action_range(cls, value: ActionRange | None) -> ActionRange | None:
        if isinstance(value, tuple) and value[0] >= value[1]:
            raise ValueError(
                f"action_range = {short(list(value))}: the first number must be less than the "
                "second"
            )
        return value

    @field_validator("trackers")
    @classmethod
    def _check_trackers_differ(cls, value: list[str]) -> list[str]:
        if len(set(value)) < len(value):
            raise ValueError(f"trackers = {short(value)}: must not repeat a tracker")
        return value

    @field_validator("seeds")
    @classmethod
    def _check_seeds_differ(cls, value: list[int] | None) -> list[int] | None:
        if value is not None and len(set(value)) < len(value):
            raise ValueError(f"seeds = {short(value)}: must not repeat a seed")
        return value

    @model_validator(mode="after")
    def _check_environments(self) -> TrainConfig:
        seeds = len(self.seeds or [self.seed])
        if seeds * self.num_envs > MAX_ENVIRONMENTS:
            raise ValueError(
                f"num_envs = {self.num_envs}: {seeds:,} seeds need {seeds * self.num_envs:,} "
                f"environments; use at most {MAX_ENVIRONMENTS:,} in total"
            )
        if self.num_envs > MAX_ON_HOST and self.vectorization not in ("auto", "tensors"):
            raise ValueError(
                f"num_envs = {self.num_envs}: vectorization {self.vectorization!r} steps at most "
                f"{MAX_ON_HOST:,} environments; more need a tensor environment, such as "
                "warp/HalfCheetah-v5"
            )
        alone = ("sync", "ray-async", "tensors")
        if self.env_workers is not None and self.vectorization in alone:
            each = self.vectorization == "ray-async"
            one = "has one worker per environment" if each else "has none"
            raise ValueError(
                f"env_workers = {self.env_workers}: vectorization {self.vectorization!r} {one}; "
                "remove env_workers, or use 'async' or 'ray'"
            )
        return self

    @model_validator(mode="after")
    def _check_regime(self) -> TrainConfig:
        spec = self.spec
        regime = self.resolved_regime
        if regime not in spec.regimes:
            hint = "; to fine-tune its policy online, use another algorithm with init_from"
            raise ValueError(
                f"regime = {regime!r}: {self.algo} supports {' or '.join(spec.regimes)}"
                + (hint if spec.regimes == ("offline",) else "")
            )
        if regime == "online" == spec.regimes[0] and self.dataset is not None:
            raise ValueError(
                f"dataset: {self.algo} learns online and uses no dataset; remove this section"
            )
        self._check_pretraining(regime)
        self._check_weights(regime)
        if self.hindsight is not None and action_chunk(self.algo_kwargs) > 1:
            raise ValueError(
                "replay.hindsight: cannot be combined with action_chunk, because a goal may be "
                "reached in the middle of a chunk; remove one of them"
            )
        self._check_returns()
        self._check_rollouts()
        return self


ConfigSource = TrainConfig | Mapping[str, Any] | str | Path
"""What `load_config` accepts: a config, a mapping, or the path or packaged name of a file"""


def _hyperparameters(values: Mapping[str, Any]) -> Hyperparameters:
    algo = values.get("algo")
    if not isinstance(algo, str):
        raise ConfigError(
            "algo: required, but missing; `rl-training list` shows the algorithms"
            if algo is None
            else f"algo = {short(algo)}: must be a string"
        )
    given = values.get("algo_kwargs")
    kind = get_algorithm_spec(algo).hyperparameters_type
    if isinstance(given, kind):
        return given
    if given is not None and not isinstance(given, Mapping):
        raise ConfigError(
            f"algo_kwargs = {short(given)}: must be a mapping of {algo}'s hyper-parameters"
        )
    return validate(kind, given or {}, section="algo_kwargs")


def _check_places(values: Mapping[str, Any]) -> None:
    """Raise `ConfigError` if a hyper-parameter is among the config's own keys."""
    hyperparameters = type(values["algo_kwargs"]).model_fields
    for key in values:
        if key in hyperparameters and key not in TrainConfig.model_fields:
            raise ConfigError(
                f"{key}: is a hyper-parameter of {values['algo']}; move it to algo_kwargs"
            )


def read_wrappers(value: Any, key: str = "wrappers") -> list[WrapperSection]:
    """Validate the wrappers of a config or a saved policy, called `key`; imports nothing."""
    if not isinstance(value, list | tuple) or len(value) > MAX_WRAPPERS:
        raise ConfigError(
            f"{key} = {short(value)}: must be a list of at most {MAX_WRAPPERS} module:Class"
        )
    return [_read_wrapper(part, f"{key}[{index}]") for index, part in enumerate(value)]


def _read_wrapper(value: Any, key: str) -> WrapperSection:
    if isinstance(value, WrapperSection):
        return value
    if isinstance(value, str):
        value = {"wrapper": value}
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"{key} = {short(value)}: must be module:Class, or a mapping with wrapper and kwargs"
        )
    return validate(WrapperSection, value, section=key)


def _is_unicode(text: str) -> bool:
    """Return whether text can be written to a file; half a surrogate pair cannot."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _json_problem(value: Any, depth: int = 0) -> str | None:
    """Describe the first part of a value that JSON cannot store, or return None."""
    if value is None or isinstance(value, bool):
        return None
    if isinstance(value, int):
        return None if abs(value) <= LARGEST else "the integer is too large"
    if isinstance(value, str):
        if len(value) > MAX_TEXT:
            return f"text of more than {MAX_TEXT:,} characters"
        return None if _is_unicode(value) else f"{short(value)} is not valid Unicode"
    if isinstance(value, float):
        return None if math.isfinite(value) else f"{value} is not a finite number"
    if depth > 20:
        return "nested too deeply"
    if isinstance(value, dict):
        if wrong := [key for key in value if not isinstance(key, str)]:
            return f"the key {short(wrong[0])} is not a string"
        if wrong := [key for key in value if not _is_unicode(key) or len(key) > MAX_TEXT]:
            return f"the key {short(wrong[0])} is not valid text"
        parts = list(value.items())
    elif isinstance(value, list):
        parts = list(enumerate(value))
    else:
        return f"unsupported type {type(value).__name__}"
    if len(parts) > MAX_PARTS:
        return f"more than {MAX_PARTS:,} values"
    problems = ((key, _json_problem(part, depth + 1)) for key, part in parts)
    key, problem = next((found for found in problems if found[1]), ("", None))
    return f"{key_name(key)}: {problem}" if problem and depth == 0 else problem
