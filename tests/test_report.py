"""The report page: its numbers, its size, and what strangers' runs can do to it."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import html.parser
import json
import os
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from made_up_runs import write_run
from typer.testing import CliRunner

import rl_training
from rl_training.cli import app
from rl_training.errors import UserError
from rl_training.experiment.published import published_curves
from rl_training.report import page
from rl_training.report.data import assemble, page_data
from rl_training.report.numbers import chosen
from rl_training.report.page import beside, embedded, render, write_report
from rl_training.report.runs import read_run

HOSTILE = [
    "</script><script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "<!--<script>",
    "%%SCRIPT%%",
    "__proto__",
    "javascript:alert(1)",
    "a\u2028b & c\u2029",
]


def evaluations(run: Path) -> list[dict[str, float]]:
    """The rows of a run's file that are evaluations, read without this package."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "eval/mean_reward" in row]


def two_methods(folder: Path, **settings: Any) -> list[Path]:
    """Two algorithms in two tasks, with three seeds each."""
    return [
        write_run(
            folder / f"{algorithm}-{environment}-{seed}",
            **{
                "algorithm": algorithm,
                "environment": environment,
                "seed": seed,
                "level": level,
                "steps": 200_000,
                **settings,
            },
        )
        for environment in ("Hopper-v5", "Walker2d-v5")
        for algorithm, level in (("sac", 2000.0), ("td3", 1000.0))
        for seed in range(3)
    ]


def page_of(paths: list[Path] | Path, tmp_path: Path, **options: Any) -> str:
    given = [paths] if isinstance(paths, Path) else paths
    return write_report(given, tmp_path / "page" / "report.html", **options).read_text("utf-8")


