"""KV events: what a router needs to follow the cache. Off unless asked for; then one per group and base block."""

from __future__ import annotations

from typing import NamedTuple


class BlockStored(NamedTuple):
    """All blocks of a group that end inside a base block are cached under `key`; `parent` is the key before it."""

    key: bytes
    parent: bytes | None
    token_ids: tuple[int, ...]
    group: str
    tier: str = "device"


class BlockRemoved(NamedTuple):
    """The blocks of a group under `key` are no longer complete."""

    key: bytes
    group: str
    tier: str = "device"


class AllBlocksCleared(NamedTuple):
    """The cache was reset, and nothing is cached any more. A reset while prefixes are held names what it removes."""

    tier: str = "device"


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared
