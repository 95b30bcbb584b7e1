"""Configs: validation, error messages, YAML files, packaged names and overrides."""

from __future__ import annotations

import copy
import datetime
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from chaos.configs import FuzzedConfig, fuzzed_configs, judge
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from rl_training.config import EarlyStopping, TrainConfig
from rl_training.config_files import (
    MAX_BYTES,
    MAX_DEPTH,
    MAX_NODES,
    dump_yaml,
    find_config,
    load_config,
    packaged_configs,
    parse_yaml,
    read_yaml,
)
from rl_training.errors import ConfigError

VALID: dict[str, Any] = {
    "algo": "sac",
    "env_id": "Pendulum-v1",
    "env_kwargs": {"g": 9.81},
    "seed": 3,
    "total_timesteps": 5000,
    "num_envs": 2,
    "compile": "off",
    "early_stopping": {"metric": "eval_return_mean", "patience": 3, "target_value": -150.0},
    "algo_kwargs": {"learning_rate": 1e-3, "hidden_sizes": [64, 64], "alpha": 0.1},
}


def changed(**changes: Any) -> dict[str, Any]:
    return {**VALID, **changes}


# Invalid values and their error messages


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (changed(sede=1), ["sede = 1", "unknown key", "did you mean 'seed'?"]),
        (changed(Seed=1), ["Seed = 1", "unknown key", "did you mean 'seed'?"]),
        (changed(zzz=1), ["zzz = 1", "unknown key", "allowed:", "total_timesteps"]),
        (
            changed(algo_kwargs={"learnin_rate": 1}),
            ["algo_kwargs.learnin_rate = 1", "did you mean 'learning_rate'?"],
        ),
        (
            changed(early_stopping={"patiens": 3}),
            ["early_stopping.patiens = 3", "did you mean 'patience'?"],
        ),
        (changed(algo="sca"), ["algo = 'sca'", "did you mean 'sac'?", "known: "]),
        (changed(algo=3), ["algo = 3", "a string"]),
        ({"env_id": "Pendulum-v1"}, ["algo", "required"]),
        (changed(seed="one"), ["seed = 'one'", "an integer"]),
        (changed(seed=True), ["seed = True", "an integer"]),
        (changed(seed=1.5), ["seed = 1.5", "an integer"]),
        (changed(seed=-1), ["seed = -1", "greater than or equal to 0"]),
        (changed(seed=2**32), ["seed = 4294967296", "less than 4294967296"]),
        (changed(seeds=[]), ["seeds = []", "a non-empty list"]),
        (changed(seeds=[0, "x"]), ["seeds.1 = 'x'", "an integer"]),
        (changed(total_timesteps=0), ["total_timesteps = 0", "greater than or equal to 1"]),
        (changed(total_timesteps=None), ["total_timesteps = None", "an integer"]),
        (changed(num_envs=0), ["num_envs = 0", "greater than or equal to 1"]),
        (changed(eval_interval=-1), ["eval_interval = -1", "greater than or equal to 0"]),
        (changed(compile="onn"), ["compile = 'onn'", "auto, on, off", "did you mean 'on'?"]),
        (changed(device="gpu"), ["device = 'gpu'", "auto, cpu, cuda or cuda:N"]),
        (changed(run_name="../escape"), ["run_name = '../escape'", "a folder name"]),
        (changed(run_name=""), ["run_name = ''", "a folder name"]),
        (
            changed(normalize_observations="yes please"),
            ["normalize_observations = 'yes please'", "true or false"],
        ),
        (changed(env_kwargs=[1]), ["env_kwargs = [1]", "a mapping"]),
        (changed(algo_kwargs=[1]), ["algo_kwargs = [1]", "a mapping"]),
        (changed(early_stopping=5), ["early_stopping = 5", "a mapping"]),
        (changed(early_stopping={"mode": "maximum"}), ["early_stopping.mode", "max, min"]),
        (changed(early_stopping={"patience": 0}), ["early_stopping.patience = 0"]),
        (
            changed(algo_kwargs={"tau": 2}),
            ["algo_kwargs.tau = 2", "less than or equal to 1"],
        ),
        (
            changed(algo_kwargs={"learning_rate": 0}),
            ["algo_kwargs.learning_rate = 0", "greater than 0"],
        ),
        (
            changed(algo_kwargs={"learning_rate": float("nan")}),
            ["algo_kwargs.learning_rate = nan", "a finite number"],
        ),
        (
            changed(algo_kwargs={"activation": "reul"}),
            ["algo_kwargs.activation = 'reul'", "relu, tanh", "did you mean 'relu'?"],
        ),
        (changed(algo_kwargs={"hidden_sizes": [64, 0]}), ["algo_kwargs.hidden_sizes.1 = 0"]),
        (changed(algo_kwargs={"hidden_sizes": "big"}), ["algo_kwargs.hidden_sizes", "a list"]),
        (changed(algo_kwargs={"alpha": "aut"}), ["algo_kwargs.alpha = 'aut'", "auto"]),
        (changed(algo_kwargs={"policy_delay": 0}), ["algo_kwargs.policy_delay = 0"]),
        (changed(regime="offline"), ["regime = 'offline'", "sac", "online"]),
        (changed(dataset={"kind": "random", "size": 10}), ["dataset", "sac", "online"]),
        (changed(seeds=[0, 1, 0]), ["seeds", "0"]),
        (changed(early_stopping={"metric": "eval_reward"}), ["early_stopping.metric"]),
    ],
)
def test_an_error_names_the_key_the_value_and_what_is_allowed(
    values: dict[str, Any], expected: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(values)
    message = str(caught.value)
    assert [part for part in expected if part not in message] == []


def test_all_errors_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(changed(seed="x", num_envs=0, sede=1))
    lines = str(caught.value).splitlines()
    assert [line.split(" = ")[0] for line in lines] == ["seed", "num_envs", "sede"]


def test_a_long_value_is_shortened_in_the_message() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(changed(seed="x" * 10_000))
    assert len(str(caught.value)) < 200


def test_a_key_can_have_the_name_of_a_constructor_parameter() -> None:
    with pytest.raises(ConfigError, match="self = 1: unknown key"):
        load_config(changed(self=1))


@pytest.mark.parametrize("key", [1, None, True, 2.5, ("a", "b")])
def test_keys_that_are_not_names_are_refused(key: Any) -> None:
    with pytest.raises(ConfigError, match="keys must be strings"):
        load_config({**VALID, key: 1})
    with pytest.raises(ConfigError, match="algo_kwargs"):
        load_config(changed(algo_kwargs={key: 1}))


def test_a_config_is_immutable() -> None:
    config = TrainConfig(**VALID)
    with pytest.raises(ValueError, match="frozen"):
        config.seed = 4
    with pytest.raises(ValueError, match="frozen"):
        config.algo_kwargs.gamma = 0.5


def test_changes_are_checked_like_a_new_config() -> None:
    config = TrainConfig(**VALID)
    assert config.with_changes(seed=9).seed == 9
    assert config.seed == 3
    with pytest.raises(ConfigError, match="seed = -9"):
        config.with_changes(seed=-9)


@pytest.mark.parametrize(
    "value",
    [
        float("nan"),
        float("inf"),
        b"\xff\x00",
        {1, 2},
        object(),
        datetime.date(2026, 1, 1),
        {"deeper": [float("nan")]},
    ],
    ids=lambda value: type(value).__name__,
)
def test_environment_arguments_that_cannot_be_saved_are_refused(value: Any) -> None:
    """Rejected by the config, not only when the first checkpoint is written."""
    with pytest.raises(ConfigError, match="env_kwargs"):
        load_config(changed(env_kwargs={"thing": value}))


# Round trips


def test_a_config_survives_a_round_trip_through_a_mapping_and_yaml() -> None:
    config = TrainConfig(**VALID)
    assert TrainConfig(**config.to_mapping()) == config
    assert load_config(parse_yaml(dump_yaml(config.to_mapping()), "dumped")) == config


@pytest.mark.parametrize("text", ["1e5", "1E-3", "on", "null", "12", "0x1f", "~", "2026-01-01", ""])
def test_strings_that_look_like_other_types_stay_strings(text: str) -> None:
    config = load_config(changed(env_kwargs={"mode": text}))
    again = load_config(parse_yaml(dump_yaml(config.to_mapping()), "dumped"))
    assert again.env_kwargs == {"mode": text}


@pytest.mark.parametrize("name", sorted(packaged_configs()))
def test_packaged_configs_survive_the_round_trip(name: str) -> None:
    config = load_config(name)
    assert TrainConfig(**config.to_mapping()) == config


# YAML


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(textwrap.dedent(text))
    return path


@pytest.mark.parametrize(
    ("spelling", "meaning"),
    [
        ("on", "on"),
        ("off", "off"),
        ("true", "on"),
        ("false", "off"),
        ("yes", "on"),
        ("'off'", "off"),
        ("auto", "auto"),
    ],
)
def test_compile_accepts_every_boolean_spelling(
    tmp_path: Path, spelling: str, meaning: str
) -> None:
    config = load_config(written(tmp_path, f"algo: sac\ncompile: {spelling}\n"))
    assert config.compile == meaning


@pytest.mark.parametrize(
    ("spelling", "value"),
    [
        ("1e-3", 0.001),
        ("1E-3", 0.001),
        ("1.e-3", 0.001),
        ("3e-4", 0.0003),
        ("1.5e-2", 0.015),
        ("+1e-3", 0.001),
        ("0.001", 0.001),
        (".001", 0.001),
        ("1", 1.0),
    ],
)
def test_all_number_formats_are_read_as_numbers(
    tmp_path: Path, spelling: str, value: float
) -> None:
    config = load_config(
        written(tmp_path, f"algo: sac\nalgo_kwargs: {{learning_rate: {spelling}}}\n")
    )
    assert config.algo_kwargs.learning_rate == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize("spelling", ["1e6", "1E6", "1e+6", "1000000", "1_000_000"])
def test_step_counts_may_be_written_with_an_exponent(tmp_path: Path, spelling: str) -> None:
    config = load_config(written(tmp_path, f"algo: sac\ntotal_timesteps: {spelling}\n"))
    assert config.total_timesteps == 1_000_000
    assert isinstance(config.total_timesteps, int)


@pytest.mark.parametrize("spelling", ["1e-6", "1e400", "1.5"])
def test_values_that_are_not_counts_are_refused(tmp_path: Path, spelling: str) -> None:
    with pytest.raises(ConfigError, match="total_timesteps = "):
        load_config(written(tmp_path, f"algo: sac\ntotal_timesteps: {spelling}\n"))


def test_a_number_too_large_to_print_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="seed"):
        load_config(written(tmp_path, f"algo: sac\nseed: 0x{'f' * 5000}\n"))


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("algo: sac\nseed: 1\nseed: 2\n", "line 3"),
        ("algo: sac\nalgo_kwargs:\n  tau: 0.1\n  tau: 0.2\n", "line 4"),
    ],
)
def test_a_duplicate_key_is_refused(tmp_path: Path, text: str, line: str) -> None:
    with pytest.raises(ConfigError, match=f"{line}.*given twice"):
        load_config(written(tmp_path, text))


