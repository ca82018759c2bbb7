"""What the stores' settings have in common: `StoreConfig`, and types of settings that occur in several.

A store's `Config` checks all that can be checked without opening anything, so that `kvtide config check` finds it:
types and bounds by the annotations, the rest when it is made.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

from kvtide.kvcache import ConfigError
from kvtide.kvcache.sizes import parse_bytes
from kvtide.offload.codecs import CODECS
from kvtide.offload.eviction import POLICIES

# The codecs' names as a setting of a store: `codec: CodecName = "raw"`.
CodecName = Annotated[str, Meta(description=f"How values are packed: {', '.join(CODECS)}; fp8 changes numbers.")]


class StoreConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the settings of stores; `ConfigError` names the key.

    `sizes` names the keys that are sizes such as 64GiB, `sizes_or_zero` those that may also be 0, and `least` the
    smallest that makes sense. `codec` and `eviction` are checked wherever a store has them.
    """

    sizes: ClassVar[tuple[str, ...]] = ()
    sizes_or_zero: ClassVar[tuple[str, ...]] = ()
    least: ClassVar[Mapping[str, str]] = MappingProxyType({})

    def __post_init__(self) -> None:
        for name in (*self.sizes, *self.sizes_or_zero):
            num_bytes, least = self.num_bytes(name), self.least.get(name)
            if least is not None and num_bytes < parse_bytes(least) and getattr(self, name) is not None:
                raise ConfigError(f"{name} {getattr(self, name)!r} must be at least {least}")
        for name, allowed in (("codec", CODECS), ("eviction", tuple(POLICIES))):
            value = getattr(self, name, allowed[0])
            if value not in allowed:
                raise ConfigError(f"{name} {value!r} is not known; allowed are {', '.join(allowed)}")

    def num_bytes(self, name: str) -> int:
        """A size in bytes; 0 where the key is absent."""
        value = getattr(self, name)
        if value is None or (name in self.sizes_or_zero and value in (0, "0")):
            return 0
        return size_of(name, value)


def size_of(name: str, value: int | str) -> int:
    """Bytes of the size that a key holds; `ConfigError` names the key."""
    try:
        return parse_bytes(value)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None


def secret(what: str, env: str | None, file: str | None) -> str | None:
    """A secret from the environment variable or the file that the settings `{what}_env` and `{what}_file` name."""
    if env is not None and file is not None:
        raise ConfigError(f"{what}_env and {what}_file must not both be given")
    if env is not None:
        if env not in os.environ:
            raise ConfigError(f"{what}_env names the environment variable {env!r}, which is not set")
        return os.environ[env]
    if file is not None:
        try:
            return Path(file).read_text(encoding="utf-8").rstrip("\r\n")
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            raise ConfigError(f"{what}_file {file!r} cannot be read: {reason}") from None
    return None
