"""Read and check a sweep file: what to vary, how to search, and how to judge a trial."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from rl_training.config import TrainConfig
from rl_training.config_files import load_config, read_config, read_yaml
from rl_training.errors import ConfigError
from rl_training.sweeps.settings import Objective, SweepSettings
from rl_training.sweeps.space import Params, Space, read_grid, read_search, with_counts
from rl_training.types import Json
from rl_training.validation import parse_seeds, short, suggestion, user_path, validate

DEFAULT_TRIALS = 20
PLANNED_AHEAD = 64
"""Independent trials that are planned together; it is part of the random numbers"""
MAX_CHECKED = 500
"""Most combinations of a grid that are checked one by one"""
SEQUENCES = ("qmc",)
"""Samplers that give the points of a fixed sequence one after another"""
INDEPENDENT = ("grid", "random", *SEQUENCES)
"""Samplers whose trials do not depend on the results of others"""
SAMPLERS = {
    "tpe": "TPESampler",
    "random": "RandomSampler",
    "gp": "GPSampler",
    "cmaes": "CmaEsSampler",
    "qmc": "QMCSampler",
    "nsgaii": "NSGAIISampler",
}
PRUNERS = {
    "asha": "SuccessiveHalvingPruner",
    "hyperband": "HyperbandPruner",
    "median": "MedianPruner",
    "percentile": "PercentilePruner",
    "wilcoxon": "WilcoxonPruner",
}
PRUNER_NAMES = {
    "asha": {"grace": "min_resource", "factor": "reduction_factor"},
    "hyperband": {"grace": "min_resource", "factor": "reduction_factor"},
    "median": {"grace": "n_warmup_steps"},
    "percentile": {"grace": "n_warmup_steps"},
}
"""Short names of the arguments of a pruner"""
_PASSWORD = re.compile(r"(?<=://)([^:/@\s]*):\S*(?=@)")
"""Up to the last @: a password may contain one"""
_QUERY_PASSWORD = re.compile(
    r"((?:password|passwd|pwd|token|secret|key|sig|signature|credential)=)[^&\s]+", re.IGNORECASE
)
HIDDEN = "***"
"""Stands for a password"""
_RESERVED = ("seed", "seeds", "output_dir", "run_name")


@dataclass(frozen=True)
class SweepFile:
    """A sweep file that was read and checked."""

    settings: SweepSettings
    base: Json
    """The values of the config that every trial starts from"""

    @cached_property
    def space(self) -> Space:
        chosen = self.settings
        if (chosen.search is None) == (chosen.grid is None):
            raise ConfigError("a sweep file needs either search or grid")
        if not (chosen.search or chosen.grid):
            raise ConfigError("a sweep file needs a key to vary in search or grid")
        return read_search(chosen.search) if chosen.search else read_grid(chosen.grid or {})

    @property
    def objective(self) -> Objective:
        return self.settings.objective

    @cached_property
    def seeds(self) -> list[int]:
        return _seeds(self.settings.seeds, "seeds")

    @cached_property
    def fresh_seeds(self) -> list[int]:
        """Seeds that the search has not seen."""
        if self.settings.fresh_seeds is None:
            first = max(self.seeds) + 1
            if first + len(self.seeds) > 2**32:
                raise ConfigError(f"fresh_seeds: set them, since seeds end at {first - 1}")
            return list(range(first, first + len(self.seeds)))
        chosen = _seeds(self.settings.fresh_seeds, "fresh_seeds")
        if seen := sorted(set(chosen) & set(self.seeds)):
            raise ConfigError(f"fresh_seeds: {seen[0]} is one of seeds, so it is not fresh")
        return chosen

    @cached_property
    def trials(self) -> int:
        wanted = self.settings.trials
        if self.settings.grid is None:
            return DEFAULT_TRIALS if wanted is None else wanted
        size = self.space.grid_size()
        if wanted is not None and wanted != size:
            raise ConfigError(
                f"trials = {wanted}: the grid has {size} combinations; remove trials, or use search"
            )
        return size

    @property
    def sampler(self) -> tuple[str, Json]:
        """Name and arguments of the sampler; a grid has none."""
        if self.settings.grid is not None:
            return "grid", {}
        given = self.settings.sampler
        return _named_choice(
            {given: None} if isinstance(given, str) else given, "sampler", SAMPLERS
        )

    @property
    def pruner(self) -> tuple[str, Json] | None:
        """Name and arguments of the pruner, if there is one."""
        if self.settings.prune is None:
            return None
        name, given = _named_choice(self.settings.prune, "prune", PRUNERS)
        return name, {key: with_counts(value) for key, value in given.items()}

    @property
    def planned_at_once(self) -> int:
        """How many trials are planned together."""
        if self.settings.rounds is not None:
            return self.settings.rounds
        return PLANNED_AHEAD if self.sampler[0] in INDEPENDENT else 1

    @property
    def is_exact(self) -> bool:
        """Whether neither stops nor the order in which trials end change the table."""
        return self.is_planned_in_order and self.settings.prune is None

    @property
    def is_planned_in_order(self) -> bool:
        """Whether a trial's parameters do not depend on which of the others ended before it."""
        return self.settings.rounds is not None or self.sampler[0] in INDEPENDENT

    def config(self, parameters: Params) -> TrainConfig:
        """The config of a trial with these values."""
        changes = {key: with_counts(value) for key, value in self.settings.set.items()}
        overrides = [f"{key}={as_yaml(value)}" for key, value in {**changes, **parameters}.items()]
        config = load_config(self.base, overrides)
        if config.num_threads is None:
            config = config.with_changes(num_threads=self.settings.resources.cpus)
        return config

    def examples(self) -> Iterator[Params]:
        """Trials that have every bound and every choice of each parameter at least once."""
        values = {key: each.examples() for key, each in self.space.dimensions.items()}
        for number in range(max(map(len, values.values()))):
            yield {key: given[number % len(given)] for key, given in values.items()}

    def checked_trials(self) -> Iterator[Params]:
        """Trials whose configs are checked before a sweep starts: all of a grid, or examples."""
        if self.settings.grid is None or self.space.grid_size() > MAX_CHECKED:
            return self.examples()
        return map(self.space.to_values, self.space.grid())

    def to_json(self) -> Json:
        """All settings, without the passwords of a database and a storage."""
        values = self.settings.model_dump(mode="json")
        return {**values, **{key: masked(values[key]) for key in ("study", "storage")}}

    @property
    def identity(self) -> Json:
        """The settings that must not change while a sweep goes on."""
        free = {"max_failures", "ray", "resources", "slurm", "storage", "study", "fresh_seeds"}
        identity = self.settings.model_dump(mode="json", exclude=free)
        cpus = self.settings.resources.cpus  # the threads of a trial
        return {**identity, "base": self.base, "trials": self.trials, "cpus": cpus}


