"""Sizes in bytes as people write them."""

from __future__ import annotations

import re

from .errors import ConfigError

_UNITS = {
    "": 1,
    "b": 1,
    **{f"{prefix}b": 1000**i for i, prefix in enumerate("kmgtp", 1)},
    **{f"{prefix}ib": 1024**i for i, prefix in enumerate("kmgtp", 1)},
}
MAX_BYTES = 2**60


def parse_bytes(text: str | int) -> int:
    """Bytes of `80GiB`, `512 MiB`, `80GB` or a plain number; `ConfigError` unless more than 0 and below 1 EiB."""
    match = re.fullmatch(r"\s*([0-9]{1,19}(?:\.[0-9]{1,19})?)\s*([A-Za-z]*)\s*", str(text))
    if match is None or match[2].lower() not in _UNITS:
        raise ConfigError(f"{str(text)[:40]!r} is not a size; write it like 80GiB, 512MiB, 80GB or 1000000")
    size = int(float(match[1]) * _UNITS[match[2].lower()])
    if not 0 < size < MAX_BYTES:
        raise ConfigError(f"{text!r} must be more than 0 bytes and less than 1 EiB")
    return size
