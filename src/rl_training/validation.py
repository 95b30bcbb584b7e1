"""Strict models with error messages that name the key, its value and the allowed values."""

from __future__ import annotations

import difflib
import os
import re
import reprlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from rl_training.errors import ConfigError, UserError, printable

Model = TypeVar("Model", bound=BaseModel)


MAX_DEPTH = 20
MAX_VALUE = 200
"""Maximum number of characters of a value in a message"""
MAX_MESSAGE = 1_500
"""Number of characters after which a message names no further errors"""
_PHRASES = {
    "int_type": "an integer",
    "float_type": "a number",
    "string_type": "a string",
    "bool_type": "true or false",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "too_short": "a non-empty list",
    "finite_number": "a finite number",
    "string_too_long": "shorter text",
}


MAX_SEEDS = 10_000
_COUNT = re.compile(
    r"(?P<number>[+-]?(\d{1,3}(,\d{3})+|\d+(_\d+)*)(\.\d+)?(e[+-]?\d{1,2})?)(?P<unit>[kmb]?)",
    re.ASCII | re.IGNORECASE,
)
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9}
_SEEDS = re.compile(r"(\d{1,10})(?:-(\d{1,10}))?", re.ASCII)


class StrictModel(BaseModel):
    """An immutable model that rejects unknown keys, wrong types and non-finite numbers."""

    model_config: ClassVar[ConfigDict] = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        allow_inf_nan=False,
        str_max_length=4096,  # the longest path that Linux accepts
    )


def validate(model: type[Model], values: Mapping[str, Any], *, section: str = "") -> Model:
    """Build `model` from `values`. Raises one `ConfigError` that lists all errors."""
    try:
        return model.model_validate(plain(dict(values)))
    except ValidationError as error:
        raise ConfigError(explain(error, model, section)) from None


def plain(value: Any, depth: int = 0) -> Any:
    """Convert NumPy values, tuples and paths to the types that YAML would give."""
    if depth > MAX_DEPTH:  # the model rejects it later
        return value
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, dict):
        return {key: plain(part, depth + 1) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain(part, depth + 1) for part in value]
    return value


def user_path(path: str | Path, key: str = "") -> Path:
    """Expand `~` in a path that the user wrote, in the config at `key` or as an argument.

    The path may not exist yet. Raises `UserError` if no file can have this path.
    """
    try:
        expanded = Path(path).expanduser()
        os.lstat(expanded)
    except (FileNotFoundError, NotADirectoryError):
        return expanded
    except RuntimeError:
        home = Path(path).parts[0]
        reason = f"the home folder {home} does not exist; write the full path instead"
    except OSError as error:
        reason = f"cannot be used as a path ({error.strerror})"
    except ValueError:
        reason = "contains characters that no path can have"
    else:
        return expanded
    kind = ConfigError if key else UserError
    raise kind(f"{key} = {short(str(path))}: {reason}" if key else f"{short(str(path))}: {reason}")


def explain(error: ValidationError, model: type[BaseModel], section: str = "") -> str:
    """Format validation errors, one line per wrong key."""
    wrong: dict[tuple[str, ...], list[ErrorDetails]] = {}
    for detail in error.errors(include_url=False):
        wrong.setdefault(_field_path(detail["loc"], model), []).append(detail)
    prefix = (section,) if section else ()
    return limited(
        [_describe(".".join(prefix + path), details, model) for path, details in wrong.items()]
    )


def limited(problems: Sequence[str]) -> str:
    """Join problems, one per line. A long list ends with the number of those left out."""
    lines: list[str] = []
    length = 0
    for problem in problems:
        length += len(problem) + 1
        if lines and length > MAX_MESSAGE:
            return "\n".join([*lines, f"and {len(problems) - len(lines)} more errors"])
        lines.append(problem)
    return "\n".join(lines)


def suggestion(word: str, known: Iterable[str]) -> str:
    """Return `; did you mean 'x'?` for the known name closest to `word`, or an empty string."""
    names = list(known) if len(word) <= MAX_VALUE else []  # comparing long words takes long
    by_lower = {name.lower(): name for name in names}
    close = difflib.get_close_matches(word.lower(), list(by_lower), n=1, cutoff=0.6)
    return f"; did you mean {by_lower[close[0]]!r}?" if close else ""


def _field_path(location: tuple[int | str, ...], model: type[BaseModel]) -> tuple[str, ...]:
    """Return the keys of an error location, without the tags that pydantic adds for unions."""
    path: list[str] = []
    current: type[BaseModel] | None = model
    for part in location:
        if current is None and not isinstance(part, int):
            break
        path.append(key_name(str(part)))
        if current is not None:
            field = current.model_fields.get(str(part))
            current = _nested_model(field.annotation) if field else None
    return tuple(path)


