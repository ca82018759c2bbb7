"""The connector configuration: vLLM's `kv_transfer_config`, as JSON, YAML or a mapping, checked to the last key.

    {"kv_connector": "LMDBConnector", "kv_role": "kv_both", "kv_connector_extra_config": {"path": "/var/kv"}}

Any key can be overridden from the environment: `KVTIDE_CONFIG__KV_ROLE=kv_consumer`, and, for keys inside others,
`KVTIDE_CONFIG__KV_CONNECTOR_EXTRA_CONFIG__MAX_BYTES=64GiB`; an element of a list is named by its number. Values are
read as YAML. Unknown keys and bad values are errors that name the key, the value, and what is allowed.
"""

from __future__ import annotations

import errno
import json
import os
import re
import reprlib
from collections.abc import Mapping
from copy import deepcopy
from difflib import get_close_matches
from os import PathLike
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import yaml
from msgspec import Meta

from kvtide.kvcache import ConfigError
from kvtide.offload.store import Store

from .registry import known_stores, store_class

ENV_PREFIX = "KVTIDE_CONFIG__"
_MAX_BYTES = 1 << 20
_SHOWN = 60

AnyStruct = TypeVar("AnyStruct", bound=msgspec.Struct)


class TransferConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`kv_transfer_config`, with vLLM's names and meanings; the configuration reference explains every key."""

    kv_connector: Annotated[str, Meta(description="The store: a known name, or module:Class.", min_length=1)]
    kv_role: Annotated[
        Literal["kv_producer", "kv_consumer", "kv_both"],
        Meta(description="Whether this engine stores KV (producer), loads it (consumer), or does both."),
    ] = "kv_both"
    kv_connector_extra_config: Annotated[
        dict[str, Any], Meta(description="The store's own settings; see its section of the schema.")
    ] = {}
    kv_connector_module_path: Annotated[
        str | None, Meta(description="Module that holds the class named by kv_connector, for stores of other packages.")
    ] = None
    kv_load_failure_policy: Annotated[
        Literal["recompute", "fail"],
        Meta(
            description="What happens when KV that was found cannot be loaded: compute it again, or fail the request."
        ),
    ] = "recompute"
    engine_id: Annotated[str | None, Meta(description="The engine's name; read by vLLM.")] = None
    kv_buffer_device: Annotated[str | None, Meta(description="Device of vLLM's transfer buffers; read by vLLM.")] = None
    kv_port: Annotated[int | None, Meta(description="Port for connectors that listen; read by vLLM.")] = None
    enable_permute_local_kv: Annotated[bool, Meta(description="An experiment of vLLM's; read by vLLM.")] = False

    @property
    def stores(self) -> bool:
        """Whether this engine's role is to store KV."""
        return self.kv_role != "kv_consumer"

    @property
    def loads(self) -> bool:
        """Whether this engine's role is to load KV."""
        return self.kv_role != "kv_producer"


def load_config(
    source: str | PathLike[str] | Mapping[str, Any], *, environ: Mapping[str, str] | None = None
) -> TransferConfig:
    """Read and check a configuration: a mapping, JSON text, or a JSON or YAML file.

    The store's own settings are checked too, which imports its module but opens nothing. `environ` (the process's own
    by default) supplies overrides. `ConfigError` for anything that is wrong.
    """
    data = _override(_read(source), os.environ if environ is None else environ)
    config = checked(data, TransferConfig, "kv_transfer_config")
    store_settings(config.kv_connector, config.kv_connector_extra_config, config.kv_connector_module_path)
    return config


def open_store(config: TransferConfig) -> Store:
    """The store that a configuration names, opened."""
    return make_store(config.kv_connector, config.kv_connector_extra_config, config.kv_connector_module_path)


def make_store(name: str, extra_config: Mapping[str, Any], module_path: str | None = None) -> Store:
    """The store `name` with the settings `extra_config`, opened; `module_path` is that of another package's class.

    `ConfigError` for an unknown name, a bad setting, or a store that cannot be opened; `MissingExtra` without a package
    that it needs.
    """
    return store_class(name, module_path)(store_settings(name, extra_config, module_path))


def store_settings(name: str, extra_config: Mapping[str, Any], module_path: str | None = None) -> msgspec.Struct:
    """The settings `extra_config` of the store `name`, checked, as its own `Config`; opens nothing.

    `ConfigError` names the key, its value, and what is allowed.
    """
    return checked(extra_config, store_class(name, module_path).Config, f"{name}'s kv_connector_extra_config")


def checked(data: Mapping[str, Any], kind: type[AnyStruct], label: str) -> AnyStruct:
    """`data` as a struct; `ConfigError` names the key under `label`, its value, and what is allowed."""
    allowed = [field.encode_name for field in msgspec.structs.fields(kind)]
    for key in data:
        if key not in allowed:
            near = get_close_matches(str(key), allowed, n=1, cutoff=0.6)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"{label} has no key {key!r}; allowed are {', '.join(allowed)}{hint}")
    try:
        return msgspec.convert(data, kind)
    except ConfigError as error:  # of the struct's own checks
        raise ConfigError(f"{label}: {error}") from None
    except msgspec.ValidationError as error:
        what, _, path = str(error).partition(" - at `")
        path = path.removesuffix("`").removeprefix("$").removeprefix(".")
        if not path:
            raise ConfigError(f"{label}: {what[0].lower()}{what[1:].replace('`', '')}") from None
        raise ConfigError(f"{label}: {path} is {_show(_at(data, path))}; {_lower(what)}") from None


