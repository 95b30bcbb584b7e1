"""Publishing policies on the Hub, with the real client and a local server."""

from __future__ import annotations

import base64
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import yaml
from conftest import Command
from helpers import tiny
from hostile import seal
from hub_server import TOKEN, StandInHub, StoredFile, StoredRepository, error, hub_of_this_process

from rl_training import (
    SAC,
    evaluate_checkpoint,
    predict_checkpoint,
    pull_from_hub,
    push_to_hub,
    train,
)
from rl_training.checkpoints.format import MODEL, checkpoint_folders
from rl_training.config_files import load_config
from rl_training.deployment.anonymous import REMOVED, published_config, published_environment
from rl_training.deployment.card import CardContents, escaped, model_card, shown
from rl_training.deployment.results import Results
from rl_training.errors import UserError
from rl_training.experiment.statistics import interquartile_mean, interval

huggingface_hub = pytest.importorskip("huggingface_hub")

# Of the client itself, about its own HTTP library.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content:DeprecationWarning")

REPOSITORY = "alice/sac-pendulum"
OBSERVATION = [1.0, 0.0, 0.5]
VIDEO = b"\0\0\0\x18ftypmp42" + bytes(range(256)) * 8
NAMES = {"MANIFEST.json", "policy.json", "model.safetensors", "config.yaml", "results.json"}
USER, MACHINE, HOME = "zaphod", "heart-of-gold", "/galaxy/zaphod"


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[StandInHub]:
    with hub_of_this_process(tmp_path) as server:
        yield server


