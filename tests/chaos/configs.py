"""Mutated configs of every algorithm and regime, and a judge of how the package reacts to them.

`fuzzed_configs(seed, count)` yields configs, `judge(config)` says what is wrong with the reaction.
A mutated config must be accepted and survive a round trip, or be refused with one short, printable
message that names the key that was changed.

Run `python -m chaos.configs SEED COUNT` in the folder `tests` to print every config that fails.
"""

from __future__ import annotations

import copy
import dataclasses
import datetime
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rl_training.algorithms.spec import AlgorithmSpec, list_algorithm_specs
from rl_training.config import EarlyStopping, TrainConfig
from rl_training.config_files import dump_yaml, load_config, parse_yaml
from rl_training.errors import UserError
from rl_training.types import Regime

MAX_MESSAGE = 2_000
MAX_SECONDS = 1.0
Values = dict[str, Any]
ANYTHING: tuple[Any, ...] = ()
"""Stands for a change whose key cannot be known, such as a truncated file"""


@dataclasses.dataclass(frozen=True)
class FuzzedConfig:
    """A config, how it was made, and what a message about it must name."""

    source: Values | str | bytes
    """A mapping, or the content of a YAML file"""
    overrides: tuple[str, ...] = ()
    """Arguments of `--set`"""
    keys: tuple[Any, ...] = ANYTHING
    """A message must name one of these keys"""
    mutation: str = "given"
    seed: int = 0
    index: int = 0

    def __str__(self) -> str:
        return f"config {self.index} of seed {self.seed} ({self.mutation})"


def fuzzed_configs(seed: int, count: int) -> Iterator[FuzzedConfig]:
    """Yield `count` mutated configs; each depends only on `seed` and its index."""
    bases = valid_configs()
    for index in range(count):
        chance = random.Random(f"{seed}/{index}")
        base = copy.deepcopy(bases[index % len(bases)])
        mutate = chance.choice(MUTATIONS)
        mutated = mutate(chance, base)
        yield dataclasses.replace(mutated, mutation=mutate.__name__, seed=seed, index=index)


def judge(config: FuzzedConfig | Values | str | bytes) -> str | None:
    """Say what is wrong with the reaction to a config; None if it is right."""
    if not isinstance(config, FuzzedConfig):
        config = FuzzedConfig(config)
    started = time.process_time()
    try:
        loaded = _load(config)
    except UserError as error:
        problem = _judge_message(str(error), config.keys)
    except Exception as error:
        problem = f"{type(error).__name__} instead of a ConfigError: {str(error)[:200]}"
    else:
        problem = _judge_accepted(loaded)
    seconds = time.process_time() - started
    if problem is None and seconds > MAX_SECONDS:
        problem = f"took {seconds:.1f} s"
    return problem


def _load(config: FuzzedConfig) -> TrainConfig:
    if isinstance(config.source, dict):
        return load_config(config.source, config.overrides)
    content = config.source
    if isinstance(content, str):
        content = content.encode("utf-8", "surrogatepass")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "fuzzed.yaml"
        path.write_bytes(content)
        return load_config(path, config.overrides)


def _judge_accepted(config: TrainConfig) -> str | None:
    config = config.with_changes(seeds=None)  # each run is saved with its own seed
    values = config.to_mapping()
    try:
        if load_config(values) != config:
            return "accepted, but its mapping gives another config"
        if load_config(parse_yaml(dump_yaml(values), "dumped")) != config:
            return "accepted, but its YAML gives another config"
        dump_yaml(values).encode()
    except (UserError, ValueError) as error:
        return f"accepted, but cannot be saved and read back: {str(error)[:200]}"
    return None


def _judge_message(message: str, keys: tuple[Any, ...]) -> str | None:
    if not message.strip():
        return "refused without a message"
    if len(message) > MAX_MESSAGE:
        return f"a message of {len(message):,} characters"
    if not message.replace("\n", "").isprintable():
        return f"a message with control characters: {message[:200]!r}"
    if keys and not any(_names(message, key) for key in keys):
        return f"a message that does not name {keys[0]!r:.60}: {message[:200]}"
    return None


