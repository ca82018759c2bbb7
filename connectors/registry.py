"""Which stores there are, by the name that a configuration gives them.

    "LMDBConnector"             one of kvtide's own
    "acme"                      an entry point of the group `kvtide.connectors`, from any installed package
    "acme.stores:AcmeStore"     a class by its path; or its name, with `kv_connector_module_path: acme.stores`

A store class derives from `kvtide.offload.store.Store`, has a `Config` (a `msgspec.Struct` whose fields are the keys of
`kv_connector_extra_config`), and takes one of them as its only argument. Nothing is imported before it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, Protocol, cast

import msgspec

from kvtide.kvcache import ConfigError
from kvtide.offload.store import Store

BUILT_IN = {
    "HostConnector": "kvtide.connectors.host",
    "LMDBConnector": "kvtide.connectors.lmdb",
    "SharedStorageConnector": "kvtide.connectors.shared_storage",
    "NixlConnector": "kvtide.connectors.nixl",
    "NixlPeerConnector": "kvtide.connectors.nixl_peer",
    "RedisConnector": "kvtide.connectors.redis",
    "S3Connector": "kvtide.connectors.s3",
    "MooncakeConnector": "kvtide.connectors.mooncake",
    "MultiConnector": "kvtide.connectors.multi",
}
ENTRY_POINTS = "kvtide.connectors"


class StoreClass(Protocol):
    """What the registry hands out: a store's class."""

    Config: type[msgspec.Struct]
    __call__: Callable[..., Store]


def store_class(name: str, module_path: str | None = None) -> StoreClass:
    """The class of the store `name`: kvtide's own, an entry point, `module:Class`, or a class of `module_path`.

    `ConfigError` names what is known, or why it cannot be loaded.
    """
    if module_path is not None:
        return _from_module(module_path, name)
    if name in BUILT_IN:
        return cast(StoreClass, getattr(import_module(BUILT_IN[name]), name))
    module, colon, attribute = name.partition(":")
    if colon:
        return _from_module(module, attribute)
    found = entry_points(group=ENTRY_POINTS, name=name)
    if not found:
        known = known_stores()
        near = get_close_matches(name, known, n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"kv_connector {name!r} is not known; known are {', '.join(known)}, or module:Class{hint}")
    entry = next(iter(found))
    try:
        return _checked(entry.load(), f"entry point {name!r}")
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"kv_connector {name!r} cannot be loaded from {entry.value}: {error}") from None


def known_stores() -> list[str]:
    """Names of kvtide's own stores, and of those that other packages register."""
    return [*BUILT_IN, *sorted({entry.name for entry in entry_points(group=ENTRY_POINTS)} - BUILT_IN.keys())]


def _from_module(module_path: str, name: str) -> StoreClass:
    try:
        found = getattr(import_module(module_path), name)
    except (ImportError, ValueError, TypeError) as error:  # TypeError: a path that starts with a dot
        raise ConfigError(f"kv_connector_module_path {module_path!r} cannot be imported: {error}") from None
    except AttributeError:
        raise ConfigError(f"module {module_path!r} has no class {name!r}") from None
    return _checked(found, f"{module_path}:{name}")


def _checked(found: Any, what: str) -> StoreClass:
    config = getattr(found, "Config", None)
    if not (isinstance(found, type) and issubclass(found, Store)):
        raise ConfigError(f"{what} is not a subclass of kvtide.offload.store.Store")
    if not (isinstance(config, type) and issubclass(config, msgspec.Struct)):
        raise ConfigError(f"{what} has no Config that is a msgspec.Struct")
    return cast(StoreClass, found)
