"""The built package, installed and used in a clean environment."""

from __future__ import annotations

import email.parser
import json
import os
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path, PurePosixPath

import pytest
from code_blocks import blocks_of, extras_of, pages, run_page

package = pytest.mark.package

ROOT = Path(__file__).parent.parent
CONFIGS = sorted(
    path.relative_to(ROOT / "configs").as_posix() for path in (ROOT / "configs").rglob("*.yaml")
)
PAGES = [page for page in pages() if any(block.runs for block in blocks_of(page))]
FIRST_PAGES = [ROOT / "docs/start.md", *sorted(ROOT.glob("docs/tutorials/*.md"))]
"""Run in every CI run; `make test-pages` runs all of them"""

# Python must not find this checkout. Keep proxies and pip's settings.
ENVIRONMENT = {
    name: value
    for name, value in os.environ.items()
    if not name.startswith(("PYTHON", "VIRTUAL_ENV"))
}


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the sdist and the wheel that `build` makes from it."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--outdir", folder, ROOT, cwd=folder)
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    [path] = built.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def command(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return `rl-training` of an environment with the wheel and its requirements, no extras."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=True)
    install(folder / "bin/python", str(wheel))
    return folder / "bin/rl-training"


def install(python: Path, requirement: str) -> None:
    options = ["--quiet", "--constraint", ROOT / "constraints.txt"]
    run(python, "-m", "pip", "install", *options, requirement, cwd=python.parent)


def files_of_wheel(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


@package
def test_the_sdist_contains_the_configs_and_no_saved_runs(built: Path) -> None:
    [path] = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {str(PurePosixPath(*PurePosixPath(n).parts[1:])) for n in archive.getnames()}
    packaged = {f"src/rl_training/assets/configs/{name}" for name in CONFIGS}
    assert packaged - names == set()
    assert {"LICENSE", "README.md", "pyproject.toml", "src/rl_training/py.typed"} - names == set()
    assert [name for name in names if name.startswith("tests/fixtures")] == []


@package
def test_the_wheel_contains_only_the_package_and_its_configs(wheel: Path) -> None:
    names = files_of_wheel(wheel)
    configs = "rl_training/assets/configs/"
    assert {name.removeprefix(configs) for name in names if name.startswith(configs)} == set(
        CONFIGS
    )
    assert "rl_training/py.typed" in names
    assert {name.split("/")[0].partition("-")[0] for name in names} == {"rl_training"}


@package
def test_the_wheel_metadata_contain_the_license_and_the_readme(wheel: Path) -> None:
    [info] = {name.split("/")[0] for name in files_of_wheel(wheel) if ".dist-info/" in name}
    with zipfile.ZipFile(wheel) as archive:
        assert archive.read(f"{info}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
        text = archive.read(f"{info}/METADATA").decode()
    metadata = email.parser.Parser().parsestr(text)
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Description-Content-Type"] == "text/markdown"
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert str(metadata.get_payload()).strip() == readme.strip()


@package
def test_an_installed_package_trains_predicts_and_resumes(command: Path, tmp_path: Path) -> None:
    """Run a shortened version of the README's first command in an empty folder."""
    assert "train" in run(command, "--help", cwd=tmp_path)
    assert "sac/pendulum" in run(command, "list", cwd=tmp_path)
    short = ["--total-timesteps", "800"]
    run(command, "train", "--config", "sac/pendulum", *short, cwd=tmp_path)
    [folder] = (tmp_path / "runs").iterdir()
    state = json.loads((folder / "checkpoints/step_000000800/state.json").read_text())
    assert state["progress"]["gradient_steps"] > 0
    action = json.loads(run(command, "predict", folder, "--obs", "[1, 0, 0]", cwd=tmp_path))
    assert -2 <= action[0] <= 2
    run(command, "resume", folder, "--total-timesteps", "900", cwd=tmp_path)
    assert (folder / "checkpoints/step_000000900").is_dir()
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(
            page,
            marks=package if page in FIRST_PAGES else pytest.mark.pages,
            id=page.relative_to(ROOT).as_posix(),
        )
        for page in PAGES
    ],
)
def test_the_code_of_a_page_works_with_the_installed_package(
    page: Path, command: Path, wheel: Path, tmp_path: Path
) -> None:
    """Follow a page in an empty folder, with the extras that it says to install."""
    python = command.parent / "python"
    if extras := extras_of(page):
        install(python, f"{wheel}[{','.join(sorted(extras))}]")
    run_page(page, tmp_path, python, ENVIRONMENT)