def _names(message: str, key: Any) -> bool:
    """Return whether a message shows a key: as it is, or quoted if it is empty or unusual."""
    if isinstance(key, str) and key and key.isprintable():
        return key[:25] in message
    try:
        return repr(key)[:25] in message
    except ValueError:  # an integer with too many digits for Python to print
        return f"<{type(key).__name__}>" in message


# Valid configs


def valid_configs() -> list[Values]:
    """Return configs of every algorithm in each of its regimes: small ones and complete ones."""
    return [
        config
        for spec in list_algorithm_specs()
        for regime in spec.regimes
        for config in (_small(spec, regime), _complete(spec, regime))
    ]


def _small(spec: AlgorithmSpec, regime: Regime) -> Values:
    values: Values = {
        "algo": spec.name,
        "env_id": "CartPole-v1" if (spec.actions[0] == "discrete") else "Pendulum-v1",
        "total_timesteps": 1000,
        "regime": regime,
        "algo_kwargs": {"batch_size": 32, "hidden_sizes": [16, 16], "learning_rate": 1e-3},
    }
    if regime != "online":
        values["dataset"] = {"kind": "npz", "path": "data.npz", "reward_scale": 2.0}
    return values


def _complete(spec: AlgorithmSpec, regime: Regime) -> Values:
    changes = {
        "seeds": [0, 1, 2],
        "env_kwargs": {"render_mode": None, "options": {"wind": [0.5, 1]}},
        "wrappers": [{"wrapper": "gymnasium.wrappers:TimeAwareObservation", "kwargs": {}}],
        "early_stopping": {"patience": 3, "min_delta": 0.5},
    }
    if regime != "online":
        changes["dataset"] = [
            {"kind": "random", "size": 1000, "weight": 1.0},
            {"kind": "minari", "id": "D4RL/door/human-v2"},
        ]
    return TrainConfig(**{**_small(spec, regime), **changes}).to_mapping()


# Values and keys that do not belong into a config


def _nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def _circular() -> Any:
    value: list[Any] = []
    value.append(value)
    return value


def _hostile_value(chance: random.Random) -> Any:
    """Return a value that most settings must refuse."""
    value = chance.choice(HOSTILE_VALUES)
    return value() if type(value) is LAZY else copy.deepcopy(value)


LAZY = type(_circular)
HOSTILE_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 3.7, -0.0, 1e-320, 1e300, 10**9, 2**31, 2**63, 10**30),
    *(float("nan"), float("inf"), float("-inf")),
    *("", " ", "on", "1e5", "auto", "null", "nan", "../x", "~nosuchuser/x", "/dev/full"),
    *("a\0b", "\x1b[31mred\x1b[0m", "\u202eabc", "é\nü", "\ud800", "x" * 300, "{{7*7}}"),
    *([], {}, [[]], [{}], [None], {"": 1}, {1: 2}, {None: 3}, {"a": {"b": {"c": [1]}}}),
    *((1, 2), {1, 2}, b"bytes", 1 + 2j, datetime.date(2026, 1, 1), datetime.timedelta(1)),
    *(range(3), object, ValueError("x"), Path("a/b"), 10**5000, -(10**5000), [10**5000]),
    # Large values are made when they are needed.
    lambda: "y" * 1_000_000,
    lambda: ["z" * 10_000] * 100,
    lambda: list(range(100_000)),
    lambda: {f"k{index}": index for index in range(5_000)},
    lambda: _nested(30),
    lambda: _nested(1_000),
    _circular,
)

HOSTILE_KEYS: tuple[Any, ...] = (
    *("", " ", ".", "..", "a.b", ".algo", "algo.", "a\nb", "a\0b", "\t", "\x1b[31m", "\u202e"),
    *("é", "学习率", "\ud800", "k" * 5_000, "a b", "a=b", "'", '"', "-", "#", "{}", "[0]", "<<"),
    *("self", "cls", "values", "__init__", "__class__", "model_fields", "model_config", "/"),
    *(0, 1, -1, 2.5, True, False, None, float("nan"), 10**5000),
    *((1, 2), (), b"x", datetime.date(2026, 1, 1), frozenset({1})),
)


# Mutations: each changes a valid config and says which keys a message must name


