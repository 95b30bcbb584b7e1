"""Networks that a user gives in Python, as a factory of plain modules.

The factory is a class, or an instance of one, with any of these methods:

- `encoder(observation: ObservationSpec)`: a module from the leaves of an observation, a dictionary
  of tensors `(batch, *shape)`, to features `(batch, n)`. It gets the tensor itself if an
  observation is a single array.
- `actor(inputs: int, outputs: int)`, `critic(inputs: int, outputs: int)` and `value(...)`: modules
  from `(batch, inputs)` to `(batch, outputs)`. Inputs are features, followed by actions if the
  critic values them.

What it does not define is built in.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from rl_training.errors import ConfigError, brief
from rl_training.observations import ObservationSpec
from rl_training.validation import suggestion

METHODS = ("encoder", "actor", "critic", "value")
ROWS = 2
"""Rows of the inputs that new modules are tried with"""


_given: ContextVar[object] = ContextVar("given_networks", default=None)


@contextlib.contextmanager
def given_networks(factory: object) -> Iterator[None]:
    """Build and load policies with the networks of a user's factory; None: built-in ones.

    A run builds and loads policies at many places, also to check files. All of them need it.
    """
    token = _given.set(factory)
    try:
        yield
    finally:
        _given.reset(token)


def current_networks() -> object:
    """Return the factory of `given_networks`, or None."""
    return _given.get()


def networks_name(factory: object) -> str | None:
    """Return the name under which files remember a factory; None if there is none."""
    if factory is None:
        return None
    return (factory if isinstance(factory, type) else type(factory)).__qualname__


class CustomNetworks:
    """Builds the modules of a user's factory and checks them."""

    def __init__(self, factory: object) -> None:
        self.name = networks_name(factory)
        self._refuse_unknown_methods(factory)
        if not any(callable(getattr(factory, method, None)) for method in METHODS):
            raise ConfigError(
                f"networks = {self.name}: defines none of the methods {', '.join(METHODS)}"
            )
        self._factory = self._instance(factory)

    def _refuse_unknown_methods(self, factory: object) -> None:
        """Raise `ConfigError` if a method is none of `METHODS`, since it would never be called."""
        for method in _public_methods(factory if isinstance(factory, type) else type(factory)):
            if method not in METHODS:
                raise ConfigError(
                    f"{self.name}.{method}: is never called{suggestion(method, METHODS)} (methods "
                    f"of networks are {', '.join(METHODS)}; begin the names of others with _)"
                )

    def _instance(self, factory: object) -> object:
        if not inspect.isclass(factory):
            return factory
        try:
            return factory()
        except TypeError as error:
            raise ConfigError(
                f"networks = {self.name}: cannot be built without arguments ({brief(error)}); pass "
                "an instance instead of the class"
            ) from None

    def defines(self, method: str) -> bool:
        return callable(getattr(self._factory, method, None))

    def encoder(self, observation: ObservationSpec, leaves: Any) -> tuple[nn.Module, int]:
        """Build the encoder; return it and the number of its features of `leaves`."""
        module = self._build("encoder", observation)
        features = self._try("encoder", module, leaves)
        if features.dim() != 2 or len(features) != ROWS:
            self._refuse_shape("encoder", leaves, features, f"({ROWS}, number of features)")
        return module, features.shape[1]

    def network(self, method: str, inputs: int, outputs: int) -> nn.Module:
        """Build one network."""
        module = self._build(method, inputs, outputs)
        example = torch.zeros(ROWS, inputs)
        found = self._try(method, module, example)
        if found.shape != (ROWS, outputs):
            self._refuse_shape(method, example, found, str((ROWS, outputs)))
        return module

    def _build(self, method: str, *arguments: Any) -> nn.Module:
        build = getattr(self._factory, method)
        try:
            inspect.signature(build).bind(*arguments)
        except TypeError as error:
            expected = "observation" if method == "encoder" else "inputs, outputs"
            raise ConfigError(
                f"{self.name}.{method}: cannot be called with ({expected}): {brief(error)}"
            ) from None
        module = build(*arguments)
        if not isinstance(module, nn.Module):
            raise ConfigError(
                f"{self.name}.{method}: returned {type(module).__name__}, not a torch.nn.Module"
            )
        if (hidden := _hidden_part(module)) is not None:
            raise ConfigError(
                f"{self.name}.{method}: its module has {hidden}, which would neither be trained "
                "nor saved; use register_buffer for constants, nn.Parameter for what is learned, "
                "and nn.ModuleList instead of a list"
            )
        for name, parameter in module.named_parameters():
            if isinstance(parameter, nn.parameter.UninitializedParameter):
                raise ConfigError(
                    f"{self.name}.{method}: its parameter {name!r} has no shape yet; use modules "
                    "with stated sizes, such as nn.Linear instead of nn.LazyLinear"
                )
        for name, buffer in list(module.named_buffers()):
            self._freeze(method, module, name, buffer)
        for name, parameter in module.named_parameters():
            if parameter.dtype != torch.float32:
                raise ConfigError(
                    f"{self.name}.{method}: its parameter {name!r} has type {parameter.dtype}, not "
                    "torch.float32"
                )
        return module

    def _freeze(self, method: str, module: nn.Module, name: str, buffer: Tensor) -> None:
        """Make a constant a parameter without a gradient, so that it is saved and exported."""
        if buffer.dtype != torch.float32:
            raise ConfigError(
                f"{self.name}.{method}: its buffer {name!r} has type {buffer.dtype}, not "
                "torch.float32; keep constants as float32, such as indices that forward converts "
                "(instead of batch normalization, use LayerNorm)"
            )
        owner, _, attribute = name.rpartition(".")
        part = module.get_submodule(owner)
        delattr(part, attribute)
        part.register_parameter(attribute, nn.Parameter(buffer.detach(), requires_grad=False))

    def _try(self, method: str, module: nn.Module, inputs: Any) -> Tensor:
        """Evaluate a module; raise `ConfigError` if it is no pure function of its inputs."""
        before = {name: value.detach().clone() for name, value in module.named_parameters()}
        random = torch.get_rng_state()
        first_row = _first_row(inputs)
        try:
            with torch.no_grad():
                outputs, alone = module(inputs), module(first_row)
        except Exception as error:
            raise ConfigError(
                f"{self.name}.{method}: failed for inputs {_shapes(inputs)}: {brief(error)}"
            ) from error
        if not isinstance(outputs, Tensor) or outputs.dtype != torch.float32:
            kind = outputs.dtype if isinstance(outputs, Tensor) else type(outputs).__name__
            raise ConfigError(f"{self.name}.{method}: gave {kind}, not a tensor of torch.float32")
        if not torch.equal(random, torch.get_rng_state()):
            raise ConfigError(
                f"{self.name}.{method}: its module draws random numbers (dropout?); a network must "
                "be a function of its inputs and parameters"
            )
        for name, value in module.named_parameters():
            if not torch.equal(before[name], value):
                raise ConfigError(
                    f"{self.name}.{method}: its module changes {name!r} when it is evaluated "
                    "(batch normalization?); use LayerNorm, or .eval() with fixed statistics"
                )
        if outputs[:1].shape == alone.shape and not torch.allclose(
            outputs[:1], alone, rtol=1e-3, atol=1e-3, equal_nan=True
        ):
            raise ConfigError(
                f"{self.name}.{method}: its outputs for a row depend on the other rows, or on "
                "earlier calls; a network must be a function of its inputs and parameters"
            )
        return outputs

    def _refuse_shape(self, method: str, inputs: Any, outputs: Tensor, expected: str) -> None:
        raise ConfigError(
            f"{self.name}.{method}: gave outputs {tuple(outputs.shape)} for inputs "
            f"{_shapes(inputs)}, expected {expected}"
        )


