"""Repository files: valid links and consistent versions."""

from __future__ import annotations

import itertools
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

from rl_training.experiment import doctor

ROOT = Path(__file__).parent.parent
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
REPOSITORY: str = PROJECT["urls"]["Homepage"]
PAGES = [
    path.relative_to(ROOT).as_posix()
    for path in sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
]
LINK = re.compile(r"\]\(([^)\s]+)\)|^\[[^\]]+\]: (\S+)$", re.MULTILINE)


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def links(page: str) -> list[str]:
    """Return the targets of `[text](target)` and `[label]: target`."""
    return [inline or labelled for inline, labelled in LINK.findall(read(page))]


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub creates for headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def target_exists(link: str, page: str) -> bool:
    """Return whether the target exists. Links to other sites are not checked."""
    if own := re.match(f"{REPOSITORY}/(?:blob|raw)/main/", link):
        page, link = "README.md", link.removeprefix(own.group())
    elif link.startswith("http"):
        return True
    name, _, anchor = link.partition("#")
    target = (ROOT / page).parent / name if name else ROOT / page
    return target.exists() and (not anchor or anchor in anchors(target))


@pytest.mark.parametrize("page", PAGES)
def test_link_targets_exist(page: str) -> None:
    assert [link for link in links(page) if not target_exists(link, page)] == []


def test_links_of_the_readme_work_on_the_package_index_too() -> None:
    assert [link for link in links("README.md") if not link.startswith(("https://", "#"))] == []


def test_every_label_of_the_readme_has_a_link() -> None:
    text = re.sub(r"```.*?```|`[^`\n]*`", "", read("README.md"), flags=re.DOTALL)
    defined = set(re.findall(r"^\[([^\]]+)\]: ", text, re.MULTILINE))
    used = re.findall(r"\[([^\]]+)\](?:\[([^\]]+)\])?(?![\(:\]])", text)
    assert {(label or shown).lower() for shown, label in used} == defined


@pytest.mark.parametrize("name", sorted(PROJECT["urls"]))
def test_addresses_are_in_one_repository(name: str) -> None:
    assert PROJECT["urls"][name].startswith(REPOSITORY)


def test_the_citation_and_the_changelog_have_the_version_and_its_date() -> None:
    citation = yaml.safe_load(read("CITATION.cff"))
    assert citation["version"] == PROJECT["version"]
    assert citation["repository-code"] == REPOSITORY
    released = f"## [{PROJECT['version']}] ({citation['date-released']})"
    assert released in read("CHANGELOG.md").splitlines()


def test_pinned_versions_are_within_the_declared_ranges() -> None:
    extras = PROJECT["optional-dependencies"].values()
    declared = [*PROJECT["dependencies"], *itertools.chain.from_iterable(extras)]
    ranges = {each.name.lower(): each.specifier for each in map(Requirement, declared)}
    pins = dict(re.findall(r"^([\w-]+)==(\S+)$", read("constraints.txt"), re.MULTILINE))
    assert {name: pin for name, pin in pins.items() if pin not in ranges[name.lower()]} == {}


def test_doctor_names_every_optional_part() -> None:
    extras = {extra for extra, _ in doctor.OPTIONAL.values()}
    assert extras == set(PROJECT["optional-dependencies"]) - {"dev", "docs"}


def test_doctor_says_how_to_install_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "OPTIONAL", {"no_such_module": ("video", "videos")})
    missing = 'missing      no_such_module (videos: pip install "rl-training[video]")'
    assert list(doctor.diagnose())[-1] == missing
