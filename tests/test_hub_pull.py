"""Policies from strangers on the Hub: damaged, forged and malicious repositories and servers."""

from __future__ import annotations

import hashlib
import json
import pickle
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import Command, tree
from helpers import tiny
from hub_server import (
    TOKEN,
    Request,
    StandInHub,
    StoredFile,
    StoredRepository,
    hub_of_this_process,
    running_hub,
)

from rl_training import SAC, predict_checkpoint, pull_from_hub, train
from rl_training.deployment.hub_files import LIMITS
from rl_training.errors import UserError

huggingface_hub = pytest.importorskip("huggingface_hub")

REPOSITORY = "mallory/policy"
OBSERVATION = [1.0, 0.0, 0.5]
MANIFEST, MODEL, POLICY = "MANIFEST.json", "model.safetensors", "policy.json"


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a small saved policy."""
    folder = tmp_path_factory.mktemp("policy")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rl_training.training.run.draw_learning_curve", lambda *_, **__: None)
        result = train(tiny(folder / "runs", total_timesteps=41))
    assert not isinstance(result, list)
    saved = SAC.load(result.run_dir).save(folder / "saved")
    return {path.name: path.read_bytes() for path in Path(saved).iterdir()}


@pytest.fixture
def hub(tmp_path: Path, policy: dict[str, bytes]) -> Iterator[StandInHub]:
    """A server with a policy of a stranger."""
    with hub_of_this_process(tmp_path) as server:
        files = {name: StoredFile(data, name == MODEL) for name, data in policy.items()}
        server.repositories[REPOSITORY] = StoredRepository(commits=[files])
        yield server


def files_of(hub: StandInHub) -> dict[str, StoredFile]:
    return hub.repositories[REPOSITORY].files


def sealed(hub: StandInHub, name: str, data: bytes) -> None:
    """Replace a file, and what the manifest says of it."""
    files = files_of(hub)
    files[name] = StoredFile(data, files[name].is_large)
    manifest = json.loads(files[MANIFEST].data)
    digest = hashlib.sha256(data).hexdigest()
    manifest["files"][name] = {"size": len(data), "sha256": digest}
    files[MANIFEST] = StoredFile(json.dumps(manifest).encode())


def test_a_policy_without_a_card_is_pulled(
    hub: StandInHub, policy: dict[str, bytes], work: Path
) -> None:
    folder = pull_from_hub(REPOSITORY, out="some/where/new")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == policy
    assert predict_checkpoint(folder, OBSERVATION).shape == (1,)


def test_only_the_files_of_a_policy_are_downloaded(
    hub: StandInHub, policy: dict[str, bytes], work: Path
) -> None:
    marker = work / "executed"
    bomb = pickle.dumps(_Bomb(str(marker)))
    others = ("model.pkl", "pytorch_model.bin", "../outside.txt", "/tmp/outside.txt", "policy.py")
    files_of(hub).update({name: StoredFile(bomb) for name in (*others, "folder/policy.json")})
    listed: list[str] = []

    def add_all(entries: list[Any]) -> list[Any]:
        listed.extend(each["path"] for each in entries)
        return entries + [file.listed(name) for name, file in files_of(hub).items()]

    hub.change_listing = add_all
    folder = pull_from_hub(REPOSITORY)
    assert tree(work) == {"policy", *(f"policy/{name}" for name in policy)}
    assert set(listed) <= set(LIMITS)
    asked = [path for path in hub.paths("GET") if "/resolve/" in path]
    assert len(asked) == len(policy)
    predict_checkpoint(folder, OBSERVATION)
    assert not marker.exists()


class _Bomb:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (Path(self.path),)


def test_a_revision_can_be_chosen(hub: StandInHub, policy: dict[str, bytes], work: Path) -> None:
    repository = hub.repositories[REPOSITORY]
    repository.commits.append({})
    repository.branches["first"] = 0
    with pytest.raises(UserError, match="not an rl_training policy"):
        pull_from_hub(REPOSITORY)
    for number, revision in enumerate(("first", repository.commit_id(0))):
        folder = pull_from_hub(REPOSITORY, revision=revision, out=f"policy{number}")
        assert (folder / MODEL).read_bytes() == policy[MODEL]
    for revision in ("../../etc", "missing", "a\nb"):
        with pytest.raises(UserError, match="has no revision"):
            pull_from_hub(REPOSITORY, revision=revision)


def remove_manifest(hub: StandInHub) -> None:
    del files_of(hub)[MANIFEST]


def remove_model(hub: StandInHub) -> None:
    del files_of(hub)[MODEL]


def forge_large_hash(hub: StandInHub) -> None:
    def change(entries: list[Any]) -> list[Any]:
        for entry in entries:
            if "lfs" in entry:
                entry["lfs"]["oid"] = "0" * 64
        return entries

    hub.change_listing = change


def forge_git_hash(hub: StandInHub) -> None:
    hub.change_listing = lambda entries: [{**each, "oid": "0" * 40} for each in entries]


def damage_model(hub: StandInHub) -> None:
    data = bytearray(files_of(hub)[MODEL].data)
    data[-1] ^= 1
    files_of(hub)[MODEL] = StoredFile(bytes(data), is_large=True)


def damage_policy(hub: StandInHub) -> None:
    files_of(hub)[POLICY] = StoredFile(files_of(hub)[POLICY].data.replace(b"sac", b"td3"))


def pickled_model(hub: StandInHub) -> None:
    sealed(hub, MODEL, pickle.dumps({"weight": [1.0]}))


def nested_policy(hub: StandInHub) -> None:
    sealed(hub, POLICY, b'{"a":' * 50_000 + b"1" + b"}" * 50_000)
    sealed(hub, MODEL, (10**7).to_bytes(8, "little") + b"{}")


def listed_outside(hub: StandInHub) -> None:
    manifest = json.loads(files_of(hub)[MANIFEST].data)
    manifest["files"]["../../outside.json"] = manifest["files"][POLICY]
    files_of(hub)[MANIFEST] = StoredFile(json.dumps(manifest).encode())


def more_in_manifest(hub: StandInHub) -> None:
    manifest = json.loads(files_of(hub)[MANIFEST].data)
    manifest["files"]["state.json"] = manifest["files"][POLICY]
    files_of(hub)[MANIFEST] = StoredFile(json.dumps(manifest).encode())


def manifest_is_no_json(hub: StandInHub) -> None:
    files_of(hub)[MANIFEST] = StoredFile(b"\x80\x04not json")


def huge_listed(hub: StandInHub) -> None:
    hub.change_listing = lambda entries: [
        {**each, "size": LIMITS[each["path"]] + 1} for each in entries
    ]


def full_disk(hub: StandInHub) -> None:
    hub.change_listing = lambda entries: [
        {**each, "size": LIMITS[each["path"]]} for each in entries
    ]


def more_than_listed(hub: StandInHub) -> None:
    def interfere(request: Request) -> Any:
        if request.method == "GET" and "/resolve/" in request.path:
            return 200, {}, b"x" * 5_000_000
        return None

    hub.interfere = interfere


def less_than_listed(hub: StandInHub) -> None:
    def interfere(request: Request) -> Any:
        return (200, {}, b"{}") if "/resolve/" in request.path else None

    hub.interfere = interfere


def endless(hub: StandInHub) -> None:
    """Send data without its length, compressed a thousand times."""
    import gzip

    bomb = gzip.compress(b"\0" * 30_000_000)

    def interfere(request: Request) -> Any:
        if request.method == "GET" and "/resolve/" in request.path:
            return 200, {"Content-Encoding": "gzip"}, bomb
        return None

    hub.interfere = interfere


def redirect(address: str) -> Callable[[StandInHub], None]:
    def change(hub: StandInHub) -> None:
        def interfere(request: Request) -> Any:
            return (302, {"Location": address}, b"") if "/resolve/" in request.path else None

        hub.interfere = interfere

    change.__name__ = f"redirect to {address}"
    return change


def sizes_are_text(hub: StandInHub) -> None:
    hub.change_listing = lambda entries: [{**each, "size": "1"} for each in entries]


def sizes_are_negative(hub: StandInHub) -> None:
    hub.change_listing = lambda entries: [{**each, "size": -1} for each in entries]


def listing_is_text(hub: StandInHub) -> None:
    hub.change_listing = lambda entries: "\x1b[31m"


def listing_has_holes(hub: StandInHub) -> None:
    hub.change_listing = lambda entries: [{"type": "file"}, None, 1]


def hashes_are_paths(hub: StandInHub) -> None:
    def change(entries: list[Any]) -> list[Any]:
        lfs = {"oid": "../../x", "size": 1, "pointerSize": 1}
        return [{**each, "lfs": lfs} for each in entries]

    hub.change_listing = change


def folders(hub: StandInHub) -> None:
    hub.change_listing = lambda entries: [
        {"type": "directory", "path": each["path"], "oid": each["oid"]} for each in entries
    ]


def commit_is_a_path(hub: StandInHub) -> None:
    def interfere(request: Request) -> Any:
        if request.path.startswith("/api/models/"):
            return 200, {}, json.dumps({"id": REPOSITORY, "sha": "../../main"}).encode()
        return None

    hub.interfere = interfere


def link(hub: StandInHub) -> None:
    """A link is stored in git as a file that contains the path it points to."""
    files_of(hub)[POLICY] = StoredFile(b"/etc/passwd")


def disabled(hub: StandInHub) -> None:
    hub.interfere = lambda request: (403, {"X-Error-Message": f"\x1b[31m{TOKEN}"}, b"")


ATTACKS: dict[Callable[[StandInHub], None], str] = {
    remove_manifest: "not an rl_training policy (MANIFEST.json is missing)",
    remove_model: "not an rl_training policy (model.safetensors is missing)",
    forge_large_hash: "is not the file that the Hub lists",
    forge_git_hash: "is not the file that the Hub lists",
    damage_model: "not an rl_training policy (model.safetensors is damaged",
    damage_policy: "not an rl_training policy (policy.json is damaged",
    pickled_model: "not an rl_training policy (model.safetensors is damaged",
    nested_policy: "not an rl_training policy (model.safetensors is damaged",
    listed_outside: "not an rl_training policy (the manifest lists",
    more_in_manifest: "its manifest does not fit its files",
    manifest_is_no_json: "not an rl_training policy (MANIFEST.json cannot be read",
    huge_listed: "are downloaded",
    full_disk: "are free",
    more_than_listed: "the server sends more than",
    less_than_listed: "the exchange with the Hub failed",
    endless: "the server sends more than",
    redirect("file:///etc/passwd"): "cannot be reached",
    redirect("http://127.0.0.1:9/x"): "cannot be reached",
    sizes_are_text: "the Hub lists no size",
    sizes_are_negative: "the Hub lists no size",
    listing_is_text: "the exchange with the Hub failed",
    listing_has_holes: "the exchange with the Hub failed",
    hashes_are_paths: "a hash that is not one",
    folders: "not an rl_training policy",
    commit_is_a_path: "the Hub named no commit",
    link: "its manifest does not fit its files",
    disabled: "does not permit this",
}


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_a_malicious_repository_or_server_harms_nothing(
    hub: StandInHub,
    rl: Command,
    work: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    attack: Callable[[StandInHub], None],
) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # between attempts of the client
    if attack is full_disk:
        usage = type("Usage", (), {"free": 10**9})
        monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    attack(hub)
    before = tree(tmp_path)
    outcome = rl("pull", REPOSITORY)
    assert outcome.code == 2, outcome
    message = outcome.err.strip().splitlines()[-1]
    assert ATTACKS[attack] in message
    assert "Traceback" not in outcome.err
    assert TOKEN not in outcome.out + outcome.err
    assert "\x1b" not in message
    assert tree(tmp_path) == before, "nothing is left"


def test_the_token_does_not_follow_a_redirect_to_another_machine(
    hub: StandInHub, policy: dict[str, bytes], work: Path
) -> None:
    with running_hub() as other:
        other.objects = {hashlib.sha256(data).hexdigest(): data for data in policy.values()}

        def interfere(request: Request) -> Any:
            if "/resolve/" not in request.path:
                return None
            oid = hashlib.sha256(policy[request.path.rpartition("/")[2]]).hexdigest()
            address = other.address.replace("127.0.0.1", "localhost")
            return 302, {"Location": f"{address}/storage/{oid}"}, b""

        hub.interfere = interfere
        pull_from_hub(REPOSITORY)
        assert len(other.requests) == len(policy)
        assert [each for each in other.requests if TOKEN in str(each.headers)] == []
    assert any(TOKEN in str(each.headers) for each in hub.requests)


def test_a_pulled_policy_is_as_distrusted_as_any_file(
    hub: StandInHub, rl: Command, work: Path
) -> None:
    (work / "evil_module.py").write_text("open('executed', 'w')")
    description = json.loads(files_of(hub)[POLICY].data)
    description["environment"] = {
        "id": "evil_module:Pendulum-v1",
        "kwargs": {},
        "label": "\x1b[31mred",
        "modules": ["evil_module", "not a module; rm -rf"],
        "wrappers": [{"wrapper": "evil_module:Wrapper"}],
    }
    description["obs_dim"] = 10**12
    sealed(hub, POLICY, json.dumps(description).encode())
    pulled = rl("pull", REPOSITORY)
    assert pulled.code == 0
    assert "\x1b" not in pulled.out
    assert "rm -rf" not in pulled.out
    assert "evil_module, which is imported only if you name it" in pulled.out
    assert rl("evaluate", "policy").code == 2
    assert rl("predict", "policy", "--obs", "[0, 0, 0]").code == 2
    assert not (work / "executed").exists()
    assert "evil_module" not in sys.modules


def test_a_private_policy_needs_a_token(
    hub: StandInHub, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repositories[REPOSITORY].private = True
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(UserError, match="if it is private, log in"):
        pull_from_hub(REPOSITORY)
    assert pull_from_hub(REPOSITORY, token=TOKEN).is_dir()


def test_an_existing_folder_is_kept(hub: StandInHub, work: Path) -> None:
    (work / "policy").mkdir()
    (work / "link").symlink_to(work / "nowhere")
    for out in (None, "link"):
        with pytest.raises(UserError, match="already exists"):
            pull_from_hub(REPOSITORY, out=out)
    assert hub.requests == []
    assert tree(work) == {"policy", "link"}


def test_an_interrupted_pull_leaves_nothing(
    hub: StandInHub, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("rl_training.deployment.hub_client.Hub.download", interrupt)
    with pytest.raises(KeyboardInterrupt):
        pull_from_hub(REPOSITORY)
    assert tree(work) == set()