def read_sweep(source: str | Path | Mapping[str, Any]) -> SweepFile:
    """Read a sweep file; raise `ConfigError` if anything in it is wrong. Creates nothing."""
    values = source if isinstance(source, Mapping) else read_yaml(_existing(source))
    settings = validate(SweepSettings, values)
    return checked(SweepFile(settings, read_config(settings.base)))


def checked(sweep: SweepFile) -> SweepFile:
    """Raise `ConfigError` if a trial of this sweep could not be built or judged."""
    _ = sweep.space
    seen: dict[str, str] = {}
    for section in ("set", "search", "grid"):
        _check_keys(getattr(sweep.settings, section) or {}, section, seen)
    sweep.settings.slurm.check()
    _ = sweep.trials, sweep.fresh_seeds, sweep.sampler, sweep.objective.parts
    if sweep.settings.rounds is not None and sweep.sampler[0] in INDEPENDENT:
        raise ConfigError(
            f"rounds = {sweep.settings.rounds}: trials of {sweep.sampler[0]} search do not depend "
            "on each other, so there are no rounds; remove rounds"
        )
    for parameters in sweep.checked_trials():
        try:
            config = sweep.config(parameters)
        except ConfigError as error:
            raise ConfigError(_with_section(sweep.settings, str(error))) from None
        _check_pruning(sweep, config)
    return sweep


