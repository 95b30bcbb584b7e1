"""Write the tables of settings, configs and algorithms into the pages of docs/.

A page has a comment where a table begins and one where it ends; the text around them is written by
hand. `make generate` replaces the tables. `--check` writes nothing, lists pages with old tables and
fails if there are any.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rl_training.algorithms.spec import AlgorithmSpec, list_built_in_specs
from rl_training.config_descriptions import (
    Group,
    Setting,
    algorithm_group,
    dataset_groups,
    early_stopping_group,
    run_group,
)
from rl_training.config_files import packaged_configs

ROOT = Path(__file__).parent.parent
START, END = "<!-- {}: written by `make generate` -->\n", "<!-- end of {} -->\n"
CAMPAIGNS = Path("benchmarks/results/reliability.json")
UNITS = {"seconds": " s", "megabytes": " MB", "steps": " steps"}
"""Units of the campaigns' figures, by a word of their name"""
LINKS = {"arXiv:": "https://arxiv.org/abs/", "doi:": "https://doi.org/"}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="list old pages and write nothing")
    only_check = parser.parse_args(arguments).check
    old = {page: text for page, text in pages().items() if text != read(page)}
    for page, text in old.items():
        if only_check:
            print(f"{page}: stale; run `make generate`", file=sys.stderr)
        else:
            print(page)
            (ROOT / page).write_text(text, encoding="utf-8")
    return 1 if old and only_check else 0


def pages() -> dict[Path, str]:
    """Return the current text of every page that has tables."""
    specs = list_built_in_specs()
    folder = Path("docs/algorithms")
    tables = {
        folder / "index.md": {"algorithms": algorithms_table(specs)},
        Path("docs/reference/config.md"): run_tables(),
        Path("docs/reliability.md"): {"campaigns": campaigns_table()},
        **{
            folder / f"{spec.name}.md": {
                "settings": settings_table(most_specific_first(spec), with_symbols=True),
                "configs": configs_list(spec),
            }
            for spec in specs
        },
    }
    return {page: with_tables(page, parts) for page, parts in tables.items()}


def with_tables(page: Path, tables: Mapping[str, str]) -> str:
    """Return the text of a page with its tables replaced."""
    text = read(page)
    for name, table in tables.items():
        start, end = START.format(name), END.format(name)
        if text.count(start) != 1 or text.count(end) != 1:
            sys.exit(f"{page}: must contain once {start.strip()} and {end.strip()}")
        before, rest = text.split(start)
        text = f"{before}{start}\n{table}\n{end}{rest.split(end)[1]}"
    return text


def most_specific_first(spec: AlgorithmSpec) -> list[Setting]:
    """Return the algorithm's settings; those that fewer algorithms have come first."""
    settings = {each.key: each for each in algorithm_group(spec).settings}
    bases = spec.hyperparameters_type.__mro__
    introduced = {
        key: base for base in bases for key in getattr(base, "model_fields", ()) if key in settings
    }
    return [settings[key] for base in bases for key in settings if introduced[key] is base]


def run_tables() -> dict[str, str]:
    groups = {"run": run_group(), "early_stopping": early_stopping_group()}
    shared, *kinds = dataset_groups()
    per_kind = "\n".join(f"**`kind: {kind_of(group)}`**\n\n{table_of(group)}" for group in kinds)
    tables = {name: table_of(group) for name, group in groups.items()}
    return {**tables, "dataset": table_of(shared), "kinds": per_kind}


def kind_of(group: Group) -> str:
    return group.title.split()[-1]


def table_of(group: Group) -> str:
    return settings_table(group.settings, with_symbols=False)


def settings_table(settings: Iterable[Setting], *, with_symbols: bool) -> str:
    symbol = "symbol | " if with_symbols else ""
    rows = [f"| key | {symbol}type | default | meaning |", f"|---|{'---|' * (3 + with_symbols)}"]
    for each in settings:
        cell = f"{each.symbol} | " if with_symbols else ""
        rows.append(
            f"| `{each.key.rpartition('.')[2]}` | {cell}{type_of(each)} | {default_of(each)} "
            f"| {each.meaning} |"
        )
    return "\n".join(rows) + "\n"


def type_of(setting: Setting) -> str:
    return re.sub(r'"(\w+)"', r"`\1`", setting.type)


def default_of(setting: Setting) -> str:
    return "required" if setting.required else f"`{setting.default_text}`"


def configs_list(spec: AlgorithmSpec) -> str:
    """List the packaged configs with the comments at the top of their files."""
    found = {k: v for k, v in packaged_configs().items() if k.startswith(f"{spec.name}/")}
    return "".join(f"- `{name}`: {first_comment(path)}\n" for name, path in found.items())


def first_comment(path: Path) -> str:
    lines = path.read_text(encoding="utf-8").splitlines()
    comment = [line.removeprefix("#").strip() for line in lines[: lines.index(first_key(lines))]]
    # Options are code: typography would change their hyphens.
    return re.sub(r"(--set \S+|--\w+)", r"`\1`", " ".join(comment))


def first_key(lines: Iterable[str]) -> str:
    return next(line for line in lines if not line.startswith("#"))


def algorithms_table(specs: Iterable[AlgorithmSpec]) -> str:
    rows = ["| algorithm | actions | trained | reference |", "|---|---|---|---|"]
    rows += [
        f"| [{spec.title}]({spec.name}.md), `{spec.name}` | {spec.action_kind} "
        f"| {', '.join(spec.regimes)} | {linked(spec.reference)} |"
        for spec in specs
    ]
    return "\n".join(rows) + "\n"


def campaigns_table() -> str:
    """Return the results of `make chaos`: one row for each campaign, and where they are from."""
    report = json.loads(read(CAMPAIGNS))
    hardware, versions = report["hardware"], report["versions"]
    rows = ["| | campaign | trials | held | median and worst figures |", "|---|---|---:|---:|---|"]
    rows += [campaign_row(name, entry) for name, entry in report["campaigns"].items()]
    minutes = sum(entry["seconds"] for entry in report["campaigns"].values()) / 60
    return "\n".join(rows) + (
        f"\n\nSeed {report['seed']}, {minutes:.0f} minutes, {report['date']}, commit "
        f"`{str(report['commit'])[:7]}`, {hardware['processor']} with {hardware['cpu_count']} "
        f"cores, PyTorch {versions['torch']}, Python {versions['python']}.\n"
    )


def campaign_row(name: str, entry: Mapping[str, Any]) -> str:
    figures = "; ".join(
        f"{key.replace('_', ' ')}: {with_unit(key, value['median'])}, "
        f"{with_unit(key, value['worst'])}"
        for key, value in entry["figures"].items()
    )
    cells = [name, entry["title"], f"{entry['trials']:,}", f"{entry['held']:,}", figures or "-"]
    return f"| {' | '.join(cells)} |"


def with_unit(name: str, value: float) -> str:
    unit = next((unit for word, unit in UNITS.items() if word in name.split("_")), "")
    return f"{value:.3g}{unit}"


def linked(reference: str) -> str:
    """Return the reference with a link for each paper that has one."""
    for prefix, site in LINKS.items():
        reference = re.sub(rf"{prefix}(\S*\w)", rf"[\1]({site}\1)", reference)
    return reference


def read(page: Path) -> str:
    return (ROOT / page).read_text(encoding="utf-8") if (ROOT / page).exists() else ""


if __name__ == "__main__":
    sys.exit(main())
