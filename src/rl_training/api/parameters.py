"""What the constructor of a managed class takes, derived from the models that check it.

`inspect.signature(SAC)`, `help(SAC)` and the stub that editors and type checkers read
(`algorithms.pyi`, written by `make generate`) all come from here.
"""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
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
from rl_training.config import TrainConfig
from rl_training.envs import EnvironmentSource
from rl_training.errors import UserError

ENVIRONMENT = "An id, an environment, a class or factory of them, or a whole `TrainConfig`"
NOT_FOR_AGENTS = ("algo", "seeds")
"""Keys of a config that an agent settles itself: its class is its algorithm, and it has one seed"""

_ALSO_TAKES: dict[str, Any] = {
    "compile": bool,
    "overlap": bool,
    "output_dir": Path,
    "init_from": Path,
}
"""What `TrainConfig` turns into a type of its model by itself"""

_SAYS_MORE = {"dataset": "; or arrays in memory, by D4RL's names"}
"""What an agent takes that a config cannot hold"""


@dataclass(frozen=True)
class Parameter:
    """A keyword argument."""

    name: str
    annotation: Any
    default: Any
    description: str
    """On one line; empty where the model has none"""

    @property
    def type_name(self) -> str:
        """Its type as it is written in code."""
        return type_name(self.annotation)


def parameters_of(spec: AlgorithmSpec) -> list[Parameter]:
    """The keys of a config, then the hyper-parameters of the algorithm."""
    own = spec.hyperparameters_type
    run = [name for name in TrainConfig.model_fields if name not in NOT_FOR_AGENTS]
    described = [(TrainConfig, name) for name in run] + [(own, name) for name in own.model_fields]
    replaced = {"algo_kwargs": own | Mapping[str, Any] | None}
    return [
        Parameter(
            name,
            replaced.get(name) or _accepted(name, model.model_fields[name]),
            _default(model.model_fields[name]),
            (description_of(model, name) or "") + _SAYS_MORE.get(name, ""),
        )
        for model, name in described
    ]


def signature_of(spec: AlgorithmSpec) -> inspect.Signature:
    """The environment, then every setting by keyword."""
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
    """The arguments as a section of a docstring in Google's style."""
    lines = ["Args:", *_wrapped(f"env: {ENVIRONMENT}.")]
    for each in parameters:
        kind = f" ({each.type_name} = {each.default!r})" if typed else ""
        meaning = f" {each.description}." if each.description else ""
        lines += _wrapped(f"{each.name}{kind}:{meaning}")
    return "\n".join(lines)


class LazySignature:
    """The signature of a managed class, made when someone looks at it.

    The algorithm may be registered after its class is made, and most programs never look.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._constructor = _constructor(owner)

    def __get__(self, instance: object, owner: type) -> inspect.Signature:
        spec = _spec_of(owner)
        if spec is None or _constructor(owner) is not self._constructor:
            raise AttributeError("__signature__")  # `inspect` then looks at `__init__`
        return signature_of(spec)


class LazyDocumentation:
    """The docstring of a managed class with its arguments, likewise."""

    def __init__(self, summary: str | None) -> None:
        self._summary = summary

    def __get__(self, instance: object, owner: type) -> str | None:
        spec = _spec_of(owner)
        if spec is None:
            return self._summary
        arguments = documentation_of(parameters_of(spec), typed=True)
        return f"{inspect.cleandoc(self._summary or spec.title)}\n\n{arguments}"


def type_name(annotation: Any) -> str:
    """A type as it is written in code, with models and containers by their bare names."""
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


def description_of(model: type[BaseModel], name: str) -> str | None:
    """A setting's docstring on one line; that of a parent where a child changes the default."""
    for base in model.__mro__:
        if found := _attribute_docstrings(base).get(name):
            return found
    return model.model_fields[name].description


@functools.cache
def _attribute_docstrings(model: type) -> Mapping[str, str]:
    """The first paragraph below each field of a class body, read from its source if there is one.

    Pydantic could collect them (`use_attribute_docstrings`), but would parse the source of every
    model whenever it is imported.
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
        field.target.id: " ".join(inspect.cleandoc(text).partition("\n\n")[0].split()).rstrip(".")
        for field, following in itertools.pairwise(definition.body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
        if isinstance(text := following.value.value, str)
    }


def _spec_of(agent: type) -> AlgorithmSpec | None:
    try:
        return get_algorithm_spec(getattr(agent, "algo", ""))
    except UserError:
        return None


def _constructor(owner: type) -> object:
    return getattr(owner, "__init__")  # noqa: B009 (mypy does not let it be read from a type)


def _default(field: FieldInfo) -> Any:
    """`algo_kwargs` is required of a config, but not of an agent."""
    return None if field.is_required() else field.get_default(call_default_factory=True)


def _accepted(name: str, field: FieldInfo) -> Any:
    annotation = _argument_type(field.annotation)
    return _union([annotation, _ALSO_TAKES[name]]) if name in _ALSO_TAKES else annotation


def _argument_type(annotation: Any) -> Any:
    """What may be given for a field, where lists serve as tuples and mappings as models.

    The models are strict, but values reach them as YAML would have given them. Bounds are left out.
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
        return annotation | Mapping[str, Any]
    return annotation


def _union(kinds: Iterable[Any]) -> Any:
    """Without repetition, its literals as one, and None at its end."""
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