def test_an_anchor_can_be_reused(tmp_path: Path) -> None:
    text = """
        algo: sac
        algo_kwargs:
          actor_hidden_sizes: &sizes [32, 32]
          critic_hidden_sizes: *sizes
    """
    config = load_config(written(tmp_path, text))
    assert config.to_mapping()["algo_kwargs"]["critic_hidden_sizes"] == [32, 32]


@pytest.mark.parametrize(
    "text",
    [
        "!!python/object/apply:os.system ['touch executed']",
        "algo: !!python/name:os.system",
        "algo: !!python/module:os",
        "env_kwargs: !!python/object/new:os.system ['touch executed']",
        "algo: !unknown sac",
    ],
)
def test_tags_that_could_execute_code_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="not valid YAML"):
        load_config(written(tmp_path, text))
    assert not (tmp_path / "executed").exists()


def _levels(number: int, width: int, kind: str) -> str:
    """Return YAML aliases that expand to `width ** number` values."""
    if kind == "merges":
        first, level = "a0: &a0 {x0: 1}\n", "a{0}: &a{0} {{<<: [{1}]}}\n"
    else:
        first, level = "a0: &a0 [x]\n", "a{0}: &a{0} [{1}]\n"
    levels = [level.format(i, ", ".join([f"*a{i - 1}"] * width)) for i in range(1, number + 1)]
    return first + "".join(levels)