def why_not_mapped(module: nn.Module, inputs: Any) -> str | None:
    """Say why a module cannot be mapped over seeds; None if it can be."""
    stacked = {name: _repeated(value.detach()) for name, value in module.named_parameters()}
    if isinstance(inputs, Tensor):
        given: Any = _repeated(inputs)
    else:
        given = {name: _repeated(value) for name, value in inputs.items()}

    places = places_of(module)

    def call(tensors: dict[str, Tensor], given: Any) -> Any:
        return called_with(module, tensors, given, places)

    try:
        with torch.no_grad():
            torch.func.vmap(call)(stacked, given)
    except Exception as error:
        return brief(error)
    return None


def places_of(module: nn.Module) -> dict[str, list[str]]:
    """Return the names of all attributes that are each parameter, by the name of the parameter.

    A parameter may belong to several parts. A part that has several names, such as a layer that is
    also in a `Sequential`, counts once.
    """
    names = {parameter: name for name, parameter in module.named_parameters()}
    places: dict[str, list[str]] = {name: [] for name in names.values()}
    for path, part in module.named_modules():  # each part once
        for attribute, parameter in part._parameters.items():
            if parameter is not None:
                places[names[parameter]].append(f"{path}.{attribute}".lstrip("."))
    return places


def called_with(
    module: nn.Module,
    tensors: Mapping[str, Tensor],
    inputs: Any,
    places: Mapping[str, Sequence[str]],
) -> Any:
    """Evaluate a module with other tensors as its parameters; `places` are from `places_of`.

    PyTorch would find the places itself, but replace a parameter several times if its part has
    several names, and not undo it.
    """
    replaced = {place: tensors[name] for name in places for place in places[name]}
    return torch.func.functional_call(module, replaced, (inputs,), tie_weights=False)


def _hidden_part(module: nn.Module) -> str | None:
    """Name a tensor or module that PyTorch does not see as part of a module; None if there is none.

    It would not be in files. One with random numbers would be another one in a loaded policy.
    """
    known = set(module.modules())
    for path, part in module.named_modules():
        if type(part).__module__.startswith("torch."):
            continue
        for name, value in vars(part).items():
            if name in ("_parameters", "_buffers", "_modules"):
                continue
            items = value.values() if isinstance(value, dict) else value
            for item in items if isinstance(value, list | tuple | dict) else (value,):
                if isinstance(item, Tensor) or (isinstance(item, nn.Module) and item not in known):
                    what = "a tensor" if isinstance(item, Tensor) else "modules in a list"
                    return f"{what} as the attribute {f'{path}.{name}'.lstrip('.')!r}"
    return None


def _public_methods(kind: type) -> Iterator[str]:
    """Yield the names of methods without an underscore that are defined in the class's package.

    Those of base classes from other packages are left out, and functions of other packages that
    are attributes, such as an activation.
    """
    for owner in kind.__mro__:
        for name, value in vars(owner).items():
            function = getattr(value, "__func__", value)
            if name.startswith("_") or not inspect.isfunction(function):
                continue
            if _package(owner) == _package(function) == _package(kind):
                yield name


def _package(defined: Any) -> str:
    return str(defined.__module__).partition(".")[0]


def _first_row(inputs: Any) -> Any:
    if isinstance(inputs, Tensor):
        return inputs[:1]
    return {name: value[:1] for name, value in inputs.items()}


def _repeated(value: Tensor) -> Tensor:
    return value.expand(ROWS, *value.shape)


def _shapes(inputs: Any) -> str:
    if isinstance(inputs, Tensor):
        return str(tuple(inputs.shape))
    return ", ".join(f"{name} {tuple(value.shape)}" for name, value in inputs.items())