def _sections(values: Values) -> list[Values]:
    """Return the config and its sections, each of which has fixed keys."""
    found = [values, values["algo_kwargs"]]
    found += [values[key] for key in ("early_stopping",) if isinstance(values.get(key), dict)]
    dataset = values.get("dataset")
    parts = dataset if isinstance(dataset, list) else [dataset]
    return found + [part for part in parts if isinstance(part, dict)]


def _pick(chance: random.Random, values: Values) -> tuple[Values, str]:
    """Choose a section and one of its keys."""
    section = chance.choice(_sections(values))
    return section, chance.choice(sorted(section))


def _concerned(values: Values, key: Any) -> tuple[Any, ...]:
    """Return the keys that a message may name after a change of `key`.

    The algorithm, the regime and the kind of a dataset decide which other keys are allowed.
    """
    if key not in ("algo", "regime", "kind", "algo_kwargs", "dataset"):
        return (key, *_checked_together(key))
    return (
        key,
        "regime",
        "dataset",
        *values,
        *(each for part in _sections(values) for each in part),
    )


def _checked_together(key: Any) -> tuple[str, ...]:
    """Return the keys whose values are checked together with that of `key`."""
    together = (
        {"action_low", "action_high"},
        {"weight", "offline_batch_ratio"},
        {"offline_pretrain_updates", "regime"},
        {"n_step", "entropy_in_target"},
        {"subset_size", "num_critics"},
        {"num_quantiles", "top_quantiles_to_drop_per_critic"},
        {"alpha", "learn_alpha", "target_entropy", "cql_target_gap", "cql_alpha"},
    )
    return tuple(sorted(other for keys in together if key in keys for other in keys - {key}))


def dropped_key(chance: random.Random, values: Values) -> FuzzedConfig:
    section, key = _pick(chance, values)
    concerned = _concerned(values, key)
    del section[key]
    return FuzzedConfig(values, keys=concerned)


def renamed_key(chance: random.Random, values: Values) -> FuzzedConfig:
    section, key = _pick(chance, values)
    concerned = _concerned(values, key)
    name = chance.choice([f"{key}s", key.upper(), f" {key}", key[1:], f"{key}\n", f"my_{key}"])
    section[name] = section.pop(key)
    return FuzzedConfig(values, keys=(name, *concerned))


def misspelled_key(chance: random.Random, values: Values) -> FuzzedConfig:
    section, key = _pick(chance, values)
    concerned = _concerned(values, key)
    at = chance.randrange(len(key))
    name = chance.choice(
        [key[:at] + key[at + 1 :], key[:at] + "x" + key[at:], key[:at] + "x" + key[at + 1 :]]
    )
    section[name] = section.pop(key)
    return FuzzedConfig(values, keys=(name, *concerned))


def added_key(chance: random.Random, values: Values) -> FuzzedConfig:
    section, key = chance.choice(_sections(values)), chance.choice(HOSTILE_KEYS)
    section[key] = _hostile_value(chance)
    return FuzzedConfig(values, keys=(key,))


def added_many_keys(chance: random.Random, values: Values) -> FuzzedConfig:
    section = chance.choice(_sections(values))
    names = [f"unknown_{index}" for index in range(chance.choice([2, 30, 5_000]))]
    section.update(dict.fromkeys(names, 1))
    return FuzzedConfig(values, keys=tuple(names))


def wrong_value(chance: random.Random, values: Values) -> FuzzedConfig:
    section, key = _pick(chance, values)
    concerned = _concerned(values, key)
    section[key] = _hostile_value(chance)
    return FuzzedConfig(values, keys=concerned)


def added_setting(chance: random.Random, values: Values) -> FuzzedConfig:
    """Give a setting that the config does not have, with a value that may be wrong."""
    spec = next(spec for spec in list_algorithm_specs() if spec.name == values["algo"])
    models = [(values, TrainConfig), (values["algo_kwargs"], spec.hyperparameters_type)]
    section, model = chance.choice(models)
    key = chance.choice(sorted(model.model_fields))
    concerned = _concerned(values, key)
    section[key] = _hostile_value(chance)
    return FuzzedConfig(values, keys=concerned)