def test_aliases_count_with_their_expanded_size(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"more than {MAX_NODES:,} values"):
        read_yaml(written(tmp_path, _levels(10, 10, "lists")))


def test_expansions_within_the_alias_limit_are_refused_in_little_memory(tmp_path: Path) -> None:
    """Printing, copying or storing 2 ** 24 values would need gigabytes."""
    if not Path("/proc/self/statm").exists():
        pytest.skip("needs /proc to limit a process's memory")
    for kind in ("lists", "merges"):
        nested = textwrap.indent(_levels(24, 2, kind), "  ")
        for key in ("surprise", "env_kwargs", "algo_kwargs", "seed", "wrappers"):
            bomb = f"algo: sac\n{key}:\n{nested}  last: *a24\n"
            (tmp_path / f"{kind}-{key}.yaml").write_text(bomb)
        bomb = f"algo: sac\nwrappers:\n- wrapper: a:B\n  kwargs:\n{textwrap.indent(nested, '  ')}"
        (tmp_path / f"{kind}-wrapper.yaml").write_text(f"{bomb}    last: *a24\n")
    script = """
        import pathlib, resource, sys
        from rl_training.config_files import load_config
        from rl_training.errors import ConfigError

        load_config("sac/pendulum")  # imports PyTorch before memory is limited
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 2**26, used + 2**26))
        for path in sorted(pathlib.Path(sys.argv[1]).glob("*.yaml")):
            try:
                load_config(path).to_mapping()
            except ConfigError as error:
                pass
            except BaseException as error:
                print(path.stem, type(error).__name__)
            else:
                print(path.stem, "was accepted")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.stdout, done.returncode) == ("", 0), done.stderr[-500:]


def test_a_structure_that_contains_itself_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        load_config(written(tmp_path, "algo: sac\nenv_kwargs: &a {again: *a}\n"))


def test_deep_nesting_is_refused(tmp_path: Path) -> None:
    assert parse_yaml("[" * (MAX_DEPTH - 1) + "]" * (MAX_DEPTH - 1), "text")
    for depth in (MAX_DEPTH + 1, 100_000):
        with pytest.raises(ConfigError, match="deep"):
            read_yaml(written(tmp_path, "algo: " + "[" * depth + "]" * depth))


def test_a_file_that_is_too_large_is_refused_without_reading_it(tmp_path: Path) -> None:
    path = tmp_path / "large.yaml"
    path.write_text("# " + "x" * MAX_BYTES)
    with pytest.raises(ConfigError, match="larger than"):
        load_config(path)


@pytest.mark.parametrize(
    "data", [b"", b"just text", b"- a\n- b\n", b"\xff\xfe\x00", b"algo: [sac", b"\x80\x04K\x01."]
)
def test_a_file_that_is_not_a_config_is_refused_by_name(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "strange.yaml"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=r"strange\.yaml"):
        load_config(path)


def test_a_syntax_error_is_reported_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.yaml, line 3: not valid YAML"):
        load_config(written(tmp_path, "algo: sac\nseed: 1\nenv_id: a: b\n"))


# Names


def test_packaged_configs_are_found_with_and_without_suffix() -> None:
    assert load_config("sac/pendulum").env_id == "Pendulum-v1"
    assert load_config("sac/pendulum.yaml") == load_config("sac/pendulum")
    assert load_config(find_config("sac/pendulum")) == load_config("sac/pendulum")


def test_the_error_for_a_misspelt_name_suggests_the_right_one() -> None:
    with pytest.raises(ConfigError, match=r"config 'sac/pendulm'.*did you mean 'sac/pendulum'\?"):
        load_config("sac/pendulm")


def test_the_error_for_an_unknown_name_lists_all_names() -> None:
    with pytest.raises(ConfigError, match=r"config 'qqqqqq'.*packaged: .*sac/pendulum"):
        load_config("qqqqqq")


def test_a_file_takes_precedence_over_a_packaged_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sac").mkdir()
    (tmp_path / "sac/pendulum").write_text("algo: sac\nseed: 77\n")
    assert load_config("sac/pendulum").seed == 77


def test_a_packaged_name_cannot_refer_to_files_outside_the_package() -> None:
    with pytest.raises(ConfigError, match="no such file"):
        load_config("../configs/sac/pendulum")


# Overrides


def test_a_dotted_key_changes_one_entry() -> None:
    config = load_config(VALID, ["algo_kwargs.alpha=0.5", "early_stopping.patience=9"])
    assert config.algo_kwargs.model_dump()["alpha"] == 0.5
    assert config.algo_kwargs.learning_rate == 1e-3
    assert config.early_stopping == EarlyStopping(patience=9, target_value=-150.0)


def test_a_mapping_replaces_its_section() -> None:
    config = load_config(VALID, ["algo_kwargs={alpha: 0.5}", "early_stopping={patience: 9}"])
    assert config.algo_kwargs.model_dump()["alpha"] == 0.5
    assert config.algo_kwargs.learning_rate == 3e-4
    assert config.early_stopping == EarlyStopping(patience=9)


def test_a_dotted_key_creates_a_missing_section() -> None:
    values = {"algo": "sac", "early_stopping": None}
    config = load_config(values, ["early_stopping.patience=4", "env_kwargs.g=5"])
    assert config.early_stopping == EarlyStopping(patience=4)
    assert config.env_kwargs == {"g": 5}


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("total_timesteps=1e5", "total_timesteps", 100_000),
        ("compile=on", "compile", "on"),
        ("normalize_observations=yes", "normalize_observations", True),
        ("seeds=[0, 1]", "seeds", [0, 1]),
        ("early_stopping=null", "early_stopping", None),
        ("run_name='a=b'", "run_name", "a=b"),
        ("run_name=off", "run_name", "off"),
        ("run_name= 007 ", "run_name", "007"),
        ("run_name=2026-01-31", "run_name", "2026-01-31"),
        ("run_name=null", "run_name", None),
        ("output_dir=1", "output_dir", "1"),
        (" seed =4", "seed", 4),
    ],
)
def test_the_value_of_an_override_is_parsed_as_yaml(override: str, key: str, value: Any) -> None:
    assert getattr(load_config(VALID, [override]), key) == value


@pytest.mark.parametrize(
    "override", ["learning_rate=0.5", "algo_kwargs.learning_rate=0.5", " learning_rate =0.5"]
)
def test_a_hyperparameter_can_be_overridden_by_its_own_name(override: str) -> None:
    assert load_config(VALID, [override]) == load_config(VALID, ["algo_kwargs.learning_rate=0.5"])
    config = load_config(VALID)
    assert load_config(config, [override]).algo_kwargs.learning_rate == 0.5


def test_a_hyperparameter_is_looked_up_in_the_overridden_algorithm() -> None:
    config = load_config({"algo": "sac"}, ["expectile=0.8", "algo=iql"])
    assert config.algo_kwargs.model_dump()["expectile"] == 0.8
    with pytest.raises(ConfigError, match=r"expectile = 0\.8: unknown key"):
        load_config({"algo": "sac"}, ["expectile=0.8"])


def test_an_unknown_override_is_compared_with_all_keys() -> None:
    with pytest.raises(ConfigError, match=r"lerning_rate = 1: unknown key; .*'learning_rate'"):
        load_config(VALID, ["lerning_rate=1"])
    with pytest.raises(ConfigError, match=r"total_timestep = 1: unknown key; .*'total_timesteps'"):
        load_config(VALID, ["total_timestep=1"])
    with pytest.raises(ConfigError, match=r"clip_range = 1: unknown key; it is a setting of ppo$"):
        load_config(VALID, ["clip_range=1"])
    with pytest.raises(ConfigError, match=r"zzz = 1: unknown key; allowed: .*env_id.*tau"):
        load_config(VALID, ["zzz=1"])


def test_a_hyperparameter_outside_algo_kwargs_is_explained(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"learning_rate: .*hyper-parameter of sac.*algo_kwargs"):
        load_config(written(tmp_path, "algo: sac\nlearning_rate: 1e-3\n"))


def test_later_overrides_win() -> None:
    assert load_config(VALID, ["seed=1", "seed=2"], seed=7).seed == 2


def test_overrides_do_not_change_the_callers_mapping() -> None:
    values = copy.deepcopy(VALID)
    load_config(values, ["algo_kwargs.alpha=0.9", "env_kwargs.g=1", "seed=4"])
    assert values == VALID


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("seed", "key=value"),
        ("=3", "key=value"),
        ("seed.x=3", "'seed' is not a section"),
        ("algo_kwargs.tua=0.1", "did you mean 'tau'"),
        ("seed=[", "--set seed"),
        ("seed=", "seed = None"),
        ("seed=!!python/name:os.system", "--set seed"),
        ("algo_kwargs=3", "algo_kwargs = 3"),
        ("..=1", "key=value"),
    ],
)
def test_the_error_for_an_invalid_override_names_it(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(VALID, [override])
    assert message in str(caught.value)


# Random configs are either valid or rejected with the name of the key

PATHS = [
    (),
    ("early_stopping",),
    ("algo_kwargs",),
    *((key,) for key in TrainConfig.model_fields),
    *(("early_stopping", key) for key in EarlyStopping.model_fields),
    *(("algo_kwargs", key) for key in type(TrainConfig(algo="sac").algo_kwargs).model_fields),
    ("env_kwargs", "g"),
]
SPECIAL_TEXT = st.sampled_from(["on", "1e5", "auto", "sac", "null", "../x", "a\0b", "nan", "é\n"])
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([0, -1, 2**31, 2**63, 2**64, 10**30, 10**400]),
    st.floats(),
    SPECIAL_TEXT,
    st.text(max_size=8),
)
KEYS = st.one_of(SPECIAL_TEXT, st.text(max_size=8), st.sampled_from(["self", "cls", "values"]))
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=6,
)
REPLACED = st.tuples(st.sampled_from(PATHS[1:]), VALUES)
ADDED = st.tuples(st.sampled_from([(), ("early_stopping",), ("algo_kwargs",)]), KEYS, VALUES).map(
    lambda added: ((*added[0], added[1]), added[2])
)


def _put(values: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    *sections, last = path
    for section in sections:
        inner = values.get(section)
        values[section] = dict(inner) if isinstance(inner, dict) else {}
        values = values[section]
    values[last] = value


@settings(
    max_examples=500,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(st.lists(st.one_of(REPLACED, ADDED), min_size=1, max_size=3))
@example([(("self",), 1)])
@example([(("env_kwargs",), {"mode": "1e5"})])
@example([(("env_kwargs",), {"mode": float("nan")})])
def test_any_mutation_is_valid_or_refused_by_name(
    mutations: list[tuple[tuple[str, ...], Any]],
) -> None:
    values = copy.deepcopy(VALID)
    for path, value in mutations:
        _put(values, path, value)
    try:
        config = load_config(values)
    except ConfigError as error:
        message = str(error)
        assert message
        # Characters that cannot be printed are escaped.
        named = [part for path, _ in mutations for part in (path[-1], path[0])]
        assert any(key in message or repr(key) in message for key in named), message
    else:
        assert TrainConfig(**config.to_mapping()) == config
        assert load_config(parse_yaml(dump_yaml(config.to_mapping()), "dumped")) == config


# Hostile configs


def test_fuzzed_configs_are_accepted_or_refused_by_name() -> None:
    problems = [(str(config), judge(config)) for config in fuzzed_configs(seed=0, count=200)]
    assert [found for found in problems if found[1]] == []


def test_the_judge_finds_a_message_that_does_not_name_the_key() -> None:
    assert judge(FuzzedConfig({"algo": "sac", "sed": 1}, keys=("other",))) is not None
    assert judge(FuzzedConfig({"algo": "sac", "sed": 1}, keys=("sed",))) is None


@pytest.mark.parametrize("key", ["", "a\nb", "\x1b[31m", "\u202e", "k" * 5_000])
def test_unusual_keys_are_quoted_in_one_short_line(key: str) -> None:
    for config in ({**VALID, key: 1}, {**VALID, "algo_kwargs": {key: 1}}):
        with pytest.raises(ConfigError) as caught:
            load_config(config)
        message = str(caught.value)
        assert repr(key)[:20] in message
        assert message.isprintable()
        assert len(message) < 1_500


def test_a_long_list_of_errors_is_cut() -> None:
    with pytest.raises(ConfigError, match=r"and \d+ more errors$") as caught:
        load_config({**VALID, **{f"unknown_{index}": 1 for index in range(5_000)}})
    assert len(str(caught.value)) < 2_000


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"seeds": list(range(100_000))}, "seeds = .*at most 10,000"),
        ({"seeds": list(range(1_000)), "num_envs": 4096}, "num_envs = 4096: 1,000 seeds"),
        ({"algo_kwargs": {"hidden_sizes": [1] * 1_000}}, "hidden_sizes = .*at most 256"),
        ({"output_dir": "x" * 1_000_000}, "output_dir = .*shorter"),
        ({"log_interval": 10**5000}, "log_interval"),
        ({"env_kwargs": {"a": "\ud800"}}, "env_kwargs: a"),
    ],
)
def test_values_of_absurd_size_are_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named) as caught:
        load_config({**VALID, **changes})
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("value", ["!!bool x", "!!timestamp x", "!!int x"])
def test_a_value_that_does_not_match_its_tag_is_refused(tmp_path: Path, value: str) -> None:
    (tmp_path / "a.yaml").write_text(f"algo: sac\nseed: {value}\n")
    with pytest.raises(ConfigError, match="not valid YAML"):
        load_config(tmp_path / "a.yaml")


def test_a_pipe_is_not_a_config(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    with pytest.raises(ConfigError, match="not a regular file"):
        load_config(tmp_path / "pipe.yaml")
