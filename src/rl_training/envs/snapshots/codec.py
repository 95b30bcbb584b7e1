"""Encode Python and NumPy values as JSON, exactly and without pickle.

Strings, booleans, integers, finite floats, None and lists are encoded as themselves, all other
values as an object with a `kind`. If a mutable value occurs again, it is encoded as a reference, so
that it stays one object: a frame stack repeats its first frame, and environments have their random
generator as two attributes.
"""

from __future__ import annotations

import base64
import binascii
import math
import re
import reprlib
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from rl_training.envs.snapshots.plain_objects import (
    PLAIN_CLASSES,
    new_plain_object,
    plain_class_name,
)
from rl_training.errors import UserError
from rl_training.types import Json

_DTYPE = re.compile(r"[<>|=][biufcSU]\d+")
"""Booleans, numbers and fixed-width text; no objects, which would need pickle"""

_BIT_GENERATORS: dict[str, type[np.random.BitGenerator]] = {
    "PCG64": np.random.PCG64,
    "PCG64DXSM": np.random.PCG64DXSM,
    "MT19937": np.random.MT19937,
    "Philox": np.random.Philox,
    "SFC64": np.random.SFC64,
}


class Encoder:
    """Encodes the values of one snapshot; `encode` raises TypeError for unsupported types."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self._kept: list[object] = []  # kept alive, since Python reuses the ids of deleted objects

    def encode(self, value: object) -> Any:
        """Return `value` as JSON."""
        if isinstance(value, np.generic):
            return {"kind": "scalar", **_encode_array(np.asarray(value))}
        if value is None or type(value) in (bool, int, str):
            return value
        if type(value) is float:
            return value if math.isfinite(value) else {"kind": "float", "value": repr(value)}
        if type(value) is tuple:
            return {"kind": "tuple", "items": self._encode_all(value)}
        if id(value) in self._numbers:
            return {"kind": "same", "number": self._numbers[id(value)]}
        return self._encode_mutable(value)

    def _encode_mutable(self, value: object) -> Any:
        self._numbers[id(value)] = len(self._kept)
        self._kept.append(value)
        if type(value) is np.ndarray:
            return {"kind": "array", **_encode_array(value)}
        if type(value) is list:
            return self._encode_all(value)
        if type(value) is deque:
            items = self._encode_all(value)
            return {"kind": "deque", "maxlen": value.maxlen, "items": items}
        if type(value) is dict:
            return {"kind": "dict", "items": [self._encode_all(item) for item in value.items()]}
        if type(value) is np.random.Generator:
            state = value.bit_generator.state
            if state["bit_generator"] in _BIT_GENERATORS:
                return {"kind": "generator", "state": Encoder().encode(state)}
        if (name := plain_class_name(value)) is not None:
            attributes = [getattr(value, attribute) for attribute in PLAIN_CLASSES[name]]
            return {"kind": "object", "class": name, "attributes": self._encode_all(attributes)}
        raise TypeError(f"a value of type {type(value).__module__}.{type(value).__qualname__}")

    def _encode_all(self, values: Iterable[object]) -> list[Any]:
        return [self.encode(value) for value in values]


def encode_plain(value: object, name: str) -> Any:
    """Return plain values as JSON: floats that are not finite are encoded, the others as they are.

    Raises `UserError`, which calls the value `name`, for types that JSON does not have.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return Encoder().encode(float(value))
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [encode_plain(item, name) for item in value]
    if isinstance(value, dict) and all(isinstance(key, str | int) for key in value):
        return {key: encode_plain(item, name) for key, item in value.items()}
    raise UserError(
        f"{name} has {reprlib.repr(value)}; use numbers, strings, lists, and dicts with strings as "
        "keys"
    )


def decode_plain(encoded: object) -> Any:
    """Return the value that `encode_plain` encoded."""
    if isinstance(encoded, list):
        return [decode_plain(item) for item in encoded]
    if not isinstance(encoded, dict):
        return encoded
    if encoded.get("kind") == "float" and encoded.get("value") in ("inf", "-inf", "nan"):
        return float(encoded["value"])
    return {key: decode_plain(item) for key, item in encoded.items()}


