"""Descriptions of all settings: key, type, default, meaning and the paper's symbol.

They come from the models that validate a config, and from the docstrings of their fields. They are
the source of `rl-training config --describe`, of `help(SAC)` and of the tables in docs/.
"""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import json
import re
import textwrap
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from rl_training.algorithms.hyperparameters import Hyperparameters
from rl_training.algorithms.spec import AlgorithmSpec
from rl_training.config import EarlyStopping, HindsightSection, TrainConfig
from rl_training.data.sections import SECTIONS, DataSection

LARGE_BOUND = 10**6
"""Larger bounds only exclude absurd values and are not described"""

_TYPE_NAMES = {int: "integer", float: "number", str: "text"}


@dataclass(frozen=True)
class Setting:
    """One key of a config."""

    key: str
    """As in a config file; keys inside a section have its name as prefix, `dataset.weight`"""
    type: str
    """The accepted values in words, such as `number > 0`"""
    default: Any
    """None if `required`"""
    meaning: str
    """Sentences without the last period"""
    symbol: str = ""
    """Symbol in the algorithm's paper; empty if it has none"""
    required: bool = False

    @property
    def default_text(self) -> str:
        return "required" if self.required else value_text(self.default)


@dataclass(frozen=True)
class Group:
    """The settings of one section of a config."""

    title: str
    settings: tuple[Setting, ...]


def run_group() -> Group:
    """Describe the top level of a config."""
    return Group("Run", _settings(TrainConfig))


def early_stopping_group() -> Group:
    """Describe the section `early_stopping`."""
    return Group("Early stopping", _settings(EarlyStopping, prefix="early_stopping."))


def hindsight_group() -> Group:
    """Describe the section `replay.hindsight`."""
    return Group("Hindsight", _settings(HindsightSection, prefix="replay.hindsight."))


def section_group(title: str, model: type[BaseModel], prefix: str = "") -> Group:
    """Describe the keys of any other model, such as those of a sweep file."""
    return Group(title, _settings(model, prefix=prefix))


def dataset_groups(kinds: Iterable[str] = tuple(SECTIONS)) -> list[Group]:
    """Describe the section `dataset`: the keys of every kind, then the keys of each one."""
    kind, *shared = _settings(DataSection, prefix="dataset.")
    known = Setting(kind.key, _literals(list(SECTIONS)), None, kind.meaning, required=True)
    return [
        Group("Dataset", (known, *shared)),
        *(Group(f"Dataset of kind {kind}", _own_settings(SECTIONS[kind])) for kind in kinds),
    ]


def algorithm_group(spec: AlgorithmSpec) -> Group:
    """Describe the section `algo_kwargs`: the algorithm's own settings."""
    model = spec.hyperparameters_type
    return Group(spec.title, _settings(model, symbols=symbols_of(model)))


def groups_of(spec: AlgorithmSpec | None) -> list[Group]:
    """Describe the settings that apply to an algorithm, or all settings of runs if it is None."""
    run, sections = run_group(), [early_stopping_group(), hindsight_group()]
    if spec is None:
        return [run, *sections, *dataset_groups()]
    if spec.regimes == ("online",):
        without_data = tuple(each for each in run.settings if each.key != "dataset")
        return [Group(run.title, without_data), *sections, algorithm_group(spec)]
    return [run, *sections, *dataset_groups(), algorithm_group(spec)]


def symbols_of(model: type[Hyperparameters]) -> dict[str, str]:
    """Return the symbols of an algorithm's paper, by setting."""
    declared = [vars(base).get("symbols", {}) for base in reversed(model.__mro__)]
    return {name: symbol for symbols in declared for name, symbol in symbols.items()}


def description_of(model: type[BaseModel], name: str) -> str | None:
    """Return the docstring of a field on one line, inherited if a subclass has none.

    `{default_learning_starts}` stands for that number of the model, so that a docstring for all
    algorithms names none of them.
    """
    for base in model.__mro__:
        if found := _attribute_docstrings(base).get(name):
            return re.sub(r"\{(\w+)\}", lambda match: f"{getattr(model, match[1]):,}", found)
    return model.model_fields[name].description


def type_text(field: FieldInfo) -> str:
    """Return the accepted values of a field in words."""
    if field.description is not None:  # strings with a pattern describe their values themselves
        optional = types.NoneType in get_args(field.annotation)
        return f"{field.description} or null" if optional else field.description
    return _type_text(field.annotation, field.metadata)


