"""Write the tables of settings, algorithms and measurements into the pages of docs/.

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

from page_tables import with_tables
from pydantic import BaseModel

from rl_training.algorithms.spec import AlgorithmSpec, list_built_in_specs
from rl_training.config_descriptions import (
    Group,
    Setting,
    algorithm_group,
    dataset_groups,
    early_stopping_group,
    hindsight_group,
    run_group,
    section_group,
)
from rl_training.config_files import packaged_configs
from rl_training.sweeps.settings import (
    Objective,
    RaySection,
    Resources,
    SlurmSection,
    SweepSettings,
)

ROOT = Path(__file__).parent.parent
RESULTS = Path("benchmarks/results")
CAMPAIGNS = RESULTS / "reliability.json"
SAVING = {"CPU": RESULTS / "saving.json", "GPU": RESULTS / "saving_gpu.json"}
REMOTE, SWEEPS = RESULTS / "remote_environments.json", RESULTS / "sweeps.json"
PLACES = {"local": "a process of this machine", "ray": "an embedded Ray"}
"""Where trials of `benchmarks/sweeps.py` run"""
BYTES = ("B", "kB", "MB", "GB")
MANY_TRIALS, SEEDS = 1_000, 5
"""A large sweep, whose size is calculated"""
BUSY = 0.5
"""Load of a machine above which other programs distort measured times"""
UNITS = {"seconds": " s", "megabytes": " MB", "steps": " steps"}
"""Units of the campaigns' figures, by a word of their name"""
LINKS = {"arXiv:": "https://arxiv.org/abs/", "doi:": "https://doi.org/"}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="list old pages and write nothing")
    only_check = parser.parse_args(arguments).check
    for line in [] if only_check else shortcomings(load(CAMPAIGNS)["campaigns"]):
        print(f"warning: {CAMPAIGNS}: {line}", file=sys.stderr)
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
        Path("docs/reference/sweep.md"): sweep_tables(),
        Path("docs/how-to/remote-environments.md"): {
            "rounds": rounds_table(),
            "scaling": scaling_table(),
            "uneven": uneven_table(),
        },
        Path("docs/how-to/sweeps.md"): {"overhead": overhead_table()},
        Path("docs/tutorials/cluster.md"): {"sizes": sizes_table()},
        Path("docs/reliability.md"): {"campaigns": campaigns_table(), "saving": saving_table()},
        **{
            folder / f"{spec.name}.md": {
                "settings": settings_table(most_specific_first(spec), with_symbols=True),
                "configs": configs_list(spec),
            }
            for spec in specs
        },
    }
    return {
        page: with_tables(page, read(page), parts, "make generate")
        for page, parts in tables.items()
    }


def most_specific_first(spec: AlgorithmSpec) -> list[Setting]:
    """Return the algorithm's settings; those that fewer algorithms have come first."""
    settings = {each.key: each for each in algorithm_group(spec).settings}
    bases = spec.hyperparameters_type.__mro__
    introduced = {
        key: base for base in bases for key in getattr(base, "model_fields", ()) if key in settings
    }
    return [settings[key] for base in bases for key in settings if introduced[key] is base]


def run_tables() -> dict[str, str]:
    groups = {
        "run": run_group(),
        "early_stopping": early_stopping_group(),
        "replay.hindsight": hindsight_group(),
    }
    shared, *kinds = dataset_groups()
    per_kind = "\n".join(f"**`kind: {kind_of(group)}`**\n\n{table_of(group)}" for group in kinds)
    tables = {name: table_of(group) for name, group in groups.items()}
    return {**tables, "dataset": table_of(shared), "kinds": per_kind}


def sweep_tables() -> dict[str, str]:
    models: dict[str, type[BaseModel]] = {
        "sweep": SweepSettings,
        "objective": Objective,
        "resources": Resources,
        "ray": RaySection,
        "slurm": SlurmSection,
    }
    return {name: table_of(section_group(name, model)) for name, model in models.items()}


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
    rows = ["| algorithm | use it for | actions | trained | reference |", "|---|---|---|---|---|"]
    rows += [
        f"| [{spec.title}]({spec.name}.md), `{spec.name}` | {spec.use_when} | {spec.action_kind} "
        f"| {', '.join(spec.regimes)} | {linked(spec.reference)} |"
        for spec in specs
    ]
    return "\n".join(rows) + "\n"


