"""One store configuration for all ranks of an engine: `{rank}` inside any of its texts is the rank's number.

For stores that one process owns, such as an LMDB directory, where an engine runs several processes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

RANK = "{rank}"


def for_rank(value: Any, rank: int) -> Any:
    """A copy of a configuration, or of a part of one, with the rank's number filled in."""
    if isinstance(value, str):
        return value.replace(RANK, str(rank))
    if isinstance(value, Mapping):
        return {key: for_rank(part, rank) for key, part in value.items()}
    if isinstance(value, list):
        return [for_rank(part, rank) for part in value]
    return value


def leaf_stores(store: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The configurations of a store's tiers, of their tiers and so on; of the store itself if it has none."""
    tiers = [leaf for part in store.values() for leaf in _inside(part)]
    return tiers or [store]


def is_private(store: Mapping[str, Any]) -> bool:
    """Whether a store, or one tier of it, is each rank's own, so that what is alike on all ranks is stored by each."""
    return any(map(_is_own, leaf_stores(store)))


def is_shared(store: Mapping[str, Any]) -> bool:
    """Whether what one rank stores another one can find, at least in one tier."""
    return not all(map(_is_own, leaf_stores(store)))


def _inside(value: Any) -> list[Mapping[str, Any]]:
    if isinstance(value, Mapping):
        return leaf_stores(value) if "kv_connector" in value else [x for part in value.values() for x in _inside(part)]
    return [leaf for part in value for leaf in _inside(part)] if isinstance(value, list) else []


def _is_own(leaf: Mapping[str, Any]) -> bool:
    return leaf.get("kv_connector") == "HostConnector" or _mentions_rank(leaf)


def _mentions_rank(value: Any) -> bool:
    if isinstance(value, Mapping | list):
        return any(map(_mentions_rank, value.values() if isinstance(value, Mapping) else value))
    return isinstance(value, str) and RANK in value