def _encode_array(array: np.ndarray) -> Json:
    if not _DTYPE.fullmatch(array.dtype.str):
        raise TypeError(f"an array of {array.dtype}")
    data = base64.b64encode(array.tobytes()).decode("ascii")
    return {"dtype": array.dtype.str, "shape": list(array.shape), "data": data}


class Decoder:
    """Decodes the values that one `Encoder` encoded, in the same order.

    `decode` raises ValueError for anything else. It never imports or calls anything that a file
    names.
    """

    def __init__(self) -> None:
        self._objects: list[object] = []

    def decode(self, encoded: object) -> Any:
        """Return the value that was encoded."""
        if encoded is None or type(encoded) in (bool, int, float, str):
            return encoded
        if type(encoded) is list:
            items: list[Any] = []
            return self._fill(items, encoded, items.append)
        if type(encoded) is not dict:
            raise ValueError(f"{type(encoded).__name__} is not allowed in a snapshot")
        try:
            return self._decode_kind(encoded)
        except (KeyError, TypeError, OverflowError, IndexError, binascii.Error) as error:
            raise ValueError(f"a damaged value ({error!r})") from error

    def _decode_kind(self, encoded: Json) -> Any:
        match encoded["kind"]:
            case "float":
                return {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}[encoded["value"]]
            case "scalar":
                return _decode_array(encoded, shape=[])[()]
            case "tuple":
                return tuple(self.decode(item) for item in encoded["items"])
            case "same":
                return self._earlier(encoded["number"])
            case "array":
                return self._keep(_decode_array(encoded, shape=encoded["shape"]))
            case "deque":
                values: deque[Any] = deque(maxlen=encoded["maxlen"])
                return self._fill(values, encoded["items"], values.append)
            case "dict":
                return self._decode_dict(encoded["items"])
            case "generator":
                return self._keep(_decode_generator(encoded["state"]))
            case "object":
                return self._decode_object(encoded["class"], encoded["attributes"])
            case kind:
                raise ValueError(f"unknown kind {kind!r}")

    def _keep(self, value: Any) -> Any:
        self._objects.append(value)
        return value

    def _earlier(self, number: int) -> object:
        if type(number) is not int or not 0 <= number < len(self._objects):
            raise ValueError(f"a reference to value {number!r}, which does not exist")
        return self._objects[number]

    def _fill(self, container: Any, items: object, add: Callable[[Any], object]) -> Any:
        if type(items) is not list:
            raise ValueError("items that are not a list")
        self._keep(container)  # before its items: the encoder numbers containers first
        for item in items:
            add(self.decode(item))
        return container

    def _decode_dict(self, items: list[list[Any]]) -> dict[Any, Any]:
        values: dict[Any, Any] = {}
        self._keep(values)
        for encoded_key, encoded_value in items:
            key = self.decode(encoded_key)
            values[key] = self.decode(encoded_value)
        return values

    def _decode_object(self, name: str, attributes: list[Any]) -> object:
        value = self._keep(new_plain_object(name))
        for attribute, encoded in zip(PLAIN_CLASSES[name], attributes, strict=True):
            setattr(value, attribute, self.decode(encoded))
        return value


def _decode_array(encoded: Json, shape: list[int]) -> np.ndarray:
    if not _DTYPE.fullmatch(encoded["dtype"]):
        raise ValueError(f"an array of type {encoded['dtype']!r}")
    if any(type(size) is not int or size < 0 for size in shape) or len(shape) > 32:
        raise ValueError(f"an array of shape {shape!r}")
    dtype = np.dtype(encoded["dtype"])
    data = base64.b64decode(encoded["data"], validate=True)
    if len(data) != dtype.itemsize * math.prod(shape):
        raise ValueError(f"an array of shape {shape!r} with {len(data)} bytes")
    if not data:
        return np.empty(shape, dtype=dtype)
    return np.frombuffer(data, dtype=dtype).reshape(shape).copy()


def _decode_generator(encoded_state: object) -> np.random.Generator:
    state = Decoder().decode(encoded_state)
    bit_generator = _BIT_GENERATORS[state["bit_generator"]]()
    bit_generator.state = state
    return np.random.Generator(bit_generator)