def wrong_inner_value(chance: random.Random, values: Values) -> FuzzedConfig:
    """Put a hostile value or key into a free-form or nested value."""
    hostile = _hostile_value(chance)
    key = chance.choice(["env_kwargs", "wrappers", "early_stopping", "dataset", "seeds"])
    inner = chance.choice([*EarlyStopping.model_fields, *HOSTILE_KEYS])
    values[key] = chance.choice([[hostile], {inner: hostile}, [{inner: hostile}], [[hostile]]])
    return FuzzedConfig(values, keys=(key, inner))


def out_of_range(chance: random.Random, values: Values) -> FuzzedConfig:
    section, key = _pick(chance, values)
    numbers = [name for name in section if type(section[name]) in (int, float)]
    key = chance.choice(sorted(numbers)) if numbers else key
    old = section[key] if numbers else 1
    concerned = _concerned(values, key)
    section[key] = chance.choice([-old, old * 10**12, -1, 0, 10**18, 1e308, float(old) + 0.5, 2])
    return FuzzedConfig(values, keys=concerned)


def swapped_sections(chance: random.Random, values: Values) -> FuzzedConfig:
    values.setdefault("early_stopping", {"patience": 3})
    one, other = chance.sample(["algo_kwargs", "dataset", "early_stopping", "env_kwargs"], 2)
    every = _concerned(values, "algo")
    values[one], values[other] = values.get(other), values.get(one)
    return FuzzedConfig(values, keys=(one, other, *every))


def flattened_section(chance: random.Random, values: Values) -> FuzzedConfig:
    """Move the keys of a section to the top level."""
    every = _concerned(values, "algo")
    values.update(values.pop("algo_kwargs"))
    return FuzzedConfig(values, keys=every)


def other_top_level(chance: random.Random, values: Values) -> FuzzedConfig:
    """Write a file that is not a mapping of settings."""
    content = chance.choice(
        [
            *("", "null", "~", "---\n", "# nothing\n", "3", "text", "[]", "- a\n- b\n", "{}"),
            *("[algo, sac]", "--- a\n--- b\n", "!!set {a, b}", "!!binary aGVsbG8=", "2026-01-01"),
            *("\ufeff", "\x00", "\x1b[31m", b"\xff\xfe", b"\x80abc", b"PK\x03\x04", b"\x89HDF\r\n"),
            *("[" * 1_000, "{" * 5_000, "- " * 3_000, "a: " * 200, " " * 65_000, "a" * 65_537),
            *("x" * 1_000_000, "algo: sac\n" * 3_000, "? [a]\n: 1", "? {a: 1}\n: 1", "a: &a [*a]"),
            *(
                "%YAML 9.9\n---\na: 1",
                "%TAG ! tag:x,2000:\n---\na: !b 1",
                "*missing",
                "a: *missing",
            ),
            *("a: !!python/object/apply:os.system [id]", "!!python/name:os.system", "<<: 3"),
            *("<<: [1, 2]", "<<: {a: 1}\nb: 2", "!<tag:x> y", "a: @b", "a: `b`", "a:\tb", "\ta: b"),
        ]
    )
    return FuzzedConfig(content)


def hostile_text(chance: random.Random, values: Values) -> FuzzedConfig:
    """Append a line with hostile YAML to a file."""
    value = chance.choice(
        [
            *("2026-01-01", "2026-01-01T00:00:00Z", "!!set {a, b}", "!!binary aGVsbG8=", ".nan"),
            *(".inf", "-.INF", "0x1F", "0o17", "017", "1:30:00", "1_0_0", "1e400", "9" * 5_000),
            *(
                "!!python/tuple [1]",
                "!!python/object/apply:os.system [id]",
                "!!timestamp x",
                "!!x y",
            ),
            *("!!omap [a: 1]", "!!pairs [a: 1]", "!!int x", "!!float x", "!!bool x", "!!null x"),
            *(
                "[" * 100 + "]" * 100,
                "{" * 1_000,
                "&a [*a]",
                "&a {b: *a}",
                "*nothing",
                '"\\x1b[31m"',
            ),
            *(
                "'" + "q" * 60_000 + "'",
                "|\n  a\n  b",
                ">\n  a\n",
                "'unclosed",
                '"\\ud800"',
                '"\\0"',
            ),
            *(
                "{<<: {a: 1}}",
                "{a: 1, a: 2}",
                "{1: 2, 01: 3}",
                "{? [a] : 1}",
                "2001-99-99",
                "1e",
                "=",
            ),
        ]
    )
    key = chance.choice(["seed", "env_kwargs", "unknown", "''", "1", "2026-01-01", "algo_kwargs"])
    values.pop(key, None)
    return FuzzedConfig(f"{dump_yaml(values)}{key}: {value}\n")


