"""Copies of jobs in a storage without locks and renames."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem

from rl_training.errors import ConfigError, UserError
from rl_training.sweeps.storage import (
    JobStorage,
    absolute_url,
    check_storage,
    open_url,
    published,
)

FILES = {
    "job.json": "{}",
    "sac__seed0/metrics.jsonl": "1",
    "sac__seed0/checkpoints/step_000000001/a": "x",
}


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def content(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): path.read_text()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.fixture
def job(tmp_path: Path) -> Path:
    return write(tmp_path / "job", FILES)


@pytest.fixture
def storage(tmp_path: Path) -> JobStorage:
    return JobStorage(f"file://{tmp_path}/storage", "sweep/trial_0000")


@pytest.fixture
def manifests(tmp_path: Path) -> Path:
    return tmp_path / "storage" / "sweep" / "trial_0000" / "manifests"


def restored(storage: JobStorage, folder: Path) -> dict[str, str] | None:
    folder.mkdir()
    return content(folder) if storage.restore(folder) else None


def test_a_folder_comes_back_as_it_was_last_published(
    tmp_path: Path, storage: JobStorage, job: Path
) -> None:
    assert restored(storage, tmp_path / "none") is None
    storage.publish(job, 1, 1)
    write(job, {"job.json": "{1}", ".lease-000001": "", ".tmp-1/a": "", "sac__seed0/.lock": ""})
    storage.publish(job, 1, 2)
    assert restored(storage, tmp_path / "back") == {**FILES, "job.json": "{1}"}
    storage.publish(write(tmp_path / "other", {"job.json": "late"}), 0, 99)
    assert restored(storage, tmp_path / "again") == {**FILES, "job.json": "{1}"}


def test_a_new_attempt_replaces_an_old_one(tmp_path: Path, storage: JobStorage, job: Path) -> None:
    storage.publish(job, 1, 7)
    storage.publish(write(tmp_path / "second", {"job.json": "second"}), 2, 1)
    assert restored(storage, tmp_path / "back") == {"job.json": "second"}


def remove_objects(manifests: Path) -> None:
    for path in (manifests.parent / "objects").iterdir():
        if path.read_text() == "new":
            path.unlink()


def damage_objects(manifests: Path) -> None:
    for path in (manifests.parent / "objects").iterdir():
        if path.read_text() == "new":
            path.write_text("old")


@pytest.mark.parametrize("damage", [remove_objects, damage_objects])
def test_a_damaged_copy_is_skipped(
    tmp_path: Path,
    storage: JobStorage,
    job: Path,
    manifests: Path,
    damage: Callable[[Path], None],
) -> None:
    storage.publish(job, 1, 1)
    storage.publish(write(job, {"job.json": "new"}), 1, 2)
    damage(manifests)
    with pytest.warns(UserWarning, match=r"skipped a damaged copy of back \(000001-000002\.json\)"):
        assert restored(storage, tmp_path / "back") == FILES


@pytest.mark.parametrize(
    "manifest",
    [
        "",
        "[]",
        "{}",
        '{"files": []}',
        '{"files": {"a": 1}}',
        '{"files": {"a": ["0", Infinity]}}',
        '{"files": {"../a": ["OBJECT", 2]}}',
        '{"files": {"b/../../a": ["OBJECT", 2]}}',
        '{"files": {"/tmp/a": ["OBJECT", 2]}}',
        '{"files": {"": ["OBJECT", 2]}}',
        '{"files": {"a": ["../../../../job/job.json", 2]}}',
        '{"files": {"a\\u0000b": ["OBJECT", 2]}}',
        "[" * 100_000,
    ],
)
def test_a_hostile_manifest_neither_harms_nor_stops_a_job(
    tmp_path: Path, storage: JobStorage, job: Path, manifests: Path, manifest: str
) -> None:
    storage.publish(job, 1, 1)
    stored = next(path for path in (manifests.parent / "objects").iterdir())
    (manifests / "999999-000001.json").write_text(manifest.replace("OBJECT", stored.name))
    (manifests / "000000-000001.json").write_text(manifest.replace("OBJECT", stored.name))
    before = content(tmp_path)
    with pytest.warns(UserWarning, match="skipped a damaged copy"):
        assert restored(storage, tmp_path / "back") == FILES
    back = {f"back/{name}": text for name, text in FILES.items()}
    assert content(tmp_path) == before | back
    with published(storage, job, 2):
        write(job, {"job.json": "new"})
    (manifests / "999999-000001.json").unlink()
    assert restored(storage, tmp_path / "again") == {**FILES, "job.json": "new"}


def test_an_upload_that_fails_is_not_the_fault_of_the_trial(
    tmp_path: Path, storage: JobStorage, job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("429: slow down")

    monkeypatch.setattr(JobStorage, "publish", refuse)
    with pytest.raises(OSError, match=r"not uploaded: .*slow down"), published(storage, job, 1):
        pass


SECRET = "hunter2hunter2"  # noqa: S105


class Unreachable(LocalFileSystem):
    """A storage that does not answer, and names its password in its own kind of error."""

    protocol = "unreachable"

    def _refuse(self, *_: object, **__: object) -> None:
        raise RuntimeError(f"503 from unreachable://me:{SECRET}@host, password {SECRET}")

    makedirs = ls = info = pipe_file = _refuse


@pytest.fixture
def unreachable() -> str:
    fsspec.register_implementation("unreachable", Unreachable, clobber=True)
    return f"unreachable://me:{SECRET}@host/runs"


def test_a_storage_that_does_not_answer_is_not_the_fault_of_the_trial(
    tmp_path: Path, job: Path, unreachable: str
) -> None:
    storage = JobStorage(unreachable, "sweep/trial_0000")
    with pytest.raises(OSError, match=r"the storage cannot be read: .*503") as reading:
        storage.restore(tmp_path)
    with (
        pytest.raises(OSError, match=r"not uploaded: .*503") as writing,
        published(storage, job, 1),
    ):
        pass
    with pytest.raises(UserError, match=r"storage: cannot be written .*503") as checking:
        check_storage(unreachable)
    for error in (reading, writing, checking):
        assert SECRET not in "".join(traceback.format_exception(error.value))


def test_a_storage_that_no_other_process_can_read_is_refused() -> None:
    with pytest.raises(ConfigError, match="memory of one process"):
        check_storage("memory://sweeps")


def test_a_storage_that_cannot_be_written_is_refused() -> None:
    for url in ("file:///proc/nowhere", "nonsense://x"):
        with pytest.raises(UserError, match="storage: cannot be"):
            check_storage(url)


def test_a_relative_folder_means_the_same_place_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    url = absolute_url("store")
    monkeypatch.chdir("/")
    assert open_url(url)[1] == str(tmp_path / "store")
    assert absolute_url("s3://bucket/path") == "s3://bucket/path"


def test_a_manifest_is_json_that_names_every_file(storage: JobStorage, job: Path) -> None:
    storage.publish(job, 3, 4)
    names = storage._manifests()
    assert names == ["000003-000004.json"]
    assert set(storage._read(names[0])) == set(FILES)
    assert json.loads(storage._system.cat_file(f"{storage._root}/manifests/{names[0]}"))