def settings_tree(settings: msgspec.Struct) -> dict[str, Any]:
    """Settings as plain values, defaults included, those of a stack's tiers too."""
    found: dict[str, Any] = msgspec.to_builtins(settings)
    for tier in found.get("connectors", ()):
        inner = store_settings(
            tier["kv_connector"], tier["kv_connector_extra_config"], tier["kv_connector_module_path"]
        )
        tier["kv_connector_extra_config"] = settings_tree(inner)
    return found


def schema() -> dict[str, Any]:
    """A JSON schema (2020-12) of the whole configuration: every store's settings, generated from the classes."""
    classes = {name: store_class(name) for name in known_stores()}
    kinds = [TransferConfig, *(found.Config for found in classes.values())]
    (root, *settings), definitions = msgspec.json.schema_components(kinds, ref_template="#/$defs/{name}")
    branches = [
        {
            "if": {"properties": {"kv_connector": {"const": name}}},
            "then": {"properties": {"kv_connector_extra_config": settings[at]}},
        }
        for at, name in enumerate(classes)
    ]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "kv_transfer_config",
        **root,
        "allOf": branches,
        "$defs": definitions,
    }


def _read(source: str | PathLike[str] | Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(source, Mapping):
        return dict(source)
    text, label = str(source), "the given text"
    if not text.lstrip().startswith("{"):
        text, label = _read_file(Path(source)), str(source)
    try:
        data = json.loads(text) if text.lstrip().startswith("{") else yaml.safe_load(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{label}, line {error.lineno}: is not valid JSON: {error.msg}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or " ".join(str(error).split())
        raise ConfigError(f"{label}{line}: is not valid YAML: {problem}") from None
    except RecursionError:
        raise ConfigError(f"{label} nests too deeply") from None
    except ValueError as error:  # a day that no month has, a number of thousands of digits
        raise ConfigError(f"{label} has a value that cannot be read: {error}") from None
    if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
        raise ConfigError(f"{label} must hold one object whose keys are names, not {_show(data)}")
    return data


def _read_file(path: Path) -> str:
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ConfigError(f"{path} is larger than {_MAX_BYTES >> 20} MiB, which no configuration is")
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        # What is no path at all may be a whole document.
        name = _show(str(path)) if getattr(error, "errno", 0) == errno.ENAMETOOLONG else repr(str(path))
        raise ConfigError(f"configuration {name} cannot be read: {reason}") from None


def _override(data: dict[str, Any], environ: Mapping[str, str]) -> dict[str, Any]:
    """A copy of `data` with the environment's overrides, in the order of their names."""
    data = deepcopy(data)
    for name in sorted(environ):
        if name.startswith(ENV_PREFIX):
            keys = name.removeprefix(ENV_PREFIX).lower().split("__")
            try:
                value = yaml.safe_load(environ[name])
            except (yaml.YAMLError, ValueError):  # ValueError: it looks like a date or a number, and is none
                value = environ[name]
            except RecursionError:
                raise ConfigError(f"environment variable {name} nests too deeply") from None
            _put(data, keys, value, name)
    return data


def _put(target: Any, keys: list[str], value: Any, variable: str) -> None:
    for depth, key in enumerate(keys):
        last = depth == len(keys) - 1
        if isinstance(target, list):
            if not re.fullmatch(r"[0-9]{1,9}", key) or int(key) >= len(target):
                raise ConfigError(f"environment variable {variable}: {key!r} is no place of a list of {len(target)}")
            at: Any = int(key)
        elif isinstance(target, dict):
            at = key
            if not last:
                target.setdefault(at, {})
        else:
            raise ConfigError(f"environment variable {variable} names a key inside {_show(target)}, which has none")
        if last:
            target[at] = value
        else:
            target = target[at]


def _at(data: Any, path: str) -> Any:
    """The value at a path such as `connectors[0].path`; the innermost that is there."""
    for part in path.replace("[", ".").replace("]", "").split("."):
        try:
            data = data[int(part)] if isinstance(data, list) else data[part]
        except (LookupError, ValueError, TypeError):
            break
    return data


class _Short(reprlib.Repr):
    """Shows the beginning of what may be without end: YAML's aliases make a short text a huge value."""

    def repr_str(self, x: str, level: int) -> str:
        return repr(re.sub(r"://[^@/\s]*@", "://***@", x))  # a password in a URL is never printed

    def repr_int(self, x: int, level: int) -> str:
        return repr(x) if x.bit_length() <= 128 else f"a number of {x.bit_length()} bits"


def _show(value: Any) -> str:
    text = _Short().repr(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


def _lower(what: str) -> str:
    return f"{what[0].lower()}{what[1:].replace('`', '')}"