def campaigns_table() -> str:
    """Return the results of `make chaos`: one row for each campaign, and where they are from."""
    report = load(CAMPAIGNS)
    hardware, versions, campaigns = report["hardware"], report["versions"], report["campaigns"]
    rows = ["| | campaign | trials | held | figures |", "|---|---|---:|---:|---|"]
    rows += [campaign_row(name, entry) for name, entry in campaigns.items()]
    minutes = sum(entry["seconds"] for entry in campaigns.values()) / 60
    return "\n".join([campaigns_caption(campaigns), "", *rows]) + (
        f"\n\nSeed {report['seed']}, {minutes:.0f} minutes, {report['date']}, commit "
        f"`{str(report['commit'])[:7]}`, {hardware['processor']} with {hardware['cpu_count']} "
        f"cores, PyTorch {versions['torch']}, Python {versions['python']}.\n"
    )


def campaigns_caption(campaigns: Mapping[str, Mapping[str, Any]]) -> str:
    """Say how many trials held, and how that compares to the full figures."""
    held, trials, full = (
        sum(entry[key] for entry in campaigns.values()) for key in ("held", "trials", "full")
    )
    text = f"{held:,} of {trials:,} trials held; the full figure is {full:,} trials."
    found = "; ".join(shortcomings(campaigns))
    return f"{text} **Not a complete run without failures. {found}.**" if found else text


