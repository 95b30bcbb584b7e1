"""Load configs from YAML files, packaged names and `key=value` overrides.

`TrainConfig` needs PyTorch, so it is imported when a config is loaded. YAML files and packaged
names can be read without it.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from rl_training.errors import ConfigError, printable, warn_user
from rl_training.validation import key_name, short, suggestion, user_path
from rl_training.version import __version__

if TYPE_CHECKING:
    from rl_training.config import ConfigSource, TrainConfig

MAX_BYTES = 65_536
MAX_NODES = 10_000
"""Maximum number of values in a file, with every YAML alias expanded"""
MAX_DEPTH = 20
MAX_PROBLEM = 300
"""Maximum number of characters of a YAML parser's message"""


def load_config(source: ConfigSource, overrides: Sequence[str] = (), **changes: Any) -> TrainConfig:
    """Load a config from a `TrainConfig`, a mapping, a path or a name such as `sac/pendulum`.

    `changes` replace top-level keys. Then each override `a.b=VALUE` is applied, with VALUE parsed
    as YAML. A hyper-parameter of the algorithm can be named without `algo_kwargs`, such as
    `learning_rate=1e-3`. Raises `ConfigError` if the result is not valid.
    """
    from rl_training.config import TrainConfig

    if isinstance(source, TrainConfig):
        if not overrides and not changes:
            return source
        values = {**source.to_mapping(), "algo_kwargs": source.algo_kwargs.given()}
    elif isinstance(source, Mapping):
        values = dict(source)
    else:
        values = _as_trained(find_config(source))
    values = {**values, **changes}
    parsed = [_as_text(*_parse_override(override), override) for override in overrides]
    algo = dict(parsed).get("algo", values.get("algo"))
    for key, value in parsed:
        _apply_override(values, _complete_key(key, value, algo), value)
    given = {*changes, *(key.partition(".")[0] for key, _ in parsed)}
    if "dataset" in given and "env_id" not in given and _is_packaged(source):
        _follow_dataset(values, str(source))
    return TrainConfig(**{_key(key): value for key, value in values.items()})


def parse_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """Return the values of `key=value` overrides by their keys."""
    return dict(map(_parse_override, overrides))


def chosen_environment(values: Mapping[str, Any], overrides: Sequence[str]) -> Any:
    """Return the `env_id` of a config that is not validated yet."""
    return parse_overrides(overrides).get("env_id", values.get("env_id"))


def read_config(name: str | Path) -> dict[str, Any]:
    """Read the values of a config file or a packaged config, without defaults."""
    return read_yaml(find_config(name))


def find_config(name: str | Path) -> Path:
    """Return the file for a path or a packaged name. Raises `ConfigError` if there is none."""
    path = user_path(name)
    if path.is_file():
        return path
    packaged = packaged_configs()
    found = packaged.get(str(name).removesuffix(".yaml"))
    if found is not None:
        return found
    if path.exists():
        kind = "a folder" if path.is_dir() else "not a regular file"
        raise ConfigError(f"config {short(str(name))}: is {kind}; give the path of a YAML file")
    hint = suggestion(str(name), packaged)
    raise ConfigError(
        f"config {short(str(name))}: no such file or packaged config"
        f"{hint or '; packaged: ' + ', '.join(packaged)}"
    )


def _as_trained(path: Path) -> dict[str, Any]:
    """Read a config file. The config of a run of another version is completed to do what that did.

    Such a run has every setting of its version, and lacks those that were added later. Other files
    have what a person wrote, and get the defaults of today.
    """
    from rl_training.algorithms.spec import get_algorithm_spec

    values, metadata = read_yaml(path), path.with_name("metadata.json")
    settings = values.get("algo_kwargs")
    if not (metadata.is_file() and isinstance(settings, Mapping)):
        return values
    try:
        saved = read_yaml(metadata)["versions"]["rl_training"]
    except (ConfigError, LookupError, TypeError):
        return values
    if saved == __version__:
        return values
    kind = get_algorithm_spec(str(values.get("algo"))).hyperparameters_type
    if change := kind.changes_since(settings):
        warn_user(f"{path}: {values['algo']} has changed since this run: {change}")
    return {**values, "algo_kwargs": kind.upgrade(settings)}