def _nested_model(annotation: Any) -> type[BaseModel] | None:
    candidates = [annotation, *getattr(annotation, "__args__", ())]
    models = [c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)]
    return models[0] if models else None


def _describe(key: str, details: list[ErrorDetails], model: type[BaseModel]) -> str:
    first = details[0]
    if first["type"] == "missing":
        return f"{key}: required, but missing"
    value = short(first["input"])
    if first["type"] == "extra_forbidden":
        known = _known_keys(first["loc"], model)
        hint = suggestion(str(first["loc"][-1]), known)
        return f"{key} = {value}: unknown key{hint or '; allowed: ' + ', '.join(known)}"
    if first["type"] == "value_error":
        return str(first.get("ctx", {}).get("error", first["msg"]))
    if first["type"] == "string_pattern_mismatch":
        field = model.model_fields[str(first["loc"][-1])]
        return f"{key} = {value}: must be {field.description}"
    expectations = list(dict.fromkeys(_expectation(detail) for detail in details))
    hint = ""
    if isinstance(first["input"], str):
        choices = [c for d in details for c in _choices(d)]
        hint = suggestion(first["input"], choices)
    return f"{key} = {value}: must be {' or '.join(expectations)}{hint}"


def _expectation(detail: ErrorDetails) -> str:
    if choices := _choices(detail):
        return ", ".join(choices)
    if detail["type"] == "too_long":
        return f"a list of at most {detail['ctx']['max_length']:,} entries"
    return _PHRASES.get(detail["type"]) or detail["msg"].removeprefix("Input should be ")


def _choices(detail: ErrorDetails) -> list[str]:
    if detail["type"] != "literal_error":
        return []
    expected = str(detail.get("ctx", {}).get("expected", ""))
    return [choice.strip().strip("'") for choice in expected.replace(" or ", ", ").split(",")]


def _known_keys(location: tuple[int | str, ...], model: type[BaseModel]) -> list[str]:
    current: type[BaseModel] = model
    for part in location[:-1]:
        field = current.model_fields.get(str(part))
        current = (_nested_model(field.annotation) if field else None) or current
    return sorted(current.model_fields)


def short(value: Any) -> str:
    """Format a value as printable text of limited length, in limited time."""
    try:
        text = _printer.repr(value)
    except ValueError:  # an integer with too many digits for Python to print
        return f"<{type(value).__name__}>"
    text = printable(re.sub(r"\n\s*", " ", text))  # arrays are printed with line breaks
    return text if len(text) <= MAX_VALUE else f"{text[: MAX_VALUE - 3]}..."


def key_name(key: Any) -> str:
    """Format a key: as it is if that is clear, else quoted, such as `''` for an empty one."""
    plain_name = isinstance(key, str) and re.fullmatch(r"[\w.\-\[\]]{1,80}", key)
    return key if plain_name else short(key)


_printer = reprlib.Repr()
_printer.maxstring = _printer.maxother = _printer.maxlong = 80
_printer.maxlevel = 3


def parse_count(text: str) -> int | None:
    """Parse an integer such as `10000`, `10_000`, `10,000`, `1e4`, `10k` or `1.5M`; else None."""
    found = _COUNT.fullmatch(text.strip())
    if found is None:
        return None
    number = Decimal(found["number"].replace(",", "")) * _UNITS[found["unit"].lower()]
    return int(number) if number == number.to_integral_value() else None


def parse_seeds(text: str, name: str = "--seeds") -> list[int]:
    """Parse seeds such as `0,1,2`, `0-4` or `0,2,5-7`; `name` is that of the option or key."""
    seeds: list[int] = []
    for part in text.split(","):
        found = _SEEDS.fullmatch(part.strip())
        if found is None:
            raise ConfigError(f"{name} {text!r}: must be integers or ranges, such as 0,1,2 or 0-4")
        first, last = int(found[1]), int(found[2] or found[1])
        if last < first:
            raise ConfigError(
                f"{name} {text!r}: the range {part.strip()} is reversed; use {last}-{first}"
            )
        if last - first >= MAX_SEEDS - len(seeds):
            raise ConfigError(f"{name} {text!r}: more than {MAX_SEEDS:,} seeds")
        seeds += range(first, last + 1)
    repeated = [str(seed) for seed, times in Counter(seeds).items() if times > 1]
    if repeated:
        raise ConfigError(f"{name} {text!r}: repeats {', '.join(repeated[:10])}")
    return seeds