def shortcomings(campaigns: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return what a report lacks: campaigns below their full figure, and those with failures."""
    short = [name for name, entry in campaigns.items() if entry["trials"] < entry["full"]]
    failed = [name for name, entry in campaigns.items() if entry["held"] < entry["trials"]]
    missing = [name for name in (f"R{number}" for number in range(1, 11)) if name not in campaigns]
    found = {
        "below the full figure": short,
        "trials that failed or were skipped": failed,
        "not run": missing,
    }
    return [f"{what}: {', '.join(names)}" for what, names in found.items() if names]


def campaign_row(name: str, entry: Mapping[str, Any]) -> str:
    figures = "; ".join(
        f"{key.replace('_', ' ')}: {figure(key, values)}"
        for key, values in entry["figures"].items()
    )
    trials = f"{entry['trials']:,} of {entry['full']:,}"
    cells = [name, entry["title"], trials, f"{entry['held']:,}", figures or "-"]
    return f"| {' | '.join(cells)} |"


def figure(name: str, values: Mapping[str, float]) -> str:
    """Return a number that was added up, or the median and the worst of the trials."""
    if "total" in values:
        return f"{values['total']:,.0f} in total"
    return f"median {with_unit(name, values['median'])}, worst {with_unit(name, values['worst'])}"


def saving_table() -> str:
    """Return how long checkpoints stop training, as `benchmarks/saving.py` measured it."""
    rows = [
        "| device | task | rows in the buffer | stall, median and worst | first save | share |",
        "|---|---|---:|---:|---:|---:|",
    ]
    notes = []
    for device, path in SAVING.items():
        report = load(path)
        rows += [saving_row(device, entry) for entry in report["rows"]]
        notes.append(f"{device}: {described(report['machine'])}.")
    return "\n".join(rows) + "\n\n" + "\n".join(notes) + "\n"


def saving_row(device: str, entry: Mapping[str, Any]) -> str:
    stall, worst, first = (
        f"{1e3 * entry[f'{name}stall_seconds']:.0f} ms" for name in ("", "worst_", "first_")
    )
    cells = [
        device,
        entry["env_id"],
        f"{entry['rows']:,}",
        f"{stall}, {worst}",
        first,
        f"{100 * entry['share_of_wall_time']:.2f} %",
    ]
    return f"| {' | '.join(cells)} |"


def rounds_table() -> str:
    """Return what a round of workers costs, as `benchmarks/remote_environments.py` measured it."""
    rounds = load(REMOTE)["round_milliseconds"]
    rows = [f"| `{name}` | {value:.2f} ms |" for name, value in rounds.items()]
    return table("| `vectorization` | a round of two workers |", "|---|---:|", rows)


def scaling_table() -> str:
    """Return the rates of 1 to 16 workers, and from which step on other machines are faster."""
    report = load(REMOTE)
    rows = [
        f"| {each['workers']} | {rate_cells(each['async'])} | {rate_cells(each['ray'])} |"
        for each in report["scaling"]
    ]
    header = "| workers | `async`, steps/s | efficiency | `ray`, steps/s | efficiency |"
    cores, most = report["machine"]["cores"], report["scaling"][-1]
    added = most["workers"] / most["ray"]["steps_per_second"] - report["step_seconds"]
    least = added / (most["workers"] / cores - 1)
    return table(header, "|---:|---:|---:|---:|---:|", rows) + (
        f"\n{described(report['machine'])}. With {most['workers']} actors, a round took "
        f"{1e3 * added:.0f} ms longer than a step. By calculation, they are faster than the "
        f"{cores} cores of this machine for environments that compute for {1e3 * least:.1f} ms or "
        "longer, if each actor has a core of another machine and the network adds nothing.\n"
    )


def rate_cells(entry: Mapping[str, float]) -> str:
    return f"{entry['steps_per_second']:,.0f} | {100 * entry['efficiency']:.0f} %"


def uneven_table() -> str:
    """Return lock-step rounds beside asynchronous ones, where some steps take longer."""
    uneven = load(REMOTE)["uneven"]
    rates = uneven["steps_per_second"]
    rows = [f"| `{name}` | {rate:,.0f} |" for name, rate in rates.items()]
    header = f"| `vectorization`, {uneven['workers']} workers | steps/s |"
    return table(header, "|---|---:|", rows)


def overhead_table() -> str:
    """Return what a trial costs besides training, as `benchmarks/sweeps.py` measured it."""
    report = load(SWEEPS)
    rows = [
        f"| {PLACES[name]} | {each['seconds_to_first_step']:.1f} s "
        f"| {1e3 * each['seconds_to_first_step_of_further_trials']:.0f} ms "
        f"| {each['seconds_per_further_trial']:.2f} s |"
        for name, each in report["places"].items()
    ]
    rows.append(
        f"| no sweep, in one process | | | {report['seconds_per_run_without_sweep']:.2f} s |"
    )
    header = "| trials run in | command to first step | next trial to first step | next trial |"
    return table(header, "|---|---:|---:|---:|", rows) + f"\n{described(report['machine'])}.\n"


def sizes_table() -> str:
    """Return files and bytes of a sweep: measured, and calculated for a large one."""
    report = load(SWEEPS)
    pendulum, hopper = report["sizes"]["pendulum"], report["sizes"]["hopper"]
    journal, runs = report["places"]["local"]["journal_bytes_per_trial"], MANY_TRIALS * SEEDS
    sizes = {
        "journal, a trial with 20 evaluations": (journal, MANY_TRIALS),
        "disk of a run of `sac/pendulum`, 3,000 steps": (pendulum["bytes_per_run"], runs),
        "disk of a run of `sac/mujoco` on Hopper-v5, 200,000 steps, calculated": (
            hopper["bytes_per_run"],
            runs,
        ),
    }
    files = pendulum["files_per_run"]
    rows = [f"| files of a run | {files} | {files * runs:,} |"]
    rows += [
        f"| {name} | {with_bytes(one)} | {with_bytes(one * times)} |"
        for name, (one, times) in sizes.items()
    ]
    header = f"| | one | {MANY_TRIALS:,} trials of {SEEDS} seeds, calculated |"
    return table(header, "|---|---:|---:|", rows) + f"\n{report['machine']['processor']}.\n"


def table(header: str, alignment: str, rows: Iterable[str]) -> str:
    return "\n".join([header, alignment, *rows]) + "\n"


def with_bytes(number: float) -> str:
    """Return a number of bytes with two digits or more."""
    power = min((len(str(int(number))) - 1) // 3, len(BYTES) - 1)
    value = number / 1_000**power
    return f"{value:.1f} {BYTES[power]}" if value < 10 else f"{value:,.0f} {BYTES[power]}"


def described(machine: Mapping[str, Any]) -> str:
    """Say on which machine times were measured, and whether other programs used it."""
    hardware = ", ".join(machine[key] for key in ("gpu", "processor") if key in machine)
    names = {"torch": "PyTorch", "ray": "Ray", "compile": "compile"}
    versions = [f"{name} {machine[key]}" for key, name in names.items() if key in machine]
    load = machine["load_before"]
    busy = f"; other programs used the machine, with a load of {load}" if load > BUSY else ""
    return f"{', '.join([hardware, *versions])}{busy}"


def with_unit(name: str, value: float) -> str:
    unit = next((unit for word, unit in UNITS.items() if word in name.split("_")), "")
    return f"{value:.3g}{unit}"


def linked(reference: str) -> str:
    """Return the reference with a link for each paper that has one."""
    for prefix, site in LINKS.items():
        reference = re.sub(rf"{prefix}(\S*\w)", rf"[\1]({site}\1)", reference)
    return reference


def load(path: Path) -> Any:
    return json.loads(read(path))


def read(page: Path) -> str:
    return (ROOT / page).read_text(encoding="utf-8") if (ROOT / page).exists() else ""


if __name__ == "__main__":
    sys.exit(main())
