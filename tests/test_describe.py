"""Descriptions of settings: on the command line, in `help` and in the pages of docs/."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from typing import Annotated, Any, Literal

import conformance
import generate_docs
import pytest
from conftest import Command
from helpers import BUILT_IN, each_algorithm, has_rollouts
from pydantic import BaseModel, Field

import rl_training
from rl_training.algorithms.spec import AlgorithmSpec, get_algorithm_spec
from rl_training.config import EarlyStopping, TrainConfig
from rl_training.config_descriptions import (
    Setting,
    algorithm_group,
    description_of,
    groups_of,
    run_group,
    symbols_of,
    type_text,
)
from rl_training.config_files import load_config
from rl_training.data.sections import SECTIONS, DataSection

ROOT = Path(__file__).parent.parent
MODELS: list[type[BaseModel]] = [
    TrainConfig,
    EarlyStopping,
    DataSection,
    *SECTIONS.values(),
    *(spec.hyperparameters_type for spec in BUILT_IN),
]


# Descriptions


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_every_key_has_a_docstring(model: type[BaseModel]) -> None:
    # Without a docstring, the description is the phrase of error messages.
    without = [
        name
        for name, field in model.model_fields.items()
        if description_of(model, name) in (None, "", field.description)
    ]
    assert without == []


@each_algorithm
def test_symbols_are_for_existing_settings(spec: AlgorithmSpec) -> None:
    assert symbols_of(spec.hyperparameters_type).keys() <= own_settings(spec.name).keys()


def own_settings(algorithm: str) -> dict[str, Setting]:
    return {each.key: each for each in algorithm_group(get_algorithm_spec(algorithm)).settings}


def test_symbols_are_those_of_the_paper() -> None:
    assert own_settings("sac")["tau"].symbol == "τ"
    assert own_settings("iql")["tau"].symbol == "α"
    assert own_settings("iql")["expectile"].symbol == "τ"
    assert own_settings("redq")["gradient_updates_per_step"].symbol == "G"
    assert own_settings("rlpd")["gradient_updates_per_step"].symbol == "G"
    assert own_settings("rlpd")["num_critics"].symbol == "E"
    assert own_settings("td3")["noise_clip"].symbol == "c"


class Example(BaseModel):
    positive: Annotated[float, Field(gt=0)]
    half_open: Annotated[float, Field(ge=0, lt=1)]
    closed: Annotated[int, Field(ge=1, le=4096)]
    huge: Annotated[int, Field(ge=1, le=10**9)]
    optional: Annotated[int, Field(ge=1)] | None
    switch: bool
    maybe: bool | None
    choice: Literal["a", "b", "c"]
    automatic: Annotated[float, Field(ge=0)] | Literal["auto"]
    sizes: tuple[Annotated[int, Field(ge=1)], ...] | None
    pair: tuple[Annotated[float, Field(ge=0)], Annotated[float, Field(ge=0)]]
    bounds: float | list[float] | None
    options: dict[str, Any]
    section: EarlyStopping | None
    folder: str = Field(pattern="^x", description="the path of a folder")


TYPES = {
    "positive": "number > 0",
    "half_open": "number >= 0 and < 1",
    "closed": "integer from 1 to 4,096",
    "huge": "integer >= 1",
    "optional": "integer >= 1 or null",
    "switch": "true or false",
    "maybe": "true, false or null",
    "choice": '"a", "b" or "c"',
    "automatic": '"auto" or number >= 0',
    "sizes": "list of integers >= 1 or null",
    "pair": "list of 2 numbers >= 0",
    "bounds": "number, list of numbers or null",
    "options": "mapping",
    "section": "mapping or null",
    "folder": "the path of a folder",
}


@pytest.mark.parametrize("name", TYPES)
def test_types_are_described_in_words(name: str) -> None:
    assert type_text(Example.model_fields[name]) == TYPES[name]


@each_algorithm
def test_a_config_accepts_the_defaults_as_they_are_shown(spec: AlgorithmSpec) -> None:
    own = [
        f"algo_kwargs.{each.key}={each.default_text}" for each in own_settings(spec.name).values()
    ]
    run = [
        f"{each.key}={each.default_text}"
        for each in run_group().settings
        if not each.required and each.key not in ("algo_kwargs", "dataset")
    ]
    source = {"algo": spec.name}
    assert load_config(source, [*run, *own]).to_mapping() == load_config(source).to_mapping()


def test_only_algorithms_that_read_data_have_dataset_keys() -> None:
    def keys(algorithm: str) -> set[str]:
        groups = groups_of(get_algorithm_spec(algorithm))
        return {each.key.partition(".")[0] for group in groups for each in group.settings}

    assert "dataset" in keys("iql")
    assert "dataset" not in keys("sac")


def test_help_shows_the_same_description_and_symbol() -> None:
    text = " ".join((inspect.getdoc(rl_training.SAC) or "").split())
    setting = own_settings("sac")["tau"]
    assert f"tau (float = 0.005): {setting.meaning}. Symbol: {setting.symbol}." in text


# config --describe


@each_algorithm
def test_all_settings_of_an_algorithm_fit_into_80_columns(
    spec: AlgorithmSpec, rl: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    done = rl("config", "--describe", spec.name)
    assert (done.code, done.err) == (0, "")
    assert max(len(line) for line in done.out.splitlines()) <= 80
    shown = {line.split()[0] for line in done.out.splitlines() if line[:1].isalpha()}
    assert {each.key for group in groups_of(spec) for each in group.settings} <= shown
    text = " ".join(done.out.split())
    assert all(f"{each.meaning}." in text for each in own_settings(spec.name).values())


def test_without_an_algorithm_the_settings_of_runs_are_described(rl: Command) -> None:
    done = rl("config", "--describe")
    assert done.code == 0
    for key in ("total_timesteps", "early_stopping.patience", "dataset.weight", "dataset.id"):
        assert re.search(rf"^{key} ", done.out, re.MULTILINE), key
    assert "rl-training config --describe sac" in done.out
    assert not re.search(r"^learning_rate ", done.out, re.MULTILINE)


def test_one_key_is_described(rl: Command) -> None:
    done = rl("config", "--describe", "cql", "algo_kwargs.cql_alpha")
    assert done.code == 0
    assert re.search(r"^cql_alpha +5\.0 +α +number >= 0$", done.out, re.MULTILINE)
    assert "gamma" not in done.out


def test_the_key_of_a_section_includes_the_keys_inside(rl: Command) -> None:
    done = rl("config", "--describe", "early_stopping")
    keys = re.findall(r"^(early_stopping\S*)", done.out, re.MULTILINE)
    assert keys[:3] == ["early_stopping", "early_stopping.metric", "early_stopping.mode"]


def test_values_of_a_config_are_shown_with_changed_defaults(rl: Command) -> None:
    done = rl("config", "--describe", "-c", "sac/pendulum", "--set", "algo_kwargs.tau=0.5")
    assert done.code == 0
    text = " ".join(done.out.split())
    assert re.search(r"\btau 0\.5 τ number > 0 and <= 1 .*?networks\. Default: 0\.005\.", text)
    assert re.search(r"\bgamma 0\.99 γ number from 0 to 1 Discount factor per step\. \w+", text)
    assert "env_id Pendulum-v1 " in text


def test_only_the_kinds_of_datasets_in_the_config_are_described(rl: Command) -> None:
    done = rl("config", "--describe", "-c", "rlpd/pendulum", "dataset")
    assert re.findall(r"^Dataset.*", done.out, re.MULTILINE) == [
        "Dataset",
        "Dataset of kind random",
    ]
    assert re.search(r"^dataset\.size +5_000 ", done.out, re.MULTILINE)


def test_the_descriptions_are_available_as_json(rl: Command) -> None:
    done = rl("config", "--describe", "-c", "sac/pendulum", "learning_rate", "--json")
    [row] = json.loads(done.out)
    assert row == {
        "group": "Soft Actor-Critic",
        "key": "learning_rate",
        "type": "number > 0",
        "default": 0.0003,
        "required": False,
        "symbol": "",
        "meaning": own_settings("sac")["learning_rate"].meaning,
        "value": 0.001,
    }


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--describe", "sacc"], ["'sacc'", "did you mean 'sac'"]),
        (["--describe", "sac", "taau"], ["'taau'", "did you mean 'tau'"]),
        (["--describe", "sac", "zzz"], ["'zzz'", "rl-training config --describe sac"]),
        (["--describe", "total_steps"], ["did you mean 'total_timesteps'"]),
        (["--describe", "expectile"], ["setting of iql", "config --describe iql expectile"]),
        (["--describe", "td3", "-c", "sac/pendulum"], ["td3", "the config is sac"]),
        (["sac"], ["sac", "--describe"]),
        (["-c", "sac/pendulum", "--json"], ["--json", "--describe"]),
        ([], ["--config", "--describe"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_wrong_arguments_are_explained(rl: Command, arguments: list[str], words: list[str]) -> None:
    done = rl("config", *arguments)
    assert (done.code, done.out) == (2, "")
    assert all(word in done.err for word in words), done.err


# Pages


def page_of(spec: AlgorithmSpec) -> str:
    return (ROOT / f"docs/algorithms/{spec.name}.md").read_text(encoding="utf-8")


def test_the_tables_of_the_pages_are_current(capsys: pytest.CaptureFixture[str]) -> None:
    assert (generate_docs.main(["--check"]), capsys.readouterr().err) == (0, "")


def test_an_edited_table_is_reported_and_restored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results = [generate_docs.CAMPAIGNS, *generate_docs.SAVING.values()]
    results += [generate_docs.REMOTE, generate_docs.SWEEPS]
    texts = {**generate_docs.pages(), **{path: generate_docs.read(path) for path in results}}
    monkeypatch.setattr(generate_docs, "ROOT", tmp_path)
    for page, text in texts.items():
        (tmp_path / page).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / page).write_text(text, encoding="utf-8")
    edited = Path("docs/algorithms/sac.md")
    (tmp_path / edited).write_text(texts[edited].replace("| `0.005` |", "| `0.5` |"))

    assert generate_docs.main(["--check"]) == 1
    assert capsys.readouterr().err.startswith(f"{edited}: stale")
    assert generate_docs.main([]) == 0
    assert (tmp_path / edited).read_text(encoding="utf-8") == texts[edited]

    (tmp_path / edited).write_text("# SAC\n")
    with pytest.raises(SystemExit, match=r"sac\.md: must contain once <!-- settings"):
        generate_docs.main([])


def campaign(**changes: int) -> dict[str, int]:
    return {"full": 10, "trials": 10, "held": 10, **changes}


COMPLETE = {f"R{number}": campaign() for number in range(1, 11)}


def test_a_complete_report_without_failures_lacks_nothing() -> None:
    assert generate_docs.shortcomings(COMPLETE) == []
    caption = generate_docs.campaigns_caption(COMPLETE)
    assert caption == "100 of 100 trials held; the full figure is 100 trials."


@pytest.mark.parametrize(
    ("report", "found"),
    [
        ({**COMPLETE, "R4": campaign(trials=6, held=6)}, "below the full figure: R4"),
        ({**COMPLETE, "R9": campaign(held=9)}, "trials that failed or were skipped: R9"),
        ({"R1": campaign()}, "not run: R2, R3, R4, R5, R6, R7, R8, R9, R10"),
    ],
)
def test_the_table_of_campaigns_says_what_a_report_lacks(
    report: dict[str, dict[str, int]], found: str
) -> None:
    assert generate_docs.shortcomings(report) == [found]
    assert found in generate_docs.campaigns_caption(report)


@each_algorithm
def test_a_page_explains_every_logged_metric(spec: AlgorithmSpec) -> None:
    learner = conformance.make(spec)
    batch = conformance.one_batch(spec)
    names: set[str] = set()
    for _ in range(learner.hyperparameters.policy_delay):
        names |= learner.update(batch).metrics.keys()
    if "mixed" in spec.regimes:
        names |= {"q_offline_mean", "q_online_mean", "q_gap"}
    if has_rollouts(spec):  # of complete rollouts, not of minibatches
        names |= {"explained_variance"}
    section = page_of(spec).partition("## Logged metrics")[2].partition("\n## ")[0]
    explained = {
        name
        for row in re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
        for name in re.findall(r"`(\w+)`", row)
    }
    assert explained - {"cql_alpha"} == names


@each_algorithm
def test_a_page_has_all_parts(spec: AlgorithmSpec) -> None:
    headings = re.findall(r"^## (.+)$", page_of(spec), re.MULTILINE)
    assert headings == [
        "When to use it",
        "Example",
        "Equations",
        "Logged metrics",
        "Measured result",
        "Packaged configs",
        "Settings",
        "Reference",
    ]


def code_blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def test_the_example_of_run_settings_is_valid(tmp_path: Path) -> None:
    [text] = code_blocks((ROOT / "docs/reference/config.md").read_text("utf-8"), "yaml")
    file = tmp_path / "config.yaml"
    file.write_text(text)
    assert load_config(file).algo == "sac"