@pytest.fixture(scope="module")
def seeds(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three runs that differ only in seed, and one that differs in more."""
    folder = tmp_path_factory.mktemp("seeds")
    short: dict[str, Any] = {"total_timesteps": 60, "eval_interval": 30}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rl_training.training.run.draw_learning_curve", lambda *_, **__: None)
        results = train(tiny(folder, seeds=[0, 1, 2], **short))
        other = train(tiny(folder, seed=7, algo_kwargs={"gamma": 0.5}, **short))
    assert isinstance(results, list)
    return [Path(each.run_dir) for each in (*results, other)]


@pytest.fixture
def video(tmp_path: Path) -> Path:
    path = tmp_path / "my film.mp4"
    path.write_bytes(VIDEO)
    return path


def push(run: Path, repository: str = REPOSITORY, **options: Any) -> Any:
    return push_to_hub(run, repository, **{"video": False, **options})


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("large", [(".safetensors", ".mp4"), ()], ids=["large files", "regular"])
def test_a_pushed_policy_is_pulled_with_the_same_bytes(
    hub: StandInHub, seeds: list[Path], video: Path, work: Path, large: tuple[str, ...]
) -> None:
    hub.large = large
    sent = push(seeds[0], video=video)
    stored = hub.repositories[REPOSITORY]
    assert len(stored.commits) == 2, "one commit after that of the creation"
    assert sent.commit == stored.commit_id()
    assert {name for name, file in stored.files.items() if file.is_large} == {
        name for name in sent.files if name.endswith(large)
    } - ({".gitattributes"} if not large else set())
    folder = pull_from_hub(REPOSITORY)
    assert folder == Path("sac-pendulum")
    pulled = contents(folder)
    assert pulled.keys() == NAMES | {"README.md", "replay.mp4"} == sent.files.keys()
    assert pulled == {name: stored.files[name].data for name in pulled}
    newest = checkpoint_folders(seeds[0] / "checkpoints")[0]
    assert pulled[MODEL] == (newest / MODEL).read_bytes()
    assert np.array_equal(
        predict_checkpoint(folder, OBSERVATION), predict_checkpoint(seeds[0], OBSERVATION)
    )
    assert evaluate_checkpoint(folder, num_episodes=1)["eval_length_mean"] == 200
    assert SAC.load(folder).policy is not None
    assert load_config(folder / "config.yaml").seed == 0


def test_the_card_shows_an_observation_only_if_it_is_one_vector() -> None:
    leaf = {"kind": "numbers", "shape": [3]}
    policies = {
        "[0.0] * 3": {"obs_dim": 3},
        "observation": {"obs_dim": 6, "observation": [{"name": n, **leaf} for n in "ab"]},
    }
    for shown_as, policy in policies.items():
        contents = CardContents(
            "me/policy", "sac", "Task-v0", policy, None, Results(), 10, True, {}, False
        )
        assert f"predict_checkpoint(path, {shown_as})" in model_card(contents)


def test_the_client_of_the_hub_reads_the_card(hub: StandInHub, seeds: list[Path]) -> None:
    push(seeds[0])
    card = huggingface_hub.ModelCard.load(REPOSITORY)
    assert card.data.library_name == "rl_training"
    assert card.data.pipeline_tag == "reinforcement-learning"
    assert {"reinforcement-learning", "deep-reinforcement-learning", "Pendulum-v1"} <= set(
        card.data.tags
    )
    (result,) = card.data.eval_results
    assert (result.task_type, result.dataset_type) == ("reinforcement-learning", "Pendulum-v1")
    rows = [json.loads(line) for line in (seeds[0] / "metrics.jsonl").read_text().splitlines()]
    last = [row for row in rows if "eval/mean_reward" in row][-1]
    mean, _, deviation = result.metric_value.partition(" +/- ")
    assert float(mean) == pytest.approx(last["eval/mean_reward"], abs=0.01)
    assert float(deviation) == pytest.approx(last["eval/std_reward"], abs=0.01)
    assert result.verified is False
    assert "runs no code" in card.text
    assert f"rl-training pull {REPOSITORY}" in card.text


def test_the_results_have_an_interval_over_the_seeds_beside_the_run(
    hub: StandInHub, seeds: list[Path]
) -> None:
    push(seeds[1])
    files = hub.repositories[REPOSITORY].files
    found = json.loads(files["results.json"].data)["seeds"]
    assert found["seeds"] == [0, 1, 2], "not the run with another gamma"
    low, high = interval(found["returns"])
    assert [found["low"], found["high"]] == pytest.approx([float(low), float(high)])
    iqm = float(interquartile_mean(found["returns"]))
    row = f"| {iqm:.2f} | {low:.2f} to {high:.2f} |"
    assert row in files["README.md"].data.decode()


def test_the_runs_of_other_seeds_can_be_named(hub: StandInHub, seeds: list[Path]) -> None:
    push(seeds[0], runs=[seeds[2]])
    found = json.loads(hub.repositories[REPOSITORY].files["results.json"].data)
    assert found["seeds"]["seeds"] == [0, 2]
    with pytest.raises(UserError, match=r"differs .* in more than the seed"):
        push(seeds[0], "alice/other", runs=[seeds[3]])
    assert "alice/other" not in hub.repositories


def test_a_saved_policy_is_published_without_a_run(
    hub: StandInHub, seeds: list[Path], tmp_path: Path
) -> None:
    SAC.load(seeds[0]).save(tmp_path / "policy")
    push(tmp_path / "policy", episodes=2)
    files = hub.repositories[REPOSITORY].files
    assert files.keys() - {".gitattributes", "README.md"} == NAMES - {"config.yaml"}
    found = json.loads(files["results.json"].data)
    assert found["policy"]["is_new"]
    assert found["policy"]["episodes"] == 2
    assert found["seeds"] is None


def test_the_best_checkpoint_can_be_published(hub: StandInHub, seeds: list[Path]) -> None:
    best = json.loads((seeds[0] / "checkpoints/best.json").read_text())
    push(seeds[0], best=True)
    files = hub.repositories[REPOSITORY].files
    found = json.loads(files["results.json"].data)
    assert (found["checkpoint"], found["step"]) == ("best", best["step"])
    assert found["policy"]["mean"] == pytest.approx(best["eval_return_mean"])
    assert "optimistic" in files["README.md"].data.decode()


@pytest.fixture
def somebody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("getpass.getuser", lambda: USER)
    monkeypatch.setattr("platform.node", lambda: f"{MACHINE}.example.org")
    monkeypatch.setenv("HOME", HOME)


def sent_bytes(hub: StandInHub) -> bytes:
    """Return everything that the server has received, files decoded."""
    sent = [f"{each.method} {each.path} {each.headers}".encode() for each in hub.requests]
    for request in hub.requests:
        sent.append(request.body)
        if "/commit/" in request.path:
            lines = [json.loads(line)["value"] for line in request.body.splitlines()]
            sent += [base64.b64decode(each["content"]) for each in lines if "content" in each]
    return b"\n".join(sent)


@pytest.mark.filterwarnings("ignore:init_from")
def test_nothing_that_is_sent_tells_of_the_user_or_the_machine(
    hub: StandInHub,
    seeds: list[Path],
    tmp_path: Path,
    somebody: None,
    monkeypatch: pytest.MonkeyPatch,
    no_pictures: None,
) -> None:
    command = ["rl-training", "train", "--config", f"{HOME}/secret.yaml", "--set", "seed=4711"]
    monkeypatch.setattr(sys, "argv", command)
    gym.register(
        "Place-v0",
        lambda place, **_: gym.make("Pendulum-v1").unwrapped,
        max_episode_steps=20,
    )
    try:
        result = train(
            tiny(
                tmp_path / f"{USER}-runs",
                algo="rlpd",
                algo_kwargs={"num_critics": 2, "gradient_updates_per_step": 1},
                env_id="Place-v0",
                env_kwargs={"place": f"{HOME}/place.xml"},
                dataset={"kind": "run", "path": str(seeds[0])},
                init_from=str(seeds[0]),
                run_name=f"of-{USER}",
                total_timesteps=45,
            )
        )
    finally:
        del gym.registry["Place-v0"]
    assert not isinstance(result, list)
    assert USER in (result.run_dir / "config.yaml").read_text(), "there is something to find"
    assert "4711" in (result.run_dir / "metadata.json").read_text()
    push(result.run_dir, message="A policy")
    everything = sent_bytes(hub).lower()
    folders = [HOME, str(tmp_path), str(seeds[0].parent), tempfile.gettempdir()]
    secrets = [USER, MACHINE, *folders, "4711", "secret.yaml", "--set", "output_dir", "run_name"]
    assert [word for word in secrets if word.lower().encode() in everything] == []
    for expected in (b"place-v0", b'"action_low"', b"path: removed", b"init_from: removed"):
        assert expected in everything


@pytest.mark.parametrize(
    "value",
    [
        "/galaxy/model.xml",
        "~/model.xml",
        "../model.xml",
        "C:\\models\\ant.xml",
        "--file=/galaxy/model.xml",
        "tcp://10.0.0.3:5555",
        "192.168.1.20",
        "me@example.org",
        "model of Zaphod",
        f"{MACHINE}_model",
    ],
)
def test_places_and_persons_are_removed_from_settings(somebody: None, value: str) -> None:
    config = {
        "algo": "sac",
        "env_kwargs": {"a": value, "b": {"c": [value, 1.5, "ant.xml"]}},
        "wrappers": [{"wrapper": "my.module:Class", "kwargs": {"path": value}}],
        "init_from": "runs/earlier",
        "dataset": {"kind": "npz", "path": "data.npz", "reward_scale": 2.0},
        "output_dir": "runs",
        "run_name": "mine",
        "trackers": ["wandb"],
    }
    assert published_config(config) == {
        "algo": "sac",
        "env_kwargs": {"a": REMOVED, "b": {"c": [REMOVED, 1.5, "ant.xml"]}},
        "wrappers": [{"wrapper": "my.module:Class", "kwargs": {"path": REMOVED}}],
        "init_from": REMOVED,
        "dataset": {"kind": "npz", "path": REMOVED, "reward_scale": 2.0},
    }
    described = published_environment({"id": "Ant-v5", "kwargs": {"xml_file": value}, "label": "x"})
    assert described == {"id": "Ant-v5", "kwargs": {"xml_file": REMOVED}, "label": "x"}


@pytest.mark.parametrize(
    "value", ["D4RL/door/human-v2", "ant.xml", "rgb_array", "zaphodian", "a:b"]
)
def test_other_text_stays_in_settings(somebody: None, value: str) -> None:
    assert published_config({"env_kwargs": {"a": value}}) == {"env_kwargs": {"a": value}}


HOSTILE = [
    "<script>alert(1)</script>",
    "x](http://evil.example)",
    "`code` **bold** | cell",
    "---\ntitle: other\n---",
    "http://evil.example www.evil.example",
    "\x1b[31mred",
    "![image](http://evil.example/x.png)",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_text_of_a_run_is_neither_markdown_nor_html_nor_yaml(
    hub: StandInHub, seeds: list[Path], tmp_path: Path, text: str
) -> None:
    run = Path(shutil.copytree(checkpoint_folders(seeds[0] / "checkpoints")[0], tmp_path / "copy"))
    policy = json.loads((run / "policy.json").read_text())
    policy["environment"] = {"id": None, "kwargs": {"text": text}, "label": text}
    (run / "policy.json").write_text(json.dumps(policy))
    seal(run)
    push(run)
    card = hub.repositories[REPOSITORY].files["README.md"].data.decode()
    metadata, body = card.removeprefix("---\n").split("\n---\n", 1)
    values = yaml.safe_load(metadata)
    assert values["library_name"] == "rl_training"
    assert "title" not in values
    assert "<" not in body
    assert "evil.example" not in body
    assert "**bold**" not in body
    assert "\x1b" not in card


@pytest.mark.parametrize(
    "environment",
    [[1], "x", {"id": 5}, {"wrappers": True}, {"wrappers": [{"wrapper": 5}]}, {"modules": 1}],
)
def test_a_damaged_description_is_not_published(
    hub: StandInHub, seeds: list[Path], tmp_path: Path, environment: Any
) -> None:
    run = Path(shutil.copytree(checkpoint_folders(seeds[0] / "checkpoints")[0], tmp_path / "copy"))
    policy = json.loads((run / "policy.json").read_text())
    (run / "policy.json").write_text(json.dumps({**policy, "environment": environment}))
    seal(run)
    with pytest.raises(UserError):
        push(run)
    assert hub.repositories == {}


def test_numbers_that_are_too_large_are_no_results(
    hub: StandInHub, seeds: list[Path], tmp_path: Path
) -> None:
    run = Path(shutil.copytree(seeds[0], tmp_path / "copy"))
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 60, "eval/mean_reward": ' + "9" * 400 + "}\n")
    push(run)
    results = json.loads(hub.repositories[REPOSITORY].files["results.json"].data)
    assert -3000 < results["policy"]["mean"] < 0


def test_escaped_text_is_shown_as_it_is() -> None:
    assert shown("Pendulum-v1") == "`Pendulum-v1`"
    assert escaped("Ant-v5") == "Ant-v5"
    assert escaped("<b>") == "&#60;b&#62;"


def test_the_files_are_listed_and_confirmed(
    hub: StandInHub, seeds: list[Path], rl: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = rl("push", seeds[0], REPOSITORY, "--no-video")
    assert refused.code == 2
    assert "add --yes" in refused.err
    assert hub.requests == []
    monkeypatch.setattr("rl_training.cli.deployment._has_terminal", lambda: True)
    declined = rl("push", seeds[0], REPOSITORY, "--no-video", stdin="n\n")
    assert declined.code == 1
    assert "nothing was sent" in declined.out
    assert hub.repositories == {}
    assert [each.method for each in hub.requests if each.method != "GET"] == []
    for name in NAMES | {"README.md"}:
        assert name in declined.out
    assert "public" in declined.out
    agreed = rl("push", seeds[0], REPOSITORY, "--no-video", "--private", stdin="y\n")
    assert agreed.code == 0
    assert "(new, private)" in agreed.out
    assert hub.repositories[REPOSITORY].private
    assert TOKEN not in declined.out + declined.err + agreed.out + agreed.err


def test_the_command_line_pushes_and_pulls(
    hub: StandInHub, seeds: list[Path], rl: Command, video: Path, work: Path
) -> None:
    options = ("--yes", "--video", video, "--message", "First policy", "--best")
    assert rl("push", seeds[0], REPOSITORY, *options).code == 0
    assert hub.repositories[REPOSITORY].messages == ["First policy"]
    pulled = rl("pull", REPOSITORY, "--out", "mine")
    assert pulled.code == 0
    assert "rl-training evaluate mine" in pulled.out
    assert "rl-training predict mine --obs '[0.0, 0.0, 0.0]'" in pulled.out
    assert rl("predict", "mine", "--obs", "[0, 0, 0]").code == 0
    again = rl("pull", REPOSITORY, "--out", "mine")
    assert again.code == 2
    assert "already exists" in again.err


def test_a_second_push_replaces_the_first(
    hub: StandInHub, seeds: list[Path], video: Path, rl: Command
) -> None:
    push(seeds[0], video=video)
    hub.repositories[REPOSITORY].files["notes.txt"] = StoredFile(b"of the owner")
    outcome = rl("push", seeds[1], REPOSITORY, "--yes", "--no-video")
    assert "replay.mp4         is deleted there" in outcome.out
    assert "replaces the file there" in outcome.out
    files = hub.repositories[REPOSITORY].files
    assert "replay.mp4" not in files
    assert json.loads(files["results.json"].data)["policy"]["mean"] != 0
    assert files["notes.txt"].data == b"of the owner"
    assert len(hub.repositories[REPOSITORY].commits) == 3


def test_a_policy_that_cannot_be_filmed_is_pushed_without_a_video(
    hub: StandInHub, seeds: list[Path], rl: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise UserError("no display")

    monkeypatch.setattr("rl_training.evaluation.video.record", fail)
    outcome = rl("push", seeds[0], REPOSITORY, "--yes")
    assert outcome.code == 0
    assert "note: no replay.mp4: the policy could not be filmed (no display)" in outcome.out
    assert "replay.mp4" not in hub.repositories[REPOSITORY].files


def test_what_is_not_a_video_is_refused(hub: StandInHub, seeds: list[Path], tmp_path: Path) -> None:
    (tmp_path / "text.mp4").write_text("not a video")
    with pytest.raises(UserError, match="is not an MP4 file"):
        push(seeds[0], video=tmp_path / "text.mp4")
    with pytest.raises(UserError, match="cannot be read"):
        push(seeds[0], video=tmp_path / "missing.mp4")
    assert hub.repositories == {}


def log_out(hub: StandInHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN")


def spoil_token(hub: StandInHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_expired")


def read_only(hub: StandInHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.role = "read"


def other_owner(hub: StandInHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.user = "bob"


def taken(hub: StandInHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.user = "bob"
    hub.repositories[REPOSITORY] = StoredRepository()


def other_contents(hub: StandInHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repositories[REPOSITORY] = StoredRepository()
    hub.repositories[REPOSITORY].files["README.md"] = StoredFile(b"a language model")


def no_network(hub: StandInHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")


def forbidden(hub: StandInHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.interfere = lambda request: (
        error(403, f"not with {TOKEN}") if request.path == "/api/repos/create" else None
    )


def broken(hub: StandInHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.interfere = lambda request: error(500, "internal error")


def echo(hub: StandInHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.interfere = lambda request: (
        error(400, f"bad request with {TOKEN}\x1b[31m") if "commit" in request.path else None
    )


def changed_meanwhile(hub: StandInHub, monkeypatch: pytest.MonkeyPatch) -> None:
    def interfere(request: Any) -> None:
        if "preupload" in request.path:
            hub.repositories[REPOSITORY].commits.append({})

    hub.interfere = interfere


PROBLEMS: dict[Callable[[StandInHub, pytest.MonkeyPatch], None], str] = {
    log_out: "not logged in",
    spoil_token: "does not accept your token",
    read_only: "your token can only read",
    other_owner: "alice is another user",
    taken: "belongs to another user",
    other_contents: "holds something else",
    no_network: "cannot be reached",
    forbidden: "does not permit this",
    broken: "the Hub has a problem",
    echo: "refused the request",
    changed_meanwhile: "was changed by someone else",
}


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.__name__)
def test_a_push_that_fails_says_why_in_one_line(
    hub: StandInHub,
    seeds: list[Path],
    rl: Command,
    monkeypatch: pytest.MonkeyPatch,
    problem: Callable[[StandInHub, pytest.MonkeyPatch], None],
) -> None:
    problem(hub, monkeypatch)
    outcome = rl("push", seeds[0], REPOSITORY, "--yes", "--no-video")
    assert outcome.code == 2
    assert PROBLEMS[problem] in outcome.err
    assert len(outcome.err.strip().splitlines()) == 1
    assert TOKEN not in outcome.out + outcome.err
    assert "\x1b" not in outcome.err
    stored = hub.repositories.get(REPOSITORY)
    assert stored is None or "policy.json" not in stored.files


def test_private_files_are_not_sent_to_a_public_repository(
    hub: StandInHub, seeds: list[Path]
) -> None:
    hub.repositories[REPOSITORY] = StoredRepository(private=False)
    with pytest.raises(UserError, match="exists and is public"):
        push(seeds[0], private=True)
    assert hub.repositories[REPOSITORY].files == {}


@pytest.mark.parametrize(
    "name", ["", "alone", "a/b/c", "../x", "alice/..", "alice/a b", "-a/b", "alice/x.git", "a/b\n"]
)
def test_a_bad_name_is_refused_before_anything_is_sent(
    hub: StandInHub, seeds: list[Path], name: str
) -> None:
    for action in (lambda: push(seeds[0], name), lambda: pull_from_hub(name)):
        with pytest.raises(UserError, match="not the name of a repository"):
            action()
    assert hub.requests == []


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, seeds: list[Path]) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UserError, match=r"pip install 'rl-training\[hub\]'"):
        push(seeds[0])