def _is_packaged(source: ConfigSource) -> bool:
    return isinstance(source, str | Path) and not user_path(source).is_file()


def _follow_dataset(values: dict[str, Any], config: str) -> None:
    """Replace the environment of a packaged config by that of the dataset that the user chose.

    An offline run whose environment is not registered gets none, and is not evaluated.
    """
    from rl_training.algorithms.spec import get_algorithm_spec
    from rl_training.data.formats.minari import local_environment

    section = values.get("dataset")
    if not isinstance(section, Mapping):
        return
    recorded = local_environment(section.get("id"))
    chosen = values.get("env_id")
    if recorded is None or chosen is None or _name(recorded["id"]) == _name(chosen):
        return
    import gymnasium

    found = recorded["id"] in gymnasium.registry
    offline = get_algorithm_spec(str(values.get("algo"))).regimes[0] == "offline"
    offline = values.get("regime", "offline" if offline else None) == "offline"
    both = f"{config} is for {chosen}, but {section['id']} was recorded in {recorded['id']}"
    if found or not offline:
        warn_user(f"{both}, which is used instead; choose another environment with --env")
        values["env_id"], values["env_kwargs"] = recorded["id"], recorded["kwargs"]
        return
    package = json.loads(recorded["spec"]).get("entry_point", "").partition(".")[0]
    hint = f" (install {package} and add --import {package})" if package else ""
    warn_user(
        f"{both}, which is not registered here{hint}; the policy is trained without an "
        "environment and is not evaluated"
    )
    values["env_id"], values["env_kwargs"] = None, {}


def _name(environment_id: str) -> str:
    """Return an id without its version: data of an older version is used with a newer one."""
    return re.sub(r"-v\d+$", "", environment_id)


def packaged_configs() -> dict[str, Path]:
    """Map the names of packaged configs, such as `sac/pendulum`, to their files."""
    root = Path(str(resources.files("rl_training") / "assets" / "configs"))
    return {
        path.relative_to(root).with_suffix("").as_posix(): path
        for path in sorted(root.rglob("*.yaml"))
    }


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a mapping from a YAML file.

    Raises `ConfigError` if the file is too large, repeats a key or is not plain YAML, which cannot
    execute code.
    """
    try:
        # Does not wait for a pipe's other end, should one have replaced the file.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            content = file.read(MAX_BYTES + 1) or b""
        text = content.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot read this file ({error})") from None
    if len(content) > MAX_BYTES:
        raise ConfigError(f"{path}: larger than {MAX_BYTES:,} bytes, so not a config")
    values = parse_yaml(text, str(path))
    if not isinstance(values, dict):
        found = "an empty file" if values is None else f"a {type(values).__name__}"
        raise ConfigError(f"{path}: must contain `key: value` lines, but is {found}")
    return values


def parse_yaml(text: str, name: str) -> Any:
    """Parse YAML text. `name` identifies the text in error messages."""
    try:
        return yaml.load(text, Loader=_ConfigLoader)  # noqa: S506 (derives from SafeLoader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        problem = getattr(error, "problem", None) or str(error) or "nested too deeply"
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        raise ConfigError(f"{name}{where}: not valid YAML: {_cut(problem)}") from None
    except (AttributeError, KeyError, TypeError):  # PyYAML's reaction to `!!bool x`
        raise ConfigError(f"{name}: not valid YAML: a value does not match its tag") from None


def _cut(problem: str) -> str:
    """Shorten a parser's message, which may quote the file, and make it printable."""
    line = printable(" ".join(problem.split()))
    return line if len(line) <= MAX_PROBLEM else f"{line[:MAX_PROBLEM]}..."


def dump_yaml(values: Mapping[str, Any]) -> str:
    """Format values as YAML that `parse_yaml` reads back unchanged."""
    return yaml.dump(
        dict(values), Dumper=_ConfigDumper, sort_keys=False, default_flow_style=None, width=100
    )