def value_text(value: Any) -> str:
    """Return a value as YAML on one line, with `_` between thousands."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(value_text, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {value_text(part)}' for key, part in value.items())}}}"
    if isinstance(value, str):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:_}"
    return json.dumps(value).replace("e-0", "e-")


def _settings(
    model: type[BaseModel], *, prefix: str = "", symbols: Mapping[str, str] | None = None
) -> tuple[Setting, ...]:
    return tuple(
        Setting(
            f"{prefix}{name}",
            type_text(field),
            _default(field),
            description_of(model, name) or "",
            (symbols or {}).get(name, ""),
            required=_default(field) is None and field.is_required(),
        )
        for name, field in model.model_fields.items()
    )


def _default(field: FieldInfo) -> Any:
    if field.annotation is Hyperparameters:  # `algo_kwargs`: a missing section is an empty one
        return {}
    default = None if field.is_required() else field.get_default(call_default_factory=True)
    return {} if isinstance(default, BaseModel) else default  # of a section: its own defaults


def _own_settings(section: type[DataSection]) -> tuple[Setting, ...]:
    """Describe the keys of one kind of dataset that not every kind has."""
    shared = {f"dataset.{name}" for name in DataSection.model_fields}
    return tuple(each for each in _settings(section, prefix="dataset.") if each.key not in shared)


@functools.cache
def _attribute_docstrings(model: type) -> Mapping[str, str]:
    """Return the docstring of each field on one line, read from the source of the class.

    Pydantic's `use_attribute_docstrings` is not used: it parses the source of every model at
    import.
    """
    if not issubclass(model, BaseModel) or model is BaseModel:
        return {}
    try:
        source = inspect.getsource(model)
    except (OSError, TypeError):
        return {}
    [definition] = ast.parse(textwrap.dedent(source)).body
    assert isinstance(definition, ast.ClassDef)
    return {
        field.target.id: " ".join(text.split()).rstrip(".")
        for field, following in itertools.pairwise(definition.body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
        if isinstance(text := following.value.value, str)
    }


def _type_text(annotation: Any, metadata: Sequence[Any] = (), *, plural: bool = False) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type_text(arguments[0], _constraints(arguments[1:]), plural=plural)
    if origin in (Union, types.UnionType):
        return _union_text(arguments)
    if annotation is bool:
        return _literals([True, False])
    if origin is Literal:
        return _literals(arguments)
    if origin in (list, tuple):
        items = [item for item in arguments if item is not Ellipsis]
        number = f"{len(items)} " if len(items) > 1 else ""
        return f"list of {number}{_type_text(items[0], plural=True)}"
    name = _TYPE_NAMES.get(annotation, "mapping") + ("s" if plural else "")
    return f"{name}{_bounds(_constraints(metadata))}"


def _union_text(options: Sequence[Any]) -> str:
    """Return the options with literals first and null last."""
    literals = [
        value for each in options if get_origin(each) is Literal for value in get_args(each)
    ]
    others = [each for each in options if get_origin(each) is not Literal]
    parts = [_quoted(value) for value in literals]
    parts += [_type_text(each) for each in others if each is not types.NoneType]
    return _either([*parts, "null"] if types.NoneType in others else parts)


def _literals(values: Iterable[Any]) -> str:
    return _either([_quoted(value) for value in values])


def _quoted(value: Any) -> str:
    return json.dumps(value)


def _either(parts: Sequence[str]) -> str:
    """Join options, each of which may be a list of options itself: `a, b or c`."""
    *first, last = " or ".join(parts).split(" or ")
    return f"{', '.join(first)} or {last}" if first else last


def _constraints(metadata: Iterable[Any]) -> list[Any]:
    """Return single constraints; `Field(...)` inside `Annotated` may hold several."""
    return [
        part
        for each in metadata
        for part in (each.metadata if isinstance(each, FieldInfo) else [each])
    ]


def _bounds(constraints: Iterable[Any]) -> str:
    found = {
        name: getattr(each, name)
        for each in constraints
        for name in ("gt", "ge", "lt", "le")
        if getattr(each, name, LARGE_BOUND) < LARGE_BOUND
    }
    if found.keys() == {"ge", "le"}:
        return f" from {found['ge']:,} to {found['le']:,}"
    signs = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
    parts = [f"{sign} {found[name]:,}" for name, sign in signs.items() if name in found]
    return f" {' and '.join(parts)}" if parts else ""