class _Elements(html.parser.HTMLParser):
    """Collects the elements of a page, with their attributes and the text of scripts."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self._is_open = False

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attributes)))
        self.texts.append("")
        self._is_open = True

    def handle_endtag(self, tag: str) -> None:
        self._is_open = False

    def handle_data(self, data: str) -> None:
        if self._is_open:
            self.texts[-1] += data


def elements(text: str) -> list[tuple[str, dict[str, str | None], str]]:
    parser = _Elements()
    parser.feed(text)
    return [(*found, text) for found, text in zip(parser.found, parser.texts, strict=True)]


def data_in(text: str) -> dict[str, Any]:
    [found] = [found for _, attributes, found in elements(text) if attributes.get("id") == "data"]
    return json.loads(found)


def test_every_score_is_the_last_evaluation_of_a_run(tmp_path: Path) -> None:
    runs = {run.name: run for run in two_methods(tmp_path / "runs")}
    data = data_in(page_of(tmp_path / "runs", tmp_path))
    assert len(data["groups"]) == 4
    for group in data["groups"]:
        members = [data["runs"][place] for place in group["runs"]]
        last = [evaluations(runs[member["name"]])[-1] for member in members]
        assert [each["value"] for each in group["score"]["values"]] == [
            row["eval/mean_reward"] for row in last
        ]
        assert group["score"]["step"] == last[0]["step"]
        assert [member["last"]["value"] for member in members] == [
            row["eval/mean_reward"] for row in last
        ]


def test_scores_are_those_of_compare(tmp_path: Path) -> None:
    two_methods(tmp_path / "runs")
    data = data_in(page_of(tmp_path / "runs", tmp_path))
    rows = {(row.task, row.label): row for row in rl_training.compare(tmp_path / "runs").rows}
    for group in data["groups"]:
        task, label = data["tasks"][group["task"]]["name"], data["methods"][group["method"]]
        row, shown = rows[task, label["label"]], group["score"]
        assert [shown[name] for name in ("iqm", "low", "high", "mean", "median", "seeds")] == [
            row.iqm, row.low, row.high, row.mean, row.median, row.seeds
        ]  # fmt: skip
        assert shown["low"] < shown["iqm"] < shown["high"]


def test_the_points_of_a_curve_are_evaluations_of_the_run(tmp_path: Path) -> None:
    run = write_run(tmp_path / "runs" / "one", rows=2_000, evaluations=2_000)
    data = data_in(page_of(run, tmp_path))
    [shown] = data["runs"]
    by_step = {row["step"]: row for row in evaluations(run)}
    steps = data["axes"][shown["x"]]
    assert len(steps) == 500
    assert (steps[0], steps[-1]) == (min(by_step), max(by_step))
    for step, value, seconds in zip(steps, shown["returns"], shown["seconds"], strict=True):
        assert value == pytest.approx(by_step[step]["eval/mean_reward"], rel=1e-4)
        assert seconds == pytest.approx(by_step[step]["time/wall_seconds"], rel=1e-4)


def test_health_and_phases_are_the_rows_values(tmp_path: Path) -> None:
    run = write_run(tmp_path / "runs" / "one")
    [group] = data_in(page_of(run, tmp_path))["groups"]
    rows = evaluations(run)
    for metric in group["health"]["metrics"]:
        last = rows[-1][f"health/{metric['name']}"]
        assert metric["center"][-1] == pytest.approx(last, rel=1e-4)
    assert len(group["health"]["metrics"]) == 11
    seconds = dict(group["phases"]["seconds"])
    assert group["phases"]["total"] == pytest.approx(1_000_000 / 500)
    assert seconds["update"] == pytest.approx(0.45 * 2_000)
    assert sum(seconds.values()) == pytest.approx(2_000)


def test_published_values_stand_beside_ours_at_the_same_step(tmp_path: Path) -> None:
    two_methods(tmp_path / "runs")
    data = data_in(page_of(tmp_path / "runs", tmp_path))
    hopper = [
        each for each in data["published"] if data["tasks"][each["task"]]["name"] == "Hopper-v5"
    ]
    for shown, curve in zip(hopper, published_curves("Hopper-v5"), strict=True):
        assert shown["mean"] == curve.mean.tolist()
        place = curve.steps.tolist().index(200_000)
        assert shown["final"] == {
            "step": 200_000, "mean": curve.mean[place], "deviation": curve.deviation[place]
        }  # fmt: skip
        assert "v4" in shown["note"]
    assert data_in(page_of(tmp_path / "runs", tmp_path, published=False))["published"] == []


def test_a_short_run_has_no_published_value_beside_it(tmp_path: Path) -> None:
    run = write_run(tmp_path / "runs" / "one", steps=50_000)
    published = data_in(page_of(run, tmp_path))["published"]
    assert published
    assert {each["final"] for each in published} == {None}


@pytest.mark.parametrize(
    "settings", [{"algorithm": "iql"}, {"algorithm": "cql", "regime": "offline"}]
)
def test_offline_runs_have_no_published_values_beside_them(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    write_run(tmp_path / "runs" / "offline", **settings)
    assert page_data([tmp_path / "runs"])["published"] == []
    write_run(tmp_path / "runs" / "online", steps=100_000)
    data = page_data([tmp_path / "runs"])
    assert {each["final"]["step"] for each in data["published"]} == {100_000}


@pytest.mark.parametrize(
    ("algorithms", "unit"),
    [
        (["sac"], "environment steps"),
        (["iql"], "updates"),
        (["sac", "iql"], "environment steps or updates"),
    ],
)
def test_the_axis_says_what_a_step_is(algorithms: list[str], unit: str, tmp_path: Path) -> None:
    for algorithm in algorithms:
        write_run(tmp_path / algorithm, algorithm=algorithm)
    (task,) = page_data([tmp_path])["tasks"]
    assert task == {"name": "Hopper-v5", "unit": unit}


def test_offline_and_compiled_runs_show_where_time_goes(tmp_path: Path) -> None:
    run = write_run(tmp_path / "runs" / "one")
    row = {"time/update_seconds": 5.0, "time/compilation_seconds": 3.0, "time/health_seconds": 1.0}
    row |= {"step": 9, "time/time_elapsed": 10.0, "time/wall_seconds": 10.0}
    (run / "metrics.jsonl").write_text(f"{json.dumps(row)}\n")
    [group] = page_data([run])["groups"]
    seconds = {name: value for name, value in group["phases"]["seconds"] if value}
    assert seconds == {"update": 5, "compilation": 3, "health": 1, "other": 1}


def test_seeds_of_very_different_speed_are_drawn_over_steps(tmp_path: Path) -> None:
    for seed, second in enumerate((1_000, 1)):
        run = write_run(tmp_path / "runs" / str(seed), seed=seed, steps=100, rows=2, evaluations=2)
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        for row in rows:
            row["time/wall_seconds"] = second + row["step"] / 500
        (run / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    data = data_in(page_of(tmp_path / "runs", tmp_path))
    [group] = data["groups"]
    assert (group["curve"]["seeds"], group["time"]) == (2, None)
    assert all(run["seconds"] for run in data["runs"])


def test_only_tasks_with_several_seeds_count_in_comparisons_over_tasks(tmp_path: Path) -> None:
    two_methods(tmp_path / "runs")
    for algorithm in ("sac", "td3"):
        write_run(tmp_path / "runs" / algorithm, algorithm=algorithm, environment="Ant-v5")
    [overall] = [e for e in page_data([tmp_path / "runs"])["improvement"] if e["task"] is None]
    assert overall["tasks"] == 2


def test_several_methods_are_compared(tmp_path: Path) -> None:
    two_methods(tmp_path / "runs")
    data = data_in(page_of(tmp_path / "runs", tmp_path))
    methods = [method["label"] for method in data["methods"]]
    assert methods == ["sac", "td3"]
    assert [each["task"] for each in data["improvement"]] == [None, 0, 1]
    for table in data["improvement"]:
        chances = {(first, second): rest for first, second, *rest in table["pairs"]}
        assert chances[0, 1] == [1.0, 1.0, 1.0]  # every seed of sac is better
        assert chances[1, 0] == [0.0, 0.0, 0.0]
    assert [each["task"] for each in data["profiles"]] == [None, 0, 1]
    for table in data["profiles"]:
        for curve in table["curves"]:
            assert (curve["share"][0], curve["share"][-1]) == (1.0, 0.0)
    assert [row["method"] for row in data["overall"]["rows"]] == [0, 1]
    for row in data["overall"]["rows"]:
        for name in ("iqm", "mean", "median", "optimality_gap"):
            value, low, high = row[name]  # as the page reads them
            assert low <= value <= high


def test_one_method_is_not_compared(tmp_path: Path) -> None:
    data = data_in(page_of(write_run(tmp_path / "runs" / "one"), tmp_path))
    assert (data["improvement"], data["profiles"], data["overall"]) == ([], [], None)
    [group] = data["groups"]
    assert group["score"]["low"] is None  # a single seed has no interval


def test_runs_without_times_are_drawn_over_steps(tmp_path: Path) -> None:
    for seed in range(2):
        run = write_run(tmp_path / "runs" / f"old-{seed}", seed=seed)
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        kept = [
            {key: value for key, value in row.items() if not key.startswith(("time/", "health/"))}
            for row in rows
        ]
        (run / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in kept))
    data = data_in(page_of(tmp_path / "runs", tmp_path))
    [group] = data["groups"]
    assert group["curve"]["center"]
    assert (group["time"], group["health"], group["phases"]) == (None, None, None)
    assert {run["seconds"] for run in data["runs"]} == {None}


def test_runs_without_evaluations_or_with_damage_are_named(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "good")
    write_run(tmp_path / "runs" / "young", seed=1, evaluations=0)
    broken = write_run(tmp_path / "runs" / "broken", seed=2)
    (broken / "config.yaml").write_text("algo: [")
    (broken / "checkpoints" / "step_001000000" / "state.json").write_text("{")
    (broken / "metadata.json").write_text("[1")
    data = data_in(page_of(tmp_path / "runs", tmp_path))
    assert {run["name"]: run["state"] for run in data["runs"]}["broken"] == "unreadable"
    notes = "\n".join(data["notes"])
    assert "young: has no evaluations" in notes
    assert "broken: cannot be read" in notes
    [group] = data["groups"]
    assert group["score"]["seeds"] == 1


def test_only_runs_without_evaluations(tmp_path: Path) -> None:
    data = data_in(page_of(write_run(tmp_path / "runs" / "young", evaluations=0), tmp_path))
    [group] = data["groups"]
    assert (group["score"], group["curve"]) == (None, None)


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_text_stays_text(name: str, tmp_path: Path) -> None:
    folder = name.replace("/", "∕")
    run = write_run(tmp_path / "runs" / folder, environment=f"{name}-v5", learning_note=name)
    metadata = json.loads((run / "metadata.json").read_text())
    metadata |= {"command": ["rl-training", name], "git_commit": name, "created": name}
    metadata["versions"] = {name: name}
    (run / "metadata.json").write_text(json.dumps(metadata))
    rows = (run / "metrics.jsonl").read_text().splitlines()
    extra = {"step": 10**6, "eval/mean_reward": 1.0, f"health/{name}": 1.0, "time/wall_seconds": 1}
    (run / "metrics.jsonl").write_text("\n".join([*rows, json.dumps(extra), ""]))
    text = page_of(run, tmp_path, title=name)
    plain = page_of(write_run(tmp_path / "plain" / "run"), tmp_path)
    tags = [(tag, sorted(attributes)) for tag, attributes, _ in elements(text)]
    assert tags == [(tag, sorted(attributes)) for tag, attributes, _ in elements(plain)]
    data = data_in(text)
    assert data["title"] == name
    shown = re.sub(r"[\u2028\u2029]", " ", folder)
    assert data["runs"][0]["name"] == shown


def test_the_policy_allows_only_the_pages_own_script_and_style(tmp_path: Path) -> None:
    text = page_of(write_run(tmp_path / "runs" / "one"), tmp_path)
    found = elements(text)
    [policy] = [
        str(attributes["content"])
        for _, attributes, _ in found
        if attributes.get("http-equiv") == "Content-Security-Policy"
    ]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    assert rules["connect-src"] == "'none'"
    assert not re.search(r"https?:|\*|unsafe", policy)
    for kind, tag in (("script-src", "script"), ("style-src", "style")):
        [text] = [
            text for each, attributes, text in found if each == tag and "type" not in attributes
        ]
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert rules[kind] == f"'sha256-{digest}'"
    assert not [attributes for _, attributes, _ in found if "src" in attributes]
    assert not [name for _, attributes, _ in found for name in attributes if name.startswith("on")]
    assert not [attributes for _, attributes, _ in found if "style" in attributes]


def test_a_live_page_has_a_nonce_and_no_data(tmp_path: Path) -> None:
    data = page_data([write_run(tmp_path / "runs" / "one")])
    text = render(data, live=True, nonce="abc")
    assert "script-src 'nonce-abc'; style-src 'nonce-abc'" in text
    assert "connect-src 'self'" in text
    assert data_in(text) == {"live": True, "title": data["title"]}


def test_embedded_data_cannot_end_its_element() -> None:
    text = embedded({"a": "</script>\u2028&", "b": "\ud800"})
    assert not set(text) & set("<>&\u2028")
    assert json.loads(text)["a"] == "</script>\u2028&"


def test_commands_are_quoted_and_never_have_control_codes(tmp_path: Path) -> None:
    run = write_run(tmp_path / "runs" / "it's; rm -rf $HOME", finished=False)
    odd = write_run(tmp_path / "runs" / "a\x1b[2Jb\nc", seed=1)
    shown = {each["seed"]: each for each in data_in(page_of([run, odd], tmp_path))["runs"]}
    assert shlex.split(shown[0]["repeat"]) == [
        "rl-training", "train", "--config", str(run / "config.yaml")
    ]  # fmt: skip
    assert shlex.split(shown[0]["resume"]) == ["rl-training", "resume", str(run)]
    assert (shown[1]["repeat"], shown[1]["resume"]) == (None, None)
    assert shown[1]["name"].isprintable()


@pytest.mark.parametrize("name", ["--import=os", "-h", "~root"])
def test_the_name_of_a_run_is_no_option_of_its_commands(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    (run,) = page_data(["."])["runs"]
    assert shlex.split(run["repeat"])[2:] == ["--config", f"./{name}/config.yaml"]
    assert shlex.split(run["resume"])[2] == f"./{name}"


def test_a_title_may_have_bytes_that_are_no_text(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    assert '<h1 id="title">a?b</h1>' in page_of(run, tmp_path, title="a\udcffb")


def test_the_command_that_repeats_a_run_reads_its_settings(tmp_path: Path) -> None:
    run = write_run(tmp_path / "runs" / "one", seed=7)
    [shown] = data_in(page_of(run, tmp_path))["runs"]
    *_, config = shlex.split(shown["repeat"])
    assert rl_training.config_files.load_config(config).seed == 7


def test_videos_are_linked_relative_to_the_page(tmp_path: Path) -> None:
    run = write_run(tmp_path / "runs" / "javascript:alert(1)#?%20")
    videos = run / "videos"
    videos.mkdir()
    (videos / "step_000500000_best.mp4").write_bytes(b"x")
    (videos / "step_000500000_worst.mp4").write_bytes(b"x")
    (videos / "notes.html").write_text("not a video")
    os.symlink("/etc/passwd", videos / "step_000600000_best.mp4")
    [shown] = data_in(page_of(run, tmp_path))["runs"]
    quoted = "../runs/javascript%3Aalert%281%29%23%3F%2520/videos/step_000500000"
    assert [video["href"] for video in shown["videos"]] == [
        f"{quoted}_best.mp4",
        f"{quoted}_worst.mp4",
    ]
    assert beside(run.parent)(run / "a.mp4").startswith("./javascript%3A")


def test_a_linked_folder_of_videos_is_not_followed(tmp_path: Path) -> None:
    run = write_run(tmp_path / "runs" / "one")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "step_000500000_best.mp4").write_bytes(b"x")
    os.symlink(tmp_path / "elsewhere", run / "videos")
    assert data_in(page_of(run, tmp_path))["runs"][0]["videos"] == []


def test_settings_are_compared_with_the_packaged_config_and_between_groups(tmp_path: Path) -> None:
    for rate in (1e-3, 3e-4):
        config = rl_training.config_files.load_config("sac/pendulum", [f"learning_rate={rate}"])
        settings = {key: config.to_mapping()[key] for key in ("algo_kwargs", "eval_episodes")}
        write_run(
            tmp_path / "runs" / str(rate), environment="Pendulum-v1", steps=10_000, **settings
        )
    data = data_in(page_of(tmp_path / "runs", tmp_path))
    changes = {
        data["methods"][group["method"]]["label"]: group["settings"] for group in data["groups"]
    }
    assert changes == {
        "sac (learning_rate=0.001)": {"default": "sac/pendulum", "changes": []},
        "sac (learning_rate=0.0003)": {
            "default": "sac/pendulum", "changes": [["learning_rate", "0.001", "0.0003"]]
        },
    }  # fmt: skip
    [difference] = data["differences"]
    assert (difference["key"], sorted(difference["values"])) == (
        "learning_rate",
        ["0.0003", "0.001"],
    )


def test_two_hundred_runs_fit_into_two_megabytes(tmp_path: Path) -> None:
    """Five runs are written and read; the others repeat them in other tasks and algorithms."""
    read = [
        read_run(write_run(tmp_path / f"run-{seed}", seed=seed, rows=300, evaluations=300))
        for seed in range(5)
    ]
    runs = []
    for number in range(200):
        group, seed = divmod(number, 5)
        algorithm, task = ("sac", "td3", "tqc", "redq")[group % 4], f"Task{group // 4}-v5"
        name = f"{algorithm}__{task}__seed{seed}__20260101-120000-{number:06}"
        curve = read[seed].curve
        changed = dataclasses.replace(
            curve,
            path=tmp_path / name,
            name=name,
            algorithm=algorithm,
            environment=task,
            returns=curve.returns + number,
            wall_seconds=curve.wall_seconds * (1 + number / 7),
        )
        runs.append(dataclasses.replace(read[seed], curve=changed))
    data = assemble(runs, resamples=50)
    assert (len(data["runs"]), len(data["groups"])) == (200, 40)
    assert len(data["runs"][0]["returns"]) == 200
    assert len(render(data).encode()) < 2_000_000


def test_many_details_make_the_points_fewer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_run(tmp_path / "runs" / "one", rows=1_000, evaluations=1_000)
    monkeypatch.setattr(page, "MOST_BYTES", 150_000)
    text = page_of(run, tmp_path)
    assert len(data_in(text)["runs"][0]["returns"]) == 50


def test_chosen_places_have_the_first_and_the_last() -> None:
    assert chosen(3, 10).tolist() == [0, 1, 2]
    places = chosen(1_001, 11)
    assert places.tolist() == list(range(0, 1_001, 100))


def test_the_command_writes_the_page_and_says_where(tmp_path: Path) -> None:
    run = write_run(tmp_path / "runs" / "one")
    out = tmp_path / "new" / "page.html"
    done = CliRunner().invoke(app, ["report", str(run), "--out", str(out), "--title", "My runs"])
    assert done.exit_code == 0, done.output
    assert f"report {out} (" in done.output
    assert "<title>My runs</title>" in out.read_text()


def test_wrong_paths_are_explained(tmp_path: Path) -> None:
    run = write_run(tmp_path / "runs" / "one")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="no such folder"):
        write_report([tmp_path / "missing"])
    with pytest.raises(UserError, match="no runs found"):
        write_report([tmp_path / "empty"])
    with pytest.raises(UserError, match=r"must end with \.html"):
        write_report([run], run / "metrics.jsonl")
    (tmp_path / "folder.html").mkdir()
    with pytest.raises(UserError, match="is a folder"):
        write_report([run], tmp_path / "folder.html")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        write_report([run], tmp_path / "file" / "report.html")