def _with_section(settings: SweepSettings, message: str) -> str:
    """Put the section of a sweep file before a message about one of its keys."""
    for section in ("search", "grid", "set"):
        for key in getattr(settings, section) or {}:
            if message.startswith((f"{key} ", f"{key}.", f"algo_kwargs.{key} ")):
                return f"{section}.{message}"
    return message


def _existing(source: str | Path) -> Path:
    path = user_path(source)
    if not path.is_file():
        raise ConfigError(f"{path}: no such sweep file")
    return path


def _check_keys(values: Mapping[str, Any], section: str, seen: dict[str, str]) -> None:
    """Raise `ConfigError` for a key that no config can have, or that was `seen` before."""
    for key in values:
        name = f"{section}.{key}"
        if not key.isprintable() or not all(map(str.strip, key.split("."))) or "=" in key:
            raise ConfigError(f"{section}.{short(key)}: must be a config key, such as env_id")
        if key.partition(".")[0] in _RESERVED:
            raise ConfigError(
                f"{name}: a sweep sets this itself; "
                + ("use seeds at the top" if key.startswith("seed") else "use --output-dir")
            )
        # A hyper-parameter may be named without its section.
        if (other := seen.setdefault(key.removeprefix("algo_kwargs."), name)) != name:
            raise ConfigError(f"{name}: is set by {other} too; remove one of them")


def _check_pruning(sweep: SweepFile, config: TrainConfig) -> None:
    """Raise `ConfigError` if a trial would never report anything that a pruner could judge."""
    interval, total = config.eval_interval, config.total_timesteps
    if sweep.pruner is None or 0 < interval < total:
        return
    raise ConfigError(
        f"prune: needs evaluations during a trial, but eval_interval is {interval:,} and "
        f"total_timesteps is {total:,}; set a smaller eval_interval, or remove prune"
    )


def _seeds(given: str | int | list[int], key: str) -> list[int]:
    listed = given if isinstance(given, list) else [given]
    return parse_seeds(",".join(map(str, listed)), key)


def _named_choice(
    given: Mapping[str, Json | None], key: str, known: Mapping[str, str]
) -> tuple[str, Json]:
    """Read `{name: {argument: value}}`."""
    if len(given) != 1:
        raise ConfigError(f"{key} = {short(dict(given))}: must name exactly one of {_list(known)}")
    [(name, arguments)] = given.items()
    if name not in known:
        raise ConfigError(
            f"{key} = {short(name)}: unknown{suggestion(name, known)}; use one of {_list(known)}"
        )
    return name, dict(arguments or {})


def _list(names: Mapping[str, str]) -> str:
    return ", ".join(names)


def as_yaml(value: Any) -> str:
    """Format a value for an override of the config, which is parsed as YAML."""
    return json.dumps(value)


def masked(url: str | None) -> str | None:
    """Hide the password in the URL of a database or storage."""
    return url and _QUERY_PASSWORD.sub(rf"\1{HIDDEN}", _PASSWORD.sub(rf"\1:{HIDDEN}", url))


def without_password(text: str, url: str) -> str:
    """Hide the password of a URL in any text."""
    passwords = [part for found in _PASSWORD.finditer(url) for part in found[0].split(":", 1)[1:]]
    passwords += [found[0].partition("=")[2] for found in _QUERY_PASSWORD.finditer(url)]
    for password in passwords:
        for spelled in {password, unquote(password)} - {""}:
            text = text.replace(spelled, HIDDEN)
    return str(masked(text))