def _parse_override(override: str) -> tuple[str, Any]:
    key, separator, text = override.partition("=")
    key = key.strip()
    if not separator or not all(key.split(".")):
        raise ConfigError(f"--set {short(override)}: must be key=value, e.g. learning_rate=1e-3")
    return key, parse_yaml(text, f"--set {key_name(key)}")


def _as_text(key: str, value: Any, override: str) -> tuple[str, Any]:
    """Keep what was typed for a key that takes text: YAML reads `off`, `1` or a date otherwise."""
    from rl_training.config import TrainConfig

    field = TrainConfig.model_fields.get(key)
    takes_text = field is not None and field.annotation in (str, str | None)
    if takes_text and not isinstance(value, str | list | dict | None):
        value = override.partition("=")[2].strip()
    return key, value


def _complete_key(key: str, value: Any, algo: Any) -> str:
    """Return the key of an override, with `algo_kwargs` before a hyper-parameter's own name."""
    from rl_training.algorithms.spec import get_algorithm_spec, unknown_setting_hint
    from rl_training.config import TrainConfig

    first = key.partition(".")[0]
    if first in TrainConfig.model_fields or not isinstance(algo, str):
        return key
    hyperparameters = get_algorithm_spec(algo).hyperparameters_type.model_fields
    if first in hyperparameters:
        return f"algo_kwargs.{key}"
    known = [*TrainConfig.model_fields, *hyperparameters]
    hint = unknown_setting_hint(first, known)
    raise ConfigError(f"{key_name(key)} = {short(value)}: unknown key{hint}")


def _apply_override(values: dict[str, Any], key: str, value: Any) -> None:
    *sections, last = key.split(".")
    target = values
    for section in sections:
        inner = target.get(section)
        if inner is not None and not isinstance(inner, dict):
            raise ConfigError(f"--set {key_name(key)}: {short(section)} is not a section")
        # Copied, so that the caller's mapping does not change.
        target[section] = dict(inner or {})
        target = target[section]
    target[last] = value


def _key(key: Any) -> str:
    if not isinstance(key, str):
        raise ConfigError(f"{short(key)}: is not a key; keys must be strings")
    return key


class _ConfigLoader(yaml.SafeLoader):
    """PyYAML's safe loader with size limits; rejects duplicate keys and parses `1e-3` as float."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._depth = 0
        self._sizes: dict[int, int] = {}

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise yaml.YAMLError(f"nested more than {MAX_DEPTH} deep")
        node = super().compose_node(parent, index)
        self._depth -= 1
        if node is not None and id(node) not in self._sizes:
            size = 1 + sum(self._sizes.get(id(child), 1) for child in _children(node))
            if size > MAX_NODES:
                raise yaml.YAMLError(f"more than {MAX_NODES:,} values, aliases included")
            self._sizes[id(node)] = size
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise yaml.YAMLError(f"line {key_node.start_mark.line + 1}: keys must be strings")
            if key_node.value in seen:
                raise yaml.YAMLError(
                    f"line {key_node.start_mark.line + 1}: {short(key_node.value)} is given twice"
                )
            seen.add(key_node.value)
        return super().construct_mapping(node, deep)


def _children(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [part for pair in node.value for part in pair]
    return list(node.value) if isinstance(node, yaml.SequenceNode) else []


def _construct_scientific(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int | float:
    """Parse `1e-3` as a float, and `1e6`, which is common for step counts, as an integer."""
    value = float(node.value)
    written_as_count = "." not in node.value and "-" not in node.value.lower().split("e")[1]
    return int(value) if written_as_count and value < 2**53 else value


class _ConfigDumper(yaml.SafeDumper):
    """PyYAML's safe dumper. Quotes strings that the loader would parse as numbers."""


_ConfigLoader.add_constructor("!scientific", _construct_scientific)
for _kind in (_ConfigLoader, _ConfigDumper):
    _kind.add_implicit_resolver(
        "!scientific", re.compile(r"^[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
    )
