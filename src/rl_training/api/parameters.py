"""Constructor parameters of the managed classes, derived from the models that validate them.

They are the source of `inspect.signature(SAC)`, `help(SAC)` and `algorithms.pyi`, the stub for
editors and type checkers that `make generate` writes.
"""

from __future__ import annotations

import functools
import inspect
import operator
import textwrap
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from rl_training.algorithms.spec import AlgorithmSpec, get_algorithm_spec
from rl_training.config import TrainConfig, WrapperSection
from rl_training.config_descriptions import description_of, symbols_of
from rl_training.envs import EnvironmentSource
from rl_training.errors import UserError

ENVIRONMENT = "Gymnasium id, environment, environment class or factory, or a `TrainConfig`"
NOT_FOR_AGENTS = ("algo", "seeds")
"""Config keys that an agent does not accept: its class sets `algo`, and it has only one seed"""

_ALSO_TAKES: dict[str, Any] = {
    "compile": bool,
    "overlap": bool,
    "output_dir": Path,
    "init_from": Path,
    "networks": object,
}
"""Types that an agent or `TrainConfig` converts to the type of the field"""

_EXTRA_DESCRIPTIONS = {
    "dataset": ". Also a mapping of arrays with D4RL's names",
    "networks": ". Also a class of your own networks",
}
"""Values that an agent accepts and a config does not"""


@dataclass(frozen=True)
class Parameter:
    """A keyword argument of a managed class."""

    name: str
    annotation: Any
    default: Any
    description: str
    """One line; empty if the field has no docstring"""
    symbol: str = ""
    """Symbol in the algorithm's paper; empty if it has none"""

    @property
    def type_name(self) -> str:
        """The type as Python source code."""
        return type_name(self.annotation)


def parameters_of(spec: AlgorithmSpec) -> list[Parameter]:
    """Return the config keys, followed by the hyper-parameters of the algorithm."""
    own = spec.hyperparameters_type
    run = [name for name in TrainConfig.model_fields if name not in NOT_FOR_AGENTS]
    described = [(TrainConfig, name) for name in run] + [(own, name) for name in own.model_fields]
    replaced = {"algo_kwargs": own | Mapping[str, Any] | None}
    symbols = symbols_of(own)
    return [
        Parameter(
            name,
            replaced.get(name) or _accepted(name, model.model_fields[name]),
            _default(model.model_fields[name]),
            (description_of(model, name) or "") + _EXTRA_DESCRIPTIONS.get(name, ""),
            symbols.get(name, "") if model is own else "",
        )
        for model, name in described
    ]


def signature_of(spec: AlgorithmSpec) -> inspect.Signature:
    """Return the signature: `env`, followed by all settings as keyword arguments."""
    environment = inspect.Parameter(
        "env",
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        default=None,
        annotation=EnvironmentSource | TrainConfig | None,
    )
    settings = [
        inspect.Parameter(
            each.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=each.default,
            annotation=each.annotation,
        )
        for each in parameters_of(spec)
    ]
    return inspect.Signature([environment, *settings])


def documentation_of(parameters: Iterable[Parameter], *, typed: bool) -> str:
    """Return the `Args:` section of a Google-style docstring."""
    lines = ["Args:", *_wrapped(f"env: {ENVIRONMENT}.")]
    for each in parameters:
        kind = f" ({each.type_name} = {each.default!r})" if typed else ""
        meaning = f" {each.description}." if each.description else ""
        meaning += f" Symbol: {each.symbol}." if each.symbol else ""
        lines += _wrapped(f"{each.name}{kind}:{meaning}")
    return "\n".join(lines)


class LazySignature:
    """Signature of a managed class, built on access.

    The algorithm may be registered after its class is defined, and most programs never need it.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._constructor = _constructor(owner)

    def __get__(self, instance: object, owner: type) -> inspect.Signature:
        spec = _spec_of(owner)
        if spec is None or _constructor(owner) is not self._constructor:
            raise AttributeError("__signature__")  # `inspect` then uses `__init__`
        return signature_of(spec)


class LazyDocumentation:
    """Docstring of a managed class with its `Args:` section, built on access."""

    def __init__(self, summary: str | None) -> None:
        self._summary = summary

    def __get__(self, instance: object, owner: type) -> str | None:
        spec = _spec_of(owner)
        if spec is None:
            return self._summary
        arguments = documentation_of(parameters_of(spec), typed=True)
        return f"{inspect.cleandoc(self._summary or spec.title)}\n\n{arguments}"


def type_name(annotation: Any) -> str:
    """Return a type as Python source code, with class names but not their modules."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation is None or annotation is types.NoneType:
        return "None"
    if origin is Literal:
        return f"Literal[{', '.join(map(repr, arguments))}]"
    if _is_union(annotation):
        return " | ".join(map(type_name, arguments))
    if origin is not None:
        return f"{origin.__name__}[{', '.join(map(type_name, arguments))}]"
    return str(annotation.__name__)


def _spec_of(agent: type) -> AlgorithmSpec | None:
    try:
        return get_algorithm_spec(getattr(agent, "algo", ""))
    except UserError:
        return None


def _constructor(owner: type) -> object:
    return getattr(owner, "__init__")  # noqa: B009 (mypy rejects `owner.__init__`)


def _default(field: FieldInfo) -> Any:
    """Return the default. `algo_kwargs` is required in a config but optional for an agent."""
    return None if field.is_required() else field.get_default(call_default_factory=True)


def _accepted(name: str, field: FieldInfo) -> Any:
    annotation = _argument_type(field.annotation)
    return _union([annotation, _ALSO_TAKES[name]]) if name in _ALSO_TAKES else annotation


def _argument_type(annotation: Any) -> Any:
    """Return the type that an argument may have: any sequence for a tuple, a mapping for a model.

    Arguments are converted to plain values before the strict models validate them. Bounds are left
    out.
    """
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _argument_type(arguments[0])
    if _is_union(annotation):
        return _union(map(_argument_type, arguments))
    if origin in (tuple, list):
        kinds = [_argument_type(kind) for kind in arguments if kind is not Ellipsis]
        return Sequence[_union(kinds)]  # type: ignore[misc]
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        accepted = annotation | Mapping[str, Any]
        return accepted | str if annotation is WrapperSection else accepted
    return annotation


def _union(kinds: Iterable[Any]) -> Any:
    """Return the union without duplicates, with literals merged and None last."""
    flat = [part for kind in kinds for part in (get_args(kind) if _is_union(kind) else [kind])]
    literals = [value for kind in flat if get_origin(kind) is Literal for value in get_args(kind)]
    plain = [kind for kind in flat if get_origin(kind) is not Literal]
    together = [Literal[tuple(literals)]] if literals else []
    parts = sorted([*plain, *together], key=lambda kind: kind is types.NoneType)
    return functools.reduce(operator.or_, dict.fromkeys(parts))


def _is_union(annotation: Any) -> bool:
    return get_origin(annotation) in (Union, types.UnionType)


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(
        text,
        width=88,
        initial_indent="    ",
        subsequent_indent="        ",
        break_long_words=False,
        break_on_hyphens=False,
    )
