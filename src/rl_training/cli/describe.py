"""`rl-training config --describe`: which settings to describe, and their layout as text."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import textwrap
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rl_training.algorithms.spec import AlgorithmSpec, get_algorithm_spec, list_algorithm_specs
from rl_training.config import TrainConfig
from rl_training.config_descriptions import Group, Setting, dataset_groups, groups_of, value_text
from rl_training.errors import UserError
from rl_training.validation import suggestion

SHORTEST_WIDTH, LONGEST_WIDTH = 60, 100
WIDEST_VALUE = 19
SECTIONS = ("early_stopping", "replay", "dataset", "algo_kwargs")
"""Keys whose value is described key by key"""
BELOW = "(below)"
HINT = "To list the settings of an algorithm too, add its name: rl-training config --describe sac"


def describe(names: Sequence[str], config: TrainConfig | None, *, width: int, as_json: bool) -> str:
    """Describe the settings of runs and of one algorithm.

    `names` are the algorithm's name, then keys; without keys, all settings are described. With a
    config, its algorithm is described, and its values are shown.
    """
    spec, keys = _algorithm_and_keys(names, config)
    known = groups_of(spec) if config is None else _used(groups_of(spec), config)
    groups = _select(known, keys, spec)
    values = {} if config is None else _values(config)
    if as_json:
        return _as_json(groups, values)
    text = "\n\n".join(_tables(groups, spec, values, _clamped(width)))
    return text if spec is not None or keys else f"{text}\n\n{HINT}"


def _algorithm_and_keys(
    names: Sequence[str], config: TrainConfig | None
) -> tuple[AlgorithmSpec | None, list[str]]:
    known = [spec.name for spec in list_algorithm_specs()]
    keys = [name.removeprefix("algo_kwargs.") for name in names]
    if keys and keys[0] in known:
        if config is not None and keys[0] != config.algo:
            raise UserError(f"--describe {keys[0]}: the algorithm of the config is {config.algo}")
        return get_algorithm_spec(keys[0]), keys[1:]
    if config is not None:
        return config.spec, keys
    return None, keys


def _select(groups: list[Group], keys: Sequence[str], spec: AlgorithmSpec | None) -> list[Group]:
    """Return the settings with these keys; a section's key includes the keys inside it."""
    if not keys:
        return groups
    for key in keys:
        if not any(_has_key(setting, key) for group in groups for setting in group.settings):
            raise UserError(_unknown(key, groups, spec))
    chosen = [
        Group(group.title, tuple(s for s in group.settings if any(_has_key(s, k) for k in keys)))
        for group in groups
    ]
    return [group for group in chosen if group.settings]


def _has_key(setting: Setting, key: str) -> bool:
    return setting.key == key or setting.key.startswith(f"{key}.")


def _unknown(key: str, groups: Iterable[Group], spec: AlgorithmSpec | None) -> str:
    known = [setting.key for group in groups for setting in group.settings]
    if spec is not None:
        hint = suggestion(key, known)
        return f"{key!r}: no such setting of {spec.name}{hint or _all_settings(spec.name)}"
    specs = list_algorithm_specs()
    having = [each.name for each in specs if key in each.hyperparameters_type.model_fields]
    if having:
        return (
            f"{key!r} is a setting of {', '.join(having)}; add the name of one of them: "
            f"rl-training config --describe {having[0]} {key}"
        )
    hint = suggestion(key, [each.name for each in specs] + known)
    return f"{key!r}: no such algorithm or setting{hint or _all_settings()}"


def _all_settings(algorithm: str = "") -> str:
    command = f"rl-training config --describe {algorithm}".strip()
    return f"; `{command}` lists all settings"


def _values(config: TrainConfig) -> dict[str, Any]:
    """Return the values of a config by key; of `dataset` only if it is a single section."""
    run = config.to_mapping()
    inside = {
        key: value
        for name in SECTIONS
        if isinstance(run[name], dict)
        for key, value in _inside(run[name], name)
    }
    return {**run, **inside, **run["algo_kwargs"]}


def _inside(section: Mapping[str, Any], name: str) -> Iterator[tuple[str, Any]]:
    """Yield the values of a section, and of the sections in it, by their complete keys."""
    for key, value in section.items():
        yield f"{name}.{key}", value
        if isinstance(value, dict):
            yield from _inside(value, f"{name}.{key}")