def duplicate_key(chance: random.Random, values: Values) -> FuzzedConfig:
    key = chance.choice(sorted(values))
    text = dump_yaml(values)
    line = f"{key}: 1\n"
    return FuzzedConfig(text + line if chance.random() < 0.5 else line + text, keys=(key,))


def damaged_text(chance: random.Random, values: Values) -> FuzzedConfig:
    """Cut, repeat, replace or insert bytes of a file."""
    content = bytearray(dump_yaml(values).encode())
    for _ in range(chance.choice([1, 1, 3, 20])):
        at = chance.randrange(len(content)) if content else 0
        noise = chance.choice(
            [b"\0", b"\xff", b"\t", b":", b"{", b"- ", b"&a ", b"*a", b"!!", b"\n"]
        )
        match chance.randrange(5):
            case 0:
                del content[at:]
            case 1:
                content[at:at] = noise
            case 2:
                content[at : at + 1] = bytes([chance.randrange(256)])
            case 3:
                content[at:at] = content[: chance.randrange(200)]
            case _:
                del content[at : at + chance.randrange(40)]
    return FuzzedConfig(bytes(content))


def override(chance: random.Random, values: Values) -> FuzzedConfig:
    """Change a config by `--set`."""
    text = chance.choice(
        [
            *("=3", "", "=", "a", "a.b.c=", "a b=1", "..=1", ".a=1", "algo_kwargs.=1", "a=b=c"),
            *("seed=[", "seed=!!python/name:os.system", "seed='", "x" * 5_000, "x" * 5_000 + "=1"),
            *("\x1b[31m=1", "seed=\x1b[31m", "seed=" + "9" * 5_000, "seed=" + "[" * 500, "é=1"),
            *("algo=nothing", "algo=", "algo=3", "dataset=", "dataset=x", "dataset.kind=x"),
            *("dataset.0.kind=npz", "seed.x=1", "wrappers.0=a", "env_kwargs.a.b.c.d=1", "\ud800=1"),
            *(
                "seeds=" + str(list(range(20_000))),
                "algo_kwargs=",
                "algo_kwargs=[]",
                "env_kwargs.=1",
            ),
        ]
    )
    if chance.random() < 0.5:
        _, key = _pick(chance, values)
        value = chance.choice(["", "x", "[1, 2]", "{a: 1}", "-1", "1e9", ".nan", "~nosuchuser"])
        text = f"{key}={value}"
    key = text.partition("=")[0].strip()
    named = ("set", *_concerned(values, key), *key.split("."))
    return FuzzedConfig(values, (text,), keys=named)


def two_mutations(chance: random.Random, values: Values) -> FuzzedConfig:
    once = chance.choice(MAPPING_MUTATIONS)(chance, values)
    if not isinstance(values.get("algo_kwargs"), dict) or "algo" not in values:
        return once
    twice = chance.choice([added_key, wrong_inner_value])(chance, values)
    return dataclasses.replace(twice, keys=(*once.keys, *twice.keys))


Mutation = Callable[[random.Random, Values], FuzzedConfig]
MAPPING_MUTATIONS: tuple[Mutation, ...] = (
    *(dropped_key, renamed_key, misspelled_key, added_key, added_many_keys, wrong_value),
    *(added_setting, wrong_inner_value, out_of_range, swapped_sections, flattened_section),
)
MUTATIONS: tuple[Mutation, ...] = (
    *MAPPING_MUTATIONS,
    *(other_top_level, hostile_text, duplicate_key, damaged_text, override, two_mutations),
)


def main(seed: int, count: int) -> int:
    """Print the configs of a seed that get a wrong reaction, and return their number."""
    failures = 0
    for config in fuzzed_configs(seed, count):
        if problem := judge(config):
            failures += 1
            print(f"{config}: {problem}", flush=True)
    print(f"seed {seed}: {count - failures} of {count} configs were judged right")
    return failures


if __name__ == "__main__":
    sys.exit(min(1, main(int(sys.argv[1]), int(sys.argv[2]))))