def _used(groups: Iterable[Group], config: TrainConfig) -> list[Group]:
    """Leave out the kinds of datasets that the config does not have."""
    kinds = [section.kind for section in config.dataset_sections]
    used = {group.title for group in dataset_groups(kinds)} if kinds else set()
    unused = {group.title for group in dataset_groups()} - used
    return [group for group in groups if group.title not in unused]


def _as_json(groups: Iterable[Group], values: Mapping[str, Any]) -> str:
    rows = [
        {"group": group.title, **dataclasses.asdict(setting), **_value_of(setting, values)}
        for group in groups
        for setting in group.settings
    ]
    return json.dumps(rows, indent=1, ensure_ascii=False)


def _value_of(setting: Setting, values: Mapping[str, Any]) -> dict[str, Any]:
    return {"value": values[setting.key]} if setting.key in values else {}


def _tables(
    groups: Sequence[Group], spec: AlgorithmSpec | None, values: Mapping[str, Any], width: int
) -> Iterable[str]:
    """Format a line of headings, then each group as a title and a table."""
    settings = [setting for group in groups for setting in group.settings]
    symbol = "symbol" if any(each.symbol for each in settings) else ""
    headings = ("key", "value" if values else "default", symbol, "type")
    table = [headings, *(_cells(each, values) for each in settings)]
    columns = [max(_width(row[index]) for row in table) for index in range(3)]
    columns[1] = min(columns[1], WIDEST_VALUE)
    number, rest = sum(column > 0 for column in columns), width - sum(columns)
    longest = max(len(word) for row in table for word in row[3].split())
    gap = 2 if rest - 2 * number >= longest else 1
    columns.append(max(longest, rest - gap * number))
    yield "\n".join([*_row(headings, columns, gap), "    meaning"])
    for group in groups:
        title = f"{group.title} (algo_kwargs)" if _is_own(group, spec) else group.title
        rows = [title, "-" * len(title)]
        for setting in group.settings:
            rows += _row(_cells(setting, values), columns, gap)
            rows += _paragraph(_meaning(setting, values), width)
        yield "\n".join(rows)


def _is_own(group: Group, spec: AlgorithmSpec | None) -> bool:
    return spec is not None and group.title == spec.title


def _cells(setting: Setting, values: Mapping[str, Any]) -> tuple[str, ...]:
    return setting.key, _shown(setting, values), setting.symbol, setting.type


def _shown(setting: Setting, values: Mapping[str, Any]) -> str:
    """Return the value in the config, or the default if there is none."""
    if setting.key not in values:
        return setting.default_text
    value = values[setting.key]
    if setting.key in SECTIONS and value:
        return f"{len(value)} sections" if isinstance(value, list) else BELOW
    return value_text(value)


def _meaning(setting: Setting, values: Mapping[str, Any]) -> str:
    """Return the meaning; if the config changes the default, it follows."""
    is_changed = not setting.required and _shown(setting, values) not in (
        setting.default_text,
        BELOW,
    )
    return f"{setting.meaning}." + (f" Default: {setting.default_text}." if is_changed else "")


def _paragraph(text: str, width: int) -> list[str]:
    return textwrap.wrap(
        text, width, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False
    )


def _row(cells: Sequence[str], columns: Sequence[int], gap: int) -> list[str]:
    """Format one row of a table; text that is too long continues in its column.

    A column of width 0 is left out.
    """
    shown = [(cell, column) for cell, column in zip(cells, columns, strict=True) if column]
    wrapped = [_wrapped(cell, column) for cell, column in shown]
    lines = itertools.zip_longest(*wrapped, fillvalue="")
    widths = [column for _, column in shown]
    return [(" " * gap).join(map(_pad, line, widths)).rstrip() for line in lines]


def _wrapped(cell: str, column: int) -> list[str]:
    """Split a cell into lines; a comparison such as `>= 0` stays on one line."""
    kept = re.sub(r"([<>]=?) ", "\\1\N{NO-BREAK SPACE}", cell)
    lines = textwrap.wrap(kept, column, break_long_words=False, break_on_hyphens=False)
    return [line.replace("\N{NO-BREAK SPACE}", " ") for line in lines] or [""]


def _pad(text: str, columns: int) -> str:
    return text + " " * (columns - _width(text))


def _width(text: str) -> int:
    """Return the number of columns of a text; accents above a letter take none."""
    return sum(not unicodedata.combining(character) for character in text)


def _clamped(width: int) -> int:
    return max(SHORTEST_WIDTH, min(width, LONGEST_WIDTH))
